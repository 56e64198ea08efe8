"""The operators as model-local functions in standard ONNX ops, so that a file runs without the library.

onnxruntime uses the native kernel if one is registered and inlines the body if not. The body is

    flatten → a Loop over chunks of rows:
        score every point → TopK → Gather → offsets to the query in float64
        → [[G, k], [kᵀ, 1]] → a Loop that eliminates one neighbour per step → the last element, s.

Eliminating neighbour 0 of the augmented matrix A with pivot A₀₀ + jitter leaves the Schur complement;
after all k steps it is the 1×1 matrix 1 − kᵀ(G + jitter·I)⁻¹k. This is done in float64 because float32
loses s altogether at a jitter of 1e-6. The search is in float32, as it only chooses the neighbours.

A function's opset must equal its model's, so a body can be written for every opset from 7 on. Everything that depends on the index alone (means, norms,
decoded points, the list of each row, the rows of a chunk) is computed from constants outside the loops,
which onnxruntime folds at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from gapa_onnx.op.body import ANY_SIZE_OPSET, FunctionBody, Size
from gapa_onnx.op.chunks import in_chunks
from gapa_onnx.op.contract import PREPARED, SCHEMAS
from gapa_onnx.op.prepared import prepared_body
from gapa_onnx.variance.builder import END
from gapa_onnx.variance.loops import loop
from gapa_onnx.variance.values import Value

OLDEST_OPSET = 7

_LARGEST_COORDINATE = 1e15
"""Queries are clipped to this for the search only: beyond it float32 scores overflow into NaN and
would no longer be ordered. s is 1 out there whatever the neighbours are."""

_UNREACHABLE, _REACHABLE = -3e38, -1e38
"""The score of a point whose list is not probed, and what the score of any other point exceeds."""

_FAR = 400.0
"""Squared distance in length scales beyond which a neighbour is left out of the solve. Its r is below
e^-200; leaving it out can only raise s, and by less than float32 resolves. In exchange the round-off
of G stays below 1e-13 however far away the query is."""

CHUNKED_OPSET = 11
"""From here on queries are answered some rows at a time. Before, Slice has no way to drop the padding
(opset 9), and every Loop must carry a state (opset 10)."""

CHUNK_BYTES = 64 << 20
"""Memory that a chunk of rows may take, by the estimate of `_rows_per_chunk`."""

Tensors = Mapping[str, npt.NDArray[Any]]


def body(
    index: str, opset: int, k: int, tensors: Tensors | None = None, many: bool = True
) -> onnx.FunctionProto:
    """The function for an index kind at an opset; `many` where a sample may have many queries.

    Before opset 10 TopK takes its count as an attribute: there the function holds for this k only, and where points
    are in several lists also for these `tensors` sizes and nprobe only. From opset 10 on the result depends on
    neither.
    """
    if opset < OLDEST_OPSET:
        raise ValueError(f"there is no body for opset {opset}, only from {OLDEST_OPSET} on")
    if index == PREPARED:
        return prepared_body(opset, CHUNK_BYTES if many else None)
    e = FunctionBody(opset, SCHEMAS[index])
    query, count = e.inputs["query"], e.inputs["k"]
    site = _site(e, index, k, tensors)
    rows = e.rename(e.emit("Reshape", query, _joined(e, e.ints(-1), site.width)), "query_rows")
    share, ids = (_answer if opset < CHUNKED_OPSET else _answer_in_chunks)(e, rows, site)
    leading = e.rename(e.slice(e.shape(query), 0, 0, -1), "leading_shape")
    e.output(e.reshape(share, _joined(e, leading, e.ints(1))), "s")
    e.output(e.reshape(ids, _joined(e, leading, count)), "neighbours")
    return e.to_function(_doc(index, opset, k))


def _doc(index: str, opset: int, k: int) -> str:
    text = (
        "Share of the prior variance of a Gaussian process that the k nearest inducing points leave "
        "unexplained: s = 1 - k' (G + jitter I)^-1 k with r(a, b) = exp(-|a - b|^2 / (2 length_scale^2)). "
        "0 at an inducing point, 1 far from all of them, NaN for a query that is not finite. "
        "This body is the portable form of the native operator of the same name."
    )
    if index == "hnsw":
        text += " It searches all points; the graph inputs serve the native operator only."
    if opset < ANY_SIZE_OPSET:
        text += f" Before opset 10 TopK's count is an attribute: this body is for k = {k}."
    return text


def _joined(e: FunctionBody, *values: Value, axis: int = 0) -> Value:
    return e.emit("Concat", *values, axis=axis)


def _double(e: FunctionBody, x: Value) -> Value:
    return e.cast(x, np.float64)


def _sum(e: FunctionBody, x: Value, axis: int) -> Value:
    """The sum over one axis, which stays as a dimension of 1."""
    return e.reduce("ReduceSum", x, [axis])


# ------------------------------------------------------------------ what depends on constants alone


def _size(e: FunctionBody, source: str, name: str, tensors: Tensors | None) -> Size:
    """How many rows an input has."""
    count = e.rename(e.dimension(e.inputs[source], 0), name)
    return Size(count, None if tensors is None else len(tensors[source]))


def _points(e: FunctionBody, index: str, tensors: Tensors | None) -> tuple[Value, Value | None]:
    """The points (M, d), and for the inverted lists the list of each row (M,)."""
    if index in ("flat", "hnsw"):
        return e.inputs["points"], None
    if e.opset < ANY_SIZE_OPSET and tensors is None:
        raise ValueError(f"the {index} body of opset {e.opset} needs the tensors: its TopK count is fixed")
    if e.opset < ANY_SIZE_OPSET and index == "local" and tensors and len(tensors["centroids"]) == 1:
        return e.inputs["points"], None  # all points are in the one list, whatever their number
    if index in ("ivf", "local"):
        return e.inputs["points"], _list_of_row(e, "points", tensors)
    list_of_row = _list_of_row(e, "codes", tensors)
    codes, codebooks, centroids = (e.inputs[name] for name in ("codes", "codebooks", "centroids"))
    # Codebook j starts at row 256·j of the flattened table of all codebooks.
    table_shape = _joined(e, e.ints(-1), e.dimension(codebooks, 2))
    table = e.rename(e.emit("Reshape", codebooks, table_shape), "code_table")
    part_count = _size(e, "codebooks", "part_count", tensors)
    parts = e.arange(part_count, lambda: e.squeeze(e.block(codebooks, [1, 2], [0, 0], [1, 1]), [1, 2]))
    entry = e.cast(codes, np.int64) + parts * 256  # (M, m)
    rows_shape = _joined(e, e.ints(-1), e.dimension(centroids, 1))
    residuals = e.rename(e.emit("Reshape", e.emit("Gather", table, entry), rows_shape), "residuals")
    return e.rename(residuals + e.emit("Gather", centroids, list_of_row), "decoded_points"), list_of_row


def _list_of_row(e: FunctionBody, source: str, tensors: Tensors | None) -> Value:
    """The list of each row: how many lists start at or before it, minus one.

    Sort the row numbers (plus ½, so that a start comes before its row) together with the starts of
    the lists; a row's position in that order minus its own number is the count. This needs memory
    for M + L numbers; comparing every row with every start would need M·L.
    """
    rows, lists = _size(e, source, "row_count", tensors), _size(e, "centroids", "list_count", tensors)
    both = e.rename(rows.tensor + lists.tensor, "rows_and_lists")
    total = Size(both, None if tensors is None else len(tensors[source]) + len(tensors["centroids"]))

    def first_column() -> Value:
        return e.cast(e.emit("Gather", e.inputs[source], e.constant(np.int64(0)), axis=1), np.float32)

    numbers = e.arange(rows, first_column)
    starts = e.rename(e.slice(e.inputs["list_offsets"], 0, 0, -1), "list_starts")
    keys = e.rename(_joined(e, _double(e, numbers) + 0.5, _double(e, starts)), "rows_and_starts")
    _, order = e.topk(-keys, total.within(e), -1)
    _, position = e.topk(-_double(e, order), total.within(e), -1)
    return e.rename(e.emit("Gather", position, numbers) - numbers - 1, "list_of_row")


@dataclass(frozen=True)
class _Anchors:
    """Points or centroids, ready to be compared with queries."""

    what: str
    across: Value  #: centred and transposed, (d, M)
    half: Value  #: half of their squared norms, (1, M)


@dataclass(frozen=True)
class _Lists:
    """Inverted lists, of which each query probes some."""

    anchors: _Anchors
    of_row: Value  #: (M,)
    nprobe: Size


@dataclass(frozen=True)
class _Site:
    """What depends on the constants alone."""

    k: Size
    points: Value  #: (M, d)
    width: Value  #: d, (1,)
    centre: Value  #: mean of the points, (1, d)
    anchors: _Anchors
    lists: _Lists | None
    neighbourhoods: Value | None  #: (M, N) int32
    length_scale: Value
    jitter: Value
    steps: Value  #: k as a scalar


def _site(e: FunctionBody, index: str, k: int, tensors: Tensors | None) -> _Site:
    points, list_of_row = _points(e, index, tensors)
    centre = e.rename(_sum(e, points, 0) / e.cast(e.dimension(points, 0), np.float32), "centre")
    lists = None
    if list_of_row is not None:
        nprobe = Size(e.inputs["nprobe"], None if tensors is None else int(tensors["nprobe"][0]))
        lists = _Lists(_anchors(e, e.inputs["centroids"], centre, "list"), list_of_row, nprobe)
    return _Site(
        Size(e.inputs["k"], k),
        points,
        e.rename(e.dimension(points, 1), "width"),
        centre,
        _anchors(e, points, centre, "point"),
        lists,
        e.inputs.get("neighbourhoods"),
        e.rename(_double(e, e.inputs["length_scale"]), "length_scale_double"),
        e.rename(_double(e, e.inputs["jitter"]), "jitter_double"),
        e.rename(e.emit("Gather", e.inputs["k"], e.constant(np.int64(0))), "steps"),
    )


def _anchors(e: FunctionBody, anchors: Value, centre: Value, what: str) -> _Anchors:
    moved = e.rename(anchors - centre, f"centred_{what}s")
    half = e.emit("Transpose", _sum(e, moved.squared, 1), perm=[1, 0]) * 0.5
    across = e.emit("Transpose", moved, perm=[1, 0])
    return _Anchors(what, e.rename(across, f"{what}s_across"), e.rename(half, f"{what}s_half_square"))


# -------------------------------------------------------------------------------- rows of queries


def _rows_per_chunk(e: FunctionBody, site: _Site) -> Value:
    """How many rows fit into `CHUNK_BYTES`, plus one: (1,).

    Live at once are about three float32 rows of M scores, four float64 copies of the k + 1 offsets of
    width d, and three float64 matrices of k + 1 squared.
    """
    group = site.k.tensor + 1
    solve = group * (site.width * (4 * 8) + group * (3 * 8))
    search = e.dimension(site.points, 0) * (3 * 4)
    return e.rename(e.constant(np.int64(CHUNK_BYTES), "chunk_bytes") / (search + solve) + 1, "rows_per_chunk")


def _answer_in_chunks(e: FunctionBody, rows: Value, site: _Site) -> tuple[Value, Value]:
    """As `_answer`, by a loop over chunks of rows of about equal size, so that memory is bounded."""
    return in_chunks(
        e, rows, _rows_per_chunk(e, site), site.k.tensor, lambda inner, own: _answer(inner, own, site)
    )


def _answer(e: FunctionBody, rows: Value, site: _Site) -> tuple[Value, Value]:
    """s (n, 1) and neighbours (n, k) of query rows (n, d)."""
    # 0 per query, or NaN for a query with a NaN or an infinity.
    poison = e.rename(_sum(e, rows - rows, 1), "zero_or_nan")  # (n, 1)
    scores = _scores(e, rows, poison, site)
    if site.neighbourhoods is None:
        best, ids = e.topk_rows(scores, site.k, "nearest")
    else:
        best, ids = _neighbourhood(e, scores, site.k, e.adopt(site.neighbourhoods))
    share = _solve(e, rows, poison, site, best, ids)
    # Unreachable, or a query that is not finite (its scores are NaN, and no comparison holds): -1.
    found = e.rename(e.cast(e.compare("Greater", best, _REACHABLE), np.int64), "found")
    return share, e.rename(ids * found - (1 - found), "nearest_rows_or_minus_1")


def _scores(e: FunctionBody, rows: Value, poison: Value, site: _Site) -> Value:
    """How near each point is to each query, larger is nearer: q·p − ‖p‖²/2 = (‖q‖² − ‖q − p‖²)/2, (n, M).

    Both are centred on the mean of the points, as float32 products lose digits far from the origin.
    """
    clipped = e.clip(rows, -_LARGEST_COORDINATE, _LARGEST_COORDINATE)
    # All scores of a query that is not finite become NaN: TopK must not sort a mixture of NaN and numbers.
    centred = e.rename(clipped - e.adopt(site.centre) + poison, "centred_query")

    scores = _proximity(e, centred, site.anchors)
    if site.lists is None:
        return scores
    list_scores = _proximity(e, centred, site.lists.anchors)  # (n, L)
    best_lists, _ = e.topk_rows(list_scores, site.lists.nprobe, "best_lists")
    last = e.adopt(site.lists.nprobe.tensor) - 1
    threshold = e.rename(e.emit("Gather", best_lists, last, axis=1), "worst_probed_score")  # (n, 1)
    penalty = e.rename((list_scores < threshold) * _UNREACHABLE, "list_penalty")
    penalties = e.emit("Gather", penalty, e.adopt(site.lists.of_row), axis=1)
    return e.rename(scores + penalties, "reachable_point_scores")


def _proximity(e: FunctionBody, centred: Value, anchors: _Anchors) -> Value:
    return e.rename(centred @ e.adopt(anchors.across) - e.adopt(anchors.half), f"{anchors.what}_scores")


def _neighbourhood(e: FunctionBody, scores: Value, k: Size, neighbourhoods: Value) -> tuple[Value, Value]:
    """The nearest point's score, k times, and its neighbours: (n, k) each."""
    score, nearest = e.topk_rows(scores, Size(e.ints(1), 1), "nearest")  # (n, 1)
    group = e.emit("Gather", neighbourhoods, e.squeeze(nearest, [1]), axis=0)  # (n, N)
    ids = e.rename(e.cast(e.slice(group, 1, 0, k.within(e)), np.int64), "neighbours_of_nearest")
    number = e.cast(ids, np.float32)
    return score + (number - number), ids


def _solve(e: FunctionBody, rows: Value, poison: Value, site: _Site, best: Value, ids: Value) -> Value:
    """s per query, (n, 1) float32, from the scores and rows of its neighbours (n, k)."""
    own = e.unsqueeze(rows, [1])  # (n, 1, d)
    # The query is member k: its row of the kernel matrix is kᵀ, and is NaN if it is not finite.
    group = e.rename(
        _joined(e, e.emit("Gather", e.adopt(site.points), ids), own, axis=1), "neighbours_and_query"
    )
    away = e.rename(_double(e, group) - _double(e, own), "offsets")
    scaled = e.rename(away / e.adopt(site.length_scale), "scaled_offsets")  # (n, k+1, d)
    squares = _sum(e, scaled.squared, 2)
    reachable = _double(e, e.compare("Greater", _joined(e, best, poison, axis=1), _REACHABLE))  # (n, k+1)
    kept = e.rename((squares < _FAR) * e.unsqueeze(reachable, [2]), "kept")  # (n, k+1, 1) of 0 and 1

    def turned(x: Value) -> Value:
        return e.emit("Transpose", x, perm=[0, 2, 1])

    offsets = scaled * kept
    across = turned(offsets)
    # This Reshape changes nothing. Without it onnxruntime 1.17 fuses Transpose and MatMul into an operator
    # that it has no float64 kernel for.
    across = e.emit("Reshape", across, e.shape(across))
    half = squares * kept * 0.5
    kernel = (offsets @ across - half - turned(half)).exp()
    last = _eliminated(e, e.rename(kernel * kept * turned(kept), "kernel_matrix"), site)  # (n, 1, 1)

    share = e.rename(e.squeeze(e.cast(last, np.float32), [2]), "s_unclamped")
    # A clamp may turn NaN into a number: add x − x, which is NaN where x is, to bring it back.
    return e.rename(e.clip(share, 0, 1) + (share - share), "s_rows")


def _eliminated(e: FunctionBody, matrix: Value, site: _Site) -> Value:
    """The last element of (n, k+1, k+1) once the k rows and columns before it are eliminated, one per step."""

    def step(inner: FunctionBody, number: Value, states: list[Value]) -> tuple[list[Value], list[Value]]:
        (left,) = states
        pivot = inner.block(left, [1, 2], [0, 0], [1, 1]) + inner.adopt(site.jitter)
        row = inner.block(left, [1, 2], [0, 1], [1, END])
        column = inner.block(left, [1, 2], [1, 0], [END, 1])
        rest = inner.block(left, [1, 2], [1, 1], [END, END])
        return [rest - column * (row / pivot)], []

    (last,), _ = loop(e, e.adopt(site.steps), [matrix], step, "elimination", ranks=(3,))
    return last
