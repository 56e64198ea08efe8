"""Element types: the conversions that keep the meaning are made, all others are refused."""

from __future__ import annotations

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.spec import InputSpec, dtype_name
from gapa_onnx.errors import UserError


def kind(dtype: np.dtype) -> str:
    """text, bool, int, float, complex or other; onnx's own types (bfloat16, float8, int4) go by name."""
    if dtype.kind in "USO":
        return "text"
    if dtype.kind in "biufc":
        return {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}[dtype.kind]
    if dtype.name.startswith(("bfloat", "float")):
        return "float"
    return "int" if dtype.name.startswith(("int", "uint")) else "other"


def convertible(given: np.dtype, wanted: np.dtype) -> bool:
    """Whether some values of one type are values of the other; `convert` looks at the values."""
    real = ("bool", "int", "float")
    if kind(wanted) == "complex":
        return kind(given) in (*real, "complex")
    if kind(given) in real and kind(wanted) in real:
        return True
    return given == wanted or kind(given) == kind(wanted) != "other"


def require_convertible(given: np.dtype, spec: InputSpec, where: str) -> None:
    """Refuse by type alone, before anything is read."""
    if convertible(given, spec.dtype):
        return
    raise UserError(
        f"{where} is of type {dtype_name(given)}, but input '{spec.name}' takes {spec}",
        "text goes to text inputs only, and numbers to numeric inputs",
    )


def convert(array: Array, spec: InputSpec, where: str) -> Array:
    """The array as the input's type: a new C-contiguous array, or a UserError where a value would change.

    Rounding a number to a narrower float is no change. 0.5 for an integer, 300 for a uint8, and 1e6
    for a float16 (it would become infinite) are.
    """
    require_convertible(array.dtype, spec, where)
    wanted = spec.dtype
    if kind(wanted) == "text":
        return _text(array, spec, where)
    if array.dtype.kind == "V" and array.dtype != wanted:
        array = array.astype(np.float32 if kind(array.dtype) == "float" else np.int64)
    if wanted.kind in "biu" and array.dtype != wanted:
        _require_integers(array, spec, where)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = np.array(array, dtype=wanted, order="C", copy=True, subok=False)
    # as wide counts as narrower too: 65535 is a uint16 and infinite as a float16
    narrower = wanted.kind == "f" and array.dtype != wanted and wanted.itemsize <= array.dtype.itemsize
    if narrower and np.any(np.isinf(converted) & np.isfinite(array)):
        raise UserError(
            f"{where} holds values too large for input '{spec.name}', which takes {spec}",
            "scale the data as the model expects them",
        )
    return converted


def _require_integers(array: Array, spec: InputSpec, where: str) -> None:
    if array.size == 0 or array.dtype == np.bool_:
        return
    if array.dtype.kind == "f":
        broken = array[~(np.isfinite(array) & (array == np.rint(array)))]
        if broken.size:
            raise UserError(
                f"{where} holds {broken.flat[0]}, but input '{spec.name}' takes whole numbers ({spec})",
                "store this array with an integer type",
            )
    low, high = (0, 1) if spec.dtype == np.bool_ else (np.iinfo(spec.dtype).min, np.iinfo(spec.dtype).max)
    for value in (int(array.min()), int(array.max())):
        if not low <= value <= high:
            raise UserError(
                f"{where} holds {value}, but input '{spec.name}' takes {spec}, that is {low} to {high}",
                "check that this array is meant for this input",
            )


def _text(array: Array, spec: InputSpec, where: str) -> Array:
    if array.dtype.kind == "U":
        texts = array
    else:
        try:
            # object or bytes; `.decode` is what a str does not have, and a number has neither
            items = [item.decode() if isinstance(item, bytes) else item for item in array.ravel().tolist()]
        except UnicodeDecodeError as error:
            raise UserError(f"{where} holds bytes that are not UTF-8", "store the text as str") from error
        other = next((item for item in items if not isinstance(item, str)), None)
        if other is not None or None in items:
            raise UserError(
                f"{where} holds a Python {type(other).__name__}, but input '{spec.name}' takes text",
                "arrays of Python objects are accepted only if every element is a str",
            )
        texts = np.array(items, dtype=object).reshape(array.shape)
    return np.array(texts, dtype=spec.dtype if spec.dtype.kind == "O" else np.str_, order="C", copy=True)
