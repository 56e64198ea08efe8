"""The neighbourhood of every point: what the local operator takes over from a query's nearest point.

It may hold any points: s given some of the points is never below s given all of them. `choose` takes those from
which most follows about the data around a point, `neighbourhoods` the nearest.

FAISS proposes near points in float32; they are ordered by float64 distances, and where rounding could have
kept a nearer point from being proposed, more are asked for. So the result is a function of the points
alone, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import faiss
import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.op import reference
from gapa_onnx.op.assignment import nearest_point
from gapa_onnx.threads import side_by_side

_SPARE = 8  #: candidates beyond k at first
_MORE = 8  #: times as many candidates for the rows that need more
_SEARCHED = 4096  #: rows per search; FAISS is half as fast on a few hundred
_BLOCK_VALUES = 1 << 21  #: float64 values per working block: 16 MB
_EPS = float(np.finfo(np.float32).eps)
_CHOICE = 2.5  #: times k nearest points, of which `most_informative` chooses k
#: float64 values per piece of work of `most_informative`: 8 MB; smaller ones would wait for each other
_PIECE_VALUES = 1 << 20
_STRIPES = 1024  #: in a standard deviation of the data; rounding moves a row out of one in ten thousand
_ROWS = (16, 32)  #: least and most rows around a point that it chooses them for


@dataclass(frozen=True)
class Chosen:
    """Neighbourhoods that were chosen for some rows, and twice from half of them, to be judged by the others.

    Judged by rows that it was chosen for, a neighbourhood looks better than new rows will find it. A row's half
    is the parity of a stripe across a random direction, so that it is known from the row alone, whatever its last
    bits; stripes are far narrower than cells, and equal rows are in one half.
    """

    whole: Array  #: (M, k) int32, from all rows
    halves: tuple[Array, Array]  #: the same, from the rows of half 0 and of half 1
    stripes: Stripes = field(repr=False)

    def without(self, rows: Array, nearest: Array) -> Array:
        """For rows (n, d) and their nearest points (n,): neighbourhoods from the other half -> (n, k)."""
        first = self.stripes.half(rows)[:, None] == 0
        return np.where(first, self.halves[1][nearest], self.halves[0][nearest])


def choose(points: Array, rows: Array, k: int, length_scale: float, jitter: float, seed: int = 0) -> Chosen:
    """The `most_informative` neighbourhoods of points (M, d) from rows (n, d), and from each half of them."""
    stripes = Stripes.across(rows, seed)
    half = stripes.half(rows)
    parts = (np.arange(len(rows)), *(np.flatnonzero(half == which) for which in (0, 1)))
    whole, first, second = most_informative(points, rows, k, length_scale, jitter, parts)
    return Chosen(whole, (first, second), stripes)


@dataclass(frozen=True)
class Stripes:
    """Narrow stripes across a direction, by which rows fall into two halves."""

    direction: Array  #: (d,)
    centre: float  #: of the data along it, where a stripe begins: data that are moved or scaled have the same halves
    width: float

    @classmethod
    def across(cls, rows: Array, seed: int) -> Stripes:
        direction = np.random.default_rng(seed).choice([-1.0, 1.0], rows.shape[1])
        along = _along(direction, rows)
        return cls(direction, float(along.mean()), float(along.std()) / _STRIPES or 1.0)

    def half(self, rows: Array) -> Array:
        """0 or 1 for each row (n, d)."""
        along = np.nan_to_num(_along(self.direction, rows))
        return np.floor((along - self.centre) / self.width) % 2


def _along(direction: Array, rows: Array) -> Array:
    along: Array = np.einsum("nd,d->n", rows, direction, dtype=np.float64)
    return along


def most_informative(
    points: Array,
    rows: Array,
    k: int,
    length_scale: float,
    jitter: float,
    parts: Sequence[Array] | None = None,
) -> list[Array]:
    """Of points (M, d) near each of them, the k that leave least variance to the rows (n, d) around it -> (M, k) int32.

    The first is the point itself. Then follows, again and again, the point a that lowers the summed variance of
    the rows r around it most, given what has been chosen: by Σ_r c(a, r)² / c(a, a), with c the covariance that is
    left. Each beginning of the list is therefore a good choice as well, for a smaller k.

    There is one result for each of the `parts` of the rows, which are given by their positions; for all rows
    without them.
    """
    parts = [np.arange(len(rows))] if parts is None else parts
    near = neighbourhoods(points, min(len(points), round(_CHOICE * k)))  # (M, c)
    chosen = [near[:, :k].copy() for _ in parts]
    if near.shape[1] == k or k == 1:
        return chosen
    parts = [part[:: max(1, -(-len(part) // (_ROWS[1] * len(points))))] for part in parts]
    owners = _owners(points, rows, np.unique(np.concatenate(parts)))
    around = [_around(part, owners[part], near) if len(part) else None for part in parts]  # (M, t) each
    step = max(1, _PIECE_VALUES // (near.shape[1] * max(points.shape[1], near.shape[1])))

    def choose_part(start: int) -> None:
        part = slice(start, start + step)
        origin = points[part, None].astype(np.float64)
        offsets = (points[near[part]] - origin) / length_scale
        gram = _kernel(offsets, offsets)
        for at, found in zip(around, chosen):
            if at is not None:
                here = at[part, : np.count_nonzero(at[part] >= 0, axis=1).max()]
                from_rows = _kernel((rows[here] - origin) / length_scale, offsets)
                from_rows *= (here >= 0)[:, :, None]
                order = _greedy(gram, from_rows, k, jitter)
                found[part] = np.take_along_axis(near[part], order, axis=1)

    side_by_side(choose_part, range(0, len(points), step))
    return chosen


def _owners(points: Array, rows: Array, wanted: Array) -> Array:
    """The nearest point (M, d) of each of the rows (n, d) that are wanted, -1 for the others -> (n,)."""
    centre = points.mean(axis=0, dtype=np.float64)  # float32 loses digits to a common offset
    owners = np.full(len(rows), -1)
    if len(wanted):
        centred = (rows[wanted] - centre).astype(np.float32)
        owners[wanted] = nearest_point(centred, (points - centre).astype(np.float32))
    return owners


def _around(rows: Array, owners: Array, near: Array) -> Array:
    """Rows that stand for the data around each point, -1 where there are no more -> (M, _ROWS[1]).

    Of the rows (n,) those whose owner (n,) it is, evenly taken; where they are few, also those of the points next
    to it.
    """
    least, most = _ROWS
    sizes = np.bincount(owners, minlength=len(near))  # of the cells
    starts, members = np.cumsum(sizes) - sizes, rows[np.argsort(owners, kind="stable")]
    around = np.full((len(near), most), -1)
    found = np.zeros(len(near), np.int64)
    for place, neighbours in enumerate(near.T):
        still = np.flatnonzero(found < least)
        cells = neighbours[still]
        stride = np.maximum(1, -(-sizes[cells] // most)) if place == 0 else np.ones(len(still), np.int64)
        taken = np.minimum(-(-sizes[cells] // stride), most - found[still])
        each = np.repeat(np.arange(len(still)), taken)
        step = np.arange(len(each)) - (np.cumsum(taken) - taken)[each]  # within the cell
        around[still[each], found[still[each]] + step] = members[starts[cells[each]] + step * stride[each]]
        found[still] += taken
    return around


def _greedy(gram: Array, from_rows: Array, k: int, jitter: float) -> Array:
    """Positions (b, k) of the chosen among c points, from their kernels (b, c, c) and those of t rows (b, t, c).

    A pivoted Cholesky factorisation of the Gram matrix whose pivots are chosen by what they explain of the rows.
    `from_rows` is used up. Loops are inside numpy, and longest along c: this is most of the time of a fit.
    """
    b, c, _ = gram.shape
    each = np.arange(b)
    left = np.full((b, c), 1 + jitter)  # variance of each point, given the chosen
    factor = np.empty((b, k, c))
    order = np.zeros((b, k), np.int64)
    free = np.ones((b, c), bool)
    product = np.empty_like(from_rows)
    for step in range(k):
        if step:
            gain = np.einsum("btc,btc->bc", from_rows, from_rows) / left
            order[:, step] = np.where(free, gain, -1.0).argmax(axis=1)
        if step == k - 1:
            break
        pivot = order[:, step]
        free[each, pivot] = False
        root = np.sqrt(left[each, pivot])[:, None]
        known = factor[each, :step, pivot][:, None, :] @ factor[:, :step]  # (b, 1, c)
        column = (gram[each, pivot] - known[:, 0]) / root  # (b, c)
        factor[:, step] = column
        explained = from_rows[each, :, pivot] / root  # (b, t)
        # faster than a broadcast product
        from_rows -= np.einsum("bt,bc->btc", explained, column, out=product)
        left = np.maximum(left - column**2, jitter)  # so much is left of any point, but for rounding
    return order


def _kernel(a: Array, b: Array) -> Array:
    """exp(−½‖a − b‖²) of offsets (b, n, d) and (b, m, d) in length scales, from a point near to both."""
    halves = [np.einsum("bnd,bnd->bn", offsets, offsets) / 2 for offsets in (a, b)]
    kernel: Array = a @ b.transpose(0, 2, 1)
    kernel -= halves[0][:, :, None] + halves[1][:, None, :]
    np.minimum(kernel, 0, out=kernel)
    return np.exp(kernel, out=kernel)


def neighbourhoods(points: Array, k: int) -> Array:
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


def _ordered(points: Array, rows: Array, candidates: Array, k: int) -> tuple[Array, Array]:
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
    radius[~itself.any(axis=1)] = np.inf  # so many equal points that the row itself was not proposed
    return np.take_along_axis(candidates, order, axis=1), radius
