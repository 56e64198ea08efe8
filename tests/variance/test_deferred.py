"""Variances that are not written out (`values`): the same numbers as layer by layer, with less work.

The reference walks the source node by node in float64, with zeros for what is certain: layers by ONNX's own
implementation with squared weights, activations by central differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator
from support.rule_checks import parse

from gapa_onnx.model.load import load
from gapa_onnx.model.splice import splice
from gapa_onnx.variance.graph import VarianceGraph
from gapa_onnx.variance.propagation import Propagation, propagate
from gapa_onnx.variance.sites import Layout, Site
from gapa_onnx.variance.values import Scaled, Value

#: A variance is a sum of positive products through at most four layers of at most 80 terms each, in float32.
ROUNDING = 4 * (80 + 2) * np.finfo(np.float32).eps

TWO = "(float[n, 3, 4, 5] x, float[n, 2, 4, 5] z)"  # x is uncertain, z is not

#: name -> body of a net with weights w1, w2, … of the shapes that follow
LAYERS = {
    "conv": ("j = Concat<axis=1>(z, x)  y = Conv<pads=[1,1,1,1]>(j, w1, b)", (4, 5, 3, 3)),
    "strides and dilations": (
        "j = Concat<axis=1>(z, x, z)  y = Conv<pads=[2,1,0,1], strides=[1,2], dilations=[2,1]>(j, w1, b)",
        (4, 7, 3, 2),
    ),
    "same padding": ("j = Concat<axis=1>(x, z)  y = Conv<auto_pad=\"SAME_UPPER\", strides=[2,2]>(j, w1)", (4, 5, 3, 3)),
    "groups": ("j = Concat<axis=1>(z, x, x)  y = Conv<group=2>(j, w1, b)", (4, 4, 2, 2)),
    "conv transpose": (
        "j = Concat<axis=1>(x, z)  y = ConvTranspose<strides=[2,3], output_padding=[1,2], pads=[1,0,0,1]>(j, w1)",
        (5, 4, 3, 3),
    ),
    "batch normalisation and relu": (
        "j = Concat<axis=1>(z, x)  a = BatchNormalization(j, w2, w3, w4, w5)  r = Relu(a)  "
        "y = Conv<pads=[1,1,1,1]>(r, w1, b)",
        (4, 5, 3, 3), (5,), (5,), (5,), (5,),
    ),
    "two uncertain parts": (
        "a = Sigmoid(x)  j = Concat<axis=-3>(a, z, x)  y = Conv<pads=[1,1,1,1]>(j, w1, b)", (4, 8, 3, 3)
    ),
    "parts in parts": (
        "i = Concat<axis=1>(z, x)  r = Tanh(i)  j = Concat<axis=1>(r, z)  y = Conv<pads=[1,1,1,1]>(j, w1, b)",
        (4, 7, 3, 3),
    ),
    "partial after partial": (
        "i = Concat<axis=1>(z, x)  h = Conv<pads=[1,1,1,1]>(i, w1)  j = Concat<axis=1>(h, z)  y = Conv(j, w2, b)",
        (4, 5, 3, 3), (4, 6, 1, 1),
    ),
    "another axis": ("j = Concat<axis=2>(x, x)  k = Concat<axis=2>(j, w2)  y = Conv(k, w1, b)", (4, 3, 3, 3), (2, 3, 1, 5)),
    "split behind": ("j = Concat<axis=1>(z, x)  p, q = Split<axis=1>(j, w9)  y = Conv(q, w1, b)", (4, 3, 2, 2)),
    "read twice": (
        "j = Concat<axis=1>(z, x)  h = Conv<pads=[1,1,1,1]>(j, w1)  y = Add(h, j)", (5, 5, 3, 3)
    ),
    "matmul": (
        "i = Concat<axis=1>(x, z)  t = Transpose<perm=[0,2,3,1]>(x)  u = Transpose<perm=[0,2,3,1]>(z)  "
        "j = Concat<axis=-1>(u, t)  y = MatMul(j, w1)",
        (5, 4),
    ),
    "gemm": (
        "f = Flatten(x)  g = Flatten(z)  j = Concat<axis=1>(g, f)  y = Gemm<alpha=0.5, transB=1>(j, w1, b)", (4, 100)
    ),
    "kernel on one channel": ("y = Conv<pads=[1,1,1,1], strides=[2,1]>(x, w1, b)", (4, 3, 3, 3)),
    "depthwise": ("h = Conv<group=3, pads=[1,1,1,1]>(x, w1)  y = Conv(h, w2, b)", (3, 1, 3, 3), (4, 3, 1, 1)),
    "grouped conv transpose": ("y = ConvTranspose<group=3, strides=[2,2]>(x, w1)", (3, 2, 3, 2)),
    "upsampling": (
        "u = ConvTranspose<strides=[2,2]>(x, w1)  y = Conv<pads=[1,1,1,1]>(u, w2, b)", (3, 2, 2, 2), (4, 2, 3, 3)
    ),
    "upsampling with overlap": (
        "u = ConvTranspose<strides=[2,1], output_padding=[1,0]>(x, w1)  "
        "y = Conv<pads=[0,1,2,0], dilations=[2,1]>(u, w2, b)",
        (3, 2, 3, 2), (4, 2, 3, 2),
    ),
    "cropped upsampling": (
        "u = ConvTranspose<strides=[2,2], pads=[1,0,0,1]>(x, w1)  y = Conv<pads=[1,1,1,1]>(u, w2, b)",
        (3, 2, 3, 3), (4, 2, 3, 3),
    ),
    "wide padding": (
        "u = ConvTranspose<strides=[2,2]>(x, w1)  y = Conv<pads=[2,2,2,2]>(u, w2, b)", (3, 2, 2, 2), (4, 2, 2, 2)
    ),
    "strided behind upsampling": (
        "u = ConvTranspose<strides=[2,2]>(x, w1)  y = Conv<strides=[2,2]>(u, w2, b)", (3, 2, 2, 2), (4, 2, 3, 3)
    ),
    "skip connection": (
        "u = ConvTranspose<strides=[2,2]>(x, w1)  s = Resize<mode=\"nearest\">(z, , w9)  j = Concat<axis=1>(s, u)  "
        "h = Conv<pads=[1,1,1,1]>(j, w2, b)  r = Relu(h)  y = Conv(r, w3)",
        (3, 2, 2, 2), (4, 4, 3, 3), (4, 4, 1, 1),
    ),
    "scaled batch normalisation": (
        "a = BatchNormalization(x, w2, w3, w4, w5)  j = Concat<axis=1>(a, z)  y = Conv(j, w1)",
        (4, 5, 1, 1), (3,), (3,), (3,), (3,),
    ),
}  # fmt: skip


def net(case: str) -> onnx.ModelProto:
    body, *shapes = LAYERS[case]
    model = parse(f"net {TWO} => (float[] y) {{ {body} }}")
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    positive = ("w5",)  # the stored variance of BatchNormalization
    arrays = {f"w{k}": rng.normal(size=shape).astype(np.float32) for k, shape in enumerate(shapes, start=1)}
    arrays["b"] = rng.normal(size=4).astype(np.float32)
    arrays["w9"] = np.float32([1, 1, 2, 2]) if "Resize" in body else np.array([2, 3])
    for name, array in arrays.items():
        if f" {name}" in body:
            array = np.abs(array) + 0.5 if name in positive else array
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return onnx.shape_inference.infer_shapes(model)


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(2, 3, 4, 5)), "z": rng.normal(size=(2, 2, 4, 5))}


def births() -> dict[str, np.ndarray]:
    """One number per position, and one per channel."""
    rng = np.random.default_rng(2)
    return {"scale": rng.uniform(0.5, 1.5, (2, 1, 4, 5)), "profile": rng.uniform(0.5, 1.5, (3, 1, 1))}


def run_alone(node: onnx.NodeProto, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One node by ONNX's own implementation, which does not know groups of ConvTranspose."""
    group = next((a.i for a in node.attribute if a.name == "group"), 1)
    if node.op_type == "ConvTranspose" and group > 1:
        one = onnx.NodeProto.FromString(node.SerializeToString())
        del one.attribute[:]
        one.attribute.extend(a for a in node.attribute if a.name != "group")
        each = zip(np.split(inputs[0], group, axis=1), np.split(inputs[1], group))
        return [np.concatenate([run_alone(one, pair)[0] for pair in each], axis=1)]
    given = [name for name in node.input if name]
    declare = onnx.helper.make_tensor_value_info
    types = [onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for array in inputs]
    infos = [declare(name, dtype, None) for name, dtype in dict(zip(given, types)).items()]
    outputs = [declare(name, onnx.TensorProto.DOUBLE, None) for name in node.output]
    graph = onnx.helper.make_graph([node], "alone", infos, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    return ReferenceEvaluator(model).run(None, dict(zip(given, inputs)))


def variances_behind(node: onnx.NodeProto, means: list[np.ndarray], known: list) -> list[np.ndarray]:
    """Layers by their squared weights, activations by central differences, all else on the variance."""
    data = [np.zeros_like(mean) if var is None else var for mean, var in zip(means, known)]
    if node.op_type in ("Relu", "Sigmoid", "Tanh"):
        (high,), (low,) = (run_alone(node, [means[0] + step]) for step in (1e-6, -1e-6))
        return [((high - low) / 2e-6) ** 2 * data[0]]
    if node.op_type == "BatchNormalization":
        scale, variance = (means[k].reshape(-1, 1, 1) for k in (1, 4))
        return [data[0] * scale**2 / (variance + 1e-5)]
    if node.op_type in ("Conv", "ConvTranspose", "MatMul", "Gemm"):
        factor = next((a.f for a in node.attribute if a.name == "alpha"), 1.0)
        bias = [np.zeros_like(array) for array in means[2:]]
        return [factor * found for found in run_alone(node, [data[0], means[1] ** 2, *bias])]
    moved = len(means) if node.op_type in ("Concat", "Add") else 1
    return run_alone(node, [*data[:moved], *means[moved:]])


def layer_by_layer(model: onnx.ModelProto, var: np.ndarray) -> np.ndarray:
    """The variance of y in float64, one node after the other."""
    values = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    values = {k: a if k == "w9" else a.astype(np.float64) for k, a in values.items()} | feeds()
    variances = {"x": var}
    for node in model.graph.node:
        names = [name for name in node.input if name]
        means, known = [values[name] for name in names], [variances.get(name) for name in names]
        values.update(zip(node.output, run_alone(node, means)))
        if any(name in variances for name in names):
            variances.update(zip(node.output, variances_behind(node, means, known)))
    return variances["y"]


def propagated(model: onnx.ModelProto, *, hoisted: bool) -> tuple[Propagation, onnx.ModelProto]:
    """With the variance of x as a pair that is not multiplied out, or as one tensor."""

    def birth(graph: VarianceGraph, site: Site) -> Value:
        scale, profile = (
            graph.tensor("scale", np.float32),
            graph.constant(births()["profile"].astype(np.float32)),
        )
        return Scaled(scale, profile, 1) if hoisted else scale * profile

    result = propagate(load(model), [Site("x", "x", "x", None, Layout.ROWS, None)], birth)
    assert not result.refused
    wanted = result.graph.output(result.variances["y"], "y_var")
    info = onnx.helper.make_tensor_value_info("y_var", onnx.TensorProto.FLOAT, None)
    spliced = splice(model, result.graph.to_proto([wanted]), [info])
    spliced.graph.input.append(onnx.helper.make_tensor_value_info("scale", onnx.TensorProto.FLOAT, None))
    return result, spliced


@pytest.mark.parametrize("hoisted", [True, False], ids=["pair", "tensor"])
@pytest.mark.parametrize("case", LAYERS)
def test_the_variance_is_that_of_layer_by_layer(case: str, hoisted: bool) -> None:
    model = net(case)
    spliced = propagated(model, hoisted=hoisted)[1]
    session = ort.InferenceSession(spliced.SerializeToString(), providers=["CPUExecutionProvider"])
    given = feeds() | {"scale": births()["scale"]}
    names = {entry.name for entry in session.get_inputs()}
    (var,) = session.run(["y_var"], {k: a.astype(np.float32) for k, a in given.items() if k in names})
    expected = layer_by_layer(model, births()["scale"] * births()["profile"])
    assert var.shape == expected.shape
    np.testing.assert_allclose(var, expected, rtol=ROUNDING, atol=1e-9 * expected.max())


# --------------------------------------------------------------- what is spared


def made(case: str, *, hoisted: bool) -> list[onnx.NodeProto]:
    """The nodes of the variance graph that depend on a run."""
    model = net(case)
    spliced = propagated(model, hoisted=hoisted)[1]
    constants = {tensor.name for tensor in spliced.graph.initializer}
    own = {name for node in model.graph.node for name in node.output}
    left = []
    for node in spliced.graph.node:
        if all(name in constants for name in node.input):
            constants.update(node.output)
        elif node.output[0] not in own:
            left.append(node)
    return left


@pytest.mark.parametrize("case", ["conv", "conv transpose", "gemm", "strides and dilations"])
def test_no_zeros_are_read(case: str) -> None:
    operators = Counter(node.op_type for node in made(case, hoisted=False))
    assert not operators["Concat"] and not operators["ConstantOfShape"]


def test_a_pair_passes_a_skip_connection_as_one_channel() -> None:
    nodes = made("skip connection", hoisted=True)
    assert [node.op_type for node in nodes] == ["ConvTranspose", "HardSigmoid", "Mul", "Conv"]
    assert nodes[0].input[0] == "scale"


def test_a_pair_stays_one_behind_batch_normalisation_and_a_pointwise_layer() -> None:
    assert [node.op_type for node in made("scaled batch normalisation", hoisted=True)] == ["Mul"]


def test_what_reads_the_whole_gets_it_under_its_name() -> None:
    nodes = made("read twice", hoisted=False)
    (joined,) = (node for node in nodes if node.op_type == "Concat")
    assert joined.output[0] == "j/var"
    assert all(node.output[0].startswith(("j/var", "h/var", "y_var", "x/var")) for node in nodes)
