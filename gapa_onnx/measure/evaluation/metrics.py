"""Numbers that say how good predictions and their uncertainties are; arrays in, float64 out.

scikit-learn has ROC and precision-recall, scipy the normal distribution: those are used. scikit-learn's
log_loss and brier_score_loss want all predictions at once; here the same numbers come row by row, so that
data of any size stream through (tested to be equal). Neither library has the expected calibration error,
the area under the risk-coverage curve, the CRPS or the centred quantile metric: they are written out here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation.result import ReliabilityBin

BINS = 15
#: Probabilities below count as this one, for the source and for us alike: float32 has no smaller ones.
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)

#: A probability of yes stays this far from 0 and 1: beyond, float32 loses that of no (as scikit-learn does).
SMALLEST_OF_TWO = float(np.finfo(np.float32).eps)


def needed(module: str) -> ModuleType:
    """A module of the extra `evaluate`, imported when it is first used."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"sklearn": "scikit-learn"}.get(module.split(".")[0], module.split(".")[0])
        raise UserError(f"evaluating needs {package}", 'pip install "gapa-onnx[evaluate]"') from error


# ------------------------------------------------------------------- predicted classes


def log_loss_rows(probs: Array, labels: Array) -> Array:
    """−log p(label) of each row; probs (n, c), labels (n,)."""
    chosen = np.take_along_axis(probs, labels[:, None], axis=1)[:, 0]
    losses: Array = -np.log(np.maximum(chosen, SMALLEST_PROBABILITY))
    return losses


def brier_rows(probs: Array, labels: Array) -> Array:
    """Σ_c (p_c − [c = label])² of each row, between 0 and 2; probs (n, c), labels (n,)."""
    chosen = np.take_along_axis(probs, labels[:, None], axis=1)[:, 0]
    scores: Array = np.square(probs).sum(axis=1) - 2 * chosen + 1
    return scores


def entropy_rows(probs: Array) -> Array:
    """−Σ_c p_c log p_c over the last axis."""
    entropies: Array = needed("scipy.special").entr(probs).sum(axis=-1)
    return entropies


def bin_sums(confidence: Array, correct: Array, bins: int = BINS) -> Array:
    """Count, summed confidence and summed accuracy per bin of equal width (low, high]: (bins, 3)."""
    inner = np.linspace(0.0, 1.0, bins + 1)[1:-1]
    place = np.digitize(confidence, inner, right=True)
    return np.stack(
        [np.bincount(place, weights, bins) for weights in (np.ones(len(place)), confidence, correct)], axis=1
    )


def reliability(sums: Array) -> tuple[ReliabilityBin, ...]:
    """The bins of `bin_sums` as means, NaN where a bin is empty."""
    edges = np.linspace(0.0, 1.0, len(sums) + 1)
    found = []
    for low, high, (count, confidence, correct) in zip(edges[:-1], edges[1:], sums):
        means = (confidence / count, correct / count) if count else (np.nan, np.nan)
        found.append(ReliabilityBin(float(low), float(high), int(count), *map(float, means)))
    return tuple(found)


def expected_calibration_error(sums: Array) -> float:
    """Σ_bins |summed confidence − summed accuracy| / n, from `bin_sums`."""
    return float(np.abs(sums[:, 1] - sums[:, 2]).sum() / sums[:, 0].sum())


# ---------------------------------------------------------------------- telling apart


def detection(inside: Array, outside: Array) -> dict[str, float]:
    """How well a score tells two sets apart; what should score higher, `outside`, is the positive class.

    auroc and aupr (average precision) are scikit-learn's. fpr95 is the share of `inside` that scores at
    least as high as the highest threshold that catches 95% of `outside`. Empty if one of the sets is.
    """
    if not len(inside) or not len(outside):
        return {}
    metrics = needed("sklearn.metrics")
    truth = np.concatenate([np.zeros(len(inside)), np.ones(len(outside))])
    scores = np.concatenate([inside, outside])
    false, true, _ = metrics.roc_curve(truth, scores)
    return {
        "auroc": float(metrics.auc(false, true)),
        "aupr": float(metrics.average_precision_score(truth, scores)),
        "fpr95": float(false[np.argmax(true >= 0.95)]),
    }


def risk_coverage(losses: Array, scores: Array) -> tuple[Array, Array]:
    """Coverage k/n and mean loss of the k rows that score lowest, k = 1 … n; each (n,).

    Rows of equal score share their mean loss, the expectation over all orders among them, so that the
    curve does not depend on the order of the rows.
    """
    _, group = np.unique(scores, return_inverse=True)
    counts = np.bincount(group)
    means = np.bincount(group, losses) / counts  # by ascending score
    risk = np.cumsum(np.repeat(means, counts)) / np.arange(1, len(losses) + 1)
    return np.arange(1, len(losses) + 1) / len(losses), risk


# ------------------------------------------------------------------ predicted numbers


def gaussian_log_loss(mean: Array, std: Array, target: Array) -> Array:
    """−log N(target; mean, std²), elementwise."""
    losses: Array = -needed("scipy.stats").norm.logpdf(target, mean, std)
    return losses


def gaussian_crps(mean: Array, std: Array, target: Array) -> Array:
    """∫ (Φ((y − mean)/std) − [y ≥ target])² dy = std·(z (2Φ(z) − 1) + 2φ(z) − 1/√π), z = (target − mean)/std.

    A point prediction (std = 0) scores its absolute error.
    """
    norm = needed("scipy.stats").norm
    error = target - mean
    z = np.divide(error, std, out=np.zeros_like(error), where=std > 0)
    crps: Array = std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
    return np.where(std > 0, crps, np.abs(error))


def central_level(mean: Array, std: Array, target: Array) -> Array:
    """2Φ(|z|) − 1: the level α of the centred interval that just reaches the target."""
    error = np.abs(target - mean)
    beyond = np.where(error > 0, np.inf, 0.0)  # without spread only the mean itself is covered
    z = np.divide(error, std, out=beyond, where=std > 0)
    level: Array = 2 * needed("scipy.special").ndtr(z) - 1
    return level


def coverage(levels: Array, nominal: Sequence[float] | Array) -> Array:
    """Share of targets inside the centred interval of each nominal level, from `central_level`."""
    share: Array = np.searchsorted(np.sort(levels.ravel()), np.asarray(nominal), side="right") / levels.size
    return share


def centred_quantile_metric(levels: Array) -> float:
    """CQM = ∫₀¹ |empirical coverage(α) − α| dα of centred α-intervals (Ortega et al., 2023).

    The empirical coverage is a step function that rises by 1/n at each target's `central_level`, so the
    integral is a sum of pieces of |c − α| and needs no grid of α.
    """
    edges = np.concatenate([[0.0], np.sort(levels.ravel()), [1.0]])
    covered = np.arange(levels.size + 1) / levels.size  # between edges i and i + 1
    low, high = edges[:-1], edges[1:]
    turn = np.clip(covered, low, high)  # where |c − α| changes its slope
    return float(
        (np.square(turn - low) + np.square(high - turn) + _skipped(covered, low, high, turn)).sum() / 2
    )


def _skipped(covered: Array, low: Array, high: Array, turn: Array) -> Array:
    """Twice the rectangle under |c − α| where c lies outside of (low, high)."""
    skipped: Array = 2 * np.abs(covered - turn) * (high - low)
    return skipped
