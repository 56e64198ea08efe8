"""Every metric against scikit-learn, scipy, numeric integration, simulation or a plain loop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import integrate, stats
from sklearn import calibration
from sklearn import metrics as sk

from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation import metrics


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def classified(rng) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (n, c) and labels (n,), neither right nor wrong throughout."""
    return rng.dirichlet(np.full(5, 0.4), size=400), rng.integers(0, 5, size=400)


# ------------------------------------------------------------------- predicted classes


def test_log_loss_is_that_of_scikit_learn(classified):
    probs, labels = classified
    assert metrics.log_loss_rows(probs, labels).mean() == pytest.approx(
        sk.log_loss(labels, probs, labels=range(5)), rel=1e-12
    )


def test_log_loss_of_an_impossible_label_is_finite():
    (loss,) = metrics.log_loss_rows(np.array([[1.0, 0.0]]), np.array([1]))
    assert loss == pytest.approx(-np.log(np.finfo(np.float32).tiny))


def test_brier_score_is_the_sum_over_classes(classified):
    probs, labels = classified
    rows = metrics.brier_rows(probs, labels)
    naive = [sum((p[c] - (c == y)) ** 2 for c in range(5)) for p, y in zip(probs, labels)]
    np.testing.assert_allclose(rows, naive, rtol=1e-12)
    two, yes = probs[:, :2] / probs[:, :2].sum(axis=1, keepdims=True), (labels > 2).astype(int)
    assert metrics.brier_rows(two, yes).mean() == pytest.approx(2 * sk.brier_score_loss(yes, two[:, 1]))


def test_entropy_is_that_of_scipy(classified):
    probs, _ = classified
    probs[0] = [1, 0, 0, 0, 0]
    np.testing.assert_allclose(metrics.entropy_rows(probs), stats.entropy(probs, axis=1), atol=1e-12)


def test_calibration_error_by_a_plain_loop(classified):
    probs, labels = classified
    confidence, correct = probs.max(axis=1), probs.argmax(axis=1) == labels
    expected = 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(confidence[inside].mean() - correct[inside].mean())
    sums = metrics.bin_sums(confidence, correct)
    assert metrics.expected_calibration_error(sums) == pytest.approx(expected, rel=1e-12)


def test_reliability_bins_are_those_of_scikit_learn(rng):
    confidence = rng.random(500)
    correct = rng.random(500) < confidence**2
    bins = metrics.reliability(metrics.bin_sums(confidence, correct))
    true, predicted = calibration.calibration_curve(correct, confidence, n_bins=15, strategy="uniform")
    filled = [one for one in bins if one.count]
    np.testing.assert_allclose([one.accuracy for one in filled], true, rtol=1e-12)
    np.testing.assert_allclose([one.confidence for one in filled], predicted, rtol=1e-12)
    assert sum(one.count for one in bins) == 500 and (bins[0].low, bins[-1].high) == (0.0, 1.0)


def test_confidence_at_an_edge_belongs_to_the_bin_below():
    sums = metrics.bin_sums(np.array([0.0, 1 / 15, 1.0, 1.0000001]), np.ones(4, bool))
    assert sums[:, 0].tolist() == [2.0, *[0.0] * 13, 2.0]


def test_empty_bin_has_no_mean():
    bins = metrics.reliability(metrics.bin_sums(np.array([0.9]), np.array([True])))
    assert np.isnan(bins[0].accuracy) and np.isnan(bins[0].confidence) and bins[0].count == 0


def test_perfectly_calibrated_predictions_have_a_small_error(rng):
    confidence = rng.uniform(0.2, 1, size=200_000)
    correct = rng.random(200_000) < confidence
    error = metrics.expected_calibration_error(metrics.bin_sums(confidence, correct))
    # each of the 13 bins is off by about sqrt(2/π · .25 / (n/13)), weighted by 1/13
    assert error < 3 * np.sqrt(2 / np.pi * 0.25 * 13 / 200_000)


# ---------------------------------------------------------------------- telling apart


def _naive_fpr95(inside, outside):
    for threshold in sorted(outside, reverse=True):
        if np.mean(outside >= threshold) >= 0.95:
            return np.mean(inside >= threshold)
    raise AssertionError


@pytest.mark.parametrize("digits", [1, 12])  # with and without ties
def test_detection_by_plain_loops(rng, digits):
    inside, outside = rng.normal(0, 1, 70).round(digits), rng.normal(1, 1, 50).round(digits)
    found = metrics.detection(inside, outside)
    pairs = [(o > i) + 0.5 * (o == i) for i in inside for o in outside]
    assert found["auroc"] == pytest.approx(np.mean(pairs), rel=1e-12)
    truth = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(truth, np.r_[inside, outside]), rel=1e-12)
    assert found["fpr95"] == pytest.approx(_naive_fpr95(inside, outside), rel=1e-12)
    precision, recall = [], [0.0]
    for threshold in sorted(set(outside) | set(inside), reverse=True):
        caught = np.sum(outside >= threshold)
        precision.append(caught / (caught + np.sum(inside >= threshold)))
        recall.append(caught / len(outside))
    assert found["aupr"] == pytest.approx(np.sum(np.diff(recall) * precision), rel=1e-12)


def test_detection_of_equal_scores_is_chance():
    found = metrics.detection(np.zeros(30), np.zeros(10))
    assert found == {"auroc": 0.5, "aupr": 0.25, "fpr95": 1.0}


def test_detection_that_is_perfect():
    assert metrics.detection(np.arange(5.0), np.arange(5.0, 9)) == {"auroc": 1.0, "aupr": 1.0, "fpr95": 0.0}


def test_detection_without_one_of_the_sets_is_nothing():
    assert metrics.detection(np.arange(3.0), np.array([])) == {}


def test_risk_coverage_by_a_plain_loop(rng):
    losses, scores = rng.random(60), rng.random(60)
    coverage, risk = metrics.risk_coverage(losses, scores)
    order = np.argsort(scores)
    naive = [np.mean([losses[i] for i in order[:k]]) for k in range(1, 61)]
    np.testing.assert_allclose(risk, naive, rtol=1e-12)
    np.testing.assert_allclose(coverage, np.arange(1, 61) / 60)
    assert risk[-1] == pytest.approx(losses.mean())


def test_ties_in_risk_coverage_are_the_mean_over_all_orders():
    losses, scores = np.array([1.0, 0.0, 0.0, 1.0, 1.0]), np.array([0.0, 1.0, 1.0, 1.0, 2.0])
    orders = [(0, *middle, 4) for middle in itertools.permutations((1, 2, 3))]
    mean = np.mean([np.cumsum(losses[list(order)]) / np.arange(1, 6) for order in orders], axis=0)
    np.testing.assert_allclose(metrics.risk_coverage(losses, scores)[1], mean, rtol=1e-12)


# ------------------------------------------------------------------ predicted numbers


def test_gaussian_log_loss_by_its_formula(rng):
    mean, std, target = rng.normal(size=20), rng.uniform(0.1, 3, 20), rng.normal(size=20)
    expected = 0.5 * np.log(2 * np.pi * std**2) + (target - mean) ** 2 / (2 * std**2)
    np.testing.assert_allclose(metrics.gaussian_log_loss(mean, std, target), expected, rtol=1e-12)


@pytest.mark.parametrize("mean, std, target", [(0, 1, 0), (0.3, 0.5, 2.0), (-1, 2, -1.5), (5, 0.1, 4)])
def test_crps_by_numeric_integration(mean, std, target):
    def below(y):
        return stats.norm.cdf(y, mean, std) ** 2

    def above(y):
        return stats.norm.sf(y, mean, std) ** 2

    reach = 40 * std + abs(target - mean)
    options = {"points": [mean], "limit": 200, "epsabs": 1e-12}
    expected = (
        integrate.quad(below, target - reach, target, **options)[0]
        + integrate.quad(above, target, target + reach, **options)[0]
    )
    found = metrics.gaussian_crps(*(np.array([value], float) for value in (mean, std, target)))
    assert found[0] == pytest.approx(expected, rel=1e-8)


def test_crps_of_a_point_is_its_absolute_error():
    found = metrics.gaussian_crps(np.array([1.0, 1.0]), np.array([0.0, 1e-12]), np.array([3.5, 3.5]))
    np.testing.assert_allclose(found, 2.5, rtol=1e-10)


@pytest.mark.parametrize("n", [1, 7, 300])
@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_centred_quantile_metric_by_numeric_integration(rng, n, factor):
    mean, std = rng.normal(size=n), rng.uniform(0.5, 2, n)
    target = rng.normal(mean, factor * std)
    grid = (np.arange(20_000) + 0.5) / 20_000  # midpoints
    reach = stats.norm.ppf(0.5 + grid / 2)
    inside = [np.mean(np.abs(target - mean) <= r * std) for r in reach]
    expected = np.mean(np.abs(np.array(inside) - grid))
    found = metrics.centred_quantile_metric(metrics.central_level(mean, std, target))
    # the integrand has slope 1 and n jumps of 1/n: the midpoint rule is off by at most 1.25 cells
    assert found == pytest.approx(expected, abs=1.25 / 20_000)


def test_centred_quantile_metric_of_a_known_misfit(rng):
    """Targets with f times the predicted std: coverage(α) = 2Φ(Φ⁻¹((1+α)/2)/f) − 1, integrated by quad."""
    n, factor = 200_000, 2.0

    def gap(alpha):
        return abs(2 * stats.norm.cdf(stats.norm.ppf((1 + alpha) / 2) / factor) - 1 - alpha)

    expected = integrate.quad(gap, 0, 1)[0]
    levels = metrics.central_level(np.zeros(n), np.ones(n), rng.normal(0, factor, n))
    # an empirical share has standard error <= .5/sqrt(n)
    assert metrics.centred_quantile_metric(levels) == pytest.approx(expected, abs=5 * 0.5 / np.sqrt(n))


def test_coverage_by_counting(rng):
    mean, std, target = rng.normal(size=300), rng.uniform(0.5, 2, 300), rng.normal(size=300)
    found = metrics.coverage(metrics.central_level(mean, std, target), (0.5, 0.9, 0.95))
    for level, share in zip((0.5, 0.9, 0.95), found):
        low, high = stats.norm.interval(level, mean, std)
        assert share == np.mean((target >= low) & (target <= high))


def test_an_interval_without_width_covers_its_point_only():
    levels = metrics.central_level(np.zeros(2), np.zeros(2), np.array([0.0, 1e-9]))
    assert levels.tolist() == [0.0, 1.0]
    assert metrics.coverage(levels, [0.95]).tolist() == [0.5]


def test_a_missing_library_is_a_sentence():
    with pytest.raises(UserError, match="evaluating needs no_such_library") as caught:
        metrics.needed("no_such_library.part")
    assert caught.value.hint == 'pip install "gapa-onnx[evaluate]"'
