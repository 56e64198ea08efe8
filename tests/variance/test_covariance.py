"""The full covariance: every pullback, whole tails, refusals, and the factor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from support.covariance_checks import (
    CASES,
    SAMPLES,
    SINGLE,
    Arrays,
    Case,
    assert_close,
    assert_is_covariance,
    at,
    covariance,
    expected,
    with_covariance,
)
from support.rule_checks import parse, session

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import load
from gapa_onnx.model.splice import splice
from gapa_onnx.plan.placement import find_sites
from gapa_onnx.variance.covariance import PULLBACKS, check_tail, cholesky, output_covariance
from gapa_onnx.variance.graph import VarianceGraph
from gapa_onnx.variance.propagation import propagate


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_operator(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ is J diag(v) Jᵀ, and the pullback under test had a part in it."""
    entry, calls = PULLBACKS[case.domain, case.op_type], []

    def counted(node, g):
        calls.append(node)
        return entry.apply(node, g)

    monkeypatch.setitem(PULLBACKS, (case.domain, case.op_type), replace(entry, apply=counted))
    model, (feeds, own) = case.model(), case.values()
    cov, diag = covariance(model, feeds, own)
    assert calls
    assert_is_covariance(cov, diag)
    assert_close(cov, expected(model, feeds, own))


def test_every_pullback_has_a_case() -> None:
    assert {(case.domain, case.op_type) for case in CASES} == set(PULLBACKS)


# ------------------------------------------------------------------------------ whole tails

TAILS = {
    "mlp": """m (float[N, 3] x) => (float[N, 4] y) {
        a = Gemm(x, A, a0) h = Tanh(a) b = Gemm<transB=1>(h, B, b0) g = Relu(b) y = Gemm(g, C, c0) }""",
    "residual": """m (float[N, 3] x) => (float[N, 4] y) {
        a = Gemm(x, A, a0) h = Relu(a) b = Gemm<transB=1>(h, B, b0) g = Sigmoid(b) r = MatMul(g, D)
        s = Add(h, r) t = Elu(s) y = Gemm(t, C, c0) }""",
    "tokens": """m (float[N, 2, 3] x) => (float[N, 4] y) {
        a = MatMul(x, A) h = Tanh(a) n = LayerNormalization(h, a0, b0) b = MatMul(n, D)
        c = Mul(b, root) e = Erf(c) f = Add(e, one) w = Mul(b, f) g = Mul(w, half) r = MatMul(g, D)
        s = Add(h, r) p = Gather<axis=1>(s, first) t = Tanh(p) y = Gemm(t, C, c0) }""",
    "convolutions": """m (float[N, 2, 6, 5] x) => (float[N, 4] y) {
        a = Conv<pads=[1, 1, 1, 1], strides=[2, 2]>(x, K) h = Relu(a)
        q = AveragePool<kernel_shape=[2, 2], strides=[1, 1]>(h) b = Conv(q, L) n = BatchNormalization(b, k0, k0, k0, v0)
        g = LeakyRelu(n) p = GlobalAveragePool(g) f = Flatten(p) y = Gemm(f, C, c0) }""",
}  # fmt: skip
SHAPES = {
    "A": (3, 5), "a0": (5,), "B": (5, 5), "b0": (5,), "C": (5, 4), "c0": (4,), "D": (5, 5), "K": (3, 2, 3, 3),
    "L": (5, 3, 1, 1), "k0": (5,), "v0": (5,),
}  # fmt: skip
NUMBERS = {
    "root": SINGLE(0.5**0.5),
    "one": SINGLE(1),
    "half": SINGLE(0.5),
    "first": np.asarray(0, np.int64),
}
SITES = {"mlp": "hg", "residual": "hgt", "tokens": "hgt", "convolutions": "hg"}


def tail(name: str, opset: int) -> onnx.ModelProto:
    model = parse(TAILS[name], opset)
    rng = np.random.default_rng(1)
    arrays = {n: rng.normal(size=shape) / np.sqrt(shape[0]) for n, shape in SHAPES.items()}
    arrays["v0"] = arrays["v0"] ** 2 + 0.5
    read = {name for node in model.graph.node for name in node.input}
    for n, array in ({n: a.astype(SINGLE) for n, a in arrays.items()} | NUMBERS).items():
        if n in read:
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), n))
    return model


def tail_values(name: str, model: onnx.ModelProto, rows: int = SAMPLES) -> tuple[Arrays, Arrays]:
    """An input, and own variances in the shapes of the sites; the model is of opset 17."""
    rng = np.random.default_rng(2)
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim][1:]
    feeds = {"x": rng.normal(size=(rows, *shape)).astype(SINGLE)}
    sites = list(SITES[name])
    values = ReferenceEvaluator(
        onnx.utils.Extractor(onnx.shape_inference.infer_shapes(model)).extract_model(["x"], sites)
    ).run(None, feeds)
    own = {site: rng.uniform(0.1, 1, v.shape).astype(SINGLE) for site, v in zip(sites, values)}
    return feeds, own


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("opset", [7, 9, 13, 17, 21, 26])
def test_tail(name: str, opset: int) -> None:
    if name == "tokens" and opset < 17:
        pytest.skip("LayerNormalization is new in opset 17")
    same = tail(name, 17)  # ONNX's reference of older batch normalisations normalises the batch
    feeds, own = tail_values(name, same)
    cov, diag = covariance(tail(name, opset), feeds, own)
    assert_is_covariance(cov, diag)
    assert_close(cov, expected(same, feeds, own))


def test_sites_that_are_found() -> None:
    """Each site alone, and all of them: births are independent, so covariances add."""
    model = tail("mlp", 17)
    sites = find_sites(load(model), "all")
    assert [site.output for site in sites] == ["h", "g"]
    feeds, own = tail_values("mlp", model)
    given = feeds | {f"{n}/own": v for n, v in own.items()}
    both = session(with_covariance(model, sites)).run(["cov"], given)[0]
    alone = [covariance(model, feeds, {n: v})[0] for n, v in own.items()]
    np.testing.assert_allclose(both, alone[0] + alone[1], rtol=1e-6)


def test_logits_inside_the_model() -> None:
    """What stands in front of a Softmax has a covariance of its own."""
    model = parse("m (float[N, 4] x) => (float[N, 3] y) { h = Tanh(x) z = MatMul(h, W) y = Softmax(z) }")
    W = np.random.default_rng(0).normal(size=(4, 3)).astype(SINGLE)
    model.graph.initializer.append(onnx.numpy_helper.from_array(W, "W"))
    feeds, own = CASES[0].values()
    for output in ("z", "y"):
        cov, diag = covariance(model, feeds, own, output)
        assert_is_covariance(cov, diag)
        assert_close(cov, expected(model, feeds, own, output))


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_confident_probabilities(operator: str) -> None:
    """1 - p of an element near 1 is the sum of the others: every entry is right, however small."""
    model = parse(f"m (float[N, 3] x) => (float[N, 3] y) {{ y = {operator}(x) }}")
    x = np.array([[18.0, 1.0, 0.0]], SINGLE)
    v = np.array([[1.0, 0.5, 2.0]], SINGLE)
    z = x[0].astype(np.float64)
    p = np.exp(z) / np.exp(z).sum()
    rest = p.sum() - p[0]
    jacobian = np.diag(p) - np.outer(p, p) if operator == "Softmax" else np.eye(3) - p
    jacobian[0, 0] = p[0] * rest if operator == "Softmax" else (p[1] + p[2])
    cov, _ = covariance(model, {"x": x}, {"x": v})
    np.testing.assert_allclose(cov[0], jacobian * v @ jacobian.T, rtol=1e-5)


def test_monte_carlo() -> None:
    """A linear tail behind a nonlinear site is exact: the sample covariance, within 5 standard errors."""
    model = parse("m (float[N, 4] x) => (float[N, 3] y) { h = Tanh(x) y = MatMul(h, W) }")
    rng = np.random.default_rng(0)
    W = rng.normal(size=(4, 3)).astype(SINGLE)
    model.graph.initializer.append(onnx.numpy_helper.from_array(W, "W"))
    x, v = rng.normal(size=(1, 4)).astype(SINGLE), rng.uniform(0.1, 1, (1, 4)).astype(SINGLE)
    cov, _ = covariance(model, {"x": x}, {"h": v})
    draws = 100_000
    y = (np.tanh(x) + rng.normal(size=(draws, 4)) * np.sqrt(v)) @ W
    sampled = np.cov(y.T)
    var = np.diagonal(sampled)
    error = np.sqrt((np.outer(var, var) + sampled**2) / draws)
    assert np.all(np.abs(cov[0] - sampled) <= 5 * error)


def test_the_diagonal_is_the_diagonal_variance_of_a_linear_layer() -> None:
    model = tail("mlp", 17)
    source = load(model)
    feeds, own = tail_values("mlp", model)
    births = at("g")
    result = propagate(source, births, lambda graph, site: graph.tensor("g/own", SINGLE))
    graph = result.graph
    found = output_covariance(source, graph, births, {"g": graph.tensor("g/own", SINGLE)}, "y")
    wanted = [graph.output(v, n) for v, n in zip((*found, result.variances["y"]), ("cov", "diag", "var"))]
    infos = [onnx.helper.make_tensor_value_info(v.name, onnx.TensorProto.FLOAT, None) for v in wanted]
    spliced = splice(source.proto, graph.to_proto(wanted), infos)
    spliced.graph.input.append(onnx.helper.make_tensor_value_info("g/own", onnx.TensorProto.FLOAT, None))
    diag, var = session(spliced).run(["diag", "var"], feeds | {"g/own": own["g"]})
    np.testing.assert_allclose(diag, var, rtol=1e-6)  # sums of 5 positive terms


def test_broadcasts_that_show_at_run_time_only() -> None:
    model = parse("""m (float[N, T, 3] x, float[N, S, 3] q) => (float[N, 3] y) {
        a = Tanh(x) b = Sin(q) c = Mul(a, b) y = ReduceMax<axes=[1], keepdims=0>(c) }""")
    rng = np.random.default_rng(0)
    spliced = session(with_covariance(model, at("x", "q")))
    for sizes in ((4, 1), (1, 4), (4, 4)):
        shapes = {name: (2, size, 3) for name, size in zip("xq", sizes)}
        feeds = {name: rng.normal(size=shape).astype(SINGLE) for name, shape in shapes.items()}
        own = {name: rng.uniform(0.5, 1, shape).astype(SINGLE) for name, shape in shapes.items()}
        cov = spliced.run(["cov"], feeds | {f"{n}/own": v for n, v in own.items()})[0]
        assert_close(cov, expected(model, feeds, own))


def test_stacked_matrices_that_broadcast_at_run_time() -> None:
    model = parse("""m (float[N, S, 2, 3] x, float[N, T, 3, 2] q) => (float[N, 2] y) {
        a = MatMul(x, q) b = Tanh(a) y = ReduceMean<axes=[1, 2], keepdims=0>(b) }""")
    rng = np.random.default_rng(0)
    spliced = session(with_covariance(model, at("x", "q")))
    for sizes in ((4, 1), (1, 4), (4, 4)):
        shapes = {"x": (2, sizes[0], 2, 3), "q": (2, sizes[1], 3, 2)}
        feeds = {name: rng.normal(size=shape).astype(SINGLE) for name, shape in shapes.items()}
        own = {name: rng.uniform(0.5, 1, shape).astype(SINGLE) for name, shape in shapes.items()}
        cov = spliced.run(["cov"], feeds | {f"{n}/own": v for n, v in own.items()})[0]
        assert_close(cov, expected(model, feeds, own))


@pytest.mark.parametrize("name", TAILS)
def test_samples_do_not_see_each_other(name: str) -> None:
    model = tail(name, 17)
    feeds, own = tail_values(name, model, rows=7)
    run = session(with_covariance(model, at(*own))).run
    given = feeds | {f"{n}/own": v for n, v in own.items()}
    together = run(["cov"], given)[0]
    alone = np.concatenate([run(["cov"], {n: a[i : i + 1] for n, a in given.items()})[0] for i in range(7)])
    scale = np.abs(together).max(axis=(1, 2), keepdims=True)
    assert np.all(np.abs(alone - together) <= 1e-6 * scale)  # another blocking of the same sums
    nothing = run(["cov", "diag"], {n: a[:0] for n, a in given.items()})
    assert [a.shape for a in nothing] == [(0, 4, 4), (0, 4)]


def test_own_variances_that_broadcast() -> None:
    model = tail("convolutions", 17)
    feeds, own = tail_values("convolutions", model)
    narrow = {name: v[:, :1, :1, :1] for name, v in own.items()}
    wide = {name: np.broadcast_to(v, own[name].shape) for name, v in narrow.items()}
    np.testing.assert_array_equal(covariance(model, feeds, narrow)[0], covariance(model, feeds, wide)[0])


def test_sizes_that_are_known_at_run_time_only() -> None:
    """Of a sequence, and of what comes out."""
    model = parse("""m (float[N, T, 3] x, float[3, C] w) => (float[N, C] y) {
        t = Tanh(x) p = ReduceMean<axes=[1]>(t) q = Sub(t, p) r = Mul(q, t) c = Gather<axis=1>(r, k)
        s = ReduceMean<axes=[1], keepdims=0>(q) u = Add(c, s) y = MatMul(u, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(-2, np.int64), "k"))
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(2, 4, 3)).astype(SINGLE), "w": rng.normal(size=(3, 5)).astype(SINGLE)}
    own = {"x": rng.uniform(0.5, 1, (2, 4, 3)).astype(SINGLE)}
    cov, diag = covariance(model, feeds, own)
    assert_is_covariance(cov, diag)
    assert_close(cov, expected(model, feeds, own))


def test_a_last_layer_costs_no_product_with_the_identity() -> None:
    """J is the weights: what is left is one product, of J √v with its transpose."""
    spliced = with_covariance(tail("mlp", 17), at("g"))
    source = len(tail("mlp", 17).graph.node)
    products = [node.op_type for node in spliced.graph.node if node.op_type in ("MatMul", "Gemm")]
    assert len(products) == 3 + 1 and len(spliced.graph.node) <= source + 15


def test_half_and_double() -> None:
    """A float16 tail is computed in float32; a double one in double."""
    feeds, own = CASES[0].values()
    text = "m ({0}[N, 4] x) => ({0}[N, 4] y) {{ t = Tanh(x) y = Softmax(t) }}"
    single = expected(parse(text.format("float")), feeds, own)
    for kind, dtype, tolerance in (("float16", np.float16, 2e-2), ("double", np.float64, 1e-8)):
        source = load(parse(text.format(kind)))
        graph = propagate(source, (), lambda graph, site: None).graph
        births = {"x": graph.tensor("x/own", SINGLE)}
        cov, _ = output_covariance(source, graph, at("x"), births, "y")
        assert cov.dtype == (np.float64 if kind == "double" else SINGLE)
        value = graph.output(cov, "cov")
        element = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        info = onnx.helper.make_tensor_value_info("cov", element, None)
        spliced = splice(source.proto, graph.to_proto([value]), [info])
        own_info = onnx.helper.make_tensor_value_info("x/own", onnx.TensorProto.FLOAT, None)
        spliced.graph.input.append(own_info)
        given = {"x": feeds["x"].astype(dtype), "x/own": own["x"]}
        assert_close(session(spliced).run(["cov"], given)[0], single, tolerance)


# -------------------------------------------------------------------------------- refusals

REFUSED = {
    "y = Gemm<transA=1>(x, x)": "transA",
    "t = Transpose<perm=[1, 0]>(x) y = Transpose<perm=[1, 0]>(t)": "axis of the samples",
    "y = Softmax<axis=0>(x)": "axis of the samples",
    "s = ReduceMean<axes=[0]>(x) y = Add(x, s)": "axis of the samples",
    "y = Pow(x, x)": "the exponent is uncertain",
    "y = CumSum(x, k)": "its derivative is not in the table",
    "t, i = TopK(x, k) y = Identity(t)": "its derivative is not in the table",
    "t = Reshape(x, free) y = Reshape(t, free)": "keep the samples",
    "y = MatMul(c, x)": "summed over",
}


@pytest.mark.parametrize("body", REFUSED)
def test_refusal(body: str) -> None:
    text = f"m (float[N, 4] x, int64[2] free) => (float[N, 4] y) <int64[1] k = {{1}}> {{ {body} }}"
    model = parse(text)
    c = np.ones((4, 4) if "MatMul" in body else (4,), SINGLE)
    model.graph.initializer.append(onnx.numpy_helper.from_array(c, "c"))
    with pytest.raises(UserError, match="`covariance='diag'`") as caught:
        check_tail(load(model), at("x"), "y")
    assert REFUSED[body] in caught.value.message


def test_all_refusals_come_at_once_and_before_calibration() -> None:
    model = parse("""m (float[N, 4] x) => (float[N, 4] y) <int64[1] k = {1}> {
        a = CumSum(x, k) b = Tanh(a) c = CumSum(b, k) d = Pow(c, c) y = Relu(d) }""")
    source = load(model)
    with pytest.raises(UserError) as caught:
        check_tail(source, at("x"), "y")
    first, *rows = caught.value.message.splitlines()
    assert first.startswith("3 node(s) between the sites and 'y'")
    assert rows[0].split()[:2] == ["CumSum", "2"] and rows[1].split()[:2] == ["Pow", "1"]
    with pytest.raises(UserError) as again:
        covariance(model, {}, {"x": np.ones(1)})
    assert again.value.message == caught.value.message
    check_tail(source, at("d"), "y")  # a later site is fine


def test_outputs_of_other_shapes() -> None:
    maps = load(parse("m (float[N, 2, 3] x) => (float[N, 2, 3] y) { y = Relu(x) }"))
    with pytest.raises(UserError, match="two axes, samples and elements; 'y' has 3 axes"):
        check_tail(maps, at("x"), "y")
    free = load(parse("m (float[N, 2, 3] x, int64[k] s) => (float y) { t = Reshape(x, s) y = Relu(t) }"))
    with pytest.raises(UserError, match="'t' has unknown rank"):
        check_tail(free, at("x"), "t")
    old = load(parse("m (float[N, C] x) => (float[N, C] y) { y = Relu(x) }", 7))
    with pytest.raises(UserError, match="before opset 9"):
        check_tail(old, at("x"), "y")


def test_a_site_that_does_not_reach_the_output() -> None:
    model = parse("m (float[N, 4] x) => (float[N, 4] y, float[N, 4] z) { y = Relu(x) z = Tanh(x) }")
    with pytest.raises(UserError, match="no site reaches 'y'"):
        check_tail(load(model), at("z"), "y")


def test_one_sample_that_is_spread_over_several() -> None:
    model = parse("m (float[N, 4] x, float[1, 4] q) => (float[N, 4] y) { y = Add(x, q) }")
    with pytest.raises(UserError, match="one sample of 'q' is spread over several"):
        check_tail(load(model), at("q"), "y")


def test_slopes_of_unknown_sign_are_not_taken_from_a_composite() -> None:
    """max(x, 0) + α max(-x, 0) is PRelu of slope -α, which a variance takes for one of α."""
    model = parse("""m (float[N, 2] x) => (float[N, 1] y) <float[2] alpha = {0.5, 2.0}, float[2, 1] W = {1.0, 3.0}> {
        a = Relu(x) n = Neg(x) b = Relu(n) c = Mul(alpha, b) d = Add(a, c) e = Add(d, x) y = MatMul(e, W) }""")
    feeds = {"x": np.array([[-1.0, 1.0], [0.5, -2.0]], SINGLE)}
    own = {"x": np.ones((2, 2), SINGLE)}
    assert_close(covariance(model, feeds, own)[0], expected(model, feeds, own))


# -------------------------------------------------------------------------------- Cholesky


def factor(cov: np.ndarray, opset: int = 17) -> np.ndarray:
    graph = VarianceGraph(opset, {"cov"})
    lower = graph.output(cholesky(graph, graph.tensor("cov", SINGLE), "L"), "lower")
    made = graph.to_proto([lower])
    info = onnx.helper.make_tensor_value_info
    made.input.append(info("cov", onnx.TensorProto.FLOAT, [None, None, None]))
    made.output.append(info("lower", onnx.TensorProto.FLOAT, None))
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    found = session(model).run(None, {"cov": np.asarray(cov, SINGLE)})[0]
    np.testing.assert_array_equal(found[np.isfinite(found)], np.tril(found)[np.isfinite(found)])
    return found


@pytest.mark.parametrize("opset", [9, 13, 17, 21, 26])
@pytest.mark.parametrize("size", [1, 2, 10])
def test_cholesky(opset: int, size: int) -> None:
    """Of well-conditioned matrices (condition below 20): the factor of LAPACK in float64."""
    rng = np.random.default_rng(size)
    half = rng.normal(size=(3, size, 8 * size))
    cov = (half @ half.transpose(0, 2, 1)).astype(SINGLE)
    wanted = np.linalg.cholesky(cov.astype(np.float64))
    # ε per step, times the condition: 10 · 20 · 6e-8.
    assert np.abs(factor(cov, opset) - wanted).max() <= 1.2e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("rank", [0, 1, 3, 9])
def test_cholesky_of_singular_matrices(rank: int) -> None:
    """L Lᵀ is the matrix whatever its rank, and no column is made of rounding."""
    rng = np.random.default_rng(rank)
    scale = 10.0 ** rng.uniform(-3, 3, (40, 10, 1))  # elements of any size
    half = (scale * rng.normal(size=(40, 10, rank))).astype(SINGLE)
    cov = half @ half.transpose(0, 2, 1)
    found = factor(cov)
    std = np.sqrt(np.diagonal(cov, axis1=1, axis2=2)) + (rank == 0)
    error = np.abs(found @ found.transpose(0, 2, 1) - cov) / (std[:, :, None] * std[:, None, :])
    # A pivot that is dropped at C · 4 ε of its diagonal may take √(that) of a product of deviations with it.
    assert error.max() <= np.sqrt(10 * 4 * 1.2e-7)
    assert np.median(error.max(axis=(1, 2))) <= 1e-5
    assert np.isfinite(found).all()


def test_cholesky_of_nothing_and_of_what_is_not_a_number() -> None:
    assert factor(np.zeros((0, 4, 4))).shape == (0, 4, 4)
    np.testing.assert_array_equal(factor(np.zeros((2, 3, 3))), 0)
    cov = np.stack([np.eye(3), np.eye(3), np.zeros((3, 3))])
    cov[0, 2, 1] = cov[0, 1, 2] = np.nan
    found = factor(cov)
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1:], cov[1:])


def test_a_factor_of_an_emitted_covariance() -> None:
    """As the heads use it, in the same graph."""
    model = tail("mlp", 13)
    feeds, own = tail_values("mlp", tail("mlp", 17))
    cov, _ = covariance(model, feeds, own)
    lower = factor(cov, 13)
    std = np.sqrt(np.diagonal(cov, axis1=1, axis2=2))
    error = np.abs(lower @ lower.transpose(0, 2, 1) - cov) / (std[:, :, None] * std[:, None, :])
    assert error.max() <= 1e-5
