"""SECURITY.md is true: its evidence is there, its numbers are those of the code, and scanners see what it says."""

from __future__ import annotations

import re

import onnx
from support.paths import ROOT

from gapa_onnx.data.images import FORMATS
from gapa_onnx.model import sound
from gapa_onnx.op.contract import DOMAIN
from gapa_onnx.record import METADATA_KEY
from gapa_onnx.settle.scores import MOST_ORDINARY

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_all_evidence_is_there():
    named = re.findall(r"tests/[\w/]+\.py", PAGE)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert [
        path for path in re.findall(r"`((?:gapa_onnx|runtime)/[\w/.]+)`", PAGE) if not (ROOT / path).is_file()
    ] == []


def test_its_numbers_are_those_of_the_code():
    assert f"at most {sound.MOST_NODES:,}, calls at most {sound.DEEPEST} deep" in PAGE
    assert f"up to {MOST_ORDINARY['rows']:,} scores of rows" in PAGE
    assert f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]} alone" in PAGE


def test_a_scanner_sees_what_is_said(digits_file):
    model = onnx.load(digits_file)
    assert {function.domain for function in model.functions} == {DOMAIN}
    assert {node.domain for function in model.functions for node in function.node} <= {"", "ai.onnx"}
    assert [entry.key for entry in model.metadata_props] == [METADATA_KEY]
    sound.require_sound(model, "the file")  # no data twice
