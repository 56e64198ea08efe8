"""Builds the search index of a site as plain tensors, and measures what its approximation costs.

The tensors are the operator's constants (see `contract`). FAISS trains and links; nothing of its file
format is kept. All training runs on one thread, so that a seed gives the same bytes on every machine
setting; `to_faiss` goes the other way and is the check that the layout means what FAISS means by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import faiss
import numpy as np

from gapa_onnx.errors import UserError
from gapa_onnx.op import reference

KINDS = ("flat", "ivf", "ivfpq", "hnsw")

FLAT_LIMIT = 20_000
"""`auto` searches all points up to here: exact, and still cheap beside most models."""

HNSW_DEGREE = 32
_CODES = 256  #: per sub-vector; a code is one byte
_MEASURED = 1000  #: held-out rows that recall and the error of s are measured on, evenly spaced
_KMEANS_ITERATIONS = 10
_TRAINING_POINTS_PER_LIST = 64


@dataclass(frozen=True)
class Index:
    """A search index over the inducing points of a site."""

    kind: str  #: flat, ivf, ivfpq or hnsw
    tensors: dict[str, np.ndarray]  #: the contract's constants but k, length_scale and jitter, in its order
    points: np.ndarray  #: (M, d) float32, in the row order of the operator; decoded for ivfpq
    recall: float | None  #: share of the exact k nearest points that the search finds, on held-out rows
    settings: dict[str, int | float]  #: what was chosen, for the provenance record


class ShareError(NamedTuple):
    """How far s is off because the search misses neighbours. It errs upwards: fewer points, larger s."""

    max: float
    mean: float


def build_index(
    kind: str,
    points: np.ndarray,
    *,
    k: int,
    held_out: np.ndarray,
    seed: int = 0,
    recall_target: float = 0.99,
) -> Index:
    """The index over `points` (M, d) that reaches the recall on `held_out` (q, d) at the least cost.

    auto  flat up to FLAT_LIMIT points, ivf beyond
    flat  every point is compared; recall is 1 by definition
    ivf   about 4·√M lists around k-means centroids; the smallest nprobe that reaches the recall
    ivfpq as ivf, and a point is stored as its list's centroid plus one byte per sub-vector. The decoded
          points *are* the inducing points, so recall is among them; `settings` has the decoding error
    hnsw  a graph of degree 32; the smallest ef (to within a tenth) that reaches the recall

    If the recall cannot be reached, nprobe = all lists, or ef = M.
    """
    points = np.ascontiguousarray(points, np.float32)
    held_out = np.ascontiguousarray(held_out, np.float32)
    kind = ("flat" if len(points) <= FLAT_LIMIT else "ivf") if kind == "auto" else kind
    _check(kind, points, k, held_out)
    seed %= 2**31  # FAISS holds it as an int, and takes a negative one for "by the clock"
    queries = held_out[:: -(-len(held_out) // _MEASURED)] if len(held_out) else held_out  # (≤ _MEASURED, d)
    with _one_thread():
        if kind == "flat":
            return Index("flat", {"points": points}, points, 1.0, {})
        if kind == "hnsw":
            return _build_hnsw(points, k, queries, seed, recall_target)
        return _build_lists(kind, points, k, queries, seed, recall_target)


def _check(kind: str, points: np.ndarray, k: int, held_out: np.ndarray) -> None:
    if kind not in KINDS:
        raise UserError(f"There is no index kind {kind!r}.", f"choose auto, {', '.join(KINDS)}")
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
            "use --index flat or --index ivf, or more inducing points",
        )
    if kind != "flat" and not len(held_out):
        raise UserError(
            f"There are no held-out rows to choose the search effort of an {kind} index on.",
            "give more calibration rows, or use --index flat",
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """FAISS on one thread: the split of a sum over threads changes its last bit, and HNSW's links."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _nearest(queries: np.ndarray, points: np.ndarray, k: int) -> np.ndarray:
    """The exact k nearest points by FAISS, which is fast: (q, k).

    Centred first, because FAISS takes ‖a‖² + ‖b‖² − 2ab for many queries.
    """
    centre = points.mean(axis=0, dtype=np.float64).astype(np.float32)
    flat = faiss.IndexFlatL2(points.shape[1])
    flat.add(points - centre)
    return flat.search(queries - centre, k)[1]


def _recall(found: np.ndarray, exact: np.ndarray) -> float:
    """Share of the exact neighbours (q, k) that are among the found ones (q, k)."""
    return float(np.mean([np.isin(e, f).mean() for e, f in zip(exact, found)]))


# Inverted lists: ivf and ivfpq


def _build_lists(
    kind: str, points: np.ndarray, k: int, queries: np.ndarray, seed: int, recall_target: float
) -> Index:
    centroids = _kmeans(points, min(len(points), max(1, round(4 * len(points) ** 0.5))), seed)
    assigned = _nearest(points, centroids, 1)[:, 0]  # (M,)
    used, assigned = np.unique(assigned, return_inverse=True)  # a list without points would waste a probe
    centroids = np.ascontiguousarray(centroids[used])
    points = np.ascontiguousarray(points[np.argsort(assigned, kind="stable")])
    list_offsets = np.concatenate([[0], np.cumsum(np.bincount(assigned))]).astype(np.int64)

    settings: dict[str, int | float] = {"lists": len(centroids)}
    stored = {"points": points}
    if kind == "ivfpq":
        codes, codebooks = _quantise(points - centroids[reference.list_of_row(list_offsets)], seed)
        stored = {"codes": codes, "codebooks": codebooks}
        decoded = reference.decode(codes, codebooks, centroids, list_offsets)
        settings |= {"subvectors": codes.shape[1], "decoding_error": _relative_error(decoded, points)}
        points = decoded

    # A neighbour is found if and only if its list is probed, so the recall at every nprobe follows from
    # how far down the query's order of lists the lists of its exact neighbours stand.
    order = _nearest(queries, centroids, len(centroids))  # (q, L)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(len(centroids))[None, :], axis=1)
    wanted = reference.list_of_row(list_offsets)[_nearest(queries, points, k)]  # (q, k)
    places = np.take_along_axis(place, wanted, axis=1)
    recalls = np.cumsum(np.bincount(places.ravel(), minlength=len(centroids))) / places.size  # (L,)
    nprobe = min(int(np.searchsorted(recalls, recall_target)) + 1, len(centroids))

    settings["nprobe"] = nprobe
    tensors = {
        **stored,
        "centroids": centroids,
        "list_offsets": list_offsets,
        "nprobe": np.array([nprobe], np.int64),
    }
    return Index(kind, tensors, points, float(recalls[nprobe - 1]), settings)


def _kmeans(points: np.ndarray, count: int, seed: int) -> np.ndarray:
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


def _quantise(residuals: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (M, m) uint8 and codebooks (m, 256, d/m) of the residuals (M, d)."""
    d = residuals.shape[1]
    m = subvectors(d)
    quantiser = faiss.ProductQuantizer(d, m, 8)
    quantiser.cp.seed = seed
    quantiser.cp.min_points_per_centroid = 1
    quantiser.train(residuals)
    codebooks = faiss.vector_to_array(quantiser.centroids).reshape(m, _CODES, d // m)
    return quantiser.compute_codes(residuals), codebooks.astype(np.float32)


def _relative_error(decoded: np.ndarray, points: np.ndarray) -> float:
    """Mean distance from a point to its decoded form, over the points' root mean square spread."""
    moved = np.linalg.norm(decoded.astype(np.float64) - points, axis=1)
    spread = np.sqrt(points.astype(np.float64).var(axis=0).sum())
    return float(moved.mean() / spread) if spread > 0 else 0.0


# Graph: hnsw


def _build_hnsw(points: np.ndarray, k: int, queries: np.ndarray, seed: int, recall_target: float) -> Index:
    graph = faiss.IndexHNSWFlat(points.shape[1], HNSW_DEGREE)
    graph.hnsw.rng = faiss.RandomGenerator(seed)
    graph.add(points)
    levels = faiss.vector_to_array(graph.hnsw.levels).astype(np.int32)
    links = faiss.vector_to_array(graph.hnsw.neighbors).astype(np.int32)
    if len(links) != _slots(levels, HNSW_DEGREE)[-1]:
        raise RuntimeError("this release of FAISS lays out HNSW links in a way that is not known here")

    exact = _nearest(queries, points, k)

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


def _slots(levels: np.ndarray, degree: int) -> np.ndarray:
    """Where each point's links begin, and their total: 2·degree on level 0, degree on each above: (M+1,)."""
    return np.concatenate([[0], np.cumsum(degree * (levels.astype(np.int64) + 1))])


# Back to FAISS, and the error of s


def to_faiss(index: Index) -> faiss.Index:
    """The index as a FAISS object, rebuilt from its tensors; searches return rows of `index.points`."""
    tensors, (m, d) = index.tensors, index.points.shape
    if index.kind == "flat":
        flat = faiss.IndexFlatL2(d)
        flat.add(index.points)
        return flat
    if index.kind == "hnsw":
        return _to_faiss_hnsw(tensors, d)
    quantiser = faiss.IndexFlatL2(d)
    quantiser.add(tensors["centroids"])
    count, offsets = len(tensors["centroids"]), tensors["list_offsets"]
    if index.kind == "ivf":
        lists, content = faiss.IndexIVFFlat(quantiser, d, count), tensors["points"]
    else:
        lists, content = faiss.IndexIVFPQ(quantiser, d, count, tensors["codes"].shape[1], 8), tensors["codes"]
        faiss.copy_array_to_vector(tensors["codebooks"].ravel(), lists.pq.centroids)
    rows = np.arange(m, dtype=np.int64)
    content = np.ascontiguousarray(content).view(np.uint8).reshape(m, -1)  # (M, bytes per point)
    for i, (start, end) in enumerate(zip(offsets[:-1], offsets[1:])):
        if end > start:
            lists.invlists.add_entries(
                i, int(end - start), faiss.swig_ptr(rows[start:end]), faiss.swig_ptr(content[start:end])
            )
    lists.ntotal, lists.is_trained, lists.nprobe = m, True, int(tensors["nprobe"][0])
    return lists


def _to_faiss_hnsw(tensors: dict[str, np.ndarray], d: int) -> faiss.Index:
    degree = int(tensors["degree"][0])
    graph = faiss.IndexHNSWFlat(d, degree)
    graph.storage.add(tensors["points"])
    graph.ntotal = len(tensors["points"])
    faiss.copy_array_to_vector(tensors["levels"], graph.hnsw.levels)
    faiss.copy_array_to_vector(_slots(tensors["levels"], degree).astype(np.uint64), graph.hnsw.offsets)
    faiss.copy_array_to_vector(tensors["links"], graph.hnsw.neighbors)
    graph.hnsw.entry_point = int(tensors["entry_point"][0])
    graph.hnsw.max_level = int(tensors["levels"].max()) - 1
    graph.hnsw.efSearch = int(tensors["ef"][0])
    return graph


def share_error(index: Index, held_out: np.ndarray, length_scale: float, jitter: float, k: int) -> ShareError:
    """The error of s on held-out rows (q, d): the index's neighbours against the exact ones."""
    held_out = np.ascontiguousarray(held_out, np.float32)
    queries = held_out[:: max(1, -(-len(held_out) // _MEASURED))]
    if index.kind == "flat" or not len(queries):
        return ShareError(0.0, 0.0)
    with _one_thread():
        found = to_faiss(index).search(queries, k)[1]
        exact = _nearest(queries, index.points, k)
    difference = np.abs(
        reference.unexplained_share(queries, index.points, found, length_scale, jitter)
        - reference.unexplained_share(queries, index.points, exact, length_scale, jitter)
    )
    return ShareError(float(difference.max()), float(difference.mean()))
