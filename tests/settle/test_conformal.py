"""Lines that hold for new rows: order statistics by hand, coverage over many splits, learn then test."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, binom

from gapa_onnx.errors import UserError
from gapa_onnx.settle.conformal import (
    PixelRisk,
    answered_from,
    answers_needed,
    binomial_tail,
    interval_scores,
    level_in,
    line_at,
    lines,
    lines_by_class,
    penalties,
    reaches,
    rows_needed,
)


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95, 0.99, 2 / 3])
def test_the_line_is_the_smallest_that_counts_enough(coverage):
    """By hand: the smallest of the scores with at least (n + 1) c of them not above it."""
    generator = np.random.default_rng(0)
    for rows in (1, 2, 9, 10, 18, 19, 20, 98, 99, 100, 257):
        scores = generator.integers(0, 20, size=rows) / 4  # with ties
        enough = [s for s in np.sort(scores) if (scores <= s).sum() >= (rows + 1) * coverage - 1e-9]
        assert line_at(scores, coverage) == (enough[0] if enough else None)
        assert (line_at(scores, coverage) is not None) == (rows >= rows_needed(coverage))


def test_the_coverage_over_many_splits_is_that_of_the_theory():
    """Given n rows, the coverage of new ones is a Beta(k, n + 1 - k) number, k = ⌈(n + 1) c⌉."""
    generator, rows, coverage, splits = np.random.default_rng(1), 57, 0.9, 4000
    k = int(np.ceil((rows + 1) * coverage))
    scores = generator.exponential(size=(splits, rows))
    held = 1 - np.exp(-np.array([line_at(one, coverage) for one in scores]))  # P(a new score is not above)
    law = beta(k, rows + 1 - k)
    assert abs(held.mean() - law.mean()) < 4 * law.std() / np.sqrt(splits)
    assert coverage <= law.mean() <= coverage + 1 / (rows + 1)
    for quantile in (0.1, 0.5, 0.9):
        share = (held <= law.ppf(quantile)).mean()
        assert abs(share - quantile) < 4 * np.sqrt(quantile * (1 - quantile) / splits)


def test_ties_only_cover_more():
    generator, rows, coverage, splits = np.random.default_rng(2), 40, 0.8, 3000
    scores = generator.integers(0, 5, size=(splits, rows + 1))
    held = [scores[i, -1] <= line_at(scores[i, :-1], coverage) for i in range(splits)]
    assert np.mean(held) > coverage - 4 * np.sqrt(coverage * (1 - coverage) / splits)


def test_each_class_has_the_line_of_its_own_rows():
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 3, size=400)
    scores = generator.normal(size=400) + labels
    table = lines_by_class(scores, labels, 3, 0.9, "y")
    for label in range(3):
        assert table["0.9"][label] == line_at(scores[labels == label], 0.9)
    assert set(table) <= set(lines(scores, 0.9, "y")) | {"0.99"}


def test_too_few_rows_say_how_many_are_needed():
    with pytest.raises(UserError, match="coverage 0.95 of 'y' needs 19 rows to count on, and there are 18"):
        lines(np.zeros(18), 0.95, "y")
    assert "0.95" in lines(np.zeros(19), 0.95, "y")
    labels = np.array([0] * 30 + [1] * 5)
    with pytest.raises(UserError, match="needs 9 rows of every class to count on, and class 1 has 5"):
        lines_by_class(np.zeros(35), labels, 2, 0.9, "y")
    with pytest.raises(UserError, match="class 2 has 0"):
        lines_by_class(np.zeros(35), labels, 3, 0.5, "y")


def test_rows_without_a_number_are_not_covered():
    scores = np.concatenate([np.arange(95.0), np.full(5, np.inf)])
    table = lines(scores, 0.9, "y")
    assert table["0.9"] == (90.0,) and "0.97" not in table
    with pytest.raises(UserError, match="coverage 0.96 of 'y' is not reached"):
        lines(scores, 0.96, "y")


def test_the_level_that_keeps_what_is_asked():
    levels = ("0.5", "0.9", "0.91", "0.995")
    assert level_in(levels, 0.9, most=False) == "0.9" and level_in(levels, 0.903, most=False) == "0.91"
    assert level_in(levels, 0.999, most=False) is None
    assert level_in(levels, 0.903, most=True) == "0.9" and level_in(levels, 0.4, most=True) is None


@pytest.mark.parametrize("size", [1.0, 1e4, 1e-6])
def test_bounds_in_single_precision_hold_the_targets(size):
    """The score of a row, as the factor, keeps its target within bounds that are rounded as the file rounds them."""
    generator = np.random.default_rng(4)
    mean = (size * generator.normal(size=(5000, 2)) + size).astype(np.float32)
    var = np.float32(generator.uniform(1e-3, 1, size=(5000, 2)))
    target = mean.astype(np.float64) + np.sqrt(var) * generator.normal(size=(5000, 2))
    sides = np.float32([[0.5, 2], [1, 3]])
    factor = interval_scores(mean, var, target, sides.astype(np.float64)).astype(np.float32)[:, None]
    unit = np.sqrt(var) * factor
    assert ((mean - unit * sides[0] <= target) & (target <= mean + unit * sides[1])).all()
    error = target - mean
    plain = np.maximum(error / sides[1], -error / sides[0])
    plain = (plain / np.sqrt(var)).max(axis=1)
    slack = 1e-6 + 8e-7 * (np.abs(mean) + np.abs(target)).max(axis=1) / np.sqrt(var).min(axis=1)
    assert (factor[:, 0] >= plain * (1 - 1e-7)).all() and (factor[:, 0] - plain <= slack + 1e-6 * plain).all()


def test_a_score_without_a_number_is_infinite():
    mean, var = np.zeros((4, 1), np.float32), np.float32([[1], [np.nan], [0], [np.inf]])
    scores = interval_scores(mean, var, np.array([[1.0], [0], [1], [1]]), np.ones((2, 1)))
    assert scores[0] == pytest.approx(1, abs=1e-5) and np.isinf(scores[1:3]).all() and scores[3] == 0


def test_reaches_are_quantiles_of_either_side():
    generator = np.random.default_rng(5)
    var = generator.uniform(0.5, 2, size=(20_000, 1)).astype(np.float32)
    mean = generator.normal(size=(20_000, 1)).astype(np.float32)
    skewed = generator.exponential(size=(20_000, 1)) - 1
    found = reaches(mean, var, mean + np.sqrt(var) * skewed, 0.9)
    np.testing.assert_allclose(found[:, 0], [1 + np.log(0.95), -np.log(0.05) - 1], rtol=0.05)
    above = reaches(mean, var, mean + np.sqrt(var), 0.9)  # nothing lies below
    np.testing.assert_allclose(above[:, 0], [0.1, 1], rtol=1e-4)
    np.testing.assert_array_equal(reaches(mean, var, mean, 0.9), 1)
    np.testing.assert_array_equal(reaches(mean, np.full_like(var, np.nan), mean, 0.9), 1)


def test_penalties_begin_behind_the_ranks_that_are_needed():
    ranks = np.array([0] * 90 + [1] * 6 + [3] * 4)
    np.testing.assert_allclose(penalties(ranks, 0.9, 4), [0, 0.1, 0.2, 0.3])
    np.testing.assert_allclose(penalties(ranks, 0.95, 4), [0, 0, 0.1, 0.2])
    np.testing.assert_allclose(penalties(ranks, 0.99, 4), 0)


# ----------------------------------------------------------------------------------- pixels


def test_the_line_of_pixels_by_hand():
    """The smallest point of the grid whose mean share of missed pixels, with one image that misses all, is allowed."""
    generator = np.random.default_rng(7)
    images = [-(generator.uniform(size=generator.integers(5, 40)) ** 2) for _ in range(60)]
    risk = PixelRisk()
    for scores in images:
        risk.add(scores)
    table = risk.lines(0.9, "y")
    for level in (0.5, 0.9, 0.95):
        grid = PixelRisk.GRID.astype(np.float32)
        missed = [(sum((s.astype(np.float32) > t).mean() for s in images) + 1) / 61 for t in grid]
        assert table[f"{level:g}"] == (grid[np.flatnonzero(np.array(missed) <= 1 - level)[0]],)
    with pytest.raises(UserError, match="needs 99 images to count on, and there are 60"):
        risk.lines(0.99, "y")


def test_the_risk_of_new_images_is_kept():
    """Images differ much from each other, their pixels little: pixels by themselves would promise too much."""
    generator, missed = np.random.default_rng(8), []

    def image() -> np.ndarray:
        return -np.clip(generator.beta(2, 2) + 0.05 * generator.normal(size=50), 1e-3, 1)

    for _ in range(400):
        risk = PixelRisk()
        for _ in range(20):
            risk.add(image())
        line = risk.lines(0.8, "y")["0.8"][0]
        missed.append((image() > line).mean())
    assert np.mean(missed) < 0.2 + 3 * np.std(missed) / np.sqrt(400)
    assert np.mean(missed) > 0.2 - 2 / 21 - 3 * np.std(missed) / np.sqrt(400)


# --------------------------------------------------------------------------------- deferral


def test_the_binomial_tail():
    errors, rows = np.array([0, 1, 5, 30, 40, 0]), np.array([100, 100, 60, 200, 40, 0])
    for rate in (0.001, 0.05, 0.4):
        expected = np.where(errors >= rows, 1.0, binom.cdf(errors, rows, rate))
        np.testing.assert_allclose(binomial_tail(errors, rows, rate), expected, rtol=1e-9)


@pytest.mark.parametrize("error, confidence", [(0.02, 0.9), (0.1, 0.95), (0.5, 0.9)])
def test_so_many_right_answers_are_needed(error, confidence):
    needed = answers_needed(error, confidence)
    assert binom.cdf(0, needed, error) <= 1 - confidence < binom.cdf(0, needed - 1, error)


def draw(generator: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Highest probabilities p, and whether wrong: with probability (1 - p)."""
    confidence = generator.beta(4, 1, size=rows).astype(np.float32)
    return confidence, generator.uniform(size=rows) > confidence


def risk(line: float) -> float:
    """Of the rows from a line on: E[1 - p | p ≥ line] for p ~ Beta(4, 1), by its density 4 p³."""
    return 1 - (4 / 5) * (1 - line**5) / (1 - line**4)


def test_the_error_is_kept_with_the_stated_confidence():
    generator, broken, found, times = np.random.default_rng(5), 0, 0, 600
    for _ in range(times):
        line = answered_from(draw(generator, 600), draw(generator, 600), 0.1, 0.9)
        if line is not None:
            found += 1
            broken += risk(line) > 0.1
    assert found > 0.9 * times
    assert broken <= 0.1 * times + 3 * np.sqrt(0.1 * 0.9 * times)


def test_more_rows_answer_more():
    generator = np.random.default_rng(6)
    lines_found = [
        answered_from(draw(generator, 2000), draw(generator, rows), 0.1, 0.9) for rows in (1000, 20_000)
    ]
    assert risk(lines_found[1]) == pytest.approx(0.1, abs=0.015) and lines_found[1] < lines_found[0]


def test_lines_at_the_ends():
    confident = (np.full(200, 0.9, np.float32), np.zeros(200, bool))
    assert answered_from(confident, confident, 0.02, 0.9) == 0  # all rows are answered
    wrong = (np.full(200, 0.9, np.float32), np.ones(200, bool))
    assert answered_from(wrong, wrong, 0.02, 0.9) is None
    few = (np.full(20, 0.9, np.float32), np.zeros(20, bool))
    assert answered_from(few, few, 0.02, 0.9) is None
    lost = (np.full(200, np.nan, np.float32), np.zeros(200, bool))
    assert answered_from(lost, lost, 0.02, 0.9) is None
    half = (np.where(np.arange(400) % 2, np.float32(np.nan), np.float32(0.9)), np.arange(400) % 2 == 0)
    assert answered_from(half, half, 0.02, 0.9) is None  # the right answers are those without a number
