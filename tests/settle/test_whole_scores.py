"""Scores of whole images and sequences whose positions have their own, with p-values and flags; lines that are moved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support import text_models
from support.ordinary import counted_p, ordinary_scores, stored
from support.small_models import parse
from support.text_models import repadded, text_model, texts

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.compiler import convert
from gapa_onnx.model.splice import exposed
from gapa_onnx.record import read
from gapa_onnx.settle.thresholds import set_threshold, thresholds

SMALL = {"m": 40, "k": 8}


def segmenter() -> onnx.ModelProto:
    """Two levels, and a class for each pixel."""
    generator = np.random.default_rng(0)
    text = """net (float[n, 3, 8, 8] x) => (float[n, 4, 8, 8] y) {
        a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, k1)  b = Relu(a)  m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b)
        c = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(m, k2)  d = Relu(c)  u = Resize<mode="nearest">(d, , scales)
        e = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(u, k3)  h = Relu(e)  y = Conv<kernel_shape=[1,1]>(h, k4) }"""
    shapes = {"k1": (4, 3, 3, 3), "k2": (6, 4, 3, 3), "k3": (5, 6, 3, 3), "k4": (4, 5, 1, 1)}
    model = parse(text, **{name: generator.normal(size=shape) / 3 for name, shape in shapes.items()})
    scales = np.array([1, 1, 2, 2], np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(scales, "scales"))
    return model


def images(rows: int, seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(rows, 3, 8, 8)).astype(np.float32)}


def tagger() -> onnx.ModelProto:
    """Two layers, and a class for each token, of which padding is none."""
    return text_model(text_models.ATTENTION, text_models.TANH, tokens=True)


def sentences(rows: int, seed: int) -> dict[str, np.ndarray]:
    """No two of them alike, so that scores have no ties."""
    return texts(np.random.default_rng(seed).integers(4, 13, rows), 12, seed + 1)


CASES = {
    "image": (segmenter(), images, {"task": "segmentation"}, "y"),
    "seq": (tagger(), sentences, {}, "tokens"),
}


@pytest.fixture(scope="module")
def files() -> dict[str, onnx.ModelProto]:
    made = {}
    for whose, (model, rows, choices, _) in CASES.items():
        witnesses = {} if whose == "image" else {"witnesses": "c"}
        conversion = convert(model, rows(400, 1), **SMALL, **choices, **witnesses)
        assert all(check.passed for check in conversion.checks)
        made[whose] = conversion.model
    return made


def answers(model: onnx.ModelProto, feeds, names, native: bool = True) -> list[np.ndarray]:
    data = exposed(
        model, [n for n in names if n not in {o.name for o in model.graph.output}]
    ).SerializeToString()
    session = (
        gapa_onnx.session(data) if native else ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    )
    return session.run(list(names), feeds)


@pytest.mark.parametrize("whose", CASES)
def test_a_whole_and_its_positions_are_scored(files, whose):
    _, rows, _, output = CASES[whose]
    model, new = files[whose], rows(60, 5)
    head = read(model).heads[output]
    assert set(head.scores) == {"score", f"{whose}_score"}
    roles = [f"{part}{role}" for part in ("", f"{whose}_") for role in ("score", "pvalue", "ood")]
    native, portable = (
        answers(model, new, [head.outputs[role] for role in roles], how) for how in (True, False)
    )
    found = dict(zip(roles, native))
    positions = found["score"].shape
    assert positions[0] == 60 and len(positions) > 1 and found[f"{whose}_score"].shape == (60,)
    # Pixels go by their variance; tokens, and what is whole, by what witnesses say.
    for part, kind in (("", "variance" if whose == "image" else "witnesses"), (f"{whose}_", "witnesses")):
        record = head.scores[f"{part}score"]
        score, p, flags = (found[f"{part}{role}"] for role in ("score", "pvalue", "ood"))
        assert record.kind == kind and record.ranked == head.outputs[f"{part}score"]
        real = np.ones(score.shape, bool)
        if part == "" and whose == "seq":
            real = new["attention_mask"] == 1
        ordinary = ordinary_scores(model, record)
        np.testing.assert_array_equal(p[real], counted_p(ordinary, score[real]))
        np.testing.assert_array_equal(flags, ~(p > np.float32(0.05)) & real)
    for role, one, other in zip(roles, native, portable):
        if role.endswith("score"):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3, err_msg=role)
    assert (native[roles.index(f"{whose}_ood")] == portable[roles.index(f"{whose}_ood")]).mean() > 0.95


def z_of(model, gauge, columns, faintest: float = 1e-12) -> np.ndarray:
    """What a gauge makes of numbers (…, 1), one for each place that it reads, in float64: (…)."""
    held = stored(model)
    logs = np.log(np.maximum(np.concatenate(columns, axis=-1).astype(np.float64), faintest))
    return ((logs - held[gauge.centre]) * held[gauge.slope]).sum(axis=-1)


def test_the_score_of_an_image_is_that_of_its_witnesses(files):
    """By the formula of the page, without an entropy: each pixel has its own."""
    model = files["image"]
    made = read(model).heads["y"].scores["image_score"].witnesses
    assert made.entropy is None
    reads = [*made.last.reads, *(made.earlier.reads if made.earlier else ())]
    assert set(reads) <= {place.share for place in read(model).witnesses}  # of a site each position has one
    score, *shares = answers(model, images(60, 5), ["y_image_score", *reads])
    expected = z_of(model, made.last, shares[:1])
    if made.earlier is not None:
        expected = expected + np.logaddexp(0, z_of(model, made.earlier, shares[1:]))
    np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-4)


def test_tokens_are_scored_by_witnesses_and_a_text_by_the_mean_over_its_tokens(files):
    """½ z_last + z_earlier + ⅓ softplus(2 (z_entropy + ½)) of each real token, by the formula of the page in float64."""
    model, new = files["seq"], sentences(60, 5)
    scores = read(model).heads["tokens"].scores
    made = scores["score"].witnesses
    assert made == scores["seq_score"].witnesses and made.earlier is not None and made.entropy is not None
    reads = [*made.last.reads, *made.earlier.reads]
    names = ["tokens", "tokens_score", "tokens_seq_score", *reads]
    logits, score, whole, *shares = answers(model, new, names)
    assert all(share.shape == (60, 12, 1) for share in shares)
    odds = np.exp(logits.astype(np.float64))
    p = odds / odds.sum(axis=-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(axis=-1, keepdims=True)
    expected = z_of(model, made.last, shares[:1]) + z_of(model, made.earlier, shares[1:])
    expected += np.logaddexp(0, z_of(model, made.entropy, [entropy], 1e-7)) / 3
    real = new["attention_mask"] == 1
    np.testing.assert_allclose(score[real], expected[real], rtol=1e-4, atol=1e-4)
    assert (score[~real] == 0).all()
    mean = np.where(real, expected, 0).sum(axis=1) / real.sum(axis=1)
    np.testing.assert_allclose(whole, mean, rtol=1e-4, atol=1e-4)


def test_strange_words_make_tokens_and_texts_strange(files):
    model, new = files["seq"], sentences(100, 5)
    strange = {**new, "input_ids": np.where(new["attention_mask"] == 1, new["input_ids"] % 10 + 50, 0)}
    usual, odd = (answers(model, rows, ["tokens_seq_score", "tokens_score"]) for rows in (new, strange))
    assert (odd[0][:, None] > usual[0][None]).mean() > 0.9
    real = new["attention_mask"] == 1
    assert np.median(odd[1][real]) > np.quantile(usual[1][real], 0.75)


def test_strange_images_are_flagged_as_a_whole(files):
    usual, strange = images(200, 7), images(200, 8)
    strange["x"] = strange["x"] * 5 + 3
    rates = [answers(files["image"], one, ["y_image_ood"])[0].mean() for one in (usual, strange)]
    # 400 left-out rows and 200 new ones: 0.05 is known to √(.05 · .95 (1/400 + 1/200)) = .019
    assert rates[0] < 0.05 + 4 * 0.019 and rates[1] > 0.9


def test_padding_has_no_part_in_the_score_of_a_sequence(files):
    new = sentences(60, 5)
    names = ["tokens_seq_score", "tokens_seq_pvalue", "tokens_seq_ood"]
    for one, other in zip(answers(files["seq"], new, names), answers(files["seq"], repadded(new, 4), names)):
        np.testing.assert_array_equal(one, other)


# --------------------------------------------------------------------------------- moved lines


@pytest.mark.parametrize("whose", CASES)
def test_lines_of_wholes_and_positions_are_moved(files, whose, tmp_path, capsys):
    _, rows, _, output = CASES[whose]
    path = Path(tmp_path / "file.onnx")
    onnx.save(files[whose], path)
    held_out = rows(99, 9)
    moved = {one.role: one for one in set_threshold(path, data=held_out, quantile=0.9)}
    assert set(moved) == {"score", f"{whose}_score"} and moved[f"{whose}_score"].rows == 99
    assert moved[f"{whose}_score"].name.endswith({"image": ", images", "seq": ", sequences"}[whose])
    names = [f"{output}_{whose}_{role}" for role in ("score", "pvalue", "ood")]
    score, p, flags = answers(onnx.load(path), held_out, names)
    np.testing.assert_array_equal(p, counted_p(score, score))  # ranked among themselves
    np.testing.assert_array_equal(flags, ~(p > np.float32(1 - 0.9)))
    assert flags.sum() == 9  # (1 + 9) / 100 is at the level, (1 + 10) / 100 is above it
    assert moved[f"{whose}_score"].holds == "exactly"
    assert main(["threshold", str(path), "--quantile", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("p ≤ 0.5") == 2
    assert answers(onnx.load(path), held_out, names)[2].sum() == 49
    assert {one.quantile for one in thresholds(path)} == {0.5}


def test_a_line_that_is_given_as_a_score(files, tmp_path):
    """At an ordinary score: what is not below it is flagged, and nothing else, of these very inputs."""
    path = Path(tmp_path / "file.onnx")
    onnx.save(files["image"], path)
    rows = images(99, 9)
    set_threshold(path, data=rows, quantile=0.9)
    (score,) = answers(onnx.load(path), rows, ["y_image_score"])
    line = float(np.sort(score)[80])
    set_threshold(path, value=line)
    (flags,) = answers(onnx.load(path), rows, ["y_image_ood"])
    np.testing.assert_array_equal(flags, score >= np.float32(line))
    assert read(onnx.load(path)).heads["y"].scores["image_score"].quantile is None


def test_a_line_beyond_all_ordinary_scores_is_refused(files, tmp_path):
    """No p-value tells such a line from the largest ordinary score, so that it would flag what lies between."""
    path = Path(tmp_path / "file.onnx")
    onnx.save(files["image"], path)
    before = path.read_bytes()
    with pytest.raises(gapa_onnx.UserError, match="beyond all 9?[0-9]+ ordinary scores"):
        set_threshold(path, value=1e6)
    assert path.read_bytes() == before
