"""The library and the file on other onnxruntime releases, each in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.environments import python_with
from support.paths import MODELS

import gapa_onnx

# Runs there: no gapa_onnx, only onnxruntime and numpy.
SCRIPT = """
import sys
import numpy as np
import onnxruntime as ort
model, library, rows, out = sys.argv[1:]
options = ort.SessionOptions()
if library:
    options.register_custom_ops_library(library)
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
answers = session.run(["logits", "logits_var"], {"pixels": np.load(rows)})
np.savez(out, *answers)
print(ort.__version__)
"""


def python_of(version: str) -> Path:
    """The interpreter of an environment with this onnxruntime."""
    numpy = "numpy<2" if version < "1.19" else "numpy"  # built before numpy 2 existed
    return python_with(version, f"onnxruntime=={version}", numpy)


@pytest.fixture(scope="module")
def converted(digits_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    shutil.copy(digits_file, folder / "model.onnx")
    np.save(folder / "rows.npy", np.load(MODELS / "digits_mlp_heldout.npz")["pixels"])
    return folder


def run_with(version: str, folder: Path, library: Path | None) -> subprocess.CompletedProcess:
    arguments = [
        str(folder / "model.onnx"),
        str(library or ""),
        str(folder / "rows.npy"),
        str(folder / "out.npz"),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [python_of(version), "-c", SCRIPT, *arguments], capture_output=True, text=True, env=environment
    )


NIGHTLY = [pytest.param(version, marks=pytest.mark.nightly) for version in ("1.20.1", "1.24.4")]


@pytest.mark.parametrize("version", ["1.17.3", *NIGHTLY])  # by day the oldest, which has the least
@pytest.mark.parametrize("native", [True, False], ids=["native", "portable"])
def test_same_answer_on_other_releases(converted, version, native):
    library = gapa_onnx.library_path()
    if native and library is None:
        pytest.skip("the native library is not built")
    done = run_with(version, converted, library if native else None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == version
    here = gapa_onnx.session(converted / "model.onnx")
    rows = np.load(converted / "rows.npy")
    logits, var = here.run(["logits", "logits_var"], {"pixels": rows})
    with np.load(converted / "out.npz") as answers:
        # The query itself is onnxruntime's own work and differs in its last bits between releases:
        # 64 products of order 1 summed in float32, then s follows smoothly.
        np.testing.assert_allclose(answers["arr_0"], logits, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(answers["arr_1"], var, rtol=2e-3, atol=1e-6)


@pytest.mark.nightly
def test_older_releases_are_refused_with_a_sentence(converted):
    library = gapa_onnx.library_path()
    if library is None:
        pytest.skip("the native library is not built")
    done = run_with("1.16.3", converted, library)
    assert done.returncode == 1  # an exception, not a crash
    assert "1.17" in done.stderr
    assert "onnxruntime" in done.stderr
