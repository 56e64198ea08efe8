"""How rare a score is: the share of ordinary inputs that look as strange or stranger.

    p = (1 + #{ordinary scores ≥ score}) / (n + 1)         0 where the score is not finite
    flag = not (p > level)

With n scores of inputs that nothing was fitted to, p ≤ α happens with probability at most α for a new input of the
same kind, whatever the scores' distribution is. The scores are a parameter, sorted and laid out in rows of about √n, so
that a search reads two rows in place of n numbers: first the largest score of each row, then the row that it leads to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.variance.graph import Value, VarianceGraph

OLDEST_ASKED = 9  # opset from which on a number can be asked whether it is one


@dataclass(frozen=True)
class TableTensors:
    """Names of the parameters that a p-value is read from."""

    scores: str  #: (rows + 1, width), sorted, the last row of infinities
    largest: str  #: (rows,): of each row but the last
    count: str  #: n
    level: str  #: p at and below which an input is flagged

    def filled(self, scores: Array) -> dict[str, Array]:
        """The parameters for ordinary scores (n,), in any order."""
        table, largest = laid_out(scores)
        return {self.scores: table, self.largest: largest, self.count: np.asarray(len(scores))}


def laid_out(scores: Array) -> tuple[Array, Array]:
    """Scores (n,) in ascending order as (rows + 1, width), filled up with infinities, and the largest of each row."""
    width = max(1, math.isqrt(max(len(scores) - 1, 0)) + 1)
    rows = max(1, -(-len(scores) // width))
    table = np.full((rows + 1, width), np.inf)
    table.flat[: len(scores)] = np.sort(scores)
    return table, table[:-1, -1].copy()


def p_value(scores: Array, score: float | Array) -> Array:
    """p of scores by the ordinary ones (n,), as the graph computes it."""
    at_least = len(scores) - np.searchsorted(np.sort(scores), score, "left")
    found: Array = np.where(np.isfinite(score), (1 + at_least) / (len(scores) + 1), 0.0)
    return found


def emit_p_value(
    graph: VarianceGraph, score: Value, rank: int, prefix: str, known_by: Value | None = None
) -> tuple[Value, TableTensors]:
    """Emit p of a score of this rank; no ordinary score is known yet, so that p is 1. Where another number, `known_by`, is
    not finite, p is 0: what has no score is not ordinary."""
    kind = score.dtype
    table, largest = laid_out(np.empty(0))
    names = [
        graph.constant(np.asarray(array, kind), f"{prefix}/{name}").name
        for name, array in (
            ("ordinary", table),
            ("ordinary/largest", largest),
            ("ordinary/count", 0),
            ("level", 0),
        )
    ]
    tensors = TableTensors(*names)
    return read_p_value(graph, score, rank, tensors, f"{prefix}/p", known_by), tensors


def read_p_value(
    graph: VarianceGraph,
    score: Value,
    rank: int,
    tensors: TableTensors,
    scope: str,
    known_by: Value | None = None,
) -> Value:
    """Emit p of a score by parameters that are there."""
    scores, ends, count = (
        graph.tensor(name, score.dtype) for name in (tensors.scores, tensors.largest, tensors.count)
    )
    with graph.scope(scope):
        column = graph.unsqueeze(score, [rank])
        before = graph.reduce("ReduceSum", ends < column, [rank], keepdims=False)
        row = graph.emit("Gather", scores, graph.cast(before, np.int64), axis=0)  # (…, width)
        inside = graph.reduce("ReduceSum", row < column, [rank], keepdims=False)
        below = before * graph.cast(graph.dimension(scores, 1), score.dtype) + inside
        rare = (count + 1.0 - below) / (count + 1.0)
        known = score if known_by is None else known_by
        nothing = known - known  # of a NaN or an infinity this is no number
        if graph.opset < OLDEST_ASKED:
            return rare * (nothing < 1.0)
        return graph.where(graph.emit("IsNaN", nothing, dtype=np.bool_), score.lift(0), rare)


def emit_flag(graph: VarianceGraph, p: Value, tensors: TableTensors, scope: str, known_by: Value) -> Value:
    """Emit not (p > level), and true where `known_by` is not finite, whatever the level is and the p-value says."""
    with graph.scope(scope):
        level = graph.tensor(tensors.level, p.dtype) + (
            known_by - known_by
        )  # nothing is above what is no number
        return graph.emit("Not", graph.compare("Greater", p, level))
