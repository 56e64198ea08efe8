"""True classes of calibration or held-out rows: an array or a file, checked against the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import DataSource
from gapa_onnx.errors import UserError
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.plan.head import Head, Task
from gapa_onnx.plan.heads.promises import takes_labels
from gapa_onnx.plan.outputs import class_count
from gapa_onnx.plan.targets import read_arrays
from gapa_onnx.settings import Settings

UNKNOWN = -1  # label of a row that the model was fitted to
IGNORED = 255  # label of a pixel that has none, in most data sets


def read_labels(given: Any, plan: Plan, data: DataSource, whose: str = "calibration") -> dict[str, Array]:
    """Labels by output, as whole numbers: (rows,), or (rows, …) with one for each pixel.

    Parameters
    ----------
    given: an array for the one output with classes, a mapping output -> array, or a .npy, .npz or .csv file.
    whose: the rows that they belong to: calibration, or held-out.
    """
    heads = {head.output: head for head in plan.heads if takes_labels(head)}
    if not heads:
        tasks = ", ".join(f"{head.output}: {head.task.value}" for head in plan.heads)
        raise UserError(
            f"labels are for outputs with one class per row or pixel, and no output is taken for one ({tasks})",
            "leave `labels` out, or say `task='classification'`",
        )
    arrays = read_arrays(given, "labels")
    if not isinstance(arrays, Mapping) or (len(arrays) == 1 and len(heads) == 1):
        if len(heads) > 1:
            raise UserError(
                f"the model has several outputs with classes: {', '.join(heads)}",
                "give a .npz with one array per output, named like it",
            )
        arrays = {next(iter(heads)): next(iter(arrays.values())) if isinstance(arrays, Mapping) else arrays}
    unknown = sorted(set(arrays) - set(heads))
    if unknown:
        raise UserError(
            f"there are labels for {unknown[0]!r}, which is no output with one class per row or pixel",
            f"name them like {', '.join(heads)}",
        )
    return {
        output: _checked(array, plan, heads[output], data.rows, whose) for output, array in arrays.items()
    }


def require_labels(settings: Settings, plan: Plan, labels: Mapping[str, Array] | None) -> None:
    """Refuse settings that only labels make sense of, where there are none, or that maps of labels do not have."""
    asked = {"max_error": settings.max_error, "per_class": None if settings.per_class == "no" else "yes"}
    for name, value in asked.items():
        if value is not None and labels is None:
            raise UserError(f"`{name}={value!r}` is counted on labels, and none are given", "give `labels`")
    maps = [
        head.output for head in plan.heads if head.task is Task.SEGMENTATION and head.output in (labels or {})
    ]
    asked["sets"] = "raps" if settings.sets == "raps" else None
    for name, value in asked.items():
        if value is not None and maps:
            raise UserError(
                f"`{name}={value!r}` is for one class per row, and {maps[0]!r} has one per pixel",
                f"leave `{name}` out",
            )


def _checked(array: Array, plan: Plan, head: Head, rows: int | None, whose: str) -> Array:
    """The labels of one output, where they can be labels of these rows."""
    assert head.rank is not None
    labels = array[:, 0] if array.ndim == head.rank and array.shape[1] == 1 else array
    pixels = head.task is Task.SEGMENTATION
    if labels.ndim != head.rank - 1 or labels.dtype.kind not in "iuf" or (labels != np.floor(labels)).any():
        raise UserError(
            f"the labels are not one whole number per {'pixel' if pixels else 'row'}",
            "number the classes from 0; -1 for what is not known, or what the model was fitted to",
        )
    if rows is not None and len(labels) != rows:
        raise UserError(
            f"there are {len(labels)} labels for {rows} {whose} rows",
            "give one label per row, in the same order; -1 for rows that the model was fitted to",
        )
    classes = class_count(plan.source, head)
    labels = labels.astype(np.int64)
    if pixels and classes is not None and classes <= IGNORED:
        labels = np.where(labels == IGNORED, UNKNOWN, labels)
    require_classes(labels, classes, head.output)
    if not (labels >= 0).any():
        raise UserError(
            "every label is -1, so all rows are such that the model was fitted to, and these promise nothing",
            "label some hundred rows that it was not fitted to",
        )
    return labels


def require_classes(labels: Array, classes: int | None, output: str) -> None:
    """Refuse labels that are no class of an output, of which there may be any number."""
    most = labels.max(initial=UNKNOWN) if classes is None else classes - 1
    wrong = (labels < UNKNOWN) | (labels > most)
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0].tolist())
        known = "" if classes is None else f", and {output!r} has classes 0 to {classes - 1}"
        raise UserError(
            f"label {labels[place]} of row {place[0]} is no class{known}",
            "number the classes from 0; -1 is for rows that the model was fitted to",
        )
