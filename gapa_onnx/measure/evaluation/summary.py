"""An evaluation as JSON: the numbers, without curves and images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gapa_onnx.measure.evaluation.result import Evaluation

_NUMBERS = (
    "file",
    "output",
    "task",
    "rows",
    "ood_rows",
    "metrics",
    "detection",
    "ood_sets",
    "error_detection",
    "aurc",
    "risk",
    "flagged",
    "threshold",
    "left_out",
    "promises",
    "notes",
)


def summary_of(evaluation: Evaluation) -> dict[str, Any]:
    """Plain dicts, lists and numbers; what is not finite becomes None, which JSON has."""
    numbers = {name: getattr(evaluation, name) for name in _NUMBERS}
    numbers["shifts"] = [asdict(shift) for shift in evaluation.shifts]
    numbers["cost"] = None if evaluation.cost is None else asdict(evaluation.cost)
    return {name: _plain(value) for name, value in numbers.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
