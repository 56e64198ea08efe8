"""What `bench` feeds a model: one batch, of the user's data or made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch, InputSpec, Preparation, Remembered, open_data
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel
from gapa_onnx.sessions.feeding import feeding
from gapa_onnx.sessions.inference import row_count
from gapa_onnx.sessions.runtime import open_session


def fixed_batch(inputs: Sequence[InputSpec]) -> int | None:
    """The number of rows that a model wants in every run, None where it is free."""
    sizes = [spec.shape[0] for spec in inputs if spec.shape]
    known = [size for size in sizes if isinstance(size, int)]
    return known[0] if known and len(known) == len(sizes) else None


def _require_batch(inputs: Sequence[InputSpec], rows: int) -> None:
    fixed = fixed_batch(inputs)
    if fixed not in (None, rows):
        raise UserError(f"the model takes {fixed} row(s) at a time, not {rows}", f"use `batch={fixed}`")


def made_up(inputs: Sequence[InputSpec], rows: int) -> dict[str, Array]:
    """A batch that fits the inputs' types and shapes; free axes beyond the first have one element."""
    _require_batch(inputs, rows)
    generator = np.random.default_rng(0)
    sizes: dict[str, int] = {}
    feeds = {}
    for spec in inputs:
        if spec.shape is None:
            raise UserError(f"input {spec.name!r} has no declared shape", "give inputs with `data`")
        shape = []
        for axis, size in enumerate(spec.shape):
            free = rows if axis == 0 else 1
            if isinstance(size, str) and size:  # a symbol is one size everywhere
                free = sizes.setdefault(size, free)
            shape.append(size if isinstance(size, int) else free)
        feeds[spec.name] = _values(generator, spec.dtype, shape)
    return feeds


def _values(generator: np.random.Generator, dtype: np.dtype, shape: Sequence[int]) -> Array:
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    if dtype.kind in "USO":
        return np.full(shape, "", object)
    return np.ones(shape, dtype) if dtype.kind == "b" else np.zeros(shape, dtype)


def first_rows(
    data: Any,
    source: SourceModel,
    rows: int,
    preparation: Preparation | None = None,
    calibrated: Remembered | None = None,
) -> dict[str, Array]:
    """The first rows of the data, over and over until the batch is full; a whole batch where the model wants it as given."""
    if isinstance(data, Batch) and data.whole:
        return data
    _require_batch(source.inputs, rows)
    opened = open_session(source.given, source.label)
    found = next(feeding(opened, open_data(data, source.inputs, preparation, rows, calibrated)).batches())
    if found.whole:
        return found
    given = row_count(found)
    batched = {
        spec.name for spec in source.inputs if spec.shape is None or not isinstance((*spec.shape, 0)[0], int)
    }
    return {
        name: np.take(array, np.arange(rows) % given, axis=0)
        if given < rows and name in batched and array.ndim and len(array) == given
        else array
        for name, array in found.items()
    }
