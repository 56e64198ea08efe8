"""How text lies on the screen: tables, labelled lines, legends, and numbers and shapes in few characters."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from gapa_onnx.cli.console import console, visible

LABEL = 12  # characters in front of a line
COMMAND = "gapa-onnx "  # what is to be copied starts like this
MOST_NODES = 3  # names shown in a cell
LONGEST_WHOLE = 18  # characters of a cell that a narrow terminal may not fold


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Nothing for no rows. A heading that starts with # is of numbers; only long text is ever folded."""
    if not rows:
        return
    drawn = new_table()
    for heading, cells in zip(headings, zip(*rows)):
        numeric = heading.startswith("#")
        short = numeric or max(map(len, cells)) <= LONGEST_WHOLE
        drawn.add_column(
            heading.removeprefix("#"), justify="right" if numeric else "left", overflow="fold", no_wrap=short
        )
    for row in rows:
        drawn.add_row(*row)
    gap()
    console().print(Text(title, "bold"))
    console().print(drawn)


def gap() -> None:
    console().print()


def new_table() -> Table:
    """Two blanks between columns, a line under the headings."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def lines(*entries: tuple[str, str]) -> None:
    """A label and what there is to say; on a terminal sentences go on below themselves.

    Only commands and paths may run past the edge: they are there to be copied.
    """
    out = console()
    for label, text in entries:
        width = max(LABEL, len(label) + 2)
        said = Text.assemble((f"{visible(label):<{width}}", "bold"), _hanging(visible(text), width))
        out.print(said, soft_wrap=True)


def legend(**meanings: str) -> None:
    """What the words of the table above mean, a line for each."""
    width = max(map(len, meanings)) + 2
    for word, meaning in meanings.items():
        console().print(Text(f"  {word:<{width}}{_hanging(meaning, width + 2)}", "dim"), soft_wrap=True)


def _hanging(text: str, indent: int) -> str:
    screen = console()
    if not screen.is_terminal or text.startswith(COMMAND):
        return text
    room = max(20, screen.width - indent)
    parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(parts)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def shape_text(shape: Sequence[int | str | None] | None) -> str:
    return (
        "?" if shape is None else "(" + ", ".join("?" if size is None else str(size) for size in shape) + ")"
    )


def some(names: Sequence[str], most: int = MOST_NODES) -> str:
    """The first names; fewer of them where the terminal is narrow and they are long."""
    room = most * console().width // 6
    while most > 1 and len(", ".join(names[:most])) > room:
        most -= 1
    return ", ".join(names[:most]) + (f", … {len(names) - most} more" if len(names) > most else "")


def size_text(size: int) -> str:
    amount = float(size)
    for unit in ("bytes", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} GB"


def image_text(images: Mapping[str, Any]) -> str:
    """How images became inputs, by the record of a file: 32 × 32, RGB, channels first, (pixel / 255 − [0.5]) / [0.25]."""
    height, width, colors = images["height"], images["width"], images["colors"]
    size = (
        "in their own sizes" if height is None and width is None else f"{height or 'any'} × {width or 'any'}"
    )
    scaled = "pixel / 255" if images["white"] == 1 else "pixels as they are, 0 … 255"
    mean, std = (", ".join(f"{value:g}" for value in images[name]) for name in ("mean", "std"))
    if (mean, std) != ("0", "1"):
        scaled = f"({scaled} − [{mean}]) / [{std}]"
    named = "grey" if colors == "grey" else colors.upper()
    return f"{size}, {named}, channels {images['layout']}, {scaled}"


def text_text(text: Mapping[str, Any]) -> str:
    """How text became inputs, by the record of a file: tokenizer.json (sha256 0123456789ab…), pieces of 96 tokens."""
    cut = {"pieces": "documents in pieces of", "documents": "documents, each one row of at most"}[
        text["rows"]
    ]
    known = f", of {text['vocabulary']:,} that the model knows" if text.get("vocabulary") else ""
    return f"{text['file'] or 'a tokenizer'} (sha256 {text['tokenizer'][:12]}…), {cut} {text['seq_len']} tokens{known}"
