"""Honest error bars for any trained ONNX model.

>>> import gapa_onnx
>>> gapa_onnx.convert("model.onnx", "data/", "model.gapa.onnx")
>>> session = gapa_onnx.session("model.gapa.onnx")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gapa_onnx.errors import of_a_missing_runtime

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gapa_onnx.compiler import Conversion, collect, convert
    from gapa_onnx.data import ImageOptions, TextOptions
    from gapa_onnx.errors import UserError
    from gapa_onnx.fit.parts import Collected
    from gapa_onnx.measure.evaluation.evaluate import evaluate
    from gapa_onnx.measure.evaluation.report import write_figures, write_report
    from gapa_onnx.measure.evaluation.result import Evaluation
    from gapa_onnx.monitor.watch import watch
    from gapa_onnx.packaging.stacks import Package, package
    from gapa_onnx.sessions.runtime import library_path, session
    from gapa_onnx.settings import Settings
    from gapa_onnx.settle.thresholds import Threshold, set_threshold, thresholds

_HOME = {
    "Collected": "fit.parts",
    "Conversion": "compiler",
    "collect": "compiler",
    "convert": "compiler",
    "ImageOptions": "data",
    "TextOptions": "data",
    "UserError": "errors",
    "Evaluation": "measure.evaluation.result",
    "evaluate": "measure.evaluation.evaluate",
    "write_figures": "measure.evaluation.report",
    "write_report": "measure.evaluation.report",
    "Package": "packaging.stacks",
    "package": "packaging.stacks",
    "library_path": "sessions.runtime",
    "session": "sessions.runtime",
    "Settings": "settings",
    "Threshold": "settle.thresholds",
    "set_threshold": "settle.thresholds",
    "thresholds": "settle.thresholds",
    "watch": "monitor.watch",
}

__all__ = [
    "Collected",
    "Conversion",
    "Evaluation",
    "ImageOptions",
    "Package",
    "Settings",
    "TextOptions",
    "Threshold",
    "UserError",
    "collect",
    "convert",
    "evaluate",
    "library_path",
    "package",
    "session",
    "set_threshold",
    "thresholds",
    "watch",
    "write_figures",
    "write_report",
]


def __getattr__(name: str) -> object:
    """Load a name when it is first used: onnxruntime and FAISS take a second, which help should not."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as error:
        raise of_a_missing_runtime(error) or error from None
    return getattr(home, name)
