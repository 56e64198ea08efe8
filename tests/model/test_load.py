"""Step 1, load: what a `SourceModel` says of a file, and what is said of files that are none."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
import pytest
from support.small_models import parse

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import OPSET_WHERE_NONE, load
from gapa_onnx.record import METADATA_KEY

NET = "net (float[n, 2] x, int64[n] lengths) => (float[n, 3] y) { z = MatMul(x, w)  y = Tanh(z) }"


def net() -> onnx.ModelProto:
    return parse(NET, w=np.ones((2, 3)))


def with_functions() -> onnx.ModelProto:
    """z = double(x), y = double(z), where double is the model's own."""
    text = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
        net (float[n, 2] x) => (float[n, 2] y) { z = own.double(x)  y = own.double(z) }
        <domain: "own", opset_import: ["": 17]> double (a) => (b) { b = Add(a, a) }"""
    return onnx.parser.parse_model(text)


def test_inputs_types_and_names():
    source = load(net())
    assert [(spec.name, spec.dtype, spec.shape) for spec in source.inputs] == [
        ("x", np.float32, ("n", 2)),
        ("lengths", np.int64, ("n",)),
    ]
    assert [tensor.name for tensor in source.outputs] == ["y"]
    assert {"x", "lengths", "w", "z", "y"} <= source.names
    assert source.opset == 17 and source.label == "net" and source.path is None
    hidden = source.graph.tensors()["z"]  # which the file does not declare
    assert hidden.dtype == np.float32 and list(hidden.shape) == ["n", 3]


def test_weights_that_are_listed_as_inputs_are_not_fed():
    """As files before IR 4 do."""
    model = parse(
        "net (float[n, 2] x, float[2, 3] w) => (float[n, 3] y) { y = MatMul(x, w) }", w=np.ones((2, 3))
    )
    assert [spec.name for spec in load(model).inputs] == ["x"]


def test_names_inside_control_flow_are_taken_too():
    text = """net (bool c, float[n] x) => (float[n] y) {
        y = If <then_branch = one () => (float[n] inner) { inner = Neg(x) },
                else_branch = other () => (float[n] outer) { outer = Abs(x) }> (c) }"""
    assert {"inner", "outer"} <= load(parse(text)).names


def test_functions_are_inlined_and_the_given_model_is_kept():
    model = with_functions()
    before = model.SerializeToString()
    source = load(model)
    assert [node.op_type for node in source.proto.graph.node] == ["Add", "Add"]
    assert not source.proto.functions and {node.op for node in source.graph.nodes} == {"Add"}
    assert source.given is model and model.SerializeToString() == before
    assert source.sha256 == load(with_functions()).sha256


def test_a_model_without_functions_is_taken_as_it_is():
    model = net()
    source = load(model)
    assert source.proto is source.given is model


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path):
    path = tmp_path / "net.onnx"
    onnx.save(net(), path)
    source = load(str(path))
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source.path == path and source.label == str(path)


def test_a_model_without_onnx_operators_gets_the_default_domain():
    scaler = onnx.helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[0.0], scale=[2.0])
    values = [onnx.helper.make_tensor_value_info(name, 1, ["n", 2]) for name in "xy"]
    graph = onnx.helper.make_graph([scaler], "scaled", values[:1], values[1:])
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("ai.onnx.ml", 3)], ir_version=8
    )
    source = load(model)
    assert source.opset == OPSET_WHERE_NONE
    assert {entry.domain: entry.version for entry in source.proto.opset_import} == {
        "ai.onnx.ml": 3,
        "": OPSET_WHERE_NONE,
    }
    assert [entry.domain for entry in model.opset_import] == ["ai.onnx.ml"]


def external(tmp_path):
    path = tmp_path / "net.onnx"
    onnx.save(net(), path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    return path


def written(tmp_path, content: bytes):
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    return path


def converted(tmp_path):
    model = net()
    model.metadata_props.add(key=METADATA_KEY, value="{}")
    return model


def no_nodes(tmp_path):
    model = net()
    del model.graph.node[:]
    return model


@pytest.mark.parametrize(
    "make, message, hint",
    [
        (lambda folder: folder, "is a folder", ".onnx file inside"),
        (lambda folder: folder / "none.onnx", "no such file", "path of the model"),
        (lambda folder: written(folder, b"no model"), "is not an ONNX file", "export"),
        (lambda folder: written(folder, net().SerializeToString()[:40]), "is not an ONNX file", "export"),
        (lambda folder: written(folder, b""), "is not an ONNX file", "export"),
        (external, "external data", "beside the model"),
        (no_nodes, "has no nodes", "trained model"),
        (converted, "was converted by gapa-onnx already", "original model"),
        (lambda folder: parse(NET, opset=6, w=np.ones((2, 3))), "uses opset 6", "convert_version"),
    ],
)
def test_what_is_no_model_is_refused_with_a_sentence(tmp_path, make, message, hint):
    with pytest.raises(UserError) as error:
        load(make(tmp_path))
    assert message in error.value.message and hint in error.value.hint
