"""Environments of their own, with other packages than those of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "runtimes"  # kept between runs: installing is most of the time


def python_with(name: str, *packages: str) -> Path:
    """The interpreter of an environment with these packages; skips where they cannot be installed."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "-q", *packages]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1]
            pytest.skip(f"{' and '.join(packages)} cannot be installed here: {last}")
        (folder / "ready").touch()
    return python
