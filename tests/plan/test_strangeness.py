"""The score that witnesses make, and the entropy in it, against float64; it grows with every share."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_expit, log_softmax
from support.graph_runs import run_graph
from support.ordinary import counted_p, ordinary_scores, stored
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.model.splice import exposed
from gapa_onnx.plan.heads import strangeness
from gapa_onnx.plan.heads.strangeness import EARLIER, ENTROPY, LAST, Gauge, emit_entropy, emit_strangeness
from gapa_onnx.record import read

EPS = float(np.finfo(np.float32).eps)
#: What is added up, as the page of the file format has it: least number, and what becomes of z.
ADDED = {
    LAST: (1e-12, lambda z: z / 2),
    EARLIER: (1e-12, lambda z: np.logaddexp(0, 4 * (z - 1.25))),
    ENTROPY: (1e-7, lambda z: np.logaddexp(0, 2 * (z + 0.5)) / 3),
}


def z_of(ordinary: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Numbers (n,) on the scale of ordinary ones: 0 at their median, 1 at their quantile .95."""
    median = np.median(ordinary)
    return (numbers - median) / max(np.quantile(ordinary, 0.95) - median, 0.05)


def by_definition(kind, ordinary: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """What numbers (n, columns) add to a score, (n,), with medians and quantiles of ordinary ones (m, columns)."""
    least, bent = ADDED[kind]
    logs, known = np.log(np.maximum(numbers, least)), np.log(np.maximum(ordinary, least))
    columns = range(logs.shape[1])
    z, of_known = (
        np.mean([z_of(known[:, c], part[:, c]) for c in columns], axis=0) for part in (logs, known)
    )
    return bent(z_of(of_known, z) if len(columns) > 1 else z)


def drawn(rows: int, columns: int, seed: int) -> np.ndarray:
    """Shares of ordinary inputs: most small, none the same."""
    return np.random.default_rng(seed).beta(0.7, 8, (rows, columns)).astype(np.float32)


def with_ends(numbers: np.ndarray) -> np.ndarray:
    """The same, some of them 0, 1 and what is hardly a number."""
    changed = numbers.copy()
    for row, value in enumerate((0.0, 1.0, 1e-30, 1e-12, 1e-7, 1e-38)):
        changed[row] = value
        changed[row + 6, row % changed.shape[1]] = value
    return changed


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("kind", [LAST, EARLIER, ENTROPY], ids=["last", "earlier", "entropy"])
def test_a_gauge_is_its_definition(kind, columns):
    ordinary, numbers = (
        array.astype(np.float64) for array in (drawn(500, columns, 0), with_ends(drawn(200, columns, 1)))
    )
    gauge = Gauge(kind, tuple("abcd"[:columns]), "centre", "slope")
    found = gauge(numbers, *gauge.fitted(ordinary))
    np.testing.assert_allclose(found, by_definition(kind, ordinary, numbers), rtol=1e-12, atol=1e-12)


def test_what_is_no_number_has_no_part_in_a_scale():
    ordinary = drawn(400, 2, 2).astype(np.float64)
    holes = np.concatenate([ordinary, [[np.nan, 0.5], [0.5, np.nan], [np.inf, 0.5]]])
    gauge = Gauge(EARLIER, ("a", "b"), "centre", "slope")
    np.testing.assert_array_equal(gauge.fitted(holes), gauge.fitted(ordinary))
    centre, slope = gauge.fitted(np.full((3, 2), np.nan))
    assert np.isfinite(centre).all() and (slope > 0).all()
    centre, slope = gauge.fitted(
        np.full((50, 2), 0.25)
    )  # all alike: units of 0.05, of each and of their mean
    np.testing.assert_allclose(slope, 4 / (2 * 0.05 * 0.05))


@pytest.mark.parametrize("places", [1, 2, 4])
@pytest.mark.parametrize("entropy", [False, True], ids=["shares alone", "with an entropy"])
@pytest.mark.parametrize("opset", [8, 11, 13, 17, 21])
def test_the_graph_is_the_definition(places, entropy, opset):
    names = [f"share{at}" for at in range(places)]
    ordinary, numbers = drawn(500, places + 1, 3), with_ends(drawn(200, places + 1, 4))
    feeds = {name: numbers[:, at : at + 1] for at, name in enumerate(names)}
    feeds |= {"entropy": numbers[:, places:]} if entropy else {}
    told = {}

    def write(graph, values):
        testimony = strangeness.Testimony(graph, shares={name: values[name] for name in names})
        score, by_shares, told["tensors"] = emit_strangeness(
            testimony, tuple(names), values["entropy"] if entropy else None, "y/score"
        )
        return score, by_shares

    def fill():
        columns = {name: ordinary[:, at : at + 1] for at, name in enumerate([*names, "entropy"])}
        filled = {}
        for gauge in told["tensors"].gauges:
            read = np.concatenate([columns[name] for name in gauge.reads], axis=1).astype(np.float64)
            filled |= dict(zip((gauge.centre, gauge.slope), gauge.fitted(read)))
        return filled

    score, by_shares = run_graph(opset, feeds, write, fill)
    assert [gauge.reads for gauge in told["tensors"].gauges] == [
        part for part in (("share0",), tuple(names[1:]), ("entropy",) if entropy else ()) if part
    ]
    wide, known = numbers.astype(np.float64), ordinary.astype(np.float64)
    expected = by_definition(LAST, known[:, :1], wide[:, :1])
    if places > 1:
        expected += by_definition(EARLIER, known[:, 1:places], wide[:, 1:places])
    # Logarithms of up to 30, and their centres, are rounded; then they are divided by units of about 2, times 4.
    rounding = 4 * EPS * 60 * 4 * places
    np.testing.assert_allclose(by_shares, expected, rtol=1e-5, atol=rounding)
    if entropy:
        expected += by_definition(ENTROPY, known[:, places:], wide[:, places:])
    np.testing.assert_allclose(score, expected, rtol=1e-5, atol=rounding)
    assert score.shape == (200,)


@pytest.mark.parametrize("column", range(4), ids=["last", "first", "second", "entropy"])
def test_a_score_grows_with_each_of_its_numbers(column):
    """Strictly, also far beyond all that was seen; where it is far from the ordinary, in single precision too."""
    ordinary = drawn(500, 4, 5).astype(np.float64) / 100
    gauges = [Gauge(LAST, ("a",), "", ""), Gauge(EARLIER, ("b", "c"), "", ""), Gauge(ENTROPY, ("d",), "", "")]
    slots = [[0], [1, 2], [3]]
    scales = [gauge.fitted(ordinary[:, slot]) for gauge, slot in zip(gauges, slots)]

    def score(numbers):
        parts = [g(numbers[:, slot], *scale) for g, slot, scale in zip(gauges, slots, scales)]
        return parts[0] + parts[1] + parts[2]

    rising = np.median(ordinary, axis=0) * np.ones((300, 1))
    start = ordinary[:, column].min() if column == 0 else np.quantile(ordinary[:, column], 0.2)
    rising[:, column] = np.geomspace(start, 1, 300)
    assert rising[:, column].max() > 10 * ordinary[:, column].max()
    found = score(rising)
    assert (np.diff(found) > 0).all()
    far = rising[:, column] > ordinary[:, column].max()
    assert far.sum() > 30 and (np.diff(found[far].astype(np.float32)) > 0).all()
    # What an earlier place or an entropy finds ordinary takes nothing away, however small it is.
    faint = rising[:1].copy()
    faint[:, column] = 0
    assert column == 0 or 0 <= (found[0] - score(faint)[0]) < 0.6


# -------------------------------------------------------------------------------- entropies


def of_classes(logits: np.ndarray) -> np.ndarray:
    logs = log_softmax(logits.astype(np.float64), axis=1)
    return -(np.exp(logs) * logs).sum(axis=1, keepdims=True)


def of_labels(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    yes, no = log_expit(wide), log_expit(-wide)
    return -(np.exp(yes) * yes + np.exp(no) * no).sum(axis=1, keepdims=True)


LOGITS = {
    "usual": 3 * np.random.default_rng(0).normal(size=(50, 10)),
    "all the same": np.full((3, 7), 4.25),
    "one class": np.array([[0.0], [50.0], [-50.0]]),
    "two": np.stack([np.linspace(-120, 120, 241), np.zeros(241)], axis=1),
    "large": 1e4 + np.random.default_rng(1).normal(size=(20, 5)),
    "a hundred apart": np.array([[100.0, 0, 0], [0, 100, 99], [-100, 0, 0], [1000, 0, -1000]]),
    "a thousand classes": 2 * np.random.default_rng(2).normal(size=(20, 1000)),
    "a thousand that are sure": np.where(np.arange(1000) == 3, 40.0, 0.0)[None],
}


@pytest.mark.parametrize("opset", [8, 13, 17])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("which", LOGITS)
def test_entropies(which, link, opset):
    logits = LOGITS[which].astype(np.float32)
    (found,) = run_graph(
        opset, {"z": logits}, lambda graph, values: [emit_entropy(graph, values["z"], link, "y/entropy")]
    )
    expected = (of_classes if link == "softmax" else of_labels)(logits)
    assert found.shape == (len(logits), 1)
    # The logarithm of 1 + a small number is known to a rounding of 1 for each of its terms, all else relatively.
    terms = logits.shape[1] if link == "sigmoid" else 1
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=terms * EPS)
    assert (found >= 0).all()


def test_classes_that_are_ruled_out_have_no_part_in_an_entropy():
    """A logit of minus infinity, as of tokens that must not come; what is no number stays none."""
    rest = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    without = np.concatenate([np.full((20, 1), -np.inf, np.float32), rest], axis=1)
    wrong = without.copy()
    wrong[0, 1], wrong[1, 1], wrong[2] = np.nan, np.inf, -np.inf

    def entropies(logits, link="softmax"):
        return run_graph(
            17, {"z": logits}, lambda graph, values: [emit_entropy(graph, values["z"], link, "y/entropy")]
        )[0]

    np.testing.assert_allclose(entropies(without), of_classes(rest), rtol=2e-5)
    np.testing.assert_allclose(entropies(without, "sigmoid"), of_labels(rest), rtol=2e-5)
    np.testing.assert_array_equal(np.isnan(entropies(wrong))[:, 0], np.arange(20) < 3)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_nothing_cancels_where_a_prediction_is_sure(link):
    """p log p of the others remains, down to the smallest numbers: a sum 1 + … would have lost it."""
    away = np.arange(2, 86, dtype=np.float32)
    logits = away[:, None] if link == "sigmoid" else np.stack([away, 0 * away], axis=1)
    (found,) = run_graph(
        17, {"z": logits}, lambda graph, values: [emit_entropy(graph, values["z"], link, "y/entropy")]
    )
    expected = np.exp(-away.astype(np.float64)) * (1 + away)  # to first order in exp(-away)
    assert (found[:, 0] > 0).all() and (np.diff(found[:, 0]) < 0).all()
    sure = away > 10
    assert (np.abs(found[:, 0] / expected - 1)[sure] < 1.1 / away[sure]).all()


# --------------------------------------------------------------------------------- in a file


@pytest.mark.parametrize("held_out", [False, True], ids=["left-out rows", "held-out rows"])
def test_the_score_of_a_file_by_its_record(held_out):
    """From its shares and its logits, by the formula that docs/file-format.md has."""
    calibration = np.load(MODELS / "digits_mlp_calibration.npz")["pixels"]
    images = np.load(MODELS / "digits_mlp_heldout.npz")["pixels"]
    given = {"held_out": {"pixels": images[:200]}} if held_out else {}
    model = gapa_onnx.convert(MODELS / "digits_mlp.onnx", {"pixels": calibration}, m=100, k=10, **given).model
    score = read(model).heads["logits"].score
    made, held = score.witnesses, stored(model)
    shares = [*made.last.reads, *made.earlier.reads]
    assert score.kind == "witnesses" and len(shares) == 2
    rows = np.concatenate([images[200:], 255 * np.random.default_rng(0).random((20, 64)).astype(np.float32)])
    session = gapa_onnx.session(exposed(model, [*shares, score.ranked]).SerializeToString())
    names = ["logits", "logits_score", "logits_pvalue", "logits_ood", score.ranked, *shares]
    logits, found, p, flags, ranked, *numbers = session.run(names, {"pixels": rows})

    def z(gauge, x, least):
        return (np.log(np.maximum(x.astype(np.float64)[:, 0], least)) - held[gauge.centre]) * held[
            gauge.slope
        ]

    by_shares = z(made.last, numbers[0], 1e-12) + np.logaddexp(0, z(made.earlier, numbers[1], 1e-12))
    entropy = z(made.entropy, of_classes(logits), 1e-7)
    whole = by_shares + np.logaddexp(0, entropy) / 3
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-4)
    # Entropies of rows that the model was fitted to are too small to be ranked by.
    np.testing.assert_allclose(ranked, whole if held_out else by_shares, rtol=1e-5, atol=1e-4)
    ordinary = ordinary_scores(model, score)
    assert (
        len(ordinary) == score.rows == (100 if held_out else len(calibration))
    )  # the other held-out rows are fitted to
    assert score.holds == ("exactly" if held_out else "approximately")
    np.testing.assert_array_equal(p, counted_p(ordinary, ranked))
    np.testing.assert_array_equal(flags, ~(p > np.float32(0.05)))
    assert flags[:-20].mean() < 0.15 and flags[-20:].all()
