"""Results of a benchmark, line by line in a CSV, so that an interrupted run can go on."""

from __future__ import annotations

import csv
import os
import platform
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort

import gapa_onnx


class Lines:
    """Lines of a CSV, written after each, known by some of their columns."""

    def __init__(self, path: Path, key: tuple[str, ...], *, fresh: bool):
        self.path, self.key = path, key
        self.rows: list[dict[str, Any]] = []
        if path.exists() and not fresh:
            with open(path, newline="") as file:
                self.rows = list(csv.DictReader(file))

    def has(self, *values: Any) -> bool:
        return any([str(row[name]) for name in self.key] == [str(v) for v in values] for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        say("  " + ", ".join(f"{name} {value}" for name, value in row.items() if name not in machine()))
        same = [str(row[name]) for name in self.key]
        self.rows = [old for old in self.rows if [str(old[name]) for name in self.key] != same] + [row]
        with open(self.path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(row), extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)


def machine() -> dict[str, Any]:
    return {
        "gapa_onnx": gapa_onnx.__version__,
        "onnxruntime": ort.__version__,
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    """Its name where Linux tells, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
