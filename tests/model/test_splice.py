"""Parts of a model: what they need of it, and nothing else."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from gapa_onnx.model.splice import extract, prune

TEXT = """<ir_version: 8, opset_import: ["": 17]>
net (float[n, 2] x, float[2, 3] w1, float[3, 1] w2) => (float[n, 1] y) {
    z = MatMul(x, w1)  h = Tanh(z)  other = Exp(z)  y = MatMul(h, w2) }"""


@pytest.fixture
def model() -> onnx.ModelProto:
    """A model that lists its initializers as inputs, as old exporters do in newer files too."""
    proto = onnx.parser.parse_model(TEXT)
    for name, shape in (("w1", (2, 3)), ("w2", (3, 1))):
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def test_a_part_before_a_tensor(model):
    part = extract(model, ["z"])
    assert [node.op_type for node in part.graph.node] == ["MatMul"]
    assert [tensor.name for tensor in part.graph.initializer] == ["w1"]
    x = np.ones((4, 2), np.float32)
    np.testing.assert_array_equal(run(part, {"x": x}), x @ np.arange(6, dtype=np.float32).reshape(2, 3))


def test_a_part_behind_a_tensor_that_is_given(model):
    given = onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, ["n", 3])
    part = extract(model, ["y"], [given])
    assert [value.name for value in part.graph.input] == ["x", "w2", "h"]  # w1 would have to be fed
    h = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(run(part, {"x": h[:, :2], "h": h}), np.full((4, 1), 3, np.float32))


def test_a_weight_that_is_given(model):
    given = onnx.helper.make_tensor_value_info("w2", onnx.TensorProto.FLOAT, [3, 1])
    del model.graph.input[1:]
    part = extract(model, ["y"], [given])
    assert [tensor.name for tensor in part.graph.initializer] == ["w1"]
    x, zeros = np.ones((4, 2), np.float32), np.zeros((3, 1), np.float32)
    assert not run(part, {"x": x, "w2": zeros}).any()


def test_prune_takes_out_what_nothing_needs(model):
    graph = model.graph
    prune(graph, ["h"])
    assert [node.op_type for node in graph.node] == ["MatMul", "Tanh"]
    assert [tensor.name for tensor in graph.initializer] == ["w1"]
    before = graph.SerializeToString(deterministic=True)
    prune(graph, ["h"])
    assert graph.SerializeToString(deterministic=True) == before
