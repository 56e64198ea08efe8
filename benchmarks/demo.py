"""The product end to end, as a user runs it: convert a digit classifier, show it digits and non-digits.

    python benchmarks/demo.py [--out demo-output]

converts models/digits_cnn.onnx with the installed command line, runs the source and the converted file
on held-out digits and on three sets of foreign images, prints a table and draws `uncertainty.png`.
Exit code 0 if the predictions are bit-equal, 1 if not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MODELS = Path(__file__).resolve().parents[1] / "models"
SETS = {  # label: file, the in-distribution set first
    "held-out digits": "heldout",
    "rotated 90°": "rotated",
    "pixels shuffled": "shuffled",
    "noise": "noise",
}
COLOURS = ("#2f6db3", "#e0a030", "#c8553d", "#6b4c9a")
QUANTILE = 0.95


@dataclass(frozen=True)
class Result:
    """What the models say about one set of images."""

    images: np.ndarray  # (n, 1, 8, 8)
    logits: np.ndarray  # (n, 10), of the source model
    var: np.ndarray  # (n, 10), of the logits

    @property
    def score(self) -> np.ndarray:
        """The mean logit variance of each image, the demo's one number for doubt."""
        return self.var.mean(axis=1, dtype=np.float64)  # (n,)

    @property
    def confidence(self) -> np.ndarray:
        """The source model's largest softmax probability, what people use without error bars."""
        shifted = np.exp(self.logits.astype(np.float64) - self.logits.max(axis=1, keepdims=True))
        return (shifted / shifted.sum(axis=1, keepdims=True)).max(axis=1)  # (n,)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    rows: int
    confidence: float  #: mean of the largest softmax probability
    var: float  #: median of the mean logit variance
    auroc: float | None  #: of the mean logit variance, against the first set; None for that set itself
    beyond: float  #: share of rows above the first set's quantile


def summarise(sets: dict[str, Result]) -> list[Row]:
    """One row per set; the first set is the in-distribution one that the others are compared with."""
    from sklearn.metrics import roc_auc_score

    known = next(iter(sets.values())).score
    threshold = np.quantile(known, QUANTILE)
    table = []
    for position, (name, result) in enumerate(sets.items()):
        score, auroc = result.score, None
        if position:
            foreign = np.repeat([0, 1], [len(known), len(score)])
            auroc = float(roc_auc_score(foreign, np.concatenate([known, score])))
        beyond = float((score > threshold).mean())
        confidence, median = float(result.confidence.mean()), float(np.median(score))
        table.append(Row(name, len(score), confidence, median, auroc, beyond))
    return table


def format_table(table: list[Row]) -> str:
    """The table as text, one line per set."""
    lines = [
        f"{'':18}{'':>6}{'source model':>16}{'logit variance':>18}{'AUROC against':>17}{'beyond 95% of':>17}",
        f"{'set':18}{'rows':>6}{'mean max prob':>16}{'median of mean':>18}{'held-out':>17}{'held-out':>17}",
    ]
    for row in table:
        auroc = "-" if row.auroc is None else f"{row.auroc:.3f}"
        lines.append(
            f"{row.name:18}{row.rows:>6}{row.confidence:>16.3f}{row.var:>18.3g}{auroc:>17}{row.beyond:>17.1%}"
        )
    return "\n".join(lines)


def log_score(result: Result) -> np.ndarray:
    """log10 of the score; an image that *is* an inducing point has variance 0, which is drawn at 1e-12."""
    return np.log10(np.maximum(result.score, 1e-12))  # (n,)


def draw(sets: dict[str, Result], path: Path) -> None:
    """Left the distribution of doubt per set, right the images with the least and the most of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(15, 5.4), dpi=130, layout="constrained", facecolor="white")
    left, *halves = figure.subfigures(1, 3, width_ratios=(1, 0.72, 0.68))
    axes = left.subplots()
    scores = [log_score(result) for result in sets.values()]
    bins = np.linspace(min(map(np.min, scores)), max(map(np.max, scores)) + 1e-9, 41)
    for name, score, colour in zip(sets, scores, COLOURS):
        axes.hist(score, bins, color=colour, alpha=0.55, label=name, edgecolor="white", linewidth=0.4)
    line = axes.axvline(np.quantile(scores[0], QUANTILE), color="#333333", linestyle="--", linewidth=1)
    line.set_label(f"{QUANTILE:.0%} of held-out below")
    axes.set(xlabel="log10 of the mean logit variance", ylabel="images", title="How far to trust each image")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9)

    for half, title, part in zip(halves, ("Least doubtful", "Most doubtful"), (np.s_[:5], np.s_[-5:])):
        half.suptitle(title, fontsize=12)
        for cells, (name, result), colour in zip(half.subplots(len(sets), 5), sets.items(), COLOURS):
            for cell, image in zip(cells, np.argsort(result.score, kind="stable")[part]):
                cell.set(xticks=[], yticks=[])
                cell.spines[:].set_color(colour)
                cell.imshow(result.images[image, 0], cmap="gray_r", vmin=0, vmax=1)
                std = np.sqrt(result.score[image])
                cell.set_title(f"{result.logits[image].argmax()}  ±{std:.2f}", fontsize=8, pad=3)
            if half is halves[0]:
                cells[0].set_ylabel(name, fontsize=9, color=colour)
    halves[0].supxlabel("predicted class ± standard deviation of a logit", fontsize=9)
    halves[1].supxlabel(" ", fontsize=9)  # keeps both halves equally high
    figure.savefig(path)
    pyplot.close(figure)


def convert(out: Path) -> Path:
    """Call the command line that a user calls; it is installed beside this Python, or is on PATH."""
    beside = shutil.which("gapa-onnx", path=str(Path(sys.executable).parent)) or shutil.which("gapa-onnx")
    if beside is None:
        raise SystemExit("error: the command gapa-onnx is not installed\nhint: pip install . or make demo")
    converted = out / "digits_cnn.gapa.onnx"
    paths = [os.path.relpath(MODELS / name) for name in ("digits_cnn.onnx", "digits_cnn_calibration.npz")]
    arguments = ["convert", paths[0], "--calib", paths[1], "-o", str(converted)]
    print("$ gapa-onnx", *arguments, flush=True)
    finished = subprocess.run([beside, *arguments])
    if finished.returncode:
        raise SystemExit(finished.returncode)
    return converted


def compare(converted: Path) -> tuple[dict[str, Result], bool]:
    """Both files on every set, and whether the logits are bit-equal on all of them."""
    import onnxruntime

    import gapa_onnx

    source = onnxruntime.InferenceSession(MODELS / "digits_cnn.onnx", providers=["CPUExecutionProvider"])
    session = gapa_onnx.session(converted)
    sets, equal = {}, True
    for name, kind in SETS.items():
        with np.load(MODELS / f"digits_cnn_{kind}.npz") as file:
            images = file["image"]
        (expected,) = source.run(["logits"], {"image": images})
        logits, var = session.run(["logits", "logits_var"], {"image": images})
        equal &= logits.tobytes() == expected.tobytes()
        sets[name] = Result(images, expected, var)
    return sets, equal


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert a digit classifier; show its doubt.")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for what is made")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    sets, equal = compare(convert(out))
    print(f"\n{format_table(summarise(sets))}\n")
    rows = sum(len(result.logits) for result in sets.values())
    print(f"predictions of source and converted: {'bit-equal' if equal else 'DIFFERENT'} on {rows} rows")
    draw(sets, out / "uncertainty.png")
    print(f"picture: {out / 'uncertainty.png'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
