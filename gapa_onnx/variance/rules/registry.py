"""The table of behaviours, and the families that fill it.

Every operator has exactly one behaviour: a `Rule` with its accuracy, `Deterministic`, or
`Refusal` with its reason. An operator that is not in the table is refused by name.

A family is a constructor of rules: it is told what makes one operator special (a derivative, which
input is data) and does the rest. A derivative is stated once, with its sign, as a slope: the variance
reads its square, the full covariance (`gapa_onnx.variance.covariance`) the slope itself. With independent inputs of variance v_i, first order:

    elementwise   y = g(x_1 … x_n)     v_y = Σ_i slope_i² v_i, slope_i = ∂g/∂x_i
    bilinear      y = f(a, b)          v_y = f(v_a, b²) + f(a², v_b) + f(v_a, v_b)
    structural    y moves elements     v_y = the same node, on the variance
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from gapa_onnx.variance.rules.hoisting import Layer
from gapa_onnx.variance.rules.view import NodeView, Operand
from gapa_onnx.variance.values import Partial, Value

Variances = Value | None | tuple[Value | None, ...]
Key = tuple[str, str]  # domain ("" for ONNX's own), operator

Slope = Callable[..., Value | float]
"""∂y/∂x of one input, with its sign, as a function of the output y and of all inputs.

Keyword arguments are attributes of the operator with their ONNX defaults."""

Slopes = Callable[[NodeView], Sequence[Slope | None]]
"""The slope of each input of a node; None, or nothing, for an input that must be certain."""


@dataclass(frozen=True)
class Sign:
    """A slope that is 1 or -1: a variance, which reads its square, has no need of it."""

    slope: Slope

    def __call__(self, y: Value, *x: Value) -> Value | float:
        return self.slope(y, *x)


@dataclass(frozen=True)
class Gathered:
    """A reduction, as the slope of its elements sees it."""

    x: Value
    whole: Callable[[], Value]
    total: Callable[
        [Value], Value
    ]  #: over the elements that are reduced to one, which stay as axes of size 1

    @property
    def y(self) -> Value:
        """The output, with the reduced axes as axes of size 1."""
        return self.whole()


Share = Callable[[Gathered], Value]
"""∂y/∂x_j of a reduction, with its sign, in the shape of x."""


class Accuracy(enum.Enum):
    """How true a rule is when the elements of its inputs are independent."""

    EXACT = "exact"
    FIRST_ORDER = "first order"
    COMPOSED = "composed"  # as true as the rules of what is inside
    HEURISTIC = "heuristic"


Apply = TypeVar("Apply", bound=Callable[[NodeView], Variances])


@dataclass(frozen=True)
class Rule:
    """States the variance of each output of a node."""

    apply: Callable[[NodeView], Variances]
    accuracy: Accuracy
    formula: str
    activation: bool = False  #: an elementwise nonlinearity of one tensor: a place for a site
    linear: bool = False  #: has weights: a layer
    operands: tuple[int, ...] = (
        0,
        1,
    )  #: inputs that are a layer's data and weights; (0,) if the weights are attributes
    slopes: Slopes | None = None  #: of an operator that acts on each element by itself
    share: Share | None = None  #: of a reduction


@dataclass(frozen=True)
class Deterministic:
    """No variance leaves the operator, and why."""

    reason: str


@dataclass(frozen=True)
class Refusal:
    """The variance cannot be stated, and why."""

    reason: str


Behaviour = Rule | Deterministic | Refusal

TABLE: dict[Key, Behaviour] = {}


def _key(domain: str | None, op_type: str) -> Key:
    return "" if domain in (None, "ai.onnx") else domain, op_type


def is_declared(domain: str | None, op_type: str) -> bool:
    """Whether the table has an entry for an operator."""
    return _key(domain, op_type) in TABLE


def behaviour(domain: str | None, op_type: str) -> Behaviour:
    """The behaviour of an operator; never fails."""
    found = TABLE.get(_key(domain, op_type))
    if found is not None:
        return found
    return Refusal(f"no rule for {domain + '::' if domain else ''}{op_type} yet")


def variance_by_rule(node: NodeView) -> Value | None:
    """The variance of the first output of a node that a rule made up, by the rule of its operator."""
    entry = behaviour(node.node.domain, node.op_type)
    if not isinstance(entry, Rule):
        raise node.refuse(f"no rule for {node.op_type}")
    found = entry.apply(node)
    return found[0] if isinstance(found, tuple) else found


def _define(op_type: str, entry: Behaviour, domain: str = "") -> None:
    if (domain, op_type) in TABLE:
        raise ValueError(f"{op_type} has a behaviour already")
    TABLE[domain, op_type] = entry


# -------------------------------------------------------------------- families


def rule(
    *op_types: str,
    accuracy: Accuracy,
    activation: bool = False,
    linear: bool = False,
    operands: tuple[int, ...] = (0, 1),
    slopes: Slopes | None = None,
    share: Share | None = None,
    formula: str | None = None,
    domain: str = "",
) -> Callable[[Apply], Apply]:
    """A rule of its own: a function of the node view that returns one variance per output.

    `slopes` or `share` are the derivatives where the operator has such. The formula is the first paragraph
    of the function's docstring unless it is given.
    """

    def decorate(function: Apply) -> Apply:
        stated = formula or (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
        entry = Rule(function, accuracy, stated, activation, linear, operands, slopes, share)
        for op_type in op_types:
            _define(op_type, entry, domain)
        return function

    return decorate


def deterministic(reason: str, *op_types: str, domain: str = "") -> None:
    for op_type in op_types:
        _define(op_type, Deterministic(reason), domain)


def refused(reason: str, *op_types: str, domain: str = "") -> None:
    for op_type in op_types:
        _define(op_type, Refusal(reason), domain)


def elementwise(
    op_type: str,
    *slopes: Slope,
    of_node: Slopes | None = None,
    accuracy: Accuracy = Accuracy.FIRST_ORDER,
    activation: bool = False,
    formula: str = "Σ (∂y/∂x)² v",
    domain: str = "",
) -> None:
    """Delta method. One slope per input, or `of_node` where the slopes depend on the node."""
    known: Slopes = of_node or of_every_node(*slopes)

    def apply(node: NodeView) -> Value:
        return first_order(node, known(node))

    _define(op_type, Rule(apply, accuracy, formula, activation, slopes=known), domain)


def of_every_node(*slopes: Slope | None) -> Slopes:
    """Slopes that are the same function for every node of an operator."""
    return lambda node: slopes


def first_order(node: NodeView, slopes: Sequence[Slope | None]) -> Value:
    """Σ_i slope_i² v_i over the uncertain inputs, in the shape of the output.

    A tensor that is an input twice (x·x) is one variable: its slopes add before they are squared.
    """
    means = [operand.mean for operand in node.inputs if operand.present]
    if len(means) == 1 and slopes[0] is not None:
        return _first_order_of_one(node, slopes[0])
    found: dict[str, Value | float] = {}
    variances: dict[str, Value] = {}
    fills = (
        False  # a constant slope does not bring in the other operand's shape: x (1, d) + b (n, d) is (n, d)
    )
    for operand, slope in zip(node.inputs, slopes):
        if operand.var is not None:
            name = operand.tensor.name
            if slope is None:
                raise node.refuse(f"its input {name!r} is uncertain")
            value = evaluated(node, slope, node.output.mean, means)
            found[name] = found[name] + value if name in found else value
            variances[name] = operand.var
            fills = fills or operand.same_shape(node.output)
    terms = [variances[name] * (value * value) for name, value in found.items()]
    fills = fills or any(isinstance(value, Value) for value in found.values())
    return total_of(terms) if fills else node.graph.expand(total_of(terms), like=node.output.raw)


def _first_order_of_one(node: NodeView, slope: Slope) -> Value:
    """slope² v of a node with one input."""
    graph, y, x, var = node.graph, node.output.mean, node.inputs[0].mean, node.inputs[0].variance

    def stretched(part: Value, *means: Value) -> Value:
        if isinstance(slope, Sign):
            return part
        value = evaluated(node, slope, means[0], means[1:])
        return part * (value * value)

    if isinstance(var, Partial):
        axis = var.axis
        return var.each(
            lambda start, end, part: stretched(
                part, *(graph.slice(mean, axis, start, end) for mean in (y, x))
            )
        )
    return stretched(var, y, x)


def evaluated(node: NodeView, slope: Slope, y: Value, x: Sequence[Value]) -> Value | float:
    """A slope at y and x, with the attributes of the node."""
    return slope(y, *x, **{name: node.attr(name, default) for name, default in _keywords(slope)})


@functools.cache
def _keywords(slope: Slope) -> list[tuple[str, Any]]:
    parameters = inspect.signature(slope).parameters.values()
    return [(p.name, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY]


def total_of(terms: Sequence[Value]) -> Value:
    """The sum of one or more terms."""
    return functools.reduce(Value.__add__, terms)


def bilinear(*op_types: str, domain: str = "", **squared_attributes: float) -> None:
    """y = f(a, b) + c. Named attributes are factors of f and are squared; their values are defaults."""

    def apply(node: NodeView) -> Value | None:
        a, b = node.inputs[:2]
        if not a.certain and a.tensor.name == b.tensor.name:
            raise node.refuse("a tensor is multiplied by itself: its factors are not independent")
        scale = {name: node.attr(name, default) ** 2 for name, default in squared_attributes.items()}
        # Gemm cannot leave its bias out before opset 11.
        no_bias = (
            [node.graph.constant(np.zeros(1, a.dtype))] if node.op_type == "Gemm" and node.opset < 11 else []
        )
        if a.var is not None and b.var is None:
            return _with_bias(node, Layer.of(node, b, no_bias, scale)(a.var))
        pairs: list[tuple[Value, Value]] = []
        if a.var is not None:
            pairs.append((a.var, b.mean.squared))
        if b.var is not None:
            pairs.append((a.mean.squared, b.var))
        if a.var is not None and b.var is not None:
            pairs.append((a.var, b.var))
        terms = [node.again(*pair, *no_bias, **scale) for pair in pairs]
        return _with_bias(node, total_of(terms) if terms else None)

    for op_type in op_types:
        formula = "f(v_a, b²) + f(a², v_b) + f(v_a, v_b)"
        _define(op_type, Rule(apply, Accuracy.EXACT, formula, linear=True), domain)


def _with_bias(node: NodeView, total: Value | None) -> Value | None:
    bias = node.input(2)
    if bias is None or bias.var is None:
        return total
    if node.op_type != "Gemm":
        raise node.refuse("an uncertain bias is supported by Gemm only")
    if bias.tensor.name in (operand.tensor.name for operand in node.inputs[:2]):
        raise node.refuse("a factor is its own bias: the two are not independent")
    term = bias.var * node.attr("beta", 1.0) ** 2
    return node.graph.expand(term, like=node.output.raw) if total is None else total + term


def structural(
    *op_types: str, data: slice = slice(0, 1), slopes: Slopes | None = None, domain: str = ""
) -> None:
    """Elements are moved, repeated or dropped: the same node, with variances in place of `data`."""

    def apply(node: NodeView) -> Variances:
        moved = range(len(node.inputs))[data]
        inputs = [
            variance_or_zeros(operand) if position in moved else (operand.raw if operand.present else None)
            for position, operand in enumerate(node.inputs)
        ]
        return node.again_several(*inputs, outputs=len(node.outputs))

    for op_type in op_types:
        _define(op_type, Rule(apply, Accuracy.EXACT, "the same node, on the variance", slopes=slopes), domain)


def variance_or_zeros(operand: Operand) -> Value:
    """For operators that need a tensor even where it is certain, such as one input of a Concat."""
    return operand.graph.zeros(operand.mean) if operand.var is None else operand.var
