"""The lower Cholesky factor of covariances that may be singular."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.loops import loop

ROUNDING = 4.0
"""A pivot below this many units of rounding per step, relative to its own diagonal entry, is what
subtraction left over, and counts as 0."""


def cholesky(graph: VarianceGraph, covariance: Value, name: str) -> Value:
    """L (N, C, C), lower triangular, with L Lᵀ = covariance (N, C, C).

    Each step takes the first column of what is left, scales it by the root of its pivot and goes on
    with one row and column less:

        l = S[:, 0] / √S_00,    S ← S[1:, 1:] - l[1:] l[1:]ᵀ

    A pivot at rounding level gives a column of zeros, so singular and zero matrices have a factor. One
    NaN or infinity makes the sample's whole factor NaN. For opset 9 and newer, or a C that is known.
    """
    dtype = covariance.dtype
    with graph.scope(name):
        count = graph.dimension(covariance, 1)  # (1)
        eye = graph.eye(count, dtype)
        diagonal = graph.reduce("ReduceSum", covariance * eye, [2], keepdims=False)  # (N, C)
        least = diagonal * (graph.cast(count, dtype) * (ROUNDING * float(np.finfo(dtype).eps)))
        nothing = graph.slice(diagonal, 1, 0, 0)  # (N, 0)

        def step(
            inner: VarianceGraph, j: Value, states: list[Value]
        ) -> tuple[Sequence[Value], Sequence[Value]]:
            left, above = states  # (N, C - j, C - j), (N, j) of zeros
            column = inner.emit("Gather", left, inner.constant(np.int64(0)), axis=2)
            pivot = inner.slice(column, 1, 0, 1)  # (N, 1)
            kept = pivot > inner.emit("Gather", inner.adopt(least), inner.unsqueeze(j, [0]), axis=1)
            part = column * (kept / (kept * pivot + (1 - kept)).sqrt())
            below = inner.slice(part, 1, 1, None)
            square = inner.unsqueeze(below, [2]) * inner.unsqueeze(below, [1])
            left = inner.slice(inner.slice(left, 1, 1, None), 2, 1, None) - square
            longer = inner.emit("Concat", above, inner.zeros(pivot), axis=1)
            return [left, longer], [inner.emit("Concat", above, part, axis=1)]

        _, (columns,) = loop(graph, count, [covariance, nothing], step, f"{name}/step")  # (C, N, C)
        lower = graph.emit("Transpose", columns, perm=[1, 2, 0])
        # 0 · NaN is NaN: a column that was dropped must not hide it.
        return lower + graph.reduce("ReduceSum", covariance * 0.0, [1, 2])
