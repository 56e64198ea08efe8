"""Where sites go, and what is said when they cannot go there."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse, operator_table, require_convertible
from gapa_onnx.plan.layers import Network
from gapa_onnx.plan.placement import find_sites
from gapa_onnx.settings import Settings
from gapa_onnx.variance.sites import Layout, Site


def model(body: str, signature: str = "float[n, 4] x", result: str = "float[n, 2] y", **shapes):
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net ({signature}) => ({result}) {{ {body} }}'
    )
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        proto.graph.initializer.append(onnx.helper.make_tensor(name, 1, shape, [0.5] * count))
    return load(proto)


MLP = "z1 = MatMul(x, a)  h1 = Tanh(z1)  z2 = MatMul(h1, b)  h2 = Relu(z2)  y = MatMul(h2, c)"
SHAPES = {"a": (4, 5), "b": (5, 6), "c": (6, 2)}


def outputs(source, spec):
    return [site.output for site in find_sites(source, spec)]


def test_auto_takes_the_activation_before_the_last_layer():
    site = find_sites(model(MLP, **SHAPES), "auto")[-1]
    assert (site.query, site.output, site.activation, site.layout) == ("z2", "h2", "Relu", "rows")


@pytest.mark.parametrize(
    "between",
    [
        "q = MatMul(r, b)",
        "n = MatMul(r, b)  q = Add(n, bias)",
        "s = MatMul(r, b)  t = Tanh(s)  q = MatMul(t, b)",
        "n = MatMul(r, b)  q = Add(n, r)",
        "q = Mul(r, bias)",
    ],
)
def test_auto_takes_the_last_site_of_an_output_alone(between):
    """The first vector of fully connected layers is a witness."""
    body = f"p = MatMul(x, a)  r = Tanh(p)  {between}  h = Relu(q)  y = MatMul(h, c)"
    source = model(body, a=(4, 5), b=(5, 5), bias=(5,), c=(5, 2))
    assert outputs(source, "auto") == ["h"]


@pytest.mark.parametrize("rank, many", [(1, False), (2, False), (3, True), (None, True)])
def test_rows_of_unknown_rank_may_be_many_queries(rank, many):
    assert Site("s", "z", "h", "Tanh", Layout.ROWS, rank).many == many
    assert not Site("s", "z", "h", "Tanh", Layout.POOLED, rank).many


def test_feature_maps_and_tokens_have_no_first_vector():
    body = "p = MatMul(x, a)  r = Tanh(p)  q = MatMul(r, b)  h = Relu(q)  y = MatMul(h, c)"
    source = model(body, "float[n, 7, 4] x", "float[n, 7, 2] y", a=(4, 5), b=(5, 5), c=(5, 2))
    assert outputs(source, "auto") == ["h"]


def test_a_final_sigmoid_is_not_a_hidden_activation():
    source = model(MLP.replace("y = MatMul", "l = MatMul") + "  y = Sigmoid(l)", **SHAPES)
    assert outputs(source, "auto") == outputs(source, "last") == ["h2"]
    assert outputs(source, "all") == ["h1", "h2"]


def test_without_an_activation_the_tensor_itself_is_the_site():
    (site,) = find_sites(model("y = MatMul(x, w)", w=(4, 2)), "auto")
    assert (site.query, site.output, site.activation) == ("x", "x", None)


def test_dropout_and_bias_do_not_hide_the_activation():
    body = "z = MatMul(x, a)  h = Relu(z)  d = Dropout(h)  m = MatMul(d, b)  y = Add(m, bias)"
    assert outputs(model(body, a=(4, 5), b=(5, 2), bias=(2,)), "auto") == ["h"]


def test_two_heads_share_one_site_or_have_their_own():
    body = "h = Relu(x)  y = MatMul(h, a)  g = Tanh(h)  w = MatMul(g, b)"
    source = model(body, result="float[n, 2] y, float[n, 2] w", a=(4, 2), b=(4, 2))
    assert outputs(source, "auto") == ["h", "g"]


CONV = "z = Conv(x, k)  h = Relu(z)  {tail}"


@pytest.mark.parametrize(
    "tail, extra, layout",
    [
        ("f = Flatten(h)  y = MatMul(f, w)", {"w": (3 * 6 * 6, 2)}, "flat"),
        ("y = Conv(h, w)", {"w": (2, 3, 1, 1)}, "positions"),
        ("g = GlobalAveragePool(h)  f = Flatten(g)  y = MatMul(f, w)", {"w": (3, 2)}, "rows"),
    ],
)
def test_auto_on_feature_maps(tail, extra, layout):
    source = model(CONV.format(tail=tail), "float[n, 1, 8, 8] x", "float y", k=(3, 1, 3, 3), **extra)
    (site,) = find_sites(source, "auto")
    assert site.layout == layout


def test_large_maps_are_pooled_unless_asked_otherwise():
    source = model(
        CONV.format(tail="y = Conv(h, w)"), "float[n, 1, 80, 80] x", "float y", k=(3, 1, 3, 3), w=(2, 3, 1, 1)
    )
    assert find_sites(source, "auto")[0].layout == "pooled"
    assert find_sites(source, "h")[0].layout == "pooled"
    assert find_sites(source, "h:positions")[0].layout == "positions"
    assert find_sites(source, "h:pooled")[0].layout == "pooled"
    assert find_sites(source, "h:flat")[0].layout == "flat"


def test_sequence_features_are_rows():
    source = model("h = Tanh(x)  y = MatMul(h, w)", "float[n, 7, 4] x", "float[n, 7, 2] y", w=(4, 2))
    assert find_sites(source, "auto")[0].layout == "rows"


@pytest.mark.parametrize(
    "spec, message, hint",
    [
        ("h3", "no node or tensor is called 'h3'", "did you mean"),
        ("completely_else", "no node or tensor", "inspect"),
        (",", "no site is named", "auto"),
        ("h1:pooled@2", "no axis 2", "count axes from 0"),
        ("h1:pooled@0", "cannot be queried as 'pooled'", "layout"),
        ("h1:rows@0", "last axis", "h1:positions@0"),
    ],
)
def test_wrong_names(spec, message, hint):
    with pytest.raises(UserError) as error:
        find_sites(model(MLP, **SHAPES), spec)
    assert message in error.value.message
    assert hint in error.value.hint


def test_a_whole_number_tensor_is_no_site():
    source = model("s = Shape(x)  h = Relu(x)  y = MatMul(h, w)", w=(4, 2))
    with pytest.raises(UserError, match="floating-point"):
        find_sites(source, "s")


def test_no_linear_layer():
    """The numbers that are fed are the place that is left, if they come to one tensor (n, d)."""
    (site,) = find_sites(model("h = Relu(x)  y = ReduceSum(h)", result="float[1, 1] y"), "auto")
    assert site.query == "h" and site.standardised
    with pytest.raises(UserError, match="linear layer"):
        find_sites(model("y = Relu(x)", result="float[n, 4] y"), "all")


def test_all_refusals_are_shown_at_once():
    body = (
        "h = Relu(x)  m = MatMul(h, w)  a = com.example.F(m)  b = com.example.F(m)  c = com.example.G(m)"
        "d = Add(a, b)  y = Mul(c, d)"
    )
    source = model(body, w=(4, 2))
    plan = analyse(source, Settings(sites="h"))
    with pytest.raises(UserError) as error:
        require_convertible(plan, Settings())
    assert "3 node(s)" in error.value.message
    assert "example::F" in error.value.message and "example::G" in error.value.message
    assert "`on_unsupported='cut'`" in error.value.hint


def test_operator_table_names_every_operator():
    rows = {
        row.operator: row
        for row in operator_table(
            model("h = Relu(x)  s = Shape(h)  d = com.example.F(h)  y = MatMul(h, w)", w=(4, 2))
        )
    }
    assert rows["Relu"].behaviour == "rule" and rows["Relu"].accuracy == "first order"
    assert rows["Shape"].behaviour == "deterministic"
    unknown = rows["com.example::F"]
    assert unknown.behaviour == "refused" and "no rule" in unknown.reason


def test_control_flow_with_a_layer_inside_counts_as_one():
    """Its interior is out of reach; the tensor that goes in becomes the site."""
    body = """h = Tanh(x)
        y = If <then_branch = one () => (float[n, 2] a) { a = MatMul(h, w) },
                else_branch = other () => (float[n, 2] b) { m = MatMul(h, w)  b = Neg(m) }> (c)"""
    (site,) = find_sites(model(body, "float[n, 4] x, bool c", w=(4, 2)), "auto")
    assert (site.output, site.activation) == ("h", "Tanh")


def test_a_composite_activation_is_one_site():
    """x·sigmoid(x): the product is the activation, the sigmoid inside is none."""
    body = "z = MatMul(x, a)  g = Sigmoid(z)  h = Mul(z, g)  y = MatMul(h, b)"
    source = model(body, a=(4, 5), b=(5, 2))
    for spec in ("auto", "last", "all", "h"):
        (site,) = find_sites(source, spec)
        assert (site.query, site.output, site.activation) == ("z", "h", "Swish")


def test_a_residual_path_does_not_bring_in_an_earlier_layer():
    body = "p = MatMul(x, a)  r = Tanh(p)  q = MatMul(r, b)  h = Relu(q)  m = MatMul(h, c)  y = Add(q, m)"
    source = model(body, result="float[n, 5] y", a=(4, 5), b=(5, 5), c=(5, 5))
    assert outputs(source, "auto") == outputs(source, "last") == ["h"]


def test_operator_table_names_composites():
    body = "z = MatMul(x, a)  g = Sigmoid(z)  h = Mul(z, g)  y = MatMul(h, b)"
    rows = {row.operator: row for row in operator_table(model(body, a=(4, 5), b=(5, 2)))}
    assert rows["Swish (composite)"].count == 1
    assert rows["Sigmoid"].count == 1


EXPECTATIONS = {
    "p = Softmax(l)  y = MatMul(p, w)": (6,),
    "p = Softmax(l)  i = Identity(p)  y = MatMul(i, w)": (6, 1),
    "p = Softmax(l)  y = Gemm(p, w)": (6, 1),
    "p = Softmax(l)  y = Gemm<transB = 1>(p, w)": (1, 6),
    'p = Softmax(l)  y = Einsum<equation = "nk,k->n">(p, w)': (6,),
    "p = Softmax(l)  q = Mul(p, w)  y = ReduceSum(q, one)": (6,),
    "p = Softmax(l)  q = Mul(w, p)  y = ReduceSum<keepdims = 0>(q, one)": (1, 6),
    "e = Exp(l)  t = ReduceSum(e, one)  p = Div(e, t)  y = MatMul(p, w)": (6,),
    "u = Unsqueeze(l, two)  p = Softmax<axis = 1>(u)  y = Conv(p, w)": (1, 6, 1),
}


@pytest.mark.parametrize("evenly", [True, False])
@pytest.mark.parametrize("tail", EXPECTATIONS)
def test_the_mean_of_a_distribution_is_no_layer(tail, evenly):
    """The last layer makes the logits, unless the numbers are ones that were learned."""
    constants = "int64[1] one = {1}, int64[1] two = {2}"
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> net (float[n, 4] x) => (float y)'
        f"<{constants}> {{ z = MatMul(x, a)  h = Tanh(z)  l = MatMul(h, b)  {tail} }}"
    )
    numbers = np.arange(6.0) if evenly else np.arange(6.0) ** 2
    weights = {"a": np.ones((4, 5)), "b": np.ones((5, 6)), "w": numbers.reshape(EXPECTATIONS[tail])}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()
    )
    source = load(proto)
    learned = not evenly and " Mul" not in tail  # a product by itself is never a layer
    assert len(Network.of(source).layers) == 2 + learned
    assert (outputs(source, "auto") == ["h"]) == (not learned)


STEP = "a = MatMul(x, v)  b = MatMul(s, u)  t = Add(a, b)  new = Tanh(t)"
RECURRENT = {"v": (4, 5), "u": (5, 5), "w": (5, 2)}


@pytest.mark.parametrize(
    "tail, sites",
    [
        ("y = MatMul(new, w)", ["new"]),  # which is the state
        ("g = Relu(new)  y = MatMul(g, w)", ["x", "g"]),  # s is the state of the call before
        ("p = MatMul(new, u)  g = Relu(p)  y = MatMul(g, w)", ["x", "g"]),
    ],
)
def test_a_state_has_sites_of_its_own_only_where_the_others_lie_behind_it(tail, sites):
    """It is no answer, but a variance reaches it: a part without one stops the conversion."""
    source = model(
        f"{STEP}  {tail}", "float[n, 4] x, float[n, 5] s", "float[n, 2] y, float[n, 5] new", **RECURRENT
    )
    assert outputs(source, "auto") == sites
