"""The exact nearest points of every point: what the local operator takes over from a query's nearest point.

FAISS proposes candidates in float32; they are ordered by float64 distances, and where rounding could have
kept a nearer point from being proposed, more are asked for. So the result is a function of the points
alone, whatever the number of threads.
"""

from __future__ import annotations

import faiss
import numpy as np

from gapa_onnx.op import reference

_SPARE = 8  #: candidates beyond k at first
_MORE = 8  #: times as many candidates for the rows that need more
_SEARCHED = 4096  #: rows per search; FAISS is half as fast on a few hundred
_BLOCK_VALUES = 1 << 21  #: float64 values per working block: 16 MB
_EPS = float(np.finfo(np.float32).eps)


def neighbourhoods(points: np.ndarray, k: int) -> np.ndarray:
    """Rows of the k nearest points of each of the points (M, d), itself first, then by (distance, row).

    -> (M, k) int32.
    """
    m, d = points.shape
    if not 1 <= k <= m:
        raise ValueError(f"k must be between 1 and the number of points {m}, not {k}")
    near = np.empty((m, k), np.int32)
    if k == 1:
        near[:, 0] = np.arange(m)
        return near
    centre = points.mean(axis=0, dtype=np.float64)  # float32 loses digits to a common offset
    centred = (points - centre).astype(np.float32)
    flat = faiss.IndexFlatL2(d)
    flat.add(centred)
    # ‖a‖² + ‖b‖² − 2ab in float32, in any order of summation, and the rounding of a and b themselves.
    norms = np.sqrt(np.einsum("md,md->m", centred, centred, dtype=np.float64))
    error = (d + 8) * _EPS * (norms + norms.max()) ** 2  # (M,)

    unsure, wanted = np.arange(m), k + _SPARE
    while len(unsure) and wanted < m:
        missed = []
        step = max(1, min(_SEARCHED, _BLOCK_VALUES // wanted))
        for start in range(0, len(unsure), step):
            rows = unsure[start : start + step]
            squares, candidates = flat.search(centred[rows], wanted)
            near[rows], radius = _ordered(points, rows, candidates, k)
            # What was not proposed is at least as far as the last proposal, but for rounding.
            missed.append(rows[~(radius < squares[:, -1] - error[rows])])
        unsure, wanted = np.concatenate(missed), _MORE * wanted
    step = max(1, _BLOCK_VALUES // m)
    for start in range(0, len(unsure), step):
        rows = unsure[start : start + step]
        squares = reference.squared_distances(points[rows], points)
        squares[np.arange(len(rows)), rows] = -1.0
        near[rows] = np.argsort(squares, axis=1, kind="stable")[:, :k]
    return near


def _ordered(
    points: np.ndarray, rows: np.ndarray, candidates: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest candidates (b, c) of each row in float64, and the squared distance of the last."""
    squares = np.empty(candidates.shape)
    step = max(1, _BLOCK_VALUES // (candidates.shape[1] * points.shape[1]))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        offsets = points[candidates[part]].astype(np.float64) - points[rows[part]][:, None, :]
        squares[part] = np.einsum("bcd,bcd->bc", offsets, offsets)
    itself = candidates == rows[:, None]
    squares[itself] = -1.0
    order = np.lexsort((candidates, squares), axis=1)[:, :k]
    radius = np.take_along_axis(squares, order[:, -1:], axis=1)[:, 0]
    radius[~itself.any(axis=1)] = np.inf  # so many twins that the row itself was not proposed
    return np.take_along_axis(candidates, order, axis=1), radius
