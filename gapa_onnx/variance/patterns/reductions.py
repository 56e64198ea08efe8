"""Sums and means over axes, as the source spells them: the vocabulary of normalisations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import constant_of
from gapa_onnx.variance.patterns.formula import (
    BROADCASTING,
    RESHAPING,
    STEPS,
    close,
    floored,
    made_by,
    operand_and_scalar,
    same,
    square_of,
    through,
)

REDUCTIONS = (
    "ReduceMean",
    "ReduceSum",
    "ReduceMax",
    "ReduceSumSquare",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSumExp",
)


@dataclass(frozen=True, eq=False)
class Reduced:
    """coefficient · reduction of x over axes, perhaps broadcast to the shape of x again."""

    op: str
    x: gs.Tensor
    axes: tuple[int, ...]  #: sorted; negative
    coefficient: float = 1.0
    loose: bool = False  #: dropped its axes on the way, or was reshaped: only shapes tell whether it fits

    def fits(self, used: gs.Tensor) -> bool:
        """Whether `used`, made from this, stands beside x with its axes in their places."""
        shape, whole = used.shape, self.x.shape
        if shape is None or whole is None:
            return not self.loose
        if len(shape) != len(whole):
            return False
        reduced_axes = {axis % len(whole) for axis in self.axes}
        for axis, (size, full) in enumerate(zip(shape, whole)):
            if axis in reduced_axes and size == 1 or size == full:
                continue
            if axis in reduced_axes or isinstance(size, int) and isinstance(full, int):
                return False
        return True


def reduced(tensor: gs.Tensor) -> Reduced | None:
    """A reduction, perhaps scaled by a number, reshaped or broadcast."""
    coefficient, loose = 1.0, False
    for _ in range(STEPS):
        node = made_by(tensor, "Mul", "Div", "Max", *BROADCASTING, *REDUCTIONS)
        if node is None:
            return None
        if node.op in REDUCTIONS:
            axes = _axes(node)
            loose |= not node.attrs.get("keepdims", 1)
            if axes is None:
                return None
            return Reduced(node.op, through(node.inputs[0]), axes, coefficient, loose)
        if node.op == "Unsqueeze" and (kept := _kept(node)) is not None:
            return replace(kept, coefficient=coefficient, loose=loose)
        inner, value = next(operand_and_scalar(node), (None, 0.0))
        if node.op in BROADCASTING:
            loose |= node.op in RESHAPING
            inner = node.inputs[0]
        elif node.op == "Max":  # some exporters bound a maximum by -inf
            inner = inner if value == -math.inf else None
        elif node.op == "Mul":
            coefficient *= value
        elif inner is node.inputs[0] and value:
            coefficient /= value
        else:
            return None
        if inner is None:
            return None
        tensor = inner
    return None


def _kept(node: gs.Node) -> Reduced | None:
    """The reduction whose axes an Unsqueeze puts back where they were."""
    inner = made_by(node.inputs[0], *REDUCTIONS)
    axes = _axes(inner) if inner is not None else None
    if inner is None or axes is None or inner.attrs.get("keepdims", 1):
        return None
    if set(_written_axes(inner) or ()) != set(_written_axes(node) or ()):
        return None
    return Reduced(inner.op, through(inner.inputs[0]), axes)


def _written_axes(node: gs.Node) -> list[int] | None:
    axes = node.attrs.get("axes")
    if len(node.inputs) > 1 and node.inputs[1].name:
        axes = constant_of(through(node.inputs[1]))
    return None if axes is None else [int(axis) for axis in np.ravel(axes)]


def _axes(node: gs.Node) -> tuple[int, ...] | None:
    axes = _written_axes(node)
    if axes is None and len(node.inputs) > 1 and node.inputs[1].name:
        return None
    rank = None if node.inputs[0].shape is None else len(node.inputs[0].shape)
    if not axes:
        if not rank or node.attrs.get("noop_with_empty_axes", 0):
            return None
        return tuple(range(-rank, 0))
    if rank is None:
        return tuple(sorted(axes)) if all(axis < 0 for axis in axes) else None
    return tuple(sorted(axis % rank - rank for axis in axes))


def mean_of(tensor: gs.Tensor) -> Reduced | None:
    """The mean of x, also as a sum divided by the size of its axes."""
    found = reduced(tensor)
    return found if found and found.op in ("ReduceMean", "ReduceSum") and _is_mean(found) else None


def mean_square_of(tensor: gs.Tensor) -> Reduced | None:
    """The mean of x²."""
    found = reduced(tensor)
    if not found or found.op not in ("ReduceMean", "ReduceSum", "ReduceSumSquare") or not _is_mean(found):
        return None
    x = found.x if found.op == "ReduceSumSquare" else square_of(found.x)
    return None if x is None else replace(found, x=x)


def _is_mean(found: Reduced) -> bool:
    if found.op == "ReduceMean":
        return close(found.coefficient, 1)
    sizes = [] if found.x.shape is None else [found.x.shape[axis] for axis in found.axes]
    known = bool(sizes) and all(isinstance(size, int) for size in sizes)
    return known and close(found.coefficient * math.prod(sizes), 1)


def sum_square_of(tensor: gs.Tensor) -> Reduced | None:
    """The sum of x²."""
    found = reduced(tensor)
    if not found or found.op not in ("ReduceSum", "ReduceSumSquare") or not close(found.coefficient, 1):
        return None
    x = found.x if found.op == "ReduceSumSquare" else square_of(found.x)
    return None if x is None else replace(found, x=x)


def deviation_of(tensor: gs.Tensor) -> Reduced | None:
    """The mean of x where the tensor is x less that mean."""
    node = made_by(tensor, "Sub")
    if node is None:
        return None
    mean = mean_of(node.inputs[1])
    return mean if mean and same(mean.x, node.inputs[0]) and mean.fits(node.inputs[1]) else None


@dataclass(frozen=True, eq=False)
class MeanSquare:
    """The mean square of x, about its mean (`centred`: its variance) or about 0."""

    of: Reduced
    centred: bool
    floor: float  #: a small number that keeps it away from 0


def second_moment_of(tensor: gs.Tensor) -> MeanSquare | None:
    bare = floored(tensor)
    square = mean_square_of(bare.core)
    if square is not None:
        mean = deviation_of(square.x)
        centred = mean is not None and mean.axes == square.axes
        found = replace(square, x=mean.x) if mean is not None and centred else square
        return MeanSquare(replace(found, loose=found.loose or bare.loose), centred, bare.floor)
    node = made_by(bare.core, "Sub")  # the mean square less the squared mean
    square = mean_square_of(node.inputs[0]) if node is not None else None
    root = square_of(node.inputs[1]) if node is not None else None
    mean = mean_of(root) if root is not None else None
    if not square or not mean or not same(square.x, mean.x) or square.axes != mean.axes:
        return None
    loose = square.loose or mean.loose or bare.loose
    return MeanSquare(replace(square, loose=loose), centred=True, floor=bare.floor)
