"""How good a converted file's uncertainty is on labelled data, beside the source model by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gapa_onnx.arrays import Array
from gapa_onnx.data import ImageOptions
from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation import metrics
from gapa_onnx.measure.evaluation.answers import ConvertedFile, open_converted
from gapa_onnx.measure.evaluation.collection import Progress, collect
from gapa_onnx.measure.evaluation.judges import Judge, judge_of
from gapa_onnx.measure.evaluation.labels import read_labels
from gapa_onnx.measure.evaluation.result import Evaluation, Shift
from gapa_onnx.measure.evaluation.rows import FLAGGED, VALID, Columns, concatenate, scores_in
from gapa_onnx.measure.evaluation.shifts import ShiftedSet, shifted_sets
from gapa_onnx.measure.evaluation.thumbnails import Gallery
from gapa_onnx.measure.evaluation.timing import measure_cost
from gapa_onnx.model.load import load

CURVE_POINTS = 2000  #: of a risk-coverage curve that is kept for drawing; its area counts every row


def evaluate(
    model: str | os.PathLike | onnx.ModelProto,
    data: Any,
    labels: Any,
    *,
    ood: Any = None,
    shifts: str | os.PathLike | None = None,
    source: str | os.PathLike | None = None,
    output: str | None = None,
    batch_size: int = 256,
    images: ImageOptions = ImageOptions(),
    progress: Progress = lambda text, done: None,
) -> Evaluation:
    """Measure predictions and uncertainties of a converted file, always beside those of its source.

    Rows for which the file answers NaN are left out of every number, and counted (`left_out`). A metric
    that is undefined on the data is left out too, and `notes` says why.

    Parameters
    ----------
    model: path of a converted file, or its ModelProto.
    data: what to feed it, in any form that `convert` takes.
    labels: what is true of each row: a path (.npy, .npz, .csv, .txt) or an array. Classes as whole numbers
        or one-hot, 0/1 matrices for several labels at once, numbers, maps (N, H, W) of classes with 255 to
        ignore, next tokens (N, T) with negative ones to ignore.
    ood: data unlike those of the training, without labels: one source of data, or a list of paths or arrays.
    shifts: a folder of ever stranger data sets with the same labels (or their own, under y in a .npz).
    source: the file of the source model, to measure what the conversion costs.
    output: which output to evaluate, where several have a task.

    Example
    -------
    >>> found = evaluate("model.gapa.onnx", "test.npz", "test_labels.npy", ood="elsewhere.npz")
    >>> found.metrics["gapa"]["nll"] < found.metrics["source"]["nll"]
    """
    for module in ("scipy.special", "scipy.stats", "sklearn.metrics"):
        metrics.needed(module)
    converted = open_converted(model, output)
    if source is not None:
        _require_source(source, converted)
    truth = read_labels(labels)
    judge = judge_of(converted)
    opened = converted.open_data(data, images)
    unlike = {name: converted.open_data(given, images) for name, given in named_sets(ood).items()}
    series = [] if shifts is None else shifted_sets(Path(shifts))

    galleries = [Gallery(images, judge.caption, origin) for origin in ("data", "ood")]
    columns, dropped = collect(
        converted, judge, opened, truth, batch_size, gallery=galleries[0], progress=progress
    )
    found = judge.findings(columns)
    notes, left_out = [*found.notes], {"data": dropped}
    strange: dict[str, Columns] = {}
    for name, given in unlike.items():
        strange[name], lost = collect(
            converted, judge, given, None, batch_size,
            gallery=galleries[1], progress=progress, text=f"OOD set {name}",
        )  # fmt: skip
        left_out["ood"] = left_out.get("ood", 0) + lost
    notes += [f"rows left out of {kind} for NaN answers: {lost}" for kind, lost in left_out.items() if lost]

    scores = scores_in(columns)
    everything = {"data": columns, **({"ood": concatenate(strange.values())} if strange else {})}
    outside = scores_in(everything["ood"]) if strange else {}
    known = ~np.isnan(found.losses)
    curves = {name: metrics.risk_coverage(found.losses[known], v[known]) for name, v in scores.items()}
    shifted = tuple(_shift(converted, judge, one, truth, batch_size, images, progress) for one in series)
    cost = None
    if source is not None:
        progress("timing", 0.0)
        cost, sentence = measure_cost(source, model, next(opened.batches(batch_size)))
        notes.append(sentence)
    return Evaluation(
        file=converted.file,
        output=converted.answered.output,
        task=converted.answered.task,
        rows=len(columns[VALID]),
        ood_rows=sum(len(one[VALID]) for one in strange.values()),
        metrics=found.metrics,
        detection=_detection(scores, outside),
        scores={name: (values, outside.get(name)) for name, values in scores.items()},
        reliability=found.reliability,
        risk_coverage={name: _thinned(*curve) for name, curve in curves.items()},
        aurc={name: float(risk.mean()) for name, (_, risk) in curves.items()},
        flagged={kind: float(some[FLAGGED].mean()) for kind, some in everything.items() if FLAGGED in some},
        threshold=converted.answered.threshold,
        shifts=shifted,
        most_certain=sum((gallery.most_certain for gallery in galleries), ()),
        least_certain=sum((gallery.least_certain for gallery in galleries), ()),
        segmentation=galleries[0].segmented,
        intervals=found.intervals,
        cost=cost,
        provenance=converted.provenance,
        error_detection=found.error_detection,
        ood_sets={name: _detection(scores, scores_in(one)) for name, one in strange.items()},
        risk=found.risk,
        left_out=left_out,
        notes=tuple(notes),
    )


def _require_source(source: str | os.PathLike, converted: ConvertedFile) -> None:
    """A cost ratio to some other model would mislead."""
    expected = converted.provenance.get("source", {}).get("sha256")
    if expected and load(source).sha256 != expected:
        raise UserError(
            f"{converted.file} was not converted from {source}: the sha256 differs",
            "give the file that was converted, or leave --source out",
        )


def named_sets(ood: Any) -> dict[str, Any]:
    """OOD sets by name: none, one source of data, or a list of paths or arrays."""
    if ood is None:
        return {}
    several = isinstance(ood, (list, tuple)) and all(
        isinstance(entry, (str, os.PathLike, np.ndarray)) for entry in ood
    )
    found: dict[str, Any] = {}
    for number, entry in enumerate(ood if several else [ood], start=1):
        name = Path(entry).stem if isinstance(entry, (str, os.PathLike)) else f"set {number}"
        found[name if name not in found else f"{name} {number}"] = entry
    return found


def _shift(
    converted: ConvertedFile,
    judge: Judge,
    one: ShiftedSet,
    truth: Array,
    batch_size: int,
    images: ImageOptions,
    progress: Progress,
) -> Shift:
    labels = truth if one.labels is None else one.labels
    data = converted.open_data(one.path, images)
    columns, _ = collect(converted, judge, data, labels, batch_size, progress=progress, text=one.name)
    means = {name: float(values.mean()) for name, values in scores_in(columns).items()}
    return Shift(one.name, one.position, judge.findings(columns).metrics, means)


def _detection(inside: Mapping[str, Array], outside: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    return {name: metrics.detection(inside[name], values) for name, values in outside.items()}


def _thinned(coverage: Array, risk: Array) -> tuple[Array, Array]:
    if len(coverage) <= CURVE_POINTS:
        return coverage, risk
    kept = np.linspace(0, len(coverage) - 1, CURVE_POINTS).astype(np.int64)
    return coverage[kept], risk[kept]
