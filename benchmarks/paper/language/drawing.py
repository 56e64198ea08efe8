"""The paper's two figures: AUROC against the number of inducing points, and against the block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

Row = dict[str, str]
STYLES = {"kmeans": "-", "random": "--"}
ORACLE, ENTROPY = "best temperature (oracle)", "source entropy"


def points(rows: Sequence[Row], path: Path) -> bool:
    """Epistemic part and score against M: one panel for each place and quantity, a line for each K and kind of points."""
    chosen = [row for row in rows if row["row"] == "points" and row["web"]]
    places = sorted({int(row["place"]) for row in chosen}, reverse=True)
    if not places:
        return False
    quantities = ("epistemic", "score", "share median")
    last = max(int(row["place"]) for row in rows if row["place"])
    figure, panels = plt.subplots(
        len(places), len(quantities), figsize=(13, 4 * len(places)), squeeze=False, sharey=True
    )
    for place, line in zip(places, panels):
        for quantity, panel in zip(quantities, line):
            here = [r for r in chosen if int(r["place"]) == place and r["quantity"] == quantity]
            neighbours = sorted({int(row["k"]) for row in here})
            for colour, k in enumerate(neighbours):
                for inducing, style in STYLES.items():
                    found = sorted(
                        (r for r in here if r["inducing"] == inducing and int(r["k"]) == k),
                        key=lambda r: int(r["m"]),
                    )
                    _line(
                        panel,
                        [int(r["m"]) for r in found],
                        found,
                        style,
                        f"C{colour}",
                        f"{inducing}, K = {k}",
                    )
            panel.set_xscale("log")
            panel.set_title(
                f"{quantity}, {'input of the head' if place == last else f'block {place}'}", fontsize=10
            )
            _bounds(panel, rows)
    panels[-1][0].set_xlabel("inducing points")
    panels[0][0].legend(fontsize=7)
    return _saved(figure, path)


def layers(rows: Sequence[Row], path: Path) -> bool:
    """Against the block, a panel for each geometry."""
    chosen = [row for row in rows if row["row"] == "layers" and row["web"]]
    metrics = list(dict.fromkeys(row["metric"] for row in chosen))
    if not metrics:
        return False
    figure, panels = plt.subplots(1, len(metrics), figsize=(13, 4.5), squeeze=False, sharey=True)
    for metric, panel in zip(metrics, panels[0]):
        for colour, quantity in enumerate(("epistemic", "score", "share median")):
            found = sorted(
                (r for r in chosen if (r["metric"], r["quantity"]) == (metric, quantity)),
                key=lambda r: int(r["place"]),
            )
            _line(panel, [int(row["place"]) for row in found], found, "-", f"C{colour}", quantity)
        panel.set_title(metric, fontsize=10)
        panel.set_xlabel("block (0: embeddings, the last: input of the head)")
        _bounds(panel, rows)
    panels[0][0].legend(fontsize=7)
    return _saved(figure, path)


def _line(
    panel: plt.Axes, x: Sequence[int], rows: Sequence[Row], style: str, colour: str, label: str
) -> None:
    if rows:
        values, errors = ([float(row[name]) for row in rows] for name in ("web", "web_error"))
        panel.errorbar(
            x, values, errors, linestyle=style, color=colour, marker=".", capsize=2, linewidth=1, label=label
        )


def _bounds(panel: plt.Axes, rows: Sequence[Row]) -> None:
    for name, colour in ((ORACLE, "green"), (ENTROPY, "grey")):
        for row in rows:
            if row["row"] == name and row["web"]:
                panel.axhline(float(row["web"]), color=colour, linestyle=":", linewidth=1, label=name)
    panel.set_ylabel("AUROC, WikiText against OpenWebText", fontsize=8)


def _saved(figure: plt.Figure, path: Path) -> bool:
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return True
