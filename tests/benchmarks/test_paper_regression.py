"""The regression benchmark's own arithmetic: the noise that all methods get, and the ranks on its page."""

from __future__ import annotations

import numpy as np
import pytest
from support.paths import BENCHMARKS

PAPER = BENCHMARKS / "paper"


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    for folder in (PAPER.parent, PAPER):
        monkeypatch.syspath_prepend(str(folder))


def lines(nll: dict[str, float]) -> list[dict[str, str]]:
    import regression_page as page

    versions = dict.fromkeys(("torch", "laplace_torch", "onnxruntime", "gapa_onnx"), "1")
    sizes = dict.fromkeys(("rows_fitted", "rows_held_out", "rows_test"), "10")
    found = []
    for method in page.METHODS:
        for split in range(2):
            value = nll.get(method, 9.0) + split
            figures = {"nll": value, "crps": 1.0, "cqm": value / 100, "rmse": 1.0}
            row = {"dataset": "yacht", "split": str(split), "method": method}
            found.append(row | {name: str(number) for name, number in figures.items()} | versions | sizes)
    return found


def test_ranks_and_means_on_the_page():
    import regression_page as page

    text = page.section(lines({page.OURS: 2.0, "Ensemble": 1.0, "MAP + noise head": 1.5, "MAP": 3.0}))
    assert "NLL on 1 of 1 of Gal's sets (yacht 2), where two kinds" in text
    assert "on 1 of 1 beside *Ensemble* alone, on 1 of 1 beside *Gaussian ensemble* alone" in text
    assert "on 1 of 1 among methods that need one network" in text
    assert "on 0 of 1 if MAP with the same noise head counts as a peer" in text
    assert "NLL is below MAP's on 1 of 1, its CQM on 1 of 1." in text
    assert "| GAPA + noise head | *2.500 ± 0.500* |" in text and "| Ensemble | **1.500 ± 0.500** |" in text


def test_error_bars_that_are_all_right_still_have_a_cqm():
    import regression_page as page

    rows = [row | {"rows_test": "400"} for row in lines({})]
    # E ∫ |F_n(α) − α| dα → √(2/π) ∫ √(α (1 − α) / n) dα = √(2/π) π / 8 / √n; 2000 draws of ± .007 are off by .0005
    expected = np.sqrt(2 / np.pi) * np.pi / 8 / 20
    found = float(page._least_cqm(rows, ["yacht"]).split("yacht ")[1].split(" ±")[0])
    assert abs(found - expected) < 0.0005 + 0.0005  # and three digits are printed


def test_a_set_with_missing_lines_is_named_and_not_ranked():
    import regression_page as page

    text = page.section(lines({})[:-1])
    assert "Not measured yet" in text
    other = [row | {"dataset": "energy"} for row in lines({})]
    assert "Not all methods have been run on yacht" in page.section(lines({})[:-1] + other)


def test_the_constant_noise_is_the_most_likely_one():
    pytest.importorskip("torch")
    import regression_peers as peers

    generator = np.random.default_rng(0)
    var = generator.uniform(0, 1, 300)
    y = np.sqrt(var + 0.3) * generator.normal(size=300)
    noise = peers.best_noise((np.zeros(300), var), y)
    near = [peers.likelihood((np.zeros(300), var + noise * factor), y) for factor in (0.98, 1.0, 1.02)]
    assert near[1] < min(near[0], near[2])
