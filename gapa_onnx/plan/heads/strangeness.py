"""How strange an input is, by all witnesses together: the shares of several places and the entropy of the prediction.

Each column x (a share, or the entropy) is put on the scale of ordinary inputs,

    z = (log x − centre) · slope          centre and slope from left-out calibration rows (`settle.combining`)

and the score is a soft maximum of the z, between their mean and the largest of them. It increases strictly in every x
that is not at its end, also beyond all that was seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.variance.graph import Value, VarianceGraph

FAINTEST = 1e-30  # a share or an entropy that is 0 has no logarithm
NARROWEST = 0.05  # spread of logarithms: data that are all alike would make every difference huge
SHARPNESS = 0.5  # of the soft maximum: 0 would be the mean, infinity the maximum


@dataclass(frozen=True)
class WitnessTensors:
    """Names of the tensors that a score is combined from."""

    places: tuple[str, ...]  #: the outputs of the places whose shares are columns, in their order
    entropy: str | None  #: tensor (N, 1), the last column; None without classes
    centre: str  #: parameter (columns,)
    slope: str  #: parameter (columns,)


def emit_strangeness(
    graph: VarianceGraph, shares: dict[str, Value], entropy: Value | None, prefix: str
) -> tuple[Value, Value, WitnessTensors]:
    """Emit the score (N,) of shares (N, 1) and the entropy (N, 1), and the same by shares alone."""
    columns = [*shares.values(), *([] if entropy is None else [entropy])]
    kind, count = columns[0].dtype, len(columns)
    centre = graph.constant(np.zeros(count, kind), f"{prefix}/centre")
    slope = graph.constant(np.ones(count, kind), f"{prefix}/slope")
    with graph.scope(prefix):
        together = graph.emit("Concat", *columns, axis=1) if count > 1 else columns[0]
        logs = graph.emit("Log", graph.at_least(together, FAINTEST))
        z = (logs - centre) * slope
        score = _soft_maximum(graph, z, count)
        by_shares = (
            score if entropy is None else _soft_maximum(graph, graph.slice(z, 1, 0, len(shares)), len(shares))
        )
    tensors = WitnessTensors(
        tuple(shares), None if entropy is None else entropy.name, centre.name, slope.name
    )
    return score, by_shares, tensors


def _soft_maximum(graph: VarianceGraph, z: Value, count: int) -> Value:
    """log(mean(exp(SHARPNESS z))) / SHARPNESS over the columns, (N,)."""
    if count == 1:
        return graph.squeeze(z, [1])
    largest = graph.reduce("ReduceMax", z, [1])
    above = graph.reduce("ReduceMean", ((z - largest) * SHARPNESS).exp(), [1])
    return graph.squeeze(largest + graph.emit("Log", above) / SHARPNESS, [1])


def scales(columns: Array) -> tuple[Array, Array]:
    """Centre and slope of each column (n, c), of ordinary inputs: the median of the logarithms, and one over their
    spread."""
    logs = np.log(np.maximum(columns, FAINTEST))
    centre = np.nanmedian(logs, axis=0)
    spread = np.maximum(np.nanstd(logs, axis=0), NARROWEST)
    return centre, 1 / spread


def combined(columns: Array, centre: Array, slope: Array) -> Array:
    """The score (n,) of columns (n, c) as the graph computes it."""
    z = (np.log(np.maximum(columns, FAINTEST)) - centre) * slope
    largest = z.max(axis=1, keepdims=True)
    found: Array = largest[:, 0] + np.log(np.mean(np.exp(SHARPNESS * (z - largest)), axis=1)) / SHARPNESS
    return found


def emit_entropy(graph: VarianceGraph, logits: Value, link: str, scope: str) -> Value:
    """The entropy (N, 1) of the source's own prediction from its logits (N, C); of labels the sum over them.

    Each term is positive, so that nothing cancels where the prediction is sure.
    """
    with graph.scope(scope):
        if link == "sigmoid":
            size = graph.emit("Abs", logits)
            rest = (-size).exp()  # odds of the less probable answer
            terms = graph.emit("Log", 1.0 + rest) + size * rest / (1.0 + rest)
            return graph.reduce("ReduceSum", terms, [1])
        away = graph.reduce("ReduceMax", logits, [1]) - logits
        weight = (-away).exp()
        total = graph.reduce("ReduceSum", weight, [1])
        return graph.emit("Log", total) + graph.reduce("ReduceSum", weight * away, [1]) / total
