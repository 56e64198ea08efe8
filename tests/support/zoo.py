"""Models that other people wrote, where they are at hand (../shared/zoo), with inputs made to fit."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime as ort
import pytest

from gapa_onnx.model.load import SourceModel
from gapa_onnx.sessions.runtime import session_options
from support.paths import SHARED

FOLDER = SHARED / "zoo"
MANIFEST = FOLDER / "manifest.json"

SLOW = ("Multilingual_PP-OCRv3_det", "speechmos__sig_bak")  # 960 x 960 pixels, 9 s of sound: seconds per run


def names() -> list[str]:
    """Files of the models that onnxruntime runs, smallest first."""
    if not MANIFEST.exists():
        return []
    entries = [entry["file"] for entry in json.loads(MANIFEST.read_text()) if entry["onnxruntime"] == "run"]
    return sorted(entries, key=lambda name: (FOLDER / name).stat().st_size)


def by_day(largest: int, most: float = float("inf")) -> list:
    """Parameters of a test: the names of files below `most` bytes, those from `largest` on marked for the night."""
    sizes = {name: (FOLDER / name).stat().st_size for name in names()}
    nightly = pytest.mark.nightly
    return [
        pytest.param(name, marks=() if size < largest else nightly)
        for name, size in sizes.items()
        if size < most
    ]


def free_batch(source: SourceModel) -> bool:
    """Whether the number of rows is up to the caller: declared so, and found true (one file lies)."""
    if not source.inputs or any(not spec.shape or isinstance(spec.shape[0], int) for spec in source.inputs):
        return False
    session = ort.InferenceSession(source.proto.SerializeToString(), session_options())
    try:
        session.run(None, feeds(source, 3, seed=0))
    except Exception:  # onnxruntime has no common base class for its errors
        return False
    return True


def feeds(source: SourceModel, rows: int, seed: int) -> dict[str, np.ndarray]:
    """One batch of inputs: normal numbers, and small whole numbers where indices or lengths are meant."""
    rng = np.random.default_rng(seed)
    sizes: dict[str, int] = {}
    batch = {}
    for spec in source.inputs:
        shape = []
        for axis, size in enumerate(spec.shape or ()):
            if not isinstance(size, int):
                free = rows if axis == 0 else _free_size(spec.name, source)
                size = sizes.setdefault(size, free) if size else free  # a symbol means one size everywhere
            shape.append(size)
        batch[spec.name] = _values(rng, spec, shape, source)
    return batch


def _free_size(name: str, source: SourceModel) -> int:
    audio = any(word in source.label for word in ("asr", "openwakeword__mel", "silero", "swift_f0"))
    if "seal_det" in source.label:
        return 160  # below it the deepest maps are constant
    return 4000 if audio and "state" not in name else 64


def _values(rng: np.random.Generator, spec, shape: list[int], source: SourceModel) -> np.ndarray:
    if spec.dtype == bool:
        return np.ones(shape, bool)
    if np.issubdtype(spec.dtype, np.floating):
        return rng.standard_normal(shape).astype(spec.dtype)
    if "len" in spec.name:
        return np.full(shape, _free_size(spec.name, source), spec.dtype)
    if spec.name == "sr":
        return np.full(shape, 16000, spec.dtype)
    return rng.integers(0, 5, size=shape).astype(spec.dtype)
