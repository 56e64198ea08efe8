"""How queries of a place are compared is chosen by what tells strange ones apart."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.small_models import parse

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.data.strange import strange_batches
from gapa_onnx.fit.choosing import (
    FEWEST,
    FEWEST_AXES,
    MARGIN,
    auroc,
    choose_geometry,
    metrics_for,
    metrics_of_positions,
)
from gapa_onnx.fit.geometry import geometry_of
from gapa_onnx.record import read
from gapa_onnx.settings import Settings

SETTINGS = Settings(k=20)


def candidates(rows: np.ndarray, *metrics: str):
    wide = rows.astype(np.float64)
    moments = wide.mean(axis=0), wide.std(axis=0), np.cov(wide.T, bias=True)
    return [geometry_of(metric, rows, *moments) for metric in metrics]


def unit(generator, rows: int, width: int) -> np.ndarray:
    z = generator.normal(size=(rows, width))
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def by_direction() -> tuple[np.ndarray, np.ndarray]:
    """Few directions of all lengths, and strange ones between these with the same lengths."""
    generator = np.random.default_rng(0)
    centres = unit(generator, 6, 8)

    def lengths(count):
        return np.exp(1.5 * generator.normal(size=(count, 1)))

    usual = centres[generator.integers(0, 6, 800)] + 0.02 * generator.normal(size=(800, 8))
    strange = unit(generator, 400, 8)
    return (usual * lengths(800)).astype(np.float32), (strange * lengths(400)).astype(np.float32)


def by_length() -> tuple[np.ndarray, np.ndarray]:
    """All directions of one length, and strange ones that are half as long."""
    generator = np.random.default_rng(1)
    usual, strange = unit(generator, 800, 4), 0.5 * unit(generator, 400, 4)
    return usual.astype(np.float32), strange.astype(np.float32)


def by_small_axes() -> tuple[np.ndarray, np.ndarray]:
    """Strange along axes that hardly vary, beside others that vary a hundred times as much."""
    generator = np.random.default_rng(2)
    scale = np.array([1.0, 1.0, 0.01, 0.01, 0.01])
    usual = generator.normal(size=(1500, 5)) * scale
    strange = generator.normal(size=(400, 5)) * scale * [1, 1, 5, 5, 5]
    return usual.astype(np.float32), strange.astype(np.float32)


@pytest.mark.parametrize(
    "made, metrics, expected",
    [
        (by_direction, ("euclidean", "direction"), "direction"),
        (by_direction, ("direction", "euclidean"), "direction"),
        (by_length, ("direction", "euclidean"), "euclidean"),
        (by_length, ("euclidean", "direction"), "euclidean"),
        (by_length, ("direction", "polar"), "polar"),  # which keeps the length
        (by_small_axes, ("euclidean", "whitened"), "whitened"),
    ],
)
def test_what_tells_strange_ones_apart_is_taken(made, metrics, expected):
    rows, strange = made()
    best, found = choose_geometry(candidates(rows, *metrics), rows, {"made": strange}, SETTINGS)
    assert best.metric == expected and set(found) == set(metrics)
    other = min(found.values())
    assert found[expected] > 0.9 and found[expected] > other + MARGIN
    again = choose_geometry(candidates(rows, *metrics), rows, {"made": strange}, SETTINGS)
    assert again[1] == found  # to the bit


def test_kinds_count_alike_and_less_than_chance_counts_as_chance():
    rows, strange = by_direction()
    centres = unit(np.random.default_rng(0), 6, 8)  # in the middle of the data: more ordinary than these
    inside = np.repeat(centres, 50, axis=0).astype(np.float32)
    (how,) = candidates(rows, "direction")
    _, alone = choose_geometry([how], rows, {"a": strange}, SETTINGS)
    _, both = choose_geometry([how], rows, {"a": strange, "b": inside}, SETTINGS)
    assert both["direction"] == pytest.approx((alone["direction"] + 0.5) / 2, rel=1e-12)


def test_of_equals_the_first_is_taken():
    rows, _ = by_length()
    same = rows[::-1][:400]
    for metrics in (("euclidean", "direction"), ("direction", "euclidean")):
        best, found = choose_geometry(candidates(rows, *metrics), rows, {"none": same}, SETTINGS)
        assert best.metric == metrics[0] and max(found.values()) - min(found.values()) <= MARGIN


def test_too_little_tells_nothing():
    rows, strange = by_direction()
    every = candidates(rows, "euclidean", "direction")
    assert choose_geometry(every, rows, {}, SETTINGS) == (every[0], {})
    assert choose_geometry(every, rows, {"few": strange[: FEWEST - 1]}, SETTINGS) == (every[0], {})
    assert choose_geometry(every, rows[: 2 * FEWEST - 1], {"made": strange}, SETTINGS) == (every[0], {})
    lost = strange.copy()
    lost[FEWEST - 1 :] = np.nan
    assert choose_geometry(every, rows, {"lost": lost}, SETTINGS) == (every[0], {})


def test_auroc_counts_pairs():
    generator = np.random.default_rng(3)
    known, strange = generator.integers(0, 8, 60).astype(float), generator.integers(3, 12, 50).astype(float)
    pairs = [(b > a) + 0.5 * (b == a) for a in known for b in strange]
    assert auroc(known, strange) == pytest.approx(np.mean(pairs), rel=1e-12)
    assert auroc(known, known) == pytest.approx(0.5) and auroc(np.zeros(5), np.ones(5)) == 1.0


def test_metrics_by_width():
    assert metrics_for(3) == ("euclidean",)
    assert metrics_for(FEWEST_AXES - 1) == ("polar",)
    assert metrics_for(64) == ("polar", "projected")


# -------------------------------------------------------------------------------- conversions


NET = "net (float[n, 20] x) => (float[n, 3] y) { a = MatMul(x, v)  h = Relu(a)  y = MatMul(h, w) }"


def net() -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    return parse(NET, v=generator.normal(size=(20, 24)) / 3, w=generator.normal(size=(24, 3)))


def rows(count: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(5).normal(size=(4, 20))
    return (centres[generator.integers(0, 4, count)] + 0.3 * generator.normal(size=(count, 20))).astype(
        np.float32
    )


SMALL = {"m": 60, "k": 10, "task": "classification"}


def test_a_metric_that_is_given_is_taken():
    for metric in ("euclidean", "direction", "whitened-direction", "polar", "projected"):
        (fit,) = gapa_onnx.convert(net(), {"x": rows(400, 1)}, metric=metric, **SMALL).calibration.places
        assert fit.geometry.metric == metric and fit.metrics == {}


def test_the_record_says_what_was_tried():
    first, again = (gapa_onnx.convert(net(), {"x": rows(600, 1)}, **SMALL) for _ in range(2))
    assert first.model.SerializeToString(deterministic=True) == again.model.SerializeToString(
        deterministic=True
    )
    (place,) = read(first.model).places
    assert set(place.metrics) == {"polar", "projected"} and all(0.5 <= v <= 1 for v in place.metrics.values())
    better = place.metrics["projected"] > place.metrics["polar"] + MARGIN
    assert place.metric == ("projected" if better else "polar")


def test_values_are_predicted_by_distances():
    """How large an error is follows distances: sites of a regression are not chosen for."""
    (fit,) = gapa_onnx.convert(net(), {"x": rows(400, 1)}, **{**SMALL, "task": "regression"}).calibration.fits
    assert fit.geometry.metric == "euclidean" and fit.metrics == {}


def test_strange_inputs_of_the_user_decide(tmp_path, capsys):
    """By their own AUROC, not by that of what is made of the data; the command line takes them too."""
    strange = np.random.default_rng(7).normal(size=(300, 20)).astype(np.float32)
    made, given = (
        read(gapa_onnx.convert(net(), {"x": rows(400, 1)}, strange=asked, **SMALL).model).places[0]
        for asked in (None, {"x": strange})
    )
    assert given.metrics != made.metrics and set(given.metrics) == set(made.metrics)
    assert min(given.metrics.values()) > 0.95  # these are easily told
    onnx.save(net(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=rows(400, 1))
    np.savez(tmp_path / "s.npz", x=strange)
    command = ["convert", tmp_path / "m.onnx", "--calib", tmp_path / "d.npz", "--strange", tmp_path / "s.npz"]
    command += ["--m", 60, "--k", 10, "--task", "classification", "-o", tmp_path / "o.onnx"]
    assert main([str(part) for part in command]) == 0
    capsys.readouterr()
    assert read(onnx.load(tmp_path / "o.onnx")).places[0].metrics == given.metrics


# ------------------------------------------------------------------------------ strange inputs


INPUTS = {
    "images": np.random.default_rng(0).random((6, 3, 16, 20)).astype(np.float32),
    "images, channels last": np.random.default_rng(0).random((6, 16, 20, 3)).astype(np.float32),
    "bytes": np.random.default_rng(1).integers(0, 256, (6, 16, 16, 3)).astype(np.uint8),
    "sequences": np.random.default_rng(2).normal(size=(6, 9, 5)).astype(np.float32),
    "vectors": np.random.default_rng(3).normal(size=(6, 7)).astype(np.float32),
    "half precision": np.random.default_rng(3).normal(size=(6, 7)).astype(np.float16),
    "tokens": np.random.default_rng(4).integers(0, 50, (6, 9)),
}


@pytest.mark.parametrize("what", INPUTS)
def test_strange_inputs_are_like_the_data_in_kind(what):
    array = INPUTS[what]
    made = dict(strange_batches({"x": array}, 0))
    assert len(made) >= 2
    for kind, batch in made.items():
        changed = batch["x"]
        assert changed.shape == array.shape and changed.dtype == array.dtype, kind
        assert not np.array_equal(changed, array), kind
        assert array.dtype.kind == "f" or (changed.min() >= array.min() and changed.max() <= array.max()), (
            kind
        )
    again = dict(strange_batches({"x": array}, 0))
    for kind in made:
        np.testing.assert_array_equal(made[kind]["x"], again[kind]["x"])


def test_tokens_that_are_shuffled_are_the_same_tokens():
    tokens = INPUTS["tokens"]
    shuffled = dict(strange_batches({"ids": tokens}, 0))["shuffled"]["ids"]
    np.testing.assert_array_equal(np.sort(shuffled, axis=1), np.sort(tokens, axis=1))


def test_a_mask_and_padding_stay():
    generator = np.random.default_rng(5)
    for values in (generator.integers(1, 50, (6, 9)), generator.normal(size=(6, 9, 4)).astype(np.float32)):
        mask = (np.arange(9) < generator.integers(1, 10, (6, 1))).astype(np.int64)
        other = np.where(mask.reshape(6, 9, *[1] * (values.ndim - 2)) == 1, values, -7)
        for (kind, one), (_, two) in zip(
            strange_batches({"x": values, "attention_mask": mask}, 0, mask == 1),
            strange_batches({"x": other.astype(values.dtype), "attention_mask": mask}, 0, mask == 1),
        ):
            np.testing.assert_array_equal(one["attention_mask"], mask)
            np.testing.assert_array_equal(one["x"][mask == 0], values[mask == 0], kind)
            np.testing.assert_array_equal(one["x"][mask == 1], two["x"][mask == 1], kind)


def test_axes_of_few_rows_are_not_tried():
    """300 rows of 64 features: axes that follow these rows would make every new one strange."""
    assert metrics_for(64, 20 * 64) == ("polar", "projected")
    assert metrics_for(64, 20 * 64 - 1) == ("polar",)
    for passes, metric in ((True, "whitened-direction"), (False, "whitened")):
        assert metrics_of_positions(64, 20 * 64, passes=passes) == (metric,)
        assert metrics_of_positions(64, 20 * 64 - 1, passes=passes) == ("euclidean",)
    generator = np.random.default_rng(0)
    weights = {"v": (8, 64), "q": (64, 64), "w": (64, 3)}
    text = "net (float[n, 8] x) => (float[n, 3] y) { a = MatMul(x, v)  b = Tanh(a)  c = MatMul(b, q)  h = Tanh(c)  y = MatMul(h, w) }"
    arrays = {name: generator.normal(size=size).astype(np.float32) for name, size in weights.items()}
    rows = generator.normal(size=(300, 8)).astype(np.float32)
    model = parse(text, **arrays)
    conversion = gapa_onnx.convert(model, {"x": rows}, m=100, k=10, task="classification")
    assert {fit.geometry.metric for fit in conversion.calibration.places} == {"polar"}


def test_a_place_of_unknown_rank_is_known_by_its_data():
    """A Reshape to a shape that is computed hides the rank; each row still has one query, so that it is a witness too."""
    generator = np.random.default_rng(0)
    text = """net (float[n, 8] x, int64[k] s) => (float[n, 3] y) {
        a = MatMul(x, v)  b = Tanh(a)  h = Reshape(b, s)  y = MatMul(h, w) }"""
    arrays = {
        "v": generator.normal(size=(8, 16)).astype(np.float32),
        "w": generator.normal(size=(16, 3)).astype(np.float32),
    }
    rows = [
        {"x": generator.normal(size=(100, 8)).astype(np.float32), "s": np.array([-1, 16], np.int64)}
        for _ in range(3)
    ]
    conversion = gapa_onnx.convert(parse(text, **arrays), rows, m=50, k=10, task="classification", sites="h")
    (fit,) = conversion.calibration.fits
    assert fit.site.rank is None and fit.single and fit.geometry.metric == "polar"
    assert conversion.numbers.scores["y", "score"].record.kind == "witnesses"
