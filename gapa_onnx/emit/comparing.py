"""The map that queries go through before they are compared, as graph nodes: see `fit.geometry`."""

from __future__ import annotations

import numpy as np

from gapa_onnx.fit.geometry import Geometry, Lengths
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.sites import SHORTEST


def compared(graph: VarianceGraph, query: Value, geometry: Geometry, rank: int | None, prefix: str) -> Value:
    """Emit the coordinates in which queries (…, d) of this rank are compared."""
    last = -1 if rank is None else rank - 1  # before opset 11 axes are not counted from the end
    moved, centred = query, query
    if geometry.linear is not None:
        centre, factors = geometry.linear
        centred = query - graph.constant(centre, f"{prefix}/centre")
        by = graph.constant(factors, f"{prefix}/whitening")
        moved = graph.emit("MatMul", centred, by) if factors.ndim == 2 else centred * by
    if not geometry.unit:
        return moved
    squared = moved.squared
    squares = graph.reduce("ReduceSum", squared, [last])
    parts = [moved / graph.at_least(squares.sqrt(), SHORTEST)]
    if geometry.lengths is not None:
        parts.append(_coordinate(graph, squares, geometry.lengths))
    if geometry.rest is not None:
        variances, lengths = geometry.rest
        along = graph.emit("MatMul", squared, graph.constant(variances[:, None], f"{prefix}/variances"))
        over = graph.reduce("ReduceSum", centred.squared, [last]) - along
        parts.append(_coordinate(graph, graph.at_least(over, 0.0), lengths))
    return parts[0] if len(parts) == 1 else graph.emit("Concat", *parts, axis=last)


def _coordinate(graph: VarianceGraph, squares: Value, lengths: Lengths) -> Value:
    """(½ log(squares + short²) − middle) · slope, with the ½ in the slope."""
    logs = graph.emit("Log", squares + float(np.float32(lengths.short**2)))
    return (logs - 2 * lengths.middle) * (lengths.slope / 2)
