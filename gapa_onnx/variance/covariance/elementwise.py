"""Operators that act on each element by itself: G_x = G · ∂y/∂x, summed where x was broadcast.

The slopes are those of the variance rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gapa_onnx.variance.covariance.registry import Cotangents, TailNode, pullback
from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules import TABLE, Rule
from gapa_onnx.variance.rules.registry import attributes_of

Derivative = Callable[..., Value | float]

SIGNED: dict[str, Derivative] = {
    "Abs": lambda y, x: 2 * (x >= 0) - 1,
    "Acos": lambda y, x: -1 / (1 - x * x).sqrt(),
}
"""Slopes of which a variance rule leaves the sign out, because it squares them."""


def pulled(node: TailNode, g: Value, derivatives: Sequence[Derivative]) -> tuple[Value | None, ...]:
    """G · ∂y/∂x_i for each input that is uncertain."""
    present = [operand for operand in node.inputs if operand.present]
    if len(present) == 1:  # the slope has the shape of both, and may be there already for the variance
        slope = _slope(node, derivatives[0], node.output.mean, [present[0].mean])
        return (g * (node.graph.unsqueeze(slope, [1]) if isinstance(slope, Value) else slope),)
    y, x = node.lifted(node.output), [node.lifted(operand) for operand in present]
    return tuple(
        None if operand.certain else node.summed(g * _slope(node, derivative, y, x), operand)
        for operand, derivative in zip(node.inputs, derivatives)
    )


def _slope(node: TailNode, derivative: Derivative, y: Value, x: Sequence[Value]) -> Value | float:
    return derivative(y, *x, **attributes_of(node, derivative))


def _define(op_type: str, domain: str, derivatives: Sequence[Derivative]) -> None:
    @pullback(op_type, domain=domain)
    def elementwise(node: TailNode, g: Value) -> Cotangents:
        return pulled(node, g, derivatives)


for (_domain, _op_type), _rule in TABLE.items():
    if isinstance(_rule, Rule) and _rule.derivatives:
        _signed = SIGNED.get(_op_type)
        _define(_op_type, _domain, _rule.derivatives if _signed is None else (_signed,))


@pullback("Mul")
def product(node: TailNode, g: Value) -> Cotangents:
    """G b, G a"""
    return pulled(node, g, (lambda y, a, b: b, lambda y, a, b: a))


@pullback("Pow")
def power(node: TailNode, g: Value) -> Cotangents:
    """G b a^(b-1)"""

    def slope(y: Value, base: Value, exponent: Value) -> Value:
        exponent = node.graph.cast(exponent, base.dtype)  # it may be whole numbers
        return exponent * node.graph.emit("Pow", base, exponent - 1)

    return pulled(node, g, (slope,))


@pullback("Sum")
def variadic_sum(node: TailNode, g: Value) -> Cotangents:
    """G for each input"""
    return pulled(node, g, [lambda y, *x: 1] * len(node.inputs))


@pullback("Mean")
def variadic_mean(node: TailNode, g: Value) -> Cotangents:
    """G / n for each of the n inputs"""
    share = 1 / len(node.inputs)
    return pulled(node, g, [lambda y, *x: share] * len(node.inputs))


@pullback("Max", "Min")
def extremum(node: TailNode, g: Value) -> Cotangents:
    """G for the input that was chosen; those that tie share it."""

    def chosen(x: Value, y: Value) -> Value:
        return x >= y if node.op_type == "Max" else x <= y

    def share(position: int) -> Derivative:
        def slope(y: Value, *x: Value) -> Value:
            ties = [chosen(one, y) for one in x]
            return ties[position] / sum(ties[1:], ties[0])

        return slope

    return pulled(node, g, [share(position) for position in range(len(node.inputs))])


@pullback("Clip")
def clip(node: TailNode, g: Value) -> Cotangents:
    """G strictly between the bounds"""
    y, inside = node.output.mean, None
    for position, name in ((1, "min"), (2, "max")):
        bound = node.input(position)
        limit = node.attr(name) if bound is None else bound.mean
        if limit is not None:
            within = y > limit if name == "min" else y < limit
            inside = within if inside is None else inside * within
    return g if inside is None else g * node.graph.unsqueeze(inside, [1])


@pullback("Where")
def where(node: TailNode, g: Value) -> Cotangents:
    """G where an input was taken, 0 elsewhere"""
    condition, a, b = node.inputs
    taken = node.lifted(condition, node.graph.cast(condition.raw, node.output.dtype))
    return (
        None,
        None if a.certain else node.summed(g * taken, a),
        None if b.certain else node.summed(g * (1 - taken), b),
    )


@pullback("Identity", "Dropout")
def identity(node: TailNode, g: Value) -> Cotangents:
    """G, unchanged"""
    training = node.input(2) if node.op_type == "Dropout" else None
    if training is not None and (training.constant is None or training.constant.any()):
        raise node.refuse("training_mode may be on: elements are dropped at random")
    return g


@pullback("Cast", "CastLike")
def cast(node: TailNode, g: Value) -> Cotangents:
    """G, unchanged: between floating-point types"""
    return node.graph.cast(g, node.inputs[0].dtype)
