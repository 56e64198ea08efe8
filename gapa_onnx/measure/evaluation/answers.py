"""What a converted file answers about data: its head, and batches of outputs by their role."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from gapa_onnx.arrays import Array
from gapa_onnx.data import InputSpec, Preparation, Remembered, open_data, remembered
from gapa_onnx.data.spec import fixed
from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation.labels import require_rows
from gapa_onnx.measure.evaluation.metrics import needed
from gapa_onnx.presence import require_outputs
from gapa_onnx.record import DetectionRecord, HeadRecord, damaged
from gapa_onnx.sessions.feeding import Feeding, feeding
from gapa_onnx.sessions.inference import input_specs, open_model, read_record, row_count, run_batch

_CLASS_ROLES = ("probs", "tokens", "entropy", "epistemic", "score", "ood", "set", "defer")
_NUMBER_ROLES = ("var", "total_var", "score", "ood", "lower", "upper")
_BOX_ROLES = (
    "candidates", "probs", "objectness", "box_var", "entropy", "epistemic", "score", "ood",
    "image_score", "image_ood",
)  # fmt: skip
MEAN = "mean"  #: the role of the source's own output; of a detector's, the one with the class scores
BOXES = "boxes"  #: the role of a detector's own output with the box numbers
_CONVERT_AGAIN = (
    "convert the model again with `task` classification, multilabel, regression, segmentation, tokens or "
    "detection"
)


@dataclass(frozen=True)
class Answered:
    """One output of a converted file, as the record of the file describes it."""

    output: str
    task: str
    link: str  #: softmax, sigmoid or identity
    axis: int | None  #: of the classes
    plain_logits: bool  #: the output is the logits themselves, not yet probabilities
    outputs: Mapping[str, str]  #: role -> graph output; `MEAN` among them
    threshold: Mapping[str, float] | None
    detection: DetectionRecord | None = None  #: of a detector: where its boxes and class scores lie

    def classes_last(self, values: Array) -> Array:
        """(n, places, classes) of an answer that has classes."""
        return features_last(values, self.axis)

    def places(self, values: Array) -> tuple[int, ...]:
        """The trailing shape of an answer, without its classes."""
        shape = values.shape[1:]
        return shape if self.axis is None else (*shape[: self.axis - 1], *shape[self.axis :])

    def source_probs(self, values: Array) -> Array:
        """Probabilities (…, classes) of the source by itself; no variance has a part in them."""
        values = values.astype(np.float64)
        special = needed("scipy.special")
        if self.link == "sigmoid":
            return special.expit(values) if self.plain_logits else values
        if not self.plain_logits and not (values < 0).any():
            return values
        probs: Array = special.softmax(values, axis=-1)  # of log-probabilities these are the probabilities
        return probs


def features_last(values: Array, axis: int | None) -> Array:
    """(n, places, features) of an answer with features along an axis; None where each place is one number."""
    if axis is None:
        return values.reshape(len(values), -1, 1)
    moved = np.moveaxis(values, axis, -1)
    return moved.reshape(len(moved), -1, moved.shape[-1])


@dataclass(frozen=True)
class ConvertedFile:
    """A converted file, open, and the one of its outputs that is looked at."""

    file: str
    session: ort.InferenceSession = field(repr=False)
    inputs: tuple[InputSpec, ...]
    answered: Answered
    provenance: Mapping[str, Any] = field(repr=False)
    remembered: Remembered = field(
        default_factory=Remembered
    )  #: how data became inputs when it was calibrated

    @property
    def head(self) -> Mapping[str, Any]:
        """What the record says of the output."""
        head: Mapping[str, Any] = self.provenance["heads"][self.answered.output]
        return head

    def batches(self, data: Feeding) -> Iterator[tuple[int, dict[str, Array], dict[str, Array]]]:
        """First row, inputs by name and answers by role, batch after batch."""
        roles, start = self.answered.outputs, 0
        for batch in data.batches():
            found = dict(zip(roles, run_batch(self.session, list(roles.values()), batch)))
            rows = row_count(batch, [found[MEAN]])
            for role, array in found.items():
                if array.ndim == 0 or len(array) != rows:
                    raise UserError(
                        f"output {roles[role]!r} does not have one row per sample", "evaluate it from Python"
                    )
            axis, rank = self.answered.axis, found[MEAN].ndim
            if axis is not None and not -rank <= axis < rank:
                raise damaged(f"heads.{self.answered.output}.axis is {axis}, and the output has {rank} axes")
            yield start, batch, found
            start += rows

    def open_data(self, data: Any, preparation: Preparation, batch_size: int | None = None) -> Feeding:
        opened = open_data(data, self.inputs, preparation, batch_size, calibrated=self.remembered)
        return feeding(self.session, opened)

    def require_matching(self, labels: Array, data: Feeding, seen: int | None = None) -> None:
        """Labels fit the rows, also those that a fixed batch size leaves out at the end.

        Before the run, and after it with the number of rows `seen`.
        """
        if seen is None or data.rows is not None:
            require_rows(labels, data.rows, data.description)
        if seen is None or seen == len(labels):
            return
        sizes = {spec.shape[0] for spec in self.inputs if spec.shape and fixed(spec.shape[0])}
        steady = all(spec.shape and all(map(fixed, spec.shape[1:])) for spec in self.inputs)
        # Rows of several shapes may be left out anywhere, and labels would then slip.
        if not sizes or not steady or not 0 <= len(labels) - seen < max(sizes):
            raise UserError(
                f"{seen} of {len(labels)} labelled rows fill batches of the model",
                f"give a multiple of {max(sizes)} rows" if sizes else "label i belongs to row i of the data",
            )


def open_converted(
    model: str | os.PathLike[str] | onnx.ModelProto, output: str | None = None
) -> ConvertedFile:
    """Open a converted file and choose the output to look at: the named one, else the only one with a task."""
    session = open_model(model)
    file = "a model in memory" if isinstance(model, onnx.ModelProto) else str(Path(model))
    record = read_record(session)
    if record is None:
        raise UserError(f"{file} was not converted by gapa-onnx", f"gapa-onnx convert {file} --calib PATH")
    heads = record.heads
    useful = [name for name, head in heads.items() if _is_judged(head)]
    if output is not None and output not in heads:
        present = ", ".join(heads) or "none"
        raise UserError(f"{file} has no output {output!r} with a head; it has {present}", _CONVERT_AGAIN)
    if not useful or (output is not None and output not in useful):
        named = f" for output {output!r}" if output else ""
        raise UserError(
            f"{file} has no task{named}, so there is nothing to compare labels with", _CONVERT_AGAIN
        )
    if output is None and len(useful) > 1:
        raise UserError(
            f"{file} has several outputs with a task: {', '.join(useful)}",
            f"choose one: `output={useful[0]!r}`",
        )
    chosen = output or useful[0]
    return ConvertedFile(
        file,
        session,
        tuple(input_specs(session)),
        _answered(chosen, heads[chosen], session),
        record.as_json(),
        remembered(record, session.get_modelmeta().custom_metadata_map),
    )


def _is_judged(head: HeadRecord) -> bool:
    return head.task != "none" or head.score_only


def _answered(output: str, head: HeadRecord, session: ort.InferenceSession) -> Answered:
    require_outputs({output: head}, {value.name for value in session.get_outputs()})
    wanted = {"regression": _NUMBER_ROLES, "none": _NUMBER_ROLES, "detection": _BOX_ROLES}.get(
        head.task, _CLASS_ROLES
    )
    roles = {role: name for role, name in head.outputs.items() if role in wanted}
    # Of a file with a score only, labels and maps are not judged.
    own, axis = {MEAN: roles["score"] if head.score_only else output}, head.axis
    if head.task == "detection":
        if head.detection is None:
            raise damaged(f"heads.{output}.detection is missing")
        own, axis = {MEAN: head.detection.classes, BOXES: head.detection.boxes}, head.detection.class_axis
    known = {}
    if head.score is not None:
        # Where p-values rank another number than the score, its line is no line of the score.
        own_line = head.score.ranked == head.outputs.get("score")
        drawn = {"quantile": head.score.quantile, "threshold": head.score.threshold if own_line else None}
        known = {name: value for name, value in drawn.items() if value is not None}
    return Answered(
        output,
        head.task,
        head.link,
        axis,
        head.logits == own[MEAN],
        {**own, **roles},
        known or None,
        head.detection,
    )


def require_roles(answered: Answered, roles: Sequence[str]) -> None:
    """Outputs without which there is nothing to evaluate."""
    for role in roles:
        if role not in answered.outputs:
            raise UserError(
                f"the file lacks the output {answered.output}_{role}, which {answered.task} is judged by",
                _CONVERT_AGAIN,
            )
