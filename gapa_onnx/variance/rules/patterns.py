"""Operators that no model has: what `gapa_onnx.variance.patterns` finds spelled out without a standard name."""

from __future__ import annotations

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.normalisation import Normalised, affine, elements_along, over
from gapa_onnx.variance.rules.registry import Accuracy, rule
from gapa_onnx.variance.rules.view import NodeView

DOMAIN = "ai.gapa.pattern"


def _axes(node: NodeView) -> list[int]:
    """Counted from the front where the rank is known: before opset 11 they may not be negative."""
    x = node.inputs[0]
    return [axis if x.shape is None else axis % x.rank for axis in node.attr("axes")]


@rule("Normalization", accuracy=Accuracy.FIRST_ORDER, domain=DOMAIN)
def normalization(node: NodeView) -> Value:
    """Layer or RMS normalisation over any axes, γ u + β: Σ_j J_ij² v_j."""
    x = node.inputs[0]
    axes = _axes(node)
    epsilon, centred = node.attr("epsilon", 0.0), bool(node.attr("centred", 1))
    found = Normalised(x.mean, x.var, over(node.graph, axes), epsilon, centred, elements_along(x, axes))
    return affine(found.var, found.u, node.input(1), node.input(2))


@rule("Centering", accuracy=Accuracy.EXACT, domain=DOMAIN)
def centering(node: NodeView) -> Value:
    """y = x - mean: (1 - 2/n) v_i + Σ_j v_j / n²"""
    x = node.inputs[0]
    average = node.graph.reduce("ReduceMean", x.variance, _axes(node))
    n = node.graph.count(x.variance, x.dtype) / node.graph.count(average, x.dtype)
    return (1 - 2 / n) * x.variance + average / n


@rule("SumNormalization", accuracy=Accuracy.FIRST_ORDER, domain=DOMAIN)
def sum_normalization(node: NodeView) -> Value:
    """y = x / S, S = Σx: ((1 - y_i)² v_i + y_i² Σ_{j≠i} v_j) / S²"""
    x, y = node.inputs[0], node.output.mean

    def total(value: Value) -> Value:
        return node.graph.reduce("ReduceSum", value, _axes(node))

    others = total(x.variance) - x.variance  # never negative: no sum of floats is below its largest term
    return ((1 - y).squared * x.variance + y.squared * others) / total(x.mean).squared
