"""Where things are: the repository, its example models, and data that lie beside it on some machines."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
MODELS = ROOT / "models"
BENCHMARKS = ROOT / "benchmarks"
SHARED = ROOT.parent / "shared"  #: models and data of others; what needs them is skipped without them
