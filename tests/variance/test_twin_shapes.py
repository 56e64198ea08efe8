"""Twins of Scan and Loop tell how many axes their results have: onnxruntime does not run a Scan that does not."""

from __future__ import annotations

import numpy as np
import pytest
from support.rule_checks import parse, run_with_variances

RNG = np.random.default_rng(0)
X, V = RNG.normal(size=(5, 6)).astype(np.float32), RNG.uniform(0.1, 1, (5, 6)).astype(np.float32)
SHAPE = {"s": np.array([2, 3])}  # fed, so that nothing can be inferred behind the Reshape


def tanh_variance(x: np.ndarray, v: np.ndarray) -> np.ndarray:
    return (1 - np.tanh(x.astype(np.float64)) ** 2) ** 2 * v


def test_what_a_scan_stacks():
    model = parse("""m (float[5, 6] x, int64[k] s) => (float[5, 2, 3] y) {
        y = Scan <num_scan_inputs=1, body = b (float[6] e) => (float[2, 3] out)
            { r = Reshape(e, s) out = Tanh(r) }> (x) }""")
    found = run_with_variances(model, {"x": X, **SHAPE}, {"x": V})["y_var"]
    np.testing.assert_allclose(found, tanh_variance(X, V).reshape(5, 2, 3), rtol=1e-5)


def test_the_states_of_a_scan():
    model = parse("""m (float[5, 6] x, float[2, 3] h0, int64[k] s) => (float[2, 3] y, float[5, 2, 3] all) {
        y, all = Scan <num_scan_inputs=1, body = b (float[2, 3] h, float[6] e) => (float[2, 3] next, float[2, 3] out)
            { r = Reshape(e, s) t = Add(r, h) next = Tanh(t) out = Identity(next) }> (h0, x) }""")
    start = np.zeros((2, 3), np.float32)
    state, var, stacked = start.astype(np.float64), np.zeros((2, 3)), []
    for x, v in zip(X.reshape(5, 2, 3), V.reshape(5, 2, 3)):
        var = tanh_variance(x + state, v + var)
        state = np.tanh(x + state)
        stacked.append(var)
    found = run_with_variances(model, {"x": X, "h0": start, **SHAPE}, {"x": V})
    np.testing.assert_allclose(found["y_var"], var, rtol=1e-5)
    np.testing.assert_allclose(found["all_var"], stacked, rtol=1e-5)


@pytest.mark.parametrize("steps", [0, 4])
def test_what_a_loop_stacks_has_the_rank_of_the_mean(steps):
    model = parse("""m (float[5, 6] x, int64[k] s, int64 n, bool c) => (float[a, 2, 3] y) {
        y = Loop <body = b (int64 i, bool go) => (bool on, float[2, 3] out)
            { e = Gather(x, i) r = Reshape(e, s) out = Tanh(r) on = Identity(go) }> (n, c) }""")
    feeds = {"x": X, **SHAPE, "n": np.array(steps), "c": np.array(True)}
    found = run_with_variances(model, feeds, {"x": V})["y_var"]
    assert found.ndim == 3 and len(found) == steps
    if steps:
        np.testing.assert_allclose(found, tanh_variance(X, V).reshape(5, 2, 3)[:steps], rtol=1e-5)
