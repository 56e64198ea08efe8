"""The numbers behind the figures: curves thin enough to draw, histograms, ROC."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array

MOST_POINTS = 400
BINS = 40
LOG_SPREAD = 30.0  # values this far apart are shown on a logarithmic axis


@dataclass(frozen=True)
class Histogram:
    """Shares of the data and of the OOD set per bin; each sums to 1."""

    edges: Array  # (bins + 1,)
    data: Array  # (bins,)
    ood: Array | None  # (bins,)
    log: bool
    left_out: int  #: scores that are not finite


def thin(x: Array, y: Array, most: int = MOST_POINTS) -> tuple[Array, Array]:
    """At most `most` points of a curve, evenly along its length as drawn; the ends stay."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= most:
        return x, y
    steps = np.abs(np.diff(x)) / (np.ptp(x) or 1) + np.abs(np.diff(y)) / (np.ptp(y) or 1)
    length = np.concatenate([[0.0], np.cumsum(steps)])
    chosen = np.unique(np.searchsorted(length, np.linspace(0, length[-1], most)))
    chosen[0], chosen[-1] = 0, len(x) - 1
    return x[chosen], y[chosen]


def every(count: int, most: int) -> Array:
    """At most `most` indices below `count`, evenly spaced."""
    return (
        np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)) if count else np.arange(0)
    )


def roc(data: Array, ood: Array) -> tuple[Array, Array]:
    """False and true positive rate for every threshold; the OOD set is what is to be found."""
    data, ood = finite(data), finite(ood)
    values = np.concatenate([data, ood])
    strange = np.concatenate([np.zeros(len(data)), np.ones(len(ood))])
    order = np.argsort(-values, kind="stable")
    values, strange = values[order], strange[order]
    last = np.append(np.flatnonzero(np.diff(values)), len(values) - 1)  # equal scores are one threshold
    caught = np.cumsum(strange)[last] / len(ood)
    alarms = np.cumsum(1 - strange)[last] / len(data)
    return np.append(0.0, alarms), np.append(0.0, caught)


def histogram(data: Array, ood: Array | None) -> Histogram | None:
    """Common bins over both sets; the outermost ones hold all that lies beyond. None without finite scores."""
    shown, strange = finite(data), None if ood is None else finite(ood)
    both = shown if strange is None else np.concatenate([shown, strange])
    if not len(both):
        return None
    left_out = np.size(data) + (0 if ood is None else np.size(ood)) - len(both)
    low, high = np.quantile(both, [0.001, 0.999])
    log = bool(low > 0 and high / low > LOG_SPREAD)
    if log:
        edges = np.geomspace(low, high, BINS + 1)
    else:
        slack = (high - low) * 1e-6 or abs(high) * 0.1 or 0.5  # all scores equal: one bar in the middle
        edges = np.linspace(low - slack, high + slack, BINS + 1)
    return Histogram(
        edges, _shares(shown, edges), None if strange is None else _shares(strange, edges), log, left_out
    )


def finite(values: Array) -> Array:
    """The finite ones, flat."""
    values = np.asarray(values, float).reshape(-1)
    kept: Array = values[np.isfinite(values)]
    return kept


def _shares(values: Array, edges: Array) -> Array:
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    shares: Array = counts / max(1, len(values))
    return shares
