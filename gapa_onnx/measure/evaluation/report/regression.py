"""Figures of a regression: coverage of its intervals, and the intervals themselves.

10,000 rows do not fit side by side; evenly spaced ones of the sorted rows are drawn, and the caption says how many.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.report.curves import every, finite
from gapa_onnx.measure.evaluation.report.drawing import (
    COLOURS,
    Figure,
    Panel,
    Place,
    legend_above,
    percent_axis,
)
from gapa_onnx.measure.evaluation.report.wording import number, whole
from gapa_onnx.measure.evaluation.result import Evaluation, Intervals

MOST_BARS, MOST_DOTS = 90, 500
NINETY, FIFTY = 1.6449, 0.6745  # a normal variable lies within so many standard deviations with 90% and 50%


def coverage(evaluation: Evaluation) -> Figure | None:
    found = evaluation.intervals
    if found is None or not len(finite(found.coverage)):
        return None
    nominal, held = np.asarray(found.nominal, float), np.asarray(found.coverage, float)
    gap = float(np.nanmean(np.abs(held - nominal)))
    return Figure(
        "figure-coverage",
        "Coverage of intervals",
        "How many targets lie inside the interval that should hold a given share. On the diagonal the intervals keep "
        "their promise; below it they are too narrow, above it too wide.",
        (
            Panel(
                partial(_draw_coverage, nominal, held),
                f"Actual against nominal coverage at {len(nominal)} levels; mean gap {number(gap, percent=True)}.",
            ),
        ),
    )


def _draw_coverage(nominal: Array, held: Array, place: Place) -> None:
    axes = place.subplots()
    axes.plot([0, 1], [0, 1], color=COLOURS["muted"], linewidth=1.1, dashes=(1, 2), label="promised")
    axes.fill_between(nominal, nominal, held, color=COLOURS["gapa"], alpha=0.16, linewidth=0)
    axes.plot(
        nominal, held, color=COLOURS["gapa"], marker="o" if len(nominal) <= 25 else "", label="with gapa"
    )
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="nominal level", ylabel="targets inside")
    percent_axis(axes.xaxis)
    percent_axis(axes.yaxis)
    legend_above(axes)


def intervals(evaluation: Evaluation) -> Figure | None:
    found = evaluation.intervals
    if found is None:
        return None
    mean, std, target = (
        np.asarray(part, float).reshape(-1) for part in (found.mean, found.std, found.target)
    )
    usable = np.isfinite(mean) & np.isfinite(std) & np.isfinite(target)
    if not usable.any():
        return None
    found = Intervals(mean[usable], std[usable], target[usable], found.nominal, found.coverage)
    count = int(usable.sum())
    inside = float(np.mean(np.abs(found.target - found.mean) <= NINETY * found.std))
    bars, dots = len(every(count, MOST_BARS)), len(every(count, MOST_DOTS))
    return Figure(
        "figure-intervals",
        "Predicted intervals",
        f"First: the 90% interval of {whole(bars)} of {whole(count)} rows in the order of their prediction, with the true "
        f"target. Second: the errors of {whole(dots)} rows in the order of their uncertainty; the bands should hold 50% "
        f"and 90% of them all along. Of all rows, {number(inside, percent=True)} lie inside the 90% interval.",
        (
            Panel(
                partial(_draw_bars, found),
                f"90% intervals and targets of {whole(bars)} rows, sorted by prediction; "
                f"{number(inside, percent=True)} of all targets are inside.",
            ),
            Panel(
                partial(_draw_funnel, found),
                f"Errors of {whole(dots)} rows against predicted intervals, sorted by uncertainty from "
                f"{number(float(found.std.min()))} to {number(float(found.std.max()))}.",
            ),
        ),
    )


def _draw_bars(found: Intervals, place: Place) -> None:
    axes = place.subplots()
    rows = np.argsort(found.mean, kind="stable")[every(len(found.mean), MOST_BARS)]
    x, mean, reach, target = (
        np.arange(len(rows)),
        found.mean[rows],
        NINETY * found.std[rows],
        found.target[rows],
    )
    inside = np.abs(target - mean) <= reach
    axes.vlines(x, mean - reach, mean + reach, color=COLOURS["gapa"], alpha=0.3, linewidth=2.2, label="90%")
    axes.plot(x, mean, color=COLOURS["gapa"], linewidth=1.1)
    axes.plot(x[inside], target[inside], ".", color=COLOURS["good"], markersize=4.5, label="target inside")
    axes.plot(x[~inside], target[~inside], "x", color=COLOURS["bad"], markersize=4.5, label="outside")
    axes.set(xlabel="rows, in the order of their prediction", ylabel="value", xticks=[])
    axes.set_ylim(*_view(np.concatenate([mean - reach, mean + reach, target])))
    axes.grid(False, axis="x")
    legend_above(axes, columns=3)


def _draw_funnel(found: Intervals, place: Place) -> None:
    axes = place.subplots()
    order = np.argsort(found.std, kind="stable")
    place_of = np.arange(len(order)) / max(1, len(order) - 1)
    band = every(len(order), MOST_DOTS)
    x, std = place_of[band], found.std[order][band]
    error = (found.target - found.mean)[order][band]
    inside = np.abs(error) <= NINETY * std
    axes.fill_between(
        x, -NINETY * std, NINETY * std, color=COLOURS["gapa"], alpha=0.14, linewidth=0, label="90%"
    )
    axes.fill_between(
        x, -FIFTY * std, FIFTY * std, color=COLOURS["gapa"], alpha=0.24, linewidth=0, label="50%"
    )
    axes.plot(x[inside], error[inside], ".", color=COLOURS["good"], markersize=3, label="inside")
    axes.plot(x[~inside], error[~inside], "x", color=COLOURS["bad"], markersize=3.5, label="outside")
    axes.set(xlim=(0, 1), xlabel="rows, most certain first", ylabel="target − prediction")
    axes.set_ylim(*_view(np.concatenate([-NINETY * std, NINETY * std, error])))
    percent_axis(axes.xaxis)
    legend_above(axes, columns=4)


def _view(values: Array) -> tuple[float, float]:
    """Limits that a few wild values do not stretch."""
    low, high = np.quantile(values, [0.005, 0.995])
    slack = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return float(low - slack), float(high + slack)
