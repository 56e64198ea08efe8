"""Operators without a rule of their own: ONNX's function bodies, and functions inside a model."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import scipy.special
from onnx.reference import ReferenceEvaluator
from support.rule_checks import parse, run_with_variances, squared_jacobian_product

import gapa_onnx
from gapa_onnx.variance.rules import TABLE

RNG = np.random.default_rng(0)
TOLERANCE = 4e-5  #: of float32, as in `rule_checks`

#: Operators whose body is one chain from x to y: what comes out is J² v of the operator itself.
CHAINS = [
    "Softplus", "Selu", "Celu", "Elu", "LeakyRelu", "HardSigmoid", "ThresholdedRelu", "ReduceL1", "ReduceL2",
    "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp",
]  # fmt: skip

Stage = Callable[[np.ndarray, np.ndarray], np.ndarray]
Array = np.ndarray


def _hard_sigmoid(x: Array) -> Array:
    return np.clip(x / 6 + 0.5, 0, 1)


def _total(x: Array) -> Array:
    return x.sum(axis=1, keepdims=True)


def _less_largest(x: Array, again: Array) -> Array:
    return x - again.max(axis=1, keepdims=True)


#: Operators whose body reads a tensor twice, which diagonal rules take for two that are independent: each
#: stage as a function of two copies of what the stage before it gave.
MEETING_AGAIN: dict[str, list[Stage]] = {
    "Softsign": [lambda x, again: x / (1 + np.abs(again))],
    "Mish": [lambda x, again: x * np.tanh(np.log1p(np.exp(again)))],
    "HardSwish": [lambda x, again: x * _hard_sigmoid(again)],
    "Gelu": [lambda x, again: x * (1 + scipy.special.erf(again / np.sqrt(2))) / 2],
    "Softmax": [_less_largest, lambda x, again: np.exp(x) / _total(np.exp(again))],
    "LogSoftmax": [_less_largest, lambda x, again: x - np.log(_total(np.exp(again)))],
}


def _of_copies(stage: Stage, fed: dict[str, Array]) -> list[Array]:
    return [stage(fed["x"], fed["again"])]


def model_of(op_type: str, opset: int, dtype: str) -> onnx.ModelProto:
    reduces = op_type.startswith("Reduce")
    axes, call = ("<int64[1] axes = {1}>", "x, axes") if reduces else ("", "x")
    shape = "[4, 1]" if reduces else "[4, 3]"
    return parse(f"m ({dtype}[4, 3] x) => ({dtype}{shape} y) {axes} {{ y = {op_type}({call}) }}", opset)


def spelled_out(
    monkeypatch: pytest.MonkeyPatch, op_type: str, opset: int
) -> tuple[Array, Array, dict[str, Array]]:
    """x, its variance, and what the model answers where the operator has no rule."""
    x, v = RNG.uniform(0.3, 1.5, (4, 3)), 1e-6 * RNG.uniform(0.1, 1, (4, 3))
    # Small: norms add the variance to the square that they divide by.
    x, v = x.astype(np.float32), v.astype(np.float32)
    monkeypatch.delitem(TABLE, ("", op_type))
    found = run_with_variances(model_of(op_type, opset, "float"), {"x": x}, {"x": v})
    return x.astype(np.float64), v.astype(np.float64), found


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("op_type", CHAINS)
def test_a_chain_gives_the_first_order_variance(
    monkeypatch: pytest.MonkeyPatch, op_type: str, opset: int
) -> None:
    x, v, found = spelled_out(monkeypatch, op_type, opset)
    reference = ReferenceEvaluator(model_of(op_type, opset, "double"))
    wanted = squared_jacobian_product(functools.partial(reference.run, None), {"x": x}, {"x": v})[0]
    np.testing.assert_allclose(found["y_var"], wanted, rtol=TOLERANCE, atol=1e-12 * v.max())


@pytest.mark.parametrize("opset", [20, 21])
@pytest.mark.parametrize("op_type", MEETING_AGAIN)
def test_what_meets_again_counts_as_independent(
    monkeypatch: pytest.MonkeyPatch, op_type: str, opset: int
) -> None:
    x, var, found = spelled_out(monkeypatch, op_type, opset)
    for stage in MEETING_AGAIN[op_type]:
        feeds, variances = {"x": x, "again": x}, {"x": var, "again": var}
        (var,) = squared_jacobian_product(functools.partial(_of_copies, stage), feeds, variances)
        x = stage(x, x)
    np.testing.assert_allclose(found["y"], x, rtol=1e-5)
    np.testing.assert_allclose(found["y_var"], var, rtol=TOLERANCE)


LOCAL = """
<ir_version: 8, opset_import: ["": 17, "local": 1]>
net (float[n, 3] x) => (float[n, 2] y) <float[3, 4] a = {A}, float[4, 2] b = {B}> {
    h = local.dense <slope = 0.2> (x, a)
    y = MatMul(h, b)
}
<domain: "local", opset_import: ["": 17]>
dense <slope> (x, w) => (h) { z = MatMul(x, w)  h = LeakyRelu <alpha: float = @slope> (z) }
"""


def test_functions_inside_a_model_are_inlined_and_their_layers_found():
    weights = RNG.standard_normal(20).round(3)
    text = LOCAL.replace("{A}", "{" + ", ".join(map(str, weights[:12])) + "}")
    text = text.replace("{B}", "{" + ", ".join(map(str, weights[12:])) + "}")
    model = onnx.parser.parse_model(text)
    rows = RNG.standard_normal((80, 3)).astype(np.float32)
    conversion = gapa_onnx.convert(model, {"x": rows}, m=20, k=5)
    assert all(check.passed for check in conversion.checks)
    (site,) = conversion.plan.sites
    assert site.activation == "LeakyRelu"
    onnx.checker.check_model(conversion.model, full_check=True)
