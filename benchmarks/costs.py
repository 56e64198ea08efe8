"""What the default costs beside the network alone, over processes that take turns, each with its control.

    python benchmarks/costs.py [--data DIR] [--cache DIR] [--processes 9] [--only NAME …]

Files are converted once and kept in the cache: ResNet-20 and 56 on CIFAR-10 (batches of 1 and 32), and the network of
784-200-200-10 units on MNIST (1, 32 and 256); some are also timed without the native library, by their portable functions. Then every case is timed once by a process of its own, again and again, so that what
a machine does at one time meets all cases alike. Times are CPU times of one thread (`gapa_onnx.measure.bench`).

    ratio, low, high    mean over processes, and its interval of 95% (Student's t)
    control             the network's time over itself, the mean; where it is off by more than .01 the line tells nothing

Writes results/costs.csv. On a machine that has nothing else to do it takes about ten minutes.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import t as student

import gapa_onnx
from gapa_onnx.measure import bench

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "paper")]
from backbones import CACHE, DATA, classifier, images  # noqa: E402
from lines import machine, say  # noqa: E402

MLP = "mlp"
ROUNDS = 48  #: of one process


@dataclass(frozen=True)
class Case:
    """A network and a batch."""

    network: str
    batch: int
    library: bool = True  #: else by portable functions

    @property
    def name(self) -> str:
        return f"{self.network} {self.batch}" + ("" if self.library else " portable")


CASES = (
    *(
        Case(*one)
        for one in (("resnet20", 1), ("resnet20", 32), ("resnet56", 1), ("resnet56", 32), (MLP, 256))
    ),
    *(Case(*one, library=False) for one in (("resnet20", 1), (MLP, 1), (MLP, 32), (MLP, 256))),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument(
        "--cache", type=Path, default=CACHE / "costs", help="of files and of CIFAR-10's images"
    )
    parser.add_argument("--processes", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="words in names of cases")
    parser.add_argument("--one", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if any(word in case.name for word in options.only)]
    if options.one:
        print(*_timed(next(case for case in CASES if case.name == options.one), options))
        return
    for network in dict.fromkeys(case.network for case in cases):
        _files(network, options)
    found: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for _ in range(options.processes):
        for case in cases:
            found[case.name].append(_in_a_process(case, options))
            say(f"{case.name}: ratio {found[case.name][-1][0]:.4f}, control {found[case.name][-1][1]:.4f}")
    _write({case: np.array(found[case.name]) for case in cases})


def _files(network: str, options: argparse.Namespace) -> tuple[Path, Path, np.ndarray]:
    """The network, its file by default, and rows to time: made where they are not in the cache."""
    source, target, rows = (options.cache / f"{network}{end}" for end in (".onnx", ".gapa.onnx", ".npy"))
    if not (target.exists() and rows.exists()):
        say(f"converting {network}")
        train, test = _network(network, source, options)
        np.save(rows, test[:256])
        gapa_onnx.convert(source, {"x": train}, target)
    return source, target, np.load(rows)


def _network(network: str, path: Path, options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Save the network, and give the rows that it was trained on and others."""
    if network == MLP:
        path.write_bytes(classifier("mnist", 0, options.data, 10).read_bytes())
        data = images("mnist", options.data)
        return data["x_train"], data["x_test"]
    import onnx
    from cifar.images import cifar10, normalised, shared
    from cifar.nets import resnet

    onnx.save(resnet(shared(options.data, f"{network}.npz")), path)
    pictures = cifar10(options.cache)
    return normalised(pictures.x_train), normalised(pictures.x_test[:256])


def _in_a_process(case: Case, options: argparse.Namespace) -> tuple[float, float]:
    command = [sys.executable, __file__, "--one", case.name, "--data", options.data, "--cache", options.cache]
    ratio, control = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2:]
    return float(ratio), float(control)


def _timed(case: Case, options: argparse.Namespace) -> tuple[float, float]:
    source, target, rows = _files(case.network, options)
    x = {"x": rows[: case.batch]}
    found = bench.measure(
        source, target, batch=case.batch, data=x, rounds=ROUNDS, parts=False, native=case.library
    ).comparison
    return found.ratio, found.control


def _write(found: dict[Case, np.ndarray]) -> None:
    path = HERE / "results" / "costs.csv"
    measured = {(case.network, str(case.batch), str(case.library)) for case in found}
    with open(path, newline="") as file:  # of cases that were not asked for, what was found before stays
        kept = [
            row
            for row in csv.DictReader(file)
            if (row["network"], row["batch"], row["library"]) not in measured
        ]
    lines = []
    for case, pairs in found.items():
        low, high = interval(pairs[:, 0])
        means = pairs.mean(axis=0)
        figures = {"ratio": means[0], "low": low, "high": high, "control": means[1]}
        known = {
            "network": case.network,
            "batch": case.batch,
            "library": case.library,
            "processes": len(pairs),
        }
        lines.append(
            {**known, **{name: round(float(value), 4) for name, value in figures.items()}, **machine()}
        )
        say(f"{case.name}: " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows([*kept, *lines])


def interval(values: np.ndarray) -> tuple[float, float]:
    """Where the mean of what these were drawn from is, with 95% confidence if they are normal."""
    n = len(values)
    reach = student.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
    return float(values.mean() - reach), float(values.mean() + reach)


if __name__ == "__main__":
    main()
