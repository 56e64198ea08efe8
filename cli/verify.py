"""`gapa-onnx verify`: the promises of a converted file, checked on data."""

from __future__ import annotations

from typing import Annotated

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import print_json, quiet_runtime, say_if_portable
from gapa_onnx.errors import UserError

BATCH = 64
ROWS = 256
MEMORY = 1 << 30  # bytes of the answers of all runs, which are held side by side
RUNS = 4
_Rows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        metavar="N",
        help=f"How many rows of the data to use; {ROWS} unless given, and fewer where rows are very large.",
        min=1,
        show_default=False,
    ),
]


@options.preparing_options()
def verify(
    source: options.Source,
    out: options.Converted,
    data: options.Data,
    *,
    rows: _Rows = None,
    batch_size: options.BatchSize = None,
    preparation: options.Prepared,
    allow_uncovered: options.AllowUncovered = False,
    as_json: options.Json = False,
) -> int:
    """Check a converted file: outputs bit-equal, variances sound and nowhere missing, native = portable = reference."""
    from gapa_onnx.cli import render
    from gapa_onnx.data import metadata, open_data, remembered
    from gapa_onnx.measure.agreement import Check
    from gapa_onnx.measure.verify import verify as check_promises
    from gapa_onnx.model.load import load, read_proto
    from gapa_onnx.record import read
    from gapa_onnx.sessions.feeding import TENSORS_PER_OUTPUT, feeding, first_batches
    from gapa_onnx.sessions.inference import row_count
    from gapa_onnx.sessions.runtime import open_session

    quiet_runtime()
    original = load(source)
    converted = read_proto(out)
    record = read(converted)
    if record is None:
        raise UserError(
            f"{out} was not written by gapa-onnx", "give the source first, then the converted file"
        )
    opened = open_session(original.given, original.label)
    given = open_data(data, original.inputs, preparation, batch_size, remembered(record, metadata(converted)))
    fed = feeding(opened, given, TENSORS_PER_OUTPUT)
    rows = rows or max(1, min(ROWS, int(MEMORY / (RUNS * fed.row_bytes))))
    batches = first_batches(opened, fed, rows, batch_size or min(BATCH, rows))
    del opened  # before others open
    say_if_portable()
    same = record.source.sha256 == original.sha256
    checks = [
        Check(
            "converted from this source",
            same,
            "sha256 is the same" if same else "sha256 differs: another file",
        ),
        *check_promises(original.given, converted, batches, allow_uncovered=allow_uncovered),
    ]
    passed = all(check.passed for check in checks)
    if as_json:
        answer = {
            "source": str(source),
            "converted": str(out),
            "rows": sum(map(row_count, batches)),
            "passed": passed,
        }
        print_json({**answer, "checks": [vars(check) for check in checks]})
    else:
        render.checks([vars(check) for check in checks])
    return 0 if passed else 1
