"""Where output goes: answers to stdout, everything else to stderr.

Names come from models and data that anybody may have made. Whatever would move the cursor, change colours or turn the
direction of writing is shown as Python writes it, in place of being done.
"""

from __future__ import annotations

import json
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from gapa_onnx.cli.flags import as_flags
from gapa_onnx.errors import DataWarning

PIPE_WIDTH = 200  # columns where there is no terminal to ask: lines that a program can still take apart


#: Categories of characters that a terminal obeys, or that nobody sees.
_ACTING = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


def visible(text: str, *, lines: bool = False) -> str:
    """The text with every character that a terminal would obey written out; `lines` may go on below."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c in kept or unicodedata.category(c) not in _ACTING else ascii(c)[1:-1] for c in text)


class _Visible(Console):
    """A console that only its own styles act upon."""

    def render_str(self, text: str, *arguments: Any, **choices: Any) -> Text:
        return super().render_str(visible(text), *arguments, **choices)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text, lines=True), segment.style)


def console(*, stderr: bool = False) -> Console:
    """A console that takes text as it is: names may hold brackets and colons."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if terminal else PIPE_WIDTH
    return _Visible(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def print_json(answer: Any) -> None:
    """The one object that `--json` promises. ASCII, so that any locale can carry it."""
    print(json.dumps(answer, indent=2, allow_nan=False))


def report(message: str, hint: str | None) -> None:
    """An error, and what to do about it."""
    _say("error", "bold red", message)
    if hint:
        _say("hint", "bold cyan", hint)


def trace() -> None:
    """Where the error that is being handled was met."""
    console(stderr=True).print(Text(traceback.format_exc().rstrip()), soft_wrap=True)


def note(message: str) -> None:
    _say("note", "bold", message)


def warn(message: str) -> None:
    _say("warning", "bold yellow", message)


def _say(kind: str, style: str, message: str) -> None:
    """A message of the library names settings; here they are flags."""
    console(stderr=True).print(Text.assemble((f"{kind}: ", style), as_flags(message)), soft_wrap=True)


@contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """What the library warns of goes to stderr in our own form, each sentence once."""
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
            if issubclass(category, DataWarning):
                warn(str(message))
            else:
                show_others(message, category, *where, **rest)

        warnings.simplefilter("default", DataWarning)
        warnings.showwarning = show
        yield


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr if that is a terminal: called with what is being done and how much of it is done."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if not sys.stderr.isatty():
        yield lambda text, done: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def advance(text: str, done: float) -> None:
            # Nothing done yet, or the size of the data is not known: a bar that only pulses.
            bar.update(task, description=text, total=1.0 if done else None, completed=done)

        yield advance


def quiet_runtime() -> None:
    """Keep what onnxruntime logs off stderr, which is not for eyes and tells errors a second time, and the library's about the portable function."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    warnings.filterwarnings("ignore", message=".*running the portable function", category=RuntimeWarning)


def say_if_portable() -> None:
    """What that warning says, in our own form; a command calls it once."""
    from gapa_onnx.sessions.runtime import library_path

    if library_path() is None:
        note("the native library is missing: running the portable function, which is slower")
