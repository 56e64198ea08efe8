"""The operators in float64 numpy: slow, plain, and what every other implementation is tested against.

Distances are sums of squared differences, never ‖a‖² + ‖b‖² − 2ab: no digit is lost when a query
lies far from the origin or from every inducing point.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.op.contract import PREPARED

_CHUNK = 1 << 22
"""Float64 values in the largest temporary array (32 MB; a handful of them live at once)."""

_CACHED = 1 << 17
"""Float64 values of the offsets that shares are computed from at a time: 1 MB, what a cache holds."""


def nearest(queries: Array, points: Array, k: int) -> Array:
    """Rows of the k nearest points of each query, sorted by (distance, row): ids (n, k) int64."""
    queries = np.asarray(queries, np.float64)  # (n, d)
    n, m = len(queries), len(points)
    if not 1 <= k <= m:
        raise ValueError(f"k must be between 1 and the number of points {m}, not {k}")
    ids = np.empty((n, k), np.int64)
    step = max(1, _CHUNK // m)
    for start in range(0, n, step):
        squares = squared_distances(queries[start : start + step], points)  # (c, M)
        ids[start : start + step] = _smallest(squares, k)
    return ids


def squared_distances(queries: Array, points: Array) -> Array:
    """‖query − point‖² by direct differences in float64: (n, M)."""
    queries, points = np.asarray(queries, np.float64), np.asarray(points)
    n, (m, d) = len(queries), points.shape
    squares = np.empty((n, m))
    block = max(1, min(m, _CHUNK // max(d, 1)))
    step = max(1, _CHUNK // (block * max(d, 1)))
    with np.errstate(invalid="ignore"):  # a query with an infinity has no distance; its answer is NaN anyway
        for left in range(0, m, block):
            part = points[left : left + block].astype(np.float64)  # (b, d)
            for start in range(0, n, step):
                difference = queries[start : start + step, None, :] - part  # (c, b, d)
                squares[start : start + step, left : left + block] = np.einsum(
                    "nmd,nmd->nm", difference, difference
                )
    return squares


def _smallest(values: Array, k: int) -> Array:
    """Columns of the k smallest values of each row, by (value, column): (n, M) -> (n, k)."""
    n, m = values.shape
    if k == m:
        return np.argsort(values, axis=1, kind="stable")
    bound = np.partition(values, k - 1, axis=1)[:, k - 1]  # (n,) the k-th smallest
    ids = np.empty((n, k), np.int64)
    for row in range(n):
        # Everything up to the bound, ties included, in column order: a stable sort breaks ties by column.
        within = np.flatnonzero(~(values[row] > bound[row]))
        ids[row] = within[np.argsort(values[row, within], kind="stable")[:k]]
    return ids


def unexplained_share(queries: Array, points: Array, ids: Array, length_scale: float, jitter: float) -> Array:
    """s = 1 − kᵀ (G + jitter·I)⁻¹ k per query, clamped to [0, 1]: (n,) float64.

    With the Cholesky factor L of G + jitter·I this is 1 − ‖L⁻¹k‖². Neighbours -1 are left out.
    A query with a NaN or an infinity has s = NaN.
    """
    queries, ids = np.asarray(queries, np.float64), np.asarray(ids)  # (n, d), (n, k)
    (n, k), d = ids.shape, queries.shape[1]
    share = np.full(n, np.nan)
    finite = np.flatnonzero(np.isfinite(queries).all(axis=1))
    step = max(1, _CACHED // (k * max(d, k)))
    for start in range(0, len(finite), step):
        rows = finite[start : start + step]
        share[rows] = _share(queries[rows], points, ids[rows], float(length_scale), float(jitter))
    return share


def _share(queries: Array, points: Array, ids: Array, length_scale: float, jitter: float) -> Array:
    c, k = ids.shape
    present = ids >= 0  # (c, k)
    # Centring on the query costs nothing (both are float32 inside) and keeps the numbers small.
    offsets = (points[np.where(present, ids, 0)].astype(np.float64) - queries[:, None, :]) / length_scale
    to_query = np.exp(-0.5 * np.einsum("ckd,ckd->ck", offsets, offsets)) * present  # (c, k)
    gram = np.empty((c, k, k))
    for i in range(k):
        difference = offsets[:, i:] - offsets[:, i : i + 1]  # (c, k-i, d)
        r = np.exp(-0.5 * np.einsum("ckd,ckd->ck", difference, difference))
        gram[:, i, i:] = gram[:, i:, i] = r * present[:, i:] * present[:, i : i + 1]
    # A neighbour that is left out is an unrelated point: 1 on the diagonal, 0 elsewhere.
    gram[:, range(k), range(k)] = 1.0 + jitter
    factor = np.linalg.cholesky(gram)
    whitened = np.linalg.solve(factor, to_query[:, :, None])[:, :, 0]  # (c, k)
    share: Array = np.clip(1.0 - np.einsum("ck,ck->c", whitened, whitened), 0.0, 1.0)
    return share


def probe(queries: Array, centroids: Array, nprobe: int) -> Array:
    """The lists that each query searches, those of its nearest centroids: (n, nprobe)."""
    return nearest(queries, centroids, nprobe)


def members(lists: Array, list_offsets: Array) -> Array:
    """Rows of all points of the given lists, ascending."""
    return np.concatenate([np.arange(list_offsets[i], list_offsets[i + 1]) for i in np.sort(lists)])


def list_of_row(list_offsets: Array) -> Array:
    """The list that each row belongs to: (M,) int64."""
    return np.repeat(np.arange(len(list_offsets) - 1), np.diff(list_offsets))


def decode(codes: Array, codebooks: Array, centroids: Array, list_offsets: Array) -> Array:
    """Points of an ivfpq index: the list's centroid plus, per sub-vector, what the code stands for.

    One float32 addition per component, so that every implementation has the same bits: (M, d) float32.
    """
    parts = codebooks[np.arange(codes.shape[1]), codes]  # (M, m, d/m)
    return parts.reshape(len(codes), -1) + centroids[list_of_row(list_offsets)]


def evaluate(index: str, tensors: Mapping[str, Array], queries: Array) -> tuple[Array, Array]:
    """What the operator answers to queries (…, d): s (…, 1) float64 and neighbours (…, k) int64.

    `tensors` are the operator's constants by their contract names. ivf and ivfpq search exactly the
    probed lists; local finds the nearest point there and takes over its neighbourhood. hnsw searches all
    points: its graph only speeds the search up and may miss a neighbour now and then, so compare a
    kernel's s by `unexplained_share` on the kernel's neighbours. A query with a NaN or an infinity has no
    neighbours: all -1.
    """
    queries = np.asarray(queries)
    rows = queries.reshape(-1, queries.shape[-1])  # (n, d)
    k = int(_number(tensors, "k"))
    if index == "ivfpq":
        points = decode(*(tensors[name] for name in ("codes", "codebooks", "centroids", "list_offsets")))
    else:
        points = tensors["points"]
    if index in ("ivf", "ivfpq"):
        ids = _nearest_in_lists(rows, points, k, tensors)
    elif index in ("local", PREPARED):
        first = _nearest_in_lists(rows, points, 1, tensors)  # (n, 1)
        ids = np.where(first < 0, -1, tensors["neighbourhoods"][first[:, 0], :k].astype(np.int64))
    elif index in ("flat", "hnsw"):
        ids = nearest(rows, points, k)
    else:
        raise ValueError(f"no such index kind: {index}")
    ids[~np.isfinite(rows).all(axis=1)] = -1
    share = unexplained_share(rows, points, ids, _number(tensors, "length_scale"), _number(tensors, "jitter"))
    leading = queries.shape[:-1]
    return share.reshape(*leading, 1), ids.reshape(*leading, k)


def _number(tensors: Mapping[str, Array], name: str) -> float:
    """The only element of a constant, whatever its rank."""
    return float(np.asarray(tensors[name]).item())


def _nearest_in_lists(rows: Array, points: Array, k: int, tensors: Mapping[str, Array]) -> Array:
    """As `nearest` among the points of the probed lists, -1 where these hold fewer than k: (n, k)."""
    nprobe = int(_number(tensors, "nprobe"))
    ids = np.full((len(rows), k), -1, np.int64)
    for i, lists in enumerate(probe(rows, tensors["centroids"], nprobe)):
        candidates = members(lists, tensors["list_offsets"])
        found = min(k, len(candidates))
        if found:
            ids[i, :found] = candidates[nearest(rows[i : i + 1], points[candidates], found)[0]]
    return ids
