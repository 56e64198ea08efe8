"""The product in one page: seven steps from a trained model to the same model with error bars.

load       the ONNX file                                            -> SourceModel
analyse    where sites go, what the variance meets                  -> Plan
calibrate  one pass over the data fits every site and witness       -> Calibration
rewrite    the variance graph beside the source, its numbers open   -> Template
settle     what is ordinary: scales, weights, scores, promises      -> Numbers
emit       one file                                                 -> ModelProto
verify     predictions bit-equal, variances sound                   -> list[Check]
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from gapa_onnx.data import (
    Batch,
    DataSource,
    HeldOut,
    ImageOptions,
    Preparation,
    TextOptions,
    hold_out,
    open_data,
    require_apart,
    set_apart,
)
from gapa_onnx.data.text import CALIBRATION_TOKENS
from gapa_onnx.emit.emit import emit, seal
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import rewrite
from gapa_onnx.errors import UserError
from gapa_onnx.files import writable
from gapa_onnx.fit.calibrate import Calibration, fit
from gapa_onnx.fit.collect import Known, Pass, Shard, material, read
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.fit.parts import Collected, part_of, restored
from gapa_onnx.measure.budget import within_budget
from gapa_onnx.measure.coverage import Coverage
from gapa_onnx.measure.verify import Check, verify
from gapa_onnx.model.load import SourceModel, load
from gapa_onnx.model.weights import inside
from gapa_onnx.model.writing import save
from gapa_onnx.plan.analyse import Plan, analyse, require_convertible
from gapa_onnx.plan.labels import read_labels, require_labels
from gapa_onnx.plan.targets import read_targets
from gapa_onnx.progress import Progress, silent
from gapa_onnx.record import BudgetRecord, require
from gapa_onnx.sessions.feeding import MEMORY
from gapa_onnx.sessions.runtime import library_path
from gapa_onnx.settings import Settings
from gapa_onnx.settle.settle import settle

VERIFIED_ROWS = 64
VERIFYING_RUNS = 4  # whose answers are held side by side: source and file, with and without optimisation
LEAST_VERIFIED_ROWS = 4  # in several batches, where they are smaller: in a single row nothing varies


@dataclass(frozen=True)
class Conversion:
    """The result of `convert`."""

    emitted: onnx.ModelProto = field(repr=False)  #: the model; where it is large, its weights lie in files
    path: Path | None  #: where it was written
    plan: Plan = field(repr=False)
    calibration: Calibration
    numbers: Numbers  #: what the file holds: τ and A of each site, thresholds, noise
    checks: tuple[Check, ...]

    @functools.cached_property
    def model(self) -> onnx.ModelProto:
        """The model with all of its weights in memory."""
        return inside(self.emitted)


def convert(
    model: str | os.PathLike[str] | onnx.ModelProto,
    calib: Any,
    out: str | os.PathLike[str] | None = None,
    *,
    targets: Any = None,
    labels: Any = None,
    held_out: Any = None,
    strange: Any = None,
    budget: float | None = None,
    allow_uncovered: bool = False,
    settings: Settings | None = None,
    paper: bool = False,
    images: ImageOptions | None = None,
    text: TextOptions | None = None,
    batch_size: int | None = None,
    progress: Progress = silent,
    **choices: Any,
) -> Conversion:
    """Give a trained model error bars; its predictions stay the same, bit for bit.

    Parameters
    ----------
    model: path of an ONNX file, or a ModelProto.
    calib: data like those that the model was trained on: a path (folder, .npy, .npz, .csv, .parquet, .txt, .jsonl,
        `loader.py:function`), a dict of arrays, an iterable of dicts, a CalibrationDataReader; or what `collect` has left.
    out: where to write; None writes nothing.
    targets: for regression, the true values of the held-out rows, or of the calibration rows where there are none: they
        set the scale of the variance, teach the noise head and count the intervals. NaN for rows that were fitted to.
    labels: for classification, the true classes of the same rows, -1 for fitted ones; a few hundred suffice.
    held_out: rows that the model was not trained on: what is promised then holds exactly for inputs like them.
    strange: inputs that the model is not made for: distances are chosen by these, not by some made of the data.
    budget: how many times the source model's time the result may take; settings that cost more are made cheaper.
    allow_uncovered: write the file also where part of an output varies with the data and gets no variance.
    settings: a `Settings`; single choices can be given by name instead (`k=20, sites="all"`).
    paper: read the open choices as the paper does.
    images, text: how these become inputs, beyond what the model's inputs say; the file remembers it.
    batch_size: rows to run the model on at a time; as many as fit well into memory unless given.

    Example
    -------
    >>> gapa_onnx.convert("model.onnx", {"x": x_train}, "model.gapa.onnx")
    """
    path, source = None if out is None else writable(Path(out)), load(model)
    _require_another_file(source, path)
    prepared = prepared_for_calibration(images, text)
    truth = held_out, targets, labels
    if isinstance(calib, Collected):
        _refuse_beside_parts(budget, settings, paper, choices, images, text, batch_size)
        start = _from_parts(source, calib, truth, prepared)
    else:
        start = _opened(source, calib, _settings(settings, paper, choices), truth, prepared, batch_size)
    held, others = start.held, None if strange is None else _strange_rows(strange, start.data, prepared)
    settings, plan, calibration, spent = _calibrated(start, budget, progress, others)
    template = rewrite(plan, calibration, settings, **_known(held))
    numbers = settle(template, calibration, settings, held, progress)
    converted = emit(template, numbers, calibration, settings, spent, held)
    checks = _verified(source, converted, calibration, allow_uncovered, progress)
    _seal(converted, checks)
    return Conversion(converted, _written(converted, path, checks), plan, calibration, numbers, checks)


def collect(
    model: str | os.PathLike[str] | onnx.ModelProto,
    calib: Any,
    *,
    shard: str | Shard | tuple[int, int] = "1/1",
    held_out: bool = False,
    targets: Any = None,
    labels: Any = None,
    settings: Settings | None = None,
    paper: bool = False,
    images: ImageOptions | None = None,
    text: TextOptions | None = None,
    batch_size: int | None = None,
    threads: int = 0,
    progress: Progress = silent,
    **choices: Any,
) -> Collected:
    """Read one shard of the calibration data; of all shards together, on however many machines, `convert` makes the file
    that it makes of the data, byte for byte.

    Parameters
    ----------
    shard: which of how many parts of the data is read, "1/8" to "8/8".
    held_out: whether rows will be held out when the file is converted. Targets and labels are then those of these rows,
        and given there; here they are those of the calibration rows, of all of them.
    threads: that the model runs on; 0 for all cores. They change no byte.

    All others are as in `convert`.
    """
    settings = _settings(settings, paper, choices)
    one = Shard.of(shard) if isinstance(shard, str) else shard if isinstance(shard, Shard) else Shard(*shard)
    if held_out and not (targets is None and labels is None):
        raise UserError(
            "with `held_out`, `targets` and `labels` are those of held-out rows",
            "give them to `convert`, beside the rows",
        )
    source = load(model)
    given = None if held_out else (None, targets, labels)
    prepared = prepared_for_calibration(images, text)
    start = _opened(source, calib, settings, given, prepared, batch_size)
    found = read(start.plan, start.data, settings, progress, truth_of(start.held), one, threads)
    return part_of(found, start.plan, settings, start.held, held_out, one)


@dataclass(frozen=True)
class _Start:
    """What is known before anything is fitted."""

    settings: Settings
    plan: Plan
    data: DataSource
    held: HeldOut | None  #: the rows that promises rest on
    found: Pass | None = None  #: where the data were read before


def _opened(
    source: SourceModel,
    calib: Any,
    settings: Settings,
    given: tuple[Any, Any, Any] | None,
    prepared: Preparation,
    batch_size: int | None,
) -> _Start:
    """The data open; None is `given` where the rows that promises rest on come later."""
    plan = analyse(source, settings)
    require_convertible(plan, settings)
    data = open_calibration(calib, source, prepared, batch_size)
    if given is None:
        return _Start(settings, plan, data, None)
    return _Start(settings, plan, *known_rows(plan, data, settings, given, prepared, batch_size))


def _from_parts(
    source: SourceModel, parts: Collected, given: tuple[Any, Any, Any], prepared: Preparation
) -> _Start:
    """The data as they were collected."""
    settings, (held_out, targets, labels) = parts.record.settings, given
    plan = analyse(source, settings)
    found, held = restored(parts, plan)
    if (parts.record.held == "later") != (held_out is not None):
        raise UserError(
            "the parts were collected for a conversion with rows held out, and none are given"
            if held_out is None
            else "rows are held out, and the parts were not collected for that",
            "give `held_out` to both `collect` and `convert`, or to none",
        )
    if held_out is not None:
        _, held = known_rows(plan, found.fed.data, settings, given, prepared)
    elif not (targets is None and labels is None):
        raise UserError(
            "the parts have the targets and labels that they were collected with",
            "give those of the calibration rows to `collect`, or hold rows out",
        )
    return _Start(settings, plan, found.fed.data, held, found)


def _refuse_beside_parts(budget: float | None, *choices: Any) -> None:
    """Refuse what the parts say already, or what needs the data."""
    if budget is not None:
        raise UserError(
            "`budget` reads the data again for cheaper places, and parts do not hold them",
            "leave it out, or convert on one machine",
        )
    if any(choices):
        raise UserError(
            "parts hold the choices that they were collected with",
            "give settings, images, text and batch size to `collect` alone",
        )


def prepared_for_calibration(images: ImageOptions | None, text: TextOptions | None) -> Preparation:
    """How data become inputs; of text, so much as a fit gains from."""
    text = text or TextOptions()
    return Preparation.of(images, replace(text, tokens=text.tokens or CALIBRATION_TOKENS))


def open_calibration(
    calib: Any, source: SourceModel, preparation: Preparation, batch_size: int | None = None
) -> DataSource:
    """The calibration data, which are enough for some fit."""
    data = open_data(calib, source.inputs, preparation, batch_size)
    if data.text is not None:
        data.text.require_a_sequence()
    return data


def truth_of(held: HeldOut | None) -> Known | None:
    """Which calibration rows are for what only rows with a truth are good for; None where none are."""
    if held is None or held.exact:
        return None
    fitted = {Purpose.SCALING: held.fitting, Purpose.COUNTING: held.counting}
    return fitted | {Purpose.NOISE: held.fitting} if held.targets else fitted


def _known(held: HeldOut | None) -> dict[str, Any]:
    """What is known beside the calibration data, as `rewrite` asks for it."""
    if held is None:
        return {}
    return {"targets": held.targets, "labels": held.labels, "held_out": held.exact}


def _settings(settings: Settings | None, paper: bool, choices: Mapping[str, Any]) -> Settings:
    chosen = replace(settings or Settings(), **choices)
    if chosen.portable == "none" and library_path() is None:
        raise UserError(
            "a file without portable functions cannot be run here, as the native library is missing",
            "leave `portable` out, or install a release of gapa-onnx that has the library; `gapa-onnx doctor` looks for it",
        )
    return chosen.as_in_paper() if paper else chosen


def _require_another_file(source: SourceModel, path: Path | None) -> None:
    if path is not None and source.path is not None and path.resolve() == source.path.resolve():
        raise UserError("the output would replace the source model", "choose another name with `out`")


def known_rows(
    plan: Plan,
    data: DataSource,
    settings: Settings,
    given: tuple[Any, Any, Any],
    preparation: Preparation | None = None,
    batch_size: int | None = None,
) -> tuple[DataSource, HeldOut | None]:
    """The calibration data, and the rows that promises rest on: those held out, or calibration rows with a known truth;
    without either, documents of a text that are set apart from the data, or None.

    `given` are the held-out rows, targets and labels, as the user gave them.
    """
    held_out, targets, labels = given
    if held_out is None and targets is None and labels is None:
        require_labels(settings, plan, None)
        return set_apart(data, settings.seed)
    rows, whose = data, "calibration"
    if held_out is not None:
        rows, whose = (
            open_data(held_out, plan.source.inputs, preparation, batch_size, data.remembered),
            "held-out",
        )
    numbers = {} if targets is None else read_targets(targets, plan.heads, rows, whose)
    classes = {} if labels is None else read_labels(labels, plan, rows, whose)
    require_labels(settings, plan, None if labels is None else classes)
    errors = settings.max_error is not None or settings.per_class == "yes"
    apart = None if held_out is None else data
    return data, hold_out(rows, apart, numbers, classes, errors, settings.seed)


def _strange_rows(strange: Any, data: DataSource, preparation: Preparation) -> DataSource:
    """The strange inputs, of which none may be a calibration row."""
    others = open_data(strange, data.inputs, preparation, data.batch_size, data.remembered)
    require_apart(others, data, "strange inputs", "give inputs that the model is not made for")
    return others


def _calibrated(
    start: _Start, budget: float | None, progress: Progress, strange: DataSource | None
) -> tuple[Settings, Plan, Calibration, BudgetRecord | None]:
    """The fitted sites; with a budget, also the settings and the plan that keep it, and what that gave up."""
    settings, plan, data, known = start.settings, start.plan, start.data, truth_of(start.held)
    if budget is None:
        found = start.found or read(plan, data, settings, progress, known)
        return (
            settings,
            plan,
            fit(material(plan, found, settings, progress, strange), settings, progress),
            None,
        )
    choice = within_budget(plan, data, settings, budget, progress, strange, known)
    return choice.settings, choice.plan, choice.calibration, choice.record


def _verified(
    source: SourceModel,
    converted: onnx.ModelProto,
    calibration: Calibration,
    allow_uncovered: bool,
    progress: Progress,
) -> tuple[Check, ...]:
    """The checks of the result, on the first rows of the data."""
    progress("verifying", 0.0)
    sample: list[Batch] = []
    for batch in calibration.fed.verified(VERIFIED_ROWS, LEAST_VERIFIED_ROWS, MEMORY / VERIFYING_RUNS):
        sample.append(batch)
        if sum(held.rows or 1 for held in sample) >= LEAST_VERIFIED_ROWS:
            break
    checks = verify(source.given, converted, sample, allow_uncovered=allow_uncovered)
    progress("verifying", 1.0)
    return tuple(checks)


def _seal(converted: onnx.ModelProto, checks: Sequence[Check]) -> None:
    """Put into the record what varies and has no variance, and the digest of all."""
    uncovered = {
        output: text
        for check in checks
        if isinstance(check, Coverage)
        for output, text in check.uncovered.items()
    }
    record = require(converted, "the model")
    heads = {output: replace(head, uncovered=uncovered.get(output)) for output, head in record.heads.items()}
    bare = tuple(output for output in uncovered if output not in heads)
    seal(converted, replace(record, heads=heads, uncovered=bare))


def _written(converted: onnx.ModelProto, path: Path | None, checks: Sequence[Check]) -> Path | None:
    """Where the file is; None where none was asked for, or where a check failed."""
    if path is None or not all(check.passed for check in checks):
        return None
    save(converted, path)
    return path


def default_output(model: Path) -> Path:
    """MODEL.onnx becomes MODEL.gapa.onnx, beside it."""
    return model.with_name((model.stem if model.suffix == ".onnx" else model.name) + ".gapa.onnx")
