"""Scores that do not follow the length of a text: how they are levelled, and that new texts are flagged alike."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from support import text_models
from support.ordinary import counted_p, ordinary_scores
from support.text_models import text_model, texts

import gapa_onnx
from gapa_onnx.compiler import convert
from gapa_onnx.record import read
from gapa_onnx.settings import Settings
from gapa_onnx.settle import ranking
from gapa_onnx.settle.lengths import LONGEST, WIDEST, LengthFit, fit_lengths, quantile_curve

# ----------------------------------------------------------------- the fit


def loss(y, curve, quantile):
    away = y - curve
    return np.where(away > 0, quantile * away, (quantile - 1) * away).sum(axis=-1)


def best_curve(x, y, quantile, degree):
    """The best of all curves through degree + 1 of the points: one of these is the best of all."""
    every = itertools.combinations(range(len(x)), degree + 1)
    chosen = np.array([corners for corners in every if len(set(x[list(corners)])) > degree])
    corners = x[chosen][:, :, None] ** np.arange(degree + 1)
    found = np.linalg.solve(corners, y[chosen][:, :, None])[:, :, 0]
    return found[loss(y, found @ (x[:, None] ** np.arange(degree + 1)).T, quantile).argmin()]


@pytest.mark.parametrize("quantile, degree", [(0.5, 1), (0.75, 1), (0.9, 1), (0.5, 2), (0.8, 2)])
def test_curves_are_those_of_the_smallest_loss(quantile, degree):
    generator = np.random.default_rng(0)
    x = generator.uniform(-2, 1, 51)
    y = 1 - 2 * x + (0.3 * x**2 if degree == 2 else 0) + generator.exponential(size=51)
    best = best_curve(x, y, quantile, degree)
    found = quantile_curve(x, y, quantile, degree)
    powers = x[:, None] ** np.arange(degree + 1)
    assert loss(y, powers @ found, quantile) <= (1 + 1e-3) * loss(y, powers @ best, quantile)
    # 51 points with a standard deviation of 1 know a quantile to about 0.2, and at the ends less
    assert np.abs(powers @ (found - best)).max() < 0.1


def test_few_rows_are_levelled_by_lines():
    generator = np.random.default_rng(1)
    n = generator.integers(4, 65, 60)
    scores = np.exp(-1.5 * np.log(n) + generator.normal(size=60))
    found = fit_lengths(scores, n, 0.95)
    usual = np.exp(np.median(np.log(n)))
    away, y = np.log(n / usual), np.log(scores)
    median = best_curve(away, y, 0.5, 1)
    # 60 rows have 3 beyond the quantile 0.95, and 20 beyond 0.67; the least is 0.75
    distance = best_curve(away, y - median[0] - median[1] * away, 0.75, 1)
    assert (found.least, found.most, found.usual) == (n.min(), n.max(), pytest.approx(usual))
    assert (found.bend, found.flaring) == (0, 0)
    np.testing.assert_allclose([found.middle, found.slope], median, atol=0.01)
    assert found.widening == pytest.approx(distance[1] / distance[0], abs=0.02)


def test_curves_that_scores_were_made_from_are_found_again():
    generator = np.random.default_rng(2)
    n = generator.integers(4, 65, 40_000)
    usual = np.exp(np.median(np.log(n)))
    away = np.log(n / usual)
    noise = (1 - 0.2 * away + 0.1 * away**2) * generator.normal(size=len(n)) * 0.5
    found = fit_lengths(np.exp(2 - 1.2 * away + 0.3 * away**2 + noise), n, 0.95)
    # The median of 40,000 is known to 1.25 · 0.5 / 200 = .003, the quantile .95 to 2.1 · 0.5 / 200; at the
    # ends of the lengths coefficients are known a few times less well.
    np.testing.assert_allclose([found.middle, found.slope, found.bend], [2, -1.2, 0.3], atol=0.02)
    np.testing.assert_allclose([found.widening, found.flaring], [-0.2, 0.1], atol=0.05)
    levelled = np.log(found.levelled(np.exp(2 - 1.2 * away + 0.3 * away**2 + noise), n))
    line = np.quantile(levelled, 0.95)
    for part in np.array_split(np.argsort(n, kind="stable"), 5):
        assert np.median(levelled[part]) == pytest.approx(2, abs=0.03)
        # 8000 in a fifth: √(.05 · .95 / 8000) = .0024
        assert (levelled[part] > line).mean() == pytest.approx(0.05, abs=4 * 0.0025)


def test_the_table_says_what_the_formula_does():
    level = LengthFit(usual=10, least=3, most=40, middle=-1, slope=-2, bend=0.25, widening=0.4, flaring=-0.1)
    lengths, scores = np.array([0, 1, 3, 10, 25, 40, 41, 5000]), np.linspace(0.1, 3, 8)
    away = np.log(np.clip(lengths, 3, 40) / 10)
    widths = 1 + 0.4 * away - 0.1 * away**2
    expected = -1 + (np.log(scores) - (-1 - 2 * away + 0.25 * away**2)) / widths
    assert level.table().shape == (41, 3)
    np.testing.assert_allclose(np.log(level.levelled(scores, lengths)), expected, rtol=1e-12)
    assert (level.levelled(np.array([0.0, -1e-9]), np.array([3, 9])) == 0).all()


def test_wild_curves_and_very_long_inputs_are_bounded():
    level = LengthFit(usual=10, least=1, most=2 * LONGEST, middle=0, slope=0, bend=0, widening=5, flaring=-3)
    table = level.table()
    assert len(table) == LONGEST + 1
    assert table[:, 0].min() == pytest.approx(1 / WIDEST) and table[:, 0].max() == pytest.approx(WIDEST)


@pytest.mark.parametrize(
    "scores, lengths",
    [
        (np.ones(49), np.arange(1, 50)),  # few
        (np.linspace(1, 2, 300), np.full(300, 12)),  # of one length
        (np.where(np.arange(90) < 45, 1.0, np.nan), np.arange(1, 91)),  # few that are numbers
        (np.where(np.arange(90) < 45, 1.0, 0.0), np.arange(1, 91)),  # few that have a logarithm
    ],
)
def test_what_tells_nothing_is_not_levelled(scores, lengths):
    assert fit_lengths(scores, lengths, 0.95) is None


# ----------------------------------------------------------------- texts from 4 to 64 tokens

LONG = 64
SMALL = {"m": 200, "k": 16}
CHOICES = {**SMALL, "metric": "euclidean", "score": "variance"}
PLAIN = text_model(text_models.PLAIN, text_models.TANH, texts=True)
MODELS = {
    "the mean of tokens": (PLAIN, "auto"),
    "attention": (text_model(text_models.ATTENTION, text_models.TANH, texts=True), "auto"),
    "a query for each token": (PLAIN, "h"),
    "a query for each text": (PLAIN, "h:pooled"),
}
KNOWN, NEW = (
    texts(np.random.default_rng(seed).integers(4, LONG + 1, rows), LONG, seed + 1)
    for seed, rows in ((1, 2000), (3, 3000))
)


def run(conversion, rows, *names):
    return gapa_onnx.session(conversion.model.SerializeToString()).run(list(names), rows)


def without_levels(monkeypatch, *arguments, **choices):
    """The same conversion with scores as they are."""
    with monkeypatch.context() as patched:
        patched.setattr(ranking, "fit_lengths", lambda *_: None)
        return convert(*arguments, **choices)


def follows(conversion):
    """How the score of new texts follows 1 / length, and the shares of the short and the long third that are flagged."""
    scores, flags = run(conversion, NEW, "logits_score", "logits_ood")
    n = NEW["attention_mask"].sum(axis=1)
    low, high = np.quantile(n, [1 / 3, 2 / 3])
    return np.corrcoef(scores, 1 / n)[0, 1], flags[n <= low].mean(), flags[n >= high].mean()


@pytest.mark.parametrize("how", MODELS)
def test_short_and_long_texts_are_flagged_alike(how, monkeypatch):
    model, sites = MODELS[how]
    conversion = convert(model, KNOWN, sites=sites, **CHOICES)
    assert all(check.passed for check in conversion.checks)  # also without the library
    correlation, short, long = follows(conversion)
    # A third of the new texts, and a third of those that the line and the curves are found on.
    known = read(conversion.model).heads["logits"].score.rows
    bound = 4 * np.sqrt(0.05 * 0.95 * (3 / 3000 + 3 / known))
    assert abs(correlation) < 0.15
    assert short == pytest.approx(0.05, abs=bound) and long == pytest.approx(0.05, abs=bound)
    correlation, short, long = follows(without_levels(monkeypatch, model, KNOWN, sites=sites, **CHOICES))
    assert correlation > 0.5
    assert short > 0.05 + bound and long < 0.005


@pytest.mark.parametrize("how", MODELS)
def test_short_and_long_texts_are_flagged_alike_by_witnesses(how):
    model, sites = MODELS[how]
    conversion = convert(model, KNOWN, sites=sites, **SMALL)
    assert all(check.passed for check in conversion.checks)
    score = read(conversion.model).heads["logits"].score
    bound = 4 * np.sqrt(0.05 * 0.95 * (3 / 3000 + 3 / score.rows))
    _, short, long = follows(conversion)
    assert short == pytest.approx(0.05, abs=bound) and long == pytest.approx(0.05, abs=bound)


def test_the_file_levels_as_its_record_says(monkeypatch):
    """By the formula of `settle.lengths`, from the score of a file that is not levelled; longer texts are as the
    longest of the data, shorter ones as the shortest."""
    data = texts(np.random.default_rng(5).integers(6, 41, 300), LONG, 6)
    conversion = convert(PLAIN, data, **CHOICES)
    plain = without_levels(monkeypatch, PLAIN, data, **CHOICES)
    level = read(conversion.model).heads["logits"].score.lengths
    assert (level["least"], level["most"]) == (6, 40)
    rows = texts(np.arange(1, LONG + 1), LONG, 7)
    found, before = (run(one, rows, "logits_score")[0] for one in (conversion, plain))
    away = np.log(np.clip(np.arange(1, LONG + 1), 6, 40) / level["usual"])
    median = level["middle"] + level["slope"] * away + level["bend"] * away**2
    width = np.clip(1 + level["widening"] * away + level["flaring"] * away**2, 1 / WIDEST, WIDEST)
    expected = np.exp(level["middle"] + (np.log(before) - median) / width)
    np.testing.assert_allclose(found, expected, rtol=1e-4)  # logarithms of about 5 in float32, times 3
    assert np.abs(np.log(found / before)).max() > 0.5
    names = ["logits", "logits_var", "logits_epistemic", "logits_probs"]
    for name, *both in zip(names, run(conversion, rows, *names), run(plain, rows, *names)):
        np.testing.assert_array_equal(*both, name)  # only the score is another


def test_the_line_is_that_of_levelled_scores():
    """The epistemic part as score, which is levelled as well."""
    for score in ("variance", "epistemic"):
        conversion = convert(PLAIN, KNOWN, **{**CHOICES, "score": score})
        ordinary = ordinary_scores(conversion.model, read(conversion.model).heads["logits"].score)
        assert len(ordinary) == 2000
        scores, p, flags = run(conversion, NEW, "logits_score", "logits_pvalue", "logits_ood")
        np.testing.assert_array_equal(p, counted_p(ordinary, scores))
        np.testing.assert_array_equal(flags, ~(p > np.float32(0.05)))
        assert flags.mean() == pytest.approx(0.05, abs=4 * np.sqrt(0.05 * 0.95 * (1 / 2000 + 1 / 3000)))


def test_the_same_data_give_the_same_bytes():
    first, second = (convert(PLAIN, KNOWN, **CHOICES).model.SerializeToString() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("lengths", [np.arange(4, 50), np.full(300, 12)], ids=["few", "one length"])
def test_without_lengths_to_learn_from_the_score_is_as_it_is(lengths):
    data = texts(lengths, LONG, 8)
    conversion = convert(PLAIN, data, m=40, k=8, score="variance")
    assert all(check.passed for check in conversion.checks)
    assert read(conversion.model).heads["logits"].score.lengths is None
    (neutral,) = [t for t in conversion.model.graph.initializer if t.name == "logits/score/lengths"]
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(neutral), [[1, 1, 1]])
    rows = texts(np.arange(1, LONG + 1), LONG, 9)
    score, var = run(conversion, rows, "logits_score", "logits_var")
    np.testing.assert_allclose(score, var.mean(axis=1), rtol=1e-5)


def test_without_a_mask_nothing_is_levelled():
    conversion = convert(PLAIN, KNOWN, settings=Settings(mask="none", **CHOICES))
    assert read(conversion.model).heads["logits"].score.lengths is None
