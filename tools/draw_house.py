"""Draw the house: rooms in their order, who imports whom, lines of code. `make house` writes docs/figures/house.svg."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from typing import NamedTuple

import house

PICTURE = house.ROOT / "docs" / "figures" / "house.svg"

#: The rooms that all others stand on.
GROUND = ("errors", "files", "arrays", "tensors", "progress", "threads", "settings", "record")

LEFT, RIGHT = 40, 530  # the walls
EAVES = 18  # how far the roof reaches beyond them
RIDGE, TOP = 16, 122  # the roof, and the first floor below it
FLOOR, GAP = 42, 6
COLUMN = 25  # from one column to the next
WIDTH = RIGHT + COLUMN * len(house.ROOMS) + 64

INK, QUIET = "#1f2937", "#6b7280"
EDGE, FAINT = "#2f5d8a", "#dfe6ee"
ROOF, WALL, STONE, BORDER, BAR = "#a8503a", "#fbf7ef", "#e9e2d5", "#d2c7b2", "#e0b98a"


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def draw(modules: Mapping[str, house.Module], imports: Iterable[house.Import]) -> str:
    """The picture as SVG text, which depends on nothing but the source."""
    lines = Counter[str]()
    for module in modules.values():
        lines[house.room(module.name)] += module.lines
    floors = [*reversed(house.ROOMS)]
    places = {
        name: Box(LEFT, TOP + at * (FLOOR + GAP), RIGHT - LEFT, FLOOR) for at, name in enumerate(floors)
    }
    height = TOP + len(floors) * (FLOOR + GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">',
        "<title>The rooms of gapa-onnx: each imports only rooms below it</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.5L8 4L0 7.5z" fill="{EDGE}"/></marker></defs>',
        *_edges(house.edges(imports), places),
        *_roof(),
        *_boxes(places),
        *_lines(lines, places),
        _text(
            LEFT,
            height - 16,
            "A dot: the room at its left imports the room that the line below it leads to.",
            12,
        ),
    ]
    return "\n".join([*parts, "</svg>", ""])


def without_lines(picture: str) -> str:
    """The picture without what shows numbers of lines."""
    return re.sub(r'<g class="lines">.*?</g>\n', "", picture, flags=re.DOTALL)


def _text(x: float, y: float, text: str, size: int = 13, fill: str = QUIET, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{more}>{escape(text)}</text>'


def _roof() -> list[str]:
    eaves = TOP - GAP
    middle = (LEFT + RIGHT) / 2
    corners = f"{LEFT - EAVES},{eaves} {middle:g},{RIDGE} {RIGHT + EAVES},{eaves}"
    centred = ' text-anchor="middle" font-weight="bold"'
    return [
        f'<polygon points="{corners}" fill="{ROOF}" stroke="{ROOF}" stroke-width="6" stroke-linejoin="round"/>',
        _text(middle, eaves - 34, "gapa-onnx", 24, "#ffffff", centred),
        _text(
            middle, eaves - 14, "a room imports only rooms below it", 12, "#f7e3d8", ' text-anchor="middle"'
        ),
    ]


def _boxes(places: dict[str, Box]) -> list[str]:
    parts = []
    for name, box in places.items():
        parts += [
            f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="5" '
            f'fill="{STONE if name in GROUND else WALL}" stroke="{BORDER}"/>',
            _text(box.x + 12, box.y + 18, name, 15, INK, ' font-weight="bold"'),
            _text(box.x + 12, box.y + 34, house.ROOMS[name], 12),
        ]
    return parts


def _lines(lines: Counter[str], places: dict[str, Box]) -> list[str]:
    """How much each room holds: a number, and a bar."""
    parts = ['<g class="lines">']
    for name, box in places.items():
        right = box.x + box.width - 12
        length = max(150 * lines[name] / max(lines.values()), 1)
        parts += [
            _text(right, box.y + 18, f"{lines[name]:,} lines", 12, QUIET, ' text-anchor="end"'),
            f'<rect x="{right - length:.1f}" y="{box.y + 26:g}" width="{length:.1f}" height="7" fill="{BAR}"/>',
        ]
    return [*parts, "</g>"]


def _edges(edges: set[tuple[str, str]], places: dict[str, Box]) -> list[str]:
    """One column for each room that others import: a dot for each of them, and a line down to the room.

    Columns of lower rooms are farther out, so that no line crosses another on its way into its room.
    """
    columns = [name for name in places if any(of == name for _, of in edges)]
    faint, lines = [], []
    for name, box in places.items():
        reads = [at for at, of in enumerate(columns) if (name, of) in edges]
        if reads:
            row = f"M{RIGHT} {box.middle:g}H{_column(max(reads))}"
            faint.append(f'<path d="{row}" stroke="{FAINT}" stroke-width="1.5"/>')
    for at, of in enumerate(columns):
        x, end = _column(at), places[of].middle
        users = [name for name in places if (name, of) in edges]
        lines.append(
            f'<path d="M{x} {places[users[0]].middle:g}V{end - 8:g}q0 8 -8 8H{RIGHT + 2}" fill="none" '
            f'stroke="{EDGE}" stroke-width="1.4" marker-end="url(#tip)"/>'
        )
        lines += [
            f'<circle cx="{x}" cy="{places[name].middle:g}" r="4.5" fill="{EDGE}" stroke="#ffffff">'
            f"<title>{escape(name)} imports {escape(of)}</title></circle>"
            for name in users
        ]
        top = places[users[0]].middle - 14
        lines.append(_text(x, top, of, 12, QUIET, f' transform="rotate(-68 {x} {top:g})"'))
    return [*faint, *lines]


def _column(at: int) -> int:
    return RIGHT + 44 + COLUMN * at


if __name__ == "__main__":
    found = house.modules()
    PICTURE.write_text(draw(found, house.imports(found)), encoding="utf-8")
