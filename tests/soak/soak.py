"""A long run: threads that open, use and close sessions of every kind of file all the time, for hours if wanted.

    python tests/soak/soak.py --minutes 60 --cores 0.5 --to benchmarks/results/soak.json

Every answer is compared bit for bit with that of a first session, which a single thread asked before the others began.
Which file, how many threads in a session, which rows and how long a session lives is drawn at random; some sessions are
shared by all threads, and the last that uses one closes it.

Memory is looked at when all threads rest and no session is open: what is free is handed back to the system
(`malloc_trim`), then the resident set is read, and what of it is anonymous, which the machine does not take away as it
does pages of files. Growth is, of the latter, the median of the last five such readings less that of the first
five behind the warm-up, so a leak shows however slow, while caches that fill once do not.

A share of the machine can be set (`--cores`): each thread rests as long as its work took too much of it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import onnxruntime as ort

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.decoders import decoder, token_rows
from support.native_models import LIBRARY, inducing_points, model, tensors
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.op.contract import CLASSES, DOMAIN, LEADING, SCHEMAS

THREADS = 8
MOST_GROWTH = 5.0  # MB
READINGS = 5  # that an end of the run is told by
WARM = 0.1  # of the run
SHARED = 0.3  # of the sessions
CHECKED = 0.05  # of the sessions are opened with a look at the digest
SAMPLES = 120  # readings of a run
PAUSED = 2.0  # seconds of a step beyond which the process was not running
#: How a small classifier is converted: every index and solver, and what inducing points are stored as.
SETTINGS: dict[str, dict[str, object]] = {
    "flat exact": {"index": "flat", "solver": "exact"},
    "flat cached": {"index": "flat", "solver": "cached"},
    "ivf exact": {"index": "ivf", "solver": "exact"},
    "ivf cached": {"index": "ivf", "solver": "cached"},
    "hnsw exact": {"index": "hnsw", "solver": "exact"},
    "ivfpq exact": {"index": "ivfpq", "solver": "exact"},
    "int8 cached": {"solver": "cached", "points": "int8"},
    "paper": {"paper": True},
}

Feed = dict[str, np.ndarray]


@dataclass
class Case:
    """A file, what is fed to it, and what it has answered first."""

    name: str
    path: Path
    feeds: list[Feed]
    k: int | None = None  #: neighbours, where a session is to use fewer
    expected: list[list[bytes]] = field(default_factory=list)


def opened(case: Case, threads: int, check: bool = False) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "0"
    )  # it would eat the share of others
    return gapa_onnx.session(case.path, options, k=case.k, check=check)


def answer(running: ort.InferenceSession, feed: Feed) -> list[bytes]:
    return [np.ascontiguousarray(found).tobytes() for found in running.run(None, feed)]


# ── files ─────────────────────────────────────────────────────────────────────────────────────


def cases(folder: Path) -> list[Case]:
    """All operators: each index by itself, a classifier by every setting (classes), a decoder (leading)."""
    found = []
    for kind in SCHEMAS:
        given = tensors(kind)
        path = folder / f"{kind}.onnx"
        path.write_bytes(model(kind, given))
        points = inducing_points(given)
        near = points[np.random.default_rng(1).integers(0, len(points), 256)]
        rows = near + np.random.default_rng(2).normal(size=near.shape).astype(np.float32) * np.float32(0.5)
        rows[:2, 0] = np.nan, np.inf
        feeds = [{"query": rows[:size]} for size in (1, 7, 64, 256)]
        found += [
            Case(f"operator {kind}", path, feeds),
            Case(f"operator {kind}, fewer neighbours", path, feeds, k=5),
        ]
    with np.load(MODELS / "digits_mlp_heldout.npz") as held_out:
        (name,) = [key for key in held_out.files if held_out[key].ndim == 2]
        digits = [{name: held_out[name][:size]} for size in (1, 5, 32)]
    for setting, choices in SETTINGS.items():
        path = folder / f"digits {setting}.onnx"
        gapa_onnx.convert(
            MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz", path, m=300, k=12, **choices
        )
        found.append(Case(f"classifier {setting}", path, digits))
    path = folder / "decoder.onnx"
    gapa_onnx.convert(
        decoder(),
        token_rows(60, 8),
        path,
        m=100,
        k=10,
        task="logits=tokens",
        top_k=8,
        strange=token_rows(20, 8, 1),
    )
    found.append(
        Case("decoder", path, [token_rows(rows, length, seed=9) for rows, length in ((1, 1), (2, 8))])
    )
    missing = {schema.name for schema in (*SCHEMAS.values(), CLASSES, LEADING)} - set().union(
        *map(operators, found)
    )
    assert not missing, f"no file has {missing}"
    for case in found:
        running = opened(case, 1)
        case.expected = [answer(running, feed) for feed in case.feeds]
    return found


def operators(case: Case) -> set[str]:
    """Ours that a file has."""
    return {node.op_type for node in onnx.load(case.path).graph.node if node.domain == DOMAIN}


# ── threads ───────────────────────────────────────────────────────────────────────────────────


class Soak:
    """The run: what its threads share, and what they have counted."""

    def __init__(self, cases: list[Case], cores: float, threads: int = THREADS):
        self.cases, self.cores, self.threads = cases, cores, threads
        self.calls: Counter[str] = Counter()
        self.sessions = 0
        self.differences: Counter[str] = Counter()
        self.errors: list[str] = []
        self.readings: list[tuple[float, float, float]] = []  #: second, resident MB, of that anonymous
        self._shared: dict[str, ort.InferenceSession] = {}
        self._lock = threading.Lock()
        self._rest = threading.Event()  # threads come to rest while it is set
        self._resting = threading.Semaphore(0)
        self._go_on = threading.Semaphore(0)
        self._over = threading.Event()

    def run(self, seconds: float, say: Callable[[str], None] = lambda line: None, step: float = 2.0) -> None:
        """So long, with a reading of the memory in each `step` or more, 120 in all."""
        workers = [threading.Thread(target=self._work, args=(seed,)) for seed in range(self.threads)]
        for worker in workers:
            worker.start()
        ran, last = 0.0, time.monotonic()
        step, due = max(step, seconds / SAMPLES), 0.0
        while ran < seconds and not self.errors:
            time.sleep(min(0.2, seconds / 50))
            now = time.monotonic()
            ran += now - last if now - last < PAUSED else 0.0
            last = now
            if ran >= due:
                self._read(ran)
                last, due = time.monotonic(), ran + step
                say(f"{ran:6.0f} s: {self.readings[-1][1]:.1f} MB, {sum(self.calls.values())} calls")
        self._over.set()
        for worker in workers:
            worker.join()

    def growth(self) -> float:
        """MB of anonymous resident memory from the end of the warm-up to the end of the run; pages of files come and go."""
        warm = self.readings[int(len(self.readings) * WARM) :]
        ends = min(READINGS, max(1, len(warm) // 2))
        first, last = warm[:ends], warm[-ends:]
        return median(mb for _, _, mb in last) - median(mb for _, _, mb in first)

    def _work(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            while not self._over.is_set():
                if self._rest.is_set():
                    self._resting.release()
                    self._go_on.acquire()
                began, worked = time.monotonic(), time.thread_time()
                self._turn(random)
                worked = time.thread_time() - worked
                took = time.monotonic() - began
                self._over.wait(
                    max(0.0, worked * self.threads / self.cores - took) * random.uniform(0.5, 1.5)
                )
        except Exception as error:  # a run that fails is told, not lost in a thread
            self.errors.append(f"{type(error).__name__}: {error}")

    def _turn(self, random: np.random.Generator) -> None:
        """One session, its own or a shared one, and some calls."""
        case = self.cases[random.integers(len(self.cases))]
        running = self._session(case, random)
        for _ in range(random.integers(1, 12)):
            at = random.integers(len(case.feeds))
            same = answer(running, case.feeds[at]) == case.expected[at]
            with self._lock:
                self.calls[case.name] += 1
                self.differences[case.name] += not same

    def _session(self, case: Case, random: np.random.Generator) -> ort.InferenceSession:
        threads, check = (
            int(random.integers(1, 3)),
            bool(random.random() < CHECKED) and "operator" not in case.name,
        )
        if random.random() >= SHARED:
            return self._opened(case, threads, check)
        with self._lock:
            found = self._shared.get(case.name)
        if found is None or random.random() < 0.25:
            found = self._opened(case, threads, check)
            with self._lock:
                self._shared[case.name] = found
        return found

    def _opened(self, case: Case, threads: int, check: bool) -> ort.InferenceSession:
        with self._lock:
            self.sessions += 1
        return opened(case, threads, check)

    def _read(self, second: float) -> None:
        """Memory while all threads rest and no session is open."""
        self._rest.set()
        for _ in range(self.threads):
            while not self._resting.acquire(timeout=1):
                if self.errors:
                    self._over.set()
                    self._rest.clear()
                    self._go_on.release(self.threads)
                    return
        self._shared.clear()
        self.readings.append((round(second, 1), *resident()))
        self._rest.clear()
        self._go_on.release(self.threads)


def resident() -> tuple[float, float]:
    """The resident set in MB and what of it is anonymous, with nothing in it that is free."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return kilobytes["VmRSS"] / 1024, kilobytes["RssAnon"] / 1024


# ── the program ───────────────────────────────────────────────────────────────────────────────


def report(soak: Soak, minutes: float) -> dict[str, object]:
    return {
        "minutes": round(minutes, 2),
        "threads": soak.threads,
        "cores": soak.cores,
        "sessions": soak.sessions,
        "calls": sum(soak.calls.values()),
        "differences": sum(soak.differences.values()),
        "growth_mb": round(soak.growth(), 2),
        "resident_mb": [round(mb, 1) for _, mb, _ in soak.readings],
        "anonymous_mb": [round(mb, 1) for _, _, mb in soak.readings],
        "cases": dict(sorted(soak.calls.items())),
        "onnxruntime": ort.__version__,
        "gapa_onnx": gapa_onnx.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--cores", type=float, default=1.0, help="of the machine that may be used, about")
    parser.add_argument("--to", type=Path, help="a .json for the result")
    given = parser.parse_args()
    if LIBRARY is None:
        print("there is no native library: nothing to soak", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(cases(Path(folder)), given.cores)
        soak.run(given.minutes * 60, lambda line: print(line, flush=True))
    for error in soak.errors:
        print(f"error: {error}", file=sys.stderr)
    found = report(soak, soak.readings[-1][0] / 60)
    print(json.dumps(found, indent=1))
    silent = [case.name for case in soak.cases if not soak.calls[case.name]]
    if given.to and not soak.errors:
        given.to.write_text(json.dumps(found, indent=1) + "\n")
    good = (
        not soak.errors and not silent and not any(soak.differences.values()) and soak.growth() <= MOST_GROWTH
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
