"""Choosing inducing points: at most `count` rows that stand for all the calibration rows.

Same rows, count and seed: same points, whatever the number of threads. Matrix products are rounded
differently by one thread and by two, so every decision here is either made by arithmetic that runs in
one thread, or is made again in float64 where float32 rounding could have changed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import faiss
import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.op.assignment import blocks, groups, nearest_point

METHODS = ("kmeans", "fps", "random", "all")

_TRAINING_ROWS = 256  # per centroid: more move a mean by less than 1/16 of its cluster's spread
_PART_ROWS = 64  # per centroid: where there are more, so many come first, and all of them to finish
_ITERATIONS = 25
_CONVERGED = 1e-3  # relative gain in inertia below which Lloyd's iteration stops; 1e-4 takes twice as long
_SEEDING_VALUES = 2e10  # compared while seeding, at most about 8 s; what is asked for is cut down to it
_SEEDING_SHARE, _PART_SHARE = 0.3, 0.5  # of the progress shown: up to the end of each
_WIDE = 32  # so wide a row is worth asking first whether a new seed can be nearer to it than the old ones

Report = Callable[[float], None]
"""Told the fraction that is done."""


def select(method: str, rows: Array, count: int, seed: int = 0, progress: Report | None = None) -> Array:
    """At most `count` distinct points (≤ count, d) for finite float32 rows (m, d).

    kmeans: centroids. fps: rows in farthest-first order. random: rows without replacement, in their
    order. all: every distinct row, whatever `count` is. Where there are no more than `count` distinct
    rows, each method returns them all. `progress` is told the fraction done.
    """
    if method not in METHODS:
        raise UserError(
            f"there is no inducing point method '{method}'", f"choose one of {', '.join(METHODS)}"
        )
    if method != "all" and count < 1:
        raise UserError(f"{count} inducing points were asked for", "ask for at least 1")
    rows = np.ascontiguousarray(rows, np.float32)
    distinct = distinct_rows(rows)
    report = progress or (lambda fraction: None)
    if method == "all" or len(distinct) <= count:
        points = rows[distinct]
    elif method == "random":
        chosen = np.random.default_rng(seed).choice(len(distinct), count, replace=False)
        points = rows[distinct[np.sort(chosen)]]
    elif method == "fps":
        points = rows[distinct[_farthest_first(rows[distinct], count, report)]]
    else:
        points = _kmeans(rows, distinct, count, np.random.default_rng(seed), report)
        points = points[distinct_rows(points)]
    report(1.0)
    return points


def cluster_sizes(rows: Array, points: Array) -> Array:
    """How many rows (m, d) are nearest to each point (k, d) -> (k,)."""
    mean, scale = _centre(rows)
    owner = nearest_point(_normalised(rows, mean, scale), _normalised(points, mean, scale))
    return np.bincount(owner, minlength=len(points))


def of_many(rows: Array, points: Array, least: int) -> Array:
    """The points (≤ k, d) that are the means of at least so many of the rows (m, d).

    All others go at once: what their rows are near to then is not made of them.
    """
    return points if least == 1 else points[cluster_sizes(rows, points) >= least]


def distinct_rows(rows: Array) -> Array:
    """Indices of the rows that no earlier row equals, ascending; -0 equals 0.

    Rows with equal hashes are compared, so a collision keeps a row and never loses one.
    """
    hashes = np.empty(len(rows), np.uint64)
    weights = np.random.default_rng(0).integers(0, 2**63, rows.shape[1], np.uint64)
    weights = weights * np.uint64(2) + np.uint64(1)  # odd: no factor 2 that would drop bits
    for part in blocks(len(rows), rows.shape[1]):
        bits = (rows[part] + np.float32(0)).view(np.uint32)  # -0 + 0 is +0
        hashes[part] = (bits * weights).sum(axis=1, dtype=np.uint64)  # modulo 2⁶⁴
    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    if len(first) == len(rows):
        return np.arange(len(rows))
    earliest = first[group]
    suspects = np.flatnonzero(earliest != np.arange(len(rows)))
    repeated = np.zeros(len(rows), bool)
    for part in blocks(len(suspects), rows.shape[1]):
        repeated[suspects[part]] = (rows[suspects[part]] == rows[earliest[suspects[part]]]).all(axis=1)
    return np.flatnonzero(~repeated)


def _farthest_first(rows: Array, count: int, report: Report) -> Array:
    """Indices of a greedy traversal: each next row is the farthest from all chosen before it.

    It starts at the row nearest to the mean, which depends neither on a seed nor on the order of the rows
    and is no outlier. Of equally far rows the first is taken.
    """
    rows = rows * np.float32(_scale(max(rows.max(), -rows.min())))
    mean = rows.mean(axis=0, dtype=np.float64)
    to_mean = np.empty(len(rows))
    for part in blocks(len(rows), rows.shape[1]):
        to_mean[part] = ((rows[part] - mean) ** 2).sum(axis=1)
    chosen = [int(to_mean.argmin())]
    gaps = _squared_distances(rows, rows[chosen[0]])  # to the chosen rows, (m,)
    fresh = np.empty_like(gaps)
    while len(chosen) < count:
        farthest = int(gaps.argmax())
        if gaps[farthest] == 0:  # what is left differs by less than float32 can square
            break
        chosen.append(farthest)
        np.minimum(gaps, _squared_distances(rows, rows[farthest], fresh), out=gaps)
        report(len(chosen) / count)
    return np.array(chosen)


def _kmeans(
    rows: Array, distinct: Array, count: int, generator: np.random.Generator, report: Report
) -> Array:
    """Centroids (≤ count, d) of Lloyd's algorithm from a k-means++ start.

    It works on rows that are centred and scaled to about 1, since float32 loses digits to an offset. Seeds
    come from distinct rows, so that there are enough of them; training rows keep their multiplicity. Where
    these are many, a part of them brings the centroids near to where they stay, and all of them finish.
    """
    mean, scale = _centre(rows)
    size, trials = _seeding_effort(len(distinct), rows.shape[1], count)
    candidates = _normalised(rows, mean, scale, _sample(distinct, size, generator))
    done = _SEEDING_SHARE
    centroids = _seeds(candidates, count, trials, generator, _between(report, 0, done))
    training = _normalised(
        rows, mean, scale, _sample(np.arange(len(rows)), _TRAINING_ROWS * count, generator)
    )
    if len(training) > _PART_ROWS * count:
        part = training[_sample(np.arange(len(training)), _PART_ROWS * count, generator)]
        centroids = _lloyd(part, centroids, _between(report, done, _PART_SHARE))
        done = _PART_SHARE
    return (_lloyd(training, centroids, _between(report, done, 1)) / scale + mean).astype(np.float32)


def _seeding_effort(m: int, d: int, count: int) -> tuple[int, int]:
    """How many rows to draw seeds from, and in how many trials each: the most that the budget allows.

    Seeding reads count · trials · rows · d values, which grows with the square of `count`.
    """
    for per_seed, trials in ((16, 2 + int(np.log(count))), (16, 3), (8, 3), (8, 1)):
        candidates = min(m, per_seed * count)
        if count * trials * candidates * d <= _SEEDING_VALUES:
            break
    return candidates, trials


def _sample(indices: Array, size: int, generator: np.random.Generator) -> Array:
    """At most `size` of the indices, in their order."""
    if len(indices) <= size:
        return indices
    return indices[np.sort(generator.choice(len(indices), size, replace=False))]


def _seeds(rows: Array, count: int, trials: int, generator: np.random.Generator, report: Report) -> Array:
    """k-means++: each next seed is drawn with probability ∝ squared distance to the seeds before it.

    Of `trials` draws the one that lowers the inertia most is taken: with well-separated clusters a single
    draw often puts two seeds into one of them, which Lloyd's iteration does not undo.
    """
    seeds = np.empty((count, rows.shape[1]), np.float32)
    seeds[0] = rows[generator.integers(len(rows))]
    squares = _squared_distances(rows, seeds[0])  # to the nearest seed, (m,)
    owner = np.zeros(len(rows), np.intp)  # which seed that is
    for found in range(1, count):
        mass = np.cumsum(squares.astype(np.float64))
        if mass[-1] == 0:  # what is left differs by less than float32 can square
            return seeds[:found]
        drawn = np.searchsorted(mass, generator.random(trials) * mass[-1], side="right")
        lowered = [_lowered(squares, owner, rows, seeds[:found], row) for row in rows[drawn]]
        best = int(np.argmin([each.sum(dtype=np.float64) for each in lowered]))
        owner[lowered[best] < squares] = found
        squares, seeds[found] = lowered[best], rows[drawn[best]]
        report((found + 1) / count)
    return seeds


def _lowered(squares: Array, owner: Array, rows: Array, seeds: Array, new: Array) -> Array:
    """The squared distances (m,) of rows to the nearest seed once there is a new one, to the bit.

    It is not nearer to a row than the seed that owns the row if it is twice as far from that seed as the row is.
    """
    d = rows.shape[1]
    if d < _WIDE:
        return np.minimum(squares, _squared_distances(rows, new))
    twice = 4 * (1 + 4 * (d + 4) * np.finfo(np.float32).eps)  # squared, and more than any rounding
    open_to_it = np.flatnonzero(_squared_distances(seeds, new)[owner] < np.float32(twice) * squares)
    fresh = np.empty(len(open_to_it), np.float32)
    faiss.fvec_L2sqr_by_idx(*map(faiss.swig_ptr, (fresh, new, rows, open_to_it)), d, 1, len(fresh))
    lowered: Array = squares.copy()
    lowered[open_to_it] = np.minimum(squares[open_to_it], fresh)
    return lowered


def _lloyd(rows: Array, centroids: Array, report: Report) -> Array:
    """Alternate assignment and means, from centroids (k, d) -> (k, d). An empty cluster keeps its place."""
    centroids = centroids.astype(np.float64)
    total = np.einsum("ij,ij->", rows, rows, dtype=np.float64)
    previous, owner = np.inf, None
    for iteration in range(_ITERATIONS):
        owner = nearest_point(rows, centroids.astype(np.float32), owner)
        sums, sizes = _cluster_sums(rows, owner, len(centroids))
        used = sizes > 0
        centroids[used] = sums[used] / sizes[used, None]
        # Σ‖x − c‖² = Σ‖x‖² − Σ n_c ‖c‖² once each c is the mean of its cluster
        inertia = total - (sums[used] * centroids[used]).sum()
        report((iteration + 1) / _ITERATIONS)
        if inertia >= (1 - _CONVERGED) * previous:
            break
        previous = inertia
    return centroids


def _cluster_sums(rows: Array, owner: Array, k: int) -> tuple[Array, Array]:
    """Sum (k, d) and size (k,) of each cluster, added in row order in float64."""
    clusters = groups(owner, k)
    sums = np.stack([rows[members].sum(axis=0, dtype=np.float64) for members in clusters])
    return sums, np.array([len(members) for members in clusters])


def _centre(rows: Array) -> tuple[Array, float]:
    """Mean (d,) and scale by which rows are brought to about 1: float32 loses digits to an offset."""
    mean = rows.mean(axis=0, dtype=np.float64)
    return mean, _scale(max((rows.max(axis=0) - mean).max(), (mean - rows.min(axis=0)).max()))


def _normalised(rows: Array, mean: Array, scale: float, chosen: Array | None = None) -> Array:
    """(rows − mean) · scale of the chosen rows (b,) or of all, computed in float64."""
    chosen = np.arange(len(rows)) if chosen is None else chosen
    result = np.empty((len(chosen), rows.shape[1]), np.float32)
    for part in blocks(len(chosen), rows.shape[1]):
        result[part] = (rows[chosen[part]] - mean) * scale
    return result


def _between(report: Report, start: float, end: float) -> Report:
    """The report of a part that takes all from `start` to `end`."""
    return lambda done: report(start + (end - start) * done)


def _squared_distances(rows: Array, to: Array, out: Array | None = None) -> Array:
    """Squared distances of all rows (m, d) to one (d,) -> (m,): differences first, in one thread."""
    out = np.empty(len(rows), np.float32) if out is None else out
    faiss.fvec_L2sqr_ny(*map(faiss.swig_ptr, (out, to, rows)), rows.shape[1], len(rows))
    return out


def _scale(largest: float) -> float:
    """The power of two that brings `largest` to about 1, so that no square overflows; exact to apply."""
    exponent = int(np.clip(np.frexp(largest)[1], -126, 126))
    return math.ldexp(1.0, -exponent)
