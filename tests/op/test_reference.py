"""The numpy reference against textbook Gaussian process regression, computed another way."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from scipy.spatial.distance import cdist

from gapa_onnx.op import reference
from gapa_onnx.op.contract import SCHEMAS


def textbook_share(z, points, length_scale, jitter):
    """Posterior over prior variance of a noisy GP at z, by a general solve of the full system."""
    gram = np.exp(-cdist(points, points, "sqeuclidean") / (2 * length_scale**2))
    to_z = np.exp(-cdist(points, z[None], "sqeuclidean")[:, 0] / (2 * length_scale**2))
    return 1 - to_z @ scipy.linalg.solve(gram + jitter * np.eye(len(points)), to_z)


def test_one_inducing_point_by_hand():
    """s = 1 − r²/(1 + ε), r = exp(−(z − a)²/2ℓ²)."""
    a, z, length, jitter = 0.5, 2.0, 1.5, 1e-3
    r = np.exp(-((z - a) ** 2) / (2 * length**2))
    s = reference.unexplained_share(np.array([[z]]), np.array([[a]]), np.array([[0]]), length, jitter)
    assert s == pytest.approx([1 - r**2 / (1 + jitter)], rel=1e-14)


def test_two_inducing_points_by_hand():
    """The 2×2 inverse written out: kᵀA⁻¹k = (e(p² + q²) − 2gpq)/(e² − g²), e = 1 + ε."""
    a, b, z, length, jitter = -1.0, 0.7, 0.2, 0.8, 1e-4
    r = lambda x, y: np.exp(-((x - y) ** 2) / (2 * length**2))  # noqa: E731
    p, q, g, e = r(z, a), r(z, b), r(a, b), 1 + jitter
    expected = 1 - (e * (p * p + q * q) - 2 * g * p * q) / (e * e - g * g)
    s = reference.unexplained_share(np.array([[z]]), np.array([[a], [b]]), np.array([[1, 0]]), length, jitter)
    assert s == pytest.approx([expected], rel=1e-13)


@pytest.mark.parametrize("d, length_scale", [(1, 1.0), (3, 2.0), (20, 5.0)])
def test_share_is_the_textbook_posterior(d, length_scale):
    rng = np.random.default_rng(d)
    points, queries = rng.normal(size=(12, d)), rng.normal(size=(40, d))
    ids = np.tile(np.arange(12), (40, 1))
    s = reference.unexplained_share(queries, points, ids, length_scale, 1e-4)
    expected = [textbook_share(z, points, length_scale, 1e-4) for z in queries]
    # Round-off of a solve: condition number ≤ (12 + jitter)/jitter ≈ 1e5, times 1e-16.
    np.testing.assert_allclose(s, expected, rtol=0, atol=1e-10)


def test_missing_neighbours_are_left_out():
    rng = np.random.default_rng(1)
    points, queries = rng.normal(size=(9, 4)), rng.normal(size=(30, 4))
    ids = np.array([rng.permutation(9)[:6] for _ in range(30)])
    padded = np.insert(ids, [0, 3, 6], -1, axis=1)
    np.testing.assert_allclose(
        reference.unexplained_share(queries, points, padded, 1.5, 1e-5),
        reference.unexplained_share(queries, points, ids, 1.5, 1e-5),
        atol=1e-11,
    )
    none = reference.unexplained_share(queries, points, np.full((30, 3), -1), 1.5, 1e-5)
    np.testing.assert_array_equal(none, 1.0)


def test_fewer_neighbours_never_lower_s():
    rng = np.random.default_rng(2)
    points, queries = rng.normal(size=(200, 5)), rng.normal(size=(300, 5))
    ids = reference.nearest(queries, points, 30)
    counts = (1, 2, 5, 10, 20, 30)
    shares = [reference.unexplained_share(queries, points, ids[:, :k], 1.5, 1e-6) for k in counts]
    for fewer, more in zip(shares, shares[1:]):
        assert (fewer >= more - 1e-9).all()
    subset = np.take_along_axis(ids, rng.permuted(np.tile(np.arange(30), (300, 1)), axis=1)[:, :15], axis=1)
    assert (reference.unexplained_share(queries, points, subset, 1.5, 1e-6) >= shares[-1] - 1e-9).all()


def test_limits():
    rng = np.random.default_rng(3)
    points = rng.normal(size=(50, 6)).astype(np.float32)
    at = reference.unexplained_share(points, points, reference.nearest(points, points, 5), 1.0, 1e-6)
    # At an inducing point 0 ≤ s ≤ jitter, since one point alone leaves 1 − 1/(1 + jitter).
    assert (at >= 0).all() and (at <= 1e-6).all()
    far = np.array([[1e4] * 6, [3e38] * 6], np.float32)
    np.testing.assert_array_equal(
        reference.unexplained_share(far, points, reference.nearest(far, points, 5), 1.0, 1e-6), 1.0
    )
    bad = np.zeros((3, 6))
    bad[0, 2], bad[1, 0], bad[2, 5] = np.nan, np.inf, -np.inf
    assert np.isnan(reference.unexplained_share(bad, points, np.zeros((3, 1), int), 1.0, 1e-6)).all()


def test_s_does_not_depend_on_where_the_origin_is():
    rng = np.random.default_rng(4)
    points, queries = rng.integers(-8, 8, (60, 3)).astype(float), rng.integers(-8, 8, (40, 3)) + 0.25
    ids = reference.nearest(queries, points, 10)
    moved = 2.0**30  # a shift that float64 represents exactly for these numbers
    np.testing.assert_array_equal(reference.nearest(queries + moved, points + moved, 10), ids)
    np.testing.assert_array_equal(
        reference.unexplained_share(queries + moved, points + moved, ids, 3.0, 1e-6),
        reference.unexplained_share(queries, points, ids, 3.0, 1e-6),
    )


def test_nearest_is_sorted_by_distance_then_row(monkeypatch):
    rng = np.random.default_rng(5)
    points = rng.integers(0, 4, (150, 2)).astype(np.float32)  # a small grid: most distances are tied
    queries = rng.integers(0, 4, (60, 2)).astype(np.float32)
    squares = cdist(queries.astype(float), points.astype(float), "sqeuclidean")
    expected = np.lexsort((np.broadcast_to(np.arange(150), squares.shape), squares), axis=1)
    for k in (1, 7, 150):
        np.testing.assert_array_equal(reference.nearest(queries, points, k), expected[:, :k])
    monkeypatch.setattr(reference, "_CHUNK", 64)  # chunks smaller than one row must give the same
    np.testing.assert_array_equal(reference.nearest(queries, points, 7), expected[:, :7])
    with pytest.raises(ValueError):
        reference.nearest(queries, points, 151)


def lists_index(rng, m=300, d=6, lists=12, k=8, nprobe=3):
    """Tensors of an ivf and ivfpq index with arbitrary lists, some of them empty."""
    offsets = np.sort(np.concatenate([[0, 0, m], rng.integers(0, m + 1, lists - 2)])).astype(np.int64)
    points = rng.normal(size=(m, d)).astype(np.float32)
    return {
        "k": np.array([k]),
        "length_scale": np.float32(1.5),
        "jitter": np.float32(1e-6),
        "points": points,
        "neighbourhoods": reference.nearest(points, points, k + 2).astype(np.int32),
        "codes": rng.integers(0, 256, (m, 3)).astype(np.uint8),
        "codebooks": rng.normal(size=(3, 256, d // 3)).astype(np.float32),
        "centroids": rng.normal(size=(lists, d)).astype(np.float32),
        "list_offsets": offsets,
        "nprobe": np.array([nprobe]),
    }


@pytest.mark.parametrize("kind", ["ivf", "ivfpq"])
def test_lists_restrict_the_search_to_the_probed_rows(kind):
    rng = np.random.default_rng(6)
    t = lists_index(rng)
    queries = rng.normal(size=(50, 6)).astype(np.float32)
    s, ids = reference.evaluate(kind, t, queries)
    points = t["points"] if kind == "ivf" else np.empty((300, 6), np.float32)
    for row in range(300):  # the list and the point of every row, by definition
        own = next(i for i in range(12) if t["list_offsets"][i] <= row < t["list_offsets"][i + 1])
        if kind == "ivfpq":
            parts = [t["codebooks"][j, t["codes"][row, j]] for j in range(3)]
            points[row] = np.concatenate(parts) + t["centroids"][own]
    for z, share, found in zip(queries, s, ids):
        probed = np.argsort(cdist(z[None], t["centroids"])[0])[:3]
        rows = [r for i in probed for r in range(t["list_offsets"][i], t["list_offsets"][i + 1])]
        rows = sorted(rows, key=lambda r: np.sum((z.astype(float) - points[r]) ** 2))[:8]
        assert list(found) == rows + [-1] * (8 - len(rows))
        near = points[rows].astype(float)
        expected = textbook_share(z.astype(float), near, 1.5, np.float32(1e-6)) if rows else 1.0
        assert share[0] == pytest.approx(np.clip(expected, 0, 1), abs=1e-8)


def test_all_lists_probed_is_flat():
    rng = np.random.default_rng(7)
    t = lists_index(rng, nprobe=12)
    queries = rng.normal(size=(20, 6)).astype(np.float32)
    for mine, flat in zip(reference.evaluate("ivf", t, queries), reference.evaluate("flat", t, queries)):
        np.testing.assert_array_equal(mine, flat)


@pytest.mark.parametrize("leading", [(), (7,), (2, 3), (0,), (2, 0)])
def test_shapes(leading):
    t = lists_index(np.random.default_rng(8))
    for kind in SCHEMAS:
        s, ids = reference.evaluate(kind, t, np.zeros((*leading, 6), np.float32))
        assert s.shape == (*leading, 1) and ids.shape == (*leading, 8)


def test_queries_that_are_not_finite_have_no_neighbours():
    t = lists_index(np.random.default_rng(9))
    queries = np.zeros((3, 6), np.float32)
    queries[1, 0], queries[2, 3] = np.nan, np.inf
    for kind in SCHEMAS:
        s, ids = reference.evaluate(kind, t, queries)
        np.testing.assert_array_equal(np.isnan(s[:, 0]), [False, True, True])
        assert (ids[1:] == -1).all() and ids[0, 0] >= 0


def test_unknown_kind():
    with pytest.raises(ValueError, match="no such index kind"):
        reference.evaluate("kdtree", lists_index(np.random.default_rng(0)), np.zeros((1, 6)))
