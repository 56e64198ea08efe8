"""What a record names is in its file: outputs, initializers and the shares that scores are made of."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import onnx

from gapa_onnx.record import GaugeRecord, HeadRecord, Record, ScoreRecord, damaged


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
    """UserError unless the model has what heads speak of: for each a variance, those of a detector's candidates or of
    a vocabulary's leading tokens, or a score and its flag alone."""
    for output, head in heads.items():
        roles = ["var"]
        if head.detection is not None:
            roles = ["candidates", "probs", "box_var", "score"]
        elif head.of_tokens:
            roles = ["tokens", "token_var"]
        require_outputs({output: head}, present, roles=["score", "ood"] if head.score_only else roles)


def require_thresholds(record: Record, graph: onnx.GraphProto) -> None:
    """UserError where the level of a score is not a number of the graph, or what it is made of and ranked by is not
    in it."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    shares = {place.share for place in record.places}
    scores = {
        f"{o}.scores.{role}": one for o, head in record.heads.items() for role, one in head.scores.items()
    }
    for where, score in scores.items():
        for part, name, what in _initializers(score):
            if name not in sizes or (what == "a number" and sizes[name] != 1):
                raise damaged(f"heads.{where}.{part} is {name!r}, which is not {what} of the graph")
        for kind, gauge in _gauges(score):
            for name in () if kind == "entropy" else gauge.reads:
                if name not in shares:
                    raise damaged(
                        f"heads.{where}.witnesses.{kind}.reads holds {name!r}, which no site or witness has"
                    )


def _initializers(score: ScoreRecord) -> Iterator[tuple[str, str, str]]:
    """Field, name and kind of the initializers that a score has."""
    yield "level", score.level, "a number"
    yield "count", score.count, "a number"
    yield "ordinary", score.ordinary, "an initializer"
    yield "largest", score.largest, "an initializer"
    for kind, gauge in _gauges(score):
        yield f"witnesses.{kind}.centre", gauge.centre, "an initializer"
        yield f"witnesses.{kind}.slope", gauge.slope, "an initializer"


def _gauges(score: ScoreRecord) -> Iterator[tuple[str, GaugeRecord]]:
    """What a score by witnesses is measured by, by the field that it is in."""
    for kind in ("last", "earlier", "entropy") if score.witnesses is not None else ():
        gauge = getattr(score.witnesses, kind)
        if gauge is not None:
            yield kind, gauge


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
