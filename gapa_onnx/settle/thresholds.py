"""Where the line is drawn: the threshold of a converted file's score, read and changed.

An input is flagged (`y_ood`) unless its score is below the threshold. The file carries the score at many
quantiles of left-out calibration rows, so the line can be moved without calibrating again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gapa_onnx import record as provenance
from gapa_onnx.data import ImageOptions, open_data
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import read_proto
from gapa_onnx.model.writing import save
from gapa_onnx.plan.outputs import threshold_name
from gapa_onnx.sessions.inference import input_specs, open_model, row_count
from gapa_onnx.settings import require_quantile
from gapa_onnx.settle.left_out import ScoreSample, threshold_at

ROWS_BEYOND = 10  # fewer rows beyond a quantile say little about where it is


@dataclass(frozen=True)
class Threshold:
    """Where the line of one output is."""

    output: str
    kind: str  #: of score: variance or epistemic
    quantile: float | None  #: None where a number was given
    threshold: float
    rows: int  #: that the quantiles were taken over
    source: str  #: which rows those were
    quantiles: Mapping[str, float]

    @property
    def rows_beyond(self) -> float:
        """How many of those rows the quantile leaves above."""
        return self.rows * (1 - self.quantile) if self.quantile is not None else float("nan")


def thresholds(path: str | os.PathLike) -> tuple[Threshold, ...]:
    """The thresholds that a converted file has, one per output with a score."""
    return _listed(_record(read_proto(Path(path)), Path(path)))


def set_threshold(
    path: str | os.PathLike,
    *,
    quantile: float | None = None,
    value: float | None = None,
    data: Any = None,
    output: str | None = None,
    out: str | os.PathLike | None = None,
    images: ImageOptions = ImageOptions(),
) -> tuple[Threshold, ...]:
    """Move the threshold of a converted file; nothing else in it changes.

    Parameters
    ----------
    quantile: share of ordinary inputs that must stay unflagged, such as 0.99.
    value: the threshold itself, in place of a quantile.
    data: held-out inputs to take the quantiles over, in place of the calibration's own.
    output: which output's; all that have a score unless given.
    out: where to write; the file itself unless given.
    """
    path = Path(path)
    model = read_proto(path)
    record = _record(model, path)
    chosen = _outputs(record, output)
    if (quantile is None) == (value is None) and data is None:
        raise UserError("give a quantile or a value for the threshold", "for example --quantile 0.99")
    if quantile is not None:
        require_quantile("--quantile", quantile)
    if value is not None and not np.isfinite(value):
        raise UserError(f"the threshold {value} is not a finite number", "give a number, or a quantile")
    if data is not None:
        _take_quantiles(path, record, chosen, data, images)
    for name in chosen:
        score = record["heads"][name]["score"]
        level = quantile if quantile is not None or value is not None else score["quantile"]
        new = value if value is not None else threshold_at(score["quantiles"], level)
        put_threshold(model, record, name, None if value is not None else level, new)
    provenance.write(model, record)
    save(model, Path(out) if out is not None else path)
    return _listed(record)


def put_threshold(
    model: onnx.ModelProto, record: dict[str, Any], output: str, quantile: float | None, threshold: float
) -> None:
    """Write a threshold into the model's initializer and into its record (which is not written here)."""
    name = threshold_name(output)
    for tensor in model.graph.initializer:
        if tensor.name == name:
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(threshold, kind), name))
            break
    else:
        raise UserError(f"the file has no threshold for output {output!r}", "convert the source model again")
    record["heads"][output]["score"] |= {"quantile": quantile, "threshold": float(threshold)}


def _record(model: onnx.ModelProto, path: Path) -> dict[str, Any]:
    record = provenance.read(model)
    if record is None:
        raise UserError(f"{path} was not written by gapa-onnx", "give a converted file")
    return record


def _outputs(record: dict[str, Any], output: str | None) -> list[str]:
    known = [name for name, head in record["heads"].items() if "score" in head]
    if not known:
        raise UserError("no output of this file has a score", "convert the source model again with --task")
    if output is not None and output not in known:
        raise UserError(f"output {output!r} has no score", f"choose one of {', '.join(known)}")
    return known if output is None else [output]


def _listed(record: dict[str, Any]) -> tuple[Threshold, ...]:
    scores = {name: record["heads"][name]["score"] for name in _outputs(record, None)}
    return tuple(
        Threshold(name, s["kind"], s["quantile"], s["threshold"], s["rows"], s["from"], s["quantiles"])
        for name, s in scores.items()
    )


def _take_quantiles(
    path: Path, record: dict[str, Any], outputs: list[str], data: Any, images: ImageOptions
) -> None:
    """Quantiles of held-out data in place of those of the calibration."""
    session = open_model(path)
    source = open_data(data, input_specs(session), images)
    names = [record["heads"][output]["outputs"]["score"] for output in outputs]
    samples = [ScoreSample() for _ in outputs]
    rows = 0
    for batch in source.batches():
        answers = session.run(names, batch)
        rows += row_count(batch)
        for sample, scores in zip(samples, answers):
            sample.add(scores)
    for output, sample in zip(outputs, samples):
        if not len(sample.values):
            raise UserError(f"every score of {source.description} is NaN", "check the data")
        record["heads"][output]["score"] |= {
            "rows": rows,
            "from": source.description,
            "quantiles": sample.table(),
        }
