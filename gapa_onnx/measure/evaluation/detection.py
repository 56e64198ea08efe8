"""Objects in images: are confidences of boxes honest, do scores point at wrong ones, do error bars hold the truth?

What is judged is what the detector shows by itself: of its candidates those that its own confidence and non-maximum
suppression leave. Each box finds at most one object of its class. The boxes are the same for the source and for the
converted file, and so is which of them are right; what differs is how confident each is of them. The average precision
looks at less confident boxes too, and lets each side rank them by its own confidence.

Box errors are of the four numbers in the model's own units, for boxes that are right: others have no truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.spec import fixed
from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation.answers import BOXES, MEAN, Answered, ConvertedFile, features_last
from gapa_onnx.measure.evaluation.boxes import (
    FORMATS,
    BoxFormat,
    average_precision,
    contained,
    overlaps,
    owners,
    survivors,
)
from gapa_onnx.measure.evaluation.classification import within
from gapa_onnx.measure.evaluation.coco import NO_OBJECT, Pictures, read_boxes
from gapa_onnx.measure.evaluation.metrics import (
    bin_sums,
    expected_calibration_error,
    needed,
    reliability,
)
from gapa_onnx.measure.evaluation.result import ReliabilityBin
from gapa_onnx.measure.evaluation.rows import (
    FLAGGED,
    FLAGGED_BOXES,
    SCORE,
    VALID,
    Columns,
    Findings,
    detect_errors,
    flat,
    place_scores,
    ragged,
    scores_in,
)
from gapa_onnx.sessions.feeding import Feeding

SHOWN = 0.25  #: confidence from which on a box is shown
RANKED = 0.001  #: confidence from which on a box counts for the average precision
SUPPRESSED = 0.45  #: overlap beyond which the less confident of two boxes of a class goes
MATCHED = 0.5  #: overlap from which on a box finds an object
_IMAGE = "image_"  # scores of whole images
_SIDES = ("source", "gapa")
_ENOUGH = 500  # objects that tell how boxes are written
_FIRST = 20  # candidates that are looked at for that where none is shown
_PLAUSIBLE = 0.3  # mean overlap with the nearest box; below, boxes may be written in some other way


@dataclass(frozen=True)
class _Candidates:
    """What a file says about the candidates of a batch, the most confident first: (n, k) each but for boxes."""

    boxes: Array  #: (n, k, 4) as the model writes them
    box_var: Array | None  #: (n, k, 4)
    classes: Array  #: from 0, without the background
    confidence: Mapping[str, Array]  #: of that class, by side
    scores: Mapping[str, Array]  #: the file's own
    flagged: Array | None


def _candidates(answered: Answered, found: Mapping[str, Array]) -> _Candidates:
    place = answered.detection
    assert place is not None, "a detector's record says where its boxes are"
    chosen = found["candidates"].astype(np.int64)[..., None]  # (n, k, 1)
    boxes, classes = (
        np.take_along_axis(features_last(found[role], axis), chosen, axis=1).astype(np.float64)
        for role, axis in ((BOXES, place.box_axis), (MEAN, place.class_axis))
    )
    last = None if place.classes_count is None else place.class_start + place.classes_count
    probs = {
        "source": answered.source_probs(classes[..., place.class_start : last]),
        "gapa": found["probs"].astype(np.float64),
    }
    if place.background is not None:
        probs = {side: np.delete(values, place.background, axis=-1) for side, values in probs.items()}
    kinds = np.nan_to_num(probs["source"]).argmax(axis=-1)
    confidence = {
        side: np.take_along_axis(values, kinds[..., None], axis=-1)[..., 0] for side, values in probs.items()
    }
    if place.objectness is not None:
        objects = classes[..., place.objectness]
        objects = needed("scipy.special").expit(objects) if answered.plain_logits else objects
        confidence["source"] = confidence["source"] * objects
        confidence["gapa"] = confidence["gapa"] * found.get("objectness", objects)
    return _Candidates(
        boxes[..., place.box_start : place.box_start + 4],
        found["box_var"].astype(np.float64) if "box_var" in found else None,
        kinds,
        confidence,
        place_scores(answered, found),
        found.get("ood"),
    )


# ------------------------------------------------------------------------------------- truth


def read_truth(converted: ConvertedFile, data: Feeding, labels: Any) -> tuple[Array, tuple[str, ...]]:
    """The objects of each image, in pixels of what the model sees, and notes; see `coco.read_boxes`."""
    _, batch, found = next(converted.batches(data))
    place = converted.answered.detection
    background = place is not None and place.background is not None
    pictures = Pictures(data.data.files, data.rows, data.description, _seen_size(converted, data, batch))
    return read_boxes(labels, pictures, found["probs"].shape[-1] - background)


def _seen_size(converted: ConvertedFile, data: Feeding, batch: Mapping[str, Array]) -> tuple[int, int] | None:
    """(width, height) of the images that the model is fed; None where each keeps its own."""
    for spec in converted.inputs:
        shape = spec.shape or ()
        if len(shape) == 4:
            first = shape[1] in (1, 3)
            height, width = (2, 3) if first else (1, 2)
            settled = fixed(shape[height]) and fixed(shape[width])
            if settled or not data.data.files:  # arrays have been scaled before
                given = batch[spec.name].shape
                return given[width], given[height]
    return None


def seen_format(converted: ConvertedFile, data: Feeding, truth: Array) -> tuple[BoxFormat, tuple[str, ...]]:
    """How the model writes its boxes: as it must be for them to overlap the objects most, and a note about it."""
    converted.require_matching(truth, data)
    sums, objects = np.zeros(len(FORMATS)), 0
    for candidates, row, image in _images_of(converted, data, truth):
        true = image["boxes"][image["classes"] != NO_OBJECT]
        likely = candidates.confidence["source"][row] >= SHOWN
        numbers = candidates.boxes[row][likely] if likely.any() else candidates.boxes[row][:_FIRST]
        if not len(true) or not np.isfinite(numbers).all():
            continue
        for place, form in enumerate(FORMATS):
            sums[place] += overlaps(form.to_corners(numbers, image["size"]), true).max(axis=0).sum()
        objects += len(true)
        if objects >= _ENOUGH:
            break
    form, mean = FORMATS[int(sums.argmax())], float(sums.max() / max(objects, 1))
    note = f"boxes are read as {form}: so they overlap the objects by {mean:.2f} in the mean"
    if mean < _PLAUSIBLE:
        note += ", which is little; check that images and boxes belong together and are scaled as the model expects"
    return form, (note,)


def _images_of(
    converted: ConvertedFile, data: Feeding, truth: Array
) -> Iterator[tuple[_Candidates, int, Any]]:
    """The candidates of a batch, a row in it, and what is true of that row."""
    for start, _, found in converted.batches(data):
        candidates = _candidates(converted.answered, found)
        for row, image in enumerate(truth[start : start + len(candidates.classes)]):
            yield candidates, row, image


# ----------------------------------------------------------------------------------- columns


def box_columns(
    form: BoxFormat,
    answered: Answered,
    found: Mapping[str, Array],
    labels: Array | None,
    start: int,
    rows: int,
) -> Columns:
    """Boxes and objects of each image; the scores are of shown boxes, and of images where their name says so."""
    if labels is not None and labels.dtype.names is None:
        raise UserError(
            "the labels among shifted data are not boxes", "leave them out: those of the data count"
        )
    candidates = _candidates(answered, found)
    finite = [candidates.boxes, *candidates.confidence.values(), *candidates.scores.values()]
    if candidates.box_var is not None:
        finite.append(candidates.box_var)
    count = len(candidates.classes)
    columns: Columns = {}
    for side, values in candidates.confidence.items():
        name = ("source_" if side == "source" else "") + _IMAGE + "confidence"
        columns[SCORE + name] = 1 - values.max(axis=1)
    if "image_score" in found:
        columns[SCORE + "image_score"] = found["image_score"].astype(np.float64).reshape(count)
    valid = [np.isfinite(values).reshape(count, -1).all(axis=1) for values in (*finite, *columns.values())]
    columns[VALID] = np.all(valid, axis=0)
    if "image_ood" in found:
        columns[FLAGGED] = found["image_ood"].reshape(count).astype(np.float64)
    lines = [
        _image(form, candidates, row, None if labels is None else labels[row], columns[VALID][row])
        for row in range(count)
    ]
    for name in lines[0]:
        columns[name] = ragged(line[name] for line in lines)
    if labels is not None:
        kinds = np.where(labels["crowd"], NO_OBJECT, labels["classes"])
        columns["objects"] = ragged(row[row != NO_OBJECT] for row in kinds)
    return columns


def _image(form: BoxFormat, candidates: _Candidates, row: int, truth: Any, valid: bool) -> Columns:
    """What is kept of the boxes of one image, by falling confidence of the source."""
    size = (
        np.ones(2) if truth is None else truth["size"]
    )  # without truth only overlaps count, which have no unit
    confidence = {side: values[row] for side, values in candidates.confidence.items()}
    ranked = np.flatnonzero(confidence["source"] >= RANKED) if valid else np.arange(0)
    corners = form.to_corners(candidates.boxes[row][ranked], size)
    kinds = candidates.classes[row][ranked]
    stays = survivors(corners, kinds, confidence["source"][ranked], SUPPRESSED)
    line: Columns = {}
    if truth is not None:
        right, stays = _right(corners, kinds, {s: v[ranked] for s, v in confidence.items()}, stays, truth)
        line |= right
    kept = ranked[stays]
    shown = kept[confidence["source"][kept] >= SHOWN]
    line["class"] = candidates.classes[row][kept]
    for side, values in confidence.items():
        line[f"{side}/confidence"] = values[kept]
        line[SCORE + ("source_" if side == "source" else "") + "confidence"] = 1 - values[shown]
    for name, scores in candidates.scores.items():
        line[SCORE + name] = scores[row][shown]
    if candidates.flagged is not None:
        line[FLAGGED_BOXES] = candidates.flagged[row][shown].astype(np.float64)
    if truth is not None:
        owner = line.pop("owner")[: len(shown)]
        found = owner >= 0
        true = form.from_corners(truth["boxes"][owner[found]], size)
        line["error"] = candidates.boxes[row][shown[found]] - true
        if candidates.box_var is not None:
            line["box_var"] = candidates.box_var[row][shown[found]]
    return line


def _right(
    corners: Array, kinds: Array, confidence: Mapping[str, Array], stays: Array, truth: Any
) -> tuple[Columns, Array]:
    """Which of the boxes that stay find an object, by side; and those that stay once crowds are left out.

    A box that finds no object and lies in a crowd of its class is neither right nor wrong.
    """
    single = (truth["classes"] != NO_OBJECT) & ~truth["crowd"]
    same = kinds[stays][:, None] == truth["classes"][None]
    overlap = np.where(same & single, overlaps(corners[stays], truth["boxes"]), 0.0)
    owner = owners(overlap, confidence["source"][stays], MATCHED)
    in_crowd = np.where(same & truth["crowd"], contained(corners[stays], truth["boxes"]), 0.0) >= MATCHED
    counts = (owner >= 0) | ~in_crowd.any(axis=1)
    stays, overlap, owner = stays[counts], overlap[counts], owner[counts]
    ours = owners(overlap, confidence["gapa"][stays], MATCHED)
    return {"owner": owner, "source/right": owner >= 0, "gapa/right": ours >= 0}, stays


# ---------------------------------------------------------------------------------- findings


def box_findings(columns: Columns, notes: tuple[str, ...] = ()) -> Findings:
    """Metrics of the boxes of all images together."""
    objects = flat(columns["objects"])
    confidence = {side: flat(columns[f"{side}/confidence"]) for side in _SIDES}
    shown = confidence["source"] >= SHOWN
    right = flat(columns["source/right"])[shown]
    told = [
        *notes,
        f"a box is shown from confidence {SHOWN} on, and right from an overlap of {MATCHED} on; scores are those of shown "
        "boxes unless they are named after the image",
    ]
    if not shown.any():
        told.append("no box is shown, so that there is nothing to calibrate")
    metrics: dict[str, dict[str, float]] = {}
    bins: dict[str, tuple[ReliabilityBin, ...]] = {}
    for side in _SIDES:
        metrics[side] = {"ap50": _mean_precision(columns, confidence[side], side, objects)}
        if not shown.any():
            continue
        chance = within(confidence[side][shown])
        sums = bin_sums(chance, right)
        metrics[side] |= {
            "precision": float(right.mean()),
            "recall": float(right.sum() / max(len(objects), 1)),
            "nll": float(-np.log(np.where(right, chance, 1 - chance)).mean()),
            "ece": expected_calibration_error(sums),
            "brier": float(np.square(chance - right).mean()),
        }
        bins[side] = reliability(sums)
    bars, about_bars = _error_bars(columns)
    metrics["gapa"] |= bars
    scores = {name: values for name, values in scores_in(columns).items() if _IMAGE not in name}
    errors: dict[str, dict[str, float]] = {}
    if shown.any():
        errors, about_errors = detect_errors(scores, dict.fromkeys(_SIDES, ~right), "box")
        told += about_errors
    return Findings(
        metrics,
        (~right).astype(float),
        ordering=tuple(scores) if shown.any() else (),
        risk="share of wrong boxes",
        reliability=bins,
        error_detection=errors,
        notes=(*told, *about_bars),
    )


def _mean_precision(columns: Columns, confidence: Array, side: str, objects: Array) -> float:
    """Average precision, the mean over the classes that have objects."""
    kinds, right = flat(columns["class"]), flat(columns[f"{side}/right"])
    each = [
        average_precision(confidence[kinds == kind], right[kinds == kind], int((objects == kind).sum()))
        for kind in np.unique(objects)
    ]
    return float(np.mean(each)) if each else float("nan")


def _error_bars(columns: Columns) -> tuple[dict[str, float], list[str]]:
    """How often a true box number lies within 1 and 2 standard deviations, and whether large variances go with
    large errors: Spearman's rank correlation of the two, the mean over the four numbers."""
    if "box_var" not in columns:
        return {}, ["the file has no box_var: error bars of boxes are not judged"]
    error, var = flat(columns["error"]), flat(columns["box_var"])  # (boxes, 4) each
    if len(error) < 2:
        return {}, ["fewer than two boxes are right: their error bars cannot be judged"]
    std = np.sqrt(var)
    bars = {f"within_{k}_sigma": float((np.abs(error) <= k * std).mean()) for k in (1, 2)}
    varied = [i for i in range(4) if np.ptp(var[:, i]) > 0 and np.ptp(np.square(error[:, i])) > 0]
    if not varied:
        return bars, ["the variance of boxes is constant, so that its rank correlation is undefined"]
    spearman = needed("scipy.stats").spearmanr
    ranks = [float(spearman(var[:, i], np.square(error[:, i])).statistic) for i in varied]
    return {**bars, "box_rank_correlation": float(np.mean(ranks))}, []


def box_caption(columns: Columns, row: int) -> tuple[str, str]:
    """The classes of the boxes that are shown, and those of the objects, in order."""
    shown = columns["class"][row][: len(columns[SCORE + "source_confidence"][row])]
    return _listed(shown), _listed(columns["objects"][row]) if "objects" in columns else ""


def _listed(kinds: Array, most: int = 8) -> str:
    named = [str(kind) for kind in sorted(kinds)]
    return ", ".join(named[:most] + ["…"] * (len(named) > most)) or "none"
