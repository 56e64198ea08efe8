"""`gapa-onnx bench`: what a converted file costs beside its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import console, note, print_json, progress_bar, quiet_runtime, say_if_portable
from gapa_onnx.errors import UserError

if TYPE_CHECKING:
    from gapa_onnx.measure.bench import Measurement, Refusal

BATCHES = (1, 32, 256)
_Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="What to feed: its first rows, repeated to fill a batch. Without it inputs are made up: normal "
        "numbers, and zeros where whole numbers are wanted.",
    ),
]
_Batches = Annotated[
    str | None,
    typer.Option(
        "--batch-size",
        "--batch",
        metavar="N,…",
        help="Rows per run; 1,32,256 if not given, or as the data were given where the model takes nothing else.",
        show_default=False,
    ),
]
_Threads = Annotated[str, typer.Option("--threads", metavar="N,…", help="Threads that onnxruntime may use.")]
_Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        metavar="N",
        help="Times that each model has its turn; a few seconds' worth if not given.",
        show_default=False,
    ),
]


@options.preparing_options()
def bench(
    source: options.Source,
    out: options.Converted,
    *,
    data: _Data = None,
    batch: _Batches = None,
    threads: _Threads = "1",
    rounds: _Rounds = None,
    preparation: options.Prepared,
    as_json: options.Json = False,
) -> int:
    """Measure the cost ratio of a converted file to its source, with the source against itself as control.

    The three take turns in one process. Where the source differs from itself by more than 0.03, no figure is
    given, and the exit code is 1.
    """
    from gapa_onnx.measure.bench import Measurement, measure, require_pair
    from gapa_onnx.measure.feeds import fixed_batch
    from gapa_onnx.model.load import load
    from gapa_onnx.sessions.runtime import library_path

    sizes, counts = _counts("--batch", batch), _counts("--threads", threads)
    quiet_runtime()
    original = load(source)
    require_pair(original, out)
    fixed = fixed_batch(original.inputs)
    found: list[Measurement | Refusal] = []
    with progress_bar() as progress:
        for threads_now in counts:
            for rows in sizes or (BATCHES if fixed is None else (fixed,)):
                found.append(
                    measure(
                        source,
                        out,
                        batch=rows,
                        threads=threads_now,
                        data=data,
                        rounds=rounds,
                        images=preparation.images,
                        text=preparation.text,
                        progress=_saying(progress, f"batch {rows}"),
                    )
                )
                if found[-1].batch != rows:  # the model takes the data only as they were given
                    break
    say_if_portable()
    if library_path() is not None and any(getattr(entry, "native", None) is False for entry in found):
        note(
            "the native library is older than this file: the portable function was measured, which is slower"
        )
    refused = [entry for entry in found if not isinstance(entry, Measurement)]
    records = [record(entry) for entry in found]
    if as_json:
        files = {"source": str(source), "converted": str(out), "data": data}
        print_json({**files, **machine(), "measurements": records})
    else:
        _show(records, str(source), str(out), data)
        for entry in refused:
            note(f"batch {entry.batch}, threads {entry.threads}: {entry.reason}; {entry.hint}")
    return 1 if refused else 0


def _saying(progress: Callable[[str, float], None], which: str) -> Callable[[str, float], None]:
    """Progress that says which of several measurements it is about."""
    return lambda text, done: progress(f"{text}, {which}", done)


def record(found: Measurement | Refusal) -> dict[str, Any]:
    """A measurement as JSON; of a refusal all but the ratio, which is not to be trusted."""
    from gapa_onnx.measure.bench import Refusal

    comparison = asdict(found.comparison)
    answer = {"batch": found.batch, "threads": found.threads, **comparison}
    if isinstance(found, Refusal):
        withheld = dict.fromkeys(("ratio", "ratio_quartiles", "converted_seconds"))
        return {**answer, **withheld, "refused": found.reason, "parts": {}, "added": {}}
    rest = {"clock": found.clock, "native": found.native, "parts": found.parts, "added": found.added}
    return {**answer, "refused": None, **rest}


def machine() -> dict[str, Any]:
    """What a figure depends on beside the model."""
    import os
    import platform

    import onnxruntime

    from gapa_onnx import __version__

    return {
        "versions": {"gapa_onnx": __version__, "onnxruntime": onnxruntime.__version__},
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
    }


def _counts(option: str, text: str | None) -> tuple[int, ...]:
    """`1,32,256`, each once."""
    if text is None:
        return ()
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise UserError(f"{option} {text!r} is not a list of numbers", "for example 1,32,256") from error
    if min(numbers) < 1:
        raise UserError(f"{option} is {min(numbers)}; it must be at least 1")
    return numbers


# --------------------------------------------------------------------------- text


def _show(records: Sequence[Mapping[str, Any]], source: str, out: str, data: str | None) -> None:
    from rich.text import Text

    from gapa_onnx.cli.layout import lines, new_table

    screen = console()
    lines(("source", source), ("converted", out), ("data", data or "made up"))
    parts = list(dict.fromkeys(name for entry in records for name in entry["added"]))
    table = new_table()
    for heading in (
        "Batch",
        "Threads",
        "Source",
        "Ratio",
        "Quartiles",
        "Control",
        *map(str.capitalize, parts),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in records:
        ratio = "refused" if entry["refused"] else f"{entry['ratio']:.2f}"
        spread = "" if entry["refused"] else " … ".join(f"{q:.2f}" for q in entry["ratio_quartiles"])
        shares = [f"{entry['added'][name]:.0%}" if name in entry["added"] else "" for name in parts]
        control = Text(f"{entry['control']:.3f}", "bold red" if entry["refused"] else "")
        table.add_row(
            str(entry["batch"]),
            str(entry["threads"]),
            _seconds(entry["source_seconds"]),
            Text(ratio, "bold"),
            spread,
            control,
            *shares,
        )
    screen.print()
    screen.print(Text("cost: time over the source's; the control is the source over itself", "bold"))
    if parts:
        screen.print(f"{', '.join(parts)}: shares of the added time; search and solve are told apart roughly")
    screen.print(table)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
