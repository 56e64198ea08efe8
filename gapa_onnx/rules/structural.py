"""Operators that move, repeat, drop or retype elements, and those that look at shapes only."""

from __future__ import annotations

import numpy as np
import onnx

from gapa_onnx.graph import Value
from gapa_onnx.rules.registry import Accuracy, deterministic, rule, structural
from gapa_onnx.rules.view import NodeView, is_float, variance_dtype

structural("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")
structural("Slice", "Split", "Gather", "GatherElements", "GatherND", "Expand", "Tile")
structural("DepthToSpace", "SpaceToDepth", "Compress", "ReverseSequence", "Trilu")
structural("Concat", data=slice(0, None))
structural("Where", data=slice(1, None))

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
    "And", "Or", "Not", "Xor", "IsNaN", "IsInf", "NonZero", "BitShift", "Multinomial",
)  # fmt: skip
deterministic("it draws at random whatever the values of its input", "RandomNormalLike", "RandomUniformLike")


@rule("Identity", accuracy=Accuracy.EXACT)
def identity(node: NodeView) -> Value:
    """v, unchanged."""
    return node.inputs[0].var


@rule("Dropout", accuracy=Accuracy.EXACT)
def dropout(node: NodeView) -> tuple[Value | None, ...]:
    """v, unchanged: nothing is dropped at inference."""
    training = node.input(2)
    if training is not None and (training.constant is None or bool(np.any(training.constant))):
        raise node.refuse("training_mode may be on: elements are dropped at random")
    return (node.inputs[0].var, *[None] * (len(node.outputs) - 1))


@rule("Cast", accuracy=Accuracy.EXACT)
def cast(node: NodeView) -> Value | None:
    """v between floating-point types; nothing leaves a cast to whole numbers, truth values or text."""
    target = node.attr("to")
    if isinstance(target, (int, np.integer)):
        target = onnx.helper.tensor_dtype_to_np_dtype(target)
    if not is_float(target):
        return None
    return node.graph.cast(node.inputs[0].var, variance_dtype(target))


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
