"""Operators without a rule of their own: ONNX's function bodies, and functions inside a model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.rule_checks import parse, run_with_variances

import gapa_onnx
from gapa_onnx.variance.rules import TABLE

RNG = np.random.default_rng(0)
CHAINS = ("Softplus", "ReduceL2")  # operators whose body is one chain from x to y


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("op_type", ["Softsign", "Selu", "Softplus", "Mish", "ReduceL2", "LogSoftmax"])
def test_an_expansion_gives_what_the_rule_gives(monkeypatch, op_type, opset):
    shape = "float[4, 1]" if op_type == "ReduceL2" else "float[4, 3]"
    axes, call = ("<int64[1] axes = {1}>", "x, axes") if op_type == "ReduceL2" else ("", "x")
    model = parse(f"m (float[4, 3] x) => ({shape} y) {axes} {{ y = {op_type}({call}) }}", opset)
    feeds = {"x": RNG.uniform(0.3, 1.5, (4, 3)).astype(np.float32)}
    # Small: norms add the variance to the square that they divide by.
    variances = {"x": 1e-6 * RNG.uniform(0.1, 1, (4, 3)).astype(np.float32)}
    if ("", op_type) not in TABLE:
        pytest.skip("has no rule to compare with")
    direct = run_with_variances(model, feeds, variances)
    monkeypatch.delitem(TABLE, ("", op_type))
    expanded = run_with_variances(model, feeds, variances)
    np.testing.assert_array_equal(expanded["y"], direct["y"])
    if op_type in CHAINS:
        np.testing.assert_allclose(expanded["y_var"], direct["y_var"], rtol=1e-4)
    else:  # the body reads x more than once, and the diagonal rules take what meets again for independent
        assert np.isfinite(expanded["y_var"]).all() and (expanded["y_var"] > 0).all()


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
