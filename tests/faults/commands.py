"""Every command line that writes, with what it needs, what stands there before, and what must hold after any fault."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from support.genai_folders import builder_folder
from support.labelled_models import net, rows
from support.paths import TESTS
from support.texts import sentences

from gapa_onnx.files import PREFIX

HERE = Path(__file__).resolve().parent
Snapshot = dict[str, bytes]
Run = dict[str, Any]
LOW = 1024  # bytes of a model beyond which its weights are written into a second file, in these tests


class Zygote:
    """The process that forks the commands, with the shim in it."""

    def __init__(self, scratch: Path):
        self.scratch = scratch
        shim = scratch / "shim.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "shim.c", "-ldl"], check=True)
        environment = os.environ | {
            "LD_PRELOAD": str(shim),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MPLCONFIGDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        }
        self._process = subprocess.Popen(
            [sys.executable, HERE / "zygote.py"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip

    def runs(self, *runs: Run) -> list[dict[str, Any]]:
        """The ends of commands that are started together: code (minus a signal), what they said, their calls, seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([{"scratch": str(self.scratch), **run} for run in runs]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def zygote() -> Iterator[Zygote]:
    """A zygote whose scratch anybody may enter: some children are somebody else."""
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        os.chmod(folder, 0o755)
        running = Zygote(Path(folder))
        try:
            yield running
        finally:
            running.close()


# ── what they work on ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Command:
    """A command line that writes into a folder."""

    name: str
    arguments: Callable[
        [Path, Path, int], list[object]
    ]  #: of the materials, the folder, and which of two variants
    old: Callable[[Path, Path], None]  #: puts into the folder what stands there before
    main: str  #: the file that others are for
    largest_proto: int | None = None
    whole: bool = False  #: the folder `main` is new as a whole, or not there
    slow: bool = False  #: takes more than a moment

    def run(self, materials: Path, folder: Path, variant: int = 0, **fault: Any) -> Run:
        arguments = [str(argument) for argument in self.arguments(materials, folder, variant)]
        beyond = {} if self.largest_proto is None else {"largest_proto": self.largest_proto}
        return {"folder": str(folder), "arguments": arguments, **beyond, **fault}


def materials(running: Zygote, folder: Path) -> Path:
    """Models, data and converted files that the commands read; nothing below is written again."""
    onnx.save(net(), folder / "net.onnx")
    x, y = rows(160, seed=0)
    np.savez(folder / "rows.npz", x=x)
    np.save(folder / "labels.npy", y)
    np.savez(folder / "few.npz", x=x[:20])
    np.save(folder / "few_labels.npy", y[:20])
    for run in (
        CONVERT.run(folder, folder, 2),
        CONVERT.run(folder, folder, 2, largest_proto=LOW),
    ):
        run["arguments"][-1] = str(folder / ("beyond.onnx" if "largest_proto" in run else "converted.onnx"))
        (end,) = running.runs(run)
        assert end["code"] == 0, end["said"]
    source = builder_folder(folder / "built", 1)
    (folder / "corpus.txt").write_text("\n".join(sentences(40, 0, 20, 60)))
    converted = [
        "convert", source, "--calib", folder / "corpus.txt", "--tokenizer", source.with_name("tokenizer.json"),
        "--seq-len", 16, "--task", "logits=tokens", "--top-k", 20, "--m", 40, "--k", 5, "-o", source.with_name("net.onnx"),
    ]  # fmt: skip
    (end,) = running.runs({"folder": str(folder), "arguments": list(map(str, converted))})
    assert end["code"] == 0, end["said"]
    return folder


def _file(*names: str) -> Callable[[Path, Path], None]:
    """Something of each name that nobody has asked to be gone."""

    def put(_: Path, folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(f"what was in {name} before".encode() * 50)

    return put


def _copy(name: str, other: str) -> Callable[[Path, Path], None]:
    """A copy of a converted file and of its weights."""

    def put(materials: Path, folder: Path) -> None:
        shutil.copy(materials / name, folder / other)
        model = onnx.load(materials / name, load_external_data=False)
        places = {
            entry.value
            for tensor in model.graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
        for place in places:  # under the name that the model says
            shutil.copy(materials / place, folder / place)

    return put


def _empty(_: Path, folder: Path) -> None:
    (folder / "package").mkdir()


def _convert(materials: Path, folder: Path, variant: int) -> list[object]:
    return [
        "convert", materials / "net.onnx", "--calib", materials / "rows.npz", "--m", 100 + variant, "--k", 5,
        "-o", folder / "model.onnx",
    ]  # fmt: skip


def _beyond(materials: Path, folder: Path, variant: int) -> list[object]:
    return [*_convert(materials, folder, variant)[:-1], folder / "beyond.onnx"]


def _threshold(name: str) -> Callable[[Path, Path, int], list[object]]:
    return lambda _, folder, variant: ["threshold", folder / name, "--quantile", (0.8, 0.7)[variant]]


def _run(name: str) -> Callable[[Path, Path, int], list[object]]:
    return lambda materials, folder, variant: [
        "run", materials / "converted.onnx", "--data", materials / ("few.npz", "rows.npz")[variant], "-o", folder / name,
    ]  # fmt: skip


def _evaluate(*wanted: object) -> Callable[[Path, Path, int], list[object]]:
    def arguments(materials: Path, folder: Path, variant: int) -> list[object]:
        data = (("few.npz", "few_labels.npy"), ("rows.npz", "labels.npy"))[variant]
        given = [part if str(part).startswith("--") else folder / str(part) for part in wanted]
        return ["evaluate", materials / "converted.onnx", "--data", materials / data[0], "--labels", materials / data[1], *given]  # fmt: skip

    return arguments


def _collect(materials: Path, folder: Path, variant: int) -> list[object]:
    return [
        "collect", materials / "net.onnx", "--calib", materials / "rows.npz", "--shard", ("1/2", "2/2")[variant], "-o",
        folder / "part.npz",
    ]  # fmt: skip


def _package(materials: Path, folder: Path, variant: int) -> list[object]:
    return ["package", materials / "built" / "net.onnx", "--for", "genai", "-o", folder / "package"]


CONVERT = Command("convert", _convert, _file("model.onnx"), "model.onnx", slow=True)
COMMANDS = (
    CONVERT,
    Command("convert, weights outside", _beyond, _copy("beyond.onnx", "beyond.onnx"), "beyond.onnx", LOW, slow=True),
    Command("threshold", _threshold("model.onnx"), _copy("converted.onnx", "model.onnx"), "model.onnx"),
    Command("threshold, weights outside", _threshold("beyond.onnx"), _copy("beyond.onnx", "beyond.onnx"), "beyond.onnx", LOW),
    Command("run -o .npz", _run("answers.npz"), _file("answers.npz"), "answers.npz"),
    Command("run -o .csv", _run("answers.csv"), _file("answers.csv"), "answers.csv"),
    Command("run -o .json", _run("answers.json"), _file("answers.json"), "answers.json"),
    Command("evaluate --report", _evaluate("--report", "page.html"), _file("page.html"), "page.html", slow=True),
    Command("evaluate --figures", _evaluate("--figures", "figures"), _file("notes.txt"), "notes.txt", slow=True),
    Command("collect", _collect, _file("part.npz"), "part.npz"),
    Command("package", _package, _empty, "package", whole=True),
)  # fmt: skip


# ── what must hold ────────────────────────────────────────────────────────────────────────────


def snapshot(folder: Path) -> Snapshot:
    """What is in every file below a folder; what is temporary is not looked into."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if PREFIX not in name}


def strays(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob(f"{PREFIX}*"))


def state(command: Command, now: Snapshot, before: Snapshot, *afters: Snapshot) -> str:
    """`old` or `new`, of which every file is one as a whole; an AssertionError says what is lost."""
    if now in afters:  # also where `main` itself does not change
        return "new"
    for after in (before, *afters):
        if command.whole:
            fits = now == after
        else:
            fits = now.get(command.main) == after.get(command.main)
            fits = fits and all(
                now.get(name) == held for name, held in after.items() if name.endswith(".data")
            )
        if fits:
            break
    else:
        raise AssertionError(f"neither the old {command.main} nor the new one is there, but {sorted(now)}")
    for name, held in now.items():
        kinds = {found.get(name) for found in (before, *afters)}
        assert held in kinds, f"{name} is neither old nor new"
    for name in before:
        may_go = name.endswith(".data") and after is not before
        assert name in now or may_go, f"{name} is gone"
    return "old" if after is before else "new"
