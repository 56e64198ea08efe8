"""Choose how queries of a place are compared, without labels: by which geometry strange inputs stand out.

Of convolutional networks directions tell more than distances, and lengths count beside them; of fully connected ones
principal components tell more again (docs/defaults.md). Strange inputs that are made of the calibration rows themselves
(`data.strange`) tell which: for each geometry, some random rows are remembered, and the shares of other rows are held
against those of the strange ones. The first of the candidates is taken unless another has a mean AUROC that is higher by
a margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.fit import statistics
from gapa_onnx.fit.geometry import Geometry
from gapa_onnx.op.shares import unexplained_share
from gapa_onnx.settings import Settings
from gapa_onnx.threads import one_thread

REMEMBERED = 1000  # rows for each geometry; a file remembers more
JUDGED = 1000  # other rows, and as many of each kind of strange ones at most
FEWEST = 100  # rows that are remembered, and that are judged: fewer tell nothing
NARROWEST = 4  # features: of fewer, directions are few
FEWEST_AXES = 16  # features: of fewer, half of the principal axes are too few to tell by
ROWS_OF_FEATURE = 20  # rows for each: axes of few rows follow these, and every new row is then strange
WIDEST_WHITENED = 2048  # features: their covariance is what takes long to compute
MARGIN = 0.03  # by which a geometry must be better than the first, which is cheaper
USUAL = "euclidean"  # where nothing is chosen


def metrics_for(width: int, rows: int | None = None) -> tuple[str, ...]:
    """The metrics that are tried for queries of this width, and so many of them where that is known."""
    if width < NARROWEST:
        return (USUAL,)
    if rows is not None and rows < ROWS_OF_FEATURE * width:
        return ("polar",)
    return ("polar", "projected") if FEWEST_AXES <= width <= WIDEST_WHITENED else ("polar",)


def metrics_of_positions(width: int, rows: int | None = None, *, passes: bool) -> tuple[str, ...]:
    """The metric of the positions of sequences of this width at a place that passes variance on, or at a witness: whitened
    where there are rows enough to tell how. Many tokens differ along few axes, and those that tell of a text are not
    among them; at the head lengths follow what token comes next, and only directions tell."""
    few = rows is not None and rows < ROWS_OF_FEATURE * width
    if few or not FEWEST_AXES <= width <= WIDEST_WHITENED:
        return (USUAL,)
    return ("whitened-direction",) if passes else ("whitened",)


def choose_geometry(
    candidates: Sequence[Geometry], rows: Array, strange: Mapping[str, Array], settings: Settings
) -> tuple[Geometry, dict[str, float]]:
    """The geometry that tells strange queries (n, d) of each kind from rows (n, d) best, and the mean AUROC of each.

    The first of the candidates where there is too little to tell by.
    """
    finite = {kind: queries[statistics.finite_rows(queries)][:JUDGED] for kind, queries in strange.items()}
    finite = {kind: queries for kind, queries in finite.items() if len(queries) >= FEWEST}
    if len(rows) < 2 * FEWEST or not finite:
        return candidates[0], {}
    order = np.random.default_rng(settings.seed).permutation(len(rows))
    half = min(JUDGED, len(rows) // 2)
    judged, remembered = rows[order[:half]], rows[order[half : half + REMEMBERED]]
    found = {how.metric: _told_apart(how, remembered, judged, finite, settings) for how in candidates}
    best = max(candidates, key=lambda how: found[how.metric])  # of equals the first
    return best if found[best.metric] > found[candidates[0].metric] + MARGIN else candidates[0], found


@one_thread()
def _told_apart(
    how: Geometry, remembered: Array, judged: Array, strange: Mapping[str, Array], settings: Settings
) -> float:
    """The mean over kinds of the AUROC of shares: strange queries against rows that are judged."""
    points = how(remembered)
    length_scale = statistics.median_distance(points, seed=settings.seed)
    if not length_scale > 0:
        return 0.0
    search, k = statistics.NearestSearch(points), min(settings.k, len(points))

    def shares(queries: Array) -> Array:
        compared = how(queries)
        nearest = search.candidates(compared, k)
        return unexplained_share(compared, points, nearest, length_scale, settings.jitter)

    known = shares(judged)
    # What looks more ordinary than the data looks strange to no one: that tells geometries apart no more than chance.
    return float(np.mean([max(auroc(known, shares(queries)), 0.5) for queries in strange.values()]))


def auroc(known: Array, strange: Array) -> float:
    """How often a strange one is above a known one; equal ones count half."""
    ordered = np.sort(known)
    below = np.searchsorted(ordered, strange, "left") + np.searchsorted(ordered, strange, "right")
    return float(np.mean(below) / (2 * len(known)))
