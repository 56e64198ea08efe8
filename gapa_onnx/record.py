"""What a converted file says about itself: one typed record, kept as JSON in the file's metadata_props.

`emit` alone writes it; everything else reads it here. docs/file-format.md describes every field, and every tensor
that a record names. A record that is not as described is the user's to fix: one sentence, never a trace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import onnx

from gapa_onnx.errors import UserError
from gapa_onnx.record_parts import (
    BudgetRecord,
    CutRecord,
    DataRecord,
    DetectionRecord,
    GaugeRecord,
    HeadRecord,
    HeldOutRecord,
    ImageRecord,
    NoiseRecord,
    PlaceRecord,
    PointsRecord,
    PromiseRecord,
    ScoreRecord,
    SiteRecord,
    SourceRecord,
    TemperatureRecord,
    TrialRecord,
    WitnessesRecord,
)
from gapa_onnx.strict_json import Damage, decoded, encoded, shown

__all__ = [
    "SourceRecord",
    "HeldOutRecord",
    "DataRecord",
    "ImageRecord",
    "PlaceRecord",
    "SiteRecord",
    "PointsRecord",
    "GaugeRecord",
    "WitnessesRecord",
    "ScoreRecord",
    "NoiseRecord",
    "TemperatureRecord",
    "PromiseRecord",
    "DetectionRecord",
    "HeadRecord",
    "CutRecord",
    "TrialRecord",
    "BudgetRecord",
]  # of `record_parts`, which are asked for here

METADATA_KEY = "gapa_onnx"
FORMAT = 3  #: of the record; raised whenever a field is added, removed or changes its meaning, as the reader is strict


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
    budget: BudgetRecord | None = None
    uncovered: tuple[str, ...] = ()  #: outputs that vary with the data and have no variance at all
    states: tuple[str, ...] = ()  #: outputs that are fed again at the next call, and have no variance

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
    if "format" in plain and version != FORMAT:
        raise damaged(f"format is {shown(version)}, not {FORMAT}")
    try:
        record: Record = decoded(Record, plain, "")
    except Damage as damage:
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


def require_described(heads: Mapping[str, HeadRecord], present: Collection[str]) -> None:
    """UserError unless the model has what heads speak of: for each a variance, those of a detector's candidates, or a
    score and its flag alone."""
    for output, head in heads.items():
        roles = ["candidates", "probs", "box_var", "score"] if head.detection is not None else ["var"]
        require_outputs({output: head}, present, roles=["score", "ood"] if head.score_only else roles)


def require_thresholds(record: Record, graph: onnx.GraphProto) -> None:
    """UserError where the level of a score is not a number of the graph, or what it is made of and ranked by is not
    in it."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    for output, head in record.heads.items():
        for role, score in head.scores.items():
            for part in ("level", "count", "ordinary", "largest"):
                name = getattr(score, part)
                if name not in sizes or (part in ("level", "count") and sizes[name] != 1):
                    what = "a number" if part in ("level", "count") else "an initializer"
                    raise damaged(
                        f"heads.{output}.scores.{role}.{part} is {name!r}, which is not {what} of the graph"
                    )
            if score.witnesses is not None:
                _require_witnesses(record, score.witnesses, sizes, f"heads.{output}.scores.{role}.witnesses")


def _require_witnesses(
    record: Record, witnesses: WitnessesRecord, initializers: Collection[str], where: str
) -> None:
    """UserError where a score is made of shares that no place has, or by numbers that are not in the graph."""
    known = {place.share for place in record.places}
    for kind in ("last", "earlier", "entropy"):
        gauge = getattr(witnesses, kind)
        for share in () if gauge is None or kind == "entropy" else gauge.reads:
            if share not in known:
                raise damaged(
                    f"{where}.{kind}.reads holds {share!r}, which is the share of no site or witness"
                )
        for part in () if gauge is None else ("centre", "slope"):
            name = getattr(gauge, part)
            if name not in initializers:
                raise damaged(f"{where}.{kind}.{part} is {name!r}, which is not an initializer of the graph")


def require_promises(record: Record, graph: onnx.GraphProto) -> None:
    """UserError where a promise has no line at its level, or its lines do not fit an initializer of the graph."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    for output, head in record.heads.items():
        promises = {"sets": head.sets, "deferral": head.deferral, "intervals": head.intervals}
        for name, promise in promises.items():
            if promise is None:
                continue
            place = f"heads.{output}.{name}"
            if f"{promise.level:g}" not in promise.table:
                raise damaged(f"{place}.table has no line at the level {promise.level:g}")
            if not all(len(line) == sizes.get(promise.tensor) for line in promise.table.values()):
                raise damaged(f"{place}.tensor is {promise.tensor!r}, which the lines do not fit")


def damaged(what: str) -> UserError:
    """The error of a record that does not fit its description, or its file."""
    return UserError(
        f"the file's record is damaged: {' '.join(what.split())}", "convert the source model again"
    )
