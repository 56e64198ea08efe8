"""Fixtures for all tests: example models that are converted once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import MODELS

import gapa_onnx


@pytest.fixture(scope="session")
def digits_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/digits_mlp.onnx, converted with 200 inducing points. Copy it before writing to it."""
    out = tmp_path_factory.mktemp("digits") / "digits.gapa.onnx"
    gapa_onnx.convert(MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz", out, m=200, k=20)
    return out
