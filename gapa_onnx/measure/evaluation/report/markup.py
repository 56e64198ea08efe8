"""The few pieces of HTML that every part of the page uses."""

from __future__ import annotations

import html
from collections.abc import Sequence


def text(value: object) -> str:
    """Escaped for HTML text and attributes; control characters are no text."""
    printable = "".join(c if c.isprintable() else " " for c in str(value))
    return html.escape(printable, quote=True)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], label: str, kinds: str = "") -> str:
    """A table that scrolls inside its own box; cells are HTML already.

    `kinds` has a letter per column, t for a name and l for words; the others are numbers.
    """
    kinds = kinds.ljust(len(heads), "n")
    names = {"t": "name", "l": "words", "n": "number"}
    head = "".join(f'<th scope="col" class="{names[k]}">{text(h)}</th>' for k, h in zip(kinds, heads))
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row" class="name">{cell}</th>' if k == "t" else f'<td class="{names[k]}">{cell}</td>'
            for k, cell in zip(kinds, row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{text(label)}" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def cards(parts: Sequence[str], columns: int | None = None) -> str:
    """Cards side by side: up to three in a row on a wide screen, one on a phone; a `pair` is two wide."""
    parts = [part for part in parts if part]
    if not parts:
        return ""
    room = len(parts) + sum('class="card pair"' in part for part in parts)
    columns = columns or {1: 1, 2: 2, 4: 2}.get(room, 3)
    return f'<div class="cards columns-{columns}">{"".join(parts)}</div>'


def section(title: str, lede: str, rows: Sequence[str]) -> str:
    """A heading, a sentence and rows of cards; nothing at all where there are no cards."""
    rows = [row for row in rows if row]
    if not rows:
        return ""
    return f'<section><h2>{text(title)}</h2><p class="lede">{text(lede)}</p>{"".join(rows)}</section>'
