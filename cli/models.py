"""Reading model files that may be converted already, which `load` refuses."""

from __future__ import annotations

from pathlib import Path

import onnx

from gapa_onnx.load import _read


def read_model(path: Path) -> onnx.ModelProto:
    """Any ONNX file; what cannot be read is a UserError, as in `load`."""
    return _read(path)
