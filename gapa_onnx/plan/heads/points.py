"""Fixed points that stand for Gaussian logits: what replaces sampling in a converted file.

    E f(l), l ~ N(mean, diag(var))   ≈   Σ_s weight_s f(mean + sqrt(var) · point_s)

Three kinds:

latin    for softmax. Latin hypercube: in each column every cell of equal probability is used once, and
         with each point comes its negative. A column belongs to a *rank*, not to a class: the class
         with the largest logit takes column 0. The answer then depends on few columns, whatever the
         number of classes, and not on the order of the classes.
grid     for sigmoid, where each label is a problem of one dimension: the trapezoidal rule.
samples  standard normal noise, the paper's Monte Carlo. For softmax a column belongs to a rank here too, where
         the paper has a class; that is just as random. For sigmoid it belongs to a label.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from gapa_onnx.record import PointsRecord

#: Columns of a table; the classes of ranks 1024, 2048, … share a column with rank 0, of whose
#: probability they have nothing.
TABLE_COLUMNS = 1024

#: Classes from which on more points are worth their cost: with 16 of them the epistemic part comes out
#: up to 17% too small for 1000 classes of large variance, with 32 up to 8%. (Its ranking is as good.)
WIDE = 33
COARSE, FINE = 16, 32

#: Columns whose points sit in the middle of their cells and have variance 1. In the others they sit
#: anywhere in the cell: of many classes the one matters that is far out.
LEADING = 8

#: Streams of random bits: of the first 20000 for 16 points, and the first 1000 for 32, those with the
#: smallest error of log BALD on random logits of 2 to 30, and 2 to 100, classes.
STREAMS = {COARSE: 10819, FINE: 737}

GRID_COUNT, GRID_STEP = 16, 0.6


@dataclass(frozen=True)
class Points:
    """Points and their weights."""

    kind: str  #: "latin", "grid" or "samples"
    values: np.ndarray = field(repr=False)  #: (s, columns); (s,) for a grid
    weights: np.ndarray | None = field(default=None, repr=False)  #: (s,), None where all are equal

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def record(self) -> PointsRecord:
        """What a converted file says about them."""
        return PointsRecord(self.kind, self.count)


def latin(classes: int | None, *, fine: bool = False) -> Points:
    """Points for softmax over so many classes; None for any number."""
    columns = TABLE_COLUMNS if classes is None else min(classes, TABLE_COLUMNS)
    count = FINE if fine else COARSE
    return Points("latin", latin_hypercube(count, columns, STREAMS[count]))


def latin_hypercube(count: int, columns: int, stream: int) -> np.ndarray:
    """(count, columns) points of which the second half are the negatives of the first.

    The first columns do not depend on how many there are. Only raw bits are drawn: unlike the
    distributions of numpy's Generator, these never change between versions of numpy.
    """
    half = count // 2
    bits = np.random.PCG64(stream).random_raw((columns, 3, half))
    cells = np.argsort(bits[:, 0], axis=1, kind="stable")  # (columns, half)
    signs = np.where(bits[:, 1] >> np.uint64(63), 1.0, -1.0)
    places = ((bits[:, 2] >> np.uint64(12)) + 0.5) * 2.0**-52  # inside (0, 1)
    places[:LEADING] = 0.5
    probabilities = 0.5 + (cells + places) / count  # of the normal distribution's upper half
    sizes = np.vectorize(NormalDist().inv_cdf)(probabilities)
    sizes[:LEADING] /= np.sqrt(np.mean(sizes[:LEADING] ** 2, axis=1, keepdims=True))
    points = (signs * sizes).T
    return np.concatenate([points, -points])


def grid() -> Points:
    """Equally spaced nodes, weighted by the normal density, of variance 1.

    For a sigmoid this rule errs as little as Gauss-Hermite with twice the nodes: the sigmoid of a wide
    Gaussian has poles near the real axis, to which equal spacing is less sensitive.
    """
    nodes = (np.arange(GRID_COUNT) - (GRID_COUNT - 1) / 2) * GRID_STEP
    weights = np.exp(-(nodes**2) / 2)
    weights /= weights.sum()
    return Points("grid", nodes / np.sqrt(np.sum(weights * nodes**2)), weights)


def samples(count: int, columns: int, seed: int) -> Points:
    """Standard normal noise, drawn once and kept in the file."""
    noise = np.random.Generator(np.random.PCG64(seed)).standard_normal((count, columns))
    return Points("samples", noise)
