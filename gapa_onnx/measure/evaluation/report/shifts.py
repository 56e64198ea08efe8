"""The figure of a series of ever stranger data sets: one panel per metric and per score."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from os.path import commonprefix

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.report.drawing import (
    COLOURS,
    MODELS,
    MOST_SERIES,
    Dash,
    Figure,
    Panel,
    Place,
    colour_of,
    legend_above,
    percent_axis,
    short,
)
from gapa_onnx.measure.evaluation.report.wording import key, metric, number, score_label
from gapa_onnx.measure.evaluation.result import Evaluation, Shift

SHIFT_METRICS = ("accuracy", "nll", "ece", "rmse", "crps", "miou")

Line = tuple[str, Dash, str, str, Array]
"""What a line of a panel is called, its dash, marker and colour, and its values along the series."""


def shifts(evaluation: Evaluation) -> Figure | None:
    """Metrics of source and gapa and the mean of each score along the series, one panel each."""
    if not evaluation.shifts:
        return None
    series = sorted(evaluation.shifts, key=lambda shift: shift.position)
    panels = [*_metric_panels(series), *_score_panels(series)]
    if not panels:
        return None
    return Figure(
        "figure-shifts",
        "Ever stranger data",
        f"From {short(series[0].name)} to {short(series[-1].name)}. As data drift away, accuracy may fall; honest uncertainty should then "
        "rise, and the NLL should stay low.",
        tuple(panels),
    )


def _metric_panels(series: Sequence[Shift]) -> Iterator[Panel]:
    names = {key(n): n for shift in series for found in shift.metrics.values() for n in found}
    for wanted in SHIFT_METRICS:
        lines = {who: _along(series, who, names[wanted]) for who in MODELS} if wanted in names else {}
        lines = {who: line for who, line in lines.items() if np.isfinite(line).any()}
        if lines:
            drawn = {who: (*MODELS[who], COLOURS[who], line) for who, line in lines.items()}
            yield _shift_panel(series, metric(wanted).label, drawn, metric(wanted).percent)


def _score_panels(series: Sequence[Shift]) -> Iterator[Panel]:
    scores = dict.fromkeys(name for shift in series for name in shift.mean_scores)
    for index, name in enumerate(list(scores)[:MOST_SERIES]):
        line = np.array([float(shift.mean_scores.get(name, np.nan)) for shift in series])
        if np.isfinite(line).any():
            drawn: dict[str, Line] = {name: ("", "-", "o", colour_of(index), line)}
            yield _shift_panel(series, f"Mean {score_label(name)}", drawn, False)


def _along(series: Sequence[Shift], who: str, name: str) -> Array:
    """A metric along the series, NaN where it is absent."""
    return np.array([float(shift.metrics.get(who, {}).get(name, np.nan)) for shift in series])


def _shift_panel(series: Sequence[Shift], title: str, lines: dict[str, Line], percent: bool) -> Panel:
    ends = [
        f"{text or title} from {number(line[0], percent)} to {number(line[-1], percent)}"
        for text, _, _, _, line in lines.values()
    ]
    alt = f"{title} over {len(series)} sets: {'; '.join(ends)}."
    return Panel(partial(_draw_shift, series, title, lines, percent), alt, width=3.6, height=2.5)


def _common_name(series: Sequence[Shift]) -> str:
    """What the names of a series share, without its number: `rotated-015`, `rotated-030` -> rotated."""
    return short(re.sub(r"[\W\d_]+$", "", commonprefix([shift.name for shift in series]))) or "shift"


def _draw_shift(
    series: Sequence[Shift], title: str, lines: dict[str, Line], percent: bool, place: Place
) -> None:
    axes = place.subplots()
    x = np.array([shift.position for shift in series], float)
    for text, dash, marker, colour, line in lines.values():
        axes.plot(x, line, color=colour, linestyle=dash, marker=marker, markersize=3.5, label=text)
    if not any(re.search(r"\d", shift.name) for shift in series):  # positions are mere places: show the names
        axes.set_xticks(x, [short(shift.name) for shift in series], rotation=30, ha="right")
    axes.set(xlabel=_common_name(series), ylabel=title)
    if percent:
        axes.set_ylim(bottom=0)
        percent_axis(axes.yaxis)
    if len(lines) > 1:
        legend_above(axes)
