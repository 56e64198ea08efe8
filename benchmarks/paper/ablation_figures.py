"""Figures of the ablations: one panel per quantity, one line per network, data set and series."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

QUANTITIES = {
    "nll": "NLL − network's own",
    "entropy": "AUROC of entropy",
    "bald": "AUROC of BALD",
    "score": "AUROC of score",
}
SPLIT = {"bald": "AUROC of BALD", "spearman": "rank correlation", "largest_error": "largest error, nats"}
COLOURS = {"mnist": "tab:blue", "fashion_mnist": "tab:orange"}
MARKERS = {"mlp0": "o", "mlp1": "v", "lenet": "s", "resnet": "^", "deep0": "o"}
STYLES = ("-", "--", ":", "-.")


def draw(
    rows: Sequence[dict[str, Any]], path: Path, order: Sequence[str], axis: str, *, split: bool = False
) -> None:
    """`order` are the values of the horizontal axis, left to right."""
    quantities = SPLIT if split else QUANTITIES
    figure, panels = plt.subplots(1, len(quantities), figsize=(4.2 * len(quantities), 4.2))
    series = list(dict.fromkeys(row["series"] for row in rows))
    for panel, (name, title) in zip(panels, quantities.items()):
        for key in dict.fromkeys((row["network"], row["data"], row["series"]) for row in rows):
            found = {row["value"]: _height(row, name) for row in rows if _key(row) == key}
            places, heights = _joined(order, found)
            network, data, kind = key
            panel.plot(
                places,
                heights,
                color=COLOURS[data],
                marker=MARKERS[network],
                linestyle=STYLES[series.index(kind) % len(STYLES)],
                markerfacecolor=_filling(COLOURS[data], series.index(kind)),
                markersize=4,
                linewidth=1,
                label=", ".join(filter(None, (network, data, kind))),
            )
        panel.set_title(title, fontsize=10)
        panel.set_xticks(
            range(len(order)), order, fontsize=7, rotation=45 if _long(order) else 0, ha="center"
        )
        panel.set_xlabel(axis, fontsize=8)
        panel.tick_params(axis="y", labelsize=7)
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, fontsize=7, frameon=False)
    lines = -(-len(labels) // 4)
    figure.tight_layout(rect=(0, 0.045 * lines + 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _joined(order: Sequence[str], found: dict[str, float]) -> tuple[list[float], list[float]]:
    """Places and heights of a line; a gap around values that are words, which have no order."""
    places, heights = [], []
    for place, value in enumerate(order):
        if value not in found:
            continue
        word = not value[0].isdigit() or "+" in value
        gap = [np.nan] if word else []
        places += [*gap, place, *gap]
        heights += [*gap, found[value], *gap]
    return places, heights


def _filling(colour: str, number: int) -> str | tuple[str, float]:
    """Of markers that may stand without a line between: full, none, or some for the first, second and other series."""
    return (colour, "white", (colour, 0.35))[min(number, 2)]


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["network"], row["data"], row["series"]


def _height(row: dict[str, Any], name: str) -> float:
    height = float(row[name])
    return height - float(row["map_nll"]) if name == "nll" else height


def _long(order: Sequence[str]) -> bool:
    return len("".join(order)) > 40
