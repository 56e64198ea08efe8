"""What a converted decoder costs beside its source: 96 tokens at once, one token after 96, and the loading of a session.

    python benchmarks/paper/language/cost.py [--cache DIR] [--only plain cached gqa int4] [--rounds N] [--threads N] [--fresh]
                                             [--quick]

For each form a round is a process that opens the source, the source once more (the control) and the converted file
(FORM/converted.onnx, which `equality.py` makes), in another order each round, and lets them take turns at each run: what
disturbs the machine hits all three alike, and what memory a session happens to get differs from round to round. Then each of
them is opened in a process of its own, for what that takes. Times are CPU seconds of all threads, which do not go on while another
process has the core; of a round the median over its runs. All outputs of a file are asked for. Told are medians over rounds of

    control    the source over itself, which must be within 0.02 of 1
    ratio      the file over the mean of both runs of the source, with a 95% interval by bootstrap over rounds
    load       the same for the seconds of opening a session, and its memory in MB: at most, and what stays

Rounds are kept in FORM/rounds.json and counted together, until the file is made anew or `--fresh`: so they may be run in several
parts. Writes results/language_cost.csv. A figure is worth most on a machine that does nothing else. `--quick` is one round
with a tiny decoder.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[2] / "tests")]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime as ort  # noqa: E402
import packages  # noqa: E402
from lines import Lines, machine, say  # noqa: E402
from support.decoders import decoder, token_rows, with_empty_past  # noqa: E402

import gapa_onnx  # noqa: E402
from gapa_onnx.sessions.runtime import register, session_options  # noqa: E402
from language.decoding import answered, prefill, step  # noqa: E402

CONVERTED = "converted.onnx"
FORMS = ("cached", "gqa", "int4", "plain")
LENGTH = 96
ROUNDS, WARM_UP = 12, 3
RUNS = {"prefill": 12, "step": 60}  # in one process
WHO = ("source", "control", "file")
ORDERS = tuple(itertools.permutations(WHO))
KEY = ("form", "what")
BOOTSTRAP = 4000


# -------------------------------------------------------------------------- processes


def loaded(model: Path, threads: int) -> dict[str, float]:
    """What opening a model takes in this process."""
    _options(threads)  # also loads our library, in the processes of the source too
    before, start = _memory(), time.process_time()
    held = _session(model, threads)
    found = {"load": time.process_time() - start, "stays": _memory() - before, "most": _peak() - before}
    del held  # not before its memory was read
    return found


def in_turn(
    models: Sequence[Path], feeds: Path, threads: int, runs: Mapping[str, int]
) -> dict[str, list[float]]:
    """The seconds of a run of each model, by kind of run."""
    sessions = [_session(model, threads) for model in models]
    names = [[output.name for output in session.get_outputs()] for session in sessions]
    found = {}
    for what, count in runs.items():
        with np.load(feeds / f"{what}.npz") as held:
            fed = {name: ort.OrtValue.ortvalue_from_numpy(held[name]) for name in held.files}
        readings: list[list[float]] = [[] for _ in models]
        for number in range(WARM_UP + count):
            for turn in range(len(models)):
                at = (number + turn) % len(models)
                start = time.process_time()
                sessions[at].run_with_ort_values(names[at], fed)
                readings[at].append(time.process_time() - start)
        found[what] = [statistics.median(seconds[WARM_UP:]) for seconds in readings]
    return found


def _session(model: Path, threads: int) -> ort.InferenceSession:
    return ort.InferenceSession(str(model), _options(threads), providers=["CPUExecutionProvider"])


def _options(threads: int) -> ort.SessionOptions:
    options = session_options(threads=threads)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    register(options)
    return options


def _memory() -> float:
    """MB that the process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _peak() -> float:
    """MB that it had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# ------------------------------------------------------------------------------ the rounds


def make_feeds(source: Path, folder: Path, vocabulary: int) -> None:
    """What both kinds of runs are fed; a step is fed the source's own keys and values."""
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
    """Readings (3, n) of each figure, of source, control and file: of so many rounds more than were kept."""
    models = {"source": source, "control": source, "file": file}
    kept = file.with_name("rounds.json")
    held = (
        json.loads(kept.read_text()) if kept.exists() and kept.stat().st_mtime > file.stat().st_mtime else []
    )
    for number in range(count):
        order = ORDERS[len(held) % len(ORDERS)]
        made = {
            what: [seconds[order.index(who)] for who in WHO]
            for what, seconds in _process([*(models[who] for who in order), feeds], threads, runs).items()
        }
        opened = {who: _process([models[who]], threads) for who in order}
        made |= {what: [opened[who][what] for who in WHO] for what in opened["file"]}
        held.append(made)
        kept.write_text(json.dumps(held))
        say(f"  round {number + 1} of {count}")
    return {what: np.array([one[what] for one in held]).T for what in held[0]}


def _process(paths: Sequence[Path], threads: int, runs: Mapping[str, int] | None = None) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "cost.py"), "--threads", str(threads), "--runs", json.dumps(runs)]
    command += ["--worker", *map(str, paths)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


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
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--worker", nargs="+", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        *models, last = given.worker
        found = in_turn(models, last, given.threads, given.runs) if models else loaded(last, given.threads)
        print(json.dumps(found))
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
        if given.fresh or given.quick:
            file.with_name("rounds.json").unlink(missing_ok=True)
        feeds = cache / form / "feeds"
        make_feeds(source, feeds, vocabulary)
        for what, readings in rounds(source, file, feeds, count, given.threads, runs).items():
            figures: dict[str, Any] = {name: round(value, 5) for name, value in summary(readings).items()}
            lines.add(
                {
                    "form": form,
                    "what": what,
                    "threads": given.threads,
                    "rounds": readings.shape[1],
                    **figures,
                    **machine(),
                }
            )


if __name__ == "__main__":
    main()
