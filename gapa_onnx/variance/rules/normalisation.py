"""Normalisations: elements are divided by the spread of the group that they belong to.

With u = (x - m) / s over a group of n elements,

    centred       J = (I - (1 1ᵀ + u uᵀ) / n) / s      layer, instance, group normalisation
    not centred   J = (I - u uᵀ / n) / s               RMS and L2 normalisation, m = 0

and the variance is Σ_j J_ij² v_j. s² is the *expected* mean square, that of the means plus what
the variance adds to it: first order where v is small, bounded where v outgrows the means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.rules.registry import Accuracy, Variances, rule, total_of
from gapa_onnx.variance.rules.view import NodeView, Operand

FIRST_ORDER = Accuracy.FIRST_ORDER

NEARLY_ZERO = 1e-30
"""For normalisations without an ε: a group of certain zeros divides by its root instead of by 0."""


@dataclass(frozen=True)
class Normalised:
    """A tensor divided by the spread of its groups; identical nodes are emitted once, so each quantity
    is simply its formula."""

    x: Value
    v: Value | None
    average: Callable[[Value], Value]  #: over each group, which stays as an axis of size 1
    epsilon: float
    centred: bool
    elements: int | None = None  #: of a group, where that is known before a run

    @property
    def size(self) -> Value | float:
        """n"""
        if self.elements is not None:
            return float(self.elements)
        count = self.x.graph.count
        return count(self.x, self.x.dtype) / count(self.average(self.x), self.x.dtype)

    @property
    def deviation(self) -> Value:
        return self.x - self.average(self.x) if self.centred else self.x

    @property
    def square(self) -> Value:
        """s²; subtracting the mean takes one n-th of the variance away."""
        square = self.average(self.deviation.squared) + self.epsilon
        if self.v is None:
            return square
        noise = self.average(self.v)
        return square + (noise * (1 - 1 / self.size) if self.centred else noise)

    @property
    def u(self) -> Value:
        return self.deviation / self.square.sqrt()

    @property
    def var(self) -> Value | None:
        """Of u."""
        return None if self.v is None else self.variance

    @property
    def variance(self) -> Value:
        """Of u, where x is uncertain."""
        return (self._centred_spread() if self.centred else self._spread()) / self.square

    @property
    def _noise(self) -> Value:
        """v, where x is uncertain."""
        if self.v is None:
            raise ValueError("what is normalised is certain: it has no variance")
        return self.v

    @property
    def var_of_mean(self) -> Value:
        return self.average(self._noise) / self.size

    @property
    def var_of_inverse(self) -> Value:
        """Of 1 / s, whose slopes are -u_j / (n s²)."""
        return self.average(self.u.squared * self._noise) / (self.size * self.square.squared)

    def _spread(self) -> Value:
        """(1 - p_i)² v_i + p_i Σ_{j≠i} p_j v_j, with p = u² / n, which sums to 1 at most.

        Where p_i ≤ 1/2 this is (1 - 2 p_i) v_i + p_i Σ_j p_j v_j, a sum of what is positive. At most
        one element is above; its own term is left out of the sum that it reads, not subtracted.
        """
        v, average = self._noise, self.average
        p = self.u.squared / self.size
        terms = self.u.squared * v  # n p_j v_j
        large = p > 0.5
        small = 1 - large
        of_small = (1 - 2 * p) * v + p * average(large * terms)
        return small * of_small + large * ((1 - p).squared * v) + p * average(small * terms)

    def _centred_spread(self) -> Value:
        """(1 - a_ii)² v_i + Σ_{j≠i} a_ij² v_j, with a_ij = (1 + u_i u_j) / n.

        Σ_i a_ii is 2 at most, so at most one element has a_ii > 1/2 + 1/n, which is u_i² > n/2. Its sum
        is taken over the others. For the rest the sums over j are expanded, so that they are shared.
        """
        v, u, n, average = self._noise, self.u, self.size, self.average
        square, graph = u.squared, self.x.graph
        own = (square + 1) / n  # a_ii
        rest = 1 - own
        is_large = graph.emit("Greater", square, square.lift(n / 2), dtype=np.bool_)
        large = graph.cast(is_large, square.dtype)
        at_large = n * average(large * u)
        of_large = rest.squared * v + average((at_large * u + 1).squared * (v - large * v)) / n
        # (1 - 2 a_ii) v_i + (mean(v) + 2 u_i mean(u v) + u_i² mean(u² v)) / n
        shared = u * (u * (average(square * v) / n) + average(u * v) * (2 / n)) + average(v) / n
        # A group of two loses all its variance: what is left of it is rounding, of either sign.
        of_small = graph.at_least((rest - own) * v + shared, 0)
        return graph.where(is_large, of_large, of_small)


def over(graph: VarianceGraph, axes: Sequence[int]) -> Callable[[Value], Value]:
    return lambda value: graph.reduce("ReduceMean", value, axes)


def elements_along(x: Operand, axes: Sequence[int]) -> int | None:
    """How many elements a group has that spans some axes; None where that is not known."""
    if x.shape is None:
        return None
    sizes = [x.shape[axis] for axis in axes]
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    return prod(known) if len(known) == len(sizes) else None


def affine(
    var: Value | None,
    u: Value,
    scale: Operand | None,
    bias: Operand | None,
    shape: Callable[[Value], Value] = lambda parameter: parameter,
) -> Value:
    """The variance of γ u + β: γ² v_u + u² v_γ + v_u v_γ + v_β. `shape` makes a parameter broadcast."""
    terms = []
    if var is not None:
        terms.append(var if scale is None else var * shape(scale.mean).squared)
    if scale is not None and scale.var is not None:
        terms.append(shape(scale.var) * (u.squared if var is None else u.squared + var))
    if bias is not None and bias.var is not None:
        terms.append(shape(bias.var))
    total = total_of(terms)
    return total if var is not None else u.graph.expand(total, like=u)


def added(parts: Sequence[Operand], shape: Callable[[Operand, Value], Value]) -> tuple[Value, Value | None]:
    """The sum of tensors and its variance, in the shape of the first; one that comes twice counts twice."""
    means = [shape(part, part.mean) for part in parts]
    uncertain = {part.tensor.name: part for part in parts if not part.certain}
    times = Counter(part.tensor.name for part in parts)
    terms = [shape(part, part.variance) * float(times[name] ** 2) for name, part in uncertain.items()]
    mean = total_of(means)
    if not terms:
        return mean, None
    var = total_of(terms)
    return mean, var.graph.expand(var, like=means[0]) if parts[0].certain else var


# ------------------------------------------------------------- over the last axes of a tensor


@rule("LayerNormalization", accuracy=FIRST_ORDER)
def layer_normalization(node: NodeView) -> Variances:
    """γ² Σ_j J_ij² v_j with J = (I - (1 1ᵀ + u uᵀ) / n) / s"""
    x = node.inputs[0]
    normalised = _over_last_axes(node, x, x.mean, x.var, centred=True, epsilon=1e-5)
    var = affine(normalised.var, normalised.u, node.input(1), node.input(2))
    return _with_statistics(node, normalised, var, ("var_of_mean", "var_of_inverse"))


@rule("RMSNormalization", "SimplifiedLayerNormalization", accuracy=FIRST_ORDER)
def rms_normalization(node: NodeView) -> Variances:
    """γ² Σ_j J_ij² v_j with J = (I - u uᵀ / n) / s"""
    x = node.inputs[0]
    normalised = _over_last_axes(node, x, x.mean, x.var, centred=False, epsilon=1e-5)
    var = affine(normalised.var, normalised.u, node.input(1), None)
    return _with_statistics(node, normalised, var, ("var_of_inverse",))


@rule("SkipLayerNormalization", accuracy=FIRST_ORDER, domain="com.microsoft")
def skip_layer_normalization(node: NodeView) -> Variances:
    """LayerNormalization of x + skip + bias, whose variances add"""
    return _skip(node, centred=True, bias=4)


@rule("SkipSimplifiedLayerNormalization", accuracy=FIRST_ORDER, domain="com.microsoft")
def skip_rms_normalization(node: NodeView) -> Variances:
    """RMSNormalization of x + skip + bias, whose variances add"""
    return _skip(node, centred=False, bias=3)


@rule("EmbedLayerNormalization", accuracy=FIRST_ORDER, domain="com.microsoft")
def embed_layer_normalization(node: NodeView) -> Variances:
    """LayerNormalization of the sum of embeddings, where their tables are uncertain"""
    ids, word, position = node.inputs[0], node.inputs[2], node.inputs[3]
    rows = {word.tensor.name: ids.raw, position.tensor.name: _position_ids(node)}
    tables = [word, position]
    segment = node.input(4)
    if segment is not None:
        tables.append(segment)
        rows[segment.tensor.name] = node.inputs[1].raw
    if len(rows) < len(tables):
        raise node.refuse("one table serves two kinds of embeddings")

    def looked_up(table: Operand, values: Value) -> Value:
        return node.graph.emit("Gather", values, rows[table.tensor.name], axis=0)

    mean, v = added(tables, looked_up)
    normalised = Normalised(mean, v, over(node.graph, [2]), node.attr("epsilon", 1e-12), centred=True)
    var = affine(normalised.var, normalised.u, node.input(5), node.input(6))
    return (var, None, v)[: len(node.outputs)]


def _position_ids(node: NodeView) -> Value:
    given = node.input(8)
    if given is not None:
        return given.raw
    return node.graph.positions(node.graph.dimension(node.inputs[0].raw, 1))


def _over_last_axes(
    node: NodeView, x: Operand, mean: Value, v: Value | None, centred: bool, epsilon: float
) -> Normalised:
    first = node.attr("axis", -1)
    # Counted from the front where the rank is known: before opset 11 axes are not negative.
    axes = list(range(first, 0)) if first < 0 and x.shape is None else list(range(first % x.rank, x.rank))
    elements = elements_along(x, axes)
    return Normalised(mean, v, over(node.graph, axes), node.attr("epsilon", epsilon), centred, elements)


def _with_statistics(
    node: NodeView, normalised: Normalised, var: Value, names: Sequence[str]
) -> tuple[Value | None, ...]:
    """The variance of the output and of the statistics that a node may hand out besides."""
    further = []
    for operand, name in zip(node.outputs[1:], names):
        wanted = operand.present and normalised.v is not None
        further.append(node.graph.cast(getattr(normalised, name), operand.dtype) if wanted else None)
    return var, *further


def _skip(node: NodeView, centred: bool, bias: int) -> Variances:
    given = (node.input(position) for position in (0, 1, bias))
    parts = [operand for operand in given if operand is not None]
    mean, v = added(parts, lambda part, value: value)
    normalised = _over_last_axes(node, parts[0], mean, v, centred, epsilon=1e-12)
    var = affine(normalised.var, normalised.u, node.input(2), node.input(3) if centred else None)
    statistics = _with_statistics(node, normalised, var, ("var_of_mean", "var_of_inverse"))
    return (*statistics, v)[: len(node.outputs)]


# ------------------------------------------------------------------ over channels and positions


@rule("InstanceNormalization", accuracy=FIRST_ORDER)
def instance_normalization(node: NodeView) -> Value:
    """γ² Σ_j J_ij² v_j over the positions of a channel, J as for LayerNormalization"""
    x, scale, bias = node.inputs
    return _over_groups(node, x.mean, x.var, 0, scale, bias)[0]


@rule("GroupNormalization", accuracy=FIRST_ORDER)
def group_normalization(node: NodeView) -> Value:
    """γ² Σ_j J_ij² v_j over the positions of a group of channels, J as for LayerNormalization"""
    x, scale, bias = node.inputs
    return _over_groups(node, x.mean, x.var, node.attr("num_groups"), scale, bias)[0]


@rule("GroupNorm", "SkipGroupNorm", accuracy=FIRST_ORDER, domain="com.microsoft")
def group_norm(node: NodeView) -> Variances:
    """GroupNormalization of x + skip + bias, channels last or first; φ'(z)² times that with SiLU

    A skip of one value per channel is the same at all positions; its variance counts as if it were not,
    as it does where the sum and the normalisation are nodes of their own.
    """
    last = bool(node.attr("channels_last", 1))
    x, scale, bias = node.inputs[:3]
    added_to = (node.input(position) for position in (3, 4))
    parts = [x, *(operand for operand in added_to if operand is not None)]

    def broadcast(part: Operand, value: Value) -> Value:
        missing = 4 - part.rank if part is not x else 0  # (n, c) or (c): no positions, no samples
        if missing == 0 or (last and missing == 3):
            return value
        return node.graph.unsqueeze(value, [1, 2] if last else [2, 3] if missing == 2 else [1, 2])

    def moved(value: Value, perm: list[int]) -> Value:
        return node.graph.emit("Transpose", value, perm=perm) if last else value

    mean, v = added(parts, broadcast)
    first = [0, 3, 1, 2]
    mean_first = moved(mean, first)
    v_first = None if v is None else moved(v, first)
    var, z = _over_groups(node, mean_first, v_first, node.attr("groups"), scale, bias)
    if node.attr("activation", 0):
        on = z.sigmoid()
        var = var * (on + z * on * (1 - on)).squared
    return (moved(var, [0, 2, 3, 1]), v)[: len(node.outputs)]


def _over_groups(
    node: NodeView, x: Value, v: Value | None, groups: int, scale: Operand, bias: Operand
) -> tuple[Value, Value]:
    """The variance of the output for x (n, c, …), and its mean; 0 groups stand for one per channel.

    All axes behind the groups are seen as one, so that the rank need not be known.
    """
    graph = node.graph

    def seen_as(channels: int, value: Value) -> Value:
        return graph.emit("Reshape", value, graph.ints(0, channels, -1))

    def by_channel(value: Value) -> Value:
        if parameters_per_group:
            return value
        return graph.emit("Reshape", value, graph.shape(seen_as(0, x)))

    def column(parameter: Value) -> Value:
        return graph.unsqueeze(parameter, [1])

    # Up to opset 20 the standard's operator had one γ and β per group.
    parameters_per_group = groups == 0 or (node.op_type == "GroupNormalization" and node.opset < 21)
    epsilon = node.attr("epsilon", 1e-5)
    groups_of_x = seen_as(groups, x)
    groups_of_v = None if v is None else seen_as(groups, v)
    normalised = Normalised(groups_of_x, groups_of_v, over(graph, [2]), epsilon, centred=True)
    var_of_u = normalised.var
    var = affine(
        None if var_of_u is None else by_channel(var_of_u), by_channel(normalised.u), scale, bias, column
    )
    mean = by_channel(replace(normalised, v=None).u) * column(scale.mean) + column(bias.mean)
    shape = graph.shape(x)
    return graph.emit("Reshape", var, shape), graph.emit("Reshape", mean, shape)


@rule("MeanVarianceNormalization", accuracy=FIRST_ORDER)
def mean_variance_normalization(node: NodeView) -> Value:
    """Σ_j J_ij² v_j, J as for LayerNormalization"""
    x = node.inputs[0]
    average = over(node.graph, node.attr("axes", [0, 2, 3]))
    return Normalised(x.mean, x.variance, average, NEARLY_ZERO, centred=True).variance
