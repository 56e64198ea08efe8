"""Rules that need no rank do not ask for one: a tensor whose number of axes the file does not tell."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.rule_checks import parse, run_with_variances


def of_unknown_rank(body: str, opset: int, rank: int) -> onnx.ModelProto:
    """`u` is x behind a Reshape to a shape that is fed, so that nothing tells how many axes it has."""
    sizes = ", ".join("abcd"[:rank])
    text = f"m (float[{sizes}] x, int64[k] s) => (float y) {{ u = Reshape(x, s) {body} }}"
    model = parse(text, opset)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 4))
V = RNG.uniform(0.1, 1, X.shape)


def found(body: str, opset: int, x: np.ndarray = X, v: np.ndarray = V) -> np.ndarray:
    model = of_unknown_rank(body, opset, x.ndim)
    feeds = {"x": x.astype(np.float32), "s": np.array(x.shape)}
    return run_with_variances(model, feeds, {"x": v.astype(np.float32)})["y_var"]


def chosen(where: np.ndarray) -> float:
    return float(V.reshape(-1)[where])


@pytest.mark.parametrize("opset", [9, 12, 13, 18, 20])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_full_reductions(opset, keepdims):
    flat = X.reshape(-1)
    expected = {
        "ReduceMax": chosen(flat.argmax()),
        "ReduceMin": chosen(flat.argmin()),
        "ReduceSum": V.sum(),
        "ReduceMean": V.sum() / V.size**2,
        "ReduceL1": V.sum(),
        "ReduceL2": ((flat**2 + V.ravel()) * V.ravel()).sum() / (flat**2 + V.ravel()).sum(),
        "ReduceSumSquare": (4 * flat**2 * V.ravel()).sum(),
    }
    for op, value in expected.items():
        var = found(f"y = {op}<keepdims={keepdims}>(u)", opset)
        np.testing.assert_allclose(var.ravel(), [value], rtol=1e-5, err_msg=op)
        assert var.ndim == (3 if keepdims else 0)


@pytest.mark.parametrize("opset", [13, 18])
def test_an_extremum_over_some_axes(opset):
    axes = "<axes=[1]>(u)" if opset < 18 else "(u, a)"
    head = "" if opset < 18 else "a = Constant<value_ints=[1]>() "
    var = found(f"{head}y = ReduceMax{axes}", opset)
    expected = np.take_along_axis(V, X.argmax(1, keepdims=True), 1)
    np.testing.assert_allclose(var, expected, rtol=1e-6)


def test_an_extremum_over_axes_that_are_fed():
    """The axes are a tensor of the graph: only the run tells which they are."""
    model = parse(
        "m (float[a, b, c] x, int64[k] axes) => (float y) { y = ReduceMin<keepdims=0>(x, axes) }", 18
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {"x": X.astype(np.float32), "axes": np.array([2])}
    var = run_with_variances(model, feeds, {"x": V.astype(np.float32)})["y_var"]
    np.testing.assert_allclose(var, np.take_along_axis(V, X.argmin(2, keepdims=True), 2)[..., 0], rtol=1e-6)


def test_nothing_is_reduced_where_no_axes_say_so():
    var = found("y = ReduceMax<noop_with_empty_axes=1>(u)", 18)
    np.testing.assert_allclose(var, V, rtol=1e-6)


def test_global_max_pool():
    var = found("y = GlobalMaxPool(u)", 17)
    np.testing.assert_allclose(
        var[..., 0], np.take_along_axis(V, X.argmax(2)[..., None], 2)[..., 0], rtol=1e-6
    )


def test_layer_normalization_over_axes_counted_from_the_end():
    """The weights are ones: J = (I - (1 + u uᵀ) / n) / σ for the last two axes together."""
    model = parse("m (float[a, b, c] x, int64[k] s, float[3, 4] g) => (float y) "
                  "{ u = Reshape(x, s) y = LayerNormalization<axis=-2, epsilon=0.0>(u, g) }", 17)  # fmt: skip
    model.graph.output[0].type.tensor_type.ClearField("shape")
    tiny = 1e-8 * V  # first order
    feeds = {"x": X.astype(np.float32), "s": np.array(X.shape), "g": np.ones((3, 4), np.float32)}
    var = run_with_variances(model, feeds, {"x": tiny.astype(np.float32)})["y_var"]
    for row, v, y in zip(X.reshape(2, -1), tiny.reshape(2, -1), var.reshape(2, -1)):
        n, u = row.size, (row - row.mean()) / row.std()
        jacobian = (np.eye(n) - (1 + np.outer(u, u)) / n) / row.std()
        np.testing.assert_allclose(y, jacobian**2 @ v, rtol=1e-4)
