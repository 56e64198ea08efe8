"""benchmarks/paper/readings.py beside converted files: its variances are those that a file answers with."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from support.paths import BENCHMARKS

import gapa_onnx
from gapa_onnx.sessions.runtime import library_path

FOLDERS = [BENCHMARKS / name for name in ("", "paper")]


@pytest.fixture
def module(monkeypatch):
    """Import a module of benchmarks/paper by name, as the scripts there do; forgotten after the test."""
    before = set(sys.modules)
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if any(str(folder) in str(getattr(sys.modules[name], "__file__", "")) for folder in FOLDERS):
            del sys.modules[name]


@pytest.fixture
def observed(module):
    """A small tanh network, seen on 300 rows, and those rows."""
    readings, backbones = module("readings"), module("backbones")
    generator = np.random.default_rng(3)
    sizes = (8, 7, 6, 4)
    weights = [
        (generator.normal(size=(a, b)).astype(np.float32), generator.normal(size=b).astype(np.float32))
        for a, b in zip(sizes, sizes[1:])
    ]
    rows = generator.normal(size=(300, 8)).astype(np.float32)
    known, strange = rows[:20] + np.float32(0.01), rows[:30] * np.float32(3)
    model = backbones.as_onnx(weights)
    labels = np.zeros(20, np.int64)
    return (
        model,
        rows,
        readings.observed(model, "tiny", "noise", (rows, known, strange), labels, left_out_rows=50),
    )


@pytest.mark.skipif(library_path() is None, reason="needs the native library")
@pytest.mark.parametrize(
    "sites, solver",
    [
        ("all", "exact"),
        ("h2", "exact"),
        ("h2", "cached"),
    ],
)
def test_variances_are_those_of_a_converted_file(observed, module, tmp_path, sites, solver):
    readings = module("readings")
    model, rows, subject = observed
    chosen = {"inducing": "random", "m": 40, "k": 10, "solver": solver, "seed": 0}
    reading = readings.Reading(sites=(0, 1) if sites == "all" else None, multiple=1.0, target=None, **chosen)
    source, path = tmp_path / "tiny.onnx", tmp_path / "tiny.gapa.onnx"
    source.write_bytes(model.SerializeToString())
    numbers = {"length_scale": subject.sites[1].median} if sites == "h2" else {}
    alone = {"witnesses": "none", "metric": "euclidean", "scale": "none"}
    gapa_onnx.convert(source, {"x": rows}, path, sites=sites, **alone, **numbers, **chosen)
    expected = gapa_onnx.session(path).run(["logits_var"], {"x": rows[:20] + np.float32(0.01)})[0]
    # float32 all the way against float64 behind the operator
    np.testing.assert_allclose(readings.variances(subject, reading)[0], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.skipif(library_path() is None, reason="needs the native library")
def test_scale_makes_the_median_share_its_target(observed, module):
    readings = module("readings")
    subject = observed[2]
    reading = readings.Reading(inducing="random", m=40, k=10, target=0.1)
    plain = readings.variances(subject, readings.replace(reading, target=None))
    scaled = readings.variances(subject, reading)
    tau = 0.1 / readings.shares(subject, 1, reading).median
    np.testing.assert_allclose(scaled[1], tau * plain[1], rtol=1e-12)
    capped = readings.variances(subject, readings.replace(reading, target=0.9, capped=True))
    prior = subject.sites[1].prior_var @ subject.sites[1].weight.astype(np.float64) ** 2
    assert capped[1].max(axis=0) == pytest.approx(prior)  # what is far has all of the prior variance


def test_losses_are_against_the_best_of_the_same_network(module):
    tables = module("ablation_tables")
    rows = [
        {"network": "a", "data": "x", "series": "", "value": "1", "bald": ".9", "nll": "2", "map_nll": "1"},
        {"network": "a", "data": "x", "series": "", "value": "2", "bald": ".8", "nll": "1", "map_nll": "1"},
        {"network": "b", "data": "x", "series": "", "value": "1", "bald": ".5", "nll": "2", "map_nll": "3"},
        {"network": "b", "data": "x", "series": "", "value": "2", "bald": ".7", "nll": "4", "map_nll": "3"},
    ]
    mean, worst, where = tables.losses(rows, ("", "1"), "bald")
    assert (mean, worst, where) == (pytest.approx(0.7), pytest.approx(0.2), "b on x")
    mean, worst, where = tables.losses(rows, ("", "1"), "nll")
    assert (mean, worst, where) == (pytest.approx(0.0), pytest.approx(1.0), "a on x")


def test_the_page_is_what_the_results_say(module):
    defaults = module("defaults")
    assert defaults.PAGE.read_text() == defaults.page()
