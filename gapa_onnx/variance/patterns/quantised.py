"""Dynamic quantisation: a product in whole numbers, and the scales of its factors behind it.

onnxruntime merges the group into one operator, if nobody reads what lies inside. The rule of that
operator does not: the scale by which the data are quantised cancels.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from gapa_onnx.variance.patterns.composite import Output, Spelled, pattern
from gapa_onnx.variance.patterns.formula import is_constant


@pattern("Mul")
def dynamic_matmul(y: Output) -> Spelled | None:
    """Cast(MatMulInteger(q, b, z, z_b)) · (s · s_b), with q, s, z = DynamicQuantizeLinear(x)."""
    for product, scales in (y.node.inputs, y.node.inputs[::-1]):
        cast, scale = _made_by(product, "Cast"), _made_by(scales, "Mul")
        if cast is None or scale is None:
            continue
        integers = _made_by(cast.inputs[0], "MatMulInteger")
        if integers is None or len(integers.inputs) < 3:
            continue
        quantise = _made_by(integers.inputs[0], "DynamicQuantizeLinear")
        if quantise is None or integers.inputs[2] is not quantise.outputs[2]:
            continue
        own = [tensor for tensor in scale.inputs if tensor is quantise.outputs[1]]
        weights = [tensor for tensor in scale.inputs if is_constant(tensor)]
        if integers.inputs[0] is quantise.outputs[0] and len(own) == len(weights) == 1:
            inputs = [quantise.inputs[0], integers.inputs[1], weights[0], *integers.inputs[3:4]]
            return Spelled("DynamicQuantizeMatMul", inputs, domain="com.microsoft", keeps_shape=False)
    return None


def _made_by(tensor: gs.Tensor, op_type: str) -> gs.Node | None:
    node = tensor.inputs[0] if tensor.inputs else None
    return node if node is not None and node.op == op_type else None
