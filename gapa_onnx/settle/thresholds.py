"""Read and change the threshold of a converted file's score.

An input is flagged (`y_ood`) unless its score is below the threshold. The file carries the score at many
quantiles of left-out calibration rows, so the line can be moved without calibrating again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gapa_onnx.data import DataSource, ImageOptions, InputSpec, open_data
from gapa_onnx.emit.emit import attach, put_tensor
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import read_proto
from gapa_onnx.model.writing import save
from gapa_onnx.record import Record, ScoreRecord, damaged, require, require_outputs, require_thresholds
from gapa_onnx.sessions.feeding import feeding
from gapa_onnx.sessions.inference import input_specs, open_model, row_count, run_batch
from gapa_onnx.settings import require_quantile
from gapa_onnx.settle.scores import ScoreSample, threshold_at

ROWS_BEYOND = 10  # fewer rows beyond a quantile say little about where it is


@dataclass(frozen=True)
class Threshold:
    """The threshold of one output's score, and the quantiles that it was chosen from."""

    output: str
    role: str  #: of the score: score, or image_score of a detector's images
    kind: str  #: of score: variance or epistemic
    quantile: float | None  #: None where a number was given
    threshold: float
    rows: int  #: that the quantiles were taken over
    source: str  #: which rows those were
    quantiles: Mapping[str, float]

    @property
    def name(self) -> str:
        """What people call it: the output, and whether the line is for whole images."""
        return self.output if self.role == "score" else f"{self.output}, images"

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
    images: how images become inputs; what it leaves open, or all, as the file was calibrated.
    batch_size: rows to run the file on at a time; as many as fit well into memory unless given.
    """
    path = Path(path)
    model = read_proto(path)
    record = _required(model, str(path))
    scores = _scores(record, output)
    _require_a_line(quantile, value, data)
    if data is not None:
        scores = _on_data(
            path,
            record,
            scores,
            lambda inputs: open_data(data, inputs, images, batch_size, calibrated=record.images),
        )
    heads = dict(record.heads)
    for (name, role), score in scores.items():
        moved = _moved(name, score, quantile, value)
        put_tensor(model.graph, score.tensor, np.asarray(moved.threshold))
        head = heads[name]
        heads[name] = replace(head, score=moved) if role == "score" else replace(head, image_score=moved)
    record = replace(record, heads=heads)
    attach(model, record)
    save(model, Path(out) if out is not None else path)
    return _listed(record)


def _required(model: onnx.ModelProto, label: str) -> Record:
    """The record of a converted model, once it is certain that its thresholds can be moved."""
    record = require(model, label)
    require_thresholds(record, model.graph)
    for (output, role), score in _all_scores(record).items():
        if not _are_quantiles(score.quantiles):
            raise damaged(
                f"heads.{output}.{role}.quantiles does not go from numbers between 0 and 1 to scores"
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
    found = {}
    for output, head in record.heads.items():
        for role, score in (("score", head.score), ("image_score", head.image_score)):
            if score is not None:
                found[output, role] = score
    return found


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
        Threshold(name, role, s.kind, s.quantile, s.threshold, s.rows, s.source, s.quantiles)
        for (name, role), s in _scores(record, None).items()
    )


def _on_data(
    path: Path,
    record: Record,
    scores: Scores,
    opened: Callable[[Sequence[InputSpec]], DataSource],
) -> Scores:
    """The scores with quantiles of held-out data in place of those of the calibration."""
    session = open_model(path)
    scored = {output: record.heads[output] for output, _ in scores}
    require_outputs(scored, {value.name for value in session.get_outputs()}, roles=["score"])
    source = feeding(session, opened(input_specs(session)))
    names = [record.heads[output].outputs[role] for output, role in scores]
    samples = [ScoreSample() for _ in scores]
    rows = 0
    for batch in source.batches():
        answers = run_batch(session, names, batch)
        rows += row_count(batch, answers)
        for sample, values in zip(samples, answers):
            sample.add(values)
    for sample in samples:
        if not len(sample.values):
            raise UserError(f"every score of {source.description} is NaN", "check the data")
    return {
        key: replace(score, rows=rows, source=source.description, quantiles=sample.table())
        for (key, score), sample in zip(scores.items(), samples)
    }
