"""Fusions of the mean path survive conversion, and with them every bit of the predictions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.small_models import transformer_block

import gapa_onnx
from gapa_onnx.op.contract import DOMAIN
from gapa_onnx.sessions.runtime import register, session_options

RNG = np.random.default_rng(0)


def fused_operators(model: onnx.ModelProto, path) -> Counter:
    """How often the optimised model has each operator of onnxruntime's own."""
    options = session_options()
    register(options)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(path).graph.node if node.domain not in ("", DOMAIN))


@pytest.mark.parametrize("sites", ["auto", "all", "x:rows", "fb", "r"])
def test_a_transformer_block_stays_fused(tmp_path, sites):
    model = transformer_block()
    rows = RNG.standard_normal((60, 3, 16)).astype(np.float32)
    conversion = gapa_onnx.convert(model, {"x": rows}, sites=sites, m=20, k=5)
    assert [check for check in conversion.checks if not check.passed] == []
    before = fused_operators(model, tmp_path / "before.onnx")
    assert before == {"SkipLayerNormalization": 2, "FusedMatMul": 1, "BiasGelu": 1}
    assert fused_operators(conversion.model, tmp_path / "after.onnx") == before


def test_what_is_computed_again_is_named_after_its_tensor():
    conversion = gapa_onnx.convert(
        transformer_block(),
        {"x": RNG.standard_normal((60, 3, 16)).astype(np.float32)},
        sites="x:rows",
        m=20,
        k=5,
    )
    names = {name for node in conversion.model.graph.node for name in node.output}
    assert {"r/again", "fb/again"} <= names  # swallowed by SkipLayerNormalization and BiasGelu


def test_layers_are_not_computed_again():
    """The input of a fused Relu would need its layer again: it is read as it is."""
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[n, 4] x) => (float[n, 2] y) {
        z = Gemm(x, a)  h = Relu(z)  y = Gemm(h, b) }"""
    model = onnx.parser.parse_model(text)
    for name, shape in (("a", (4, 5)), ("b", (5, 2))):
        weights = RNG.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    conversion = gapa_onnx.convert(model, {"x": RNG.standard_normal((60, 4)).astype(np.float32)}, m=20, k=5)
    assert all(check.passed for check in conversion.checks)
    assert sum(node.op_type == "Gemm" and "x" in node.input for node in conversion.model.graph.node) == 1
