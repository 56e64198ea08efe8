"""All faults at all points over all commands, counted, as benchmarks/results/faults.json.

    PYTHONPATH=tests python -m faults.table

It stops at the first that loses something. benchmarks/page.py shows the table.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

from faults.commands import COMMANDS, materials, zygote
from faults.faults import Bench, campaign, small_disk
from support.paths import BENCHMARKS

import gapa_onnx

TO = BENCHMARKS / "results" / "faults.json"


def main() -> int:
    with zygote() as running, small_disk(running.scratch) as disk:
        for name in ("materials", "work"):
            (running.scratch / name).mkdir()
        bench = Bench(running, materials(running, running.scratch / "materials"), running.scratch / "work")
        for command in sorted(COMMANDS, key=lambda command: command.slow):
            campaign(bench, command, disk, long=True)
            _write(bench, disk is not None)
            print(command.name, bench.counted.total(), flush=True)
    return 0


def _write(bench: Bench, disk: bool) -> None:
    """What has been counted so far."""
    rows: Counter[tuple[str, str, str]] = Counter()
    commands: Counter[str] = Counter()
    for (name, fault, end, found), count in bench.counted.items():
        rows[fault, end, found] += count
        commands[name] += count
    lines = [
        {"fault": fault, "end": end, "there": found, "count": count}
        for (fault, end, found), count in sorted(rows.items())
    ]
    told = {"gapa_onnx": gapa_onnx.__version__, "disk": disk, "commands": commands, "rows": lines}
    TO.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
