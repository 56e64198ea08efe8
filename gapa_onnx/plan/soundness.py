"""What a flag goes by beside the score: whether the variances that it stands beside can be variances at all, and whether
what was fed are numbers.

A file whose numbers are damaged may give negative variances, or none, with a score that looks ordinary. The square root
of a negative number is none, so that the mean standard deviation of an answer is finite exactly if all of its
variances are finite and not negative. A layer may make an ordinary number of an infinity, as a saturating activation does; but who feeds one
has broken something before. So inputs are looked at themselves, unless calibration rows held such values in them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from gapa_onnx.model.dtypes import variance_dtype
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.frontier import comes_from
from gapa_onnx.plan.head import Head
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.masks import masked_mean, tensor_of, valid_in
from gapa_onnx.variance.values import Scaled

OLDEST_WATCHED = 9  # opset from which on rows can be counted at run time


def emit_deviation(
    source: SourceModel, graph: VarianceGraph, head: Head, roles: Mapping[str, Value], role: str = "var"
) -> Value | None:
    """Emit the mean standard deviation of what has a score of its own: a sample, a position; None where nothing has a
    variance. It is a finite number exactly if the variances are sound."""
    with graph.scope(f"{head.output}/{role}_deviation"):
        if role in roles:
            var = roles[role]
            # A number per query times a vector is finite, whatever the answer is.
            deviation = (var if isinstance(var, Scaled) else _where_finite(source, graph, head, var)).sqrt()
        elif "token_var" in roles:
            deviation = roles["token_var"].sqrt()
        else:
            return None
        if head.axis is not None:
            return graph.reduce("ReduceMean", deviation, [head.axis], keepdims=False)
        if head.rank is None or head.rank < 2:
            return deviation if head.rank == 1 else None
        inner = list(range(1 if head.mask is None else 2, head.rank))
        deviation = graph.reduce("ReduceMean", deviation, inner, keepdims=False) if inner else deviation
        if head.mask is None:
            return deviation
        return masked_mean(graph, deviation, valid_in(graph, source, head.mask), 2)


def _where_finite(source: SourceModel, graph: VarianceGraph, head: Head, var: Value) -> Value:
    """The variance, and 0 where an answer is infinite, as that of a class that is ruled out: that has no error bar."""
    dtype = source.tensors[head.tensor].dtype or np.float32
    mean = graph.cast(graph.tensor(head.tensor, dtype), var.dtype)
    largest, none = (graph.constant(np.asarray(x, var.dtype)) for x in (np.finfo(var.dtype).max, 0))
    return graph.where(graph.compare("Greater", graph.emit("Abs", mean), largest), none, var)


def emit_candidate_deviation(
    graph: VarianceGraph, roles: Mapping[str, Value], axis: int, prefix: str = ""
) -> Value:
    """The same of each candidate of a detector, whose class scores and boxes have variances."""
    with graph.scope(f"{roles[f'{prefix}box_var'].name}/deviation"):
        boxes, classes = (
            graph.reduce("ReduceMean", roles[f"{prefix}{name}"].sqrt(), [axis], keepdims=False)
            for name in ("box_var", "class_var")
        )
        return boxes + graph.cast(classes, boxes.dtype)


def beside(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    score: Value,
    deviation: Value | None,
    rank: int,
    whole: int,
    told_by: str,
    watched: Sequence[str] = (),
) -> Value:
    """What the p-value of a score is known by: a number that is finite if the score is, its variances are sound and the
    inputs that are `watched` were numbers.

    `rank` is that of the score, `whole` that of the deviations, which are more where one score tells of many positions;
    `told_by` is the tensor whose rows have the score: of a place where witnesses speak, which may be others.
    """
    inputs = emit_finite_inputs(source, graph, head, watched, score, rank, told_by)
    if inputs is not None:
        with graph.scope(f"{head.output}/known"):
            score = score + inputs
    if deviation is None:
        return score
    if head.axis is not None and head.mask is not None and head.detector is None and whole > 1:
        with graph.scope(f"{tensor_of(head.mask)}/valid"):
            valid = valid_in(graph, source, head.mask)
        with graph.scope(f"{head.output}/known"):
            valid = graph.unsqueeze(valid, list(range(2, whole))) if whole > 2 else valid
            deviation = graph.where(valid, deviation, graph.constant(np.asarray(0, deviation.dtype)))
    with graph.scope(f"{head.output}/known"):
        if rank < whole:
            deviation = graph.reduce("ReduceMean", deviation, list(range(rank, whole)), keepdims=False)
        if _rows(source, told_by) != _rows(source, head.output) and told_by != head.output:
            if graph.opset < OLDEST_WATCHED:
                return score
            deviation = _spread_over(graph, deviation, score)
        return score + graph.cast(deviation, score.dtype)


def _rows(source: SourceModel, name: str) -> object:
    """What a tensor says of its number of rows; what is not said is never the same as anything."""
    shape = source.tensors[name].shape
    return shape[0] if shape and shape[0] else object()


def watched_inputs(source: SourceModel, head: Head, unwatched: Collection[str]) -> tuple[str, ...]:
    """The inputs of numbers, by rows, that an output is made of, but for those that may hold anything."""
    tensor = source.tensors[head.logits] if head.logits in source.tensors else source.tensors[head.output]
    return tuple(
        spec.name
        for spec in source.inputs
        if spec.name not in unwatched
        and spec.shape
        and spec.dtype in (np.float16, np.float32, np.float64)
        and comes_from(tensor, {spec.name})
    )


def emit_finite_inputs(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    names: Sequence[str],
    score: Value,
    rank: int,
    told_by: str,
) -> Value | None:
    """Emit, for each row of a score of this rank, a number that is finite if what it was fed are numbers; None if nothing is
    watched."""
    rows = _rows(source, told_by)
    found: Value | None = None
    for name in names if graph.opset >= OLDEST_WATCHED else ():
        held = source.tensors[name]
        assert held.shape
        axis = next((at for at, size in enumerate(held.shape) if isinstance(size, str) and size == rows), 0)
        others = [at for at in range(len(held.shape)) if at != axis]
        with graph.scope(f"{name}/finite"):
            value = graph.cast(graph.tensor(name, held.dtype), variance_dtype(held.dtype))
            value = graph.reduce("ReduceSum", value, others, keepdims=False) if others else value
            term = graph.cast(value, score.dtype)
        with graph.scope(f"{head.output}/finite"):
            term = term if held.shape[axis] == rows else _spread_over(graph, term, score)
            found = term if found is None else found + term
    if found is None or rank < 2:
        return found
    with graph.scope(f"{head.output}/finite"):
        return graph.unsqueeze(found, list(range(1, rank)))


def _spread_over(graph: VarianceGraph, term: Value, like: Value) -> Value:
    """Numbers of the rows of an input for those of an answer, which may have several for each, or one for all."""
    count, own = graph.dimension(like, 0), graph.dimension(term, 0)
    at = graph.emit("Mul", graph.positions(count), own, dtype=np.int64)
    none = graph.cast(
        graph.compare("Equal", count, graph.ints(0)), np.int64
    )  # nothing is divided, but by something
    at = graph.emit("Div", at, graph.emit("Add", count, none, dtype=np.int64), dtype=np.int64)
    return graph.emit("Gather", term, at, axis=0)


def flagged_unless_sound(
    source: SourceModel, graph: VarianceGraph, head: Head, roles: Mapping[str, Value], role: str
) -> dict[str, Value]:
    """The p-value and the flag of a sample once more: 0 and true where the variances of this role are not sound."""
    deviation = emit_deviation(source, graph, head, roles, role)
    if deviation is None or "pvalue" not in roles:
        return {}
    with graph.scope(f"{head.output}/{role}_sound"):
        finite = graph.compare("Less", deviation - deviation, 1.0)
        rare = roles["pvalue"] * graph.cast(finite, roles["pvalue"].dtype)
        return {"pvalue": rare, "ood": graph.emit("Or", roles["ood"], graph.emit("Not", finite))}
