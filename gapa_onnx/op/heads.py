"""The functions that heads may call, by operator."""

from __future__ import annotations

from gapa_onnx.op.classes import classes_body
from gapa_onnx.op.contract import CLASSES, LEADING
from gapa_onnx.op.leading import leading_body

OF_HEADS = {CLASSES.name: classes_body, LEADING.name: leading_body}
