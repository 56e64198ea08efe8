"""The rule table: how the variance of each operator follows from the variances of its inputs.

Where to look: `elementwise` (arithmetic, activations), `linear` (layers with weights),
`structural` (reshaping, retyping), `selection` (scatter, top-k), `spatial`
and `sampling` (resizing, reading at positions), `spectral` (Fourier), `sequences`, `reduction` (sums, pooling, softmax),
`normalisation`, `norms`, `quantised` and `quantised_elements`, `patterns` (what has no standard name), `multilinear` (Einsum, Det), `loss`,
`recurrent` (LSTM, GRU, RNN), `attention`, `rotary`, `contrib` and `contrib_attention` (what
onnxruntime fuses). `registry` holds the table and the families, `view` what a rule sees.
"""

from __future__ import annotations

from gapa_onnx.variance.rules import (  # noqa: F401  (they fill the table)
    attention,
    contrib,
    contrib_attention,
    control_flow,
    elementwise,
    linear,
    loss,
    ml,
    multilinear,
    normalisation,
    norms,
    patterns,
    quantised,
    quantised_elements,
    recurrent,
    reduction,
    rotary,
    sampling,
    selection,
    sequences,
    spatial,
    spectral,
    structural,
)
from gapa_onnx.variance.rules.registry import (
    TABLE,
    Accuracy,
    Behaviour,
    Deterministic,
    Refusal,
    Rule,
    behaviour,
    is_declared,
)
from gapa_onnx.variance.rules.view import NodeView, Operand, Options, Refused, VirtualNode

__all__ = [
    "TABLE", "Accuracy", "Behaviour", "Deterministic", "NodeView", "Operand", "Options", "Refusal", "Refused",
    "Rule", "VirtualNode", "behaviour", "is_declared",
]  # fmt: skip
