"""Drawing with matplotlib: one look, SVG that takes its colours from the page, PNG and SVG files.

A figure is one or more panels. On the page each panel is an SVG of its own, so that panels wrap on a phone; in a
file they stand side by side. Colours have names: on the page `#0072b2` becomes `var(--gapa)`, which is another
blue in the dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.figure import SubFigure
from matplotlib.ticker import LogLocator

from gapa_onnx.measure.evaluation.report.wording import plain, power_of_ten

#: name -> colour on paper; page.css has the same names. Each is used once, as the page finds them by value.
COLOURS = {
    "ink": "#1f2933",
    "muted": "#5b6776",
    "grid": "#dde2e9",
    "gapa": "#0072b2",
    "source": "#a86f00",
    "data": "#0072b3",
    "ood": "#d04a02",
    "good": "#00805c",
    "bad": "#d04a03",
    "series-1": "#0072b4",
    "series-2": "#d04a04",
    "series-3": "#00805d",
    "series-4": "#a2478a",
    "series-5": "#8a6d00",
    "series-6": "#4d5a68",
}
#: of a line: its name, or where it begins and how far it is on and off
Dash = str | tuple[int, tuple[float, ...]]
#: so that no figure rests on colour alone
DASHES: tuple[Dash, ...] = (
    "-",
    (0, (5, 1.6)),
    (0, (1.6, 1.4)),
    (0, (6, 1.5, 1.5, 1.5)),
    (0, (3, 2)),
    (0, (8, 2)),
)

#: who -> what it is called, and how it is drawn
MODELS: dict[str, tuple[str, Dash, str]] = {
    "source": ("source", DASHES[1], "s"),
    "gapa": ("with gapa", "-", "o"),
}
MOST_SERIES = 6  # curves that one can still tell apart

WIDTH, HEIGHT = 3.9, 2.95  # inches; with 9 pt text this reads well from 320 to 560 pixels
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_STYLE: dict[Any, Any] = {  # matplotlib's own names, each with a type of its own
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout everywhere
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": COLOURS["ink"],
    "axes.labelsize": 9,
    "axes.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["grid"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.6,
    "xtick.color": COLOURS["grid"],
    "ytick.color": COLOURS["grid"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": COLOURS["ink"],
    "text.parse_math": False,  # names with $ are names
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.9,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "none",
    "path.simplify": True,
    "svg.fonttype": "none",  # text stays text
    "svg.image_inline": True,
}


#: what a panel is drawn into: a figure of its own, or a part of one
Place = SubFigure | Canvas


@dataclass(frozen=True)
class Panel:
    """One set of axes, drawn into whatever it is given."""

    draw: Callable[[Place], None]
    alt: str  #: what there is to see, for people who do not see it
    width: float = WIDTH
    height: float = HEIGHT


@dataclass(frozen=True)
class Figure:
    """What the page and the files show under one id."""

    id: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    most_columns: int = 3  #: panels side by side in a file

    @property
    def alt(self) -> str:
        return " ".join(panel.alt for panel in self.panels)


def inline_svg(panel: Panel, name: str) -> str:
    """The panel as an `<svg>` element for the page; `name` keeps its ids apart from those of others."""
    with _look(salt=name):
        canvas = Canvas(figsize=(panel.width, panel.height))
        panel.draw(canvas)
        text = _save(canvas, "svg").decode()
    return _adopted(text, name)


def render(figure: Figure, kind: str) -> bytes:
    """The whole figure as a PNG or SVG file, on white."""
    columns = min(figure.most_columns, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    with _look(salt=figure.id):
        canvas = Canvas(
            figsize=(
                columns * max(panel.width for panel in figure.panels),
                rows * max(panel.height for panel in figure.panels) + 0.35,
            ),
            facecolor="white",
        )
        canvas.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
        canvas.suptitle(figure.title, x=0.02, ha="left", fontsize=11, fontweight="bold")
        places = canvas.subfigures(rows, columns, squeeze=False).reshape(-1)
        for place, panel in zip(places, figure.panels):
            panel.draw(place)
        content = _save(canvas, kind, facecolor="white")
    return content if kind == "png" else _file_fonts(content.decode()).encode()


def colour_of(index: int) -> str:
    return COLOURS[f"series-{index % 6 + 1}"]


def legend_above(axes: Axes, columns: int = 2) -> None:
    """A legend that never covers data."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderpad=0.2, columnspacing=1.2
    )


def log_axis(axes: Axes) -> None:
    """A logarithmic x axis with at most a handful of plain labels (mathematical ones are switched off)."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_major_formatter(lambda value, _: power_of_ten(value))
    axes.minorticks_off()


def percent_axis(axis: Axis) -> None:
    """Shares as percentages."""
    axis.set_major_formatter(lambda share, _: f"{100 * share:.4g}%")


@contextmanager
def _look(salt: str) -> Iterator[None]:
    """Our style alone, whatever the caller has set; nothing of it stays."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Names may hold any script; the browser has fonts for it, the layout only needs a width.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        matplotlib.rcParams["svg.hashsalt"] = salt
        yield


def _save(canvas: Canvas, kind: str, facecolor: str = "none") -> bytes:
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    content = io.BytesIO()
    canvas.savefig(content, format=kind, dpi=160, metadata=metadata, facecolor=facecolor)
    return content.getvalue()


def _adopted(text: str, name: str) -> str:
    """A matplotlib SVG made fit for an HTML page: no size, no style sheet, no ids but its own, our colours."""
    root = ElementTree.fromstring(text)
    used = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', text))
    svg = ElementTree.Element(
        "svg", {"viewBox": root.get("viewBox", ""), "aria-hidden": "true", "focusable": "false"}
    )
    for child in root:
        _adopt(child, svg, name, used)
    return ElementTree.tostring(svg, encoding="unicode")


def _adopt(element: ElementTree.Element, parent: ElementTree.Element, name: str, used: set[str]) -> None:
    """Copy an element without its namespace, and groups without a purpose not at all."""
    tag = element.tag.rpartition("}")[2]
    if tag in ("metadata", "style"):
        return
    attributes = {}
    for spelled, value in element.attrib.items():
        attribute = spelled.rpartition("}")[2]
        if attribute == "id" and value not in used:
            continue
        attributes[attribute] = _attribute(attribute, value, name)
    if tag != "g" or attributes:
        parent = ElementTree.SubElement(parent, tag, attributes)
        parent.text = element.text if tag == "text" else None
    for child in element:
        _adopt(child, parent, name, used)


def _attribute(attribute: str, value: str, name: str) -> str:
    if attribute == "id":
        return f"{name}-{value}"
    value = re.sub(r"(^|url\()#", rf"\g<1>#{name}-", value) if attribute in ("href", "clip-path") else value
    if attribute == "style":
        value = re.sub(r"(?<=font-family: )[^;]*|'DejaVu Sans'[^;]*", "var(--font)", value)
        for colour, paper in COLOURS.items():
            value = value.replace(paper, f"var(--{colour})")
    if attribute in ("d", "x", "y", "width", "height", "transform", "points"):
        value = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), value)
        value = re.sub(r"\s+", " ", value).strip()
    return value


def _file_fonts(text: str) -> str:
    """System fonts first, so that the file looks at home wherever it is opened."""
    return re.sub(r"'DejaVu Sans'[^;\"]*", FONTS, text)


def short(name: object) -> str:
    """A name for a legend or a tick."""
    return plain(name, 30)
