"""Peak memory and time of a conversion, by step.

    python benchmarks/paper/language/conversion.py MODEL.onnx DATA [--tokenizer FILE] [--tokens N] [--out FILE] [--rows N] [--json]
                                                  [--keep NAME] [SETTING=VALUE …]

DATA is a .npz with the model's inputs, or text.

Prints one line for each step: seconds and CPU seconds, and the highest resident memory while it ran (of which `own` is not mapped from
a file); then what the process had at most. `forward` is the source model on the same rows, in the same
batches, after the conversion: what no conversion can do without, in time and in memory. `--keep` adds a line of that name to results/language_conversion.csv.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import gapa_onnx
from gapa_onnx import compiler

#: what the compiler calls for each step
STEPS = {
    "load": "load",
    "analyse": "analyse",
    "calibrate": "_calibrated",
    "rewrite": "rewrite",
    "settle": "settle",
    "emit": "emit",
    "verify": "_verified",
    "write": "_written",
}
HERE = Path(__file__).resolve().parent
SAMPLED = 0.02  # seconds between looks at the memory
PAGE = resource.getpagesize()


def resident() -> tuple[int, int]:
    """Bytes that the process has in memory, and how many of them are no file's (Linux)."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * PAGE, (int(fields[1]) - int(fields[2])) * PAGE


@dataclass
class Watch:
    """Seconds and peaks by step."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict)
    step: str = "between"
    done: bool = False

    def look(self) -> None:
        while not self.done:
            self._see(self.step)
            time.sleep(SAMPLED)

    def _see(self, step: str) -> None:
        now, before = resident(), self.peaks.get(step, (0, 0))
        self.peaks[step] = (max(now[0], before[0]), max(now[1], before[1]))

    def watched(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.step, start, worked = step, time.perf_counter(), time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self._see(step)
                self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start
                self.cpu[step] = self.cpu.get(step, 0.0) + time.process_time() - worked
                self.step = "between"

        return call


@contextmanager
def watching() -> Iterator[Watch]:
    """The steps of the compiler, watched."""
    watch, kept = Watch(), {name: getattr(compiler, name) for name in STEPS.values()}
    thread = threading.Thread(target=watch.look, daemon=True)
    thread.start()
    try:
        for step, name in STEPS.items():
            setattr(compiler, name, watch.watched(step, kept[name]))
        yield watch
    finally:
        watch.done = True
        thread.join()
        for name, function in kept.items():
            setattr(compiler, name, function)


def forward(model: Path, batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Seconds, CPU seconds and peaks of the memory that the source takes for all rows."""
    with watching() as watch:
        watch.watched("forward", _run)(model, batches)
    return {
        "forward": watch.seconds["forward"],
        "forward_cpu": watch.cpu["forward"],
        "forward_peak": watch.peaks["forward"],
    }


def _run(model: Path, batches: Sequence[Mapping[str, np.ndarray]]) -> None:
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    for batch in batches:
        session.run(None, dict(batch))


def measured(model: Path, rows: Any, out: Path | None, **choices: Any) -> dict[str, Any]:
    """Figures of one conversion; the process's own peak is only of use where it does nothing else."""
    with watching() as watch:
        start, worked = time.perf_counter(), time.process_time()
        result = gapa_onnx.convert(model, rows, out, **choices)
        seconds, cpu = time.perf_counter() - start, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "steps": {
            step: {"seconds": watch.seconds[step], "cpu": watch.cpu[step], "peak": watch.peaks[step]}
            for step in watch.seconds
        },
        "seconds": seconds,
        "cpu": cpu,
        "peak": peak,
        "batch": result.calibration.fed.batch_rows,
        "rows": result.calibration.rows,
        "fed": result.calibration.fed,
        "failed": [f"{check.name}: {check.detail}" for check in result.checks if not check.passed],
    }


def told(figures: dict[str, Any]) -> Iterator[str]:
    for step, found in figures["steps"].items():
        whole, own = (size / 1e9 for size in found["peak"])
        yield f"{step:10} {found['seconds']:8.1f} s {found['cpu']:8.1f} CPU s   {whole:5.2f} GB, own {own:5.2f}"
    whole = f"{figures['peak'] / 1e9:5.2f} GB, {figures['rows']} rows, {figures['batch']} at a time"
    yield f"{'all':10} {figures['seconds']:8.1f} s {figures['cpu']:8.1f} CPU s   {whole}"
    whole, own = (size / 1e9 for size in figures["forward_peak"])
    memory = f"{whole:5.2f} GB, own {own:5.2f}"
    yield f"{'forward':10} {figures['forward']:8.1f} s {figures['forward_cpu']:8.1f} CPU s   {memory}"
    yield from figures["failed"]


def parameters(path: Path) -> int:
    """Numbers in all weights of a model."""
    held = onnx.load(path, load_external_data=False).graph.initializer
    return sum(int(np.prod(tensor.dims)) for tensor in held)


def keep(name: str, model: Path, tokens: int, figures: dict[str, Any]) -> None:
    """Add a line to the results."""
    sys.path.insert(0, str(HERE.parents[1]))
    from lines import Lines, machine

    line: dict[str, Any] = {"form": name, "tokens": tokens, "parameters": parameters(model)}
    own = max(step["peak"][1] for step in figures["steps"].values())
    memory = {"peak_gb": figures["peak"], "own_gb": own, "forward_own_gb": figures["forward_peak"][1]}
    line |= {what: round(size / 1e9, 3) for what, size in memory.items()}
    line |= {what: round(figures[what], 1) for what in ("seconds", "cpu", "forward", "forward_cpu")}
    Lines(HERE.parent / "results" / "language_conversion.csv", ("form", "tokens"), fresh=False).add(
        line | machine()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("choices", nargs="*", metavar="SETTING=VALUE")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", metavar="NAME")
    given = parser.parse_args()
    choices: dict[str, Any] = {}
    rows: Any = given.data
    if given.data.suffix == ".npz":
        with np.load(given.data) as held:
            rows = {name: held[name][: given.rows] for name in held.files}
    else:
        choices["text"] = gapa_onnx.TextOptions(given.tokenizer, tokens=given.tokens)
    for choice in given.choices:
        name, _, text = choice.partition("=")
        try:
            choices[name] = json.loads(text)
        except json.JSONDecodeError:
            choices[name] = text
    figures = measured(given.model, rows, given.out, **choices)
    read = list(figures.pop("fed").batches(figures["batch"]))
    figures |= forward(given.model, read)
    if given.keep:
        keep(given.keep, given.model, sum(batch["input_ids"].size for batch in read), figures)
    if given.json:
        print(json.dumps(figures))
        return
    sys.stdout.writelines(f"{line}\n" for line in told(figures))


if __name__ == "__main__":
    main()
