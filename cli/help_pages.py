"""docs/cli.md: the help of every command, as the commands print it.

    cd docs && python -m gapa_onnx.cli.help_pages > cli.md

(From the root of a checkout Python would import the bare folder gapa_onnx there, not the installed package.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import typer

COMMANDS = ("convert", "inspect", "verify", "run", "doctor")
COLUMNS = 100


def help_pages() -> str:
    """The page; the layout of help is typer's, so its version is part of it."""
    parts = [
        f"<!-- written by `python -m gapa_onnx.cli.help_pages`, typer {typer.__version__} -->",
        "# The command line",
        "Exit codes: 0 good, 1 a check failed, 2 usage error or something that is the user's to fix, 130 interrupt. "
        "Errors go to stderr as `error: …` and `hint: …`.",
        _block(),
    ]
    for command in COMMANDS:
        parts += [f"## gapa-onnx {command}", _block(command)]
    return "\n\n".join(parts) + "\n"


def _block(*arguments: str) -> str:
    width = str(COLUMNS)
    # TERMINAL_WIDTH is typer's, COLUMNS rich's; GITHUB_ACTIONS and the like make typer force colours.
    forced = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in forced}
    environment |= {"TERMINAL_WIDTH": width, "COLUMNS": width, "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "gapa_onnx.cli", *arguments, "--help"]
    elsewhere = tempfile.gettempdir()  # for the reason above
    text = subprocess.run(
        command, env=environment, cwd=elsewhere, check=True, capture_output=True, encoding="utf-8"
    ).stdout
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    return "\n".join(["```", *lines, "```"])


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(help_pages())
