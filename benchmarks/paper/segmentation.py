"""Segmentation with error bars: does the model's own doubt show where its map of classes is wrong?

    python benchmarks/paper/segmentation.py [--quick] [--data DIR] [--seeds 3] [--rows NAME …]

A small U-Net (`unet`) learns made scenes (`scenes`). The rows of the table, all for the same network:

    MAP                    the network's own softmax
    MC dropout             20 passes with the dropout that it was trained with
    GAPA embedding         the site of the paper: the 64 numbers at the bottleneck, one query per image
    GAPA pooled            the mean of the last map (merge1), one query per image
    GAPA auto              this tool's default site: each of 48 x 48 positions of the last map
    GAPA positions         each of 24 x 24 positions of the decoder's middle level (merge2) is a query, K = 20

and what is measured, pixel by pixel, for three scores: the entropy of the prediction, its epistemic part
(BALD), the mean variance of the logits:

    error_…                AUROC for telling wrong pixels of test scenes from right ones
    shape_…, texture_…     AUROC for telling pixels of the unseen object from all others, in strange scenes
    scene_shape_…, …       AUROC of the mean over pixels, for telling strange scenes from test scenes

Lines go to results/segmentation.csv, one by one; those that are there are not computed again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import scenes  # noqa: E402
from backbones import CACHE, DATA  # noqa: E402
from lines import Lines, machine, say  # noqa: E402

FIGURE = HERE.parents[1] / "docs" / "figures" / "segmentation.png"
POSITIONS = "GAPA positions"
#: sites, neighbours and calibration scenes of a conversion; a scene is one query, 576 or 2304 of them
GAPA = {
    "GAPA embedding": ("embedding", 50, None),
    "GAPA pooled": ("merge1:pooled", 50, None),
    "GAPA auto": ("auto", 50, 150),
    POSITIONS: ("merge2:positions", 20, 150),
}
ROWS = ("MAP", "MC dropout", *GAPA)
SCORES = ("entropy", "epistemic", "variance")
DRAWS = 20


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    training: int  #: scenes
    test: int
    strange: int  #: of each kind
    epochs: int


FULL, QUICK = Size(1500, 150, 60, epochs=8), Size(160, 24, 12, epochs=1)

Answers = dict[str, np.ndarray]  #: probs (n, c, h, w), and (n, h, w) by score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of mnist.npz")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=ROWS, choices=ROWS, help="computed again, also if there")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, few scenes; into benchmarks/cache/quick"
    )
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    folder = CACHE / "quick" if options.quick else HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    lines = Lines(folder / "segmentation.csv", ("seed", "row"), fresh=options.quick)
    again = options.rows is not ROWS
    for seed in range(1 if options.quick else options.seeds):
        wanted = [row for row in options.rows if again or not lines.has(seed, row)]
        if wanted:
            measure_seed(seed, wanted, size, options.data, folder, lines)
    say(section(lines.rows))
    return 0


def measure_seed(seed: int, rows: Sequence[str], size: Size, data: Path, folder: Path, lines: Lines) -> None:
    """Train, or load, the network of a seed and add the lines of the rows; seed 0 also draws the figure."""
    known = {part: scenes.digits(data, part) for part in ("train", "test")}
    training = scenes.make(size.training, 0, known["train"])
    test = scenes.make(size.test, 1, known["test"])
    strange = {
        kind: scenes.make(size.strange, 2 + place, known["test"], kind)
        for place, kind in enumerate(scenes.STRANGE)
    }
    net = trained(training, size.epochs, seed)
    drawn = {}
    for row in rows:
        started = time.process_time()
        predict = predictor(row, net, training, seed)
        fitted = time.process_time() - started
        say(f"seed {seed}, {row}")
        answers = predict(test.images)
        elsewhere = {kind: predict(made.images) for kind, made in strange.items()}
        line = figures(answers, test, elsewhere, strange)
        digits = "MNIST" if known["test"] is not None else "drawn"
        lines.add(
            {"seed": seed, "row": row, **line, "fit_cpu_s": round(fitted, 1), "scenes": size.training}
            | {"epochs": size.epochs, "test_scenes": size.test, "digits": digits, **machine()}
        )
        drawn[row] = (answers, elsewhere)
    if seed == 0 and set(GAPA) <= set(drawn):
        draw(drawn, test, strange, FIGURE if folder == HERE / "results" else folder / FIGURE.name)


def trained(training: scenes.Scenes, epochs: int, seed: int):
    """The network of a seed, from the cache if it is there."""
    import torch
    import unet

    torch.set_num_threads(1)  # sums in another order round differently
    path = CACHE / f"unet_{len(training)}_{epochs}_{seed}.pt"
    if path.exists():
        net = unet.UNet()
        net.load_state_dict(torch.load(path, weights_only=True))
        return net.eval()
    say(f"training the U-Net, seed {seed}")
    net = unet.train(training, epochs, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), path)
    return net


# ---------------------------------------------------------------------------- predicting


def predictor(row: str, net, training: scenes.Scenes, seed: int):
    """A function from images to Answers; a conversion is checked to predict what the network predicts."""
    import onnxruntime
    import unet

    import gapa_onnx

    if row == "MC dropout":
        return lambda images: _dropout(unet.sampled_probs(net, images, DRAWS, seed))
    model = unet.as_onnx(net)
    source = onnxruntime.InferenceSession(model.SerializeToString(), _single(), ["CPUExecutionProvider"])
    if row == "MAP":
        return lambda images: _softmax(_batched(source, ["logits"], images)["logits"])

    sites, k, most = GAPA[row]
    images = training.images[:most]
    names = ["logits", *(f"logits_{role}" for role in ("var", "probs", "entropy", "aleatoric", "epistemic"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "unet.gapa.onnx"
        made = gapa_onnx.convert(model, {"image": images}, path, sites=sites, k=k, seed=seed)
        if made.path is None:  # nothing is written where a check fails
            raise AssertionError(f"{row}: {[check for check in made.checks if not check.passed]}")
        session = gapa_onnx.session(path, _single())

    def predict(images: np.ndarray) -> Answers:
        found = _batched(session, names, images)
        expected = _batched(source, ["logits"], images)["logits"]
        if found["logits"].tobytes() != expected.tobytes():
            raise AssertionError(f"{row} does not predict what its source predicts")
        answers = {name.removeprefix("logits_"): values for name, values in found.items()}
        return {**answers, "variance": answers["var"].mean(axis=1)}

    return predict


def _single():
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return options


def _batched(session, names: list[str], images: np.ndarray) -> Answers:
    parts = [session.run(names, {"image": images[start : start + 16]}) for start in range(0, len(images), 16)]
    return {name: np.concatenate(part) for name, part in zip(names, zip(*parts))}


def _softmax(logits: np.ndarray) -> Answers:
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    probs = shifted / shifted.sum(axis=1, keepdims=True)
    return {"probs": probs, "entropy": _entropy(probs)}


def _dropout(sampled: tuple[np.ndarray, np.ndarray]) -> Answers:
    probs, aleatoric = sampled
    entropy = _entropy(probs)
    return {"probs": probs, "entropy": entropy, "epistemic": entropy - aleatoric}


def _entropy(probs: np.ndarray) -> np.ndarray:
    from gapa_onnx.measure.evaluation.metrics import entropy_rows

    return entropy_rows(np.moveaxis(probs, 1, -1))


# ----------------------------------------------------------------------------- measuring


def figures(
    answers: Answers,
    test: scenes.Scenes,
    elsewhere: dict[str, Answers],
    strange: dict[str, scenes.Scenes],
) -> dict[str, Any]:
    """All numbers of a line; those that a row has no notion of are empty."""
    from gapa_onnx.measure.evaluation.metrics import bin_sums, expected_calibration_error, log_loss_rows

    probs = np.moveaxis(answers["probs"], 1, -1).reshape(-1, len(scenes.CLASSES)).astype(np.float64)
    truth, predicted = test.labels.ravel().astype(np.int64), probs.argmax(axis=1)
    wrong = (truth != predicted).reshape(test.labels.shape)
    found = {
        "miou": mean_iou(truth, predicted),
        "accuracy": 1 - wrong.mean(),
        "nll": log_loss_rows(probs, truth).mean(),
        "ece": expected_calibration_error(bin_sums(probs.max(axis=1), ~wrong.ravel())),
    }
    for score in SCORES:
        found[f"error_{score}"] = auroc(answers, score, wrong)
    for kind, there in elsewhere.items():
        for score in SCORES:
            found[f"{kind}_{score}"] = auroc(there, score, strange[kind].labels == scenes.UNSEEN)
            found[f"scene_{kind}_{score}"] = scene_auroc(answers, there, score)
    return {name: "" if value is None else f"{value:.4f}" for name, value in found.items()}


def mean_iou(truth: np.ndarray, predicted: np.ndarray) -> float:
    """The mean over classes of |both| / |either|."""
    pairs = [(truth == label, predicted == label) for label in range(len(scenes.CLASSES))]
    return float(np.mean([(a & b).sum() / (a | b).sum() for a, b in pairs]))


def auroc(answers: Answers, score: str, positive: np.ndarray) -> float | None:
    """How well the score of a pixel tells the positive ones from the others."""
    from gapa_onnx.measure.evaluation.metrics import detection

    if score not in answers:
        return None
    return detection(answers[score][~positive], answers[score][positive]).get("auroc")


def scene_auroc(inside: Answers, outside: Answers, score: str) -> float | None:
    """How well the mean score of a scene tells strange ones from those like the training scenes."""
    from gapa_onnx.measure.evaluation.metrics import detection

    if score not in inside:
        return None
    return detection(*(there[score].mean(axis=(1, 2)) for there in (inside, outside))).get("auroc")


# ------------------------------------------------------------------------------- showing

QUALITY = {
    "mIoU": "miou",
    "NLL": "nll",
    "ECE": "ece",
    "entropy": "error_entropy",
    "epistemic": "error_epistemic",
    "variance": "error_variance",
}
STRANGE = {
    f"{kind}, {unit}: {score}": f"{scope}{kind}_{score}"
    for kind in scenes.STRANGE
    for unit, scope in (("pixels", ""), ("scenes", "scene_"))
    for score in ("entropy", "epistemic")
}


def section(rows: Sequence[dict[str, Any]]) -> str:
    """The part of the results page: tables of mean ± standard deviation over seeds."""
    if not rows:
        return ""
    seeds, first = len({str(row["seed"]) for row in rows}), rows[0]
    return f"""## Segmentation

Made scenes of 48 x 48 pixels ({first["digits"]} digits, balls and rectangles over a textured background), a small
U-Net with a bottleneck of 64 numbers, {first["test_scenes"]} test scenes; mean ± standard deviation over networks
of different seeds, {seeds} here. Converted files predict what the network predicts, bit for bit, on every scene.
Right of ECE: AUROC for finding wrong pixels, by three scores.

{_table(rows, QUALITY)}

{_verdict(rows)}

Strange scenes hold one object of an unseen shape (a star) or texture (stripes). AUROC for telling its pixels from
all others in these scenes, and for telling strange scenes from test scenes by their mean score:

{_table(rows, STRANGE)}

![scenes, errors and uncertainty](../../docs/figures/segmentation.png)
"""


def _table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in ROWS:
        own = [line for line in rows if line["row"] == row]
        if own:
            lines.append(f"| {row} | " + " | ".join(_mean(own, column) for column in columns.values()) + " |")
    return "\n".join(lines)


def _values(lines: Sequence[dict[str, Any]], column: str) -> np.ndarray:
    return np.array([float(line[column]) for line in lines if line[column] not in ("", None)])


def _mean(lines: Sequence[dict[str, Any]], column: str) -> str:
    values = _values(lines, column)
    if not len(values):
        return ""
    return f"{values.mean():.3f}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else "")


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    """The epistemic map of each row against the entropy of the network as it was, in finding wrong pixels."""
    entropy = _values([row for row in rows if row["row"] == "MAP"], "error_entropy")
    found = []
    for name in ROWS[1:]:
        epistemic = _values([row for row in rows if row["row"] == name], "error_epistemic")
        if len(entropy) and len(epistemic):
            gain = epistemic.mean() - entropy.mean()
            found.append(f"{name}: {abs(gain):.3f} {'above' if gain > 0 else 'below'}")
    return "The epistemic part's AUROC for wrong pixels against the entropy of MAP: " + "; ".join(found) + "."


def draw(
    drawn: dict[str, tuple[Answers, dict[str, Answers]]],
    test: scenes.Scenes,
    strange: dict[str, scenes.Scenes],
    path: Path,
) -> None:
    """Scenes by rows, not picked by hand: the test scenes of middling and of many errors, the first strange ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    answers, elsewhere = drawn["GAPA embedding"]
    fine, fine_elsewhere = drawn[POSITIONS]
    wrong = (answers["probs"].argmax(axis=1) != test.labels).mean(axis=(1, 2))
    order = np.argsort(wrong, kind="stable")
    cases = [
        (name, test, order[int(share * (len(order) - 1))], answers, fine)
        for name, share in (("middling", 0.5), ("many errors", 0.9))
    ]
    cases += [
        (f"strange {kind}", made, 0, elsewhere[kind], fine_elsewhere[kind]) for kind, made in strange.items()
    ]

    titles = (
        "image",
        "truth",
        "prediction",
        "error",
        "aleatoric",
        "epistemic\n(embedding)",
        "epistemic\n(positions)",
    )
    classes = ListedColormap(["#f2f2f2", "#2f6db3", "#e0a030", "#5a9e6f", "#c8553d"])  # the last one: unseen
    figure, axes = pyplot.subplots(
        len(cases), len(titles), figsize=(9.6, 5.8), dpi=100, layout="constrained", facecolor="white"
    )
    shown = []
    for cells, (name, made, row, coarse, sharp) in zip(axes, cases):
        truth = np.where(made.labels[row] == scenes.UNSEEN, len(scenes.CLASSES), made.labels[row])
        predicted = coarse["probs"][row].argmax(axis=0)
        flat = {"cmap": classes, "vmin": 0, "vmax": len(scenes.CLASSES), "interpolation": "nearest"}
        cells[0].imshow(made.images[row, 0], cmap="gray", vmin=0, vmax=1)
        cells[1].imshow(truth, **flat)
        cells[2].imshow(predicted, **flat)
        cells[3].imshow(truth != predicted, cmap="Greys", vmin=0, vmax=1)
        maps = (coarse["aleatoric"][row], coarse["epistemic"][row], sharp["epistemic"][row])
        shown.append([cell.imshow(values, cmap="magma") for cell, values in zip(cells[4:], maps)])
        cells[0].set_ylabel(name, fontsize=9)
    for column in zip(*shown):  # one scale per column
        highest = max(float(np.quantile(np.asarray(image.get_array()), 0.995)) for image in column)
        for image in column:
            image.set_clim(0, highest)
    for cell, title in zip(axes[0], titles):
        cell.set_title(title, fontsize=9)
    for cell in axes.flat:
        cell.set(xticks=[], yticks=[])
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
    shrink(path)


def shrink(path: Path) -> None:
    """256 colours are enough for a picture of maps, and half the bytes."""
    from PIL import Image

    with Image.open(path) as image:
        few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
