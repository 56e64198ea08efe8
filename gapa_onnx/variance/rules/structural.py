"""Operators that move, repeat, drop or retype elements, and those that look at shapes only."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from gapa_onnx.model.dtypes import is_float, is_whole, variance_dtype
from gapa_onnx.variance.rules.registry import (
    Accuracy,
    deterministic,
    of_every_node,
    refused,
    rule,
    structural,
    variance_or_zeros,
)
from gapa_onnx.variance.rules.view import NodeView, Operand
from gapa_onnx.variance.values import Deferred, Part, Partial, Value

structural("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")
structural("Slice", "Split", "Gather", "GatherElements", "GatherND", "Expand", "Tile")
structural("DepthToSpace", "SpaceToDepth", "Compress", "ReverseSequence", "Trilu")
structural(
    "Where",
    data=slice(1, None),
    slopes=of_every_node(
        None,
        lambda y, condition, a, b: a.graph.cast(condition, a.dtype),
        lambda y, condition, a, b: 1 - a.graph.cast(condition, a.dtype),
    ),
)

deterministic(
    "it depends on shapes or constants only",
    "Shape",
    "Size",
    "Constant",
    "ConstantOfShape",
    "Range",
    "EyeLike",
)
deterministic(
    "its output is discrete", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "And", "Or", "Not", "Xor", "IsNaN", "IsInf", "NonZero", "BitShift", "Multinomial", "Bernoulli",
    "NonMaxSuppression",
)  # fmt: skip
deterministic("it works on whole numbers", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")
deterministic(
    "it works on text", "StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"
)
deterministic("it reads an encoded image", "ImageDecoder")
deterministic("it draws at random whatever the values of its input", "RandomNormalLike", "RandomUniformLike")
deterministic("it draws at random and has no input", "RandomNormal", "RandomUniform")
refused("it reads the bits of a number as another type", "BitCast")
refused(
    "it is an operator of training",
    "Gradient",
    "Adagrad",
    "Adam",
    "Momentum",
    domain="ai.onnx.preview.training",
)


@rule("Identity", accuracy=Accuracy.EXACT)
def identity(node: NodeView) -> Value:
    """v, unchanged."""
    return node.inputs[0].variance


@rule("Dropout", accuracy=Accuracy.EXACT)
def dropout(node: NodeView) -> tuple[Value | None, ...]:
    """v, unchanged: nothing is dropped at inference."""
    require_inference(node)
    return (node.inputs[0].var, *[None] * (len(node.outputs) - 1))


def require_inference(node: NodeView) -> None:
    """Refuse a Dropout that may drop something."""
    training = node.input(2) if node.op_type == "Dropout" else None
    if training is not None and (training.constant is None or bool(np.any(training.constant))):
        raise node.refuse("training_mode may be on: elements are dropped at random")


@rule("Cast", accuracy=Accuracy.EXACT)
def cast(node: NodeView) -> Value | None:
    """v; nothing leaves a cast from floating-point to whole numbers, truth values or text."""
    target = node.attr("to")
    if isinstance(target, (int, np.integer)):
        target = onnx.helper.tensor_dtype_to_np_dtype(int(target))
    return _retyped(node.inputs[0], target)


@rule("CastLike", accuracy=Accuracy.EXACT)
def cast_like(node: NodeView) -> Value | None:
    """v; nothing leaves a cast from floating-point to whole numbers, truth values or text."""
    x, pattern = node.inputs
    return None if x.certain else _retyped(x, pattern.tensor.dtype)


def _retyped(x: Operand, target: Any) -> Value | None:
    """Whole numbers that are uncertain stand for real ones (`quantised`): they stay so as wider ones."""
    if is_float(target):
        return x.graph.cast(x.variance, variance_dtype(target))
    return x.var if is_whole(target) and is_whole(x.tensor.dtype) else None


@rule("Concat", accuracy=Accuracy.EXACT)
def concat(node: NodeView) -> Value:
    """The same node, on the variance.

    Parts that are certain are left out until something reads the whole, and deferred ones stay so.
    """
    sizes = _known_sizes(node)
    if sizes is None or not any(x.certain or isinstance(x.var, Deferred) for x in node.inputs):
        return node.again(*(variance_or_zeros(x) for x in node.inputs))
    axis = node.attr("axis") % node.inputs[0].rank
    parts: list[Part] = []
    for x, size in zip(node.inputs, sizes):
        if isinstance(x.var, Partial) and x.var.axis == axis:
            parts.extend(x.var.parts)
        else:
            parts.append(Part(size, x.var, x.mean))
    return Partial(parts, axis)


def _known_sizes(node: NodeView) -> list[int] | None:
    """The size of each input of a Concat along the axis; None unless each is known and has something there."""
    axis = node.attr("axis")
    sizes = [None if x.shape is None else x.shape[axis] for x in node.inputs]
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    return known if len(known) == len(sizes) else None


@rule("Pad", accuracy=Accuracy.EXACT)
def pad(node: NodeView) -> Value:
    """The same node on the variance; what a constant fills in is certain."""
    if node.opset < 11:
        return node.again(node.inputs[0].var, value=0.0)
    pads, axes = node.inputs[1], node.input(3)
    fill = node.input(2)
    if fill is not None and not fill.certain:
        raise node.refuse("the padding value is uncertain")
    return node.again(node.inputs[0].var, pads.raw, *([None, axes.raw] if axes else []))
