"""Which points a neighbourhood holds: the nearest, or those that tell most, judged by rows they were not chosen for."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from support.dense_shares import by_definition, clustered, kernel, solve_tolerance

from gapa_onnx.fit.statistics import leave_one_out_share
from gapa_onnx.op import neighbourhoods as neighbourhoods_module
from gapa_onnx.op import reference
from gapa_onnx.op.neighbourhoods import choose, most_informative, neighbourhoods

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
    (chosen,) = most_informative(points, rows, k, 2.0, jitter)
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
    groups = [*most_informative(points, rows, 20, 6.0, 1e-6), neighbourhoods(points, 20)]
    for k in (5, 10, 20):
        told, near = (
            reference.unexplained_share(new, points, group[nearest, :k], 6.0, 1e-6) for group in groups
        )
        gain = (near - told).ravel()
        assert gain.mean() > 4 * gain.std() / np.sqrt(len(gain))


def told(points: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    return most_informative(points, rows, k, 1.0, 1e-6)[0]


def test_telling_where_there_is_no_choice(monkeypatch):
    points, rows = clustered(40, 4, 22)
    np.testing.assert_array_equal(told(points, rows, 40), neighbourhoods(points, 40))
    np.testing.assert_array_equal(told(points, rows[:0], 7), neighbourhoods(points, 7))
    np.testing.assert_array_equal(told(points, rows, 1)[:, 0], np.arange(40))
    twins = np.repeat(points[:8], 5, axis=0)  # the Gram matrix is singular but for the jitter
    for group in told(twins, rows, 12):
        assert len(set(group)) == 12 and len({tuple(twins[row]) for row in group}) >= 2
    far = 1e4 * np.eye(9, dtype=np.float32)  # all kernels are 0: the nearest, as good as any
    np.testing.assert_array_equal(told(far, far, 3), neighbourhoods(far, 3))
    whole = told(points, rows, 7)
    monkeypatch.setattr(neighbourhoods_module, "_PIECE_VALUES", 400)
    np.testing.assert_array_equal(told(points, rows, 7), whole)


def test_halves_judge_by_rows_that_a_neighbourhood_was_not_chosen_for():
    """A twentieth of new rows is beyond the 0.95 quantile of left-out ones. Judged by its own rows, many more are."""
    rng = np.random.default_rng(23)
    spread = rng.normal(size=(20, 40))  # so many directions that the choice among near points matters
    rows, new = np.split((rng.normal(size=(14_000, 20)) @ spread).astype(np.float32), [6000])
    points, k, length_scale, jitter = rows[:300], 15, 25.0, 1e-6
    judged = rows[300:]
    nearest = cdist(new, points).argmin(axis=1)
    chosen = choose(points, rows, k, length_scale, jitter)
    told = reference.unexplained_share(new, points, chosen.whole[nearest], length_scale, jitter)
    shares, by_itself = (
        leave_one_out_share(judged, points, k, length_scale, jitter, neighbourhoods=near)
        for near in (chosen, chosen.whole)
    )
    error = np.sqrt(0.05 * 0.95 * (1 / len(judged) + 1 / len(new)))  # of the share of new rows beyond
    beyond, flattered = ((told > np.quantile(each, 0.95)).mean() for each in (shares, by_itself))
    assert 0.03 < beyond <= 0.05 + 3 * error < flattered


def test_a_half_is_known_from_the_row_alone():
    points, rows = clustered(80, 5, 24)
    chosen = choose(points, rows, 4, 2.0, 1e-6, seed=3)
    half = chosen.stripes.half(rows)
    assert set(half) == {0, 1} and 0.4 < half.mean() < 0.6
    np.testing.assert_array_equal(chosen.stripes.half(rows[::-1]), half[::-1])
    nudged = np.nextafter(rows, np.float32(np.inf))  # other last bits, as another batch size may give
    assert (chosen.stripes.half(nudged) == half).mean() > 0.99
    assert np.isfinite(chosen.stripes.half(np.full((1, 5), np.nan))).all()
    expected = [
        *most_informative(points, rows[half == 0], 4, 2.0, 1e-6),
        *most_informative(points, rows[half == 1], 4, 2.0, 1e-6),
    ]
    np.testing.assert_array_equal(chosen.halves, expected)
    nearest = np.arange(len(rows)) % len(points)
    for row, point, group in zip(half, nearest, chosen.without(rows, nearest)):
        np.testing.assert_array_equal(group, expected[1 - int(row)][point])
    alike = choose(points[:1], np.ones((9, 5), np.float32), 1, 1.0, 1e-6)  # no spread at all
    assert len(set(alike.stripes.half(np.ones((9, 5), np.float32)))) == 1
