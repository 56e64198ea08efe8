"""Every model of a folder, converted: one row a model, written to benchmarks/results/zoo.md and .csv.

    python benchmarks/zoo.py [--sites auto all] [--match TEXT] [--quick]

Needs ../shared/zoo. A row says what became of a model: converted with all checks passed, refused and
why, or failed; how many nodes were added; how long it took beside the model's own load time.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

import onnxruntime as ort

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import zoo  # noqa: E402

from gapa_onnx import UserError, convert  # noqa: E402
from gapa_onnx.model.load import load  # noqa: E402

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("model", "opset", "nodes", "sites", "result", "added_nodes", "outputs", "seconds", "detail")


def measure(name: str, sites: str) -> dict:
    """Convert one model and say what happened."""
    row = {"model": name.removesuffix(".onnx"), "sites": sites}
    start = time.perf_counter()
    try:
        source = load(zoo.FOLDER / name)
        row |= {"opset": source.opset, "nodes": len(source.proto.graph.node)}
        slow = any(part in name for part in zoo.SLOW)
        rows = 4 if zoo.free_batch(source) else 1
        data = [zoo.feeds(source, rows, seed) for seed in range(6 if slow else 12)]
        start = time.perf_counter()
        conversion = convert(zoo.FOLDER / name, data, sites=sites, m=12, k=4)
    except UserError as refusal:
        result = "refused" if "no variance rule" in refusal.message else "not applicable"
        return row | {
            "result": result,
            "detail": " ".join(refusal.message.replace(str(zoo.FOLDER), "").split()),
        }
    except Exception as error:  # a benchmark goes on to the next model
        return row | {"result": "FAILED", "detail": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    failed = [f"{check.name}: {check.detail}" for check in conversion.checks if not check.passed]
    return row | {
        "result": "FAILED" if failed else "converted",
        "added_nodes": len(conversion.model.graph.node) - len(source.proto.graph.node),
        "outputs": len(conversion.plan.outputs),
        "seconds": round(time.perf_counter() - start, 1),
        "detail": "; ".join(failed) or f"{len(conversion.plan.sites)} site(s)",
    }


def write(rows: list[dict]) -> None:
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / "zoo.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        "# The zoo",
        "",
        f"onnxruntime {ort.__version__} on the CPU; conversion seconds beside whatever else the machine did.",
        "",
    ]
    for sites in dict.fromkeys(row["sites"] for row in rows):
        mine = [row for row in rows if row["sites"] == sites]
        counts = {
            r: sum(row["result"] == r for row in mine) for r in dict.fromkeys(row["result"] for row in mine)
        }
        lines += [f"`--sites {sites}`: " + ", ".join(f"{n} {result}" for result, n in counts.items()), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = (str(row.get(column, "")).replace("|", "/")[:160] for column in COLUMNS)
        lines.append("| " + " | ".join(cells) + " |")
    (RESULTS / "zoo.md").write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", nargs="+", default=["auto", "all"])
    parser.add_argument("--match", default="", help="only models whose name holds this")
    parser.add_argument("--quick", action="store_true", help="the ten smallest models")
    options = parser.parse_args()
    ort.set_default_logger_severity(4)
    names = [name for name in zoo.names() if options.match in name]
    if not names:
        print("no models: ../shared/zoo is not here, or nothing matches", file=sys.stderr)
        return 2
    rows = []
    for name in names[:10] if options.quick else names:
        for sites in options.sites:
            rows.append(measure(name, sites))
            print(
                f"{rows[-1]['result']:<15} {sites:<5} {name}  {rows[-1].get('detail', '')[:120]}", flush=True
            )
    if not options.match and not options.quick:
        write(rows)
    return int(any(row["result"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
