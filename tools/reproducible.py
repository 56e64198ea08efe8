"""Build the wheels of the commit that is checked out in two new folders, and compare the bytes: `make reproducible`.

The folders have names of different lengths, and each build starts with an empty cache of the compiler. Takes twice as
long as a release; `--target` is as of tools/release.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        made = [build(Path(scratch) / name) for name in ("one", "the-other-folder")]
    names = sorted(made[0].keys() | made[1].keys())
    differing = [name for name in names if made[0].get(name) != made[1].get(name)]
    for name in names:
        print(f"{'DIFFERS' if name in differing else 'equal'}  {name}")
    return 1 if differing else 0


def build(folder: Path) -> dict[str, bytes]:
    """The wheels of a build in a folder, by their names."""
    checkout, wheels = folder / "checkout", folder / "wheels"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    command = [sys.executable, "tools/release.py", "--to", str(wheels), *sys.argv[1:]]
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(folder / "cache"), "ZIG_LOCAL_CACHE_DIR": str(folder / "local")}
    subprocess.run(command, cwd=checkout, check=True, env={**os.environ, **caches})
    return {path.name: path.read_bytes() for path in wheels.iterdir()}


if __name__ == "__main__":
    sys.exit(main())
