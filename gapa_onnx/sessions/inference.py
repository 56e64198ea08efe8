"""Running a model over data: the file opened, what its inputs take, one batch answered.

What onnxruntime throws at a broken file or unfit data is the user's to fix, and becomes a `UserError`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch, InputSpec
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import require_readable
from gapa_onnx.record import METADATA_KEY, Record, parse
from gapa_onnx.sessions.runtime import first_line, open_session, register_or_say, session, session_options


def open_model(
    model: str | os.PathLike[str] | onnx.ModelProto, *, portable: bool = False, threads: int = 0
) -> ort.InferenceSession:
    """A session of a converted file, or of any other model; `portable` leaves the native library out."""
    options = session_options(threads=threads)
    if isinstance(model, onnx.ModelProto):
        if not portable:
            register_or_say(options)
        return open_session(model, "the model", options)
    require_readable(Path(model))
    given = label = os.fspath(model)
    try:
        if portable:
            return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        return session(given, options)
    except UserError:
        raise
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise UserError(
            f"onnxruntime cannot load {label}: {first_line(error)}",
            "check that it is a whole ONNX file; `gapa-onnx doctor` checks the installation",
        ) from error


def told_against(path: Path) -> str | None:
    """What ONNX's checker or onnxruntime has against a file, in its first words; None if nothing."""
    try:
        onnx.checker.check_model(str(path))
        open_model(path)
    except Exception as error:  # onnxruntime has no common base class for its errors
        return error.message if isinstance(error, UserError) else first_line(error)
    return None


def input_specs(opened: ort.InferenceSession) -> list[InputSpec]:
    """What a session says about its inputs, as the data layer wants it."""
    return [_input_spec(value) for value in opened.get_inputs()]


def run_batch(
    opened: ort.InferenceSession,
    names: Sequence[str] | None,
    batch: Mapping[str, Array],
    failed: str = "the model failed on the data",
    hint: str = "check their shape and range",
) -> list[Array]:
    """The named outputs for one batch, all of them for None; a list of maps from classes to numbers, one for each
    row, as (N, C). What onnxruntime says against it becomes a UserError that begins so."""
    return [as_array(found) for found in run_as_is(opened, names, batch, failed, hint)]


def run_as_is(
    opened: ort.InferenceSession,
    names: Sequence[str] | None,
    batch: Mapping[str, Array],
    failed: str = "the model failed on the data",
    hint: str = "check their shape and range",
) -> list[Any]:
    """The same with lists of maps as onnxruntime gives them."""
    quiet = ort.RunOptions()
    quiet.log_severity_level = 4  # what is wrong is told below, once
    try:
        found = opened.run(None if names is None else list(names), dict(batch), quiet)
    except Exception as error:  # as above
        raise UserError(f"{failed}: {first_line(error)}", hint) from error
    return [_copied(answer) for answer in found]


def _copied(answer: Any) -> Any:
    """The same in memory of its own: an array of onnxruntime's, however small, keeps all that its session has
    allocated, also after that is closed."""
    if isinstance(answer, np.ndarray):
        return answer.copy()
    return [_copied(entry) for entry in answer] if isinstance(answer, list) else answer


def as_array(answer: Any) -> Any:
    """A list of maps from classes to numbers as an array, classes in the order of their names; else as it is."""
    maps = isinstance(answer, list) and answer and all(isinstance(row, dict) for row in answer)
    return np.array([[row[name] for name in sorted(row)] for row in answer]) if maps else answer


def read_record(opened: ort.InferenceSession) -> Record | None:
    """The record of a converted file, None for any other model."""
    text = opened.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    return None if text is None else parse(text)


def row_count(batch: Mapping[str, Array], answers: Sequence[Any] = ()) -> int:
    """The samples of a batch. Of one as given they are the rows of the first answer, or one where that has none."""
    if not isinstance(batch, Batch):  # arrays that the caller has put together
        return max((array.shape[0] for array in batch.values() if array.ndim), default=1)
    if batch.rows is not None:
        return batch.rows
    first = next(
        (found for found in answers if isinstance(found, np.ndarray)), None
    )  # sequences have no rows
    return len(first) if first is not None and first.ndim else 1


def _input_spec(value: ort.NodeArg) -> InputSpec:
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    kind = {"float": "float32", "double": "float64", "string": "object"}.get(kind, kind)
    try:
        return InputSpec(value.name, np.dtype(kind), tuple(value.shape))
    except TypeError as error:
        raise UserError(
            f"input {value.name!r} is of type {value.type}", "only tensors of numpy's types can be fed"
        ) from error
