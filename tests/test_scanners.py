"""Scanners of model files, as they are published, on converted files: docs/scanners.md tells what they say.

They run in an environment of their own, told not to tell anybody else what they see.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.decoders import decoder, token_rows
from support.environments import python_with
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.model import protos

pytestmark = pytest.mark.nightly
QUIET = {"PROMPTFOO_DISABLE_TELEMETRY": "1", "NO_ANALYTICS": "1"}
WEIGHTS = ("Weight Distribution Analysis Coverage", "Weight Distribution Anomaly Detection")


@pytest.fixture(scope="module")
def scanners() -> Path:
    """The folder of their programs."""
    return python_with("scanners", "modelscan", "picklescan", "fickling", "modelaudit", "onnx").parent


@pytest.fixture(scope="module", params=["one file", "weights outside"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scanned") / "converted.onnx"
    if request.param == "one file":
        gapa_onnx.convert(
            MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz", path, m=200, k=20
        )
        return path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protos, "LARGEST_PROTO", 8192)
        gapa_onnx.convert(decoder(), token_rows(60, 8), path, m=100, k=10)
    assert len(list(path.parent.iterdir())) == 2
    return path


def said(program: Path, *arguments: object, errors: bool = False) -> str:
    done = subprocess.run(
        [program, *map(str, arguments)],
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stderr if errors else done.stdout


def test_those_that_look_for_pickles_find_none(scanners: Path, converted: Path) -> None:
    assert "No issues found" in said(scanners / "modelscan", "-p", converted)
    assert "Infected files: 0" in said(scanners / "picklescan", "-p", converted)
    assert "No pickle files detected" in said(scanners / "fickling", "--check-safety", converted, errors=True)


def test_one_that_reads_onnx_has_remarks_about_numbers_only(scanners: Path, converted: Path) -> None:
    found = json.loads(said(scanners / "modelaudit", "scan", "--format", "json", converted))
    assert {issue["severity"] for issue in found["issues"]} <= {"info"}
    failed = {check["name"] for check in found["checks"] if check["status"] != "passed"}
    outside = len(list(converted.parent.iterdir())) == 2
    # of ONNX's own checker, which this scanner does not give files beside a model
    assert failed <= {*WEIGHTS, *(["ONNX Schema Validation"] if outside else [])}
    passed = {check["name"] for check in found["checks"] if check["status"] == "passed"}
    assert {
        "Custom Operator Domain Check", "Python Operator Detection", "JIT/Script Code Execution Detection",
        "Network Communication Detection", "Tensor Size Validation",
    } <= passed  # fmt: skip
    assert not outside or {"External Data Reference Check", "External Data Size Validation"} <= passed
