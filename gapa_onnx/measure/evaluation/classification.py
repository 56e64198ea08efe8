"""One class per row, or several labels at once: accuracy, log loss, calibration and Brier score.

The source by itself stands beside the converted file: softmax or sigmoid of its output, without variance.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.answers import MEAN, Answered
from gapa_onnx.measure.evaluation.labels import class_labels, label_matrix
from gapa_onnx.measure.evaluation.metrics import (
    SMALLEST_OF_TWO,
    bin_sums,
    brier_rows,
    entropy_rows,
    expected_calibration_error,
    log_loss_rows,
    reliability,
)
from gapa_onnx.measure.evaluation.promises import set_columns
from gapa_onnx.measure.evaluation.rows import (
    VALID,
    Columns,
    Findings,
    detect_errors,
    flag_column,
    place_scores,
    score_columns,
    scores_in,
)

_SIDES = ("source", "gapa")


def two_sided(probs: Array) -> Array:
    """(…, 1) probabilities of yes as (…, 2) of no and yes; any other probabilities as they are."""
    if probs.shape[-1] != 1:
        return probs
    yes = within(probs)
    return np.concatenate([1 - yes, yes], axis=-1)


def within(probs: Array) -> Array:
    """Probabilities of yes, kept off 0 and 1; NaN stays."""
    return np.clip(probs, SMALLEST_OF_TWO, 1 - SMALLEST_OF_TWO)


def class_columns(
    answered: Answered, found: Mapping[str, Array], labels: Array | None, start: int
) -> Columns:
    """One class per row. Without labels only what needs none."""
    probs = {
        "source": two_sided(answered.source_probs(answered.classes_last(found[MEAN])[:, 0])),
        "gapa": two_sided(answered.classes_last(found["probs"])[:, 0].astype(np.float64)),
    }  # (n, c) each
    scores = place_scores(answered, found)
    scores["maxprob"] = 1 - probs["gapa"].max(axis=1, keepdims=True)
    scores["source_entropy"] = entropy_rows(probs["source"])[:, None]
    scores["source_maxprob"] = 1 - probs["source"].max(axis=1, keepdims=True)
    columns = {**score_columns(scores), **flag_column(found)}
    columns[VALID] = np.all([np.isfinite(values) for values in columns.values()], axis=0)
    probs = {side: np.nan_to_num(values) for side, values in probs.items()}  # such rows drop out
    for side, values in probs.items():
        columns[f"{side}/predicted"] = values.argmax(axis=1)
    if labels is None:
        return {**columns, **set_columns(found, None)}
    target = class_labels(labels, (), probs["gapa"].shape[1], start)[:, 0]
    for side, values in probs.items():
        columns[f"{side}/confidence"] = values.max(axis=1)
        columns[f"{side}/nll"] = log_loss_rows(values, target)
        columns[f"{side}/brier"] = brier_rows(values, target)
    return {**columns, **set_columns(found, target), "target": target}


def class_findings(columns: Columns) -> Findings:
    """Metrics of the rows that `class_columns` made."""
    metrics, bins, wrong = {}, {}, {}
    for side in _SIDES:
        correct = columns[f"{side}/predicted"] == columns["target"]
        sums = bin_sums(columns[f"{side}/confidence"], correct)
        metrics[side] = {
            "accuracy": float(correct.mean()),
            "nll": float(columns[f"{side}/nll"].mean()),
            "ece": expected_calibration_error(sums),
            "brier": float(columns[f"{side}/brier"].mean()),
        }
        bins[side], wrong[side] = reliability(sums), ~correct
    errors, notes = detect_errors(scores_in(columns), wrong, "prediction")
    if len(np.unique(columns["target"])) == 1:
        notes.append(
            f"all labels are class {columns['target'][0]}: accuracy and calibration speak of it alone"
        )
    return Findings(
        metrics, wrong["gapa"].astype(float), reliability=bins, error_detection=errors, notes=tuple(notes)
    )


def label_columns(
    answered: Answered, found: Mapping[str, Array], labels: Array | None, start: int
) -> Columns:
    """Several labels at once, each of two classes; scores are means over the labels."""
    rows = len(found[MEAN])
    probs = {
        "source": within(answered.source_probs(answered.classes_last(found[MEAN])).reshape(rows, -1)),
        "gapa": within(answered.classes_last(found["probs"]).astype(np.float64).reshape(rows, -1)),
    }  # (n, labels) each
    scores = place_scores(answered, found)
    surest = {side: np.maximum(values, 1 - values) for side, values in probs.items()}
    scores["maxprob"] = 1 - surest["gapa"]
    scores["source_entropy"] = entropy_rows(np.stack([probs["source"], 1 - probs["source"]], axis=-1))
    scores["source_maxprob"] = 1 - surest["source"]
    columns = {**score_columns(scores), **flag_column(found)}
    columns[VALID] = np.all([np.isfinite(values) for values in columns.values()], axis=0)
    columns |= {f"{side}/probs": np.nan_to_num(values, nan=0.5) for side, values in probs.items()}
    if labels is None:
        return columns
    return {**columns, "target": label_matrix(labels, probs["gapa"].shape[1], start)}


def label_findings(columns: Columns) -> Findings:
    """Each metric per label, with that label's two classes, then averaged over the labels (macro).

    The Brier score of a label is (p − y)², as scikit-learn has it for two classes. Subset accuracy asks for
    all labels of a row at once; the loss of a row is the share of its labels that are wrong.
    """
    target = columns["target"]  # (n, labels)
    metrics, bins, wrong = {}, {}, {}
    for side in _SIDES:
        probs = columns[f"{side}/probs"]
        correct = (probs >= 0.5) == (target == 1)
        chosen = np.where(target == 1, probs, 1 - probs)
        surest = np.maximum(probs, 1 - probs)
        sums = [bin_sums(surest[:, label], correct[:, label]) for label in range(target.shape[1])]
        metrics[side] = {
            "accuracy": float(correct.mean()),
            "subset_accuracy": float(correct.all(axis=1).mean()),
            "nll": float(-np.log(chosen).mean()),
            "ece": float(np.mean([expected_calibration_error(one) for one in sums])),
            "brier": float(np.square(probs - target).mean()),
        }
        bins[side], wrong[side] = reliability(np.sum(sums, axis=0)), ~correct
    any_wrong = {side: values.any(axis=1) for side, values in wrong.items()}
    errors, notes = detect_errors(scores_in(columns), any_wrong, "row")
    return Findings(
        metrics,
        wrong["gapa"].mean(axis=1),
        risk="share of wrong labels",
        reliability=bins,
        error_detection=errors,
        notes=tuple(notes),
    )


def class_caption(columns: Columns, row: int) -> tuple[str, str]:
    """What is predicted and what is true of a row, in words."""
    target = str(columns["target"][row]) if "target" in columns else ""
    return str(columns["gapa/predicted"][row]), target


def label_caption(columns: Columns, row: int) -> tuple[str, str]:
    target = _listed(columns["target"][row] == 1) if "target" in columns else ""
    return _listed(columns["gapa/probs"][row] >= 0.5), target


def _listed(chosen: Array) -> str:
    return ", ".join(map(str, np.flatnonzero(chosen))) or "none"
