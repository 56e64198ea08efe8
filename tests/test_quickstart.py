"""docs/quickstart.md says what works: its commands and its Python run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT

from gapa_onnx.cli import main

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where the page's files are: the example models, and held-out data under its names."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    held_out = np.load(ROOT / "models" / "digits_cnn_heldout.npz")
    for name in ("test.npz", "held_out.npz"):
        np.savez(name, image=held_out["image"])
    for name in ("test_labels.npy", "held_out_labels.npy"):
        np.save(name, held_out["labels"])
    Path("strange.npz").symlink_to(ROOT / "models" / "digits_cnn_noise.npz")
    diabetes = np.load(ROOT / "models" / "diabetes_mlp_heldout.npz")
    Path("price.onnx").symlink_to(ROOT / "models" / "diabetes_mlp.onnx")
    np.save("inputs.npy", diabetes["features"])
    np.save("prices.npy", diabetes["labels"])
    return tmp_path


def test_the_commands(folder, capsys):
    commands = re.findall(r"^\$ gapa-onnx (.*)$", PAGE.replace("\\\n", ""), re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        assert main(shlex.split(command, comments=True)) == 0, command
    assert (folder / "report.html").stat().st_size > 10_000
    assert "progression_total_var" in capsys.readouterr().out


def test_the_python(folder):
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "quickstart.md", "exec"), {})
    assert (folder / "report.html").exists()
