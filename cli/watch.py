"""`gapa-onnx watch`: whether the input has changed, from a table of predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import console, note, print_json

if TYPE_CHECKING:
    from gapa_onnx.arrays import Array
    from gapa_onnx.monitor.watch import Stream

COLUMNS, ROWS = 60, 8  # of the picture
_Table = Annotated[
    Path,
    typer.Argument(
        metavar="TABLE", help="Predictions in their order: a .csv or .parquet.", show_default=False
    ),
]
_File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="The converted file that made them, whose ordinary rows they are compared with; with their own beginning unless given.",
        show_default=False,
    ),
]
_Column = Annotated[
    str | None,
    typer.Option(
        "--column",
        metavar="NAME",
        help="Read this one; the score of each output unless given, or its p-value where there is no score.",
        show_default=False,
    ),
]
_Level = Annotated[
    float,
    typer.Option(
        "--level", metavar="P", help="In at most this share of unchanged streams there is an alarm."
    ),
]
_Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Of the numbers that tell equal rows apart.", min=0)
]


def watch(
    table: _Table,
    *,
    file: _File = None,
    column: _Column = None,
    level: _Level = 0.01,
    seed: _Seed = 0,
    as_json: options.Json = False,
) -> int:
    """Has the input changed? A test on the stream of scores, without labels; exit code 1 if it has."""
    from gapa_onnx.monitor.watch import watch as ask

    streams = ask(table, file, column=column, level=level, seed=seed)
    if as_json:
        print_json({"level": level, "streams": {one.column: _plain(one) for one in streams}})
    else:
        for one in streams:
            _show(one)
    return 1 if any(one.drift.alarm is not None for one in streams) else 0


def _plain(one: Stream) -> dict[str, object]:
    found = one.drift
    return {
        "rows": found.rows,
        "ordinary_rows": found.ordinary,
        "holds": one.holds,
        "changed": found.alarm is not None,
        "alarm": found.alarm,
        "level": found.level,
        "largest_log_evidence": float(found.log_evidence.max()),
        "last_log_evidence": float(found.log_evidence[-1]),
    }


def _show(one: Stream) -> None:
    """What the test says of a column, and how the evidence grew."""
    from gapa_onnx.cli.layout import gap, lines

    found = one.drift
    lines((one.column, f"{found.rows} rows, compared with {one.against}"))
    gap()
    for line in picture(found.log_evidence, found.level):
        console().print(line, soft_wrap=True, highlight=False, markup=False)
    gap()
    if found.alarm is None:
        told = "no: the evidence has not reached the line"
    else:
        told = f"yes, told at row {found.alarm}: the evidence reached the line"
    lines(("changed", f"{told}, as it does in at most {found.level:.3g} of all unchanged streams"))
    if one.holds == "approximately":
        note(
            "the ordinary rows were trained on or picked out, so other rows may look stranger without any change; "
            "convert with --held-out, or see threshold --data"
        )


def picture(log_evidence: Array, level: float) -> list[str]:
    """The largest evidence so far in each part of the stream as bars, and the line that an alarm is raised at."""
    import numpy as np

    tens = log_evidence / np.log(10)
    columns = min(COLUMNS, len(tens))
    highest = np.array([part.max() for part in np.array_split(tens, columns)])
    line = -np.log10(level)
    bottom, top = min(0.0, highest.min()), max(line * 1.25, min(highest.max(), 4 * line))
    edges = np.linspace(bottom, top, ROWS + 1)[:-1]
    drawn = []
    for edge, above in reversed([*zip(edges, [*edges[1:], np.inf])]):
        bars = ["█" if value > edge else " " for value in highest]
        marked = edge <= line < above
        text = "".join("─" if marked and bar == " " else bar for bar in bars)
        drawn.append(f"{f'1 : {1 / level:,.0f}' if marked else '':>12} ┤{text}")
    drawn.append(f"{'row':>12}  0{len(tens) - 1:>{columns - 1}}" if columns > 1 else f"{'row':>12}  0")
    return drawn
