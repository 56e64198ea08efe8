"""What a converted decoder costs beside its source: 96 tokens at once, one token after 96, and the loading of a session.

    python benchmarks/paper/language/cost.py [--cache DIR] [--only plain cached gqa int4] [--rounds N] [--threads N]
                                             [--k 50] [--quick]

For each form: processes of the source, of the source once more (the control) and of the converted file (FORM/converted.onnx, which
`equality.py` makes) take turns, in another order each round. A process loads its session, warms up, and takes turns of its own
between both kinds of runs; times are CPU seconds of all its threads, which do not go on while another process has the core,
the median over its runs. All outputs of a file are asked for. Told are medians over rounds of

    control    the source over itself, which must be within 0.02 of 1
    ratio      the file over the mean of both runs of the source, with a 95% interval by bootstrap over rounds
    load       the same for the seconds of opening a session, and its memory in MB: at most, and what stays

Writes results/language_cost.csv. A figure is worth most on a machine that does nothing else. `--quick` is one round with a tiny decoder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[2] / "tests")]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import packages  # noqa: E402
from lines import Lines, machine, say  # noqa: E402

CONVERTED = "converted.onnx"
FORMS = ("cached", "gqa", "int4", "plain")
LENGTH = 96
ROUNDS, WARM_UP = 12, 3
RUNS = {"prefill": 12, "step": 60}  # in one process
WHO = ("source", "control", "file")
ORDERS = tuple(itertools.permutations(WHO))
KEY = ("form", "what")
BOOTSTRAP = 4000


# --------------------------------------------------------------------------- one process


def loaded(model: Path, feeds: Path, threads: int, runs: dict[str, int]) -> dict[str, float]:
    """Figures of one model in this process."""
    import onnxruntime as ort

    from gapa_onnx.sessions.runtime import register, session_options

    options = session_options(threads=threads)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    register(options)  # in the processes of the source too
    before, start = _memory(), time.process_time()
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    found = {"load": time.process_time() - start}
    found["stays"], found["most"] = _memory() - before, _peak() - before
    names = [output.name for output in session.get_outputs()]
    readings: dict[str, list[float]] = {what: [] for what in runs}
    fed = {}
    for what in runs:
        with np.load(feeds / f"{what}.npz") as held:
            fed[what] = {name: ort.OrtValue.ortvalue_from_numpy(held[name]) for name in held.files}
    for number in range(WARM_UP + max(runs.values())):
        for what, count in runs.items():
            if number < WARM_UP + count:
                start = time.process_time()
                session.run_with_ort_values(names, fed[what])
                readings[what].append(time.process_time() - start)
    return found | {what: statistics.median(seconds[WARM_UP:]) for what, seconds in readings.items()}


def _memory() -> float:
    """MB that the process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _peak() -> float:
    """MB that it had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# ------------------------------------------------------------------------------ the rounds


def make_feeds(source: Path, folder: Path, vocabulary: int) -> None:
    """What both kinds of runs are fed; a step is fed the source's own keys and values."""
    import onnxruntime as ort

    from language.decoding import answered, prefill, step

    ids = np.random.default_rng(0).integers(0, vocabulary, (1, LENGTH))
    fed = prefill(source, ids)
    session = ort.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    said = answered(session, fed)
    following = said["logits"][:, -1:].argmax(axis=-1)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "prefill.npz", **fed)
    np.savez(folder / "step.npz", **step(fed, said, following))


def rounds(
    source: Path, file: Path, feeds: Path, count: int, threads: int, runs: dict[str, int]
) -> dict[str, np.ndarray]:
    """Readings (3, count) of each figure: source, control, file."""
    found: dict[str, list[list[float]]] = {}
    for number in range(count):
        by_name: dict[str, dict[str, float]] = {}
        for who in ORDERS[number % len(ORDERS)]:
            model = file if who == "file" else source
            command = [sys.executable, str(HERE / "cost.py"), "--worker", str(model), str(feeds)]
            command += ["--threads", str(threads), "--runs", json.dumps(runs)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            by_name[who] = json.loads(done.stdout.splitlines()[-1])
        for what in by_name["file"]:
            found.setdefault(what, []).append([by_name[who][what] for who in WHO])
        say(f"  round {number + 1} of {count}")
    return {what: np.array(readings).T for what, readings in found.items()}


def summary(readings: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Ratio with its interval and control, from readings (3, n) of source, control and file."""
    source, control, file = readings
    ratios, controls = 2 * file / (source + control), control / source
    drawn = np.random.default_rng(seed).integers(0, len(ratios), (BOOTSTRAP, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    return {
        "source": float(np.median((source + control) / 2)),
        "file": float(np.median(file)),
        "ratio": float(np.median(ratios)),
        "low": float(low),
        "high": float(high),
        "control": float(np.median(controls)),
    }


def quick(cache: Path) -> None:
    """A tiny decoder with a cache, and its file."""
    from support.decoders import decoder, token_rows, with_empty_past

    import gapa_onnx

    folder = cache / "cached"
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(decoder(cached=True), folder / "model.onnx")
    gapa_onnx.convert(
        folder / "model.onnx", with_empty_past(token_rows(24, 12)), folder / CONVERTED, m=50, k=5
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=packages.cache_folder("language"))
    parser.add_argument("--only", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(loaded(*given.worker, given.threads, given.runs)))
        return
    cache, forms, results = given.cache, given.only, HERE.parent / "results"
    count, runs, vocabulary = given.rounds, RUNS, 40_000
    if given.quick:
        cache = results = cache / "quick"
        quick(cache)
        forms, count, runs, vocabulary = ("cached",), 1, {"prefill": 2, "step": 2}, 300
    lines = Lines(results / "language_cost.csv", KEY, fresh=given.quick)
    for form in forms:
        source, file = cache / form / "model.onnx", cache / form / CONVERTED
        if not (source.exists() and file.exists()):
            say(
                f"{form} is skipped: there is no {file}; python benchmarks/paper/language/equality.py --only {form}"
            )
            continue
        feeds = cache / form / "feeds"
        make_feeds(source, feeds, vocabulary)
        for what, readings in rounds(source, file, feeds, count, given.threads, runs).items():
            figures: dict[str, Any] = {name: round(value, 5) for name, value in summary(readings).items()}
            lines.add(
                {
                    "form": form,
                    "what": what,
                    "threads": given.threads,
                    "rounds": count,
                    **figures,
                    **machine(),
                }
            )


if __name__ == "__main__":
    main()
