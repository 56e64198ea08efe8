"""Streaming statistics against the same figures computed from all the data at once."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy.stats import chi2

from gapa_onnx.errors import UserError
from gapa_onnx.fit.geometry import whitening
from gapa_onnx.fit.statistics import (
    QUANTILES,
    finite_rows,
    leave_one_out_share,
    median_distance,
    quantile_table,
)
from gapa_onnx.fit.streams import Moments, RowSample, drawing

U64 = np.finfo(np.float64).eps / 2


def cuts(rows, sizes):
    """The rows in batches whose sizes go round in `sizes`."""
    start, turn = 0, 0
    while start < len(rows):
        yield rows[start : start + sizes[turn % len(sizes)]]
        start += sizes[turn % len(sizes)]
        turn += 1


def streamed(target, rows, sizes):
    for batch in cuts(rows, sizes):
        target.add(batch)
    return target


# ---- moments


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_moments_equal_those_of_the_whole_data(offset):
    rows = offset + np.random.default_rng(0).normal(size=(5000, 7)) * np.arange(1, 8)
    moments = streamed(Moments(7, covariance=True), rows, [1, 999, 64])
    deviation = rows.astype(np.longdouble) - rows.astype(np.longdouble).mean(axis=0)
    covariance = (deviation.T @ deviation / len(rows)).astype(np.float64)
    # A block's mean is off by up to 1024 u·offset; that shift enters the scatter only squared, and the
    # shift between block means with a factor of their own small difference.
    error = 1024 * U64 * (offset + 10)
    spread = np.sqrt(np.diagonal(covariance))
    assert moments.count == 5000
    mean = rows.mean(axis=0, dtype=np.longdouble).astype(float)
    np.testing.assert_allclose(moments.mean, mean, atol=error, rtol=0)
    tolerance = 2 * error * spread.max() + 1e-12 * 49
    np.testing.assert_allclose(moments.covariance, covariance, atol=tolerance, rtol=0)
    np.testing.assert_allclose(moments.std, spread, rtol=2 * error + 1e-12)
    diagonal = streamed(Moments(7), rows, [5000])
    np.testing.assert_allclose(diagonal.std, moments.std, rtol=1e-12)


def test_a_plain_sum_of_squares_would_fail_the_offset_case():
    rows = 1e8 + np.random.default_rng(0).normal(size=(5000, 1))
    naive = np.sqrt(abs((rows**2).mean() - rows.mean() ** 2))
    assert abs(naive - rows.std()) > 0.1
    assert abs(streamed(Moments(1), rows, [100]).std[0] - rows.std()) < 1e-6


@pytest.mark.parametrize("covariance", [False, True])
def test_moments_do_not_depend_on_the_batches(covariance):
    rows = np.random.default_rng(1).normal(size=(3001, 5)).astype(np.float32) + 100
    whole = streamed(Moments(5, covariance), rows, [3001])
    for sizes in ([1], [1024], [7, 0, 1500]):
        moments = Moments(5, covariance)
        for batch in cuts(rows, sizes):
            moments.add(batch)
            _ = moments.mean, moments.std  # reading in between leaves no trace
        assert moments.mean.tobytes() == whole.mean.tobytes()
        assert moments.std.tobytes() == whole.std.tobytes()


def test_moments_of_float32_rows_of_many_neurons():
    rows = np.random.default_rng(2).normal(size=(9, 300_000)).astype(np.float32)  # blocks of 3 rows
    moments = streamed(Moments(300_000), rows, [4])
    np.testing.assert_allclose(moments.std, rows.astype(float).std(axis=0), rtol=1e-12)


def test_moments_without_rows_or_covariance_say_so():
    with pytest.raises(ValueError, match="no rows"):
        Moments(3).mean
    moments = streamed(Moments(3), np.ones((2, 3)), [2])
    assert (moments.std == 0).all()
    with pytest.raises(ValueError, match="covariance=True"):
        moments.covariance


# ---- the row sample


def numbered(n, d=2):
    return np.repeat(np.arange(n, dtype=np.float32)[:, None], d, axis=1)


def test_a_short_stream_is_kept_whole_and_in_order():
    sample = streamed(RowSample(100, 2, seed=0), numbered(100), [33])
    assert sample.seen == 100
    np.testing.assert_array_equal(sample.rows, numbered(100))
    assert sample.rows.dtype == np.float32


@pytest.mark.parametrize("capacity", [1, 3, 64, 1000])
def test_the_sample_does_not_depend_on_the_batches(capacity):
    rows = numbered(5003)
    expected = streamed(RowSample(capacity, 2, seed=5), rows, [5003]).rows
    keys = drawing(5, 0).random(5003)
    np.testing.assert_array_equal(expected[:, 0], np.sort(np.argsort(keys)[:capacity]))
    for sizes in ([1], [256], [1, 2000, 13]):
        sample = RowSample(capacity, 2, seed=5)
        for batch in cuts(rows, sizes):
            sample.add(batch)
            if sample.seen % 5 == 0:
                _ = sample.rows  # reading in between leaves no trace
        assert sample.rows.tobytes() == expected.tobytes()
        assert sample.seen == 5003


def test_every_row_is_equally_likely():
    n, capacity, runs = 40, 10, 3000
    counts = np.zeros(n)
    for seed in range(runs):
        counts[streamed(RowSample(capacity, 1, seed), numbered(n, 1), [7]).rows[:, 0].astype(int)] += 1
    p = capacity / n
    # counts of a sample without replacement: variance runs·p(1−p), any two correlated by −1/(n−1)
    statistic = ((counts - runs * p) ** 2).sum() / (runs * p * (1 - p)) * (n - 1) / n
    assert chi2.ppf(1e-4, n - 1) < statistic < chi2.ppf(1 - 1e-4, n - 1)


def test_the_sample_takes_bounded_memory():
    capacity, d = 40_000, 64
    for size, batches in ((500, 300), (100_000, 2)):
        batch = np.zeros((size, d), np.float32)
        tracemalloc.start()
        sample = RowSample(capacity, d, seed=0)
        for _ in range(batches):
            sample.add(batch)
        _ = sample.rows
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # 1.25 capacity and a copy of the sample, a slice of 1 MB, and the keys
        assert peak < 2.25 * capacity * d * 4 + 2**20 + 8 * (3 * capacity + size)


def test_a_large_capacity_costs_nothing_until_it_is_used():
    sample = streamed(RowSample(10**12, 3, seed=0), numbered(10, 3), [3])
    np.testing.assert_array_equal(sample.rows, numbered(10, 3))


# ---- median distance


def all_distances(rows):
    rows = rows.astype(np.longdouble)
    return np.array([np.sqrt(((a - b) ** 2).sum()) for i, a in enumerate(rows) for b in rows[i + 1 :]])


@pytest.mark.parametrize("offset", [0, 1e5])
def test_median_distance_of_few_rows_is_exact(offset):
    rows = (offset + np.random.default_rng(3).normal(size=(60, 5))).astype(np.float32)
    assert median_distance(rows) == pytest.approx(float(np.median(all_distances(rows))), rel=1e-14)


def test_median_distance_by_sampling():
    rows = np.random.default_rng(4).normal(size=(300, 3)).astype(np.float32)
    distances = all_distances(rows).astype(float)
    pairs = 20_000
    sampled = median_distance(rows, pairs, seed=1)
    assert sampled == median_distance(rows, pairs, seed=1) != median_distance(rows, pairs, seed=2)
    # the rank of a sample median is that of 1/2 ± 1/(2√pairs); five of these
    share = 5 / (2 * np.sqrt(pairs))
    assert np.quantile(distances, 0.5 - share) < sampled < np.quantile(distances, 0.5 + share)


def test_a_row_is_never_paired_with_itself():
    rows = np.eye(4, dtype=np.float32)  # every true pair is √2 apart, a row and itself 0
    for seed in range(50):  # a single pair each: a quarter would be a row and itself
        assert median_distance(rows, pairs=1, seed=seed) == pytest.approx(np.sqrt(2), rel=1e-15)


def test_median_distance_without_pairs_or_spread():
    assert median_distance(np.zeros((0, 3), np.float32)) == 0.0
    assert median_distance(np.ones((1, 3), np.float32)) == 0.0
    assert median_distance(np.ones((9, 3), np.float32)) == 0.0


@pytest.mark.parametrize("smaller", [1, 17, 60, 100])
def test_a_smaller_sample_of_the_same_stream(smaller):
    rows = np.random.default_rng(8).normal(size=(1000, 3)).astype(np.float32)
    large, small = RowSample(60, 3, seed=5), RowSample(min(smaller, 60), 3, seed=5)
    for part in cuts(rows, (7, 100, 1)):
        large.add(part)
        small.add(part)
    np.testing.assert_array_equal(large.smaller(smaller), small.rows)


# ---- whitening


def test_whitening_gives_unit_covariance():
    generator = np.random.default_rng(5)
    mix = generator.normal(size=(6, 6))
    z = generator.normal(size=(4000, 6)) @ mix + 10
    mean, covariance = z.mean(axis=0), np.cov(z.T, bias=True)
    w = whitening(mean, covariance, floor=0.0)
    assert w.dtype == np.float32 and w.shape == (6, 6)
    # W is rounded to float32: relative error u per entry, d entries per axis, magnified by the condition
    tolerance = 2 * 6 * 2**-24 * np.sqrt(np.linalg.cond(covariance))
    np.testing.assert_allclose(np.cov(((z - mean) @ w).T, bias=True), np.eye(6), atol=tolerance)
    peaks = np.take_along_axis(w, np.abs(w).argmax(axis=0)[None], axis=0)
    assert (peaks > 0).all()


def test_axes_below_the_floor_are_kept_at_the_floor():
    values = np.array([4.0, 1.0, 1e-3, 0.0])
    rotation = np.linalg.qr(np.random.default_rng(6).normal(size=(4, 4)))[0]
    covariance = rotation @ np.diag(values) @ rotation.T
    w = whitening(np.zeros(4), covariance, floor=1e-2).astype(float)
    np.testing.assert_allclose(w.T @ covariance @ w, np.diag([1, 1, 1e-3 / 4e-2, 0]), atol=1e-6)
    off_the_data = rotation[:, 3] @ w
    assert np.linalg.norm(off_the_data) == pytest.approx(1 / np.sqrt(4e-2), rel=1e-6)


def test_a_massive_axis_does_not_lift_the_floor():
    """One axis in 100 may be out of all proportion; where it is not, it counts."""
    values = np.concatenate([[1.0], np.linspace(1, 0.5, 199)])
    for massive, lowest in ((50.0, 50.0), (1e6, values[2])):
        values[0] = massive
        values[-1] = 1e-9
        w = whitening(np.zeros(200), np.diag(values), floor=1e-3).astype(float)
        assert np.linalg.norm(w[-1]) == pytest.approx(1 / np.sqrt(1e-3 * lowest), rel=1e-6)
        assert np.linalg.norm(w[0]) == pytest.approx(1 / np.sqrt(massive), rel=1e-6)


def test_the_floor_is_not_below_rounding():
    mean, eps = np.array([1e6, 0.0]), float(np.finfo(np.float32).eps)
    w = whitening(mean, np.diag([1.0, 1e-12]), floor=0.0)
    assert w.max() == pytest.approx(1 / (eps * 1e6), rel=1e-6)


def test_a_constant_layer_cannot_be_whitened():
    with pytest.raises(UserError, match="constant"):
        whitening(np.ones(3), np.zeros((3, 3)))


# ---- leave-one-out


def brute_share(row, points, k, length_scale, jitter):
    """s from the k nearest of the points, by a dense solve."""
    order = np.argsort(((points - row) ** 2).sum(axis=1), kind="stable")[:k]
    near = points[order]

    def kernel(a, b):
        return np.exp(-((a[:, None] - b[None]) ** 2).sum(axis=2) / (2 * length_scale**2))

    k_vector = kernel(near, row[None])[:, 0]
    s = 1 - k_vector @ np.linalg.solve(kernel(near, near) + jitter * np.eye(len(near)), k_vector)
    return min(max(s, 0.0), 1.0)


# The condition of G + jitter·I is at most k / jitter, and a solve loses about k·u times that.
def solve_tolerance(k, jitter):
    return 10 * k * U64 * k / jitter


@pytest.mark.parametrize("offset", [0.0, 500.0])
@pytest.mark.parametrize("k", [1, 8, 79, 200])
def test_leaving_out_equals_deleting_the_row(offset, k):
    points = (offset + np.random.default_rng(7).normal(size=(80, 4))).astype(np.float32)
    shares = leave_one_out_share(points, points, k, length_scale=1.5, jitter=1e-4)
    exact = points.astype(np.float64)
    expected = [brute_share(exact[i], np.delete(exact, i, axis=0), k, 1.5, 1e-4) for i in range(80)]
    np.testing.assert_allclose(shares, expected, atol=solve_tolerance(80, 1e-4), rtol=0)
    assert shares.min() > 1e-4  # with the row itself s is at most jitter / (1 + jitter)


def test_rows_that_are_no_inducing_point_use_them_all():
    generator = np.random.default_rng(8)
    points, rows = (generator.normal(size=(n, 3)).astype(np.float32) for n in (50, 20))
    shares = leave_one_out_share(rows, points, 10, 1.0, 1e-4)
    expected = [brute_share(r, points.astype(float), 10, 1.0, 1e-4) for r in rows.astype(float)]
    np.testing.assert_allclose(shares, expected, atol=solve_tolerance(10, 1e-4), rtol=0)


def test_a_point_within_rounding_of_the_row_is_left_out():
    generator = np.random.default_rng(9)
    rows = (100 + generator.normal(size=(30, 4))).astype(np.float32)
    points = np.nextafter(rows, np.float32(np.inf))
    shares = leave_one_out_share(rows, points, 5, 2.0, 1e-6)
    rest = [np.delete(points.astype(float), i, axis=0) for i in range(30)]
    expected = [brute_share(row.astype(float), others, 5, 2.0, 1e-6) for row, others in zip(rows, rest)]
    np.testing.assert_allclose(shares, expected, atol=solve_tolerance(5, 1e-6), rtol=0)
    assert shares.min() > 1e-5


def test_a_row_leaves_the_mean_that_it_is_part_of():
    generator = np.random.default_rng(11)
    places = 20 * generator.normal(size=(12, 3))
    owner = np.concatenate([np.arange(12), generator.integers(0, 11, 60)])  # the last cluster is one row
    rows = (places[owner] + generator.normal(size=(72, 3))).astype(np.float32)
    sizes = np.bincount(owner)
    means = np.stack([rows[owner == c].mean(axis=0, dtype=np.float64) for c in range(12)])
    nearest = ((rows[:, None].astype(float) - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == owner).all()  # the data are such that Lloyd's iteration has come to rest
    shares = leave_one_out_share(rows, means.astype(np.float32), 5, 15.0, 1e-4, sizes)
    for i, row in enumerate(rows.astype(float)):
        others = np.flatnonzero(np.arange(72) != i)
        without = [rows[others[owner[others] == c]].astype(float) for c in range(12)]
        left = np.stack([members.mean(axis=0) for members in without if len(members)])
        # The means are rounded to float32, which moves the kernel by at most its slope times the rounding.
        rounding = np.abs(means).max() * np.finfo(np.float32).eps / 15.0
        assert abs(shares[i] - brute_share(row, left, 5, 15.0, 1e-4)) <= 2 * 25 * rounding / 1e-4
    ignorant = leave_one_out_share(rows, means.astype(np.float32), 5, 15.0, 1e-4)
    assert (ignorant < shares)[sizes[owner] == 2].all()  # what it would be with the row in its mean


def test_nothing_left_explains_nothing():
    row = np.ones((1, 3), np.float32)
    assert leave_one_out_share(row, row, 5, 1.0, 1e-6) == [1.0]


def test_leave_one_out_in_chunks_and_of_bad_rows():
    generator = np.random.default_rng(10)
    points = generator.normal(size=(400, 600)).astype(np.float32)  # 4 Mi / (19 · 600) = 367 rows a chunk
    rows = np.concatenate([points, points[:1] * np.nan])
    shares = leave_one_out_share(rows, points, 10, 30.0, 1e-6)
    assert np.isnan(shares[-1])
    single = [leave_one_out_share(points[i : i + 1], points, 10, 30.0, 1e-6)[0] for i in (0, 366, 367, 399)]
    np.testing.assert_allclose(shares[[0, 366, 367, 399]], single, atol=solve_tolerance(10, 1e-6), rtol=0)


def test_the_thread_setting_of_faiss_is_restored():
    import faiss

    threads = faiss.omp_get_max_threads()
    row = np.ones((1, 3), np.float32)
    leave_one_out_share(row, row, 5, 1.0, 1e-6)
    assert faiss.omp_get_max_threads() == threads


# ---- the rest


def test_finite_rows():
    rows = np.array([[1, 2], [np.nan, 0], [0, np.inf], [-np.inf, np.nan], [0, 0]], np.float32)
    np.testing.assert_array_equal(finite_rows(rows), [True, False, False, False, True])


def test_quantiles_are_observed_values_and_never_low():
    values = np.random.default_rng(11).random(1234)
    table = quantile_table(values)
    assert list(table) == [str(q) for q in QUANTILES] and table.keys() >= {"0.95", "0.999"}
    for q in QUANTILES:
        value = table[str(q)]
        assert type(value) is float and value in values
        assert np.mean(values <= value) >= q
        assert np.sum((values < value) & (values >= np.quantile(values, q))) == 0  # the next observed one
    assert set(quantile_table(np.array([0.5])).values()) == {0.5}
    for bad in ([], [1.0, np.nan]):
        with pytest.raises(ValueError, match="finite"):
            quantile_table(np.array(bad))


def test_the_median_distance_of_rows_that_are_mostly_the_same():
    """Empty places of a map are all alike; the others tell the scale."""
    rows = np.zeros((30, 2), np.float32)
    rows[:3] = [[3, 4], [6, 8], [0, 1]]
    apart = [np.hypot(*(a - b)) for i, a in enumerate(rows) for b in rows[:i] if (a != b).any()]
    assert median_distance(rows) == np.median(apart) > 0
    assert median_distance(np.zeros((30, 2), np.float32)) == 0
