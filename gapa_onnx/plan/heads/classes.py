"""The heads for classes, as graph nodes: softmax and sigmoid, per row, pixel, position or token.

With the logits' mean m and variance v, over C classes along one axis:

    probs      softmax(m / sqrt(1 + π/8 · mean(v)))     bridge "shared"; "per-class" has v in place of its mean
    p_s        softmax(m + sqrt(v) ε_s)                  at fixed points ε_s, see `points`
    entropy    H(mean_s p_s)                             total
    aleatoric  mean_s H(p_s)                             what remains if the logits were known
    epistemic  entropy - aleatoric                       what knowing them would tell (BALD)
    score      mean(v), or the epistemic part

and for sigmoid the same with binary entropies, summed over the labels.

For softmax in single precision, from opset 11 on, all of this is one operator, `ai.gapa::GapaClasses` (`op.classes`),
which a native kernel computes in one pass; a bridge per class has nodes of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.errors import UserError
from gapa_onnx.op.classes import OLDEST_OPSET
from gapa_onnx.op.contract import CLASSES, DOMAIN, LEADING
from gapa_onnx.plan.head import Head, Task
from gapa_onnx.plan.heads.points import WIDE, Points, grid, latin, samples
from gapa_onnx.plan.heads.split import ClassAxis, log_softmax, split_classes, split_labels
from gapa_onnx.settings import choices
from gapa_onnx.variance.chosen import chosen
from gapa_onnx.variance.graph import Value, VarianceGraph

ROLES = ("probs", "entropy", "aleatoric", "epistemic", "score")

#: Above one half by more than the rounding that keeps the other labels below the first.
JUST_YES = 0.5 + 2.0**-20

#: A probability that rounding can still be taken from.
HARDLY = 2.0**-100


@dataclass(frozen=True)
class HeadOptions:
    """Choices about heads."""

    bridge: str = "shared"
    samples: int | None = None  #: Monte Carlo with so many draws in place of the fixed points
    top_k: str | int = 512  #: of a vocabulary, the tokens that count
    score: str = "variance"
    seed: int = 0  #: of the draws

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            choices()[name].check(name, value)

    def leading(self, tokens: int) -> int:
        """How many tokens of a vocabulary count."""
        return tokens if isinstance(self.top_k, str) else min(self.top_k, tokens)


def head_points(head: Head, options: HeadOptions, classes: int | None, *, correlated: bool = False) -> Points:
    """The points that a head's split is computed at; their `record` is what the file says of them.

    `correlated` is for logits with a full covariance, where a rank is no longer one direction.
    """
    if head.task is Task.TOKENS and classes is not None:
        classes = options.leading(classes)
    if options.samples is not None:
        columns = 1 if classes is None and head.link == "sigmoid" else classes
        if columns is None:
            raise UserError(
                f"`samples` needs the number of classes of {head.output!r}, which the model leaves open",
                "leave `samples` out, or fix the size of the output's class axis in the model",
            )
        return samples(options.samples, columns, options.seed)
    if head.link == "sigmoid":
        return grid()
    single = head.rank is not None and head.rank <= 2  # one answer per row
    return latin(classes, fine=correlated or (single and (classes is None or classes >= WIDE)))


@dataclass(frozen=True)
class Classes:
    """What a head makes of its logits."""

    roles: dict[str, Value]  #: its outputs
    spread: Value  #: mean variance of the logits, which sites are weighed by whatever the score is
    logits: Value  #: those that count: of a vocabulary the leading ones


def emit_classes(
    graph: VarianceGraph,
    head: Head,
    output: Value,
    mean: Value,
    var: Value,
    options: HeadOptions,
    *,
    classes: int | None,
    factor: Value | None = None,
    leading: int | None = None,
) -> Classes:
    """Emit a head.

    Parameters
    ----------
    output: the source graph's output, whose prediction is kept.
    mean, var: of the logits, in the variance's type.
    classes: size of the class axis, None if the model leaves it open.
    factor: (n, C, C) with factor · factorᵀ the covariance of the logits, for rank 2; the split then
        sees how the logits vary together, and the bridge its diagonal `var`.
    leading: of labels, how many the split is over: those with the largest logits. None: all of them.
    """
    axis = _class_axis(head, classes)
    if factor is not None and axis.rank != 2:
        raise ValueError("a factor of the covariance is for logits of rank 2")
    points = head_points(head, options, classes, correlated=factor is not None)
    shared, ranked = options.bridge == "shared", head.task is Task.TOKENS
    roles: dict[str, Value] = {}
    if ranked:
        with graph.scope(f"{head.output}/tokens"):
            axis, roles["tokens"], mean, var = _leading_tokens(graph, head, axis, output, mean, var, options)
        output, roles["token_var"] = mean, var
    fits = head.link == "softmax" and factor is None and mean.dtype == np.float32
    if fits and graph.opset >= OLDEST_OPSET:
        found = _operator(graph, axis, points, output if shared else mean, mean, var, head.output)
    else:
        found = _nodes(graph, head, axis, points, mean, var, factor, leading)
    found["probs"] = _probabilities(graph, head, axis, options, output, mean, var, found.get("probs"))
    if options.score == "epistemic":
        found["score"] = found["epistemic"]
    with graph.scope(f"{head.output}/spread"):
        spread = graph.reduce("ReduceMean", var, [axis.axis], keepdims=False)
    return Classes(roles | {role: found[role] for role in ROLES}, spread, mean)


def _class_axis(head: Head, classes: int | None) -> ClassAxis:
    if head.axis is None or head.rank is None:
        raise UserError(
            f"the number of axes of {head.output!r} is unknown, so its classes cannot be told apart",
            "declare the output's shape in the model, or choose `task='none'`",
        )
    return ClassAxis(head.axis, head.rank, classes)


def _operator(
    graph: VarianceGraph,
    axis: ClassAxis,
    points: Points,
    output: Value,
    mean: Value,
    var: Value,
    prefix: str,
) -> dict[str, Value]:
    """All roles by one node, for the shared bridge."""
    with graph.scope(f"{prefix}/probs"):
        output = _as_seen(graph, output, mean.dtype)
    table = graph.constant(points.values.astype(np.float32), f"{prefix}/classes/points")
    roles = [port.name for port in CLASSES.outputs]
    values = graph.emit_several(
        CLASSES.name,
        *(mean, var, output, table, graph.ints(axis.axis)),
        outputs=len(roles),
        domain=DOMAIN,
        names=[f"{prefix}/classes/{role}" for role in roles],
    )
    return dict(zip(roles, values))


def _nodes(
    graph: VarianceGraph,
    head: Head,
    axis: ClassAxis,
    points: Points,
    mean: Value,
    var: Value,
    factor: Value | None,
    leading: int | None,
) -> dict[str, Value]:
    """All roles but the probabilities, by nodes."""
    name = f"{head.output}/split/points"
    with graph.scope(f"{head.output}/split"):
        if head.link == "sigmoid":
            few = _leading_labels(graph, axis, mean, var, leading)
            parts = split_labels(graph, few[0], points, *few[1:], name)
        else:
            parts = split_classes(graph, axis, points, mean, var, name, factor=factor)
    with graph.scope(f"{head.output}/score"):
        score = graph.reduce("ReduceMean", var, [axis.axis], keepdims=False)
    return dict(zip(("entropy", "aleatoric", "epistemic", "score"), (*parts, score)))


def _leading_labels(
    graph: VarianceGraph, axis: ClassAxis, mean: Value, var: Value, leading: int | None
) -> tuple[ClassAxis, Value, Value]:
    """The labels with the largest logits, where not all of them count."""
    if leading is None or axis.size is None or axis.size <= leading:
        return axis, mean, var
    chosen, labels = graph.topk(mean, leading, axis.axis)
    var = graph.emit("GatherElements", var, labels, axis=axis.axis)
    return replace(axis, size=leading), chosen, var


# ------------------------------------------------------------------------ probabilities


def _probabilities(
    graph: VarianceGraph,
    head: Head,
    axis: ClassAxis,
    options: HeadOptions,
    output: Value,
    mean: Value,
    var: Value,
    made: Value | None,
) -> Value:
    """The probabilities, of which the operator may have `made` those of the shared bridge."""
    with graph.scope(f"{head.output}/probs"):
        if options.bridge != "shared":
            return _bridged(graph, axis, head.link, options.bridge, mean, var)
        if made is None:
            bridged = _bridged(graph, axis, head.link, options.bridge, mean, var)
            made = _as_predicted(graph, axis, head, output, bridged)
        if head.task is not Task.TOKENS or axis.size is None:
            return made
        return graph.topk(made, axis.size, axis.axis)[
            0
        ]  # the exponential's rounding may have changed their order


def _bridged(graph: VarianceGraph, axis: ClassAxis, link: str, bridge: str, mean: Value, var: Value) -> Value:
    """The probit bridge: E link(l) ≈ link(m / sqrt(1 + π/8 v))."""
    spread = graph.reduce("ReduceMean", var, [axis.axis]) if bridge == "shared" else var
    scaled = mean / (1 + math.pi / 8 * spread).sqrt()
    return scaled.sigmoid() if link == "sigmoid" else log_softmax(graph, axis, scaled).exp()


def _as_predicted(graph: VarianceGraph, axis: ClassAxis, head: Head, output: Value, probs: Value) -> Value:
    """The source's prediction, whatever rounding does.

    A factor shared by the classes keeps their order, but it brings near ones together until rounding
    ties or swaps them. The class that the source puts first gets the largest probability, the others
    stay below it by a rounding step at least; a label that the source affirms stays above one half.
    """
    output = _as_seen(graph, output, probs.dtype)
    first = _first(graph, axis, output)
    if head.link == "sigmoid":
        bound = graph.constant(np.asarray(0.0 if head.logits == head.tensor else 0.5, output.dtype))
        yes = graph.emit("Greater", output, bound, dtype=np.bool_)
        probs = graph.where(yes, graph.at_least(probs, JUST_YES), graph.at_most(probs, 0.5))
    highest = graph.reduce("ReduceMax", probs, [axis.axis])
    if head.link == "sigmoid":  # of labels that are all out of the question, one is still the first
        highest = graph.at_least(highest, HARDLY)
    return graph.where(first, highest, _below(graph, probs, highest))


def _as_seen(graph: VarianceGraph, output: Value, dtype: np.dtype) -> Value:
    """The output as its reader sees it, in a wider type.

    onnxruntime computes most of float16 in float32, and takes two casts in a row for none: the
    Reshape between them makes it round as the output is rounded.
    """
    if output.dtype.itemsize < 4:
        output = graph.emit("Reshape", output, graph.shape(output))
    return graph.cast(output, dtype)


def _first(graph: VarianceGraph, axis: ClassAxis, output: Value) -> Value:
    """Where the class is that the source puts first, as a mask (bool); the first of equal ones."""
    first = graph.emit("ArgMax", output, axis=axis.axis, keepdims=1, dtype=np.int64)
    return graph.emit("Equal", first, _class_numbers(graph, axis, output), dtype=np.bool_)


def _below(graph: VarianceGraph, probs: Value, highest: Value) -> Value:
    """p (1 - eps) is one or two rounding steps below p."""
    return graph.at_most(probs, highest * (1 - float(np.finfo(probs.dtype).eps)))


def _class_numbers(graph: VarianceGraph, axis: ClassAxis, like: Value) -> Value:
    """0, 1, …, C - 1 along the class axis."""
    if axis.size is not None:
        return graph.constant(axis.along(np.arange(axis.size, dtype=np.int64)))
    if graph.opset < 9:
        raise UserError(
            f"the number of classes of {like.name!r} is left open, which opset {graph.opset} cannot handle",
            "fix the size of the class axis in the model, or raise its opset to 10 or newer",
        )
    numbers = graph.positions(graph.dimension(like, axis.axis))
    return graph.emit("Reshape", numbers, graph.ints(-1, *(1,) * (axis.rank - 1 - axis.axis)))


# ------------------------------------------------------------------------------- tokens


def _leading_tokens(
    graph: VarianceGraph,
    head: Head,
    axis: ClassAxis,
    output: Value,
    mean: Value,
    var: Value,
    options: HeadOptions,
) -> tuple[ClassAxis, Value, Value, Value]:
    """The tokens with the largest logits, in descending order, with their means and variances."""
    if axis.size is None:
        raise UserError(
            f"the size of the vocabulary of {head.output!r} is left open",
            "fix the size of the output's last axis in the model, or choose `task='none'`",
        )
    if graph.opset < 11:
        raise UserError(
            f"a head for tokens needs opset 11; the model has opset {graph.opset}",
            "raise it, e.g. with onnx.version_converter, or choose `task='none'`",
        )
    key = mean
    if head.logits != head.tensor or output.dtype.itemsize < 4:
        # The source's Softmax, or half precision, may round two logits to one; then the first one counts.
        first = _first(graph, axis, _as_seen(graph, output, mean.dtype))
        key = graph.where(first, graph.constant(np.asarray(np.inf, mean.dtype)), mean)
    count = options.leading(axis.size)
    if axis.axis == axis.rank - 1 and key.dtype == np.float32:
        both = (key.dtype, np.dtype(np.int64))
        largest, tokens = graph.emit_several(
            LEADING.name, key, graph.ints(count), outputs=2, dtypes=both, domain=DOMAIN
        )
    else:
        largest, tokens = graph.topk(key, count, axis.axis)
    mean = largest if key is mean else graph.emit("GatherElements", mean, tokens, axis=axis.axis)
    var = chosen(graph, var, tokens, axis.axis, axis.rank, f"{head.output}/tokens")
    return replace(axis, size=count), tokens, mean, var
