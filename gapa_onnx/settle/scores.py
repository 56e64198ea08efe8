"""Scores of ordinary inputs: their quantiles, and the threshold at one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.fit.statistics import QUANTILES, quantile

VALUES_PER_ROW = 256  # kept where a row has a score per pixel or token
#: Scores that a file keeps to rank others by. Positions of one image or text are not exchangeable, so that there the
#: p-value is approximate whatever their number, and fewer are searched faster.
MOST_ORDINARY = {"rows": 10_000, "positions": 999}


class ScoreSample:
    """A sample of scores: all scores of a row, or some of them where it has one per pixel or token."""

    def __init__(self, seed: int = 0):
        self._generator = np.random.default_rng(seed)
        self._kept: list[Array] = []

    def add(self, scores: Array) -> None:
        """Take in scores (rows, …)."""
        # There may be no row at all: of what NonMaxSuppression selects, where it finds nothing.
        flat = (
            scores.reshape(len(scores), math.prod(scores.shape[1:])) if scores.ndim else scores.reshape(1, 1)
        )
        if flat.shape[1] > VALUES_PER_ROW:
            flat = flat[:, self._generator.choice(flat.shape[1], VALUES_PER_ROW, replace=False)]
        self._kept.append(flat[np.isfinite(flat)].astype(np.float64))

    @property
    def values(self) -> Array:
        return np.concatenate(self._kept) if self._kept else np.empty(0)

    def table(self) -> dict[str, float]:
        """The score at each of the `QUANTILES`, by name ("0.95")."""
        values = self.values
        return {str(q): quantile(values, q) for q in QUANTILES}


def thinned(values: Array, most: int) -> Array:
    """At most so many of the values (n,), in order: those at evenly spaced ranks."""
    ordered = np.sort(values)
    if len(ordered) <= most:
        return ordered
    ranks = (np.arange(most) + 0.5) * len(ordered) / most
    kept: Array = ordered[ranks.astype(np.int64)]
    return kept


def threshold_at(quantiles: Mapping[str, float], wanted: float) -> float:
    """The score at a quantile, between two of the table by linear interpolation, beyond it at its end."""
    levels = sorted((float(name), value) for name, value in quantiles.items())
    return float(np.interp(wanted, [level for level, _ in levels], [value for _, value in levels]))
