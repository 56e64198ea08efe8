"""The table of real models: what it counts as covered and as said, its totals, and one row from end to end."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx.parser
import pytest
from support.paths import BENCHMARKS

MODEL = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }'


@pytest.fixture
def module(monkeypatch):
    """A module of benchmarks/ by its name, as its scripts see it."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def answers(var: list[float]) -> tuple[list[dict], SimpleNamespace]:
    """Four rows of an output whose third element never varies, with the same variances in every row."""
    mean = np.float32([[1, 5, 7], [2, 6, 7], [3, 5, 7], [4, 6, 7]])
    held_out = [{"x": mean[:2]}, {"x": mean[2:]}]
    found = [{"y": batch["x"], "y_var": np.tile(np.float32(var), (2, 1))} for batch in held_out]
    return found, SimpleNamespace(free=True, held_out=held_out)


@pytest.mark.parametrize(
    ("var", "share"), [([1, 1, 0], 1.0), ([1, 0, 1], 0.5), ([0, 0, 1], 0.0), ([float("nan"), 1, 1], 0.5)]
)
def test_covered_is_the_share_of_what_varies(module, var, share):
    rows = module("real_models_row")
    head = SimpleNamespace(outputs={"var": "y_var"}, link="identity")
    found, sets = answers(var)
    assert rows._covered("y", {"y": head}, found, sets)["share"] == share


def test_an_output_without_a_variance_is_open_or_has_a_score(module):
    rows = module("real_models_row")
    found, sets = answers([1, 1, 1])
    assert rows._covered("y", {}, found, sets) == {"share": 0.0, "elements": 2, "score_only": False}
    head = SimpleNamespace(outputs={"score": "y_score", "ood": "y_ood"}, link="identity")
    assert rows._covered("y", {"y": head}, found, sets)["score_only"]


def test_what_is_said_is_what_convert_says(module):
    rows = module("real_models_row")
    plan = SimpleNamespace(certain_outputs=("box",), refused=())
    check = SimpleNamespace(name="covered", detail="half of y", passed=False)
    conversion = SimpleNamespace(plan=plan, checks=(check,))
    says = rows.announced(conversion, {"y": SimpleNamespace(outputs={"var": "y_var"})})
    assert says == ["box: no site reaches it, so it gets no variance", "covered: half of y"]


def test_auroc_is_the_share_of_pairs_in_order(module):
    rows, rng = module("real_models_row"), np.random.default_rng(0)
    known, strange = rng.integers(0, 5, 30), rng.integers(1, 7, 40)
    pairs = [(s > k) + 0.5 * (s == k) for s in strange for k in known]
    assert rows.auroc(known, strange) == pytest.approx(np.mean(pairs), rel=1e-12)
    assert rows.auroc(known, known) == 0.5


def test_rows_are_the_same_in_every_run_and_strange_ones_are_not(module):
    data, proto = module("real_models_data"), onnx.parser.parse_model(MODEL)
    once, again = data.sets("some model", proto), data.sets("some model", proto)
    assert once.kind == "Gaussian" and once.free
    assert sum(len(batch["x"]) for batch in once.calibration) >= 200
    for mine, other in zip(once.held_out, again.held_out):
        assert (mine["x"] == other["x"]).all() and mine["x"].dtype == np.float32
    assert len(once.strange) == 3
    known = np.concatenate([batch["x"] for batch in once.held_out])
    for what, batches in once.strange.items():
        strange = np.concatenate([batch["x"] for batch in batches])
        assert strange.shape == known.shape and (strange != known).any(), what


def test_totals_count_what_must_not_be(module):
    page = module("real_models_page")
    cover = {"y": {"share": 1.0, "elements": 3, "score_only": False}}
    rows = [
        {"kind": "zoo", "model": "a__b", "state": "covered", "cover": cover, "auroc": {"noise": 0.95}},
        {"kind": "zoo", "model": "c__d", "state": "uncovered, NOT SAID", "auroc": {"noise": None}},
        {"kind": "zoo", "model": "e__f", "state": "TRACEBACK", "says": ["ValueError"]},
        {"kind": "zoo", "model": "g__h", "state": "does not run", "says": ["not converted"]},
    ]
    text = page.page(rows)
    for sentence in ("fully covered: 33.3%", "without a word: 1 ", "tracebacks: 1 ", "without a score: 1 "):
        assert sentence in text
    assert "**TRACEBACK**" in text and "100%" in text


def test_one_row_from_end_to_end(tmp_path):
    out = tmp_path / "row.json"
    command = [sys.executable, str(BENCHMARKS / "real_models_row.py"), "example", "diabetes_mlp", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    row = json.loads(out.read_text())
    assert row["state"] == "covered" and row["tasks"] == {"progression": "regression"}
    assert row["cover"]["progression"]["share"] == 1 and row["auroc"]["shifted"] > 0.9
