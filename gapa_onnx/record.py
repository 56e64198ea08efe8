"""What a converted file says about itself: one typed record, kept as JSON in the file's metadata_props.

`emit` alone writes it; everything else reads it here. docs/file-format.md describes every field, and every tensor
that a record names. A record that is not as described is the user's to fix: one sentence, never a trace.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import onnx

from gapa_onnx.errors import UserError

METADATA_KEY = "gapa_onnx"
FORMAT = 1  #: of the record; raised when a reader of the old form would misread the new one


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
class SiteRecord:
    """One site: where it is, its numbers, and the names of its tensors."""

    name: str  #: of the node or tensor, as people call it
    query: str  #: tensor of the source that is compared with the inducing points
    output: str  #: tensor of the source that becomes uncertain
    activation: str | None
    layout: str
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
    index: str
    index_settings: Mapping[str, int | float]
    recall: float | None
    share_error: float
    storage: str
    storage_error: float
    share_quantiles: Mapping[str, float]


@dataclass(frozen=True)
class PointsRecord:
    """The nodes of the quadrature that uncertainty is split at."""

    kind: str  #: latin, grid or samples
    count: int


@dataclass(frozen=True)
class ScoreRecord:
    """The score of an output on ordinary inputs, and the line beyond which an input is flagged."""

    kind: str  #: variance or epistemic
    rows: int  #: that the quantiles were taken over
    source: str  #: which rows those were
    quantiles: Mapping[str, float]
    tensor: str  #: the initializer that the score is compared with
    quantile: float | None  #: None where the threshold was given as a number
    threshold: float


@dataclass(frozen=True)
class NoiseRecord:
    """How well the noise head describes left-out targets, in nats per row."""

    rows: int
    nll: float
    constant_nll: float  #: of the best constant noise


@dataclass(frozen=True)
class HeadRecord:
    """What one output means, and what stands beside it."""

    task: str
    logits: str  #: tensor
    link: str  #: softmax, sigmoid or identity
    axis: int | None  #: of the classes
    reason: str
    outputs: Mapping[str, str]  #: role -> graph output
    bridge: str | None = None
    points: PointsRecord | None = None
    operator: str | None = None  #: the node of the head, where it is one operator
    score: ScoreRecord | None = None
    noise: NoiseRecord | None = None


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
    budget: BudgetRecord | None = None

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
    except json.JSONDecodeError as error:
        raise _damaged(f"it is not JSON ({error})") from error
    version = plain.get("format") if isinstance(plain, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise UserError(
            f"the file's record has format {version}, and this gapa-onnx reads up to {FORMAT}",
            "update gapa-onnx",
        )
    if version != FORMAT:
        raise _damaged(f"format is {version!r}, not {FORMAT}")
    try:
        record: Record = _decoded(Record, plain, "")
    except _Damage as damage:
        raise _damaged(str(damage)) from damage
    return record


def _damaged(what: str) -> UserError:
    return UserError(f"the file's record is damaged: {what}", "convert the source model again")


class _Damage(ValueError):
    """What is wrong at one place of a record."""


_WORDS = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false"}


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
    if kind is type(None):
        _require(plain is None, where, plain, "nothing")
        return None
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    fits = isinstance(plain, kind) and (kind is bool or not isinstance(plain, bool))
    _require(fits and (kind is not float or math.isfinite(plain)), where, plain, _WORDS[kind])
    return plain


def _one_of(kinds: tuple[Any, ...], plain: Any, where: str) -> Any:
    """The first of the types that fits; an integer stays one where both kinds of number are allowed."""
    damage = None
    for kind in kinds:
        try:
            return _decoded(kind, plain, where)
        except _Damage as found:
            # Of several reasons the one that is not just "nothing" tells what was meant.
            damage = found if damage is None or kind is not type(None) else damage
    raise damage or _Damage(f"{where} has no type")


def _dataclass(kind: Any, plain: Any, where: str) -> Any:
    _require(isinstance(plain, dict), where or "the record", plain, "an object")
    hints, values = get_type_hints(kind), {}
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
        raise _Damage(f"{where} is {json.dumps(plain)[:40]}, not {wanted}")


def _encoded(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((part, getattr(value, part.name)) for part in dataclasses.fields(value))
        return {part.name: _encoded(held) for part, held in parts if held != part.default}
    if isinstance(value, Mapping):
        return {name: _encoded(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(held) for held in value]
    return value
