"""What an index finds, by FAISS, and how far its answer is off the exact one."""

from __future__ import annotations

from typing import NamedTuple

import faiss
import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.op.index import MEASURED, Index, search_exactly, slots
from gapa_onnx.op.shares import unexplained_share
from gapa_onnx.threads import one_thread


class ShareError(NamedTuple):
    """How far s is off the s of the exact k nearest points.

    A search that misses neighbours errs upwards: fewer points, larger s. A local index has other
    neighbours, not fewer; it mostly errs upwards, and is never below s given all inducing points.
    """

    max: float
    mean: float


def to_faiss(index: Index) -> faiss.Index:
    """The index as a FAISS object, rebuilt from its tensors; searches return rows of `index.points`.

    Of a local index this is the part that finds the nearest point; see `find`.
    """
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
    if index.kind == "ivf" or index.is_local:
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


def _to_faiss_hnsw(tensors: dict[str, Array], d: int) -> faiss.Index:
    degree = int(tensors["degree"][0])
    graph = faiss.IndexHNSWFlat(d, degree)
    graph.storage.add(tensors["points"])
    graph.ntotal = len(tensors["points"])
    faiss.copy_array_to_vector(tensors["levels"], graph.hnsw.levels)
    faiss.copy_array_to_vector(slots(tensors["levels"], degree).astype(np.uint64), graph.hnsw.offsets)
    faiss.copy_array_to_vector(tensors["links"], graph.hnsw.neighbors)
    graph.hnsw.entry_point = int(tensors["entry_point"][0])
    graph.hnsw.max_level = int(tensors["levels"].max()) - 1
    graph.hnsw.efSearch = int(tensors["ef"][0])
    return graph


def find(index: Index, queries: Array, k: int) -> Array:
    """The neighbours that the operator uses for queries (q, d), by FAISS -> (q, k)."""
    local = index.is_local
    found: Array = to_faiss(index).search(queries, 1 if local else k)[1]
    return index.tensors["neighbourhoods"][found[:, 0], :k] if local else found


def share_error(index: Index, held_out: Array, length_scale: float, jitter: float, k: int) -> ShareError:
    """The error of s on held-out rows (q, d): the index's neighbours against the exact ones."""
    queries = _measured(held_out)
    if index.kind == "flat" or not len(queries):
        return ShareError(0.0, 0.0)
    with one_thread():
        found = find(index, queries, k)
        exact = search_exactly(queries, index.points, k)
        shares = [
            unexplained_share(queries, index.points, near, length_scale, jitter) for near in (found, exact)
        ]
    return _difference(*shares)


def rounding_error(
    rounded: Array,
    points: Array,
    held_out: Array,
    length_scale: float,
    jitter: float,
    k: int,
) -> ShareError:
    """How far s moves on held-out rows (q, d) where rounded points (≤ M, d) stand for points (M, d)."""
    queries = _measured(held_out)
    if rounded is points or not len(queries):
        return ShareError(0.0, 0.0)
    with one_thread():
        shares = [
            unexplained_share(queries, each, search_exactly(queries, each, k), length_scale, jitter)
            for each in (rounded, points)
        ]
    return _difference(*shares)


def _measured(held_out: Array) -> Array:
    held_out = np.ascontiguousarray(held_out, np.float32)
    return held_out[:: max(1, -(-len(held_out) // MEASURED))]  # (≤ MEASURED, d)


def _difference(shares: Array, exact: Array) -> ShareError:
    difference = np.abs(shares - exact)
    return ShareError(float(difference.max()), float(difference.mean()))
