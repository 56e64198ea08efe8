"""Queries answered some rows at a time, so that memory is bounded whatever the size of a batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gapa_onnx.op.body import FunctionBody
from gapa_onnx.variance.loops import loop
from gapa_onnx.variance.values import Value

Answer = Callable[[FunctionBody, Value], tuple[Value, Value]]
"""s (n, 1) and neighbours (n, k) of rows (n, d), emitted into the given body."""


def in_chunks(e: FunctionBody, rows: Value, most: Value, k: Value, answer: Answer) -> tuple[Value, Value]:
    """What `answer` says of rows (n, d), by a loop over chunks of about equal size: fewer than `most` (1,) rows each."""
    count, width = e.rename(e.dimension(rows, 0), "row_total"), e.dimension(rows, 1)
    # At least one chunk, also of no rows; fewer than `most` rows are one chunk.
    chunks = e.rename(count / most + 1, "chunks")
    size = e.rename((count + chunks - 1) / chunks, "chunk_rows")
    missing = e.rename(chunks * size - count, "padding_rows")

    def joined(*values: Value) -> Value:
        return e.emit("Concat", *values, axis=0)

    padding = e.emit("ConstantOfShape", joined(missing, width), dtype=np.float32)  # of zeros
    stacked = e.emit("Reshape", joined(rows, padding), joined(chunks, e.ints(-1), width))
    stacked = e.rename(stacked, "query_chunks")

    def chunk(inner: FunctionBody, number: Value, states: list[Value]) -> tuple[list[Value], list[Value]]:
        own = inner.emit("Gather", inner.adopt(stacked), number, axis=0)
        return [], list(answer(inner, own))

    steps = e.emit("Gather", chunks, e.constant(np.int64(0)))
    _, stacks = loop(e, steps, [], chunk, "chunk", ranks=(2, 2))
    shares, ids = (
        e.slice(e.emit("Reshape", stack, joined(e.ints(-1), last)), 0, 0, count)
        for stack, last in zip(stacks, (e.ints(1), k))
    )
    return shares, ids
