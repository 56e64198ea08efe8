"""onnxruntime's fused layers and activations (domain com.microsoft).

A fused operator is what it was fused from: a layer, a bias, an activation. Each part is presented to
the rule of the standard operator, with the tensor between them computed once more where that rule
reads it.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.attention import Uncertain, gated
from gapa_onnx.variance.rules.reduction import softmax_spread
from gapa_onnx.variance.rules.registry import (
    Accuracy,
    bilinear,
    deterministic,
    refused,
    rule,
    structural,
    variance_by_rule,
)
from gapa_onnx.variance.rules.sampling import grid_sample as sample_grid
from gapa_onnx.variance.rules.view import NodeView, Operand, VirtualNode

MICROSOFT = "com.microsoft"
EXACT, FIRST_ORDER = Accuracy.EXACT, Accuracy.FIRST_ORDER

# ---------------------------------------------------------------------- parts of a node


def _seen_as(node: NodeView, op_type: str, inputs: list[gs.Tensor], **attrs: Any) -> NodeView:
    """The node, or a part of it, as a standard operator with the same output."""
    attrs = {name: value for name, value in attrs.items() if value is not None}
    virtual = VirtualNode(op_type, node.node.name, attrs, inputs, node.node.outputs[:1])
    return NodeView(node.graph, virtual, node.variance_of, node.options)


def _activated(node: NodeView, op_type: str, z: Uncertain, y: Value | None = None, **attrs: Any) -> Value:
    """Through the rule of an activation: z goes in and the node's output comes out, or y."""
    inside = gs.Variable(z.mean.name, z.mean.dtype)
    after = node.node.outputs[0] if y is None else gs.Variable(y.name, y.dtype)
    virtual = VirtualNode(op_type, node.node.name, attrs, [inside], [after])
    var = variance_by_rule(NodeView(node.graph, virtual, {z.mean.name: z.variance}.get, node.options))
    if var is None:
        raise node.refuse(f"no variance leaves its activation {op_type}")
    return var


def _sum(node: NodeView, *operands: Operand | None) -> Uncertain:
    """The sum of independent operands; the first has the shape of the sum."""
    present = [operand for operand in operands if operand is not None]
    first = present[0]
    mean, var = first.mean, first.var
    for operand in present[1:]:
        if operand.tensor.name == first.tensor.name and not operand.certain:
            raise node.refuse("a tensor is added to itself")
        mean = mean + operand.mean
        if operand.var is not None:
            var = node.graph.expand(operand.var, like=first.raw) if var is None else var + operand.var
    return Uncertain(mean, var)


# ------------------------------------------------------------------- activations, biases


@rule("Gelu", accuracy=FIRST_ORDER, activation=True, domain=MICROSOFT)
def gelu(node: NodeView) -> Value:
    """φ'(x)² v"""
    return _activated(node, "Gelu", Uncertain.of(node.inputs[0]))


@rule("QuickGelu", accuracy=FIRST_ORDER, activation=True, domain=MICROSOFT)
def quick_gelu(node: NodeView) -> Value:
    """φ'(x)² v"""
    return _activated(node, "Swish", Uncertain.of(node.inputs[0]), alpha=node.attr("alpha", 1.702))


@rule("BiasGelu", accuracy=FIRST_ORDER, activation=True, domain=MICROSOFT)
def bias_gelu(node: NodeView) -> Value:
    """φ'(x + b)² (v_x + v_b)"""
    return _activated(node, "Gelu", _sum(node, *node.inputs))


@rule("FastGelu", accuracy=FIRST_ORDER, activation=True, domain=MICROSOFT)
def fast_gelu(node: NodeView) -> Value:
    """φ'(x + b)² (v_x + v_b)"""
    return _activated(node, "Gelu", _sum(node, node.inputs[0], node.input(1)), approximate="tanh")


@rule("ScaledSiLU", accuracy=FIRST_ORDER, activation=True, domain=MICROSOFT)
def scaled_silu(node: NodeView) -> Value:
    """(c φ'(c x))² v"""
    x, given = node.inputs[0], node.input(1)
    if given is not None and not given.certain:
        raise node.refuse("its scale is uncertain")
    scale = node.attr("alpha", 1.0) if given is None else given.mean
    return _activated(node, "Swish", Uncertain(x.mean * scale, x.variance * (scale * scale)))


@rule("BiasSplitGelu", accuracy=FIRST_ORDER, domain=MICROSOFT)
def bias_split_gelu(node: NodeView) -> Value:
    """φ(r)² v_l + (l φ'(r))² v_r + φ'(r)² v_l v_r, with l and r the halves of x + b."""
    graph = node.graph
    both = _sum(node, *node.inputs).moved(lambda t: graph.emit("Reshape", t, graph.ints(0, 0, 2, -1)))

    def half(position: int) -> Uncertain:
        index = graph.constant(np.asarray(position, np.int64))
        return both.moved(lambda t: graph.emit("Gather", t, index, axis=2))

    left, right = half(0), half(1)
    r = right.mean
    phi = 0.5 * r * (1 + (r * (1 / sqrt(2))).erf())
    return gated(Uncertain(phi, _activated(node, "Gelu", right, phi)), left)


@rule("BiasAdd", accuracy=EXACT, domain=MICROSOFT)
def bias_add(node: NodeView) -> Value:
    """The sum of the variances of its inputs."""
    return _sum(node, *node.inputs).variance


@rule("BiasDropout", accuracy=EXACT, domain=MICROSOFT)
def bias_dropout(node: NodeView) -> tuple[Value | None, ...]:
    """The sum of the variances of its inputs: nothing is dropped at inference."""
    training = node.input(4)
    if training is not None and (training.constant is None or bool(np.any(training.constant))):
        raise node.refuse("training_mode may be on: elements are dropped at random")
    var = _sum(node, node.inputs[0], node.inputs[1], node.input(2)).var
    return (var, *[None] * (len(node.outputs) - 1))


@rule("BiasSoftmax", accuracy=FIRST_ORDER, domain=MICROSOFT)
def bias_softmax(node: NodeView) -> Value:
    """p_i² ((1 - 2 p_i) v_i + Σ_j p_j² v_j), as softmax; its bias must be certain."""
    scores, bias = node.inputs
    if not bias.certain:
        raise node.refuse("its bias is uncertain")
    axis = node.attr("axis", 1)
    axes = list(range(axis % scores.rank, scores.rank))
    p = node.output.mean
    return (
        p * p * softmax_spread(p, scores.variance, lambda terms: node.graph.reduce("ReduceSum", terms, axes))
    )


# ------------------------------------------------------------------------------- layers

bilinear("FusedMatMul", "TransposeMatMul", domain=MICROSOFT, alpha=1.0)

_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
#: What the numbers in `activation_params` are called.
_PARAMETERS = {
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
    "Clip": ("min", "max"),
    "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
}
_ACTIVATIONS = {*_PARAMETERS, "Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "HardSwish", "Gelu", "Mish"}


def _then_activation(node: NodeView, z: Uncertain, attrs: dict[str, Any]) -> Value | None:
    name = node.attr("activation", "")
    if not name or z.var is None:
        return z.var
    if name not in _ACTIVATIONS:
        raise node.refuse(f"its activation {name!r} is not known")
    return _activated(node, name, z, **attrs)


def _conv_activation(node: NodeView) -> dict[str, float]:
    names = _PARAMETERS.get(node.attr("activation", ""), ())
    return dict(zip(names, node.attr("activation_params", ())))


@rule("FusedConv", accuracy=FIRST_ORDER, linear=True, domain=MICROSOFT)
def fused_conv(node: NodeView) -> Value | None:
    """φ'(z)² (v_x ∗ W² + v_Z), with z = x ∗ W + b + Z."""
    graph, attrs = node.graph, {name: node.attr(name) for name in _CONV}
    attrs = {name: value for name, value in attrs.items() if value is not None}
    operands = node.inputs[:3] if node.input(2) is not None else node.inputs[:2]
    mean = graph.emit("Conv", *(operand.mean for operand in operands), **attrs)
    conv = _seen_as(node, "Conv", node.node.inputs[: len(operands)], **attrs)
    var = None if all(o.certain for o in operands) else variance_by_rule(conv)
    z = _with_residual(Uncertain(mean, var), node.input(3))
    return _then_activation(node, z, _conv_activation(node))


def _with_residual(z: Uncertain, residual: Operand | None) -> Uncertain:
    if residual is None:
        return z
    terms = [var for var in (z.var, residual.var) if var is not None]
    return Uncertain(z.mean + residual.mean, sum(terms[1:], terms[0]) if terms else None)


@rule("NhwcConv", "NhwcFusedConv", accuracy=FIRST_ORDER, linear=True, domain=MICROSOFT)
def channels_last_conv(node: NodeView) -> Value | None:
    """φ'(z)² (v_x ∗ W² + v_Z), with channels on the last axis."""
    x, weights, bias = node.inputs[0], node.inputs[1], node.input(2)
    if not weights.certain or (bias is not None and not bias.certain):
        raise node.refuse("its weights are uncertain")
    rank, graph = x.rank, node.graph
    attrs = {name: node.attr(name) for name in _CONV if node.attr(name) is not None}

    def conv(data: Value, *parameters: Value) -> Value:
        first = graph.emit("Transpose", data, perm=[0, rank - 1, *range(1, rank - 1)])
        done = graph.emit("Conv", first, *parameters, **attrs)
        return graph.emit("Transpose", done, perm=[0, *range(2, rank), 1])

    mean = conv(x.mean, weights.mean, *([] if bias is None else [bias.mean]))
    var = None if x.var is None else conv(x.var, weights.mean.squared)
    z = _with_residual(Uncertain(mean, var), node.input(3))
    return _then_activation(node, z, _conv_activation(node))


@rule("FusedGemm", accuracy=FIRST_ORDER, linear=True, domain=MICROSOFT)
def fused_gemm(node: NodeView) -> Value | None:
    """φ'(z)² v_z, with z and v_z as Gemm."""
    names = ("alpha", "beta", "transA", "transB")
    gemm = _seen_as(node, "Gemm", node.node.inputs, **{name: node.attr(name) for name in names})
    present = [operand.mean for operand in node.inputs if operand.present]
    z = Uncertain(gemm.again(*present), variance_by_rule(gemm))
    given = {name: node.attr(f"activation_{name}") for name in ("alpha", "beta", "gamma")}
    return _then_activation(node, z, {name: value for name, value in given.items() if value is not None})


@rule("FusedMatMulActivation", accuracy=FIRST_ORDER, linear=True, domain=MICROSOFT)
def fused_matmul_activation(node: NodeView) -> Value | None:
    """φ'(z)² v_z, with z and v_z as FusedMatMul."""
    own = {"activation", "activation_alpha", "activation_beta", "activation_gamma", "activation_axis"}
    attrs = {name: value for name, value in node.node.attrs.items() if name not in own}
    virtual = VirtualNode(
        "FusedMatMul", node.node.name, attrs, node.node.inputs, node.node.outputs, MICROSOFT
    )
    matmul = NodeView(node.graph, virtual, node.variance_of, node.options)
    z = Uncertain(
        matmul.again(*(operand.mean for operand in node.inputs)),
        variance_by_rule(matmul),
    )
    given = {name: node.attr(f"activation_{name}") for name in ("alpha", "beta", "gamma")}
    return _then_activation(node, z, {name: value for name, value in given.items() if value is not None})


@rule("GemmFastGelu", accuracy=FIRST_ORDER, linear=True, domain=MICROSOFT)
def gemm_fast_gelu(node: NodeView) -> Value:
    """φ'(x W + b)² (v_x W² + …)"""
    x, weights, bias = node.inputs[0], node.inputs[1], node.input(2)
    if bias is not None and not bias.certain:
        raise node.refuse("its bias is uncertain")
    var = variance_by_rule(_seen_as(node, "MatMul", node.node.inputs[:2]))
    mean = node.graph.emit("MatMul", x.mean, weights.mean)
    z = Uncertain(mean if bias is None else mean + bias.mean, var)
    return _activated(node, "Gelu", z, approximate="tanh")


@rule("ConvTransposeWithDynamicPads", accuracy=EXACT, linear=True, domain=MICROSOFT)
def conv_transpose(node: NodeView) -> Value:
    """v_x ∗ W²; its weights must be certain."""
    x, weights, pads, bias = node.inputs[0], node.inputs[1], node.input(2), node.input(3)
    if not weights.certain or (bias is not None and not bias.certain):
        raise node.refuse("its weights are uncertain")
    return node.again(x.var, weights.mean.squared, *([] if pads is None else [pads.raw]))


# -------------------------------------------------------------------- moved elements

structural("Trilu", "GatherND", "ExpandDims", "SampleOp", domain=MICROSOFT)


@rule("Pad", accuracy=EXACT, domain=MICROSOFT)
def pad(node: NodeView) -> Value:
    """The same node on the variance; what a constant fills in is certain."""
    fill = node.input(2)
    if fill is not None and not fill.certain:
        raise node.refuse("the padding value is uncertain")
    return node.again(node.inputs[0].var, node.inputs[1].raw)


@rule("GridSample", accuracy=EXACT, domain=MICROSOFT)
def grid_sample(node: NodeView) -> Value:
    """Σ w² v with the interpolation weights w, as ONNX's own."""
    attrs = {"mode": "bilinear", **node.node.attrs}
    virtual = VirtualNode("GridSample", node.node.name, attrs, node.node.inputs, node.node.outputs, MICROSOFT)
    return sample_grid(NodeView(node.graph, virtual, node.variance_of, node.options))


@rule("NhwcMaxPool", accuracy=FIRST_ORDER, domain=MICROSOFT)
def channels_last_max_pool(node: NodeView) -> Value:
    """The variance of the element that the maximum came from."""
    graph, x = node.graph, node.inputs[0]
    if node.opset < 12:
        raise node.refuse("MaxPool of whole numbers tells which element it took only from opset 12 on")

    def channels_second(t: Value) -> Value:
        return graph.emit("Transpose", t, perm=[0, 3, 1, 2])

    both = (x.raw.dtype, np.int64)
    _, where = graph.emit_several(
        "MaxPool", channels_second(x.raw), outputs=2, dtypes=both, **node.node.attrs
    )
    flat = graph.emit("Reshape", channels_second(x.variance), graph.ints(-1))
    return graph.emit("Transpose", graph.emit("Gather", flat, where, axis=0), perm=[0, 2, 3, 1])


# -------------------------------------------------------------------------- the others

deterministic(
    "its output is discrete", "IsAllFinite", "MurmurHash3", "Tokenizer", "DynamicTimeWarping",
    "BifurcationDetector", "NGramHashMapping", "VarlenNGramHashMapping",
    domain=MICROSOFT,
)  # fmt: skip
deterministic("it depends on shapes or constants only", "Range", domain=MICROSOFT)

refused(
    "the model was optimised for one machine; convert the original model",
    "Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "ReorderInput", "ReorderOutput",
    "Upsample",
    domain="com.microsoft.nchwc",
)  # fmt: skip
refused(
    "it is a search over sequences, not a function with a slope; convert the model inside it",
    "BeamSearch", "WhisperBeamSearch", "GreedySearch", "Sampling", "NGramRepeatBlock",
    domain=MICROSOFT,
)  # fmt: skip
refused(
    "which experts it asks is a choice inside the operator; export the experts as layers",
    "MoE", "QMoE",
    domain=MICROSOFT,
)  # fmt: skip
refused("its slope needs the whole inverse of a matrix", "Inverse", domain=MICROSOFT)
refused("it exists for GPUs only; export the model with ONNX's DFT", "Rfft", "Irfft", domain=MICROSOFT)
refused(
    "it exists for GPUs only; export the model with ordinary products", "ComplexMul", "ComplexMulConj",
    domain=MICROSOFT,
)  # fmt: skip
refused(
    "it samples at boxes that may be uncertain; export the model with RoiAlign",
    "CropAndResize",
    domain=MICROSOFT,
)
refused("its slope is not defined where values coincide", "Unique", domain=MICROSOFT)
refused("its inputs are whole numbers and weights, and the weights are uncertain", "WordConvEmbedding",
        "TorchEmbedding", "RelativePositionBias", domain=MICROSOFT)  # fmt: skip
refused("its operands are 8-bit floats with scales of their own", "GemmFloat8", domain=MICROSOFT)
refused(
    "it repacks sequences of different lengths; export the model with padded batches",
    "RemovePadding", "RestorePadding",
    domain=MICROSOFT,
)  # fmt: skip
refused("it drops elements at random, for training", "BitmaskDropout", "BitmaskBiasDropout", domain=MICROSOFT)
refused(
    "onnxruntime fuses it from several operators; export the model without that fusion",
    "AttnLSTM", "BranchwiseRMSNorm", "CausalConvWithState", "EngramGate", "GatedAdd", "GatedDeltaNet", "GatedRMSNorm", "GatedRelativePositionBias",
    "GemmaRotaryEmbedding", "HyperConnectionPostMix", "HyperConnectionPreMix", "LinearAttention",
    "LinearAttentionGate", "MRotaryEmbedding", "MaxpoolWithMask", "UnfoldTensor",
    "VarlenCausalConvWithState",
    domain=MICROSOFT,
)  # fmt: skip
refused("its 4-bit floats are decoded by a table inside the kernel", "MatMulBnb4", domain=MICROSOFT)
refused("its slope depends on the metric, and many have none at 0", "CDist", domain=MICROSOFT)
refused("one of its inputs is a sparse tensor", "SparseToDenseMatMul", domain=MICROSOFT)
refused("its operands live in an accelerator's own format", "EPContext", "Snpe", domain=MICROSOFT)
