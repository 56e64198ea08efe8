"""Neighbourhoods prepared beforehand: which points they hold, what s they give, and that s is never too small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import test_convert
import test_function
from scipy.spatial.distance import cdist

import gapa_onnx
from gapa_onnx import provenance
from gapa_onnx.errors import UserError
from gapa_onnx.op import index as index_module
from gapa_onnx.op import neighbourhoods as neighbourhoods_module
from gapa_onnx.op import reference
from gapa_onnx.op.index import build_index
from gapa_onnx.op.neighbourhoods import Halves, neighbourhoods, telling
from gapa_onnx.settings import Settings
from gapa_onnx.statistics import leave_one_out_share

MODELS = Path(__file__).parent.parent / "models"
U64 = 2.0**-53


def solve_tolerance(m: int, jitter: float) -> float:
    """The condition of G + jitter·I is at most m / jitter, and a solve loses about m·u times that."""
    return 10 * m * U64 * m / jitter


def kernel(a: np.ndarray, b: np.ndarray, length_scale: float) -> np.ndarray:
    return np.exp(-cdist(a, b, "sqeuclidean") / (2 * length_scale**2))


def dense_share(row: np.ndarray, points: np.ndarray, length_scale: float, jitter: float) -> float:
    """s given all of the points, by a dense solve."""
    to_row = kernel(points, row[None], length_scale)[:, 0]
    gram = kernel(points, points, length_scale) + jitter * np.eye(len(points))
    return float(np.clip(1 - to_row @ np.linalg.solve(gram, to_row), 0, 1))


def by_definition(points: np.ndarray, k: int) -> np.ndarray:
    """Itself first, then by (distance, row), where distances are exact: for points on a grid."""
    squares = cdist(points.astype(float), points.astype(float), "sqeuclidean")
    np.fill_diagonal(squares, -1)
    return np.argsort(squares, axis=1, kind="stable")[:, :k]


# ---------------------------------------------------------------- the neighbourhoods


@pytest.mark.parametrize("k", [1, 2, 10, 60, 399, 400])
@pytest.mark.parametrize("offset", [0, 1 << 12])
def test_neighbourhoods_are_exact_also_among_ties(k, offset):
    """Integer points: distances are exact in float64, most are tied, some points are twins."""
    points = np.random.default_rng(0).integers(-3, 4, (400, 3)).astype(np.float32) + offset
    near = neighbourhoods(points, k)
    assert near.dtype == np.int32
    np.testing.assert_array_equal(near, by_definition(points, k))
    np.testing.assert_array_equal(near[:, 0], np.arange(400))


def test_neighbourhoods_where_float32_cannot_tell():
    """Two far clusters, centred between them: float32 distances within a cluster are all rounding."""
    rng = np.random.default_rng(1)
    points = np.concatenate([rng.integers(0, 99, (150, 2)), rng.integers(0, 99, (150, 2)) + (1 << 20)])
    points = points.astype(np.float32)  # exact: integers below 2²⁴
    np.testing.assert_array_equal(neighbourhoods(points, 12), by_definition(points, 12))


def test_neighbourhoods_in_blocks(monkeypatch):
    points = np.random.default_rng(2).normal(size=(700, 5)).astype(np.float32)
    expected = by_definition(points, 9)
    np.testing.assert_array_equal(neighbourhoods(points, 9), expected)
    monkeypatch.setattr(neighbourhoods_module, "_SEARCHED", 64)
    monkeypatch.setattr(neighbourhoods_module, "_BLOCK_VALUES", 300)
    np.testing.assert_array_equal(neighbourhoods(points, 9), expected)
    with pytest.raises(ValueError, match="between 1 and"):
        neighbourhoods(points, 701)


def summed_variance(points: np.ndarray, rows: np.ndarray, length_scale: float, jitter: float) -> float:
    """Σ_r s(r) given all of the points, by a dense solve."""
    to_rows = kernel(points, rows, length_scale)
    gram = kernel(points, points, length_scale) + jitter * np.eye(len(points))
    return float(len(rows) - np.einsum("mr,mr->", to_rows, np.linalg.solve(gram, to_rows)))


def rows_around(points: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Those whose nearest point it is, at most 32 evenly taken, and where fewer than 16 those of the next points."""
    gaps = cdist(points.astype(float), rows.astype(float))
    cells = [np.nonzero(gaps.argmin(axis=0) == point)[0] for point in range(len(points))]
    found = []
    for point, order in enumerate(by_definition(points, len(points))):
        own = list(cells[point][:: max(1, -(-len(cells[point]) // 32))])
        for neighbour in order[1:15]:
            own += list(cells[neighbour]) if len(own) < 16 else []
        found.append(np.array(own[:32]))
    return found


@pytest.mark.parametrize("count", [60, 500])
def test_each_telling_point_lowers_the_variance_around_most(count):
    """Every choice against dense solves with each of the other candidates in its place."""
    points, rows = clustered(50, 3, 20)
    rows, k, jitter = rows[:count], 6, 1e-6
    chosen = telling(points, rows, k, 2.0, jitter)
    near, around = by_definition(points, round(2.5 * k)), rows_around(points, rows)
    assert chosen.dtype == np.int32 and (chosen[:, 0] == np.arange(50)).all()
    exact, different = points.astype(float), 0
    for of, candidates, at in zip(chosen, near, around):
        for step in range(1, k):
            rest = [c for c in candidates if c not in of[:step]]
            data = rows[at].astype(float)
            lowest = min(summed_variance(exact[[*of[:step], c]], data, 2.0, jitter) for c in rest)
            found = summed_variance(exact[of[: step + 1]], data, 2.0, jitter)
            assert found <= lowest + len(at) * solve_tolerance(k, jitter)
        different += set(of) != set(candidates[:k])
    assert different > 25  # it does not choose the nearest


def test_telling_points_leave_less_to_new_rows_than_the_nearest():
    """New rows: the choice was not made for them. Also for every smaller k, by the first of the list."""
    points, rows, new = np.split(clustered(12_000, 12, 21)[0], [300, 8000])
    nearest = cdist(new.astype(float), points.astype(float)).argmin(axis=1)
    groups = [choose(points, rows, 20, 6.0, 1e-6) for choose in (telling, near_only)]
    for k in (5, 10, 20):
        told, near = (
            reference.unexplained_share(new, points, group[nearest, :k], 6.0, 1e-6) for group in groups
        )
        gain = (near - told).ravel()
        assert gain.mean() > 4 * gain.std() / np.sqrt(len(gain))


def near_only(points: np.ndarray, rows: np.ndarray, k: int, length_scale: float, jitter: float) -> np.ndarray:
    return neighbourhoods(points, k)


def test_telling_where_there_is_no_choice(monkeypatch):
    points, rows = clustered(40, 4, 22)
    np.testing.assert_array_equal(telling(points, rows, 40, 1.0, 1e-6), neighbourhoods(points, 40))
    np.testing.assert_array_equal(telling(points, rows[:0], 7, 1.0, 1e-6), neighbourhoods(points, 7))
    np.testing.assert_array_equal(telling(points, rows, 1, 1.0, 1e-6)[:, 0], np.arange(40))
    twins = np.repeat(points[:8], 5, axis=0)  # the Gram matrix is singular but for the jitter
    for group in telling(twins, rows, 12, 1.0, 1e-6):
        assert len(set(group)) == 12 and len({tuple(twins[row]) for row in group}) >= 2
    far = 1e4 * np.eye(9, dtype=np.float32)  # all kernels are 0: the nearest, as good as any
    np.testing.assert_array_equal(telling(far, far, 3, 1.0, 1e-6), neighbourhoods(far, 3))
    whole = telling(points, rows, 7, 1.0, 1e-6)
    monkeypatch.setattr(neighbourhoods_module, "_CACHED", 400)
    np.testing.assert_array_equal(telling(points, rows, 7, 1.0, 1e-6), whole)


def test_halves_judge_by_rows_that_a_neighbourhood_was_not_chosen_for():
    """A twentieth of new rows is beyond the 0.95 quantile of left-out ones. Judged by its own rows, many more are."""
    rng = np.random.default_rng(23)
    spread = rng.normal(size=(20, 40))  # so many directions that the choice among near points matters
    rows, new = np.split((rng.normal(size=(14_000, 20)) @ spread).astype(np.float32), [6000])
    points, k, length_scale, jitter = rows[:300], 15, 25.0, 1e-6
    judged = rows[300:]
    nearest = cdist(new, points).argmin(axis=1)
    whole = telling(points, rows, k, length_scale, jitter)
    told = reference.unexplained_share(new, points, whole[nearest], length_scale, jitter)

    halves = Halves.of(points, rows, k, length_scale, jitter, seed=0)
    shares = np.empty(len(judged))
    for at, near in halves.without(judged):
        shares[at] = leave_one_out_share(judged[at], points, k, length_scale, jitter, neighbourhoods=near)
    by_itself = leave_one_out_share(judged, points, k, length_scale, jitter, neighbourhoods=whole)
    error = np.sqrt(0.05 * 0.95 * (1 / len(judged) + 1 / len(new)))  # of the share of new rows beyond
    beyond, flattered = ((told > np.quantile(each, 0.95)).mean() for each in (shares, by_itself))
    assert 0.03 < beyond <= 0.05 + 3 * error < flattered


def test_a_half_is_known_from_the_row_alone():
    points, rows = clustered(80, 5, 24)
    halves = Halves.of(points, rows, 4, 2.0, 1e-6, seed=3)
    half = halves.half(rows)
    assert set(half) == {0, 1} and 0.4 < half.mean() < 0.6
    np.testing.assert_array_equal(halves.half(rows[::-1]), half[::-1])
    nudged = np.nextafter(rows, np.float32(np.inf))  # other last bits, as another batch size may give
    assert (halves.half(nudged) == half).mean() > 0.99
    for one, chosen in enumerate(halves.chosen):
        np.testing.assert_array_equal(chosen, telling(points, rows[half == one], 4, 2.0, 1e-6))
    (first, for_first), (second, for_second) = halves.without(rows)
    np.testing.assert_array_equal(np.sort([*first, *second]), np.arange(len(rows)))
    assert (half[first] == 0).all() and for_first is halves.chosen[1] and for_second is halves.chosen[0]
    alike = Halves.of(points[:1], np.ones((9, 5), np.float32), 1, 1.0, 1e-6, seed=0)  # no spread at all
    assert len(set(alike.half(np.ones((9, 5), np.float32)))) == 1
    assert np.isfinite(halves.half(np.full((1, 5), np.nan, np.float32))).all()


# ------------------------------------------------------------------------- the index


def clustered(m: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = (2 * rng.normal(size=(30, d)))[rng.integers(0, 30, m + 500)] + rng.normal(size=(m + 500, d))
    return tuple(np.split(rows.astype(np.float32), [m]))


def test_lists_reach_the_recall_for_the_nearest_point_at_least_cost():
    points, held_out = clustered(2500, 8, 3)
    index = build_index("local", points, k=7, held_out=held_out, search="ivf")
    lists, nprobe = index.settings["lists"], index.settings["nprobe"]
    assert lists == len(index.tensors["centroids"]) > 1 and nprobe == index.tensors["nprobe"][0]
    np.testing.assert_array_equal(index.tensors["neighbourhoods"], by_definition(index.points, 7))

    own = reference.list_of_row(index.tensors["list_offsets"])[reference.nearest(held_out, index.points, 1)]
    order = reference.nearest(held_out, index.tensors["centroids"], lists)
    place = (order == own).argmax(axis=1)  # where the list of the nearest point stands
    assert index.recall == pytest.approx((place < nprobe).mean(), abs=2 / 500) and index.recall >= 0.99
    assert (place < nprobe - 1).mean() < 0.99

    def cost(factor: int) -> float:
        built = index_module._lists(points, round(factor * 2500**0.5), 0)
        wanted = reference.nearest(held_out, built.points, 1)
        _, _, compared = index_module._smallest_nprobe(built, held_out, wanted, 0.99)
        return index_module._LIST_COST * len(built.centroids) + index_module._LISTED_COST * compared

    costs = {factor: cost(factor) for factor in (1, 2, 4, 8)}
    assert lists == pytest.approx(min(costs, key=costs.get) * 2500**0.5, rel=0.05)  # empty lists are dropped


@pytest.mark.parametrize(
    "m, search, several", [(500, "auto", False), (500, "ivf", True), (6000, "flat", False)]
)
def test_how_many_lists(m, search, several):
    points, held_out = clustered(m, 4, 4)
    index = build_index("local", points, k=3, held_out=held_out, search=search)
    assert (index.settings["lists"] > 1) == several
    if not several:
        assert index.settings == {"lists": 1, "nprobe": 1} and index.recall == 1.0
        np.testing.assert_array_equal(index.points, points)  # no need to reorder
        assert build_index("local", points, k=3, held_out=held_out[:0], search=search).recall == 1.0


def test_auto_keeps_one_list_where_lists_save_nothing():
    """In many dimensions without clusters a nearest point may be in any list."""
    rng = np.random.default_rng(5)
    points, held_out = (rng.normal(size=(n, 60)).astype(np.float32) for n in (800, 300))
    assert build_index("local", points, k=3, held_out=held_out).settings["lists"] == 1
    points, held_out = clustered(6000, 3, 5)
    assert build_index("local", points, k=3, held_out=held_out).settings["lists"] > 1


def test_rows_that_are_inducing_points_do_not_flatter_the_recall():
    """A point is always found in its own list; what counts is a row that is not among the points."""
    points, new = clustered(3000, 12, 6)
    index = build_index("local", points, k=3, held_out=points[::6], search="ivf")
    t = index.tensors
    constants = {"k": np.array([1]), "length_scale": np.float32(1), "jitter": np.float32(1e-6)}
    found = reference.evaluate("local", constants | t, new)[1]
    assert (found == reference.nearest(new, index.points, 1)).mean() > 0.975  # .99 − 3 standard errors of 500
    assert t["nprobe"][0] > 1


def test_user_mistakes():
    points, held_out = clustered(600, 4, 7)
    with pytest.raises(UserError, match="cannot search for the nearest point by 'hnsw'"):
        build_index("local", points, k=3, held_out=held_out, search="hnsw")
    with pytest.raises(UserError, match="no held-out rows"):
        build_index("local", points, k=3, held_out=held_out[:0])
    for index in ("hnsw", "ivfpq"):
        with pytest.raises(UserError, match=f"--index {index} is not for") as caught:
            Settings(solver="cached", index=index)
        assert "auto, flat or ivf" in caught.value.hint
    with pytest.raises(UserError, match="--solver 'lazy'"):
        Settings(solver="lazy")


# ---------------------------------------------------------------------- the operator


def local_tensors(
    points: np.ndarray,
    k: int,
    *,
    lists: int = 1,
    nprobe: int = 1,
    length_scale=1.5,
    jitter=1e-6,
    groups=neighbourhoods,
):
    held_out, search = (points[:0], "flat") if lists == 1 else (points[::3] + 0.1, "ivf")
    index = build_index("local", points, k=k, held_out=held_out, search=search, groups=groups)
    constants = {"k": k, "length_scale": np.float32(length_scale), "jitter": np.float32(jitter)}
    given = constants | index.tensors
    return given | {"k": np.array([k]), "nprobe": np.array([nprobe])}


def near_and_far(points: np.ndarray, seed: int) -> np.ndarray:
    """Points themselves, between them, among them, and out to where nothing is known."""
    rng = np.random.default_rng(seed)
    d = points.shape[1]
    middle = (points[rng.integers(0, len(points), 200)] + points[rng.integers(0, len(points), 200)]) / 2
    spread = rng.normal(size=(800, d)) * rng.choice([0.3, 1, 2, 5, 30], (800, 1))
    return np.concatenate([points[:50], middle, spread]).astype(np.float32)


def test_reference_takes_over_the_neighbourhood_of_the_nearest_point():
    rng = np.random.default_rng(8)
    points = rng.normal(size=(200, 5)).astype(np.float32)
    queries = near_and_far(points, 9)
    s, ids = reference.evaluate("local", local_tensors(points, 12), queries)
    nearest = cdist(queries.astype(float), points.astype(float)).argmin(axis=1)
    np.testing.assert_array_equal(ids, by_definition(points, 12)[nearest])
    for row, share, members in zip(queries.astype(float), s[:, 0], ids):
        expected = dense_share(row, points[members].astype(float), 1.5, float(np.float32(1e-6)))
        assert share == pytest.approx(expected, abs=solve_tolerance(12, 1e-6))


@pytest.mark.parametrize("k", [1, 2, 5, 20, 50, 100, 300])
@pytest.mark.parametrize("d, length_scale", [(3, 1.0), (20, 6.0)])
@pytest.mark.parametrize("choose", [near_only, telling])
def test_s_is_never_below_s_given_all_inducing_points(k, d, length_scale, choose):
    """The reference and the portable function, with one list and with probing so few that points are missed."""
    points = np.random.default_rng(d).normal(size=(300, d)).astype(np.float32)
    queries = near_and_far(points, 10)[:: 1 if k <= 50 else k // 3]
    jitter = float(np.float32(1e-6))
    gram = kernel(points.astype(float), points.astype(float), length_scale) + jitter * np.eye(300)
    to_queries = kernel(points.astype(float), queries.astype(float), length_scale)  # (300, n)
    given_all = 1 - np.einsum("mn,mn->n", to_queries, np.linalg.solve(gram, to_queries))
    given_all = np.clip(given_all, 0, 1)
    tolerance = solve_tolerance(300, jitter)
    data = np.random.default_rng(d + 1).normal(size=(2000, d)).astype(np.float32)
    for lists in (1, 2):
        t = local_tensors(
            points,
            k,
            lists=lists,
            length_scale=length_scale,
            groups=lambda listed, k: choose(listed, data, k, length_scale, jitter),
        )
        s = reference.evaluate("local", t, queries)[0][:, 0]
        assert (s >= given_all - tolerance).all()
        portable, _ = test_function.session(test_function.model_of("local", t)).run(None, {"z": queries})
        assert (portable[:, 0] >= given_all * (1 - 2.0**-24) - tolerance - 2.0**-24).all()
        if k < 300:  # and the test is not vacuous: something is lost
            assert (s > given_all + 10 * tolerance).mean() > 0.1


# --------------------------------------------------------------------- leave-one-out


def test_leaving_out_equals_deleting_the_row():
    """Rows that are inducing points: the nearest other point, and its neighbourhood without the row."""
    points = np.random.default_rng(11).normal(size=(90, 4)).astype(np.float32)
    near = neighbourhoods(points, 10)
    shares = leave_one_out_share(points, points, 8, 1.5, 1e-4, neighbourhoods=near)
    exact = points.astype(float)
    dropped = 0
    for i, row in enumerate(exact):
        distance = np.linalg.norm(exact - row, axis=1)
        distance[i] = np.inf
        members = [j for j in near[distance.argmin(), :8] if j != i]
        dropped += len(members) < 8
        assert shares[i] == pytest.approx(
            dense_share(row, exact[members], 1.5, 1e-4), abs=solve_tolerance(8, 1e-4)
        )
    assert 0 < dropped < 90  # both cases occur


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_a_row_leaves_the_mean_that_it_is_part_of(spread):
    """Means are computed again from the other rows. With wide clusters another mean is then the nearest."""
    rng = np.random.default_rng(12)
    places = 20 * rng.normal(size=(14, 2))
    drawn = np.concatenate([np.arange(14), rng.integers(0, 13, 50)])  # the last cluster is mostly one row
    rows = (places[drawn] + spread * rng.normal(size=(64, 2))).astype(np.float32)
    means = rows[:14].astype(float)
    for _ in range(50):  # Lloyd's iteration, to rest: each row is nearest to the mean that it is part of
        owner = cdist(rows.astype(float), means).argmin(axis=1)
        means = np.stack(
            [
                rows[owner == c].mean(axis=0, dtype=float) if (owner == c).any() else means[c]
                for c in range(14)
            ]
        )
    assert (cdist(rows.astype(float), means.astype(np.float32)).argmin(axis=1) == owner).all()
    sizes = np.bincount(owner, minlength=14)
    means = means[sizes > 0].astype(np.float32)
    owner, sizes = (np.cumsum(sizes > 0) - 1)[owner], sizes[sizes > 0]
    near = neighbourhoods(means, 5)

    shares = leave_one_out_share(rows, means, 5, 15.0, 1e-4, sizes, near)
    moved_away = 0
    for i, row in enumerate(rows.astype(float)):
        others = np.delete(np.arange(64), i)
        left = means.astype(float)
        members = rows[others[owner[others] == owner[i]]].astype(float)
        left[owner[i]] = members.mean(axis=0) if len(members) else np.inf
        nearest = np.linalg.norm(left - row, axis=1).argmin()
        moved_away += nearest != owner[i]
        group = left[near[nearest]]
        expected = dense_share(row, group[np.isfinite(group[:, 0])], 15.0, 1e-4)
        # The means are rounded to float32, which moves the kernel by at most its slope times the rounding.
        rounding = np.abs(means).max() * np.finfo(np.float32).eps / 15.0
        assert abs(shares[i] - expected) <= 2 * 25 * rounding / 1e-4
    assert moved_away >= (sizes == 1).sum() and (spread == 1.0 or moved_away > (sizes == 1).sum())


def test_left_out_rows_without_anything_near_and_bad_rows():
    row = np.ones((1, 3), np.float32)
    one = neighbourhoods(row, 1)
    assert leave_one_out_share(row, row, 1, 1.0, 1e-6, neighbourhoods=one) == [1.0]
    points = np.random.default_rng(13).normal(size=(60, 3)).astype(np.float32)
    rows = np.concatenate([points[:5] + 1, points[:1] * np.nan])
    shares = leave_one_out_share(rows, points, 4, 1.0, 1e-6, np.ones(60, int), neighbourhoods(points, 4))
    assert np.isnan(shares[-1]) and np.isfinite(shares[:-1]).all()
    t = local_tensors(points, 4, length_scale=1.0)
    new = reference.evaluate("local", t, rows[:5])[0][:, 0]  # no point is near: nothing to leave out
    np.testing.assert_allclose(shares[:5], new, atol=solve_tolerance(4, 1e-6), rtol=0)


# -------------------------------------------------------------------- the whole path


@pytest.fixture(scope="module")
def digits():
    calibration = MODELS / "digits_cnn_calibration.npz"
    return gapa_onnx.convert(MODELS / "digits_cnn.onnx", calibration, m=300, k=20, solver="cached")


def test_conversion(digits):
    failed = [check for check in digits.checks if not check.passed]
    assert not failed
    record = provenance.read(digits.model)
    (site,) = record["sites"]
    assert record["settings"]["solver"] == "cached" and site["index"] == "local"
    assert site["index_settings"] == {"lists": 1, "nprobe": 1} and site["recall"] == 1.0
    assert site["share_error"] > 0


CONVERT = """
import sys, gapa_onnx
gapa_onnx.convert(*sys.argv[1:4], m=600, k=10, solver="cached", index="ivf")
"""


def test_same_bytes_whatever_the_threads(tmp_path):
    written = set()
    for threads in ("1", "2"):
        arguments = [MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz", tmp_path / threads]
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-c", CONVERT, *map(str, arguments)], check=True, env=environment)
        written.add((tmp_path / threads).read_bytes())
    assert len(written) == 1


def test_scale_comes_from_left_out_rows_of_the_same_operator(digits):
    (fit,) = digits.calibration.fits
    rows = np.random.default_rng(14).normal(size=(50, fit.index.points.shape[1])).astype(np.float32)
    found = fit.leave_one_out(rows)
    for at, near in fit.halves.without(rows):
        expected = leave_one_out_share(
            rows[at], fit.index.points, fit.k, fit.length_scale, fit.jitter, fit.sizes, near
        )
        np.testing.assert_array_equal(found[at], expected)
    assert fit.scale == pytest.approx(0.05 / fit.share_quantiles["0.5"], rel=0.02)


def test_flagged_share_of_new_rows_is_what_was_asked_for(digits):
    """Held-out images are like the calibration images: about one in twenty is flagged."""
    session = gapa_onnx.session(digits.model.SerializeToString())
    x = np.load(MODELS / "digits_cnn_heldout.npz")["image"]
    (flags,) = session.run(["logits_ood"], {"image": x})
    bound = 4 * np.sqrt(0.05 * 0.95 / len(x)) + 0.02  # of the sample, and of the quantile itself
    assert abs(flags.mean() - 0.05) < bound


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 18])
def test_opsets(opset):
    rng = np.random.default_rng(15)
    weights = {"w1": rng.standard_normal((3, 8)), "w2": rng.standard_normal((8, 4))}
    text = "net (float[n, 3] x) => (float[n, 4] y) { z = MatMul(x, w1)  h = Relu(z)  y = MatMul(h, w2) }"
    model = test_convert.parse(text, opset, **weights)
    rows = rng.standard_normal((200, 3)).astype(np.float32)
    conversion = gapa_onnx.convert(model, {"x": rows}, m=40, k=5, solver="cached", index="ivf")
    assert all(check.passed for check in conversion.checks)
    assert conversion.calibration.fits[0].index.settings["lists"] > 1


def test_ties_for_the_nearest_point_do_not_fail_a_check():
    """Features on a grid: a query halfway between two points has two neighbourhoods to choose from."""
    from gapa_onnx.verify import _share_of

    points = np.array([[0.0], [1.0], [3.0], [4.5]], np.float32)
    queries = np.array([[0.5], [3.2]], np.float32)
    ports = {"points": points, "length_scale": np.float32(1), "jitter": np.float32(1e-6)}
    ports |= {"centroids": points.mean(axis=0)[None], "nprobe": np.array([1])}
    one, other = np.array([[0, 1], [2, 3]]), np.array([[1, 2], [3, 2]])
    exact = reference.unexplained_share(queries, points, one, 1.0, 1e-6)
    swapped = reference.unexplained_share(queries, points, other, 1.0, 1e-6)
    found = _share_of(queries, ports, other, one, exact)
    assert found[0] == pytest.approx(swapped[0], rel=1e-9) and abs(found[0] - exact[0]) > 0.01  # as near
    assert found[1] == exact[1] != swapped[1]  # not as near: what was found is wrong, and shows


def test_ties_for_the_list_to_search_do_not_fail_a_check():
    """The nearest point of a list that is as near as the other's need not be as near as that one's."""
    from gapa_onnx.verify import _share_of

    points = np.array([[-3.0], [-1.0], [2.0], [2.0], [9.0]], np.float32)
    ports = {"points": points, "length_scale": np.float32(1), "jitter": np.float32(1e-6)}
    ports |= {
        "centroids": np.array([[-2.0], [2.0], [9.0]], np.float32),
        "list_offsets": np.array([0, 2, 4, 5]),
        "nprobe": np.array([1]),
    }
    queries = np.array([[0.0], [1.0]], np.float32)  # halfway between two centroids, and not
    one, other = np.array([[1, 0], [2, 3]]), np.array([[2, 3], [1, 0]])
    exact = reference.unexplained_share(queries, points, one, 1.0, 1e-6)
    found = _share_of(queries, ports, other, one, exact)
    swapped = reference.unexplained_share(queries, points, other, 1.0, 1e-6)
    assert found[0] == pytest.approx(swapped[0], rel=1e-12) and abs(found[0] - exact[0]) > 0.01
    assert found[1] == exact[1] != swapped[1]
