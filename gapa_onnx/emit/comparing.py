"""The map that queries go through before they are compared, as graph nodes: see `fit.geometry`."""

from __future__ import annotations

import numpy as np

from gapa_onnx.fit.geometry import Block, Geometry
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.sites import SHORTEST


def compared(graph: VarianceGraph, query: Value, geometry: Geometry, rank: int | None, prefix: str) -> Value:
    """Emit the coordinates in which queries (…, d) of this rank are compared."""
    last = -1 if rank is None else rank - 1  # before opset 11 axes are not counted from the end
    parts = [_block(graph, query, block, last, prefix) for block in geometry.blocks]
    return parts[0] if len(parts) == 1 else graph.emit("Concat", *parts, axis=last)


def _block(graph: VarianceGraph, query: Value, block: Block, last: int, prefix: str) -> Value:
    if block.linear is not None:
        centre, factors = block.linear
        query = query - graph.constant(centre, f"{prefix}/centre")
        by = graph.constant(factors, f"{prefix}/whitening")
        query = graph.emit("MatMul", query, by) if factors.ndim == 2 else query * by
    if not block.unit:
        return query
    squares = graph.reduce("ReduceSum", query.squared, [last])
    unit = query / graph.at_least(squares.sqrt(), SHORTEST)
    if block.lengths is not None:
        lengths = block.lengths
        logs = graph.emit("Log", squares + float(np.float32(lengths.short**2))) * 0.5
        unit = graph.emit("Concat", unit, (logs - lengths.middle) * lengths.slope, axis=last)
    return unit if block.factor == 1 else unit * block.factor
