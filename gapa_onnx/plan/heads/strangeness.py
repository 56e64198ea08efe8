"""How strange an input is, by all witnesses together: the shares of several places and the entropy of the prediction.

Each column x (a share, or the entropy) is put on the scale of ordinary inputs,

    z = (log x − centre) · slope      0 at the median of ordinary inputs, 1 at the quantile .95

and added up: the last place as it is, the entropy where it is not small, earlier places where they are beyond the
ordinary,

    score = z_last + ½ softplus(2 z_entropy) + Σ softplus(4 (z_earlier − 1.25))

An early place knows nothing of classes, and what it finds ordinary may still be of none; a network may be sure of what
it has never seen. So neither takes anything away. The score increases strictly in every share, also beyond all that was
seen. What it is of what was chosen on is in docs/defaults.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.variance.graph import Value, VarianceGraph

FAINTEST = {"share": 1e-12, "entropy": 1e-7}  # what is 0 has no logarithm
QUANTILE = 0.95  # of ordinary inputs, that is at 1
NARROWEST = (
    0.05  # between the median and that quantile: where all data are alike, every difference would be huge
)
EARLIER = 4.0, 1.25  # slope and beginning of what earlier places add
ENTROPY = 2.0, 0.0  # the same of the entropy, and of this ½


@dataclass(frozen=True)
class WitnessTensors:
    """Names of the tensors that a score is combined from."""

    places: tuple[str, ...]  #: the outputs of the places whose shares are columns, the last place first
    entropy: str | None  #: tensor (N, 1), the last column; None without classes
    centre: str  #: parameter (columns,)
    slope: str  #: parameter (columns,)


def emit_strangeness(
    graph: VarianceGraph, shares: Mapping[str, Value], entropy: Value | None, prefix: str
) -> tuple[Value, Value, WitnessTensors]:
    """Emit the score (N,) of shares (N, 1), of which the last place comes first, and the entropy (N, 1); and the same by
    shares alone."""
    columns = [*shares.values(), *([] if entropy is None else [entropy])]
    kind, count, places = columns[0].dtype, len(columns), len(shares)
    centre = graph.constant(np.zeros(count, kind), f"{prefix}/centre")
    slope = graph.constant(np.ones(count, kind), f"{prefix}/slope")
    with graph.scope(prefix):
        together = graph.emit("Concat", *columns, axis=1) if count > 1 else columns[0]
        floor = graph.constant(_floors(places, entropy is not None).astype(kind))
        z = (graph.emit("Log", graph.at_least(together, floor)) - centre) * slope
        by_shares = graph.slice(z, 1, 0, 1) if count > 1 else z
        if places > 1:
            earlier = _softplus(graph, graph.slice(z, 1, 1, places), *EARLIER)
            by_shares = by_shares + (graph.reduce("ReduceSum", earlier, [1]) if places > 2 else earlier)
        score = by_shares
        if entropy is not None:
            score = by_shares + 0.5 * _softplus(graph, graph.slice(z, 1, places, None), *ENTROPY)
        score, by_shares = graph.squeeze(score, [1]), graph.squeeze(by_shares, [1])
    tensors = WitnessTensors(
        tuple(shares), None if entropy is None else entropy.name, centre.name, slope.name
    )
    return score, by_shares, tensors


def _softplus(graph: VarianceGraph, z: Value, slope: float, start: float) -> Value:
    return graph.emit("Softplus", (z - start) * slope if start else z * slope)


def _floors(places: int, entropy: bool) -> Array:
    return np.array([FAINTEST["share"]] * places + [FAINTEST["entropy"]] * entropy)


def scales(columns: Array, entropy: bool) -> tuple[Array, Array]:
    """Centre and slope of each column (n, c) of ordinary inputs; the last is the entropy, if that is said."""
    logs = np.log(np.maximum(columns, _floors(columns.shape[1] - entropy, entropy)))
    finite = logs[np.isfinite(logs).all(axis=1)]
    if not len(finite):
        return np.zeros(columns.shape[1]), np.ones(columns.shape[1])
    centre = np.median(finite, axis=0)
    return centre, 1 / np.maximum(np.quantile(finite, QUANTILE, axis=0) - centre, NARROWEST)


def combined(columns: Array, centre: Array, slope: Array, entropy: bool) -> Array:
    """The score (n,) of columns (n, c) as the graph computes it."""
    places = columns.shape[1] - entropy
    z = (np.log(np.maximum(columns, _floors(places, entropy))) - centre) * slope
    score = z[:, 0] + np.logaddexp(0, EARLIER[0] * (z[:, 1:places] - EARLIER[1])).sum(axis=1)
    if entropy:
        score = score + 0.5 * np.logaddexp(0, ENTROPY[0] * (z[:, -1] - ENTROPY[1]))
    found: Array = score
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
