"""What the scripts about language models measure, on a tiny decoder."""

from __future__ import annotations

import sys

import onnx
import pytest
from support.decoders import decoder, token_rows
from support.paths import BENCHMARKS

LANGUAGE = BENCHMARKS / "paper" / "language"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_a_conversion_is_measured_step_by_step(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(LANGUAGE))
    monkeypatch.delitem(sys.modules, "conversion", raising=False)
    import conversion

    path = tmp_path / "decoder.onnx"
    onnx.save(decoder(blocks=1), path)
    rows = token_rows(24, 8)
    figures = conversion.measured(path, rows, tmp_path / "out.onnx", m=50, k=5)
    assert list(figures["steps"]) == list(conversion.STEPS) and figures["failed"] == []
    steps = figures["steps"].values()
    assert sum(step["seconds"] for step in steps) <= figures["seconds"]
    assert sum(step["cpu"] for step in steps) <= figures["cpu"] + 0.1  # the clock of the CPU is coarse
    assert max(step["peak"][0] for step in steps) <= figures["peak"] * 1.01  # which is told in kilobytes
    assert figures["rows"] == 24
    figures["forward"], figures["forward_cpu"] = conversion.forward_seconds(path, rows, figures["batch"])
    lines = list(conversion.told(figures))
    assert [line.split()[0] for line in lines] == [*conversion.STEPS, "all", "forward"]
    assert conversion.compiler.load.__name__ == "load"  # nothing is watched any more
