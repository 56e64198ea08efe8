"""Reductions, pooling and softmax: each output element gathers several inputs."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.registry import Accuracy, Gathered, Share, deterministic, rule
from gapa_onnx.variance.rules.view import NodeView, Operand

EXACT, FIRST_ORDER = Accuracy.EXACT, Accuracy.FIRST_ORDER


def _same_node(node: NodeView, value: Value) -> Value:
    """The node on another tensor, with its axes where they are an input."""
    return node.again(value, *(operand.raw for operand in node.inputs[1:] if operand.present))


@rule("ReduceSum", accuracy=EXACT)
def reduce_sum(node: NodeView) -> Value:
    """Σ_j v_j"""
    return _same_node(node, node.inputs[0].variance)


@rule("ReduceMean", "GlobalAveragePool", accuracy=EXACT)
def mean(node: NodeView) -> Value:
    """Σ_j v_j / n²"""
    var, count = node.inputs[0].variance, node.graph.count
    average = _same_node(node, var)
    # Variances are counted: another reader of the means would keep transposes from moving past them.
    return average / (count(var, var.dtype) / count(average, var.dtype))


def _reduced(node: NodeView, op_type: str, value: Value, **changed: int) -> Value:
    """Another reduction over the axes of the node."""
    attrs = {name: node.attr(name) for name in ("keepdims", "noop_with_empty_axes")} | changed
    attrs = {name: setting for name, setting in attrs.items() if setting is not None}
    axes = node.input(1)
    if axes is not None:
        return node.graph.emit(op_type, value, axes.raw, **attrs)
    if node.attr("axes") is not None:
        return node.graph.reduce(op_type, value, node.attr("axes"), bool(attrs.get("keepdims", 1)))
    return node.graph.emit(op_type, value, **attrs)


def _total(node: NodeView, value: Value, **changed: int) -> Value:
    return _reduced(node, "ReduceSum", value, **changed)


def _seen_as_gathered(node: NodeView) -> Gathered:
    mean = node.inputs[0].mean
    return Gathered(
        mean, lambda: _reduced(node, node.op_type, mean, keepdims=1), lambda v: _total(node, v, keepdims=1)
    )


def reducing(op_type: str, share: Share, formula: str) -> None:
    """Delta method: Σ_j share_j² v_j, where share_j is ∂y/∂x_j."""

    @rule(op_type, accuracy=FIRST_ORDER, share=share, formula=formula)
    def apply(node: NodeView) -> Value:
        return _total(node, share(_seen_as_gathered(node)).squared * node.inputs[0].variance)


reducing("ReduceSumSquare", lambda all: 2 * all.x, formula="4 Σ_j x_j² v_j")
# exp(x - y) is the softmax.
reducing(
    "ReduceLogSumExp",
    lambda all: (all.x - all.y).exp(),
    formula="Σ_j p_j² v_j with p = exp(x - y), the softmax",
)


@rule("ReduceLogSum", accuracy=FIRST_ORDER, share=lambda all: all.x.graph.expand((-all.y).exp(), like=all.x))
def reduce_log_sum(node: NodeView) -> Value:
    """Σ_j v_j / (Σ_j x_j)²"""
    x = node.inputs[0]
    return _total(node, x.variance) / _total(node, x.mean).squared


@rule("ReduceProd", accuracy=FIRST_ORDER)
def reduce_prod(node: NodeView) -> Value:
    """Σ_j (Π_{k≠j} x_k)² v_j"""
    x = node.inputs[0]
    zero, nonzero = _zeros_apart(x.mean)
    others = _reduced(node, "ReduceProd", nonzero, keepdims=1) / nonzero
    alone = _total(node, zero, keepdims=1) - zero < 0.5  # none of the others is 0
    return _total(node, (alone * others).squared * x.variance)


def _zeros_apart(x: Value) -> tuple[Value, Value]:
    """1 where x is 0, and x with 1 in these places, so that products of the others come by division."""
    zero = 1 - (x > 0) - (x < 0)
    return zero, x + zero


@rule("CumSum", accuracy=EXACT)
def cumulative_sum(node: NodeView) -> Value:
    """Σ_j v_j over the elements summed"""
    return _same_node(node, node.inputs[0].variance)


@rule("CumProd", accuracy=FIRST_ORDER)
def cumulative_product(node: NodeView) -> Value:
    """Σ_j (Π_{k≠j} x_k)² v_j over the elements multiplied"""
    x, axis = node.inputs

    def total(value: Value) -> Value:
        return node.graph.emit("CumSum", value, axis.raw, **node.node.attrs)

    zero, nonzero = _zeros_apart(x.mean)
    zeros = total(zero)
    # One zero among the elements: only its own slope is left. Two: none.
    without = (zeros < 0.5) * total(x.variance / nonzero.squared)
    with_one = (zeros > 0.5) * (zeros < 1.5) * total(zero * x.variance)
    return _same_node(node, nonzero).squared * (without + with_one)


@rule("ReduceL1", accuracy=FIRST_ORDER, share=lambda all: (all.x > 0) - (all.x < 0))
@rule("ReduceL2", accuracy=FIRST_ORDER, share=lambda all: all.x / (all.y + (all.y <= 0)))  # 0 has no slope
def reduce_norm(node: NodeView) -> Value:
    """Σ_j (|x_j| / y)^(2p-2) v_j with the expected squares x² + v"""
    return _norm(node.inputs[0], int(node.op_type[-1]), lambda value: _total(node, value))


@rule("LpPool", "GlobalLpPool", accuracy=FIRST_ORDER)
def lp_pool(node: NodeView) -> Value:
    """Σ_j (|x_j| / y)^(2p-2) v_j with the expected squares x² + v"""
    # What is summed is not negative: its norm with p = 1 is its sum.
    return _norm(node.inputs[0], node.attr("p", 2), lambda value: node.again(value, p=1))


def _norm(x: Operand, p: int, total: Callable[[Value], Value]) -> Value:
    """Σ_j (|x_j| / y)^(2p-2) v_j, the variance of y = (Σ_j |x_j|^p)^(1/p).

    |x| is √(x² + v): the weights are those of the first order where v is small, and at x = 0, where
    there is no slope, the variance becomes a mean of those that come in.
    """
    if p == 1:
        return total(x.variance)
    square = x.mean.squared + x.variance

    def power(value: Value, exponent: float) -> Value:
        if exponent == 1:
            return value
        return value.graph.emit("Pow", value, value.graph.constant(np.asarray(exponent, value.dtype)))

    norm = total(power(square, p / 2))  # y^p
    norm = norm + (norm <= 0)  # certain zeros only: 0 / 1
    return total(power(square, p - 1) * x.variance) / power(norm, (2 * p - 2) / p)


@rule("AveragePool", accuracy=EXACT)
def average_pool(node: NodeView) -> Value:
    """Σ_j v_j / n², with n the number of elements that the window averages over."""
    x = node.inputs[0]
    window: int = prod(node.attr("kernel_shape"))
    pooled = node.again(x.var)
    ones = node.graph.zeros(x.mean) + 1
    padding = node.attr("auto_pad", "NOTSET")
    if node.attr("ceil_mode", 0) and padding in ("NOTSET", "VALID"):
        real = window * node.again(ones, ceil_mode=0, count_include_pad=1, **_pads_for_last_windows(node))
        # What a last window divides by if padding counts depends on the runtime: ones tell it.
        return pooled * node.again(ones) / real if node.attr("count_include_pad", 0) else pooled / real
    padded = padding not in ("NOTSET", "VALID") or any(node.attr("pads", ()))
    if not padded or node.attr("count_include_pad", 0):
        return pooled / window
    # Averaging ones with the padding counted gives the share of the window that is real.
    share = node.again(ones, count_include_pad=1)
    return pooled / (window * share)


def _pads_for_last_windows(node: NodeView) -> dict[str, list[int] | None]:
    """Pads with which ceil_mode=0 has the windows of ceil_mode=1: up to a stride more at the end, as
    long as the last window still starts before the padding."""
    kernel = node.attr("kernel_shape")
    rank = len(kernel)
    strides, dilations = node.attr("strides", [1] * rank), node.attr("dilations", [1] * rank)
    none = [0] * (2 * rank)
    pads = none if node.attr("auto_pad", "NOTSET") == "VALID" else node.attr("pads", none)
    ends = [
        min(pad + stride - 1, dilation * (size - 1))
        for pad, stride, dilation, size in zip(pads[rank:], strides, dilations, kernel)
    ]
    return {"pads": [*pads[:rank], *ends], "auto_pad": None}


@rule("MaxPool", accuracy=FIRST_ORDER)
def max_pool(node: NodeView) -> tuple[Value | None, ...]:
    """The variance of the element that the maximum came from."""
    if node.opset < 8:
        raise node.refuse("MaxPool tells which element it took only from opset 8 on")
    x = node.inputs[0]
    # Row-major indices into the whole tensor, whatever order the source asks for.
    _, where = node.again_several(x.raw, outputs=2, dtypes=(x.raw.dtype, np.dtype(np.int64)), storage_order=0)
    flat = node.graph.emit("Reshape", x.var, node.graph.ints(-1))
    return (node.graph.emit("Gather", flat, where, axis=0), *[None] * (len(node.outputs) - 1))


def _largest(x: Value, y: Value) -> Value:
    return x >= y


def _smallest(x: Value, y: Value) -> Value:
    return x <= y


def _tied(chosen: Callable[[Value, Value], Value]) -> Share:
    """1 of the element that an extremum came from; those that tie share it."""

    def share(all: Gathered) -> Value:
        mask = chosen(all.x, all.y)
        return mask / all.total(mask)

    return share


@rule("GlobalMaxPool", accuracy=FIRST_ORDER, share=_tied(_largest))
def global_max_pool(node: NodeView) -> Value:
    """The variance of the element that the maximum came from; ties share it."""
    x, reduce = node.inputs[0], node.graph.reduce
    chosen = _largest(x.mean, node.output.mean)
    if x.shape is None:  # the mean of those chosen over their share: no axis is named
        average, share = (node.graph.emit("GlobalAveragePool", v) for v in (chosen * x.variance, chosen))
        return average / share
    axes = list(range(2, x.rank))
    return reduce("ReduceSum", chosen * x.variance, axes) / reduce("ReduceSum", chosen, axes)


@rule("ReduceMax", accuracy=FIRST_ORDER, share=_tied(_largest))
@rule("ReduceMin", accuracy=FIRST_ORDER, share=_tied(_smallest))
def reduce_extremum(node: NodeView) -> Value:
    """The variance of the element that the extremum came from; ties share it."""
    x = node.inputs[0]
    extremum = _reduced(node, node.op_type, x.mean, keepdims=1)
    chosen = (_largest if node.op_type == "ReduceMax" else _smallest)(x.mean, extremum)
    return _total(node, chosen * x.variance) / _total(node, chosen)


def constant_axes(node: NodeView) -> list[int]:
    """The axes of a reduction, as they are written; empty where nothing is reduced."""
    axes, given = node.attr("axes"), node.input(1)
    if given is not None:
        axes = given.constant
        if axes is None:
            raise node.refuse("its axes are not constant")
    if axes is None or len(axes) == 0:
        axes = [] if node.attr("noop_with_empty_axes", 0) else range(node.inputs[0].rank)
    return [int(axis) for axis in axes]


def _normalised_sum(node: NodeView, terms: Value) -> Value:
    """The sum over the elements that are normalised together."""
    if node.opset >= 13:
        return node.graph.reduce("ReduceSum", terms, [node.attr("axis", -1)])
    # Before opset 13 the input is seen as a matrix: all axes from `axis` on are one.
    known = [operand.rank for operand in (node.output, node.inputs[0]) if operand.shape is not None]
    if known:
        rank = known[0]
        return node.graph.reduce("ReduceSum", terms, list(range(node.attr("axis", 1) % rank, rank)))
    rows = node.graph.emit("Flatten", terms, axis=node.attr("axis", 1))
    total = node.graph.reduce("ReduceSum", rows, [1])
    spread = node.graph.expand(total, like=rows)
    # Not the shape of the output: one that a file declares wrongly would be taken for a constant.
    return node.graph.emit("Reshape", spread, node.graph.shape(node.inputs[0].raw))


def softmax_spread(p: Value, v: Value, total: Callable[[Value], Value]) -> Value:
    """(1 - 2 p_i) v_i + Σ_j p_j² v_j = (1 - p_i)² v_i + Σ_{j≠i} p_j² v_j, the variance of x_i - pᵀx.

    The first form cancels where p_i is near 1. At most one element is above 1/2: for that one the
    second form is used, with the sum of the others for 1 - p_i. `total` sums over what p sums to 1.
    """
    large = p > 0.5
    small = 1 - large
    of_large = total(small * p).squared * v
    of_small = (1 - 2 * p) * v + total(large * p * p * v)
    return large * of_large + small * of_small + total(small * p * p * v)


def _against_mean(node: NodeView, p: Value) -> Value:
    return softmax_spread(p, node.inputs[0].variance, lambda terms: _normalised_sum(node, terms))


@rule("Softmax", accuracy=FIRST_ORDER)
def softmax(node: NodeView) -> Value:
    """J = diag(p) - p pᵀ, so p_i² ((1 - 2 p_i) v_i + Σ_j p_j² v_j)."""
    p = node.output.mean
    return p * p * _against_mean(node, p)


@rule("LogSoftmax", accuracy=FIRST_ORDER)
def log_softmax(node: NodeView) -> Value:
    """J = I - 1 pᵀ, so (1 - 2 p_i) v_i + Σ_j p_j² v_j."""
    return _against_mean(node, node.output.mean.exp())


deterministic("it only tells which element is largest", "Hardmax")
