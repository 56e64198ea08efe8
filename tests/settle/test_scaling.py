"""τ by targets: a factor on s is a factor on τ, the factor that made the targets is found, unknown targets."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm
from support.small_models import noisy_data, noisy_net
from support.steps import Steps, steps

from gapa_onnx.compiler import convert
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.record import read
from gapa_onnx.settings import Settings
from gapa_onnx.settle.scaling import FACTORS, largest_factor, row_losses, scaled_by_targets, times


def made(x: np.ndarray, **choices) -> Steps:
    return steps(noisy_net(), {"x": x}, Settings(m=100, k=20, task="regression", **choices))


@pytest.mark.parametrize("factor", [0.01, 30.0])
def test_other_numbers_in_the_tail_are_another_scale_of_the_file(factor):
    """The template answers with τ κ as a file that is converted with that τ does."""
    x, _ = noisy_data(300, seed=1)
    one = made(x)
    scale = one.calibration.fits[0].scale * factor
    found = one.answers("y_var", fits=times(one.calibration.fits, factor))["y_var"]
    other = made(x, scale=scale)
    assert other.calibration.fits[0].scale == pytest.approx(scale)
    np.testing.assert_allclose(found, other.answers("y_var")["y_var"], rtol=1e-6)
    assert not np.allclose(found, one.answers("y_var")["y_var"], rtol=0.5)


@pytest.mark.parametrize("factor", [1e-3, 0.1, 1.0])
def test_the_factor_that_made_the_targets_is_found(factor):
    x, _ = noisy_data(2000, seed=2)
    one = made(x)
    answers = one.answers("y", "y_var", fits=times(one.calibration.fits, factor))
    mean, var = answers["y"], answers["y_var"]
    noise = 0.1 * var.mean()
    y = mean + np.sqrt(var + noise) * np.random.default_rng(3).normal(size=mean.shape)
    before = Numbers(one.calibration.fits)
    scaled = scaled_by_targets(one.template, one.sample, before, one.tail("y", "y_var"), {"y": y})
    found = scaled.fits[0].scale / before.fits[0].scale
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
    record = read(model)
    assert record.heads["y"].noise.rows == 200 and record.data.rows == 600


def test_a_scale_that_was_given_stays():
    x, y = noisy_data(300, seed=6)
    model = convert(noisy_net(), {"x": x}, targets=y, m=100, k=20, scale=0.5).model
    assert read(model).sites[0].scale == 0.5
