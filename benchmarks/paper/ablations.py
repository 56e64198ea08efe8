"""One choice of the Gaussian process varied at a time, on MNIST and Fashion-MNIST networks: what its defaults rest on.

    python benchmarks/paper/ablations.py [--quick] [--only NAME …] [--networks mlp0 …] [--on mnist] [--data DIR]
                                         [--rows 2000] [--fresh]

    scale         τ: target of the median leave-one-out share, with and without a cap at the prior variance
    length_scale  multiples of the median distance at the site, and of the inputs
    points        how many inducing points, chosen how
    k             neighbours: the query's own (exact), its nearest point's (nearest), those chosen for that (cached)
    jitter        on the diagonal of the kernel matrix
    bridge        one factor for all logits, or one for each
    placement     all 15 subsets of the sites of a network with four hidden layers
    split         fixed points against Monte Carlo draws for the epistemic part

AUROCs are against test rows of the other data set; `map_…` is the network by itself. Each ablation writes
results/ablations_NAME.csv, a line at a time, and draws results/ablations_NAME.png. A line that is there is not
computed again; `--fresh` does. `--quick` tries everything on little data and writes to benchmarks/cache/quick.
docs/defaults.md is made of the results by defaults.py. What a converted file makes of it, with witnesses and geometries, is
measured by choices.py.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from ablation_figures import draw
from readings import CLASSES, PAPER, Reading, Subject, figures, subject, variances
from scipy.stats import spearmanr

from backbones import CACHE, DATA  # isort: skip  (readings puts benchmarks/ on the path)
from lines import Lines, machine, say  # isort: skip
from gapa_onnx.plan.heads.points import Points, latin, samples
from gapa_onnx.plan.heads.reference import split

HERE = Path(__file__).resolve().parent
DRAWS, SPLIT_ROWS = (
    16_384,
    250,
)  # draws that stand for the truth, and rows of each kind that they are made for
KEY = ("network", "data", "series", "value")
DATA_SETS = ("mnist", "fashion_mnist")
ONE = ("mlp0",)
EVERY = ("mlp0", "mlp1", "lenet", "resnet")

Case = tuple[str, str, Reading]  #: series, value, reading


@dataclass(frozen=True)
class Scale:
    """How much is computed."""

    rows: int = 2000  #: known, and strange
    quick: bool = False
    m: int = 1000
    most_m: int = 55_000
    data_sets: tuple[str, ...] = DATA_SETS
    folder: Path = HERE / "results"

    def networks(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        return wanted[:1] if self.quick else wanted

    def calibration_rows(self, network: str) -> int:
        """All of them for the main network; k-means of so many takes too long for all networks."""
        return 1000 if self.quick else 55_000 if network in ("mlp0", "deep0") else 16_000


QUICK = Scale(200, True, 100, 250, DATA_SETS[:1], CACHE / "quick" / "ablations")


@dataclass(frozen=True)
class Ablation:
    """What is varied, and on which networks."""

    cases: Callable[[Scale], Iterator[Case]]
    networks: tuple[str, ...] = ONE
    axis: str = ""  #: what the values are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=tuple(ABLATIONS), default=tuple(ABLATIONS))
    parser.add_argument("--networks", nargs="+", choices=(*EVERY, "deep0"))
    parser.add_argument("--on", nargs="+", choices=DATA_SETS, help="data sets; both unless quick")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", type=int, default=Scale.rows)
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    scale = QUICK if options.quick else Scale(options.rows)
    scale.folder.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        run(name, scale, options)


def run(name: str, scale: Scale, options: argparse.Namespace) -> None:
    ablation, path = ABLATIONS[name], scale.folder / f"ablations_{name}.csv"
    lines = Lines(path, KEY, fresh=options.fresh or options.quick)
    networks = [n for n in scale.networks(ablation.networks) if n in (options.networks or [n])]
    cases = list(ablation.cases(scale))
    subjects = list(itertools.product(networks, options.on or scale.data_sets))
    for number, (network, data) in enumerate(subjects, start=1):
        left = [case for case in cases if not lines.has(network, data, *case[:2])]
        say(f"{name}, {network} on {data} ({number} of {len(subjects)})")
        for series, value, reading in left:
            given = _subject(network, data, scale, options.data)
            found = _split_figures(given, reading, value) if name == "split" else figures(given, reading)
            itself = {f"map_{key}": figure for key, figure in figures(given, None).items()}
            known = {"network": network, "data": data, "series": series, "value": value}
            counts = {"rows": scale.rows, "calibration_rows": len(given.sites[0].rows)}
            lines.add({**known, **found, **itself, **counts, **machine()})
    if lines.rows:
        order = list(dict.fromkeys(value for _, value, _ in cases))
        draw(lines.rows, path.with_suffix(".png"), order, ablation.axis, split=name == "split")


@lru_cache(maxsize=2)
def _subject(network: str, data: str, scale: Scale, folder: Path) -> Subject:
    count = scale.calibration_rows(network)
    return subject(network, data, scale.rows, folder, calibration_rows=count, quick=scale.quick)


# ------------------------------------------------------------------------ what is varied


def _scale(scale: Scale) -> Iterator[Case]:
    for capped, target in itertools.product((False, True), (None, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)):
        reading = Reading(m=scale.m, target=target, capped=capped)
        yield "capped" if capped else "free", "none" if target is None else f"{target:g}", reading


def _length_scale(scale: Scale) -> Iterator[Case]:
    for target in (0.05, None):
        series = "no τ" if target is None else "τ"
        for multiple in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0):
            yield series, f"{multiple:g}", Reading(m=scale.m, multiple=multiple, target=target)
        yield series, "input", Reading(m=scale.m, of="input", multiple=1.0, target=target)


def _points(scale: Scale) -> Iterator[Case]:
    most = {"kmeans": 1000, "fps": 1000, "random": 16_000}
    for method, m in itertools.product(most, (100, 250, 1000, 4000, 16_000)):
        if m <= min(most[method], scale.most_m):
            yield method, str(m), Reading(inducing=method, m=m)
    yield "random", "all", Reading(inducing="all")


def _k(scale: Scale) -> Iterator[Case]:
    for solver, k in itertools.product(("exact", "nearest", "cached"), (1, 2, 5, 10, 20, 50, 100, 200, 500)):
        if k <= (scale.m if solver == "exact" else min(scale.m, 200)):  # M factors of K x K take their time
            yield solver, str(k), Reading(m=scale.m, k=k, solver=solver)


def _jitter(scale: Scale) -> Iterator[Case]:
    for jitter in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        yield "", f"{jitter:.0e}", Reading(m=scale.m, jitter=jitter)


def _bridge(scale: Scale) -> Iterator[Case]:
    for series, reading in (("default", Reading(m=scale.m)), ("paper", replace(PAPER, m=scale.m))):
        for bridge in ("shared", "per-class"):
            yield series, bridge, replace(reading, bridge=bridge)


def _placement(scale: Scale) -> Iterator[Case]:
    series = {"added": None, "alike": 1.0, "half": 0.5}
    for label, count in itertools.product(series, range(1, 5)):
        for sites in itertools.combinations(range(4), count):
            name = "+".join(str(site + 1) for site in sites)
            reading = Reading(sites=sites, inducing="random", m=scale.m, earlier=series[label])
            if label == "added" or count > 1:
                yield label, name, reading


def _split(scale: Scale) -> Iterator[Case]:
    yield "", "fixed", Reading(m=scale.m)
    for draws in (16, 64, 256, 1024, 4096):
        yield "", str(draws), Reading(m=scale.m)


ABLATIONS = {
    "scale": Ablation(_scale, EVERY, "target of the median leave-one-out share"),
    "length_scale": Ablation(_length_scale, EVERY, "length scale / median distance at the site"),
    "points": Ablation(_points, ONE, "inducing points"),
    "k": Ablation(_k, ONE, "neighbours K"),
    "jitter": Ablation(_jitter, ONE, "jitter"),
    "bridge": Ablation(_bridge, EVERY, "bridge"),
    "placement": Ablation(_placement, ("deep0",), "hidden layers with a site"),
    "split": Ablation(_split, ONE, "draws"),
}


def _split_figures(given: Subject, reading: Reading, value: str) -> dict[str, Any]:
    """A split at fixed points or at draws, beside one of many other draws: rank correlation and largest error."""
    points = latin(CLASSES) if value == "fixed" else samples(int(value), CLASSES, seed=1)
    found, truth = _epistemic(given, reading, points), _sampled(given, reading)
    return {
        **figures(given, reading, points),
        "spearman": round(float(spearmanr(found, truth).statistic), 5),
        "largest_error": round(float(np.abs(found - truth).max()), 4),
        "points": points.count,
    }


@lru_cache(maxsize=1)
def _sampled(given: Subject, reading: Reading) -> np.ndarray:
    return _epistemic(given, reading, samples(DRAWS, CLASSES, seed=0))


def _epistemic(given: Subject, reading: Reading, points: Points) -> np.ndarray:
    """Of some known rows, then of some strange ones."""
    both = zip((given.known, given.strange), variances(given, reading))
    parts = [split(mean[:SPLIT_ROWS], var[:SPLIT_ROWS], 1, points).epistemic for mean, var in both]
    return np.concatenate(parts)


if __name__ == "__main__":
    main()
