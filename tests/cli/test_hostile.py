"""The command line against machines, models and data that mean no good: an answer, or a sentence and exit code 2."""

from __future__ import annotations

import ast
import csv
import errno
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import house
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from rich.text import Text
from support.paths import MODELS

from gapa_onnx.cli import main
from gapa_onnx.cli.answer_files import harmless, member_name, writer
from gapa_onnx.cli.console import console

MODEL = MODELS / "digits_mlp.onnx"


def call(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command in this process."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


# ------------------------------------------------------------------ the machine


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/x"), "/data/x: Permission denied"),
        (MemoryError(), "not enough memory"),
    ],
)
def test_what_the_machine_refuses_is_a_sentence(capsys, monkeypatch, error, said):
    def refusing(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr("gapa_onnx.model.load.read_proto", refusing)
    code, out, err = call(capsys, "inspect", MODEL)
    assert code == 2 and not out
    assert err.startswith("error: ") and said in err and "\nhint: " in err and "Traceback" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_reader_that_has_gone_ends_the_program_quietly(tmp_path):
    command = [sys.executable, "-m", "gapa_onnx.cli", "inspect", str(MODEL), "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


# ------------------------------------------------------------------ names

NAMES = (
    "y",
    "file",
    "allow_pickle",
    "=cmd|' /C calc'!A0",
    "../../../tmp/out",
    "/etc/passwd",
    "a/b",
    "a%2Fb",
    "back\\slash",
    "red\x1b[31m",
    "\x1b]0;title\x07",
    "two\nlines",
    "turned\u202e",
    "@SUM(1)",
)


def model_with_outputs(path: Path, names: Sequence[str]) -> Path:
    """x passed on to outputs of these names, each times its own number."""
    nodes, weights = [], []
    for number, name in enumerate(names):
        weights.append(numpy_helper.from_array(np.array([number + 1], np.float32), f"w{number}"))
        nodes.append(helper.make_node("Mul", ["x", f"w{number}"], [name]))
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 2]) for name in ("x", *names)]
    graph = helper.make_graph(nodes, "names", ports[:1], ports[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def named(tmp_path: Path) -> tuple[Path, Path]:
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, 4]], np.float32))
    return model_with_outputs(tmp_path / "names.onnx", NAMES), tmp_path / "x.npy"


def test_an_archive_has_every_output_whatever_its_name(capsys, named, tmp_path):
    model, data = named
    code, out, err = call(capsys, "run", model, "--data", data, "-o", tmp_path / "out.npz")
    assert (code, err) == (0, "")
    with np.load(tmp_path / "out.npz") as found:
        assert len(found.files) == len(NAMES)
        for number, name in enumerate(NAMES):
            np.testing.assert_array_equal(found[member_name(name)], [[number + 1, 2 * number + 2],
                                                                     [3 * number + 3, 4 * number + 4]])  # fmt: skip
    with zipfile.ZipFile(tmp_path / "out.npz") as archive:
        for member in archive.namelist():
            parts = PurePosixPath(member).parts
            assert ".." not in parts and parts[0] != "/" and "\\" not in member and member.isprintable()


def test_members_are_called_as_outputs_are_unless_they_would_lead_elsewhere():
    assert [member_name(name) for name in ("y_var", "a/b", "a.b:0")] == ["y_var", "a/b", "a.b:0"]
    assert len({member_name(name) for name in (*NAMES, "%61/b", "a%252Fb")}) == len(NAMES) + 2


def test_a_table_holds_no_formula(capsys, named, tmp_path):
    model, data = named
    assert call(capsys, "run", model, "--data", data, "-o", tmp_path / "out.csv")[0] == 0
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert len(header) == 2 * len(NAMES) and [len(row) for row in rows] == [len(header)] * 2
    assert not [cell for cell in header if cell[0] in "=+-@\t\r" or "\x1b" in cell]
    assert "'=cmd|' /C calc'!A0[0]" in header
    assert harmless("-1 apple") == "'-1 apple" and harmless("apple") == "apple"


def test_text_in_a_table_is_no_formula_either(tmp_path):
    writer(tmp_path / "out.csv")({"label": np.array(["=1+1", "cat"], object), "score": np.array([-1.5, 2.0])})
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["label", "score"], ["'=1+1", "-1.5"], ["cat", "2.0"]]


@pytest.mark.parametrize("command", ["run", "inspect", "convert"])
def test_no_name_reaches_the_terminal_as_a_command(capsys, named, command):
    model, data = named
    arguments = {"run": ["--data", data], "inspect": [], "convert": ["--calib", data, "--sites", "\x1b[2J"]}
    code, out, err = call(capsys, command, model, *arguments[command])
    assert code == (2 if command == "convert" else 0)
    assert "\x1b" not in out + err and "\x07" not in out + err and "\u202e" not in out + err
    shown = out + err
    assert r"\x1b[" in shown and "\nlines" not in shown


def test_a_trace_is_no_command_either(capsys, named):
    model, data = named
    code, _, err = call(capsys, "--debug", "convert", model, "--calib", data, "--sites", "\x1b[2J")
    assert code == 2 and "Traceback" in err and "\x1b" not in err


def test_styles_are_still_there_on_a_terminal():
    screen = console()
    screen = type(screen)(force_terminal=True, color_system="standard", file=io.StringIO(), width=80)
    screen.print(Text("bold \x1b[2J", "bold"))
    assert screen.file.getvalue() == "\x1b[1mbold \\x1b[2J\x1b[0m\n"


def test_all_that_is_printed_goes_through_the_console():
    """Other than the console, only what this program says of itself: its version, its help, that it was interrupted."""
    printing = {
        (module.name, ast.unparse(node.args[0]) if node.args else "")
        for module in house.modules().values()
        if module.name.startswith("gapa_onnx.cli")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing == {
        ("gapa_onnx.cli", "f'{PROGRAM} {__version__}'"),
        ("gapa_onnx.cli", "context.get_help()"),
        ("gapa_onnx.cli", "'interrupted'"),
        ("gapa_onnx.cli.console", "json.dumps(answer, indent=2, allow_nan=False)"),
    }
