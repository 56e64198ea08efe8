"""A branch that the calibration data never take may contradict their shape; the file loads all the same, anywhere."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.small_models import parse

import gapa_onnx

RNG = np.random.default_rng(0)
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")

# One branch is for inputs one wide, as where a model takes two sample rates.
BRANCHES = """net (float[n, width] x) => (float[n, 3] y) {
    shape = Shape(x)  last = Constant<value_ints=[1]>()  width = Gather(shape, last)
    one = Constant<value_ints=[1]>()  narrow = Equal(width, one)
    y = If(narrow) <
        then_branch = narrow_net () => (float[n, 3] a) { axis = Constant<value_ints=[1]>()
            flat = Squeeze(x, axis)  column = Unsqueeze(flat, axis)  a = MatMul(column, w1) },
        else_branch = wide_net () => (float[n, 3] b) { b = MatMul(x, w4) }
    > }"""


ROWS = RNG.normal(size=(60, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def source() -> onnx.ModelProto:
    return parse(BRANCHES, w1=RNG.normal(size=(1, 3)), w4=RNG.normal(size=(4, 3)))


@pytest.fixture(scope="module")
def converted(source) -> bytes:
    conversion = gapa_onnx.convert(source, {"x": ROWS}, m=20, k=5, task="none")
    assert [check for check in conversion.checks if not check.passed] == []
    return conversion.model.SerializeToString()


@pytest.mark.parametrize("level", LEVELS)
def test_a_branch_that_is_not_taken_lets_the_file_load(source, converted, level):
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(converted, options)  # without our library
    strange = {"x": ROWS[:3] + 5}
    y, y_var = session.run(["y", "y_var"], strange)
    (expected,) = ort.InferenceSession(source.SerializeToString(), options).run(None, strange)
    assert y.tobytes() == expected.tobytes() and (y_var > 0).all()


def test_a_known_width_needs_no_node_for_it():
    text = """net (float[n, 4] x) => (float[n, 3] y) {
        zero = Constant<value_float=0.0>()  sum = ReduceSum<keepdims=0>(x)  turn = Greater(sum, zero)
        h = If(turn) <
            then_branch = negative () => (float[n, 4] a) { a = Neg(x) },
            else_branch = same () => (float[n, 4] b) { b = Identity(x) }
        >
        y = MatMul(h, w) }"""
    model = parse(text, w=RNG.normal(size=(4, 3)))
    conversion = gapa_onnx.convert(model, {"x": ROWS}, sites="x:rows", m=20, k=5, task="none")
    assert not any(node.op_type == "Reshape" for node in conversion.model.graph.node)
