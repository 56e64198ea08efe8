"""Two checkouts of this project beside each other: how long conversion and `inspect` take in each.

    python benchmarks/structure.py OLD NEW [--rounds 3] [--only inspect]

OLD and NEW are folders that hold `gapa_onnx/` and `cli/`. Every measurement is a process of its own that imports
one of the two. They take turns: old, new, old again; the second run of the old one is the control, whose ratio to
the first says how much this machine can be trusted. Printed and written to benchmarks/results/structure.json are
medians over the rounds, of seconds on the clock and of seconds of processors.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "structure.json"
INSPECTED = (2000, 5000, 10_000, 20_000)
CONVERTED = 20_000
LONG = (
    100.0  # seconds; what takes longer is not repeated, and larger models are left to the new checkout alone
)


# ------------------------------------------------------------------------------------- one measurement


def measure(checkout: Path, task: str, model: Path) -> dict[str, float]:
    """Seconds of one task in one checkout, after a small one of the same kind that loads all modules."""
    sys.path.insert(0, str(checkout))
    small, whole = _TASKS[task](checkout, model)
    small()
    clock, processors = time.perf_counter(), time.process_time()
    whole()
    return {"clock": time.perf_counter() - clock, "processors": time.process_time() - processors}


def _convert_digits(checkout: Path, model: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from gapa_onnx import convert

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            convert(model, model.with_name("digits_mlp_calibration.npz"), Path(folder) / "out.onnx")

    return run, run


def _convert_chain(checkout: Path, model: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import numpy as np

    from gapa_onnx import convert

    def run(path: Path) -> None:
        rows = np.random.default_rng(1).standard_normal((100, 8)).astype(np.float32)
        convert(path, {"x": rows}, sites="h0", m=20, k=5)

    return lambda: run(model.with_name("small.onnx")), lambda: run(model)


def _inspect(checkout: Path, model: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import gapa_onnx

    if not (Path(gapa_onnx.__file__).parent / "cli").exists():  # it lies beside the package until installed
        spec = importlib.util.spec_from_file_location(
            "gapa_onnx.cli",
            checkout / "cli" / "__init__.py",
            submodule_search_locations=[str(checkout / "cli")],
        )
        sys.modules["gapa_onnx.cli"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["gapa_onnx.cli"])
    from gapa_onnx.cli import main

    def run(path: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["inspect", str(path), "--json"]) == 0

    return lambda: run(model.with_name("small.onnx")), lambda: run(model)


_TASKS = {"convert_digits": _convert_digits, "convert_chain": _convert_chain, "inspect": _inspect}


# --------------------------------------------------------------------------------------- comparisons


def compare(old: Path, new: Path, task: str, model: Path, rounds: int) -> dict[str, Any]:
    """Medians of both checkouts and of the control, and the ratios of new and control to old."""
    taken: dict[str, list[dict[str, float]]] = {"old": [], "new": [], "control": []}
    for _ in range(rounds):
        for name, checkout in (("old", old), ("new", new), ("control", old)):
            taken[name].append(_in_a_process(checkout, task, model))
        if taken["old"][0]["clock"] > LONG:
            break
    row: dict[str, Any] = {"rounds": len(taken["old"])}
    for unit in ("clock", "processors"):
        seconds = {name: median(run[unit] for run in runs) for name, runs in taken.items()}
        row[unit] = {name: round(value, 3) for name, value in seconds.items()}
        for name in ("new", "control"):
            row[unit][f"{name}/old"] = round(median(_ratios(taken[name], taken["old"], unit)), 3)
    return row


def _ratios(runs: list[dict[str, float]], beside: list[dict[str, float]], unit: str) -> Iterator[float]:
    """Round by round, since what else the machine does changes between rounds."""
    return (run[unit] / other[unit] for run, other in zip(runs, beside))


def _in_a_process(checkout: Path, task: str, model: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", task, str(checkout), str(model)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{task} of {model.name} failed in {checkout}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def comparisons(folder: Path, only: str) -> Iterator[tuple[str, str, Path]]:
    """Name, task and model of everything that is compared."""
    import onnx
    from scale import chain

    onnx.save(chain(30), folder / "small.onnx")
    yield "convert digits_mlp", "convert_digits", ROOT / "models" / "digits_mlp.onnx"
    for task, sizes in (("inspect", INSPECTED), ("convert_chain", (CONVERTED,))):
        for nodes in sizes if only in task else ():
            path = folder / f"chain{nodes}.onnx"
            if not path.exists():
                onnx.save(chain(nodes), path)
            yield f"{task.split('_')[0]} a chain of {nodes} nodes", task, path


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        task, checkout, model = sys.argv[2:]
        print(json.dumps(measure(Path(checkout), task, Path(model))))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="inspect or convert; other results stay as they are")
    options = parser.parse_args()
    old, new = options.old.resolve(), options.new.resolve()
    found = json.loads(RESULT.read_text()) if options.only and RESULT.exists() else {}
    slow: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="structure-") as folder:
        for name, task, model in comparisons(Path(folder), options.only):
            if options.only not in task:
                continue
            if task in slow:
                found[name] = {"rounds": 1, **_in_a_process(new, task, model)}
                print(f"{name}: {found[name]['processors']:.2f} s of processors, new alone", flush=True)
                continue
            found[name] = compare(old, new, task, model, options.rounds)
            print(f"{name}: {_sentence(found[name])}", flush=True)
            if found[name]["clock"]["old"] > LONG:
                slow.add(task)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _sentence(row: dict[str, Any]) -> str:
    parts = []
    for unit in ("clock", "processors"):
        seconds = row[unit]
        parts.append(
            f"{unit} {seconds['old']:.2f} s -> {seconds['new']:.2f} s, "
            f"ratio {seconds['new/old']:.2f} (control {seconds['control/old']:.2f})"
        )
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
