"""Regression beside peers: NLL, CRPS and CQM of error bars on one network per split, through onnxruntime for ours.

    python benchmarks/paper/regression.py [--quick] [--data DIR] [--sets …] [--splits 5] [--rows map gapa …]

The training rows of a split (Gal's, or a random tenth is left for testing) fall into those that networks are fitted
to, four fifths, and held-out rows. The same backbone, a hidden layer of 50 relu units (100 for protein), serves
MAP, Laplace and GAPA; dropout and ensembles train their own of the same size. Held-out rows are for everything that
is chosen or fitted besides, alike for all methods:

    backbone, ensemble             the weight decay
    MAP, dropout, ensemble, LLA    a constant noise; the dropout rate, the prior precision
    Gaussian ensemble              when each network stops; one factor for all variances
    GAPA                           a constant noise and one factor for its variance; calibrated on the fitted rows.
                                   "No labels for its scale" leaves the factor at 1
    GAPA + noise head              the targets of `convert`, by which it sets τ and the noise head; calibrated on all
                                   training rows
    MAP + noise head               the same head without GAPA's variance, to tell the two apart

Test rows are for the table alone. Figures are in units of the target. Writes results/regression.csv, line by line;
what is there already is not run again (`--fresh` does).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import regression_peers as peers
import torch
from regression_networks import STEPS, Bundle, Units, as_onnx, train
from regression_peers import Answer

import gapa_onnx
from gapa_onnx.measure.evaluation import metrics
from gapa_onnx.settle.noise import fit_noise
from gapa_onnx.settle.scaling import FACTORS

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from lines import Lines, machine, say  # noqa: E402

GAL = (
    "yacht",
    "bostonHousing",
    "energy",
    "concrete",
    "wine-quality-red",
    "kin8nm",
    "power-plant",
    "naval-propulsion-plant",
    "protein-tertiary-structure",
)
STAND_INS = ("taxi_green_2022_01", "airline_nyc13")
GROUPS = ("map", "dropout", "ensemble", "laplace", "gapa")
WIDER = {"protein-tertiary-structure": 100}
UNITS = 50
MEMBERS = 5
DECAYS = (1e-5, 3e-4, 3e-3)
MOST_ROWS = 50_000  # of a data set
QUICK = {"sets": ("yacht", "energy"), "splits": 1, "steps": 1000}


@dataclass(frozen=True)
class Networks:
    """All networks of a split."""

    means: Bundle  #: of one weight decay, the one of least held-out error; the first is the backbone
    dropped: Bundle  #: trained with dropout, one of each rate
    gaussian: Bundle  #: of mean and variance


class Split:
    """One split of one data set, its networks trained when they are first asked for."""

    def __init__(self, data: Path, name: str, number: int, steps: int, cache: Path | None):
        self.name, self.number, self.steps = name, number, steps
        self.cache = cache and cache / f"{name}-{number}.pt"
        with np.load(data / f"{name}.npz") as arrays:
            x, y = (arrays[key].astype(np.float64) for key in ("x", "y"))
            generator = np.random.default_rng(number)
            if f"train_{number}" in arrays:
                training, test = arrays[f"train_{number}"], arrays[f"test_{number}"]
                training = generator.permutation(training)
            else:
                rows = generator.permutation(len(x))[:MOST_ROWS]
                test, training = rows[: len(rows) // 10], rows[len(rows) // 10 :]
        count = len(training) // 5
        x = x.astype(np.float32)  # what the converted model reads
        self.held_out, self.fitted, self.test = (
            (x[rows], y[rows]) for rows in (training[:count], training[count:], test)
        )
        self.units = Units.of(*self.fitted)
        self._networks: Networks | None = None

    @property
    def fitted_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.units.rows(self.fitted[0]), self.units.targets(self.fitted[1])

    @property
    def held_out_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.units.rows(self.held_out[0]), self.units.targets(self.held_out[1])

    def networks(self) -> Networks:
        """Trained, or as they were left by an earlier run."""
        if self._networks is None and self.cache and self.cache.exists():
            self._networks = torch.load(self.cache, weights_only=False)
        if self._networks is None:
            self._networks = self._train()
            if self.cache:
                self.cache.parent.mkdir(parents=True, exist_ok=True)
                torch.save(self._networks, self.cache.with_suffix(".part"))
                os.replace(self.cache.with_suffix(".part"), self.cache)
        return self._networks

    def _train(self) -> Networks:
        x, y = self.fitted_tensors
        units = WIDER.get(self.name, UNITS)
        decays = [decay for decay in DECAYS for _ in range(MEMBERS)]
        rates = peers.DROPOUT_RATES
        means = train(
            *(x, y, units),
            decay=[*decays, *[DECAYS[0]] * len(rates)],
            dropout=[0.0] * len(decays) + list(rates),
            seed=self.number,
            steps=self.steps,
        )
        held_out, true = self.held_out_tensors
        errors = ((means(held_out)[..., 0] - true) ** 2).mean(dim=1)[: len(decays)]
        best = int(errors.reshape(len(DECAYS), MEMBERS).mean(dim=1).argmin())
        both = train(
            *(x, y, units),
            decay=[DECAYS[0]] * MEMBERS,
            dropout=[0.0] * MEMBERS,
            judge=(held_out, true),
            seed=self.number + 1000,
            steps=self.steps,
        )
        return Networks(
            means.part(list(range(best * MEMBERS, (best + 1) * MEMBERS))),
            means.part(list(range(len(decays), len(decays) + len(rates)))),
            both,
        )


# ------------------------------------------------------------------------------- rows
# Each group yields the names of its rows with their answers for the test rows, noise included.

Named = Iterator[tuple[str, Answer]]


def _plain(split: Split, method: peers.Method) -> Answer:
    """A method in units of the target, with its constant noise."""
    x, y = split.held_out_tensors
    noise = peers.best_noise(method(x), y.double().numpy())
    return split.units.back(*peers.with_noise(method(split.units.rows(split.test[0])), noise))


def map_rows(split: Split) -> Named:
    means = split.networks().means
    yield "MAP", _plain(split, peers.point(means))
    hidden, residual = {}, {}
    for name, (x, y) in (("held_out", split.held_out), ("test", split.test)):
        rows = split.units.rows(x)
        hidden[name] = (rows @ means.w1[0] + means.b1[0]).numpy()
        mean, _ = split.units.back(*peers.point(means)(rows))
        residual[name] = y - mean
    head = fit_noise(
        hidden["held_out"], residual["held_out"], np.zeros(len(hidden["held_out"])), seed=split.number
    )
    yield "MAP + noise head", (split.test[1] - residual["test"], head(hidden["test"])[:, 0].astype(float))


def dropout_rows(split: Split) -> Named:
    x, y = split.held_out_tensors
    networks = split.networks().dropped
    method = peers.dropout(networks, peers.DROPOUT_RATES, x, y.double().numpy(), split.number)
    yield "MC dropout", _plain(split, method)


def ensemble_rows(split: Split) -> Named:
    yield "Ensemble", _plain(split, peers.ensemble(split.networks().means))
    method = peers.gaussian_ensemble(split.networks().gaussian)
    x, y = split.held_out_tensors
    mean, var = method(x)
    factor = np.mean((y.double().numpy() - mean) ** 2 / var)  # the most likely one
    mean, var = method(split.units.rows(split.test[0]))
    yield "Gaussian ensemble", split.units.back(mean, var * factor)


def laplace_rows(split: Split) -> Named:
    means = split.networks().means
    x, y = split.held_out_tensors
    for kind in peers.LAPLACE:
        method = peers.laplace(means, kind, split.fitted_tensors, x, y.double().numpy())
        yield kind, _plain(split, method)


def gapa_rows(split: Split) -> Named:
    means = split.networks().means
    model = as_onnx(means, split.units)
    choices = {"task": "regression", "seed": split.number}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "converted.onnx"
        gapa_onnx.convert(model, {"x": split.fitted[0]}, path, **choices)
        (known, known_var), (mean, var) = (
            answers(path, x, "y_var") for x in (split.held_out[0], split.test[0])
        )
        y = split.held_out[1]
        noises = {factor: peers.best_noise((known, factor * known_var), y) for factor in (*FACTORS, 1.0)}
        yield "GAPA, no labels for its scale", (mean, var + noises[1.0])
        factor = min(
            FACTORS, key=lambda factor: peers.likelihood((known, factor * known_var + noises[factor]), y)
        )
        yield "GAPA", (mean, factor * var + noises[factor])

        rows = np.concatenate([split.fitted[0], split.held_out[0]])
        # A target that is not a number says that its row is not for the noise: the network has learnt from it.
        targets = np.concatenate([np.full(len(split.fitted[0]), np.nan), y])
        gapa_onnx.convert(model, {"x": rows}, path, targets=targets, **choices)
        yield "GAPA + noise head", answers(path, split.test[0], "y_total_var")


def answers(path: Path, x: np.ndarray, variance: str) -> Answer:
    """Mean and variance of a converted file, by onnxruntime."""
    session = gapa_onnx.session(path)
    parts = [session.run(["y", variance], {"x": x[k : k + 1000]}) for k in range(0, len(x), 1000)]
    mean, var = (np.concatenate(part).reshape(-1).astype(np.float64) for part in zip(*parts))
    return mean, var


ROWS: dict[str, Callable[[Split], Named]] = {
    "map": map_rows,
    "dropout": dropout_rows,
    "ensemble": ensemble_rows,
    "laplace": laplace_rows,
    "gapa": gapa_rows,
}
NAMES = {
    "map": ("MAP", "MAP + noise head"),
    "dropout": ("MC dropout",),
    "ensemble": ("Ensemble", "Gaussian ensemble"),
    "laplace": tuple(peers.LAPLACE),
    "gapa": ("GAPA, no labels for its scale", "GAPA", "GAPA + noise head"),
}


def figures(answer: Answer, y: np.ndarray) -> dict[str, float]:
    mean, var = answer
    std = np.sqrt(var)
    return {
        "nll": float(np.mean(metrics.gaussian_log_loss(mean, std, y))),
        "crps": float(np.mean(metrics.gaussian_crps(mean, std, y))),
        "cqm": metrics.centred_quantile_metric(metrics.central_level(mean, std, y)),
        "rmse": float(np.sqrt(np.mean((mean - y) ** 2))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data" / "regression")
    parser.add_argument("--sets", nargs="*", help="names of .npz files; all of Gal's and two larger ones")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--rows", nargs="*", choices=GROUPS, default=GROUPS, help="methods to run")
    parser.add_argument("--quick", action="store_true", help="two sets, one split, short training")
    parser.add_argument("--fresh", action="store_true", help="run again what the table already has")
    parser.add_argument("--out", type=Path, help="the table; results/regression.csv")
    options = parser.parse_args()
    sets = options.sets or (QUICK["sets"] if options.quick else GAL + STAND_INS)
    missing = [name for name in sets if not (options.data / f"{name}.npz").exists()]
    if missing:
        print(f"error: {options.data} has no {', '.join(missing)}", file=sys.stderr)
        return 2
    quick = HERE.parent / "cache" / "quick"
    out = options.out or (quick if options.quick else HERE / "results") / "regression.csv"
    out.parent.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "laplace_torch": version("laplace-torch")} | machine()
    lines = Lines(out, ("dataset", "split", "method"), fresh=options.quick)
    for number in range(QUICK["splits"] if options.quick else options.splits):
        for name in sets:
            cache = None if options.quick else HERE.parent / "cache" / "regression"
            steps = QUICK["steps"] if options.quick else STEPS
            split = Split(options.data, name, number, steps, cache)
            for group in options.rows:
                if not options.fresh and all(lines.has(name, number, method) for method in NAMES[group]):
                    continue
                start = time.process_time()
                for method, answer in ROWS[group](split):
                    row = {"dataset": name, "split": number, "method": method}
                    found = {key: round(value, 6) for key, value in figures(answer, split.test[1]).items()}
                    rows = {"rows_fitted": len(split.fitted[0]), "rows_held_out": len(split.held_out[0])}
                    lines.add(row | found | rows | {"rows_test": len(split.test[0])} | versions)
                say(f"{name}, split {number}: {group} in {time.process_time() - start:.1f} s of CPU time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
