"""What a converted file costs beside its source, as an evaluation reports it; see `bench`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import onnx

from gapa_onnx.arrays import Array
from gapa_onnx.measure.bench import Refusal, measure_on
from gapa_onnx.measure.evaluation.result import Cost
from gapa_onnx.model.load import read_proto

THREADS = 1


def measure_cost(
    source: str | os.PathLike[str],
    converted: str | os.PathLike[str] | onnx.ModelProto,
    batch: Mapping[str, Array],
) -> tuple[Cost | None, str]:
    """The cost ratio on one batch, or None, and a sentence: how it was measured, or why it is not given."""
    emitted = converted if isinstance(converted, onnx.ModelProto) else read_proto(Path(converted))
    found = measure_on(read_proto(Path(source)), emitted, batch, threads=THREADS, parts=False)
    if isinstance(found, Refusal):
        return None, found.reason
    cost = Cost(found.ratio, found.control, found.batch, THREADS)
    return cost, f"batches of {cost.batch} rows, {THREADS} thread, source against itself {found.control:.3f}"
