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
        for command in COMMANDS:
            campaign(bench, command, disk, long=True)
            print(
                command.name,
                sum(count for key, count in bench.counted.items() if key[0] == command.name),
                flush=True,
            )
    rows: Counter[tuple[str, str, str]] = Counter()
    for (_, fault, end, found), count in bench.counted.items():
        rows[fault, end, found] += count
    lines = [
        {"fault": fault, "end": end, "there": found, "count": count}
        for (fault, end, found), count in sorted(rows.items())
    ]
    commands = {
        command.name: sum(n for key, n in bench.counted.items() if key[0] == command.name)
        for command in COMMANDS
    }
    told = {"gapa_onnx": gapa_onnx.__version__, "disk": disk is not None, "commands": commands, "rows": lines}
    TO.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
