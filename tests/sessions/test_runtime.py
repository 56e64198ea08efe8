"""Sessions with and without the native library."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.sessions.inference import run_as_is
from gapa_onnx.sessions.runtime import first_line, open_session

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


def test_an_answer_does_not_keep_the_memory_of_its_session():
    """What onnxruntime gives out refers to its arena, which may be a thousand times as large."""
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[n, 2] x) => (float[n, 2] y, seq(float[n, 2]) z) {
        y = Abs(x)  z = SequenceConstruct(y, x) }"""
    opened = open_session(onnx.parser.parse_model(text), "the model")
    y, z = run_as_is(opened, None, {"x": np.ones((3, 2), np.float32)})
    assert [array.flags.owndata for array in (y, *z)] == [True, True, True]
    assert not opened.run(None, {"x": y})[0].flags.owndata  # else there is nothing to copy
