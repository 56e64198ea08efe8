"""Files as strangers load them: without our library, at every optimisation level, a few rows and one row."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.small_models import parse

import gapa_onnx
from gapa_onnx.measure import strangers
from gapa_onnx.measure.agreement import LEVELS
from gapa_onnx.measure.verify import verify
from gapa_onnx.op.contract import SCHEMAS
from gapa_onnx.record import read
from gapa_onnx.sessions.runtime import library_path

RUNS = "runs without the library, at every optimisation"
AGREES = "whole graph: native = portable"
NET = "net (float[%s, 4] x) => (float[%s, 3] y) { z = MatMul(x, a)  h = Tanh(z)  y = MatMul(h, b) }"
ROWS = {"x": np.random.default_rng(1).normal(size=(60, 4)).astype(np.float32)}


def net(rows: str = "n") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    return parse(NET % (rows, rows), a=rng.normal(size=(4, 6)), b=rng.normal(size=(6, 3)))


@pytest.fixture(scope="module")
def good() -> bytes:
    return gapa_onnx.convert(net(), ROWS, m=30, k=6, solver="exact", index="flat").model.SerializeToString()


@pytest.fixture
def converted(good: bytes) -> onnx.ModelProto:
    return onnx.load_model_from_string(good)


def checks_of(converted: onnx.ModelProto) -> dict[str, gapa_onnx.measure.verify.Check]:
    return {check.name: check for check in verify(net(), converted, [ROWS])}


def test_a_good_file(converted):
    checks = checks_of(converted)
    assert checks[RUNS].passed and ", ".join(LEVELS) in checks[RUNS].detail
    assert "2 and 1 row(s)" in checks[RUNS].detail
    if library_path() is not None:
        assert checks[AGREES].passed


def test_a_file_without_its_functions_fails_only_for_strangers(converted):
    """With the library it runs as before; that is why strangers are asked."""
    if library_path() is None:
        pytest.skip("needs the native library")
    node = helper.make_node("NoSuchOperator", ["query"], ["nothing"], domain="com.example")
    (function,) = (f for f in converted.functions if f.name == SCHEMAS["flat"].name)
    function.node.append(node)
    batches = [ROWS]
    asked = strangers.questions(net(), batches)
    answers = strangers.run(net(), asked.batches, level="none")
    asked = asked.answered(none=answers, all=answers)
    found = strangers.checks(read(converted), converted, converted, asked, {"none": answers, "all": answers})
    assert [check.name for check in found] == [RUNS] and not found[0].passed
    assert all(f"optimisation {level}: " in found[0].detail for level in LEVELS)


@pytest.mark.parametrize("factor, passes", [(1.01, False), (1.00001, True)])
def test_a_function_that_answers_otherwise(converted, factor, passes):
    """A share of the portable path that is off by 1% moves variances by as much."""
    if library_path() is None:
        pytest.skip("needs the native library")
    (function,) = (f for f in converted.functions if f.name == SCHEMAS["flat"].name)
    share = function.output[0]
    (at,) = (i for i, node in enumerate(function.node) if share in node.output)
    place = list(function.node[at].output).index(share)
    function.node[at].output[place] = "clean"
    function.node.append(helper.make_node("Constant", [], ["factor"], value_float=factor))
    function.node.append(helper.make_node("Mul", ["clean", "factor"], [share]))
    checks = checks_of(converted)
    assert checks[RUNS].passed and checks[AGREES].passed == passes
    if not passes:
        assert "y_var at optimisation" in checks[AGREES].detail


def test_questions_of_a_free_batch():
    asked = strangers.questions(net(), [ROWS])
    some, one = (batch["x"] for batch in asked.batches)
    x = ROWS["x"]
    np.testing.assert_array_equal(some, (x + np.roll(x, -1, 0) - np.roll(x, -2, 0))[:2])
    np.testing.assert_array_equal(one, x[:1])
    assert asked.rows == "2 and 1" and set(asked.expected) == {"basic", "extended"}


def test_questions_of_a_fixed_batch():
    asked = strangers.questions(net("5"), [{"x": ROWS["x"][:5]}])
    assert [batch["x"].shape for batch in asked.batches] == [(5, 4)] * 2


def test_what_the_source_does_not_answer_is_not_asked():
    """A model of rows in fours: neither two rows nor one."""
    model = parse(
        "net (float[n, 4] x) => (float[m, 3] y) { r = Reshape(x, fours)  z = MatMul(r, a)  y = Tanh(z) }",
        a=np.random.default_rng(0).normal(size=(16, 3)),
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 16], np.int64), "fours"))
    asked = strangers.questions(model, [{"x": ROWS["x"][:8]}])
    assert [batch["x"].shape for batch in asked.batches] == [(8, 4)]


def test_whole_numbers_are_asked_as_they_are():
    batch = {"x": ROWS["x"], "ids": np.arange(60)}
    made = strangers._between([batch])
    assert made["ids"] is batch["ids"] and not np.array_equal(made["x"], batch["x"])


def test_levels_are_compared_each_with_itself(converted):
    """Means differ between levels, and behind a steep slope variances by more than two paths may; at one level they
    may not."""
    record = read(converted)
    plain, steep = (
        [
            {**answer, "y_var": factor * answer["y_var"]}
            for answer in strangers.run(converted, [ROWS], level="none")
        ]
        for factor in (1, 1.1)
    )
    alike = {"none": [_with_shares(record, answer) for answer in plain], "all": steep}
    assert strangers._agreement(record, converted, alike, {**alike, "basic": steep, "extended": steep}).passed
    found = strangers._agreement(record, converted, alike, {**alike, "all": plain})
    assert not found.passed and "optimisation all" in found.detail


def _with_shares(record, answer):
    return {**answer, **{site.share: np.ones((60, 1), np.float32) for site in record.sites}}
