"""How many cases there were and how they ended: a file beside the builds that survives restarts.

A case is a number. A fuzzer goes through the numbers in their order, so what it has to remember is the next
one. Counts belong to the code that they were counted with: `code` is a hash of the files that matter.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "build" / "fuzz" / "tally.json"

Table = dict[str, dict[str, int]]


@dataclass
class Tally:
    """Of one fuzzer and one state of the code."""

    code: str
    cases: int = 0
    seconds: float = 0
    table: Table = field(default_factory=dict)  #: row -> how it ended -> how often
    failures: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)  #: versions, and whatever else stands in the record
    before: int = 0  #: cases with earlier states of the code

    def count(self, row: str, outcome: str, by: int = 1) -> None:
        line = self.table.setdefault(row, {})
        line[outcome] = line.get(outcome, 0) + by

    def total(self, outcome: str) -> int:
        return sum(line.get(outcome, 0) for line in self.table.values())


def code(paths: Iterable[Path]) -> str:
    """A hash of the files, and of those in the folders."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def read(path: Path = STATE) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def resumed(fuzzer: str, of: str, path: Path = STATE) -> Tally:
    """The tally so far; a new one where the code is another."""
    known = read(path).get(fuzzer)
    if known is None:
        return Tally(of)
    tally = Tally(**known)
    return tally if tally.code == of else Tally(of, before=tally.before + tally.cases)


def keep(fuzzer: str, tally: Tally, path: Path = STATE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:  # several fuzzers may run at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write(fuzzer, tally, path)


def _write(fuzzer: str, tally: Tally, path: Path) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(
        json.dumps({**read(path), fuzzer: asdict(tally)}, indent=1, sort_keys=True), encoding="utf-8"
    )
    os.replace(part, path)


def lines(tally: Tally, outcomes: Mapping[str, str]) -> list[str]:
    """The table as Markdown: outcome -> its heading."""
    text = ["| | " + " | ".join(outcomes.values()) + " |", "|---|" + "---:|" * len(outcomes)]
    for row in sorted(tally.table):
        numbers = (f"{tally.table[row].get(outcome, 0):,}" for outcome in outcomes)
        text.append(f"| {row} | " + " | ".join(numbers) + " |")
    return text
