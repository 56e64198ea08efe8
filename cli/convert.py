"""`gapa-onnx convert`: a trained model in, the same model with error bars out."""

from __future__ import annotations

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

_Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="OUT", help="Where to write; MODEL.gapa.onnx unless given."),
]


@options.settings_options()
@options.preparing_options("")
def convert(
    context: typer.Context,
    model: options.Model,
    calib: options.Calib,
    *,
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
    from gapa_onnx import compiler

    if paper:
        _refuse_beside_paper(context)
    out = _output(model, out)
    quiet_runtime()
    if dry_run:
        return _rehearse(model, calib, (held_out, targets, labels), out, settings, preparation, as_json)
    with progress_bar() as progress:
        conversion = compiler.convert(
            model,
            calib,
            out,
            targets=targets,
            labels=labels,
            held_out=held_out,
            strange=strange,
            budget=budget,
            allow_uncovered=allow_uncovered,
            settings=settings,
            paper=paper,
            images=preparation.images,
            text=preparation.text,
            batch_size=batch_size,
            progress=progress,
        )
    say_if_portable()
    return _show(conversion, calib, as_json)


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
