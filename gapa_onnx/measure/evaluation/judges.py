"""The tasks that can be evaluated: how each turns answers into columns, and columns into findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.answers import Answered, ConvertedFile, require_roles
from gapa_onnx.measure.evaluation.boxes import FORMATS
from gapa_onnx.measure.evaluation.classification import (
    class_caption,
    class_columns,
    class_findings,
    label_caption,
    label_columns,
    label_findings,
)
from gapa_onnx.measure.evaluation.detection import (
    box_caption,
    box_columns,
    box_findings,
    read_truth,
    seen_format,
)
from gapa_onnx.measure.evaluation.labels import read_labels
from gapa_onnx.measure.evaluation.regression import number_caption, number_columns, number_findings
from gapa_onnx.measure.evaluation.rows import Columns, Findings
from gapa_onnx.measure.evaluation.segmentation import pixel_columns, pixel_findings
from gapa_onnx.measure.evaluation.strangeness import strangeness_columns, strangeness_findings
from gapa_onnx.measure.evaluation.tokens import token_columns, token_findings
from gapa_onnx.sessions.feeding import Feeding


@dataclass(frozen=True)
class Judge:
    """What one task asks of a file, and what it makes of the answers."""

    needs: tuple[str, ...]  #: roles of outputs
    #: (answered, found by role, labels or None, first row, rows in all) -> columns
    columns: Callable[[Answered, Mapping[str, Array], Array | None, int, int], Columns]
    findings: Callable[[Columns], Findings]
    caption: Callable[[Columns, int], tuple[str, str]] | None = None  #: None: rows are not shown one by one
    by_labels: bool = True  #: whether predictions are held against labels


_CLASSES = Judge(("probs",), lambda *given: class_columns(*given[:4]), class_findings, class_caption)
_LABELS = Judge(("probs",), lambda *given: label_columns(*given[:4]), label_findings, label_caption)
_PLACES = Judge(("probs",), pixel_columns, pixel_findings)
_TOKENS = Judge(("probs", "tokens"), token_columns, token_findings)
_NUMBERS = Judge(("var",), number_columns, number_findings, number_caption)
_BOXES = Judge(("candidates", "probs"), partial(box_columns, FORMATS[0]), box_findings, box_caption)


_OTHERS = {
    "multilabel": _LABELS,
    "segmentation": _PLACES,
    "tokens": _TOKENS,
    "regression": _NUMBERS,
    "detection": _BOXES,
}

_STRANGENESS = Judge(
    ("score", "ood"), lambda *given: strangeness_columns(*given[:2]), strangeness_findings, by_labels=False
)


def judge_of(converted: ConvertedFile) -> Judge:
    """The judge of a file's output, once it is certain that the file answers what the judge asks."""
    answered = converted.answered
    if answered.task == "classification":
        judge = _CLASSES if _one_place(converted) else _PLACES
    else:
        judge = _OTHERS.get(answered.task, _STRANGENESS)
    require_roles(answered, judge.needs)
    return judge


def prepared(judge: Judge, converted: ConvertedFile, data: Feeding, labels: Any) -> tuple[Judge, Array]:
    """What is true of each row, and the judge once it knows what only data and truth together tell it."""
    if judge is not _BOXES:
        return judge, read_labels(labels)
    truth, about_truth = read_truth(converted, data, labels)
    form, about_form = seen_format(converted, data, truth)
    notes = (*about_truth, *about_form)
    columns, findings = partial(box_columns, form), partial(box_findings, notes=notes)
    return replace(judge, columns=columns, findings=findings), truth


def _one_place(converted: ConvertedFile) -> bool:
    """Whether a row has one class: (N, C), also with sizes of 1 beside, as opposed to classes along a sequence."""
    answered = converted.answered
    shape = next(v.shape for v in converted.session.get_outputs() if v.name == answered.output)
    return all(size == 1 for axis, size in enumerate(shape) if axis not in (0, answered.axis))
