"""Tables of the page in markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Row = dict[str, str]  #: a line of a CSV


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
