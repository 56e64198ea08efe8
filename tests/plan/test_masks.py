"""Which inputs tell padding, what in them is padding, and which sites and outputs they are for."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel, load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.plan.layers import Network
from gapa_onnx.plan.masks import Mask, find_masks, with_mask
from gapa_onnx.plan.naming import named_site
from gapa_onnx.settings import Settings
from gapa_onnx.variance.masks import valid_positions, valid_queries
from gapa_onnx.variance.sites import Layout

CONSTANTS = """int64[1] first = {1}, int64[1] last = {2}, int64[2] between = {1, 2}, float one = {1}, float nothing = {0},
    float low = {-1e9}, float high = {1e9}, float lower = {-10000}, int64 whole = {1}, int64 none = {0}"""
REST = "z = MatMul(c, w1)  h = Tanh(z)  logits = MatMul(h, w2)"
TOKENS = "int64[n, t] input_ids"
OF_TEXTS = "float[n, 3] logits"


def source(
    body: str,
    inputs: str = f"{TOKENS}, int64[n, t] attention_mask",
    result: str = "float[n, t, 3] logits",
    **extra,
) -> SourceModel:
    """A model from ONNX text, with the weights of a small text model."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>'
        f" net ({inputs}) => ({result}) <{CONSTANTS}> {{ {body} }}"
    )
    generator = np.random.default_rng(0)
    shapes = {"table": (9, 4), "w1": (4, 5), "w2": (5, 3), "qkv": (4, 12), "bias": (12,), **extra}
    used = {name for node in model.graph.node for name in node.input}
    for name, shape in shapes.items():
        if name in used:
            array = generator.normal(size=shape).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return load(model)


def attending(masked: str, mask: str = "int64[n, t] attention_mask", more: str = "") -> SourceModel:
    """Self-attention of one head, whose scores s become m by what `masked` does."""
    body = f"e = Gather(table, input_ids)  f = Transpose<perm = [0, 2, 1]>(e)  s = MatMul(e, f)  {masked}"
    return source(f"{body}  a = Softmax(m)  c = MatMul(a, e)  {REST}", f"{TOKENS}, {mask}{more}")


def names(found: tuple[Mask, ...]) -> list[str]:
    return [mask.name for mask in found]


FLOAT = "k = Cast<to = 1>(attention_mask)  u = Unsqueeze(k, first)  "
BOOL = "k = Cast<to = 9>(attention_mask)  u = Unsqueeze(k, first)  "
LOWERED = {  # what is done with scores -> whether ones are padding
    "exported BERT": (FLOAT + "i = Sub(one, u)  p = Mul(i, low)  m = Add(s, p)", False),
    "the sum the other way round": (FLOAT + "i = Sub(one, u)  p = Mul(lower, i)  m = Add(p, s)", False),
    "filled": (BOOL + "i = Not(u)  m = Where(i, low, s)", False),
    "kept": (BOOL + "m = Where(u, s, low)", False),
    "a bias by Where": (BOOL + "p = Where(u, nothing, low)  m = Add(s, p)", False),
    "equal to 0": (
        "u = Unsqueeze(attention_mask, first)  i = Equal(u, none)  m = Where(i, low, s)",
        False,
    ),
    "(m - 1) · 1e9": (FLOAT + "i = Sub(u, one)  p = Mul(i, high)  m = Add(s, p)", False),
    "taken off": (FLOAT + "p = Mul(u, high)  m = Sub(s, p)", True),
    "ones lowered": (FLOAT + "p = Mul(u, lower)  m = Add(s, p)", True),
    "ones filled": (BOOL + "m = Where(u, low, s)", True),
    "zeros kept": (BOOL + "i = Not(u)  m = Where(i, s, low)", True),
}


@pytest.mark.parametrize("how", LOWERED)
def test_padding_is_where_scores_are_lowered(how):
    masked, ones = LOWERED[how]
    assert names(find_masks(attending(masked), "auto")) == [("~" if ones else "") + "attention_mask"]


def test_a_mask_beside_a_causal_one_is_read_through_it():
    body = BOOL + "both = And(u, causal)  m = Where(both, s, low)"
    found = find_masks(attending(body, more=", bool[t, t] causal"), "auto")
    assert names(found) == ["attention_mask"]
    body = BOOL + "hidden = Or(causal, u)  m = Where(hidden, low, s)"
    found = find_masks(attending(body, more=", bool[t, t] causal"), "auto")
    assert names(found) == ["~attention_mask"]


POOLING = "e = Gather(table, input_ids)  k = Cast<to = 1>({mask})  u = Unsqueeze(k, last)  {factor}"
MEAN = "q = Mul(e, {by})  r = ReduceSum<keepdims = 0>(q, first)  d = ReduceSum<keepdims = 0>({by}, first)  c = Div(r, d)"


@pytest.mark.parametrize(
    "factor, by, ones", [("", "u", False), ("i = Sub(one, u)", "i", True)], ids=["by m", "by 1 - m"]
)
def test_padding_is_where_features_are_multiplied_with_0(factor, by, ones):
    body = POOLING.format(mask="attention_mask", factor=factor) + "  " + MEAN.format(by=by) + REST
    assert names(find_masks(source(body, result=OF_TEXTS), "auto")) == [
        ("~" if ones else "") + "attention_mask"
    ]


@pytest.mark.parametrize(
    "before, read, name",
    [
        ("", "padding_mask", "padding_mask"),  # the operator's own mask has ones at what is read
        ("i = Sub(whole, padding_mask)", "i", "~padding_mask"),
    ],
)
def test_an_attention_operator_reads_ones_as_tokens(before, read, name):
    attention = f"c = com.microsoft.Attention<num_heads = 2>(e, qkv, bias, j)  {REST}"
    body = f"e = Gather(table, input_ids)  {before}  j = Cast<to = 6>({read})  {attention}"
    assert names(find_masks(source(body, f"{TOKENS}, int64[n, t] padding_mask"), "auto")) == [name]


@pytest.mark.parametrize("called, name", [("key_padding_mask", "~key_padding_mask"), ("mask", "mask")])
def test_where_the_graph_does_not_tell_the_name_does(called, name):
    """torch's key_padding_mask has ones at padding."""
    body = f"e = Gather(table, input_ids)  n = com.example.Attend(e, {called})  c = Identity(e)  {REST}"
    assert names(find_masks(source(body, f"{TOKENS}, bool[n, t] {called}"), "auto")) == [name]


@pytest.mark.parametrize(
    "inputs, found",
    [
        (f"{TOKENS}, int64[n, t] attention_mask", ["attention_mask"]),
        ("int64[2, 7] input_ids, int64[2, 7] attention_mask", ["attention_mask"]),
        ("int64[?, ?] input_ids, int64[?, ?] attention_mask", ["attention_mask"]),  # exported with open sizes
        (f"{TOKENS}, bool[n, t] mask", ["mask"]),
        (f"{TOKENS}, int64[n, t] input_mask_1", ["input_mask_1"]),
        (f"{TOKENS}, int64[n, t] mask_ids", []),  # numbers that are called after a mask
        (f"{TOKENS}, float[layers, heads] head_mask", []),
        (f"{TOKENS}, float[n, t] head_mask", []),
        (f"{TOKENS}, int64[n, t] token_type_ids", []),
        (f"{TOKENS}, int64[n, s] attention_mask", []),  # of other positions
        (f"{TOKENS}, float[n, 1, t, t] attention_mask", []),
        ("int64[n] input_ids, int64[n, t] attention_mask, int64[n, t] other_mask", []),  # beside masks only
        ("int64[n, t] question, int64[n, t] mask_0, int64[n, c] context, int64[n, c] mask_1", ["mask_0", "mask_1"]),
    ],
)  # fmt: skip
def test_a_mask_is_called_one_and_has_the_axes_of_another_input(inputs, found):
    tokens = inputs.split("] ")[1].split(",")[0]  # the name of the first
    body = f"c = Gather(table, {tokens})  {REST}"
    assert names(find_masks(source(body, inputs, "float logits"), "auto")) == found


def test_what_is_added_to_scores_as_it_is_is_no_mask():
    """It holds 0 and -1e9 itself: the model was exported behind the arithmetic."""
    masked = "u = Unsqueeze(attention_mask, first)  m = Add(s, u)"
    assert find_masks(attending(masked, "float[n, t] attention_mask"), "auto") == ()
    scaled = "u = Unsqueeze(attention_mask, first)  m = Sub(s, u)"
    assert find_masks(attending(scaled, "float[n, t] attention_mask"), "auto") == ()


# ----------------------------------------------------------------- masks by name

KEPT = BOOL + "m = Where(u, s, low)"
TURNED = BOOL + "m = Where(u, low, s)"


@pytest.mark.parametrize("masked, sign", [(KEPT, ""), (TURNED, "~")])
def test_a_mask_that_is_named(masked, sign):
    found = attending(masked)
    assert find_masks(found, "none") == ()
    assert find_masks(found, "attention_mask") == (Mask(f"{sign}attention_mask", ("n", "t")),)
    assert find_masks(found, "~attention_mask") == (Mask("~attention_mask", ("n", "t")),)
    assert find_masks(found, " k ")[0].name == f"{sign}k"  # a tensor inside serves as well


@pytest.mark.parametrize(
    "asked, message, hint",
    [
        ("atention_mask", "`mask` names 'atention_mask', which is no tensor of the model", "did you mean 'attention_mask'"),
        ("~", "`mask` names '', which is no tensor", "auto, none or a tensor"),
        ("zzzzzz", "which is no tensor", "auto, none or a tensor"),
        ("table", "the same in every run; a mask has two axes", "name another tensor"),
        ("~e", "of 3 axes; a mask has two axes, the rows and their positions", "name another tensor"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_mask(asked, message, hint):
    with pytest.raises(UserError) as error:
        find_masks(attending(KEPT), asked)
    assert message in error.value.message and hint in error.value.hint


# ----------------------------------------------------------------- whose mask it is

TEXT = f"e = Gather(table, input_ids)  c = Identity(e)  {REST}"


def site_mask(found: SourceModel, name: str) -> str | None:
    return with_mask(found, named_site(Network.of(found), name), find_masks(found, "auto")).mask


def test_sites_with_the_positions_of_the_mask_have_it():
    found = source(TEXT)
    assert site_mask(found, "h") == "attention_mask"
    assert site_mask(found, "h:pooled") == "attention_mask"
    assert site_mask(found, "h:flat") is None


def test_channels_first_sites_have_it_where_positions_are_the_last_axis():
    """(N, channels, T), as in front of a convolution over a text."""
    body = "e = Gather(table, input_ids)  x = Transpose<perm = [0, 2, 1]>(e)  z = Conv(x, k)  h = Relu(z)"
    body += "  y = Conv(h, l)  logits = Transpose<perm = [0, 2, 1]>(y)"
    sizes = "int64[n, 6] input_ids, int64[n, 6] attention_mask"
    found = source(body, sizes, "float[n, 6, 3] logits", k=(5, 4, 1), l=(3, 5, 1))
    site = named_site(Network.of(found), "h:positions")
    assert (site.layout, site.axis) == (Layout.POSITIONS, 1)
    assert site_mask(found, "h:positions") == site_mask(found, "h:pooled") == "attention_mask"
    # With the features on the last axis, the other two are rows and channels, which have no padding.
    assert site_mask(found, "h:positions@2") is None


WINDOWS = {  # of convolutions over open lengths -> whether their number of positions stays
    "Conv(x, k1)": True,
    "Conv<pads = [1, 1]>(x, k3)": True,
    "Conv<pads = [2, 0]>(x, k3)": True,  # causal
    "Conv<pads = [2, 2], dilations = [2]>(x, k3)": True,
    'Conv<auto_pad = "SAME_UPPER">(x, k3)': True,
    "MaxPool<kernel_shape = [3], pads = [1, 1]>(c1)": True,  # behind another that leaves it
    "Conv(x, k3)": False,
    "Conv<pads = [1, 1], dilations = [2]>(x, k3)": False,
    "Conv<pads = [1, 1], strides = [2]>(x, k3)": False,
    'Conv<auto_pad = "SAME_UPPER", strides = [2]>(x, k3)': False,
    "MaxPool<kernel_shape = [3], pads = [1, 1]>(c3)": False,
}


@pytest.mark.parametrize("window", WINDOWS)
def test_a_mask_goes_through_convolutions_that_leave_the_length(window):
    body = (
        "e = Gather(table, input_ids)  x = Transpose<perm = [0, 2, 1]>(e)  c1 = Conv(x, k1)  c3 = Conv(x, k3)"
    )
    body += f"  z = {window}  h = Relu(z)  y = Conv(h, l)  logits = Transpose<perm = [0, 2, 1]>(y)"
    found = source(body, result="float[n, u, 3] logits", k1=(5, 4, 1), k3=(5, 4, 3), l=(3, 5, 1))
    # The mean over positions is written into the graph, where lengths must agree.
    assert site_mask(found, "h:pooled") == ("attention_mask" if WINDOWS[window] else None)
    # For single positions the arrays tell, see `valid_queries`.
    assert site_mask(found, "h:positions") == "attention_mask"


def test_vectors_of_whole_texts_have_no_mask_and_their_output_has_lengths():
    body = POOLING.format(mask="attention_mask", factor="") + "  " + MEAN.format(by="u") + REST
    plan = analyse(source(body, result=OF_TEXTS), Settings())
    assert [site.mask for site in plan.sites] == [None] * len(plan.sites)
    (head,) = plan.heads
    assert (head.mask, head.lengths) == (None, "attention_mask")
    (head,) = analyse(source(body, result=OF_TEXTS), Settings(mask="none")).heads
    assert (head.mask, head.lengths) == (None, None)


def test_outputs_of_positions_have_the_mask():
    (head,) = analyse(source(TEXT), Settings()).heads
    assert (head.mask, head.lengths) == ("attention_mask", None)


def test_two_masks_tell_no_length():
    body = POOLING.format(mask="mask_0", factor="") + "  " + MEAN.format(by="u") + REST
    inputs = f"{TOKENS}, int64[n, t] mask_0, int64[n, t] mask_1"
    (head,) = analyse(source(body, inputs, OF_TEXTS), Settings()).heads
    assert (head.mask, head.lengths) == (None, None)


# ----------------------------------------------------------------- in arrays


def test_positions_without_padding():
    values = np.array([[1, 1, 0], [2, 0, 0]])
    np.testing.assert_array_equal(valid_positions("mask", values), [[1, 1, 0], [1, 0, 0]])
    np.testing.assert_array_equal(valid_positions("~mask", values), [[0, 0, 1], [0, 1, 1]])


def test_queries_without_padding():
    valid = np.array([[True, True, False], [True, False, False]])
    flat = [True, True, False, True, False, False]
    np.testing.assert_array_equal(valid_queries(valid, np.zeros((2, 3, 4))), flat)
    np.testing.assert_array_equal(valid_queries(valid, np.zeros((6, 4))), flat)  # rows and positions in one
    np.testing.assert_array_equal(valid_queries(valid, np.zeros((2, 3, 2, 4))), np.repeat(flat, 2))
    assert valid_queries(valid, np.zeros((2, 4))) is None  # one query for each text
    assert valid_queries(valid, np.zeros((3, 2, 4))) is None
    assert valid_queries(None, np.zeros((2, 3, 4))) is None
