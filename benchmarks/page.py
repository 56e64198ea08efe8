"""benchmarks/RESULTS.md from the files in benchmarks/results; no number on it is typed in by hand.

    python benchmarks/page.py

A section whose file is missing says which command makes it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trust

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
Row = dict[str, str]


def main() -> None:
    parts = [
        "# What was measured\n",
        "Made by `python benchmarks/page.py` from `benchmarks/results`. Costs are ratios to the source model in the "
        "same run; the *control* is the source model against itself in that run, and a ratio whose control is "
        "not within 1.00 ± 0.03 is not given. One thread counts CPU time, two threads wall time. The quality of "
        "uncertainty beside other methods is in [paper/RESULTS.md](paper/RESULTS.md).\n",
        machine(),
    ]
    for title, file, command, section in SECTIONS:
        parts.append(f"## {title}\n")
        path = RESULTS / file
        parts.append(section(path) if path.exists() else f"Not measured yet: `{command}`.\n")
    (HERE / "RESULTS.md").write_text("\n".join(parts))


def machine() -> str:
    rows = read(RESULTS / "speed.csv")
    kinds = sorted({(r["processor"], r["cores"], r["onnxruntime"], r["gapa_onnx"]) for r in rows})
    return "\n".join(
        f"Machine: {processor}, {cores} cores; onnxruntime {ort}, gapa-onnx {version}.\n"
        for processor, cores, ort, version in kinds
    )


# ----------------------------------------------------------------------- sections


def ratios(path: Path) -> str:
    """The cost of converted networks, and for the classifier what it buys."""
    rows = read(path)
    processors = dict.fromkeys(row["processor"] for row in rows)
    tables = (
        f"### {processor}\n\n{_ratios([row for row in rows if row['processor'] == processor])}"
        for processor in processors
    )
    return (
        "AUROC: Fashion-MNIST test images against MNIST's; *exact* is the line with all 55,000 points and flat "
        "search. The classifier's site is its last hidden layer but for `sites=auto`, the tool's default.\n\n"
        + "\n".join(tables)
    )


def _ratios(rows: list[Row]) -> str:
    exact = next((r for r in rows if r["settings"] == "inducing=all index=flat" and r["auroc_bald"]), None)
    found = []
    for row in rows:
        quality = []
        for key in ("auroc_score", "auroc_bald"):
            less = f" ({float(row[key]) - float(exact[key]):+.4f})" if row[key] and exact else ""
            quality.append(f"{row[key]}{less}")
        found.append(
            [
                row["network"],
                row["settings"],
                row["m"],
                row["index"],
                row["batch"],
                row["threads"],
                row["ratio"],
                row["control"],
                row["target"],
                row["met"],
                *quality,
            ]  # fmt: skip
        )
    head = ["network", "settings", "M", "index", "batch", "threads", "ratio", "control", "target", "met",
            "AUROC score (less exact)", "AUROC BALD (less exact)"]  # fmt: skip
    return table(head, found)


def default_costs(path: Path) -> str:
    """Ratios of the default with their intervals."""
    rows = [
        [
            row["network"],
            row["batch"],
            "native" if row["library"] == "True" else "portable",
            row["processes"],
            f"{float(row['ratio']):.3f}",
            f"{float(row['low']):.3f} to {float(row['high']):.3f}",
            f"{float(row['control']):.3f}",
        ]
        for row in read(path)
    ]
    text = (
        "The default beside the network alone; each process times every case once, and the interval (95%) is over "
        "processes. The files are those of the AUROCs in [paper/RESULTS.md](paper/RESULTS.md): nothing is chosen otherwise.\n\n"
    )
    return text + table(["network", "batch", "by", "processes", "ratio", "interval", "control"], rows)


def growth(path: Path) -> str:
    """One operator against M, K, d and batch."""
    found = []
    for row in read(path):
        found.append(
            [
                row[name]
                for name in ("varied", "kind", "index", "m", "k", "d", "batch", "us_per_query", "recall")
            ]
        )
    return (
        "One site by itself, one thread, in microseconds per query.\n\n"
        "![cost of one site against M, K, d and batch](results/speed_growth.png)\n\n"
        + table(["varied", "asked for", "index", "M", "K", "d", "batch", "µs per query", "recall"], found)
    )


def memory(path: Path) -> str:
    rows = read(path)
    head = ["what", "settings", "batch", "peak_mb", "inducing_mb", "beyond_mb", "target_mb"]
    return (
        "Peaks of resident memory above an idle onnxruntime, in MB; *beyond* is what is neither the source's nor "
        "the inducing points'.\n\n" + table(head, [[row[name] for name in head] for row in rows])
    )


def kernel(path: Path) -> str:
    """Search and solve by the native library beside FAISS's search alone."""
    rows = read(path)
    head = ["processor", "rows", "points", "queries", "blas_core", "ratio", "quartiles", "control", "us_per_query",
            "faiss_us_per_query", "same_neighbours"]  # fmt: skip
    sizes = {(row["d"], row["k"], row["threads"]) for row in rows}
    return (
        "Exact search *and* solve over PyPI faiss-cpu's `IndexFlatL2` search *alone*, by wall time ("
        + "; ".join(f"d = {d}, K = {k}, {threads} threads" for d, k, threads in sorted(sizes))
        + "): below 1 is faster. *blas_core* is what the OpenBLAS within faiss-cpu takes the processor for.\n\n"
        + table(head, [[row[name] for name in head] for row in rows])
    )


def operators(path: Path) -> str:
    head = ["operator", "rows", "batch", "cpu_us", "cpu_us_least", "instructions"]
    return (
        "One thread, microseconds of CPU time per row, and instructions of the library per row with AVX2 as "
        "callgrind counts them (without what onnxruntime does around it).\n\n"
        + table(head, [[row[name] for name in head] for row in read(path)])
    )


def calibration(path: Path) -> str:
    """Seconds of a conversion by step."""
    results = json.loads(path.read_text())
    lines = results["sizes"] if isinstance(results, dict) else results
    steps = list(lines[0]["shares"])
    found = [
        [
            line["network"],
            line["rows"],
            line["width"],
            line["pass_seconds"],
            line["total_seconds"],
            *(line["shares"][s] for s in steps),
        ]
        for line in lines
    ]
    return (
        "CPU seconds of a whole conversion and of one pass of the source model alone, and the share of each step. "
        "What comes after the pass is bounded, however many rows there are.\n\n"
        + table(["network", "rows", "width", "pass (s)", "conversion (s)", *steps], found)
    )


def serving(path: Path) -> str:
    """What came back from each server, and how fast."""
    stacks = json.loads(path.read_text())
    checks = [
        [
            f"{stack} ({' '.join(next(iter(check['versions'].items())))})",
            check["clients"],
            f"{check['requests']:,}",
            check["unequal"],
            check["failed"],
            check["nan"],
            f"HTTP {check['wrong_shape']}",
            "empty answer" if check["empty"] == [[0], [0]] else check["empty"],
        ]
        for stack, check in ((name, parts["check"]) for name, parts in stacks.items() if "check" in parts)
    ]
    soaks = [
        [
            stack,
            soak["minutes"],
            f"{soak['requests']:,}",
            soak["unequal"],
            soak["failed"],
            *(soak["resident_megabytes"][place] for place in (0, 4, 9)),
        ]
        for stack, soak in ((name, parts["soak"]) for name, parts in stacks.items() if "soak" in parts)
    ]
    speeds = [
        [
            stack,
            kind,
            *(" / ".join(str(lap[key]) for lap in speed[kind]) for key in ("per_second", "p50_ms", "p99_ms")),
        ]
        for stack, speed in ((name, parts["speed"]) for name, parts in stacks.items() if "speed" in parts)
        for kind in ("source", "converted")
    ]
    return (
        "The digit classifier in the packages of `gapa-onnx package`, each server in an environment of its own, clients on the same "
        "machine. KServe runs the package of MLServer. Triton is that of nvidia-pytriton with its Python backend; the settings for its "
        "onnxruntime backend, which that package does not have, agree with NVIDIA's schema and were not run. *Unequal*: answers in "
        "which any bit of any output differs from a run of the same batch in a session of the server's onnxruntime. The machine was "
        "busy with other work; for the last table what could be paused of it was, and laps tell how quiet that is.\n\n"
        + table(
            ["server", "clients", "requests", "unequal", "failed", "a NaN", "a wrong shape", "no row"], checks
        )
        + "\nSoak: memory of the server and all its processes after a tenth, a half and all of the time.\n\n"
        + table(["server", "minutes", "requests", "unequal", "failed", "MB at 10%", "50%", "100%"], soaks)
        + "\nSpeed: batches of 8 rows from 16 clients, source and converted in turns; two laps of each show how far one lap differs "
        "from another. The converted model is asked for its prediction, p-value and flag.\n\n"
        + table(["server", "model", "requests a second", "p50 ms", "p99 ms"], speeds)
    )


def drift(path: Path) -> str:
    """False alarms of the drift test, and how soon it tells a change."""
    found = json.loads(path.read_text())
    alarms = [
        [
            name,
            f"{one['table']:,}" + (f" of {one['of']:,}" if one["of"] != one["table"] else ""),
            f"{one['streams']:,}",
            f"{one['rows']:,}",
            f"{one['alarms']} ({one['alarms'] / one['streams']:.2%})",
            f"{one['fixed']} of {one['fixed_streams']} ({one['fixed'] / one['fixed_streams']:.0%})",
        ]
        for name, parts in found["scores"].items()
        for one in parts["alarms"]
    ]
    delays = [
        [
            name,
            f"{one['table']:,}",
            f"{one['strange']:.0%}",
            f"{one['first']:,}",
            f"{one['told']} of {one['streams']}",
            *(f"{one[key]:.0f}" for key in ("median", "high", "largest")),
        ]
        for name, parts in found["scores"].items()
        for one in parts["delays"]
    ]
    return (
        f"`gapa-onnx watch` at level {found['level']}. *MNIST*: scores of a classifier (784-128-10) on 60,000 images that it has not seen; tables and "
        "streams are drawn from them without putting any back, clothes are what is strange. *Normal* and *in steps* (many equal scores): made, "
        "strange rows are 4 higher. *Thinned*: a table as a file keeps it of more rows.\n\n"
        + table(
            [
                "scores",
                "table",
                "streams",
                "rows",
                "false alarms",
                "the same bets on ranks in the table alone",
            ],
            alarms,
        )
        + "\nRows from the change to the alarm, in streams that were told before their end and not before the change.\n\n"
        + table(
            ["scores", "table", "strange", "from row", "told", "median", "nine of ten", "largest"], delays
        )
    )


def many_machines(path: Path) -> str:
    """Shards and Ray beside one pass."""
    found = json.loads(path.read_text())
    names = {
        "mnist": "classifier, MNIST",
        "resnet20": "ResNet-20, CIFAR-10",
        "decoder": "small decoder, random tokens",
    }
    lines = [
        "| network, data | rows | shards | the same bytes as one pass | largest part | convert | convert from parts |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, label in names.items():
        if name in found:
            case = found[name]
            lines.append(
                f"| {label} | {case['rows']:,} | {case['shards']} | {'yes' if case['same'] else '**no**'} | "
                f"{case['largest_part_bytes'] / 1e6:.1f} MB | {case['convert_seconds']} s | {case['from_parts_seconds']} s |"
            )
    text = "Wall times of one run beside other work, for orientation.\n\n" + "\n".join(lines) + "\n"
    if "ray" not in found:
        return text
    case = found["ray"]
    return (
        f"{text}\nRay, ResNet-20 on {case['rows']:,} images, one thread a worker: the same bytes "
        f"{'always' if case['same'] else '**not always**'}; reading took {case['seconds_of_one']} s with one worker and "
        f"{case['seconds_of_two']} s with two, {case['times_as_fast']} times as fast by medians (two runs of one worker: "
        f"{case['control']} apart).\n"
    )


SECTIONS: tuple[tuple[str, str, str, Callable[[Path], str]], ...] = (
    ("Cost of converted networks", "speed.csv", "python benchmarks/speed.py --only ratios", ratios),
    ("Cost of the default, by many processes", "costs.csv", "python benchmarks/costs.py", default_costs),
    ("Cost of one site", "speed_growth.csv", "python benchmarks/speed.py --only growth", growth),
    ("Memory", "speed_memory.csv", "python benchmarks/speed.py --only memory", memory),
    ("Calibration", "calibration_speed.json", "python benchmarks/calibration_speed.py", calibration),
    ("Many machines", "many_machines.json", "python benchmarks/many_machines.py", many_machines),
    ("The native kernel beside FAISS", "native_kernel.csv", "python benchmarks/native_kernel.py", kernel),
    (
        "Native operators",
        "native_operators.csv",
        "python benchmarks/native_kernel.py --only operators",
        operators,
    ),
    ("Serving", "serving.json", "python benchmarks/serving/run.py", serving),
    ("Whether the input has changed", "drift.json", "python benchmarks/drift.py", drift),
    ("Faults", "faults.json", "PYTHONPATH=tests python -m faults.table", trust.faults),
    ("A long run", "soak.json", "python tests/soak/soak.py --to benchmarks/results/soak.json", trust.soak),
)


# -------------------------------------------------------------------------- tables


def read(path: Path) -> list[Row]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
