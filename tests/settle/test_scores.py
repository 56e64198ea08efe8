"""Scores of left-out calibration rows against shares worked out without them, and the line that they draw."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.dense_shares import share_without
from support.paths import MODELS
from support.steps import steps

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.compiler import convert
from gapa_onnx.data import InputSpec, open_data
from gapa_onnx.errors import UserError
from gapa_onnx.fit.calibrate import calibrate
from gapa_onnx.fit.kept_rows import Purpose, is_fixed, put_together
from gapa_onnx.fit.statistics import QUANTILES
from gapa_onnx.model.load import load
from gapa_onnx.model.splice import exposed
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.record import read
from gapa_onnx.settings import Settings
from gapa_onnx.settle.left_out import leave_out
from gapa_onnx.settle.scores import ScoreSample, threshold_at
from gapa_onnx.settle.thresholds import set_threshold, thresholds

NET = """<ir_version: 8, opset_import: ["": 17]>
net (float[n, 3] x) => (float[n, 4] logits) { z = MatMul(x, w1)  h = Tanh(z)  logits = MatMul(h, w2) }"""


def net(seed: int = 0) -> onnx.ModelProto:
    generator = np.random.default_rng(seed)
    model = onnx.parser.parse_model(NET)
    for name, shape in (("w1", (3, 5)), ("w2", (5, 4))):
        array = generator.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}


def test_left_out_scores_are_those_of_a_file_without_the_row():
    model = net()
    rows = np.random.default_rng(1).normal(size=(60, 3)).astype(np.float32)
    choices = {"inducing": "all", "k": 10, "length_scale": 2.0, "scale": 0.5, "jitter": 1e-4}
    choices |= {"metric": "euclidean", "score": "variance"}
    made = steps(model, {"x": rows}, Settings(**choices))
    found = made.answers("logits_score")["logits_score"]
    w = weights(model)
    z = rows.astype(np.float64) @ w["w1"]
    per_logit = z.var(axis=0) @ w["w2"] ** 2  # c² W²
    for row in range(60):
        share = share_without(z, row, 10, 2.0, 1e-4)
        # The network runs in float32: z is off by a few roundings, which the solve magnifies by 1 / jitter.
        np.testing.assert_allclose(found[row], 0.5 * share * per_logit.mean(), rtol=2e-2, atol=2e-5)
    conversion = convert(model, {"x": rows}, **choices)
    inside = gapa_onnx.session(conversion.model.SerializeToString()).run(["logits_score"], {"x": rows})[0]
    assert np.median(found / inside) > 5  # rows that are inducing points themselves look far too familiar


def test_whitened_queries_are_left_out_as_the_file_compares_them():
    rows = (np.random.default_rng(9).normal(size=(200, 3)) * [1, 5, 0.1]).astype(np.float32)
    made = steps(net(), {"x": rows}, Settings(metric="whitened", m=50, k=10))
    (site,), (fit,) = made.template.sites, made.calibration.fits
    batch = next(made.sample.batches(Purpose.SCORES))
    compared = made.tail(site.queries)(batch, made.calibration.fits)[site.queries]
    expected = fit.leave_one_out(compared)
    # the product with the whitening in numpy and in onnxruntime: a few roundings, magnified by the solve
    np.testing.assert_allclose(batch.shares[site.output][:, 0], expected, rtol=1e-2, atol=1e-5)


def test_rows_are_chosen_once_and_fewer_are_among_more():
    model = net()
    rows = np.random.default_rng(2).normal(size=(5000, 3)).astype(np.float32)
    even, odd = np.arange(5000) % 2 == 0, (np.arange(5000) % 2 == 1) & (np.arange(5000) < 1000)
    known = {Purpose.SCALING: even, Purpose.NOISE: even, Purpose.COUNTING: odd}
    every = Purpose.WEIGHING | Purpose.SCORES | Purpose.SCALING | Purpose.NOISE | Purpose.COUNTING
    source, settings = load(model), Settings(m=50, k=10)
    data = open_data({"x": rows}, source.inputs)
    calibration = calibrate(analyse(source, settings), data, settings, known=known)
    sample = leave_out(calibration, every)
    positions = {}
    for purpose in known.keys() | {Purpose.WEIGHING, Purpose.SCORES}:
        batches = list(sample.batches(purpose))
        found = np.concatenate([batch.positions for batch in batches])
        np.testing.assert_array_equal(np.concatenate([b.inputs["x"] for b in batches]), rows[found])
        assert sample.rows(purpose) == calibration.kept.rows(purpose) == len(set(found.tolist()))
        positions[purpose] = found
    assert {p: len(found) for p, found in positions.items()} == {
        Purpose.WEIGHING: 500, Purpose.SCORES: 2000, Purpose.SCALING: 2000, Purpose.NOISE: 2500,
        Purpose.COUNTING: 500,
    }  # fmt: skip
    assert np.isin(positions[Purpose.WEIGHING], positions[Purpose.SCORES]).all()
    assert np.isin(positions[Purpose.SCALING], positions[Purpose.NOISE]).all()
    assert (positions[Purpose.NOISE] % 2 == 0).all() and odd[positions[Purpose.COUNTING]].all()


def parts_of(batches, wanted: np.ndarray):
    """Batches with their positions and the purposes of their rows."""
    start = 0
    for batch in batches:
        rows = len(batch["x"])
        yield start + np.arange(rows), batch, wanted[start : start + rows]
        start += rows


def test_rows_of_one_shape_are_put_together():
    lengths = (5, 5, 5, 7, 7, 5)  # of the rows of six batches of four
    data = list(({"x": np.full((4, length), i), "id": np.arange(4)} for i, length in enumerate(lengths)))
    wanted = np.zeros(24, np.uint8)
    wanted[[0, 2, 5, 6, 7, 9, 13, 18, 20, 23]] = Purpose.SCORES
    parts = list(put_together(parts_of(data, wanted), 4, False))
    assert [list(positions) for positions, _, _ in parts] == [[0, 2], [5, 6, 7, 9], [13, 18], [20, 23]]
    for positions, batch, purpose in parts:
        assert purpose == Purpose.SCORES
        np.testing.assert_array_equal(batch["x"][:, 0], positions // 4)
        np.testing.assert_array_equal(batch["id"], positions % 4)


def test_what_is_not_given_by_rows_stays_with_its_batch():
    batches = [{"x": np.full((4, 2), i), "whole": np.full(3, i)} for i in range(3)]
    batches.append(
        {"x": np.full((3, 2), 3), "whole": np.full(3, 3)}
    )  # as many rows as it has numbers, by chance
    wanted = np.zeros(15, np.uint8)
    wanted[[1, 6, 12]] = Purpose.SCORES
    parts = list(put_together(parts_of(batches, wanted), 9, False))
    assert [list(positions) for positions, _, _ in parts] == [[1], [6], [12]]
    assert [list(batch["whole"][:1]) for _, batch, _ in parts] == [[0], [1], [3]]


def test_rows_for_other_purposes_are_not_mixed():
    data = list({"x": np.arange(4 * i, 4 * i + 4)} for i in range(3))
    wanted = np.array([3, 1, 0, 3, 1, 0, 0, 0, 3, 1, 1, 1], np.uint8)
    parts = {
        int(purpose): list(batch["x"]) for _, batch, purpose in put_together(parts_of(data, wanted), 8, False)
    }
    assert parts == {3: [0, 3, 8], 1: [1, 4, 9, 10, 11]}


def test_batches_of_a_fixed_size_stay_whole():
    data = list({"x": np.arange(4 * i, 4 * i + 4)} for i in range(3))
    fixed = is_fixed((InputSpec("x", np.dtype(np.float32), (4,)),))
    wanted = np.array([0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 2], np.uint8)
    parts = [
        (list(positions), int(purpose))
        for positions, _, purpose in put_together(parts_of(data, wanted), 4, fixed)
    ]
    assert parts == [([0, 1, 2, 3], 3), ([8, 9, 10, 11], 2)]


def test_the_threshold_is_the_quantile_of_left_out_scores():
    model = net()
    rows = np.random.default_rng(4).normal(size=(300, 3)).astype(np.float32)
    settings = Settings(m=40, k=10, ood_quantile=0.9, score="variance")
    made = convert(model, {"x": rows}, settings=settings)
    left_out = steps(model, {"x": rows}, settings).answers("logits_score", fits=made.numbers.fits)
    scores, score = left_out["logits_score"], read(made.model).heads["logits"].score
    assert score.rows == 300 and score.quantile == 0.9
    assert (scores < score.threshold).mean() == pytest.approx(0.9, abs=1 / 300)
    for level in ("0.5", "0.95", "0.999"):
        # the mean variance by a node, and by the head's operator: sums of four numbers, and two products
        expected = np.quantile(scores, float(level), method="higher")
        assert score.quantiles[level] == pytest.approx(expected, rel=8 * 2.0**-24)


def test_the_line_of_another_score_is_drawn_by_that_score():
    model = net()
    rows = np.random.default_rng(4).normal(size=(300, 3)).astype(np.float32)
    settings = Settings(m=40, k=10, score="epistemic")
    made = convert(model, {"x": rows}, settings=settings)
    left_out = steps(model, {"x": rows}, settings).answers("logits_epistemic", fits=made.numbers.fits)
    found, score = left_out["logits_epistemic"], read(made.model).heads["logits"].score
    assert score.kind == "epistemic"
    # a difference of entropies of about 1, in float32 at 16 points
    assert score.quantiles["0.9"] == pytest.approx(
        np.quantile(found, 0.9, method="higher"), rel=1e-4, abs=1e-6
    )


def test_new_rows_of_the_same_kind_are_flagged_as_often_as_asked():
    model = net()
    generator = np.random.default_rng(5)
    rows, new = (generator.normal(size=(n, 3)).astype(np.float32) for n in (2000, 20_000))
    for inducing in ("kmeans", "random", "all"):
        conversion = convert(model, {"x": rows}, m=200, k=20, inducing=inducing, ood_quantile=0.9)
        session = gapa_onnx.session(conversion.model.SerializeToString())
        flagged = session.run(["logits_ood"], {"x": new})[0]
        # 2000 rows know the 0.9 quantile to √(.9 · .1 / 2000) = .0067; 4 of these, and 20,000 new rows' own .002
        assert flagged.mean() == pytest.approx(0.1, abs=4 * 0.007)


def test_what_is_not_a_number_is_flagged():
    rows = np.random.default_rng(6).normal(size=(100, 3)).astype(np.float32)
    conversion = convert(net(), {"x": rows}, m=40, k=10, metric="euclidean")  # 0 has no direction
    strange = np.array([[0, 0, 0], [np.nan, 0, 0], [1e4, 1e4, 1e4]], np.float32)
    session = gapa_onnx.session(conversion.model.SerializeToString())
    p, flagged = session.run(["logits_pvalue", "logits_ood"], {"x": strange})
    assert flagged.tolist() == [False, True, True] and p[1] == 0 < p[2] == np.float32(1 / 101)


def test_a_sample_of_scores_per_pixel():
    sample = ScoreSample(seed=0)
    values = np.random.default_rng(7).random((40, 100, 100))
    sample.add(values)
    sample.add(np.full((1, 3), np.nan))
    assert len(sample.values) == 40 * 256
    assert list(sample.table()) == [str(q) for q in QUANTILES]
    assert sample.table()["0.9"] == pytest.approx(0.9, abs=4 * np.sqrt(0.09 / len(sample.values)))


def test_thresholds_between_the_quantiles_of_the_table():
    assert threshold_at({"0.5": 1.0, "0.9": 3.0}, 0.6) == pytest.approx(1.5)
    assert threshold_at({"0.5": 1.0, "0.9": 3.0}, 0.95) == 3.0


# -------------------------------------------------------------------- changing the line


@pytest.fixture
def digits(digits_file, tmp_path) -> Path:
    """A copy, which a test may write to."""
    return Path(shutil.copy(digits_file, tmp_path / "digits.gapa.onnx"))


def test_moving_the_line_changes_nothing_else(digits, tmp_path):
    moved = tmp_path / "moved.onnx"
    [found] = set_threshold(digits, quantile=0.5, out=moved)
    [before] = thresholds(digits)
    assert found.threshold == before.quantiles["0.5"] < before.threshold
    assert thresholds(moved) == (found,)
    old, new = onnx.load(digits), onnx.load(moved)
    changed = [a.name for a, b in zip(old.graph.initializer, new.graph.initializer) if a != b]
    assert changed == ["logits/score/level"]
    assert old.graph.node == new.graph.node
    images = np.load(MODELS / "digits_mlp_heldout.npz")["pixels"]
    p, flagged = gapa_onnx.session(moved).run(["logits_pvalue", "logits_ood"], {"pixels": images})
    np.testing.assert_array_equal(flagged, ~(p > np.float32(0.5)))
    assert 0.4 < flagged.mean() < 0.8
    np.testing.assert_array_equal(p, gapa_onnx.session(digits).run(["logits_pvalue"], {"pixels": images})[0])


def ranked_of(path: Path, images: np.ndarray) -> tuple[np.ndarray, ...]:
    """What p-values rank, the p-values and the flags of a converted file."""
    score = read(onnx.load(path)).heads["logits"].score
    session = gapa_onnx.session(exposed(onnx.load(path), [score.ranked]).SerializeToString())
    return tuple(session.run([score.ranked, "logits_pvalue", "logits_ood"], {"pixels": images}))


def test_a_line_from_held_out_rows(digits):
    images = np.load(MODELS / "digits_mlp_heldout.npz")["pixels"]
    [found] = set_threshold(digits, data=images, quantile=0.8)
    ranked, p, flagged = ranked_of(digits, images)
    assert found.threshold == np.quantile(ranked.astype(np.float64), 0.8, method="higher")
    assert found.rows == 450 and found.holds == "exactly"
    assert (ranked < np.float32(found.threshold)).mean() == pytest.approx(0.8, abs=1 / 450)
    at_least = (ranked[None, :] >= ranked[:, None]).sum(axis=1)
    np.testing.assert_array_equal(p, ((1 + at_least) / 451).astype(np.float32))
    np.testing.assert_array_equal(flagged, ~(p > np.float32(1 - 0.8)))
    assert flagged.sum() == 89  # (1 + 89) / 451 ≤ 0.2 < (1 + 90) / 451, and no two scores are the same
    before = ranked_of(digits, images)
    [again] = set_threshold(digits, value=1.25)
    assert (again.quantile, again.threshold) == (None, 1.25)
    after, p_after, flagged = ranked_of(digits, images)
    np.testing.assert_array_equal(after, before[0])
    np.testing.assert_array_equal(p_after, before[1])
    np.testing.assert_array_equal(flagged, ranked >= np.float32(1.25))  # ordinary scores are these very rows


def test_the_command(digits, capsys):
    assert main(["threshold", str(digits)]) == 0
    shown = capsys.readouterr().out
    assert "p ≤ 0.05, by 1347 left-out calibration rows" in shown and "0.999" in shown
    assert main(["threshold", str(digits), "--quantile", "0.99", "--json"]) == 0
    assert '"quantile": 0.99' in capsys.readouterr().out
    assert thresholds(digits)[0].quantile == 0.99
    assert main(["threshold", str(digits), "--quantile", "0.999"]) == 0
    assert "so the line is rough" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--quantile", "1.5"], "must be between 0 and 1"),
        (["--quantile", "0.9", "--value", "1"], "say the same thing"),
        (["--value", "nan"], "not a finite number"),
        (["--output", "nothing"], "has no score"),
        (["-o", "elsewhere.onnx"], "nothing to write"),
        (["--data", "nowhere.npz"], "no file or folder"),
    ],
)
def test_mistakes(digits, arguments, message, capsys):
    before = digits.read_bytes()
    assert main(["threshold", str(digits), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert digits.read_bytes() == before


def test_a_file_that_is_not_ours():
    with pytest.raises(UserError, match="was not written by gapa-onnx"):
        thresholds(MODELS / "digits_mlp.onnx")


def test_an_output_that_is_never_a_number_has_no_threshold():
    text = NET.replace("logits = MatMul(h, w2)", "l = MatMul(h, w2)  logits = Sqrt(l)").replace(
        "float[n, 4]", "float[n, 2]"
    )
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(net().graph.initializer[:1])
    negative = np.full((5, 2), 0.1, np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(negative, "w2"))
    x = -np.abs(np.random.default_rng(8).normal(size=(80, 3))).astype(np.float32)
    w1 = np.abs(weights(net())["w1"]).astype(np.float32)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(w1, "w1"))
    conversion = convert(model, {"x": x}, m=40, k=10, score="variance")
    head = read(conversion.model).heads["logits"]
    assert head.score is None and "every score on the data is NaN" in head.reason
    assert all(check.passed for check in conversion.checks)
    flagged = gapa_onnx.session(conversion.model.SerializeToString()).run(["logits_ood"], {"x": x})[0]
    assert flagged.all()
    # By witnesses too, although their shares are numbers.
    conversion = convert(model, {"x": x}, m=40, k=10)
    session = gapa_onnx.session(conversion.model.SerializeToString())
    score, p, flagged = session.run(["logits_score", "logits_pvalue", "logits_ood"], {"x": x})
    assert np.isnan(score).all() and (p == 0).all() and flagged.all()
