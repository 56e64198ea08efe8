"""Every variance rule, by its cases (`cases`) and by what the table cannot say: kinks, ties,
products, refusals, names."""

from __future__ import annotations

import numpy as np
import pytest
from cases import CASES, Case
from support import rule_checks
from support.rule_checks import add_variances, check_names, parse, propagate_inputs, run_with_variances

from gapa_onnx.variance.rules import TABLE, Accuracy, Deterministic, Rule

every_case = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
exact_cases = [case for case in CASES if rule_checks.is_exact(case)]


def first_by_day(cases: list[Case]) -> pytest.MarkDecorator:
    """The first case of each operator by day, the others at night: other checks see them all."""
    first = {case.key: case for case in reversed(cases)}.values()
    marks = {id(case): () for case in first}
    return pytest.mark.parametrize(
        "case", [pytest.param(c, id=c.id, marks=marks.get(id(c), pytest.mark.nightly)) for c in cases]
    )


def single(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# ------------------------------------------------------------------- the case table


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    # Rules that are composed of others (control flow) have bodies, not one line: test_control_flow.
    composed = Accuracy.COMPOSED
    rules = {
        key for key, entry in TABLE.items() if isinstance(entry, Rule) and entry.accuracy is not composed
    }
    rules -= {("ai.onnx.ml", "ZipMap")}  # what it puts out is no tensor: test_ml
    assert rules == {case.key for case in CASES}


@every_case
def test_a_case_is_about_its_operator(case: Case) -> None:
    assert case.node.op_type == case.op_type
    assert case.uncertain
    made = {name for node in case.nodes for name in node.output}
    assert set(case.tensors) == {name for node in case.nodes for name in node.input if name} - made


@every_case
def test_jacobian(case: Case) -> None:
    rule_checks.check_jacobian(case)


@first_by_day(CASES)
def test_sampling_with_small_variances(case: Case) -> None:
    rule_checks.check_monte_carlo(case, rule_checks.SMALL_STD, samples=1000)


@first_by_day(exact_cases)
def test_sampling_with_large_variances_where_a_rule_is_exact(case: Case) -> None:
    rule_checks.check_monte_carlo(case, std=1.0, samples=2000)


@every_case
def test_properties(case: Case) -> None:
    rule_checks.check_properties(case)


@every_case
def test_the_graph_is_valid_and_the_source_untouched(case: Case) -> None:
    rule_checks.check_graph(case)


@every_case
def test_half_precision(case: Case) -> None:
    rule_checks.check_half(case)


@first_by_day(CASES)
def test_symbolic_dimensions_change_nothing(case: Case) -> None:
    assert rule_checks.check_shapes(case, "symbolic") is None


@every_case
def test_an_unknown_rank_changes_nothing_or_is_refused(case: Case) -> None:
    reason = rule_checks.check_shapes(case, "unknown")
    assert reason is None or "rank" in reason


@every_case
def test_certain_inputs_give_no_variance(case: Case) -> None:
    result = propagate_inputs(case.model(np.float32), [])
    assert result.variances == {} and result.refused == () and result.graph.nodes == []


# ------------------------------------------------------------------- no variance leaves

UNARY = [
    "Floor", "Ceil", "Round", "Sign", "Shape", "Size", "EyeLike", "Hardmax", "ArgMax", "ArgMin", "IsNaN", "IsInf",
    "NonZero", "Multinomial", "Bernoulli", "RandomNormalLike", "RandomUniformLike", "OptionalHasElement",
    "SequenceLength",
]  # fmt: skip
BINARY = ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "NonMaxSuppression"]
#: They read no activations.
NEVER_UNCERTAIN = {
    "Constant", "ConstantOfShape", "And", "Or", "Not", "Xor", "BitShift", "Range", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor", "BitwiseNot", "StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch",
    "TfIdfVectorizer", "ImageDecoder", "RandomNormal", "RandomUniform", "BlackmanWindow", "HannWindow",
    "HammingWindow", "MelWeightMatrix", "SequenceEmpty",
}  # fmt: skip
CALLS = [f"{op}(x)" for op in UNARY] + [f"{op}(x, x)" for op in BINARY] + ["Cast<to=7>(x)"]


@pytest.mark.parametrize("call", CALLS)
def test_deterministic_operators_drop_it(call: str) -> None:
    model = parse(f"m (float[2, 3] x) => (float[] y) {{ y = {call} }}")
    result = propagate_inputs(model, ["x"])
    assert set(result.variances) == {"x"} and not result.refused


def test_every_deterministic_operator_is_tested() -> None:
    entries = {op for (domain, op), entry in TABLE.items() if not domain and isinstance(entry, Deterministic)}
    assert entries == {*UNARY, *BINARY, *NEVER_UNCERTAIN}


# ------------------------------------------------------------------------- kinks, ties

KINKS = {
    "Relu(x)": ([-1, 0, 1], [0, 0, 1]),
    "LeakyRelu<alpha=0.5>(x)": ([-1, 0, 1], [0.25, 0.25, 1]),
    "Abs(x)": ([-1, 0, 1], [1, 1, 1]),
    "Clip<min=-1.0, max=1.0>(x)": ([-2, -1, 0, 1, 2], [0, 0, 1, 0, 0]),
    "ThresholdedRelu<alpha=1.0>(x)": ([0, 1, 2], [0, 0, 1]),
    "HardSigmoid<alpha=0.5, beta=0.5>(x)": ([-2, -1, 0, 1, 2], [0, 0, 0.25, 0, 0]),
    "HardSwish(x)": ([-4, -3, 0, 3, 4], [0, 0, 0.25, 1, 1]),
    "Elu(x)": ([0, 1], [1, 1]),
    "Softsign(x)": ([0, 1], [1, 1 / 16]),
}


@pytest.mark.parametrize("call", KINKS)
def test_kinks_take_the_flat_side(call: str) -> None:
    x, wanted = KINKS[call]
    opset = 10 if call.startswith("Clip") else 17
    model = parse(f"m (float[{len(x)}] x) => (float[{len(x)}] y) {{ y = {call} }}", opset)
    found = run_with_variances(model, {"x": single(*x)}, {"x": single(*[1] * len(x))})
    np.testing.assert_allclose(found["y_var"], wanted, rtol=1e-6)


TIES = {  # of (1, 1, 3), values 2, 2, 1 with variances 3, 5, 7
    "GlobalMaxPool(x)": 4,
    "ReduceMax<axes=[2]>(x)": 4,
    "Max(x, two)": (3 / 2, 5 / 2, 0),  # the certain tensor takes half
}


@pytest.mark.parametrize("call", TIES)
def test_ties_share_the_variance(call: str) -> None:
    model = parse(f"m (float[1, 1, 3] x) => (float[1, 1, n] y) <float two = {{2}}> {{ y = {call} }}")
    x, v = single(2, 2, 1).reshape(1, 1, 3), single(3, 5, 7).reshape(1, 1, 3)
    found = run_with_variances(model, {"x": x}, {"x": v})
    np.testing.assert_allclose(found["y_var"].ravel(), TIES[call])


def test_max_pool_takes_one_of_those_that_tie() -> None:
    model = parse("m (float[1, 1, 2] x) => (float[1, 1, 1] y) { y = MaxPool<kernel_shape=[2]>(x) }")
    x, v = single(2, 2).reshape(1, 1, 2), single(3, 5).reshape(1, 1, 2)
    found = run_with_variances(model, {"x": x}, {"x": v})
    assert found["y_var"].item() in (3, 5)


# ---------------------------------------------------------------------------- products


def test_product_of_two_uncertain_matrices_is_exact() -> None:
    """Var Σ a b = Σ (a² v_b + b² v_a + v_a v_b), written out in numpy."""
    rng = np.random.default_rng(0)
    a, va, b, vb = rng.normal(size=(3, 4)), rng.random((3, 4)), rng.normal(size=(4, 2)), rng.random((4, 2))
    c, vc = rng.normal(size=2), rng.random(2)
    exact = (a**2) @ vb + va @ (b**2) + va @ vb  # (3, 2)

    model = parse("m (double[3, 4] a, double[4, 2] b) => (double[3, 2] y) { y = MatMul(a, b) }")
    found = run_with_variances(model, {"a": a, "b": b}, {"a": va, "b": vb})
    np.testing.assert_allclose(found["y_var"], exact, rtol=1e-13)

    model = parse(
        "m (double[4, 3] a, double[2, 4] b, double[2] c) => (double[3, 2] y)"
        "{ y = Gemm<alpha=0.5, beta=3.0, transA=1, transB=1>(a, b, c) }"
    )
    feeds = {"a": a.T.copy(), "b": b.T.copy(), "c": c}
    found = run_with_variances(model, feeds, {"a": va.T.copy(), "b": vb.T.copy(), "c": vc})
    np.testing.assert_allclose(found["y_var"], 0.25 * exact + 9 * vc, rtol=1e-13)


def test_a_tensor_with_itself_is_one_variable() -> None:
    model = parse(
        "m (float[1] x) => (float[1] s, float[1] d, float[1] p) { s = Add(x, x) d = Sub(x, x) p = Mul(x, x) }"
    )
    found = run_with_variances(model, {"x": single(3)}, {"x": single(0.5)})
    assert [found[name].item() for name in ("s_var", "d_var", "p_var")] == [4 * 0.5, 0, 4 * 9 * 0.5]


# --------------------------------------------------------------- types, infinities, NaN


def test_casts_carry_the_variance_in_its_type() -> None:
    model = parse("m (double[2] x) => (float[2] y, float16[2] z) { y = Cast<to=1>(x) z = Cast<to=10>(y) }")
    found = run_with_variances(model, {"x": np.array([1.0, 2.0])}, {"x": np.array([0.1, 1e6])})
    for name in ("y_var", "z_var"):  # 1e6 is beyond float16
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], [0.1, 1e6], rtol=1e-7)


def test_batch_normalization_of_half_floats_with_single_statistics() -> None:
    model = parse(
        "m (float16[1, 2] x, float16[2] s, float16[2] b) => (float16[1, 2] y)"
        "<float[2] m = {0, 1}, float[2] v = {4, 9}> { y = BatchNormalization<epsilon=0.0>(x, s, b, m, v) }"
    )
    feeds = {"x": np.ones((1, 2), np.float16), "s": np.array([2, 6], np.float16), "b": np.ones(2, np.float16)}
    found = run_with_variances(model, feeds, {"x": single(5, 7).reshape(1, 2)})
    assert found["y_var"].dtype == np.float32
    np.testing.assert_allclose(found["y_var"], [[5 * 4 / 4, 7 * 36 / 9]], rtol=1e-6)


@pytest.mark.parametrize("opset", [9, 17])
def test_a_certain_infinity_stays_certain(opset: int) -> None:
    """A mask of -inf is joined to uncertain scores."""
    model = parse(
        "m (float[2] x, float[2] mask, bool[2] on) => (float[2] y, float[4] z)"
        "{ y = Where(on, mask, x) z = Concat<axis=0>(mask, x) }",
        opset,
    )
    feeds = {"x": single(0, 5), "mask": single(-np.inf, -np.inf), "on": np.array([True, False])}
    found = run_with_variances(model, feeds, {"x": single(2, 3)})
    np.testing.assert_array_equal(found["y_var"], [0, 3])
    np.testing.assert_array_equal(found["z_var"], [0, 0, 2, 3])


def test_nan_never_becomes_a_confident_number() -> None:
    """A NaN variance stays one through layers, activations and pooling."""
    model = parse(
        "m (float[1, 1, 4] x) => (float[1, 1, 1] y) <float[1, 1, 1] w = {2}>"
        "{ a = Conv(x, w) b = Tanh(a) c = MaxPool<kernel_shape=[4]>(b) y = GlobalAveragePool(c) }"
    )
    x = np.full((1, 1, 4), np.nan, np.float32)
    found = run_with_variances(model, {"x": x}, {"x": x})
    assert np.isnan(found["y"]).all() and np.isnan(found["y_var"]).all()


def test_max_pool_takes_from_its_own_sample() -> None:
    """A window of NaN or -inf has no largest element; the index must still lie in the window."""
    model = parse("m (float[3, 1, 2] x) => (float[3, 1, 1] y) { y = MaxPool<kernel_shape=[2]>(x) }")
    x = single(1, 2, np.nan, np.nan, -np.inf, -np.inf).reshape(3, 1, 2)
    found = run_with_variances(model, {"x": x}, {"x": single(1, 1, 2, 2, 3, 3).reshape(3, 1, 2)})
    np.testing.assert_array_equal(found["y_var"].ravel(), [1, 2, 3])


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
def test_softmax_of_a_confident_row_in_single_precision(op_type: str) -> None:
    """1 - p is 1e-7 here: a difference of terms of order 1 would be rounding alone."""
    model = parse(f"m (float[2, 3] x) => (float[2, 3] y) {{ y = {op_type}(x) }}")
    x, v = np.array([[16.0, 0, -1], [0.1, 9, 8]]), np.array([[1.0, 2, 3], [4, 5, 6]])
    found = run_with_variances(model, {"x": x.astype(np.float32)}, {"x": v.astype(np.float32)})
    p = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    jacobian = np.eye(3) - p[:, None, :]  # (n, i, j), of the logarithm; float64 leaves 9 digits of 1 - p
    wanted = (jacobian**2 @ v[:, :, None])[..., 0] * (p**2 if op_type == "Softmax" else 1)
    np.testing.assert_allclose(found["y_var"], wanted, rtol=1e-5)  # some ε, times |x| from the exponential


# --------------------------------------------------------------------------- refusals

REFUSALS = [
    ("y = Pow(c, x)", 17, "exponent is uncertain"),
    ("y = Dropout(x, n, on)", 17, "training_mode"),
    ("y = Dropout(x, n, maybe)", 17, "training_mode"),
    ("y = MaxPool<kernel_shape=[2]>(x)", 7, "opset 8"),
    ("y, m, v = BatchNormalization<training_mode=1>(x, g, g, g, g)", 15, "training mode"),
    ("y, m, v, a, b = BatchNormalization(x, g, g, g, g)", 9, "training mode"),
    ("y = BatchNormalization(c, g, n1, g, g)", 15, "parameters are uncertain"),
    ("y = MatMul(x, x)", 17, "multiplied by itself"),
    ("y = Conv(c, w, n1)", 17, "uncertain bias"),
    ("y = Gemm(x, w, x)", 17, "its own bias"),
    ("y = Pad(x, pads, n)", 17, "padding value is uncertain"),
    ('y = Einsum<equation="ijk,ijk->i">(x, x)', 17, "multiplied by itself"),
]


@pytest.mark.parametrize("text, opset, reason", REFUSALS, ids=[text for text, _, _ in REFUSALS])
def test_refusals_tell_their_reason(text: str, opset: int, reason: str) -> None:
    model = parse(
        "m (float[2, 2, 2] x, float[2, 2, 2] c, float n, float[2] n1, bool maybe, int64[1] axes) => (float y)"
        "<float[2] g = {1, 1}, float[2, 2, 1] w = {1, 1, 1, 1}, bool on = {1},"
        "int64[6] pads = {0, 0, 1, 0, 0, 1}>"
        f"{{ {text} }}",
        opset,
    )
    result = propagate_inputs(model, ["x", "n", "n1"])
    assert [entry.operator for entry in result.refused] == [model.graph.node[0].op_type]
    assert reason in result.refused[0].reason


def test_all_refusals_are_collected_and_cutting_stops_there() -> None:
    model = parse(
        "m (float[2, 2] x) => (float y, float[2, 2] z)"
        "{ a = com.example.F(x) y = com.example.G(a) z = Relu(x) }"
    )
    model.graph.node[0].name = "first"
    refused = propagate_inputs(model, ["x"]).refused
    assert [(entry.node, entry.operator) for entry in refused] == [
        ("first", "com.example::F"), ("y", "com.example::G"),
    ]  # fmt: skip
    result = propagate_inputs(model, ["x"], cut=True)
    assert [entry.operator for entry in result.refused] == ["com.example::F"]
    assert set(result.variances) == {"x", "z"}


def test_operators_of_other_domains_are_refused_by_name() -> None:
    model = parse("m (float[2] x) => (float[2] y) { y = com.example.Relu(x) }")
    (entry,) = propagate_inputs(model, ["x"]).refused
    assert entry.operator == "com.example::Relu" and "com.example::Relu" in entry.reason


def test_a_branch_passes_on_what_it_captures() -> None:
    text = (
        "m (bool c, float[2] x, float[2] k) => (float[2] y) { y = If (c) <"
        "then_branch = t () => (float[2] a) { a = Relu(CAPTURED) },"
        "else_branch = e () => (float[2] b) { b = Neg(k) }> }"
    )
    assert "y" in propagate_inputs(parse(text.replace("CAPTURED", "x")), ["x"]).variances
    assert "y" not in propagate_inputs(parse(text.replace("CAPTURED", "k")), ["x"]).variances


# ------------------------------------------------------------------------------ names


def test_names_read_like_the_source() -> None:
    model = parse(
        "m (float[2, 3] x) => (float[2, 4] y) <float[3, 4] w = {1,1,1,1,1,1,1,1,1,1,1,1}>"
        "{ h = MatMul(x, w) a = Gelu(h) b = Identity(a) y = Softmax(b) }",
        20,
    )
    result = propagate_inputs(model, ["x"])
    assert {name: value.name for name, value in result.variances.items()} == {
        "x": "x/own", "h": "h/var", "a": "a/var", "b": "a/var", "y": "y/var",
    }  # fmt: skip
    check_names(model, add_variances(model, result)[0])


def test_names_of_the_source_are_not_given_out_again() -> None:
    """A source that has tensors called `y/var`, `y/var/1` and `y_var` already."""
    model = parse(
        "m (float[2] x) => (float[2] y, float[2] z)"
        "{ p = Exp(x) q = Exp(p) r = Exp(q) y = Sin(x) z = Add(r, y) }"
    )
    names = {"p": "y/var", "q": "y/var/1", "r": "y_var"}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    result = propagate_inputs(model, ["x"])
    spliced, names = add_variances(model, result)
    outputs = [name for node in spliced.graph.node for name in node.output]
    assert len(set(outputs)) == len(outputs)
    x, v = single(0.5, 1), single(1, 2)
    found = rule_checks.session(spliced).run(names, {"x": x, "x/own": v})
    np.testing.assert_allclose(found[0], np.cos(x) ** 2 * v, rtol=1e-6)


def test_each_output_of_a_node_gets_its_own_name() -> None:
    model = parse("m (float[4] x) => (float[2] a, float[2] b) { a, b = Split(x) }")
    result = propagate_inputs(model, ["x"])
    assert [result.variances[name].name for name in "ab"] == ["a/var", "b/var"]
