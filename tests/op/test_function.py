"""The standard-ops bodies in a stock onnxruntime, against the numpy reference."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnx.inliner
import pytest
from support.operator_models import LEVELS, NEWEST, model_of, oldest_opset, session, tensors

from gapa_onnx.op import function, reference
from gapa_onnx.op.contract import DOMAIN, PREPARED, SCHEMAS

KINDS = list(SCHEMAS)
TOLERANCE = 1e-4  #: relative, where s > 1e-6


def points_of(kind, t):
    if kind != "ivfpq":
        return t["points"]
    return reference.decode(t["codes"], t["codebooks"], t["centroids"], t["list_offsets"])


def assert_same(kind, t, queries, s, ids):
    """s equals the reference on the same neighbours; the neighbours are the reference's but for ties."""
    points = points_of(kind, t)
    flat = queries.reshape(-1, queries.shape[-1])
    ids = ids.reshape(len(flat), ids.shape[-1])
    expected = reference.unexplained_share(flat, points, ids, t["length_scale"], t["jitter"])
    s = s.reshape(-1)
    np.testing.assert_array_equal(np.isnan(s), np.isnan(expected))
    if kind == PREPARED:
        known = ~np.isnan(expected)
        assert (np.abs(s - expected)[known] <= 1e-3 * expected[known] + 1e-5).all()
        return
    clear = expected > 1e-6
    np.testing.assert_allclose(s[clear], expected[clear], rtol=TOLERANCE)
    np.testing.assert_allclose(s[expected <= 1e-6], expected[expected <= 1e-6], atol=1e-6 * TOLERANCE)


def assert_neighbours(kind, t, queries, ids):
    """As near as the reference's, to what float32 products can tell apart."""
    _, exact = reference.evaluate(kind, t, queries)
    points = points_of(kind, t).astype(np.float64)
    np.testing.assert_array_equal(ids < 0, exact < 0)
    queries = queries.astype(np.float64)
    centre, d = points.mean(axis=0), points.shape[1]

    def distance(rows):
        return np.sum((points[rows] - queries[:, None]) ** 2, axis=2)

    # A score is a sum of d products of centred numbers, so its error is at most (d + 2)·2⁻²⁴·Σ|q||p|. Twice
    # that between two points, and twice again as a squared distance is two scores.
    size = np.linalg.norm(points - centre, axis=1).max() + np.linalg.norm(queries - centre, axis=1)
    bound = 4 * (d + 2) * 2.0**-24 * size**2
    off = np.where(ids < 0, 0, np.abs(distance(ids) - distance(exact)))
    assert (off <= bound[:, None]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "d, k, length_scale, jitter", [(6, 8, 1.5, 1e-6), (24, 30, 5.0, 1e-6), (3, 20, 0.5, 1e-8)]
)
def test_agrees_with_the_reference_on_many_queries(kind, d, k, length_scale, jitter):
    """3 × 4000 queries per kind, from inside the data to far outside."""
    t = tensors(d, m=500, d=d, k=k, length_scale=length_scale, jitter=jitter)
    rng = np.random.default_rng(100 + d)
    queries = (rng.normal(size=(4000, d)) * rng.choice([0.3, 1, 3, 100], (4000, 1))).astype(np.float32)
    queries[:100] = points_of(kind, t)[:100]
    s, ids = session(model_of(kind, t)).run(None, {"z": queries})
    assert_same(kind, t, queries, s, ids)
    if kind in ("flat", "hnsw"):
        assert_neighbours(kind, t, queries[:1000], ids[:1000])
    else:  # random centroids are nearly tied now and then, so compare where the choice of lists is clear
        distance = np.sort(reference.squared_distances(queries[:1000], t["centroids"]), axis=1)
        clear = np.flatnonzero(distance[:, 3] - distance[:, 2] > 1e-4 * distance[:, 3])
        assert len(clear) > 900
        assert_neighbours(kind, t, queries[clear], ids[clear])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opset", range(function.OLDEST_OPSET, NEWEST + 1))
def test_every_opset(kind, opset):
    if opset < oldest_opset(kind):
        with pytest.raises(ValueError, match=f"for opset {opset}"):
            function.body(kind, opset, 8)
        return
    t = tensors(1)
    queries = np.random.default_rng(2).normal(size=(20, 6)).astype(np.float32)
    queries[3, 1], queries[4, 5], queries[5] = np.nan, np.inf, 3e38
    queries[6] = points_of(kind, t)[7]
    model = model_of(kind, t, opset)
    onnx.checker.check_model(model, full_check=True)
    s, ids = session(model).run(None, {"z": queries})
    assert_same(kind, t, queries, s, ids)
    assert (ids[3:5] == -1).all() and s[5] == 1
    finite = [0, 1, 2, *range(6, 20)]
    np.testing.assert_array_equal(ids[finite], reference.evaluate(kind, t, queries)[1][finite])
    empty = session(model).run(None, {"z": queries[:0]})
    assert empty[0].shape == (0, 1) and empty[1].shape == (0, 8)


@pytest.mark.parametrize("opset", range(NEWEST + 1, onnx.defs.onnx_opset_version() + 1))
def test_opsets_newer_than_onnxruntime_are_still_valid(opset):
    for kind in KINDS:
        onnx.checker.check_model(model_of(kind, tensors(1), opset), full_check=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opset", [9, 17])
def test_levels_and_inlining_do_not_change_the_answer(kind, opset):
    opset = max(opset, oldest_opset(kind))
    t = tensors(3)
    queries = np.random.default_rng(4).normal(size=(50, 6)).astype(np.float32)
    model = model_of(kind, t, opset)
    inlined = onnx.inliner.inline_local_functions(model)
    assert not inlined.functions and all(node.domain != DOMAIN for node in inlined.graph.node)
    runs = [session(m, level).run(None, {"z": queries}) for m in (model, inlined) for level in LEVELS]
    for s, ids in runs:
        assert_same(kind, t, queries, s, ids)
        np.testing.assert_array_equal(ids, runs[0][1])
        np.testing.assert_allclose(s, runs[0][0], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_size_and_position_change_only_rounding(kind):
    t = tensors(5)
    queries = np.random.default_rng(6).normal(size=(64, 6)).astype(np.float32)
    run = session(model_of(kind, t)).run
    whole, ids = run(None, {"z": queries})
    for size in (1, 7):
        parts = [run(None, {"z": queries[i : i + size]}) for i in range(0, 64, size)]
        np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), ids)
        np.testing.assert_allclose(np.concatenate([p[0] for p in parts]), whole, rtol=1e-6)
    reversed_s, _ = run(None, {"z": queries[::-1].copy()})
    np.testing.assert_allclose(reversed_s[::-1], whole, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_answered_in_chunks_of_any_size(kind, monkeypatch):
    """Whole chunks, a last one that is padded, one row each: the same bits as all at once."""
    t = tensors(18)
    queries = np.random.default_rng(19).normal(size=(45, 6)).astype(np.float32)
    queries[[7, 44], 2] = np.nan, np.inf
    whole = session(model_of(kind, t)).run(None, {"z": queries})
    per_row = 9 * (6 * 32 + 9 * 24) + 300 * 12  # of `_rows_per_chunk`, for k = 8, d = 6, M = 300
    for rows in (1, 2, 7, 15, 44, 45):
        monkeypatch.setattr(function, "CHUNK_BYTES", (rows - 1) * per_row)
        run = session(model_of(kind, t)).run
        for n in (45, 44, 2, 1, 0):
            s, ids = run(None, {"z": queries[:n]})
            np.testing.assert_array_equal(ids, whole[1][:n])
            np.testing.assert_allclose(s, whole[0][:n], rtol=1e-6)  # a product of one row is summed otherwise


@pytest.mark.parametrize("kind", ["flat", "ivf", "local"])
def test_memory_does_not_grow_with_the_batch(kind, tmp_path):
    """200 MB at most beyond what the session takes, where all at once would take 1.3 GB and more."""
    m, rng = 20_000, np.random.default_rng(20)
    t = tensors(20, d=60, k=30, lists=100) | {
        "points": rng.normal(size=(m, 60)).astype(np.float32),
        "neighbourhoods": rng.integers(0, m, (m, 30)).astype(np.int32),
        "list_offsets": np.linspace(0, m, 101).astype(np.int64),
    }
    onnx.save(model_of(kind, t), tmp_path / "m.onnx")
    code = (
        "import resource, sys, numpy as np, onnxruntime as ort\n"
        "run = ort.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider']).run\n"
        "z = np.random.default_rng(0).normal(size=(6000, 60)).astype(np.float32)\n"
        "run(None, {'z': z[:1]})\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "run(None, {'z': z})\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    assert int(done.stdout) * unit < 200 << 20


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 14, NEWEST])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 1, 3), (0,), (0, 3), (2, 0), (2, 0, 3)])
def test_ranks(opset, leading):
    t = tensors(7)
    for kind in ("flat", "ivf"):
        queries = np.random.default_rng(8).normal(size=(*leading, 6)).astype(np.float32)
        model = model_of(kind, t, opset, rank=len(leading) + 1)
        onnx.checker.check_model(model, full_check=True)
        s, ids = session(model).run(None, {"z": queries})
        assert s.shape == (*leading, 1) and ids.shape == (*leading, 8)
        assert_same(kind, t, queries, s, ids)


def test_data_far_from_the_origin():
    """Float32 has 24 bits: 4096 away from the origin the search must still tell neighbours apart."""
    t = tensors(9, centre=4096.0)
    queries = (4096 + np.random.default_rng(10).normal(size=(500, 6))).astype(np.float32)
    s, ids = session(model_of("flat", t)).run(None, {"z": queries})
    assert_same("flat", t, queries, s, ids)
    assert_neighbours("flat", t, queries, ids)


def test_far_queries_are_certain_to_be_unknown():
    """s is 1, not NaN, wherever float32 can go, and rises on the way there."""
    t = tensors(11)
    queries = (10.0 ** np.arange(-1, 39, dtype=np.float64)[:, None] * np.ones(6)).astype(np.float32)
    for sign in (1, -1):
        s, ids = session(model_of("flat", t)).run(None, {"z": sign * queries})
        assert (s[2:] == 1).all() and (np.diff(s[:, 0]) >= 0).all()
        assert ((ids >= 0) & (ids < 300)).all()


def test_local_without_a_reachable_point():
    """One probe, into an empty list: nothing is known."""
    t = tensors(12, m=30, lists=2, nprobe=1) | {"list_offsets": np.array([0, 0, 30])}
    t["centroids"] = np.array([[5.0] * 6, [-5.0] * 6], np.float32)
    queries = np.array([[4.0] * 6, [-4.0] * 6], np.float32)
    for opset in (9, 17):
        s, ids = session(model_of("local", t, opset)).run(None, {"z": queries})
        assert s[0] == 1 and (ids[0] == -1).all() and (ids[1] >= 0).all()
        np.testing.assert_array_equal(ids, reference.evaluate("local", t, queries)[1])


@pytest.mark.parametrize("kind", ["ivf", "ivfpq"])
def test_lists_that_run_out(kind):
    """Lists of three points and one probe: most of the eight neighbours are missing, and s says so."""
    t = tensors(12, m=30, lists=10, nprobe=1) | {"list_offsets": np.arange(0, 31, 3)}
    queries = np.random.default_rng(13).normal(size=(200, 6)).astype(np.float32)
    for opset in (9, 17):
        s, ids = session(model_of(kind, t, opset)).run(None, {"z": queries})
        assert ((ids >= 0).sum(axis=1) == 3).all() and (ids[:, 3:] == -1).all()
        assert_same(kind, t, queries, s, ids)
        np.testing.assert_array_equal(ids, reference.evaluate(kind, t, queries)[1])


@pytest.mark.parametrize("k, m", [(1, 1), (1, 40), (40, 40)])
def test_extreme_k(k, m):
    t = tensors(14, m=m, k=k, lists=4, nprobe=4)
    queries = np.random.default_rng(15).normal(size=(30, 6)).astype(np.float32)
    for kind in ("flat", "ivf"):
        for opset in (9, 17):
            s, ids = session(model_of(kind, t, opset)).run(None, {"z": queries})
            assert_same(kind, t, queries, s, ids)
            np.testing.assert_array_equal(np.sort(ids), np.sort(reference.evaluate(kind, t, queries)[1]))


def test_one_function_serves_sites_of_any_k_from_opset_10_on():
    assert function.body("flat", 10, 3).node == function.body("flat", 10, 5).node
    assert function.body("ivfpq", 17, 3).node == function.body("ivfpq", 17, 5, tensors(0)).node
    assert function.body("flat", 9, 3).node != function.body("flat", 9, 5).node
    with pytest.raises(ValueError, match="needs the tensors"):
        function.body("ivf", 9, 3)
    with pytest.raises(ValueError, match="no body for opset 6"):
        function.body("flat", 6, 3)
    model = model_of("ivf", tensors(16), sites=2)
    onnx.checker.check_model(model, full_check=True)
    first, _, second, _ = session(model).run(None, {"z": np.ones((4, 6), np.float32)})
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_contract_and_is_documented(kind):
    schema, body = SCHEMAS[kind], function.body(kind, 17, 4)
    assert (body.domain, body.name) == (DOMAIN, schema.name)
    assert list(body.input) == [port.name for port in schema.inputs]
    assert list(body.output) == [port.name for port in schema.outputs]
    assert "unexplained" in body.doc_string
    assert body.SerializeToString() == function.body(kind, 17, 4).SerializeToString()


def test_onnxruntime_has_nothing_to_warn_about(tmp_path):
    """Load and run in a process of its own, where its stderr can be read."""
    paths = []
    for kind in KINDS:
        for opset in (oldest_opset(kind), 17, NEWEST):
            paths.append(str(tmp_path / f"{kind}{opset}.onnx"))
            onnx.save(model_of(kind, tensors(17), opset), paths[-1])
    code = (
        "import sys, numpy as np, onnxruntime as ort\n"
        "for path in sys.argv[1:]:\n"
        "    run = ort.InferenceSession(path, providers=['CPUExecutionProvider']).run\n"
        "    for n in (0, 1, 5): run(None, {'z': np.ones((n, 6), np.float32)})\n"
        "    run(None, {'z': np.full((2, 6), np.nan, np.float32)})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "" and done.stdout == ""


def test_before_opset_10_one_function_serves_sites_of_any_size_whose_points_are_in_one_list():
    few, many = (one_list(tensors(1, m=m)) for m in (40, 90))
    assert function.body("local", 9, 8, few).node == function.body("local", 9, 8, many).node
    assert function.body("local", 9, 8, few).node != function.body("local", 9, 8, tensors(1, m=40)).node
    for opset in (7, 9):
        for t in (few, many):
            queries = np.random.default_rng(2).normal(size=(20, 6)).astype(np.float32)
            queries[3, 1] = np.nan
            s, ids = session(model_of("local", t, opset)).run(None, {"z": queries})
            assert_same("local", t, queries, s, ids)
            assert (ids[3] == -1).all()


def one_list(t):
    """The same points, all of them in one list."""
    m = len(t["points"])
    whole = {"centroids": t["points"].mean(axis=0, keepdims=True), "list_offsets": np.array([0, m])}
    return {**t, **whole, "nprobe": np.array([1])}
