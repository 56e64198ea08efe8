from __future__ import annotations
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import pytest
import rule_checks
from rule_cases import CASES, Case
from gapa_onnx.rules import TABLE, Rule

every_case = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])

def test_every_rule_has_a_case():
    rules = {op for (_, op), entry in TABLE.items() if isinstance(entry, Rule)}
    assert rules == {case.op_type for case in CASES}
    assert all(case.node.op_type == case.op_type for case in CASES)

@every_case
def test_jacobian(case: Case):
    rule_checks.check_jacobian(case)
@every_case
def test_small_variances_by_sampling(case: Case):
    rule_checks.check_monte_carlo(case, rule_checks.SMALL_STD, 1500)
@pytest.mark.parametrize("case", [c for c in CASES if rule_checks.is_exact(c)], ids=lambda c: c.id)
def test_large(case: Case):
    rule_checks.check_monte_carlo(case, 1, 3000)
@every_case
def test_properties(case: Case):
    rule_checks.check_properties(case)
@every_case
def test_graph(case: Case):
    rule_checks.check_graph(case)
@every_case
@pytest.mark.parametrize("shapes", ["symbolic", "unknown"])
def test_shapes(case: Case, shapes):
    r = rule_checks.check_shapes(case, shapes)
    if r: pytest.skip(r)
