"""Quantised models, made by onnxruntime's own quantiser from the example models and by hand.

Every one converts, predicts the same bits as before, and has error bars close to those of the float
model that it was made from.
"""

from __future__ import annotations

import collections
import functools
import logging
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnxruntime import quantization
from support.paths import MODELS
from support.rule_checks import parse, propagate_inputs, run_with_variances

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import load
from gapa_onnx.plan.placement import find_sites
from gapa_onnx.plan.witnesses import find_witnesses
from gapa_onnx.variance.patterns import find_composites
from gapa_onnx.variance.qdq import dequantised, reading_graph
from gapa_onnx.variance.rules import TABLE, Deterministic, Refusal

BY_HAND = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'


def data(name: str, part: str) -> dict[str, np.ndarray]:
    with np.load(MODELS / f"{name}_{part}.npz") as arrays:
        names = {value.name for value in onnx.load(MODELS / f"{name}.onnx").graph.input}
        return {key: arrays[key] for key in arrays if key in names}


class Reader(quantization.CalibrationDataReader):
    def __init__(self, feeds: dict[str, np.ndarray]):
        (name, rows), *_ = feeds.items()
        self.batches = iter([{name: rows[at : at + 50]} for at in range(0, 500, 50)])

    def get_next(self) -> dict | None:
        return next(self.batches, None)


U8, I8 = quantization.QuantType.QUInt8, quantization.QuantType.QInt8
QDQ, QOPERATOR = quantization.QuantFormat.QDQ, quantization.QuantFormat.QOperator
STATIC = {
    "qdq": dict(quant_format=QDQ, activation_type=U8, weight_type=I8),
    "qdq per channel": dict(quant_format=QDQ, activation_type=U8, weight_type=I8, per_channel=True),
    "qdq int8": dict(quant_format=QDQ, activation_type=I8, weight_type=I8, per_channel=True),
    "operators": dict(quant_format=QOPERATOR, activation_type=U8, weight_type=I8),
    "operators per channel": dict(
        quant_format=QOPERATOR, activation_type=I8, weight_type=I8, per_channel=True
    ),
}
# Without VNNI a processor adds products of 8 bits in 16, which overflow: 7 bits are what onnxruntime advises there.
REDUCED = {"reduce_range": True}
FORMS = ["dynamic", *STATIC]


def pairs(by_day: set[str], leave_out: set[str] = frozenset()) -> list:
    """Every model in every form; the convolutional one, which takes longer, in these forms by day, else at night."""
    return [
        pytest.param(name, form, marks=() if name == "digits_mlp" or form in by_day else pytest.mark.nightly)
        for name in ("digits_mlp", "digits_cnn")
        for form in FORMS
        if form not in leave_out
    ]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A quantised form of an example model, made once."""
    folder = tmp_path_factory.mktemp("quantised")
    logging.getLogger().setLevel(logging.ERROR)  # the quantiser has advice for everyone

    def make(name: str, form: str) -> onnx.ModelProto:
        source, path = MODELS / f"{name}.onnx", folder / f"{name} {form}.onnx"
        if path.exists():
            return onnx.load(path)
        if form == "dynamic":
            quantization.quantize_dynamic(source, path, weight_type=I8, **REDUCED)
        else:
            quantization.quantize_static(
                source, path, Reader(data(name, "calibration")), **STATIC[form], **REDUCED
            )
        return onnx.load(path)

    return make


@pytest.fixture(scope="module")
def converted(quantised):
    """A quantised form of an example model, converted once."""

    @functools.cache
    def make(name: str, form: str, sites: str) -> onnx.ModelProto:
        return convert(quantised(name, form), some(data(name, "calibration")), sites).model

    return make


def some(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: rows[:300] for name, rows in feeds.items()}


def convert(
    model: onnx.ModelProto | Path, feeds: dict[str, np.ndarray], sites: str = "auto", **choices
) -> gapa_onnx.Conversion:
    conversion = gapa_onnx.convert(
        model, feeds, sites=sites, **{"m": 32, "k": 8, "metric": "euclidean", "witnesses": "none"} | choices
    )
    assert [check for check in conversion.checks if not check.passed] == []
    return conversion


def answers(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], *, native: bool = True, optimise: bool = True
) -> dict:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    content, cpu = model.SerializeToString(), ["CPUExecutionProvider"]
    session = gapa_onnx.session(content, options) if native else ort.InferenceSession(content, options, cpu)
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds)))


# ----------------------------------------------------------- models of onnxruntime's quantiser


@pytest.mark.parametrize("name, form", pairs(by_day=set(FORMS)))
def test_predictions_keep_every_bit(quantised, converted, name, form):
    check_predictions(quantised, converted, name, form, "auto")


@pytest.mark.parametrize("name, form", pairs(by_day={"qdq"}))
def test_predictions_keep_every_bit_with_sites_everywhere(quantised, converted, name, form):
    check_predictions(quantised, converted, name, form, "all")


def check_predictions(quantised, converted, name, form, sites):
    """On all rows, 13470 numbers: a layer that is computed in floats instead shows in about one of them."""
    model, feeds = quantised(name, form), data(name, "calibration")
    for optimise in (False, True):
        before = answers(model, feeds, native=False, optimise=optimise)["logits"]
        found = answers(converted(name, form, sites), feeds, optimise=optimise)
        np.testing.assert_array_equal(found["logits"], before)
    portable = answers(converted(name, form, sites), feeds, native=False)["logits_var"]
    # In single precision a share is off by 10⁻³ s + 10⁻⁵, which is a thousandth of an ordinary one here.
    beside = 1e-3 * np.median(found["logits_var"])
    np.testing.assert_allclose(found["logits_var"], portable, rtol=2e-3, atol=beside)


SAME_PLACE = {  # of the convolutional model, where its features are flattened: a relu is merged in all others
    "dynamic": "flatten_out",
    "qdq": "flatten_out_DequantizeLinear_Output",
    "qdq per channel": "flatten_out_DequantizeLinear_Output",
    "qdq int8": "flatten_out_DequantizeLinear_Output",
    "operators": "flatten_out_quantized",
    "operators per channel": "flatten_out_quantized",
}


@pytest.mark.parametrize("name, form", pairs(by_day={"operators"}))
def test_error_bars_are_those_of_the_float_model(quantised, name, form):
    """8 bits: activations are off by 1/255 of their range, 1 to 2 % of a standard deviation. Squared
    distances to neighbours, and squared slopes, are off by twice that, over two or three layers: 10 %
    for most rows. All rows lie within a factor of 2, which a scale that is forgotten or applied twice,
    some 1e4 squared, does not. All points are inducing points: which are chosen is a matter of luck."""
    feeds, held_out = some(data(name, "calibration")), data(name, "heldout")
    here, there = ("tanh2", "tanh2") if name == "digits_mlp" else (SAME_PLACE[form], "flatten_out")
    models = (MODELS / f"{name}.onnx", there), (quantised(name, form), here)
    conversions = [convert(model, feeds, sites, inducing="all", k=20) for model, sites in models]
    float_bars, bars = (answers(conversion.model, held_out)["logits_var"] for conversion in conversions)
    ratio = bars.mean(axis=1) / float_bars.mean(axis=1)  # (n,)
    assert 0.9 < np.median(ratio) < 1.1
    assert np.median(np.abs(ratio - 1)) < 0.1
    assert 0.5 < np.quantile(ratio, 0.01) and np.quantile(ratio, 0.99) < 2


@pytest.mark.parametrize("form", FORMS)
def test_sites_of_the_mlp_are_those_of_the_float_model(quantised, form):
    source = load(quantised("digits_mlp", form))
    assert [site.activation for site in find_sites(source, "last")] == ["Tanh"]
    assert [site.activation for site in find_sites(source, "all")] == ["Tanh", "Tanh"]
    sites = find_sites(source, "auto")
    assert [site.activation for site in sites] == ["Tanh"]
    assert [witness.activation for witness in find_witnesses(source, "auto", sites)] == ["Tanh"]


@pytest.mark.parametrize("form", FORMS)
def test_merged_activations_leave_what_the_next_layer_reads(quantised, form):
    """Three hidden layers with a relu each, whichever of them quantisation has left in the graph."""
    sites = find_sites(load(quantised("digits_cnn", form)), "all")
    assert len(sites) == 3
    assert find_sites(load(quantised("digits_cnn", form)), "last")[0].output == sites[-1].output


def fused(model: onnx.ModelProto, path: Path) -> collections.Counter:
    """How many layers of whole numbers onnxruntime runs."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(path)
    gapa_onnx.session(model.SerializeToString(), options)
    layers = ("QLinearConv", "QGemm", "DynamicQuantizeMatMul", "ConvInteger")
    return collections.Counter(node.op_type for node in onnx.load(path).graph.node if node.op_type in layers)


@pytest.mark.parametrize("name, form", pairs(by_day={"qdq"}, leave_out={"qdq int8"}))
def test_layers_of_whole_numbers_stay_so(quantised, converted, name, form, tmp_path):
    after, before = converted(name, form, "all"), quantised(name, form)
    assert fused(after, tmp_path / "after.onnx") == fused(before, tmp_path / "before.onnx") != {}


def test_int8_activations_are_read_from_a_copy(quantised):
    source = load(quantised("digits_cnn", "qdq int8"))
    value = reading_graph(source).tensor("relu2_out_DequantizeLinear_Output", np.float32)
    assert value.name == "relu2_out_DequantizeLinear_Output/copy"
    source = load(quantised("digits_cnn", "qdq"))
    value = reading_graph(source).tensor("relu2_out_DequantizeLinear_Output", np.float32)
    assert value.name == "relu2_out_DequantizeLinear_Output"


# ------------------------------------------------------------------ layers between Q and DQ

STEP = "{y}_q = QuantizeLinear({x}, {s}, {z})  {y} = DequantizeLinear({y}_q, {s}, {z})"
BODIES = {
    "relu": "c = Conv(x1, w_f, b_f)  t = Relu(c)",
    "clip": "c = Conv(x1, w_f, b_f)  t = Clip(c, low)",
    "conv": "t = Conv(x1, w_f, b_f)",
    "sigmoid": f"c = Conv(x1, w_f, b_f)  {STEP.format(x='c', y='d', s='st', z='mid')}  t = Sigmoid(d)",
    "leaky": f"c = Conv(x1, w_f, b_f)  {STEP.format(x='c', y='d', s='st', z='mid')}  t = LeakyRelu(d)",
    "softmax": f"c = Conv(x1, w_f, b_f)  {STEP.format(x='c', y='d', s='st', z='mid')}  t = Softmax(d)",
    "square": f"c = Conv(x1, w_f, b_f)  {STEP.format(x='c', y='d', s='st', z='mid')}  t = Mul(d, d)",
}


def between_steps(body: str) -> onnx.ModelProto:
    """Two convolutions of uint8 activations, with something between."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f"{BY_HAND} m (float[n, 2, 8, 8] x) => (float[n, 3, 6, 6] y) {{"
        f"{STEP.format(x='x', y='x1', s='sx', z='mid')}"
        "w_f = DequantizeLinear(w, sw, even)  b_f = DequantizeLinear(b, sb, zero)  v_f = DequantizeLinear(v, sw, even)"
        f"{body}  {STEP.format(x='t', y='t1', s='st', z='least')}"
        f"u = Conv(t1, v_f)  {STEP.format(x='u', y='y', s='su', z='mid')} }}"
    )
    scales = {"sx": 0.03, "sw": 0.01, "sb": 0.0003, "st": 0.03, "su": 0.05, "low": 0.0}
    arrays = {name: np.float32(value) for name, value in scales.items()}
    arrays |= {"mid": np.uint8(128), "least": np.uint8(0), "even": np.int8(0), "zero": np.int32(0)}
    arrays |= {
        "w": rng.integers(-90, 90, (3, 2, 3, 3)).astype(np.int8),
        "b": rng.integers(-900, 900, 3).astype(np.int32),
    }
    arrays["v"] = rng.integers(-90, 90, (3, 3, 1, 1)).astype(np.int8)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()
    )
    return model


NIGHTLY_SITES = [pytest.param(site, marks=pytest.mark.nightly) for site in ("x1", "auto")]
NOISE = {"x": np.random.default_rng(1).normal(size=(200, 2, 8, 8)).astype(np.float32)}


@pytest.mark.parametrize("site", ["t", "all", *NIGHTLY_SITES])
@pytest.mark.parametrize("body", BODIES)
def test_what_lies_between_is_not_read(body, site):
    """Each of these differs in some bits if the variance graph reads t itself (or c, before a relu)."""
    model = between_steps(BODIES[body])
    converted = convert(model, NOISE, site).model
    np.testing.assert_array_equal(answers(converted, NOISE)["y"], answers(model, NOISE, native=False)["y"])


def test_what_is_read_in_place_of_quantised_floats():
    assert dequantised(load(between_steps(BODIES["conv"])).graph) == {"t": "t1", "u": "y"}
    assert dequantised(load(between_steps(BODIES["sigmoid"])).graph) == {"c": "d", "t": "t1", "u": "y"}


def test_an_output_is_read_itself():
    model = between_steps(BODIES["conv"])
    model.graph.output.append(helper.make_empty_tensor_value_info("t"))
    assert dequantised(load(model).graph) == {"u": "y"}


def test_a_tensor_that_is_merged_away_is_no_site():
    with pytest.raises(UserError, match="whole numbers only") as error:
        find_sites(load(between_steps(BODIES["relu"])), "c")
    assert "'t'" in error.value.hint
    (site,) = find_sites(load(between_steps(BODIES["relu"])), "t")
    assert (site.output, site.activation) == ("t1", None)


# ------------------------------------------------------------------------ dynamic quantisation

DYNAMIC = (
    "q, s, z = DynamicQuantizeLinear(x)  i = MatMulInteger(q, w, z, wz)  f = Cast<to=1>(i)"
    "  k = Mul(s, ws)  y = Mul(f, k)"
)


def dynamic(body: str = DYNAMIC, result: str = "float[n, 2] y") -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"{BY_HAND} m (float[n, 3] x) => ({result}) {{ {body} }}")
    arrays = {"w": np.int8([[9, -70], [50, 3], [-20, 80]]), "wz": np.int8(2), "ws": np.float32(0.01)}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()
    )
    return model


def dynamic_reference(v: np.ndarray) -> np.ndarray:
    return v @ ((np.array([[9, -70], [50, 3], [-20, 80]]) - 2) * 0.01) ** 2


@pytest.mark.parametrize(
    "body", [DYNAMIC, DYNAMIC.replace("Mul(s, ws)", "Mul(ws, s)").replace("Mul(f, k)", "Mul(k, f)")]
)
def test_dynamic_quantisation_is_one_layer(body):
    (composite,) = find_composites(load(dynamic(body)).graph, set())
    assert composite.node.op == "DynamicQuantizeMatMul"
    assert [tensor.name for tensor in composite.node.inputs] == ["x", "w", "ws", "wz"]


@pytest.mark.parametrize(
    "body, result",
    [
        (DYNAMIC.replace("MatMulInteger(q, w, z, wz)", "MatMulInteger(q, w, wu, wz)"), "float[n, 2] y"),
        (DYNAMIC.replace("Mul(s, ws)", "Mul(ws, ws)"), "float[n, 2] y"),
        (DYNAMIC.replace("Mul(s, ws)", "Mul(s, s)"), "float[n, 2] y"),
    ],
)
def test_other_scales_or_zero_points_are_not(body, result):
    model = dynamic(body, result)
    model.graph.initializer.append(numpy_helper.from_array(np.uint8(3), "wu"))
    assert not list(find_composites(load(model).graph, set()))


@pytest.mark.parametrize("result", ["float[n, 2] y", "float[n, 2] y, int32[n, 2] i"])
def test_dynamic_quantisation_gives_real_units(result):
    """As a group, and node by node (a site inside, or a reader of the accumulator, does not matter)."""
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(5, 3)).astype(np.float32), rng.random((5, 3)).astype(np.float32)
    found = run_with_variances(dynamic(result=result), {"x": x}, {"x": v})
    np.testing.assert_allclose(found["y_var"], dynamic_reference(v), rtol=1e-5)


# ---------------------------------------------------------------------------- units, saturation


def test_saturated_elements_pass_nothing_on():
    model = parse(
        "m (float[5] x) => (float[5] y) <float s = {0.5}, uint8 z = {0}>"
        "{ q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }"
    )
    x, v = np.float32([-3, 0, 1, 127, 999]), np.float32([1, 2, 3, 4, 5])
    np.testing.assert_allclose(
        run_with_variances(model, {"x": x}, {"x": v})["y_var"], [0, 0, 3, 4, 0], rtol=1e-6
    )


def test_float8_saturates_too():
    model = parse(
        "m (float[4] x) => (float[4] y) <float s = {0.5}, float8e4m3fn z = {0}>"
        "{ q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }", 19
    )  # fmt: skip
    x, v = np.float32([-999, 0, 1, 500]), np.float32([1, 2, 3, 4])
    np.testing.assert_allclose(
        run_with_variances(model, {"x": x}, {"x": v})["y_var"], [0, 2, 3, 0], rtol=1e-6
    )


def test_a_quantised_output_has_a_variance_in_squared_steps():
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f"{BY_HAND} m (float[n, 4] x) => (uint8[n, 3] y)"
        "<float s = {0.02}, uint8 z = {128}, int8 wz = {0}, float sy = {0.05}>"
        "{ q = QuantizeLinear(x, s, z)  y = QLinearMatMul(q, s, z, w, s, wz, sy, z) }"
    )
    weights = rng.integers(-60, 60, (4, 3)).astype(np.int8)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    feeds = {"x": rng.normal(size=(300, 4)).astype(np.float32) / 3}
    conversion = convert(model, feeds)
    assert conversion.plan.outputs == ("y",)
    (site,) = conversion.plan.sites
    assert (site.output, site.activation) == ("q", None)
    y, var, *_ = answers(conversion.model, feeds).values()
    assert y.dtype == np.uint8 and var.dtype == np.float32
    saturated = (y == 0) | (y == 255)
    assert np.all(var[saturated] == 0) and np.all(var[~saturated] > 0)


def test_a_site_is_the_same_in_steps_and_in_real_numbers():
    """Distances, length scale and prior variance all scale along: q as a site is x as a site."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f"{BY_HAND} m (float[n, 4] x) => (float[n, 3] y) <float s = {{0.02}}, uint8 z = {{128}}>"
        "{ q = QuantizeLinear(x, s, z)  h = DequantizeLinear(q, s, z)  y = MatMul(h, w) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=(4, 3)).astype(np.float32), "w"))
    feeds = {"x": rng.normal(size=(300, 4)).astype(np.float32) / 2}
    in_steps, in_numbers = (answers(convert(model, feeds, site).model, feeds)["y_var"] for site in ("q", "h"))
    np.testing.assert_allclose(in_steps, in_numbers, rtol=2e-3)  # s is the difference of 1 and nearly 1


def test_pooling_and_moving_of_whole_numbers():
    """Rules of floats serve quantised tensors as they are."""
    model = parse(
        "m (float[1, 1, 4, 4] x) => (float[n, m] y) <float s = {0.02}, uint8 z = {128}, int64[2] to = {1, 4}>"
        "{ q = QuantizeLinear(x, s, z)  p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(q)"
        "  r = Reshape(p, to)  t = Transpose(r)  y = DequantizeLinear(t, s, z) }"
    )
    x = np.linspace(-1, 1, 16, dtype=np.float32)[np.random.default_rng(0).permutation(16)].reshape(1, 1, 4, 4)
    v = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    blocks, vars_ = (a.reshape(2, 2, 2, 2).swapaxes(1, 2).reshape(4, 4) for a in (x, v))
    wanted = vars_[np.arange(4), blocks.argmax(axis=1)][:, None]
    np.testing.assert_allclose(run_with_variances(model, {"x": x}, {"x": v})["y_var"], wanted, rtol=1e-5)


# ---------------------------------------------------------------------------------- few bits


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_of_four_bits(symmetric):
    """The example model with onnxruntime's own 4-bit packing of its weights."""
    pack = pytest.importorskip("onnxruntime.capi._pybind_state").quantize_matmul_4bits
    model = onnx.load(MODELS / "digits_mlp.onnx")
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Gemm":
            nodes.append(node)
            continue
        transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        weights = arrays[node.input[1]].T if transposed else arrays[node.input[1]]
        nodes += packed_layer(model, node, np.ascontiguousarray(weights), pack, symmetric)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.opset_import.add(domain="com.microsoft", version=1)
    feeds, held_out = some(data("digits_mlp", "calibration")), data("digits_mlp", "heldout")
    conversion = convert(model, feeds, "all")
    assert [site.activation for site in conversion.plan.sites] == ["Tanh", "Tanh"]
    bars = answers(conversion.model, held_out)["logits_var"].mean(axis=1)
    wanted = answers(convert(MODELS / "digits_mlp.onnx", feeds, "all").model, held_out)["logits_var"].mean(
        axis=1
    )
    # Weights are off by 1/32 of their range, an eighth of a standard deviation: Σ w² by some per cent.
    assert 0.8 < np.median(bars / wanted) < 1.25


def packed_layer(model, node, weights, pack, symmetric) -> list[onnx.NodeProto]:  # noqa: ANN001
    (width, rows), block = weights.shape, 32
    blocks = -(-width // block)
    packed, scales = np.zeros((rows, blocks, block // 2), np.uint8), np.zeros(rows * blocks, np.float32)
    zeros = np.zeros(rows * -(-blocks // 2), np.uint8)
    pack(packed, weights, scales, zeros, block, rows, width, symmetric)
    tensors = {"packed": packed, "scales": scales} | ({} if symmetric else {"zeros": zeros})
    names = [f"{node.output[0]}_{name}" for name in tensors]
    model.graph.initializer.extend(map(numpy_helper.from_array, tensors.values(), names))
    product = f"{node.output[0]}_product"
    attrs = dict(K=width, N=rows, bits=4, block_size=block)
    layer = helper.make_node(
        "MatMulNBits", [node.input[0], *names], [product], domain="com.microsoft", **attrs
    )
    return [layer, helper.make_node("Add", [product, node.input[2]], node.output)]


# ---------------------------------------------------------------------- what has no variance

SIGNATURE = (
    "m (float[2, 32] x, uint8[2, 3] q, float s, float[3] many, int32[4] c) => (float[] y)"
    "<uint8 z = {1}, uint8[3, 4] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float one = {0.5}, float[3] row = {1,2,3}>"
)
REFUSED = [
    ("y = QLinearMatMul(q, row, z, w, one, z, one, z)", "scale per channel"),
    ("y = QLinearMatMul(q, s, z, w, one, z, one, z)", "scales or zero points are uncertain"),
    ("y = com.microsoft.QGemm(q, one, z, w, one, z, c)", "bias is uncertain"),
    ("y = MatMulInteger(q, q)", "multiplied by itself"),
    ("y = com.microsoft.MatMulNBits<K=32, N=1, bits=3, block_size=32>(x, w, one)", "not packed in whole bytes"),
    ("y = com.microsoft.MatMulNBits<K=32, N=1, bits=4, block_size=32, weight_prepacked=1>(x, w, one)", "one kind of processor"),
    ("y = com.microsoft.MatMulNBits<K=32, N=1, bits=4, block_size=32>(x, w, one, , c)", "g_idx"),
    ("y = com.microsoft.QLinearAveragePool<kernel_shape=[1], channels_last=1>(q, one, z, one, z)", "channels_last"),
    ("y = com.microsoft.QAttention<num_heads=1>(q, w, row, one, one)", "one kernel"),
    ("y = onnx.brevitas.Quant(x, one, one, one)", "lower it to QuantizeLinear"),
    ("y = qonnx.custom_op.general.Quant(x, one, one, one)", "lower it to QuantizeLinear"),
]  # fmt: skip


@pytest.mark.parametrize("text, reason", REFUSED, ids=[text for text, _ in REFUSED])
def test_refusals_tell_their_reason(text, reason):
    model = parse(f"{SIGNATURE} {{ {text} }}", 21)
    uncertain = ["x", "q", *(["s"] if "(q, s," in text else []), *(["c"] if "z, c)" in text else [])]
    (entry,) = propagate_inputs(model, uncertain).refused
    assert reason in entry.reason


def test_every_quantised_operator_of_onnxruntime_has_a_behaviour():
    """By name, of all that onnxruntime's schemas list."""
    schemas = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state").get_all_operator_schema()
    marks = (
        "QLinear",
        "QOrdered",
        "Integer",
        "NBits",
        "Quantize",
        "QGemm",
        "QAttention",
        "BFP",
        "Bnb4",
        "FpQ4",
        "QMoE",
    )
    names = {s.name for s in schemas if s.domain == "com.microsoft" and any(mark in s.name for mark in marks)}
    assert len(names) > 30
    assert {name for name in names if ("com.microsoft", name) not in TABLE} == set()


def test_tables_of_constants_are_certain():
    for name in ("GatherBlockQuantized", "QEmbedLayerNormalization"):
        assert isinstance(TABLE["com.microsoft", name], Deterministic)
    assert isinstance(TABLE["onnx.brevitas", "Quant"], Refusal)
