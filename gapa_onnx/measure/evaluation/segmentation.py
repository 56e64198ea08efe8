"""One class per pixel, or per place of any other map: the metrics of classes, pixel by pixel, and mean IoU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation.answers import MEAN, Answered
from gapa_onnx.measure.evaluation.classification import two_sided
from gapa_onnx.measure.evaluation.dense import (
    SIDES,
    Places,
    detect_place_errors,
    reduce_row,
    sample_row,
    stacked,
    sum_up,
)
from gapa_onnx.measure.evaluation.labels import class_labels
from gapa_onnx.measure.evaluation.metrics import brier_rows, entropy_rows, log_loss_rows
from gapa_onnx.measure.evaluation.promises import COVERED, SIZE
from gapa_onnx.measure.evaluation.rows import (
    VALID,
    Columns,
    Findings,
    flag_column,
    place_scores,
    score_columns,
)

MAP = "map/"  #: columns (n, pixels) for showing a few images; not kept
PREDICTED, UNCERTAINTY, TARGET = MAP + "predicted", MAP + "uncertainty", MAP + "target"


def pixel_columns(
    answered: Answered, found: Mapping[str, Array], labels: Array | None, start: int, rows: int
) -> Columns:
    """Sums per image, for `rows` images in all. The map/… columns are for whoever shows an image."""
    means, probs = answered.classes_last(found[MEAN]), answered.classes_last(found["probs"])  # (n, p, c)
    places, classes = answered.places(found[MEAN]), max(2, probs.shape[-1])
    if answered.link == "sigmoid" and probs.shape[-1] > 1:
        raise UserError(
            f"output {answered.output!r} predicts several labels per pixel, which evaluate does not compare",
            "evaluate one label at a time, or a model that ends in a softmax",
        )
    target = None if labels is None else class_labels(labels, places, classes, start)
    own = place_scores(answered, found)
    columns = []
    for row in range(len(means)):
        sides = {
            "source": two_sided(answered.source_probs(means[row])),
            "gapa": two_sided(probs[row].astype(np.float64)),
        }  # (p, c) each
        scores = {name: values[row] for name, values in own.items()} | {
            "maxprob": 1 - sides["gapa"].max(axis=1),
            "source_entropy": entropy_rows(sides["source"]),
            "source_maxprob": 1 - sides["source"].max(axis=1),
        }
        line = {name: values[0] for name, values in _row_scores(scores).items()}
        line[VALID] = np.bool_(all(map(np.isfinite, line.values())))
        if target is not None:
            line |= _labelled(sides, scores, target[row], start + row, rows)
        columns.append(line)
    return {**stacked(columns), **flag_column(found), **_set_columns(answered, found, target)}


def _set_columns(answered: Answered, found: Mapping[str, Array], target: Array | None) -> Columns:
    """Mean size of the sets of each image, and the share of its labelled pixels whose class is in theirs."""
    if "set" not in found:
        return {}
    chosen = answered.classes_last(found["set"])  # (n, p, c)
    columns: Columns = {SIZE: chosen.sum(axis=2).mean(axis=1)}
    if target is not None:
        inside = np.take_along_axis(chosen, np.maximum(target, 0)[..., None], axis=2)[..., 0]
        known = target >= 0
        share = (inside & known).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        columns[COVERED] = np.where(known.any(axis=1), share, np.nan)
    return columns


def _row_scores(scores: Mapping[str, Array]) -> Columns:
    return score_columns({name: values[None] for name, values in scores.items()})


def _labelled(
    sides: Mapping[str, Array], scores: Mapping[str, Array], target: Array, row: int, rows: int
) -> Columns:
    counted = target >= 0
    true = target[counted]
    classes = sides["gapa"].shape[1]
    predicted, judged, overlap = {}, {}, {}
    for side, probs in sides.items():
        probs = np.nan_to_num(probs)[counted]  # a row with NaN is not valid and drops out
        predicted[side] = probs.argmax(axis=1)
        judged[side] = Places(
            predicted[side], probs.max(axis=1), log_loss_rows(probs, true), brier_rows(probs, true)
        )
        hits = np.bincount(true[predicted[side] == true], minlength=classes)
        union = np.bincount(true, minlength=classes) + np.bincount(predicted[side], minlength=classes) - hits
        overlap[f"{side}/overlap"] = np.stack([hits, union])  # (2, c)
    wrong = {side: predicted[side] != true for side in SIDES}
    unsure = scores.get("epistemic", scores["maxprob"])
    return {
        **reduce_row(judged, true),
        **overlap,
        **sample_row({name: values[counted] for name, values in scores.items()}, wrong, row, rows),
        PREDICTED: np.nan_to_num(sides["gapa"]).argmax(axis=1),
        UNCERTAINTY: unsure,
        TARGET: target,
    }


def pixel_findings(columns: Columns) -> Findings:
    """Mean IoU is over the classes that are predicted or true anywhere; all images count as one."""
    if not columns["places"].sum():
        raise UserError("every label is to be ignored (255 or negative)", "label some of the places")
    metrics, bins, rate = sum_up(columns)
    for side in SIDES:
        hits, union = columns[f"{side}/overlap"].sum(axis=0)
        metrics[side]["mean_iou"] = float((hits[union > 0] / union[union > 0]).mean())
    errors, notes = detect_place_errors(columns, "pixel")
    return Findings(metrics, rate, reliability=bins, error_detection=errors, notes=tuple(notes))
