"""The functions that heads may call, by operator."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx

from gapa_onnx.op.classes import classes_body
from gapa_onnx.op.contract import CLASSES, LEADING
from gapa_onnx.op.leading import leading_body


def head_bodies(opset: int, called: Collection[str], many_rows: bool) -> Iterator[onnx.FunctionProto]:
    """The functions of the operators that are called; `many_rows` where a sample has several rows of classes."""
    if CLASSES.name in called:
        yield classes_body(opset, in_blocks=many_rows)
    if LEADING.name in called:
        yield leading_body(opset)
