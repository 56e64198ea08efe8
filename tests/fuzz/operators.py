"""The operators behind a stand-in for onnxruntime, under sanitizers: tests/fuzz/native.

A failure says a seed. It is repeated by

    build/fuzz/address/gapa_fuzz --first SEED --count 1 --show
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import gapa_onnx
from fuzz import tally
from fuzz.tally import ROOT, Tally

NATIVE = ROOT / "tests" / "fuzz" / "native"
CORPUS = ROOT / "tests" / "fuzz" / "corpus" / "operators.txt"
LEVELS = ("avx512", "avx2", "generic")
THREADS = 4
OUTCOMES = {
    "computed": "computed",
    "refused at registration": "refused at registration",
    "refused at load": "refused at load",
    "refused at run": "refused at run",
    "crashed": "crashed or broke a promise",
}


def build(kind: str, jobs: int = 2) -> Path:
    """The program for a sanitizer: address, thread, coverage or none; library: with the installed library."""
    folder = ROOT / "build" / "fuzz" / kind
    library = f"-DGAPA_LIBRARY={gapa_onnx.library_path()}"
    commands = [
        ["cmake", "-S", str(NATIVE), "-B", str(folder), f"-DGAPA_FUZZ={kind}", library],
        ["cmake", "--build", str(folder), f"-j{jobs}", "--target", "gapa_fuzz"],
    ]
    for command in commands:
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{run.stdout[-4000:]}")
    return folder / "gapa_fuzz"


def compiled() -> str:
    return tally.code([ROOT / "runtime" / "src", ROOT / "runtime" / "include", NATIVE])


def compiler() -> str:
    found = shutil.which("g++") or "g++"
    return subprocess.run([found, "--version"], stdout=subprocess.PIPE, text=True).stdout.splitlines()[0]


def run(program: Path, first: int, count: int, seconds: float, threads: int, level: str) -> tuple[dict, str]:
    """What the program counted, and what it said if it did not come to its end."""
    command = [str(program), "--first", str(first), "--count", str(count), "--seconds", str(seconds)]
    command += ["--threads", str(threads)]
    ended = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env={**os.environ, "GAPA_ONNX_ISA": level}
    )
    if ended.returncode == 0:
        return json.loads(ended.stdout), ""
    return {}, ended.stderr[-6000:] or f"exit code {ended.returncode}"


def fuzz(
    kind: str, seconds: float, chunk: int, most: int = 1 << 62, keep: bool = True, jobs: int = 1
) -> Tally:
    """Goes on where it ended before, for so long; a failing case is noted and passed over."""
    name = f"operators ({kind})"
    program, threads = build(kind), THREADS if kind == "thread" else 0
    counted = tally.resumed(name, compiled()) if keep else Tally(compiled())
    counted.notes["compiler"] = compiler()
    start, before = time.monotonic(), counted.seconds
    levels = cycle(LEVELS)
    with ThreadPoolExecutor(jobs) as pool:
        while (left := seconds - (time.monotonic() - start)) > 0 and counted.cases < most:
            size = min(chunk, most - counted.cases)
            rounds = [(counted.cases + i * size, size, left, threads, next(levels)) for i in range(jobs)]
            ended = list(pool.map(lambda one: run(program, *one), rounds))
            for (first, _, _, _, level), (found, said) in zip(rounds, ended):
                if said:
                    note_failure(counted, first, level, said)
                for operator, outcomes in found.get("operators", {}).items():
                    for outcome, number in outcomes.items():
                        counted.count(operator, outcome, number)
            # Out of time a round may have stopped early: the rest of it is left for later.
            whole = all(said or found["done"] == size for found, said in ended)
            counted.cases += jobs * size if whole else min(f.get("done", size) for f, _ in ended)
            counted.seconds = before + time.monotonic() - start
            if keep:
                tally.keep(name, counted)
    return counted


def note_failure(counted: Tally, first: int, level: str, said: str) -> None:
    seeds = re.findall(r"^seed (\d+)$", said, re.MULTILINE)
    summary = re.findall(
        r"^.*(?:runtime error|SUMMARY|ERROR|WARNING: ThreadSanitizer|\().*$", said, re.MULTILINE
    )
    counted.failures.append(
        f"{level}, seed {seeds[-1] if seeds else f'after {first}'}: {' | '.join(summary[:3])}"
    )
    counted.count("all", "crashed")


def seeds() -> list[int]:
    """Of cases that have failed once."""
    return [int(line.split()[0]) for line in CORPUS.read_text().splitlines() if line and line[0] != "#"]


def replay() -> list[str]:
    """What of the corpus fails again."""
    program = build("address")
    ended = [(seed, level, run(program, seed, 1, 60, 0, level)[1]) for seed in seeds() for level in LEVELS]
    return [f"seed {seed} of the corpus, {level}: {said}" for seed, level, said in ended if said]
