"""Calibration and evaluation data: from what people have on disk to batches that fit the model.

`open_data` is the way in; `source` says which formats there are. The flow is
reader -> Bundle (named, lazily read arrays) -> Binding (names, shapes and rows agreed) -> batches.
"""

from gapa_onnx.data.batching import Batch
from gapa_onnx.data.held_out import HeldOut, hold_out, require_apart, set_apart
from gapa_onnx.data.remembered import Remembered, metadata, remembered
from gapa_onnx.data.source import DataSource, open_data, recalled
from gapa_onnx.data.spec import ImageOptions, InputSpec, Preparation, TextOptions

__all__ = [
    "Batch",
    "DataSource",
    "HeldOut",
    "ImageOptions",
    "InputSpec",
    "Preparation",
    "Remembered",
    "TextOptions",
    "hold_out",
    "metadata",
    "open_data",
    "recalled",
    "remembered",
    "require_apart",
    "set_apart",
]
