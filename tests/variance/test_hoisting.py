"""Behind the last site: one multiplication by the share, of a vector that is computed once, at load."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.sessions.runtime import register, session_options

NETS = {
    "gemm": ("(float[n, 6] x) => (float[n, 4] y) { z = MatMul(x, w1)  h = Tanh(z)  y = Gemm(h, w2, b) }", (6, 8), (8, 4)),
    "scaled gemm": (
        "(float[n, 6] x) => (float[n, 4] y) { z = MatMul(x, w1)  h = Tanh(z)  y = Gemm<alpha = 0.5, transB = 1>(h, w2, b) }",
        (6, 8), (4, 8),
    ),
    "matmul and bias": (
        "(float[n, 6] x) => (float[n, 4] y) { z = MatMul(x, w1)  h = Tanh(z)  l = MatMul(h, w2)  y = Add(l, b) }",
        (6, 8), (8, 4),
    ),
    "tokens": (
        "(float[n, t, 6] x) => (float[n, t, 4] y) { z = MatMul(x, w1)  h = Tanh(z)  l = MatMul(h, w2)  y = Add(l, b) }",
        (6, 8), (8, 4),
    ),
    "times a constant": (
        "(float[n, 6] x) => (float[n, 4] y) { z = MatMul(x, w1)  h = Tanh(z)  l = MatMul(h, w2)  y = Mul(l, b) }",
        (6, 8), (8, 4),
    ),
    "pointwise convolution": (
        "(float[n, 3, 5, 5] x) => (float[n, 4, 5, 5] y) { z = Conv(x, w1)  h = Tanh(z)  y = Conv(h, w2, b) }",
        (8, 3, 1, 1), (4, 8, 1, 1),
    ),
}  # fmt: skip


def build(case: str) -> tuple[onnx.ModelProto, np.ndarray]:
    text, first, second = NETS[case]
    generator = np.random.default_rng(0)
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> net {text}')
    for name, shape in (("w1", first), ("w2", second), ("b", (4,))):
        array = generator.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    shape = {"tokens": (7, 6), "pointwise convolution": (3, 5, 5)}.get(case, (6,))
    return model, generator.normal(size=(90, *shape)).astype(np.float32)


def optimised(model: onnx.ModelProto, folder: Path) -> onnx.GraphProto:
    """The graph that onnxruntime runs."""
    options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    register(options)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath).graph


@pytest.mark.parametrize("case", NETS)
def test_only_one_multiplication_is_left(case, tmp_path):
    model, x = build(case)
    converted = gapa_onnx.convert(model, {"x": x}, m=30, k=8, task="none", sites="h", scale="none").model
    graph = optimised(converted, tmp_path)
    made_by = {name: node for node in graph.node for name in node.output}
    node = made_by["y_var"]
    assert node.op_type == "Mul"
    constants = {tensor.name for tensor in graph.initializer}
    share, profile = sorted(node.input, key=lambda name: name in constants)
    assert profile in constants
    while made_by[share].op_type in ("Transpose", "Reshape"):  # to where the features are
        share = made_by[share].input[0]
    assert made_by[share].op_type.startswith("GapaActivation")


@pytest.mark.parametrize("case", NETS)
def test_the_variance_is_what_it_was(case):
    model, x = build(case)
    done = gapa_onnx.convert(model, {"x": x}, m=30, k=8, task="none", sites="h", scale="none")
    converted = done.model
    exposed = onnx.ModelProto()
    exposed.CopyFrom(converted)
    exposed.graph.output.append(onnx.helper.make_empty_tensor_value_info("h/gapa/share"))
    session = gapa_onnx.session(exposed.SerializeToString())
    var, share = session.run(["y_var", "h/gapa/share"], {"x": 2 * x})
    named = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in converted.graph.initializer}
    weight = named["w2"].reshape(named["w2"].shape[:2])
    prior = done.calibration.fits[0].prior_var.astype(np.float64).reshape(-1)
    if case == "scaled gemm":
        weight = 0.5 * weight.T
    if case == "pointwise convolution":
        weight = weight.T
    profile = prior @ weight**2
    profile = profile * named["b"] ** 2 if case == "times a constant" else profile
    expected = share.astype(np.float64) * profile  # features last
    expected = np.moveaxis(expected, -1, 1) if case == "pointwise convolution" else expected
    # a sum of 8 products in float32, and two roundings more
    np.testing.assert_allclose(var, expected, rtol=10 * np.finfo(np.float32).eps)


def test_data_of_one_axis():
    model, x = build("matmul and bias")
    text = NETS["matmul and bias"][0].replace("[n, 6]", "[6]").replace("[n, 4]", "[4]")
    flat = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> net {text}')
    flat.graph.initializer.extend(model.graph.initializer)
    settings = {"m": 30, "k": 8, "task": "none", "sites": "h"}
    one = gapa_onnx.convert(flat, [{"x": row} for row in x], **settings).model
    var = gapa_onnx.session(one.SerializeToString()).run(["y_var"], {"x": 2 * x[0]})[0]
    many = gapa_onnx.convert(model, {"x": x}, **settings).model
    expected = gapa_onnx.session(many.SerializeToString()).run(["y_var"], {"x": 2 * x[:1]})[0]
    assert var.shape == (4,)
    np.testing.assert_allclose(var, expected[0], rtol=1e-3)  # the query is rounded otherwise in a batch


def test_nothing_is_stored_that_can_be_computed():
    model, x = build("gemm")
    converted = gapa_onnx.convert(
        model, {"x": x}, m=30, k=8, task="none", solver="exact", witnesses="none", metric="euclidean"
    ).model
    added = {t.name: t for t in converted.graph.initializer[len(model.graph.initializer) :]}
    kept = [tensor for name, tensor in added.items() if "/ordinary" not in name]  # what other inputs scored
    size = sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in kept)
    points = onnx.numpy_helper.to_array(added["h/gapa/points"]).nbytes
    assert size - points < 8 * 4 + 200  # the prior variances, and a handful of scalars


@pytest.mark.parametrize("name", ["digits_cnn", "digits_mlp", "diabetes_mlp"])
def test_fusions_of_the_source_stay(name, tmp_path):
    source = onnx.load(MODELS / f"{name}.onnx")
    converted = gapa_onnx.convert(source, MODELS / f"{name}_calibration.npz", m=60, k=10).model
    sites = sum(node.op_type.startswith("GapaActivation") for node in converted.graph.node)
    before, after = (Counter(n.op_type for n in optimised(m, tmp_path).node) for m in (source, converted))
    # A site reads what goes into its activation, so that one cannot be fused into the layer before it.
    assert sum((before - after).values()) <= sites
