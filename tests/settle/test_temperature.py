"""Temperature and τ by labels: the minimum by another optimiser, and what few or extreme labels say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax

from gapa_onnx.settle.temperature import FACTORS, Logits, best_temperature


def labelled(rows: int, temperature: float, seed: int = 0, spread: float = 1.0) -> Logits:
    """Labels drawn at a temperature, from logits whose variances go with κ."""
    generator = np.random.default_rng(seed)
    mean = 3 * generator.normal(size=(rows, 4))
    var = spread * generator.exponential(size=(rows, 1))
    true = mean / np.sqrt(temperature**2 + math.pi / 8 * var) + generator.gumbel(size=(rows, 4))
    return Logits(mean, FACTORS[:, None, None] * var, true.argmax(axis=1), rows)


def by_scipy(logits: Logits, factor: float) -> float:
    var = logits.var[list(FACTORS).index(1.0)] * factor

    def loss(log: np.ndarray) -> float:
        scaled = logits.mean / np.sqrt(np.exp(2 * log[0]) + math.pi / 8 * var)
        losses = -log_softmax(scaled, axis=1)[np.arange(len(scaled)), logits.labels]
        return losses.mean() + log[0] ** 2 / (2 * len(scaled))

    return minimize(loss, [0.3], tol=1e-10).fun


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("step", [-0.5, 0.0, 0.7])
def test_the_minimum_is_that_of_another_optimiser(temperature, step):
    logits = labelled(300, temperature)
    found, loss = best_temperature(logits, step)
    assert loss == pytest.approx(by_scipy(logits, 10**step), abs=1e-8)
    assert 0 < found < math.exp(4.5)


def test_the_temperature_that_made_the_labels_is_found():
    found, _ = best_temperature(labelled(20_000, 2.0, spread=2.0), 0.0)
    assert found == pytest.approx(2.0, rel=0.03)


def test_variances_between_two_factors_go_with_a_power():
    logits = labelled(50, 1.0)
    np.testing.assert_allclose(logits.var_at(0.3), logits.var[list(FACTORS).index(1.0)] * 10**0.3, rtol=1e-12)
    np.testing.assert_allclose(logits.var_at(-1.5), logits.var[0], rtol=1e-12)
    np.testing.assert_allclose(logits.var_at(1.5), logits.var[-1], rtol=1e-9)


def test_few_rows_that_are_all_right_do_not_make_it_certain():
    mean = np.eye(4)[[0, 1, 2, 3, 0, 1]] * 2.0
    logits = Logits(mean, np.full((len(FACTORS), 6, 1), 1e-6), np.array([0, 1, 2, 3, 0, 1]), 6)
    found, _ = best_temperature(logits, 0.0)
    assert 0.2 < found < 1


def test_labels_that_contradict_the_network_end_at_a_bound():
    logits = labelled(200, 1.0)
    found, loss = best_temperature(Logits(logits.mean, logits.var, (-logits.mean).argmax(axis=1), 200), 0.0)
    assert math.isfinite(loss) and found > 5
