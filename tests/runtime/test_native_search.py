"""The native scan and solve at every instruction set: exact neighbours, the same bits however queries are grouped.

`GAPA_ONNX_ISA` is read once per process, so each level runs in a process of its own: this file, run as a
program, makes the answers; the tests compare them with float64 numpy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.native_models import LIBRARY, inducing_points, model, session, tensors
from support.paths import ROOT, TESTS

from gapa_onnx.op import reference

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")
LEVELS = ("generic", "avx2", "avx512")  # a CPU without one falls back to the level below
BY_DAY = [pytest.param(level, marks=pytest.mark.nightly if level == "avx2" else ()) for level in LEVELS]
LIST_KINDS = ("ivf", "ivfpq", "local")


# ── cases ─────────────────────────────────────────────────────────────────────────────────────


def cases() -> dict[str, tuple[np.ndarray, np.ndarray, int]]:
    """Name -> points (M, d), queries (n, d), k: what could break the error bound or the selection."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> np.ndarray:
        return (shift + scale * rng.normal(size=shape)).astype(np.float32)

    clusters = normal(20, 24, scale=100)[rng.integers(20, size=3000)] + normal(3000, 24, scale=1e-3)
    grid = np.stack(np.meshgrid(*[np.arange(7)] * 4), -1).reshape(-1, 4).astype(np.float32)  # exact ties
    outlier = normal(2000, 16)
    outlier[777] = 1e6
    large = np.concatenate([normal(500, 8), normal(4, 8, scale=1e30)])
    same = np.tile(normal(1, 10), (1500, 1))
    # Points near a few directions, which a search by lower bounds is for; queries among them, beside them,
    # and where the bounds tell nothing.
    sheet = normal(5, 120) * np.float32(3)
    flat = normal(4000, 5) @ sheet + normal(4000, 120, scale=0.05)
    off_sheet = np.concatenate([flat[:30] + normal(30, 120, scale=s) for s in (0.02, 1, 30, 1e20)])
    flat[50:60] = flat[40]
    return {
        "plain": (normal(3000, 33), normal(70, 33), 50),
        "wide": (normal(900, 777), normal(20, 777), 20),  # not a multiple of any vector
        "narrow": (normal(5000, 1), normal(60, 1), 7),
        "one point": (normal(1, 5), normal(9, 5), 1),
        "every point": (normal(61, 5), normal(19, 5), 61),
        "far from the origin": (normal(2000, 16, shift=1e4), normal(40, 16, shift=1e4), 30),
        "queries far away": (normal(2000, 16), normal(40, 16, scale=1e6), 30),
        "tight clusters": (clusters, clusters[:50] + normal(50, 24, scale=1e-3), 30),
        "ties": (grid, grid[::60] + np.float32(0.5), 33),
        "an outlier": (outlier, normal(40, 16), 25),
        "an outlier asked for": (outlier, outlier[770:784] + np.float32(0.25), 25),
        "scores that would overflow": (large, np.concatenate([large[-4:], normal(6, 8)]), 12),
        "queries that would overflow": (normal(300, 8), normal(6, 8, scale=1e25), 12),
        "numbers that underflow": (normal(400, 8, scale=1e-30), normal(10, 8, scale=1e-30), 9),
        "few directions": (flat, off_sheet, 50),
        "few directions, the nearest": (flat, off_sheet, 1),
        "few directions, all rows": (flat[:600], off_sheet[::3], 600),
        "equal points": (same, same[:3] + np.float32(0.125), 40),
        "split over threads": (normal(6000, 200), normal(3, 200), 50),
    }


def share_case() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A layer of 200 neurons, queries from on top of a point to outside."""
    rng = np.random.default_rng(5)
    points = np.tanh(rng.normal(size=(2000, 20)) @ rng.normal(size=(20, 200)) / 4).astype(np.float32)
    reach = 10 ** rng.uniform(-3, 0, size=(150, 1))
    queries = (points[:150] + reach * rng.normal(size=(150, 200))).astype(np.float32)
    given = {
        "k": np.array([50], np.int64),
        "length_scale": np.array(8, np.float32),
        "jitter": np.array(1e-6, np.float32),
        "points": points,
    }
    return given, queries


def local_case() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The same layer, far from the origin, with neighbourhoods; each query's nearest point is exact."""
    given, queries = share_case()
    points = given["points"][:1000] + np.float32(100)
    near = np.argsort(reference.squared_distances(points, points), axis=1, kind="stable")[:, :50]
    lists = {
        "neighbourhoods": near.astype(np.int32),
        "centroids": points.mean(axis=0, keepdims=True),
        "list_offsets": np.array([0, len(points)], np.int64),
        "nprobe": np.array([1], np.int64),
    }
    return given | {"points": points} | lists, queries + np.float32(100)


def flat(points: np.ndarray, k: int, length_scale: float) -> dict[str, np.ndarray]:
    return {
        "k": np.array([k], np.int64),
        "length_scale": np.array(length_scale, np.float32),
        "jitter": np.array(1e-6, np.float32),
        "points": points,
    }


def answers(
    given: dict[str, np.ndarray], queries: np.ndarray, kind: str = "flat"
) -> tuple[np.ndarray, np.ndarray, bool]:
    """s, neighbours, and whether no grouping of the queries changes a bit of them."""
    data = model(kind, given, ("n", queries.shape[1]))
    running = session(data, threads=2)
    s, neighbours = running.run(None, {"query": queries})
    same = True
    for threads, batch in ((1, 1), (1, 3), (2, 5), (1, 13), (2, 40)):
        other = session(data, threads=threads)
        parts = [other.run(None, {"query": queries[i : i + batch]}) for i in range(0, len(queries), batch)]
        same &= np.concatenate([part[0] for part in parts]).tobytes() == s.tobytes()
        same &= np.concatenate([part[1] for part in parts]).tobytes() == neighbours.tobytes()
    many = np.concatenate([queries] * 4)[::-1]  # other places, other tiles
    again_s, again = running.run(None, {"query": many})
    same &= again_s[::-1].tobytes() == np.concatenate([s] * 4).tobytes()
    same &= again[::-1].tobytes() == np.concatenate([neighbours] * 4).tobytes()
    return s, neighbours, bool(same)


def main(folder: Path) -> None:
    out, same = {}, {}
    for name, (points, queries, k) in cases().items():
        scale = float(np.sqrt(points.shape[1]))
        out[f"{name}/s"], out[f"{name}/rows"], same[name] = answers(flat(points, k, scale), queries)
    given, queries = share_case()
    out["share/s"], out["share/rows"], same["share"] = answers(given, queries)
    given, queries = local_case()
    out["local share/s"], out["local share/rows"], same["local share"] = answers(given, queries, "local")
    for kind in LIST_KINDS:
        given = tensors(kind)
        near = inducing_points(given)[::9] + np.float32(0.1)
        out[f"{kind}/s"], out[f"{kind}/rows"], same[kind] = answers(given, near, kind)
    np.savez(folder / "answers.npz", **out)
    (folder / "same.json").write_text(json.dumps(same))


# ── tests ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=BY_DAY)
def level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path), str(ROOT)]),
        "GAPA_ONNX_LIBRARY": str(LIBRARY),
        "GAPA_ONNX_ISA": request.param,
    }
    done = subprocess.run(
        [sys.executable, __file__, str(folder)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return np.load(folder / "answers.npz"), json.loads((folder / "same.json").read_text())


@cache
def exact(name: str) -> np.ndarray:
    points, queries, k = cases()[name]
    return reference.nearest(queries, points, k)


@pytest.mark.parametrize("name", list(cases()))
def test_neighbours_are_the_exact_ones(level, name: str) -> None:
    found = level[0][f"{name}/rows"]
    points, queries, _ = cases()[name]
    wrong = (found != exact(name)).any(axis=1)
    for q in np.flatnonzero(wrong):
        # Two sums of the same squares may round differently: then the distances are one number.
        mine, theirs = (
            np.sqrt(reference.squared_distances(queries[q : q + 1], points[rows[q]]))[0]
            for rows in (found, exact(name))
        )
        np.testing.assert_allclose(mine, theirs, rtol=1e-14)
        assert len(set(found[q])) == found.shape[1]
    assert wrong.mean() < 0.05


def test_no_grouping_of_the_queries_changes_a_bit(level) -> None:
    assert [name for name, same in level[1].items() if not same] == []


def test_share_of_a_wide_layer(level) -> None:
    """Float32 output of a float64 solve: what is left is one rounding, 6e-8, and the condition of G."""
    given, queries = share_case()
    s, rows = level[0]["share/s"][:, 0], level[0]["share/rows"]
    expected = reference.unexplained_share(queries, given["points"], rows, 8.0, 1e-6)
    clear = expected > 1e-6
    assert clear.sum() > 100 and expected.min() < 1e-4 and expected.max() > 0.5
    assert (np.abs(s - expected) / expected)[clear].max() <= 1e-6


def test_share_of_a_neighbourhood(level) -> None:
    """The same, with L⁻¹ instead of a solve: its rounding, times the root of a condition of 1e7, adds 1e-12."""
    given, queries = local_case()
    s, rows = level[0]["local share/s"][:, 0], level[0]["local share/rows"]
    nearest = reference.nearest(queries, given["points"], 1)[:, 0]
    np.testing.assert_array_equal(rows, given["neighbourhoods"][nearest])
    expected = reference.unexplained_share(queries, given["points"], rows, 8.0, 1e-6)
    clear = expected > 1e-6
    assert clear.sum() > 100 and expected.min() < 1e-4 and expected.max() > 0.5
    assert (np.abs(s - expected) / expected)[clear].max() <= 1e-5


def test_levels_agree_on_lists(level) -> None:
    for kind in LIST_KINDS:
        given = tensors(kind)
        near = inducing_points(given)[::9] + np.float32(0.1)
        expected_s, expected_rows = reference.evaluate(kind, given, near)
        np.testing.assert_array_equal(level[0][f"{kind}/rows"], expected_rows)
        np.testing.assert_allclose(level[0][f"{kind}/s"], expected_s, rtol=1e-4, atol=1e-8)


def test_queries_without_an_answer_where_threads_share_the_points() -> None:
    points, queries, k = cases()["split over threads"]
    running = session(model("flat", flat(points, k, 14.0), ("n", points.shape[1])), threads=2)
    expected_s, expected_rows = running.run(None, {"query": queries})
    bad = np.full_like(queries, np.nan)
    s, rows = running.run(None, {"query": np.concatenate([bad[:1], queries, bad])})
    assert s[1:4].tobytes() == expected_s.tobytes() and rows[1:4].tobytes() == expected_rows.tobytes()
    assert np.isnan(s[[0, 4, 5, 6]]).all() and (rows[[0, 4, 5, 6]] == -1).all()
    s, rows = running.run(None, {"query": bad})
    assert np.isnan(s).all() and (rows == -1).all()


def test_points_outlive_the_bytes_that_they_came_from() -> None:
    """The kernel reads points where onnxruntime keeps them."""
    points, queries, k = cases()["plain"]
    data = bytearray(model("flat", flat(points, k, 5.0), ("n", points.shape[1])))
    running = session(bytes(data), threads=2)
    expected = running.run(None, {"query": queries})
    data[:] = b"\0" * len(data)
    rubbish = [np.full(len(data), i) for i in range(4)]  # what was freed is likely handed out again
    for mine, theirs in zip(running.run(None, {"query": queries}), expected):
        np.testing.assert_array_equal(mine, theirs)
    assert len(rubbish) == 4


if __name__ == "__main__":
    main(Path(sys.argv[1]))
