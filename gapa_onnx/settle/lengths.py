"""How a score follows the length of inputs, on left-out calibration rows, and the table that levels it.

With y = log score and l = log n - log of the usual length, two parabolas in l describe them: the median of y, and the
distance from it of an upper quantile, that of the threshold,

    median = a + b l + c l²        distance = D (1 + d l + e l²)

and a score is put where it would be at the usual length: as many such distances above the median there as it is at
its own,

    log score  ->  a + (y - median) / (1 + d l + e l²)

so that inputs of every length have about the same median, and are flagged about as often. Beyond the lengths of the
data the shortest and the longest stand for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array

FEWEST_ROWS = 50  # with fewer a curve says nothing
ROWS_OF_PARABOLA = 200  # with fewer they are lines
FEWEST_BEYOND = 20  # rows beyond the upper quantile, at least
WIDEST = 3.0  # distance over that at the usual length, and the inverse: what a curve through few rows may say at most
LONGEST = 1 << 16  # rows of a table; longer inputs are as this one
ROUNDS = 60  # of reweighting; curves then move by less than 0.1% of the distances


@dataclass(frozen=True)
class LengthFit:
    """How the score of an output follows the length."""

    usual: float  #: length
    least: int  #: length that the data have
    most: int
    middle: float  #: a, logarithm of the median score at the usual length
    slope: float  #: b
    bend: float  #: c
    widening: float  #: d
    flaring: float  #: e

    def table(self, logarithmic: bool = False) -> Array:
        """Exponent, median and usual median of the score by length: (most + 1, 3); the medians as logarithms, if asked."""
        most = min(self.most, LONGEST)
        away = np.log(np.clip(np.arange(most + 1), self.least, self.most) / self.usual)
        exponent = 1 / np.clip(1 + self.widening * away + self.flaring * away**2, 1 / WIDEST, WIDEST)
        median = self.middle + self.slope * away + self.bend * away**2
        usual = np.full(most + 1, self.middle)
        medians = (median, usual) if logarithmic else (np.exp(median), np.exp(usual))
        return np.stack([exponent, *medians], axis=1)

    def levelled(self, scores: Array, lengths: Array) -> Array:
        """The scores (n,) of inputs of these lengths (n,) as the file computes them."""
        exponent, median, usual = self.table()[
            np.minimum(lengths.astype(np.int64), min(self.most, LONGEST))
        ].T
        found: Array = usual * (np.maximum(scores, 0) / median) ** exponent
        return found

    def numbers(self) -> dict[str, float]:
        """What the record says of it."""
        return {name: float(value) for name, value in vars(self).items()}


def fit_lengths(scores: Array, lengths: Array, quantile: float) -> LengthFit | None:
    """How scores (n,) follow lengths (n,); None where the data do not tell: few rows, or all of one length.

    `quantile` is that of the threshold; where few rows lie beyond it, a lower one is taken.
    """
    good = np.isfinite(scores) & (scores > 0) & (lengths > 0)
    y, n = np.log(scores[good].astype(np.float64)), lengths[good].astype(np.float64)
    if len(y) < FEWEST_ROWS or n.min() == n.max():
        return None
    usual = float(np.exp(np.median(np.log(n))))
    away = np.log(n / usual)
    degree = 2 if len(y) >= ROWS_OF_PARABOLA and len(np.unique(n)) > 2 else 1
    median = quantile_curve(away, y, 0.5, degree)
    upper = max(0.75, min(quantile, 1 - FEWEST_BEYOND / len(y)))
    above = y - np.polynomial.polynomial.polyval(away, median)
    distance = quantile_curve(away, above, upper, degree)
    widening = distance[1:] / distance[0] if distance[0] > 0 else np.zeros(degree)
    a, b, c = (*median.tolist(), 0.0)[:3]
    d, e = (*widening.tolist(), 0.0)[:2]
    return LengthFit(usual, int(n.min()), int(n.max()), a, b, c, d, e)


def quantile_curve(x: Array, y: Array, quantile: float, degree: int) -> Array:
    """Coefficients of the polynomial with a share `quantile` of the points (x, y) below it, the constant first.

    It minimises Σ |y - p(x)| · (quantile above the curve, 1 - quantile below), by least squares that are weighted
    again and again.
    """
    columns = np.stack([x**power for power in range(degree + 1)], axis=1)
    found = np.linalg.lstsq(columns, y, rcond=None)[0]
    tiny = 1e-6 * max(float(np.std(y)), 1e-12)  # a point on the curve has no weight of its own
    for _ in range(ROUNDS):
        away = y - columns @ found
        weight = np.sqrt(np.where(away > 0, quantile, 1 - quantile) / np.maximum(np.abs(away), tiny))
        found = np.linalg.lstsq(columns * weight[:, None], y * weight, rcond=None)[0]
    curve: Array = found
    return curve
