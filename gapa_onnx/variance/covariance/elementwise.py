"""Operators that act on each element by itself: G_x = G · ∂y/∂x, summed where x was broadcast.

The slopes are those of the rule table, so that an operator that has slopes there has a pullback here.
"""

from __future__ import annotations

from gapa_onnx.variance.covariance.registry import Cotangents, TailNode, pullback
from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules import TABLE, Rule
from gapa_onnx.variance.rules.registry import Slopes, evaluated
from gapa_onnx.variance.rules.structural import require_inference


def _define(op_type: str, domain: str, slopes: Slopes) -> None:
    @pullback(op_type, domain=domain)
    def elementwise(node: TailNode, g: Value) -> Cotangents:
        """G · ∂y/∂x_i for each input that is uncertain."""
        known = slopes(node)
        present = [operand for operand in node.inputs if operand.present]
        if len(present) == 1 and known[0] is not None:
            # The slope has the shape of both, and may be there already for the variance.
            slope = evaluated(node, known[0], node.output.mean, [present[0].mean])
            return (g * (node.graph.unsqueeze(slope, [1]) if isinstance(slope, Value) else slope),)
        y, x = node.lifted(node.output), [node.lifted(operand) for operand in present]
        return tuple(
            None
            if operand.certain or slope is None
            else node.summed(g * evaluated(node, slope, y, x), operand)
            for operand, slope in zip(node.inputs, known)
        )


for (_domain, _op_type), _entry in TABLE.items():
    if isinstance(_entry, Rule) and _entry.slopes is not None:
        _define(_op_type, _domain, _entry.slopes)


@pullback("Identity", "Dropout")
def identity(node: TailNode, g: Value) -> Cotangents:
    """G, unchanged"""
    require_inference(node)
    return g


@pullback("Cast", "CastLike")
def cast(node: TailNode, g: Value) -> Cotangents:
    """G, unchanged: between floating-point types"""
    return node.graph.cast(g, node.inputs[0].dtype)
