"""Run mypy on the packages as they are installed: cli/ is gapa_onnx.cli, which no folder of the checkout shows.

So mypy reads a folder of links, in which it is. Messages name the files of the checkout.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "gapa_onnx"
NATIVE = "gapa_onnx_runtime"


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / PACKAGE
        package.mkdir()
        for entry in (*(ROOT / PACKAGE).iterdir(), ROOT / "cli"):
            link = package / entry.name
            if not link.is_symlink():  # a checkout may have a link to cli/ of its own
                link.symlink_to(entry)
        (Path(scratch) / NATIVE).symlink_to(ROOT / "runtime" / NATIVE)
        command = [
            sys.executable,
            "-m",
            "mypy",
            "-p",
            PACKAGE,
            "-p",
            NATIVE,
            "--no-color-output",
            *sys.argv[1:],
        ]
        command += [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"]
        run = subprocess.run(command, cwd=scratch, stdout=subprocess.PIPE, text=True)
    for line in run.stdout.splitlines():
        print(line.removeprefix(f"{PACKAGE}/") if line.startswith(f"{PACKAGE}/cli/") else line)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
