"""What a converted file says about itself: one typed record, kept as JSON in the file's metadata_props.

`emit` alone writes it; everything else reads it here. docs/file-format.md describes every field, and every tensor
that a record names. A record that is not as described is the user's to fix: one sentence, never a trace.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import onnx

from gapa_onnx.errors import UserError

METADATA_KEY = "gapa_onnx"
FORMAT = 2  #: of the record; raised whenever a field is added, removed or changes its meaning, as the reader is strict


# Text that is one of some words.
Metric = Annotated[str, "euclidean", "whitened", "direction"]
Layout = Annotated[str, "rows", "positions", "pooled", "flat"]
Index = Annotated[str, "flat", "ivf", "ivfpq", "hnsw", "local"]
Storage = Annotated[str, "float32", "float16", "int8"]
Task = Annotated[
    str, "classification", "multilabel", "regression", "segmentation", "tokens", "detection", "none"
]
Link = Annotated[str, "softmax", "sigmoid", "identity"]
Bridge = Annotated[str, "shared", "per-class"]
Quadrature = Annotated[str, "latin", "grid", "samples"]
Score = Annotated[str, "variance", "epistemic"]
Channels = Annotated[str, "first", "last"]
Colors = Annotated[str, "rgb", "bgr", "grey"]


@dataclass(frozen=True)
class SourceRecord:
    """The model that the file was made from."""

    file: str | None
    sha256: str
    opset: int
    producer: str


@dataclass(frozen=True)
class DataRecord:
    """The calibration data."""

    rows: int
    dropped: int  #: query rows left out for a NaN or an infinity


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
class SiteRecord:
    """One site: where it is, its numbers, and the names of its tensors."""

    name: str  #: of the node or tensor, as people call it
    query: str  #: tensor of the source that is compared with the inducing points
    output: str  #: tensor of the source that becomes uncertain
    activation: str | None
    layout: Layout  #: what of a tensor is one query
    metric: Metric  #: of distances between queries
    axis: int  #: of the query tensor's features; -1, the last, where its rank is not known
    operator: str  #: the node of the operator; its name is that of the share it computes
    share: str  #: tensor: the unexplained share s of each query
    rows: int  #: queries that it was fitted to
    points: int  #: inducing points
    width: int
    k: int
    length_scale: float
    scale: float  #: τ
    ceiling: float  #: A
    jitter: float
    index: Index  #: how neighbours are found
    index_settings: Mapping[str, int | float]
    recall: float | None  #: share of the nearest points that the index finds on held-out rows; 1 is all
    share_error: float  #: largest error of s that the index makes on held-out rows
    storage: Storage  #: of the inducing points
    storage_error: float  #: by which s moves at most on held-out rows since the points are rounded
    share_quantiles: Mapping[str, float]  #: of s over the calibration data, each row left out
    mask: str | None = (
        None  #: tensor that tells padding among its queries: where it is 0, after a ~ where it is not
    )


@dataclass(frozen=True)
class PointsRecord:
    """The nodes of the quadrature that uncertainty is split at."""

    kind: Quadrature
    count: int


@dataclass(frozen=True)
class ScoreRecord:
    """The score of an output on ordinary inputs, and the line beyond which an input is flagged."""

    kind: Score
    rows: int  #: that the quantiles were taken over
    source: str  #: which rows those were
    quantiles: Mapping[str, float]
    tensor: str  #: the initializer that the score is compared with
    quantile: float | None  #: None where the threshold was given as a number
    threshold: float
    lengths: Mapping[str, float] | None = None  #: how it is levelled over lengths, where a mask tells them


@dataclass(frozen=True)
class NoiseRecord:
    """How well the noise head describes left-out targets, in nats per row."""

    rows: int
    nll: float
    constant_nll: float  #: of the best constant noise


@dataclass(frozen=True)
class DetectionRecord:
    """Where boxes and class scores of a detector's candidates lie in the outputs of the source."""

    boxes: str  #: graph output that holds the box numbers
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
    score: ScoreRecord | None = None
    image_score: ScoreRecord | None = None  #: of a whole image, where candidates have their own
    noise: NoiseRecord | None = None
    uncovered: str | None = None  #: which part of the output varies with the data and has no variance
    mask: str | None = None  #: tensor that tells padding among its positions, as that of a site
    detection: DetectionRecord | None = None


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
    heads: Mapping[str, HeadRecord]  #: by output
    cuts: tuple[CutRecord, ...]
    images: ImageRecord | None = None  #: where the calibration data were images
    budget: BudgetRecord | None = None
    uncovered: tuple[str, ...] = ()  #: outputs that vary with the data and have no variance at all
    states: tuple[str, ...] = ()  #: outputs that are fed again at the next call, and have no variance

    def as_json(self) -> dict[str, Any]:
        """The record as JSON has it; what holds its default is left out."""
        plain: dict[str, Any] = _encoded(self)
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
        raise damaged(f"it is {_shown(plain)}, not an object")
    version = plain.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise UserError(
            f"the file's record has format {_shown(version)}, and this gapa-onnx reads up to {FORMAT}",
            "update gapa-onnx",
        )
    if "format" in plain and version != FORMAT:
        raise damaged(f"format is {_shown(version)}, not {FORMAT}")
    try:
        record: Record = _decoded(Record, plain, "")
    except _Damage as damage:
        raise damaged(str(damage)) from damage
    return record


def require_outputs(
    heads: Mapping[str, HeadRecord], present: Collection[str], roles: Collection[str] = ()
) -> None:
    """UserError where heads speak of outputs that the model does not have, or lack a role that is needed."""
    for output, head in heads.items():
        missing = [role for role in roles if role not in head.outputs]
        if missing:
            raise damaged(f"heads.{output}.outputs.{missing[0]} is missing")
        named = {f"heads.{output}": output}
        named |= {f"heads.{output}.outputs.{role}": name for role, name in head.outputs.items()}
        if head.detection is not None and "selected_score" not in head.outputs:
            named[f"heads.{output}.detection.boxes"] = head.detection.boxes
            named[f"heads.{output}.detection.classes"] = head.detection.classes
        for place, name in named.items():
            if name not in present:
                raise damaged(f"{place} stands for the output {name!r}, which the model does not have")


def require_thresholds(record: Record, graph: onnx.GraphProto) -> None:
    """UserError where the threshold of a score is not a number of the graph."""
    numbers = {tensor.name for tensor in graph.initializer if math.prod(tensor.dims) == 1}
    for output, head in record.heads.items():
        if head.score is not None and head.score.tensor not in numbers:
            raise damaged(
                f"heads.{output}.score.tensor is {head.score.tensor!r}, which is not a number of the graph"
            )


def damaged(what: str) -> UserError:
    """The error of a record that does not fit its description, or its file."""
    return UserError(
        f"the file's record is damaged: {' '.join(what.split())}", "convert the source model again"
    )


class _Damage(ValueError):
    """What is wrong at one place of a record."""


_NAMES = {str: "text", int: "a whole number", float: "a finite number"}


def _decoded(kind: Any, plain: Any, where: str) -> Any:
    """A value of the annotated type from what JSON gave; raises _Damage."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(kind), plain, where)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, plain, where)
    if origin is tuple:
        _require(isinstance(plain, list), where, plain, "a list")
        return tuple(_decoded(get_args(kind)[0], part, f"{where}[{i}]") for i, part in enumerate(plain))
    if origin is Mapping:
        _require(isinstance(plain, dict), where, plain, "an object")
        return {name: _decoded(get_args(kind)[1], part, f"{where}.{name}") for name, part in plain.items()}
    if origin is Annotated:
        words = get_args(kind)[1:]
        _require(plain in words, where, plain, f"one of {', '.join(words)}")
        return plain
    _require(_fits(kind, plain), where, plain, _NAMES[kind])
    return float(plain) if kind is float else plain


def _fits(kind: type, plain: Any) -> bool:
    """Whether a value is text, a whole number or a finite number; for Python true is a number, for JSON it is not."""
    if kind is float:
        number = isinstance(plain, (int, float)) and not isinstance(plain, bool)
        return number and abs(plain) <= sys.float_info.max  # false for a NaN
    return isinstance(plain, kind) and not isinstance(plain, bool)


def _one_of(kinds: tuple[Any, ...], plain: Any, where: str) -> Any:
    """A value of the first type that fits; a whole number stays one where both kinds of number are allowed."""
    wanted = [kind for kind in kinds if kind is not types.NoneType]
    if plain is None and len(wanted) < len(kinds):
        return None
    if len(wanted) == 1:
        return _decoded(wanted[0], plain, where)
    for kind in wanted:
        if _fits(kind, plain):
            return plain
    raise _Damage(f"{where} is {_shown(plain)}, not {' or '.join(_NAMES[kind] for kind in wanted)}")


def _dataclass(kind: Any, plain: Any, where: str) -> Any:
    _require(isinstance(plain, dict), where, plain, "an object")
    hints, values = get_type_hints(kind, include_extras=True), {}
    for part in dataclasses.fields(kind):
        place = f"{where}.{part.name}".lstrip(".")
        if part.name in plain:
            values[part.name] = _decoded(hints[part.name], plain[part.name], place)
        elif part.default is dataclasses.MISSING:
            raise _Damage(f"{place} is missing")
    unknown = sorted(set(plain) - set(hints))
    if unknown:
        raise _Damage(f"{f'{where}.{unknown[0]}'.lstrip('.')} is not known")
    return kind(**values)


def _require(fits: bool, where: str, plain: Any, wanted: str) -> None:
    if not fits:
        raise _Damage(f"{where} is {_shown(plain)}, not {wanted}")


def _shown(plain: Any) -> str:
    """What stands in the place of something else, in a few words."""
    if isinstance(plain, (list, dict)):
        return "a list" if isinstance(plain, list) else "an object"
    return json.dumps(plain)[:40]


def _encoded(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((part, getattr(value, part.name)) for part in dataclasses.fields(value))
        return {part.name: _encoded(held) for part, held in parts if held != part.default}
    if isinstance(value, Mapping):
        return {name: _encoded(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(held) for held in value]
    return value
