"""What a noise head is worth: test NLL of a constant noise and of the head, on the UCI regression sets.

    python benchmarks/noise_head.py [--data ../shared/data/regression] [--splits 5] [--sets …] [--quick]

Writes benchmarks/results/noise_head.csv: one line a data set, split and kind of rows, then the means.
A network of 50 relu units is fitted to standardised targets; the noise is learnt

    rows = training   from the residuals of the rows that the network was fitted to
    rows = held-out   from a fifth of the training rows, which the network has not seen

The constant is the mean squared residual of the same rows. Epistemic variances are 0 here, so that the
two differ by nothing but the noise. NLLs are in nats per test row, in units of the standardised target.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from gapa_onnx.settle.noise import fit_noise

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
SETS = (
    "protein-tertiary-structure",
    "kin8nm",
    "power-plant",
    "naval-propulsion-plant",
    "wine-quality-red",
    "concrete",
    "energy",
    "bostonHousing",
)
COLUMNS = ("dataset", "split", "rows", "nll_constant", "nll_head", "gain", "rmse_fitted", "rmse_test")
UNITS = 50
ROW_VISITS = 400_000  # of one fit, within 40 … 400 epochs


def measure(
    x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray, held_out: bool, seed: int
) -> dict:
    """One network, one head, one line of the table."""
    train = np.random.default_rng(seed).permutation(train)
    count = len(train) // 5 if held_out else 0
    noise_rows, fitted = train[:count] if held_out else train, train[count:]
    x = (x - x[fitted].mean(axis=0)) / (x[fitted].std(axis=0) + 1e-9)
    y = (y - y[fitted].mean()) / y[fitted].std()
    epochs = int(np.clip(ROW_VISITS / len(fitted), 40, 400))
    network = MLPRegressor(
        hidden_layer_sizes=(UNITS,),
        max_iter=epochs,
        n_iter_no_change=epochs,
        batch_size=min(100, len(fitted)),
        random_state=seed,
    ).fit(x[fitted], y[fitted])
    hidden = np.maximum(x @ network.coefs_[0] + network.intercepts_[0], 0)
    residual = y - network.predict(x)

    head = fit_noise(hidden[noise_rows], residual[noise_rows], np.zeros(len(noise_rows)), seed=seed)
    constant = nll(residual[test], np.mean(residual[noise_rows] ** 2))
    learnt = nll(residual[test], head(hidden[test])[:, 0])
    return {
        "rows": "held-out" if held_out else "training",
        "nll_constant": constant,
        "nll_head": learnt,
        "gain": constant - learnt,
        "rmse_fitted": float(np.sqrt(np.mean(residual[fitted] ** 2))),
        "rmse_test": float(np.sqrt(np.mean(residual[test] ** 2))),
    }


def nll(residual: np.ndarray, var: np.ndarray) -> float:
    return float(np.mean(residual**2 / (2 * var) + 0.5 * np.log(2 * np.pi * var)))


def means(lines: list[dict]) -> list[dict]:
    """The mean over splits of every data set and kind of rows."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for line in lines:
        groups.setdefault((line["dataset"], line["rows"]), []).append(line)
    return [
        {"dataset": dataset, "split": "mean", "rows": rows}
        | {column: float(np.mean([line[column] for line in group])) for column in COLUMNS[3:]}
        for (dataset, rows), group in groups.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "regression")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--quick", action="store_true", help="one split of each set")
    parser.add_argument("--output", type=Path, default=RESULTS / "noise_head.csv")
    options = parser.parse_args()
    missing = [name for name in options.sets if not (options.data / f"{name}.npz").exists()]
    if missing:
        print(f"error: {options.data} has no {', '.join(missing)}", file=sys.stderr)
        return 2

    warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is given
    lines = []
    for name in options.sets:
        data = np.load(options.data / f"{name}.npz")
        x, y = (data[key].astype(np.float64) for key in ("x", "y"))
        for split in range(1 if options.quick else options.splits):
            for held_out in (False, True):
                start = time.perf_counter()
                train, test = data[f"train_{split}"], data[f"test_{split}"]
                line = {"dataset": name, "split": split} | measure(x, y, train, test, held_out, split)
                lines.append(line)
                seconds = time.perf_counter() - start
                print(
                    f"{name} {split} {line['rows']}: constant {line['nll_constant']:.4f}, "
                    f"head {line['nll_head']:.4f} ({seconds:.1f} s)",
                    file=sys.stderr,
                )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for line in lines + means(lines):
            table.writerow({k: round(v, 5) if isinstance(v, float) else v for k, v in line.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
