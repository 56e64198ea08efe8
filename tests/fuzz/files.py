"""Damaged converted files in real onnxruntime, oldest and newest, with the native library; then in our own checks.

A file whose answers are not those of the undamaged one goes to `session(check=True)` and to `verify`: who accepts it?
Negative variances must be flagged wherever the damage is in numbers; who changes the graph can take flags away, and
that is what the digest and `verify` are for.

    python -m fuzz.files FOLDER      judges: answers numbers of kinds by who accepts FOLDER/case.onnx
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from support.environments import python_with
from support.small_models import parse

import gapa_onnx
from fuzz import damage, tally, workers
from fuzz.sources import CLASSIFIER
from fuzz.tally import ROOT, Tally
from gapa_onnx.record import require

NAME = "files"
OLDEST = "1.17.3"
SECONDS = 60.0
INDEXES = {
    "flat": {"index": "flat", "solver": "exact"},
    "ivf": {"index": "ivf", "solver": "exact"},
    "ivfpq": {"index": "ivfpq", "m": 300},
    "hnsw": {"index": "hnsw"},
    "local": {"index": "flat", "solver": "cached"},
}
TASKS = ("classification", "regression", "multilabel", "none")
DAMAGES = ("bytes", "numbers", "structure", "record")
VARIANCES = ("var", "total_var", "aleatoric_var")
OUTCOMES = {
    "refused at load": "refused at load",
    "refused at run": "refused at run",
    "same": "runs, same answers",
    "flagged": "runs, all that changed is flagged",
    "different": "runs, other answers",
    "another form": "runs, other shapes or types",
    "unsound, flagged": "unsound variance, flagged",
    "unsound, not flagged": "unsound variance, not flagged",
    workers.SLOW: "took longer than a minute",
    "onnxruntime died": "onnxruntime ended the process",
    workers.DIED: "our library ended the process",
    "check accepts": "of these, `session(check=True)` accepts",
    "verify accepts": "of these, `verify` accepts",
}


def prepare(folder: Path) -> list[dict[str, Any]]:
    """One converted file for each kind of index and for each task, rows to run, and what stands where."""
    rng = np.random.default_rng(2)
    model = parse(CLASSIFIER, w1=rng.normal(size=(4, 8)), b1=rng.normal(size=8), w2=rng.normal(size=(8, 3)))
    x = rng.normal(size=(600, 4)).astype(np.float32)
    rows = np.concatenate([x[:5], 3 * x[5:6], 1e3 * x[6:7]])
    rows = np.concatenate([rows, np.full((1, 4), np.nan, np.float32)])
    np.savez(folder / "feed.npz", x=rows)
    onnx.save(model, folder / "source.onnx")
    kinds = []
    for index, task in [(one, "classification") for one in INDEXES] + [("flat", one) for one in TASKS[1:]]:
        name = f"{index}-{task}.onnx"
        choices = {"m": 40, "k": 5, "task": task, **INDEXES[index]}
        result = gapa_onnx.convert(model, {"x": x}, folder / name, **choices)
        (head,) = require(result.model, name).heads.values()
        roles = dict(head.outputs)
        kinds.append(
            {
                "file": name, "feed": "feed.npz", "ood": [roles["ood"]],
                "outputs": [output.name for output in result.model.graph.output],
                "variances": [roles[role] for role in VARIANCES if role in roles],
            }
        )  # fmt: skip
    (folder / "kinds.json").write_text(json.dumps(kinds))
    return kinds


@cache
def _sound(path: Path) -> bytes:
    return path.read_bytes()


def damaged(content: bytes, how: str, random: Random) -> bytes:
    if how == "bytes":
        return damage.some_bytes(content, random)
    model = onnx.ModelProto.FromString(content)
    if how == "numbers":
        for _ in range(random.choice((1, 1, 2, 4))):
            _damage_numbers(random.choice(list(model.graph.initializer)), random)
    elif how == "structure":
        damage.a_message(model, random)
    else:
        for entry in model.metadata_props:
            entry.value = damage.json_text(entry.value, random).encode("utf-8", "replace").decode()
    return model.SerializeToString()


def _damage_numbers(tensor: onnx.TensorProto, random: Random) -> None:
    """Other contents; type and shape stay."""
    array = onnx.numpy_helper.to_array(tensor)
    if array.size == 0 or array.dtype == object:
        return
    changed, flat = array.copy(), random.random()
    if flat < 0.4:
        content = bytearray(array.tobytes())
        for _ in range(random.choice((1, 2, 8))):
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        changed = np.frombuffer(bytes(content), array.dtype).reshape(array.shape)
    elif array.dtype.kind == "f":
        with np.errstate(all="ignore"):
            if flat < 0.7:
                changed.reshape(-1)[random.randrange(array.size)] = random.choice(damage.REAL)
            else:
                changed = (array * random.choice(damage.REAL)).astype(array.dtype)
    elif array.dtype.kind in "iu":
        whole = random.choice(damage.WHOLE) % 2 ** (8 * array.itemsize)
        changed.reshape(-1)[random.randrange(array.size)] = np.uint64(whole).astype(array.dtype)
    name = tensor.name
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(changed), name))


def accepts(folder: Path) -> list[str]:
    """Which of our own checks take the damaged file."""
    from gapa_onnx.errors import UserError
    from gapa_onnx.measure.verify import verify
    from gapa_onnx.model.load import load
    from gapa_onnx.sessions.runtime import require_as_written

    found = []
    try:
        require_as_written(folder / "case.onnx")
        found.append("check accepts")
    except UserError:
        pass
    try:
        source = load(folder / "source.onnx").given
        with np.load(folder / "feed.npz") as feed:
            rows = {"x": feed["x"][:5]}
        checks = verify(source, load(folder / "case.onnx").given, [rows])
        if all(check.passed for check in checks):
            found.append("verify accepts")
    except UserError:
        pass
    except Exception as error:  # the command turns what a damaged model does into a sentence
        del error
    return found


class Engines:
    """The releases, with and without the library, and the judge; each in a process of its own."""

    def __init__(self, folder: Path):
        library = gapa_onnx.library_path()
        assert library is not None, "the native library is not built"
        oldest = str(python_with(OLDEST, f"onnxruntime=={OLDEST}", "numpy<2"))
        pythons = {OLDEST: oldest, "newest": sys.executable}
        self.native = {
            v: workers.Worker(p, "fuzz.stock", str(folder), str(library)) for v, p in pythons.items()
        }
        self.stock = {v: workers.Worker(p, "fuzz.stock", str(folder), "") for v, p in pythons.items()}
        self.judge = workers.Worker(sys.executable, "fuzz.files", str(folder))

    def end(self) -> None:
        for worker in (*self.native.values(), *self.stock.values(), self.judge):
            worker.end()


def one_case(
    number: int, folder: Path, kinds: list[dict[str, Any]], engines: Engines
) -> tuple[str, str, list[str], str]:
    """The row of the table, how it ended, who accepts it, and what was said."""
    random = Random(f"files/{number}")
    kind, how = random.randrange(len(kinds)), DAMAGES[random.choices(range(4), (25, 40, 30, 5))[0]]
    version = random.choice(list(engines.native))
    (folder / "case.onnx").write_bytes(damaged(_sound(folder / kinds[kind]["file"]), how, random))
    ended, said = engines.native[version].answer(kind, SECONDS)
    row = f"{how}, {version}"
    if ended == workers.DIED:
        own, _ = engines.stock[version].answer(kind, SECONDS)
        return row, "onnxruntime died" if own == workers.DIED else workers.DIED, [], said
    if ended:
        return row, ended, [], ""
    wrong = said in ("different", "another form", "flagged") or said.startswith("unsound")
    sampled = said.startswith("unsound") or random.random() < 0.2
    taken: list[str] = []
    if wrong and sampled:
        ended, taken = engines.judge.answer(kind, SECONDS)
        taken = [] if ended else taken
    return row, said, taken, ""


def failed(row: str, how: str, taken: list[str]) -> bool:
    """A crash of ours; a negative variance that a check accepts, or that damaged numbers leave without a flag."""
    if how == workers.DIED or (how.startswith("unsound") and taken):
        return True
    return how == "unsound, not flagged" and row.startswith("numbers")


def fuzz(seconds: float, folder: Path, most: int = 1 << 62, keep: bool = True) -> Tally:
    """Goes on where it ended before, for so long."""
    tested = [ROOT / "gapa_onnx", ROOT / "runtime" / "src"]
    tested += [ROOT / "tests" / "fuzz" / name for name in ("files.py", "stock.py", "damage.py")]
    counted = tally.resumed(NAME, tally.code(tested)) if keep else Tally(tally.code(tested))
    folder.mkdir(parents=True, exist_ok=True)
    kinds, engines = prepare(folder), Engines(folder)
    start, before = time.monotonic(), counted.seconds
    while time.monotonic() - start < seconds and counted.cases < most:
        row, how, taken, said = one_case(counted.cases, folder, kinds, engines)
        for outcome in (how, *taken):
            counted.count(row, outcome)
        if failed(row, how, taken):
            counted.failures.append(f"case {counted.cases}, {row}: {how}, {taken} {said}")
        counted.cases += 1
        counted.seconds = before + time.monotonic() - start
        if keep and counted.cases % 100 == 0:
            tally.keep(NAME, counted)
    engines.end()
    if keep:
        tally.keep(NAME, counted)
    return counted


if __name__ == "__main__":
    workers.serve(lambda number: accepts(Path(sys.argv[1])))
