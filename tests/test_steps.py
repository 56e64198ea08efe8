"""How often a conversion does what it does: one walk makes the file, rows are left out once, few sessions are opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnxruntime as ort
import pytest
from support.paths import MODELS

from gapa_onnx import compiler
from gapa_onnx.emit import guarding, rewrite
from gapa_onnx.fit.calibrate import SiteFit
from gapa_onnx.measure import agreement
from gapa_onnx.plan import analyse
from gapa_onnx.settle import settle


class Counted:
    """What was called how often, and every session: its model, its level, with or without the library."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()  #: rows, by site
        self.sessions: list[tuple[int, str, bool]] = []
        self.before_verify: int | None = None


@pytest.fixture
def counted(monkeypatch) -> Iterator[Counted]:
    found = Counted()
    registered: set[int] = set()

    def count(module, name: str, label: str) -> None:
        real = getattr(module, name)

        def wrapped(*args, **kwargs):
            found.calls[label] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)

    count(analyse, "propagate", "propagate")
    count(rewrite, "propagate", "propagate")
    count(compiler, "rewrite", "rewrite")
    count(compiler, "emit", "emit")
    count(compiler, "verify", "verify")
    count(settle, "leave_out", "leave_out")
    open_one = ort.InferenceSession.__init__

    def opened(self, model, options=None, *args, **kwargs):
        if found.calls["verify"] and found.before_verify is None:
            found.before_verify = len(found.sessions)
        level = str(options.graph_optimization_level) if options else ""
        found.sessions.append((hash(model), level, id(options) in registered))
        open_one(self, model, options, *args, **kwargs)

    monkeypatch.setattr(ort.InferenceSession, "__init__", opened)
    real_register, kept = agreement.register, []

    def register(options):
        kept.append(options)  # or its id would be given to another
        registered.add(id(options))
        return real_register(options)

    monkeypatch.setattr(agreement, "register", register)
    real_share = SiteFit.leave_one_out

    def leave_one_out(self, queries):
        found.left_out[self.site.output] += len(queries)
        return real_share(self, queries)

    monkeypatch.setattr(SiteFit, "leave_one_out", leave_one_out)
    guarding._left_by_optimiser.cache_clear()
    yield found


def test_digits_mlp(counted):
    conversion = compiler.convert(
        MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz", m=200, k=20
    )
    assert all(check.passed for check in conversion.checks) and len(conversion.plan.places) == 2
    assert counted.calls == {
        "propagate": 2, "rewrite": 1, "emit": 1, "verify": 1, "leave_out": 1,
    }  # fmt: skip
    rows = conversion.calibration.rows
    assert counted.left_out == {place.output: rows for place in conversion.plan.places}  # each row once
    assert counted.before_verify is not None and counted.before_verify <= 6
    verified = counted.sessions[counted.before_verify :]
    # The source at four levels, the file at two with the library and at four without, operators by themselves.
    assert len(verified) == len(set(verified)) == 11


def test_diabetes_with_targets(counted):
    calibration = np.load(MODELS / "diabetes_mlp_calibration.npz")
    (x,) = (calibration[name] for name in calibration.files)
    targets = np.random.default_rng(0).normal(size=len(x))
    conversion = compiler.convert(
        MODELS / "diabetes_mlp.onnx", {calibration.files[0]: x}, targets=targets, m=100, k=20
    )
    assert all(check.passed for check in conversion.checks)
    assert counted.calls == {
        "propagate": 2, "rewrite": 1, "emit": 1, "verify": 1, "leave_out": 1,
    }  # fmt: skip
    assert counted.left_out == {place.output: len(x) for place in conversion.plan.places}
    assert counted.before_verify is not None and counted.before_verify <= 6
    verified = counted.sessions[counted.before_verify :]
    assert len(verified) == len(set(verified))


def test_the_source_is_optimised_once_for_all_candidates_of_a_budget(counted, monkeypatch):
    from types import SimpleNamespace

    from gapa_onnx.measure import budget

    ratios = iter([3.0, 2.0, 1.1])
    monkeypatch.setattr(budget, "measure", lambda *a, **k: SimpleNamespace(ratio=next(ratios), control=1.0))
    views = []
    real = guarding.session_options
    monkeypatch.setattr(guarding, "session_options", lambda *a, **k: views.append(1) or real(*a, **k))
    compiler.convert(
        MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz", m=200, k=20, budget=1.5
    )
    assert len(views) == 1
