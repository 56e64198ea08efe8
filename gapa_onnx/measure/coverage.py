"""What of an output varies with the data and has no variance: parts that no site reaches, or that were cut off.

An element of an output is *uncovered* if it varies from row to row, its variance is 0 in every row, and a weight of
the model has a part in it. Not counted are

- what varies by rounding only, or so little that the square of it is no number of its type (a probability of 1e-30);
- what is not finite in some row: it has no error bar;
- what no weight has a part in: an input that is passed on is as certain as it was fed;
- a probability behind Softmax or Sigmoid that is 0 or 1 in every row, to the last bit: its slope is no number;
- a state without a variance, which is fed again at the next call and is no answer: the record names it.

An activation that is flat in some rows (Relu, Sigmoid) has no variance there and some where it is not flat, and what is
the same in every row needs none: neither is uncovered.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gapa_onnx.arrays import Array
from gapa_onnx.measure.agreement import Batch, Check, run
from gapa_onnx.model.caches import names_told
from gapa_onnx.model.protos import duplicate
from gapa_onnx.model.splice import reads
from gapa_onnx.model.weights import Writer, array_of, is_outside
from gapa_onnx.record import HeadRecord, Record

NAME = "every part that varies has a variance"
ROUNDING = 16  # units in the last place that a sum may move by without anything having changed
MOST_RANGES = 4  # named of one axis
CHANGE = 1.01  # every weight so many times, to see what depends on some


@dataclass(frozen=True)
class Coverage(Check):
    """The check that variance reaches all that varies; also what it does not reach."""

    uncovered: Mapping[str, str] = field(default_factory=dict)  #: output -> which part of it, in words


@dataclass(frozen=True)
class Part:
    """Elements of an output that vary and have no variance."""

    mask: Array  #: bool, of the output without its rows
    varies: Array  #: bool, the elements that vary at all
    rows_axis: int | None  #: of the output; None where it has no axis for rows

    def text(self, class_axis: int | None = None) -> str:
        """Where they are along the axis that tells best, and how much of the output they are."""
        share = f"{100 * self.mask.mean():.3g}%"
        if (self.mask == self.varies).all():
            return "all of it" if self.mask.all() else f"all that varies of it ({share})"
        axis = max(range(self.mask.ndim), key=self._tells)
        others = tuple(other for other in range(self.mask.ndim) if other != axis)
        concerned: Array = np.asarray(self.mask.any(axis=others))
        whole = np.asarray((self.mask | ~self.varies).all(axis=others))[concerned].all()
        number = axis + (self.rows_axis is not None and self.rows_axis <= axis)
        kind = "classes" if number == class_axis else "elements"
        where = f"{kind} {_ranges(np.flatnonzero(concerned))} of {len(concerned)} on axis {number}"
        return f"{where}{'' if whole else ', in part'} ({share})"

    def _tells(self, axis: int) -> float:
        """How much better a slice along the axis is known to be uncovered or not than if slices were alike."""
        others = tuple(other for other in range(self.mask.ndim) if other != axis)
        varying = self.varies.sum(axis=others)
        shares = self.mask.sum(axis=others)[varying > 0] / varying[varying > 0]
        return float(shares.var())


def find_uncovered(mean: Array, var: Array | None, reached: Array | None = None) -> Array:
    """Which elements are uncovered, of means and variances (rows, …): bool of the shape without rows.

    `var` is None where there is none at all. `reached` has the elements that weights have a part in; all, where it
    is not given.
    """
    zero = np.ones(mean.shape[1:], bool) if var is None else (var == 0).all(axis=0)
    found: Array = zero & varying(mean) & (True if reached is None else reached)
    return found


def varying(mean: Array) -> Array:
    """Which elements differ from row to row by more than rounding: bool of the shape without rows."""
    if len(mean) < 2:
        return np.zeros(mean.shape[1:], bool)
    limits = np.finfo(mean.dtype)
    high, low = (bound.astype(np.float64) for bound in (mean.max(axis=0), mean.min(axis=0)))
    with np.errstate(invalid="ignore", over="ignore"):  # of what is not finite, and is not counted
        spread = high - low
        largest = np.maximum(np.abs(high), np.abs(low))
        beyond = (spread > ROUNDING * float(limits.eps) * largest) & (spread**2 > float(limits.tiny))
    found: Array = beyond & np.isfinite(spread)
    return found


def coverage(
    source: onnx.ModelProto,
    record: Record,
    batches: Sequence[Batch],
    answers: Sequence[Batch],
    *,
    allowed: bool = False,
) -> Coverage:
    """The check on the answers of a converted model to some batches; `allowed` lets uncovered parts pass."""
    heads = record.heads
    found: dict[str, str] = {}
    rows: dict[str, int] = {}
    changed = functools.cache(lambda: _changed_answers(source, batches))
    for output, head in heads.items():
        if head.detection is not None or head.of_tokens:
            text, rows[output] = _uncovered_few(output, head, answers)
            found |= {output: text} if text else {}
    for output in _judged_outputs(source, record):
        name = heads[output].outputs.get("var") if output in heads else None
        table = _Rows.of(batches, [answer[output] for answer in answers])
        if table is None:
            continue
        mean, var = table.joined(output, answers), table.joined(name, answers) if name else None
        rows[output] = len(mean)
        if find_uncovered(mean, var).any():
            other = table.joined(output, changed())
            moved = (mean != other).any(axis=0) if other.shape == mean.shape else None
            reached = _unsaturated(heads.get(output), output, mean) & (True if moved is None else moved)
            part = Part(find_uncovered(mean, var, reached), varying(mean), table.axis)
            if part.mask.any():
                found[output] = part.text(heads[output].axis if output in heads else None)
    return _judged(source, record, found, rows, allowed)


def _judged_outputs(source: onnx.ModelProto, record: Record) -> list[str]:
    """The outputs that are judged element by element: neither states, nor what candidates speak for, nor those whose
    head says that there is a score only, and none where that is so of all heads."""
    alone = {output for output, head in record.heads.items() if head.score_only}
    if alone and len(alone) == len(record.heads):
        return []
    spoken_for = {
        name
        for output, head in record.heads.items()
        if head.detection is not None and "var" not in head.outputs
        for name in (output, head.detection.boxes, head.detection.classes)
    }
    names = (value.name for value in source.graph.output)
    leading = {output for output, head in record.heads.items() if head.of_tokens}
    left_out = {*spoken_for, *record.states, *alone, *leading}
    return [name for name in names if name not in left_out]


def _uncovered_few(output: str, head: HeadRecord, answers: Sequence[Batch]) -> tuple[str, int]:
    """The same of a head that answers for candidates or leading tokens only, and how many rows that is by."""
    return (
        _uncovered_tokens(output, head, answers) if head.of_tokens else _uncovered_candidates(head, answers)
    )


def _uncovered_tokens(output: str, head: HeadRecord, answers: Sequence[Batch]) -> tuple[str, int]:
    """Which tokens lead somewhere, vary and have no variance wherever they lead, in words; and how many rows there are."""
    bare: set[int] = set()
    covered: set[int] = set()
    logits = [np.moveaxis(answer[output], head.axis or 0, -1) for answer in answers]
    table = np.concatenate([np.reshape(part, (-1, part.shape[-1])) for part in logits])
    for answer in answers:
        tokens, var = answer[head.outputs["tokens"]], answer[head.outputs["token_var"]]
        bare.update(np.unique(tokens[var == 0]).tolist())
        covered.update(np.unique(tokens[var != 0]).tolist())
    left = np.array(sorted(bare - covered), np.int64)
    left = left[varying(table[:, left])]
    text = f"tokens {_ranges(left)} of those that lead somewhere" if len(left) else ""
    return text, sum(len(part) for part in logits)


def _uncovered_candidates(head: HeadRecord, answers: Sequence[Batch]) -> tuple[str, int]:
    """Which box numbers and classes have no variance at any candidate, in words; and how many candidates there are."""
    parts, count = [], 0
    for role, what in (("box_var", "box numbers"), ("class_var", "classes")):
        var = np.concatenate(
            [
                answer[head.outputs[role]].reshape(-1, answer[head.outputs[role]].shape[-1])
                for answer in answers
            ]
        )
        zero = (var == 0).all(axis=0)
        count = len(var)
        if count and zero.any():
            share = 100 * float(zero.mean())
            parts.append(
                f"{what} {_ranges(np.flatnonzero(zero))} of {len(zero)} of every candidate ({share:.3g}%)"
            )
    return "; ".join(parts), count


def _unsaturated(head: HeadRecord | None, output: str, mean: Array) -> Array:
    """Which elements of (rows, …) have a slope behind their link in some row: bool of the shape without rows."""
    if head is None or head.link == "identity" or head.logits == output or (mean < 0).any():
        return np.ones(mean.shape[1:], bool)
    limits = np.finfo(mean.dtype)
    found: Array = ((mean < 1 - 2 * limits.eps) & (mean**2 > limits.tiny)).any(axis=0)
    return found


def _judged(
    source: onnx.ModelProto,
    record: Record,
    found: Mapping[str, str],
    rows: Mapping[str, int],
    allowed: bool,
) -> Coverage:
    alone = [f"{output}: {head.reason}" for output, head in record.heads.items() if head.score_only]
    if len(alone) == len(record.heads) > 0:
        return Coverage(NAME, True, f"no output has one: {'; '.join(alone)}", {})
    most = max(rows.values(), default=0)
    if most < 2:
        return Coverage(NAME, True, "nothing could be judged: nothing varies in a single row", {})
    if not found:
        told = names_told(record.states, record.states)
        states = f"; {told}: fed again, not judged" if record.states else ""
        return Coverage(NAME, True, f"{', '.join(rows)} over {most} rows{states}", {})
    cut = _behind(source, {entry.node for entry in record.cuts})
    parts = [f"{output}: {text}{' (cut)' if output in cut else ''}" for output, text in found.items()]
    passed = allowed or all(output in cut for output in found)
    hint = "allowed" if passed else "`allow_uncovered` lets it pass"
    return Coverage(NAME, passed, f"no variance over {most} rows of {'; '.join(parts)}; {hint}", dict(found))


# --------------------------------------------------------------------- rows


@dataclass(frozen=True)
class _Rows:
    """How the answers of several batches are put one below the other: rows first, then what all have alike."""

    axis: int | None  #: of the rows; None where an answer is one row as a whole
    uneven: tuple[int, ...]  #: axes behind the rows that differ in size; their positions count as rows

    @classmethod
    def of(cls, batches: Sequence[Batch], answers: Sequence[Any]) -> _Rows | None:
        """None for what is no array of floats in all batches, or of different ranks."""
        arrays = [_as_array(answer) for answer in answers]
        found = [array for array in arrays if array is not None]
        if len(found) < len(arrays) or len({array.ndim for array in found}) != 1:
            return None
        axes = {_rows_axis(array, batch) for array, batch in zip(found, batches)}
        axis = axes.pop() if len(axes) == 1 else None
        shapes = [_rows_first(array, axis).shape[1:] for array in found]
        uneven = tuple(i for i in range(len(shapes[0])) if len({shape[i] for shape in shapes}) > 1)
        return cls(axis, uneven)

    def joined(self, name: str, answers: Sequence[Batch]) -> Array:
        """A tensor of all answers as (rows, …)."""
        parts = []
        for answer in answers:
            array = _as_array(answer[name])
            if array is None:
                raise ValueError(f"{name} is no array of numbers")
            first = _rows_first(array, self.axis)
            moved = np.moveaxis(first, [1 + i for i in self.uneven], range(1, 1 + len(self.uneven)))
            inner = 1 + len(self.uneven)
            parts.append(moved.reshape(math.prod(moved.shape[:inner]), *moved.shape[inner:]))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _as_array(answer: Any) -> Array | None:
    """An answer as floats: a tensor, a list of alike ones, or of maps; None for all else."""
    if isinstance(answer, list) and answer and all(isinstance(entry, dict) for entry in answer):
        answer = np.array([list(entry.values()) for entry in answer])
    elif isinstance(answer, list) and len({np.shape(entry) for entry in answer}) == 1 and np.ndim(answer[0]):
        answer = np.stack(answer, axis=1)
    if not isinstance(answer, np.ndarray) or not np.issubdtype(answer.dtype, np.floating):
        return None
    return answer


def _rows_axis(array: Array, batch: Batch) -> int | None:
    """The first axis that is as long as the batch has rows."""
    rows = max((fed.shape[0] for fed in batch.values() if fed.ndim), default=1)
    return next((axis for axis, size in enumerate(array.shape) if size == rows), None)


def _rows_first(array: Array, axis: int | None) -> Array:
    return array[None] if axis is None else np.moveaxis(array, axis, 0)


def _ranges(indices: Iterable[int]) -> str:
    """4, 5, 6, 9 as "4..6, 9"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    named = [f"{a}" if a == b else f"{a}..{b}" for a, b in runs[:MOST_RANGES]]
    return ", ".join(named) + (", …" if len(runs) > MOST_RANGES else "")


# ------------------------------------------------------------------ the source


def _changed_answers(source: onnx.ModelProto, batches: Sequence[Batch]) -> list[Batch]:
    """What the source would answer if every weight were a little larger: what does not change depends on none."""
    with tempfile.TemporaryDirectory(prefix="gapa-onnx-") as folder:
        path = Path(os.path.realpath(folder), "changed.weights")
        with open(path, "wb") as file:
            model = _with_other_weights(source, Writer(file, str(path)))
        return run(model, batches, level="all")


def _with_other_weights(source: onnx.ModelProto, writer: Writer) -> onnx.ModelProto:
    """The source with other weights; those outside it are written."""

    def other(tensor: onnx.TensorProto) -> onnx.TensorProto:
        return writer.put(_changed(tensor)) if is_outside(tensor) else _changed(tensor)

    model = duplicate(source, other)
    for attribute in _attributes(model):
        if attribute.HasField("t"):
            attribute.t.CopyFrom(_changed(attribute.t))
        if attribute.name == "coefficients":  # of the linear models of ai.onnx.ml
            attribute.floats[:] = [CHANGE * number for number in attribute.floats]
        for inner in (attribute.g, *attribute.graphs):
            for tensor in inner.initializer:
                tensor.CopyFrom(_changed(tensor))
    return model


def _attributes(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """Of all nodes, also those of functions and inner graphs."""
    pending = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while pending:
        for attribute in pending.pop().attribute:
            yield attribute
            pending += (node for inner in (attribute.g, *attribute.graphs) for node in inner.node)


def _changed(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """A matrix of floats or of codes is a weight; a number or a vector may be a size or an axis, and stays."""
    kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    if len(tensor.dims) < 2 or not (np.issubdtype(kind, np.floating) or kind in (np.int8, np.uint8)):
        return tensor
    array = array_of(tensor)
    changed = array ^ 1 if kind.kind in "iu" else (array * CHANGE).astype(array.dtype)
    return onnx.numpy_helper.from_array(changed, tensor.name)


def _behind(source: onnx.ModelProto, nodes: AbstractSet[str]) -> set[str]:
    """The outputs that depend on some nodes; all of them, where a node is not in the graph by this name."""
    outputs = {value.name for value in source.graph.output}
    if not nodes:
        return set()
    named = [node for node in source.graph.node if node.name in nodes or not nodes.isdisjoint(node.output)]
    if len(named) < len(nodes):
        return outputs
    tensors = {name for node in named for name in node.output}
    size = 0
    while len(tensors) > size:  # once, and once more, where the nodes are in order
        size = len(tensors)
        for node in source.graph.node:
            if not tensors.isdisjoint(reads(node)):
                tensors.update(node.output)
    return outputs & tensors
