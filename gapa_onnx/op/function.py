"""The operators as model-local functions in standard ONNX ops, so that a file runs without the library.

onnxruntime uses the native kernel if one is registered and inlines the body if not. The body is

    flatten → score every point → TopK → Gather → offsets to the query in float64
    → [[G, k], [kᵀ, 1]] → a Loop that eliminates one neighbour per step → the last element, s.

Eliminating neighbour 0 of the augmented matrix A with pivot A₀₀ + jitter leaves the Schur complement;
after all k steps it is the 1×1 matrix 1 − kᵀ(G + jitter·I)⁻¹k. This is done in float64 because float32
loses s altogether at a jitter of 1e-6. The search is in float32, as it only chooses the neighbours.

A function's opset must equal its model's, so a body can be written for every opset from 7 on.
`emitter` knows how the opsets differ. Everything that depends on the index alone (means, norms,
decoded points, the list of each row) is computed from constants, which onnxruntime folds at load.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from gapa_onnx.op.contract import DOMAIN, SCHEMAS
from gapa_onnx.op.emitter import Emitter, Size

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
    points, list_of_row = _points(e, index, sizes)
    width = e("Gather", e("Shape", points, to="points_shape"), e.constant("axis_1", [1]), to="width")
    rows = e("Reshape", "query", e("Concat", e.constant("any", [-1]), width, axis=0), to="query_rows")

    # 0 per query, or NaN for a query with a NaN or an infinity.
    poison = e.reduce_sum(e("Sub", rows, rows), axis=1, to="zero_or_nan")  # (n, 1)
    e.constant("reachable_score", np.float32(_REACHABLE))

    scores = _scores(e, rows, poison, points, list_of_row, sizes)
    best, ids = e.topk_rows(scores, sizes["k"], to=("best_scores", "nearest_rows"))
    share = _solve(e, rows, poison, points, best, ids)

    one = e.constant("one", [1])
    query_shape = e("Shape", "query", to="query_shape")
    leading = e.slice(query_shape, starts=[0], ends=[-1], axes=[0], to="leading_shape")
    _restore(e, share, e("Concat", leading, one, axis=0, to="s_shape"), to="s")
    # Unreachable, or a query that is not finite (its scores are NaN, and no comparison holds): -1.
    found = e("Cast", e("Greater", best, "reachable_score"), to_type=TensorProto.INT64, to="found")
    marked = e("Sub", e("Mul", ids, found), e("Sub", one, found), to="nearest_rows_or_minus_1")
    _restore(e, marked, e("Concat", leading, "k", axis=0, to="neighbours_shape"), to="neighbours")

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
    if index not in ("ivf", "ivfpq"):
        return sizes
    if e.opset < 10 and tensors is None:
        raise ValueError(f"the {index} body of opset {e.opset} needs the tensors: its TopK count is fixed")
    rows = "points" if index == "ivf" else "codes"

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
    if index == "ivf":
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


def _scores(
    e: Emitter, rows: str, poison: str, points: str, list_of_row: str | None, sizes: dict[str, Size]
) -> str:
    """How near each point is to each query, larger is nearer: q·p − ‖p‖²/2 = (‖q‖² − ‖q − p‖²)/2, (n, M).

    Both are centred on the mean of the points, as float32 products lose digits far from the origin.
    """
    total = e.reduce_sum(points, axis=0)
    count = e("Cast", e("Gather", "points_shape", e.constant("axis_0", [0])), to_type=TensorProto.FLOAT)
    centre = e("Div", total, count, to="centre")  # (1, d)
    clipped = e.clip(rows, -_LARGEST_COORDINATE, _LARGEST_COORDINATE)
    # All scores of a query that is not finite become NaN: TopK must not sort a mixture of NaN and numbers.
    centred = e("Add", e("Sub", clipped, centre), poison, to="centred_query")

    scores = _proximity(e, centred, points, centre, "point")
    if list_of_row is None:
        return scores
    list_scores = _proximity(e, centred, "centroids", centre, "list")  # (n, L)
    best_lists, _ = e.topk_rows(list_scores, sizes["nprobe"], to=("best_list_scores", "best_lists"))
    last = e("Sub", "nprobe", e.constant("one", [1]), to="last_probe")
    threshold = e("Gather", best_lists, last, axis=1, to="worst_probed_score")  # (n, 1)
    skipped = e("Cast", e("Less", list_scores, threshold), to_type=TensorProto.FLOAT)
    penalty = e("Mul", skipped, e.constant("unreachable_score", np.float32(_UNREACHABLE)), to="list_penalty")
    return e("Add", scores, e("Gather", penalty, list_of_row, axis=1), to="reachable_point_scores")


def _proximity(e: Emitter, centred: str, anchors: str, centre: str, what: str) -> str:
    moved = e("Sub", anchors, centre, to=f"centred_{what}s")
    squares = e.reduce_sum(e("Mul", moved, moved), axis=1)  # (M, 1)
    half = e("Mul", e("Transpose", squares, perm=[1, 0]), e.constant("half_float", np.float32(0.5)))
    product = e("MatMul", centred, e("Transpose", moved, perm=[1, 0]))
    return e("Sub", product, half, to=f"{what}_scores")


def _solve(e: Emitter, rows: str, poison: str, points: str, best: str, ids: str) -> str:
    """s per query, (n, 1, 1) float32, from the scores and rows of its neighbours (n, k)."""
    own = e.unsqueeze(rows, axis=1)  # (n, 1, d)
    # The query is member k: its row of the kernel matrix is kᵀ, and is NaN if it is not finite.
    group = e("Concat", e("Gather", points, ids), own, axis=1, to="neighbours_and_query")
    away = e("Sub", e.double(group), e.double(own), to="offsets")
    scaled = e("Div", away, e.double("length_scale"), to="scaled_offsets")  # (n, k+1, d)
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
    jitter = e.double("jitter")

    step = e.inner()
    pivot = step("Add", step.slice("matrix", [0, 0], [1, 1], [1, 2]), jitter, to="pivot")
    row = step.slice("matrix", [0, 1], [1, _END], [1, 2], to="row")
    column = step.slice("matrix", [1, 0], [_END, 1], [1, 2], to="column")
    rest = step.slice("matrix", [1, 1], [_END, _END], [1, 2], to="rest")
    step("Sub", rest, step("Mul", column, step("Div", row, pivot)), to="matrix_out")
    step("Identity", "go_on", to="go_on_out")
    steps = e("Gather", "k", e.constant("first", np.int64(0)), to="steps")
    last = e.loop(steps, step, matrix, to="last_element")  # (n, 1, 1)

    share = e("Cast", last, to_type=TensorProto.FLOAT, to="s_unclamped")
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
