"""The native library of gapa-onnx by itself, for where files are served: nothing here needs another package.

>>> options = onnxruntime.SessionOptions()
>>> options.register_custom_ops_library(str(gapa_onnx_runtime.library_path()))
"""

from __future__ import annotations

import sys
from pathlib import Path

__version__ = "0.1.0"

_NAME = {"win32": "gapa_onnx.dll", "darwin": "libgapa_onnx.dylib"}.get(sys.platform, "libgapa_onnx.so")


def library_path() -> Path:
    """Where the library lies; FileNotFoundError where this installation has none."""
    for folder in __path__:  # an editable install has two
        library = Path(folder) / _NAME
        if library.is_file():
            return library
    raise FileNotFoundError(f"there is no {_NAME} in {', '.join(__path__)}: install gapa-onnx-runtime again")
