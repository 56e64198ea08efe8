"""How good a converted file's uncertainty is on labelled data, beside the source model by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gapa_onnx.arrays import Array
from gapa_onnx.data import ImageOptions, Preparation, TextOptions
from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation import metrics
from gapa_onnx.measure.evaluation.answers import ConvertedFile, open_converted
from gapa_onnx.measure.evaluation.collection import columns_of
from gapa_onnx.measure.evaluation.judges import judge_of, prepared
from gapa_onnx.measure.evaluation.promises import kept
from gapa_onnx.measure.evaluation.result import Cost, Evaluation, Shift
from gapa_onnx.measure.evaluation.rows import (
    FLAGGED,
    FLAGGED_BOXES,
    VALID,
    Columns,
    Findings,
    concatenate,
    flat,
    scores_in,
)
from gapa_onnx.measure.evaluation.shifts import ShiftedSet, shifted_sets
from gapa_onnx.measure.evaluation.thumbnails import Gallery
from gapa_onnx.measure.evaluation.timing import measure_cost
from gapa_onnx.model.load import load
from gapa_onnx.progress import Progress, silent
from gapa_onnx.sessions.feeding import Feeding

CURVE_POINTS = 2000  #: of a risk-coverage curve that is kept for drawing; its area counts every row


def evaluate(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    labels: Any = None,
    *,
    ood: Any = None,
    shifts: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    output: str | None = None,
    batch_size: int | None = None,
    images: ImageOptions | None = None,
    text: TextOptions | None = None,
    progress: Progress = silent,
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
        ignore, next tokens (N, T) with negative ones to ignore. For a detector the boxes of a COCO-style .json,
        or what it holds as a dict; images are found by file_name where the data are image files, else by order.
        A file with a score only needs none, and text that a decoder reads has the tokens that follow.
    ood: data unlike those of the training, without labels: one source of data, or a list of paths or arrays.
    shifts: a folder of ever stranger data sets with the same labels (or their own, under y in a .npz).
    source: the file of the source model, to measure what the conversion costs.
    output: which output to evaluate, where several have a task.
    batch_size: rows to run the file on at a time; as many as fit well into memory unless given.
    images, text: how these become inputs; what is left open, or all, as the file was calibrated.

    Example
    -------
    >>> found = evaluate("model.gapa.onnx", "test.npz", "test_labels.npy", ood="elsewhere.npz")
    >>> found.metrics["gapa"]["nll"] < found.metrics["source"]["nll"]
    """
    run = _Run(_opened(model, output, source), batch_size, Preparation.of(images, text), progress)
    given = run.open(data)
    truth = run.read(labels, given)
    unlike = {name: run.open(one) for name, one in named_sets(ood).items()}
    series = [] if shifts is None else shifted_sets(Path(shifts))
    inside = _inside(run, given, truth)
    outside = _outside(run, unlike)
    shifted = tuple(_shift(run, one, truth) for one in series)
    cost, sentence = _cost(run, source, model, given)
    return _summary(run, inside, outside, shifted, cost, sentence)


class _Run:
    """A converted file with the judge of its task, and how data are fed to it."""

    def __init__(
        self,
        converted: ConvertedFile,
        batch_size: int | None,
        preparation: Preparation,
        progress: Progress,
    ):
        self.converted, self.judge = converted, judge_of(converted)
        self.batch_size, self.preparation, self.progress = batch_size, preparation, progress

    def open(self, data: Any) -> Feeding:
        return self.converted.open_data(data, self.preparation, self.batch_size)

    def read(self, labels: Any, data: Feeding) -> Array | None:
        """What is true of each row, where predictions are held against that; a judge that has to see data first has
        then seen them."""
        if not self.judge.by_labels:
            return None
        text = data.data.text
        if labels is None and self.converted.answered.task == "tokens" and text is not None and text.goes_on:
            labels = text.next_tokens()
        if labels is None:
            raise UserError(
                f"predictions of {self.converted.file} are judged by labels, and none are given",
                "give `labels`, what is true of each row",
            )
        self.judge, truth = prepared(self.judge, self.converted, data, labels)
        return truth

    def gallery(self, origin: str) -> Gallery:
        prepared = self.converted.remembered.complete(self.preparation)
        return Gallery(prepared.images, self.judge.caption, origin)

    def columns_of(
        self, data: Feeding, labels: Array | None, text: str, gallery: Gallery | None = None
    ) -> tuple[Columns, int]:
        """The columns of all rows that the file has an answer for, and the number of the others."""
        return columns_of(
            self.converted, self.judge, data, labels,
            gallery=gallery, progress=self.progress, text=text,
        )  # fmt: skip


@dataclass(frozen=True)
class _Inside:
    """What the labelled rows gave."""

    columns: Columns
    lost: int  #: rows without an answer
    gallery: Gallery
    findings: Findings


@dataclass(frozen=True)
class _Outside:
    """What the OOD sets gave, each under its name."""

    sets: Mapping[str, Columns]
    lost: int
    gallery: Gallery

    @property
    def columns(self) -> Columns:
        """Those of all sets together; none without a set."""
        return concatenate(self.sets.values()) if self.sets else {}


def _opened(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str | None,
    source: str | os.PathLike[str] | None,
) -> ConvertedFile:
    """The file, once it is certain that all is there to judge it."""
    for module in ("scipy.special", "scipy.stats", "sklearn.metrics"):
        metrics.needed(module)
    converted = open_converted(model, output)
    if source is not None:
        _require_source(source, converted)
    return converted


def _require_source(source: str | os.PathLike[str], converted: ConvertedFile) -> None:
    """A cost ratio to some other model would mislead."""
    expected = converted.provenance.get("source", {}).get("sha256")
    if expected and load(Path(source)).sha256 != expected:
        raise UserError(
            f"{converted.file} was not converted from {source}: the sha256 differs",
            "give the file that was converted, or leave `source` out",
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


def _inside(run: _Run, data: Feeding, truth: Array | None) -> _Inside:
    """Run the labelled rows and judge them."""
    gallery = run.gallery("data")
    columns, lost = run.columns_of(data, truth, "evaluating", gallery)
    return _Inside(columns, lost, gallery, run.judge.findings(columns))


def _outside(run: _Run, unlike: Mapping[str, Feeding]) -> _Outside:
    """Run the OOD sets one after the other."""
    gallery = run.gallery("ood")
    found = {name: run.columns_of(data, None, f"OOD set {name}", gallery) for name, data in unlike.items()}
    sets = {name: columns for name, (columns, _) in found.items()}
    return _Outside(sets, sum(lost for _, lost in found.values()), gallery)


def _shift(run: _Run, one: ShiftedSet, truth: Array | None) -> Shift:
    """Run one set of a series of ever stranger ones."""
    labels = truth if one.labels is None or truth is None else one.labels
    columns, _ = run.columns_of(run.open(one.path), labels, one.name)
    means = {name: float(values.mean()) for name, values in scores_in(columns).items()}
    return Shift(one.name, one.position, run.judge.findings(columns).metrics, means)


def _cost(
    run: _Run,
    source: str | os.PathLike[str] | None,
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Feeding,
) -> tuple[Cost | None, str | None]:
    """What the file costs beside its source, and a sentence about it; nothing without the source."""
    if source is None:
        return None, None
    run.progress("timing", 0.0)
    return measure_cost(source, model, next(data.batches()))


def _summary(
    run: _Run,
    inside: _Inside,
    outside: _Outside,
    shifts: tuple[Shift, ...],
    cost: Cost | None,
    sentence: str | None,
) -> Evaluation:
    """All numbers that follow from what was collected."""
    converted, found = run.converted, inside.findings
    everything = {"data": inside.columns, "ood": outside.columns}
    scores, strange = scores_in(everything["data"]), scores_in(everything["ood"])
    ordering = {name: scores[name] for name in (scores if found.ordering is None else found.ordering)}
    curves = _risk_curves(found.losses, ordering)
    left_out = {"data": inside.lost, **({"ood": outside.lost} if outside.sets else {})}
    lost = [f"rows left out of {kind} for NaN answers: {rows}" for kind, rows in left_out.items() if rows]
    return Evaluation(
        file=converted.file,
        output=converted.answered.output,
        task=converted.answered.task,
        rows=len(inside.columns[VALID]),
        ood_rows=sum(len(columns[VALID]) for columns in outside.sets.values()),
        metrics=found.metrics,
        detection=_detection(scores, strange),
        scores={name: (values, strange.get(name)) for name, values in scores.items()},
        reliability=found.reliability,
        risk_coverage={name: _thinned(*curve) for name, curve in curves.items()},
        aurc={name: float(risk.mean()) for name, (_, risk) in curves.items()},
        flagged=_flagged(everything),
        threshold=converted.answered.threshold,
        shifts=shifts,
        most_certain=inside.gallery.most_certain + outside.gallery.most_certain,
        least_certain=inside.gallery.least_certain + outside.gallery.least_certain,
        segmentation=inside.gallery.segmented,
        intervals=found.intervals,
        cost=cost,
        provenance=converted.provenance,
        error_detection=found.error_detection,
        ood_sets={name: _detection(scores, scores_in(columns)) for name, columns in outside.sets.items()},
        risk=found.risk,
        left_out=left_out,
        promises=kept(converted.head, inside.columns, everything["ood"]),
        notes=(*found.notes, *lost, *([] if sentence is None else [sentence])),
    )


def _risk_curves(losses: Array, scores: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Risk against coverage by each score, over the rows that have a label."""
    known = ~np.isnan(losses)
    if not known.any():
        return {}
    return {name: metrics.risk_coverage(losses[known], values[known]) for name, values in scores.items()}


def _flagged(sets: Mapping[str, Columns]) -> dict[str, float]:
    """The share of each set, and of its boxes, that the file's own threshold flags, where it has one."""
    shares = {}
    for name, suffix in ((FLAGGED, ""), (FLAGGED_BOXES, " boxes")):
        for kind, columns in sets.items():
            if name in columns and len(flags := flat(columns[name])):
                shares[kind + suffix] = float(flags.mean())
    return shares


def _detection(inside: Mapping[str, Array], outside: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    return {name: metrics.detection(inside[name], values) for name, values in outside.items()}


def _thinned(coverage: Array, risk: Array) -> tuple[Array, Array]:
    if len(coverage) <= CURVE_POINTS:
        return coverage, risk
    kept = np.linspace(0, len(coverage) - 1, CURVE_POINTS).astype(np.int64)
    return coverage[kept], risk[kept]
