"""The operators as model-local functions in standard ONNX ops, so that a file runs without the library.

onnxruntime uses the native kernel if one is registered and inlines the body if not. The body is

    flatten → a Loop over chunks of rows:
        score every point → TopK → Gather → offsets to the query in float64
        → [[G, k], [kᵀ, 1]] → a Loop that eliminates one neighbour per step → the last element, s.

Eliminating neighbour 0 of the augmented matrix A with pivot A₀₀ + jitter leaves the Schur complement;
after all k steps it is the 1×1 matrix 1 − kᵀ(G + jitter·I)⁻¹k. This is done in float64 because float32
loses s altogether at a jitter of 1e-6. The search is in float32, as it only chooses the neighbours.

A function's opset must equal its model's, so a body can be written for every opset from 7 on.
`emitter` knows how the opsets differ. Everything that depends on the index alone (means, norms,
decoded points, the list of each row, the rows of a chunk) is computed from constants outside the loops,
which onnxruntime folds at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from gapa_onnx.op.contract import DOMAIN, SCHEMAS
from gapa_onnx.op.emitter import Emitter, Size, Slot

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

_END = np.iinfo(np.int64).max
"""The end of a Slice that reaches to the end, whatever the size."""


def body(
    index: str, opset: int, k: int, tensors: Mapping[str, np.ndarray] | None = None
) -> onnx.FunctionProto:
    """The function for an index kind at an opset.

    Before opset 10 TopK takes its count as an attribute: there the function holds for this k only,
    and for ivf and ivfpq also for these `tensors` sizes and nprobe only. From opset 10 on the
    result depends on neither.
    """
    schema = SCHEMAS[index]
    if opset < OLDEST_OPSET:
        raise ValueError(f"there is no body for opset {opset}, only from {OLDEST_OPSET} on")
    e = Emitter(opset)
    sizes = _sizes(e, index, k, tensors)
    site = _site(e, index, sizes)
    width = e("Gather", "points_shape", e.constant("axis_1", [1]), to="width")
    any_rows = e("Concat", e.constant("any", [-1]), width, axis=0)
    rows = e("Reshape", "query", any_rows, to="query_rows")
    if opset < CHUNKED_OPSET:
        share, ids = _answer(e, rows, site, sizes)
    else:
        share, ids = _answer_in_chunks(e, rows, site, sizes)

    query_shape = e("Shape", "query", to="query_shape")
    leading = e.slice(query_shape, starts=[0], ends=[-1], axes=[0], to="leading_shape")
    _restore(e, share, e("Concat", leading, e.constant("one", [1]), axis=0, to="s_shape"), to="s")
    _restore(e, ids, e("Concat", leading, "k", axis=0, to="neighbours_shape"), to="neighbours")

    return helper.make_function(
        DOMAIN,
        schema.name,
        [port.name for port in schema.inputs],
        [port.name for port in schema.outputs],
        e.nodes,
        [helper.make_opsetid("", opset)],
        doc_string=_doc(index, opset, k),
    )


def _doc(index: str, opset: int, k: int) -> str:
    text = (
        "Share of the prior variance of a Gaussian process that the k nearest inducing points leave "
        "unexplained: s = 1 - k' (G + jitter I)^-1 k with r(a, b) = exp(-|a - b|^2 / (2 length_scale^2)). "
        "0 at an inducing point, 1 far from all of them, NaN for a query that is not finite. "
        "This body is the portable form of the native operator of the same name."
    )
    if index == "hnsw":
        text += " It searches all points; the graph inputs serve the native operator only."
    if opset < 10:
        text += f" Before opset 10 TopK's count is an attribute: this body is for k = {k}."
    return text


def _sizes(e: Emitter, index: str, k: int, tensors: Mapping[str, np.ndarray] | None) -> dict[str, Size]:
    """The counts that TopK needs: as tensors, and before opset 10 as numbers."""
    sizes = {"k": Size("k", k)}
    if index not in ("ivf", "ivfpq", "local"):
        return sizes
    if e.opset < 10 and tensors is None:
        raise ValueError(f"the {index} body of opset {e.opset} needs the tensors: its TopK count is fixed")
    rows = "codes" if index == "ivfpq" else "points"

    def size_of(source: str, to: str) -> Size:
        count = e("Gather", e("Shape", source), e.constant("axis_0", [0]), to=to)
        return Size(count, len(tensors[source]) if tensors else None)

    row_count, list_count = size_of(rows, "row_count"), size_of("centroids", "list_count")
    both = e("Add", row_count.name, list_count.name, to="rows_and_lists")
    sizes["rows"] = row_count
    sizes["rows_and_lists"] = Size(both, row_count.value + list_count.value if tensors else None)
    sizes["nprobe"] = Size("nprobe", int(tensors["nprobe"][0]) if tensors else None)
    if index == "ivfpq":
        sizes["parts"] = size_of("codebooks", "part_count")
    return sizes


def _points(e: Emitter, index: str, sizes: dict[str, Size]) -> tuple[str, str | None]:
    """The points (M, d), and for the inverted lists the list of each row (M,)."""
    if index in ("flat", "hnsw"):
        return "points", None
    if index in ("ivf", "local"):
        return "points", _list_of_row(e, "points", sizes)
    list_of_row = _list_of_row(e, "codes", sizes)
    # Codebook j starts at row 256·j of the flattened table of all codebooks.
    part_width = e("Gather", e("Shape", "codebooks"), e.constant("axis_2", [2]), to="part_width")
    table_shape = e("Concat", e.constant("any", [-1]), part_width, axis=0)
    table = e("Reshape", "codebooks", table_shape, to="code_table")
    parts = e.arange(
        sizes["parts"], lambda: e("Squeeze", e.slice("codebooks", [0, 0], [1, 1], [1, 2]), axes=[1, 2])
    )
    starts = e("Mul", parts, e.constant("codes_per_part", [256]))  # (m,)
    entry = e("Add", e("Cast", "codes", to_type=TensorProto.INT64), starts)  # (M, m)
    width = e("Gather", e("Shape", "centroids"), e.constant("axis_1", [1]))
    residuals = e("Reshape", e("Gather", table, entry), e("Concat", "any", width, axis=0), to="residuals")
    return e("Add", residuals, e("Gather", "centroids", list_of_row), to="decoded_points"), list_of_row


def _list_of_row(e: Emitter, source: str, sizes: dict[str, Size]) -> str:
    """The list of each row: how many lists start at or before it, minus one.

    Sort the row numbers (plus ½, so that a start comes before its row) together with the starts of
    the lists; a row's position in that order minus its own number is the count. This needs memory
    for M + L numbers; comparing every row with every start would need M·L.
    """
    first = e.constant("first", np.int64(0))
    numbers = e.arange(
        sizes["rows"], lambda: e("Cast", e("Gather", source, first, axis=1), to_type=TensorProto.FLOAT)
    )
    starts = e.slice("list_offsets", starts=[0], ends=[-1], axes=[0], to="list_starts")
    keys = e(
        "Concat",
        e("Add", e.double(numbers), e.constant("half", np.float64(0.5))),
        e.double(starts),
        axis=0,
        to="rows_and_starts",
    )
    _, order = e.topk(e("Neg", keys), sizes["rows_and_lists"], to=("", "sorted_order"))
    _, position = e.topk(e("Neg", e.double(order)), sizes["rows_and_lists"], to=("", "sorted_position"))
    starts_before = e("Sub", e("Gather", position, numbers), numbers)
    return e("Sub", starts_before, e.constant("one", [1]), to="list_of_row")


@dataclass(frozen=True)
class _Anchors:
    """Points or centroids, ready to be compared with queries."""

    what: str
    across: str  #: centred and transposed, (d, M)
    half: str  #: half of their squared norms, (1, M)


@dataclass(frozen=True)
class _Site:
    """What depends on the constants alone."""

    points: str  #: (M, d)
    centre: str  #: mean of the points, (1, d)
    anchors: _Anchors
    lists: _Anchors | None
    list_of_row: str | None  #: (M,)
    neighbourhoods: str | None  #: (M, N) int32
    length_scale: str
    jitter: str
    steps: str  #: k as a scalar


def _site(e: Emitter, index: str, sizes: dict[str, Size]) -> _Site:
    points, list_of_row = _points(e, index, sizes)
    shape = e("Shape", points, to="points_shape")
    count = e("Cast", e("Gather", shape, e.constant("axis_0", [0])), to_type=TensorProto.FLOAT)
    centre = e("Div", e.reduce_sum(points, axis=0), count, to="centre")
    e.constant("reachable_score", np.float32(_REACHABLE))
    return _Site(
        points,
        centre,
        _anchors(e, points, centre, "point"),
        _anchors(e, "centroids", centre, "list") if list_of_row else None,
        list_of_row,
        "neighbourhoods" if index == "local" else None,
        e.double("length_scale"),
        e.double("jitter"),
        e("Gather", "k", e.constant("first", np.int64(0)), to="steps"),
    )


def _anchors(e: Emitter, anchors: str, centre: str, what: str) -> _Anchors:
    moved = e("Sub", anchors, centre, to=f"centred_{what}s")
    squares = e.reduce_sum(e("Mul", moved, moved), axis=1)  # (M, 1)
    half = e("Mul", e("Transpose", squares, perm=[1, 0]), e.constant("half_float", np.float32(0.5)))
    return _Anchors(what, e("Transpose", moved, perm=[1, 0]), half)


def _rows_per_chunk(e: Emitter) -> str:
    """How many rows fit into `CHUNK_BYTES`, plus one: (1,).

    Live at once are about three float32 rows of M scores, four float64 copies of the k + 1 offsets of
    width d, and three float64 matrices of k + 1 squared.
    """
    group = e("Add", "k", e.constant("one", [1]))
    offsets = e("Mul", "width", e.constant("bytes_per_offset", [4 * 8]))
    entries = e("Mul", group, e.constant("bytes_per_entry", [3 * 8]))
    solve = e("Mul", group, e("Add", offsets, entries))
    points = e("Gather", "points_shape", e.constant("axis_0", [0]))
    search = e("Mul", points, e.constant("bytes_per_point", [3 * 4]))
    fitting = e("Div", e.constant("chunk_bytes", [CHUNK_BYTES]), e("Add", search, solve))
    return e("Add", fitting, "one", to="rows_per_chunk")


def _answer_in_chunks(e: Emitter, rows: str, site: _Site, sizes: dict[str, Size]) -> tuple[str, str]:
    """As `_answer`, by a loop over chunks of rows of about equal size, so that memory is bounded."""
    one = e.constant("one", [1])
    count = e("Gather", e("Shape", rows), e.constant("axis_0", [0]), to="row_total")
    # At least one chunk, also of no rows; fewer than `rows_per_chunk` rows are one chunk.
    chunks = e("Add", e("Div", count, _rows_per_chunk(e)), one, to="chunks")
    size = e("Div", e("Sub", e("Add", count, chunks), one), chunks, to="chunk_rows")
    missing = e("Sub", e("Mul", chunks, size), count, to="padding_rows")
    padding = e("ConstantOfShape", e("Concat", missing, "width", axis=0))  # of float32 zeros
    padded = e("Concat", rows, padding, axis=0)
    stacked = e("Reshape", padded, e("Concat", chunks, "any", "width", axis=0), to="query_chunks")

    chunk = e.inner()
    share, ids = _answer(chunk, chunk("Gather", stacked, "chunk_number", axis=0), site, sizes)
    slots = [Slot(share, TensorProto.FLOAT, 2), Slot(ids, TensorProto.INT64, 2)]
    steps = e("Gather", chunks, e.constant("first", np.int64(0)))
    stacks = e.loop("chunk", steps, chunk, each=slots, to=("s_chunks", "neighbour_chunks"))
    whole = []
    for stack, last in zip(stacks, (one, "k")):
        flat = e("Reshape", stack, e("Concat", "any", last, axis=0))
        whole.append(e("Slice", flat, "axis_0", count, "axis_0"))
    return whole[0], whole[1]


def _answer(e: Emitter, rows: str, site: _Site, sizes: dict[str, Size]) -> tuple[str, str]:
    """s (n, 1) and neighbours (n, k) of query rows (n, d)."""
    # 0 per query, or NaN for a query with a NaN or an infinity.
    poison = e.reduce_sum(e("Sub", rows, rows), axis=1, to="zero_or_nan")  # (n, 1)
    scores = _scores(e, rows, poison, site, sizes)
    if site.neighbourhoods is None:
        best, ids = e.topk_rows(scores, sizes["k"], to=("best_scores", "nearest_rows"))
    else:
        best, ids = _neighbourhood(e, scores, site, sizes["k"])
    share = _solve(e, rows, poison, site, best, ids)
    # Unreachable, or a query that is not finite (its scores are NaN, and no comparison holds): -1.
    found = e("Cast", e("Greater", best, "reachable_score"), to_type=TensorProto.INT64, to="found")
    missing = e("Sub", e.constant("one", [1]), found)
    return share, e("Sub", e("Mul", ids, found), missing, to="nearest_rows_or_minus_1")


def _scores(e: Emitter, rows: str, poison: str, site: _Site, sizes: dict[str, Size]) -> str:
    """How near each point is to each query, larger is nearer: q·p − ‖p‖²/2 = (‖q‖² − ‖q − p‖²)/2, (n, M).

    Both are centred on the mean of the points, as float32 products lose digits far from the origin.
    """
    clipped = e.clip(rows, -_LARGEST_COORDINATE, _LARGEST_COORDINATE)
    # All scores of a query that is not finite become NaN: TopK must not sort a mixture of NaN and numbers.
    centred = e("Add", e("Sub", clipped, site.centre), poison, to="centred_query")

    scores = _proximity(e, centred, site.anchors)
    if site.lists is None:
        return scores
    list_scores = _proximity(e, centred, site.lists)  # (n, L)
    best_lists, _ = e.topk_rows(list_scores, sizes["nprobe"], to=("best_list_scores", "best_lists"))
    last = e("Sub", "nprobe", e.constant("one", [1]), to="last_probe")
    threshold = e("Gather", best_lists, last, axis=1, to="worst_probed_score")  # (n, 1)
    skipped = e("Cast", e("Less", list_scores, threshold), to_type=TensorProto.FLOAT)
    penalty = e("Mul", skipped, e.constant("unreachable_score", np.float32(_UNREACHABLE)), to="list_penalty")
    return e("Add", scores, e("Gather", penalty, site.list_of_row, axis=1), to="reachable_point_scores")


def _proximity(e: Emitter, centred: str, anchors: _Anchors) -> str:
    return e("Sub", e("MatMul", centred, anchors.across), anchors.half, to=f"{anchors.what}_scores")


def _neighbourhood(e: Emitter, scores: str, site: _Site, k: Size) -> tuple[str, str]:
    """The nearest point's score, k times, and its neighbours: (n, k) each."""
    one = Size(e.constant("one", [1]), 1)
    score, nearest = e.topk_rows(scores, one, to=("nearest_score", "nearest_row"))  # (n, 1)
    group = e("Gather", site.neighbourhoods, e("Squeeze", nearest, axes=[1]), axis=0)  # (n, N)
    if e.opset < 10:
        group = e.slice(group, [0], [k.value], [1])
    else:
        group = e("Slice", group, e.constant("axis_0", [0]), k.name, e.constant("axis_1", [1]))
    ids = e("Cast", group, to_type=TensorProto.INT64, to="nearest_rows")
    number = e("Cast", ids, to_type=TensorProto.FLOAT)
    return e("Add", score, e("Sub", number, number), to="best_scores"), ids


def _solve(e: Emitter, rows: str, poison: str, site: _Site, best: str, ids: str) -> str:
    """s per query, (n, 1) float32, from the scores and rows of its neighbours (n, k)."""
    own = e.unsqueeze(rows, axis=1)  # (n, 1, d)
    # The query is member k: its row of the kernel matrix is kᵀ, and is NaN if it is not finite.
    group = e("Concat", e("Gather", site.points, ids), own, axis=1, to="neighbours_and_query")
    away = e("Sub", e.double(group), e.double(own), to="offsets")
    scaled = e("Div", away, site.length_scale, to="scaled_offsets")  # (n, k+1, d)
    squares = e.reduce_sum(e("Mul", scaled, scaled), axis=2)
    near = e.double(e("Less", squares, e.constant("far", np.float64(_FAR))))
    reachable = e.double(e("Greater", e("Concat", best, poison, axis=1), "reachable_score"))  # (n, k+1)
    kept = e("Mul", near, e.unsqueeze(reachable, axis=2), to="kept")  # (n, k+1, 1) of 0 and 1

    def turned(x: str) -> str:
        return e("Transpose", x, perm=[0, 2, 1])

    offsets = e("Mul", scaled, kept)
    across = turned(offsets)
    # This Reshape changes nothing. Without it onnxruntime 1.17 fuses Transpose and MatMul into an operator
    # that it has no float64 kernel for.
    across = e("Reshape", across, e("Shape", across))
    half = e("Mul", e("Mul", squares, kept), e.constant("half", np.float64(0.5)))
    exponent = e("Sub", e("Sub", e("MatMul", offsets, across), half), turned(half))
    matrix = e("Mul", e("Mul", e("Exp", exponent), kept), turned(kept), to="kernel_matrix")

    step = e.inner()
    pivot = step("Add", step.slice("matrix", [0, 0], [1, 1], [1, 2]), site.jitter, to="pivot")
    row = step.slice("matrix", [0, 1], [1, _END], [1, 2], to="row")
    column = step.slice("matrix", [1, 0], [_END, 1], [1, 2], to="column")
    rest = step.slice("matrix", [1, 1], [_END, _END], [1, 2], to="rest")
    step("Sub", rest, step("Mul", column, step("Div", row, pivot)), to="matrix_out")
    state = [(matrix, Slot("matrix", TensorProto.DOUBLE, 3))]
    (last,) = e.loop("elimination", site.steps, step, state, to=["last_element"])  # (n, 1, 1)

    share = e("Squeeze", e("Cast", last, to_type=TensorProto.FLOAT), axes=[2], to="s_unclamped")
    # A clamp may turn NaN into a number: add x − x, which is NaN where x is, to bring it back.
    return e("Add", e.clip(share, 0.0, 1.0), e("Sub", share, share), to="s_rows")


def _restore(e: Emitter, x: str, shape: str, to: str) -> None:
    """Reshape rows to the query's leading shape, which may have a dimension of 0."""
    if e.opset >= 14:
        e("Reshape", x, shape, allowzero=1, to=to)
        return
    # There a 0 means "copy the input's": ask for the dimension to be inferred instead, which is 0.
    empty = e("Cast", e("Equal", shape, e.constant("zero", [0])), to_type=TensorProto.INT64)
    e("Reshape", x, e("Sub", shape, empty), to=to)
