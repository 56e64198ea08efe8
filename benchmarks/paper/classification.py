"""The paper's MNIST and Fashion-MNIST table: this tool beside its peers, on the same trained networks.

    python benchmarks/paper/classification.py [--quick] [--data DIR] [--seeds 5] [--only mnist fashion]
                                              [--rows NAME …] [--fresh] [--cache DIR]

    acc nll ece        of the predicted probabilities on the test set
    ood bald score     AUROC against the test images of the other data set: by the entropy of the
                       probabilities, by its epistemic part, by the method's own score
    argmax_changed     rows of both test sets whose most probable class is not the network's, which for converted
                       files is the source file in onnxruntime: torch rounds otherwise, and ties fall otherwise
    fit_seconds        CPU seconds on one thread from the trained network to the method ready for use
    ratio, control     time of a batch over MAP's, and MAP's over itself, in turns in one process (`gapa_onnx.measure.bench`);
                       for converted files over the source file in onnxruntime, for the others over torch

Writes results/classification.csv line by line; a line that is there is not run again. `--rows gapa` takes only rows
whose names contain one of the words, `--fresh` runs the chosen ones again. `--quick` leaves out what
needs Jacobians of all weights, takes few rows, and writes to benchmarks/cache/quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from converted import CONVERTED, Converted, source_predictor
from measuring import Fitted, beside, in_batches, quality
from peers import PEERS, Row
from training import DATA_SETS, HERE, QUICK, Problem, Scale, problem

from backbones import CACHE, DATA, images  # isort: skip  (training puts benchmarks/ on the path)
from lines import Lines, machine, say  # isort: skip
from gapa_onnx.measure import bench

ROWS: tuple[Row, ...] = (*PEERS, *CONVERTED)
KEY = ("data", "row", "seed")


def main() -> None:
    options = arguments(__doc__).parse_args()
    scale, folder = chosen(options)
    lines = Lines(folder / "classification.csv", KEY, fresh=False)
    one_thread()
    for seed in range(1 if options.quick else options.seeds):
        for name in options.only:
            rows = [r for r in matching(options.rows) if not (options.quick and r.all_layers)]
            wanted = [r for r in rows if options.fresh or not lines.has(name, r.name, seed)]
            if wanted:
                task = problem(name, seed, scale, options.data)
                outside = images(DATA_SETS[name], options.data)["x_test"]
                for row in wanted:
                    say(f"{name}, seed {seed}: {row.name}")
                    lines.add({"data": name, "row": row.name, "seed": seed, **measured(row, task, outside)})


def arguments(text: str) -> argparse.ArgumentParser:
    """The options that the commands of this folder share."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where networks are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(DATA_SETS), type=_data_set)
    parser.add_argument("--rows", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--fresh", action="store_true")
    return parser


def _data_set(word: str) -> str:
    found = [name for name in DATA_SETS if name.startswith(word)]
    if len(found) != 1:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(DATA_SETS)}")
    return found[0]


def chosen(options: argparse.Namespace) -> tuple[Scale, Path]:
    """How much to compute, and where results go."""
    networks = options.cache / "quick" / "paper" if options.quick else options.cache / "paper"
    results = networks if options.quick else HERE / "results"
    for folder in (networks, results):
        folder.mkdir(parents=True, exist_ok=True)
    return replace(QUICK if options.quick else Scale(), folder=networks), results


def matching(words: Sequence[str]) -> list[Row]:
    """Rows whose names contain one of the words."""
    return [row for row in ROWS if any(word.lower() in row.name.lower() for word in words)]


def one_thread() -> None:
    """CPU time of the calling thread is then all of the time."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)


# ------------------------------------------------------------------------ one line


def measured(row: Row, task: Problem, outside: np.ndarray) -> dict[str, Any]:
    fitted = row.fit(task)
    most = task.scale.all_layer_rows if row.all_layers else task.scale.test_rows
    x, labels = task.data["x_test"][:most], task.data["y_test"][:most].astype(np.int64)
    outside = outside[:most]
    known, strange = (in_batches(fitted.predict, rows, row.batch) for rows in (x, outside))
    plainly = source_predictor(task) if isinstance(row, Converted) else MAP.fit(task).predict
    best = [in_batches(plainly, rows, row.batch).probs.argmax(axis=1) for rows in (x, outside)]
    return {
        "rows": len(x),
        **quality(known, strange, labels),
        "argmax_changed": sum(
            int((b != answer.probs.argmax(1)).sum()) for b, answer in zip(best, (known, strange))
        ),
        "fit_seconds": round(fitted.seconds, 2),
        **timing(row, fitted, task, x[: row.batch]),
        "settings": row.settings if isinstance(row, Converted) else "",
        "torch": torch.__version__,
        "laplace_torch": version("laplace-torch"),
        **machine(),
    }


MAP = PEERS[0]


def timing(row: Row, fitted: Fitted, task: Problem, x: np.ndarray) -> dict[str, Any]:
    """Time over MAP's for one batch; empty where MAP against itself says that the machine was too busy."""
    if isinstance(row, Converted):
        found = bench.measure(
            task.onnx_path,
            row.path(task),
            batch=len(x),
            data={"x": x},
            rounds=task.scale.rounds,
            parts=False,
        ).comparison
    else:
        found = beside(MAP.fit(task).predict, fitted.predict, x, task.scale.rounds)
    ratio = round(found.ratio, 3) if found.sound else ""
    return {"batch": len(x), "ratio": ratio, "control": round(found.control, 3)}


if __name__ == "__main__":
    main()
