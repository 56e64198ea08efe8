"""Honest error bars for any trained ONNX model.

>>> import gapa_onnx
>>> gapa_onnx.convert("model.onnx", "data/", "model.gapa.onnx")
>>> session = gapa_onnx.session("model.gapa.onnx")
"""

from __future__ import annotations

__version__ = "0.1.0"

from gapa_onnx.compiler import Conversion, convert
from gapa_onnx.data import ImageOptions
from gapa_onnx.errors import UserError
from gapa_onnx.runtime import library_path, session
from gapa_onnx.settings import Settings
from gapa_onnx.verify import Check, verify

__all__ = [
    "Check", "Conversion", "ImageOptions", "Settings", "UserError", "convert", "library_path", "session", "verify",
]  # fmt: skip
