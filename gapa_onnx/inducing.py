"""Choosing inducing points: at most `count` rows that stand for all the calibration rows.

Same rows, count and seed: same points, whatever the number of threads. Matrix products are rounded
differently by one thread and by two, so every decision here is either made by arithmetic that runs in
one thread, or is made again in float64 where float32 rounding could have changed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import faiss
import numpy as np

from .errors import UserError

METHODS = ("kmeans", "fps", "random", "all")

_TRAINING_ROWS = 256  # per centroid: more move a mean by less than 1/16 of its cluster's spread
_ITERATIONS = 25
_CONVERGED = 1e-3  # relative gain in inertia below which Lloyd's iteration stops; 1e-4 takes twice as long
_SEEDING_VALUES = 2e10  # values read while seeding, about 8 s; what is asked for is cut down to it
_SEEDING_SHARE = 0.3  # of the progress shown
_BLOCK_VALUES = 1 << 20

Progress = Callable[[float], None]


def select(
    method: str, rows: np.ndarray, count: int, seed: int = 0, progress: Progress | None = None
) -> np.ndarray:
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


def cluster_sizes(rows: np.ndarray, points: np.ndarray) -> np.ndarray:
    """How many rows (m, d) are nearest to each point (k, d) -> (k,)."""
    mean = rows.mean(axis=0, dtype=np.float64)  # float32 loses digits to an offset
    sizes = np.zeros(len(points), np.int64)
    for part in _blocks(len(rows), rows.shape[1]):
        owner = _nearest((rows[part] - mean).astype(np.float32), (points - mean).astype(np.float32))
        sizes += np.bincount(owner, minlength=len(points))
    return sizes


def distinct_rows(rows: np.ndarray) -> np.ndarray:
    """Indices of the rows that no earlier row equals, ascending; -0 equals 0.

    Rows with equal hashes are compared, so a collision keeps a row and never loses one.
    """
    hashes = np.empty(len(rows), np.uint64)
    weights = np.random.default_rng(0).integers(0, 2**63, rows.shape[1], np.uint64)
    weights = weights * np.uint64(2) + np.uint64(1)  # odd: no factor 2 that would drop bits
    for part in _blocks(len(rows), rows.shape[1]):
        bits = (rows[part] + np.float32(0)).view(np.uint32)  # -0 + 0 is +0
        hashes[part] = (bits * weights).sum(axis=1, dtype=np.uint64)  # modulo 2⁶⁴
    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    if len(first) == len(rows):
        return np.arange(len(rows))
    earliest = first[group]
    suspects = np.flatnonzero(earliest != np.arange(len(rows)))
    repeated = np.zeros(len(rows), bool)
    for part in _blocks(len(suspects), rows.shape[1]):
        repeated[suspects[part]] = (rows[suspects[part]] == rows[earliest[suspects[part]]]).all(axis=1)
    return np.flatnonzero(~repeated)


def _farthest_first(rows: np.ndarray, count: int, report: Progress) -> np.ndarray:
    """Indices of a greedy traversal: each next row is the farthest from all chosen before it.

    It starts at the row nearest to the mean, which depends neither on a seed nor on the order of the rows
    and is no outlier. Of equally far rows the first is taken.
    """
    rows = rows * np.float32(_scale(max(rows.max(), -rows.min())))
    mean = rows.mean(axis=0, dtype=np.float64)
    to_mean = np.empty(len(rows))
    for part in _blocks(len(rows), rows.shape[1]):
        to_mean[part] = ((rows[part] - mean) ** 2).sum(axis=1)
    chosen = [int(to_mean.argmin())]
    nearest = _squared_distances(rows, chosen[0])  # to the chosen rows, (m,)
    fresh = np.empty_like(nearest)
    while len(chosen) < count:
        farthest = int(nearest.argmax())
        if nearest[farthest] == 0:  # what is left differs by less than float32 can square
            break
        chosen.append(farthest)
        np.minimum(nearest, _squared_distances(rows, farthest, fresh), out=nearest)
        report(len(chosen) / count)
    return np.array(chosen)


def _kmeans(
    rows: np.ndarray, distinct: np.ndarray, count: int, generator: np.random.Generator, report: Progress
) -> np.ndarray:
    """Centroids (≤ count, d) of Lloyd's algorithm from a k-means++ start.

    It works on rows that are centred and scaled to about 1, since float32 loses digits to an offset. Seeds
    come from distinct rows, so that there are enough of them; training rows keep their multiplicity.
    """
    mean = rows.mean(axis=0, dtype=np.float64)
    scale = _scale(max((rows.max(axis=0) - mean).max(), (mean - rows.min(axis=0)).max()))

    def normalised(indices: np.ndarray) -> np.ndarray:
        result = np.empty((len(indices), rows.shape[1]), np.float32)
        for part in _blocks(len(indices), rows.shape[1]):
            result[part] = (rows[indices[part]] - mean) * scale
        return result

    candidates, trials = _seeding_effort(len(distinct), rows.shape[1], count)
    seeds = _seeds(normalised(_sample(distinct, candidates, generator)), count, trials, generator, report)
    training = normalised(_sample(np.arange(len(rows)), _TRAINING_ROWS * count, generator))
    return (_lloyd(training, seeds, report) / scale + mean).astype(np.float32)


def _seeding_effort(m: int, d: int, count: int) -> tuple[int, int]:
    """How many rows to draw seeds from, and in how many trials each: the most that the budget allows.

    Seeding reads count · trials · rows · d values, which grows with the square of `count`.
    """
    for per_seed, trials in ((16, 2 + int(np.log(count))), (16, 3), (8, 3), (8, 1)):
        candidates = min(m, per_seed * count)
        if count * trials * candidates * d <= _SEEDING_VALUES:
            break
    return candidates, trials


def _sample(indices: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """At most `size` of the indices, in their order."""
    if len(indices) <= size:
        return indices
    return indices[np.sort(generator.choice(len(indices), size, replace=False))]


def _seeds(
    rows: np.ndarray, count: int, trials: int, generator: np.random.Generator, report: Progress
) -> np.ndarray:
    """k-means++: each next seed is drawn with probability ∝ squared distance to the seeds before it.

    Of `trials` draws the one that lowers the inertia most is taken: with well-separated clusters a single
    draw often puts two seeds into one of them, which Lloyd's iteration does not undo.
    """
    chosen = [int(generator.integers(len(rows)))]
    nearest = _squared_distances(rows, chosen[0])  # to the chosen rows, (m,)
    fresh = [np.empty_like(nearest) for _ in range(trials)]
    while len(chosen) < count:
        mass = np.cumsum(nearest, dtype=np.float64)
        if mass[-1] == 0:  # what is left differs by less than float32 can square
            break
        drawn = np.searchsorted(mass, generator.random(trials) * mass[-1], side="right")
        for distances, row in zip(fresh, drawn):
            np.minimum(nearest, _squared_distances(rows, row, distances), out=distances)
        best = int(np.argmin([distances.sum(dtype=np.float64) for distances in fresh]))
        chosen.append(int(drawn[best]))
        nearest, fresh[best] = fresh[best], nearest
        report(_SEEDING_SHARE * len(chosen) / count)
    return rows[chosen]


def _lloyd(rows: np.ndarray, seeds: np.ndarray, report: Progress) -> np.ndarray:
    """Alternate assignment and means, from seeds (k, d) -> (k, d). An empty cluster keeps its place."""
    centroids = seeds.astype(np.float64)
    total = np.einsum("ij,ij->", rows, rows, dtype=np.float64)
    previous = np.inf
    for iteration in range(_ITERATIONS):
        owner = _nearest(rows, centroids.astype(np.float32))
        sums, sizes = _cluster_sums(rows, owner, len(centroids))
        used = sizes > 0
        centroids[used] = sums[used] / sizes[used, None]
        # Σ‖x − c‖² = Σ‖x‖² − Σ n_c ‖c‖² once each c is the mean of its cluster
        inertia = total - (sums[used] * centroids[used]).sum()
        report(_SEEDING_SHARE + (1 - _SEEDING_SHARE) * (iteration + 1) / _ITERATIONS)
        if inertia >= (1 - _CONVERGED) * previous:
            break
        previous = inertia
    return centroids


def _cluster_sums(rows: np.ndarray, owner: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum (k, d) and size (k,) of each cluster, added in row order in float64."""
    sums = np.empty((k, rows.shape[1]))
    for start in range(0, rows.shape[1], 16):  # some columns at a time: contiguous, and still in the cache
        for column, values in enumerate(np.ascontiguousarray(rows[:, start : start + 16].T), start):
            sums[:, column] = np.bincount(owner, weights=values, minlength=k)
    return sums, np.bincount(owner, minlength=k)


def _nearest(rows: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The nearest centroid of each row -> (m,): in float32, and in float64 where float32 cannot tell."""
    owner = np.empty(len(rows), np.int64)
    exact = centroids.astype(np.float64)
    for part in _blocks(len(rows), len(centroids)):
        block = rows[part]
        nearest, unsure = _nearest_within_rounding(block, centroids)
        if unsure.any():
            nearest[unsure] = _nearest_within_rounding(block[unsure].astype(np.float64), exact)[0]
        owner[part] = nearest
    return owner


def _nearest_within_rounding(rows: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first centroid that may be the nearest, and whether another may be too.

    The nearest has the largest x·c − ½‖c‖². In any order of summation its rounding error is at most
    (d + 4) u (‖x‖ + ‖c‖) ‖c‖ with the unit roundoff u.
    """
    half = np.einsum("ij,ij->i", centroids, centroids) / 2
    longest = np.sqrt(2 * half.max())
    error = np.sqrt(np.einsum("ij,ij->i", rows, rows)) + longest  # (b,)
    error *= longest * (rows.shape[1] + 4) * np.finfo(rows.dtype).eps / 2
    score = rows @ centroids.T  # (b, k)
    score -= half
    possible = score >= (score.max(axis=1) - 2 * error)[:, None]
    return possible.argmax(axis=1), np.count_nonzero(possible, axis=1) > 1


def _squared_distances(rows: np.ndarray, row: int, out: np.ndarray | None = None) -> np.ndarray:
    """Squared distances of all rows to one of them, (m,): differences first, in one thread."""
    out = np.empty(len(rows), np.float32) if out is None else out
    faiss.fvec_L2sqr_ny(
        faiss.swig_ptr(out), faiss.swig_ptr(rows[row]), faiss.swig_ptr(rows), rows.shape[1], len(rows)
    )
    return out


def _scale(largest: float) -> float:
    """The power of two that brings `largest` to about 1, so that no square overflows; exact to apply."""
    return 2.0 ** -float(np.clip(np.frexp(largest)[1], -126, 126))


def _blocks(length: int, width: int) -> Iterator[slice]:
    """Slices that cover `length` rows of `width` values, a bounded number of values at a time."""
    step = max(1, _BLOCK_VALUES // max(1, width))
    return (slice(start, start + step) for start in range(0, length, step))
