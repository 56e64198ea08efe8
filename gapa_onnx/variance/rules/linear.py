"""Layers with weights, and what is affine in its input."""

from __future__ import annotations

from collections.abc import Callable

from gapa_onnx.variance.rules.registry import Accuracy, bilinear, rule
from gapa_onnx.variance.rules.view import NodeView
from gapa_onnx.variance.values import Partial, Scaled, Value

bilinear("MatMul", "Conv", "ConvTranspose")
bilinear("Gemm", alpha=1.0)


@rule("BatchNormalization", accuracy=Accuracy.EXACT)
def batch_normalization(node: NodeView) -> Value:
    """v γ² / (σ² + ε): affine with the stored statistics."""
    require_stored_statistics(node)
    x, scale, bias, mean, variance = node.inputs
    if any(not parameter.certain for parameter in (scale, bias, mean, variance)):
        raise node.refuse("its parameters are uncertain")
    if isinstance(x.var, Partial) and x.var.axis == 1:
        return x.var.each(
            lambda *part: _stretched(node, part[2], lambda p: node.graph.slice(p, 0, *part[:2]))
        )
    return _stretched(node, x.variance, lambda parameter: parameter)


def require_stored_statistics(node: NodeView) -> None:
    """Refuse a BatchNormalization in training. Before opset 14 it is its further outputs that tell."""
    if node.attr("training_mode", 0) or len(node.outputs) > 1:
        raise node.refuse("it is in training mode: the output depends on the whole batch")


def _stretched(node: NodeView, var: Value, own: Callable[[Value], Value]) -> Value:
    """`own` takes what belongs to the variance's channels out of a parameter."""
    graph = node.graph
    scale, mean, variance = (own(node.inputs[position].mean) for position in (1, 3, 4))
    square = variance + node.attr("epsilon", 1e-5)
    if isinstance(var, Scaled) and var.axis == 1 and node.inputs[0].shape is not None:
        ones = [1] * (node.inputs[0].rank - 2)
        return var * graph.emit("Reshape", scale.squared / square, graph.ints(-1, *ones))
    # The same node divides by √(σ² + ε) once; the scale brings the second time.
    zero = graph.zeros(mean)
    return node.again(var, scale.squared / square.sqrt(), zero, zero, variance)
