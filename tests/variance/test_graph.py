"""The arithmetic of variance graphs: what is emitted, what it is called, what is shared and pruned.

Numbers are checked by running the emitted nodes in onnxruntime against numpy, in the oldest
supported opset and in a newer one.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from onnx import helper

from gapa_onnx.variance.builder import END
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.loops import loop
from gapa_onnx.variance.values import Part, Partial, Scaled, Upsampled

OPSETS = [7, 12, 17, 18]


def new_graph(opset: int = 17, taken: set[str] | None = None) -> VarianceGraph:
    return VarianceGraph(opset, taken or set())


def element_type(dtype: np.dtype) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def run(value: Value, **feeds: np.ndarray) -> np.ndarray:
    """The value, computed from the graph's own nodes."""
    proto = value.graph.to_proto([value])
    inputs = [helper.make_tensor_value_info(n, element_type(a.dtype), a.shape) for n, a in feeds.items()]
    output = helper.make_tensor_value_info(value.name, element_type(value.dtype), None)
    graph = helper.make_graph(list(proto.node), "g", inputs, [output], list(proto.initializer))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", value.graph.opset)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


# ------------------------------------------------------------------------- arithmetic

X, Y = np.array([-1.5, 0.25, 2.0]), np.array([0.5, 0.25, -3.0])

ARITHMETIC = {
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x * y": lambda x, y: x * y,
    "x / y": lambda x, y: x / y,
    "-x": lambda x, y: -x,
    "2 + x": lambda x, y: 2 + x,
    "2 - x": lambda x, y: 2 - x,
    "2 * x": lambda x, y: 2 * x,
    "2 / x": lambda x, y: 2 / x,
    "x - 2": lambda x, y: x - 2,
    "x / 2": lambda x, y: x / 2,
    "sum": lambda x, y: sum([x, y], x),
    "polynomial": lambda x, y: 0.5 * x * x - y / (1 + x * x),
}


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("formula", ARITHMETIC.values(), ids=ARITHMETIC)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_operators_emit_what_they_say(formula, opset: int, dtype: type) -> None:
    graph = new_graph(opset)
    value = formula(graph.tensor("x", dtype), graph.tensor("y", dtype))
    read = {tensor.name for node in graph.nodes for tensor in node.inputs}
    found = run(value, **{name: a.astype(dtype) for name, a in (("x", X), ("y", Y)) if name in read})
    assert found.dtype == dtype == value.dtype
    np.testing.assert_allclose(found, formula(X, Y), rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize("name", ["exp", "tanh", "sqrt", "cos", "sin", "abs"])
def test_functions(name: str, opset: int) -> None:
    x = np.array([0.25, 1.5])
    value = getattr(new_graph(opset).tensor("x", np.float64), name)()
    np.testing.assert_allclose(run(value, x=x), getattr(np, name)(x))


def test_sigmoid_erf_and_square() -> None:
    x = np.array([-1.0, 0.0, 1.0], np.float32)
    tensor = new_graph().tensor("x", np.float32)
    np.testing.assert_allclose(run(tensor.sigmoid(), x=x), 1 / (1 + np.exp(-x)), rtol=1e-6)
    np.testing.assert_allclose(run(tensor.erf(), x=x), [-0.8427007929, 0, 0.8427007929], rtol=1e-6)
    np.testing.assert_array_equal(run(tensor.squared, x=2 * x), 4 * x**2)


@pytest.mark.parametrize("opset", OPSETS)
def test_comparisons_are_masks_in_the_value_s_own_type(opset: int) -> None:
    x = np.array([-1.0, 0.0, 1.0])
    for compare, wanted in (
        (lambda v: v > 0, [0, 0, 1]), (lambda v: v < 0, [1, 0, 0]),
        (lambda v: v >= 0, [0, 1, 1]), (lambda v: v <= 0, [1, 1, 0]),
    ):  # fmt: skip
        found = run(compare(new_graph(opset).tensor("x", np.float64)), x=x)
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, wanted)


def test_neutral_elements_emit_nothing() -> None:
    graph = new_graph()
    x = graph.tensor("x", np.float32)
    for value in (x + 0, 0 + x, x - 0, x * 1, 1 * x, x / 1, graph.cast(x, np.float32)):
        assert value is x
    assert graph.nodes == []
    assert run(0 - x, x=np.ones(1, np.float32)) == -1 and run(x * 0, x=np.ones(1, np.float32)) == 0


# ------------------------------------------------------------ differences between opsets


@pytest.mark.parametrize("opset", OPSETS)
def test_reductions(opset: int) -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for op_type, reduce in (("ReduceSum", np.sum), ("ReduceMean", np.mean), ("ReduceMax", np.max)):
        for axes, keepdims in (([1], True), ([0, 2], False), (None, True)):
            value = new_graph(opset).tensor("x", np.float32)
            value = value.graph.reduce(op_type, value, axes, keepdims)
            wanted = reduce(x, axis=None if axes is None else tuple(axes), keepdims=keepdims)
            np.testing.assert_allclose(run(value, x=x), wanted)


@pytest.mark.parametrize("opset", OPSETS)
def test_shapes(opset: int) -> None:
    x = np.ones((2, 3), np.float32)
    like = np.full((4, 2, 3), 7, np.float32)

    def both() -> tuple[VarianceGraph, Value, Value]:
        graph = new_graph(opset)
        return graph, graph.tensor("x", np.float32), graph.tensor("like", np.float32)

    graph, value, _ = both()
    assert run(graph.unsqueeze(value, [0, 3]), x=x).shape == (1, 2, 3, 1)
    assert run(graph.count(value, np.float64), x=x) == 6.0
    np.testing.assert_array_equal(run(graph.shape(value), x=x), [2, 3])
    graph, value, other = both()
    np.testing.assert_array_equal(run(graph.expand(value, other), x=x, like=like), np.ones_like(like))
    graph, _, other = both()
    np.testing.assert_array_equal(run(graph.zeros(other), like=like), np.zeros_like(like))


@pytest.mark.parametrize("opset", [9, 17])
def test_zeros_of_an_infinity_are_zeros(opset: int) -> None:
    graph = new_graph(opset)
    like = np.array([np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(run(graph.zeros(graph.tensor("like", np.float32)), like=like), [0, 0])


@pytest.mark.parametrize("opset", OPSETS)
def test_at_most_keeps_nan(opset: int) -> None:
    graph = new_graph(opset)
    x = np.array([0.5, 1.0, 7.0, np.nan], np.float32)
    value = graph.at_most(graph.tensor("x", np.float32), 1)
    np.testing.assert_array_equal(run(value, x=x), [0.5, 1, 1, np.nan])


@pytest.mark.parametrize("opset", [7, 17])
def test_expand_like_a_tensor_of_another_type(opset: int) -> None:
    graph = new_graph(opset)
    value = graph.expand(graph.tensor("x", np.float32), graph.tensor("like", np.float16))
    assert run(value, x=np.ones(1, np.float32), like=np.ones(3, np.float16)).shape == (3,)


# ------------------------------------------------------------------------------- names


def test_names_count_up_within_a_scope() -> None:
    graph = new_graph(taken={"y/var/2"})
    x = graph.tensor("x", np.float32)
    with graph.scope("y/var"):
        first, second = x.exp(), x.tanh()
        with graph.scope("inner"):
            assert x.sin().name == "inner/1"
        third = x.cos()
    assert first.name == "y/var/1"
    assert len({first.name, second.name, third.name, "y/var/2"}) == 4
    assert all(value.name.startswith("y/var/") for value in (second, third))
    assert x.abs().name == "gapa/1"


def test_a_scope_ends_with_an_error_too() -> None:
    graph = new_graph()
    with pytest.raises(RuntimeError), graph.scope("y/var"):
        raise RuntimeError
    assert graph.tensor("x", np.float32).exp().name == "gapa/1"


def test_rename_gives_the_last_value_its_final_name() -> None:
    graph = new_graph()
    x = graph.tensor("x", np.float32)
    with graph.scope("y/var"):
        value = x.exp() * x
        renamed = graph.rename(value, "y/var")
    assert renamed.name == "y/var"
    assert [node.name for node in graph.nodes] == ["y/var/1", "y/var"]
    with graph.scope("z/var"):
        assert graph.rename(renamed, "z/var").name == "y/var"  # it has a final name already
        assert graph.rename(x, "z/var").name == "x"  # a source tensor
        assert (renamed + x).name == "z/var/1"
    x_values = np.array([0.5], np.float32)
    np.testing.assert_allclose(run(renamed, x=x_values), np.exp(x_values) * x_values, rtol=1e-6)


def test_a_shared_value_keeps_its_sharing_after_a_rename() -> None:
    graph = new_graph()
    x = graph.tensor("x", np.float32)
    with graph.scope("y/var"):
        first = graph.rename(x.exp(), "y/var")
    with graph.scope("z/var"):
        second = graph.rename(x.exp(), "z/var")
    assert first.name == second.name == "y/var" and len(graph.nodes) == 1


def test_taken_names_are_not_given_out() -> None:
    graph = new_graph(taken={"y/var", "y_var", "gapa/const/2_float32"})
    x = graph.tensor("x", np.float32)
    assert (x * 2).name == "gapa/1"
    assert [t.name for t in graph.nodes[0].inputs][1] != "gapa/const/2_float32"
    named = graph.emit("Identity", x, names=("y_var",))
    assert named.name not in ("y_var", "x")
    assert graph.unique("fresh") == "fresh" != graph.unique("fresh")


# ----------------------------------------------------------------- sharing and pruning


def test_identical_nodes_are_emitted_once() -> None:
    graph = new_graph()
    x, y = graph.tensor("x", np.float32), graph.tensor("y", np.float32)
    assert x.exp() is x.exp() and x * y is x * y and (x > 0) is (x > 0)
    before = len(graph.nodes)
    assert graph.emit("Softmax", x, axis=0) is not graph.emit("Softmax", x, axis=1)
    assert graph.emit("Relu", x) is not graph.emit("Relu", x, domain="other")
    assert y * x is not x * y
    assert len(graph.nodes) == before + 5


def test_a_named_node_is_not_shared_with_an_unnamed_one() -> None:
    graph = new_graph()
    x = graph.tensor("x", np.float32)
    assert graph.emit("Identity", x).name != graph.emit("Identity", x, names=("a",)).name
    assert graph.emit("Identity", x, names=("a",)).name == "a"


def test_constants_are_shared_by_value_and_type() -> None:
    graph = new_graph()
    assert graph.constant(np.float32(2)) is graph.constant(np.float32(2))
    different = (np.float32(2), np.float64(2), np.full(1, 2, np.float32), np.int64(2))
    assert len({graph.constant(array).name for array in different}) == 4
    close = [graph.constant(np.float32(a)).name for a in (0.1, 0.10000002)]  # one label, two values
    assert close[0] != close[1]
    assert graph.ints(1, 2).dtype == np.int64


def test_several_outputs() -> None:
    graph = new_graph()
    halves = graph.emit_several("Split", graph.tensor("x", np.float32), outputs=2)
    x = np.arange(4, dtype=np.float32)
    assert len(halves) == 2
    np.testing.assert_array_equal(run(halves[0] * halves[1], x=x), [0, 3])


def test_left_out_inputs_are_empty() -> None:
    graph = new_graph()
    x = graph.tensor("x", np.float32)
    value = graph.emit("Clip", x, None, graph.constant(np.float32(1)))
    np.testing.assert_array_equal(run(value, x=np.array([-5, 5], np.float32)), [-5, 1])


def test_only_what_is_wanted_is_exported_in_order() -> None:
    graph = new_graph()
    x = graph.tensor("x", np.float32)
    kept = (x * 2).exp()
    unused = (x * 3).tanh()
    last = kept + 1
    proto = graph.to_proto([last])
    assert [node.op_type for node in proto.node] == ["Mul", "Exp", "Add"]
    assert {tensor.name for tensor in proto.initializer} == {"gapa/const/1_float32", "gapa/const/2_float32"}
    assert unused.name not in {name for node in proto.node for name in node.output}
    assert not proto.input and not proto.output  # source tensors are read by name only
    again = graph.to_proto([last])
    assert proto.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)


def test_export_of_attributes() -> None:
    graph = new_graph()
    x, w = graph.tensor("x", np.float32), graph.tensor("w", np.float32)
    value = graph.emit("Gemm", x, w, alpha=0.5, transB=1)
    (node,) = graph.to_proto([value]).node
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute} == {"alpha": 0.5, "transB": 1}
    assert node.domain == "" and isinstance(node, onnx.NodeProto)


# ------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_above_zero_is_one_and_all_else_zero(dtype: type) -> None:
    graph = new_graph()
    tiny = np.finfo(np.float32).tiny  # the smallest normal number
    x = np.array([-np.inf, -3, -tiny, -0.0, 0, tiny, 1e-20, 2, np.inf], dtype)
    found = run(graph.tensor("x", dtype) > 0, x=x)
    np.testing.assert_array_equal(found, (x > 0).astype(dtype))
    assert found.dtype == dtype


def test_a_mask_is_its_own_square() -> None:
    graph = new_graph()
    x = graph.tensor("x", np.float32)
    for mask in (x > 0, x > 1, x < 0.5):
        nodes = len(graph.nodes)
        assert mask.squared is mask
        assert len(graph.nodes) == nodes
    assert x.squared is not x


# ---------------------------------------------------------------------- values do not change


def every_kind_of_value() -> list[Value]:
    graph = new_graph()
    x, constant = graph.tensor("x", np.float32), graph.constant(np.ones(3, np.float32))
    parts = [Part(1, x.exp(), x), Part(2, None, x)]
    deferred = [Scaled(x, constant, -1), Upsampled(x, constant, {}), Partial(parts, 1)]
    return [x, constant, x > 0, *deferred]


@pytest.mark.parametrize("value", every_kind_of_value(), ids=repr)
def test_a_value_cannot_be_changed(value: Value) -> None:
    for name in ("graph", "name", "dtype", "is_mask", "is_constant", "label", "scale", "parts", "new"):
        with pytest.raises(AttributeError):
            setattr(value, name, None)
    for name in ("graph", "dtype", "is_mask"):
        with pytest.raises(AttributeError):
            delattr(value, name)


def test_every_value_of_a_tensor_has_its_new_name() -> None:
    graph = new_graph()
    value = graph.tensor("x", np.float32).exp()
    same = graph.tensor(value.name, np.float32)
    graph.rename(value, "y/var")
    assert value.name == same.name == "y/var"
    assert graph.output(value, "y_var").name == same.name == "y_var"


def test_a_deferred_value_is_called_what_it_was_last_renamed_to() -> None:
    graph = new_graph()
    scale, profile = graph.tensor("x", np.float32), graph.constant(np.ones(3, np.float32))
    value = Scaled(scale, profile, -1, "a/var")
    assert graph.rename(value, "b/var") is value and graph.nodes == []
    assert value.name == "b/var" and len(graph.nodes) == 1
    assert graph.rename(value, "c/var").name == "b/var"


def test_a_mask_is_one_whoever_emitted_its_node_first() -> None:
    graph = new_graph()
    x, one = graph.tensor("x", np.float32), graph.constant(np.float32(1))
    plain = graph.cast(graph.compare("Greater", x, one), np.float32)
    mask = x > 1
    assert mask.name == plain.name and mask.is_mask and not plain.is_mask
    assert mask is (x > 1) and mask.squared is mask


@pytest.mark.parametrize("opset", [9, 17])
def test_outputs_of_one_node_have_their_own_types(opset: int) -> None:
    graph = new_graph(opset)
    x = graph.tensor("x", np.float32)
    assert [value.dtype for value in graph.topk(x, 2, 0)] == [np.float32, np.int64]

    def step(inner: VarianceGraph, number: Value, states: list[Value]) -> tuple[list[Value], list[Value]]:
        return [states[0] + 1], [number]

    (last,), (numbers,) = loop(graph, graph.constant(np.int64(3)), [x], step, "steps")
    assert (last.dtype, numbers.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(run(numbers, x=np.ones(1, np.float32)), [0, 1, 2])


def test_names_and_outputs_are_as_many() -> None:
    graph = new_graph()
    with pytest.raises(ValueError, match="2 names"):
        graph.emit("Identity", graph.tensor("x", np.float32), names=("a", "b"))


# ----------------------------------------------------------------------------- constants


def test_what_follows_from_constants_alone_is_constant() -> None:
    graph = VarianceGraph(17, set(), constants=frozenset({"w"}))
    x, w = graph.tensor("x", np.float32), graph.tensor("w", np.float32)
    for value in (w, graph.constant(np.float32(2)), w * 2, graph.rename(w.exp(), "w/var"), (w > 0).sqrt()):
        assert value.is_constant
    for value in (x, x * w, w + x.exp(), graph.emit("RandomNormalLike", w), Scaled(x, w, -1)):
        assert not value.is_constant


def test_whether_a_long_chain_is_constant_costs_nothing() -> None:
    """A thousand times deeper than Python recurses; each link is asked about."""
    graph = VarianceGraph(17, set(), constants=frozenset({"w"}))
    value = graph.tensor("w", np.float32)
    for _ in range(20_000):
        value = value.sqrt()
        assert value.is_constant
    assert not (value * graph.tensor("x", np.float32)).is_constant


def test_what_a_copied_node_makes_of_constants_is_constant() -> None:
    source = helper.make_graph(
        [helper.make_node("Exp", ["w"], ["e"]), helper.make_node("Mul", ["e", "x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info("y", 1, [2])],
        [onnx.numpy_helper.from_array(np.ones(2, np.float32), "w")],
    )
    nodes = gs.import_onnx(helper.make_model(source)).nodes
    graph = new_graph(taken={"x", "w", "e", "y"})
    graph.copy(nodes, outside=set())
    assert graph.tensor("e", np.float32).is_constant and not graph.tensor("y", np.float32).is_constant


# --------------------------------------------------------------------------- more forms


@pytest.mark.parametrize("opset", OPSETS)
def test_blocks_squeezing_and_clipping(opset: int) -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    graph = new_graph(opset)
    value = graph.tensor("x", np.float32)
    np.testing.assert_array_equal(run(graph.block(value, [1, 2], [0, 1], [1, END]), x=x), x[:, :1, 1:])
    np.testing.assert_array_equal(run(graph.squeeze(graph.slice(value, 1, 0, 1), [1]), x=x), x[:, 0])
    np.testing.assert_array_equal(run(graph.clip(value, 2, 7), x=x), x.clip(2, 7))
    np.testing.assert_array_equal(
        run(value @ graph.constant(np.ones((4, 1), np.float32)), x=x), x.sum(2)[..., None]
    )


@pytest.mark.parametrize("opset", [9, 13, 14, 18])
def test_reshape_keeps_a_dimension_of_zero(opset: int) -> None:
    graph = new_graph(opset)
    value = graph.reshape(graph.tensor("x", np.float32), graph.ints(3, 0, 2))
    assert run(value, x=np.ones((2, 3, 0), np.float32)).shape == (3, 0, 2)


def test_bounds_that_are_tensors() -> None:
    graph = new_graph(10)
    x, count = graph.tensor("x", np.float32), graph.tensor("count", np.int64)
    found = run(graph.slice(x, 0, 1, count), x=np.arange(5, dtype=np.float32), count=np.array([3]))
    np.testing.assert_array_equal(found, [1, 2])
    old = new_graph(9)
    with pytest.raises(ValueError, match="opset 10"):
        old.slice(old.tensor("x", np.float32), 0, 0, old.tensor("count", np.int64))
