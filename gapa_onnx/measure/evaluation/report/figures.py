"""The figures of an evaluation, each only where there are data for it.

here             figure-reliability  figure-histogram-<score>  figure-roc  figure-risk-coverage
in `regression`  figure-intervals  figure-coverage
in `shifts`      figure-shifts
in `pictures`    figure-examples  figure-segmentation
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.report.curves import Histogram, finite, histogram, roc, thin
from gapa_onnx.measure.evaluation.report.drawing import (
    COLOURS,
    DASHES,
    HEIGHT,
    MODELS,
    MOST_SERIES,
    Figure,
    Panel,
    Place,
    colour_of,
    legend_above,
    log_axis,
    percent_axis,
    short,
)
from gapa_onnx.measure.evaluation.report.regression import coverage, intervals
from gapa_onnx.measure.evaluation.report.shifts import shifts
from gapa_onnx.measure.evaluation.report.wording import key, number, score_label, value, whole
from gapa_onnx.measure.evaluation.result import Evaluation, ReliabilityBin


def figures(evaluation: Evaluation) -> tuple[Figure, ...]:
    """All that can be drawn, in the order of the page."""
    makers: tuple[Callable[[Evaluation], Figure | None], ...] = (
        reliability,
        coverage,
        intervals,
        risk_coverage,
        detection_curves,
    )
    found = [figure for maker in makers if (figure := maker(evaluation)) is not None]
    found.extend(histograms(evaluation))
    shifted = shifts(evaluation)
    return (*found, shifted) if shifted else tuple(found)


def reliability(evaluation: Evaluation) -> Figure | None:
    bins = {
        name: filled
        for name in MODELS
        if (filled := [b for b in evaluation.reliability.get(name, ()) if b.count])
    }
    if not bins:
        return None
    errors = [
        f"{MODELS[name][0]} {number(error)}"
        for name in bins
        if (error := value(evaluation, name, "ece")) is not None
    ]
    alt = f"Reliability diagram: accuracy against confidence, {' and '.join(MODELS[n][0] for n in bins)}."
    return Figure(
        "figure-reliability",
        "Reliability",
        "How often a prediction of a given confidence is right. On the diagonal the model means what it says; "
        "below it, it is overconfident. The strip shows where the predictions are.",
        (
            Panel(
                partial(_draw_reliability, bins),
                f"{alt} Calibration error: {', '.join(errors) or 'not known'}.",
            ),
        ),
    )


def _draw_reliability(bins: Mapping[str, Sequence[ReliabilityBin]], place: Place) -> None:
    axes, strip = place.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    axes.plot([0, 1], [0, 1], color=COLOURS["muted"], linewidth=1.1, dashes=(1, 2))
    for name, found in bins.items():
        label, dash, marker = MODELS[name]
        x, y = [b.confidence for b in found], [b.accuracy for b in found]
        axes.plot(x, y, color=COLOURS[name], linestyle=dash, marker=marker, label=label)
        edges = [found[0].low]
        heights = []
        total = sum(b.count for b in found)
        for b in found:
            if b.low > edges[-1] + 1e-9:  # a gap of empty bins
                edges.append(b.low)
                heights.append(0.0)
            edges.append(b.high)
            heights.append(b.count / total)
        strip.stairs(heights, edges, color=COLOURS[name], linestyle=dash, linewidth=1.2)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
    strip.set(xlabel="confidence", ylabel="share")
    strip.set_ylim(bottom=0)
    strip.locator_params(axis="y", nbins=2)
    for axis in (axes.xaxis, axes.yaxis, strip.yaxis):
        percent_axis(axis)
    legend_above(axes)


def risk_coverage(evaluation: Evaluation) -> Figure | None:
    curves = {
        name: thin(*evaluation.risk_coverage[name]) for name in list(evaluation.risk_coverage)[:MOST_SERIES]
    }
    curves = {name: curve for name, curve in curves.items() if len(curve[0])}
    if not curves:
        return None
    labels = {
        name: f"{short(score_label(name))} · {number(evaluation.aurc.get(name))}"
        if name in evaluation.aurc
        else short(score_label(name))
        for name in curves
    }
    return Figure(
        "figure-risk-coverage",
        "Risk against coverage",
        f"The {evaluation.risk} among the most certain part of the inputs: hand the uncertain rest to a person, and this "
        "is what remains. Lower is better; the number is the area (AURC). Dotted: a random order.",
        (
            Panel(
                partial(_draw_risk, curves, labels, evaluation.risk),
                f"Risk-coverage curves, area under each: {', '.join(labels.values())}.",
                height=_height(labels),
            ),
        ),
    )


def _height(labels: dict[str, str]) -> float:
    """Taller for a legend of many lines, so that the curves keep their room."""
    return HEIGHT + 0.17 * max(0, len(labels) - 3)


def _draw_risk(
    curves: dict[str, tuple[Array, Array]], labels: dict[str, str], risk: str, place: Place
) -> None:
    axes = place.subplots()
    tops: list[float] = []
    for index, (name, (x, y)) in enumerate(curves.items()):
        shown = x >= min(0.01, x[-1])  # the first few rows alone make a wild rate
        axes.plot(x[shown], y[shown], color=colour_of(index), linestyle=DASHES[index], label=labels[name])
        tops.extend(y[x >= 0.05].tolist())
    whole_risk = float(np.mean([y[-1] for _, y in curves.values()]))
    axes.axhline(whole_risk, color=COLOURS["muted"], linewidth=1.1, dashes=(1, 2))
    top = max([*tops, whole_risk]) * 1.12 or 1.0
    axes.set(xlim=(0, 1), ylim=(0, top), xlabel="coverage: share that is kept", ylabel=short(risk))
    percent_axis(axes.xaxis)
    if risk.endswith("rate"):
        percent_axis(axes.yaxis)
    legend_above(axes, columns=1)


def detection_curves(evaluation: Evaluation) -> Figure | None:
    curves: dict[str, tuple[Array, Array]] = {}
    for name, (data, ood) in evaluation.scores.items():
        if ood is not None and len(finite(data)) and len(finite(ood)) and len(curves) < MOST_SERIES:
            curves[name] = thin(*roc(data, ood))
    if not curves:
        return None
    labels = {
        name: f"{short(score_label(name))} · {number(evaluation.detection.get(name, {}).get('auroc'))}"
        for name in curves
    }
    return Figure(
        "figure-roc",
        "ROC: data against OOD",
        "Every point is a threshold: the share of the OOD set that it catches against the share of the data that it "
        "flags for nothing. The number is the area (AUROC).",
        (
            Panel(
                partial(_draw_roc, curves, labels),
                f"ROC curves, area under each: {', '.join(labels.values())}.",
                height=_height(labels),
            ),
        ),
    )


def _draw_roc(curves: dict[str, tuple[Array, Array]], labels: dict[str, str], place: Place) -> None:
    axes = place.subplots()
    axes.plot([0, 1], [0, 1], color=COLOURS["muted"], linewidth=1.1, dashes=(1, 2))
    for index, (name, (x, y)) in enumerate(curves.items()):
        axes.plot(x, y, color=colour_of(index), linestyle=DASHES[index], label=labels[name])
    axes.set(xlim=(-0.01, 1), ylim=(0, 1.01), xlabel="data flagged", ylabel="OOD caught")
    percent_axis(axes.xaxis)
    percent_axis(axes.yaxis)
    legend_above(axes, columns=1)


def histograms(evaluation: Evaluation) -> list[Figure]:
    """One per score; the file's threshold is drawn where it applies."""
    found: list[Figure] = []
    taken: set[str] = set()
    for name, (data, ood) in evaluation.scores.items():
        bins = histogram(data, ood)
        if bins is None:
            continue
        cut = (evaluation.threshold or {}).get("threshold") if key(name) == "score" else None
        label = score_label(name)
        caption = "Share of each set per bar; the outermost bars hold what lies beyond."
        if bins.left_out:
            caption += f" {whole(bins.left_out)} scores that are not finite are left out."
        if cut is not None:
            caption += " The line is the file's own threshold."
        sets = f"{whole(np.size(data))} of the data" + (
            f", {whole(np.size(ood))} OOD" if ood is not None else ""
        )
        medians = [
            f"{number(float(np.median(finite(part))))}"
            for part in (data, ood)
            if part is not None and len(finite(part))
        ]
        alt = f"Histogram of {label}: {sets}; median {' against '.join(medians)}."
        panel = Panel(partial(_draw_histogram, bins, cut, label), alt, height=2.5)
        found.append(Figure(_free_id(name, taken), label[0].upper() + label[1:], caption, (panel,)))
    return found


def _free_id(name: str, taken: set[str]) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"
    unique, count = slug, 2
    while unique in taken:
        unique, count = f"{slug}-{count}", count + 1
    taken.add(unique)
    return f"figure-histogram-{unique}"


def _draw_histogram(bins: Histogram, cut: float | None, label: str, place: Place) -> None:
    axes = place.subplots()
    for shares, name, text, dash in ((bins.data, "data", "data", "-"), (bins.ood, "ood", "OOD", DASHES[1])):
        if shares is not None:
            axes.stairs(shares, bins.edges, fill=True, color=COLOURS[name], alpha=0.22, linewidth=0)
            axes.stairs(shares, bins.edges, color=COLOURS[name], linestyle=dash, linewidth=1.4, label=text)
    if cut is not None and np.isfinite(cut) and (cut > 0 or not bins.log):
        axes.axvline(cut, color=COLOURS["ink"], linewidth=1.2, label="threshold")
    if bins.log:
        log_axis(axes)
    axes.set(xlabel=short(label), ylabel="share")
    axes.set_ylim(bottom=0)
    percent_axis(axes.yaxis)
    legend_above(axes, columns=3)
