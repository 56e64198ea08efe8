"""The whole path on small models: variances against numbers worked out by other means, and the promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import exp, tanh

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.paths import MODELS
from support.small_models import parse

import gapa_onnx
from gapa_onnx.model import protos, weights, writing
from gapa_onnx.op import reference
from gapa_onnx.record import METADATA_KEY, DataRecord, read


def run(model: onnx.ModelProto, names: list[str], **feeds: np.ndarray) -> list[np.ndarray]:
    return gapa_onnx.session(model.SerializeToString()).run(names, feeds)


TANH_NET = "net (float[n, 1] x) => (float[n, 1] y) { z = MatMul(x, w1)  h = Tanh(z)  y = MatMul(h, w2) }"


def test_a_case_worked_out_by_hand():
    """One tanh unit, inducing points -1, 0 and 1, length scale 1, queried at 1/2."""
    model = parse(TANH_NET, w1=[[1.0]], w2=[[3.0]])
    rows = np.array([[-1.0], [0.0], [1.0]], np.float32)
    conversion = gapa_onnx.convert(
        model, {"x": rows}, inducing="all", k=3, length_scale=1.0, scale="none", jitter=1e-6
    )
    y, y_var = run(conversion.model, ["y", "y_var"], x=np.array([[0.5]], np.float32))

    # Kernel between the points: 1 + jitter on the diagonal, a at distance 1, b at distance 2.
    e, a, b = 1 + 1e-6, exp(-0.5), exp(-2.0)
    # Kernel to the query: distances 3/2, 1/2 and 1/2.
    p, q = exp(-(1.5**2) / 2), exp(-(0.5**2) / 2)
    # K = [[e, a, b], [a, e, a], [b, a, e]] by cofactors; s = 1 - kᵀ K⁻¹ k with k = (p, q, q).
    determinant = e**3 + 2 * a * a * b - e * (2 * a * a + b * b)
    cofactors = [
        [e * e - a * a, a * b - a * e, a * a - b * e],
        [a * b - a * e, e * e - b * b, a * b - a * e],
        [a * a - b * e, a * b - a * e, e * e - a * a],
    ]
    k = np.array([p, q, q])
    s = 1 - sum(k[i] * cofactors[i][j] * k[j] for i in range(3) for j in range(3)) / determinant
    prior_var = 2 / 3  # of -1, 0, 1
    assert y[0, 0] == pytest.approx(3 * tanh(0.5), rel=1e-6)
    # float32 output, and s carries the rounding of 1 - 0.99…: 1e-7 / s.
    assert y_var[0, 0] == pytest.approx(3**2 * prior_var * s, rel=1e-5)
    kernel = np.array([[e, a, b], [a, e, a], [b, a, e]])
    assert s == pytest.approx(1 - k @ np.linalg.inv(kernel) @ k, rel=1e-9)  # the cofactors are right


def test_scale_makes_the_median_share_the_target():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((401, 1)).astype(np.float32)  # an odd number: the median is one of the shares
    model = parse(TANH_NET, w1=[[1.0]], w2=[[1.0]])
    conversion = gapa_onnx.convert(
        model, {"x": rows}, inducing="random", m=50, k=5, solver="exact", length_scale=0.05, scale="loo"
    )
    (fit,) = conversion.numbers.fits
    points = fit.index.points
    shares = []
    for row in rows:
        others = points[(points != row).any(axis=1)]  # the row itself is left out
        ids = reference.nearest(row[None], others, 5)
        shares.append(reference.unexplained_share(row[None], others, ids, fit.length_scale, fit.jitter)[0])
    assert fit.scale * np.median(shares) == pytest.approx(0.05, rel=1e-5)
    assert fit.share_quantiles["0.5"] == pytest.approx(np.median(shares), rel=1e-5)


def levelled(fit, s: np.ndarray) -> np.ndarray:
    """τ s up to the ceiling τ = A, beyond that A times the share whose odds are those of s times τ/A."""
    if fit.scale <= fit.ceiling:
        return fit.scale * s
    odds = fit.scale / fit.ceiling * s / np.maximum(1 - s, 1e-300)
    return fit.ceiling * odds / (1 + odds)


def test_variance_of_two_stacked_sites_adds_up():
    """v = σ₂² + φ'(z)² W² σ₁² at the second site, worked out in float64 from the sites' own variances."""
    rng = np.random.default_rng(1)
    w1, w2, w3 = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (4, 5), (5, 2)))
    text = """net (float[n, 3] x) => (float[n, 2] y) {
        z1 = MatMul(x, w1)  h1 = Tanh(z1)  z2 = MatMul(h1, w2)  h2 = Relu(z2)  y = MatMul(h2, w3) }"""
    rows = rng.standard_normal((200, 3)).astype(np.float32)
    conversion = gapa_onnx.convert(
        parse(text, w1=w1, w2=w2, w3=w3),
        {"x": rows},
        sites="all",
        m=40,
        k=8,
        solver="exact",
        metric="euclidean",
    )
    x = 2 * rng.standard_normal((30, 3)).astype(np.float32)
    (y_var,) = run(conversion.model, ["y_var"], x=x)

    z1 = x.astype(float) @ w1
    z2 = np.tanh(z1) @ w2
    own = []
    for fit, z in zip(conversion.numbers.fits, (z1, z2)):
        ids = reference.nearest(z, fit.index.points, fit.k)
        s = reference.unexplained_share(z, fit.index.points, ids, fit.length_scale, fit.jitter)
        own.append(levelled(fit, s)[:, None] * fit.prior_var)
    v2 = own[1] + (z2 > 0) * (own[0] @ w2.astype(float) ** 2)
    expected = v2 @ w3.astype(float) ** 2
    # z reaches the kernel in float32; s moves by its derivative times that: 1e-3 is ample and still tight.
    np.testing.assert_allclose(y_var, expected, rtol=2e-3)


@pytest.mark.parametrize("layout", ["positions", "pooled", "flat"])
def test_queries_of_a_feature_map(layout):
    rng = np.random.default_rng(2)
    kernel = rng.standard_normal((4, 2, 3, 3)).astype(np.float32)
    head = rng.standard_normal((1, 4, 1, 1)).astype(np.float32)
    text = """net (float[n, 2, 5, 5] x) => (float[n, 1, 3, 3] y) {
        z = Conv(x, kernel)  h = Relu(z)  y = Conv(h, head) }"""
    rows = rng.standard_normal((120, 2, 5, 5)).astype(np.float32)
    model = parse(text, kernel=kernel, head=head)
    conversion = gapa_onnx.convert(
        model, {"x": rows}, sites=f"h:{layout}", m=30, k=6, solver="exact", metric="euclidean"
    )
    (fit,) = conversion.numbers.fits
    assert fit.site.layout == layout and fit.ceiling == 1
    x = rng.standard_normal((7, 2, 5, 5)).astype(np.float32)
    (y_var,) = run(conversion.model, ["y_var"], x=x)

    def convolve(x):
        windows = np.lib.stride_tricks.sliding_window_view(x.astype(float), (3, 3), axis=(2, 3))
        return np.einsum("nchwij,ocij->nohw", windows, kernel.astype(float))

    z = convolve(x)
    if layout == "positions":
        queries, shape = np.moveaxis(z, 1, -1).reshape(-1, 4), (7, 1, 3, 3)
    elif layout == "pooled":
        queries, shape = z.mean(axis=(2, 3)), (7, 1, 1, 1)
    else:
        queries, shape = z.reshape(7, -1), (7, 1, 1, 1)
    ids = reference.nearest(queries, fit.index.points, fit.k)
    s = reference.unexplained_share(queries, fit.index.points, ids, fit.length_scale, fit.jitter).reshape(
        shape
    )
    spread = convolve(rows).std(axis=0 if layout == "flat" else (0, 2, 3)) ** 2
    prior = spread if layout == "flat" else spread[:, None, None]
    expected = np.sum(levelled(fit, s) * prior * head.astype(float) ** 2, axis=1, keepdims=True)
    np.testing.assert_allclose(y_var, np.broadcast_to(expected, y_var.shape), rtol=2e-3)


def test_whitened_metric_against_numpy():
    rng = np.random.default_rng(3)
    mixing = np.linalg.qr(rng.standard_normal((6, 6)))[0] * np.array(
        [5, 3, 2, 1.5, 1, 0.7]
    )  # above the floor
    rows = (rng.standard_normal((500, 6)) @ mixing.T + 10).astype(np.float32)
    text = "net (float[n, 6] x) => (float[n, 2] y) { y = MatMul(x, w) }"
    w = rng.standard_normal((6, 2)).astype(np.float32)
    conversion = gapa_onnx.convert(
        parse(text, w=w), {"x": rows}, metric="whitened", m=60, k=10, sites="x", solver="exact"
    )
    (fit,) = conversion.numbers.fits
    x = (rng.standard_normal((20, 6)) @ mixing.T + 10).astype(np.float32)
    (y_var,) = run(conversion.model, ["y_var"], x=x)
    centre, directions = fit.geometry.linear
    centre, directions = centre.astype(float), directions.astype(float)
    covariance = np.cov(((rows - centre) @ directions).T, bias=True)
    assert np.allclose(covariance, np.eye(6), atol=1e-2)  # what whitening is
    q = (x - centre) @ directions
    ids = reference.nearest(q, fit.index.points, fit.k)
    s = reference.unexplained_share(q, fit.index.points, ids, fit.length_scale, fit.jitter)
    expected = (levelled(fit, s)[:, None] * fit.prior_var) @ w.astype(float) ** 2
    np.testing.assert_allclose(y_var, expected, rtol=2e-3)


# -------------------------------------------------------------------- promises


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits") / "digits.gapa.onnx"
    return gapa_onnx.convert(
        MODELS / "digits_cnn.onnx", MODELS / "digits_cnn_calibration.npz", out, m=200, k=20
    )


def test_every_check_passes_and_the_file_is_there(digits):
    assert [check.name for check in digits.checks if not check.passed] == []
    assert len(digits.checks) >= 4
    assert digits.path.exists()


def test_checker_accepts_the_file(digits):
    onnx.checker.check_model(onnx.load(digits.path), full_check=True)


def test_source_nodes_are_untouched(digits):
    source = onnx.load(MODELS / "digits_cnn.onnx")
    written = onnx.load(digits.path)
    names = {node.name for node in source.graph.node}
    assert [node for node in written.graph.node if node.name in names] == list(source.graph.node)
    assert list(written.graph.initializer)[: len(source.graph.initializer)] == list(source.graph.initializer)
    assert list(written.graph.output)[: len(source.graph.output)] == list(source.graph.output)
    assert list(written.graph.input) == list(source.graph.input)


def test_names_read_like_the_source(digits):
    source = {node.name for node in onnx.load(MODELS / "digits_cnn.onnx").graph.node}
    added = [node for node in onnx.load(digits.path).graph.node if node.name not in source]
    assert all(node.name for node in added)
    assert {"relu3_out/gapa/share", "logits_var"} <= {node.output[0] for node in added}


def test_provenance(digits):
    record = read(onnx.load(digits.path))
    assert record.version == gapa_onnx.__version__
    assert record.heads["logits"].outputs["var"] == "logits_var"
    assert record.source.file == "digits_cnn.onnx"
    (site,) = record.sites
    assert (site.points, site.k, site.index) == (200, 20, "prepared")
    assert record.data == DataRecord(len(np.load(MODELS / "digits_cnn_calibration.npz")["image"]), 0)


def test_runs_in_a_plain_session_without_the_library(digits):
    x = np.load(MODELS / "digits_cnn_heldout.npz")["image"][:50]
    plain = ort.InferenceSession(str(digits.path), providers=["CPUExecutionProvider"])
    native = gapa_onnx.session(digits.path)
    portable_var, native_var = (s.run(["logits_var"], {"image": x})[0] for s in (plain, native))
    np.testing.assert_allclose(portable_var, native_var, rtol=1e-4)


CONVERT = """
import sys, gapa_onnx
gapa_onnx.convert(sys.argv[1], sys.argv[2], sys.argv[3], m=150, k=10, seed=int(sys.argv[4]), index=sys.argv[5])
"""


@pytest.mark.parametrize("index", ["flat", pytest.param("ivf", marks=pytest.mark.nightly)])
def test_same_seed_same_bytes_whatever_the_threads(tmp_path, index):
    written = []
    for number, (threads, seed) in enumerate([(1, 0), (2, 0), (2, 1)]):
        out = tmp_path / f"{number}.onnx"
        arguments = [MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz", out, seed, index]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, "-c", CONVERT, *map(str, arguments)], check=True, env=environment)
        written.append(out.read_bytes())
    assert written[0] == written[1]
    assert written[0] != written[2]  # another seed chooses other points


def test_nan_input_gets_nan_variance_and_nothing_else_does(digits):
    x = np.load(MODELS / "digits_cnn_heldout.npz")["image"][:3].copy()
    clean = gapa_onnx.session(digits.path).run(["logits_var"], {"image": x})[0]
    x[1, 0, 0, 0] = np.nan
    (var,) = gapa_onnx.session(digits.path).run(["logits_var"], {"image": x})
    assert np.isnan(var[1]).all()
    np.testing.assert_array_equal(var[[0, 2]], clean[[0, 2]])


def test_variance_does_not_depend_on_the_batch(digits):
    """The kernel is bit-exact given its query (test_native); here the query itself is onnxruntime's work."""
    x = np.load(MODELS / "digits_cnn_heldout.npz")["image"]
    session = gapa_onnx.session(digits.path)
    (whole,) = session.run(["logits_var"], {"image": x})
    one_by_one = np.concatenate([session.run(["logits_var"], {"image": x[i : i + 1]})[0] for i in range(40)])
    np.testing.assert_allclose(one_by_one, whole[:40], rtol=1e-3)


def test_strange_inputs_are_less_certain(digits):
    session = gapa_onnx.session(digits.path)

    def uncertainty(file: str) -> np.ndarray:
        return session.run(["logits_var"], {"image": np.load(MODELS / file)["image"]})[0].mean(axis=1)

    known = uncertainty("digits_cnn_heldout.npz")
    for file in ("digits_cnn_rotated.npz", "digits_cnn_shuffled.npz", "digits_cnn_noise.npz"):
        strange = uncertainty(file)
        auroc = (strange[:, None] > known[None, :]).mean()
        assert auroc > 0.95, file


# ------------------------------------------------------------- old and odd files


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 12, 13, 18, 21])
def test_opsets(opset):
    rng = np.random.default_rng(5)
    w1, w2 = rng.standard_normal((3, 8)), rng.standard_normal((8, 4))
    text = """net (float[n, 3] x) => (float[n, 4] y) {
        z = Gemm(x, w1, b1)  h = Relu(z)  logits = Gemm(h, w2, b2)  y = Softmax<axis = 1>(logits) }"""
    model = parse(text, opset, w1=w1, w2=w2, b1=np.zeros(8), b2=np.ones(4))
    rows = rng.standard_normal((100, 3)).astype(np.float32)
    conversion = gapa_onnx.convert(model, {"x": rows}, m=20, k=5)
    assert all(check.passed for check in conversion.checks)
    onnx.checker.check_model(conversion.model, full_check=True)


@pytest.mark.parametrize("rows", [60, 1500])
def test_an_old_opset_takes_sites_of_unlike_sizes(rows):
    """Before opset 10 a function has its counts written in, and there is one function for all sites. Rows with no
    unit on are all the same to the second place, the site, which has fewer points for it than the first, a witness."""
    rng = np.random.default_rng(0)
    text = "net (float[n, 3] x) => (float[n, 2] y) { z = MatMul(x, a)  h = Relu(z)  u = MatMul(h, b)  g = Tanh(u)  y = MatMul(g, c) }"
    model = parse(text, 9, a=rng.normal(size=(3, 2)), b=rng.normal(size=(2, 2)), c=rng.normal(size=(2, 2)))
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    conversion = gapa_onnx.convert(model, {"x": x}, k=8, m=rows)
    assert [check for check in conversion.checks if not check.passed] == []
    ((witness,), (site,)) = conversion.calibration.witnesses, conversion.calibration.fits
    assert len(site.index.points) < len(witness.index.points) == rows


def test_initializers_that_are_listed_as_inputs_stay_constant():
    """As in files of IR 3. Overridable weights would not be folded, which changes the last bits."""
    model = parse(TANH_NET, opset=9, ir=3, w1=[[1.0]], w2=[[3.0]])
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, 1, list(tensor.dims)))
    conversion = gapa_onnx.convert(model, {"x": np.linspace(-1, 1, 40, dtype=np.float32)[:, None]}, m=10, k=4)
    assert all(check.passed for check in conversion.checks)
    assert [value.name for value in conversion.model.graph.input] == ["x"]


def test_float16_and_double_models():
    rng = np.random.default_rng(6)
    for dtype, var_dtype in ((np.float16, np.float32), (np.float64, np.float64)):
        kind = {np.float16: "float16", np.float64: "double"}[dtype]
        text = f"net ({kind}[n, 3] x) => ({kind}[n, 2] y) {{ z = MatMul(x, w1)  h = Tanh(z)  y = MatMul(h, w2) }}"
        model = parse(text)
        for name, shape in (("w1", (3, 4)), ("w2", (4, 2))):
            array = rng.standard_normal(shape).astype(dtype)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        rows = rng.standard_normal((60, 3)).astype(dtype)
        conversion = gapa_onnx.convert(model, {"x": rows}, m=20, k=5)
        assert all(check.passed for check in conversion.checks)
        (var,) = run(conversion.model, ["y_var"], x=rows[:5])
        assert var.dtype == var_dtype


def test_random_operators_draw_the_same_before_and_after():
    text = """net (float[n, 3] x) => (float[n, 2] y) {
        z = MatMul(x, w1)  h = Tanh(z)  m = MatMul(h, w2)  e = RandomNormalLike(m)  y = Add(m, e) }"""
    rng = np.random.default_rng(7)
    model = parse(text, w1=rng.standard_normal((3, 4)), w2=rng.standard_normal((4, 2)))
    conversion = gapa_onnx.convert(model, {"x": rng.standard_normal((60, 3)).astype(np.float32)}, m=20, k=5)
    assert all(check.passed for check in conversion.checks)


def test_external_data_beyond_the_limit(tmp_path, monkeypatch, digits):
    monkeypatch.setattr(protos, "LARGEST_PROTO", 1000)
    path = tmp_path / "big.onnx"
    writing.save(digits.model, path)
    (data,) = tmp_path.glob("big.onnx.*.data")
    assert {p.name for p in tmp_path.iterdir()} == {"big.onnx", data.name}
    x = np.load(MODELS / "digits_cnn_heldout.npz")["image"][:5]
    for a, b in zip(
        gapa_onnx.session(path).run(None, {"image": x}),
        gapa_onnx.session(digits.path).run(None, {"image": x}),
    ):
        np.testing.assert_array_equal(a, b)


def test_metadata_is_plain_json(digits):
    (entry,) = [e for e in onnx.load(digits.path).metadata_props if e.key == METADATA_KEY]
    assert json.loads(entry.value)["settings"]["k"] == 20


def test_the_way_of_models_beyond_protobufs_limit(tmp_path, monkeypatch):
    """All steps with the limit put below the size of a small model: external data, files in place of bytes."""
    monkeypatch.setattr(protos, "LARGEST_PROTO", 1000)
    monkeypatch.setattr(weights, "LARGE_TENSOR", 100)
    monkeypatch.setattr(weights, "LARGE_MODEL", 1000)
    source = tmp_path / "source.onnx"
    onnx.save_model(
        onnx.load(MODELS / "digits_mlp.onnx"),
        source,
        save_as_external_data=True,
        location="source.data",
        size_threshold=0,
    )
    out = tmp_path / "out.onnx"
    conversion = gapa_onnx.convert(
        source, MODELS / "digits_mlp_calibration.npz", out, m=100, k=10, sites="all"
    )
    assert all(check.passed for check in conversion.checks)
    (data,) = tmp_path.glob("out.onnx.*.data")
    assert {path.name for path in tmp_path.iterdir()} == {"source.onnx", "source.data", "out.onnx", data.name}
    rows = np.load(MODELS / "digits_mlp_heldout.npz")["pixels"][:4]
    assert np.isfinite(gapa_onnx.session(out).run(["logits_var"], {"pixels": rows})[0]).all()


def odd_model(**changes) -> onnx.ModelProto:
    """A square layer used twice, with or without node names, inputs for its weights, and a left-out bias."""
    text = """net (float[n, 4] x) => (float[n, 4] y) {
        a = Gemm(x, w)  h = Relu(a)  b = Gemm(h, w)  g = Tanh(b)  c = Clip(g, , high)  y = Gemm(c, w) }"""
    model = parse(text, w=np.random.default_rng(8).standard_normal((4, 4)), high=np.float32(0.9))
    for number, node in enumerate(model.graph.node):
        node.name = f"node{number}" if changes.get("named") else ""
    if changes.get("overridable"):
        model.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [4, 4]))
    return model


@pytest.mark.parametrize("changes", [{}, {"named": True}, {"overridable": True}])
@pytest.mark.parametrize("sites", ["auto", "all", "h", "x,h,y"])
def test_shared_weights_missing_names_left_out_inputs(changes, sites):
    rows = np.random.default_rng(9).standard_normal((80, 4)).astype(np.float32)
    conversion = gapa_onnx.convert(odd_model(**changes), {"x": rows}, m=20, k=5, sites=sites)
    assert [check for check in conversion.checks if not check.passed] == []
    names = [node.name for node in conversion.model.graph.node if node.name]
    assert len(names) == len(set(names))


def test_overridden_weights_reach_the_variance_too():
    rows = np.random.default_rng(9).standard_normal((80, 4)).astype(np.float32)
    conversion = gapa_onnx.convert(
        odd_model(overridable=True), {"x": rows}, m=20, k=5, sites="h", scale="none"
    )
    x, w = rows[:3], np.zeros((4, 4), np.float32)
    (var,) = run(conversion.model, ["y_var"], x=x, w=w)
    np.testing.assert_array_equal(var, 0)  # nothing passes a layer of zeros


def test_a_sequence_as_output_has_a_sequence_of_variances():
    text = """net (float[n, 4] x) => (seq(float[n, 1]) y) {
        h = Tanh(x)  m = MatMul(h, w)  y = SplitToSequence <axis = 1> (m) }"""
    rng = np.random.default_rng(10)
    w = rng.standard_normal((4, 2))
    rows = rng.standard_normal((50, 4)).astype(np.float32)
    conversion = gapa_onnx.convert(parse(text, w=w), {"x": rows}, m=10, k=4)
    assert [check for check in conversion.checks if not check.passed] == []
    onnx.checker.check_model(conversion.model, full_check=True)
    (parts,) = run(conversion.model, ["y_var"], x=rows[:3])
    whole = gapa_onnx.convert(
        parse(text.replace("seq(float[n, 1]) y", "float[n, 2] m"), w=w), {"x": rows}, m=10, k=4
    )
    np.testing.assert_allclose(
        np.concatenate(parts, axis=1), run(whole.model, ["m_var"], x=rows[:3])[0], rtol=1e-6
    )
