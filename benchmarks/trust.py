"""The sections of benchmarks/RESULTS.md about faults and long runs; tests/faults and tests/soak make their files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median

KILLS = ("killed at a call", "killed by another")
FULL = ("full disk", "limit on files", "full temporary folder")


def faults(path: Path) -> str:
    """What befell commands, how they ended, and what was there afterwards."""
    told = json.loads(path.read_text())
    counts: Counter[str] = Counter()
    for row in told["rows"]:
        counts[row["fault"]] += row["count"]
    killed = sum(row["count"] for row in told["rows"] if row["fault"] in KILLS and row["end"] == "killed")
    full = {name: counts[name] for name in FULL}
    commands = ", ".join(f"{name} ({count})" for name, count in told["commands"].items())
    lines = ["| fault | the command | what is there | count |", "| --- | --- | --- | --- |"]
    lines += [f"| {row['fault']} | {row['end']} | {row['there']} | {row['count']} |" for row in told["rows"]]
    return (
        f"{killed} kills, {full['full disk']} points of a full disk (and {full['limit on files']} of a limit on files), "
        f"{sum(counts.values())} faults in all, over {commands}. After each the old file was there byte for byte or the new one, "
        "and after the next run nothing was left over; the run stops at the first that is otherwise. *Killed at a call* is before each "
        "call of the C library that changes a file, and half way through each write; *sentence* is exit code 2 with one error. "
        "In *two at once* both commands are told, and a second folder of one name is refused.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def soak(path: Path) -> str:
    """A long run of sessions that come and go."""
    told = json.loads(path.read_text())
    memory = told["resident_mb"]
    warm = memory[len(memory) // 10 :]
    usual = median(warm[:5])
    text = (
        f"{told['minutes']:.0f} minutes, {told['threads']} threads held to about {told['cores']} cores: {told['calls']:,} calls in "
        f"{told['sessions']:,} sessions of {len(told['cases'])} kinds of files, **{told['differences']} differences** from the first answers. "
        f"Resident memory with no session open, in {len(memory)} readings: {memory[0]} MB at first, {usual:.1f} MB behind the warm-up (a tenth of "
        f"the run), at most {max(warm)} MB ({max(warm) - usual:+.1f}), {memory[-1]} MB at last ({median(warm[-5:]) - usual:+.1f}, medians of five). "
    )
    if "anonymous_mb" in told:
        text += f"Of its anonymous part the growth is **{told['growth_mb']} MB**. "
    else:
        text += "Pages of files are in it, which the machine takes away and gives back; in this run its anonymous part was not kept. "
    return f"{text}onnxruntime {told['onnxruntime']}, gapa-onnx {told['gapa_onnx']}, {told['machine']}.\n"
