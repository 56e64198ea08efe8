"""Nodes that stand anyhow: onnxruntime runs such files, and all of our walks go by the list of nodes."""

from __future__ import annotations

import time

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.rule_checks import run_with_variances
from support.small_models import parse, transformer_block

from gapa_onnx import convert
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import load
from gapa_onnx.model.order import in_order

RESIDUAL = """net (float[n, 3] x) => (float[n, 2] y) {
    z = MatMul(x, w1)  h = Tanh(z)  g = MatMul(h, w2)  r = Add(g, h)  s = Sigmoid(r)  y = MatMul(s, w3) }"""

NESTED = """net (bool c, int64 n, float[2, 3] x) => (float[2, 3] y, float[2, 3] last) {
    y = If <then_branch = one () => (float[2, 3] a) { a = Mul(b, outer)  b = Neg(outer) },
            else_branch = other () => (float[2, 3] d) { d = Identity(late) }> (c)
    last = Loop <body = step (int64 i, bool go, float[2, 3] s) => (bool on, float[2, 3] t)
                 { t = Add(u, later)  on = Identity(go)  u = Mul(s, s) }> (n, , start)
    late = Abs(outer)  outer = Tanh(x)  later = Add(late, x)  start = Neg(later) }"""


def residual() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    return parse(
        RESIDUAL, **{f"w{i}": rng.normal(size=s) for i, s in ((1, (3, 4)), (2, (4, 4)), (3, (4, 2)))}
    )


def shuffled(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The same nodes, in an order that is none."""
    mixed = onnx.ModelProto()
    mixed.CopyFrom(model)
    del mixed.graph.node[:]
    nodes = list(model.graph.node)
    mixed.graph.node.extend(nodes[i] for i in np.random.default_rng(seed).permutation(len(nodes)))
    return mixed


def written(model: onnx.ModelProto) -> set[bytes]:
    return {node.SerializeToString() for node in model.graph.node}


def answers(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return ort.InferenceSession(model.SerializeToString()).run(None, feeds)


def test_a_model_in_order_is_taken_as_it_is():
    for model in (residual(), transformer_block()):
        assert in_order(model) is model and load(model).proto is model


@pytest.mark.parametrize("seed", range(4))
def test_only_the_order_changes(seed):
    model = shuffled(transformer_block(), seed)
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(model)
    before = model.SerializeToString()
    source = load(model)
    onnx.checker.check_model(source.proto, full_check=True)
    assert written(source.proto) == written(model)
    assert source.given is model and model.SerializeToString() == before
    assert source.tensors["y"].shape is not None


def test_what_stands_too_late_moves_before_its_first_reader_and_all_else_stays():
    model = parse(
        "net (float[n] x) => (float[n] y) { a = Abs(x)  c = Add(a, b)  d = Neg(a)  b = Exp(x)  y = Add(c, d) }"
    )
    assert [node.output[0] for node in in_order(model).graph.node] == ["a", "b", "c", "d", "y"]


def test_bodies_are_put_in_order_and_what_they_read_comes_before_them():
    model = parse(NESTED)
    ordered = load(model).proto
    onnx.checker.check_model(ordered)
    made = [node.output[0] for node in ordered.graph.node]
    assert made.index("outer") < made.index("late") < made.index("y")
    assert made.index("later") < made.index("last") and made.index("start") < made.index("last")
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    outer = np.tanh(x)
    last = -(np.abs(outer) + x)
    for _ in range(3):
        last = last * last + np.abs(outer) + x
    for chosen, expected in ((True, -(outer**2)), (False, np.abs(outer))):
        found = answers(ordered, {"n": np.array(3), "x": x, "c": np.array(chosen)})
        for a, b in zip(found, (expected, last)):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # |outer| + x cancels


def test_a_name_of_a_body_is_not_one_of_the_graph():
    """Here the branch makes a `y` of its own, which is no reason to wait for the graph's."""
    model = parse("""net (bool c, float[n] x) => (float[n] z) {
        z = If <then_branch = one () => (float[n] y) { y = Neg(x) },
                else_branch = other () => (float[n] w) { w = Abs(x) }> (c)
        y = Exp(z) }""")
    assert in_order(model) is model


def test_functions_are_put_in_order_before_they_are_inlined():
    text = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
        net (float[n, 2] x) => (float[n, 2] y) { y = own.f(z)  z = own.f(x) }
        <domain: "own", opset_import: ["": 17]> f (a) => (b) { b = Tanh(c)  c = Add(a, a) }"""
    model = onnx.parser.parse_model(text)
    source = load(model)
    onnx.checker.check_model(source.proto)
    assert [node.op_type for node in source.proto.graph.node] == ["Add", "Tanh"] * 2
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_allclose(answers(source.proto, {"x": x})[0], np.tanh(2 * np.tanh(2 * x)), rtol=1e-6)


def test_nodes_that_wait_for_each_other_are_refused_with_a_sentence():
    model = parse("net (float[n] x) => (float[n] y) { a = Add(x, c)  b = Abs(a)  c = Neg(b)  y = Exp(x) }")
    with pytest.raises(UserError) as error:
        load(model)
    assert "wait for each other: a, c, b" in error.value.message and error.value.hint
    alone = parse("net (float[n] x) => (float[n] y) { y = Add(x, y) }")
    with pytest.raises(UserError, match="wait for each other: y"):
        load(alone)


@pytest.mark.parametrize("seed", range(3))
def test_variances_do_not_depend_on_the_order(seed):
    """Without the sort variance was lost where a node was met before what it reads: here that of the residual."""
    model = residual()
    rng = np.random.default_rng(1)
    x, v = rng.normal(size=(2, 3)).astype(np.float32), rng.uniform(0.1, 1, (2, 3)).astype(np.float32)
    found = [run_with_variances(each, {"x": x}, {"x": v}) for each in (model, shuffled(model, seed))]
    np.testing.assert_array_equal(found[0]["y_var"], found[1]["y_var"])
    w = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    h = np.tanh(x @ w["w1"])
    s = 1 / (1 + np.exp(-(h @ w["w2"] + h)))
    hidden = (1 - h**2) ** 2 * (v @ w["w1"] ** 2)
    expected = (hidden @ w["w2"] ** 2 + hidden) * (s * (1 - s)) ** 2 @ w["w3"] ** 2
    np.testing.assert_allclose(
        found[1]["y_var"], expected, rtol=1e-5
    )  # some ten roundings of 6e-8 and a 1 - h²


def test_an_unsorted_model_is_converted_like_the_sorted_one():
    model = residual()
    x = np.random.default_rng(2).normal(size=(200, 3)).astype(np.float32)
    sorted_one, other = (convert(each, {"x": x}) for each in (model, shuffled(model, 5)))
    assert other.path is None and all(check.passed for check in other.checks)
    onnx.checker.check_model(other.model)
    for a, b in zip(answers(sorted_one.model, {"x": 2 * x[:9]}), answers(other.model, {"x": 2 * x[:9]})):
        assert a.tobytes() == b.tobytes()


def test_the_time_is_linear_in_the_nodes():
    """A chain of 20,000 nodes written backwards: seconds if each were looked for in the list."""
    count = 20_000
    nodes = [
        onnx.helper.make_node("Add", [f"t{i}", f"t{i // 2}"], [f"t{i + 1}"]) for i in reversed(range(count))
    ]
    values = [onnx.helper.make_tensor_value_info(name, 1, [1]) for name in ("t0", f"t{count}")]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "chain", values[:1], values[1:]))
    start = time.process_time()
    ordered = in_order(model)
    assert time.process_time() - start < 5  # 0.5 s; the square of 20,000 takes minutes
    assert [node.output[0] for node in ordered.graph.node] == [f"t{i + 1}" for i in range(count)]
