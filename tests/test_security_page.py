"""SECURITY.md is true: its evidence is there, its numbers are those of the code, and scanners see what it says."""

from __future__ import annotations

import ast
import re

import onnx
from support.paths import ROOT

from gapa_onnx.data.images import FORMATS
from gapa_onnx.model import sound
from gapa_onnx.op.contract import DOMAIN
from gapa_onnx.record import METADATA_KEY
from gapa_onnx.settle.scores import MOST_ORDINARY

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def missing(page: str) -> list[str]:
    """Evidence that is named and is not there: files, and tests in them."""
    found = []
    for name, _, test in re.findall(r"(tests/[\w/]+\.py)(::(\w+))?", page):
        path = ROOT / name
        tests = set()
        if path.is_file():
            tests = {
                node.name
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.FunctionDef)
            }
        if not path.is_file() or (test and test not in tests):
            found.append(f"{name}::{test}" if test else name)
    return found


def test_all_evidence_is_there():
    assert len(set(re.findall(r"tests/[\w/]+\.py", PAGE))) > 10 and PAGE.count("::test_") > 10
    assert missing(PAGE) == []
    assert [
        path for path in re.findall(r"`((?:gapa_onnx|runtime)/[\w/.]+)`", PAGE) if not (ROOT / path).is_file()
    ] == []


def test_evidence_that_is_not_there_is_seen():
    page = "tests/no_such_file.py, tests/test_security_page.py::test_no_such, tests/test_security_page.py::missing"
    assert missing(page) == ["tests/no_such_file.py", "tests/test_security_page.py::test_no_such"]


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
