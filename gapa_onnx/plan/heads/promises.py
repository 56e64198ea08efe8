"""What a file promises about its answers, as graph nodes, and the numbers that `settle.promises` finds for them.

    temperature   logits / T before the head, variances / T²: one number for all classes, so the first class stays
    set           classes whose score is not above a line
                      lac   -p        aps   Σ of the probabilities down to the class        raps   that + penalty(rank)
                      -2 of the most probable class, which is so in every set, and counts as covered wherever it is true
    defer         true unless the highest probability reaches a line
    lower, upper  y ∓ factor · reach · sqrt(total variance); reach has two numbers per element, for below and above

What is not a number is never sure: such a class is in its set, and such a row is deferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.plan.head import Head, Task
from gapa_onnx.record import PromiseRecord, TemperatureRecord
from gapa_onnx.variance.graph import Value, VarianceGraph

CERTAIN = -2.0  # score of the most probable class: below that of any other
OLDEST_SORTED = 11  # opset from which on there are CumSum and ScatterElements


@dataclass(frozen=True)
class PromiseTensors:
    """Names of the tensors by which the promises about one output are kept; None where there is no such promise."""

    temperature: str | None = None  #: parameter, 1/T
    logits: str | None = None  #: at that temperature
    logits_var: str | None = None  #: the same
    set_scores: str | None = None  #: of every class, in the shape of the probabilities
    set_line: str | None = None  #: parameter, one number or one for each class
    penalties: str | None = None  #: parameter of raps, by rank
    confidence: str | None = None  #: highest probability of each row
    answered_from: str | None = None  #: parameter
    factor: str | None = None  #: parameter, of all reaches
    reach: str | None = None  #: parameter (2, …), of σ downwards and upwards, for each element of a row


def joined(one: PromiseTensors, other: PromiseTensors) -> PromiseTensors:
    """All names of both."""
    return replace(one, **{name: value for name, value in vars(other).items() if value is not None})


@dataclass(frozen=True)
class Promises:
    """What was found for one output."""

    temperature: TemperatureRecord | None = None
    sets: PromiseRecord | None = None
    deferral: PromiseRecord | None = None
    intervals: PromiseRecord | None = None
    penalties: Array | None = field(default=None, repr=False)
    reach: Array | None = field(default=None, repr=False)

    def tensors(self, names: PromiseTensors) -> dict[str, Array]:
        """The numbers of the parameters, by the names that they have in the graph."""
        found: dict[str, Array] = {}
        if self.temperature is not None and names.temperature is not None:
            found[names.temperature] = np.asarray(1 / self.temperature.value)
        for name, numbers in ((names.penalties, self.penalties), (names.reach, self.reach)):
            if name is not None and numbers is not None:
                found[name] = numbers
        for promise in (self.sets, self.deferral, self.intervals):
            if promise is not None:
                found[promise.tensor] = line_of(promise)
        return found


def line_of(promise: PromiseRecord) -> Array:
    """The numbers that a promise is kept by at its level: one, or one for each class."""
    line: Array = np.array(promise.table[f"{promise.level:g}"])
    return line if len(line) > 1 else line[0]


def takes_labels(head: Head) -> bool:
    """Whether each row, or each pixel of a row, is one of several classes, so that labels tell all that is true of it."""
    row = head.task is Task.CLASSIFICATION and head.rank == 2
    return head.link == "softmax" and (row or head.task is Task.SEGMENTATION)


def cooled(
    graph: VarianceGraph, head: Head, mean: Value, var: Value, factor: Value | None
) -> tuple[Value, Value, Value | None, PromiseTensors]:
    """Mean, variance and factor of the covariance of the logits, all at a temperature that is left open."""
    inverse = graph.constant(np.asarray(1, mean.dtype), f"{head.output}/temperature/inverse")
    with graph.scope(f"{head.output}/temperature"):
        mean, var = mean * inverse, var * (inverse * inverse)
        factor = None if factor is None else factor * inverse
    return mean, var, factor, PromiseTensors(inverse.name, mean.name, var.name)


def emit_set(
    graph: VarianceGraph, head: Head, probs: Value, kind: str, classes: int | None
) -> tuple[Value, PromiseTensors]:
    """Which classes are in a set, in the shape of the probabilities (n, classes)."""
    assert head.axis is not None
    prefix = f"{head.output}/set"
    penalties = None
    with graph.scope(prefix):
        if kind == "lac":
            scores = graph.emit("Neg", probs)
        else:
            scores, penalties = _summed(graph, head, probs, kind, classes)
        highest = graph.reduce("ReduceMax", probs, [head.axis])
        below = graph.emit("Less", probs, highest, dtype=np.bool_)
        scores = graph.where(below, scores, graph.constant(np.asarray(CERTAIN, probs.dtype)))
        line = graph.constant(np.zeros(1, probs.dtype), f"{prefix}/threshold")
        chosen = graph.emit("Not", graph.emit("Greater", scores, line, dtype=np.bool_))
    return chosen, PromiseTensors(set_scores=scores.name, set_line=line.name, penalties=penalties)


def _summed(
    graph: VarianceGraph, head: Head, probs: Value, kind: str, classes: int | None
) -> tuple[Value, str | None]:
    """The sum of the probabilities from the most probable class down to each, with a penalty for late ones."""
    if graph.opset < OLDEST_SORTED:
        raise UserError(
            f"`sets={kind!r}` needs opset {OLDEST_SORTED}, and the model has {graph.opset}",
            "raise the model's opset, or use `sets='lac'`",
        )
    assert head.axis is not None
    count = classes if classes is not None else graph.dimension(probs, head.axis)
    ordered, places = graph.topk(probs, count, head.axis)
    summed, penalties = graph.emit("CumSum", ordered, graph.constant(np.int64(head.axis))), None
    if kind == "raps":
        if classes is None:
            raise UserError(
                f"`sets='raps'` needs the number of classes of {head.output!r}, which the model leaves open",
                "fix it in the model, or use `sets='aps'`",
            )
        added = graph.constant(np.zeros(classes, probs.dtype), f"{head.output}/set/penalties")
        summed, penalties = summed + added, added.name
    return graph.emit("ScatterElements", graph.zeros(probs), places, summed, axis=head.axis), penalties


def emit_deferral(graph: VarianceGraph, head: Head, probs: Value) -> tuple[Value, PromiseTensors]:
    """Whether a row is left to somebody else: its highest probability does not reach the line."""
    assert head.axis is not None
    with graph.scope(f"{head.output}/defer"):
        confidence = graph.reduce("ReduceMax", probs, [head.axis], keepdims=False)
        line = graph.constant(np.asarray(np.inf, probs.dtype), f"{head.output}/defer/threshold")
        # Not (line > p) answers at the line itself, and would answer a NaN, which therefore is looked for.
        below = graph.emit("Greater", line, confidence, dtype=np.bool_)
        lost = graph.emit("IsNaN", confidence, dtype=np.bool_) if graph.opset >= 9 else below
        deferred = graph.emit("Or", below, lost)
    return deferred, PromiseTensors(confidence=confidence.name, answered_from=line.name)


def emit_interval(
    graph: VarianceGraph, head: Head, mean: Value, total: Value
) -> tuple[Mapping[str, Value], PromiseTensors]:
    """Lower and upper bound of an output, in its shape and in the type of its variance."""
    factor = graph.constant(np.asarray(np.inf, total.dtype), f"{head.output}/interval/factor")
    reach = graph.constant(np.ones(2, total.dtype), f"{head.output}/interval/reach")
    with graph.scope(f"{head.output}/interval"):
        down, up = (
            graph.emit("Gather", reach, graph.constant(np.int64(side)), axis=0, dtype=total.dtype)
            for side in (0, 1)
        )
        unit, mean = total.sqrt() * factor, graph.cast(mean, total.dtype)
        bounds = {"lower": mean - unit * down, "upper": mean + unit * up}
    return bounds, PromiseTensors(factor=factor.name, reach=reach.name)
