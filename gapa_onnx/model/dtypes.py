"""Which types of tensors carry a variance, and in which type it is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx


def variance_dtype(dtype: Any) -> np.dtype:
    """Variances of a double model are double, all others float32 (float16 would overflow)."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def is_float(dtype: Any) -> bool:
    """True for what can carry a variance; an unknown type, or a sequence's or map's, is taken for a float."""
    if dtype is None or (isinstance(dtype, int) and dtype == onnx.TensorProto.UNDEFINED):
        return True
    try:
        return np.issubdtype(np.dtype(dtype), np.floating) or "float" in np.dtype(dtype).name
    except TypeError:  # graphsurgeon hands types that numpy lacks over as ONNX enum values
        return bool(dtype == onnx.TensorProto.BFLOAT16)


def is_whole(dtype: Any) -> bool:
    """True for integers, which carry a variance where they stand for real numbers."""
    return (
        dtype is not None and not isinstance(dtype, int) and np.dtype(dtype).name.startswith(("int", "uint"))
    )


def is_quantised(dtype: Any) -> bool:
    """True for the types that quantised activations have."""
    return is_whole(dtype) and np.dtype(dtype).itemsize <= 2
