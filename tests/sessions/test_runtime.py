"""Sessions with and without the native library."""

from __future__ import annotations

import subprocess
import sys

from support.paths import MODELS

import gapa_onnx
from gapa_onnx.sessions.runtime import first_line

TWICE = """
import sys, warnings
warnings.simplefilter("always")
import gapa_onnx
for _ in range(2):
    gapa_onnx.session(sys.argv[1])
"""


def test_a_missing_library_is_said_once(monkeypatch):
    monkeypatch.setenv("GAPA_ONNX_LIBRARY", "/nowhere/libgapa_onnx.so")
    assert gapa_onnx.library_path() is None
    done = subprocess.run(
        [sys.executable, "-c", TWICE, MODELS / "digits_mlp.onnx"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr.count("native library is missing") == 1


def test_the_installed_package_has_its_library(monkeypatch):
    monkeypatch.delenv("GAPA_ONNX_LIBRARY", raising=False)
    path = gapa_onnx.library_path()
    assert path is not None and path.stat().st_size < 8_000_000


def test_first_line_drops_the_code():
    error = RuntimeError("[ONNXRuntimeError] : 1 : FAIL : Load model failed: no such op\nmore")
    assert first_line(error) == "Load model failed: no such op"
