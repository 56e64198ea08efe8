"""Rotated test images, 0 … 180°: how NLL and entropy grow, for all rows of the classification table.

    python benchmarks/paper/rotation.py [--quick] [--data DIR] [--seeds 5] [--only mnist] [--rows NAME …] [--fresh]

Images are turned about their centre (scipy, linear interpolation, black outside). Writes results/rotation.csv line
by line, a line per data set, row, seed and angle, and draws results/rotation_<data>.png from all lines. A row whose
angles are all there is not run again. The networks and converted files are those of classification.py.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from classification import arguments, chosen, matching, one_thread
from converted import Converted, predictor
from measuring import Predict, in_batches
from peers import Row
from scipy.ndimage import rotate
from training import Problem, problem

from lines import Lines, machine, say  # isort: skip  (training puts benchmarks/ on the path)
from gapa_onnx.measure.evaluation import metrics

ANGLES = tuple(range(0, 181, 15))
MOST_ROWS = 1_000  # test images, each at every angle
MOST_ALL_LAYERS = 50  # where a row of data costs a Jacobian of all weights
KEY = ("data", "row", "seed", "angle")


def main() -> None:
    options = arguments(__doc__).parse_args()
    scale, folder = chosen(options)
    lines = Lines(folder / "rotation.csv", KEY, fresh=False)
    one_thread()
    for seed in range(1 if options.quick else options.seeds):
        for name in options.only:
            rows = [r for r in matching(options.rows) if not (options.quick and r.all_layers)]
            missing = [r for r in rows if options.fresh or not complete(lines, name, r, seed)]
            if missing:
                task = problem(name, seed, scale, options.data)
                for row in missing:
                    say(f"{name}, seed {seed}: {row.name}")
                    for line in curve(row, task):
                        lines.add({"data": name, "row": row.name, "seed": seed, **line})
    for name in options.only:
        draw(lines.rows, name, folder / f"rotation_{name}.png")


def complete(lines: Lines, name: str, row: Row, seed: int) -> bool:
    return all(lines.has(name, row.name, seed, angle) for angle in ANGLES)


def curve(row: Row, task: Problem) -> list[dict[str, Any]]:
    predict = prepared(row, task)
    most = min(MOST_ALL_LAYERS if row.all_layers else MOST_ROWS, task.scale.test_rows)
    x, labels = task.data["x_test"][:most], task.data["y_test"][:most].astype(np.int64)
    found = []
    for angle in ANGLES:
        probs = in_batches(predict, rotated(x, angle), row.batch).probs
        figures = {
            "acc": (probs.argmax(axis=1) == labels).mean(),
            "nll": metrics.log_loss_rows(probs, labels).mean(),
            "entropy": metrics.entropy_rows(probs).mean(),
        }
        figures = {name: round(float(value), 5) for name, value in figures.items()}
        found.append({"angle": angle, "rows": most, **figures, **machine()})
    return found


def prepared(row: Row, task: Problem) -> Predict:
    """The method; a converted file that classification.py has left is used as it is."""
    if isinstance(row, Converted) and row.path(task).exists():
        return predictor(row.path(task))
    return row.fit(task).predict


def rotated(x: np.ndarray, angle: float) -> np.ndarray:
    """Images (n, 784) turned by an angle in degrees; unchanged, bit for bit, for 0."""
    if not angle:
        return x
    pictures = x.reshape(-1, 28, 28)
    turned = rotate(pictures, angle, axes=(2, 1), reshape=False, order=1, mode="constant", cval=0.0)
    return np.clip(turned, 0.0, 1.0).reshape(x.shape).astype(np.float32)


def draw(rows: list[dict[str, Any]], name: str, path: Path) -> None:
    """NLL and entropy over the angle, a line per row of the table, mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    values: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["data"] == name:
            pair = (float(row["nll"]), float(row["entropy"]))
            values[row["row"]][int(row["angle"])].append(pair)
    if not values:
        return
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    colours = pyplot.get_cmap("tab20").colors
    names = [row.name for row in matching([""]) if row.name in values]
    for number, method in enumerate(names):
        angles = sorted(values[method])
        means = np.array([np.mean(values[method][angle], axis=0) for angle in angles])
        ours = "gapa" in method.lower()
        for panel, column in zip(panels, means.T):
            panel.plot(
                angles,
                column,
                color=colours[number % len(colours)],
                linewidth=2.4 if ours else 1.1,
                linestyle="-" if ours else "--",
                label=method,
            )
    for panel, label in zip(panels, ("NLL", "entropy of the prediction")):
        panel.set(xlabel="rotation in degrees", ylabel=label, xticks=range(0, 181, 45))
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
