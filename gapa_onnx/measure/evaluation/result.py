"""What an evaluation found out, as plain data: `evaluate` fills it in, the report draws it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gapa_onnx.arrays import Array


@dataclass(frozen=True)
class ReliabilityBin:
    """Predictions whose confidence lies in one interval."""

    low: float
    high: float
    count: int
    confidence: float  #: mean over the bin, NaN where it is empty
    accuracy: float


@dataclass(frozen=True)
class Shift:
    """One data set of a series of ever stranger ones (rotations, corruptions)."""

    name: str
    position: float  #: the number in its name, else its place in the series
    metrics: Mapping[str, Mapping[str, float]]  #: as `Evaluation.metrics`
    mean_scores: Mapping[str, float]  #: mean of each score over the set


@dataclass(frozen=True)
class Example:
    """One input that can be shown."""

    row: int
    image: Array = field(repr=False)  #: (h, w) or (h, w, 3), uint8
    score: float
    predicted: str
    target: str
    origin: str = "data"  #: or "ood"


@dataclass(frozen=True)
class SegmentationExample:
    """One image with what was predicted, where that is wrong, and where it is uncertain; all (h, w)."""

    row: int
    image: Array | None = field(repr=False)  #: (h, w) or (h, w, 3), uint8
    predicted: Array = field(repr=False)
    target: Array = field(repr=False)
    uncertainty: Array = field(repr=False)  #: epistemic, per pixel


@dataclass(frozen=True)
class Intervals:
    """Regression: what was predicted, how surely, and what was true; each (n,) for one target."""

    mean: Array = field(repr=False)
    std: Array = field(repr=False)  #: of the total variance where there is a noise head, else epistemic
    target: Array = field(repr=False)
    nominal: Array = field(repr=False)  #: levels of centred intervals, (levels,)
    coverage: Array = field(repr=False)  #: how many targets lie within, (levels,)


@dataclass(frozen=True)
class Cost:
    """Time of the converted file over that of the source, measured side by side."""

    ratio: float
    control: float  #: the source against itself in the same run
    batch: int
    threads: int


@dataclass(frozen=True)
class Evaluation:
    """All that was measured about one output of a converted file."""

    file: str
    output: str
    task: str
    rows: int
    ood_rows: int
    #: "source" (the model by itself) and "gapa" -> metric -> value
    metrics: Mapping[str, Mapping[str, float]]
    #: score -> {"auroc", "aupr", "fpr95"} for telling the OOD set apart; empty without one
    detection: Mapping[str, Mapping[str, float]]
    #: score -> (per row of the data, per row of the OOD set or None); higher is stranger
    scores: Mapping[str, tuple[Array, Array | None]] = field(repr=False)
    #: "source" and "gapa" -> bins; classification only
    reliability: Mapping[str, tuple[ReliabilityBin, ...]] = field(repr=False)
    #: score -> (coverage (n,), risk (n,)): error rate of the most certain part of the data
    risk_coverage: Mapping[str, tuple[Array, Array]] = field(repr=False)
    #: score -> area under that curve
    aurc: Mapping[str, float]
    #: "data" and "ood" -> share of rows that the file's own threshold flags
    flagged: Mapping[str, float]
    threshold: Mapping[str, float] | None  #: {"quantile", "threshold"} of the file
    shifts: tuple[Shift, ...] = ()
    most_certain: tuple[Example, ...] = ()
    least_certain: tuple[Example, ...] = ()
    segmentation: tuple[SegmentationExample, ...] = ()
    intervals: Intervals | None = None
    cost: Cost | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict, repr=False)
    #: score -> {"auroc", "aupr", "fpr95"} for telling wrong predictions from right ones; classes only
    error_detection: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    #: OOD set -> as `detection`, each set by itself; `detection` takes all of them together
    ood_sets: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    risk: str = "error rate"  #: what the risk of `risk_coverage` is
    #: "data" and "ood" -> rows that no number counts, because the file answers with NaN there
    left_out: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  #: sentences for people: what is missing here, and why
    #: "sets", "deferral" and "intervals" -> group of rows -> what is promised and what was found
    promises: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
