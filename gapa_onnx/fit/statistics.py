"""What calibration learns from rows: distances, left-out shares, quantiles. `streams` says how rows are kept."""

from __future__ import annotations

import faiss
import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.op.neighbourhoods import Chosen
from gapa_onnx.op.shares import rows_at_once, share_by_offsets
from gapa_onnx.threads import one_thread

# Quantiles that a file carries, of shares and of scores: every percent, and the tail in finer steps.
QUANTILES = tuple(round(q / 1000, 3) for q in (*range(10, 990, 10), *range(990, 1000)))

_EPS = float(np.finfo(np.float32).eps)
_BLOCK_VALUES = 1 << 20  # float64 values per working block: 8 MB
_FAR = 1e4  # times the largest number of a point: no kernel reaches so far
_SPARE_CANDIDATES = 8  # beyond k + 1, so that float32 rounding in the search cannot cost a neighbour


def finite_rows(rows: Array) -> Array:
    """Which rows hold neither NaN nor infinity: (n, d) -> bool (n,)."""
    finite: Array = np.all(np.isfinite(rows), axis=1)
    return finite


def median_distance(rows: Array, pairs: int = 200_000, seed: int = 0) -> float:
    """Median Euclidean distance between two different rows of (m, d); 0.0 for fewer than two rows.

    Where it would be 0, as most rows are the same (empty places of a map), it is over the pairs that differ.
    Over all m(m−1)/2 pairs while these are no more than `pairs`, else over `pairs` random ones, whose median
    is between the true quantiles ½ ± 0.0034 with 99.7% (3 standard errors of 200,000 draws). Each
    difference is formed in float64 before it is squared, so a common offset of the rows cancels exactly.
    """
    m = len(rows)
    if m < 2:
        return 0.0
    if m * (m - 1) // 2 <= pairs:
        first, second = np.triu_indices(m, 1)
    else:
        generator = np.random.default_rng(seed)
        first = generator.integers(0, m, pairs)
        second = generator.integers(0, m - 1, pairs)
        second += second >= first  # uniform over the other m − 1 rows
    distances = np.empty(len(first))
    step = max(1, _BLOCK_VALUES // rows.shape[1])
    for start in range(0, len(first), step):
        part = slice(start, start + step)
        difference = rows[first[part]].astype(np.float64) - rows[second[part]]
        distances[part] = np.sqrt(np.einsum("ij,ij->i", difference, difference))
    apart = distances[distances > 0]
    return float(np.median(distances) or (np.median(apart) if len(apart) else 0.0))


class NearestSearch:
    """The nearest of some points (M, d), exactly, prepared once for many searches."""

    def __init__(self, points: Array):
        self._centre = points.mean(axis=0, dtype=np.float64)  # float32 loses digits to a common offset
        self._index = faiss.IndexFlatL2(points.shape[1])
        self._index.add((points - self._centre).astype(np.float32))

    def candidates(self, rows: Array, count: int) -> Array:
        """Indices (b, count) for rows (b, d), -1 where there are fewer points."""
        with one_thread():
            found: Array = self._index.search((rows - self._centre).astype(np.float32), count)[1]
        return found


@one_thread()
def leave_one_out_share(
    rows: Array,
    points: Array,
    k: int,
    length_scale: float,
    jitter: float,
    sizes: Array | None = None,
    neighbourhoods: Array | Chosen | None = None,
    rounded: Array | None = None,
    search: NearestSearch | None = None,
) -> Array:
    """The op's s for calibration rows (q, d), as if the row had not been among the data -> (q,).

    A point that is the row itself is left out: within 4 float32 roundings, ‖row − point‖ ≤ 4ε‖row‖. Where
    points are rounded, `rounded` (q, d) are the rows as they would be among the points. A point
    p that is the mean of n > 1 rows (`sizes`, one number per point) moves to the mean of the others,

        p + (p − row) / (n − 1),

    for the row's own cluster, which is the nearest. Of what there is then the k nearest are used, or all if
    there are fewer; equal distances are ordered by index. With `neighbourhoods` (M, ≥ k) only the nearest
    is searched, and the first k of its neighbourhood are used, less what is left out; of `Chosen` ones that from
    the half of the data that the row is not in. `search` is for callers that come with many small batches.
    """
    q, d = rows.shape
    wanted = min(len(points), (k if neighbourhoods is None else 1) + 1 + _SPARE_CANDIDATES)
    search = search or NearestSearch(points)
    rounded = rows if rounded is None else rounded
    shares = np.empty(q)
    searched = max(1, min(4096, 4 * _BLOCK_VALUES // (max(wanted, k) * d)))
    solved = rows_at_once(max(wanted, k), d)
    for start in range(0, q, searched):
        candidates = search.candidates(rows[start : start + searched], wanted)  # (b, wanted)
        for first in range(0, len(candidates), solved):
            part = slice(start + first, start + min(first + solved, len(candidates)))
            near = candidates[first : first + solved]
            stored = rows[part] if rounded is rows else rounded[part]
            offsets, present = _neighbours(rows[part], stored, points, near, k, sizes, neighbourhoods)
            shares[part] = share_by_offsets(offsets / length_scale, present, jitter)
    return shares


def _neighbours(
    rows: Array,
    rounded: Array,
    points: Array,
    candidates: Array,
    k: int,
    sizes: Array | None,
    neighbourhoods: Array | Chosen | None,
) -> tuple[Array, Array]:
    """Offsets (b, ≤ k, d) from rows (b, d) to the neighbours that are left to them, and which of these count."""
    own = _own(rows, points, candidates[:, : 1 + _SPARE_CANDIDATES])
    offsets, present, order = _without_itself(rows, rounded, points, candidates, own, sizes)
    if neighbourhoods is not None:
        first = order[:, :1]
        nearest = np.take_along_axis(candidates, first, axis=1)[:, 0]
        found = np.take_along_axis(present, first, axis=1)  # (b, 1)
        if isinstance(neighbourhoods, Chosen):
            group = neighbourhoods.without(rows, nearest)
        else:
            group = neighbourhoods[nearest]
        members = np.where(found, group[:, :k], -1)
        offsets, present, order = _without_itself(rows, rounded, points, members, own, sizes)
    kept = np.arange(len(rows))[:, None], order[:, :k]
    return offsets[kept], present[kept]


def _own(rows: Array, points: Array, candidates: Array) -> Array:
    """The nearest of the candidates (b, c) of each row -> (b,); -1 if it has none."""
    offsets = points[candidates].astype(np.float64) - rows[:, None, :]
    distances = np.where(candidates < 0, np.inf, np.einsum("bcd,bcd->bc", offsets, offsets))
    own: Array = candidates[np.arange(len(rows)), distances.argmin(axis=1)]
    return own


def _without_itself(
    rows: Array,
    rounded: Array,
    points: Array,
    candidates: Array,
    own: Array,
    sizes: Array | None,
) -> tuple[Array, Array, Array]:
    """Offsets (b, c, d) from each row to its candidates (b, c), whether they count, and their order.

    Nearest come first. What is the row itself, or the row as it is stored, goes last and does not count. `own` (b,) are the
    points whose clusters the rows belong to.
    """
    offsets = points[candidates].astype(np.float64) - rows[:, None, :]
    distances = np.einsum("bcd,bcd->bc", offsets, offsets)
    apart = distances
    if rounded is not rows:
        from_rounded = offsets + (rows.astype(np.float64) - rounded)[:, None, :]
        apart = np.einsum("bcd,bcd->bc", from_rounded, from_rounded)
    size = np.einsum("bd,bd->b", rows, rows, dtype=np.float64)
    present = (candidates >= 0) & ~(apart <= (4 * _EPS) ** 2 * size[:, None])
    if sizes is not None:
        at = np.nonzero((candidates == own[:, None]) & (candidates >= 0) & (sizes[own] > 1)[:, None])
        count = sizes[own[at[0]]]
        growth = count / (count - 1)  # p + (p − row) / (n − 1) is this much farther from the row
        offsets[at] *= growth[:, None]
        distances[at] *= growth**2
        present[at] = True
    order = np.lexsort((candidates, np.where(present, distances, np.inf)), axis=1)
    return offsets, present, order


def points_without(points: Array, sizes: Array | None, rows: Array, owners: Array) -> Array:
    """The inducing points (M, d) as if rows (q, d) of one sample had not been among the data.

    A point that is the mean of n rows, m of which are among these (`owners` (q,), the nearest point of each), moves to
    the mean of the others; where none are left, or a point is one of the rows itself, it goes where nothing is near.
    """
    moved = points.astype(np.float64)
    counts = np.bincount(owners, minlength=len(points))
    held = np.ones(len(points)) if sizes is None else np.maximum(sizes, 1)
    sums = np.zeros_like(moved)
    np.add.at(sums, owners, rows)
    touched = np.flatnonzero(counts)
    if sizes is None:
        nearest = np.linalg.norm(points[owners] - rows, axis=1) <= 4 * _EPS * np.linalg.norm(rows, axis=1)
        touched = np.unique(owners[nearest])
    left = held[touched] - counts[touched]
    some = touched[left > 0]
    moved[some] = (held[some, None] * moved[some] - sums[some]) / (held[some] - counts[some])[:, None]
    moved[touched[left <= 0]] = np.abs(points).max(initial=1.0) * _FAR
    return moved.astype(np.float32)


def quantile_table(values: Array) -> dict[str, float]:
    """The `QUANTILES` of finite values by name ("0.95"): the observed value at or next above each."""
    values = np.asarray(values, np.float64)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError("quantiles need at least one value, all of them finite")
    return {str(q): quantile(values, q) for q in QUANTILES}


def quantile(values: Array, q: float) -> float:
    """The observed value at a quantile, or next above it."""
    return float(np.quantile(values, q, method="higher"))
