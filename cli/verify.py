"""`gapa-onnx verify`: the promises of a converted file, checked on data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import numpy as np
import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import print_json, quiet_runtime, say_if_portable
from gapa_onnx.errors import UserError

BATCH = 64
_Rows = Annotated[int, typer.Option("--rows", metavar="N", help="How many rows of the data to use.", min=1)]


def verify(
    source: options.Source,
    out: options.Converted,
    data: options.Data,
    rows: _Rows = 256,
    image_mean: options.ImageMean = None,
    image_std: options.ImageStd = None,
    as_json: options.Json = False,
) -> int:
    """Check a converted file: outputs bit-equal, variances sound, native = portable = reference."""
    from gapa_onnx.cli import render
    from gapa_onnx.data import open_data
    from gapa_onnx.measure.agreement import Check
    from gapa_onnx.measure.verify import verify as check_promises
    from gapa_onnx.model.load import load, read_proto
    from gapa_onnx.record import read

    images = options.image_options(image_mean, image_std)
    quiet_runtime()
    original = load(source)
    converted = read_proto(out)
    record = read(converted)
    if record is None:
        raise UserError(
            f"{out} was not written by gapa-onnx", "give the source first, then the converted file"
        )
    batches = list(first_rows(open_data(data, original.inputs, images).batches(min(BATCH, rows)), rows))
    say_if_portable()
    same = record.source.sha256 == original.sha256
    checks = [
        Check(
            "converted from this source",
            same,
            "sha256 is the same" if same else "sha256 differs: another file",
        ),
        *check_promises(original.given, converted, batches),
    ]
    passed = all(check.passed for check in checks)
    if as_json:
        answer = {
            "source": str(source),
            "converted": str(out),
            "rows": sum(map(count_rows, batches)),
            "passed": passed,
        }
        print_json({**answer, "checks": [vars(check) for check in checks]})
    else:
        render.checks([vars(check) for check in checks])
    return 0 if passed else 1


def first_rows(batches: Iterable[dict[str, np.ndarray]], rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Whole batches until there are that many rows: a model may fix its batch size."""
    seen = 0
    for batch in batches:
        yield batch
        seen += count_rows(batch)
        if seen >= rows:
            return


def count_rows(batch: dict[str, np.ndarray]) -> int:
    return max((array.shape[0] for array in batch.values() if array.ndim), default=1)
