"""Damaged models, records and data through the commands: an answer, or a sentence and exit code 2; never a trace.

Bytes are flipped by a seeded generator, so that what is seen once is seen again.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.errors import UserError
from gapa_onnx.record import METADATA_KEY

FLIPS = 60  # files of each kind


def outcome(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str]:
    """The exit code of a command, and what it said; a trace is a failure here too, as it raises."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err and "\x1b" not in out + err
    if code == 2:
        assert err.startswith(("error: ", "note: ", "warning: ")) and "error: " in err
        assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    return code, out + err


def flipped(content: bytes, generator: np.random.Generator, count: int) -> bytes:
    """The content with some bytes changed, most of them in what is not numbers."""
    changed = bytearray(content)
    kind = generator.integers(3)
    for _ in range(count):
        at = int(generator.integers(len(changed)))
        if kind == 0:
            changed[at] ^= 1 << int(generator.integers(8))
        elif kind == 1:
            changed[at] = int(generator.integers(256))
        else:
            del changed[at : at + int(generator.integers(1, 9))]
    return bytes(changed)


def small_model() -> bytes:
    """A model whose bytes are names, shapes and operators rather than weights."""
    model = onnx.load(MODELS / "digits_cnn.onnx")
    for tensor in model.graph.initializer:
        if tensor.raw_data and len(tensor.raw_data) > 400:
            tensor.raw_data = b""
            tensor.data_type, tensor.dims[:] = onnx.TensorProto.FLOAT, [0, *tensor.dims[1:]]
    return bytes(model.SerializeToString())


def cases(seed: int, content: bytes) -> Iterator[bytes]:
    for number in range(FLIPS):
        generator = np.random.default_rng([seed, number])
        yield flipped(content, generator, int(generator.integers(1, 6)))


def test_flipped_models_are_inspected_or_refused(capsys, tmp_path):
    path, codes = tmp_path / "model.onnx", []
    for content in cases(1, small_model()):
        path.write_bytes(content)
        codes.append(outcome(capsys, "inspect", path)[0])
    assert {0, 2} == set(codes)  # both are reached, so that something was tested


def test_flipped_models_are_run_or_refused(capsys, tmp_path):
    path, codes = tmp_path / "model.onnx", []
    content = (MODELS / "digits_mlp.onnx").read_bytes()
    for changed in cases(2, content[:600]):
        path.write_bytes(changed + content[600:])
        codes.append(outcome(capsys, "run", path, "--data", MODELS / "digits_mlp_heldout.npz")[0])
    assert 2 in codes


@pytest.fixture(scope="module")
def answering(digits_file: Path) -> tuple[onnx.ModelProto, dict]:
    model = onnx.load(digits_file)
    (entry,) = [one for one in model.metadata_props if one.key == METADATA_KEY]
    return model, json.loads(entry.value)


def put(model: onnx.ModelProto, text: str | bytes, path: Path) -> Path:
    """The model with another record."""
    content = model.SerializeToString()
    (entry,) = [one for one in model.metadata_props if one.key == METADATA_KEY]
    old = entry.SerializeToString()
    copy = onnx.StringStringEntryProto(key=METADATA_KEY)
    if isinstance(text, bytes):
        copy.value = "?" * len(text)
        new = copy.SerializeToString().replace(b"?" * len(text), text)
    else:
        copy.value = text
        new = copy.SerializeToString()
    assert content.count(old) == 1
    framed = b"\x72" + varint(len(old)) + old
    assert content.count(framed) == 1
    path.write_bytes(content.replace(framed, b"\x72" + varint(len(new)) + new))
    return path


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


RECORDS: dict[str, Callable[[dict], str | bytes]] = {
    "no JSON": lambda record: "{",
    "a list": lambda record: "[]",
    "null": lambda record: "null",
    "deep": lambda record: "[" * 100_000 + "]" * 100_000,
    "deep inside": lambda record: json.dumps(record)[:-1] + ', "x": ' + '{"x":' * 5_000 + "1" + "}" * 5_001,
    "not a number": lambda record: json.dumps({**record, "format": float("nan")}),
    "huge number": lambda record: json.dumps(record).replace('"format": ', '"format": ' + "9" * 5_000),
    "text for a number": lambda record: json.dumps({**record, "data": {"rows": "many", "dropped": "none"}}),
    "number for text": lambda record: json.dumps({**record, "version": 1}),
    "list for an object": lambda record: json.dumps({**record, "heads": [1]}),
    "half a character": lambda record: json.dumps({**record, "version": "\ud800"}),
    "no text": lambda record: json.dumps(record).encode() + b"\xff\xfe",
    "escapes": lambda record: json.dumps({**record, "version": "\x1b[2J"}),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("command", ["inspect", "run", "threshold", "evaluate", "verify"])
def test_damaged_records_are_told(capsys, answering, tmp_path, name, command):
    model, record = answering
    path = put(model, RECORDS[name](record), tmp_path / "model.onnx")
    data = MODELS / "digits_mlp_heldout.npz"
    arguments = {
        "inspect": [path],
        "run": [path, "--data", data],
        "threshold": [path],
        "evaluate": [path, "--data", data],
        "verify": [MODELS / "digits_mlp.onnx", path, "--data", data, "--rows", "4"],
    }[command]
    if name in ("half a character", "escapes"):  # odd, and not wrong
        if command in ("inspect", "threshold"):
            assert outcome(capsys, command, *arguments)[0] == (1 if command == "inspect" else 0)
        return
    assert outcome(capsys, command, *arguments)[0] == 2


def test_flipped_records_are_told(capsys, answering, tmp_path):
    model, record = answering
    text = json.dumps(record).encode()
    for changed in cases(3, text):
        path = put(model, changed, tmp_path / "model.onnx")
        assert outcome(capsys, "inspect", path)[0] in (0, 1, 2)


# ------------------------------------------------------------------ data


def pb_of(**fields: object) -> bytes:
    """A tensor of 1 × 64 numbers with some fields changed."""
    tensor = onnx.numpy_helper.from_array(np.zeros((1, 64), np.float32), "pixels")
    for name, value in fields.items():
        if name == "external_data":
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=str(value))
        elif name == "dims":
            tensor.dims[:] = value
        elif name == "float_data":
            tensor.float_data.extend(value)
        else:
            setattr(tensor, name, value)
    return bytes(tensor.SerializeToString())


def npy_of(shape: str, fortran: bool = False) -> bytes:
    """A .npy that says that it has this shape."""
    header = f"{{'descr': '<f4', 'fortran_order': {fortran}, 'shape': {shape}, }}"
    header += " " * (63 - (len(header) + 10) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(256)


def npz_of(member: bytes) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pixels.npy", member)
    return held.getvalue()


DATA: dict[str, tuple[str, bytes, str]] = {  # name of the file, what is in it, what is said
    "negative shape": ("a.npy", npy_of("(-1, 64)"), "(-1, 64)"),
    "shape beyond integers": ("a.npy", npy_of(f"({1 << 70}, 64)"), "cannot be read"),
    "shape that is none": ("a.npy", npy_of("('a', 64)"), "cannot be read"),
    "header that never ends": ("a.npy", npy_of("(" * 5000), "cannot be read"),
    "negative shape in a zip": ("a.npz", npz_of(npy_of("(-1, 64)")), "(-1, 64)"),
    "giant by columns": ("a.npz", npz_of(npy_of("(1000000000, 64)", True)), " needs "),
    "giant by rows": ("a.npz", npz_of(npy_of("(1000000000, 64)")), " needs "),
    "a scalar without bytes": ("a.npz", npz_of(npy_of("()")[:-256]), "has shape ()"),
    "type 99": ("a.pb", pb_of(data_type=99), "type 99"),
    "data elsewhere": ("a.pb", pb_of(external_data="/etc/passwd"), "not followed"),
    "data twice": ("a.pb", pb_of(float_data=[0.0] * 64), "twice"),
    "negative size": ("a.pb", pb_of(dims=[-1, 64]), "(-1, 64)"),
    "too few bytes": ("a.pb", pb_of(dims=[1 << 40, 64]), "in place of"),
    "no tensor": ("a.pb", b"\xff" * 64, "cannot be read"),
    "zero bytes in text": ("a.csv", b",".join([b"1"] * 63) + b",1\x002\n", "error: "),
    "no text": ("a.csv", b"\xff\xfe" * 64, "cannot be read"),
    "a cell without end": ("a.csv", b'"' + b"1" * 200_000, "cannot be read"),
    "no table": ("a.parquet", b"PAR1" + bytes(100) + b"PAR1", "cannot be read"),
    "no archive": ("a.npz", b"PK" + bytes(100), "cannot be read"),
    "nothing": ("a.npz", b"", "cannot be read"),
}


@pytest.mark.parametrize("name", DATA)
def test_damaged_data_are_told(capsys, tmp_path, name):
    file, content, said = DATA[name]
    (tmp_path / file).write_bytes(content)
    code, text = outcome(capsys, "run", MODELS / "digits_mlp.onnx", "--data", tmp_path / file)
    assert code == 2 and said in text


def good_data(folder: Path) -> list[Path]:
    """A file of each kind that holds the same two rows."""
    rows = np.arange(128, dtype=np.float32).reshape(2, 64) % 17
    np.save(folder / "a.npy", rows)
    np.savez(folder / "a.npz", pixels=rows)
    np.savez_compressed(folder / "b.npz", pixels=np.asfortranarray(rows))
    (folder / "a.pb").write_bytes(onnx.numpy_helper.from_array(rows, "pixels").SerializeToString())
    np.savetxt(folder / "a.csv", rows, delimiter=",", fmt="%g")
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    columns = {f"c{k}": rows[:, k] for k in range(64)}
    parquet.write_table(pyarrow.table(columns).select(list(columns)), folder / "a.parquet")
    return sorted(folder.iterdir())


def test_flipped_data_are_read_or_refused(capsys, tmp_path):
    for path in good_data(tmp_path):
        assert outcome(capsys, "run", MODELS / "digits_mlp.onnx", "--data", path)[0] == 0
        for content in itertools.islice(cases(4, path.read_bytes()), FLIPS // 3):
            path.write_bytes(content)
            assert outcome(capsys, "run", MODELS / "digits_mlp.onnx", "--data", path)[0] in (0, 2)


def test_flipped_images_are_read_or_refused(capsys, tmp_path):
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0).integers(0, 255, (8, 8), np.uint8)
    for kind, name in (("PNG", "a.png"), ("JPEG", "a.jpg"), ("BMP", "a.bmp")):
        path = tmp_path / name
        image.fromarray(noise).save(path, kind)
        assert outcome(capsys, "run", MODELS / "digits_cnn.onnx", "--data", path)[0] == 0
        for content in itertools.islice(cases(5, path.read_bytes()), FLIPS // 3):
            path.write_bytes(content)
            assert outcome(capsys, "run", MODELS / "digits_cnn.onnx", "--data", path)[0] in (0, 2)


# ------------------------------------------------------------------ models that are wrong in one place


def broken(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    model = onnx.load(MODELS / "digits_mlp.onnx")
    change(model)
    return model


def attribute_of_type(number: int) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        one = model.graph.node[0].attribute.add(name="odd")
        one.type = number

    return change


def chain(functions: int, calls: int) -> Callable[[onnx.ModelProto], object]:
    """Functions that each call the next so many times; the last one does nothing."""

    def change(model: onnx.ModelProto) -> None:
        model.ir_version = 8
        imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("own", 1)]
        for number in range(functions):
            last = number == functions - 1
            nodes = [
                onnx.helper.make_node("Identity", [f"a{k}"], [f"a{k + 1}"])
                if last
                else onnx.helper.make_node(f"f{number + 1}", [f"a{k}"], [f"a{k + 1}"], domain="own")
                for k in range(calls)
            ]
            made = onnx.helper.make_function("own", f"f{number}", ["a0"], [f"a{calls}"], nodes, imports)
            model.functions.append(made)
        model.opset_import.add(domain="own", version=1)
        model.graph.node.append(onnx.helper.make_node("f0", ["pixels"], ["z"], domain="own"))
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info("z"))

    return change


def calls_itself(model: onnx.ModelProto) -> None:
    chain(2, 1)(model)
    model.functions[1].node[0].op_type, model.functions[1].node[0].domain = "f0", "own"


def waits(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = model.graph.node[2].output[0]


MODELS_WRONG: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "node without outputs": (lambda m: m.graph.node[0].ClearField("output"), "has no outputs"),
    "node without operator": (lambda m: m.graph.node[0].ClearField("op_type"), "has no operator"),
    "node without inputs": (lambda m: m.graph.node[0].ClearField("input"), "has 0 inputs"),
    "nodes that wait": (waits, "wait for each other"),
    "tensor of no type": (lambda m: setattr(m.graph.initializer[0], "data_type", 99), "type 99"),
    "tensor without data": (lambda m: m.graph.initializer[0].ClearField("raw_data"), "0 numbers in place of"),
    "tensor with data twice": (lambda m: m.graph.initializer[0].float_data.append(1.0), "its data twice"),
    "tensor of negative size": (lambda m: m.graph.initializer[0].dims.insert(0, -1), "has the shape"),
    "input of no type": (
        lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 77), "of the type 77",
    ),
    "opset 0": (lambda m: setattr(m.opset_import[0], "version", 0), "imports version 0"),
    "a bomb of functions": (chain(14, 4), "unfold to more than"),
    "a long chain of functions": (chain(500, 1), "100 deep"),
    "a function that calls itself": (calls_itself, "calls itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS_WRONG)
@pytest.mark.parametrize("command", ["inspect", "convert", "run"])
def test_a_model_that_is_wrong_in_one_place_is_told(capsys, tmp_path, name, command):
    change, said = MODELS_WRONG[name]
    path = tmp_path / "wrong.onnx"
    path.write_bytes(broken(change).SerializeToString())
    data = MODELS / "digits_mlp_heldout.npz"
    more = {"inspect": [], "convert": ["--calib", data], "run": ["--data", data]}[command]
    code, text = outcome(capsys, command, path, *more)
    assert code == 2 and (said in text or (command == "run" and name == "nodes that wait"))
    assert list(tmp_path.iterdir()) == [path]


def test_functions_within_the_limits_are_put_in_place(capsys, tmp_path):
    path = tmp_path / "right.onnx"
    path.write_bytes(broken(chain(3, 4)).SerializeToString())
    assert outcome(capsys, "inspect", path)[0] == 0


# ------------------------------------------------------------------ weights that lie elsewhere


def named_weights(folder: Path, location: str) -> Path:
    """The digits model, whose weights are said to be at a place."""
    folder.mkdir(exist_ok=True)
    onnx.save(onnx.load(MODELS / "digits_mlp.onnx"), folder / "model.onnx", save_as_external_data=True,
              location="weights", size_threshold=0)  # fmt: skip
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def elsewhere(tmp_path: Path, how: str) -> Path:
    folder = tmp_path / "model"
    location = {
        "beside": "weights",
        "above": "../weights",
        "above by a way round": "in/../../weights",
        "absolute": str(tmp_path / "weights"),
        "windows": "..\\weights",
        "nothing": "",
    }.get(how, "weights")
    path = named_weights(folder, location)
    if how in ("above", "above by a way round", "absolute", "windows", "symbolic link"):
        (folder / "weights").rename(tmp_path / "weights")
        (folder / "in").mkdir()
    if how == "symbolic link":
        (folder / "weights").symlink_to(tmp_path / "weights")
    if how == "hard link":
        os.link(folder / "weights", tmp_path / "weights")
    if how == "cut short":
        os.truncate(folder / "weights", 100)
    if how == "linked folder":
        (tmp_path / "there").mkdir()
        (folder / "weights").rename(tmp_path / "there" / "weights")
        (folder / "in").symlink_to(tmp_path / "there")
        path = named_weights(folder, "in/weights")
        (folder / "weights").unlink()
    return path


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize(
    "how", ["above", "above by a way round", "absolute", "windows", "nothing", "symbolic link", "hard link",
            "cut short", "linked folder"],
)  # fmt: skip
def test_weights_anywhere_but_beside_the_model_are_refused_before_onnxruntime_sees_them(
    capsys, tmp_path, monkeypatch, how
):
    path = elsewhere(tmp_path, how)

    def seen(*arguments: object, **named: object) -> None:
        raise AssertionError("onnxruntime has been given the file")

    monkeypatch.setattr("onnxruntime.InferenceSession", seen)
    data = MODELS / "digits_mlp_heldout.npz"
    for command, more in (("inspect", []), ("convert", ["--calib", data]), ("run", ["--data", data])):
        code, text = outcome(capsys, command, path, *more)
        assert code == 2 and ("external data" in text or "cut short" in text)
    with pytest.raises(UserError):
        gapa_onnx.session(path)


def test_weights_beside_the_model_are_read(capsys, tmp_path):
    path = elsewhere(tmp_path, "beside")
    assert outcome(capsys, "run", path, "--data", MODELS / "digits_mlp_heldout.npz")[0] == 0
    assert gapa_onnx.session(path).get_inputs()


# ------------------------------------------------------------------ models that are well-formed and make no sense


def rewired(model: onnx.ModelProto, generator: np.random.Generator) -> None:
    """Change one thing of a graph that leaves it a graph."""
    nodes, weights = model.graph.node, model.graph.initializer

    def one_of(held):  # a repeated field has no type of its own
        return held[int(generator.integers(len(held)))]

    node = one_of(nodes)
    names = [name for other in nodes for name in other.output] + [weight.name for weight in weights]
    changes: list[Callable[[], object]] = [
        lambda: node.input.append(one_of(names)),
        lambda: node.input and node.input.__setitem__(0, one_of(names)),
        lambda: node.input and node.input.pop(),
        lambda: node.output.append(one_of(names)),
        lambda: node.output.__setitem__(0, one_of(names)),
        lambda: setattr(node, "op_type", one_of(["Relu", "Conv", "Gather", "Loop", "Split", "Constant", "Nope"])),
        lambda: node.attribute and node.attribute.pop(),
        lambda: [one_of(a.ints) and a.ints.__setitem__(0, one_of([-1, 0, 1 << 62])) for a in node.attribute if a.ints],
        lambda: one_of(weights).dims.__setitem__(0, one_of([0, 1, 1 << 40])),
        lambda: setattr(one_of(model.graph.input[0].type.tensor_type.shape.dim), "dim_value", one_of([-1, 0, 1 << 40])),
        lambda: nodes.append(node),
    ]  # fmt: skip
    one_of(changes)()


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn"])
def test_rewired_models_are_answered_or_refused(capsys, tmp_path, name):
    path, codes = tmp_path / "model.onnx", []
    data = MODELS / f"{name}_heldout.npz"
    for number in range(FLIPS):
        generator = np.random.default_rng([6, number])
        model = onnx.load(MODELS / f"{name}.onnx")
        rewired(model, generator)
        path.write_bytes(model.SerializeToString())
        more = ["run", path, "--data", data] if number % 4 == 0 else ["inspect", path]
        codes.append(outcome(capsys, *more)[0])
    assert {0, 2} == set(codes)


def test_labels_without_a_row_are_told(capsys, digits_file, tmp_path):
    (tmp_path / "labels.csv").write_text("label\n")
    data = MODELS / "digits_mlp_heldout.npz"
    code, said = outcome(capsys, "evaluate", digits_file, "--data", data, "--labels", tmp_path / "labels.csv")
    assert code == 2 and "there are 0 labels for" in said


def test_a_converted_file_that_lost_its_record_is_inspected_as_any_model(capsys, answering, tmp_path):
    """Among its outputs are numbers for classes whose axis nobody knows."""
    model = onnx.ModelProto.FromString(answering[0].SerializeToString())
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "model.onnx")
    assert outcome(capsys, "inspect", tmp_path / "model.onnx")[0] == 0


def test_an_attribute_of_no_function_is_told(capsys, tmp_path):
    model = onnx.load(MODELS / "digits_cnn.onnx")
    (node, *_) = (node for node in model.graph.node if node.attribute)
    node.attribute[0].ref_attr_name = "axis"
    onnx.save(model, tmp_path / "model.onnx")
    code, said = outcome(capsys, "inspect", tmp_path / "model.onnx")
    assert code == 2 and "refers to that of a function" in said
