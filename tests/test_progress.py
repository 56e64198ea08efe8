"""What several rooms use is defined once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gapa_onnx
from gapa_onnx.progress import silent


@pytest.mark.parametrize("definition", ["Progress = ", "QUANTILES = ", "def row_count\\("])
def test_what_rooms_share_is_defined_once(definition):
    package = Path(gapa_onnx.__file__).parent
    modules = [path for path in package.rglob("*.py") if "cli" not in path.relative_to(package).parts]
    found = [path for path in modules if re.search(f"^{definition}", path.read_text(), re.MULTILINE)]
    assert len(found) == 1, found


def test_silent_takes_any_progress():
    assert silent("fitting", 0.5) is None
