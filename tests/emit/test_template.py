"""The template and its numbers: one graph for any of them, and a file that computes what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from support.small_models import noisy_data, noisy_net, parse
from support.steps import Steps, steps

import gapa_onnx
from gapa_onnx.compiler import convert
from gapa_onnx.emit.emit import emit
from gapa_onnx.emit.numbers import Numbers, file_tensors, site_tensors
from gapa_onnx.emit.rewrite import rewrite
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.record import read
from gapa_onnx.settings import Settings

SETTINGS = Settings(m=60, k=10, task="regression")


def small(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    return parse(text, **{name: generator.normal(size=shape) for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def made() -> Steps:
    return steps(noisy_net(), {"x": noisy_data(300, seed=1)[0]}, SETTINGS)


def with_numbers(made: Steps, scale: float, ceiling: float) -> Numbers:
    return Numbers(tuple(replace(fit, scale=scale, ceiling=ceiling) for fit in made.calibration.fits))


def emitted(made: Steps, scale: float, ceiling: float) -> onnx.ModelProto:
    return emit(made.template, with_numbers(made, scale, ceiling), made.calibration, SETTINGS)


def answers(model: onnx.ModelProto, x: np.ndarray, *names: str) -> list[np.ndarray]:
    return gapa_onnx.session(model.SerializeToString()).run(list(names), {"x": x})


def test_the_template_does_not_depend_on_its_numbers(made):
    other = replace(
        made.calibration, fits=tuple(replace(fit, scale=7.0, ceiling=3.0) for fit in made.calibration.fits)
    )
    again = rewrite(made.plan, other, SETTINGS)
    assert again.additions.SerializeToString(deterministic=True) == made.template.additions.SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize("scale, ceiling", [(0.5, 1.0), (1.0, 1.0), (3.0, 1.0), (5e4, 2.0)])
def test_a_file_has_the_variance_of_its_numbers(made, scale, ceiling):
    """c² τ s / (1 + max(τ/A − 1, 0) s), in float64 from the file's own shares."""
    x, _ = noisy_data(50, seed=2)
    (fit,), (site,) = made.calibration.fits, made.template.sites
    model = emitted(made, scale, ceiling)
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(site.share))
    found, share = answers(model, x, "y_var", site.share)
    share = share.astype(np.float64)
    own = fit.prior_var * scale * share / (1 + max(scale / ceiling - 1, 0.0) * share)  # (n, units)
    (w2,) = (onnx.numpy_helper.to_array(t) for t in noisy_net().graph.initializer if t.name == "w2")
    expected = own @ w2.astype(np.float64) ** 2
    # a dozen roundings of float32: of τ, c², the quotient, squares and a sum of positive numbers
    np.testing.assert_allclose(found, expected, rtol=24 * 2.0**-24)


def test_where_nothing_levels_off_there_is_no_node_for_it(made):
    (site,) = made.template.sites
    plain, levelled = emitted(made, 0.5, 1.0), emitted(made, 3.0, 1.0)
    made_by = [{name for node in model.graph.node for name in node.output} for model in (plain, levelled)]
    assert site.levelled not in made_by[0] and site.levelled in made_by[1]
    held = [{tensor.name for tensor in model.graph.initializer} for model in (plain, levelled)]
    assert site.half_way not in held[0] and site.half_way in held[1]


def test_what_only_settling_needs_is_not_in_the_file():
    choices = Settings(m=60, k=10, task="classification", score="epistemic")
    text = "net (float[n, 3] x) => (float[n, 4] y) { h = MatMul(x, w1)  a = Tanh(h)  y = MatMul(a, w2) }"
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    made = steps(small(text, w1=(3, 6), w2=(6, 4)), {"x": x}, choices)
    (spread,) = made.template.spreads.values()
    assert any(spread in node.output for node in made.template.additions.node)
    file = emit(made.template, Numbers(made.calibration.fits), made.calibration, choices)
    assert not any(spread in node.output for node in file.graph.node)
    onnx.checker.check_model(file, full_check=True)


@pytest.mark.parametrize("scale, ceiling", [(0.5, 1.0), (3.0, 1.0)])
def test_the_tail_answers_as_the_file(made, scale, ceiling):
    """With the shares of the file in place of left-out ones."""
    x, _ = noisy_data(80, seed=3)
    numbers = with_numbers(made, scale, ceiling)
    (site,) = made.template.sites
    model = emitted(made, scale, ceiling)
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(site.share))
    found, share = answers(model, x, "y_var", site.share)
    batch = next(made.sample.batches(Purpose.SCORES))
    batch = replace(batch, positions=np.arange(80), inputs={"x": x}, shares={site.output: share})
    tail = made.tail("y_var")(batch, numbers.fits)["y_var"]
    # b = 1e-6 stands for 0, and a few roundings
    np.testing.assert_allclose(tail, found, rtol=2e-6)


def test_parameters_of_sites_hold_for_any_ceiling(made):
    (site,), (fit,) = made.template.sites, made.calibration.fits
    for scale, ceiling in ((0.5, 1.0), (3.0, 1.0), (1e4, 100.0)):
        numbers = with_numbers(made, scale, ceiling)
        held = site_tensors(made.template, numbers.fits)
        share = np.array([1e-6, 0.01, 0.5, 1.0])
        own = np.multiply.outer(held[site.amplitude], share / (share + held[site.half_way]))
        expected = np.multiply.outer(fit.prior_var, scale * share / (1 + max(scale / ceiling - 1, 0) * share))
        np.testing.assert_allclose(own, expected, rtol=3e-6)
        assert set(held) <= set(file_tensors(made.template, numbers))


def test_every_parameter_is_an_initializer_of_the_additions():
    x, y = noisy_data(300, seed=4)
    choices = Settings(m=60, k=10)
    made = steps(noisy_net(), {"x": x}, choices)
    template = rewrite(made.plan, made.calibration, choices, targets={"y"})
    held = {tensor.name for tensor in template.additions.initializer}
    names = [
        name for site in template.sites for name in (site.half_way, *site.multiples) if name != site.amplitude
    ]
    tables = [score.table for score in template.scores.values()]
    names += [name for table in tables for name in (table.scores, table.largest, table.count, table.level)]
    names += [name for gauge in template.gauges for name in (gauge.centre, gauge.slope)]
    names += [name for noise in template.noise.values() for layer in noise.layers for name in layer]
    names += [noise.unit for noise in template.noise.values()]
    assert len(names) == 2 + 4 + 2 + 6 + 1 and set(names) <= held


def test_the_noise_head_reads_a_site_that_reaches_the_output():
    """The last site in the graph does not reach the output: only whole numbers come of it."""
    text = (
        "net (float[n, 3] x) => (float[n, 1] y, int64[n, 1] c) "
        "{ h = MatMul(x, w1)  a = Tanh(h)  y = MatMul(a, w2)  d = Relu(h)  c = ArgMax <axis = 1> (d) }"
    )
    model, generator = small(text, w1=(3, 6), w2=(6, 1)), np.random.default_rng(0)
    x = generator.normal(size=(200, 3)).astype(np.float32)
    choices = Settings(m=60, k=10, sites="a,d", task="y=regression")
    made = steps(model, {"x": x}, choices)
    template = rewrite(made.plan, made.calibration, choices, targets={"y"})
    assert template.noise["y"].reads == "a"
    y = generator.normal(size=200)
    done = convert(model, {"x": x}, settings=choices, targets=y)
    assert all(check.passed for check in done.checks)
    assert read(done.model).heads["y"].noise is not None


def test_sites_stand_in_the_order_of_the_graph_however_they_are_named():
    model = small(
        "net (float[n, 3] x) => (float[n, 1] y) "
        "{ z1 = MatMul(x, w1)  h1 = Tanh(z1)  z2 = MatMul(h1, w2)  h2 = Tanh(z2)  y = MatMul(h2, w3) }",
        w1=(3, 6), w2=(6, 5), w3=(5, 1),
    )  # fmt: skip
    x = np.random.default_rng(1).normal(size=(200, 3)).astype(np.float32)
    made = steps(model, {"x": x}, Settings(m=60, k=10, sites="h2,h1"))
    assert [site.output for site in made.template.sites] == ["h1", "h2"]
    assert [fit.site.output for fit in made.calibration.fits] == ["h2", "h1"]
