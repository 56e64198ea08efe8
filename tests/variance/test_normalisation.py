"""What the case table cannot say of normalisations, norms and products: outliers, large variances,
zeros, old opsets, shapes that are spread."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from support import rule_checks
from support.rule_checks import parse, propagate_inputs, run_with_variances

from gapa_onnx.variance.graph import VarianceGraph
from gapa_onnx.variance.rules import NodeView, VirtualNode, behaviour
from gapa_onnx.variance.rules.multilinear import LARGEST_MATRIX

SINGLE = np.float32


def exact_first_order(x: np.ndarray, v: np.ndarray, epsilon: float, centred: bool) -> np.ndarray:
    """Σ_j J_ij² v_j of one row in float64, with J written out and s² without the variance."""
    n = x.size
    deviation = x - x.mean() if centred else x
    s = np.sqrt((deviation**2).mean() + epsilon)
    u = deviation / s
    jacobian = np.eye(n) - (centred + np.outer(u, u)) / n
    return (jacobian / s) ** 2 @ v


NORMALISED = {"LayerNormalization": True, "SimplifiedLayerNormalization": False}


@pytest.mark.parametrize("op_type", NORMALISED)
@pytest.mark.parametrize("outlier", [30.0, 3000.0, 30000.0])
def test_an_outlier_channel_in_single_precision(op_type: str, outlier: float) -> None:
    """One channel far above the rest, as in large transformers: its own output hardly depends on it, and
    the difference of terms of order 1 would be rounding alone, of either sign."""
    n = 64
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, n))
    x[0, 5] = outlier
    v = 1e-6 * rng.uniform(0.5, 1.5, (1, n))
    model = parse(f"m (float[1, {n}] x, float[{n}] g) => (float[1, {n}] y) {{ y = {op_type}(x, g) }}")
    feeds = {"x": x.astype(SINGLE), "g": np.ones(n, SINGLE)}
    found = run_with_variances(model, feeds, {"x": v.astype(SINGLE)})["y_var"][0]
    wanted = exact_first_order(x[0].astype(SINGLE).astype(np.float64), v[0], 1e-5, NORMALISED[op_type])
    assert np.all(found >= 0)
    # Each slope 1 + u_i u_j errs by some ε of its terms, which are up to 1; squared and averaged over
    # slopes of 1 / outlier at the outlier that is 2 · 6e-8 · outlier, and less elsewhere.
    np.testing.assert_allclose(found, wanted, rtol=1e-5 + 2e-7 * outlier)


@pytest.mark.parametrize("op_type", NORMALISED)
def test_the_variance_of_a_normalised_tensor_is_bounded(op_type: str) -> None:
    """With variances far above the means nothing is left of them but v / mean(v), n / (n - 1) times
    that of the deviations of n elements for a mean that is subtracted; γ² times that."""
    n = 8
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(1, n)), 1e8 * np.ones((1, n))
    model = parse(f"m (double[1, {n}] x, double[{n}] g) => (double[1, {n}] y) {{ y = {op_type}(x, g) }}")
    found = run_with_variances(model, {"x": x, "g": np.full(n, 2.0)}, {"x": v})["y_var"]
    np.testing.assert_allclose(found, 4, rtol=1e-6)


def test_a_group_of_two_keeps_no_variance_but_what_epsilon_leaves() -> None:
    """(a, b) becomes (1, -1): first order 0 but for ε."""
    model = parse("m (float[64, 2] x, float[2] g) => (float[64, 2] y) { y = LayerNormalization(x, g) }")
    x = np.random.default_rng(0).normal(size=(64, 2)).astype(SINGLE)
    feeds, v = {"x": x, "g": np.ones(2, SINGLE)}, np.full((64, 2), 1e-8, SINGLE)
    found = run_with_variances(model, feeds, {"x": v})["y_var"]
    spread = ((x[:, :1] - x[:, 1:]) / 2) ** 2 + 1e-5  # (64, 1), s²
    assert np.all(found >= 0)
    assert np.all(found * spread <= 1e-8 * np.maximum(1e-6, 10 * (1e-5 / spread) ** 2))


@pytest.mark.parametrize("p", [1, 2])
def test_zeros_have_no_direction_and_no_variance_that_is_not_a_number(p: int) -> None:
    model = parse(f"m (float[2, 3] x) => (float[2, 3] y) {{ y = LpNormalization<p={p}>(x) }}", 22)
    zeros = np.zeros((2, 3), SINGLE)
    v = np.array([[0, 0, 0], [1, 1, 1]], SINGLE)
    found = run_with_variances(model, {"x": zeros}, {"x": v})["y_var"]
    np.testing.assert_array_equal(found[0], 0)
    assert np.all(found[1] > 0) and np.all(found[1] <= 1)


@pytest.mark.parametrize(
    "text", ["ReduceL2<axes=[2]>(x)", "GlobalLpPool(x)", "LpPool<kernel_shape=[3], p=3>(x)"]
)
def test_a_norm_at_zero_has_the_variance_of_what_comes_in(text: str) -> None:
    """|x| at 0 has that of x; a norm of several has a mean of theirs."""
    model = parse(f"m (float[1, 2, 3] x) => (float[1, 2, n] y) {{ y = {text} }}")
    v = np.array([[[0, 0, 0], [2, 2, 2]]], SINGLE)
    found = run_with_variances(model, {"x": 0 * v}, {"x": v})["y_var"].ravel()
    expected = 2 if "p=3" not in text else 2 * 3 / 3 ** (4 / 3)
    np.testing.assert_allclose(found, [0, expected], rtol=1e-6)


PRODUCTS = {
    "ReduceProd<axes=[1]>(x)": (17, np.ones((1, 4))),
    "CumProd(x, axis)": (26, np.tri(4)),
    "CumProd<exclusive=1>(x, axis)": (26, np.tri(4, k=-1)),
    "CumProd<reverse=1>(x, axis)": (26, np.tri(4).T),
}


@pytest.mark.parametrize("call", PRODUCTS)
@pytest.mark.parametrize("zeros", [[], [2], [0, 3]])
def test_products_that_contain_zeros(call: str, zeros: list[int]) -> None:
    """The slope of an element is the product of the others, written out."""
    opset, members = PRODUCTS[call]  # (outputs, elements): 1 where an element is a factor
    x, v = np.array([1.5, -0.5, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])
    x[zeros] = 0
    wanted = [
        sum(v[j] * np.prod([x[k] for k in range(4) if row[k] and k != j]) ** 2 for j in range(4) if row[j])
        for row in members
    ]
    model = parse(f"m (double[1, 4] x) => (double[1, n] y) <int64 axis = {{1}}> {{ y = {call} }}", opset)
    found = run_with_variances(model, {"x": x[None]}, {"x": v[None]})["y_var"][0]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


OLD = {
    "LayerNormalization": (17, {"axis": -1}),
    "RMSNormalization": (23, {"axis": -1}),
    "LpNormalization": (17, {"axis": -1, "p": 2}),
}


@pytest.mark.parametrize("op_type", OLD)
@pytest.mark.parametrize("opset", [7, 9, 11, 13])
def test_composites_of_old_opsets(op_type: str, opset: int) -> None:
    """A group of nodes of an old opset, seen as an operator that this opset has not: only old nodes come."""
    newer, attrs = OLD[op_type]
    shapes = {"x": (2, 6), "g": (6,)}
    inputs = [gs.Variable(name, SINGLE, shape) for name, shape in shapes.items()][: 1 if "p" in attrs else 2]
    node = VirtualNode(op_type, "node", attrs, inputs, [gs.Variable("y", SINGLE, (2, 6))])
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=shape).astype(SINGLE) for name, shape in shapes.items()}
    feeds["x_var"] = rng.random((2, 6)).astype(SINGLE)
    found = []
    for version in (opset, newer):
        graph = VarianceGraph(version, set(shapes))
        var = graph.tensor("x_var", SINGLE)
        total = behaviour("", op_type).apply(NodeView(graph, node, {"x": var}.get))
        total = total[0] if isinstance(total, tuple) else total
        proto = graph.to_proto([total])
        read = {name for entry in proto.node for name in entry.input} & set(feeds)
        infos = [onnx.helper.make_tensor_value_info(n, 1, feeds[n].shape) for n in sorted(read)]
        proto.input.extend(infos)
        proto.output.append(onnx.helper.make_tensor_value_info(total.name, 1, (2, 6)))
        opsets = [onnx.helper.make_opsetid("", version)]
        model = onnx.helper.make_model(proto, opset_imports=opsets, ir_version=10)
        onnx.checker.check_model(model, full_check=True)
        found.append(rule_checks.session(model).run(None, {name: feeds[name] for name in read})[0])
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_a_skip_that_is_spread_over_positions_is_added_first() -> None:
    """The same as the sum and the normalisation as nodes of their own."""
    rng = np.random.default_rng(0)
    parts = "double[1, 4, 2, 2] x, double[4] g, double[4] b"
    feeds = {"x": rng.normal(size=(1, 4, 2, 2)), "g": rng.normal(size=4), "b": rng.normal(size=4)}
    skip, v = rng.normal(size=(1, 4)), rng.random((1, 4))
    fused = parse(
        f"m ({parts}, double[1, 4] skip) => (double[1, 4, 2, 2] y) {{ y = com.microsoft.SkipGroupNorm"
        "<groups=2, activation=0, channels_last=0>(x, g, b, skip) }",
        21,
    )
    fused.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    apart = parse(
        f"m ({parts}, double[1, 4, 1, 1] skip) => (double[1, 4, 2, 2] y)"
        "{ s = Add(x, skip) y = GroupNormalization<num_groups=2>(s, g, b) }",
        21,
    )
    found = run_with_variances(fused, feeds | {"skip": skip}, {"skip": v})
    spread = (1, 4, 1, 1)
    wanted = run_with_variances(apart, feeds | {"skip": skip.reshape(spread)}, {"skip": v.reshape(spread)})
    np.testing.assert_allclose(found["y_var"], wanted["y_var"], rtol=1e-12)


REFUSALS = [
    ('y = Einsum<equation="...i->i">(x)', "ellipsis"),
    ('y = Einsum<equation="ij,jk->ik">(x, one)', "single value"),
    ('y = Einsum<equation="ij,ij,ij,ij->i">(x, a, b, c)', "more than 3"),
    ("y = NegativeLogLikelihoodLoss(k, t, w)", "weights are uncertain"),
    ("y = Det(large)", f"larger than {LARGEST_MATRIX}"),
    ("y = com.microsoft.EmbedLayerNormalization(t2, , x, x, , w, w)", "one table serves two"),
]  # fmt: skip


@pytest.mark.parametrize("text, reason", REFUSALS, ids=[text for text, _ in REFUSALS])
def test_refusals(text: str, reason: str) -> None:
    size = LARGEST_MATRIX + 1
    model = parse(
        "m (float[2, 3] x, float[2, 3] a, float[2, 3] b, float[2, 3] c, float[2, 3] k, float[3] w,"
        f"float[1, 3] one, float[{size}, {size}] large, int64[2] t, int32[1, 2] t2) => (float y) {{ {text} }}"
    )
    (entry,) = propagate_inputs(model, ["x", "a", "b", "c", "w", "large"]).refused
    assert reason in entry.reason
