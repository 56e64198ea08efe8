"""How far τ is held back, against probabilities computed in float64 from what the tail says of variances."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from scipy.stats import entropy
from support.small_models import parse
from support.steps import steps

from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.settings import Settings
from gapa_onnx.settle import restraint
from gapa_onnx.settle.ranking import gauged
from gapa_onnx.settle.restraint import FACTORS, held_back, mean_divergence, restrained
from gapa_onnx.settle.tail import Tail

NET = """net (float[n, 6] x) => (float[n, 3] y) {
    a = MatMul(x, v)  b = Tanh(a)  c = MatMul(b, q)  h = Tanh(c)  y = MatMul(h, w) }"""


class Found:
    """A small classifier up to the step before τ is held back."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        shapes = {"v": (6, 12), "q": (12, 12), "w": (12, 3)}
        model = parse(NET, 17, **{name: generator.normal(size=shape) for name, shape in shapes.items()})
        settings = Settings(m=60, k=12, task="classification")
        made = steps(model, {"x": generator.normal(size=(400, 6)).astype(np.float32)}, settings)
        self.template, self.sample = made.template, made.sample
        self.numbers = gauged(self.template, self.sample, Numbers(made.calibration.fits))

    def lost(self, factor: float, raised: float = 1.0) -> float:
        """Mean KL of left-out rows in float64, the bridge by its formula."""
        tail = Tail(self.template, ["y", "y_var"], self.numbers)
        fits = held_back(self.numbers.fits, factor, raised)
        parts = [tail(batch, fits) for batch in self.sample.batches(Purpose.SCORES)]
        logits, var = (np.concatenate([p[name] for p in parts]).astype(np.float64) for name in ("y", "y_var"))
        blurred = logits / np.sqrt(1 + math.pi / 8 * var.mean(axis=1, keepdims=True))
        p = softmax(logits, axis=1)
        return float((p * (np.log(p) - log_softmax(blurred, axis=1))).sum(axis=1).mean())


@pytest.fixture(scope="module")
def found() -> Found:
    return Found()


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_tau_is_as_large_as_it_may_be(found, monkeypatch, share):
    """Of the candidates, the largest that loses no more than so much of what τ itself would lose."""
    floor, whole = found.lost(float(FACTORS[0])), found.lost(1.0)
    most = floor + share * (whole - floor)
    monkeypatch.setattr(restraint, "MOST_LOST", most)
    (before,), (after,) = found.numbers.fits, restrained(found.template, found.sample, found.numbers).fits
    chosen = int(np.argmin(np.abs(np.log(FACTORS) - math.log(after.scale / before.scale))))
    assert math.isclose(after.scale, before.scale * FACTORS[chosen], rel_tol=1e-6)
    assert math.isclose(after.lift * after.scale, before.scale, rel_tol=1e-6)
    # single precision of probabilities of about 1/3, whose differences are of the order of their losses
    assert found.lost(float(FACTORS[chosen])) <= most * (1 + 1e-3)
    assert found.lost(float(FACTORS[chosen + 1])) > most * (1 - 1e-3)


def test_what_witnesses_add_is_held_back_last(found, monkeypatch):
    """Where the least κ loses too much."""
    least = float(FACTORS[0])
    most = 0.5 * found.lost(least)
    monkeypatch.setattr(restraint, "MOST_LOST", most)
    (before,), (after,) = found.numbers.fits, restrained(found.template, found.sample, found.numbers).fits
    raised = after.lift * after.scale / before.scale
    chosen = int(np.argmin(np.abs(np.log(FACTORS) - math.log(raised))))
    assert math.isclose(after.scale, before.scale * least, rel_tol=1e-6) and chosen + 1 < len(FACTORS)
    assert found.lost(least, float(FACTORS[chosen])) <= most * (1 + 1e-3)
    assert found.lost(least, float(FACTORS[chosen + 1])) > most * (1 - 1e-3)


def test_what_costs_little_stays(found, monkeypatch):
    monkeypatch.setattr(restraint, "MOST_LOST", 1.01 * found.lost(1.0))
    assert restrained(found.template, found.sample, found.numbers) is found.numbers


def test_what_is_beyond_the_ordinary_keeps_its_variance(found):
    """κ + beyond in place of 1 + beyond: the smaller κ, the less ordinary rows have, and no row less than beyond gives."""
    tail = Tail(found.template, ["y_var"], found.numbers)
    batch = next(iter(found.sample.batches(Purpose.SCORES)))
    whole, tenth, hundredth = (
        tail(batch, held_back(found.numbers.fits, factor))["y_var"].astype(np.float64)
        for factor in (1, 0.1, 0.01)
    )
    raised = (hundredth - (tenth - hundredth) / 9) / whole  # linear in κ: what remains at κ = 0
    assert (raised > -1e-5).all() and (raised < 1).all()
    assert raised.max() > 0.3 and np.median(raised) < 0.1  # some rows are beyond the ordinary, most are not


def test_divergence():
    generator = np.random.default_rng(1)
    p, q = (generator.dirichlet(np.ones(4), 50) for _ in range(2))
    assert math.isclose(mean_divergence(p, q), entropy(p.T, q.T).mean(), rel_tol=1e-12)
    holes = p.copy()
    holes[:10] = np.nan
    assert math.isclose(mean_divergence(holes, q), entropy(p[10:].T, q[10:].T).mean(), rel_tol=1e-12)
    assert mean_divergence(np.full((3, 2), np.nan), np.ones((3, 2))) == 0
