"""How well scores tell two kinds of text apart, and wrong tokens from right ones; with errors of these figures.

AUROC   how often a strange one has the larger score; equal ones count half
PRR     of rejecting tokens by a score: the area between the rejection curve of the score and that of chance, over the
        area between the curve that knows which tokens are wrong and that of chance. 1 is perfect, 0 is chance

Sequences of one document are alike, so standard errors are those of a bootstrap over documents: documents are drawn
again with replacement, and each takes all its sequences along.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DRAWS, DRAWN = 5, 512  # overlapping draws of sequences
BOOTSTRAP = 400


@dataclass(frozen=True)
class Figure:
    """A figure and its standard error."""

    value: float
    error: float


def auroc(known: np.ndarray, strange: np.ndarray) -> float:
    """AUROC of scores (n,) against (m,)."""
    weights = np.ones((1, len(known) + len(strange)))
    return float(weighted_auroc(known, strange, weights[:, : len(known)], weights[:, len(known) :])[0])


def weighted_auroc(
    known: np.ndarray, strange: np.ndarray, known_weights: np.ndarray, strange_weights: np.ndarray
) -> np.ndarray:
    """The AUROC of each row of weights (b, n) and (b, m) of scores (n,) and (m,) -> (b,)."""
    order = np.argsort(known, kind="stable")
    ordered = known[order]
    mass = np.concatenate(
        [np.zeros((len(known_weights), 1)), np.cumsum(known_weights[:, order], axis=1)], axis=1
    )
    below = mass[:, np.searchsorted(ordered, strange, "left")]
    with_equal = mass[:, np.searchsorted(ordered, strange, "right")]
    won = np.einsum("bm,bm->b", strange_weights, (below + with_equal) / 2)
    found: np.ndarray = won / (known_weights.sum(axis=1) * strange_weights.sum(axis=1))
    return found


def resampled(documents: np.ndarray, generator: np.random.Generator, count: int = BOOTSTRAP) -> np.ndarray:
    """How often each row occurs when its documents (n,) are drawn with replacement -> (count, n)."""
    names, owner = np.unique(documents, return_inverse=True)
    drawn = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), count)
    found: np.ndarray = drawn[:, owner].astype(np.float64)
    return found


def separation(
    known: np.ndarray,
    strange: np.ndarray,
    known_documents: np.ndarray,
    strange_documents: np.ndarray,
    draws: int = DRAWS,
    drawn: int = DRAWN,
    seed: int = 0,
) -> Figure:
    """The mean AUROC over draws of sequences from each side, and its standard error by documents."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(draws):
        sides = [
            side[generator.choice(len(side), min(drawn, len(side)), replace=False)]
            for side in (known, strange)
        ]
        found.append(auroc(*sides))
    many = weighted_auroc(
        known, strange, resampled(known_documents, generator), resampled(strange_documents, generator)
    )
    return Figure(float(np.mean(found)), float(np.nanstd(many)))


def rejection_ratio(scores: np.ndarray, wrong: np.ndarray, weights: np.ndarray | None = None) -> float:
    """PRR of rejecting the largest scores (n,) where `wrong` (n,) tells the mistakes; NaN where all are or none is."""
    weights = np.ones(len(scores)) if weights is None else weights
    mistakes = wrong.astype(np.float64)
    rate = float((weights * mistakes).sum() / weights.sum())
    # areas under the error that is left, over the share that is kept, each beside rate/2 of chance
    kept = [_area(order, mistakes, weights) for order in (_without_ties(scores), mistakes)]
    chance = rate / 2
    return (chance - kept[0]) / (chance - kept[1]) if kept[1] < chance else np.nan


def _without_ties(scores: np.ndarray) -> np.ndarray:
    """Ranks of the scores; among equal ones the order must say nothing, so it is random."""
    order = np.lexsort((np.random.default_rng(0).random(len(scores)), scores))
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(len(scores))
    return ranks


def _area(scores: np.ndarray, mistakes: np.ndarray, weights: np.ndarray) -> float:
    """∫ of the mistakes among the least suspect share, as a share of all, over that share from 0 to 1."""
    order = np.argsort(scores, kind="stable")
    total = weights.sum()
    found = np.cumsum((weights * mistakes)[order]) / total
    return float((found * weights[order]).sum() / total)


def rejection(
    scores: np.ndarray, wrong: np.ndarray, documents: np.ndarray, seed: int = 0, count: int = 50
) -> tuple[Figure, Figure]:
    """AUROC and PRR of "is this token wrong?" for scores, mistakes and documents of tokens (n,)."""
    if wrong.all() or not wrong.any():
        nothing = Figure(np.nan, np.nan)
        return nothing, nothing
    generator = np.random.default_rng(seed)
    value = auroc(scores[~wrong], scores[wrong]), rejection_ratio(scores, wrong)
    weights = resampled(documents, generator, count)
    aurocs = weighted_auroc(scores[~wrong], scores[wrong], weights[:, ~wrong], weights[:, wrong])
    ratios = [rejection_ratio(scores, wrong, one) for one in weights]
    return Figure(value[0], float(np.nanstd(aurocs))), Figure(value[1], float(np.nanstd(ratios)))
