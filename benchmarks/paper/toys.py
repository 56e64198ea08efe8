"""Two pictures of what a conversion adds: two moons for classes, a curve with a gap for numbers.

    python benchmarks/paper/toys.py [--out docs/figures]

Each trains a small network, converts it with the default settings, and runs source and converted file on a
grid. That both predict the same, bit for bit, is checked before anything is drawn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backbones import as_onnx, train_classifier  # noqa: E402

import gapa_onnx  # noqa: E402

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
FIRST, SECOND, INK = "#e07a1f", "#f5c542", "#1d1d1f"
BLUE, RED = "#2f6db3", "#c8553d"


def answers(
    model: onnx.ModelProto, calib: np.ndarray, grid: np.ndarray, roles: Sequence[str], **choices
) -> list[np.ndarray]:
    """The output itself and, by role, what stands beside it after the conversion."""
    name = model.graph.output[0].name
    source = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = source.run([name], {"x": grid})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "toy.gapa.onnx"
        gapa_onnx.convert(model, {"x": calib}, path, **choices)
        names = [name, *(f"{name}_{role}" for role in roles)]
        mean, *found = gapa_onnx.session(path).run(names, {"x": grid})
    if mean.tobytes() != expected.tobytes():
        raise AssertionError("the converted file does not predict what its source predicts")
    return [expected, mean, *found]


# --------------------------------------------------------------------------- classes


def draw_moons(path: Path) -> None:
    """Confidence of the model as it is, of the converted one, and the model's own doubt about its logits."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
    from sklearn.datasets import make_moons

    x, y = make_moons(400, noise=0.2, random_state=0)
    x = x.astype(np.float32)
    weights = train_classifier(x, y, (32, 32), epochs=80, batch=50, rate=3e-3, dropout=0.0, seed=0)
    across, down = np.linspace(-3.2, 4.2, 241), np.linspace(-2.8, 3.3, 201)
    grid = np.stack(np.meshgrid(across, down), axis=-1).astype(np.float32)  # (201, 241, 2)
    before, after, probs, var = (
        values.reshape(*grid.shape[:2], *values.shape[1:])
        for values in answers(as_onnx(weights), x, grid.reshape(-1, 2), ("probs", "var"))
    )
    std = np.sqrt(var.mean(axis=-1))
    confidence = (np.linspace(0.5, 1, 26), [0.5, 0.75, 1], "Blues")
    doubt = (np.linspace(0, std.max(), 26), MaxNLocator(6), "Purples")
    panels = (
        ("the trained model\nconfidence", before, softmax(before).max(axis=-1), confidence),
        ("converted\nconfidence", after, probs.max(axis=-1), confidence),
        ("converted\nepistemic σ of the logits", after, std, doubt),
    )

    figure, axes = new_figure(1, 3, (12, 3.9))
    for panel, (title, logits, values, (levels, ticks, colours)) in zip(axes, panels):
        shade = panel.contourf(across, down, values.clip(levels[0], levels[-1]), levels, cmap=colours)
        panel.contour(across, down, logits[..., 1] - logits[..., 0], [0], colors=INK, linewidths=1.8)
        for label, colour in enumerate((FIRST, SECOND)):
            panel.scatter(*x[y == label].T, s=11, color=colour, edgecolor=INK, linewidth=0.3, zorder=3)
        panel.set(xticks=[], yticks=[], aspect="equal")
        panel.set_title(title, fontsize=11)
        bar = figure.colorbar(shade, ax=panel, ticks=ticks, shrink=0.8, pad=0.02)
        bar.outline.set_visible(False)
    boundary = Line2D([], [], color=INK, linewidth=1.8, label="decision boundary: the same, bit for bit")
    figure.legend(handles=[boundary], loc="outside lower center", frameon=False, fontsize=10)
    save(figure, path)


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


# --------------------------------------------------------------------------- numbers


def draw_gap(path: Path) -> None:
    """The trained model's curve, and around the same curve the noise of the data and the model's own doubt."""
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.uniform(-4, -0.8, 220), generator.uniform(1.4, 4, 180)])
    y = np.sin(1.4 * x) + 0.2 * x + (0.06 + 0.14 * (x > 1.4)) * generator.standard_normal(len(x))
    x, y = x[:, None].astype(np.float32), y.astype(np.float32)
    model = as_onnx(train_regressor(x, y), output="y")
    grid = np.linspace(-8, 8, 641, dtype=np.float32)[:, None]
    roles = ("aleatoric_var", "total_var")
    before, after, noise, total = (
        values[:, 0] for values in answers(model, x, grid, roles, targets=y[:, None], task="regression")
    )
    line = grid[:, 0]

    figure, (left, right) = new_figure(1, 2, (12, 3.9))
    for panel, mean in ((left, before), (right, after)):
        panel.scatter(x[:, 0], y, s=7, color=FIRST, alpha=0.75, linewidth=0, label="data", zorder=2)
        panel.plot(line, mean, color=INK, linewidth=1.8, label="prediction", zorder=4)
        panel.set(xlim=(line[0], line[-1]), xticks=[], yticks=[])
        panel.spines[["top", "right"]].set_visible(False)
    left.set_title("the trained model", fontsize=11)
    right.set_title("the same model, converted: the same curve, bit for bit, ± 2 σ", fontsize=11)
    bands = (
        (total, BLUE, 0.25, "all of it: noise of the data and the model's own doubt"),
        (noise, RED, 0.4, "the noise of the data alone"),
    )
    for var, colour, alpha, label in bands:
        reach = 2 * np.sqrt(var)
        right.fill_between(line, after - reach, after + reach, color=colour, alpha=alpha, lw=0, label=label)
    left.set_ylim(right.get_ylim())
    left.legend(frameon=False, fontsize=9, loc="upper left")
    right.legend(frameon=False, fontsize=9, loc="upper left")
    save(figure, path)


def train_regressor(x: np.ndarray, y: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights (in, out) and biases of a tanh network, by L-BFGS on the squared error."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor

    fitted = MLPRegressor(
        hidden_layer_sizes=(32, 32),
        activation="tanh",
        solver="lbfgs",
        alpha=0.05,
        max_iter=2000,
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of steps is given
        fitted.fit(x, y)
    return [(w.astype(np.float32), b.astype(np.float32)) for w, b in zip(fitted.coefs_, fitted.intercepts_)]


# ---------------------------------------------------------------------------- drawing


def new_figure(rows: int, columns: int, size: tuple[float, float]):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, dpi=110, layout="constrained", facecolor="white")


def save(figure, path: Path) -> None:
    """Without the version of matplotlib, so that the same picture is the same file."""
    figure.savefig(path, metadata={"Software": None})
    print(f"wrote {path}, {path.stat().st_size // 1024} KiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder for the pictures")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    draw_moons(out / "moons.png")
    draw_gap(out / "gap.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
