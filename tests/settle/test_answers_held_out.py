"""Held-out rows in a conversion: the file's own answers, and numbers that part B has no part in."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.small_models import noisy_data, noisy_net, parse
from support.steps import steps

import gapa_onnx
from gapa_onnx.compiler import convert
from gapa_onnx.data import hold_out, open_data
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.errors import UserError
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.record import read
from gapa_onnx.settings import Settings
from gapa_onnx.settle.held_out import FileRun, answers_in, take_in

SMALL = {"m": 60, "k": 10}


@pytest.fixture(scope="module")
def made():
    return steps(noisy_net(), {"x": noisy_data(300, 1)[0]}, Settings(task="regression", **SMALL))


def test_a_run_answers_as_the_file_does(made):
    x, _ = noisy_data(50, 2)
    model = convert(noisy_net(), {"x": noisy_data(300, 1)[0]}, task="regression", **SMALL).model
    run = FileRun(made.template, Numbers(made.calibration.fits), ["y_var", made.template.sites[0].share])
    found = run({"x": x})
    served = gapa_onnx.session(model.SerializeToString()).run(["y_var"], {"x": x})[0]
    np.testing.assert_array_equal(found["y_var"], served)
    assert found[made.template.sites[0].share].shape == (50, 1)


def test_only_the_rows_of_a_part_are_answered_for(made):
    x, _ = noisy_data(70, 3)
    held = hold_out(open_data({"x": x}, made.plan.source.inputs), made.data)
    run = FileRun(made.template, Numbers(made.calibration.fits), ["y"])
    parts = list(answers_in(run, made.calibration, held, held.counting))
    positions = np.concatenate([where for where, _ in parts])
    np.testing.assert_array_equal(np.sort(positions), np.flatnonzero(held.counting))
    found = np.concatenate([answers["y"] for _, answers in parts])
    np.testing.assert_allclose(found, run({"x": x[positions]})["y"], rtol=1e-6)


def test_also_where_the_model_fixes_its_batch():
    net = parse(
        "net (float[4, 2] x) => (float[4, 1] y) { z = MatMul(x, a)  h = Tanh(z)  y = MatMul(h, b) }",
        a=np.random.default_rng(0).normal(size=(2, 8)),
        b=np.random.default_rng(1).normal(size=(8, 1)),
    )
    fixed = steps(net, {"x": noisy_data(100, 1)[0]}, Settings(task="regression", **SMALL))
    held = hold_out(open_data({"x": noisy_data(40, 3)[0]}, fixed.plan.source.inputs), fixed.data)
    run = FileRun(fixed.template, Numbers(fixed.calibration.fits), ["y"])
    positions = [where for where, _ in answers_in(run, fixed.calibration, held, held.counting)]
    np.testing.assert_array_equal(np.sort(np.concatenate(positions)), np.flatnonzero(held.counting))


def test_the_tail_answers_for_rows_taken_in_as_the_file_does(made):
    x, _ = noisy_data(70, 3)
    held = hold_out(open_data({"x": x}, made.plan.source.inputs), made.data)
    sample = take_in(made.template, made.calibration, held, held.fitting, Purpose.SCALING | Purpose.NOISE)
    tail, fits = made.tail("y_var"), made.calibration.fits
    run = FileRun(made.template, Numbers(fits), ["y_var"])
    assert sample.rows(Purpose.NOISE) == held.fitting.sum()
    for batch in sample.batches(Purpose.SCALING):
        np.testing.assert_allclose(tail(batch, fits)["y_var"], run(batch.inputs)["y_var"], rtol=1e-5)


def test_nothing_that_is_fitted_depends_on_part_b():
    """Targets of part B may be anything: sites, scale, noise and thresholds stay."""
    x, _ = noisy_data(300, 1)
    more, y = noisy_data(200, 2)
    source = open_data({"x": more}, [value for value in steps_inputs()])
    held = hold_out(source, open_data({"x": x}, steps_inputs()), {"y": y})
    wild = np.where(held.counting[:, None], -y, y)
    models = [
        convert(noisy_net(), {"x": x}, targets=one, held_out={"x": more}, **SMALL).model for one in (y, wild)
    ]
    first, second = ({t.name: t for t in model.graph.initializer} for model in models)
    noise = [name for name in first if "/noise/" in name or "/gapa/" in name]
    assert noise and all(first[name] == second[name] for name in noise)
    assert read(models[0]).heads["y"].noise.rows == held.fitting.sum()


def steps_inputs():
    from gapa_onnx.model.load import load

    return load(noisy_net()).inputs


def test_rows_that_are_calibration_rows_are_refused():
    x, y = noisy_data(100, 1)
    with pytest.raises(UserError, match="40 of 40 held-out rows are calibration rows too"):
        convert(noisy_net(), {"x": x}, targets=y[:40], held_out={"x": x[:40]}, **SMALL)
    with pytest.raises(UserError, match="40 targets for 39 held-out rows"):
        convert(noisy_net(), {"x": x[50:]}, targets=y[:40], held_out={"x": x[:39]}, **SMALL)


def test_the_same_rows_the_same_bytes():
    x, _ = noisy_data(200, 1)
    more, y = noisy_data(100, 2)
    made = [convert(noisy_net(), {"x": x}, targets=y, held_out={"x": more}, **SMALL).model for _ in range(2)]
    assert isinstance(made[0], onnx.ModelProto)
    assert made[0].SerializeToString(deterministic=True) == made[1].SerializeToString(deterministic=True)
