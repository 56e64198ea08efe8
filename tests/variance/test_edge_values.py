"""Numbers at the edge: infinite slopes, infinite variances and zeros must not make a NaN of a sound prediction."""

from __future__ import annotations

import numpy as np
import pytest
from support.rule_checks import parse, run_with_variances

BY_HAND = "com.microsoft"


def variance(body: str, x: list[float], v: list[float], opset: int = 17) -> np.ndarray:
    model = parse(f"m (float[{len(x)}] x) => (float[{len(x)}] y) {{ {body} }}", opset)
    feeds = {"x": np.array(x, np.float32)}, {"x": np.array(v, np.float32)}
    with np.errstate(all="ignore"):
        return run_with_variances(model, *feeds)["y_var"]


SINGULAR = [
    ("Sqrt", "y = Sqrt(x)", 0.0, lambda x: 0.25 / x),
    ("Pow to a half", "p = Constant<value_float=0.5>() y = Pow(x, p)", 0.0, lambda x: 0.25 / x),
    ("Asin", "y = Asin(x)", 1.0, lambda x: 1 / (1 - x * x)),
    ("Acos", "y = Acos(x)", -1.0, lambda x: 1 / (1 - x * x)),
    ("Acosh", "y = Acosh(x)", 1.0, lambda x: 1 / (x * x - 1)),
]


@pytest.mark.parametrize(
    "body, edge, squared_slope", [case[1:] for case in SINGULAR], ids=[c[0] for c in SINGULAR]
)
def test_a_certain_number_stays_so_where_the_slope_is_infinite(body, edge, squared_slope):
    """0 · inf: behind a Relu that is off, a Sqrt has a certain 0. One that is not certain has a finite, large
    variance there: it is flagged, and does not fail."""
    inside = 1.25 if "Acosh" in body else 0.25
    found = variance(body, [edge, edge, inside], [0.0, 1e-3, 1e-3])
    assert found[0] == 0
    assert np.isfinite(found[1]) and found[1] > 1e20
    assert found[2] == pytest.approx(1e-3 * squared_slope(inside), rel=1e-5)


def test_a_power_of_0_is_certain():
    found = variance("p = Constant<value_float=0.0>() y = Pow(x, p)", [0.0, 2.0], [1.0, 1.0])
    np.testing.assert_array_equal(found, [0, 0])


QUANTISE = "s = Constant<value_float={scale}>() z = Constant<value_ints=[0]>() z8 = Cast<to=3>(z) " \
    "zero = Squeeze(z8) q = QuantizeLinear(x, s, zero) y = DequantizeLinear(q, s, zero)"  # fmt: skip


def test_saturated_elements_pass_nothing_on_however_small_the_steps():
    """Steps of 1e-25 have squares that float32 does not hold: variances in steps are infinite, or 0 / 0."""
    found = variance(QUANTISE.format(scale=1e-25), [3.0, -2.0, 0.0], [1.0, 1e-3, 0.0])
    np.testing.assert_array_equal(found, [0, 0, 0])


def test_an_infinite_variance_does_not_survive_saturation():
    found = variance(QUANTISE.format(scale=0.1), [100.0, 1.0], [np.inf, 1e-2])
    assert found[0] == 0 and found[1] == pytest.approx(1e-2, rel=1e-6)
