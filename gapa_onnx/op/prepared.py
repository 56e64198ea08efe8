"""`GapaActivationPrepared` as a model-local function: in float32, in operators that every engine has.

    rows of queries → the nearest point, among the probed lists: MatMul, ArgMax
    → its neighbours and its folded factor (`factors`): Gather
    → k by direct differences, exp → two products with the halves of L⁻¹ → s = 1 − ‖L⁻¹k‖².

What the constants alone decide stands first; engines fold it at load. A query that is not finite is replaced by zeros
before anything is compared, and its s by NaN at the end: sums of NaN mean different things in different engines.

There are no loops and no branches, but where a sample has a query for each pixel or token: there rows are answered some at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from gapa_onnx.op.body import FunctionBody
from gapa_onnx.op.chunks import in_chunks
from gapa_onnx.op.contract import PREPARED, SCHEMAS
from gapa_onnx.variance.values import Value

OLDEST_OPSET = 11  #: the first whose Clip takes bounds as inputs

_LARGEST_COORDINATE = 1e15
"""Queries are clipped to this: beyond it float32 squares overflow. s is 1 out there whatever the neighbours are."""

_UNREACHABLE = -3e38
"""Added to the score of a point whose list is not probed."""

_DOC = (
    "Share of the prior variance of a Gaussian process that the k neighbours of the nearest inducing point leave "
    "unexplained: s = 1 - |L^-1 k|^2 with k the kernel exp(-|a - b|^2 / (2 length_scale^2)) between query and neighbours "
    "and L L' their kernel matrix plus jitter, whose inverse factor is stored. 0 at an inducing point, 1 far from all of "
    "them, NaN for a query that is not finite. This body is the portable form of the native operator of the same name."
)


def prepared_body(opset: int, chunk_bytes: int | None = None) -> onnx.FunctionProto:
    """The function for an opset; with `chunk_bytes`, rows are answered in chunks that take about that much memory."""
    if opset < OLDEST_OPSET:
        raise ValueError(f"there is no prepared body for opset {opset}, only from {OLDEST_OPSET} on")
    e = FunctionBody(opset, SCHEMAS[PREPARED])
    query, count = e.inputs["query"], e.inputs["k"]
    width = e.rename(e.dimension(e.inputs["points"], 1), "width")
    given = e.rename(e.emit("Reshape", query, e.emit("Concat", e.ints(-1), width, axis=0)), "query_rows")
    rows, finite = _finite(e, given)
    if chunk_bytes is None:
        share, ids = _answer(e, rows)
    else:
        share, ids = in_chunks(e, rows, _rows_per_chunk(e, chunk_bytes), count, _answer)
    nothing, nobody = e.constant(np.float32(np.nan), "no_number"), e.constant(np.int64(-1), "no_neighbour")
    e.output(_restored(e, e.where(finite, share, nothing), query, e.ints(1)), "s")
    e.output(_restored(e, e.where(finite, ids, nobody), query, count), "neighbours")
    return e.to_function(_DOC)


def _answer(e: FunctionBody, rows: Value) -> tuple[Value, Value]:
    """s (n, 1) and neighbours (n, k) of finite rows (n, d)."""
    points, length_scale = e.inputs["points"], e.inputs["length_scale"]
    nearest = _nearest(e, rows, points)
    ids = e.rename(e.emit("Gather", e.inputs["neighbourhoods"], nearest, axis=0), "neighbourhood")  # (n, N)
    group = e.rename(e.emit("Gather", points, ids, axis=0), "neighbours_of_nearest")  # (n, N, d)
    # Direct differences: a product of query and points would lose s where the points lie far from their mean.
    away = e.rename(group - e.unsqueeze(rows, [1]), "offsets")
    squares = e.reduce("ReduceSumSquare", away, [2], keepdims=False)
    rate = e.rename(-0.5 / (length_scale * length_scale), "rate")
    kernel = e.rename((squares * rate).exp(), "kernel")  # (n, N)
    explained = _explained(e, kernel, nearest)
    share = e.rename(e.clip(1 - explained, 0, 1), "finite_s")
    return share, e.rename(e.cast(e.slice(ids, 1, 0, e.inputs["k"]), np.int64), "first_neighbours")


def _rows_per_chunk(e: FunctionBody, chunk_bytes: int) -> Value:
    """How many rows fit into so many bytes, plus one: (1,).

    Live at once are about three rows of M scores, three copies of the N offsets of width d, and three factors.
    """
    points, table = e.inputs["points"], e.inputs["neighbourhoods"]
    count, width = e.dimension(table, 1), e.dimension(points, 1)
    numbers = e.dimension(points, 0) + count * (width + count)
    return e.rename(
        e.constant(np.int64(chunk_bytes), "chunk_bytes") / (numbers * (3 * 4)) + 1, "rows_per_chunk"
    )


def _finite(e: FunctionBody, given: Value) -> tuple[Value, Value]:
    """Rows (n, d) of numbers in place of those given, and whether each was finite (n, 1).

    A comparison is false for a NaN, and counting what is true needs no arithmetic with one.
    """
    number = e.compare("Less", e.emit("Abs", given), e.constant(np.float32(np.inf), "infinite"))  # (n, d)
    clipped = e.clip(given, -_LARGEST_COORDINATE, _LARGEST_COORDINATE)
    rows = e.rename(e.where(number, clipped, e.constant(np.float32(0))), "rows")
    least = e.reduce("ReduceMin", e.cast(number, np.float32), [1])
    return rows, e.rename(e.compare("Greater", least, 0.5), "finite")


def _nearest(e: FunctionBody, rows: Value, points: Value) -> Value:
    """The row of the nearest point that the probed lists hold, the first of equal ones: (n,)."""
    centre = e.rename(e.reduce("ReduceMean", points, [0]), "centre")  # (1, d)
    centred = e.rename(rows - centre, "centred_rows")
    lists = e.rename(_scores(e, centred, e.inputs["centroids"] - centre, "list"), "list_scores")  # (n, L)
    list_count = e.dimension(e.inputs["centroids"], 0)
    # One more row, as onnxruntime 1.17 divides by the number of rows in TopK.
    spare = e.emit("ConstantOfShape", e.emit("Concat", e.ints(1), list_count, axis=0), dtype=np.float32)
    best, _ = e.topk(e.emit("Concat", lists, spare, axis=0), e.inputs["nprobe"], -1)
    worst = e.rename(e.slice(e.reduce("ReduceMin", best, [1]), 0, 0, -1), "worst_probed_score")  # (n, 1)
    penalty = e.rename(e.mask("Less", lists, worst) * _UNREACHABLE, "list_penalty")
    # A product hands each point the penalty of its list: picking columns one by one takes ten times as long.
    belongs = e.compare(
        "Equal", e.unsqueeze(_range(e, list_count), [1]), e.cast(e.inputs["list_of_row"], np.int64)
    )
    belongs = e.rename(e.cast(belongs, np.float32), "belongs")  # (L, M)
    scores = e.rename(_scores(e, centred, points - centre, "point"), "point_scores")  # (n, M)
    reachable = e.rename(e.emit("Gemm", penalty, belongs, scores), "reachable_point_scores")
    nearest = e.emit("ArgMax", reachable, axis=1, keepdims=0, dtype=np.int64)
    return e.rename(nearest, "nearest_row")


def _scores(e: FunctionBody, centred: Value, anchors: Value, what: str) -> Value:
    """How near each of the centred anchors is to each row, larger is nearer: q·a − ‖a‖²/2."""
    e.rename(anchors, f"centred_{what}s")
    across = e.rename(e.emit("Transpose", anchors, perm=[1, 0]), f"{what}s_across")
    half = e.emit("Transpose", e.reduce("ReduceSumSquare", anchors, [1]), perm=[1, 0]) * -0.5
    return e.emit("Gemm", centred, across, e.rename(half, f"{what}s_minus_half_square"))


@dataclass(frozen=True)
class _Folding:
    """How the halves of L⁻¹ lie in a folded factor (N + 1, h)."""

    half: Value  #: h, (1,)
    first: Value  #: rows 1 … 2h: A over B
    first_mask: Value  #: (2h, h): A is a lower triangle, B is whole
    last: Value  #: rows 0 … h - 1: Cᵀ
    last_mask: Value  #: (h, h): Cᵀ is an upper triangle
    below: Value  #: (h, 2h): [0 I], which puts h numbers behind h zeros


def _explained(e: FunctionBody, kernel: Value, nearest: Value) -> Value:
    """‖L⁻¹k‖² over the first k neighbours, (n, 1)."""
    folding = _folding(e, nearest)
    both = e.unsqueeze(kernel, [2])  # (n, 2h, 1)
    from_first = (folding.first * folding.first_mask) @ e.slice(both, 1, 0, folding.half)  # (n, 2h, 1)
    ahead = e.slice(e.unsqueeze(kernel, [1]), 2, folding.half, None)  # (n, 1, h)
    from_last = ahead @ (folding.last * folding.last_mask) @ folding.below  # (n, 1, 2h)
    whitened = e.squeeze(from_first, [2]) + e.squeeze(from_last, [1])  # (n, 2h)
    counted = e.mask("Less", _range(e, e.dimension(e.inputs["neighbourhoods"], 1)), e.inputs["k"])
    kept = e.rename(whitened * e.rename(e.cast(counted, np.float32), "counted"), "whitened")
    return e.rename(e.reduce("ReduceSumSquare", kept, [1]), "explained")


def _folding(e: FunctionBody, nearest: Value) -> _Folding:
    factors = e.inputs["factors"]
    half = e.rename(e.dimension(factors, 2), "half")
    own = e.rename(e.emit("Gather", factors, nearest, axis=0), "folded_factor")  # (n, 2h + 1, h)
    columns = _range(e, half)  # (h,)
    rows = e.unsqueeze(_range(e, half + half), [1])  # (2h, 1)
    lower = e.rename(e.cast(e.compare("Less", columns, rows + 1), np.float32), "lower")
    upper = e.unsqueeze(columns, [1])
    upper = e.rename(e.cast(e.compare("Less", upper, columns + 1), np.float32), "upper")
    below = e.compare("Equal", e.unsqueeze(columns, [1]) + half, _range(e, half + half))
    return _Folding(
        half,
        e.slice(own, 1, 1, None),
        lower,
        e.slice(own, 1, 0, half),
        upper,
        e.rename(e.cast(below, np.float32), "below"),
    )


def _range(e: FunctionBody, count: Value) -> Value:
    """0, 1, … count − 1, (count,) int64."""
    zero, one = e.constant(np.int64(0)), e.constant(np.int64(1))
    return e.emit("Range", zero, e.squeeze(count, [0]), one)


def _restored(e: FunctionBody, x: Value, query: Value, last: Value) -> Value:
    """Rows (n, …) in the leading shape of the query, with a last axis of so many."""
    leading = e.rename(e.slice(e.shape(query), 0, 0, -1), "leading_shape")
    return e.reshape(x, e.emit("Concat", leading, last, axis=0))
