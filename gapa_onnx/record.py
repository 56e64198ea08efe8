"""What a converted file says about itself: one typed record, kept as JSON in the file's metadata_props.

`emit` alone writes it; everything else reads it here. docs/file-format.md describes every field, and every tensor
that a record names. A record that is not as described is the user's to fix: one sentence, never a trace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import onnx

from gapa_onnx.errors import UserError
from gapa_onnx.strict_json import Damage, decoded, encoded, shown

METADATA_KEY = "gapa_onnx"
FORMAT = 5  #: of the record; raised whenever a field is added, removed or changes its meaning, as the reader is strict


# Text that is one of some words.
Layout = Annotated[str, "rows", "positions", "pooled", "flat"]
Index = Annotated[str, "flat", "ivf", "ivfpq", "hnsw", "local", "prepared"]
Metric = Annotated[
    str, "euclidean", "standardised", "direction", "whitened", "whitened-direction", "polar", "projected"
]
Storage = Annotated[str, "float32", "float16", "int8"]
Task = Annotated[
    str, "classification", "multilabel", "regression", "segmentation", "tokens", "detection", "none"
]
Link = Annotated[str, "softmax", "sigmoid", "identity"]
Bridge = Annotated[str, "shared", "per-class"]
Quadrature = Annotated[str, "latin", "grid", "samples"]
Score = Annotated[str, "witnesses", "variance", "epistemic", "share"]
Promise = Annotated[str, "lac", "aps", "raps", "error", "interval"]
RowsAmong = Annotated[str, "held-out rows", "calibration rows", "documents set apart"]
Holds = Annotated[str, "exactly", "approximately"]
Channels = Annotated[str, "first", "last"]
Colors = Annotated[str, "rgb", "bgr", "grey"]
TextRows = Annotated[str, "pieces", "documents"]


@dataclass(frozen=True)
class SourceRecord:
    """The model that the file was made from."""

    file: str | None
    sha256: str
    opset: int
    producer: str


@dataclass(frozen=True)
class HeldOutRecord:
    """The rows that promises rest on, in two parts."""

    fitting: int  #: part A, that temperature, τ and noise were fitted to
    counting: int  #: part B, that promises were counted on
    among: RowsAmong  #: apart from the calibration rows, or among them


@dataclass(frozen=True)
class DataRecord:
    """The calibration data."""

    rows: int
    dropped: int  #: query rows left out for a NaN or an infinity
    held_out: HeldOutRecord | None = None


@dataclass(frozen=True)
class ImageRecord:
    """How images became the model's input: (pixel · white / 255 − mean) / std, pixels between 0 and 255."""

    height: int | None  #: that images were resized to; None: each as it is
    width: int | None
    layout: Channels  #: where the channels are: (N, C, H, W) or (N, H, W, C)
    colors: Colors  #: what the channels are, in their order
    white: int  #: what a white pixel is before mean and std: 1, or 255 where the input takes whole numbers
    mean: tuple[float, ...]  #: one value, or one per channel in their order
    std: tuple[float, ...]


@dataclass(frozen=True)
class TextRecord:
    """How text became the model's input: documents, their tokens, and sequences of these."""

    tokenizer: str  #: sha256 of its tokenizer.json, which the file keeps too unless it is large
    file: str | None  #: what that was called
    seq_len: int  #: tokens of a sequence at most
    field: str  #: of a .jsonl, that holds the text
    rows: TextRows  #: a document is cut into several sequences, or its beginning is one
    vocabulary: int | None  #: how many tokens the model knows, where its graph tells
    longest: int | None  #: tokens of a sequence that the model takes at most, the same
    head_size: int | None  #: numbers of one head in a cache, the same


@dataclass(frozen=True, kw_only=True)
class PlaceRecord:
    """A place with a share: where it is, its numbers, and the names of its tensors. A witness is no more than that."""

    name: str  #: of the node or tensor, as people call it
    query: str  #: tensor of the source that is compared with the inducing points
    output: str  #: tensor of the source that becomes uncertain, if it is a site
    activation: str | None
    layout: Layout  #: what of a tensor is one query
    axis: int  #: of the query tensor's features; -1, the last, where its rank is not known
    operator: str  #: the node of the operator; its name is that of the share it computes
    share: str  #: tensor: the unexplained share s of each query
    rows: int  #: queries that it was fitted to
    points: int  #: inducing points
    least_rows: int  #: that each of these is the mean of, at least; 1 where calibration rows themselves are among them
    width: int
    k: int
    length_scale: float
    jitter: float
    index: Index  #: how neighbours are found
    index_settings: Mapping[str, int | float]
    recall: float | None  #: share of the nearest points that the index finds on held-out rows; 1 is all
    share_error: float  #: largest error of s that the index makes on held-out rows
    storage: Storage  #: of the inducing points
    storage_error: float  #: by which s moves at most on held-out rows since the points are rounded
    share_quantiles: Mapping[str, float]  #: of s over the calibration data, each row left out
    mask: str | None = None  #: tensor that tells padding among its queries: by 0, after a ~ by the rest
    joined: tuple[str, ...] = ()  #: tensors of the source whose numbers stand behind those of the query
    metric: Metric = "euclidean"  #: of distances between queries
    #: mean AUROC of strange inputs by each metric that was tried, where it was chosen so
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SiteRecord(PlaceRecord):
    """A place where variance is born."""

    scale: float  #: τ
    ceiling: float  #: A


@dataclass(frozen=True)
class PointsRecord:
    """The nodes of the quadrature that uncertainty is split at."""

    kind: Quadrature
    count: int


@dataclass(frozen=True)
class GaugeRecord:
    """Numbers x of ordinary inputs as a scale: Σ (log x - centre) · slope."""

    reads: tuple[str, ...]  #: tensors (N, 1), in the order of centre and slope
    centre: str  #: initializer
    slope: str  #: initializer


@dataclass(frozen=True)
class WitnessesRecord:
    """What a score by witnesses is the sum of."""

    last: GaugeRecord  #: the share of the last place, as it is
    earlier: GaugeRecord | None = None  #: the softplus of the shares of earlier places together
    entropy: GaugeRecord | None = (
        None  #: a quarter of the softplus of the entropy of the source's own prediction
    )


@dataclass(frozen=True)
class ScoreRecord:
    """The score of an output on ordinary inputs, and how rare a score must be for an input to be flagged."""

    kind: Score
    rows: int  #: that ordinary scores were taken over
    source: str  #: which rows those were
    holds: Holds  #: exactly where nothing was fitted to these rows, so that a p-value keeps what it says
    ranked: str  #: tensor whose values p-values rank: the score, or the same by shares alone
    quantiles: Mapping[str, float]  #: of what is ranked
    ordinary: str  #: initializer: the sorted scores, in rows
    largest: str  #: initializer: the largest of each row
    count: str  #: initializer: how many they are
    level: str  #: initializer: the p-value at and below which an input is flagged
    quantile: float | None  #: 1 - level; None where the threshold was given as a number
    threshold: float  #: in units of what is ranked
    lengths: Mapping[str, float] | None = None  #: how it is levelled over lengths, where a mask tells them
    witnesses: WitnessesRecord | None = None  #: where it is made of their shares


@dataclass(frozen=True)
class NoiseRecord:
    """How well the noise head describes left-out targets, in nats."""

    rows: int
    nll: float
    constant_nll: float  #: of the best constant noise


@dataclass(frozen=True)
class TemperatureRecord:
    """How probabilities were calibrated by labels: logits are divided by the temperature, τ multiplied by a factor."""

    value: float
    factor: float  #: of τ of every site
    rows: int  #: whose labels it was fitted to
    nll: float  #: of these rows with it, in nats per row
    nll_before: float  #: of the same rows without


@dataclass(frozen=True)
class PromiseRecord:
    """What a file promises of rows like those that it was counted on."""

    kind: Promise  #: of sets: lac, aps or raps; the error of what is not deferred; an interval
    level: float  #: the coverage, or the most error
    rows: int  #: that it was counted on, and that nothing was fitted to
    holds: Holds  #: exactly for held-out rows; approximately where they are calibration rows
    tensor: str  #: the initializer with the line at this level
    table: Mapping[str, tuple[float, ...]]  #: the line, or one for each class, by level
    confidence: float | None = None  #: with which an error is not exceeded; a coverage holds on average


@dataclass(frozen=True)
class DetectionRecord:
    """Where boxes and class scores of a detector's candidates lie in the outputs of the source."""

    boxes: str  #: graph output that holds the box numbers; an inner tensor where NonMaxSuppression selects
    box_axis: int  #: of its features, among them the 4 box numbers
    box_start: int  #: the first of the 4
    candidate_axis: int  #: of the same output
    classes: str  #: graph output that holds the class scores
    class_axis: int
    class_start: int  #: the first of the class scores
    classes_count: int | None  #: None: all from there on
    objectness: int | None  #: channel of the class scores' output that says whether there is an object
    background: int | None  #: class number that means "no object"
    candidates: int | None  #: how many are described, the most confident ones; None: all


@dataclass(frozen=True)
class HeadRecord:
    """What one output means, and what stands beside it."""

    task: Task
    logits: str  #: tensor
    link: Link
    axis: int | None  #: of the classes
    reason: str
    outputs: Mapping[str, str]  #: role -> graph output
    bridge: Bridge | None = None
    points: PointsRecord | None = None
    operator: str | None = None  #: the node of the head, where it is one operator
    scores: Mapping[str, ScoreRecord] = field(default_factory=dict)  #: by role: score, image_score, seq_score
    noise: NoiseRecord | None = None
    uncovered: str | None = None  #: which part of the output varies with the data and has no variance
    mask: str | None = None  #: tensor that tells padding among its positions, as that of a site
    detection: DetectionRecord | None = None
    temperature: TemperatureRecord | None = None  #: where labels were given
    sets: PromiseRecord | None = None
    deferral: PromiseRecord | None = None
    intervals: PromiseRecord | None = None

    @property
    def score(self) -> ScoreRecord | None:
        return self.scores.get("score")

    @property
    def of_tokens(self) -> bool:
        """Whether only a vocabulary's leading tokens have a variance."""
        return "token_var" in self.outputs and "var" not in self.outputs

    @property
    def score_only(self) -> bool:
        """Whether the output has a score and no variance, since none reaches it."""
        return self.task == "none" and "var" not in self.outputs and "score" in self.outputs


@dataclass(frozen=True)
class CutRecord:
    """A node behind which outputs count as certain, because its variance cannot be stated."""

    node: str
    operator: str
    reason: str


@dataclass(frozen=True)
class TrialRecord:
    """Settings that were tried to keep a budget, what they cost, and what they leave unexplained."""

    sites: str
    solver: str
    m: int
    k: int
    ratio: float  #: time of the converted model over the source's
    control: float  #: the source against itself in the same run
    share_median: float  #: of left-out calibration rows, the mean over the sites
    share_high: float  #: the same at the 0.95 quantile
    recall: float  #: the smallest of any site


@dataclass(frozen=True)
class BudgetRecord:
    """How a budget was kept; the last trial is the one that was taken."""

    limit: float
    trials: tuple[TrialRecord, ...]


@dataclass(frozen=True)
class Record:
    """All that a converted file says about itself."""

    format: int
    version: str  #: of gapa-onnx
    source: SourceRecord
    settings: Mapping[str, str | int | float | None]
    data: DataRecord
    sites: tuple[SiteRecord, ...]  #: in the order of the graph
    witnesses: tuple[PlaceRecord, ...]  #: places that pass no variance on, in the order of the graph
    heads: Mapping[str, HeadRecord]  #: by output
    cuts: tuple[CutRecord, ...]
    images: ImageRecord | None = None  #: where the calibration data were images
    text: TextRecord | None = None  #: where they were text
    budget: BudgetRecord | None = None
    uncovered: tuple[str, ...] = ()  #: outputs that vary with the data and have no variance at all
    states: tuple[str, ...] = ()  #: outputs that are fed again at the next call, and have no variance
    digest: str | None = None  #: of all that the file computes by; None in a model that is not written yet

    @property
    def places(self) -> tuple[PlaceRecord, ...]:
        """Where a share is computed."""
        return (*self.sites, *self.witnesses)

    def as_json(self) -> dict[str, Any]:
        """The record as JSON has it; what holds its default is left out."""
        plain: dict[str, Any] = encoded(self)
        return plain


# --------------------------------------------------------------------- reading


def read(proto: onnx.ModelProto) -> Record | None:
    """The record of a converted model, None for any other model."""
    for entry in proto.metadata_props:
        if entry.key == METADATA_KEY:
            return parse(entry.value)
    return None


def require(proto: onnx.ModelProto, label: str) -> Record:
    """The record of a converted model; UserError for any other."""
    record = read(proto)
    if record is None:
        raise UserError(
            f"{label} was not written by gapa-onnx",
            "give a converted file, after its source where both are asked",
        )
    return record


def parse(text: str) -> Record:
    """The record from its JSON text; UserError where it is damaged, or newer than this program."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise damaged(f"it is not JSON ({error})") from error
    if not isinstance(plain, dict):
        raise damaged(f"it is {shown(plain)}, not an object")
    version = plain.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise UserError(
            f"the file's record has format {shown(version)}, and this gapa-onnx reads up to {FORMAT}",
            "update gapa-onnx",
        )
    if version is None and "sites" in plain:
        version = 0  # the first records had no number
    if type(version) is int and 0 <= version < FORMAT:
        raise UserError(
            f"the file was written by an older gapa-onnx, with a record of format {version}; this one reads {FORMAT}",
            "convert the source model again; in a session the file runs as it did",
        )
    if "format" in plain and version != FORMAT:
        raise damaged(f"format is {shown(version)}, not {FORMAT}")
    try:
        record: Record = decoded(Record, plain, "")
    except Damage as damage:
        raise damaged(str(damage)) from damage
    return record


def damaged(what: str) -> UserError:
    """The error of a record that does not fit its description, or its file."""
    return UserError(
        f"the file's record is damaged: {' '.join(what.split())}", "convert the source model again"
    )
