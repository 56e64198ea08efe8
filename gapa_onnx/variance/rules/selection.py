"""Operators that write to, or pick, elements at places that the data or indices choose."""

from __future__ import annotations

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.registry import Accuracy, rule, structural, variance_or_zeros
from gapa_onnx.variance.rules.view import NodeView

EXACT, FIRST_ORDER = Accuracy.EXACT, Accuracy.FIRST_ORDER

structural("TensorScatter", data=slice(0, 2))


@rule("ScatterElements", "ScatterND", "Scatter", accuracy=FIRST_ORDER)
def scatter(node: NodeView) -> Value:
    """The same node on the variances, exact; for max and min the variance of the element that was chosen,
    shared by ties."""
    data, indices, updates = node.inputs
    reduction = node.attr("reduction", "none")
    if reduction == "mul":
        raise node.refuse("reduction=mul: which elements are multiplied is known at run time only")
    var, update_var = variance_or_zeros(data), variance_or_zeros(updates)
    if reduction in ("none", "add"):
        return node.again(var, indices.raw, update_var)
    graph, y = node.graph, node.output.mean
    if node.op_type == "ScatterND":
        result = graph.emit("GatherND", y, indices.raw)
    else:
        result = graph.emit("GatherElements", y, indices.raw, axis=node.attr("axis", 0))
    if reduction == "max":
        kept, written = data.mean >= y, updates.mean >= result
    else:
        kept, written = data.mean <= y, updates.mean <= result
    total = node.again(kept * var, indices.raw, written * update_var, reduction="add")
    return total / node.again(kept, indices.raw, written, reduction="add")


@rule("TopK", accuracy=FIRST_ORDER)
def top_k(node: NodeView) -> tuple[Value, None]:
    """The variances of the elements that were chosen."""
    x, graph, axis = node.inputs[0], node.graph, node.attr("axis", -1)
    if node.opset >= 11:
        where = node.outputs[1].raw
        return graph.emit("GatherElements", x.var, where, axis=axis), None
    # Elements cannot be picked along an axis yet: those that equal the value are, and share it.
    axis %= x.rank
    elements, value = graph.unsqueeze(x.mean, [axis + 1]), graph.unsqueeze(node.output.mean, [axis])
    chosen = (elements >= value) * (elements <= value)  # (…, n, k, …)
    total = graph.reduce(
        "ReduceSum", chosen * graph.unsqueeze(x.variance, [axis + 1]), [axis], keepdims=False
    )
    return total / graph.reduce("ReduceSum", chosen, [axis], keepdims=False), None


@rule("OneHot", accuracy=EXACT)
def one_hot(node: NodeView) -> Value | None:
    """The same node on the variances of the two values; nothing comes from the places."""
    places, depth, values = node.inputs
    return None if values.certain else node.again(places.raw, depth.raw, values.var)


@rule("Unique", accuracy=FIRST_ORDER)
def unique(node: NodeView) -> tuple[Value | None, ...]:
    """The variance of the first of each group of equal elements."""
    x, graph = node.inputs[0], node.graph
    _, first = node.again_several(x.raw, outputs=2)
    axis = node.attr("axis")
    source = graph.emit("Reshape", x.var, graph.ints(-1)) if axis is None else x.var
    var = graph.emit("Gather", source, first, axis=axis or 0)
    return (var, *[None] * (len(node.outputs) - 1))
