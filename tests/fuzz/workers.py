"""Cases in another process, which may die: the next ones go on in a new one.

A worker is a module with `main(arguments)`: it reads numbers from stdin, one a line, and answers each with one line
of JSON on the stdout that it was started with. What is at hand when it dies, or when it takes too long, is told.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
DIED, SLOW = "died", "took too long"


class Worker:
    """One process and what it says."""

    def __init__(self, python: str, module: str, *arguments: str):
        self._command = [python, "-X", "faulthandler", "-m", module, *arguments]
        self._process: subprocess.Popen[str] | None = None

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=environment, cwd=TESTS,  # not the checkout, where the package is in parts
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        self._listening = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listening.start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def _listen(self, stream: Any) -> None:
        for line in stream:
            self._errors.append(line)
            del self._errors[:-200]

    def answer(self, number: int, seconds: float) -> tuple[str, Any]:
        """("", what it said), or how it ended and the last that it said on stderr."""
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=seconds)
        except (BrokenPipeError, OSError):
            line = None
        except queue.Empty:
            self.end()
            return SLOW, ""
        if line is not None:
            return "", json.loads(line)
        code = self._process.wait()
        self._listening.join(5)
        said = "".join(self._errors)
        self.end()
        return DIED, f"exit code {code}\n{said[-3000:]}"

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def serve(case: Callable[[int], Any]) -> None:
    """Answers until there are no more numbers. Whatever the case prints does not get in between."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        out.write(json.dumps(case(int(line))) + "\n")
        out.flush()
