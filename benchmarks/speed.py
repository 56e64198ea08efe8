"""What error bars cost beside the model itself: every ratio with its control, and with the quality it buys.

    python benchmarks/speed.py [--quick] [--only ratios growth memory] [--network N …] [--fresh] [--data FOLDER]

    ratios   the networks of CASES converted, and `gapa_onnx.measure.bench` on them. For the Fashion-MNIST classifier
             also the AUROC of score and BALD against MNIST, to be held against exact search in all 55,000 rows
             (the line with inducing=all, index=flat)                            -> results/speed.csv
    growth   one operator by itself against M, K, d and batch                    -> results/speed_growth.csv, .png
    memory   peaks of processes that run source, native and portable             -> results/speed_memory.csv

A line that is in the results is not measured again, so an interrupted run goes on where it was; `--fresh`
starts anew, as after a change of the code. Settings that this version does not know are left out, and said.
`--quick` takes under two minutes, measures less, and writes to cache/quick instead.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnx
from backbones import CACHE, DATA, HERE, classifier, images
from growth import growth
from lines import Lines, machine, say
from sklearn.metrics import roc_auc_score

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.measure import bench
from gapa_onnx.record import require
from gapa_onnx.settings import Settings

MLP = "fashion_mlp"
SITES = {MLP: "h2", "resnet20": "features", "unet": "bottleneck", "transformer": "block6/attention"}
CALIBRATION_ROWS = {"resnet20": 5000, "unet": 64, "transformer": 16}
CHOICES = {field.name for field in fields(Settings)} | set(inspect.signature(gapa_onnx.convert).parameters)


@dataclass(frozen=True)
class Case:
    """One conversion, and the batches that it is measured on."""

    network: str
    settings: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (1, 32, 256)
    target: float | None = None  #: ratio at the largest batch; at all of them but for the classifier
    quick: bool = False

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items()) or "defaults"

    @property
    def converted(self) -> Path:
        name = "_".join((self.network, *(f"{k}-{v}" for k, v in self.settings.items())))
        return CACHE / "speed" / f"{name.replace('/', '.').replace(':', '.')}.onnx"

    def goal(self, batch: int) -> float | None:
        return self.target if self.network != MLP or batch == max(self.batches) else None


EXACT = Case(MLP, {"inducing": "all", "index": "flat"})
CASES = (
    Case(MLP, {}, target=3.0, quick=True),
    Case(MLP, {"sites": "auto"}),
    Case(MLP, {"task": "none"}),
    Case(MLP, {"m": 1000}, target=3.0),
    Case(MLP, {"solver": "exact"}),
    Case(MLP, {"budget": 3.0}, target=3.0),
    Case(MLP, {"budget": 1.65}, target=1.65),
    EXACT,
    Case("resnet20", {}, (1, 32), target=1.05, quick=True),
    Case("resnet20", {"solver": "exact"}, (1, 32), target=1.05),
    Case("unet", {}, (1, 8), target=1.6),
    Case("unet", {"solver": "exact"}, (1, 8)),
    Case("unet", {"sites": "bottleneck:pooled"}, (1, 8), target=1.6),
    Case("transformer", {"sites": "block6/out"}, (1, 8), target=1.15),
    Case("transformer", {"sites": "block6/out", "solver": "exact"}, (1, 8)),
    Case("transformer", {}, (1, 8)),  # the site in front of the last block's feed-forward part
    # what takes long to convert comes last
    Case(MLP, {"m": 4000}),
    Case(MLP, {"inducing": "all", "index": "ivf"}),
    Case(MLP, {"inducing": "all", "index": "hnsw"}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("ratios", "growth", "memory"))
    parser.add_argument("--network", nargs="+", choices=tuple(SITES), default=tuple(SITES))
    parser.add_argument("--settings", nargs="+", help="of these cases only, as the table names them")
    parser.add_argument("--threads", nargs="+", type=int, default=None, help="1 2, or 1 if quick")
    parser.add_argument("--fresh", action="store_true", help="convert and measure again")
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    if gapa_onnx.library_path() is None:
        sys.exit("the native library is missing: `gapa-onnx doctor` tells more")
    folder = CACHE / "quick" if options.quick else HERE / "results"
    if options.fresh:
        shutil.rmtree(CACHE / "speed", ignore_errors=True)
    (CACHE / "speed").mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    steps = options.only or (("ratios",) if options.quick else ("ratios", "growth", "memory"))
    if "ratios" in steps:
        ratios(folder / "speed.csv", options)
    if "growth" in steps:
        growth(folder / "speed_growth.csv", fresh=options.fresh)
    if "memory" in steps:
        memory(folder / "speed_memory.csv", options)


# ------------------------------------------------------------------------- ratios


def ratios(path: Path, options: argparse.Namespace) -> None:
    results = Lines(
        path, ("network", "settings", "batch", "threads", "processor"), fresh=options.fresh or options.quick
    )
    here = machine()["processor"]
    for case in CASES:
        if case.network not in options.network or (options.quick and not case.quick):
            continue
        if options.settings and case.label not in options.settings:
            continue
        wanted = list(itertools.product(options.threads or ((1,) if options.quick else (1, 2)), case.batches))
        wanted = [(t, b) for t, b in wanted if not results.has(case.network, case.label, b, t, here)]
        if not wanted:
            continue
        try:
            source = convert(case, options.data)
        except UserError as error:
            say(f"left out: {case.network} {case.label}: {error}")
            continue
        shared = {**about(case), **(quality(case, options) if case.network == MLP else {})}
        for threads, batch in wanted:
            found = bench.measure(
                source, case.converted, batch=batch, threads=threads, data=feeds(case.network, options.data)
            )
            results.add({**ratio_row(case, found), **shared, **machine()})
            if isinstance(found, bench.Measurement) and not found.native:
                say("  the native library does not know this operator: that was the portable function")
    table(results.rows)


def convert(case: Case, data: Path) -> Path:
    """The case's source; its converted file is there afterwards."""
    unknown = sorted(set(case.settings) - CHOICES)
    if unknown:
        raise UserError(f"{', '.join(unknown)} is not known here")
    if case.network == MLP:
        source = classifier("fashion_mnist", folder=data)
    else:
        source = CACHE / f"{case.network}.onnx"
        onnx.save(networks.make(case.network), source)
    if not case.converted.exists():
        say(f"converting {case.network}: {case.label}")
        started = time.perf_counter()
        if case.network == MLP:
            rows = {"x": images("fashion_mnist", data)["x_train"]}
        else:
            rows = networks.rows(case.network, CALIBRATION_ROWS[case.network])
        try:
            done = gapa_onnx.convert(
                source, rows, case.converted, **{"sites": SITES[case.network], **case.settings}
            )
        except TypeError as error:  # a value that an older Settings cannot take
            raise UserError(str(error)) from error
        say(f"  {time.perf_counter() - started:.0f} s")
        if done.path is None:
            raise UserError("; ".join(check.name for check in done.checks if not check.passed) + " failed")
    return source


def feeds(network: str, data: Path) -> dict[str, np.ndarray]:
    return {"x": images("fashion_mnist", data)["x_test"]} if network == MLP else networks.rows(network, 32, 1)


def quality(case: Case, options: argparse.Namespace) -> dict[str, float | str]:
    """AUROC of score and BALD for telling MNIST from Fashion-MNIST; kept beside the converted file."""
    kept = case.converted.with_suffix(".json")
    if kept.exists():
        return json.loads(kept.read_text())
    session = gapa_onnx.session(case.converted)
    names = [
        value.name for value in session.get_outputs() if value.name in ("logits_score", "logits_epistemic")
    ]
    most = 1000 if options.quick else 10_000
    answers = []
    for name in ("fashion_mnist", "mnist"):
        x = images(name, options.data)["x_test"][:most]
        parts = [session.run(names, {"x": x[start : start + 256]}) for start in range(0, len(x), 256)]
        answers.append([np.concatenate(part) for part in zip(*parts)])
    truth = np.repeat([0, 1], most)
    found: dict[str, float | str] = {"auroc_score": "", "auroc_bald": ""}
    for name, inside, outside in zip(names, *answers):
        key = "auroc_score" if name == "logits_score" else "auroc_bald"
        found[key] = round(float(roc_auc_score(truth, np.concatenate([inside, outside]))), 4)
    if not options.quick:
        kept.write_text(json.dumps(found))
    return found


def about(case: Case) -> dict[str, Any]:
    site = require(onnx.load(case.converted), str(case.converted)).sites[0]
    return {
        "m": site.points,
        "k": site.k,
        "d": site.width,
        "index": site.index,
        "auroc_score": "",
        "auroc_bald": "",
    }


def ratio_row(case: Case, found: bench.Measurement | bench.Refusal) -> dict[str, Any]:
    comparison, goal = found.comparison, case.goal(found.batch)
    refused = isinstance(found, bench.Refusal)
    low, high = comparison.ratio_quartiles
    shares = {} if refused else found.added
    return {
        "network": case.network,
        "settings": case.label,
        "batch": found.batch,
        "threads": found.threads,
        "ratio": "refused" if refused else round(comparison.ratio, 3),
        "quartiles": "" if refused else f"{low:.3f} … {high:.3f}",
        "control": round(comparison.control, 4),
        "native": "" if refused else "yes" if found.native else "no",
        "target": goal or "",
        "met": "" if refused or goal is None else "yes" if comparison.ratio <= goal else "no",
        "source_us": round(comparison.source_seconds * 1e6, 1),
        **{name: round(shares[name], 3) if name in shares else "" for name in PARTS},
    }


PARTS = ("search", "solve", "propagation", "heads")


def table(rows: list[dict[str, Any]]) -> None:
    exact = next((row for row in rows if row["settings"] == EXACT.label and row["auroc_score"]), None)
    print(f"{'network':12} {'settings':34} {'batch':>5} {'thr':>3} {'ratio':>8} {'control':>7} {'target':>6} "
          f"{'met':>3}  search solve prop. heads   AUROC score, BALD (less exact)")  # fmt: skip
    for row in rows:
        shares = " ".join(f"{float(row[p] or 0):5.0%}" for p in PARTS) if row["search"] != "" else " " * 23
        aurocs = []
        for key in ("auroc_score", "auroc_bald"):
            if row[key] != "":
                less = f" ({float(row[key]) - float(exact[key]):+.4f})" if exact else ""
                aurocs.append(f"{float(row[key]):.4f}{less}")
        print(
            f"{row['network']:12} {row['settings']:34} {row['batch']:>5} {row['threads']:>3} {row['ratio']:>8} "
            f"{row['control']:>7} {row['target']:>6} {row['met']:>3}  {shares}   {', '.join(aurocs)}"
        )


# ------------------------------------------------------------------------- memory

PEAK = """
import resource, sys, numpy, onnxruntime
path, library, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])

def resident(entry):  # in MB; ru_maxrss would count what the parent had when it started this process
    try:
        lines = open("/proc/self/status").read().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(entry))) / 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.log_severity_level = 3
if library:
    options.register_custom_ops_library(library)
x = numpy.random.default_rng(0).random((rows, 784), numpy.float32)
before = resident("VmRSS")
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
loaded = resident("VmHWM")
session.run(None, {"x": x})
print(before, loaded, resident("VmHWM"))
"""


def memory(path: Path, options: argparse.Namespace) -> None:
    """Peaks of resident memory in MB above what Python and onnxruntime take by themselves."""
    results = Lines(path, ("what", "settings", "batch"), fresh=options.fresh)
    library = str(gapa_onnx.library_path())
    for case in (Case(MLP, {}), EXACT):
        if results.has("native", case.label, 256) and results.has("portable", case.label, 2000):
            continue
        source = convert(case, options.data)
        site = about(case)
        stored = site["m"] * site["d"] * 4 / 2**20
        runs = (("source", source, "", 256), ("native", case.converted, library, 256),
                ("source", source, "", 2000), ("portable", case.converted, "", 2000))  # fmt: skip
        sources: dict[int, float] = {}
        for what, file, registered, batch in runs:
            call = [sys.executable, "-c", PEAK, str(file), registered, str(batch)]
            before, loaded, peak = map(float, subprocess.check_output(call, text=True).split())
            if what == "source":
                sources[batch] = peak - before
            results.add(
                {
                    "what": what,
                    "settings": case.label,
                    "batch": batch,
                    "loaded_mb": round(loaded - before, 1),
                    "peak_mb": round(peak - before, 1),
                    "inducing_mb": 0.0 if what == "source" else round(stored, 1),
                    "beyond_mb": round(peak - before - sources[batch] - (what != "source") * stored, 1),
                    "target_mb": {"native": 64, "portable": 512}.get(what, ""),
                    **machine(),
                }
            )


if __name__ == "__main__":
    main()
