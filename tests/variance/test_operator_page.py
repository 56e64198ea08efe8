"""Every operator of the ONNX standard has a behaviour, and the operator page says which."""

from __future__ import annotations

import re

import onnx
import onnxruntime.capi.onnxruntime_pybind11_state as runtime_state
import pytest
from support.paths import ROOT

from gapa_onnx.model.load import OLDEST_OPSET
from gapa_onnx.variance.rules import TABLE, Deterministic, Refusal, Rule, page

PAGE = ROOT / "docs" / "operators.md"


def standard_operators() -> set[tuple[str, str]]:
    """All that opset 7 or a newer one has, also those that were deprecated on the way."""
    found = set()
    for schema in onnx.defs.get_all_schemas_with_history():
        newest = onnx.defs.get_schema(schema.name, schema.domain)
        gone = newest.deprecated and newest.since_version <= OLDEST_OPSET
        if schema.domain in page.STANDARD and not (gone and schema.domain == ""):
            found.add((schema.domain, schema.name))
    return found


def test_every_operator_of_the_standard_has_a_behaviour() -> None:
    operators = standard_operators()
    assert {("", "Upsample"), ("", "Scatter")} <= operators and len(operators) > 200
    assert operators - set(TABLE) - page.spelled_out() == set()
    assert sum(domain == "ai.onnx.ml" for domain, _ in operators) >= 18


def test_every_operator_of_onnxruntime_s_own_domain_has_a_behaviour() -> None:
    schemas = getattr(runtime_state, "get_all_operator_schema", None)
    if schemas is None:
        pytest.skip("this onnxruntime does not list its operators")
    own = {("com.microsoft", schema.name) for schema in schemas() if schema.domain == "com.microsoft"}
    assert len(own) > 100
    assert own - set(TABLE) == set()


def test_every_behaviour_says_why() -> None:
    for key, entry in TABLE.items():
        reason = entry.formula if isinstance(entry, Rule) else entry.reason
        assert isinstance(entry, Rule | Deterministic | Refusal) and reason.strip(), key


def test_the_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    written_for = int(re.search(r"opsets 7 to (\d+)", text).group(1))
    if written_for != onnx.defs.onnx_opset_version():
        pytest.skip(f"the page was written with the operators of opset {written_for}")
    assert text == page.page(), "run: python -m gapa_onnx.variance.rules.page > docs/operators.md"


def test_every_operator_is_on_the_page_once() -> None:
    text = page.page()
    rows = re.findall(
        r"^\| (\w+) \| (rule|spelled out|deterministic|refused) \| ([a-z ]*) \| .+ \|$", text, re.M
    )
    assert len(rows) == len(TABLE) + len(page.spelled_out())
    assert all(
        (behaviour in ("rule", "spelled out")) == bool(accuracy.strip()) for _, behaviour, accuracy in rows
    )
