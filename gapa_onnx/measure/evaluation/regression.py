"""Predicted numbers with a Gaussian around them: log loss, CRPS, calibration of intervals.

The variance is the total one where the file has a noise head, else that of the model alone. The source
gives a point: its CRPS is the mean absolute error, and a point has no likelihood. (A constant variance
for it would have to be fitted on the very rows that are evaluated.)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.answers import MEAN, Answered
from gapa_onnx.measure.evaluation.labels import target_values
from gapa_onnx.measure.evaluation.metrics import (
    central_level,
    centred_quantile_metric,
    coverage,
    gaussian_crps,
    gaussian_log_loss,
)
from gapa_onnx.measure.evaluation.promises import interval_columns
from gapa_onnx.measure.evaluation.result import Intervals
from gapa_onnx.measure.evaluation.rows import (
    VALID,
    Columns,
    Findings,
    flag_column,
    place_scores,
    score_columns,
)

MOST_NUMBERS = 5_000_000  #: kept of large answers (depth maps); evenly spaced elements of every row
LEVELS = np.arange(1, 20) / 20  #: of the interval plot
_REPORTED = (0.5, 0.9, 0.95)


def number_columns(
    answered: Answered, found: Mapping[str, Array], labels: Array | None, start: int, rows: int
) -> Columns:
    """Means, variances and targets per row; `rows` are those of all the data, which bounds what is kept."""
    count = len(found[MEAN])
    mean, var = (found[role].astype(np.float64).reshape(count, -1) for role in (MEAN, "var"))
    total = found["total_var"].astype(np.float64).reshape(count, -1) if "total_var" in found else var
    scores = place_scores(answered, found)
    columns = score_columns(scores)
    columns["score/std"] = np.sqrt(var.mean(axis=1))
    if "total_var" in found:
        columns["score/total_std"] = np.sqrt(total.mean(axis=1))
    columns |= flag_column(found)
    finite = [np.isfinite(values) for values in columns.values()]
    columns[VALID] = np.all([*finite, np.isfinite(mean).all(axis=1), np.isfinite(total).all(axis=1)], axis=0)
    columns |= {"first/mean": mean[:, 0], "first/std": np.sqrt(total[:, 0])}
    columns["elements"] = np.full(count, mean.shape[1])
    if labels is None:
        return {**columns, **interval_columns(found, None)}
    target = target_values(labels, found[MEAN].shape[1:], start)
    kept = kept_elements(mean.shape[1], rows)
    return {
        **columns,
        **interval_columns(found, target),
        "mean": mean[:, kept],
        "std": np.sqrt(total[:, kept]),
        "target": target[:, kept],
        "error": np.abs(mean - target).mean(axis=1),
    }


def kept_elements(size: int, rows: int) -> Array:
    """Which elements of a row are kept: all, or as many evenly spaced ones as fit."""
    most = max(1, MOST_NUMBERS // max(rows, 1))
    return np.arange(size) if size <= most else np.linspace(0, size - 1, most).astype(np.int64)


def number_findings(columns: Columns) -> Findings:
    """Metrics over all kept numbers; the interval plot shows the first number of each row."""
    mean, std, target = columns["mean"], columns["std"], columns["target"]
    error = target - mean
    point = {"rmse": float(np.sqrt(np.square(error).mean())), "mae": float(np.abs(error).mean())}
    levels = central_level(mean, std, target)
    notes = ["the source gives a point: its CRPS is the mean absolute error, and it has no NLL"]
    gapa = dict(point)
    if (std > 0).all():
        gapa["nll"] = float(gaussian_log_loss(mean, std, target).mean())
    else:
        notes.append(f"{int((std == 0).sum())} predictions have variance 0, so the NLL is undefined")
    gapa["crps"] = float(gaussian_crps(mean, std, target).mean())
    gapa["cqm"] = centred_quantile_metric(levels)
    for level, share in zip(_REPORTED, coverage(levels, _REPORTED)):
        gapa[f"coverage{level * 100:.0f}"] = float(share)
    if "score/total_std" not in columns:
        notes.append(
            "the file has no noise head: its variance is the model's alone, and NLL, CRPS, CQM and coverage "
            "count no noise of the targets; convert it with `targets` to add one"
        )
    size = int(columns["elements"][0])
    if mean.shape[1] < size:
        notes.append(f"{mean.shape[1]} evenly spaced numbers of the {size} in each row are evaluated")
    intervals = Intervals(mean[:, 0], std[:, 0], target[:, 0], LEVELS, coverage(levels[:, 0], LEVELS))
    return Findings(
        {"source": {**point, "crps": point["mae"]}, "gapa": gapa},
        columns["error"],
        risk="mean absolute error",
        intervals=intervals,
        notes=tuple(notes),
    )


def number_caption(columns: Columns, row: int) -> tuple[str, str]:
    """The first number of a row in words: predicted, and true."""
    predicted = f"{columns['first/mean'][row]:.4g} ± {columns['first/std'][row]:.2g}"
    return predicted, f"{columns['target'][row, 0]:.4g}" if "target" in columns else ""
