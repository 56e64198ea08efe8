"""Padding is no query: neither in what sites are fitted to, nor in means over positions, nor in what the file says."""

from __future__ import annotations

import numpy as np
import pytest
from support import text_models
from support.steps import steps
from support.text_models import repadded, text_model, texts

import gapa_onnx
from gapa_onnx.compiler import convert
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.record import read
from gapa_onnx.settings import Settings
from gapa_onnx.settle.tail import Tail

LENGTHS = np.random.default_rng(7).integers(1, 13, 48)  # too few texts for scores to be levelled
ROWS = texts(LENGTHS, 12, seed=1)
REAL = ROWS["attention_mask"] == 1
CHOICES = {"m": 50, "k": 8, "top_k": "all"}  # as many points as there are words


def run(model, rows, names=None):
    session = gapa_onnx.session(model.SerializeToString())
    names = names or [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, rows)))


def inverted(rows):
    return {"input_ids": rows["input_ids"], "key_padding_mask": rows["attention_mask"] == 0}


MODELS = {
    "tokens": (text_model(text_models.PLAIN, text_models.TANH, tokens=True), "auto"),
    "attention": (text_model(text_models.ATTENTION, text_models.TANH, tokens=True), "auto"),
    "channels first": (
        text_model(text_models.PLAIN, text_models.CONVOLUTION, tokens=True, positions=12), "h_:positions"
    ),
    "rows of all tokens": (text_model(text_models.PLAIN, text_models.MERGED, tokens=True), "h_"),
    "pooled": (text_model(text_models.ATTENTION, text_models.TANH, tokens=True), "h:pooled"),
    "pooled, channels first": (
        text_model(text_models.PLAIN, text_models.CONVOLUTION, tokens=True, positions=12), "h_:pooled"
    ),
    "pooled, of an open length": (
        text_model(text_models.PLAIN, text_models.CONVOLUTION, tokens=True), "h_:pooled"
    ),
    "behind a convolution": (text_model(text_models.PLAIN, text_models.CONVOLUTION, tokens=True), "h"),
    "ones at padding": (
        text_model(text_models.PLAIN, text_models.TANH, tokens=True, inverted=True), "auto"
    ),
}  # fmt: skip


def fed(how, rows):
    return inverted(rows) if how == "ones at padding" else rows


@pytest.mark.parametrize("how", MODELS)
def test_sites_are_fitted_to_real_tokens(how):
    model, sites = MODELS[how]
    made = steps(model, fed(how, ROWS), Settings(sites=sites, inducing="all", k=8, metric="euclidean"))
    (fit,) = made.calibration.fits
    z = text_models.features(ROWS, attention="Softmax" in {node.op_type for node in model.graph.node})
    z = np.tanh(z) if fit.site.query == "h" else z  # a tensor behind the activation
    if "pooled" in how:
        assert fit.rows == len(LENGTHS)
        # the points are the means of whole texts: in float32, up to 12 numbers of about 3
        expected = np.nanmean(z, axis=1)
        found = fit.index.points
        assert len(found) == len(expected)
        nearest = np.abs(found[:, None] - expected).max(axis=2).min(axis=0)
        assert nearest.max() < 1e-5
    else:
        assert fit.rows == LENGTHS.sum()
    np.testing.assert_allclose(fit.prior_var.reshape(-1), np.nanvar(z, axis=(0, 1)), rtol=1e-4)


@pytest.mark.parametrize("how", MODELS)
def test_what_stands_at_padding_changes_nothing(how):
    """Neither the file, if the calibration data have it, nor what the file says of real tokens."""
    model, sites = MODELS[how]
    converted, other = (
        convert(model, fed(how, rows), sites=sites, **CHOICES) for rows in (ROWS, repadded(ROWS, 3))
    )
    assert all(check.passed for check in converted.checks)
    heads = [read(one.model).heads["tokens"] for one in (converted, other)]
    assert heads[0].score == heads[1].score
    new = texts(LENGTHS[::-1], 12, seed=2)
    real = new["attention_mask"] == 1
    answers = [run(converted.model, fed(how, rows)) for rows in (new, repadded(new, 4))]
    for name in ("tokens", "tokens_var", "tokens_score", "tokens_ood", "tokens_epistemic"):
        first, second = (one[name][real] for one in answers)
        # Rows of a matrix product are summed alike wherever they stand, so that real tokens agree to the bit.
        np.testing.assert_array_equal(first, second, name)
    assert answers[0]["tokens_var"][real].min() > 0


def test_without_the_mask_padding_counts():
    """The control of the two tests above: they can fail."""
    model, sites = MODELS["tokens"]
    choices = {"sites": sites, "mask": "none", **CHOICES}
    made = steps(model, ROWS, Settings(**choices))
    assert made.calibration.fits[0].rows == REAL.size
    scores = [
        read(convert(model, rows, **choices).model).heads["tokens"].score
        for rows in (ROWS, repadded(ROWS, 3))
    ]
    assert scores[1].threshold > scores[0].threshold + 0.1


@pytest.mark.parametrize("how", ["tokens", "ones at padding", "channels first"])
def test_positions_of_padding_have_no_score_and_no_flag(how):
    model, sites = MODELS[how]
    converted = convert(model, fed(how, ROWS), sites=sites, **CHOICES)
    assert all(check.passed for check in converted.checks)
    strange = repadded(ROWS, 5)
    answers = run(converted.model, fed(how, strange))
    assert answers["tokens_score"].shape == REAL.shape
    assert (answers["tokens_score"][~REAL] == 0).all() and not answers["tokens_ood"][~REAL].any()
    assert (answers["tokens_score"][REAL] != 0).all()
    # The same words are strange where they are part of a text.
    whole = {**strange, "attention_mask": np.ones_like(strange["attention_mask"])}
    answers = run(converted.model, fed(how, whole))
    assert answers["tokens_ood"][~REAL].mean() > 0.9 > 0.2 > answers["tokens_ood"][REAL].mean()
    head = read(converted.model).heads["tokens"]
    assert head.mask == ("~key_padding_mask" if how == "ones at padding" else "attention_mask")


def test_the_line_is_found_from_real_tokens():
    model, sites = MODELS["attention"]
    settings = Settings(sites=sites, ood_quantile=0.9, **CHOICES)
    made, converted = steps(model, ROWS, settings), convert(model, ROWS, settings=settings)
    tensor = made.template.scores["tokens", "score"].ranked
    tail, parts = Tail(made.template, [tensor], converted.numbers), []
    for batch in made.sample.batches(Purpose.SCORES):
        parts.append((batch.positions, tail(batch, converted.numbers.fits)[tensor]))
    order = np.argsort(np.concatenate([positions for positions, _ in parts]))
    scores = np.concatenate([found for _, found in parts])[order]
    np.testing.assert_array_equal(np.isfinite(scores), REAL)  # 48 texts, of which all are left out
    score = read(converted.model).heads["tokens"].score
    expected = np.quantile(scores[REAL], 0.9, method="higher")
    assert score.threshold == pytest.approx(expected, rel=1e-6)


def test_a_padding_without_numbers_is_left_out():
    """An embedding of NaN at padding: the source's own answer for texts has none, and so have variances and scores."""
    model = text_model(text_models.PLAIN, text_models.TANH, tokens=True, texts=True)
    lost = repadded(ROWS, 0, lost=True)
    converted = convert(model, lost, sites="h", **CHOICES)
    assert converted.calibration.dropped == 0  # they do not count as lost rows either
    answers = run(converted.model, lost)
    assert np.isnan(answers["tokens"][~REAL]).all() and np.isfinite(answers["logits"]).all()
    assert np.isfinite(answers["logits_var"]).all() and np.isfinite(answers["logits_score"]).all()
    assert (answers["tokens_score"][~REAL] == 0).all() and not answers["tokens_ood"][~REAL].any()
    same = run(convert(model, ROWS, sites="h", **CHOICES).model, ROWS)
    for name in ("logits_var", "logits_score"):
        np.testing.assert_array_equal(answers[name], same[name])


def test_a_pooled_site_takes_the_mean_without_numbers_at_padding():
    model = text_model(text_models.PLAIN, text_models.TANH, texts=True)
    answers = [
        run(convert(model, rows, sites="h:pooled", **CHOICES).model, rows, ["logits_var", "logits_score"])
        for rows in (ROWS, repadded(ROWS, 0, lost=True))
    ]
    for name, first in answers[0].items():
        assert np.isfinite(first).all() and (name == "logits_score" or (first > 0).all())
        np.testing.assert_array_equal(first, answers[1][name])


@pytest.mark.parametrize("sites", ["h", "h:pooled"])
def test_texts_that_are_filled_up_further_have_the_same_answers(sites):
    model = text_model(text_models.ATTENTION, text_models.TANH, tokens=True, texts=True)
    converted = convert(model, ROWS, sites=sites, **CHOICES)
    assert all(check.passed for check in converted.checks)
    longer = {name: np.pad(array, ((0, 0), (0, 7))) for name, array in ROWS.items()}
    names = ["logits_var", "logits_score", "tokens_var", "tokens_score"]
    short, long = run(converted.model, ROWS, names), run(converted.model, longer, names)
    for name in names:
        if name.startswith("tokens"):
            short[name], long[name] = short[name][REAL], long[name][:, :12][REAL]
        # float32 sums over 12 and over 19 positions, of which the solve magnifies the roundings
        np.testing.assert_allclose(short[name], long[name], rtol=1e-2)


def test_the_score_of_a_text_without_classes_is_the_mean_over_its_tokens():
    model = text_model(text_models.PLAIN, text_models.TANH, tokens=True)
    converted = convert(model, ROWS, task="regression", **CHOICES)
    answers = run(converted.model, ROWS)
    expected = [row[:n].mean() for row, n in zip(answers["tokens_var"].astype(np.float64), LENGTHS)]
    np.testing.assert_allclose(answers["tokens_score"], expected, rtol=1e-5)


def test_a_mask_inside_the_graph_may_be_named():
    """What is no padding is computed here, from the mask that is fed."""
    model = text_model(text_models.PLAIN, text_models.TANH, tokens=True, inverted=True)
    settings = Settings(mask="attention_mask", **CHOICES)
    made = steps(model, inverted(ROWS), settings)
    assert made.plan.sites[0].mask == "attention_mask"
    assert made.calibration.fits[0].rows == LENGTHS.sum()
    answers = run(convert(model, inverted(ROWS), settings=settings).model, inverted(ROWS))
    assert (answers["tokens_score"][~REAL] == 0).all() and (answers["tokens_score"][REAL] != 0).all()


@pytest.mark.parametrize("sites", ["auto", "h:pooled"])
def test_batches_may_be_filled_up_to_lengths_of_their_own(sites):
    """Each batch to its longest text, as a data loader does; the other data are filled up to 12 all over."""
    model = text_model(text_models.PLAIN, text_models.TANH, tokens=True)
    parts = np.array_split(np.argsort(LENGTHS, kind="stable"), 6)
    sorted_rows = {name: array[np.concatenate(parts)] for name, array in ROWS.items()}
    batches = [{name: array[part, : LENGTHS[part].max()] for name, array in ROWS.items()} for part in parts]
    assert len({batch["input_ids"].shape[1] for batch in batches}) > 3
    own, all_over = (convert(model, data, sites=sites, **CHOICES) for data in (batches, sorted_rows))
    assert own.calibration.fits[0].rows == all_over.calibration.fits[0].rows
    lines = [read(one.model).heads["tokens"].score.threshold for one in (own, all_over)]
    assert lines[0] == pytest.approx(lines[1], rel=1e-3)  # means over batches of other sizes, in float32
    assert read(own.model).sites[0].mask == "attention_mask"
