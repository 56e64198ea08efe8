"""Quantised graphs: integers q that stand for real numbers (q - z) s, with zero point z and scale s.

The variance of a tensor is that of the numbers which the tensor holds, here as everywhere. That of a
quantised tensor is thus in squared steps of q, that of an int32 accumulator in its own units, and
whatever follows needs no special case: a Cast to float keeps it, a Mul by the scales brings it to
real units, reshaping and pooling of integers are the rules that floats have. In real units instead,
the same q would mean one thing in front of a DequantizeLinear and another in front of a MatMulInteger.

    QuantizeLinear      v / s²       DequantizeLinear    v s²

Rounding counts as the identity ("straight through"): its slope is 0 almost everywhere, yet over more
than a step it is 1 on average. What rounding itself adds, 1/12 of a squared step, is part of the
model and not of its uncertainty. An element at an end of its integer range is saturated, and passes
nothing on, as a Clip does.

Weights are dequantised inside the variance graph, from the integers of the source: the file does not
grow, and runtimes fold the arithmetic when they load it. Means are read from quantised tensors and
not from the floats between a layer and its QuantizeLinear, which a runtime computes in integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.rules.hoisting import MANY, at_conversion
from gapa_onnx.variance.rules.registry import (
    Accuracy,
    deterministic,
    refused,
    rule,
)
from gapa_onnx.variance.rules.view import NodeView, Operand
from gapa_onnx.variance.values import Scaled, Wide
from gapa_onnx.variance.weights import read_packed

EXACT, FIRST_ORDER = Accuracy.EXACT, Accuracy.FIRST_ORDER
MICROSOFT = "com.microsoft"
Factor = Value | float


# ---------------------------------------------------------------- scales, zero points


def numbers_along(node: NodeView, at: int, axis: int = 0, rank: Callable[[], int] = lambda: 1) -> Factor:
    """A scale or zero point: a number, or a tensor along `axis` of one that has `rank` axes."""
    operand = node.input(at)
    if operand is None:
        return 0.0  # zero points may be left out, scales may not
    if not operand.certain:
        raise node.refuse("its scales or zero points are uncertain")
    if operand.constant is not None and np.size(operand.constant) == 1:
        return float(np.asarray(operand.constant).item())
    if operand.shape is None or len(operand.shape) != 1 or operand.shape[0] == 1:
        return operand.mean  # one number that is known at run time only, or a tensor that broadcasts as it is
    behind = rank() - 1 - axis % rank()
    return node.graph.unsqueeze(operand.mean, list(range(1, behind + 1))) if behind else operand.mean


def one_number(node: NodeView, at: int) -> Factor:
    """A scale or zero point that must be one number for the whole tensor."""
    operand = node.input(at)
    shape = operand.shape if operand is not None else None
    if shape is not None and any(size != 1 for size in shape if isinstance(size, int)):
        raise node.refuse("only weights may have a scale per channel")
    return numbers_along(node, at)


def held_numbers(node: NodeView, operand: Operand) -> tuple[Value, np.dtype]:
    """A quantised tensor as floats, and its own type."""
    held = _held(node, node.graph, operand)
    return node.graph.cast(held, np.float32), held.dtype


def _held(node: NodeView, graph: VarianceGraph, operand: Operand) -> Value:
    """A tensor in its own type, also one that graphsurgeon has no name for."""
    dtype = operand.tensor.dtype
    if dtype is None:
        raise node.refuse(f"the type of {operand.tensor.name!r} is unknown")
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int) else dtype)
    return graph.tensor(operand.tensor.name, dtype)


def steps_from_zero(node: NodeView, at: int, zero: Factor) -> Value:
    """q - z"""
    return held_numbers(node, node.inputs[at])[0] - zero


def unsaturated(node: NodeView, var: Value) -> Value:
    """The variance inside the output's range of numbers, 0 at its ends, also where it is infinite: a scale may be so
    small that squared steps overflow."""
    held, dtype = held_numbers(node, node.output)
    # ml_dtypes, which knows more types than numpy, has no type annotations.
    limits: Any = ml_dtypes.iinfo(dtype) if "int" in dtype.name else ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    above, below = (
        node.graph.compare(comparison, held, float(limit))
        for comparison, limit in (("Greater", limits.min), ("Less", limits.max))
    )
    return node.graph.where(node.graph.emit("And", above, below, dtype=np.bool_), var, var.lift(0))


def in_steps(var: Value, scale: Factor) -> Value:
    """v / s², by two divisions: a small scale has a square of 0, and 0 / 0 is no number."""
    return var / scale / scale


# ------------------------------------------------------ into integers and out of them


def _spread_scale(node: NodeView) -> Factor:
    """The scale of Quantize- and DequantizeLinear, in a shape that broadcasts against the data."""
    x, scale = node.inputs[:2]
    shape = scale.shape
    per_tensor = shape is not None and all(size == 1 for size in shape) and not node.attr("block_size", 0)
    per_axis = shape is not None and len(shape) == 1 and x.shape is not None
    if per_tensor or (per_axis and not node.attr("block_size", 0)):
        return numbers_along(node, 1, node.attr("axis", 1), lambda: x.rank)
    if not scale.certain:
        raise node.refuse("its scales or zero points are uncertain")
    # Blocks, or an axis of a tensor of unknown rank: the operator itself spreads the scale, over ones.
    ones = node.graph.cast(node.graph.zeros(x.mean) + 1, np.int8)
    attrs = {name: node.attr(name) for name in ("axis", "block_size") if node.attr(name) is not None}
    spread = node.graph.emit(
        "DequantizeLinear", ones, scale.raw, domain=node.node.domain or "", dtype=scale.raw.dtype, **attrs
    )
    return node.graph.cast(spread, x.dtype)


@rule("QuantizeLinear", accuracy=FIRST_ORDER)
@rule("QuantizeLinear", accuracy=FIRST_ORDER, domain=MICROSOFT)
def quantize(node: NodeView) -> Value:
    """v / s² inside the range of the integers, 0 at its ends."""
    scale = _spread_scale(node)
    return unsaturated(node, in_steps(node.inputs[0].variance, scale))


@rule("DequantizeLinear", accuracy=EXACT)
@rule("DequantizeLinear", accuracy=EXACT, domain=MICROSOFT)
def dequantize(node: NodeView) -> Value:
    """v s²"""
    scale = _spread_scale(node)
    return node.inputs[0].variance * (scale * scale)


@rule("DynamicQuantizeLinear", accuracy=FIRST_ORDER)
def dynamic_quantize(node: NodeView) -> tuple[Value | None, ...]:
    """v / s²; the range is that of the data, so nothing is saturated. Scale and zero point are certain:
    whatever they are, (q - z) s is x."""
    return (in_steps(node.inputs[0].variance, node.outputs[1].mean), None, None)


# ----------------------------------------------------------------------------- layers


def _product(
    node: NodeView,
    f: Callable[[Value, Value], Value],
    data: int,
    a: Value,
    weights: int,
    b: Value,
    factor: Factor,
) -> Value:
    """Var of f(a, b · factor) for data and weights of the node, whose means are a and b."""
    x, w = node.inputs[data], node.inputs[weights]
    square = factor * factor
    terms = []
    if not x.certain:
        terms.append(f(x.variance, b.squared * square))
    if not w.certain:
        if x.tensor.name == w.tensor.name:
            raise node.refuse("a tensor is multiplied by itself: its factors are not independent")
        terms.append(f(a.squared, w.variance * square))
    if not x.certain and not w.certain:
        terms.append(f(x.variance, w.variance * square))
    if not terms:
        raise node.refuse("only its data and its weights may be uncertain")
    return sum(terms[1:], terms[0])


def _no_uncertain_bias(node: NodeView, at: int) -> None:
    bias = node.input(at)
    if bias is not None and not bias.certain:
        raise node.refuse("its bias is uncertain")


def _matmul(node: NodeView) -> Callable[[Value, Value], Value]:
    return lambda a, b: node.graph.emit("MatMul", a, b)


_CONV_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _conv(node: NodeView, x: Operand) -> Callable[[Value, Value], Value]:
    attrs = {name: node.attr(name) for name in _CONV_ATTRIBUTES if node.attr(name) is not None}
    if not node.attr("channels_last", 0):
        return lambda a, b: node.graph.emit("Conv", a, b, **attrs)
    first, last = [0, x.rank - 1, *range(1, x.rank - 1)], [0, *range(2, x.rank), 1]

    def channels_last(a: Value, b: Value) -> Value:
        a = node.graph.emit("Transpose", a, perm=first)
        return node.graph.emit("Transpose", node.graph.emit("Conv", a, b, **attrs), perm=last)

    return channels_last


@rule("MatMulInteger", accuracy=EXACT, linear=True)
@rule("MatMulInteger16", accuracy=EXACT, linear=True, domain=MICROSOFT)
def matmul_integer(node: NodeView) -> Value:
    """f(v_a, (b - z_b)²) + f((a - z_a)², v_b) + f(v_a, v_b), f the matrix product"""
    a = steps_from_zero(node, 0, numbers_along(node, 2, 0, lambda: 2))  # one zero point per row is a column
    b = steps_from_zero(node, 1, numbers_along(node, 3))
    return _product(node, _matmul(node), 0, a, 1, b, 1.0)


@rule("ConvInteger", accuracy=EXACT, linear=True)
def conv_integer(node: NodeView) -> Value:
    """f(v_x, (w - z_w)²) + f((x - z_x)², v_w) + f(v_x, v_w), f the convolution"""
    w = steps_from_zero(node, 1, numbers_along(node, 3, 0, lambda: node.inputs[1].rank))
    return _product(
        node, _conv(node, node.inputs[0]), 0, steps_from_zero(node, 0, one_number(node, 2)), 1, w, 1.0
    )


@rule("QLinearConv", accuracy=FIRST_ORDER, linear=True, operands=(0, 3))
@rule("QLinearConv", accuracy=FIRST_ORDER, linear=True, operands=(0, 3), domain=MICROSOFT)
def qlinear_conv(node: NodeView) -> Value:
    """(s_x / s_y)² f(v_x, (s_w (w - z_w))²), f the convolution; 0 where the output is saturated."""
    _no_uncertain_bias(node, 8)
    rank = lambda: node.inputs[3].rank  # noqa: E731  (asked for only where there is a scale per channel)
    factor = numbers_along(node, 4, 0, rank) * (one_number(node, 1) / one_number(node, 6))
    w = steps_from_zero(node, 3, numbers_along(node, 5, 0, rank))
    x = steps_from_zero(node, 0, one_number(node, 2))
    return unsaturated(node, _product(node, _conv(node, node.inputs[0]), 0, x, 3, w, factor))


@rule("QLinearMatMul", accuracy=FIRST_ORDER, linear=True, operands=(0, 3))
def qlinear_matmul(node: NodeView) -> Value:
    """(s_a / s_y)² f(v_a, (s_b (b - z_b))²), f the matrix product; 0 where the output is saturated."""
    factor = numbers_along(node, 4) * (one_number(node, 1) / one_number(node, 6))
    a, b = steps_from_zero(node, 0, one_number(node, 2)), steps_from_zero(node, 3, numbers_along(node, 5))
    return unsaturated(node, _product(node, _matmul(node), 0, a, 3, b, factor))


@rule("QGemm", accuracy=FIRST_ORDER, linear=True, operands=(0, 3), domain=MICROSOFT)
def qgemm(node: NodeView) -> Value:
    """(α s_a / s_y)² f(v_a, (s_b (b - z_b))²), f the product; 0 where the output is saturated.

    Without s_y the output is real: s_y is 1 and nothing is saturated.
    """
    _no_uncertain_bias(node, 6)
    turn_a, turn_b = node.attr("transA", 0), node.attr("transB", 0)
    columns = (lambda: 2) if turn_b else (lambda: 1)  # the scales of B's columns, as B stands
    factor = numbers_along(node, 4, 0, columns) * (node.attr("alpha", 1.0) * one_number(node, 1))
    a, b = (
        steps_from_zero(node, 0, one_number(node, 2)),
        steps_from_zero(node, 3, numbers_along(node, 5, 0, columns)),
    )

    def f(a: Value, b: Value) -> Value:
        a = node.graph.emit("Transpose", a, perm=[1, 0]) if turn_a else a
        b = node.graph.emit("Transpose", b, perm=[1, 0]) if turn_b else b
        return node.graph.emit("MatMul", a, b)

    if node.input(7) is None:
        return _product(node, f, 0, a, 3, b, factor)
    return unsaturated(node, _product(node, f, 0, a, 3, b, factor / one_number(node, 7)))


@rule("MatMulIntegerToFloat", accuracy=EXACT, linear=True, domain=MICROSOFT)
def matmul_integer_to_float(node: NodeView) -> Value:
    """s_a² f(v_a, (s_b (b - z_b))²), f the matrix product"""
    _no_uncertain_bias(node, 6)
    a, b = steps_from_zero(node, 0, one_number(node, 4)), steps_from_zero(node, 1, numbers_along(node, 5))
    return _product(node, _matmul(node), 0, a, 1, b, numbers_along(node, 3) * one_number(node, 2))


@rule("DynamicQuantizeMatMul", accuracy=FIRST_ORDER, linear=True, domain=MICROSOFT)
def dynamic_quantize_matmul(node: NodeView) -> Value:
    """f(v_a, (s_b (b - z_b))²), f the matrix product; a is quantised inside, by a scale that cancels."""
    _no_uncertain_bias(node, 4)
    b = steps_from_zero(node, 1, numbers_along(node, 3))
    return _product(node, _matmul(node), 0, node.inputs[0].mean, 1, b, numbers_along(node, 2))


# ------------------------------------------------------------------ weights of few bits


def _unpacked(graph: VarianceGraph, packed: Value, bits: int, count: int) -> Value:
    """Bytes (n, m) of several numbers each, the first in the lowest bits, as floats (n, count).

    By division and remainder: ONNX has shifts of bits from opset 11 on and masks from 18 on only.
    """
    numbers, rest = [], packed
    for _ in range(8 // bits):
        above = graph.emit("Floor", rest * 2.0**-bits)
        numbers.append(graph.unsqueeze(rest - above * 2.0**bits, [2]))
        rest = above
    rows = graph.emit("Concat", *numbers, axis=2) if len(numbers) > 1 else numbers[0]
    rows = graph.emit("Reshape", rows, graph.ints(0, -1))
    return graph.slice(rows, 1, 0, count)


@rule("MatMulNBits", accuracy=EXACT, linear=True, domain=MICROSOFT)
def matmul_nbits(node: NodeView) -> Value:
    """f(v_a, (s (b - z))²), f the matrix product; weights of 2, 4 or 8 bits with a scale per block."""
    if node.attr("bits", 4) not in (2, 4, 8):
        raise node.refuse(f"weights of {node.attr('bits', 4)} bits are not packed in whole bytes")
    if node.attr("weight_prepacked", 0):
        raise node.refuse("its weights are packed for one kind of processor")
    if node.input(4) is not None:
        raise node.refuse("its groups are permuted by g_idx")
    _no_uncertain_bias(node, 5)
    x = node.inputs[0]
    if any(not operand.certain for operand in node.inputs[1:]):
        raise node.refuse("only its data may be uncertain")
    if isinstance(x.var, Scaled):
        found = at_conversion(node, x.var, lambda: read_packed(node.node))
        if found is not None:
            return found

    def some(graph: VarianceGraph, var: Value, indices: Value) -> Value:
        row = graph.emit("Reshape", var, graph.ints(-1, 1))
        behind = graph.emit("MatMul", _few_bits(node, graph, indices).squared, row)
        return graph.emit("Reshape", behind, graph.ints(-1))

    def whole() -> Value:
        turned = node.graph.emit("Transpose", _few_bits(node, node.graph), perm=[1, 0])  # (K, N)
        return node.graph.emit("MatMul", x.variance, turned.squared)

    return Wide(x.variance, node.attr("K"), some, whole) if node.attr("N") >= MANY else whole()


def _few_bits(node: NodeView, graph: VarianceGraph, indices: Value | None = None) -> Value:
    """Rows (n, K) of the weights of a MatMulNBits: all of them, or those at indices."""
    bits, block, width, rows = node.attr("bits", 4), node.attr("block_size"), node.attr("K"), node.attr("N")
    blocks = -(-width // block)

    def read(at: int) -> Value:
        values = graph.emit("Reshape", _held(node, graph, node.inputs[at]), graph.ints(rows, -1))
        values = values if indices is None else graph.emit("Gather", values, indices, axis=0)
        return graph.cast(values, np.float32)

    scales = graph.emit("Reshape", read(2), graph.ints(-1, blocks, 1))
    zero: Factor = 2.0 ** (bits - 1)
    if node.input(3) is not None:
        zero = read(3)
        if node.inputs[3].tensor.dtype == np.uint8:  # packed as the weights are, each row by itself
            zero = _unpacked(graph, zero, bits, blocks)
        zero = graph.emit("Reshape", zero, graph.ints(-1, blocks, 1))
    steps = _unpacked(graph, read(1), bits, blocks * block)
    steps = graph.emit("Reshape", steps, graph.ints(-1, blocks, block))
    weights = graph.emit("Reshape", (steps - zero) * scales, graph.ints(-1, blocks * block))
    return graph.slice(weights, 1, 0, width)


# ------------------------------------------------------------------------- no rule

deterministic(
    "it reads tables of constants at whole numbers",
    "GatherBlockQuantized",
    "QEmbedLayerNormalization",
    domain=MICROSOFT,
)
refused("its quantised projections, softmax and product are one kernel", "QAttention", domain=MICROSOFT)
refused("its weights are packed in a layout of one processor", "MatMulFpQ4", domain=MICROSOFT)
refused(
    "onnxruntime runs it on a graphics processor or another accelerator only", "MulInteger",
    "ReduceSumInteger", "QLinearReduceMean", "QOrderedAttention", "QOrderedGelu",
    "QOrderedLayerNormalization", "QOrderedLongformerAttention", "QOrderedMatMul", "QuantizeWithOrder",
    "DequantizeWithOrder", "QuantizeBFP", "DequantizeBFP", "MatMulBlockQuantizedFp8Weight",
    "MatMulBlockQuantizedFp4Weight", "MatMulNBitsQkv", "MatMulNBitsMlp", domain=MICROSOFT,
)  # fmt: skip
for custom in ("qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general"):
    refused(
        "onnxruntime has no kernel for it: lower it to QuantizeLinear and DequantizeLinear first",
        "Quant", "IntQuant", "FloatQuant", "BipolarQuant", "Trunc", domain=custom,
    )  # fmt: skip
