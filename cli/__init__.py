"""The command line: thin commands over the library. Only this package prints.

Exit codes: 0 good, 1 a check failed, 2 usage error or something that is the user's to fix, 130 interrupt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

from gapa_onnx.cli.bench import bench
from gapa_onnx.cli.collect import collect
from gapa_onnx.cli.console import report, trace, warnings_as_sentences
from gapa_onnx.cli.convert import convert
from gapa_onnx.cli.doctor import doctor
from gapa_onnx.cli.evaluate import evaluate
from gapa_onnx.cli.inspect import inspect
from gapa_onnx.cli.package import package
from gapa_onnx.cli.run import run
from gapa_onnx.cli.threshold import threshold
from gapa_onnx.cli.verify import verify
from gapa_onnx.cli.watch import watch
from gapa_onnx.errors import UserError, of_a_missing_runtime

PROGRAM = "gapa-onnx"
INTERRUPTED = 130
CUT_OFF = 141  # as a shell says of a program whose reader has gone

# typer has carried click inside itself since 0.26; before, it depended on it. The class is the same, and it has
# all that is read of it here in common with BadParameter, which is one of its kinds.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    convert,
    collect,
    inspect,
    verify,
    run,
    evaluate,
    threshold,
    watch,
    package,
    bench,
    doctor,
):
    app.command()(command)


@dataclass
class _Globals:
    """Options that stand before the command."""

    debug: bool = False


def _print_version(wanted: bool) -> None:
    if wanted:
        from gapa_onnx import __version__

        print(f"{PROGRAM} {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _before_command(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Honest error bars for any trained ONNX model: one file, the same predictions, bit for bit."""
    context.obj.debug = debug
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bugs of ours end in a Python traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has no ± must not end a conversion
    chosen = _Globals()
    command = typer.main.get_command(app)
    try:
        with warnings_as_sentences():
            code = command.main(
                args=None if arguments is None else list(arguments),
                prog_name=PROGRAM,
                standalone_mode=False,
                obj=chosen,
            )
        sys.stdout.flush()  # here, where it is known what to do if nobody reads it
    except (BrokenPipeError, SystemExit) as error:
        return _cut_off(error)
    except (UserError, _UsageError, OSError, MemoryError) as error:
        if chosen.debug and not isinstance(error, _UsageError):
            trace()
        report(*_sentence(error))
        return 2
    except Exception as error:
        if chosen.debug:
            trace()
        report(*_unexpected(arguments, error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code or 0


def _sentence(error: Exception) -> tuple[str, str | None]:
    """What is the user's to fix, or the machine's, and what to do about it."""
    if isinstance(error, UserError):
        return error.message, error.hint
    if isinstance(error, _UsageError):
        path = error.ctx.command_path if error.ctx else PROGRAM
        return error.format_message(), f"`{path} --help` lists what it takes"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", "make room, or see to the permissions, and call again"
    return "there is not enough memory", "give a smaller `batch_size`, less data or a smaller model"


def _unexpected(arguments: Sequence[str] | None, error: Exception) -> tuple[str, str | None]:
    """What nobody has expected, where onnxruntime is missing or a model is wrong; raised again where not, which is a bug of ours."""
    missing = of_a_missing_runtime(error)
    if missing is not None:
        return _sentence(missing)
    from gapa_onnx.sessions.inference import told_against

    for given in sys.argv[1:] if arguments is None else arguments:
        wrong = told_against(Path(given)) if given.endswith(".onnx") and Path(given).is_file() else None
        if wrong is not None:
            return f"{given} is damaged: {wrong}", "export the model again"
    raise error


def _cut_off(error: BrokenPipeError | SystemExit) -> int:
    """The end of a program whose reader has seen enough, of which click makes an exit; any other exit goes on."""
    if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CUT_OFF
