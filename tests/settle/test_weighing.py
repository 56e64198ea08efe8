"""Several sites count at the outputs, the last twice: against float64 by hand, and where nothing may change."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from support.dense_shares import share_without
from support.steps import steps

from gapa_onnx.compiler import Conversion, convert
from gapa_onnx.fit.calibrate import Calibration
from gapa_onnx.measure import budget
from gapa_onnx.record import read
from gapa_onnx.settings import Settings
from gapa_onnx.settle import restraint
from gapa_onnx.settle.weighing import factors, medians_alone

DEEP = """net (float[n, 4] x) => (float[n, 3] y) {
    z1 = MatMul(x, w1)  h1 = Tanh(z1)  z2 = MatMul(h1, w2)  h2 = Tanh(z2)
    z3 = MatMul(h2, w3)  h3 = Tanh(z3)  y = MatMul(h3, w4) }"""
DEEP_SHAPES = {"w1": (4, 6), "w2": (6, 5), "w3": (5, 4), "w4": (4, 3)}

FORKED = """net (float[n, 4] x) => (float[n, 2] a, float[n, 3] b) {
    z1 = MatMul(x, w1)  h1 = Tanh(z1)  z2 = MatMul(x, w2)  h2 = Tanh(z2)
    a = MatMul(h1, w3)  b = MatMul(h2, w4) }"""
FORKED_SHAPES = {"w1": (4, 6), "w2": (4, 5), "w3": (6, 2), "w4": (5, 3)}

SMALL = {"m": 40, "k": 8}


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is held back for what predictions would lose: tests/settle/test_restraint.py is about that."""
    monkeypatch.setattr(restraint, "MOST_LOST", np.inf)


def net(text: str = DEEP, shapes: dict[str, tuple[int, ...]] = DEEP_SHAPES) -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    for name, shape in shapes.items():
        # Saturated: the slopes of tanh are small, and little of a site's variance passes the next one.
        array = 2 * generator.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def rows(count: int = 150, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


def serialised(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


def scales(conversion: Conversion) -> dict[str, float]:
    return {fit.site.output: fit.scale for fit in conversion.numbers.fits}


# ------------------------------------------------------------------------ the factors


def by_hand(model: onnx.ModelProto, x: np.ndarray, numbers: list[int], ceiling: float, **fit: float) -> tuple:
    """τ of each site by itself, and the median of the outputs' mean variance from it alone; in float64."""
    w = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    z = [x.astype(np.float64) @ w["w1"]]
    for layer in (2, 3):
        z.append(np.tanh(z[-1]) @ w[f"w{layer}"])
    scale, medians = [], []
    for number in numbers:
        at = z[number]
        shares = np.array([share_without(at, row, **fit) for row in range(len(at))])
        tau = 0.05 / np.median(shares)
        own = tau * shares / (1 + max(tau / ceiling - 1, 0) * shares)
        var = own[:, None] * at.var(axis=0)
        for layer in range(number + 1, 3):
            var = (var @ w[f"w{layer + 1}"] ** 2) * (1 - np.tanh(z[layer]) ** 2) ** 2
        scale.append(tau)
        medians.append(np.median((var @ w["w4"] ** 2).mean(axis=1)))
    return np.array(scale), np.array(medians)


@pytest.mark.parametrize("task, ceiling", [("regression", 1.0), ("classification", 100.0)])
@pytest.mark.parametrize("sites", ["h1,h2,h3", "h1,h3"])
def test_each_site_has_the_same_median_at_the_output(task, ceiling, sites):
    model, x = net(), rows()
    fit = {"k": 10, "length_scale": 2.0, "jitter": 1e-2}
    settings = Settings(sites=sites, inducing="all", task=task, metric="euclidean", **fit)
    conversion = convert(model, {"x": x}, settings=settings)
    fits = conversion.numbers.fits
    numbers = [int(fit.site.output[1:]) - 1 for fit in fits]
    scale, medians = by_hand(model, x, numbers, ceiling, **fit)
    assert medians.max() / medians.min() > 3  # or there would be nothing to balance
    weights = np.array([0.5] * (len(fits) - 1) + [1.0])
    weights /= weights.sum()
    factor = weights * medians[-1] / medians
    # z has a few roundings of float32, which the solve magnifies by up to 1 / jitter.
    np.testing.assert_allclose([fit.scale for fit in fits], scale * factor, rtol=1e-3)
    np.testing.assert_allclose([fit.ceiling for fit in fits], ceiling * factor, rtol=1e-3)
    made = steps(model, {"x": x}, settings)
    tail = made.tail(*made.template.spreads.values())
    found = medians_alone(made.template, made.sample, fits, tail)
    # A dozen roundings of float32 on the way: of τ, c², weights and sums of some positive numbers.
    np.testing.assert_allclose(found / weights, [[found.sum()] * len(fits)], rtol=12 * 2.0**-24)
    assert found.sum() == pytest.approx(medians[-1], rel=1e-3)


def test_the_file_tells_what_it_uses():
    conversion = convert(net(), {"x": rows()}, sites="all", **SMALL)
    record = read(conversion.model)
    assert [site.scale for site in record.sites] == [fit.scale for fit in conversion.numbers.fits]
    assert all(check.passed for check in conversion.checks)


def test_factors_of_several_outputs():
    # The second output feels the first and the last site only, in other units; nothing feels the third.
    medians = np.array([[2.0, 4.0, 0.0, 8.0], [1e6, 0.0, np.nan, 1e5]])
    # of 4 halves 1, 1 and 2; of 3 halves 1 and 2
    wanted = [np.sqrt(8 / (4 * 2) * 1e5 / (3 * 1e6)), 8 / (4 * 4), 1 / 4, np.sqrt(1 / 2 * 2 / 3)]
    np.testing.assert_allclose(factors(medians), wanted, rtol=1e-14)


@pytest.mark.parametrize("lost", [0.0, np.nan, np.inf, 1e-44])
def test_a_part_that_has_died_out_gets_no_factor_of_its_own(lost):
    np.testing.assert_allclose(factors(np.array([[lost, 3.0, 6.0]])), [1 / 3, 2 / 3, 2 / 3], rtol=1e-14)
    np.testing.assert_array_equal(factors(np.full((1, 3), np.nan)), [1 / 3] * 3)


def test_the_order_in_which_sites_are_named_is_of_no_matter():
    found = [scales(convert(net(), {"x": rows()}, sites=s, **SMALL)) for s in ("h1,h2,h3", "h3,h1,h2")]
    assert found[0] == found[1]


def test_factors_do_not_depend_on_what_the_score_is():
    found = [
        convert(net(), {"x": rows()}, sites="all", task="classification", score=score, **SMALL)
        for score in ("variance", "epistemic")
    ]
    assert scales(found[0]) == scales(found[1])
    assert read(found[1].model).heads["y"].score.kind == "epistemic"


# ------------------------------------------------------------------------ where nothing changes


@pytest.mark.parametrize(
    "model, choices",
    [
        (net(), {"sites": "last"}),
        (net(), {"sites": "all", "scale": "none", "length_scale": "input"}),  # as in the paper
        (net(), {"sites": "all", "scale": 0.5}),
        (net(FORKED, FORKED_SHAPES), {}),  # two outputs, each with a site of its own
    ],
)
def test_nothing_is_weighed(model, choices):
    conversion = convert(model, {"x": rows()}, settings=Settings(**choices, **SMALL))
    before, after = conversion.calibration.fits, conversion.numbers.fits
    assert [(fit.scale, fit.ceiling) for fit in after] == [(fit.scale, fit.ceiling) for fit in before]


def test_paper_mode_stays():
    conversion = convert(net(), {"x": rows()}, sites="all", paper=True, **SMALL)
    assert [(fit.scale, fit.ceiling) for fit in conversion.numbers.fits] == [(1.0, 100.0)] * 3


def test_same_data_same_bytes():
    first, second = (convert(net(), {"x": rows()}, sites="all", **SMALL).model for _ in range(2))
    assert serialised(first) == serialised(second)


# ------------------------------------------------------------------------ sites that count for nothing


def weights_of(model: onnx.ModelProto, sites: str) -> tuple[Calibration, np.ndarray]:
    """The calibration, and what each site is multiplied by."""
    conversion = convert(model, {"x": rows()}, settings=Settings(sites=sites, **SMALL))
    assert all(check.passed for check in conversion.checks)
    before, after = conversion.calibration, conversion.numbers
    return before, np.array([b.scale / a.scale for a, b in zip(before.fits, after.fits)])


@pytest.mark.parametrize("sites", ["h1,d,h2", "d,h1,h2", "h1,h2,d"])
def test_a_site_that_does_not_reach_the_output(sites):
    """Only whole numbers come of d, so that the other two share the variance as if they were alone."""
    text = """net (float[n, 4] x) => (float[n, 3] y, int64[n, 1] class) {
        z1 = MatMul(x, w1)  h1 = Tanh(z1)  z2 = MatMul(h1, w2)  h2 = Tanh(z2)  y = MatMul(h2, w4)
        d = Relu(z2)  class = ArgMax <axis = 1> (d) }"""
    model = net(text, {"w1": (4, 6), "w2": (6, 5), "w4": (5, 3)})
    before, found = weights_of(model, sites)
    alone = dict(zip(("h1", "h2"), weights_of(model, "h1,h2")[1]))
    expected = [alone.get(fit.site.output, 1 / 3) for fit in before.fits]
    np.testing.assert_allclose(found, expected, rtol=2.0**-23)  # both τ are rounded to float32


def test_a_site_whose_variance_is_lost_on_the_way():
    """A layer of zeros behind h1: its variance at the output is zero, not absent."""
    model = net()
    model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(np.zeros((6, 5), np.float32), "w2"))
    model.graph.node[2].CopyFrom(onnx.helper.make_node("Gemm", ["h1", "w2", "bias"], ["g"]))
    model.graph.node.insert(3, onnx.helper.make_node("Add", ["g", "skip"], ["z2"]))
    model.graph.node.insert(0, onnx.helper.make_node("MatMul", ["x", "w5"], ["skip"]))
    extra = {"bias": np.zeros(5), "w5": np.random.default_rng(2).normal(size=(4, 5))}
    for name, array in extra.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    _, found = weights_of(model, "h1,h2,h3")
    assert found[0] == pytest.approx(1 / 3, rel=2.0**-23)
    assert found[2] == pytest.approx(2 / 3, rel=2.0**-23)


# ------------------------------------------------------------------------ beside other options


def test_targets_multiply_what_is_balanced():
    x = rows(300)
    y = np.random.default_rng(3).normal(size=(300, 3))
    plain = scales(convert(net(), {"x": x}, sites="all", task="regression", **SMALL))
    fitted = scales(convert(net(), {"x": x}, sites="all", task="regression", targets=y, **SMALL))
    ratios = np.array([fitted[site] / plain[site] for site in plain])
    np.testing.assert_allclose(ratios, ratios[0], rtol=2.0**-22)


def test_a_budget_chooses_and_then_sites_are_weighed(monkeypatch):
    monkeypatch.setattr(budget, "measure", lambda *a, **k: SimpleNamespace(ratio=1.2, control=1.0))
    settings = Settings(sites="all", solver="exact", **SMALL)
    chosen = convert(net(), {"x": rows()}, budget=1.5, settings=settings)
    assert scales(chosen) == scales(convert(net(), {"x": rows()}, settings=settings))
    one_site = convert(net(), {"x": rows()}, settings=replace(settings, sites="last"))
    assert scales(chosen)["h3"] == pytest.approx(scales(one_site)["h3"] / 2, rel=2.0**-23)
