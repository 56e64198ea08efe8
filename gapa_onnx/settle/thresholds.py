"""Read and change how rare a score must be for a converted file to flag it.

An input is flagged (`y_ood`) unless its p-value is above a level. The file carries the scores of ordinary inputs, so the
level can be moved, or given as a score, without calibrating again; and other ordinary inputs can take their place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gapa_onnx.data import (
    DataSource,
    ImageOptions,
    InputSpec,
    Preparation,
    TextOptions,
    metadata,
    open_data,
    remembered,
)
from gapa_onnx.emit.emit import put_tensor, seal
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import read_proto
from gapa_onnx.model.splice import exposed
from gapa_onnx.model.writing import save
from gapa_onnx.plan.heads.pvalues import TableTensors, p_value
from gapa_onnx.presence import require_outputs, require_thresholds
from gapa_onnx.record import Record, ScoreRecord, damaged, require
from gapa_onnx.sessions.feeding import feeding
from gapa_onnx.sessions.inference import input_specs, open_model, row_count, run_batch
from gapa_onnx.settings import require_quantile
from gapa_onnx.settle.scores import MOST_ORDINARY, ScoreSample, thinned, threshold_at

ROWS_BEYOND = 10  # fewer rows beyond a quantile say little about where it is


@dataclass(frozen=True)
class Threshold:
    """The threshold of one output's score, and the quantiles that it was chosen from."""

    output: str
    role: str  #: of the score: score, or image_score or seq_score of whole images and sequences
    kind: str  #: of score: witnesses, variance, epistemic or share
    quantile: float | None  #: None where a number was given
    threshold: float
    rows: int  #: that the quantiles were taken over
    source: str  #: which rows those were
    quantiles: Mapping[str, float]
    holds: str = "approximately"  #: or exactly, where nothing was fitted to these rows

    @property
    def name(self) -> str:
        """What people call it: the output, and whether the line is for whole images or sequences."""
        whole = {"image_score": ", images", "seq_score": ", sequences"}
        return self.output + whole.get(self.role, "")

    @property
    def rows_beyond(self) -> float:
        """How many of those rows the quantile leaves above."""
        return self.rows * (1 - self.quantile) if self.quantile is not None else float("nan")


def thresholds(path: str | os.PathLike[str]) -> tuple[Threshold, ...]:
    """The thresholds that a converted file has, one per output with a score."""
    return _listed(_required(read_proto(Path(path)), str(path)))


def set_threshold(
    path: str | os.PathLike[str],
    *,
    quantile: float | None = None,
    value: float | None = None,
    data: Any = None,
    output: str | None = None,
    out: str | os.PathLike[str] | None = None,
    images: ImageOptions | None = None,
    text: TextOptions | None = None,
    batch_size: int | None = None,
) -> tuple[Threshold, ...]:
    """Move the threshold of a converted file; nothing else in it changes.

    Parameters
    ----------
    quantile: share of ordinary inputs that must stay unflagged, such as 0.99.
    value: the threshold itself, in place of a quantile.
    data: held-out inputs to take the quantiles over, in place of the calibration's own.
    output: which output's; all that have a score unless given.
    out: where to write; the file itself unless given.
    images, text: how these become inputs; what is left open, or all, as the file was calibrated.
    batch_size: rows to run the file on at a time; as many as fit well into memory unless given.
    """
    path = Path(path)
    model = read_proto(path)
    record = _required(model, str(path))
    scores = _scores(record, output)
    _require_a_line(quantile, value, data)
    if data is not None:
        scores = _on_data(
            model,
            record,
            scores,
            lambda inputs: open_data(
                data,
                inputs,
                Preparation.of(images, text),
                batch_size,
                calibrated=remembered(record, metadata(model)),
            ),
        )
    heads = dict(record.heads)
    for (name, role), score in scores.items():
        moved = _moved(name, score, quantile, value)
        level = 1 - moved.quantile if moved.quantile is not None else _level_at(model, score, moved.threshold)
        put_tensor(model.graph, score.level, np.asarray(level))
        heads[name] = replace(heads[name], scores={**heads[name].scores, role: moved})
    record = replace(record, heads=heads)
    seal(model, record)
    save(model, Path(out) if out is not None else path)
    return _listed(record)


def _required(model: onnx.ModelProto, label: str) -> Record:
    """The record of a converted model, once it is certain that its thresholds can be moved."""
    record = require(model, label)
    require_thresholds(record, model.graph)
    for (output, role), score in _all_scores(record).items():
        if not _are_quantiles(score.quantiles):
            raise damaged(
                f"heads.{output}.scores.{role}.quantiles does not go from numbers between 0 and 1 to scores"
            )
    return record


def _are_quantiles(table: Mapping[str, float]) -> bool:
    try:
        return bool(table) and all(0 <= float(level) <= 1 for level in table)
    except ValueError:
        return False


def _require_a_line(quantile: float | None, value: float | None, data: Any) -> None:
    """Raise UserError unless what is given says where the line is; data alone keep the quantile."""
    if (quantile is None) == (value is None) and data is None:
        raise UserError("give a quantile or a value for the threshold", "for example `quantile=0.99`")
    if quantile is not None:
        require_quantile("quantile", quantile)
    if value is not None and not np.isfinite(value):
        raise UserError(f"the threshold {value} is not a finite number", "give a number, or a quantile")


def _moved(name: str, score: ScoreRecord, quantile: float | None, value: float | None) -> ScoreRecord:
    """The score with its line at the value, or at the quantile, which is the one it had unless given."""
    if value is not None:
        return replace(score, quantile=None, threshold=float(value))
    level = score.quantile if quantile is None else quantile
    if level is None:
        raise UserError(
            f"the threshold of {name!r} was given as a number, so there is no quantile to take again",
            "give `quantile` too",
        )
    return replace(score, quantile=level, threshold=float(threshold_at(score.quantiles, level)))


Scores = dict[tuple[str, str], ScoreRecord]  #: by output and role


def _all_scores(record: Record) -> Scores:
    return {
        (output, role): score for output, head in record.heads.items() for role, score in head.scores.items()
    }


def _level_at(model: onnx.ModelProto, score: ScoreRecord, threshold: float) -> float:
    """The p-value of a score by the file's ordinary scores: at and below it are those that are not less."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    table = onnx.numpy_helper.to_array(stored[score.ordinary]).ravel()
    ordinary = table[np.isfinite(table)]
    if len(ordinary) and threshold > ordinary.max():
        raise UserError(
            f"the threshold {threshold:g} lies beyond all {len(ordinary)} ordinary scores, the largest of which is "
            f"{ordinary.max():.4g}, so that no p-value tells it from them",
            "give a smaller one, or more ordinary inputs with `data`",
        )
    return float(p_value(ordinary, threshold))


def _scores(record: Record, output: str | None) -> Scores:
    """The score records of a file: of all outputs that have one, or of one output alone."""
    known = _all_scores(record)
    if not known:
        raise UserError("no output of this file has a score", "convert the source model again with `task`")
    outputs = list(dict.fromkeys(name for name, _ in known))
    if output is not None and output not in outputs:
        raise UserError(f"output {output!r} has no score", f"choose one of {', '.join(outputs)}")
    return {key: score for key, score in known.items() if output in (None, key[0])}


def _listed(record: Record) -> tuple[Threshold, ...]:
    return tuple(
        Threshold(name, role, s.kind, s.quantile, s.threshold, s.rows, s.source, s.quantiles, s.holds)
        for (name, role), s in _scores(record, None).items()
    )


def _on_data(
    model: onnx.ModelProto,
    record: Record,
    scores: Scores,
    opened: Callable[[Sequence[InputSpec]], DataSource],
) -> Scores:
    """The scores with those of held-out data in place of the calibration's, which are put into the model."""
    ranked = [score.ranked for score in scores.values()]
    session = open_model(exposed(model, ranked))
    scored = {output: record.heads[output] for output, _ in scores}
    require_outputs(scored, {value.name for value in session.get_outputs()}, roles=["score"])
    source = feeding(session, opened(input_specs(session)))
    samples = [ScoreSample() for _ in scores]
    rows = 0
    for batch in source.batches():
        answers = run_batch(session, ranked, batch)
        rows += row_count(batch, answers)
        for sample, values in zip(samples, answers):
            sample.add(values)
    for sample in samples:
        if not len(sample.values):
            raise UserError(f"every score of {source.description} is NaN", "check the data")
    for score, sample in zip(scores.values(), samples):
        names = TableTensors(score.ordinary, score.largest, score.count, score.level)
        kept = thinned(sample.values, MOST_ORDINARY["rows" if len(sample.values) <= rows else "positions"])
        for name, array in names.filled(kept).items():
            put_tensor(model.graph, name, array)
    return {
        key: replace(score, rows=rows, source=source.description, quantiles=sample.table(), holds="exactly")
        for (key, score), sample in zip(scores.items(), samples)
    }
