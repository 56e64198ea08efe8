"""Damaged models and data through the commands, in process: an answer, or a sentence and exit code 2; never a trace.

python -m fuzz.sources FOLDER       answers numbers of cases; FOLDER has what `prepare` wrote
python -m fuzz.sources FOLDER 17    one case, and what the command says
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from support.small_models import parse

from fuzz import damage, tally, workers
from fuzz.tally import ROOT, Tally

NAME = "sources and data"
SECONDS = 60.0  # a case that takes longer is told
OUTCOMES = {
    "0": "exit code 0",
    "1": "exit code 1",
    "2": "a sentence, exit code 2",
    "onnxruntime died": "onnxruntime ended the process",
    workers.SLOW: "took longer than a minute",
    "trace": "a trace",
    "no sentence": "no sentence",
    workers.DIED: "ended the process otherwise",
}
BROKEN = ("trace", "no sentence", workers.DIED)

CLASSIFIER = """classifier (float[n, 4] x) => (float[n, 3] logits) {
    z = MatMul(x, w1)  a = Add(z, b1)  h = Relu(a)  logits = MatMul(h, w2) }"""
IMAGES = """images (float[n, 1, 6, 6] image) => (float[n, 3] probabilities) {
    z = Conv<kernel_shape = [3, 3]>(image, k1)  h = Relu(z)  p = GlobalAveragePool(h)  f = Flatten(p)
    l = MatMul(f, w3)  probabilities = Softmax<axis = 1>(l) }"""
ROWS = 40


def source_models() -> dict[str, onnx.ModelProto]:
    rng = np.random.default_rng(0)
    w1, b1, w2 = rng.normal(size=(4, 8)), rng.normal(size=8), rng.normal(size=(8, 3))
    k1, w3 = rng.normal(size=(4, 1, 3, 3)), rng.normal(size=(4, 3))
    return {"classifier": parse(CLASSIFIER, w1=w1, b1=b1, w2=w2), "images": parse(IMAGES, k1=k1, w3=w3)}


def prepare(folder: Path) -> None:
    """Small models and data in all forms, sound as they are."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    import gapa_onnx

    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    images = rng.uniform(size=(ROWS, 1, 6, 6)).astype(np.float32)
    labels = rng.integers(0, 3, ROWS)
    for name, model in source_models().items():
        onnx.save(model, folder / f"{name}.onnx")
    np.save(folder / "x.npy", x)
    np.save(folder / "images.npy", images)
    np.savez(folder / "x.npz", x=x, labels=labels)
    np.savez_compressed(folder / "packed.npz", x=x, labels=labels)
    (folder / "x.pb").write_bytes(onnx.numpy_helper.from_array(x, "x").SerializeToString())
    rows = [[f"{value:.6g}" for value in row] + [str(label)] for row, label in zip(x, labels)]
    (folder / "x.csv").write_text(
        "\n".join([",".join(["x0", "x1", "x2", "x3", "label"]), *map(",".join, rows)]) + "\n"
    )
    table = pyarrow.table({"x": list(x), "label": labels})
    pyarrow.parquet.write_table(table, folder / "x.parquet")
    for form in ("png", "jpg", "bmp"):
        Image.fromarray(rng.integers(0, 256, (6, 6), np.uint8)).save(folder / f"image.{form}")
    np.save(folder / "labels.npy", labels)
    (folder / "labels.csv").write_text("label\n" + "\n".join(map(str, labels)) + "\n")
    (folder / "labels.txt").write_text("\n".join(map(str, labels)) + "\n")
    for name, data in (("classifier", "x.npy"), ("images", "images.npy")):
        gapa_onnx.convert(folder / f"{name}.onnx", folder / data, folder / f"{name}.gapa.onnx", m=12, k=4)


@dataclass
class Case:
    """A command line and what it is about."""

    about: str
    arguments: list[str]


class Maker:
    """Cases from what `prepare` wrote; each is written into a folder of its own."""

    def __init__(self, sound: Path, folder: Path, number: int):
        self.sound, self.folder, self.random = sound, folder, Random(f"sources/{number}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    def case(self) -> Case:
        kind = self.random.random()
        if kind < 0.35:
            return self.model()
        if kind < 0.6:
            return self.converted()
        return self.data()

    def model(self) -> Case:
        name = self.random.choice(("classifier", "images"))
        path = self._damaged_model(f"{name}.onnx")
        data = self.sound / ("x.npy" if name == "classifier" else "images.npy")
        command = self.random.choices(("inspect", "run", "convert", "bench"), (60, 25, 14, 1))[0]
        arguments = {
            "inspect": ["inspect", path],
            "run": ["run", path, "--data", data],
            "convert": [
                "convert",
                path,
                "--calib",
                data,
                "--m",
                "12",
                "--k",
                "4",
                "-o",
                self.folder / "out.onnx",
            ],
            "bench": ["run", path, "--data", data, "-o", self.folder / "out.npz"],
        }[command]
        return Case(f"{arguments[0]}, model", list(map(str, arguments)))

    def converted(self) -> Case:
        name = self.random.choice(("classifier", "images"))
        path = self._damaged_model(f"{name}.gapa.onnx", record=self.random.random() < 0.35)
        data = self.sound / ("x.npy" if name == "classifier" else "images.npy")
        command = self.random.choices(
            ("inspect", "run", "threshold", "evaluate", "verify"), (45, 25, 15, 5, 10)
        )[0]
        arguments = {
            "inspect": ["inspect", path, *(["--json"] if self.random.random() < 0.3 else [])],
            "run": ["run", path, "--data", data],
            "threshold": ["threshold", path],
            "evaluate": ["evaluate", path, "--data", data, "--labels", self.sound / "labels.npy"],
            "verify": ["verify", self.sound / f"{name}.onnx", path, "--data", data, "--rows", "4"],
        }[command]
        return Case(f"{command}, converted", list(map(str, arguments)))

    def data(self) -> Case:
        name = self.random.choice(
            ("x.npy", "x.npz", "packed.npz", "x.pb", "x.csv", "x.parquet", "image.png", "image.jpg", "image.bmp",
             "labels.npy", "labels.csv", "labels.txt")
        )  # fmt: skip
        path = self._damaged_data(name)
        form = name.partition(".")[2]
        pictures, labels = name.startswith("image"), name.startswith("labels")
        model = "images" if pictures else "classifier"
        if pictures:  # a folder of images, one of them damaged
            folder = self.folder / "images"
            folder.mkdir()
            path = path.rename(folder / path.name)
            shutil.copy(self.sound / name, folder / f"other.{form}")
            path = folder if self.random.random() < 0.7 else path
        converted = self.sound / f"{model}.gapa.onnx"
        if labels:
            rows = self.sound / "x.npy"
            return Case(
                f"evaluate, labels .{form}",
                list(map(str, ["evaluate", converted, "--data", rows, "--labels", path])),
            )
        command = self.random.choices(
            ("run", "threshold", "verify", "evaluate", "convert"), (80, 7, 5, 4, 4)
        )[0]
        arguments: list[Any] = {
            "run": ["run", converted, "--data", path],
            "threshold": [
                "threshold",
                converted,
                "--data",
                path,
                "--quantile",
                "0.9",
                "-o",
                self.folder / "out.onnx",
            ],
            "verify": ["verify", self.sound / f"{model}.onnx", converted, "--data", path, "--rows", "4"],
            "evaluate": ["evaluate", converted, "--data", path, "--labels", self.sound / "labels.npy"],
            "convert": ["convert", self.sound / f"{model}.onnx", "--calib", path, "--m", "12", "--k", "4"],
        }[command]
        if command == "convert":
            arguments += ["-o", self.folder / "out.onnx"]
        return Case(f"{command}, .{form}", list(map(str, arguments)))

    def _damaged_model(self, name: str, record: bool = False) -> Path:
        content, path = self._content(name), self.folder / "model.onnx"
        if not record and self.random.random() < 0.4:
            path.write_bytes(damage.some_bytes(content, self.random))
            return path
        model = onnx.ModelProto.FromString(content)
        if record:
            for entry in model.metadata_props:
                entry.value = damage.json_text(entry.value, self.random).encode("utf-8", "replace").decode()
        else:
            damage.a_message(model, self.random)
        path.write_bytes(model.SerializeToString())
        return path

    def _damaged_data(self, name: str) -> Path:
        content, path, form = self._content(name), self.folder / name, name.partition(".")[2]
        structural: dict[str, Callable[[bytes, Random], bytes]] = {
            "npy": _npy, "npz": _npz, "pb": _pb, "csv": _text, "txt": _text,
        }  # fmt: skip
        if form in structural and self.random.random() < 0.6:
            content = structural[form](content, self.random)
        else:
            content = damage.some_bytes(content, self.random)
        path.write_bytes(content)
        return path

    def _content(self, name: str) -> bytes:
        return _sound_bytes(self.sound / name)


@cache
def _sound_bytes(path: Path) -> bytes:
    return path.read_bytes()


def _text(content: bytes, random: Random) -> bytes:
    return damage.a_text(content.decode(), random).encode("utf-8", "replace")


def _npy(content: bytes, random: Random) -> bytes:
    """Another header over the same numbers."""
    (size,) = struct.unpack("<H", content[8:10])
    header = damage.a_text(content[10 : 10 + size].decode("latin1"), random).encode("utf-8", "replace")
    if random.random() < 0.3:
        header = random.choice((b"{'descr': '|O', 'fortran_order': False, 'shape': (40,), }\n",
                                b"{'descr': '<f4', 'fortran_order': True, 'shape': (-4, 40), }\n",
                                b"{'descr': '<f4', 'fortran_order': True, 'shape': (99999999999, 40), }\n",
                                b"{'descr': '<U4', 'fortran_order': False, 'shape': (40, 4), }\n",
                                b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (160,), }\n"))  # fmt: skip
    return content[:8] + struct.pack("<H", len(header) % 65536) + header + content[10 + size :]


def _npz(content: bytes, random: Random) -> bytes:
    """An archive with other members, one of them damaged inside."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(list(members))
    match random.randrange(4):
        case 0:
            members[random.choice(damage.WORDS).replace("\x00", "") or "x.npy"] = members.pop(name)
        case 1:
            members[name] = _npy(members[name], random)
        case 2:
            members[name] = damage.some_bytes(members[name], random)
        case 3:
            del members[name]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return out.getvalue()


def _pb(content: bytes, random: Random) -> bytes:
    tensor = onnx.TensorProto.FromString(content)
    damage.a_message(tensor, random)
    return tensor.SerializeToString()


def outcome(arguments: list[str]) -> tuple[str, str]:
    """How a command ends, and what it says."""
    from gapa_onnx.cli import main

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except BaseException as error:  # whatever gets out of the entry point is a trace
        import traceback

        return "trace", "".join(traceback.format_exception(error))[-3000:]
    said = err.getvalue()
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if "Traceback" in said or "\x1b" in out.getvalue() + said:
        return "trace", said[-3000:]
    if code not in (0, 1, 2) or (code == 2) != (len(errors) == 1):
        return "no sentence", f"exit code {code}\n{said[-3000:]}"
    return str(code), said


def run_case(sound: Path, number: int) -> dict[str, str]:
    case = Maker(sound, sound / f"case{number % 2}-{os.getpid()}", number).case()
    how, said = outcome(case.arguments)
    return {"about": case.about, "outcome": how, "said": said if how in BROKEN else ""}


def whose(said: str) -> str:
    """Who ended the process, by the Python frame that was on top."""
    frames = [line for line in said.splitlines() if line.strip().startswith("File ")]
    return "onnxruntime died" if frames and "onnxruntime" in frames[0] else workers.DIED


def fuzz(seconds: float, folder: Path, most: int = 1 << 62, keep: bool = True) -> Tally:
    """Goes on where it ended before, for so long."""
    tested = [
        ROOT / "gapa_onnx",
        ROOT / "cli",
        ROOT / "tests" / "fuzz" / "sources.py",
        ROOT / "tests" / "fuzz" / "damage.py",
    ]
    counted = tally.resumed(NAME, tally.code(tested)) if keep else Tally(tally.code(tested))
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    worker = workers.Worker(sys.executable, "fuzz.sources", str(folder))
    start, before = time.monotonic(), counted.seconds
    while time.monotonic() - start < seconds and counted.cases < most:
        ended, said = worker.answer(counted.cases, SECONDS)
        about, how = ("all", whose(said)) if ended == workers.DIED else ("all", ended)
        if not ended:
            about, how, said = said["about"], said["outcome"], said["said"]
        counted.count(about, how)
        if how not in ("0", "1", "2"):
            counted.failures.append(f"case {counted.cases}, {about}: {how}: {said}")
        counted.cases += 1
        counted.seconds = before + time.monotonic() - start
        if keep and counted.cases % 50 == 0:
            tally.keep(NAME, counted)
    worker.end()
    if keep:
        tally.keep(NAME, counted)
    return counted


def main(arguments: list[str]) -> None:
    sound = Path(arguments[0])
    if len(arguments) > 1:
        case = Maker(sound, sound / "shown", int(arguments[1])).case()
        print(" ".join(case.arguments))
        print("\n".join(outcome(case.arguments)))
        return
    workers.serve(lambda number: run_case(sound, number))


if __name__ == "__main__":
    main(sys.argv[1:])
