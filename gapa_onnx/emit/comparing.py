"""The map that queries go through before they are compared, as graph nodes: see `fit.geometry`."""

from __future__ import annotations

import numpy as np

from gapa_onnx.fit.geometry import Axes, Geometry
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.sites import SHORTEST

WIDE = 128  # numbers from which on a product and a sum take half the time of onnxruntime's one node for both


def compared(
    graph: VarianceGraph, query: Value, geometry: Geometry, rank: int | None, width: int, prefix: str
) -> Value:
    """Emit the coordinates, so many in all, in which queries (…, d) of this rank are compared."""
    last = -1 if rank is None else rank - 1  # before opset 11 axes are not counted from the end
    if geometry.axes is not None:
        parts, sizes = _projected(graph, query, geometry.axes, last, prefix)
    else:
        if geometry.linear is not None:
            centre, factors = geometry.linear
            query = query - graph.constant(centre, f"{prefix}/centre")
            by = graph.constant(factors, f"{prefix}/whitening")
            query = graph.emit("MatMul", query, by) if factors.ndim == 2 else query * by
        if not geometry.unit:
            return query
        sizes = [_length(graph, query, last, width)]
        parts = [query / graph.at_least(sizes[0], SHORTEST)]
    if geometry.lengths is not None:
        lengths = geometry.lengths
        together = graph.emit("Concat", *sizes, axis=last) if len(sizes) > 1 else sizes[0]
        logs = graph.emit("Log", together + _row(graph, lengths.short))
        parts.append((logs - _row(graph, lengths.middle)) * _row(graph, lengths.slope))
    return parts[0] if len(parts) == 1 else graph.emit("Concat", *parts, axis=last)


def _projected(
    graph: VarianceGraph, query: Value, axes: Axes, last: int, prefix: str
) -> tuple[list[Value], list[Value]]:
    """Both directions along the axes, and the three lengths."""
    centred = query - graph.constant(axes.centre, f"{prefix}/centre")
    inside = graph.emit("MatMul", centred, graph.constant(axes.along, f"{prefix}/axes"))
    white = inside * graph.constant(axes.whitening, f"{prefix}/whitening")
    width, narrow = axes.along.shape
    size, of_white = _length(graph, query, last, width), _length(graph, white, last, narrow)
    whole, along = _squares(graph, centred, last, width), _squares(graph, inside, last, narrow)
    over = graph.at_least(whole - along, 0.0).sqrt()
    one, other = axes.factors
    first = graph.slice(inside, last, 0, len(axes.origin))
    plain = (first + _row(graph, axes.origin)) / (graph.at_least(size, axes.short) * (1 / one))
    directed = white / graph.at_least(of_white * (1 / other), SHORTEST)
    return [plain, directed], [size, of_white, over]


def _length(graph: VarianceGraph, value: Value, last: int, width: int) -> Value:
    """The lengths (…, 1) of rows of so many numbers."""
    if width < WIDE:
        return graph.reduce("ReduceL2", value, [last])
    return _squares(graph, value, last, width).sqrt()


def _squares(graph: VarianceGraph, value: Value, last: int, width: int) -> Value:
    """Their sums of squares."""
    if width < WIDE:
        return graph.reduce("ReduceSumSquare", value, [last])
    return graph.reduce("ReduceSum", value.squared, [last])


def _row(graph: VarianceGraph, numbers: np.ndarray) -> Value:
    return graph.constant(np.asarray(numbers, np.float32))
