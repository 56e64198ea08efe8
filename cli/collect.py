"""`gapa-onnx collect`: one shard of the calibration data read, for a conversion on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import print_json, progress_bar, quiet_runtime
from gapa_onnx.settings import Settings

_Shard = Annotated[
    str, typer.Option("--shard", metavar="I/N", help="Which of how many parts of the data to read, as 1/8.")
]
_Out = Annotated[Path, typer.Option("-o", "--out", metavar="PART", help="Where to write, as part1.npz.")]
_Later = Annotated[
    bool,
    typer.Option(
        "--later-held-out",
        help="Rows will be given to convert as --held-out; --labels and --targets, which are theirs, are given there.",
    ),
]


@options.settings_options()
@options.preparing_options("")
def collect(
    model: options.Model,
    calib: options.Calib,
    out: _Out,
    *,
    shard: _Shard = "1/1",
    settings: Settings,
    later_held_out: _Later = False,
    labels: options.Labels = None,
    targets: options.Targets = None,
    paper: options.Paper = False,
    batch_size: options.BatchSize = None,
    preparation: options.Prepared,
    as_json: options.Json = False,
) -> int:
    """Read a shard of the calibration data on one of many machines; `convert --parts` makes the file of all of them."""
    from gapa_onnx import compiler
    from gapa_onnx.files import writable

    writable(out)
    quiet_runtime()
    with progress_bar() as progress:
        collected = compiler.collect(
            model,
            calib,
            shard=shard,
            held_out=later_held_out,
            targets=targets,
            labels=labels,
            settings=settings,
            paper=paper,
            images=preparation.images,
            text=preparation.text,
            batch_size=batch_size,
            progress=progress,
        )
    collected.save(out)
    record = collected.record
    if as_json:
        size = out.stat().st_size
        print_json(
            {"output": str(out), "bytes": size, "shard": shard, "read": record.read, "rows": record.rows}
        )
    else:
        from gapa_onnx.cli.layout import lines

        lines(("written", str(out)), ("shard", f"{shard}: {record.read:,} of {record.rows:,} rows"))
    return 0
