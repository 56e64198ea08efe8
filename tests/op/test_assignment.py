"""The nearest of many points against distances in float64, also where few or all of them must be compared."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from gapa_onnx.op import assignment
from gapa_onnx.op.assignment import groups, nearest_point


def clusters(seed, m, k, d, spread):
    """Rows (m, d) and points (k, d) in ten clusters whose centres are `spread` times as far apart as they are wide."""
    rng = np.random.default_rng(seed)
    centres = spread * rng.normal(size=(10, d))
    drawn = centres[rng.integers(0, 10, m + k)] + rng.normal(size=(m + k, d))
    return np.split(drawn.astype(np.float32), [m])


def compared(rows, points, near=None):
    """Share of all rows and points that are compared with each other."""
    half = (points**2).sum(axis=1) / 2
    pairs = assignment._comparisons(rows, points, half, near)
    counts = [len(rows[at]) * len(points[among]) for at, among in pairs]
    return sum(counts) / (len(rows) * len(points))


@pytest.mark.parametrize("spread", [0, 1, 8])
@pytest.mark.parametrize(
    "m, k, d", [(3000, 300, 5), (2000, 90, 60), (500, 700, 20), (300, 40, 8), (50, 1, 3)]
)
def test_against_distances_in_float64(spread, m, k, d):
    rows, points = clusters(0, m, k, d, spread)
    rows[::100] *= 50  # far from all of them
    expected = cdist(rows.astype(float), points.astype(float)).argmin(axis=1)
    np.testing.assert_array_equal(nearest_point(rows, points), expected)


@pytest.mark.parametrize("quality", ["right", "random", "one for all"])
def test_the_answer_does_not_depend_on_what_is_thought_to_be_near(quality):
    rows, points = clusters(1, 2000, 200, 10, 5)
    expected = cdist(rows.astype(float), points.astype(float)).argmin(axis=1)
    random = np.random.default_rng(2).integers(0, 200, 2000)
    near = {"right": expected, "random": random, "one for all": np.zeros(2000, int)}[quality]
    np.testing.assert_array_equal(nearest_point(rows, points, near), expected)


def test_equally_near_points_on_a_grid():
    """Integers are exact in float32: most rows have several nearest points, and some points are twins."""
    rng = np.random.default_rng(3)
    rows, points = (rng.integers(-4, 5, (n, 3)).astype(np.float32) for n in (4000, 250))
    squares = cdist(rows.astype(float), points.astype(float), "sqeuclidean")
    assert ((squares == squares.min(axis=1, keepdims=True)).sum(axis=1) > 1).mean() > 0.5
    assert compared(rows, points) < assignment._WORTH
    np.testing.assert_array_equal(nearest_point(rows, points), squares.argmin(axis=1))


def test_a_row_halfway_to_a_point_that_is_just_not_left_out():
    """‖c − g‖ = 2‖x − g‖ for many c, some before g: the bound itself must not exclude them."""
    steps = np.arange(-100, 101, dtype=np.float32)[:, None]
    rows = steps[:-1] + np.float32(0.5)  # between two points each
    np.testing.assert_array_equal(nearest_point(rows, steps), np.arange(200))
    np.testing.assert_array_equal(nearest_point(rows, steps, np.arange(1, 201)), np.arange(200))


def test_few_are_compared_where_there_are_clusters_and_all_where_there_are_none():
    rows, points = clusters(4, 5000, 400, 30, 8)
    owner = nearest_point(rows, points)
    assert compared(rows, points, owner) < 0.15  # a tenth of the points are in the row's cluster
    assert compared(rows, points) < 0.15
    rows, points = clusters(5, 1000, 400, 100, 0)
    assert compared(rows, points) == 1.0


def test_in_blocks(monkeypatch):
    rows, points = clusters(6, 1500, 150, 12, 4)
    expected = nearest_point(rows, points)
    monkeypatch.setattr(assignment, "_BLOCK_VALUES", 1000)
    np.testing.assert_array_equal(nearest_point(rows, points), expected)


def test_groups_are_the_positions_in_order():
    owner = np.array([2, 0, 2, 4, 0])
    assert [group.tolist() for group in groups(owner, 6)] == [[1, 4], [], [0, 2], [], [3], []]
