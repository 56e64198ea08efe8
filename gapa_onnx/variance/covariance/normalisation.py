"""Softmax, and what divides by the spread of a group.

With u = (x - m) / s over a group, m and s² its mean and mean square, and ⟨·⟩ the mean over the group,

    centred       G_x = (G - ⟨G⟩ - u ⟨u G⟩) / s
    not centred   G_x = (G - u ⟨u G⟩) / s
"""

from __future__ import annotations

from collections.abc import Sequence

from gapa_onnx.variance.covariance.registry import Cotangents, TailNode, pullback
from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.normalisation import NEARLY_ZERO, Normalised, over
from gapa_onnx.variance.rules.patterns import DOMAIN as PATTERN_DOMAIN

# ------------------------------------------------------------------------------- softmax


def _normalised_axes(node: TailNode) -> list[int]:
    """Before opset 13 all axes from the given one on are one."""
    x = node.inputs[0]
    axis = node.axis(node.attr("axis", 1 if node.opset < 13 else -1), x)
    return [axis] if node.opset >= 13 else list(range(axis, x.rank))


@pullback("Softmax")
def softmax(node: TailNode, g: Value) -> Cotangents:
    """p (G - Σ p G), where any constant may be taken from G: that at an element above 1/2 keeps
    1 - p from cancelling."""
    axes = [axis + 1 for axis in _normalised_axes(node)]
    p = node.lifted(node.output)
    g = g - node.graph.reduce("ReduceSum", (p > 0.5) * g, axes)
    return p * (g - node.graph.reduce("ReduceSum", p * g, axes))


@pullback("LogSoftmax")
def log_softmax(node: TailNode, g: Value) -> Cotangents:
    """G - p Σ G; for an element above 1/2 with 1 - p as the sum of the others."""
    axes = [axis + 1 for axis in _normalised_axes(node)]

    def total(value: Value) -> Value:
        return node.graph.reduce("ReduceSum", value, axes)

    p = node.graph.unsqueeze(node.output.mean.exp(), [1])
    large = p > 0.5
    small = 1 - large
    return small * (g - p * total(g)) + large * (g * total(small * p) - p * total(small * g))


# ------------------------------------------------------------------------ normalisations


def _pulled(node: TailNode, g: Value, found: Normalised, axes: Sequence[int]) -> Value:
    """Through u; the axes are those of x."""
    average = over(node.graph, [axis + 1 for axis in axes])
    u = node.graph.unsqueeze(found.u, [1])
    inner = g - average(g) if found.centred else g
    return (inner - u * average(u * g)) / node.graph.unsqueeze(found.square.sqrt(), [1])


def _over_axes(node: TailNode, g: Value, axes: Sequence[int], epsilon: float, centred: bool) -> Value:
    """γ u over some axes, γ an input that broadcasts against x."""
    x, scale = node.inputs[0], node.input(1)
    g = g if scale is None else g * node.lifted(scale)
    axes = [node.axis(axis, x) for axis in axes]
    return _pulled(node, g, Normalised(x.mean, None, over(node.graph, axes), epsilon, centred), axes)


@pullback("LayerNormalization")
def layer_normalization(node: TailNode, g: Value) -> Cotangents:
    """Centred, γ G for G, over the last axes"""
    return _over_axes(node, g, _last_axes(node), node.attr("epsilon", 1e-5), centred=True)


@pullback("RMSNormalization", "SimplifiedLayerNormalization")
def rms_normalization(node: TailNode, g: Value) -> Cotangents:
    """Not centred, γ G for G, over the last axes"""
    return _over_axes(node, g, _last_axes(node), node.attr("epsilon", 1e-5), centred=False)


def _last_axes(node: TailNode) -> range:
    rank = node.inputs[0].rank
    return range(node.attr("axis", -1) % rank, rank)


@pullback("Normalization", domain=PATTERN_DOMAIN)
def normalization(node: TailNode, g: Value) -> Cotangents:
    """Layer or RMS normalisation over any axes"""
    centred = bool(node.attr("centred", 1))
    return _over_axes(node, g, node.attr("axes"), node.attr("epsilon", 0.0), centred)


@pullback("MeanVarianceNormalization")
def mean_variance_normalization(node: TailNode, g: Value) -> Cotangents:
    """Centred, without γ"""
    return _over_axes(node, g, node.attr("axes", [0, 2, 3]), NEARLY_ZERO, centred=True)


@pullback("InstanceNormalization", "GroupNormalization")
def group_normalization(node: TailNode, g: Value) -> Cotangents:
    """Centred, γ G for G, over the positions of a group of channels; one channel is a group for Instance."""
    x, scale = node.inputs[:2]
    graph, groups = node.graph, node.attr("num_groups", 0)

    def grouped(value: Value, *lead: int) -> Value:
        return graph.emit("Reshape", value, graph.ints(*lead, groups, -1))

    def column(parameter: Value) -> Value:
        return graph.unsqueeze(parameter, [1])

    # Up to opset 20 the standard's operator had one γ and β per group.
    if groups == 0 or node.opset < 21:
        g = grouped(g, 0, 0) * column(scale.mean)
    else:
        g = grouped(graph.emit("Reshape", g, graph.ints(0, 0, 0, -1)) * column(scale.mean), 0, 0)
    found = Normalised(grouped(x.mean, 0), None, over(graph, [2]), node.attr("epsilon", 1e-5), centred=True)
    return node.reshaped(_pulled(node, g, found, [2]), x)


@pullback("LpNormalization")
def lp_normalization(node: TailNode, g: Value) -> Cotangents:
    """(G - y Σ y G) / ‖x‖ for p = 2, (G - sign(x) Σ y G) / ‖x‖ for p = 1"""
    x, graph = node.inputs[0], node.graph
    axis = node.axis(node.attr("axis", -1), x)

    def total(value: Value, place: int) -> Value:
        return graph.reduce("ReduceSum", value, [place])

    mean, y = x.mean, node.lifted(node.output)
    if node.attr("p", 2) == 2:
        norm, direction = (total(mean.squared, axis) + NEARLY_ZERO).sqrt(), y
    else:
        norm = total(mean.abs(), axis)
        norm = norm + (norm <= 0)  # zeros only: 0 / 1
        direction = node.lifted(x, (mean > 0) - (mean < 0))
    return (g - direction * total(y * g, axis + 1)) / graph.unsqueeze(norm, [1])


@pullback("Centering", domain=PATTERN_DOMAIN)
def centering(node: TailNode, g: Value) -> Cotangents:
    """G - ⟨G⟩"""
    axes = [node.axis(axis, node.inputs[0]) for axis in node.attr("axes")]
    return g - node.graph.reduce("ReduceMean", g, [axis + 1 for axis in axes])


@pullback("SumNormalization", domain=PATTERN_DOMAIN)
def sum_normalization(node: TailNode, g: Value) -> Cotangents:
    """y = x / S: (G - Σ y G) / S"""
    axes = [node.axis(axis, node.inputs[0]) for axis in node.attr("axes")]
    total = node.graph.reduce("ReduceSum", node.inputs[0].mean, axes)
    product = node.lifted(node.output) * g
    summed = node.graph.reduce("ReduceSum", product, [axis + 1 for axis in axes])
    return (g - summed) / node.graph.unsqueeze(total, [1])
