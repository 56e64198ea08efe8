"""Layers with weights, and what is affine in its input."""

from __future__ import annotations

from gapa_onnx.graph import Value
from gapa_onnx.rules.registry import Accuracy, bilinear, rule
from gapa_onnx.rules.view import NodeView

bilinear("MatMul", "Conv", "ConvTranspose")
bilinear("Gemm", alpha=1.0)


@rule("BatchNormalization", accuracy=Accuracy.EXACT)
def batch_normalization(node: NodeView) -> Value:
    """v γ² / (σ² + ε): affine with the stored statistics."""
    # Before opset 14 it is the further outputs that turn training on.
    if node.attr("training_mode", 0) or len(node.outputs) > 1:
        raise node.refuse("it is in training mode: the output depends on the whole batch")
    x, scale, bias, mean, variance = node.inputs
    if any(not parameter.certain for parameter in (scale, bias, mean, variance)):
        raise node.refuse("its parameters are uncertain")
    # The same node divides by √(σ² + ε) once; the scale brings the second time.
    std = (variance.mean + node.attr("epsilon", 1e-5)).sqrt()
    zero = node.graph.zeros(mean.mean)
    return node.again(x.var, scale.mean.squared / std, zero, zero, variance.mean)
