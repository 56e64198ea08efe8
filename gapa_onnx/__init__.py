"""Honest error bars for any trained ONNX model.

>>> import gapa_onnx
>>> gapa_onnx.convert("model.onnx", "data/", "model.gapa.onnx")
>>> session = gapa_onnx.session("model.gapa.onnx")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gapa_onnx.compiler import Conversion, convert
    from gapa_onnx.data import ImageOptions
    from gapa_onnx.errors import UserError
    from gapa_onnx.runtime import library_path, session
    from gapa_onnx.settings import Settings

_HOME = {
    "Conversion": "compiler",
    "convert": "compiler",
    "ImageOptions": "data",
    "UserError": "errors",
    "library_path": "runtime",
    "session": "runtime",
    "Settings": "settings",
}

__all__ = ["Conversion", "ImageOptions", "Settings", "UserError", "convert", "library_path", "session"]


def __getattr__(name: str):
    """Load a name when it is first used: onnxruntime and FAISS take a second, `--help` should not."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
