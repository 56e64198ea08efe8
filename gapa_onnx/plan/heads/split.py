"""The split of an uncertain prediction: how much of its entropy lies in the data, how much in the model.

entropy    H(mean_s p_s)           p_s: the prediction at mean + sqrt(var) ε_s, for fixed points ε_s
aleatoric  mean_s H(p_s)
epistemic  entropy - aleatoric

For softmax in single precision, from opset 11 on, the operator `ai.gapa::GapaClasses` has this in it. The nodes
here are for all else: double precision, old opsets, a full covariance, and sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.errors import UserError
from gapa_onnx.op.classes import RULED_OUT
from gapa_onnx.plan.heads.points import Points
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.loops import loop


@dataclass(frozen=True)
class ClassAxis:
    """Where the classes of a tensor are."""

    axis: int
    rank: int
    size: int | None  #: None if it is known at run time only

    @property
    def behind_points(self) -> ClassAxis:
        """The same axis with the points on a new first one."""
        return replace(self, axis=self.axis + 1, rank=self.rank + 1)

    def along(self, array: np.ndarray) -> np.ndarray:
        """The last axis of an array laid along the classes, all other axes of size 1 (those before it stay)."""
        return array.reshape(*array.shape, *(1,) * (self.rank - 1 - self.axis))


class _Noise:
    """What is added to the mean logits, in units of their standard deviation: at all points, or at one.

    Tensors of rank 2 take all points at once, on a new first axis: a few large nodes. More axes mean
    positions or pixels, where that would take many copies of the logits: a loop keeps running sums.
    """

    def __init__(
        self, graph: VarianceGraph, axis: ClassAxis, points: Points, mean: Value, name: str, *, by_rank: bool
    ):
        """`by_rank`: a column of the points belongs to a rank of the logits; otherwise to a place on their axis,
        which is the same if they are in order."""
        self.graph, self.axis, self.points, self.mean, self.name = graph, axis, points, mean, name
        self.looped = axis.rank > 2
        self.ranks = None
        values = points.values.astype(mean.dtype)
        if by_rank:
            self.ranks = _ranks(graph, axis, mean, values.shape[1])
        elif points.kind == "grid":
            values = values.reshape(-1, *(1,) * axis.rank)
        else:
            if axis.size is not None:  # beyond the table's width, its columns again
                values = values[:, np.arange(axis.size) % values.shape[1]]
            values = axis.along(values.reshape(len(values), *(1,) * axis.axis, -1))
        self.values = values

    def all(self) -> Value:
        """(s, …)"""
        values = self.graph.constant(self.values)
        return values if self.ranks is None else self.graph.emit("Gather", values, self.ranks, axis=1)

    def at(self, inner: VarianceGraph, step: Value) -> Value:
        """In the body of a loop, those of one point."""
        values = inner.emit("Gather", inner.constant(self.values), step, axis=0)
        return values if self.ranks is None else inner.emit("Gather", values, inner.adopt(self.ranks), axis=0)

    def average(self, terms: Callable[[VarianceGraph, ClassAxis, Value], Sequence[Value]]) -> list[Value]:
        """Weighted means over the points of what `terms(graph, axis, noise)` gives."""
        weights, count = self.points.weights, self.points.count
        if not self.looped:
            found = terms(self.graph, self.axis.behind_points, self.all())
            if weights is None:
                return [self.graph.reduce("ReduceMean", term, [0], keepdims=False) for term in found]
            factors = self.graph.constant(weights.astype(self.mean.dtype).reshape(-1, *(1,) * self.axis.rank))
            return [self.graph.reduce("ReduceSum", term * factors, [0], keepdims=False) for term in found]

        def step(inner: VarianceGraph, number: Value, sums: list[Value]) -> tuple[list[Value], list[Value]]:
            found = terms(inner, self.axis, self.at(inner, number))
            if weights is not None:
                factor = inner.emit("Gather", inner.constant(weights.astype(self.mean.dtype)), number, axis=0)
                found = [term * factor for term in found]
            return [total + term for total, term in zip(sums, found)], []

        start = [self.graph.zeros(self.mean)] * 2
        totals, _ = loop(self.graph, self.graph.constant(np.int64(count)), start, step, self.name)
        return totals if weights is not None else [total / count for total in totals]


def _ranked(graph: VarianceGraph, axis: ClassAxis, mean: Value, var: Value) -> tuple[Value, Value, bool]:
    """Mean and variance in the order of the logits, and whether that could be done.

    The order of the classes is nothing to an entropy, and with all rows in order the points are plain
    constants. Otherwise each class picks its point by its rank, which takes a Gather per point.
    """
    if graph.opset < 11 or axis.size is None:
        return mean, var, False
    ordered, indices = graph.topk(mean, axis.size, axis.axis)
    return ordered, graph.emit("GatherElements", var, indices, axis=axis.axis), True


def _ranks(graph: VarianceGraph, axis: ClassAxis, mean: Value, columns: int) -> Value:
    """The place of each class in the order of the logits: 0 for the largest, and 0 again from `columns` on."""
    if axis.size is None and graph.opset < 10:
        raise UserError(
            f"the number of classes is left open, which opset {graph.opset} cannot handle",
            "fix the size of the class axis in the model, or raise its opset to 10 or newer",
        )
    size = graph.dimension(mean, axis.axis) if axis.size is None else axis.size
    _, order = graph.topk(mean, size, axis.axis)
    _, ranks = graph.topk(-graph.cast(order, mean.dtype), size, axis.axis)
    if axis.size is not None and axis.size <= columns:
        return ranks
    return ranks - ranks / columns * columns  # whole numbers: the remainder


def split_classes(
    graph: VarianceGraph,
    axis: ClassAxis,
    points: Points,
    mean: Value,
    var: Value,
    name: str,
    *,
    factor: Value | None = None,
) -> tuple[Value, Value, Value]:
    """Total, aleatoric and epistemic entropy of one choice out of C.

    `factor` is a root of the logits' covariance, in place of the variance's.

    The epistemic part is small where all is well, and a difference of two entropies would leave only
    its rounding. Instead, with f(p) = p log p - p, which is flat at p = 1 and so forgives the rounding
    of a p near 1:

        epistemic = Σ_c (mean_s f(p_sc) - f(mean_s p_sc))        each term ≥ 0, as f is convex
    """
    ranked = False
    if factor is None:
        mean, var, ranked = _ranked(graph, axis, mean, var)
    noise = _Noise(graph, axis, points, mean, name, by_rank=not ranked)
    mean = graph.at_least(mean, RULED_OUT)
    std = var.sqrt()

    def terms(inner: VarianceGraph, axis: ClassAxis, noise: Value) -> tuple[Value, Value]:
        if factor is not None:
            deviation = _correlated(inner, factor, noise)
        else:
            deviation = _within(inner, std) * noise
        log_p = log_softmax(inner, axis, _within(inner, mean) + deviation)
        p = log_p.exp()
        return p, p * log_p - p

    p, f = noise.average(terms)
    p_log_p = p * _log(graph, p)
    total = -graph.reduce("ReduceSum", p_log_p, [axis.axis], keepdims=False)
    gaps = f - (p_log_p - p)
    # Rounding can leave a sum of gaps that are all 0 a little below it.
    epistemic = graph.at_least(graph.reduce("ReduceSum", gaps, [axis.axis], keepdims=False), 0)
    return total, graph.at_least(total - epistemic, 0), epistemic


def _correlated(graph: VarianceGraph, factor: Value, noise: Value) -> Value:
    """factor · ε for each row: (n, C, C) and (s, n, C) or (s, 1, C) make (s, n, C)."""
    columns = graph.emit("Transpose", noise, perm=[1, 2, 0])  # (n, C, s)
    return graph.emit("Transpose", graph.emit("MatMul", factor, columns), perm=[2, 0, 1])


def split_labels(
    graph: VarianceGraph, axis: ClassAxis, points: Points, mean: Value, var: Value, name: str
) -> tuple[Value, Value, Value]:
    """Total, aleatoric and epistemic entropy of C answers of yes or no, summed.

    Each stands by itself, so that their covariance has no part in it.

    An answer and its opposite have the same entropy: with the sign that makes "yes" the unlikely one,
    small probabilities keep all their digits.
    """
    noise = _Noise(graph, axis, points, mean, name, by_rank=False)
    std = var.sqrt() * (1 - 2 * (mean > 0))  # the noise turns its sign with the logit
    mean = graph.at_least(-mean.abs(), RULED_OUT)

    def terms(inner: VarianceGraph, axis: ClassAxis, noise: Value) -> tuple[Value, Value]:
        logit = _within(inner, mean) + _within(inner, std) * noise
        size = logit.abs()
        odds = (-size).exp()
        unlikely = odds / (1 + odds)  # onnxruntime's Sigmoid never falls below 1e-8
        p = unlikely + (logit > 0) * (1 - 2 * unlikely)
        return p, _log_one_plus(inner, size, odds) + size * unlikely

    p, aleatoric = noise.average(terms)
    rest = 1 - p
    lost = (1 - rest) - p  # what rounding took from the rest; its logarithm is about that much too large
    entropy = -(p * _log(graph, p) + rest * _log(graph, rest) + lost)
    # Rounding can leave a certain label a little below 0.
    epistemic = graph.at_least(entropy - aleatoric, 0)
    total, aleatoric, epistemic = (
        graph.reduce("ReduceSum", value, [axis.axis], keepdims=False)
        for value in (entropy, aleatoric, epistemic)
    )
    return total, aleatoric, epistemic


# --------------------------------------------------------------------------- arithmetic


def _within(graph: VarianceGraph, value: Value) -> Value:
    """A value for nodes of this graph, the value's own or a loop's body."""
    return value if value.graph is graph else graph.adopt(value)


def _log(graph: VarianceGraph, value: Value) -> Value:
    """log p, with a large number for the -inf of a p of 0, as 0 · log 0 counts for 0."""
    return graph.emit("Log", graph.at_least(value, float(np.finfo(value.dtype).tiny)))


def _log_one_plus(graph: VarianceGraph, size: Value, odds: Value) -> Value:
    """log(1 + exp(-size)); onnxruntime has Softplus, which keeps small ones, for float32 only."""
    return graph.emit("Softplus", -size) if size.dtype == np.float32 else graph.emit("Log", 1 + odds)


def log_softmax(graph: VarianceGraph, axis: ClassAxis, logits: Value) -> Value:
    """In front of other axes written out: before opset 13 the operator takes all axes from its own on as
    one, and later onnxruntime transposes twice, which takes three times as long as all the rest."""
    if axis.axis == axis.rank - 1:
        return graph.emit("LogSoftmax", logits, axis=axis.axis)
    shifted = logits - graph.reduce("ReduceMax", logits, [axis.axis])
    return shifted - graph.emit("Log", graph.reduce("ReduceSum", shifted.exp(), [axis.axis]))
