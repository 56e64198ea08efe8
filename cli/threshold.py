"""`gapa-onnx threshold`: where a converted file draws its line, shown or moved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import note, print_json, quiet_runtime
from gapa_onnx.errors import UserError

if TYPE_CHECKING:
    from gapa_onnx.settle.thresholds import Threshold

_Quantile = Annotated[
    float | None,
    typer.Option("--quantile", metavar="Q", help="Share of ordinary inputs that stay unflagged."),
]
_Value = Annotated[float | None, typer.Option("--value", metavar="NUMBER", help="The threshold itself.")]
_Data = Annotated[
    str | None,
    typer.Option("--data", metavar="PATH", help="Take the quantiles over these held-out inputs instead."),
]
_Output = Annotated[
    str | None, typer.Option("--output", metavar="NAME", help="Of this output; of all unless given.")
]
_Out = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="OUT", help="Where to write; FILE itself unless given.")
]
SHOWN = ("0.5", "0.75", "0.9", "0.95", "0.98", "0.99", "0.995", "0.999")


@options.image_options()
def threshold(
    file: options.Converted,
    *,
    quantile: _Quantile = None,
    value: _Value = None,
    data: _Data = None,
    output: _Output = None,
    out: _Out = None,
    batch_size: options.BatchSize = None,
    images: options.Images,
    as_json: options.Json = False,
) -> int:
    """Show or move the line beyond which a converted file flags an input; nothing else changes."""
    from gapa_onnx.compiler import writable
    from gapa_onnx.settle.thresholds import set_threshold, thresholds

    if quantile is not None and value is not None:
        raise UserError("--quantile and --value say the same thing", "leave one of them out")
    changed = quantile is not None or value is not None or data is not None
    if changed:
        quiet_runtime()
        target = writable(out or file)
        found = set_threshold(
            file,
            quantile=quantile,
            value=value,
            data=data,
            output=output,
            out=target,
            images=images,
            batch_size=batch_size,
        )
    elif out is not None:
        raise UserError("there is nothing to write", "say where the line is with --quantile")
    else:
        found = thresholds(file)
    shown = _of_output(found, output)
    if as_json:
        print_json({entry.name: {**vars(entry), "quantiles": dict(entry.quantiles)} for entry in shown})
    else:
        _show(shown, written=str(out or file) if changed else None)
    return 0


def _of_output(found: Sequence[Threshold], output: str | None) -> list[Threshold]:
    """Those of one output; of all unless it is given."""
    chosen = [entry for entry in found if output in (None, entry.output)]
    if not chosen:
        names = ", ".join(entry.output for entry in found)
        raise UserError(f"output {output!r} has no score", f"choose one of {names}")
    return chosen


def _show(shown: Sequence[Threshold], written: str | None) -> None:
    """Each threshold, and a word about those that too few rows decide."""
    from gapa_onnx.cli import render
    from gapa_onnx.settle.thresholds import ROWS_BEYOND

    for entry in shown:
        render.threshold(entry, SHOWN, written=written)
        if entry.rows_beyond < ROWS_BEYOND:
            note(
                f"only {entry.rows_beyond:.0f} of {entry.rows} rows lie beyond quantile {entry.quantile:g}, "
                "so the line is rough; --data takes more rows"
            )
