"""AUROC against cost: one panel per network, one point per row that has a score and a time."""

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
    """`rows` are lines of cifar.csv; the score's AUROC against SVHN, or that of the entropy where there is no score."""
    nets = sorted({row["net"] for row in rows if " " not in row["net"]}, key=lambda net: int(net[6:]))
    figure, panels = plt.subplots(2, 2, figsize=(13, 10), squeeze=False)
    for panel, net in zip(panels.flat, nets):
        points = {row["row"]: point(row) for row in rows if row["net"] == net and row["ratio"]}
        _panel(panel, points)
        panel.set_title(f"ResNet-{net[6:]}", fontsize=10)
    for panel in panels.flat[len(nets) :]:
        panel.set_visible(False)
    figure.supxlabel("time of a batch over the network's alone, one thread", fontsize=9)
    figure.supylabel("AUROC against SVHN, by the method's score", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def point(row: Row) -> Point:
    """Cost is at least 1: what is below is noise of the timing."""
    return max(float(row["ratio"]), 1.0), float(row["score_svhn"] or row["ood"])


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
    low, high = max(0.0, low - 0.03), 1.0
    panel.set_ylim(low, high)
    costs = [cost for cost, _ in points.values()]
    panel.set_xlim(0.9, max(costs) * 1.6)  # labels stand at the right of their points
    panel.set_xscale("log")
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick <= max(costs) * 1.6]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    last = 2.0
    for name, (cost, auroc) in sorted(points.items(), key=lambda item: -item[1][1]):
        colour = "tab:red" if name in OURS else "tab:blue"
        panel.plot(cost, auroc, "o", color=colour, markersize=5)
        last = min((auroc - low) / (high - low), last - ROW_HEIGHT)  # labels do not cover each other
        panel.annotate(
            name,
            (cost, auroc),
            xytext=(0.60, last),
            textcoords="axes fraction",
            fontsize=7.5,
            color=colour,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.25, "linewidth": 0.6},
        )
