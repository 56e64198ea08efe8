"""`gapa-onnx convert`: a trained model in, the same model with error bars out."""

from __future__ import annotations

import functools
import glob
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import print_json, progress_bar, quiet_runtime, say_if_portable, warn
from gapa_onnx.cli.flags import flag
from gapa_onnx.errors import UserError
from gapa_onnx.settings import PAPER, Settings

if TYPE_CHECKING:
    from gapa_onnx.compiler import Conversion
    from gapa_onnx.fit.parts import Collected

_Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="OUT", help="Where to write; MODEL.gapa.onnx unless given."),
]


@options.settings_options()
@options.preparing_options("")
def convert(
    context: typer.Context,
    model: options.Model,
    calib: options.CalibOrParts = None,
    *,
    parts: options.Parts = None,
    engine: options.Engine = "local",
    address: options.Address = None,
    workers: options.Workers = None,
    out: _Out = None,
    settings: Settings,
    held_out: options.HeldOut = None,
    labels: options.Labels = None,
    targets: options.Targets = None,
    strange: options.Strange = None,
    budget: options.Budget = None,
    paper: options.Paper = False,
    batch_size: options.BatchSize = None,
    preparation: options.Prepared,
    allow_uncovered: options.AllowUncovered = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> int:
    """Give a trained model error bars; its predictions stay the same, bit for bit."""

    if paper:
        _refuse_beside_paper(context)
    out = _output(model, out)
    quiet_runtime()
    data: str | Collected
    if calib is None or parts is not None:
        data = _collected(context, parts)
    else:
        data = calib
    if dry_run and calib is not None:
        return _rehearse(model, calib, (held_out, targets, labels), out, settings, preparation, as_json)
    run = _engine(engine, budget, address, workers)
    with progress_bar() as progress:
        conversion = run(
            model,
            data,
            out,
            targets=targets,
            labels=labels,
            held_out=held_out,
            strange=strange,
            allow_uncovered=allow_uncovered,
            settings=None if parts else settings,
            paper=paper,
            images=None if parts else preparation.images,
            text=None if parts else preparation.text,
            batch_size=batch_size,
            progress=progress,
        )
    say_if_portable()
    return _show(conversion, calib or "PATH", as_json)


def _engine(
    name: str, budget: float | None, address: str | None, workers: int | None
) -> Callable[..., Conversion]:
    """Who converts."""
    from gapa_onnx import compiler

    if name == "local":
        if address is not None or workers is not None:
            raise UserError(
                "--address and --workers are for a cluster", "add --engine ray, or leave them out"
            )
        return functools.partial(compiler.convert, budget=budget)
    if name != "ray":
        raise UserError(f"--engine {name} is not known", "choose local or ray")
    if budget is not None:
        raise UserError(
            "--budget reads the data again for cheaper places, which --engine ray does not",
            "leave out either of them",
        )
    from gapa_onnx import ray

    return functools.partial(ray.convert, address=address, workers=workers)


#: What may be given beside --parts, which hold all other options.
_BESIDE_PARTS = {
    "model",
    "parts",
    "out",
    "held_out",
    "labels",
    "targets",
    "strange",
    "allow_uncovered",
    "as_json",
}


def _collected(context: typer.Context, parts: str | None) -> Collected:
    """The parts in all files that a pattern names; nothing that they hold may be given beside them."""
    from gapa_onnx.fit.parts import Collected

    if parts is None:
        raise UserError("no data are given", "give --calib PATH, or --parts 'part*.npz'")
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    beside = [flag(name) for name in given if name not in _BESIDE_PARTS]
    if beside:
        raise UserError(
            f"--parts hold what they were collected with, and {beside[0]} is given beside them",
            f"give {beside[0]} to `gapa-onnx collect`, for all parts",
        )
    files = sorted(glob.glob(parts))
    if not files:
        raise UserError(f"no file is named {parts}", "write parts with `gapa-onnx collect`")
    return Collected.merge(Collected.load(file) for file in files)


def _refuse_beside_paper(context: typer.Context) -> None:
    sources = {name: context.get_parameter_source(name) for name in PAPER}
    given = [flag(name) for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if given:
        raise UserError(f"--paper sets {given[0]} itself", f"leave out either --paper or {given[0]}")


def _output(model: Path, out: Path | None) -> Path:
    """OUT, which is never the model itself: the source must survive."""
    from gapa_onnx.compiler import default_output

    out = out or default_output(model)
    if out.exists() and model.exists() and out.samefile(model):
        raise UserError(
            f"{out} is the source model, which would be overwritten", "choose another file with -o"
        )
    return out


def _rehearse(
    model: Path,
    calib: str,
    given: tuple[str | None, Path | None, Path | None],
    out: Path,
    settings: Settings,
    preparation: options.Prepared,
    as_json: bool,
) -> int:
    """Everything up to the first batch of data: whatever would stop a conversion early is found."""
    from gapa_onnx.cli import records, render
    from gapa_onnx.compiler import known_rows, open_calibration, prepared_for_calibration
    from gapa_onnx.files import writable
    from gapa_onnx.model.load import load
    from gapa_onnx.plan.analyse import analyse, require_convertible

    writable(out)
    plan = analyse(load(model), settings)
    prepared = prepared_for_calibration(preparation.images, preparation.text)
    data = open_calibration(calib, plan.source, prepared)
    known_rows(plan, data, settings, given, prepared)
    batch = next(data.batches(1))
    answer = {
        **records.plan_record(plan),
        "data": {"description": data.description, "rows": data.rows},
        "images": None if data.images is None else asdict(data.images),
        "text": None if data.text is None else asdict(data.text.record),
        "output": str(out),
    }
    if as_json:
        print_json(answer)
    else:
        render.plan(answer, {name: array.shape[1:] for name, array in batch.items()})
    require_convertible(plan, settings)
    return 0


def _show(conversion: Conversion, calib: str, as_json: bool) -> int:
    from gapa_onnx.cli import render
    from gapa_onnx.record import require
    from gapa_onnx.variance.propagation import refusal_table

    record = require(conversion.emitted, "the model")
    failed = [check for check in conversion.checks if not check.passed]
    refused = conversion.plan.refused
    if refused:
        warn(
            f"the variance is cut at {len(refused)} node(s) without a rule; what leaves them counts as "
            f"certain, so the variances of the outputs are too small:\n{refusal_table(refused)}"
        )
    answer = {
        "output": str(conversion.path) if conversion.path else None,
        "bytes": _size(conversion.path),
        "checks": [vars(check) for check in conversion.checks],
        "certain_outputs": list(conversion.plan.certain_outputs),
        "provenance": record.as_json(),
    }
    if as_json:
        print_json(answer)
    else:
        render.conversion(answer, conversion.plan.source.label, conversion.calibration.description, calib)
    return 1 if failed else 0


def _size(path: Path | None) -> int | None:
    """Bytes on disk, with the external data of a large model."""
    if path is None:
        return None
    files = (path, path.with_name(path.name + ".data"))
    return sum(file.stat().st_size for file in files if file.exists())
