"""Conversion with labels or targets: sets, intervals and deferral inside the file, and what cannot be promised."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.labelled_models import CLASSES, SMALL, converted, net, rows, run
from support.small_models import noisy_data, noisy_net, parse

import gapa_onnx
from gapa_onnx.compiler import convert
from gapa_onnx.errors import UserError
from gapa_onnx.record import read


def scores_by_hand(kind: str, probs: np.ndarray, penalties: np.ndarray) -> np.ndarray:
    """Class by class: minus its probability, or the sum of all that are not less probable."""
    found = np.empty(probs.shape)
    for row, p in enumerate(probs.astype(np.float64)):
        order = np.argsort(-p, kind="stable")
        for rank, label in enumerate(order):
            summed = p[order[: rank + 1]].sum() + penalties[rank]
            found[row, label] = -p[label] if kind == "lac" else summed
        found[row, p == p.max()] = -2
    return found


@pytest.mark.parametrize("kind", ["lac", "aps", "raps"])
@pytest.mark.parametrize("per_class", ["no", "yes"])
def test_sets_are_those_of_the_definition(kind, per_class):
    model = converted(1000, sets=kind, per_class=per_class, coverage=0.8)
    promise = read(model).heads["y"].sets
    found = run(model, rows(300, 3)[0])
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    by_hand = scores_by_hand(kind, found["y_probs"], tensors.get("y/set/penalties", np.zeros(CLASSES)))
    line = np.array(promise.table["0.8"])
    assert len(line) == (CLASSES if per_class == "yes" else 1)
    np.testing.assert_array_equal(tensors[promise.tensor].ravel(), line.astype(np.float32))
    clear = (np.abs(by_hand - line) > 1e-5) | (by_hand == -2)  # beyond what a sum in single precision loses
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(found["y_set"][clear], (by_hand <= line)[clear])
    assert found["y_set"].any(axis=1).all() and found["y_set"].shape == found["y_probs"].shape
    assert promise.kind == kind and promise.holds == "exactly" and promise.rows in (200, 500)


def test_the_line_is_an_order_statistic_of_part_b():
    """By hand, from the probabilities that the finished file gives to the rows that it was counted on."""
    from gapa_onnx.data import hold_out, open_data
    from gapa_onnx.model.load import load

    more, labels = rows(500, 2)
    model, inputs = converted(500, coverage=0.85), load(net()).inputs
    calib = open_data({"x": rows(300, 1)[0]}, inputs)
    held = hold_out(open_data({"x": more}, inputs), calib, labels={"y": labels})
    probs = run(model, more[held.counting])["y_probs"]
    true = np.take_along_axis(probs, labels[held.counting][:, None], axis=1)[:, 0]
    scores = np.sort(np.where(true == probs.max(axis=1), -2, -true))
    head = read(model).heads["y"]
    assert head.sets.rows == held.counting.sum() == 100
    assert head.sets.table["0.85"] == (pytest.approx(scores[int(np.ceil(101 * 0.85)) - 1], rel=1e-6),)
    assert head.temperature.rows == held.fitting.sum() == 400
    record = read(model).data.held_out
    assert (record.fitting, record.counting, record.among) == (400, 100, "held-out rows")


def test_coverage_of_new_rows_over_several_files():
    """The mean coverage over files that were counted on other rows is at least the nominal one, and hardly more."""
    x, y = rows(4000, 9)
    covered = []
    for seed in range(8):
        more, labels = rows(400, 100 + seed)
        made = convert(
            net(), {"x": rows(300, 1)[0]}, labels=labels, held_out={"x": more}, task="classification",
            coverage=0.8, **SMALL,
        )  # fmt: skip
        chosen = run(made.model, x)["y_set"]
        covered.append(chosen[np.arange(len(y)), y].mean())
    # Given 80 rows, the coverage has a standard deviation of sqrt(0.8 · 0.2 / 82); the test rows are the same for all.
    error = np.sqrt(0.8 * 0.2 * (1 / (82 * 8) + 1 / len(y)))
    assert 0.8 - 3 * error < np.mean(covered) < 0.8 + 1 / 81 + 3 * error


def test_the_prediction_stays_and_probabilities_are_calibrated():
    model = converted(1000)
    x, y = rows(4000, 4)
    found = run(model, x)
    np.testing.assert_array_equal(found["y_probs"].argmax(axis=1), found["y"].argmax(axis=1))
    plain = convert(net(), {"x": rows(300, 1)[0]}, task="classification", **SMALL).model
    before = run(plain, x)
    np.testing.assert_array_equal(before["y"], found["y"])
    nll = [-np.log(one["y_probs"][np.arange(len(y)), y]).mean() for one in (before, found)]
    assert nll[1] < nll[0] - 0.02
    temperature = read(model).heads["y"].temperature
    assert temperature.nll < temperature.nll_before
    assert "set" not in read(plain).heads["y"].outputs


def test_the_score_and_its_threshold_go_together():
    """Both are in units of the logits at their temperature: about 5% of new rows are flagged."""
    found = run(converted(500), rows(2000, 5)[0])
    assert 0.01 < found["y_ood"].mean() < 0.15


@pytest.mark.parametrize("opset", [9, 13, 21])
def test_opsets(opset):
    x, y = rows(300, 2)
    given = {"task": "classification", "labels": y, "held_out": {"x": x}, "max_error": 0.6, **SMALL}
    model = convert(net(opset), {"x": rows(200, 1)[0]}, **given).model
    onnx.checker.check_model(model, full_check=True)
    found = run(model, x)
    assert found["y_set"].dtype == bool and found["y_defer"].shape == (300,)


def test_old_opsets_have_no_sums():
    x, y = rows(300, 2)
    with pytest.raises(UserError, match="`sets='aps'` needs opset 11, and the model has 9"):
        convert(net(9), {"x": x}, labels=y, task="classification", sets="aps", **SMALL)


def test_classes_that_the_model_leaves_open():
    x, y = rows(300, 2)
    for kind in ("lac", "aps"):
        model = convert(
            net(17, "c"), {"x": rows(200, 1)[0]}, labels=y, held_out={"x": x}, task="classification", sets=kind, **SMALL
        ).model  # fmt: skip
        assert run(model, x)["y_set"].shape == (300, CLASSES)
    with pytest.raises(UserError, match="label 7 of row 0 is no class, and 'y' has classes 0 to 4"):
        convert(net(17, "c"), {"x": x}, labels=np.full(300, 7), task="classification", **SMALL)


@pytest.mark.parametrize("kind", ["lac", "aps", "raps"])
def test_what_is_not_a_number_is_in_every_set_and_deferred(kind):
    model = converted(500, sets=kind, max_error=0.5)
    x = rows(4, 3)[0]
    x[1] = np.nan
    found = run(model, x)
    assert found["y_set"][1].all() and found["y_defer"][1]
    assert not found["y_set"][[0, 2, 3]].all()


def test_bridges_and_covariances():
    for choices in ({"bridge": "per-class"}, {"covariance": "full"}, {"score": "epistemic"}):
        found = run(converted(400, **choices), rows(100, 3)[0])
        assert found["y_set"].any(axis=1).all()


# ---------------------------------------------------------------- among the calibration rows


def test_labels_of_calibration_rows_are_approximate():
    x, labels = rows(800, 1)
    labels[:300] = -1
    model = convert(net(), {"x": x}, labels=labels, task="classification", **SMALL).model
    record = read(model)
    assert record.data.held_out.among == "calibration rows"
    assert (record.data.held_out.fitting, record.data.held_out.counting) == (400, 100)
    promise = record.heads["y"].sets
    assert promise.holds == "approximately" and promise.rows == 100
    new, true = rows(4000, 8)
    covered = run(model, new)["y_set"][np.arange(4000), true].mean()
    assert abs(covered - 0.9) < 4 * np.sqrt(0.9 * 0.1 / 100)


# --------------------------------------------------------------------------------- pixels


def map_net() -> onnx.ModelProto:
    generator = np.random.default_rng(3)
    return parse(
        "net (float[n, 2, 6, 6] x) => (float[n, 3, 6, 6] y) { z = Conv(x, a)  h = Tanh(z)  y = Conv(h, b) }",
        a=generator.normal(size=(8, 2, 1, 1)),
        b=2 * generator.normal(size=(3, 8, 1, 1)),
    )


def maps(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, and the class of each pixel, drawn with half the logits; some pixels have none."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 2, 6, 6)).astype(np.float32)
    logits = gapa_onnx.session(map_net().SerializeToString()).run(["y"], {"x": x})[0]
    labels = (logits / 2 + generator.gumbel(size=logits.shape)).argmax(axis=1)
    labels[generator.uniform(size=labels.shape) < 0.1] = 255
    return x, labels


@pytest.mark.parametrize("kind", ["lac", "aps"])
def test_pixels_are_in_their_sets(kind):
    x, labels = maps(300, 2)
    given = {"labels": labels, "held_out": {"x": x}, "task": "segmentation", "sets": kind, **SMALL}
    found = convert(map_net(), {"x": maps(60, 1)[0]}, **given)
    assert all(check.passed for check in found.checks)
    head = read(found.model).heads["y"]
    assert head.sets.rows == 60 and head.temperature.rows == 240 and head.temperature.value > 1.2
    x, labels = maps(400, 3)
    answered = run(found.model, x)
    assert answered["y_set"].shape == answered["y_probs"].shape and answered["y_set"].any(axis=1).all()
    known = labels < 255
    inside = np.take_along_axis(answered["y_set"], np.where(known, labels, 0)[:, None], axis=1)[:, 0]
    shares = (inside & known).sum(axis=(1, 2)) / known.sum(axis=(1, 2))
    assert abs(shares.mean() - 0.9) < 1 / 61 + 4 * shares.std() / np.sqrt(60)
    evaluated = gapa_onnx.evaluate(found.model, {"x": x}, labels).promises["sets"]["all"]
    assert evaluated["coverage"] == pytest.approx(shares.mean())
    assert evaluated["set_size"] == pytest.approx(answered["y_set"].sum(axis=1).mean())


@pytest.mark.parametrize("choice", [{"max_error": 0.1}, {"per_class": "yes"}, {"sets": "raps"}])
def test_what_maps_of_labels_do_not_have(choice):
    x, labels = maps(40, 2)
    with pytest.raises(UserError, match="is for one class per row, and 'y' has one per pixel"):
        convert(map_net(), {"x": x}, labels=labels, task="segmentation", **choice, **SMALL)


def test_maps_of_another_shape():
    x, labels = maps(40, 2)
    with pytest.raises(UserError, match="not one whole number per pixel"):
        convert(map_net(), {"x": x}, labels=labels[:, 0], task="segmentation", **SMALL)
    with pytest.raises(UserError, match="the labels of a row have shape"):
        convert(map_net(), {"x": x}, labels=labels[:, :5], task="segmentation", **SMALL)


# ------------------------------------------------------------------------------- deferral


def test_who_is_answered_reaches_the_line():
    model = converted(3000, max_error=0.3, confidence=0.95)
    promise = read(model).heads["y"].deferral
    found = run(model, rows(500, 3)[0])
    line = np.float32(promise.table["0.3"][0])
    np.testing.assert_array_equal(found["y_defer"], found["y_probs"].max(axis=1) < line)
    assert promise.kind == "error" and promise.confidence == 0.95 and promise.rows == 1500
    assert 0.05 < found["y_defer"].mean() < 0.95
    x, y = rows(20_000, 7)
    found = run(model, x)
    answered = ~found["y_defer"]
    wrong = (found["y"].argmax(axis=1) != y)[answered]
    assert wrong.mean() < 0.3 + 2 * np.sqrt(0.3 * 0.7 / 1000)


def test_errors_that_cannot_be_promised():
    with pytest.raises(UserError, match="needs 230 rows to count on, and there are 200"):
        converted(400, max_error=0.01)
    with pytest.raises(UserError, match="no 45 rows can be answered with an error of at most 0.05"):
        converted(1000, max_error=0.05)


# ------------------------------------------------------------------------------ intervals


@pytest.fixture(scope="module")
def regression() -> onnx.ModelProto:
    more, y = noisy_data(900, 2)
    found = convert(noisy_net(), {"x": noisy_data(300, 1)[0]}, targets=y, held_out={"x": more}, **SMALL)
    assert all(check.passed for check in found.checks)
    return found.model


def test_intervals_are_the_mean_and_so_many_standard_deviations(regression):
    promise = read(regression).heads["y"].intervals
    x, y = noisy_data(5000, 3)
    found = run(regression, x)
    reach = onnx.numpy_helper.to_array(
        next(t for t in regression.graph.initializer if t.name == "y/interval/reach")
    )
    unit = np.sqrt(found["y_total_var"].astype(np.float64)) * promise.table["0.9"][0]
    assert reach.shape == (2, 1) and (reach > 0).all()
    np.testing.assert_allclose(found["y_lower"], found["y"] - unit * reach[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["y_upper"], found["y"] + unit * reach[1], rtol=1e-4, atol=1e-4)
    covered = ((found["y_lower"] <= y) & (y <= found["y_upper"])).mean()
    assert abs(covered - 0.9) < 4 * np.sqrt(0.09 / 300 + 0.09 / 5000)
    assert promise.kind == "interval" and promise.rows == 300 and promise.holds == "exactly"
    onnx.checker.check_model(regression, full_check=True)


def test_several_outputs_are_covered_together():
    generator = np.random.default_rng(0)
    two = parse(
        "net (float[n, 2] x) => (float[n, 3] y) { z = MatMul(x, a)  h = Tanh(z)  y = MatMul(h, b) }",
        a=generator.normal(size=(2, 8)),
        b=generator.normal(size=(8, 3)),
    )
    x = generator.normal(size=(6000, 2)).astype(np.float32)
    mean = gapa_onnx.session(two.SerializeToString()).run(["y"], {"x": x})[0]
    y = mean + generator.normal(size=mean.shape) * [0.1, 1, 10]
    given = {"targets": y[:900], "held_out": {"x": x[:900]}, "task": "regression", **SMALL}
    model = convert(two, {"x": x[900:1200]}, **given).model
    found = run(model, x[1200:])
    inside = (found["y_lower"] <= y[1200:]) & (y[1200:] <= found["y_upper"])
    assert abs(inside.all(axis=1).mean() - 0.9) < 4 * np.sqrt(0.09 / 300 + 0.09 / 4800)
    assert inside.mean() > 0.93  # each by itself more often


def test_intervals_of_calibration_rows_are_approximate():
    x, y = noisy_data(600, 1)
    y[:150] = np.nan
    promise = read(convert(noisy_net(), {"x": x}, targets=y, **SMALL).model).heads["y"].intervals
    assert promise.holds == "approximately" and promise.rows == 150


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "labels, choices, message",
    [
        (np.zeros(7, int), {}, "7 labels for 300 held-out rows"),
        (np.full(300, 5), {}, "label 5 of row 0 is no class, and 'y' has classes 0 to 4"),
        (np.full(300, -3), {}, "label -3 of row 0 is no class"),
        (np.full(300, -1), {}, "every label is -1"),
        (np.full(300, 0.5), {}, "not one whole number per row"),
        (np.zeros((300, 5)), {}, "not one whole number per row"),
        (np.array(["a"] * 300), {}, "not one whole number per row"),
        ("nowhere.npy", {}, "there is no file nowhere.npy"),
        ({"z": np.zeros(300), "y": np.zeros(300)}, {}, "labels for 'z', which is no output"),
        (np.zeros(300, int), {"task": "regression"}, "no output is taken for one"),
        (
            np.zeros(300, int),
            {"coverage": 0.99},
            "coverage 0.99 of 'y' needs 99 rows to count on, and there are 60",
        ),
        (np.zeros(300, int), {"per_class": "yes"}, "class 1 has 0"),
        (None, {"max_error": 0.1}, "`max_error=0.1` is counted on labels, and none are given"),
        (None, {"per_class": "yes"}, "`per_class='yes'` is counted on labels"),
    ],
)
def test_labels_that_do_not_fit(labels, choices, message):
    x = rows(300, 2)[0]
    given = {"task": "classification", **SMALL, **choices}
    with pytest.raises(UserError, match=message):
        convert(net(), {"x": rows(100, 1)[0]}, labels=labels, held_out={"x": x}, **given)


def test_rows_that_are_all_of_one_class():
    x = rows(300, 2)[0]
    given = {"task": "classification", "labels": np.zeros(300, int), "held_out": {"x": x}, **SMALL}
    found = run(convert(net(), {"x": rows(100, 1)[0]}, **given).model, x)
    assert found["y_set"][:, 0].mean() > 0.85
