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
    from gapa_onnx.settle.moving import Promised
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
_Coverage = Annotated[
    float | None,
    typer.Option("--coverage", metavar="C", help="How many sets or intervals are to hold the truth."),
]
_MaxError = Annotated[
    float | None,
    typer.Option("--max-error", metavar="R", help="The most error among the rows that are answered."),
]
_Output = Annotated[
    str | None, typer.Option("--output", metavar="NAME", help="Of this output; of all unless given.")
]
_Out = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="OUT", help="Where to write; FILE itself unless given.")
]
SHOWN = ("0.5", "0.75", "0.9", "0.95", "0.98", "0.99", "0.995", "0.999")


@options.preparing_options()
def threshold(
    file: options.Converted,
    *,
    quantile: _Quantile = None,
    value: _Value = None,
    data: _Data = None,
    coverage: _Coverage = None,
    max_error: _MaxError = None,
    output: _Output = None,
    out: _Out = None,
    batch_size: options.BatchSize = None,
    preparation: options.Prepared,
    as_json: options.Json = False,
) -> int:
    """Show or move the line beyond which a converted file flags an input, or what it promises; nothing else changes."""
    from gapa_onnx.files import writable
    from gapa_onnx.settle.moving import move_promises
    from gapa_onnx.settle.thresholds import set_threshold

    flagging = any(given is not None for given in (quantile, value, data))
    promising = any(given is not None for given in (coverage, max_error))
    _require_one_line(
        quantile, value, flagging and promising, out is not None and not (flagging or promising)
    )
    place = writable(out or file) if flagging or promising else file
    if promising:
        move_promises(file, coverage=coverage, max_error=max_error, output=output, out=place)
    if flagging:
        quiet_runtime()
        set_threshold(
            file,
            quantile=quantile,
            value=value,
            data=data,
            output=output,
            out=place,
            images=preparation.images,
            text=preparation.text,
            batch_size=batch_size,
        )
    return _told(place, output, as_json, changed=flagging or promising)


def _require_one_line(quantile: float | None, value: float | None, both: bool, nothing: bool) -> None:
    """Refuse options that say two things at once, or none."""
    if quantile is not None and value is not None:
        raise UserError("--quantile and --value say the same thing", "leave one of them out")
    if both:
        raise UserError("the flag and what is promised are moved one after the other", "call it twice")
    if nothing:
        raise UserError("there is nothing to write", "say where the line is with --quantile")


def _told(place: Path, output: str | None, as_json: bool, *, changed: bool) -> int:
    """What the file now has."""
    from gapa_onnx.settle.moving import promises
    from gapa_onnx.settle.thresholds import thresholds

    shown = _of_output(thresholds(place), output)
    kept = [entry for entry in promises(place) if output in (None, entry.output)]
    if as_json:
        answer = {entry.name: {**vars(entry), "quantiles": dict(entry.quantiles)} for entry in shown}
        print_json(answer | {f"{one.output}, {one.name}": vars(one.promise) for one in kept})
    else:
        _show(shown, kept, written=str(place) if changed else None)
    return 0


def _of_output(found: Sequence[Threshold], output: str | None) -> list[Threshold]:
    """Those of one output; of all unless it is given."""
    chosen = [entry for entry in found if output in (None, entry.output)]
    if not chosen:
        names = ", ".join(entry.output for entry in found)
        raise UserError(f"output {output!r} has no score", f"choose one of {names}")
    return chosen


def _show(shown: Sequence[Threshold], kept: Sequence[Promised], written: str | None) -> None:
    """Each threshold and promise, and a word about those that too few rows decide."""
    from gapa_onnx.cli import render
    from gapa_onnx.settle.thresholds import ROWS_BEYOND

    for entry in shown:
        render.threshold(entry, SHOWN)
        if entry.rows_beyond < ROWS_BEYOND:
            note(
                f"only {entry.rows_beyond:.0f} of {entry.rows} rows lie beyond quantile {entry.quantile:g}, "
                "so the line is rough; --data takes more rows"
            )
    render.promised([(one.output, one.name, vars(one.promise)) for one in kept], written)
