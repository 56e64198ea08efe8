"""`gapa-onnx run`: a converted file, or any model, over data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import note, progress_bar, quiet_runtime, say_if_portable
from gapa_onnx.errors import UserError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, NodeArg

    from gapa_onnx.data import InputSpec

_Out = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="FILE", help="Write a .npz, .csv or .json; a table is shown unless given."
    ),
]
_Portable = Annotated[bool, typer.Option("--portable", help="Leave the native library out.")]


def run(
    out: options.Converted,
    data: options.Data,
    predictions: _Out = None,
    batch_size: options.BatchSize = 256,
    portable: _Portable = False,
    image_mean: options.ImageMean = None,
    image_std: options.ImageStd = None,
) -> int:
    """Run a converted file, or any other model, over data."""
    from gapa_onnx.cli.predictions import HEAD, Predictions, show, writer
    from gapa_onnx.data import open_data

    write = writer(predictions) if predictions else None
    images = options.image_options(image_mean, image_std)
    quiet_runtime()
    session = _open(out, portable)
    inputs = [_input_spec(value) for value in session.get_inputs()]
    source = open_data(data, inputs, images)
    if not portable:
        say_if_portable()
    names = [value.name for value in session.get_outputs() if value.type.startswith("tensor(")]
    collected = Predictions(names, _variance_outputs(session), keep=None if write else HEAD)
    with progress_bar() as progress:
        for batch in source.batches(batch_size):
            collected.add(batch, _answers(session, names, batch))
            progress("running", collected.rows / source.rows if source.rows else 0.0)
    if source.rows is not None and source.rows > collected.rows:
        left = source.rows - collected.rows
        note(f"{left} row(s) left out: they do not fill a batch of the size that the model fixes")
    if write:
        write(collected.arrays())
        print(f"{predictions}: {collected.rows} rows of {', '.join(names)}")
    else:
        show(collected)
    return 0


def _open(path: Path, portable: bool) -> InferenceSession:
    import onnxruntime

    from gapa_onnx import session as native_session
    from gapa_onnx.runtime import first_line, session_options

    if not path.is_file():
        raise UserError(f"no such file: {path}", "check the path of the model")
    try:
        if portable:
            return onnxruntime.InferenceSession(
                str(path), session_options(), providers=["CPUExecutionProvider"]
            )
        return native_session(path, session_options())
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise UserError(
            f"onnxruntime cannot load {path}: {first_line(error)}",
            "check that it is a whole ONNX file; `gapa-onnx doctor` checks the installation",
        ) from error


def _answers(session: InferenceSession, names: list[str], batch: dict) -> list:
    from gapa_onnx.runtime import first_line

    try:
        return session.run(names, batch)
    except Exception as error:  # as above
        raise UserError(
            f"the model failed on the data: {first_line(error)}", "check their shape and range"
        ) from error


def _variance_outputs(session: InferenceSession) -> dict[str, str]:
    from gapa_onnx.provenance import METADATA_KEY

    record = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    return json.loads(record)["outputs"] if record else {}


def _input_spec(value: NodeArg) -> InputSpec:
    """What a session says about an input, as the data layer wants it."""
    import numpy as np

    from gapa_onnx.data import InputSpec

    kind = value.type.removeprefix("tensor(").removesuffix(")")
    kind = {"float": "float32", "double": "float64", "string": "object"}.get(kind, kind)
    try:
        return InputSpec(value.name, np.dtype(kind), tuple(value.shape))
    except TypeError as error:
        raise UserError(
            f"input {value.name!r} is of type {value.type}", "only tensors of numpy's types can be fed"
        ) from error
