"""Evaluation from end to end: files whose answers are known, numbers recomputed by other means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
from scipy import special, stats
from sklearn import metrics as sk
from support.answering_models import EMPTY_RECORD, Answering, answering, write_record
from typer.testing import CliRunner

from gapa_onnx.cli.evaluate import evaluate as command
from gapa_onnx.data import ImageOptions, InputSpec, Preparation
from gapa_onnx.errors import UserError
from gapa_onnx.measure import bench
from gapa_onnx.measure.evaluation.answers import open_converted
from gapa_onnx.measure.evaluation.evaluate import evaluate
from gapa_onnx.measure.evaluation.summary import summary_of
from gapa_onnx.measure.evaluation.thumbnails import thumbnail

ROWS, CLASSES = 120, 4
THRESHOLD = {"quantile": 0.95, "threshold": 1.5}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def class_answers(rng, rows: int = ROWS, strange: float = 0.0) -> dict[str, np.ndarray]:
    """Logits and what a head says about them; `strange` raises every score."""
    logits = rng.normal(size=(rows, CLASSES)).astype(np.float32) * 3
    probs = special.softmax(logits / 1.7, axis=1)
    score = rng.random(rows) * 2 + strange
    return {
        "y": logits,
        "y_probs": probs,
        "y_entropy": stats.entropy(probs, axis=1),
        "y_epistemic": score * 0.1,
        "y_score": score,
        "y_ood": score > THRESHOLD["threshold"],
    }


CLASS_HEAD = {"task": "classification", "link": "softmax", "axis": 1, "score": THRESHOLD}


@pytest.fixture
def classified(rng, tmp_path) -> tuple[Answering, dict[str, np.ndarray], np.ndarray]:
    answers = class_answers(rng)
    labels = np.where(rng.random(ROWS) < 0.7, answers["y"].argmax(1), rng.integers(0, CLASSES, ROWS))
    return answering(tmp_path / "c.gapa.onnx", answers, CLASS_HEAD), answers, labels


def strange_data(rng, tmp_path, rows: int = 50) -> dict[str, np.ndarray]:
    return answering(tmp_path / "unused.onnx", class_answers(rng, rows, strange=1.0), CLASS_HEAD).data


# ---------------------------------------------------------------------- classification


def test_classification_metrics_are_those_of_scikit_learn(classified):
    model, answers, labels = classified
    found = evaluate(model.path, model.data, labels)
    sides = {"source": special.softmax(answers["y"].astype(float), axis=1), "gapa": answers["y_probs"]}
    for side, probs in sides.items():
        expected = {
            "accuracy": sk.accuracy_score(labels, probs.argmax(1)),
            "nll": sk.log_loss(labels, probs, labels=range(CLASSES)),
            "brier": np.square(probs - np.eye(CLASSES)[labels]).sum(axis=1).mean(),
        }
        for name, value in expected.items():
            assert found.metrics[side][name] == pytest.approx(value, rel=1e-5), (side, name)
    assert found.metrics["source"]["nll"] != pytest.approx(found.metrics["gapa"]["nll"], rel=1e-3)
    assert (found.rows, found.ood_rows, found.task, found.output) == (ROWS, 0, "classification", "y")
    assert found.detection == {} and found.ood_sets == {}
    assert sum(one.count for one in found.reliability["gapa"]) == ROWS
    assert found.flagged == {"data": pytest.approx(answers["y_ood"].mean())}
    assert found.threshold == THRESHOLD


def test_wrong_predictions_are_told_apart_by_each_score(classified):
    model, answers, labels = classified
    found = evaluate(model.path, model.data, labels)
    wrong = answers["y_probs"].argmax(1) != labels
    for name in ("entropy", "epistemic", "score"):
        auroc = sk.roc_auc_score(wrong, answers[f"y_{name}"].astype(np.float32))
        assert found.error_detection[name]["auroc"] == pytest.approx(auroc, abs=1e-9)
    order = np.argsort(answers["y_score"].astype(np.float32), kind="stable")
    area = np.mean(np.cumsum(wrong[order]) / np.arange(1, ROWS + 1))
    assert found.aurc["score"] == pytest.approx(area, rel=1e-9)
    assert set(found.aurc) == {"entropy", "epistemic", "score", "maxprob", "source_entropy", "source_maxprob"}


def test_detection_of_strange_rows(rng, classified, tmp_path):
    model, answers, labels = classified
    strange = strange_data(rng, tmp_path)
    found = evaluate(model.path, model.data, labels, ood=strange)
    inside, outside = found.scores["score"]
    truth = np.r_[np.zeros(ROWS), np.ones(50)]
    np.testing.assert_allclose(inside, answers["y_score"].astype(np.float32))
    auroc = sk.roc_auc_score(truth, np.r_[inside, outside])
    assert found.detection["score"]["auroc"] == pytest.approx(auroc, rel=1e-12)
    source = stats.entropy(special.softmax(answers["y"].astype(float), axis=1), axis=1)
    np.testing.assert_allclose(found.scores["source_entropy"][0], source, rtol=1e-9)
    assert found.ood_rows == 50 and found.flagged["ood"] > found.flagged["data"]


def test_several_strange_sets_together_and_each_by_itself(rng, classified, tmp_path):
    model, _, labels = classified
    for name, rows in (("near", 20), ("far", 30)):
        np.savez(tmp_path / f"{name}.npz", **strange_data(rng, tmp_path, rows))
    found = evaluate(model.path, model.data, labels, ood=[tmp_path / "near.npz", tmp_path / "far.npz"])
    assert found.ood_rows == 50 and list(found.ood_sets) == ["near", "far"]
    mixed = sum(found.ood_sets[name]["score"]["auroc"] * rows for name, rows in (("near", 20), ("far", 30)))
    assert found.detection["score"]["auroc"] == pytest.approx(
        mixed / 50
    )  # the AUROC is linear in its positives


def test_nothing_depends_on_the_batches(rng, classified, tmp_path):
    model, _, labels = classified
    strange = strange_data(rng, tmp_path)
    whole = evaluate(model.path, model.data, labels, ood=strange, batch_size=1000)
    assert summary_of(evaluate(model.path, model.data, labels, ood=strange, batch_size=7)) == summary_of(
        whole
    )


@pytest.mark.parametrize("ending", [special.softmax, special.log_softmax])
def test_a_source_that_ends_in_softmax(rng, tmp_path, classified, ending):
    plain, answers, labels = classified
    ended = {**answers, "y": ending(answers["y"].astype(float), axis=1)}
    model = answering(tmp_path / "s.onnx", ended, {**CLASS_HEAD, "logits": "logits"})
    found, expected = (evaluate(one.path, one.data, labels).metrics["source"] for one in (model, plain))
    assert found == pytest.approx(expected, rel=1e-5)


def test_one_hot_labels_are_classes(classified):
    model, _, labels = classified
    by_class = evaluate(model.path, model.data, labels)
    assert evaluate(model.path, model.data, np.eye(CLASSES)[labels]).metrics == by_class.metrics


def test_a_single_sigmoid_is_two_classes(rng, tmp_path):
    logits = rng.normal(size=(60, 1)).astype(np.float32)
    probs = special.expit(logits / 2)
    model = answering(
        tmp_path / "b.onnx",
        {"y": logits, "y_probs": probs},
        {"task": "classification", "link": "sigmoid", "axis": 1},
    )
    labels = (rng.random(60) < 0.5).astype(int)
    found = evaluate(model.path, model.data, labels).metrics
    assert found["gapa"]["nll"] == pytest.approx(sk.log_loss(labels, probs[:, 0]), rel=1e-5)
    source = special.expit(logits[:, 0].astype(float))
    assert found["source"]["nll"] == pytest.approx(sk.log_loss(labels, source), rel=1e-6)
    assert found["source"]["brier"] == pytest.approx(2 * sk.brier_score_loss(labels, source), rel=1e-6)


# ------------------------------------------------------------------------- multi-label


def test_multilabel_metrics_are_means_over_labels(rng, tmp_path):
    logits = rng.normal(size=(80, 3)).astype(np.float32) * 2
    probs = special.expit(logits / 1.5)
    labels = (rng.random((80, 3)) < special.expit(logits)).astype(int)
    head = {"task": "multilabel", "link": "sigmoid", "axis": 1}
    answers = {"y": logits, "y_probs": probs, "y_score": rng.random((80, 1))}
    model = answering(tmp_path / "m.onnx", answers, head)
    found = evaluate(model.path, model.data, labels)
    for side, values in {"source": special.expit(logits.astype(float)), "gapa": probs}.items():
        each = range(3)
        expected = {
            "accuracy": np.mean([sk.accuracy_score(labels[:, i], values[:, i] >= 0.5) for i in each]),
            "subset_accuracy": sk.accuracy_score(labels, values >= 0.5),
            "nll": np.mean([sk.log_loss(labels[:, i], values[:, i]) for i in each]),
            "brier": np.mean([sk.brier_score_loss(labels[:, i], values[:, i]) for i in each]),
        }
        for name, value in expected.items():
            assert found.metrics[side][name] == pytest.approx(value, rel=1e-5), (side, name)
    assert found.risk == "share of wrong labels"
    with pytest.raises(UserError, match="label 1 of row 0 is 2"):
        evaluate(model.path, model.data, np.full((80, 3), [0, 2, 1]))


# -------------------------------------------------------------------------- regression


def test_regression_metrics_with_a_noise_head(rng, tmp_path):
    mean = rng.normal(size=(90, 1)).astype(np.float32)
    var = rng.uniform(0.1, 0.5, size=(90, 1)).astype(np.float32)
    total = var + np.float32(0.3)
    target = rng.normal(mean, np.sqrt(total))
    model = answering(
        tmp_path / "r.onnx", {"y": mean, "y_var": var, "y_total_var": total}, {"task": "regression"}
    )
    found = evaluate(model.path, model.data, target[:, 0])
    std = np.sqrt(total.astype(float))
    gapa, source = found.metrics["gapa"], found.metrics["source"]
    assert gapa["nll"] == pytest.approx(-stats.norm.logpdf(target, mean, std).mean(), rel=1e-9)
    assert gapa["rmse"] == pytest.approx(np.sqrt(sk.mean_squared_error(target, mean)), rel=1e-9)
    samples = rng.normal(mean, std, size=(4000, 90, 1))
    spread = rng.normal(mean, std, size=(4000, 90, 1))
    energy = np.abs(samples - target).mean(0) - 0.5 * np.abs(samples - spread).mean(0)  # another form of CRPS
    assert gapa["crps"] == pytest.approx(energy.mean(), rel=0.02)  # 90 x 4000 samples: about 0.3%
    low, high = stats.norm.interval(0.9, mean, std)
    assert gapa["coverage90"] == np.mean((target >= low) & (target <= high))
    assert source == {
        "rmse": gapa["rmse"],
        "mae": gapa["mae"],
        "crps": pytest.approx(sk.mean_absolute_error(target, mean)),
    }
    assert found.intervals.std == pytest.approx(std[:, 0]) and found.reliability == {}
    assert any("has no NLL" in note for note in found.notes)
    assert not any("noise head" in note for note in found.notes)


def test_regression_of_several_numbers_without_a_noise_head(rng, tmp_path):
    mean, var = rng.normal(size=(40, 2, 3)), rng.uniform(0.1, 0.5, size=(40, 2, 3))
    target = mean + 0.1
    model = answering(tmp_path / "r.onnx", {"y": mean, "y_var": var}, {"task": "regression"})
    found = evaluate(model.path, model.data, target, ood={"x": model.data["x"] * 2})
    assert found.metrics["gapa"]["mae"] == pytest.approx(0.1, rel=1e-5)
    assert found.scores["std"][0] == pytest.approx(np.sqrt(var.reshape(40, -1).mean(1)), rel=1e-6)
    assert found.detection["std"]["auroc"] > 0.9
    assert any("no noise head" in note for note in found.notes)


def test_a_variance_of_zero_leaves_the_log_loss_out(rng, tmp_path):
    model = answering(
        tmp_path / "r.onnx",
        {"y": np.zeros((5, 1)), "y_var": np.array([[0.0], [1], [1], [1], [1]])},
        {"task": "regression"},
    )
    found = evaluate(model.path, model.data, np.ones(5))
    assert "nll" not in found.metrics["gapa"] and found.metrics["gapa"]["crps"] > 0
    assert any("1 predictions have variance 0" in note for note in found.notes)


def test_large_answers_are_thinned(rng, tmp_path, monkeypatch):
    monkeypatch.setattr("gapa_onnx.measure.evaluation.regression.MOST_NUMBERS", 60)
    mean = rng.normal(size=(10, 30))
    model = answering(tmp_path / "r.onnx", {"y": mean, "y_var": np.ones_like(mean)}, {"task": "regression"})
    found = evaluate(model.path, model.data, mean + 1)
    assert found.metrics["gapa"]["mae"] == pytest.approx(1)
    assert any("6 evenly spaced numbers of the 30" in note for note in found.notes)


# ------------------------------------------------------------------------ segmentation


def segmented(rng, path: Path, axis: int = 1) -> tuple[Answering, np.ndarray, np.ndarray]:
    """A file, probabilities (n, h, w, c) and maps of classes with some pixels to ignore."""
    logits = rng.normal(size=(6, 5, 7, 3)).astype(np.float32) * 2
    probs = special.softmax(logits / 1.5, axis=-1)
    labels = np.where(rng.random((6, 5, 7)) < 0.7, logits.argmax(-1), rng.integers(0, 3, (6, 5, 7)))
    labels[0, 0, :3], labels[5] = 255, -1
    answers = {
        "y": np.moveaxis(logits, -1, axis),
        "y_probs": np.moveaxis(probs, -1, axis),
        "y_entropy": stats.entropy(probs, axis=-1),
        "y_epistemic": rng.random((6, 5, 7)),
        "y_ood": rng.random((6, 5, 7)) < 0.25,
    }
    image = {"image": rng.random((6, 3, 5, 7)).astype(np.float32)}
    head = {"task": "segmentation", "link": "softmax", "axis": axis}
    return answering(path, answers, head, inputs=image), probs, labels


@pytest.mark.parametrize("axis", [1, 3])
def test_segmentation_counts_labelled_pixels(rng, tmp_path, axis):
    model, probs, labels = segmented(rng, tmp_path / "s.onnx", axis)
    found = evaluate(model.path, model.data, labels, batch_size=4)
    counted = (labels >= 0) & (labels < 255)
    true, flat = labels[counted], probs[counted]
    gapa = found.metrics["gapa"]
    assert gapa["accuracy"] == pytest.approx(sk.accuracy_score(true, flat.argmax(1)))
    assert gapa["nll"] == pytest.approx(sk.log_loss(true, flat), rel=1e-5)
    assert gapa["brier"] == pytest.approx(np.square(flat - np.eye(3)[true]).sum(1).mean(), rel=1e-5)
    assert gapa["mean_iou"] == pytest.approx(sk.jaccard_score(true, flat.argmax(1), average="macro"))
    wrong = flat.argmax(1) != true
    entropy = stats.entropy(probs, axis=-1).astype(np.float32)[counted]
    assert found.error_detection["entropy"]["auroc"] == pytest.approx(
        sk.roc_auc_score(wrong, entropy), abs=1e-6
    )
    assert summary_of(found) == summary_of(evaluate(model.path, model.data, labels, batch_size=1))


def test_segmentation_examples_show_the_worst_images(rng, tmp_path):
    model, probs, labels = segmented(rng, tmp_path / "s.onnx")
    found = evaluate(model.path, model.data, labels)
    rate = [
        np.mean((probs[i].argmax(-1) != labels[i])[(labels[i] >= 0) & (labels[i] < 255)]) for i in range(5)
    ]
    shown = found.segmentation
    assert len(shown) == 4 and shown[0].row == int(np.argmax(rate))
    assert 5 not in [one.row for one in shown]  # nothing is labelled there
    first = shown[0]
    assert first.predicted.shape == first.target.shape == first.uncertainty.shape == (5, 7)
    np.testing.assert_array_equal(first.predicted, probs[first.row].argmax(-1))
    assert first.image.shape == (5, 7, 3) and first.image.dtype == np.uint8


def test_pixels_are_sampled_where_there_are_many(rng, tmp_path, monkeypatch):
    model, probs, labels = segmented(rng, tmp_path / "s.onnx")
    exact = evaluate(model.path, model.data, labels)
    assert len(exact.risk_coverage["entropy"][0]) == 5  # the last image has no label
    monkeypatch.setattr("gapa_onnx.measure.evaluation.dense.MOST_PLACES", 120)
    found = [evaluate(model.path, model.data, labels, batch_size=size) for size in (1, 6)]
    assert summary_of(found[0]) == summary_of(found[1])
    assert any("a fixed random sample" in note for note in found[0].notes)
    assert found[0].metrics == exact.metrics
    assert found[0].error_detection["entropy"] != exact.error_detection["entropy"]


def test_segmentation_by_one_sigmoid(rng, tmp_path):
    logits = rng.normal(size=(4, 1, 5, 5)).astype(np.float32)
    answers = {"y": logits, "y_probs": special.expit(logits / 2)}
    model = answering(tmp_path / "s.onnx", answers, {"task": "segmentation", "link": "sigmoid", "axis": 1})
    labels = (rng.random((4, 5, 5)) < 0.5).astype(int)
    found = evaluate(model.path, model.data, labels).metrics["gapa"]
    assert found["nll"] == pytest.approx(sk.log_loss(labels.ravel(), answers["y_probs"].ravel()), rel=1e-5)


def test_classes_along_a_sequence_are_places(rng, tmp_path):
    """Classification with several places per row, as of phonemes: negative labels do not count."""
    logits = rng.normal(size=(5, 6, 3)).astype(np.float32)
    probs = special.softmax(logits, axis=-1)
    labels = rng.integers(0, 3, size=(5, 6))
    labels[:, 4:] = -1
    head = {"task": "classification", "link": "softmax", "axis": 2}
    model = answering(tmp_path / "p.onnx", {"y": logits, "y_probs": probs}, head)
    found = evaluate(model.path, model.data, labels).metrics["gapa"]
    assert found["nll"] == pytest.approx(
        sk.log_loss(labels[:, :4].ravel(), probs[:, :4].reshape(-1, 3)), rel=1e-5
    )


# ------------------------------------------------------------------------------ tokens


def test_tokens_outside_the_top_keep_the_source_probability(rng, tmp_path):
    rows, length, vocabulary, top = 7, 5, 12, 4
    logits = rng.normal(size=(rows, length, vocabulary)).astype(np.float32) * 2
    order = np.argsort(-logits, axis=-1)[..., :top]
    shares = special.softmax(np.take_along_axis(logits, order, -1) / 1.5, axis=-1)
    entropy = rng.random((rows, length))
    answers = {"y": logits, "y_probs": shares, "y_tokens": order, "y_entropy": entropy}
    model = answering(tmp_path / "t.onnx", answers, {"task": "tokens", "link": "softmax", "axis": 2})
    labels = rng.integers(0, vocabulary, size=(rows, length))
    labels[0, 3:] = -100
    found = evaluate(model.path, model.data, labels, batch_size=3)

    source = special.softmax(logits.astype(float), axis=-1)
    whole = source.copy()  # the distribution over all tokens, position by position
    for i in range(rows):
        for t in range(length):
            mass = source[i, t, order[i, t]].sum()
            whole[i, t, order[i, t]] = shares[i, t] / shares[i, t].sum() * mass
    np.testing.assert_allclose(whole.sum(-1), 1, rtol=1e-6)
    whole /= whole.sum(-1, keepdims=True)  # scikit-learn warns of the last bits
    counted = labels >= 0
    for side, probs in {"source": source, "gapa": whole}.items():
        nll = sk.log_loss(labels[counted], probs[counted], labels=range(vocabulary))
        assert found.metrics[side]["nll"] == pytest.approx(nll, rel=1e-6)
        assert found.metrics[side]["perplexity"] == pytest.approx(np.exp(nll), rel=1e-6)
    inside = (order == labels[..., None]).any(-1)[counted].mean()
    assert found.metrics["gapa"]["targets_in_top_k"] == pytest.approx(inside)
    assert any("not among the top 4 tokens" in note for note in found.notes)
    np.testing.assert_allclose(found.scores["entropy"][0], entropy.mean(1), rtol=1e-6)  # per sequence


# ------------------------------------------------------------------------ rows with NaN


def test_rows_with_nan_are_left_out_and_counted(classified):
    model, answers, labels = classified
    broken = model.data["x"].copy()
    broken[[3, 50]] = np.nan
    found = evaluate(model.path, {"x": broken}, labels)
    kept = np.delete(np.arange(ROWS), [3, 50])
    expected = evaluate(model.path, {"x": model.data["x"][kept]}, labels[kept])
    assert found.metrics == expected.metrics and found.rows == ROWS - 2
    assert found.left_out == {"data": 2} and any("NaN" in note and "2" in note for note in found.notes)


def test_a_nan_score_alone_leaves_its_row_out(rng, tmp_path):
    answers = class_answers(rng)
    answers["y_score"][7] = np.nan
    model = answering(tmp_path / "c.onnx", answers, CLASS_HEAD)
    assert evaluate(model.path, model.data, np.zeros(ROWS)).left_out == {"data": 1}


def test_nan_everywhere_is_an_error(classified):
    model, _, labels = classified
    with pytest.raises(UserError, match="answers NaN for every row"):
        evaluate(model.path, {"x": np.full_like(model.data["x"], np.nan)}, labels)


# ---------------------------------------------------------------- what cannot be said


def test_no_errors_leave_error_detection_out(classified):
    model, answers, _ = classified
    found = evaluate(model.path, model.data, answers["y"].argmax(1))
    assert found.error_detection == {} and found.metrics["gapa"]["accuracy"] == 1
    assert any("every prediction is right" in note for note in found.notes)


def test_one_class_only_is_said(classified):
    model, _, _ = classified
    found = evaluate(model.path, model.data, np.full(ROWS, 2))
    assert any("all labels are class 2" in note for note in found.notes)


def test_equal_scores_are_chance(rng, tmp_path):
    answers = class_answers(rng) | {"y_score": np.ones(ROWS), "y_ood": np.zeros(ROWS, bool)}
    model = answering(tmp_path / "c.onnx", answers, CLASS_HEAD)
    labels = rng.integers(0, CLASSES, ROWS)
    found = evaluate(model.path, model.data, labels, ood=model.data)
    assert found.detection["score"]["auroc"] == 0.5
    assert found.aurc["score"] == pytest.approx(1 - found.metrics["gapa"]["accuracy"])


# ------------------------------------------------------------------------------ labels


def test_labels_from_every_kind_of_file(classified, tmp_path):
    model, _, labels = classified
    np.save(tmp_path / "y.npy", labels)
    np.savez(tmp_path / "one.npz", anything=labels)
    np.savez(tmp_path / "named.npz", x=model.data["x"], targets=labels)
    (tmp_path / "bare.csv").write_text("\n".join(map(str, labels)))
    (tmp_path / "headed.csv").write_text("label\n" + "\n".join(map(str, labels)))
    (tmp_path / "wide.csv").write_text("id;Labels\n" + "\n".join(f"r{i};{y}" for i, y in enumerate(labels)))
    (tmp_path / "y.txt").write_text("\n".join(map(str, labels)) + "\n\n")
    expected = evaluate(model.path, model.data, labels).metrics
    for name in ("y.npy", "one.npz", "named.npz", "bare.csv", "headed.csv", "wide.csv", "y.txt"):
        assert evaluate(model.path, model.data, tmp_path / name).metrics == expected, name


@pytest.mark.parametrize(
    "labels, message",
    [
        (np.zeros(ROWS - 1), f"there are {ROWS - 1} labels for {ROWS} rows"),
        (np.zeros(ROWS + 1), f"there are {ROWS + 1} labels for {ROWS} rows"),
        (np.full(ROWS, CLASSES), "the label of row 0 is 4, but the model has 4 classes"),
        (np.r_[np.zeros(ROWS - 1), -1], f"the label of row {ROWS - 1} is -1, but the model has 4 classes"),
        (np.r_[np.zeros(ROWS - 1), 0.5], f"the label of row {ROWS - 1} is 0.5, not a whole number"),
        (np.zeros((ROWS, CLASSES)), "row 0 of the labels is not one-hot"),
        (np.zeros((ROWS, 3)), r"a row of labels has shape \(3,\)"),
        (np.array(["cat"] * ROWS), "not numbers"),
        (np.array(1), "the labels is a single number"),
    ],
)
def test_bad_labels_are_a_sentence(classified, labels, message):
    model = classified[0]
    with pytest.raises(UserError, match=message) as caught:
        evaluate(model.path, model.data, labels, batch_size=50)
    assert caught.value.hint


def test_bad_label_files_are_a_sentence(classified, tmp_path):
    model = classified[0]
    np.savez(tmp_path / "two.npz", a=np.zeros(3), b=np.zeros(3))
    (tmp_path / "words.csv").write_text("1\n2\ncat\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "y.json").write_text("[1]")
    (tmp_path / "broken.npy").write_text("no array")
    for name, message in {
        "two.npz": "a, b: which of them are the labels",
        "words.csv": "row 3: 'cat' is not a row of numbers",
        "empty.txt": "is empty",
        "y.json": "of a kind that labels cannot be read from",
        "broken.npy": "cannot be read",
        "missing.npy": "there is no file",
    }.items():
        with pytest.raises(UserError, match=message):
            evaluate(model.path, model.data, tmp_path / name)


def test_targets_of_another_shape_and_not_finite(rng, tmp_path):
    model = answering(
        tmp_path / "r.onnx", {"y": np.zeros((5, 1)), "y_var": np.ones((5, 1))}, {"task": "regression"}
    )
    with pytest.raises(UserError, match=r"a row of targets has shape \(2,\), but the model predicts \(1,\)"):
        evaluate(model.path, model.data, np.zeros((5, 2)))
    with pytest.raises(UserError, match="the target of row 4 is not a finite number"):
        evaluate(model.path, model.data, np.r_[np.zeros(4), np.nan])


def test_labels_of_data_whose_size_is_not_known(classified):
    model, _, labels = classified

    def pieces():
        for start in range(0, ROWS, 25):
            yield {"x": model.data["x"][start : start + 25]}

    assert evaluate(model.path, pieces, labels).metrics == evaluate(model.path, model.data, labels).metrics
    for count in (ROWS - 10, ROWS + 10):
        with pytest.raises(UserError, match="labels|labelled"):
            evaluate(model.path, pieces, np.zeros(count))


def test_a_fixed_batch_leaves_the_last_rows_out(rng, tmp_path):
    answers = class_answers(rng, 22)
    labels = rng.integers(0, CLASSES, 22)
    model = answering(tmp_path / "c.onnx", answers, CLASS_HEAD, batch=5)
    found = evaluate(model.path, model.data, labels)
    assert found.rows == 20
    first = evaluate(model.path, {"x": model.data["x"][:20]}, labels[:20])
    assert found.metrics == first.metrics


def test_rows_left_out_anywhere_cannot_be_matched(rng, tmp_path):
    """With a fixed batch and free sizes behind it, rows are left out where the size changes: labels would slip."""
    model = answering(tmp_path / "c.onnx", class_answers(rng, 20), CLASS_HEAD, batch=5)
    opened = open_converted(model.path)
    opened.require_matching(
        np.zeros(22), opened.open_data({"x": np.zeros((22, model.data["x"].shape[1]))}, Preparation()), 20
    )
    free = replace(opened, inputs=(InputSpec("x", np.float32, (5, None)),))
    data = free.open_data({"x": np.zeros((22, model.data["x"].shape[1]))}, Preparation())
    with pytest.raises(UserError, match="20 of 22 labelled rows") as caught:
        free.require_matching(np.zeros(22), data, 20)
    assert caught.value.hint == "give a multiple of 5 rows"


# ------------------------------------------------------------------------ other files


def test_a_file_that_was_not_converted(classified, tmp_path):
    model, _, labels = classified
    proto = onnx.load(model.path)
    del proto.metadata_props[:]
    with pytest.raises(UserError, match="was not converted"):
        evaluate(proto, model.data, labels)
    with pytest.raises(UserError, match="no such file"):
        evaluate(tmp_path / "missing.onnx", model.data, labels)


def test_a_file_without_a_task(classified):
    model, _, labels = classified
    proto = onnx.load(model.path)
    head = {"task": "none", "logits": "y", "link": "identity", "axis": None, "reason": "", "outputs": {}}
    for heads in ({}, {"y": head}):
        write_record(proto, {**EMPTY_RECORD, "heads": heads})
        with pytest.raises(UserError, match="has no task, so there is nothing to compare") as caught:
            evaluate(proto, model.data, labels)
        assert "`task`" in caught.value.hint


def test_several_outputs_with_a_task(classified):
    model, _, labels = classified
    proto = onnx.load(model.path)
    record = json.loads(proto.metadata_props[0].value)
    record["heads"]["other"] = record["heads"]["y"]
    write_record(proto, record)
    with pytest.raises(UserError, match="several outputs with a task: y, other"):
        evaluate(proto, model.data, labels)
    with pytest.raises(UserError, match="no output 'z'"):
        evaluate(proto, model.data, labels, output="z")
    found = evaluate(proto, model.data, labels, output="y")
    assert replace(found, file="").metrics == evaluate(model.path, model.data, labels).metrics


def test_a_head_without_probabilities(rng, tmp_path):
    model = answering(tmp_path / "c.onnx", {"y": class_answers(rng)["y"]}, CLASS_HEAD)
    with pytest.raises(UserError, match="lacks the output y_probs"):
        evaluate(model.path, model.data, np.zeros(ROWS))


# ---------------------------------------------------------------------- shifts and cost


def test_shifts_in_the_order_of_their_numbers(classified, tmp_path):
    model, _, labels = classified
    folder = tmp_path / "shifts"
    for angle in (0, 15, 105, -30):
        data = {"x": model.data["x"] + angle / 100}
        if angle == 105:
            (folder / "rotate_105").mkdir(parents=True)
            np.save(folder / "rotate_105" / "x.npy", data["x"])
        else:
            folder.mkdir(exist_ok=True)
            np.savez(folder / f"rotate_{angle}.npz", **data)
    np.save(folder / "labels.npy", labels)
    found = evaluate(model.path, model.data, labels, shifts=folder)
    assert [one.name for one in found.shifts] == ["rotate_-30", "rotate_0", "rotate_15", "rotate_105"]
    assert [one.position for one in found.shifts] == [-30, 0, 15, 105]
    assert found.shifts[1].metrics == found.metrics
    scores = [one.mean_scores["score"] for one in found.shifts]
    assert np.diff(scores) == pytest.approx(np.diff([-0.3, 0, 0.15, 1.05]), rel=1e-4)


def test_a_shift_with_labels_of_its_own(classified, tmp_path):
    model, answers, labels = classified
    np.savez(tmp_path / "few_1.npz", x=model.data["x"][:30], y=answers["y"].argmax(1)[:30])
    folder = tmp_path / "shifts"
    folder.mkdir()
    (tmp_path / "few_1.npz").rename(folder / "few_1.npz")
    found = evaluate(model.path, model.data, labels, shifts=folder)
    assert found.shifts[0].metrics["gapa"]["accuracy"] == 1
    with pytest.raises(UserError, match="is not a folder"):
        evaluate(model.path, model.data, labels, shifts=tmp_path / "nothing")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="holds no data sets"):
        evaluate(model.path, model.data, labels, shifts=tmp_path / "bare")


@pytest.fixture
def source(classified, tmp_path) -> Path:
    """What the file could have been made from: its first output only."""
    proto = onnx.load(classified[0].path)
    del proto.graph.output[1:]
    onnx.save(proto, tmp_path / "source.onnx")
    return tmp_path / "source.onnx"


def timed_by(monkeypatch, seconds) -> list[int]:
    """A clock that only runs show: a model with so many outputs takes `seconds(outputs)`. The rows of each run."""
    now, rows = [0.0], []

    def run(model, feeds, threads, native):
        def once():
            now[0] += seconds(len(model.graph.output))
            rows.extend({len(array) for array in feeds.values()})

        return once

    monkeypatch.setattr(bench, "_run", run)
    monkeypatch.setattr(bench.time, "thread_time", lambda: now[0])
    return rows


def test_cost_beside_the_source(classified, source, monkeypatch):
    """A tenth of a second for each output: the ratio is how many outputs the file has, the source has one."""
    model, _, labels = classified
    outputs = len(onnx.load(model.path).graph.output)
    rows = timed_by(monkeypatch, lambda outputs: 0.1 * outputs)
    found = evaluate(model.path, model.data, labels, source=source, batch_size=32)
    assert found.cost.ratio == pytest.approx(outputs) and outputs > 1
    assert found.cost.control == pytest.approx(1)
    assert found.cost.batch == 32 and set(rows) == {32}
    assert any("batches of 32 rows, 1 thread, source against itself 1.000" in note for note in found.notes)


def test_a_cost_that_cannot_be_measured_is_not_given(classified, source, monkeypatch):
    """No control is near enough to 1, as on a busy machine."""
    model, _, labels = classified
    timed_by(monkeypatch, lambda outputs: 0.1)
    monkeypatch.setattr(bench, "TOLERATED", -1.0)
    found = evaluate(model.path, model.data, labels, source=source, batch_size=32)
    assert found.cost is None
    assert any("the cost ratio is not given" in note for note in found.notes)


def test_the_cost_of_real_runs(classified, source, monkeypatch):
    """Whatever the machine is busy with, the answer is a figure with a sound control, or a reason."""
    model, _, labels = classified
    monkeypatch.setattr(bench, "ROUNDS", (6, 24))
    found = evaluate(model.path, model.data, labels, source=source, batch_size=32)
    given = [note for note in found.notes if "source against itself" in note]
    assert len(given) == 1 and ("not given" in given[0]) == (found.cost is None)
    assert found.cost is None or (found.cost.ratio > 0 and abs(found.cost.control - 1) <= bench.TOLERATED)


def test_cost_beside_another_model_is_refused(classified, tmp_path):
    model, _, labels = classified
    proto = onnx.load(model.path)
    record = json.loads(proto.metadata_props[0].value)
    write_record(proto, {**record, "source": {**record["source"], "sha256": "0" * 64}})
    other = onnx.load(model.path)
    del other.metadata_props[:]
    onnx.save(other, tmp_path / "other.onnx")
    with pytest.raises(UserError, match="was not converted from .*: the sha256 differs"):
        evaluate(proto, model.data, labels, source=tmp_path / "other.onnx")


# ---------------------------------------------------------------------------- examples


def test_examples_are_the_most_and_least_certain(rng, tmp_path):
    answers = class_answers(rng)
    image = {"image": np.broadcast_to(np.arange(ROWS)[:, None, None, None] / 255, (ROWS, 1, 9, 9))}
    image["image"] = np.ascontiguousarray(image["image"], np.float32)
    model = answering(tmp_path / "c.onnx", answers, CLASS_HEAD, inputs=image)
    labels = answers["y"].argmax(1)
    found = evaluate(model.path, model.data, labels, batch_size=13)
    order = np.argsort(answers["y_score"])
    assert [one.row for one in found.most_certain] == order[:8].tolist()
    assert [one.row for one in found.least_certain] == order[::-1][:8].tolist()
    for one in found.most_certain:
        assert one.image.shape == (9, 9) and (one.image == one.row).all()
        assert one.predicted == one.target == str(labels[one.row]) and one.origin == "data"
    strange = evaluate(model.path, model.data, labels, ood=model.data)
    assert [one.origin for one in strange.least_certain] == ["data"] * 8 + ["ood"] * 8
    assert strange.least_certain[8].target == ""


def test_thumbnails():
    grey = np.linspace(0, 1, 64)
    np.testing.assert_array_equal(thumbnail(grey, ImageOptions()), (grey * 255).round().reshape(8, 8))
    first = np.zeros((3, 4, 6))
    first[1], first[2] = 1, 0.2
    assert thumbnail(first, ImageOptions()).tolist() == np.full((4, 6, 3), [0, 255, 51]).tolist()
    last = np.full((4, 6, 3), 200, np.uint8)
    np.testing.assert_array_equal(thumbnail(last, ImageOptions()), last)
    normal = thumbnail((np.full((3, 4, 6), 0.5) - 0.4) / 0.2, ImageOptions(mean=(0.4,), std=(0.2,)))
    assert (normal == 128).all()
    blue_first = thumbnail(first[::-1] - 0.5, ImageOptions((0.5,), colors="bgr"))
    assert blue_first.tolist() == thumbnail(first, ImageOptions()).tolist()
    as_recorded = ImageOptions((0.0,), (1.0,), layout="last", colors="rgb")
    np.testing.assert_array_equal(thumbnail(last, as_recorded), last)
    stretched = thumbnail(np.array([[[-3.0, 1.0], [5.0, 1.0]]]), ImageOptions())
    assert stretched.tolist() == [[0, 128], [255, 128]]
    assert thumbnail(np.zeros((1, 300, 400)), ImageOptions()).shape == (75, 100)
    assert (thumbnail(np.full((1, 300, 400), 0.25), ImageOptions()) == 64).all()
    assert thumbnail(np.full((1, 2, 500), 0.25), ImageOptions()).shape == (1, 125)


# ------------------------------------------------------------------------ command line


@pytest.fixture
def files(classified, rng, tmp_path) -> dict[str, str]:
    model, _, labels = classified
    np.savez(tmp_path / "data.npz", **model.data)
    np.save(tmp_path / "y.npy", labels)
    np.savez(tmp_path / "far.npz", **strange_data(rng, tmp_path))
    named = {"model": model.path, "data": tmp_path / "data.npz", "labels": tmp_path / "y.npy"}
    return {name: str(path) for name, path in {**named, "ood": tmp_path / "far.npz"}.items()}


def run(*arguments: str) -> str:
    """The standard output of the command; its errors are raised."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command_shows_both_sides(files):
    out = run(files["model"], "--data", files["data"], "--labels", files["labels"], "--ood", files["ood"])
    lines = out.splitlines()
    assert any(line.split()[:5] == ["ACC", "NLL", "ECE", "Brier"] for line in lines)
    assert any(line.startswith("source ") for line in lines) and any(
        line.startswith("gapa ") for line in lines
    )
    assert "telling the OOD set from the data" in out and "epistemic (BALD)" in out
    assert "of the data's rows (5.0% expected" in out and "of the OOD rows" in out
    assert "120 rows, 50 OOD rows" in out and "--report report.html" in out


def test_command_without_strange_data_hints_at_them(files):
    out = run(files["model"], "--data", files["data"], "--labels", files["labels"])
    assert "telling the OOD" not in out and "--ood PATH" in out


def test_command_prints_json(files):
    arguments = (files["model"], "--data", files["data"], "--labels", files["labels"], "--ood", files["ood"])
    answer = json.loads(run(*arguments, "--ood", files["data"], "--json"))
    assert answer["metrics"]["gapa"].keys() == {"accuracy", "nll", "ece", "brier"}
    assert answer["ood_sets"].keys() == {"far", "data"} and answer["ood_rows"] == 50 + ROWS
    assert answer["ood_sets"]["data"]["score"]["auroc"] == 0.5
    assert answer["flagged"].keys() == {"data", "ood"} and answer["cost"] is None


def test_command_shows_shifts(files, tmp_path, classified):
    (tmp_path / "shifts").mkdir()
    for level in (10, 9):
        np.savez(tmp_path / "shifts" / f"noise_{level}.npz", **classified[0].data)
    out = run(
        files["model"], "--data", files["data"], "--labels", files["labels"],
        "--shifts", str(tmp_path / "shifts"),
    )  # fmt: skip
    assert out.index("noise_9") < out.index("noise_10") and "mean score" in out


def test_command_writes_report_and_figures(files, tmp_path):
    arguments = (files["model"], "--data", files["data"], "--labels", files["labels"], "--ood", files["ood"])
    out = run(*arguments, "--report", str(tmp_path / "r.html"), "--figures", str(tmp_path / "figures"))
    assert "<html" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".svg"}
    assert str(tmp_path / "r.html") in out and "--report" not in out


def test_command_refuses_places_before_any_work(files, tmp_path):
    arguments = (files["model"], "--data", "nowhere", "--labels", files["labels"])
    with pytest.raises(UserError, match="is not a .html file"):
        run(*arguments, "--report", str(tmp_path / "r.pdf"))
    with pytest.raises(UserError, match="does not exist"):
        run(*arguments, "--report", str(tmp_path / "none" / "r.html"))
    with pytest.raises(UserError, match="is a file"):
        run(*arguments, "--figures", files["data"])
