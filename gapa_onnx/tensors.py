"""What a serialized tensor must be before anybody reads it: of a known type, with as many bytes as its shape says.

What is wrong is told in words that go on "the tensor 'w' …".
"""

from __future__ import annotations

import math

import onnx

_TYPES = onnx.TensorProto.DataType
#: Bits of a number, of types that have no whole bytes; of all others numpy knows.
_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
#: Fields that hold numbers one by one.
_TYPED = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_PAIRS = ("COMPLEX64", "COMPLEX128")  # two numbers for each
LARGEST = 1 << 62  # elements that a shape may have


def is_text(*values: object) -> bool:
    """Whether names are UTF-8: of others protobuf gives the bytes."""
    return all(isinstance(value, str) for value in values)


def bits(kind: int) -> int:
    """Of a number of a known type other than text."""
    name = _TYPES.Name(kind)
    return _BITS.get(name) or 8 * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize


def fault(tensor: onnx.TensorProto) -> str | None:
    """What is wrong with a tensor; None if nothing is."""
    if tensor.data_type not in _TYPES.values() or tensor.data_type == onnx.TensorProto.UNDEFINED:
        return f"is of the type {tensor.data_type}, which ONNX does not have"
    if any(size < 0 for size in tensor.dims):
        return f"has the shape {tuple(tensor.dims)}"
    count = math.prod(tensor.dims)
    if count > LARGEST:
        return f"has {count:.0e} elements"
    typed = [name for name in _TYPED if len(getattr(tensor, name))]
    if tensor.HasField("segment"):
        return "is one part of another"
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return "has data both inside and outside of the file" if typed or tensor.raw_data else None
    if len(typed) + tensor.HasField("raw_data") > 1:
        return f"has its data twice, as {' and '.join([*typed, 'raw_data'][:2])}"
    return _wrong_size(tensor, typed, count)


def _wrong_size(tensor: onnx.TensorProto, typed: list[str], count: int) -> str | None:
    """What is wrong with how much a tensor holds."""
    name = _TYPES.Name(tensor.data_type)
    if tensor.HasField("raw_data"):
        if name == "STRING":
            return "is text as raw data"
        wanted, held = -(-count * bits(tensor.data_type) // 8), len(tensor.raw_data)
        return None if held == wanted else f"has {held} bytes in place of {wanted}"
    held = len(getattr(tensor, typed[0])) if typed else 0
    packed = -(-count * _BITS.get(name, 8) // 8)
    possible = {2 * count} if name in _PAIRS else {count, packed}
    return None if held in possible else f"has {held} numbers in place of {count}"
