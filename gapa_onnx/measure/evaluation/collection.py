"""One data set through a converted file: the columns of its rows, and the few inputs worth showing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation.answers import MEAN, ConvertedFile
from gapa_onnx.measure.evaluation.judges import Judge
from gapa_onnx.measure.evaluation.labels import require_rows
from gapa_onnx.measure.evaluation.rows import SCORE, VALID, Columns, concatenate, select
from gapa_onnx.measure.evaluation.segmentation import MAP
from gapa_onnx.measure.evaluation.thumbnails import Gallery
from gapa_onnx.progress import Progress, silent
from gapa_onnx.sessions.feeding import Feeding

_CERTAINTY = tuple(
    SCORE + name for name in ("image_score", "score", "epistemic", "std", "entropy", "maxprob")
)


def columns_of(
    converted: ConvertedFile,
    judge: Judge,
    data: Feeding,
    labels: Array | None,
    *,
    gallery: Gallery | None = None,
    progress: Progress = silent,
    text: str = "evaluating",
) -> tuple[Columns, int]:
    """The columns of all rows that the file has an answer for, and the number of the others."""
    if labels is not None:
        converted.require_matching(labels, data)
    total = data.rows if labels is None else len(labels)
    kept, seen = [], 0
    for start, batch, found in converted.batches(data):
        seen = start + len(found[MEAN])
        if labels is not None and seen > len(labels):
            require_rows(labels, seen, f"{data.description} and more")
        own = None if labels is None else np.asarray(labels[start:seen])
        columns = judge.columns(converted.answered, found, own, start, total or 1)
        if gallery is not None:
            _show(gallery, converted, judge, start, batch, columns, found[MEAN])
        kept.append({name: values for name, values in columns.items() if not name.startswith(MAP)})
        progress(text, seen / total if total else 0.0)
    if labels is not None:
        converted.require_matching(labels, data, seen)
    whole = concatenate(kept)
    valid = whole[VALID]
    if not valid.any():
        raise UserError(
            f"the file answers NaN for every row of {data.description}",
            "check that the data are scaled as the model expects them, and hold no NaN themselves",
        )
    return select(whole, valid), int((~valid).sum())


def _show(
    gallery: Gallery,
    converted: ConvertedFile,
    judge: Judge,
    start: int,
    batch: Mapping[str, Array],
    columns: Columns,
    mean: Array,
) -> None:
    if judge.caption is not None:
        gallery.add(start, batch, columns, next(name for name in _CERTAINTY if name in columns))
        return
    shape = converted.answered.places(mean)
    if len(shape) == 2 and any(name.startswith(MAP) for name in columns):
        gallery.add_maps(start, batch, columns, shape)
