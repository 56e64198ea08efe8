"""What a detector's outputs hold for the candidates that have answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.record import HeadRecord


def candidate_scores(head: HeadRecord, answer: Mapping[str, Any]) -> Array:
    """The source's class scores of the candidates (N, K, C)."""
    where = head.detection
    assert where is not None
    return _at(head, answer, where.classes, where.class_axis, where.class_start, where.classes_count)


def candidate_boxes(head: HeadRecord, answer: Mapping[str, Any]) -> Array:
    """The source's box numbers of the candidates (N, K, 4)."""
    where = head.detection
    assert where is not None
    return _at(head, answer, where.boxes, where.box_axis, where.box_start, 4)


def _at(
    head: HeadRecord, answer: Mapping[str, Any], tensor: str, axis: int, start: int, count: int | None
) -> Array:
    by_candidate = np.moveaxis(answer[tensor], axis, -1)  # (N, A, f)
    indices = answer[head.outputs["candidates"]][..., None]
    chosen: Array = np.take_along_axis(by_candidate, indices, axis=1)
    return chosen[..., start : None if count is None else start + count]
