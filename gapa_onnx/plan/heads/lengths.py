"""A score that does not follow the length of an input.

Short texts have larger variances than long ones, and larger differences between them: the mean of few tokens is
further from what the data have than the mean of many. So where a mask tells lengths, the score of an input with n
positions is what it would be at the usual length,

    score = usual median · (score before / median_n)^exponent_n

and where a score is a logarithm already, usual median + exponent_n · (score before − median_n), with a table of these
numbers by n, a parameter: `settle.lengths` finds it, and its last row is also for longer inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapa_onnx.variance.graph import Value, VarianceGraph


@dataclass(frozen=True)
class LengthTensors:
    """Names of the tensors that level a score over lengths."""

    lengths: str  #: positions of each row that are no padding
    table: str  #: parameter (lengths, 3): exponent, median and usual median
    logarithmic: bool = False  #: whether the score, and so the medians, are logarithms


def level_score(
    graph: VarianceGraph,
    score: Value,
    valid: Value,
    prefix: str,
    logarithmic: bool = False,
    tensors: LengthTensors | None = None,
) -> tuple[Value, LengthTensors]:
    """Emit the levelled score (N,), from the score (N,) and where positions (N, T) are no padding; `tensors` are those
    of a score that has the same table."""
    if tensors is None:  # until its numbers are found it changes nothing
        neutral = np.array([[1.0, 0.0, 0.0] if logarithmic else [1.0, 1.0, 1.0]], score.dtype)
        table = graph.constant(neutral, f"{prefix}/lengths")
    else:
        table = graph.tensor(tensors.table, score.dtype)
    with graph.scope(f"{prefix}/levelled"):
        lengths = graph.reduce("ReduceSum", graph.cast(valid, np.float32), [1], keepdims=False)
        last = graph.cast(graph.dimension(table, 0), np.float32) - 1.0
        row = graph.cast(graph.emit("Min", lengths, last), np.int64)
        exponent, median, usual = (
            graph.emit(
                "Gather", graph.emit("Gather", table, graph.constant(np.int64(column)), axis=1), row, axis=0
            )
            for column in range(3)
        )
        if logarithmic:
            levelled = usual + (score - median) * exponent
        else:  # rounding may leave an epistemic part just below 0, of which there is no power
            levelled = usual * graph.emit("Pow", graph.at_least(score, 0.0) / median, exponent)
    return levelled, tensors or LengthTensors(lengths.name, table.name, logarithmic)
