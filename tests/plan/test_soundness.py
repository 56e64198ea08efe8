"""A file whose numbers are damaged: wherever a variance is negative or no number, the input is flagged, also in a stock session."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.record import read

DAMAGE = {
    "negative": lambda array: -np.abs(array) - 1e-3,
    "no number": lambda array: np.full_like(array, np.nan),
    "infinite": lambda array: np.full_like(array, np.inf),
    "one negative": lambda array: np.concatenate([[-1e3], array.ravel()[1:]]).reshape(array.shape),
}
VARIANCES = ("var", "total_var", "aleatoric_var")


@pytest.fixture(scope="module")
def regression() -> onnx.ModelProto:
    """Two outputs per row, with a noise head."""
    from onnx import parser

    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[n, 3] x) => (float[n, 2] y) {
        z = MatMul(x, w1)  h = Tanh(z)  y = MatMul(h, w2) }"""
    model, rng = parser.parse_model(text), np.random.default_rng(7)
    for name, shape in (("w1", (3, 8)), ("w2", (8, 2))):
        model.graph.initializer.append(
            numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        )
    x = rng.standard_normal((120, 3)).astype(np.float32)
    y = rng.standard_normal((120, 2)).astype(np.float32)
    return gapa_onnx.convert(model, {"x": x}, targets=y, m=20, k=5, task="regression").model


@pytest.fixture(scope="module")
def classification(digits_file) -> onnx.ModelProto:
    return onnx.load(digits_file)


def damaged(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    """The model with one added initializer of numbers damaged, each in turn."""
    for number, tensor in enumerate(model.graph.initializer):
        if "/" not in tensor.name or tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        how = list(DAMAGE)[number % len(DAMAGE)]
        yield f"{tensor.name}, {how}", with_damage(model, number, how)


def with_damage(model: onnx.ModelProto, number: int, how: str) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensor = copy.graph.initializer[number]
    array = DAMAGE[how](numpy_helper.to_array(tensor).astype(np.float32)).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return copy


def unsound(answers: dict[str, np.ndarray], roles: dict[str, str]) -> np.ndarray:
    """Rows with a variance that is none."""
    rows = np.zeros(len(answers[roles["ood"]]), bool)
    for role in VARIANCES:
        if role in roles:
            var = answers[roles[role]].reshape(len(rows), -1)
            rows |= ~(np.isfinite(var) & (var >= 0)).all(axis=1)
    return rows


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_every_row_without_a_sound_variance_is_flagged(kind, request):
    model = request.getfixturevalue(kind)
    (head,) = read(model).heads.values()
    if kind == "classification":
        feed = {"pixels": np.load(MODELS / "digits_mlp_heldout.npz")["pixels"][:8]}
    else:
        feed = {"x": np.random.default_rng(8).standard_normal((8, 3)).astype(np.float32)}
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # which load fastest
    names = [output.name for output in model.graph.output]
    wrong, reached = [], 0
    for what, changed in damaged(model):
        session = ort.InferenceSession(changed.SerializeToString(), options, ["CPUExecutionProvider"])
        answers = dict(zip(names, session.run(names, feed)))
        rows = unsound(answers, head.outputs)
        reached += rows.any()
        if (rows & ~answers[head.outputs["ood"]]).any() or (answers[head.outputs["pvalue"]][rows] > 0).any():
            wrong.append(what)
    assert not wrong
    assert reached > 2  # several ways were found that make variances unsound


def with_number(model: onnx.ModelProto, name: str, number: float) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    (tensor,) = [tensor for tensor in copy.graph.initializer if tensor.name == name]
    array = np.full_like(numpy_helper.to_array(tensor), number)
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    return copy


@pytest.mark.parametrize("number", [-1.0, -np.inf, np.nan, 3e38])
def test_no_other_damaged_number_takes_the_flag_away(regression, number):
    """Variances are negative, and so is the level, or any other number that a flag is made of."""
    (head,) = read(regression).heads.values()
    held = enumerate(regression.graph.initializer)
    position = next(at for at, tensor in held if "/" in tensor.name and "var" in tensor.name)
    negative = with_damage(regression, position, "negative")
    names = [output.name for output in negative.graph.output]
    feed = {"x": np.random.default_rng(8).standard_normal((8, 3)).astype(np.float32)}
    scalars = [
        tensor.name
        for tensor in negative.graph.initializer
        if not tensor.dims
        and tensor.data_type == onnx.TensorProto.FLOAT
        and ("gapa/" in tensor.name or "/level" in tensor.name)
    ]
    assert any(name.endswith("/level") for name in scalars)
    reached = 0
    for name in scalars:
        model = with_number(negative, name, number)
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        answers = dict(zip(names, session.run(names, feed)))
        rows = unsound(answers, head.outputs)
        reached += rows.any()
        assert answers[head.outputs["ood"]][rows].all(), name
    assert reached > 0


def test_a_class_that_is_ruled_out_is_no_reason_for_a_flag():
    """Logits of minus infinity have no error bar, and a model may have them for every input."""
    from onnx import parser

    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[n, 3] x) => (float[n, 4] logits) {
        z = MatMul(x, w1)  h = Tanh(z)  a = MatMul(h, w2)  logits = Add(a, mask) }"""
    model, rng = parser.parse_model(text), np.random.default_rng(7)
    numbers = {"w1": rng.standard_normal((3, 8)), "w2": rng.standard_normal((8, 4)),
               "mask": np.array([0, 0, 0, -np.inf])}  # fmt: skip
    for name, array in numbers.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    x = rng.standard_normal((200, 3)).astype(np.float32)
    converted = gapa_onnx.convert(model, {"x": x}, m=20, k=5, score="variance").model
    session = ort.InferenceSession(converted.SerializeToString())
    assert session.run(["logits_ood"], {"x": x})[0].mean() < 0.2
