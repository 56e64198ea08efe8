"""The rule table: how the variance of each operator follows from the variances of its inputs.

Where to look: `elementwise` (arithmetic, activations), `linear` (layers with weights),
`structural` (reshaping, selection), `reduction` (sums, pooling, softmax). `registry` holds the
table and the families, `view` what a rule sees.
"""

from __future__ import annotations

from gapa_onnx.rules import control_flow, elementwise, linear, reduction, structural  # noqa: F401  (they fill the table)
from gapa_onnx.rules.registry import TABLE, Accuracy, Behaviour, Deterministic, Refusal, Rule, behaviour, is_declared
from gapa_onnx.rules.view import NodeView, Operand, Options, Refused, VirtualNode

__all__ = [
    "TABLE", "Accuracy", "Behaviour", "Deterministic", "NodeView", "Operand", "Options", "Refusal", "Refused",
    "Rule", "VirtualNode", "behaviour", "is_declared",
]  # fmt: skip
