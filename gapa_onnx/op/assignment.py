"""Which of many points is the nearest to each row: exactly, and mostly without comparing.

The nearest point c to a row x has the largest x·c − ½‖c‖². This is computed in float32, and again in float64 where
float32 cannot tell, so that the answer is the same whatever the number of threads.

Where a point g is near x, every c with ‖c − g‖ > 2‖x − g‖ is farther than g, since ‖x − c‖ ≥ ‖c − g‖ − ‖x − g‖.
Rows that share a g are compared with the points that this leaves, where the data have clusters one in twenty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gapa_onnx.arrays import Array

_BLOCK_VALUES = 1 << 20
_FEW = 64  #: points: comparing all of them costs no more than finding out which need not be
_WORTH = 0.4  #: of all comparisons: beyond, whole blocks of rows with all points are faster

Comparison = tuple[slice | Array, slice | Array]
"""Rows, and the points to compare them with."""


def nearest_point(rows: Array, points: Array, near: Array | None = None) -> Array:
    """The nearest of points (k, d) to each of the rows (m, d), both float32; the first of equally near -> (m,).

    `near` (m,) are points that are thought to be near the rows, such as their nearest before all points moved a
    little. Only the time that it takes depends on them.
    """
    half = _half_squares(points)
    error = _score_error(rows, np.sqrt(2 * half.max()))  # (m,)
    owner = np.empty(len(rows), np.int64)
    unsure = np.empty(len(rows), bool)
    for at, among in _comparisons(rows, points, half, near):
        score = rows[at] @ points[among].T  # (b, c)
        score -= half[among]
        each = np.arange(len(score))
        best = score.argmax(axis=1)
        lead = score[each, best]
        score[each, best] = -np.inf
        lead -= score.max(axis=1)
        unsure[at] = lead <= 2 * error[at]
        owner[at] = best if isinstance(among, slice) else among[best]
    again = np.flatnonzero(unsure)
    exact = points.astype(np.float64)
    for part in blocks(len(again), len(points)):
        owner[again[part]] = _first_nearest(rows[again[part]].astype(np.float64), exact)
    return owner


def groups(owner: Array, k: int) -> list[Array]:
    """For each of k owners the positions that it has in `owner` (m,), ascending."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=k))
    return [order[start:end] for start, end in zip([0, *ends[:-1]], ends)]


def blocks(length: int, width: int) -> Iterator[slice]:
    """Slices that cover `length` rows of `width` values, a bounded number of values at a time."""
    step = max(1, _BLOCK_VALUES // max(1, width))
    return (slice(start, start + step) for start in range(0, length, step))


def _first_nearest(rows: Array, points: Array) -> Array:
    """The first point that is the nearest, but for rounding, by comparing all -> (b,)."""
    half = _half_squares(points)
    score = rows @ points.T - half
    error = _score_error(rows, np.sqrt(2 * half.max()))
    first: Array = (score >= (score.max(axis=1) - 2 * error)[:, None]).argmax(axis=1)
    return first


def _half_squares(points: Array) -> Array:
    half: Array = np.einsum("ij,ij->i", points, points) / 2
    return half


def _score_error(rows: Array, longest: float) -> Array:
    """How far x·c − ½‖c‖² may be off, ‖c‖ ≤ longest: (d + 4) u (‖x‖ + ‖c‖) ‖c‖ in any order of summation -> (m,)."""
    length: Array = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    error: Array = (length + longest) * longest * ((rows.shape[1] + 4) * np.finfo(rows.dtype).eps / 2)
    return error


def _comparisons(rows: Array, points: Array, half: Array, near: Array | None) -> Iterable[Comparison]:
    """All rows, each with the points that may be its nearest."""
    k = len(points)
    everything = ((part, slice(None)) for part in blocks(len(rows), k))
    if k <= _FEW:
        return everything
    near = _guess(rows, points, half) if near is None else near
    # Rounding: of ½‖c − g‖² as a difference of scores, and of squares that are sums of squared differences.
    rounding = (rows.shape[1] + 8) * np.finfo(np.float32).eps
    limit = 2 * (1 + rounding) * _reach(rows, points, near) + 4 * rounding * half.max()  # (k,) of ½‖c − g‖²
    members = groups(near, k)
    sizes = np.array([len(at) for at in members])
    among: list[Array] = []
    allowed = _WORTH * len(rows) * k
    for part in blocks(k, k):
        gaps = half[part, None] + half - points[part] @ points.T
        within = gaps <= limit[part, None]
        allowed -= sizes[part] @ np.count_nonzero(within, axis=1)
        if allowed < 0:
            return everything
        among += [np.flatnonzero(row) for row in within]
    return ((at, left) for at, left in zip(members, among) if len(at))


def _guess(rows: Array, points: Array, half: Array) -> Array:
    """A point near each row -> (m,): of every ⌊√k⌋th point the nearest, then the nearest of those around it."""
    some = np.arange(0, len(points), int(len(points) ** 0.5))
    cells = [_largest_score(of, points[some], half[some]) for of in (rows, points)]
    guess = some[cells[0]]
    for at, among in zip(*(groups(cell, len(some)) for cell in cells)):
        if len(at) and len(among):
            guess[at] = among[_largest_score(rows[at], points[among], half[among])]
    return guess


def _largest_score(rows: Array, points: Array, half: Array) -> Array:
    parts = [(rows[part] @ points.T - half).argmax(axis=1) for part in blocks(len(rows), len(points))]
    return np.concatenate(parts)


def _reach(rows: Array, points: Array, near: Array) -> Array:
    """The largest squared distance from each point to the rows that it is near to -> (k,)."""
    reach = np.zeros(len(points), np.float32)
    for part in blocks(len(rows), rows.shape[1]):
        offsets = rows[part] - points[near[part]]
        np.maximum.at(reach, near[part], np.einsum("ij,ij->i", offsets, offsets))
    return reach
