"""The soak finds what it is for: an answer that changes, a session that fails, memory that grows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from soak.soak import Case, Soak, answer, opened
from support.native_models import LIBRARY, D, model, tensors

pytestmark = pytest.mark.skipif(
    LIBRARY is None or not Path("/proc/self/status").exists(), reason="native, Linux"
)
SECONDS = 1.0


@pytest.fixture
def case(tmp_path) -> Case:
    path = tmp_path / "flat.onnx"
    path.write_bytes(model("flat", tensors("flat")))
    rows = np.random.default_rng(0).normal(size=(64, D)).astype(np.float32)
    made = Case("operator flat", path, [{"query": rows[:size]} for size in (1, 64)])
    made.expected = [answer(opened(made, 1), feed) for feed in made.feeds]
    return made


def test_a_sound_library_gives_the_same_bits(case):
    soak = Soak([case], cores=2)
    soak.run(SECONDS)
    assert soak.errors == [] and soak.differences.total() == 0
    assert soak.calls.total() > 50 and 8 <= soak.sessions < soak.calls.total() and len(soak.readings) >= 1


def test_one_bit_is_a_difference(case):
    s, neighbours = case.expected[1]
    wrong = dataclasses.replace(case, expected=[case.expected[0], [bytes([s[0] ^ 1]) + s[1:], neighbours]])
    soak = Soak([wrong], cores=2)
    soak.run(SECONDS)
    assert 0 < soak.differences.total() < soak.calls.total()


def test_memory_is_flat_where_nothing_is_kept(case):
    soak = Soak([case], cores=2)
    soak.run(SECONDS, step=SECONDS / 10)
    assert abs(soak.growth()) < 5


def test_a_file_that_no_longer_loads_ends_the_run_with_what_was_said(case):
    case.path.write_bytes(b"damaged")
    soak = Soak([case], cores=2)
    soak.run(60)
    assert soak.errors


def test_memory_that_is_not_given_back_is_growth(case):
    kept = []

    class Leaking(Soak):
        def _read(self, second: float) -> None:
            kept.append(np.ones(8 << 20, np.uint8))
            super()._read(second)

    soak = Leaking([case], cores=2)
    soak.run(SECONDS, step=SECONDS / 10)
    assert len(soak.readings) >= 4
    assert soak.growth() > 5
