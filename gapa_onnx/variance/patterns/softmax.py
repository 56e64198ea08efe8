"""Softmax that is spelled out, its logarithm, division by a sum, and attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_graphsurgeon as gs

from gapa_onnx.variance.patterns.composite import PATTERN_DOMAIN, NearMiss, Output, Spelled, pattern
from gapa_onnx.variance.patterns.formula import (
    BROADCASTING,
    close,
    floored,
    is_constant,
    made_by,
    product,
    same,
    through,
)
from gapa_onnx.variance.patterns.reductions import Reduced, reduced


@pattern("Mul", "Div")
def softmax(y: Output) -> Spelled | NearMiss | None:
    """eˣ / Σeˣ, also of x less its maximum."""
    found = y.factors
    if len(found.over) != 1 or len(found.under) != 1 or found.scales or not close(found.coefficient, 1):
        return None
    exponential, total = made_by(found.over[0], "Exp"), _sum(found.under[0])
    if exponential is None or total is None or not same(total.x, found.over[0]):
        return None
    x = _before_maximum(exponential.inputs[0], total.axes)
    return _along("Softmax", x, total.axes, y.opset)


@pattern("Mul", "Div")
def sum_normalisation(y: Output) -> Spelled | None:
    """x / Σx. Tried after softmax, which is this for exponentials."""
    for factor in y.factors.under:
        bare = floored(factor)
        total = reduced(bare.core)
        if total is None or total.op != "ReduceSum" or not close(total.coefficient, 1):
            continue
        total = replace(total, loose=total.loose or bare.loose)
        found = product(y.tensor, keep=total.x)
        alone = len(found.over) == len(found.under) == 1 and not found.scales and close(found.coefficient, 1)
        if alone and same(found.over[0], total.x) and total.fits(factor):
            return Spelled("SumNormalization", [total.x], {"axes": list(total.axes)}, PATTERN_DOMAIN)
    return None


def _sum(tensor: gs.Tensor) -> Reduced | None:
    total = reduced(tensor)
    if total is None or total.op != "ReduceSum" or not close(total.coefficient, 1):
        return None
    return total if total.fits(tensor) else None


def _before_maximum(tensor: gs.Tensor, axes: tuple[int, ...]) -> gs.Tensor:
    """x where the tensor is x less its maximum, which softmax does not see; else the tensor."""
    node = made_by(tensor, "Sub")
    largest = reduced(node.inputs[1]) if node is not None else None
    if node is None or largest is None or largest.op != "ReduceMax" or largest.axes != axes:
        return tensor
    fits = same(largest.x, node.inputs[0]) and largest.fits(node.inputs[1])
    return through(node.inputs[0]) if fits else tensor


def _along(op_type: str, x: gs.Tensor, axes: tuple[int, ...], opset: int) -> Spelled | NearMiss:
    """The operator over one axis. Before opset 13 it takes all axes from the given one on."""
    if len(axes) != 1:
        return NearMiss(op_type, f"its sum is over the axes {axes}; the operator has one")
    if opset < 13 and axes != (-1,):
        return NearMiss(op_type, f"before opset 13 the operator cannot take axis {axes[0]} alone")
    axis = axes[0] if x.shape is None else len(x.shape) + axes[0]
    if axis < 0 and opset < 11:  # where axes are not counted from the end
        return NearMiss(op_type, "before opset 11 it must be known how many axes there are")
    return Spelled(op_type, [x], {"axis": axis})


@pattern("Log")
def log_of_softmax(y: Output) -> Spelled | NearMiss | None:
    inner = through(y.node.inputs[0])
    node = made_by(inner, "Softmax")
    if node is not None:
        return Spelled("LogSoftmax", [node.inputs[0]], dict(node.attrs))
    found = softmax(Output(inner, y.opset))
    return Spelled("LogSoftmax", found.inputs, found.attrs) if isinstance(found, Spelled) else found


@pattern("Sub")
def log_softmax(y: Output) -> Spelled | NearMiss | None:
    """x - ln Σeˣ, also of x less its maximum."""
    z, subtracted = y.node.inputs
    total = _log_sum_exp(subtracted)
    if total is None or not same(total.x, z) or not total.fits(subtracted):
        return None
    return _along("LogSoftmax", _before_maximum(z, total.axes), total.axes, y.opset)


def _log_sum_exp(tensor: gs.Tensor) -> Reduced | None:
    total = reduced(tensor)
    if total is not None and total.op == "ReduceLogSumExp" and close(total.coefficient, 1):
        return total
    loose = False
    while (node := made_by(tensor, *BROADCASTING)) is not None:
        tensor, loose = node.inputs[0], True
    node = made_by(tensor, "Log")
    total = reduced(node.inputs[0]) if node is not None else None
    if total is None or total.op != "ReduceSum" or not close(total.coefficient, 1):
        return None
    exponential = made_by(total.x, "Exp")
    if exponential is None:
        return None
    return Reduced("ReduceLogSumExp", through(exponential.inputs[0]), total.axes, 1.0, loose or total.loose)


# ------------------------------------------------------------------------------ attention

_BETWEEN = ("Add", "Sub", "Mul", "Div", "Where", "Max", "Clip", *BROADCASTING)
"""What scales, masks and shapes the scores."""
_MOST_STEPS = 32


@pattern("MatMul")
def attention_values(y: Output) -> Spelled | None:
    """softmax(scores) V, with scores that are a product of two tensors, scaled and masked."""
    weights, values = y.node.inputs
    scores = _softmax_input(through(weights), y.opset)
    if scores is None or is_constant(values) or not any(_are_two(node) for node in _products_in(scores)):
        return None
    return Spelled("AttentionValues", [weights, values], domain=PATTERN_DOMAIN, keeps_shape=False)


def softmax_of(tensor: gs.Tensor, opset: int) -> tuple[gs.Tensor, int] | None:
    """x and the axis as it is written where a tensor is the softmax of x, also one that is spelled out."""
    node = made_by(tensor, "Softmax")
    if node is not None:
        return node.inputs[0], node.attrs.get("axis", 1 if opset < 13 else -1)
    found = softmax(Output(through(tensor), opset)) if made_by(tensor, "Mul", "Div") else None
    if not isinstance(found, Spelled) or found.inputs[0] is None:
        return None
    return found.inputs[0], found.attrs["axis"]


def _softmax_input(weights: gs.Tensor, opset: int) -> gs.Tensor | None:
    """x where the weights are a softmax of x over its last axis."""
    found = softmax_of(weights, opset)
    if found is None:
        return None
    x, axis = found
    return x if axis == -1 or x.shape is not None and axis == len(x.shape) - 1 else None


def _products_in(scores: gs.Tensor) -> Iterator[gs.Node]:
    """The matrix products that the scores are made of."""
    waiting, steps = [scores], 0
    while waiting and steps < _MOST_STEPS:
        tensor = through(waiting.pop())
        node = _fused_product(tensor) or made_by(tensor, "MatMul", "Einsum", "Gemm", *_BETWEEN)
        steps += 1
        if node is None:
            continue
        if node.op in ("MatMul", "FusedMatMul", "Einsum", "Gemm"):
            yield node
        else:
            waiting += node.inputs[:1] if node.op in BROADCASTING else node.inputs


def _fused_product(tensor: gs.Tensor) -> gs.Node | None:
    """The product with its scale, as onnxruntime's optimiser writes it."""
    node = tensor.inputs[0] if tensor.inputs else None
    return node if node is not None and (node.domain, node.op) == ("com.microsoft", "FusedMatMul") else None


def _are_two(node: gs.Node) -> bool:
    """Whether neither factor is a weight."""
    return not any(_is_weight(factor) for factor in node.inputs[:2])


def _is_weight(tensor: gs.Tensor, steps: int = 3) -> bool:
    node = made_by(tensor, "Transpose", "Mul", "Div", *BROADCASTING)
    if is_constant(tensor) or node is None or steps == 0:
        return is_constant(tensor)
    data = node.inputs[:1] if node.op in BROADCASTING else node.inputs
    return all(_is_weight(factor, steps - 1) for factor in data)
