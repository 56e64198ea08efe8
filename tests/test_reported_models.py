"""Small forms of models that once did not convert: states of zeros, tensors without elements, means read for their shape."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.small_models import parse

import gapa_onnx

RNG = np.random.default_rng(0)


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}


def integers(model: onnx.ModelProto, **arrays) -> onnx.ModelProto:
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(array, np.int64), name))
    return model


def passes(model: onnx.ModelProto, x: np.ndarray, **choices) -> gapa_onnx.Conversion:
    conversion = gapa_onnx.convert(model, {"x": x}, **{"m": 20, "k": 5, **choices})
    assert [check for check in conversion.checks if not check.passed] == []
    return conversion


@pytest.mark.parametrize("sites", ["auto", "all"])
def test_a_loop_whose_state_begins_as_zeros(sites):
    """They come from ConstantOfShape, depend on the rows' number alone and are no features."""
    text = """net (float[n, 3] x) => (float[n, 2] y) {
        whole = Shape(x)  rows = Slice(whole, zero, one)  sizes = Concat<axis = 0>(rows, five)
        start = ConstantOfShape(sizes)  z = MatMul(x, a)
        last = Loop<body = step (int64 i, bool go, float[n, 5] h) => (bool on, float[n, 5] next)
            { t = MatMul(h, u)  s = Add(t, z)  next = Tanh(s)  on = Identity(go) }>(three, , start)
        y = MatMul(last, w) }"""
    model = parse(text, **weights(a=(3, 5), u=(5, 5), w=(5, 2)))
    model = integers(model, zero=[0], one=[1], five=[5], three=3)
    conversion = passes(model, RNG.normal(size=(60, 3)).astype(np.float32), sites=sites)
    assert "start" not in {site.output for site in conversion.plan.sites}


@pytest.mark.parametrize("sites", ["auto", "all", "x:rows"])
def test_a_part_without_elements(sites):
    """A split with nothing in it, as exporters write optional inputs."""
    text = """net (float[n, 4] x) => (float[n, 2] y) {
        none = Slice(x, zero, zero, one)  e = Tanh(none)  z = MatMul(x, a)  h = Tanh(z)
        both = Concat<axis = 1>(e, h)  y = MatMul(both, w) }"""
    model = integers(parse(text, **weights(a=(4, 5), w=(5, 2))), zero=[0], one=[1])
    conversion = passes(model, RNG.normal(size=(60, 4)).astype(np.float32), sites=sites)
    assert "e" not in {site.output for site in conversion.plan.sites}


@pytest.mark.parametrize("opset", [8, 17])
@pytest.mark.parametrize("sites", ["auto", "all", "h:positions", "x:positions"])
def test_a_mean_that_is_read_for_its_shape_alone(opset, sites):
    """Behind a mean over volumes the variance needs their sizes: reading them must not undo what onnxruntime fuses at
    full optimisation, or the last bits of the source's outputs change."""
    text = """net (float[n, 1, d, 5, 5] x) => (float[n, 2] y) {
        c = Conv<kernel_shape = [2, 2, 2]>(x, k)  b = BatchNormalization(c, g, o, m, v)  h = Relu(b)
        e = Conv<kernel_shape = [2, 2, 2]>(h, l)  f = Relu(e)  p = ReduceMean<axes = [2, 3, 4], keepdims = 0>(f)
        y = MatMul(p, w) }"""
    norm = {"g": np.ones(3), "o": np.zeros(3), "m": np.full(3, 0.1), "v": np.full(3, 2.0)}
    model = parse(text, opset, **weights(k=(3, 1, 2, 2, 2), l=(4, 3, 2, 2, 2), w=(4, 2)), **norm)
    passes(model, RNG.normal(size=(40, 1, 5, 5, 5)).astype(np.float32), sites=sites)
