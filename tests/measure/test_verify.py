"""Step 7, verify: a file that breaks one promise fails the check of that promise, and no other."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.small_models import parse

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.measure.provenance import AS_WRITTEN, HOLDS_SOURCE
from gapa_onnx.measure.verify import verify
from gapa_onnx.op.contract import SCHEMAS

NET = """net (float[n, 2] x) => (float[n, 1] y, float[n, 3] u)
    { z = MatMul(x, w1)  h = Tanh(z)  y = MatMul(h, w2)  u = MatMul(h, w3) }"""


@pytest.fixture(scope="module")
def source() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    return parse(NET, **{name: rng.normal(size=shape) for name, shape in SHAPES.items()})


SHAPES = {"w1": (2, 5), "w2": (5, 1), "w3": (5, 3)}
ROWS = {"x": np.random.default_rng(1).normal(size=(80, 2)).astype(np.float32)}


@pytest.fixture(scope="module")
def good(source: onnx.ModelProto) -> bytes:
    conversion = gapa_onnx.convert(source, ROWS, m=30, k=6, task="none", solver="exact", index="flat")
    return conversion.model.SerializeToString()


@pytest.fixture
def converted(good: bytes) -> onnx.ModelProto:
    """A copy of its own for every test to damage."""
    return onnx.load_model_from_string(good)


def failed(source: onnx.ModelProto, converted: onnx.ModelProto) -> set[str]:
    """Checks that fail, but for the one that any change makes fail."""
    found = {check.name for check in verify(source, converted, [ROWS]) if not check.passed}
    assert AS_WRITTEN in found
    return found - {AS_WRITTEN}


def damage(nodes, tensor: str, *added: tuple[str, Iterable[str]]) -> None:
    """Put nodes between a tensor and whoever makes it: each reads what the one before it wrote, and more."""
    (at,) = (i for i, node in enumerate(nodes) if tensor in node.output)
    place = list(nodes[at].output).index(tensor)
    nodes[at].output[place] = current = f"{tensor}/clean"
    for step, (op, further) in enumerate(added, 1):
        made = tensor if step == len(added) else f"{tensor}/damaged/{step}"
        nodes.insert(
            at + step, helper.make_node(op, [current, *further], [made], name=f"{tensor}/damage/{step}")
        )
        current = made


def constant(converted: onnx.ModelProto, name: str, value: float) -> str:
    converted.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
    return name


def test_a_good_file_passes(source, converted):
    checks = verify(source, converted, [ROWS])
    assert [check for check in checks if not check.passed] == []
    assert len({check.name for check in checks}) == len(checks) >= 4


def test_one_bit_of_an_output(source, converted):
    damage(
        converted.graph.node, "u", ("Mul", [constant(converted, "factor", np.nextafter(np.float32(1), 2))])
    )
    checks = {check.name: check for check in verify(source, converted, [ROWS]) if not check.passed}
    assert {AS_WRITTEN, HOLDS_SOURCE} <= set(checks)  # who makes the tensor has written another name
    del checks[AS_WRITTEN], checks[HOLDS_SOURCE]
    bits = {f"source outputs bit-equal, optimisation {level}" for level in ("none", "all")}
    assert set(checks) == bits | {"runs without the library, at every optimisation"}  # which changes as much
    assert all("u" in check.detail and "y" not in check.detail for check in checks.values())


def test_a_negative_variance(source, converted):
    damage(converted.graph.node, "y_var", ("Neg", []))
    assert failed(source, converted) == {"variances finite and not negative"}


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_variance_that_is_not_a_number(source, converted, value):
    damage(converted.graph.node, "u_var", ("Add", [constant(converted, "nothing", value)]))
    assert failed(source, converted) == {"variances finite and not negative"}


@pytest.mark.parametrize("factor, passes", [(1.001, False), (1.00001, True)])
def test_a_wrong_share(source, converted, factor, passes):
    """Of the portable function; where the library is at hand, outputs come from that."""
    schema = SCHEMAS["flat"]
    (function,) = (function for function in converted.functions if function.name == schema.name)
    value = helper.make_node("Constant", [], ["factor"], value_float=factor)
    damage(function.node, function.output[0], ("Mul", ["factor"]))
    function.node.insert(0, value)
    names = failed(source, converted)
    assert (names == set()) == passes
    assert all(name.endswith(("portable = reference", "native = portable")) for name in names)


def test_outputs_in_another_order(source, converted):
    first, second = (onnx.ValueInfoProto() for _ in range(2))
    first.CopyFrom(converted.graph.output[0])
    second.CopyFrom(converted.graph.output[1])
    converted.graph.output[0].CopyFrom(second)
    converted.graph.output[1].CopyFrom(first)
    found = verify(source, converted, [ROWS])
    assert {check.name for check in found if not check.passed} == {"source outputs come first, in order"}


def test_a_file_of_someone_else(source):
    with pytest.raises(UserError, match="not written by gapa-onnx"):
        verify(source, source, [ROWS])


def test_of_many_queries_some_are_compared():
    """All over the rows, and of native, portable and reference the same ones."""
    model = parse(
        "net (float[n, 1, 40, 40] x) => (float[n, 2, 40, 40] y) { c = Conv(x, k)  h = Tanh(c)  y = Conv(h, w) }",
        k=np.random.default_rng(0).normal(size=(3, 1, 1, 1)),
        w=np.random.default_rng(1).normal(size=(2, 3, 1, 1)),
    )
    rows = np.random.default_rng(2).normal(size=(12, 1, 40, 40)).astype(np.float32)
    found = gapa_onnx.convert(model, {"x": rows}, m=40, k=8, sites="h:positions").checks
    compared = [check for check in found if " = reference" in check.name and "gapa" in check.name]
    assert compared and all(check.passed for check in found)
    assert all("6400 queries" in check.detail for check in compared)  # every third of 19,200
