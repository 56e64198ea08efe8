"""Builds the search index of a site as plain tensors, and measures what its approximation costs.

The tensors are the operator's constants (see `contract`). FAISS trains and links; nothing of its file
format is kept. All training runs on one thread, so that a seed gives the same bytes on every machine
setting; `approximation.to_faiss` goes the other way and is the check that the layout means what FAISS means
by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import faiss
import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.op import reference
from gapa_onnx.op.contract import PREPARED
from gapa_onnx.op.neighbourhoods import Chosen, neighbourhoods
from gapa_onnx.threads import one_thread

Groups = Callable[[Array, int], Array | Chosen]
"""Points (M, d) and k -> (M, k): the points that stand for a query whose nearest is that point."""

KINDS = ("flat", "ivf", "ivfpq", "hnsw", "local")

FLAT_LIMIT = 5000
"""`auto` searches all points up to here: exact, and cheaper than solving for 50 neighbours."""

ONE_LIST_LIMIT = 500
"""A local index holds no more points than this in lists: comparing all of them costs next to nothing."""

HNSW_DEGREE = 32
_CODES = 256  #: per sub-vector; a code is one byte
MEASURED = 1000  #: held-out rows that recall and the error of s are measured on, evenly spaced
_KMEANS_ITERATIONS = 10
_TRAINING_POINTS_PER_LIST = 64
_MOST_LISTS = 4096  #: to try; training that many takes about two minutes in 200 dimensions

# What a search costs, where comparing a query with a point in a scan of all is 1. Fitted once, on a busy machine, to
# about 50 timings of the native kernel (10³ … 10⁵ points, 64 and 200 wide, 1 and 256 queries at a time, 50
# neighbours); right within a third for eight of ten. Counted and not timed, so that the same data give the same
# index.
_LIST_COST = 7.0  #: a centroid: compared, ranked among many, and its list opened
_LISTED_COST = 1.12  #: a point of a list that is opened
_WORTH = 2.0  #: times cheaper than exact search an approximate one must be, as large batches gain less
_SAME = 4 * float(np.finfo(np.float32).eps)  #: relative distance up to which a row and a point are the same


@dataclass(frozen=True)
class Index:
    """A search index over the inducing points of a site."""

    kind: str  #: flat, ivf, ivfpq, hnsw, local or prepared
    tensors: dict[str, Array]  #: the contract's constants but k, length_scale and jitter, in its order
    points: Array  #: (M, d) float32, in the row order of the operator; decoded for ivfpq
    recall: float | None  #: share of the exact k nearest points (local: of the nearest) that the search finds
    settings: Mapping[str, int | float]  #: what was chosen, for the record of the file
    groups: Array | Chosen | None = None  #: of a local index, the neighbourhoods as they were chosen

    @property
    def is_local(self) -> bool:
        """Whether a query has the neighbours of its nearest point."""
        return self.kind in ("local", PREPARED)


def build_index(
    kind: str,
    points: Array,
    *,
    k: int,
    held_out: Array,
    seed: int = 0,
    recall_target: float = 0.99,
    search: str = "auto",
    groups: Groups = neighbourhoods,
) -> Index:
    """The index over `points` (M, d) that reaches the recall on `held_out` (q, d) at the least cost.

    auto  flat up to FLAT_LIMIT points; beyond, ivf where that is counted to cost half or less. Never
          hnsw: natively it takes 4 to 5 times ivf's time in batches of 256 up to 10⁵ points, alone as much or more,
          and where the portable function runs it compares all points
    flat  every point is compared; recall is 1 by definition
    ivf   √M lists or more, up to 8·√M, around k-means centroids; the smallest nprobe that reaches the recall
    ivfpq 4·√M lists, and a point is stored as its list's centroid plus one byte per sub-vector. The decoded
          points *are* the inducing points, so recall is among them; `settings` has the decoding error
    hnsw  a graph of degree 32; the smallest ef (to within a tenth) that reaches the recall
    local k points for each point, which `groups` chooses, and lists to find the nearest in. `search` is flat for
          one list, ivf for several, auto for what is cheaper

    If the recall cannot be reached, nprobe = all lists, or ef = M.
    """
    points = np.ascontiguousarray(points, np.float32)
    held_out = np.ascontiguousarray(held_out, np.float32)
    auto = kind == "auto"
    kind = ("flat" if len(points) <= FLAT_LIMIT else "ivf") if auto else kind
    _check(kind, points, k, held_out, search)
    seed %= 2**31  # FAISS holds it as an int, and takes a negative one for "by the clock"
    queries = held_out[:: -(-len(held_out) // MEASURED)] if len(held_out) else held_out  # (≤ MEASURED, d)
    if kind == "flat":
        return _flat(points)
    if kind == "local":
        return _build_local(points, k, queries, seed, recall_target, search, groups)
    with one_thread():
        if kind == "hnsw":
            return _build_hnsw(points, k, queries, seed, recall_target)
        if kind == "ivfpq":
            return _build_ivfpq(points, k, queries, seed, recall_target)
        limit = len(points) / _WORTH if auto else np.inf
        found = _cheapest_lists(
            points, queries, lambda listed: search_exactly(queries, listed, k), seed, recall_target, limit
        )
        return _flat(points) if found is None else _build_ivf(*found)


def _check(kind: str, points: Array, k: int, held_out: Array, search: str) -> None:
    if kind not in KINDS:
        raise UserError(f"There is no index kind {kind!r}.", f"choose auto, {', '.join(KINDS)}")
    if kind == "local" and search not in ("auto", "flat", "ivf"):
        raise UserError(
            f"A local index cannot search for the nearest point by {search!r}.", "choose auto, flat or ivf"
        )
    if not np.isfinite(points).all():
        raise UserError("The inducing points contain NaN or infinite values.", "drop such calibration rows")
    if not 1 <= k <= len(points):
        raise UserError(
            f"k = {k} neighbours cannot be taken from {len(points)} inducing points.",
            "choose k between 1 and the number of inducing points",
        )
    if kind == "ivfpq" and len(points) < _CODES:
        raise UserError(
            f"An ivfpq index needs at least {_CODES} inducing points, there are {len(points)}.",
            "use `index='flat'` or `index='ivf'`, or more inducing points",
        )
    exact = kind == "flat" or (kind == "local" and _is_one_list(len(points), search))
    if not exact and not len(held_out):
        raise UserError(
            f"There are no held-out rows to choose the search effort of an {kind} index on.",
            "give more calibration rows, or use `index='flat'`",
        )


def search_exactly(queries: Array, points: Array, k: int) -> Array:
    """The exact k nearest points by FAISS, which is fast: (q, k).

    Centred first, because FAISS takes ‖a‖² + ‖b‖² − 2ab for many queries.
    """
    centre = points.mean(axis=0, dtype=np.float64).astype(np.float32)
    flat = faiss.IndexFlatL2(points.shape[1])
    flat.add(points - centre)
    found: Array = flat.search(queries - centre, k)[1]
    return found


def _flat(points: Array) -> Index:
    return Index("flat", {"points": points}, points, 1.0, {})


def _recall(found: Array, exact: Array) -> float:
    """Share of the exact neighbours (q, k) that are among the found ones (q, k)."""
    return float(np.mean([np.isin(e, f).mean() for e, f in zip(exact, found)]))


# Inverted lists: ivf and ivfpq


class _Lists(NamedTuple):
    """Points in inverted lists."""

    points: Array  #: (M, d), list by list
    centroids: Array  #: (L, d)
    offsets: Array  #: (L + 1,) int64

    @property
    def of_row(self) -> Array:  # (M,)
        return reference.list_of_row(self.offsets)

    def tensors(self, nprobe: int) -> dict[str, Array]:
        return {
            "centroids": self.centroids,
            "list_offsets": self.offsets,
            "nprobe": np.array([nprobe], np.int64),
        }


def _lists(points: Array, count: int, seed: int) -> _Lists:
    """The points (M, d) in at most `count` lists around k-means centroids, none of them empty."""
    centroids = _kmeans(points, min(len(points), max(1, count)), seed)
    assigned = search_exactly(points, centroids, 1)[:, 0]  # (M,)
    used, assigned = np.unique(assigned, return_inverse=True)  # a list without points would waste a probe
    order = np.argsort(assigned, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(assigned))]).astype(np.int64)
    return _Lists(np.ascontiguousarray(points[order]), np.ascontiguousarray(centroids[used]), offsets)


def _smallest_nprobe(lists: _Lists, queries: Array, wanted: Array, target: float) -> tuple[int, float, float]:
    """The smallest nprobe with which queries (q, d) find the wanted rows (q, k) in `target` of all cases.

    Also the recall that it has, and the mean number of points that it compares. A row is found if and only
    if its list is probed, so the recall at every nprobe follows from how far down the query's order of
    lists the lists of the wanted rows stand.
    """
    count = len(lists.centroids)
    order = search_exactly(queries, lists.centroids, count)  # (q, L)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(count)[None, :], axis=1)
    places = np.take_along_axis(place, lists.of_row[wanted], axis=1)
    recalls = np.cumsum(np.bincount(places.ravel(), minlength=count)) / places.size  # (L,)
    nprobe = min(int(np.searchsorted(recalls, target)) + 1, count)
    compared = np.diff(lists.offsets)[order[:, :nprobe]].sum(axis=1).mean()
    return nprobe, float(recalls[nprobe - 1]), float(compared)


def _cheapest_lists(
    points: Array,
    queries: Array,
    wanted: Callable[[Array], Array],
    seed: int,
    recall_target: float,
    limit: float,
) -> tuple[_Lists, int, float] | None:
    """Lists, nprobe and recall that cost least, √M lists or more; None if all cost more than `limit`.

    `wanted` says which rows (q, k) of listed points (M, d) the queries (q, d) should find. More lists are
    tried while that makes it cheaper.
    """
    best, least = None, np.inf
    root = len(points) ** 0.5
    for count in [root] + [factor * root for factor in (2, 4, 8) if factor * root <= _MOST_LISTS]:
        lists = _lists(points, round(count), seed)
        nprobe, recall, compared = _smallest_nprobe(lists, queries, wanted(lists.points), recall_target)
        cost = _LIST_COST * len(lists.centroids) + _LISTED_COST * compared
        if cost >= least:
            break
        best, least = (lists, nprobe, recall), cost
    return best if least <= limit else None


def _build_ivf(lists: _Lists, nprobe: int, recall: float) -> Index:
    settings = {"lists": len(lists.centroids), "nprobe": nprobe}
    return Index("ivf", {"points": lists.points, **lists.tensors(nprobe)}, lists.points, recall, settings)


def _build_ivfpq(points: Array, k: int, queries: Array, seed: int, recall_target: float) -> Index:
    lists = _lists(points, round(4 * len(points) ** 0.5), seed)
    codes, codebooks = _quantise(lists.points - lists.centroids[lists.of_row], seed)
    decoded = reference.decode(codes, codebooks, lists.centroids, lists.offsets)
    settings = {
        "lists": len(lists.centroids),
        "subvectors": codes.shape[1],
        "decoding_error": _relative_error(decoded, lists.points),
    }
    lists = lists._replace(points=decoded)
    nprobe, recall, _ = _smallest_nprobe(lists, queries, search_exactly(queries, decoded, k), recall_target)
    tensors = {"codes": codes, "codebooks": codebooks, **lists.tensors(nprobe)}
    return Index("ivfpq", tensors, decoded, recall, {**settings, "nprobe": nprobe})


def _kmeans(points: Array, count: int, seed: int) -> Array:
    kmeans = faiss.Kmeans(
        points.shape[1],
        count,
        niter=_KMEANS_ITERATIONS,
        seed=seed,
        min_points_per_centroid=1,  # it would print a warning
        max_points_per_centroid=_TRAINING_POINTS_PER_LIST,
    )
    kmeans.train(points)
    return np.array(kmeans.centroids, np.float32)  # (L, d)


def subvectors(d: int) -> int:
    """Into how many parts ivfpq cuts a vector of d components; must divide d.

    Parts of 4 components if d allows it (16 bytes become 1), else the next width up to 8, else the largest
    below 4: 256 codes cannot describe a wider part well.
    """
    widths = [width for width in (4, 5, 6, 7, 8, 3, 2, 1) if d % width == 0]
    return d // widths[0]


def _quantise(residuals: Array, seed: int) -> tuple[Array, Array]:
    """Codes (M, m) uint8 and codebooks (m, 256, d/m) of the residuals (M, d)."""
    d = residuals.shape[1]
    m = subvectors(d)
    quantiser = faiss.ProductQuantizer(d, m, 8)
    quantiser.cp.seed = seed
    quantiser.cp.min_points_per_centroid = 1
    quantiser.train(residuals)
    codebooks = faiss.vector_to_array(quantiser.centroids).reshape(m, _CODES, d // m)
    return quantiser.compute_codes(residuals), codebooks.astype(np.float32)


def _relative_error(decoded: Array, points: Array) -> float:
    """Mean distance from a point to its decoded form, over the points' root mean square spread."""
    moved = np.linalg.norm(decoded.astype(np.float64) - points, axis=1)
    spread = np.sqrt(points.astype(np.float64).var(axis=0).sum())
    return float(moved.mean() / spread) if spread > 0 else 0.0


# Neighbourhoods: local


def _one_list(points: Array) -> _Lists:
    centre = points.mean(axis=0, dtype=np.float64, keepdims=True).astype(np.float32)
    return _Lists(points, centre, np.array([0, len(points)], np.int64))


def _is_one_list(m: int, search: str) -> bool:
    return search == "flat" or m == 1 or (search == "auto" and m <= ONE_LIST_LIMIT)


def _build_local(
    points: Array,
    k: int,
    queries: Array,
    seed: int,
    recall_target: float,
    search: str,
    groups: Groups,
) -> Index:
    found = None
    if not _is_one_list(len(points), search):
        limit = len(points) / _WORTH if search == "auto" else np.inf
        with one_thread():
            found = _cheapest_lists(
                points, queries, lambda listed: _nearest_other(queries, listed), seed, recall_target, limit
            )
    lists, nprobe, recall = found or (_one_list(points), 1, 1.0)
    with one_thread():
        chosen = groups(lists.points, k)
    table = chosen.whole if isinstance(chosen, Chosen) else chosen
    tensors = {"points": lists.points, "neighbourhoods": table, **lists.tensors(nprobe)}
    settings = {"lists": len(lists.centroids), "nprobe": nprobe}
    return Index("local", tensors, lists.points, recall, settings, chosen)


def _nearest_other(queries: Array, points: Array) -> Array:
    """The nearest point that is not the query itself -> (q, 1).

    A point's own list is always the first that is probed: where rows of the data are inducing points, they
    would make any search look good.
    """
    near = search_exactly(queries, points, min(2, len(points)))
    offsets = points[near[:, 0]].astype(np.float64) - queries
    same = np.linalg.norm(offsets, axis=1) <= _SAME * np.linalg.norm(queries.astype(np.float64), axis=1)
    return np.where(same, near[:, -1], near[:, 0])[:, None]


# Graph: hnsw


def _build_hnsw(points: Array, k: int, queries: Array, seed: int, recall_target: float) -> Index:
    graph = faiss.IndexHNSWFlat(points.shape[1], HNSW_DEGREE)
    graph.hnsw.rng = faiss.RandomGenerator(seed)
    graph.add(points)
    levels = faiss.vector_to_array(graph.hnsw.levels).astype(np.int32)
    links = faiss.vector_to_array(graph.hnsw.neighbors).astype(np.int32)
    if len(links) != slots(levels, HNSW_DEGREE)[-1]:
        raise RuntimeError("this release of FAISS lays out HNSW links in a way that is not known here")

    exact = search_exactly(queries, points, k)

    def recall(ef: int) -> float:
        graph.hnsw.efSearch = ef
        return _recall(graph.search(queries, k)[1], exact)

    ef = _smallest_effort(recall, max(k, 16), len(points), recall_target)
    tensors = {
        "points": points,
        "levels": levels,
        "links": links,
        "degree": np.array([HNSW_DEGREE], np.int64),
        "entry_point": np.array([graph.hnsw.entry_point], np.int64),
        "ef": np.array([ef], np.int64),
    }
    return Index("hnsw", tensors, points, recall(ef), {"degree": HNSW_DEGREE, "ef": ef})


def _smallest_effort(recall: Callable[[int], float], low: int, limit: int, target: float) -> int:
    """The smallest effort that reaches the target, to within a tenth: double, then bisect."""
    high, missed = min(low, limit), None
    while recall(high) < target and high < limit:
        high, missed = min(2 * high, limit), high
    while missed is not None and high - missed > max(1, high // 10):
        middle = (high + missed) // 2
        if recall(middle) < target:
            missed = middle
        else:
            high = middle
    return high


def slots(levels: Array, degree: int) -> Array:
    """Where each point's links begin, and their total: 2·degree on level 0, degree on each above: (M+1,)."""
    return np.concatenate([[0], np.cumsum(degree * (levels.astype(np.int64) + 1))])
