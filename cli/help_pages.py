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

COMMANDS = (
    "convert",
    "collect",
    "inspect",
    "verify",
    "run",
    "evaluate",
    "threshold",
    "watch",
    "package",
    "bench",
    "doctor",
)
COLUMNS = 100
_END = "--- end of help ---"


def help_pages() -> str:
    """The page; the layout of help is typer's, so its version is part of it."""
    program, *commands = _captured()
    parts = [
        f"<!-- written by `python -m gapa_onnx.cli.help_pages`, typer {typer.__version__} -->",
        "# The command line",
        "Exit codes: 0 good, 1 a check failed, 2 usage error or something that is the user's to fix, "
        "130 interrupt. Errors go to stderr as `error: …` and `hint: …`.",
        program,
    ]
    for command, text in zip(COMMANDS, commands):
        parts += [f"## gapa-onnx {command}", text]
    return "\n\n".join(parts) + "\n"


def _captured() -> list[str]:
    """The help of the program and of each command, from a process of its own: typer asks the environment
    for width and colours when it is imported."""
    width = str(COLUMNS)
    forcing = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in forcing}
    environment |= {"TERMINAL_WIDTH": width, "COLUMNS": width, "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    calls = [["--help"], *([command, "--help"] for command in COMMANDS)]
    script = f"from gapa_onnx.cli import main\nfor call in {calls}: main(call), print({_END!r})"
    elsewhere = tempfile.gettempdir()  # see above
    text = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=elsewhere,
        check=True,
        capture_output=True,
        encoding="utf-8",
    ).stdout
    return [_block(part) for part in text.split(f"{_END}\n")[:-1]]


def _block(text: str) -> str:
    return "\n".join(["```", *(line.rstrip() for line in text.strip("\n").splitlines()), "```"])


if __name__ == "__main__":
    sys.stdout.buffer.write(help_pages().encode())
