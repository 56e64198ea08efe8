"""The interval of benchmarks/costs.py."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def costs(monkeypatch):
    pytest.importorskip("scipy")
    spec = importlib.util.spec_from_file_location("costs", BENCHMARKS / "costs.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "costs", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_interval_holds_as_often_as_it_says(costs):
    """Of means of 9 normal numbers, to three standard errors over 4000 draws."""
    draws = np.random.default_rng(0).normal(2.9, 0.05, (4000, 9))
    held = np.mean([low <= 2.9 <= high for low, high in map(costs.interval, draws)])
    assert abs(held - 0.95) < 3 * np.sqrt(0.95 * 0.05 / len(draws))


def test_one_process_has_no_interval(costs):
    assert np.isnan(costs.interval(np.array([1.0]))).all()


def test_every_case_has_a_name_of_its_own(costs):
    assert len({case.name for case in costs.CASES}) == len(costs.CASES)
