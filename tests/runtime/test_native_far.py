"""Neighbours that are very far, and length scales that are very small: s is what float64 says, not a safe 1.

Where points lie together at 1e10, the squares that distances are made of are 1e20, and what cancellation leaves of a
distance of 1000 is off by 100 or more. Such points explain nothing of a query near the origin, and must not be in the way of
those that do.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import native_models
from support.native_models import D, K, inducing_points, model, session, squared_distances

from gapa_onnx.op.reference import unexplained_share

pytestmark = pytest.mark.skipif(native_models.LIBRARY is None, reason="the native library is missing")

NEAR = 4  # points around each query, fewer than K


def clustered(
    kind: str, unit: float, away: float, length_scale: float, seed: int = 3
) -> dict[str, np.ndarray]:
    """An operator whose first points lie around the origin and all others together, far away."""
    given, rng = native_models.tensors(kind, seed), np.random.default_rng(seed)
    count = len(given["points"])
    points = (rng.standard_normal((count, D)) * unit).astype(np.float32)
    points[NEAR:] = (away + rng.integers(-3, 4, (count - NEAR, D)) * unit).astype(np.float32)
    given |= {"points": points, "length_scale": np.array(length_scale, np.float32)}
    if kind == "local":
        near = np.argsort(squared_distances(points, points), axis=1, kind="stable")[:, : K + 3]
        lists = len(given["centroids"])
        offsets = np.linspace(0, count, lists + 1).astype(np.int64)
        centroids = np.stack([points[a:b].mean(axis=0) for a, b in zip(offsets, offsets[1:])])
        given |= {"neighbourhoods": near.astype(np.int32), "centroids": centroids, "list_offsets": offsets,
                  "nprobe": np.array([lists], np.int64)}  # fmt: skip
    return given


@pytest.mark.parametrize("kind", ["flat", "local"])
@pytest.mark.parametrize(
    ("unit", "away", "length_scale"),
    [(1e3, 1e10, 1e5), (1e-33, 1e-26, 1e-31), (1e3, 1e15, 1e5), (1.0, 1e7, 1e2), (1.0, 0.0, 2.0)],
)
def test_shares_beside_far_points(kind: str, unit: float, away: float, length_scale: float) -> None:
    given = clustered(kind, unit, away, length_scale)
    points = inducing_points(given)
    rng = np.random.default_rng(9)
    queries = points[:NEAR].astype(np.float64) + 1e-4 * unit * rng.standard_normal((NEAR, D))
    queries = queries.astype(np.float32)
    s, ids = session(model(kind, given)).run(None, {"query": queries})
    expected = unexplained_share(queries, points, ids, float(given["length_scale"]), float(given["jitter"]))
    assert expected.max() < 1e-4  # there is something to lose
    np.testing.assert_allclose(s[:, 0], expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("width", [64, 512, 4096])
def test_one_inducing_point_however_wide(width: int) -> None:
    point = np.random.default_rng(1).standard_normal((1, width)).astype(np.float32)
    given = {"k": np.array([1], np.int64), "length_scale": np.array(50.0, np.float32),
             "jitter": np.array(1e-6, np.float32), "points": point}  # fmt: skip
    s, ids = session(model("flat", given, ("n", width))).run(
        None, {"query": np.concatenate([point, point + 1])}
    )
    expected = unexplained_share(np.concatenate([point, point + 1]), point, ids, 50.0, 1e-6)
    assert ids.tolist() == [[0], [0]]
    np.testing.assert_allclose(s[:, 0], expected, rtol=1e-4, atol=1e-9)
