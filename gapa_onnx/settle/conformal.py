"""From rows that nothing was fitted to, lines that hold for new rows like them: split conformal prediction.

With n scores of such rows, the ⌈(n + 1) c⌉-th smallest is not exceeded by the score of a new row with probability at
least c, whatever the model and the distribution; and, without ties, with at most c + 1 / (n + 1). A score says how
badly a truth fits an answer of the file:

    sets        LAC     -p of the true class
                APS     the probability of all classes down to the true one, from the most probable on
                RAPS    the same, and a penalty for each class beyond a few
    intervals   |y - μ| / (reach · σ), the largest over the elements of an output, with a reach for either side

Deferral (`answered_from`) learns then tests: R(t) is the error of the rows that are answered when the highest
probability has to reach t. Of n_t such rows k_t are wrong, and where R(t) were above r, so few would be with
probability at most P(Bin(n_t, r) ≤ k_t). Lines are tested one after another in an order that other rows have told,
until a test fails, so that all that passed hold together with the stated confidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError

#: Coverages and errors that a file can be moved to without counting again.
COVERAGES = (*(round(0.5 + step / 100, 2) for step in range(50)), 0.995, 0.999)
ERRORS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)

SHORTEST = 0.1  # of a side of an interval, over half of what both would be if they were equal
PENALTY = 0.1  # of RAPS, for each rank that is not free
STEPS = 100  # lines that deferral tries: so many shares of rows that are answered
ROWS_TO_COUNT = 4  # known rows for each that is counted on: the others are for fitting
ROUNDING = 1e-9  # of (n + 1) c, which is a whole number for most c in use

Table = dict[str, tuple[float, ...]]  #: line, or one for each class, by the level that it holds at


# ------------------------------------------------------------------------------- coverage


def rows_needed(coverage: float) -> int:
    """The fewest rows by which a coverage can be promised: ⌈(n + 1) c⌉ ≤ n."""
    return math.ceil(coverage / (1 - coverage) - ROUNDING)


def line_at(scores: Array, coverage: float) -> float | None:
    """The ⌈(n + 1) c⌉-th smallest of the scores (n,); None where there are too few."""
    rank = math.ceil((len(scores) + 1) * coverage - ROUNDING)
    return None if rank > len(scores) else float(np.partition(scores, rank - 1)[rank - 1])


def lines(scores: Array, coverage: float, output: str) -> Table:
    """The line of the asked coverage, and of all others that so many rows reach."""
    needed = rows_needed(coverage)
    if len(scores) < needed:
        raise UserError(
            f"coverage {coverage:g} of {output!r} needs {needed} rows to count on, and there are {len(scores)}",
            f"know the truth of about {ROWS_TO_COUNT * needed} rows that the model was not fitted to, or ask for less",
        )
    return _table([scores], coverage, output)


def lines_by_class(scores: Array, labels: Array, classes: int, coverage: float, output: str) -> Table:
    """The same with a line for each class, from the rows of that class."""
    by_class = [scores[labels == label] for label in range(classes)]
    fewest = min(range(classes), key=lambda label: len(by_class[label]))
    needed = rows_needed(coverage)
    if len(by_class[fewest]) < needed:
        raise UserError(
            f"coverage {coverage:g} of each class of {output!r} needs {needed} rows of every class to count on, and "
            f"class {fewest} has {len(by_class[fewest])}",
            "label more rows of it, ask for less, or leave `per_class` out",
        )
    return _table(by_class, coverage, output)


def _table(groups: Sequence[Array], coverage: float, output: str) -> Table:
    """The lines of each group by level, where all of them are there."""
    table: Table = {}
    for level in sorted({*COVERAGES, coverage}):
        found = [line for line in (line_at(scores, level) for scores in groups) if line is not None]
        if len(found) == len(groups) and np.isfinite(found).all():
            table[f"{level:g}"] = tuple(found)
    if f"{coverage:g}" not in table:
        raise UserError(
            f"coverage {coverage:g} of {output!r} is not reached: the file answers too many rows with no number",
            "check the data",
        )
    return table


def level_in(levels: Iterable[str], asked: float, *, most: bool) -> str | None:
    """The level of a table that keeps what is asked: the nearest not below it, or not above it where it is the most
    that is allowed; None where there is none."""
    keeping = [name for name in levels if (float(name) <= asked if most else float(name) >= asked)]
    return (max if most else min)(keeping, key=float, default=None)


# ------------------------------------------------------------------------------- risk of pixels


class PixelRisk:
    """Conformal risk control: lines at which the pixels of new images miss their set in a small mean share.

    With L_i(t) the share of the pixels of image i whose score is above t, the smallest t of a grid with

        (Σ L_i(t) + 1) / (n + 1) ≤ 1 - coverage

    keeps the expectation of L(t) for a new image (Angelopoulos et al., 2022): pixels of one image go together, so images
    are what is counted.
    """

    #: Fine near 0 and near 1, where the scores of small sets and of sums of probabilities lie.
    GRID = np.concatenate(
        [[-2.0], -(10.0 ** -np.arange(0, 10, 0.01)), [0.0], 1 - 10.0 ** -np.arange(0.01, 7, 0.01), [1.01]]
    )

    def __init__(self) -> None:
        self.rows = 0
        self._missed = np.zeros(
            len(self.GRID) + 1
        )  # by the first point of the grid that is not below a score

    def add(self, scores: Array) -> None:
        """Take in the scores (pixels,) of the true classes of one image."""
        self.rows += 1
        # Rounded up by what single precision loses: the file compares with the number that it holds.
        places = np.searchsorted(self.GRID.astype(np.float32), scores.astype(np.float32), side="left")
        self._missed += np.bincount(places, minlength=len(self._missed)) / len(scores)

    def lines(self, coverage: float, output: str) -> Table:
        """The line of the asked coverage, and of all others that so many images reach."""
        needed = rows_needed(coverage)
        if self.rows < needed:
            raise UserError(
                f"coverage {coverage:g} of {output!r} needs {needed} images to count on, and there are {self.rows}",
                f"label about {ROWS_TO_COUNT * needed} images that the model was not fitted to, or ask for less",
            )
        above = self._missed.sum() - np.cumsum(self._missed)[:-1]  # Σ L_i at each point of the grid
        table: Table = {}
        for level in sorted({*COVERAGES, coverage}):
            kept = np.flatnonzero(above + 1 <= (1 - level) * (self.rows + 1) + ROUNDING)
            if len(kept):
                table[f"{level:g}"] = (float(np.float32(self.GRID[kept[0]])),)
        return table


# ------------------------------------------------------------------------------- scores


def reaches(mean: Array, var: Array, target: Array, coverage: float) -> Array:
    """How many σ the middle share of the targets reaches below and above the means: (2, elements).

    Errors may be skewed, as delays are; intervals are shortest where each side leaves out as many.
    """
    rows, outside = len(mean), (1 - coverage) / 2
    mean, std, target = _columns(rows, mean, np.sqrt(var), target)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = (target - mean) / std  # (n, elements)
    errors = errors[np.isfinite(errors).all(axis=1)]
    if not len(errors):
        return np.ones((2, mean.shape[1]))
    middle = np.quantile(np.abs(errors), coverage, axis=0)
    sides = np.stack([-np.quantile(errors, outside, axis=0), np.quantile(errors, 1 - outside, axis=0)])
    found: Array = np.maximum(sides, SHORTEST * middle)
    return np.where(found > 0, found, 1.0)


def interval_scores(mean: Array, var: Array, target: Array, reach: Array) -> Array:
    """The factor (n,) of the reaches (2, elements) from which on a row's targets lie between its bounds, whatever
    rounding does to these; infinite where something is not finite."""
    rows, kind = len(mean), np.finfo(var.dtype)
    mean, std, target = _columns(rows, mean, np.sqrt(var), target)
    rounding = float(kind.eps) * (np.abs(mean) + np.abs(target))
    error = target - mean
    unit = std * np.where(error < 0, reach[0], reach[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = (np.abs(error) + rounding) / unit * (1 + 8 * float(kind.eps))
    found: Array = np.where(np.isfinite(factors), factors, np.inf).max(axis=1, initial=0.0)
    return found


def _columns(rows: int, *arrays: Array) -> tuple[Array, ...]:
    return tuple(np.asarray(array, np.float64).reshape(rows, -1) for array in arrays)


def penalties(ranks: Array, coverage: float, classes: int) -> Array:
    """RAPS: what is added to the scores of classes by their rank (classes,), from the ranks (n,) of true classes, which
    count from 0. The ranks that as many true classes have as are to be covered are free."""
    free = int(np.sort(ranks)[math.ceil(len(ranks) * coverage - ROUNDING) - 1]) if len(ranks) else 0
    found: Array = PENALTY * np.maximum(np.arange(classes) - free, 0)
    return found


# ------------------------------------------------------------------------------- deferral


def binomial_tail(errors: Array, rows: Array, rate: float) -> Array:
    """P(Bin(rows, rate) ≤ errors), elementwise; 1 without rows."""
    found = [_tail(int(k), int(n), rate) for k, n in np.broadcast(errors, rows)]
    return np.array(found).reshape(np.broadcast_shapes(np.shape(errors), np.shape(rows)))


def _tail(errors: int, rows: int, rate: float) -> float:
    if errors >= rows:
        return 1.0
    k = np.arange(errors + 1)
    # log of the binomial coefficient, term by term
    choose = np.concatenate([[0.0], np.cumsum(np.log(rows - k[:-1]) - np.log(k[1:]))])
    logs = choose + k * math.log(rate) + (rows - k) * math.log1p(-rate)
    return float(min(1.0, np.exp(logs).sum()))


def answers_needed(error: float, confidence: float) -> int:
    """The fewest rows that have to be answered, all of them rightly, so that an error can be promised."""
    return math.ceil(math.log(1 - confidence) / math.log1p(-error) - ROUNDING)


def answered_from(
    told: tuple[Array, Array], counted: tuple[Array, Array], error: float, confidence: float
) -> float | None:
    """The lowest probability from which on rows are answered with at most this error; None where no line passes.

    Parameters
    ----------
    told: highest probabilities and whether the prediction is wrong, of rows that say in which order to test.
    counted: the same of the rows that the tests count on.
    """
    lines = _candidates(told[0])
    at, wrong_at = _answered(*told, lines)
    rows, wrong = _answered(*counted, lines)
    scale = len(counted[0]) / max(len(told[0]), 1)
    # One more error than was seen: where there is none among few rows, that says little.
    expected = np.minimum(np.ceil((wrong_at + 1) * scale), np.ceil(at * scale))
    promising = binomial_tail(expected, np.ceil(at * scale), error)
    passed = binomial_tail(wrong, rows, error) <= 1 - confidence
    start = int(np.argmin(promising))
    failed = np.flatnonzero(~passed[start:])
    count = int(failed[0]) if len(failed) else len(lines) - start
    return float(lines[start + count - 1]) if count else None


def _candidates(probabilities: Array) -> Array:
    """Lines from the strictest on: quantiles of the probabilities that tell the order, and 0, which answers all."""
    ordered = np.sort(probabilities[np.isfinite(probabilities)])[::-1]
    ranks = np.unique(np.ceil(np.arange(1, STEPS) / STEPS * len(ordered)).astype(int))
    lines = np.unique(ordered[ranks[(ranks > 0) & (ranks <= len(ordered))] - 1])[::-1]
    return np.append(lines, lines.dtype.type(0)) if len(lines) else np.zeros(1, np.float32)


def _answered(probabilities: Array, wrong: Array, lines: Array) -> tuple[Array, Array]:
    """How many rows each line answers, and how many of them wrongly; what is no number is not answered."""
    order = np.argsort(-probabilities, kind="stable")
    ordered, errors = probabilities[order], np.concatenate([[0], np.cumsum(wrong[order])])
    known = int(np.isfinite(ordered).sum())
    rows = np.searchsorted(-ordered[:known], -lines, side="right")
    return rows, errors[rows]
