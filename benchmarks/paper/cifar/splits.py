"""Whether what a converted file promises about shares holds, over many random splits of rows that are alike.

All functions work on arrays of scores, larger for stranger rows, from rows that nothing was fitted to. In each split
the rows are dealt anew into held-out and test rows. With n held-out scores, the p-value of a score s is

    p = (1 + number of held-out scores ≥ s) / (n + 1),

so that, for rows that are exchangeable, P(p ≤ α) ≤ α, and ≥ α − 1/(n + 1) where no two scores are equal.

    flagged     share of the test rows with p ≤ α: a promise about false alarms
    covered     share of the test rows with p > α, on scores of the truth (1 − its probability, |y − mean|/std):
                a promise about prediction sets and intervals
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

SPLITS = 20
ALPHA = 0.05


@dataclass(frozen=True)
class Shares:
    """A share of the test rows in each split, beside the nominal one."""

    nominal: float
    held_out: int  #: rows of a split that scores are compared with
    tested: int  #: rows of a split that the share is of
    shares: np.ndarray  #: (splits,)

    @property
    def mean(self) -> float:
        return float(self.shares.mean())

    @property
    def error(self) -> float:
        """Standard deviation over splits of one share, which its test rows and its held-out rows both cause:

        Var = α (1 − α) (1/n_test + 1/(n + 2)) about, a beta-binomial.
        """
        return float(np.sqrt(self.nominal * (1 - self.nominal) * (1 / self.tested + 1 / (self.held_out + 2))))

    @property
    def holds(self) -> bool:
        """Whether the mean is within what chance allows: three standard deviations of one split, since splits of the
        same rows are alike, and the step 1/(n + 1) of the p-value."""
        return abs(self.mean - self.nominal) <= 3 * self.error + 1 / (self.held_out + 1)


def pvalues(held_out: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(1 + #{held-out ≥ score}) / (n + 1); a score that is not a number is the strangest there can be."""
    ordered = np.sort(np.nan_to_num(held_out, nan=np.inf))
    scores = np.nan_to_num(scores, nan=np.inf)
    above = len(ordered) - np.searchsorted(ordered, scores, side="left")
    return (1 + above) / (len(ordered) + 1)


def split_flagged(
    scores_heldout: np.ndarray,
    scores_test: np.ndarray,
    *,
    alpha: float = ALPHA,
    splits: int = SPLITS,
    seed: int = 0,
) -> Shares:
    """The share of test rows that are flagged at level α in each of the splits of all these rows."""
    shares = [
        float((pvalues(held_out, test) <= alpha).mean())
        for held_out, test in _dealt(scores_heldout, scores_test, splits, seed)
    ]
    return Shares(alpha, len(scores_heldout), len(scores_test), np.array(shares))


def split_covered(
    scores_heldout: np.ndarray,
    scores_test: np.ndarray,
    *,
    alpha: float = ALPHA,
    splits: int = SPLITS,
    seed: int = 0,
) -> Shares:
    """The share of test rows whose truth is inside the set or interval of level 1 − α; scores are those of the truth."""
    flagged = split_flagged(scores_heldout, scores_test, alpha=alpha, splits=splits, seed=seed)
    return Shares(1 - alpha, flagged.held_out, flagged.tested, 1 - flagged.shares)


def _dealt(
    held_out: np.ndarray, test: np.ndarray, splits: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(seed)
    together = np.concatenate([held_out, test])
    for _ in range(splits):
        dealt = generator.permutation(together)
        yield dealt[: len(held_out)], dealt[len(held_out) :]
