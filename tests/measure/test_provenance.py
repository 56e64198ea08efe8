"""A converted file is what was written, and holds its source: any change is seen, and where weights lie is none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.errors import UserError
from gapa_onnx.measure.provenance import AS_WRITTEN, HOLDS_SOURCE, provenance
from gapa_onnx.model import protos
from gapa_onnx.model.digest import is_as_written
from gapa_onnx.model.load import load, read_proto
from gapa_onnx.model.writing import save
from gapa_onnx.record import read

SOURCE = MODELS / "digits_mlp.onnx"


@pytest.fixture
def model(digits_file) -> onnx.ModelProto:
    return onnx.load(digits_file)


def intact(model: onnx.ModelProto) -> bool:
    record = read(model)
    assert record is not None
    return is_as_written(model, record)


def failed(model: onnx.ModelProto) -> set[str]:
    record = read(model)
    assert record is not None
    return {check.name for check in provenance(load(SOURCE).given, model, record) if not check.passed}


def with_flipped_bit(tensor: onnx.TensorProto) -> None:
    content = bytearray(numpy_helper.to_array(tensor).tobytes())
    content[len(content) // 2] ^= 1
    name, kind, dims = tensor.name, tensor.data_type, list(tensor.dims)
    tensor.Clear()
    tensor.name, tensor.data_type, tensor.raw_data = name, kind, bytes(content)
    tensor.dims.extend(dims)


def test_one_bit_of_any_weight_or_parameter_is_seen(model):
    own = {tensor.name for tensor in onnx.load(SOURCE).graph.initializer}
    for number, tensor in enumerate(model.graph.initializer):
        if not np.prod(tensor.dims):
            continue
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        with_flipped_bit(copy.graph.initializer[number])
        assert not intact(copy)
        assert failed(copy) == ({AS_WRITTEN, HOLDS_SOURCE} if tensor.name in own else {AS_WRITTEN})


def of_source(model: onnx.ModelProto) -> onnx.NodeProto:
    """A node of the source inside a converted model."""
    own = {name for node in onnx.load(SOURCE).graph.node for name in node.output}
    return next(node for node in model.graph.node if node.output[0] in own)


def replaced_operator(model: onnx.ModelProto) -> None:
    kind = of_source(model).op_type
    body = [helper.make_node("Identity", ["a"], ["c"])]
    made = helper.make_function("", kind, ["a", "b"], ["c"], body, [helper.make_opsetid("", 17)])
    model.functions.append(made)


CHANGES: dict[str, tuple[Callable[[onnx.ModelProto], object], set[str]]] = {
    "a source node": (lambda m: of_source(m).attribute.add(name="odd", i=1, type=2), {AS_WRITTEN, HOLDS_SOURCE}),
    "no source node": (lambda m: m.graph.node.remove(of_source(m)), {AS_WRITTEN, HOLDS_SOURCE}),
    "a function in place of an operator": (replaced_operator, {AS_WRITTEN, HOLDS_SOURCE}),
    "an opset": (lambda m: setattr(m.opset_import[0], "version", 99), {AS_WRITTEN, HOLDS_SOURCE}),
    "the name of an input": (lambda m: setattr(m.graph.input[0], "name", "other"), {AS_WRITTEN, HOLDS_SOURCE}),
    "a node of ours": (lambda m: m.graph.node[-1].attribute.add(name="odd", i=1, type=2), {AS_WRITTEN}),
    "a function of ours": (lambda m: m.functions[0].node.pop(), {AS_WRITTEN}),
    "an output": (lambda m: m.graph.output.pop(), {AS_WRITTEN}),
    "metadata of others": (lambda m: m.metadata_props.add(key="author", value="me"), set()),
    "remarks": (lambda m: setattr(m, "doc_string", "seen by me"), set()),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_changes_are_seen(model, what):
    change, expected = CHANGES[what]
    change(model)
    assert failed(model) == expected


def test_a_record_that_says_something_else_is_seen(model):
    (entry,) = [one for one in model.metadata_props if one.key == "gapa_onnx"]
    entry.value = entry.value.replace('"task": "classification"', '"task": "multilabel"')
    assert not intact(model)


def test_where_weights_lie_makes_no_difference(model, tmp_path, monkeypatch):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # which is changed as it is saved
    onnx.save(copy, tmp_path / "a.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    assert intact(read_proto(tmp_path / "a.onnx"))
    monkeypatch.setattr(protos, "LARGEST_PROTO", 1000)
    save(model, tmp_path / "b.onnx")
    assert len(list(tmp_path.glob("b.onnx*"))) == 2 and intact(read_proto(tmp_path / "b.onnx"))


def test_a_moved_threshold_leaves_a_file_as_it_was_written(digits_file, tmp_path):
    gapa_onnx.set_threshold(digits_file, quantile=0.9, out=tmp_path / "moved.onnx")
    assert intact(read_proto(tmp_path / "moved.onnx"))


def test_sessions_and_inspect_look_at_it(model, digits_file, tmp_path, capsys):
    assert gapa_onnx.session(digits_file, check=True).get_outputs()
    assert gapa_onnx.session(digits_file.read_bytes(), check=True).get_outputs()
    assert main(["inspect", str(digits_file)]) == 0
    with_flipped_bit(model.graph.initializer[-1])
    changed = tmp_path / "changed.onnx"
    onnx.save(model, changed)
    for given in (changed, changed.read_bytes()):
        with pytest.raises(UserError, match="not what it was when gapa-onnx wrote it"):
            gapa_onnx.session(given, check=True)
    assert gapa_onnx.session(changed).get_outputs()  # only who asks pays for it
    capsys.readouterr()
    assert main(["inspect", str(changed), "--json"]) == 1
    out, err = capsys.readouterr()
    assert '"as_written": false' in out and "is not what it was" in err


def test_a_check_is_for_converted_files():
    with pytest.raises(UserError, match="was not written by gapa-onnx"):
        gapa_onnx.session(SOURCE, check=True)
    with pytest.raises(UserError, match="is damaged"):
        gapa_onnx.session(b"\xff" * 100, check=True)
