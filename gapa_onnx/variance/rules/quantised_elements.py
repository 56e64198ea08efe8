"""Quantised operators without weights: sums, products, activations, pooling, moving. See `quantised`.

The output is in steps of its own scale s_y, so that each slope is multiplied by s_x / s_y.
"""

from __future__ import annotations

from collections.abc import Callable

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.quantised import (
    MICROSOFT,
    held_numbers,
    one_number,
    steps_from_zero,
    unsaturated,
)
from gapa_onnx.variance.rules.reduction import average_pool, softmax_spread
from gapa_onnx.variance.rules.registry import Accuracy, rule, total_of, variance_or_zeros
from gapa_onnx.variance.rules.view import NodeView, VirtualNode

FIRST_ORDER = Accuracy.FIRST_ORDER


@rule("QLinearAdd", accuracy=FIRST_ORDER, domain=MICROSOFT)
def qlinear_add(node: NodeView) -> Value:
    """(s_a² v_a + s_b² v_b) / s_y², 0 where the output is saturated."""
    a, b, scale = node.inputs[0], node.inputs[3], one_number(node, 6)
    slopes = [one_number(node, 1) / scale, one_number(node, 4) / scale]
    if a.tensor.name == b.tensor.name:
        total = a.variance * (slopes[0] + slopes[1]) * (slopes[0] + slopes[1])
    else:
        pairs = zip((a, b), slopes)
        total = total_of([x.var * (slope * slope) for x, slope in pairs if x.var is not None])
    return unsaturated(node, total)


@rule("QLinearMul", accuracy=FIRST_ORDER, domain=MICROSOFT)
def qlinear_mul(node: NodeView) -> Value:
    """(s_a s_b / s_y)² (b² v_a + a² v_b + v_a v_b) with a, b in steps; 0 where the output is saturated."""
    a, b = node.inputs[0], node.inputs[3]
    steps_a, steps_b = (
        steps_from_zero(node, 0, one_number(node, 2)),
        steps_from_zero(node, 3, one_number(node, 5)),
    )
    factor = one_number(node, 1) * one_number(node, 4) / one_number(node, 6)
    if a.tensor.name == b.tensor.name:
        total = a.variance * (steps_a + steps_b).squared
    else:
        pairs = ((a.var, steps_b.squared), (b.var, steps_a.squared), (a.var, b.var))
        terms = [left * right for left, right in pairs if left is not None and right is not None]
        total = sum(terms[1:], terms[0])
    return unsaturated(node, total * (factor * factor))


def _unary(node: NodeView, slope: Callable[[Value, Value], Value | float]) -> Value:
    """φ'(x)² v (s_x / s_y)² for inputs x, s_x, z_x, s_y, z_y; the slope is a function of x and y."""
    x = steps_from_zero(node, 0, one_number(node, 2)) * one_number(node, 1)
    y = _steps_of_output(node) * one_number(node, 3)
    factor = slope(x, y) * (one_number(node, 1) / one_number(node, 3))
    return unsaturated(node, node.inputs[0].variance * (factor * factor))


def _steps_of_output(node: NodeView, zero: int = 4) -> Value:
    return held_numbers(node, node.output)[0] - one_number(node, zero)


@rule("QLinearSigmoid", accuracy=FIRST_ORDER, domain=MICROSOFT)
def qlinear_sigmoid(node: NodeView) -> Value:
    """(y (1 - y) s_x / s_y)² v, 0 where the output is saturated."""
    return _unary(node, lambda x, y: y * (1 - y))


@rule("QLinearLeakyRelu", accuracy=FIRST_ORDER, domain=MICROSOFT)
def qlinear_leaky_relu(node: NodeView) -> Value:
    """(φ'(x) s_x / s_y)² v, 0 where the output is saturated."""
    alpha = node.attr("alpha", 0.01)
    return _unary(node, lambda x, y: (x > 0) + alpha * (x <= 0))


@rule("QLinearSoftmax", accuracy=FIRST_ORDER, domain=MICROSOFT)
def qlinear_softmax(node: NodeView) -> Value:
    """(p_i s_x / s_y)² ((1 - 2 p_i) v_i + Σ_j p_j² v_j), 0 where the output is saturated."""
    graph, axis = node.graph, node.attr("axis", -1)

    def total(terms: Value) -> Value:
        if node.attr("opset", 13) >= 13:
            return graph.reduce("ReduceSum", terms, [axis])
        rows = graph.emit("Flatten", terms, axis=axis)
        spread = graph.expand(graph.reduce("ReduceSum", rows, [1]), like=rows)
        return graph.emit("Reshape", spread, graph.shape(node.output.raw))

    p = _steps_of_output(node) * one_number(node, 3)
    factor = p * (one_number(node, 1) / one_number(node, 3))
    return unsaturated(node, factor * factor * softmax_spread(p, node.inputs[0].variance, total))


@rule("QLinearAveragePool", accuracy=FIRST_ORDER, domain=MICROSOFT)
def qlinear_average_pool(node: NodeView) -> Value:
    """(s_x / s_y)² Σ_j v_j / n², 0 where the output is saturated."""
    if node.attr("channels_last", 0):
        raise node.refuse("channels_last=1")
    attrs = {name: value for name, value in node.node.attrs.items() if name != "channels_last"}
    pool = VirtualNode("AveragePool", node.node.name, attrs, node.node.inputs[:1], node.node.outputs)
    pooled = average_pool(NodeView(node.graph, pool, node.variance_of))
    ratio = one_number(node, 1) / one_number(node, 3)
    return unsaturated(node, pooled * (ratio * ratio))


@rule("QLinearGlobalAveragePool", accuracy=FIRST_ORDER, domain=MICROSOFT)
def qlinear_global_average_pool(node: NodeView) -> Value:
    """(s_x / s_y)² Σ_j v_j / n², 0 where the output is saturated."""
    x, count = node.inputs[0], node.graph.count
    if x.shape is None and not node.attr("channels_last", 0):
        average = node.graph.emit("GlobalAveragePool", x.variance)
    else:
        first = 1 if node.attr("channels_last", 0) else 2
        average = node.graph.reduce("ReduceMean", x.variance, list(range(first, first + x.rank - 2)))
    size = count(x.raw, x.dtype) / count(node.output.raw, x.dtype)
    ratio = one_number(node, 1) / one_number(node, 3)
    return unsaturated(node, average / size * (ratio * ratio))


@rule("QLinearConcat", accuracy=FIRST_ORDER, domain=MICROSOFT)
def qlinear_concat(node: NodeView) -> Value:
    """(s_i / s_y)² v_i, one behind the other; 0 where the output is saturated."""
    ratios = {at: one_number(node, at + 1) / one_number(node, 0) for at in range(2, len(node.inputs), 3)}
    parts = [variance_or_zeros(node.inputs[at]) * (ratio * ratio) for at, ratio in ratios.items()]
    return unsaturated(node, node.graph.emit("Concat", *parts, axis=node.attr("axis")))


@rule("QLinearWhere", accuracy=FIRST_ORDER, domain=MICROSOFT)
def qlinear_where(node: NodeView) -> Value:
    """(s / s_y)² v of the chosen one; 0 where the output is saturated."""
    ratios = {at: one_number(node, at + 1) / one_number(node, 7) for at in (1, 4)}
    parts = [variance_or_zeros(node.inputs[at]) * (ratio * ratio) for at, ratio in ratios.items()]
    return unsaturated(node, node.graph.emit("Where", node.inputs[0].raw, *parts, dtype=parts[0].dtype))
