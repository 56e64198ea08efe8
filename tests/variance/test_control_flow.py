"""Variance through If, Loop and Scan, against the same computation without control flow."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.rule_checks import add_variances, parse, propagate_inputs, run_with_variances


def variances(text: str, opset: int, uncertain: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> dict:
    """The variances of a model's outputs, run in onnxruntime; the result is a valid model."""
    model = parse(text, opset)
    onnx.checker.check_model(model, full_check=True)
    found = run_with_variances(model, feeds, uncertain)
    return {output.name: found[f"{output.name}_var"] for output in model.graph.output}


RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3)).astype(np.float32)
V = RNG.uniform(0.1, 1, (2, 3)).astype(np.float32)


@pytest.mark.parametrize("opset", [11, 13, 17, 21])
@pytest.mark.parametrize("chosen", [True, False])
def test_if_takes_the_variance_of_its_branch(opset, chosen):
    text = """net (float[2, 3] x, bool c) => (float[2, 3] y, float[2, 3] z)
        <float[2, 3] two = {2, 2, 2, 2, 2, 2}> {
        y, z = If <
          then_branch = one () => (float[2, 3] a, float[2, 3] b) { h = Tanh(x)  a = Mul(h, two)  b = Identity(two) },
          else_branch = other () => (float[2, 3] d, float[2, 3] e) { d = Identity(x)  e = Add(x, x) }
        > (c) }"""
    found = variances(text, opset, {"x": V}, {"x": X, "c": np.array(chosen)})
    if chosen:
        expected_y, expected_z = (2 * (1 - np.tanh(X) ** 2)) ** 2 * V, np.zeros_like(V)
    else:
        expected_y, expected_z = V, 4 * V
    np.testing.assert_allclose(found["y"], expected_y, rtol=1e-5)
    np.testing.assert_allclose(found["z"], expected_z, rtol=1e-5)


def test_a_certain_if_gets_no_twin():
    text = """net (float[2, 3] x, float[2, 3] u, bool c) => (float[2, 3] y) {
        t = If <then_branch = one () => (float[2, 3] a) { a = Tanh(u) },
                else_branch = other () => (float[2, 3] d) { d = Identity(u) }> (c)
        y = Add(x, t) }"""
    model = parse(text, 17)
    result = propagate_inputs(model, ["x"])
    assert "t" not in result.variances
    assert not any(node.op_type == "If" for node in add_variances(model, result)[0].graph.node[2:])


@pytest.mark.parametrize("opset", [11, 13, 17, 21])
def test_loop_carries_variance_from_step_to_step(opset):
    """h ← tanh(h) + x for three steps, and h² scanned; x uncertain, h certain at first."""
    text = """net (float[2, 3] x, float[2, 3] h0) => (float[2, 3] h3, float[n, 2, 3] squares)
        <int64 steps = {3}, bool go = {1}> {
        h3, squares = Loop <body = step (int64 i, bool c, float[2, 3] h) =>
            (bool c_out, float[2, 3] h_out, float[2, 3] square)
            { c_out = Identity(c)  t = Tanh(h)  h_out = Add(t, x)  square = Mul(h_out, h_out) }
        > (steps, go, h0) }"""
    h0 = np.full((2, 3), 0.3, np.float32)
    found = variances(text, opset, {"x": V}, {"x": X, "h0": h0})
    h, v, squares = h0.astype(float), np.zeros((2, 3)), []
    for _ in range(3):
        t = np.tanh(h)
        v = (1 - t**2) ** 2 * v + V  # the diagonal rule: x of two steps counts as independent
        h = t + X
        squares.append(4 * h**2 * v)
    np.testing.assert_allclose(found["h3"], v, rtol=1e-5)
    np.testing.assert_allclose(found["squares"], squares, rtol=1e-5)


def test_a_state_that_becomes_uncertain_through_another():
    """b takes a's value, a takes x's: after two rounds of the search both are uncertain."""
    text = """net (float[2, 3] x, float[2, 3] a0, float[2, 3] b0) => (float[2, 3] a, float[2, 3] b)
        <int64 steps = {2}, bool go = {1}> {
        a, b = Loop <body = step (int64 i, bool c, float[2, 3] a_in, float[2, 3] b_in) =>
            (bool c_out, float[2, 3] a_out, float[2, 3] b_out)
            { c_out = Identity(c)  a_out = Identity(x)  b_out = Neg(a_in) }
        > (steps, go, a0, b0) }"""
    zero = np.zeros((2, 3), np.float32)
    found = variances(text, 17, {"x": V}, {"x": X, "a0": zero, "b0": zero})
    np.testing.assert_allclose(found["a"], V)
    np.testing.assert_allclose(found["b"], V)


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 21])
def test_scan_along_an_axis(opset, direction):
    """s ← s/2 + x_t along axis 1, both kinds of output."""
    text = f"""net (float[2, 3] x, float[2] s0) => (float[2] s, float[2, 3] trace) {{
        s, trace = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
                         scan_input_directions = [{direction}], scan_output_directions = [{direction}],
            body = step (float[2] s_in, float[2] x_t) => (float[2] s_out, float[2] y_t)
            <float half = {{0.5}}> {{ r = Mul(s_in, half)  s_out = Add(r, x_t)  y_t = Identity(s_out) }}
        > (s0, x) }}"""
    found = variances(text, opset, {"x": V}, {"x": X, "s0": np.zeros(2, np.float32)})
    v, trace = np.zeros(2), np.zeros((2, 3))
    for t in reversed(range(3)) if direction else range(3):
        v = v / 4 + V[:, t]
        trace[:, t] = v
    np.testing.assert_allclose(found["s"], v, rtol=1e-5)
    np.testing.assert_allclose(found["trace"], trace, rtol=1e-5)


def test_nested_control_flow_and_outer_weights_are_not_copied():
    text = """net (float[2, 3] x, bool c) => (float[2, 3] y) <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64 n = {2}> {
        y = If <then_branch = one () => (float[2, 3] a) {
                  a = Loop <body = step (int64 i, bool k, float[2, 3] h) => (bool k_out, float[2, 3] h_out)
                        { k_out = Identity(k)  h_out = MatMul(h, w) }> (n, c, x) },
                else_branch = other () => (float[2, 3] d) { d = Neg(x) }> (c) }"""
    found = variances(text, 17, {"x": V}, {"x": X, "c": np.array(True)})
    w = np.arange(1, 10).reshape(3, 3).astype(float)
    np.testing.assert_allclose(found["y"], V @ w**2 @ w**2, rtol=1e-5)
    model = parse(text, 17)
    spliced, _ = add_variances(model, propagate_inputs(model, ["x"]))
    names = [t.name for node in spliced.graph.node for a in node.attribute for t in a.g.initializer]
    assert "w" not in names
