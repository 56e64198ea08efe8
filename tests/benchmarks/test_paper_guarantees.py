"""The page about promises says what its lines say, and what the table judges intervals by."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
from support.paths import BENCHMARKS


@pytest.fixture
def page():
    spec = importlib.util.spec_from_file_location(
        "guarantees_page", BENCHMARKS / "paper" / "guarantees_page.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(**given: object) -> dict[str, str]:
    columns = (
        "coverage",
        "size",
        "winkler",
        "nll",
        "ece",
        "empty",
        "argmax_changed",
        "answered",
        "error",
        "nominal",
    )
    return {name: "" for name in columns} | {name: str(value) for name, value in given.items()}


def test_intervals_are_held_against_unscaled_ones(page):
    rows = [
        line(data="naval", split=split, method=method, coverage=0.9 + 0.01 * split, size=size, winkler=score)
        for split in (0, 1)
        for method, size, score in (("normalised", 2, 3), ("skewed", 3, 5), ("unscaled", 4, 6))
    ]
    text = page.section(rows)
    assert "| naval | 2 | 0.9050 ± 0.0050 | 0.9050 ± 0.0050 | 2 | 4 | 0.500 | 0.833 |" in text
    assert "0.500 in the mean" in text


def test_sets_stand_beside_temperature_scaling(page):
    sets = {
        "coverage": 0.95,
        "size": 1.25,
        "nll": 0.25,
        "ece": 0.01,
        "nominal": 0.95,
        "empty": 0,
        "argmax_changed": 0,
    }
    rows = [line(data="net", method=f"file, {kind}", **sets) for kind in page.SETS]
    rows.append(line(data="net", method="temperature", nll=0.26, ece=0.02))
    rows += [line(data="net", method="deferral", answered=0.875, error=0.04, flagged=f) for f in (0.04, 0.06)]
    text = page.section(rows)
    assert (
        "0.2500" in text
        and "0.2600" in text
        and "0.875, 0.0400 | 0.0500 ± 0.0100 |" in text
        and "empty sets: 0" in text
    )


def test_nothing_measured(page):
    assert "Not measured yet" in page.section([])


def test_the_interval_score(monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(BENCHMARKS / "paper"))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("guarantees", BENCHMARKS / "paper" / "guarantees.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "guarantees", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    lower, upper, y = np.array([0.0, 0, 0]), np.array([1.0, 1, 2]), np.array([0.5, 1.5, -0.25])
    found = module._judged(lower, upper, y)
    assert found == {
        "coverage": round(1 / 3, 5), "size": round(4 / 3, 7), "winkler": round((1 + 11 + 7) / 3, 7),
    }  # fmt: skip
