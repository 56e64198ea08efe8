"""Inducing points against naive loops, scikit-learn, and themselves under another number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from sklearn.cluster import KMeans
from support.paths import ROOT

from gapa_onnx.errors import UserError
from gapa_onnx.fit import inducing
from gapa_onnx.fit.inducing import METHODS, cluster_sizes, select
from gapa_onnx.op import assignment


def blobs(seed, m, d, centres, spread):
    generator = np.random.default_rng(seed)
    places = generator.normal(size=(centres, d)) * spread
    return (places[generator.integers(0, centres, m)] + generator.normal(size=(m, d))).astype(np.float32)


def inertia(rows, points):
    rows, points = rows.astype(np.float64), points.astype(np.float64)
    parts = (rows[i : i + 200, None] for i in range(0, len(rows), 200))
    return sum(((part - points) ** 2).sum(axis=2).min(axis=1).sum() for part in parts)


def as_set(rows):
    return {tuple(row) for row in rows.tolist()}


# ---- what holds for every method


@pytest.mark.parametrize("method", METHODS)
def test_few_distinct_rows_are_all_returned_once_in_order(method):
    distinct = np.array([[1, 2], [0, 0], [3, -1]], np.float32)
    rows = distinct[[0, 1, 1, 0, 2, 1]]
    rows[2] = -0.0  # equals 0
    np.testing.assert_array_equal(select(method, rows, 3), distinct)
    np.testing.assert_array_equal(select(method, rows, 100), distinct)


@pytest.mark.parametrize("method", METHODS)
def test_points_are_distinct_float32_and_repeatable(method):
    rows = np.random.default_rng(0).integers(-2, 3, (500, 3)).astype(np.float32)  # at most 125 distinct
    points = select(method, rows, 60, seed=1)
    assert points.dtype == np.float32
    assert len(as_set(points)) == len(points) == (len(as_set(rows)) if method == "all" else 60)
    assert select(method, rows, 60, seed=1).tobytes() == points.tobytes()
    if method != "kmeans":
        assert as_set(points) <= as_set(rows)


@pytest.mark.parametrize("method", ["kmeans", "random"])
def test_the_seed_matters(method):
    rows = blobs(1, 400, 3, 400, 1)
    assert select(method, rows, 20, seed=1).tobytes() != select(method, rows, 20, seed=2).tobytes()


@pytest.mark.parametrize("method", METHODS)
def test_extreme_values_neither_overflow_nor_vanish(method):
    rows = blobs(2, 300, 4, 20, 5)
    for scale in (2.0**100, 2.0**-100):  # squares leave the range of float32
        scaled = rows * np.float32(scale)
        expected = select(method, rows, 10) * np.float32(scale)
        np.testing.assert_array_equal(select(method, scaled, 10), expected)


def test_wrong_arguments():
    rows = np.zeros((3, 2), np.float32)
    with pytest.raises(UserError, match="no inducing point method 'kmean'"):
        select("kmean", rows, 3)
    with pytest.raises(UserError, match="0 inducing points"):
        select("fps", rows, 0)
    assert len(select("all", rows, 0)) == 1


@pytest.mark.parametrize("method", METHODS)
def test_progress_rises_to_one(method):
    seen = []
    select(method, blobs(3, 300, 2, 300, 1), 20, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0 and seen[0] > 0
    assert len(seen) > 10 or method in ("random", "all")


# ---- distinct rows


def test_distinct_rows_against_a_dictionary():
    rows = np.random.default_rng(4).integers(0, 4, (3000, 5)).astype(np.float32)
    first = {}
    for i, row in enumerate(rows.tolist()):
        first.setdefault(tuple(row), i)
    np.testing.assert_array_equal(inducing.distinct_rows(rows), sorted(first.values()))


def test_a_hash_collision_loses_no_row(monkeypatch):
    class Constant:
        def integers(self, low, high, size, dtype):
            return np.full(size, 2**62, dtype)  # weights 2⁶³ + 1, all equal: permuted rows collide

    monkeypatch.setattr(inducing.np.random, "default_rng", lambda seed: Constant())
    rows = np.array([[1, 2], [2, 1], [1, 2]], np.float32)
    np.testing.assert_array_equal(inducing.distinct_rows(rows), [0, 1])


# ---- farthest first


def naive_farthest_first(rows, count):
    rows = rows.astype(np.float64)
    chosen = [int(((rows - rows.mean(axis=0)) ** 2).sum(axis=1).argmin())]
    while len(chosen) < count:
        gaps = [min(((row - rows[c]) ** 2).sum() for c in chosen) for row in rows]
        chosen.append(gaps.index(max(gaps)))
    return chosen


def test_farthest_first_against_a_naive_loop_with_ties():
    # small integers: float32 squares are exact, and a grid is full of equal distances
    rows = (
        np.random.default_rng(5)
        .permutation(np.stack(np.meshgrid(*[np.arange(5)] * 3), axis=-1).reshape(-1, 3))
        .astype(np.float32)
    )
    np.testing.assert_array_equal(select("fps", rows, 40), rows[naive_farthest_first(rows, 40)])


def test_farthest_first_at_an_offset():
    rows = np.random.default_rng(6).integers(0, 60, (200, 4)).astype(np.float32)
    rows = rows[inducing.distinct_rows(rows)]
    far = rows + np.float32(1e6)  # still exact
    np.testing.assert_array_equal(select("fps", far, 30), far[naive_farthest_first(far, 30)])


def test_farthest_first_covers_within_twice_the_best_radius():
    rows = blobs(7, 400, 2, 12, 30)
    points = select("fps", rows, 12)
    radius = np.sqrt(((rows[:, None].astype(float) - points) ** 2).sum(axis=2).min(axis=1).max())
    assert radius < 2 * 5  # no row of a blob is 5 standard deviations from its centre


# ---- random


def test_random_rows_keep_their_order():
    rows = np.arange(100, dtype=np.float32)[:, None]
    points = select("random", rows, 30, seed=3)
    assert (np.diff(points[:, 0]) > 0).all() and len(points) == 30


# ---- k-means


@pytest.mark.parametrize(
    "m, d, centres, spread, count, offset",
    [
        (3000, 8, 20, 10, 20, 0),  # separated blobs, one centroid each
        (3000, 8, 60, 3, 40, 0),  # fewer centroids than blobs
        (4000, 16, 5, 1, 50, 0),  # more centroids than blobs
        (3000, 8, 20, 10, 20, 3000),  # the same as the first, far from the origin
    ],
)
def test_inertia_is_near_that_of_scikit_learn(m, d, centres, spread, count, offset):
    rows = blobs(8, m, d, centres, spread) + np.float32(offset)
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    other = KMeans(count, n_init=1, random_state=0).fit(centred).inertia_
    assert inertia(rows, select("kmeans", rows, count, seed=0)) < 1.05 * other


def test_centroids_are_the_means_of_their_rows():
    rows = blobs(9, 2000, 6, 10, 20) + np.float32(50)
    points = select("kmeans", rows, 10).astype(np.float64)
    owner = ((rows[:, None] - points) ** 2).sum(axis=2).argmin(axis=1)
    means = np.stack([rows[owner == c].astype(np.float64).mean(axis=0) for c in range(10)])
    # separated blobs converge: what is left is rounding of the working rows (at most 100) and of the result
    np.testing.assert_allclose(points, means, atol=2 * 100 * 2**-24, rtol=0)


def test_many_repeated_rows_do_not_starve_the_seeding():
    rows = np.zeros((20_000, 3), np.float32)
    rows[::100] = np.random.default_rng(10).normal(size=(200, 3))
    points = select("kmeans", rows, 150)
    assert len(points) == 150
    assert inertia(rows, points) < 0.1 * inertia(rows, select("random", rows, 15))


def test_training_and_seeding_rows_are_bounded(monkeypatch):
    sizes = {}

    def watched(name, step):
        def call(rows, *rest):
            sizes[name] = len(rows)
            return step(rows, *rest)

        return call

    for name in ("_seeds", "_lloyd"):
        monkeypatch.setattr(inducing, name, watched(name, getattr(inducing, name)))
    select("kmeans", np.random.default_rng(11).normal(size=(5000, 2)).astype(np.float32), 10)
    assert sizes == {"_seeds": 160, "_lloyd": 2560}


def test_seeding_effort_shrinks_to_the_budget():
    assert inducing._seeding_effort(64_000, 64, 250) == (4000, 7)
    assert inducing._seeding_effort(256_000, 64, 1000) == (16_000, 8)
    assert inducing._seeding_effort(256_000, 200, 1000) == (16_000, 3)
    assert inducing._seeding_effort(256_000, 64, 10_000) == (80_000, 1)


def test_assignment_is_exact_where_float32_products_are_not():
    generator = np.random.default_rng(12)
    # two tight groups far apart: ‖x‖² is 10⁸ times the squared distances that decide
    centroids, rows = (
        (generator.normal(size=(n, 5)) * 1e-4 + generator.choice([-1.0, 1.0], (n, 1))).astype(np.float32)
        for n in (40, 3000)
    )
    squares = ((rows[:, None].astype(np.float64) - centroids) ** 2).sum(axis=2)
    plain = (rows @ centroids.T - (centroids**2).sum(axis=1) / 2).argmax(axis=1)
    assert (plain != squares.argmin(axis=1)).mean() > 0.01
    np.testing.assert_array_equal(assignment.nearest_point(rows, centroids), squares.argmin(axis=1))


def test_assignment_of_equal_distances_goes_to_the_first():
    centroids = np.array([[1, 0], [-1, 0], [0, 1], [0, 1]], np.float32)
    rows = np.array([[0, 0], [-1, 1], [-2, 0], [0, 2]], np.float32)
    np.testing.assert_array_equal(assignment.nearest_point(rows, centroids), [0, 1, 1, 2])


_DIGEST = """
import hashlib, numpy as np
from gapa_onnx.fit.inducing import cluster_sizes, select
generator = np.random.default_rng(0)
for m, d, count in ((6001, 200, 100), (4097, 64, 10), (1500, 784, 60)):
    groups = generator.choice([-1.0, 1.0], (m, 1))  # tight and far apart: products lose most digits
    rows = (generator.normal(size=(m, d)) * 1e-3 + groups).astype(np.float32)
    for method in ("kmeans", "fps"):
        print(m, d, method, hashlib.sha256(select(method, rows, count).tobytes()).hexdigest())
"""


def test_points_do_not_depend_on_the_number_of_threads():
    # on these shapes one and two threads were seen to round matrix products differently
    answers = []
    for threads in "12":
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = os.environ | dict.fromkeys(names, threads) | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _DIGEST]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        answers.append(finished.stdout)
    assert answers[0] == answers[1] and answers[0].count("\n") == 6


def test_cluster_sizes_count_the_nearest_rows():
    rows = 1000 + blobs(4, 200, 3, 5, 1)
    points = select("kmeans", rows, 9)
    nearest = ((rows[:, None].astype(float) - points) ** 2).sum(axis=2).argmin(axis=1)
    np.testing.assert_array_equal(cluster_sizes(rows, points), np.bincount(nearest, minlength=len(points)))


# ---- what is left out changes nothing


@pytest.mark.parametrize("d", [8, 40, 64])
def test_seeds_are_those_of_comparing_every_row(d):
    """Draws and choices of a plain loop over all rows, to the bit: rows that are left out could not have changed."""
    rows = blobs(13, 1500, d, 12, 6) / np.float32(64)
    generator = np.random.default_rng(14)
    seeds = [int(generator.integers(len(rows)))]
    squares = inducing._squared_distances(rows, rows[seeds[0]])
    while len(seeds) < 60:
        mass = np.cumsum(squares, dtype=np.float64)
        drawn = np.searchsorted(mass, generator.random(3) * mass[-1], side="right")
        lowered = [np.minimum(squares, inducing._squared_distances(rows, rows[row])) for row in drawn]
        best = int(np.argmin([each.sum(dtype=np.float64) for each in lowered]))
        squares = lowered[best]
        seeds.append(int(drawn[best]))
    found = inducing._seeds(rows, 60, 3, np.random.default_rng(14), lambda done: None)
    np.testing.assert_array_equal(found, rows[seeds])


def test_most_rows_are_not_asked_about_a_seed_in_another_cluster(monkeypatch):
    asked = []
    whole = inducing.faiss.fvec_L2sqr_by_idx
    monkeypatch.setattr(
        inducing.faiss, "fvec_L2sqr_by_idx", lambda *given: asked.append(given[-1]) or whole(*given)
    )
    inducing._seeds(blobs(15, 2000, 40, 10, 8), 100, 2, np.random.default_rng(0), lambda done: None)
    assert np.mean(asked[40:]) < 0.2 * 2000  # once each of ten clusters has a seed, a tenth of the rows


def test_cluster_sums_are_added_in_row_order():
    rows, owner = blobs(16, 900, 7, 5, 3), np.random.default_rng(17).integers(0, 19, 900)
    expected = np.zeros((20, 7))
    for row, cluster in zip(rows, owner):
        expected[cluster] += row
    sums, sizes = inducing._cluster_sums(rows, owner, 20)
    np.testing.assert_array_equal(sums, expected)
    np.testing.assert_array_equal(sizes, np.bincount(owner, minlength=20))


def test_training_on_a_part_first_costs_no_inertia(monkeypatch):
    rows = blobs(18, 12_000, 10, 30, 2)
    stages = []
    lloyd = inducing._lloyd
    monkeypatch.setattr(
        inducing, "_lloyd", lambda part, *rest: stages.append(len(part)) or lloyd(part, *rest)
    )
    in_parts = [inertia(rows, select("kmeans", rows, 60, seed=seed)) for seed in range(5)]
    monkeypatch.setattr(inducing, "_PART_ROWS", 10**6)
    at_once = [inertia(rows, select("kmeans", rows, 60, seed=seed)) for seed in range(5)]
    assert stages == [64 * 60, 12_000] * 5 + [12_000] * 5
    # seeds differ by 0.5 to 1 percent among themselves, so the means of five by 0.3 to 0.6
    assert np.mean(in_parts) < 1.01 * np.mean(at_once)


def test_cluster_sizes_of_extreme_values():
    rows = blobs(19, 500, 4, 20, 5)
    points = select("kmeans", rows, 80)
    for scale in (np.float32(2.0**100), np.float32(2.0**-100)):
        np.testing.assert_array_equal(
            cluster_sizes(rows * scale, points * scale), cluster_sizes(rows, points)
        )
