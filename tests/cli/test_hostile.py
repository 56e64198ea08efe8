"""The command line against machines, models and data that mean no good: an answer, or a sentence and exit code 2."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from support.paths import MODELS

from gapa_onnx.cli import main

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
