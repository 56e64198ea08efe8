"""The native kernel against float64 numpy: values, invariance, and what it does with bad files.

The index tensors are those of `support.native_models`, so that nothing of the package but the contract is trusted.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.native_models import (
    DEGREE,
    LIBRARY,
    LISTS,
    D,
    K,
    M,
    inducing_points,
    model,
    session,
    squared_distances,
    tensors,
)
from support.paths import ROOT, TESTS

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.op.contract import SCHEMAS

KINDS = tuple(SCHEMAS)


pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")


def run(running: ort.InferenceSession, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    s, neighbours = running.run(["s", "neighbours"], {"query": query})
    return s, neighbours


# ── the reference ─────────────────────────────────────────────────────────────────────────────


def reference(query: np.ndarray, near: np.ndarray, given: dict[str, np.ndarray]) -> np.ndarray:
    """s for one query (d,) given its neighbours (k, d)."""
    width = 2 * float(given["length_scale"]) ** 2
    correlation = np.exp(-squared_distances(query[None], near)[0] / width)
    gram = np.exp(-squared_distances(near, near) / width) + float(given["jitter"]) * np.eye(len(near))
    return np.clip(1 - correlation @ np.linalg.solve(gram, correlation), 0, 1)


def queries(n: int, points: np.ndarray, seed: int = 1) -> np.ndarray:
    """From on top of an inducing point to far outside, (n, d)."""
    rng = np.random.default_rng(seed)
    reach = 10 ** rng.uniform(-4, 1, size=(n, 1))
    return (points[rng.integers(len(points), size=n)] + reach * rng.normal(size=(n, D))).astype(np.float32)


def ranked(distances: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort((rows, distances))]


# ── values ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_s_equals_float64_numpy_given_the_neighbours(kind: str) -> None:
    given = tensors(kind)
    points = inducing_points(given)
    query = queries(10_000, points)
    s, neighbours = run(session(model(kind, given), threads=2), query)
    assert s.shape == (10_000, 1) and neighbours.shape == (10_000, K)
    expected = np.array([reference(q, points[row[row >= 0]], given) for q, row in zip(query, neighbours)])
    clear = expected > 1e-6
    error = np.abs(s[:, 0] - expected)
    assert clear.mean() > 0.9 and (expected > 0.99).any() and (expected < 1e-5).any()
    assert (error[clear] / expected[clear]).max() <= 1e-4
    # Below, what is left is the rounding of 1 − x in double with a condition number of 1e7.
    assert error[~clear].max(initial=0) <= 1e-8


def test_flat_neighbours_are_the_exact_ones() -> None:
    given = tensors("flat")
    given["points"][200:205] = given["points"][100]  # ties go to the lower row
    query = queries(3_000, given["points"], seed=2)
    query[:5] = given["points"][100]
    _, neighbours = run(session(model("flat", given)), query)
    distances = squared_distances(query, given["points"])
    expected = np.array([ranked(row, np.arange(M))[:K] for row in distances])
    np.testing.assert_array_equal(neighbours, expected)
    np.testing.assert_array_equal(neighbours[0, :6], [100, 200, 201, 202, 203, 204])


@pytest.mark.parametrize("kind", ["ivf", "ivfpq"])
def test_list_indexes_search_the_nearest_lists_in_full(kind: str) -> None:
    given = tensors(kind)
    points, offsets = inducing_points(given), given["list_offsets"]
    query = queries(2_000, points, seed=3)
    _, neighbours = run(session(model(kind, given)), query)
    nearest_lists = np.argsort(squared_distances(query, given["centroids"]), axis=1)[:, :3]
    distances = squared_distances(query, points)
    for row, lists, found in zip(distances, nearest_lists, neighbours):
        reachable = np.concatenate([np.arange(offsets[j], offsets[j + 1]) for j in lists])
        expected = ranked(row[reachable], reachable)[:K]
        np.testing.assert_array_equal(found[: len(expected)], expected)
        assert (found[len(expected) :] == -1).all()


def nearest_reachable(given: dict[str, np.ndarray], query: np.ndarray) -> np.ndarray:
    """Rows of the nearest points in the lists that are searched: (n,), -1 where these are empty."""
    offsets, nprobe = given["list_offsets"], int(given["nprobe"][0])
    nearest_lists = np.argsort(squared_distances(query, given["centroids"]), axis=1)[:, :nprobe]
    distances = squared_distances(query, given["points"])
    found = np.full(len(query), -1)
    for i, lists in enumerate(nearest_lists):
        reachable = np.concatenate([np.arange(offsets[j], offsets[j + 1]) for j in lists])
        if len(reachable):
            found[i] = ranked(distances[i][reachable], reachable)[0]
    return found


@pytest.mark.parametrize("nprobe", [1, 3, LISTS])
def test_local_takes_over_the_neighbours_of_the_nearest_point(nprobe: int) -> None:
    given = tensors("local")
    given["nprobe"][:] = nprobe
    query = queries(2_000, given["points"], seed=12)
    _, neighbours = run(session(model("local", given)), query)
    nearest = nearest_reachable(given, query)
    np.testing.assert_array_equal(neighbours, given["neighbourhoods"][nearest, :K])
    if nprobe == LISTS:  # every list: the nearest of all
        one_list = given | {
            "centroids": given["centroids"][:1],
            "list_offsets": np.array([0, M], np.int64),
            "nprobe": np.array([1], np.int64),
        }
        _, again = run(session(model("local", one_list)), query)
        np.testing.assert_array_equal(neighbours, again)
        np.testing.assert_array_equal(nearest, np.argmin(squared_distances(query, given["points"]), axis=1))


def test_local_without_a_point_in_reach_explains_nothing() -> None:
    given = tensors("local")
    given["list_offsets"][1:-1] = [5, 8, 8, 9, 20, 30, 31, 31, 40]  # some lists are empty
    given["nprobe"][:] = 1
    query = queries(500, given["points"], seed=13)
    nearest = nearest_reachable(given, query)
    s, neighbours = run(session(model("local", given)), query)
    assert 0 < (nearest < 0).sum() < 500
    assert (s[nearest < 0] == 1).all() and (neighbours[nearest < 0] == -1).all()
    np.testing.assert_array_equal(
        neighbours[nearest >= 0], given["neighbourhoods"][nearest[nearest >= 0], :K]
    )


def test_local_factors_beyond_the_memory_for_them_are_solved_for() -> None:
    """160 MB hold some 440 factors of 300 neighbours; the points behind them have to give the same answers."""
    rng = np.random.default_rng(14)
    points = rng.normal(size=(620, D)).astype(np.float32)
    near = np.argsort(squared_distances(points, points), axis=1, kind="stable")
    given = {
        "k": np.array([300], np.int64),
        "length_scale": np.array(0.7, np.float32),
        "jitter": np.array(1e-4, np.float32),
        "points": points,
        "neighbourhoods": near.astype(np.int32),
        "centroids": points[:1],
        "list_offsets": np.array([0, 620], np.int64),
        "nprobe": np.array([1], np.int64),
    }
    query = points[::12] + (0.1 * rng.normal(size=(52, D))).astype(np.float32)
    running = session(model("local", given))
    s, neighbours = run(running, query)
    nearest = np.argmin(squared_distances(query, points), axis=1)
    assert (nearest < 400).any() and (nearest > 500).any()
    np.testing.assert_array_equal(neighbours, near[nearest, :300])
    expected = [reference(q, points[row], given) for q, row in zip(query, neighbours)]
    np.testing.assert_allclose(s[:, 0], expected, rtol=1e-6)
    again = [run(running, query[i : i + 1])[0] for i in range(len(query))]
    assert np.concatenate(again).tobytes() == s.tobytes()


def test_local_singular_gram_is_rescued_with_more_jitter() -> None:
    given = tensors("local")
    given["points"][:] = given["points"][0]
    given["jitter"][...] = 1e-38
    s, _ = run(session(model("local", given)), given["points"][:1] + np.float32([[0], [0.5], [100]]))
    assert np.isfinite(s).all() and s[0, 0] < 1e-9 and s[2, 0] == 1
    width = 2 * float(given["length_scale"]) ** 2
    assert s[1, 0] == pytest.approx(1 - np.exp(-2 * D * 0.25 / width), rel=1e-4)


def test_hnsw_finds_nearly_all_of_the_nearest() -> None:
    given = tensors("hnsw")
    query = queries(2_000, given["points"], seed=4)
    _, neighbours = run(session(model("hnsw", given)), query)
    exact = np.argsort(squared_distances(query, given["points"]), axis=1)[:, :K]
    recall = np.mean([len(set(a) & set(b)) / K for a, b in zip(exact, neighbours)])
    assert recall > 0.95
    given["ef"][:] = np.iinfo(np.int64).max  # more candidates than points is no mistake
    _, neighbours = run(session(model("hnsw", given)), query)
    assert np.mean([len(set(a) & set(b)) / K for a, b in zip(exact, neighbours)]) >= recall


def test_two_points_by_hand() -> None:
    """Points ±1 and a query at 0, ℓ = 1: k = e^(−1/2)·(1, 1), G = [[1, e⁻²], [e⁻², 1]]."""
    given = {
        "k": np.array([2], np.int64),
        "length_scale": np.array(1, np.float32),
        "jitter": np.array(1e-9, np.float32),
        "points": np.array([[1], [-1]], np.float32),
    }
    s, neighbours = run(session(model("flat", given, ("n", 1))), np.zeros((1, 1), np.float32))
    assert s[0, 0] == pytest.approx(1 - 2 * np.exp(-1) / (1 + np.exp(-2)), rel=1e-6)
    assert neighbours.tolist() == [[0, 1]]


def test_lists_that_run_out_leave_neighbours_out_and_raise_s() -> None:
    given = tensors("ivf")
    query = queries(200, given["points"], seed=5)
    full, _ = run(session(model("ivf", given)), query)
    given["list_offsets"][1:-1] = [5, 8, 8, 9, 20, 30, 31, 31, 40]  # nearly all lists are short
    given["nprobe"][:] = 1
    s, neighbours = run(session(model("ivf", given)), query)
    short = (neighbours == -1).any(axis=1)
    assert short.any() and (neighbours[short] == -1).sum(axis=1).max() == K  # an empty list: none at all
    assert (s[(neighbours == -1).all(axis=1)] == 1).all()
    for q, row, value in zip(query, neighbours, s[:, 0]):
        near = given["points"][row[row >= 0]]
        assert value == pytest.approx(reference(q, near, given) if len(near) else 1, rel=1e-4, abs=1e-8)
    assert (s >= full - 1e-6).mean() > 0.9  # the points of another order are not nested, but nearly


def test_singular_gram_is_rescued_with_more_jitter() -> None:
    given = tensors("flat")
    given["points"][:] = given["points"][0]
    given["jitter"][...] = 1e-38
    s, _ = run(session(model("flat", given)), given["points"][:1] + np.float32([[0], [0.5], [100]]))
    assert np.isfinite(s).all() and s[0, 0] < 1e-9 and s[2, 0] == 1
    width = 2 * float(given["length_scale"]) ** 2
    assert s[1, 0] == pytest.approx(1 - np.exp(-2 * D * 0.25 / width), rel=1e-4)


# ── invariance ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_batch_position_threads_or_optimisation(kind: str) -> None:
    given = tensors(kind)
    data = model(kind, given)
    query = queries(256, inducing_points(given), seed=6)
    expected_s, expected_neighbours = run(session(data), query)
    levels = (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    for threads in (1, 2):
        for level in levels:
            running = session(data, threads, level)
            for batch in (1, 7, 256):
                parts = [run(running, query[i : i + batch]) for i in range(0, 256, batch)]
                assert np.concatenate([s for s, _ in parts]).tobytes() == expected_s.tobytes()
                np.testing.assert_array_equal(np.concatenate([n for _, n in parts]), expected_neighbours)
            order = np.random.default_rng(7).permutation(256)
            s, _ = run(running, query[order])
            assert s.tobytes() == expected_s[order].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_session(kind: str) -> None:
    given = tensors(kind)
    running = [session(model(kind, given), threads=2) for _ in range(2)]
    query = queries(512, inducing_points(given), seed=8)
    expected = run(running[0], query)[0].tobytes()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: run(running[i % 2], query)[0].tobytes(), range(24)))
    assert results == [expected] * 24


# ── fewer neighbours at run time ──────────────────────────────────────────────────────────────


def session_with(data: bytes, entry: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("ai.gapa.k", entry)
    options.register_custom_ops_library(str(LIBRARY))
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 5, K, K + 1, 10**17])
def test_a_session_can_use_fewer_neighbours(kind: str, k: int) -> None:
    """The same as a file with that k, bit for bit; more than the file has are not to be had."""
    given = tensors(kind)
    query = queries(200, inducing_points(given), seed=15)
    s, neighbours = run(session_with(model(kind, given), str(k)), query)
    fewer = given | {"k": np.array([min(k, K)], np.int64)}
    expected_s, expected_neighbours = run(session(model(kind, fewer)), query)
    assert s.tobytes() == expected_s.tobytes()
    np.testing.assert_array_equal(neighbours, expected_neighbours)
    full_s, full_neighbours = run(session(model(kind, given)), query)  # another session is left alone
    assert full_neighbours.shape[-1] == K
    if kind in ("flat", "ivf", "ivfpq", "local"):  # the walk of hnsw depends on k
        np.testing.assert_array_equal(neighbours, full_neighbours[:, :k])
        assert (s >= full_s - 1e-6).all()


@pytest.mark.parametrize("entry", ["0", "-3", "", "many", "5.0", " 5", "9" * 40])
def test_a_number_of_neighbours_that_is_none_is_refused(entry: str) -> None:
    with pytest.raises(
        Exception, match=r"'ai.gapa.k' must be a whole number of neighbours, at least 1, but is"
    ):
        session_with(model("flat", tensors("flat")), entry)


@pytest.mark.parametrize("kind", KINDS)
def test_k_of_the_python_session(kind: str) -> None:
    given = tensors(kind)
    query = queries(50, inducing_points(given), seed=16)
    s, _ = run(gapa_onnx.session(model(kind, given), k=4), query)
    expected, _ = run(session(model(kind, given | {"k": np.array([4], np.int64)})), query)
    assert s.tobytes() == expected.tobytes()
    for bad in (0, -1, 2.5, True, "3"):
        with pytest.raises(UserError, match="k must be a whole number of neighbours"):
            gapa_onnx.session(model(kind, given), k=bad)


# ── shapes and special queries ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(D,), (0, D), (3, 0, D), (5, D), (2, 3, D), (2, 1, 3, D)])
def test_any_rank_and_an_empty_batch(kind: str, shape: tuple[int, ...]) -> None:
    given = tensors(kind)
    count = int(np.prod(shape[:-1]))
    query = queries(max(count, 1), inducing_points(given), seed=9)[:count]
    expected, _ = run(session(model(kind, given)), query)
    for declared in (shape, [f"axis{i}" for i in range(len(shape) - 1)] + [D], [None] * len(shape)):
        s, neighbours = run(session(model(kind, given, declared)), query.reshape(shape))
        assert s.shape == (*shape[:-1], 1) and neighbours.shape == (*shape[:-1], K)
        assert s.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_query_with_a_nan_or_an_infinity_gets_nan(kind: str, bad: float) -> None:
    given = tensors(kind)
    running = session(model(kind, given))
    query = queries(9, inducing_points(given), seed=10)
    expected_s, expected_neighbours = run(running, query)
    query[4, D - 1] = bad
    s, neighbours = run(running, query)
    others = np.arange(9) != 4
    assert np.isnan(s[4, 0]) and (neighbours[4] == -1).all()
    assert s[others].tobytes() == expected_s[others].tobytes()
    np.testing.assert_array_equal(neighbours[others], expected_neighbours[others])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e10, 1e25, 3e38])
def test_a_query_beyond_all_points_is_wholly_unexplained(kind: str, size: float) -> None:
    s, _ = run(session(model(kind, tensors(kind))), np.float32([[size] * D, [-size] * D]))
    assert s.tolist() == [[1], [1]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_output_is_optional(kind: str) -> None:
    given = tensors(kind)
    query = queries(20, inducing_points(given), seed=11)
    expected, _ = run(session(model(kind, given)), query)
    (s,) = session(model(kind, given, neighbours=False)).run(None, {"query": query})
    assert s.tobytes() == expected.tobytes()


def test_a_query_of_unknown_shape_does_not_break_the_nodes_behind() -> None:
    """Features from a Reshape have an unnamed batch axis; a MatMul behind the operator must load."""
    given = tensors("flat")
    proto = onnx.load_from_string(model("flat", given, ("a", "b")))
    reshape = helper.make_node("Reshape", ["query", "shape"], ["features"])
    proto.graph.node[0].input[0] = "features"
    matmul = helper.make_node("MatMul", ["s", "weight"], ["scaled"])
    nodes = [reshape, proto.graph.node[0], matmul]
    proto.graph.ClearField("node")
    proto.graph.node.extend(nodes)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([-1, D], np.int64), "shape"))
    proto.graph.initializer.append(numpy_helper.from_array(np.full((1, 2), 2, np.float32), "weight"))
    proto.graph.output.append(helper.make_tensor_value_info("scaled", TensorProto.FLOAT, None))
    running = session(proto.SerializeToString())
    s, scaled = running.run(["s", "scaled"], {"query": queries(4, given["points"]).reshape(2, 2 * D)})
    np.testing.assert_array_equal(scaled, 2 * s * np.ones((1, 2), np.float32))


# ── bad files ─────────────────────────────────────────────────────────────────────────────────


def put(name: str, position, value):
    """A mutation that writes one element."""

    def mutate(given: dict[str, np.ndarray]) -> None:
        given[name] = given[name].copy()
        given[name][position] = value

    return name, mutate


def reshape(name: str, change):
    """A mutation that replaces the whole tensor."""

    def mutate(given: dict[str, np.ndarray]) -> None:
        given[name] = np.ascontiguousarray(change(given[name]))

    return name, mutate


_COMMON = [
    put("k", 0, 0), put("k", 0, -1), put("k", 0, M + 1), put("k", 0, 2**62),
    reshape("k", lambda a: np.array([3, 4])), reshape("k", lambda a: np.zeros(0, np.int64)),
    put("length_scale", (), 0), put("length_scale", (), -1), put("length_scale", (), np.nan),
    put("length_scale", (), np.inf), reshape("length_scale", lambda a: np.ones((1, 1), np.float32)),
    put("jitter", (), 0), put("jitter", (), -1e-6), put("jitter", (), np.inf), put("jitter", (), np.nan),
]  # fmt: skip
_POINTS = [
    put("points", (7, 1), np.nan), put("points", (M - 1, D - 1), np.inf),
    reshape("points", lambda a: a[:0]), reshape("points", lambda a: a[:, :0]), reshape("points", np.ravel),
]  # fmt: skip
_LISTS = [
    put("centroids", (0, 0), np.nan), reshape("centroids", lambda a: a[:, :-1]), reshape("centroids", lambda a: a[:0]),
    ("list_offsets", reshape("centroids", lambda a: a[:-1])[1]),
    put("list_offsets", 0, 1), put("list_offsets", 0, -1), put("list_offsets", -1, M + 1),
    put("list_offsets", 3, M + 5), put("list_offsets", 3, -(2**62)), put("list_offsets", 5, 0),
    reshape("list_offsets", lambda a: a[:-1]), reshape("list_offsets", lambda a: a[None]),
    put("nprobe", 0, 0), put("nprobe", 0, LISTS + 1), put("nprobe", 0, -1),
]  # fmt: skip
CORRUPTIONS = {
    "flat": _COMMON + _POINTS,
    "ivf": _COMMON + _POINTS + _LISTS + [("list_offsets", reshape("points", lambda a: a[:-1])[1])],
    "ivfpq": _COMMON + _LISTS + [
        ("list_offsets", reshape("codes", lambda a: a[:-1])[1]), ("codebooks", reshape("codes", lambda a: a[:, :-1])[1]),
        reshape("codes", np.ravel), reshape("codes", lambda a: a[:0]), reshape("codes", lambda a: a[:, :0]),
        put("codebooks", (1, 200, 0), np.nan), reshape("codebooks", lambda a: a[:, :255]),
        reshape("codebooks", lambda a: a[:-1]), ("centroids", reshape("codebooks", lambda a: a[:, :, :-1])[1]),
        ("codebooks", lambda given: given.update({n: given[n] * np.float32(1e38) for n in ["codebooks", "centroids"]})),
    ],
    "local": _COMMON + _POINTS + _LISTS + [
        put("k", 0, K + 4), put("neighbourhoods", (3, 2), M), put("neighbourhoods", (M - 1, K), -1),
        put("neighbourhoods", (0, 0), -(2**31)), put("neighbourhoods", (5, 1), 2**31 - 1),
        reshape("neighbourhoods", lambda a: a[:-1]), reshape("neighbourhoods", np.ravel),
        reshape("neighbourhoods", lambda a: a[:, :0]), ("neighbourhoods", reshape("points", lambda a: a[:-1])[1]),
        ("k", reshape("neighbourhoods", lambda a: a[:, : K - 1])[1]),
    ],
    "hnsw": _COMMON + _POINTS + [
        put("levels", 0, 0), put("levels", 3, -5), put("levels", 3, 2**31 - 1), ("links", put("levels", 3, 3)[1]),
        reshape("levels", lambda a: a[:-1]), reshape("levels", lambda a: a[None]),
        put("links", 0, M), put("links", 1, -2), put("links", 5, 2**31 - 1),
        reshape("links", lambda a: a[:-1]), reshape("links", lambda a: a[:0]), reshape("links", lambda a: a[None]),
        put("degree", 0, 0), put("degree", 0, -8), put("degree", 0, 2**40), ("links", put("degree", 0, DEGREE + 1)[1]),
        put("entry_point", 0, -1), put("entry_point", 0, M),
        put("ef", 0, 0), put("ef", 0, -(2**63)),
        ("links", lambda given: given.update(_upper_link_to_a_ground_point(given))),
        ("entry_point", lambda given: given.update(entry_point=np.array([np.argmin(given["levels"])]))),
    ],
}  # fmt: skip


def _upper_link_to_a_ground_point(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A link on level 1 to a point that is on level 0 only: FAISS would read another point's slots."""
    entry, levels = int(given["entry_point"][0]), given["levels"]
    links = given["links"].copy()
    links[(levels[:entry] + 1).sum() * DEGREE + 2 * DEGREE] = np.argmin(levels)
    return {"links": links}


@pytest.mark.parametrize(
    "kind, name, mutate",
    [
        pytest.param(kind, name, mutate, id=f"{kind}-{name}-{i}")
        for kind, cases in CORRUPTIONS.items()
        for i, (name, mutate) in enumerate(cases)
    ],
)
def test_a_corrupt_tensor_is_refused_with_a_sentence(kind: str, name: str, mutate) -> None:
    given = tensors(kind)
    mutate(given)
    with pytest.raises(Exception) as caught:
        session(model(kind, given))
    message = str(caught.value)
    assert f"{SCHEMAS[kind].name}: input '{name}' " in message and message.rstrip().endswith(".")


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_not_constant_is_refused(kind: str) -> None:
    for port in SCHEMAS[kind].constants:
        if port.name == "points":  # nodes may decode them, see test_points_that_nodes_compute
            continue
        with pytest.raises(Exception, match=f"{SCHEMAS[kind].name}: input '{port.name}' must be a constant"):
            session(model(kind, tensors(kind), as_graph_input=port.name))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ivfpq"])
def test_points_that_nodes_compute(kind: str) -> None:
    """What a graph decodes while nothing folds it comes with every run, and may differ between runs."""
    given = tensors(kind)
    queries = np.random.default_rng(3).normal(size=(7, D)).astype(np.float32)
    constant = run(session(model(kind, given)), queries)
    running = session(model(kind, given, as_graph_input="points"))
    for answer, expected in zip(run(running, queries), constant):
        np.testing.assert_array_equal(answer, expected)
    broken = given["points"].copy()
    broken[0, 0] = np.nan
    with pytest.raises(Exception, match="input 'points' holds a NaN"):
        running.run(None, {"query": queries, "points": broken})
    for answer, expected in zip(run(running, queries), constant):  # the session survives
        np.testing.assert_array_equal(answer, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_of_another_width_is_refused(kind: str) -> None:
    running = session(model(kind, tensors(kind), ("n", "d")))
    with pytest.raises(Exception, match=f"'query' must have a last axis of {D} .* but has {D + 1}"):
        run(running, np.zeros((2, D + 1), np.float32))
    s, _ = run(running, np.zeros((2, D), np.float32))  # the session survives
    assert np.isfinite(s).all()


def fuzz(seed: int, rounds: int) -> dict[str, int]:
    """Random damage to one tensor at a time; each file is refused with a sentence, or runs."""
    rng = np.random.default_rng(seed)
    extremes = [0, -1, 1, M - 1, M, M + 1, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63)]
    seen = {"refused": 0, "ran": 0}
    for _ in range(rounds):
        kind = KINDS[rng.integers(len(KINDS))]
        given = tensors(kind)
        name = str(rng.choice([n for n in given if n != "k"] * 3 + ["k"]))
        damaged = given[name].copy()
        flat = damaged.reshape(-1)
        how = rng.integers(4)
        if how == 0:
            raw = flat.view(np.uint8)
            for position in rng.integers(raw.size, size=rng.integers(1, 4)):
                raw[position] ^= 1 << rng.integers(8)
        elif how == 1:
            value = np.array(extremes[rng.integers(len(extremes))])
            flat[rng.integers(flat.size)] = (
                value.astype(flat.dtype)
                if flat.dtype.kind != "i"
                else np.clip(value, np.iinfo(flat.dtype).min, np.iinfo(flat.dtype).max)
            )
        elif how == 2:
            rng.shuffle(flat)
        else:
            damaged = flat[: rng.integers(flat.size + 1)]
        given[name] = damaged
        try:
            running = session(model(kind, given), threads=2)
        except Exception as error:  # noqa: BLE001 - ORT raises several types
            assert f"{SCHEMAS[kind].name}: input '" in str(error), str(error)
            seen["refused"] += 1
            continue
        s, _ = run(running, queries(40, np.zeros((1, D), np.float32), seed=int(rng.integers(1000))))
        assert ((s >= 0) & (s <= 1)).all()
        seen["ran"] += 1
    return seen


def test_random_damage_never_crashes_the_process() -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS), *filter(None, sys.path)])
    }
    environment["GAPA_ONNX_LIBRARY"] = str(LIBRARY)
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, ran = map(int, done.stdout.split())
    assert refused + ran == 400 and refused > 50 and ran > 50


# ── the library as a file ─────────────────────────────────────────────────────────────────────


def test_the_library_needs_nothing_beside_libc() -> None:
    listed = subprocess.run(["ldd", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[0].split("/")[-1].split(".so")[0] for line in listed.splitlines()}
    parts_of_an_older_libc = {"libdl", "libpthread", "librt"}  # files of their own until glibc 2.34
    others = needed - parts_of_an_older_libc
    assert others <= {"linux-vdso", "libc", "libm", "ld-linux-x86-64", "ld-linux-aarch64"}, listed


def test_the_library_shows_only_its_entry_point() -> None:
    listed = subprocess.run(["nm", "-D", "--defined-only", str(LIBRARY)], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("nm is not available")
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["RegisterCustomOps"]


if __name__ == "__main__":
    outcome = fuzz(seed=0, rounds=400)
    print(outcome["refused"], outcome["ran"])
