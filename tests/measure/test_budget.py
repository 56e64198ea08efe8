"""The choice of settings by their cost, with costs that are made up; `benchmarks/speed.py` has real ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.paths import MODELS

from gapa_onnx.compiler import convert
from gapa_onnx.errors import UserError
from gapa_onnx.measure import budget
from gapa_onnx.measure.bench import Refusal
from gapa_onnx.measure.budget import candidates
from gapa_onnx.op.contract import DOMAIN, PREPARED, SCHEMAS
from gapa_onnx.record import read
from gapa_onnx.settings import Settings

CALIBRATION = MODELS / "digits_mlp_calibration.npz"


def cost(model) -> float:
    """1 and something for each site: its inducing points, and its neighbours if they are solved each time."""
    sizes = {t.name: list(t.dims) for t in model.graph.initializer}
    cached = {SCHEMAS[kind].name for kind in ("local", PREPARED)}
    total = 1.0
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type in {schema.name for schema in SCHEMAS.values()}:
            points = next(sizes[name][0] for name in node.input if name.endswith("/points"))
            total += points / 1000 + (0 if node.op_type in cached else 5)
    return total


@pytest.fixture
def measured(monkeypatch) -> list:
    asked = []

    def fake(source, converted, *, batch, data, parts):
        asked.append(batch)
        return SimpleNamespace(ratio=cost(converted), control=1.001)

    monkeypatch.setattr(budget, "measure", fake)
    return asked


def test_the_most_exact_that_fits_is_taken(measured):
    for allowed, solver, m in ((7, "exact", 400), (1.45, "cached", 400), (1.3, "cached", 250)):
        conversion = convert(
            MODELS / "digits_mlp.onnx",
            CALIBRATION,
            budget=allowed,
            m=400,
            k=20,
            sites="last",
            witnesses="none",
        )
        record = read(conversion.model)
        assert (record.settings["solver"], record.settings["m"]) == (solver, m)
        assert record.budget.limit == allowed
        trials = record.budget.trials
        last = trials[-1]
        assert last.ratio <= allowed and last.solver == solver and last.control == 1.001
        assert all(trial.ratio > allowed for trial in trials[:-1])
        assert last.share_median >= trials[0].share_median * 0.9
        assert all(check.passed for check in conversion.checks)


def test_one_site_in_place_of_several(measured):
    conversion = convert(MODELS / "digits_mlp.onnx", CALIBRATION, budget=1.1, m=200, k=20, sites="all")
    assert len(conversion.plan.places) == 1


def test_witnesses_are_given_up_before_points_are_few(measured):
    for allowed, m, witnesses in ((1.85, 400, "auto"), (1.45, 400, "none"), (1.3, 250, "none")):
        conversion = convert(MODELS / "digits_mlp.onnx", CALIBRATION, budget=allowed, m=400, k=20)
        record = read(conversion.model)
        assert (record.settings["m"], record.settings["witnesses"]) == (m, witnesses)
        assert len(record.witnesses) == (witnesses == "auto") and len(record.sites) == 1
        assert all(check.passed for check in conversion.checks)


def test_candidates_get_cheaper_and_are_all_different():
    every = list(candidates(Settings(m=2000, k=50, index="hnsw"), sites=2))
    assert len(set(every)) == len(every)
    assert every[0] == Settings(m=2000, k=50, index="hnsw", solver="exact")
    several = [s for s in every if s.sites == "auto"]
    assert several == every[: len(several)] and min(s.m for s in several) == 1000
    found = every[len(several) :]
    assert {s.sites for s in found} == {"last"} and found[0].m == 2000
    assert [s.m for s in found] == sorted((s.m for s in found), reverse=True)
    assert [s.k for s in found] == sorted((s.k for s in found), reverse=True)
    assert all(s.k <= s.m for s in found)


def test_what_is_left_open_takes_the_best_first():
    found = list(candidates(Settings(), sites=1))
    assert [(s.solver, s.m) for s in found[:3]] == [("exact", 4000), ("cached", 4000), ("cached", 2500)]
    assert next(iter(candidates(Settings(solver="cached"), sites=1))).solver == "cached"
    every = list(candidates(Settings(inducing="all"), sites=1))
    assert [s.inducing for s in every[:3]] == ["all", "all", "kmeans"] and every[2].m == 4000


def test_a_budget_that_cannot_be_kept(measured):
    with pytest.raises(UserError, match="no settings stay within a budget of 1.01") as caught:
        convert(MODELS / "digits_mlp.onnx", CALIBRATION, budget=1.01, m=200, k=20)
    assert "`budget=1.1" in caught.value.hint
    with pytest.raises(UserError, match="does all that its source does"):
        convert(MODELS / "digits_mlp.onnx", CALIBRATION, budget=0.9)


def test_a_machine_that_is_too_busy(monkeypatch):
    refusal = Refusal(1, 1, SimpleNamespace(control=1.4))
    monkeypatch.setattr(budget, "measure", lambda *a, **k: refusal)
    with pytest.raises(UserError, match="too busy"):
        convert(MODELS / "digits_mlp.onnx", CALIBRATION, budget=2.0, m=200, k=20)


def test_the_number_of_points_by_width():
    assert [Settings().points_for(width) for width in (10, 200, 4096)] == [1000, 1000, 1000]
    assert [Settings().points_for(width, many=True) for width in (10, 200, 256)] == [2000, 1750, 1367]
    assert [Settings(k=20).points_for(200, witness=True, pooled=pooled) for pooled in (True, False)] == [
        400,
        360,
    ]
    assert Settings(k=100).points_for(10) == 2000 and Settings(m=300).points_for(4096) == 300
    assert Settings(m="500").m == 500  # as the command line gives it


def test_a_named_site_stays_where_its_witnesses_go():
    every = list(candidates(Settings(m=2000, k=50, sites="h:pooled"), sites=1, witnesses=3))
    assert {s.sites for s in every} == {"h:pooled"}
    heard = [s for s in every if s.witnesses == "auto"]
    assert heard == every[: len(heard)] and min(s.m for s in heard) == 1000
    assert every[len(heard)].m == 2000 and every[-1].k == 10
