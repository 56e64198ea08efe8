"""Many classified places per row: pixels, tokens. Each row is reduced on its own, so memory stays bounded.

Accuracy, log loss, Brier score and calibration count every place. Telling wrong places from right ones
needs all scores at once, so it is done on a fixed random sample of the places of every row
(`MOST_PLACES` in all), the same whatever the batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.metrics import bin_sums, expected_calibration_error, reliability
from gapa_onnx.measure.evaluation.result import ReliabilityBin
from gapa_onnx.measure.evaluation.rows import Columns, detect_errors

SIDES = ("source", "gapa")
MOST_PLACES = 250_000
_LEAST_PER_ROW = 16
_SAMPLE = "sample/"
_SEED = 0


@dataclass(frozen=True)
class Places:
    """What one side predicts at the labelled places of one row, each (places,)."""

    predicted: Array
    confidence: Array
    nll: Array
    brier: Array | None = None


def reduce_row(sides: Mapping[str, Places], target: Array) -> Columns:
    """Sums over the places of one row; target (places,) holds no ignored place."""
    sums: Columns = {"places": np.float64(len(target))}
    for side, places in sides.items():
        correct = places.predicted == target
        sums[f"{side}/correct"] = np.float64(correct.sum())
        sums[f"{side}/nll"] = places.nll.sum()
        sums[f"{side}/bins"] = bin_sums(places.confidence, correct)
        if places.brier is not None:
            sums[f"{side}/brier"] = places.brier.sum()
    return sums


def sample_row(scores: Mapping[str, Array], wrong: Mapping[str, Array], row: int, rows: int) -> Columns:
    """Scores and errors at sampled places of one row, NaN where a row has fewer: (sample,) each."""
    size = min(max(MOST_PLACES // max(rows, 1), _LEAST_PER_ROW), MOST_PLACES)
    places = len(wrong["gapa"])
    chosen = np.arange(places)
    if places > size:
        chosen = np.sort(np.random.default_rng([_SEED, row]).choice(places, size, replace=False))
    named = {**scores, **{f"wrong/{side}": values for side, values in wrong.items()}}
    sampled = {}
    for name, values in named.items():
        padded = np.full(size, np.nan, np.float32)
        padded[: len(chosen)] = values[chosen]
        sampled[_SAMPLE + name] = padded
    return sampled


def stacked(rows: list[Columns]) -> Columns:
    """Columns of a batch from those of its rows."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def sum_up(
    columns: Columns,
) -> tuple[dict[str, dict[str, float]], dict[str, tuple[ReliabilityBin, ...]], Array]:
    """Metrics and bins per side over all places, and the error rate of each row, NaN without labels."""
    count = columns["places"].sum()
    metrics: dict[str, dict[str, float]] = {}
    bins = {}
    for side in SIDES:
        sums = columns[f"{side}/bins"].sum(axis=0)
        metrics[side] = {
            "accuracy": float(columns[f"{side}/correct"].sum() / count),
            "nll": float(columns[f"{side}/nll"].sum() / count),
            "ece": expected_calibration_error(sums),
        }
        if f"{side}/brier" in columns:
            metrics[side]["brier"] = float(columns[f"{side}/brier"].sum() / count)
        bins[side] = reliability(sums)
    rate = 1 - columns["gapa/correct"] / np.maximum(columns["places"], 1)
    return metrics, bins, np.where(columns["places"] > 0, rate, np.nan)


def detect_place_errors(columns: Columns, what: str) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Whether scores tell wrong places from right ones, on the sampled places."""
    sampled = {
        name.removeprefix(_SAMPLE): v.ravel() for name, v in columns.items() if name.startswith(_SAMPLE)
    }
    present = ~np.isnan(sampled["wrong/gapa"])
    sampled = {name: values[present] for name, values in sampled.items()}
    wrong = {side: sampled.pop(f"wrong/{side}").astype(bool) for side in SIDES}
    found, notes = detect_errors(sampled, wrong, what)
    total = int(columns["places"].sum())
    if found and present.sum() < total:
        notes.append(
            f"wrong {what}s are told from right ones on {present.sum()} of {total}, a fixed random sample"
        )
    return found, notes
