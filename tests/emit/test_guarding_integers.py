"""Shape arithmetic that is computed again: whole numbers, which Sum does not take."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.small_models import parse

import gapa_onnx

# As YOLO's decoding has it: sizes are static, so that onnxruntime folds the arithmetic away, and the variance graph,
# which reads the shape too, has it computed again.
SPLIT = """net (float[1, 4] x) => (float[1, 3] y) {
    z = MatMul(x, w1)  h = Tanh(z)
    size = Shape(h)  width = Gather<axis=0>(size, one)  more = Add(width, one)  half = Div(more, two)
    first = Slice(h, zero, half, one)  y = MatMul(first, w2) }"""


@pytest.mark.parametrize("opset", [12, 17])
def test_shape_arithmetic_is_computed_again_in_whole_numbers(opset):
    rng = np.random.default_rng(0)
    model = parse(SPLIT, opset, w1=rng.normal(size=(4, 7)), w2=rng.normal(size=(4, 3)))
    for name, value in (("zero", 0), ("one", 1), ("two", 2)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))
    batches = [{"x": rng.normal(size=(1, 4)).astype(np.float32)} for _ in range(100)]
    conversion = gapa_onnx.convert(model, batches, sites="h", m=20, k=5)
    assert [check for check in conversion.checks if not check.passed] == []
    again = [node for node in conversion.model.graph.node if node.output[0] == "more/again"]
    assert [node.op_type for node in again] == ["Add"]
