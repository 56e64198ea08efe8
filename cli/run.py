"""`gapa-onnx run`: a converted file, or any model, over data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import console, note, progress_bar, quiet_runtime, say_if_portable

if TYPE_CHECKING:
    from gapa_onnx.cli.predictions import Predictions
    from gapa_onnx.sessions.feeding import Feeding

_Out = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="FILE", help="Write a .npz, .csv or .json; a table is shown unless given."
    ),
]
_Portable = Annotated[bool, typer.Option("--portable", help="Leave the native library out.")]


@options.preparing_options()
def run(
    out: options.Converted,
    data: options.Data,
    *,
    predictions: _Out = None,
    batch_size: options.BatchSize = None,
    portable: _Portable = False,
    preparation: options.Prepared,
) -> int:
    """Run a converted file, or any other model, over data."""
    from gapa_onnx.cli.answer_files import writer
    from gapa_onnx.cli.predictions import HEAD, Predictions, show
    from gapa_onnx.cli.tokens import Reading
    from gapa_onnx.data import open_data, remembered
    from gapa_onnx.model.caches import names_told
    from gapa_onnx.model.load import read_inputs
    from gapa_onnx.presence import require_described
    from gapa_onnx.sessions.feeding import feeding
    from gapa_onnx.sessions.inference import input_specs, open_model, read_record, row_count, run_batch

    write = writer(predictions) if predictions else None
    quiet_runtime()
    session = open_model(out, portable=portable)
    record = read_record(session)
    if record is not None:
        require_described(record.heads, {value.name for value in session.get_outputs()})
    before = remembered(record, session.get_modelmeta().custom_metadata_map)
    inputs = read_inputs(out) if record is None else input_specs(session)
    opened = open_data(data, inputs, preparation, batch_size, before)
    source = feeding(session, opened)
    if not portable:
        say_if_portable()
    names = [value.name for value in session.get_outputs() if value.type.startswith("tensor(")]
    heads = {} if record is None else record.as_json()["heads"]
    collected = Predictions(names, heads, keep=None if write else HEAD, lengths=opened.text is not None)
    reading = None if opened.text is None else Reading(opened.text)
    with progress_bar() as progress:
        for batch in source.batches():
            answers = run_batch(session, names, batch)
            collected.add(row_count(batch, answers), answers)
            if reading is not None:
                reading.add(batch)
            progress("running", collected.rows / source.rows if source.rows else 0.0)
    _say_what_was_left_out(source, collected)
    if write:
        write(collected.arrays())
        told = f"{predictions}: {collected.rows} rows of {names_told(collected.names)}"
        console().print(told, soft_wrap=True)
    else:
        show(collected, reading)
    return 0


def _say_what_was_left_out(source: Feeding, collected: Predictions) -> None:
    """Rows that fill no batch, and outputs that are not by row."""
    from gapa_onnx.model.caches import names_told

    if source.rows is not None and source.rows > collected.rows:
        left = source.rows - collected.rows
        note(f"{left} row(s) left out: they do not fill a batch of the size that the model fixes")
    if source.data.text is not None and source.data.text.uneven:
        note("sequences have several lengths: the shorter ones are filled up with NaN, -1 or false")
    if collected.left_out:
        note(f"left out, as they do not have one row per sample: {names_told(collected.left_out)}")
