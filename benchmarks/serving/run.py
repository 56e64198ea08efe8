"""Packages served for real on this machine: equal answers, odd requests, memory over minutes, and speed beside the source.

    python benchmarks/serving/run.py [--only ray,mlserver] [--part check,soak,speed] [--folder DIR] [--quick]

Each server runs in an environment of its own, which is made in DIR by the first call. `check` asks from 16 clients at once, 10,000
times, for all outputs of batches of 1 to 8 rows, and compares every answer bit for bit with a run of that batch in a session of the server's
onnxruntime; `soak` does it for minutes and watches the memory; `speed` serves the source model by the same files, in turns with the
converted one. Writes results/serving.json, a part of a stack at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from load import Load, Question, ask, decoded, hammer, question
from stacks import SERVERS, environment, resident, retargeted, serving, versions, with_source

import gapa_onnx
from gapa_onnx.files import locked, write

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "serving.json"
MODEL, ROWS = ROOT / "models" / "digits_mlp.onnx", ROOT / "models" / "digits_mlp_calibration.npz"
CLIENTS, REQUESTS, BATCHES, MOST_ROWS = 16, 10_000, 200, 8
PARTS = ("check", "soak", "speed")
ASKED = ("logits", "logits_pvalue", "logits_ood")  # of the converted model, where speed is measured
LAPS = 2  # of source and converted in turns

DIRECT = """
import json, sys
from pathlib import Path
import numpy as np, onnxruntime as ort
folder, given, out = sys.argv[1:]
about = json.loads(Path(folder, "gapa.json").read_text())
options = ort.SessionOptions()
options.register_custom_ops_library(str(Path(folder, about["library"])))
session = ort.InferenceSession(str(Path(folder, about["model"])), options, providers=["CPUExecutionProvider"])
names = [value.name for value in session.get_outputs()]
rows = np.load(given)
found = {f"{batch}/{name}": array for batch in rows for name, array in zip(names, session.run(None, {"pixels": rows[batch]}))}
np.savez(out, **found)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SERVERS), help="stacks")
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "gapa-onnx-serving")
    parser.add_argument("--minutes", type=float, default=3.0, help="of a soak")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement of speed")
    parser.add_argument("--quick", action="store_true", help="few requests, written nowhere")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.quick:
        given.minutes, given.seconds = 0.1, 2.0
    for stack in given.only.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            case = Case(stack, environment(stack, given.folder), Path(scratch))
            for part in given.part.split(","):
                found = getattr(case, part)(given)
                print(stack, part, json.dumps(found), file=sys.stderr, flush=True)
                if not given.quick:
                    record(stack, part, found)


def record(stack: str, part: str, found: dict[str, Any]) -> None:
    with locked(RESULTS.parent):  # several stacks may be asked side by side
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known.setdefault(stack, {})[part] = found
        ordered = {name: known[name] for name in SERVERS if name in known}
        write(RESULTS, (json.dumps(ordered, indent=1) + "\n").encode())


class Case:
    """One stack with its package, and questions with their answers."""

    def __init__(self, stack: str, venv: Path, scratch: Path):
        self.stack, self.venv, self.scratch, self.url = stack, venv, scratch, SERVERS[stack].url
        file = scratch / "digits.gapa.onnx"
        gapa_onnx.convert(MODEL, ROWS, file, m=200, k=20)
        self.folder = gapa_onnx.package(file, stack, scratch / "package").folder
        retargeted(stack, self.folder)
        archive = np.load(ROWS)
        self.rows = archive[archive.files[0]].astype(np.float32)
        self.outputs, self.questions = self._questions()

    @property
    def home(self) -> Path:
        return next(self.folder.rglob("gapa.json")).parent

    def _questions(self) -> tuple[list[str], list[Question]]:
        """Batches, and what a session of the server's own onnxruntime answers to them."""
        rng = np.random.default_rng(0)
        batches = {
            str(number): self.rows[rng.integers(len(self.rows), size=rng.integers(1, MOST_ROWS + 1))]
            + np.float32(number % 3) * rng.normal(size=64).astype(np.float32)
            for number in range(BATCHES)
        }
        given, out = self.scratch / "rows.npz", self.scratch / "answers.npz"
        np.savez(given, **batches)
        subprocess.run([self.venv / "bin" / "python", "-c", DIRECT, self.home, given, out], check=True)
        answers: dict[str, dict[str, np.ndarray]] = {}
        for name, array in np.load(out).items():
            batch, output = name.split("/", 1)
            answers.setdefault(batch, {})[output] = array
        names = list(answers["0"])
        return names, [question(rows, names, answers[batch]) for batch, rows in batches.items()]

    def _served(self) -> Any:
        return serving(self.stack, self.venv, self.folder, self.scratch / "server.log")

    # ------------------------------------------------------------------------ parts

    def check(self, given: argparse.Namespace) -> dict[str, Any]:
        with self._served():
            load = hammer(self.url, self.questions, CLIENTS, 300 if given.quick else REQUESTS)
            odd = self._odd()
        return {
            "versions": versions(self.venv, self.stack),
            "clients": CLIENTS,
            "requests": load.answered,
            "outputs": len(self.outputs),
            "unequal": load.unequal,
            "failed": load.failed,
            **odd,
        }

    def _odd(self) -> dict[str, Any]:
        """Requests that are not like others: a NaN, a wrong shape, no row, no JSON."""
        rows = self.rows[:2].copy()
        rows[0, 5] = np.nan
        names = ["logits_pvalue", "logits_ood"]
        status, answer = ask(self.url, *self._with_nan(rows, names))
        flags = decoded(answer) if status == 200 else {}
        wrong, told = ask(self.url, question(self.rows[:2, :32], names, None).body)
        none, empty = ask(self.url, question(self.rows[:0], names, None).body)
        broken, _ = ask(self.url, b"{")
        return {
            "nan": "flagged"
            if status == 200 and flags["logits_ood"][0] and flags["logits_pvalue"][0] == 0
            else str(answer),
            "wrong_shape": wrong,
            "wrong_shape_says": json.dumps(told),
            "empty": [list(array.shape) for array in decoded(empty).values()] if none == 200 else str(empty),
            "no_json": broken,
        }

    def _with_nan(self, rows: np.ndarray, names: list[str]) -> tuple[bytes, dict[str, str] | None]:
        """A request whose NaN is a null, or bytes where a server's JSON has no null."""
        if SERVERS[self.stack].nulls:
            body = question(rows, names, None).body.replace(b"NaN", b"null")
            return body, None
        data = struct.pack(f"<{rows.size}f", *rows.ravel().tolist())
        tensor = {"name": "pixels", "datatype": "FP32", "shape": list(rows.shape)}
        tensor["parameters"] = {"binary_data_size": len(data)}
        head = json.dumps({"inputs": [tensor], "outputs": [{"name": name} for name in names]}).encode()
        return head + data, {"Inference-Header-Content-Length": str(len(head))}

    def soak(self, given: argparse.Namespace) -> dict[str, Any]:
        """Memory after each tenth of some minutes under load."""
        memory, totals = [], Load()
        with self._served() as process:
            for _ in range(10):
                load = hammer(self.url, self.questions, CLIENTS, seconds=6 * given.minutes)
                totals.answered += load.answered
                totals.unequal += load.unequal
                totals.failed += load.failed
                memory.append(resident(process.pid))
        return {
            "minutes": given.minutes,
            "requests": totals.answered,
            "unequal": totals.unequal,
            "failed": totals.failed,
            "resident_megabytes": [round(bytes_ / 1e6, 1) for bytes_ in memory],
        }

    def speed(self, given: argparse.Namespace) -> dict[str, Any]:
        """Requests per second of source and converted model, served in turns by the same files."""
        source = shutil.copytree(self.folder, self.scratch / "source")
        with_source(self.stack, source, MODEL)
        rows = [self.rows[start : start + MOST_ROWS] for start in range(0, 400, MOST_ROWS)]
        cases = {
            "source": (source, [question(part, ["logits"], None) for part in rows]),
            "converted": (self.folder, [question(part, ASKED, None) for part in rows]),
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        for _ in range(LAPS):
            for name, (folder, questions) in cases.items():
                with serving(self.stack, self.venv, folder, self.scratch / f"{name}.log"):
                    hammer(self.url, questions, CLIENTS, seconds=given.seconds / 4)  # to warm up
                    load = hammer(self.url, questions, CLIENTS, seconds=given.seconds)
                if load.failed:
                    raise SystemExit(f"{self.stack}: {load.failed} of {load.answered} requests failed")
                found[name].append(
                    {
                        "per_second": round(load.answered / load.seconds, 1),
                        "p50_ms": round(load.quantile(0.5), 2),
                        "p99_ms": round(load.quantile(0.99), 2),
                    }
                )
                time.sleep(1)
        return {"clients": CLIENTS, "rows": MOST_ROWS, "seconds": given.seconds, **found}


if __name__ == "__main__":
    main()
