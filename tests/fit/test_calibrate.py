"""One pass over the data serves many fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from gapa_onnx.data import open_data
from gapa_onnx.fit import statistics
from gapa_onnx.fit.calibrate import _held_out, calibrate, fit
from gapa_onnx.fit.collect import collect
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.settings import Settings


@pytest.fixture(scope="module")
def plan_and_data():
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        network (float[n, 6] x) => (float[n, 2] y) { z = MatMul(x, w1)  h = Tanh(z)  y = MatMul(h, w2) }"""
    )
    for name, shape in (("w1", (6, 6)), ("w2", (6, 2))):
        weights = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    source = load(model)
    rows = rng.standard_normal((6000, 6)).astype(np.float32)
    return analyse(source, Settings()), open_data({"x": rows}, source.inputs)


@pytest.mark.parametrize(
    "choices",
    [
        {"m": 10, "k": 5},  # keeps 4000 of the rows, where the first settings keep all
        {"solver": "cached"},
        {"k": 3, "points": "int8"},
        {"index": "ivf", "inducing": "random"},
    ],
    ids=str,
)
def test_a_fit_to_what_was_collected_is_a_calibration(plan_and_data, choices):
    plan, data = plan_and_data
    first = Settings(m=40, k=8)
    settings = replace(first, **choices)
    (reused,) = fit(collect(plan, data, first), settings).fits
    (fresh,) = calibrate(plan, data, settings).fits
    assert reused.index.tensors.keys() == fresh.index.tensors.keys()
    for name, tensor in fresh.index.tensors.items():
        np.testing.assert_array_equal(reused.index.tensors[name], tensor)
    for name in ("k", "length_scale", "scale", "share_quantiles", "share_error", "storage_error", "rows"):
        assert getattr(reused, name) == getattr(fresh, name), name
    np.testing.assert_array_equal(reused.prior_var, fresh.prior_var)


def test_small_batches_are_left_out_as_large_ones(plan_and_data):
    plan, data = plan_and_data
    (site,) = calibrate(plan, data, Settings(m=40, k=8)).fits
    rows = np.random.default_rng(1).standard_normal((30, 6)).astype(np.float32)
    whole = site.leave_one_out(rows)
    np.testing.assert_array_equal(np.concatenate([site.leave_one_out(r[None]) for r in rows]), whole)


def test_rows_that_a_fit_has_judged_are_not_solved_for_again(plan_and_data, monkeypatch):
    plan, data = plan_and_data
    settings = Settings(m=40, k=8)
    collected = collect(plan, data, settings)
    (site,) = fit(collected, settings).fits
    held_out = _held_out(collected.collectors[0].rows(settings), settings.seed)
    rows = np.concatenate(
        [held_out[5:9], np.full((1, held_out.shape[1]), np.nan, np.float32), held_out[:2] + 1]
    )
    assert len(site.judged) == len(held_out)
    expected = replace(site, judged={}).leave_one_out(rows)
    solved = []

    def counting(rows, *arguments):
        solved.append(len(rows))
        return leave_one_out_share(rows, *arguments)

    leave_one_out_share = statistics.leave_one_out_share
    monkeypatch.setattr(statistics, "leave_one_out_share", counting)
    np.testing.assert_array_equal(site.leave_one_out(rows), expected)
    assert solved == [3]
    np.testing.assert_array_equal(site.leave_one_out(held_out[:0]), [])
    assert solved == [3]


def test_the_progress_of_choosing_points_is_told(plan_and_data):
    plan, data = plan_and_data
    settings = Settings(m=40, k=8)
    told = []
    fit(collect(plan, data, settings), settings, lambda text, done: told.append((text, done)))
    fractions = [done for _, done in told]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    choosing = {done for text, done in told if text == f"choosing points at {plan.sites[0].name}"}
    assert len(choosing) > 10
