"""The map that queries go through before they are compared, as graph nodes: see `fit.geometry`."""

from __future__ import annotations

import numpy as np

from gapa_onnx.fit.geometry import Axes, Geometry
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.sites import SHORTEST


def compared(graph: VarianceGraph, query: Value, geometry: Geometry, rank: int | None, prefix: str) -> Value:
    """Emit the coordinates in which queries (…, d) of this rank are compared."""
    last = -1 if rank is None else rank - 1  # before opset 11 axes are not counted from the end
    if geometry.axes is not None:
        parts, squares = _projected(graph, query, geometry.axes, last, prefix)
    else:
        if geometry.linear is not None:
            centre, factors = geometry.linear
            query = query - graph.constant(centre, f"{prefix}/centre")
            by = graph.constant(factors, f"{prefix}/whitening")
            query = graph.emit("MatMul", query, by) if factors.ndim == 2 else query * by
        if not geometry.unit:
            return query
        squares = [_square(graph, query, last)]
        parts = [query / graph.at_least(squares[0].sqrt(), SHORTEST)]
    if geometry.lengths is not None:
        lengths = geometry.lengths
        together = graph.emit("Concat", *squares, axis=last) if len(squares) > 1 else squares[0]
        logs = graph.emit("Log", together + _row(graph, lengths.short**2))
        parts.append(
            (logs - _row(graph, 2 * lengths.middle)) * _row(graph, lengths.slope / 2)
        )  # log of squares
    return parts[0] if len(parts) == 1 else graph.emit("Concat", *parts, axis=last)


def _projected(
    graph: VarianceGraph, query: Value, axes: Axes, last: int, prefix: str
) -> tuple[list[Value], list[Value]]:
    """Both directions along the axes, and the squares of the three lengths."""
    centred = query - graph.constant(axes.centre, f"{prefix}/centre")
    inside = graph.emit("MatMul", centred, graph.constant(axes.along, f"{prefix}/axes"))
    white = inside * graph.constant(axes.whitening, f"{prefix}/whitening")
    of_query, of_white = _square(graph, query, last), _square(graph, white, last)
    over = graph.at_least(_square(graph, centred, last) - _square(graph, inside, last), 0.0)
    one, other = axes.factors
    plain = (inside + _row(graph, axes.origin)) / (graph.at_least(of_query.sqrt(), SHORTEST) * (1 / one))
    directed = white / (graph.at_least(of_white.sqrt(), SHORTEST) * (1 / other))
    return [plain, directed], [of_query, of_white, over]


def _square(graph: VarianceGraph, value: Value, last: int) -> Value:
    return graph.reduce("ReduceSum", value.squared, [last])


def _row(graph: VarianceGraph, numbers: np.ndarray) -> Value:
    return graph.constant(np.asarray(numbers, np.float32))
