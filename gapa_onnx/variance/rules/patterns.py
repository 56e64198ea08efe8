"""Operators that no model has: what `gapa_onnx.variance.patterns` finds spelled out without a standard name."""

from __future__ import annotations

from dataclasses import dataclass

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


# ----------------------------------------------------- means under a softmax's distribution


@dataclass(frozen=True)
class _Softmax:
    """p, and its squares times the variances of x, as the sum over the distribution reads them."""

    p: Value
    spread: Value  #: p_j² v_j
    axis: int  #: of the distribution

    @classmethod
    def of(cls, node: NodeView) -> _Softmax:
        x, axis, perm = node.inputs[0], node.attr("axis"), node.attr("perm")
        # As the source writes it, so that onnxruntime computes both once.
        p = node.graph.emit("Softmax", x.mean, axis=axis)
        spread = p.squared * x.variance
        if perm is not None:
            p, spread = (node.graph.emit("Transpose", value, perm=perm) for value in (p, spread))
            return cls(p, spread, perm.index(axis % len(perm)))
        return cls(p, spread, axis if x.shape is None else axis % x.rank)


@rule("SoftmaxExpectation", accuracy=Accuracy.FIRST_ORDER, domain=DOMAIN)
def softmax_expectation(node: NodeView) -> Value:
    """y = Σ p w, p the softmax of x: Σ_j p_j² (w_j - y)² v_j"""
    found, w, y = _Softmax.of(node), node.inputs[1].mean, node.output.mean
    kept = bool(node.attr("keepdims", 1))
    if node.attr("weights_shape") is not None:
        w = node.graph.emit("Reshape", w, node.graph.ints(*node.attr("weights_shape")))
    y = y if kept else node.graph.unsqueeze(y, [found.axis])
    return node.graph.reduce("ReduceSum", (w - y).squared * found.spread, [found.axis], keepdims=kept)


@rule("SoftmaxMixture", accuracy=Accuracy.FIRST_ORDER, domain=DOMAIN)
def softmax_mixture(node: NodeView) -> Value:
    """y_m = Σ_j p_j w_jm, p the softmax of x: Σ_j p_j² (w_jm - y_m)² v_j

    The square is multiplied out, so that no tensor has both j and m as axes. That cancels where p_j is near 1:
    the one element that is above 1/2 goes by itself, with w - y = Σ_k p_k (w - w_k) over the others. Weights
    count from their mean, which moves y alike.
    """
    found, w = _Softmax.of(node), node.inputs[1].mean
    graph, by = node.graph, node.attr("by", "MatMul")
    if node.attr("turned", 0):
        w = graph.emit("Transpose", w, perm=[1, 0])
    w = w - graph.reduce("ReduceMean", w, [1 if by == "Conv" else 0])

    def total(value: Value) -> Value:
        return graph.reduce("ReduceSum", value, [found.axis])

    def mixed(value: Value, weights: Value) -> Value:
        return graph.emit(by, value, weights)

    large = found.p > 0.5
    small = 1 - large
    of_others = small * found.p
    gap = mixed(large, w) * total(of_others) - mixed(of_others, w)  # p_k (w - w_k) over the others
    y, spread = mixed(found.p, w), small * found.spread
    of_small = mixed(spread, w.squared) - 2 * y * mixed(spread, w) + y.squared * total(spread)
    # A sum of squares: below 0 by rounding only, where all that is not small in p has nearly the same weight.
    return graph.at_least(of_small, 0) + total(large * found.spread) * gap.squared
