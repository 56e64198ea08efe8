"""Means of constants under a distribution that a softmax makes, as detectors tell the sides of a box.

Node by node, the probabilities would count as independent. They sum to 1 and move together, and the variance
would come out many times too large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs

from gapa_onnx.variance.patterns.composite import PATTERN_DOMAIN, Output, Spelled, pattern
from gapa_onnx.variance.patterns.formula import STEPS, is_constant, made_by
from gapa_onnx.variance.patterns.reductions import reduced
from gapa_onnx.variance.patterns.softmax import softmax_of


@dataclass(frozen=True, eq=False)
class Distribution:
    """The softmax of x along one axis, perhaps with its axes in another order."""

    x: gs.Tensor
    axis: int  #: of x, as the source writes it
    rank: int | None
    perm: list[int] | None = None  #: None: the axes are those of x

    def lies_along(self, axis: int, rank: int | None = None) -> bool:
        """Whether the distribution is along this axis of the tensor, whose number of axes its reader may know."""
        rank = rank or self.rank
        if rank is None:
            return self.perm is None and self.axis == axis
        own = self.axis % rank
        return (own if self.perm is None else self.perm.index(own)) == axis % rank

    def spelled(self, op: str, weights: gs.Tensor, **attrs: Any) -> Spelled:
        attrs = {"axis": self.axis, **({} if self.perm is None else {"perm": self.perm}), **attrs}
        return Spelled(op, [self.x, weights], attrs, PATTERN_DOMAIN, keeps_shape=False)


def distribution(tensor: gs.Tensor, opset: int) -> Distribution | None:
    """The distribution that a tensor is; its axes may have been exchanged behind the softmax."""
    perm: list[int] | None = None
    for _ in range(STEPS):
        node = made_by(tensor, "Transpose")
        if node is None or "perm" not in node.attrs:
            break
        inner = list(node.attrs["perm"])
        perm = inner if perm is None else [inner[place] for place in perm]
        tensor = node.inputs[0]
    made = softmax_of(tensor, opset)
    if made is None:
        return None
    x, axis = made
    rank = len(perm) if perm is not None else None if x.shape is None else len(x.shape)
    last = axis == -1 or rank is not None and axis == rank - 1
    # Before opset 13 all axes from the given one on are one distribution.
    return Distribution(x, axis, rank, perm) if opset >= 13 or last else None


@pattern("Conv")
def convolved(y: Output) -> Spelled | None:
    """A convolution that reads one position at a time, over a distribution along the channels."""
    node, shape = y.node, y.node.inputs[1].shape
    if len(node.inputs) > 2 or shape is None or not is_constant(node.inputs[1]) or len(shape) < 3:
        return None
    moves = [*node.attrs.get("strides", []), node.attrs.get("group", 1), *shape[2:]]
    if any(move != 1 for move in moves) or any(node.attrs.get("pads", [])):
        return None
    found = distribution(node.inputs[0], y.opset)
    if found is None or not found.lies_along(1, len(shape)):
        return None
    if shape[0] == 1:
        return found.spelled("SoftmaxExpectation", node.inputs[1], keepdims=1)
    return found.spelled("SoftmaxMixture", node.inputs[1], by="Conv")


@pattern("MatMul", "Gemm")
def multiplied(y: Output) -> Spelled | None:
    """A vector or a matrix of constants, behind a distribution along the last axis."""
    node, weights = y.node, y.node.inputs[1]
    plain = len(node.inputs) == 2 and node.attrs.get("alpha", 1.0) == 1 and not node.attrs.get("transA", 0)
    if not plain or weights.shape is None or not is_constant(weights) or len(weights.shape) > 2:
        return None
    found = distribution(node.inputs[0], y.opset)
    if found is None or not found.lies_along(-1):
        return None
    turned = bool(node.attrs.get("transB", 0))
    if len(weights.shape) == 1 or weights.shape[0 if turned else 1] == 1:
        kept = int(len(weights.shape) == 2)
        return found.spelled("SoftmaxExpectation", weights, keepdims=kept, weights_shape=[-1])
    return found.spelled("SoftmaxMixture", weights, by="MatMul", turned=int(turned))


@pattern("ReduceSum")
def summed(y: Output) -> Spelled | None:
    """Σ p w, with a constant w that does not broadcast the distribution to more elements."""
    total = reduced(y.tensor)
    node = made_by(total.x, "Mul") if total is not None and len(total.axes) == 1 else None
    if total is None or node is None or sum(map(is_constant, node.inputs)) != 1:
        return None
    p, weights = sorted(node.inputs, key=is_constant)
    found = distribution(p, y.opset)
    if found is None or not found.lies_along(total.axes[0]) or not _same_shape(p, node.outputs[0]):
        return None
    return found.spelled("SoftmaxExpectation", weights, keepdims=y.node.attrs.get("keepdims", 1))


def _same_shape(a: gs.Tensor, b: gs.Tensor) -> bool:
    """True only where both shapes are known."""
    return a.shape is not None and b.shape is not None and list(a.shape) == list(b.shape)


@pattern("Einsum")
def einsum(y: Output) -> Spelled | None:
    """A vector of constants summed with the axis of a distribution, the other axes left in their order."""
    terms, _, result = y.node.attrs["equation"].replace(" ", "").partition("->")
    of_data, _, index = terms.partition(",")
    if len(index) != 1 or of_data.count(index) != 1 or result != of_data.replace(index, ""):
        return None
    if len(set(of_data)) < len(of_data) or "." in of_data or not is_constant(y.node.inputs[1]):
        return None
    found = distribution(y.node.inputs[0], y.opset)
    axis, rank = of_data.index(index), len(of_data)
    if found is None or not found.lies_along(axis, rank):
        return None
    column = [-1, *[1] * (rank - 1 - axis)]
    return found.spelled("SoftmaxExpectation", y.node.inputs[1], keepdims=0, weights_shape=column)
