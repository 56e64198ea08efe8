"""τ by targets: a factor on s is a factor on τ, the factor that made the targets is found, unknown targets."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm
from support.small_models import noisy_data, noisy_net

from gapa_onnx import record as provenance
from gapa_onnx.compiler import convert
from gapa_onnx.data import DataSource, open_data
from gapa_onnx.emit.emit import emit
from gapa_onnx.emit.rewrite import rewrite
from gapa_onnx.fit.calibrate import Calibration, calibrate
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.settings import Settings
from gapa_onnx.settle.left_out import left_out, left_out_by_scale
from gapa_onnx.settle.scaling import FACTORS, largest_factor, row_losses, scaled_by_targets


def emitted(x: np.ndarray, **choices) -> tuple:
    """A model before its completion, with what it was made from."""
    settings = Settings(m=100, k=20, task="regression", **choices)
    source = load(noisy_net())
    plan = analyse(source, settings)
    rows = open_data({"x": x}, source.inputs)
    calibration = calibrate(plan, rows, settings)
    return (
        emit(plan, calibration, rewrite(plan, calibration, settings), settings),
        calibration,
        rows,
        settings,
    )


def variances(model, calibration: Calibration, rows: DataSource) -> np.ndarray:
    return np.concatenate([answers["y_var"] for _, answers in left_out(model, calibration, rows, ["y_var"])])


@pytest.mark.parametrize("factor", [0.01, 30.0])
def test_a_factor_on_the_share_is_a_factor_on_the_scale(factor):
    x, _ = noisy_data(300, seed=1)
    model, calibration, rows, _ = emitted(x)
    by_factor = left_out_by_scale(model, calibration, rows, ["y_var"], (1.0, factor))
    found = [
        np.concatenate([a["y_var"] for a in answers]) for answers in zip(*(pair[1] for pair in by_factor))
    ]
    other, recalibrated, _, _ = emitted(x, scale=calibration.fits[0].scale * factor)
    np.testing.assert_array_equal(found[0], variances(model, calibration, rows))
    # Two products of float32 differ by a rounding each, once for τ κ and once for s κ.
    np.testing.assert_allclose(found[1], variances(other, recalibrated, rows), rtol=1e-6)


@pytest.mark.parametrize("factor", [1e-3, 0.1, 1.0])
def test_the_factor_that_made_the_targets_is_found(factor):
    x, _ = noisy_data(2000, seed=2)
    model, calibration, rows, settings = emitted(x)
    by_factor = left_out_by_scale(model, calibration, rows, ["y", "y_var"], (factor,))
    answers = [pair[1][0] for pair in by_factor]
    mean, var = (np.concatenate([answer[name] for answer in answers]) for name in ("y", "y_var"))
    noise = 0.1 * var.mean()
    y = mean + np.sqrt(var + noise) * np.random.default_rng(3).normal(size=mean.shape)
    scaled = scaled_by_targets(model, calibration, rows, {"y": y}, settings)
    found = scaled.fits[0].scale / calibration.fits[0].scale
    assert factor / 2 < found < factor * 4  # the larger ones are preferred, up to the tolerance


def test_a_loss_that_does_not_tell_keeps_the_error_bars_wide():
    flat = np.zeros((len(FACTORS), 50))
    assert largest_factor([flat]) == FACTORS[-1]
    steep = flat + 0.02 * np.arange(len(FACTORS))[:, None]
    assert largest_factor([steep]) == FACTORS[0]


def test_losses_are_those_of_the_best_constant_noise():
    generator = np.random.default_rng(4)
    var = generator.uniform(0.1, 2, size=(1, 400, 1))
    residual = np.sqrt(var[0] + 0.5) * generator.normal(size=(400, 1))

    def loss(noise: float) -> float:
        return -norm.logpdf(residual, 0, np.sqrt(var[0] + noise)).mean()

    best = minimize_scalar(loss, bounds=(1e-3, 5), method="bounded").fun
    unit = 0.5 * np.log(2 * np.pi * np.mean(residual**2))
    assert row_losses(residual, var).mean() + unit == pytest.approx(best, abs=1e-6)  # flat at its minimum


def test_targets_that_are_not_known_count_for_nothing():
    x, y = noisy_data(600, seed=5)
    y[:300] = np.nan
    wild = y.copy()
    model = convert(noisy_net(), {"x": x}, targets=wild, m=100, k=20).model
    record = provenance.read(model)
    assert record["heads"]["y"]["noise"]["rows"] == 300 and record["data"]["rows"] == 600


def test_a_scale_that_was_given_stays():
    x, y = noisy_data(300, seed=6)
    model = convert(noisy_net(), {"x": x}, targets=y, m=100, k=20, scale=0.5).model
    assert provenance.read(model)["sites"][0]["scale"] == 0.5
