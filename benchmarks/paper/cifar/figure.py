"""AUROC against cost: one panel per network, one point per row whose time is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

Row = dict[str, str]
Point = tuple[float, float]  #: cost and AUROC
OURS = ("gapa-onnx", "GAPA-Diag")
ROW_HEIGHT = 0.038  #: of a label, as a share of the panel


def draw(rows: Sequence[Row], path: Path) -> None:
    """`rows` are lines of cifar.csv; float32 networks alone, four of them at most."""
    nets = sorted({row["net"] for row in rows if " " not in row["net"]}, key=lambda net: int(net[6:]))
    figure, panels = plt.subplots(2, 2, figsize=(13, 10), squeeze=False)
    for panel, net in zip(panels.flat, nets):
        points = {row["row"]: point(row) for row in rows if row["net"] == net and row["ratio"]}
        _panel(panel, points)
        panel.set_title(f"ResNet-{net[6:]}", fontsize=10)
    for panel in panels.flat[len(nets) :]:
        panel.set_visible(False)
    figure.supxlabel("time of a batch over the network's alone, one thread", fontsize=9)
    figure.supylabel("AUROC against SVHN, by score or BALD (by entropy where a row has neither)", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def point(row: Row) -> Point:
    """Cost is at least 1: what is below is noise of the timing.

    The AUROC is that of BALD or the score, whichever tells more, as on the rest of the page; of the entropy where a row
    has neither.
    """
    own = [float(row[name]) for name in ("bald", "score_svhn") if row[name]]
    return max(float(row["ratio"]), 1.0), max(own or [float(row["ood"])])


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in both, by rising cost."""
    kept: list[Point] = []
    for cost, auroc in sorted(points, key=lambda point: (point[0], -point[1])):
        if not kept or auroc > kept[-1][1]:
            kept.append((cost, auroc))
    return kept


def _panel(panel: plt.Axes, points: dict[str, Point]) -> None:
    edge = frontier(list(points.values()))
    panel.step(*zip(*edge), where="post", linestyle="--", color="grey", linewidth=1)
    low = min(auroc for _, auroc in points.values())
    low, high = max(0.0, low - 0.02), 1.0
    panel.set_ylim(low, high)
    most = max(*(cost for cost, _ in points.values()), 1.2)
    panel.set_xscale("log")
    panel.set_xlim(0.97, most**1.8)  # labels stand at the right of all points
    ticks = [tick for tick in (1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick <= most]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    names = sorted(points, key=lambda name: -points[name][1])
    heights = spread_out([(points[name][1] - low) / (high - low) for name in names])
    for name, height in zip(names, heights):
        colour = "tab:red" if name in OURS else "tab:blue"
        panel.plot(*points[name], "o", color=colour, markersize=5)
        panel.annotate(
            name,
            points[name],
            xytext=(0.66, height),
            textcoords="axes fraction",
            fontsize=7.5,
            color=colour,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.25, "linewidth": 0.6},
        )


def spread_out(heights: Sequence[float]) -> list[float]:
    """Falling heights in 0 … 1, moved as little as it takes for labels not to cover each other."""
    found: list[float] = []
    for height in heights:
        found.append(min(height, found[-1] - ROW_HEIGHT if found else 1 - ROW_HEIGHT))
    lowest = ROW_HEIGHT
    for place in reversed(range(len(found))):  # what fell out at the bottom pushes the others up
        found[place] = max(found[place], lowest)
        lowest = found[place] + ROW_HEIGHT
    return found
