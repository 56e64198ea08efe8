"""The part of the page about what a file promises: each promise beside what was found, by groups of rows."""

from __future__ import annotations

from collections.abc import Mapping

from gapa_onnx.measure.evaluation.report.markup import cards, section, table, text
from gapa_onnx.measure.evaluation.report.wording import number, whole
from gapa_onnx.measure.evaluation.result import Evaluation

MOST_GROUPS = 24  # of which many may be classes
_TITLES = {
    "sets": ("Sets of classes", "How often the true class is in its set, and how many classes a set has."),
    "deferral": ("Deferral", "How many rows the file answers, and how many of these answers are wrong."),
    "intervals": ("Intervals", "How often the true value is in its interval, and how wide that is."),
}
_HEADS = {
    "coverage": "Coverage",
    "set_size": "Classes",
    "width": "Width",
    "answered": "Answered",
    "error": "Error",
    "rows": "Rows",
}
_PERCENT = ("coverage", "answered", "error")


def promises(evaluation: Evaluation) -> str:
    """A card for each promise; nothing where the file makes none."""
    parts = [_card(name, groups) for name, groups in evaluation.promises.items()]
    lede = "What the file promises of rows like those that it was counted on, and what these rows say."
    return section("Promises", lede, [cards(parts)])


def _card(name: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    title, note = _TITLES[name]
    columns = [column for column in _HEADS if any(column in found for found in groups.values())]
    rows = [
        [text(group), *(_cell(column, found.get(column)) for column in columns)]
        for group, found in list(groups.items())[:MOST_GROUPS]
    ]
    most = "at most" if name == "deferral" else "at least"
    level = number(groups["all"]["promised"], percent=True)
    grid = table(["Of", *(_HEADS[column] for column in columns)], rows, title, "t")
    return (
        f'<div class="card" id="table-{name}"><h3>{text(title)}: {most} {text(level)}</h3>{grid}'
        f'<p class="note">{text(note)}</p></div>'
    )


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return ""
    return text(whole(int(value)) if column == "rows" else number(value, column in _PERCENT))
