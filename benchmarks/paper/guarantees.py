"""What converted files promise, counted on rows that they have never seen: coverage, width, size, error.

    python benchmarks/paper/guarantees.py [--quick] [--data DIR] [--cifar DIR] [--only NAME …] [--splits 20]

One network per data set; what varies from split to split is which unseen rows are held out for the conversion and
which are for the table. Sites are fitted once per network, everything else is found again in each split.

Regression (protein, kin8nm, naval, airline, taxi): six tenths of the rows train a network of 50 units; of the others
half, at most 4000, are held out with their targets. Coverage 0.9, two kinds of interval:

    normalised    those of the file: y ∓ factor · reach · sqrt(y_total_var)
    unscaled      y ± the quantile of all held-out absolute residuals, the same width everywhere
    skewed        the same with a quantile for each side, to tell what of the gain is due to that

    winkler       width + 20 · what a target lies beyond its interval, the mean; `error` is its standard error

Classification: 500 labelled rows are held out. Networks: the paper's on MNIST (coverage 0.99) and Fashion-MNIST (0.95),
and with --cifar, a folder that holds or takes CIFAR-10's images, the four ResNets (0.95). Of these what the places of the
default read is computed once, the means of two maps and the last features, and a small network through which just that
passes is converted in the same geometry: a whole network's file says the same, but would run again for each split.

    file          probabilities of the file, sets by each of LAC, APS, RAPS; answered and error with --max-error 0.05
                  and 2000 labels; flagged is the share of the rows that this file calls strange at .05
    temperature   temperature scaling by the same 500 labels

Writes results/guarantees.csv, line by line; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

import gapa_onnx
from gapa_onnx.data import hold_out, open_data
from gapa_onnx.emit.emit import emit
from gapa_onnx.emit.rewrite import rewrite
from gapa_onnx.fit.calibrate import calibrate
from gapa_onnx.measure.evaluation.metrics import bin_sums, expected_calibration_error
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.settings import Settings
from gapa_onnx.settle.conformal import line_at
from gapa_onnx.settle.settle import settle

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from backbones import CACHE, DATA, classifier, images  # noqa: E402
from lines import Lines, machine, say  # noqa: E402

REGRESSION = {
    "protein": "protein-tertiary-structure",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "airline": "airline_nyc13",
    "taxi": "taxi_green_2022_01",
}
COVERAGE = {"mnist": 0.99, "fashion_mnist": 0.95} | {f"resnet{depth}": 0.95 for depth in (20, 32, 44, 56)}
LABELS, MANY_LABELS, MAX_ERROR = 500, 2000, 0.05
MOST_ROWS, MOST_HELD_OUT, MOST_TEST = 50_000, 4000, 5000
CALIBRATION_ROWS = 10_000


@dataclass(frozen=True)
class Fitted:
    """A network with its sites fitted, from which files for any held-out rows are made."""

    model: onnx.ModelProto
    calib: np.ndarray
    settings: Settings

    def __post_init__(self) -> None:
        source = load(self.model)
        plan = analyse(source, self.settings)
        data = open_data({source.inputs[0].name: self.calib}, source.inputs)
        made = {"_plan": plan, "_data": data, "_calibration": calibrate(plan, data, self.settings)}
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def file(self, rows: np.ndarray, truth: dict[str, dict[str, np.ndarray]], settings: Settings) -> Answers:
        """The file for these held-out rows and their truth, as `convert` makes it."""
        plan, data, calibration = (getattr(self, name) for name in ("_plan", "_data", "_calibration"))
        inputs = plan.source.inputs
        errors = settings.max_error is not None
        held = hold_out(
            open_data({inputs[0].name: rows}, inputs), data, **truth, errors=errors, seed=settings.seed
        )
        template = rewrite(plan, calibration, settings, held.targets, held.labels)
        numbers = settle(template, calibration, settings, held)
        return Answers(emit(template, numbers, calibration, settings, held=held))


class Answers:
    """What a file answers, by the name of the output."""

    def __init__(self, model: onnx.ModelProto):
        self._session = gapa_onnx.session(model.SerializeToString())
        self._names = [value.name for value in self._session.get_outputs()]

    def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        name = self._session.get_inputs()[0].name
        parts = [self._session.run(self._names, {name: x[k : k + 1000]}) for k in range(0, len(x), 1000)]
        return {name: np.concatenate(part) for name, part in zip(self._names, zip(*parts))}


Line = dict[str, Any]


# ------------------------------------------------------------------------------- regression


def regression_lines(name: str, splits: Sequence[int], options: argparse.Namespace) -> Iterator[Line]:
    with np.load(options.data / "regression" / f"{REGRESSION[name]}.npz") as arrays:
        x, y = arrays["x"].astype(np.float32), arrays["y"].astype(np.float64).reshape(-1)
    # Some rows are there twice; a row that the network was trained on is none to hold out.
    order = np.random.default_rng(0).permutation(np.unique(x, axis=0, return_index=True)[1])[:MOST_ROWS]
    fitted, unseen = order[: int(0.6 * len(order))], order[int(0.6 * len(order)) :]
    settings = Settings(task="regression")
    net = Fitted(_network(name, x[fitted], y[fitted], options), x[fitted][:CALIBRATION_ROWS], settings)
    for split in splits:
        rows = np.random.default_rng(1000 + split).permutation(unseen)
        held, test = np.split(rows, [min(len(rows) // 2, MOST_HELD_OUT)])
        test = test[:MOST_TEST]
        file = net.file(x[held], {"targets": {"y": y[held][:, None]}}, replace(settings, seed=split))
        known, found = file(x[held]), file(x[test])
        mean = found["y"][:, 0].astype(np.float64)
        errors = y[held] - known["y"][:, 0]
        line, below, above = line_at(np.abs(errors), 0.9), line_at(-errors, 0.95), line_at(errors, 0.95)
        bounds = {
            "normalised": (found["y_lower"][:, 0], found["y_upper"][:, 0]),
            "skewed": (mean - below, mean + above),
            "unscaled": (mean - line, mean + line),
        }
        for method, (lower, upper) in bounds.items():
            key = {"data": name, "split": split, "method": method}
            yield (
                key | _judged(lower, upper, y[test]) | {"nominal": 0.9, "rows": len(held), "test": len(test)}
            )


def _network(name: str, x: np.ndarray, y: np.ndarray, options: argparse.Namespace) -> onnx.ModelProto:
    """The network of a data set, trained unless it is in the cache."""
    path = CACHE / ("quick" if options.quick else "guarantees") / f"{name}.onnx"
    if not path.exists():
        import torch
        from regression_networks import Units, as_onnx, train

        say(f"training the network of {name}")
        torch.set_num_threads(1)
        units = Units.of(x, y)
        size, steps = (100 if name == "protein" else 50), (500 if options.quick else 4000)
        bundle = train(units.rows(x), units.targets(y), size, [1e-5], [0.0], seed=0, steps=steps)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(as_onnx(bundle, units), path)
    return onnx.load(path)


def _judged(lower: np.ndarray, upper: np.ndarray, y: np.ndarray) -> Line:
    lower, upper = lower.astype(np.float64), upper.astype(np.float64)
    scores = upper - lower + 20 * (np.maximum(lower - y, 0) + np.maximum(y - upper, 0))
    return {
        "coverage": round(float(((lower <= y) & (y <= upper)).mean()), 5),
        "size": round(float((upper - lower).mean()), 7),
        "winkler": round(float(scores.mean()), 7),
    }


# --------------------------------------------------------------------------- classification


@dataclass(frozen=True)
class Labelled:
    """A classifier, rows like those of its training, and labelled rows that it has not seen."""

    model: onnx.ModelProto
    calib: np.ndarray
    x: np.ndarray
    y: np.ndarray


def class_lines(name: str, splits: Sequence[int], options: argparse.Namespace) -> Iterator[Line]:
    task, settings = _labelled(name, options), Settings(task="classification", coverage=COVERAGE[name])
    if name.startswith("resnet"):
        settings = replace(
            settings, witnesses="place0,place1", metric="polar"
        )  # as chosen for the whole network
    net = Fitted(task.model, task.calib, settings)
    (output,) = [value.name for value in task.model.graph.output]
    for split in splits:
        order = np.random.default_rng(split).permutation(len(task.x))
        held, test = order[:LABELS], order[LABELS:]
        for kind in ("lac", "aps", "raps"):
            labels = {"labels": {output: task.y[held]}}
            file = net.file(task.x[held], labels, replace(settings, sets=kind, seed=split))
            found, true = file(task.x[test]), task.y[test]
            chosen = found[f"{output}_set"]
            line = {"data": name, "split": split, "method": f"file, {kind}"}
            line |= _probable(found[f"{output}_probs"], true)
            line |= {
                "coverage": round(float(chosen[np.arange(len(true)), true].mean()), 5),
                "size": round(float(chosen.sum(axis=1).mean()), 5),
                "nominal": COVERAGE[name],
                "empty": int((~chosen.any(axis=1)).sum()),
                "argmax_changed": int((found[f"{output}_probs"].argmax(1) != found[output].argmax(1)).sum()),
            }
            yield line | {"rows": len(held), "test": len(test)}
        known = file(task.x[held])[output]
        temperature = _temperature(known.astype(np.float64), task.y[held])
        scaled = np.exp(log_softmax(found[output].astype(np.float64) / temperature, axis=1))
        line = {"data": name, "split": split, "method": "temperature"}
        yield line | _probable(scaled, true) | {"rows": len(held), "test": len(test)}
        yield _deferred(net, task, output, order, settings, split, name)


def _deferred(
    net: Fitted, task: Labelled, output: str, order: np.ndarray, settings: Settings, split: int, name: str
) -> Line:
    """How many rows are answered where an error is promised, and how many of these wrongly."""
    held, test = order[:MANY_LABELS], order[MANY_LABELS:]
    choices = replace(settings, max_error=MAX_ERROR, seed=split)
    found = net.file(task.x[held], {"labels": {output: task.y[held]}}, choices)(task.x[test])
    flagged = round(float(found[f"{output}_ood"].mean()), 5)
    answered = ~found[f"{output}_defer"]
    wrong = (found[output].argmax(axis=1) != task.y[test])[answered]
    line = {"data": name, "split": split, "method": "deferral", "nominal": MAX_ERROR}
    line |= {"answered": round(float(answered.mean()), 5), "error": round(float(wrong.mean()), 5)}
    return line | {"flagged": flagged, "rows": len(held), "test": len(test)}


def _probable(probs: np.ndarray, true: np.ndarray) -> Line:
    right = probs.argmax(axis=1) == true
    losses = -np.log(np.maximum(probs[np.arange(len(true)), true].astype(np.float64), 1e-30))
    ece = expected_calibration_error(bin_sums(probs.max(axis=1), right))
    return {
        "accuracy": round(float(right.mean()), 5),
        "nll": round(float(losses.mean()), 6),
        "ece": round(ece, 6),
    }


def _temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    def loss(log: float) -> float:
        return -float(log_softmax(logits / math.exp(log), axis=1)[np.arange(len(labels)), labels].mean())

    return math.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x)


def _labelled(name: str, options: argparse.Namespace) -> Labelled:
    if name.startswith("resnet"):
        return _places(name, options)
    data = images(name, options.data)
    epochs = {"mnist": 10, "fashion_mnist": 12}[name]
    model = onnx.load(classifier(name, 0, options.data, 2 if options.quick else epochs))
    return Labelled(
        model, data["x_train"][:CALIBRATION_ROWS], data["x_test"], data["y_test"].astype(np.int64)
    )


def _places(name: str, options: argparse.Namespace) -> Labelled:
    """What the places of a ResNet read, computed once and kept in the cache, and a network that is told just that."""
    path = CACHE / "guarantees" / f"{name}_places.npz"
    if not path.exists():
        from cifar.images import cifar10, normalised
        from cifar.nets import resnet

        say(f"running {name}")
        with np.load(options.data / "cifar" / f"{name}.npz") as file:
            weights = dict(file)
        read = _reader(resnet(weights))
        data = cifar10(options.cifar)
        train, test = (read(normalised(x)) for x in (data.x_train[:CALIBRATION_ROWS], data.x_test))
        path.parent.mkdir(parents=True, exist_ok=True)
        last = {"weight": weights["linear.weight"], "bias": weights["linear.bias"]}
        places = {f"train{i}": x for i, x in enumerate(train)} | {f"test{i}": x for i, x in enumerate(test)}
        np.savez(path, **places, y=data.y_test.astype(np.int64), **last)
    with np.load(path) as kept:
        arrays = dict(kept)
    widths = [arrays[f"train{place}"].shape[1] for place in range(3)]
    train, test = (
        np.concatenate([arrays[f"{kind}{i}"] for i in range(3)], axis=1) for kind in ("train", "test")
    )
    return Labelled(_passing(widths, arrays["weight"], arrays["bias"]), train, test, arrays["y"])


def _reader(model: onnx.ModelProto) -> Callable[[np.ndarray], list[np.ndarray]]:
    """What its places read of images: the means of the witnesses' maps, then the last features."""
    from cifar.nets import FEATURES, with_features

    names = [site.query for site in analyse(load(model), Settings()).witnesses]
    model = with_features(model, FEATURES)
    for name in names:
        model.graph.node.append(helper.make_node("GlobalAveragePool", [name], [f"{name}/mean"]))
        model.graph.node.append(helper.make_node("Flatten", [f"{name}/mean"], [f"{name}/read"]))
        model.graph.output.append(onnx.ValueInfoProto(name=f"{name}/read"))
    session = ort.InferenceSession(model.SerializeToString())
    wanted = [*(f"{name}/read" for name in names), FEATURES]

    def read(x: np.ndarray) -> list[np.ndarray]:
        parts = [session.run(wanted, {"x": x[k : k + 100]}) for k in range(0, len(x), 100)]
        return [np.concatenate(part) for part in zip(*parts)]

    return read


def _passing(widths: list[int], weight: np.ndarray, bias: np.ndarray) -> onnx.ModelProto:
    """x (n, all widths) → place0, place1, … → features → logits, where each is made of the one before and its own columns.

    What one place adds to the next is zero, and none of the numbers is negative, so that a place is just its columns; all
    but the features are maps of one position, (n, width, 1, 1), as the places that they stand for are maps.
    """
    names = [*(f"place{i}" for i in range(len(widths) - 1)), "features"]
    ends = np.cumsum([0, *widths])
    constants = {"axis": np.array([1]), "map": np.array([2, 3]), "weight": weight, "bias": bias}
    nodes = []
    for i, name in enumerate(names):
        constants |= {f"start{i}": ends[i : i + 1], f"end{i}": ends[i + 1 : i + 2]}
        nodes.append(helper.make_node("Slice", ["x", f"start{i}", f"end{i}", "axis"], [f"columns{i}"]))
        whole = f"columns{i}"
        if i:
            constants[f"nothing{i}"] = np.zeros((widths[i - 1], widths[i]), np.float32)
            nodes.append(helper.make_node("Flatten", [names[i - 1]], [f"flat{i}"]))
            nodes.append(helper.make_node("MatMul", [f"flat{i}", f"nothing{i}"], [f"added{i}"]))
            nodes.append(helper.make_node("Add", [whole, f"added{i}"], [f"whole{i}"]))
            whole = f"whole{i}"
        if name != "features":
            nodes.append(helper.make_node("Unsqueeze", [whole, "map"], [f"map{i}"]))
            whole = f"map{i}"
        nodes.append(helper.make_node("Relu", [whole], [name]))
    nodes.append(helper.make_node("Gemm", ["features", "weight", "bias"], ["logits"], transB=1))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "places",
        [value("x", TensorProto.FLOAT, ["n", sum(widths)])],
        [value("logits", TensorProto.FLOAT, ["n", len(bias)])],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ------------------------------------------------------------------------------------ main

COLUMNS = (
    "data", "split", "method", "nominal", "coverage", "size", "winkler", "accuracy", "nll", "ece", "empty",
    "argmax_changed", "answered", "error", "flagged", "rows", "test",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument("--cifar", type=Path, help="where CIFAR-10's images are, or are to be kept")
    parser.add_argument("--only", nargs="*", choices=[*REGRESSION, *COVERAGE])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--out", type=Path, help="the table; results/guarantees.csv")
    parser.add_argument("--quick", action="store_true", help="two sets, two splits, short training")
    options = parser.parse_args()
    everything = [name for name in (*REGRESSION, *COVERAGE) if options.cifar or not name.startswith("resnet")]
    names = options.only or (["kin8nm", "mnist"] if options.quick else everything)
    options.splits = 2 if options.quick else options.splits
    out = options.out or (CACHE / "quick" if options.quick else HERE / "results") / "guarantees.csv"
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = Lines(out, ("data", "split", "method"), fresh=options.quick)
    for name in names:
        splits = [one for one in range(options.splits) if not lines.has(name, one, _last_method(name))]
        made = regression_lines if name in REGRESSION else class_lines
        for line in made(name, splits, options) if splits else ():
            lines.add({column: line.get(column, "") for column in COLUMNS} | machine())
    for text in summary(lines.rows):
        print(text)
    return 0


def _last_method(name: str) -> str:
    return "unscaled" if name in REGRESSION else "deferral"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Means over the splits, with the standard errors of coverage, and the gain of normalised intervals."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["method"]), []).append(row)
    for (data, method), lines in groups.items():
        means = {}
        for column in COLUMNS[4:15]:
            values = [float(line[column]) for line in lines if str(line[column])]
            if values:
                means[column] = (
                    f"{column} {np.mean(values):.4f} ± {np.std(values) / math.sqrt(len(values)):.4f}"
                )
        yield f"{data}, {method}, {len(lines)} splits: {', '.join(means.values())}"
    for data in REGRESSION:
        if (data, "normalised") in groups:
            one, other = (
                np.array([float(r["winkler"]) for r in groups[data, m]]) for m in ("normalised", "unscaled")
            )
            yield f"{data}: winkler score of normalised intervals over unscaled {one.mean() / other.mean():.4f}"


if __name__ == "__main__":
    sys.exit(main())
