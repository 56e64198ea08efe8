"""Processes that are killed at a chosen moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable

from gapa_onnx import files


def in_a_child(work: Callable[[], object]) -> int:
    """The exit code of this work in a process of its own; minus the signal that has ended it."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def killed_before(call: str, number: int, work: Callable[[], object]) -> Callable[[], None]:
    """The same work, which a signal ends right before a writer of files calls a function of the system so many times."""

    def doomed() -> None:
        real, calls = getattr(os, call), 0

        def counted(*arguments: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(files.os, call, counted)
        work()

    return doomed
