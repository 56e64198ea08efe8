"""Operators that act on each element by itself: only the slope is stated, ∂y/∂x with its sign.

Slopes use the output y where they can, so that the variance path taps as few intermediate
tensors as possible and the runtime keeps its fusions on the mean path. At a kink the slope is
the one from the flat side (Relu at 0: 0), which is what a unit that is switched off passes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from math import log, pi, sqrt

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.registry import (
    Accuracy,
    Sign,
    Slope,
    deterministic,
    elementwise,
    first_order,
    of_every_node,
    rule,
    total_of,
)
from gapa_onnx.variance.rules.view import NodeView

EXACT, FIRST_ORDER = Accuracy.EXACT, Accuracy.FIRST_ORDER


# Where a slope is infinite, as that of a root at 0, a certain number must stay certain: 0 · inf is no number. So the
# square of a slope ends at 1e36, which float32 holds.
NEARLY_ZERO = 1e-36


def _root(x: Value) -> Value:
    """√x for a denominator, which is not quite 0."""
    return x.graph.at_least(x, NEARLY_ZERO).sqrt()


def activation(op_type: str, slope: Slope) -> None:
    elementwise(op_type, slope, activation=True, formula="φ'(x)² v")


# --------------------------------------------------------------------------- arithmetic

elementwise("Add", lambda y, a, b: 1, lambda y, a, b: 1, accuracy=EXACT)
elementwise("Sub", lambda y, a, b: 1, lambda y, a, b: -1, accuracy=EXACT)
elementwise("Div", lambda y, a, b: 1 / b, lambda y, a, b: -y / b)
elementwise("Neg", lambda y, x: -1, accuracy=EXACT)
elementwise("Abs", Sign(lambda y, x: 2 * (x >= 0) - 1))
elementwise("Reciprocal", lambda y, x: -(y * y))
elementwise("Exp", lambda y, x: y)
elementwise("Log", lambda y, x: 1 / x)
elementwise("Sqrt", lambda y, x: 0.5 / y.graph.at_least(y, sqrt(NEARLY_ZERO)))
# y = a - q b with a whole q, whichever way the quotient is rounded.
elementwise("Mod", lambda y, a, b: 1, lambda y, a, b: (y - a) / b)
elementwise("Erf", lambda y, x: (2 / sqrt(pi)) * (-(x * x)).exp())


_PRODUCT = of_every_node(lambda y, a, b: b, lambda y, a, b: a)


@rule("Mul", accuracy=EXACT, slopes=_PRODUCT)
def product(node: NodeView) -> Value:
    """b² v_a + a² v_b + v_a v_b; a tensor times itself is 4 x² v, first order."""
    total = first_order(node, _PRODUCT(node))
    a, b = node.inputs
    if a.var is None or b.var is None or a.tensor.name == b.tensor.name:
        return total
    return total + a.var * b.var


def _power_slopes(node: NodeView) -> list[Slope | None]:
    """b a^(b-1) of the base; the exponent must be certain."""
    if not node.inputs[1].certain:
        raise node.refuse("the exponent is uncertain")
    known = node.inputs[1].constant

    def slope(y: Value, base: Value, exponent: Value) -> Value | float:
        if known is not None and not np.any(known):
            return 0.0
        exponent = base.graph.cast(exponent, base.dtype)  # it may be whole numbers
        if known is not None and np.all((known > 0) & (known < 1)):  # roots, which have no negative base
            base = base.graph.at_least(base, NEARLY_ZERO)
        return exponent * base.graph.emit("Pow", base, exponent - 1)

    return [slope, None]


elementwise("Pow", of_node=_power_slopes, formula="(b a^(b-1))² v_a; the exponent must be certain.")


def _equal_slopes(node: NodeView) -> list[Slope]:
    """1 of each summand, 1/n of each of n tensors that are averaged."""
    share = 1 / len(node.inputs) if node.op_type == "Mean" else 1
    return [lambda y, *x: share] * len(node.inputs)


elementwise("Sum", of_node=_equal_slopes, accuracy=EXACT, formula="Σ_i v_i over the inputs.")
elementwise("Mean", of_node=_equal_slopes, accuracy=EXACT, formula="Σ_i v_i / n² over the n inputs.")


def _chosen(node: NodeView, y: Value, x: Sequence[Value]) -> list[Value]:
    """1 where an input is the extremum, for each input."""
    return [one >= y if node.op_type == "Max" else one <= y for one in x]


def _extremum_slopes(node: NodeView) -> list[Slope]:
    """1 of the chosen input; inputs that tie share it."""

    def share(position: int) -> Slope:
        def slope(y: Value, *x: Value) -> Value:
            ties = _chosen(node, y, x)
            return ties[position] / total_of(ties)

        return slope

    return [share(position) for position in range(len(node.inputs))]


@rule("Max", "Min", accuracy=FIRST_ORDER, slopes=_extremum_slopes)
def extremum(node: NodeView) -> Value:
    """The variance of the chosen input; inputs that tie share it equally."""
    chosen = _chosen(node, node.output.mean, [x.mean for x in node.inputs])
    ties = total_of(chosen)
    return total_of([mask * x.var for mask, x in zip(chosen, node.inputs) if x.var is not None]) / ties


# -------------------------------------------------------------- trigonometric, hyperbolic

elementwise("Sin", lambda y, x: x.cos())
elementwise("Cos", lambda y, x: -x.sin())
elementwise("Tan", lambda y, x: 1 + y * y)
elementwise("Asin", lambda y, x: 1 / _root(1 - x * x))
elementwise("Acos", lambda y, x: -1 / _root(1 - x * x))
elementwise("Atan", lambda y, x: 1 / (1 + x * x))
elementwise("Sinh", lambda y, x: (1 + y * y).sqrt())
elementwise("Cosh", lambda y, x: x.graph.emit("Sinh", x))
elementwise("Asinh", lambda y, x: 1 / (1 + x * x).sqrt())
elementwise("Acosh", lambda y, x: 1 / _root(x * x - 1))
elementwise("Atanh", lambda y, x: 1 / (1 - x * x))

# -------------------------------------------------------------------------- activations


def _gelu_slope(y: Value, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        inner = sqrt(2 / pi) * (x + 0.044715 * (x * x * x))
        t = inner.tanh()
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (sqrt(2 / pi) * (1 + 3 * 0.044715 * (x * x)))
    # Φ(x) + x φ(x) in terms of t = x / √2, with the factor of φ inside its exponent: these maps are wide.
    t = x * sqrt(0.5)
    return 0.5 * (t.erf() + t * (log(2 / sqrt(pi)) - t * t).exp() + 1)


def _mish_slope(y: Value, x: Value) -> Value:
    t = x.graph.emit("Softplus", x).tanh()
    return t + x * x.sigmoid() * (1 - t * t)


def _swish_slope(y: Value, x: Value, *, alpha: float = 1.0) -> Value:
    s = (alpha * x).sigmoid()
    return s + alpha * x * s * (1 - s)


def _leaky_slope(y: Value, x: Value, *, alpha: float = 0.01) -> Value:
    on = (y if alpha >= 0 else x) > 0  # y has the sign of x unless the slope is negative
    return on + alpha * (1 - on)


def _elu_slope(y: Value, x: Value, *, alpha: float = 1.0) -> Value:
    on = x > 0
    return on + (1 - on) * (y + alpha)  # α eˣ = y + α


def _selu_slope(
    y: Value, x: Value, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Value:
    on = x > 0
    return gamma * on + (1 - on) * (y + alpha * gamma)


def _celu_slope(y: Value, x: Value, *, alpha: float = 1.0) -> Value:
    on = x > 0
    return on + (1 - on) * (1 + y / alpha)


def _hard_swish_slope(y: Value, x: Value) -> Value:
    inside = (x > -3) * (x < 3)
    return inside * (x / 3 + 0.5) + (x >= 3)


activation("Relu", lambda y, x: y > 0)
activation("Sigmoid", lambda y, x: y * (1 - y))
activation("Tanh", lambda y, x: 1 - y * y)
activation("LeakyRelu", _leaky_slope)
activation("ThresholdedRelu", lambda y, x, *, alpha=1.0: x > alpha)
activation("Elu", _elu_slope)
activation("Selu", _selu_slope)
activation("Celu", _celu_slope)
activation("HardSigmoid", lambda y, x, *, alpha=0.2, beta=0.5: alpha * (y > 0) * (y < 1))
activation("HardSwish", _hard_swish_slope)
activation("Softplus", lambda y, x: x.sigmoid())
activation("Softsign", lambda y, x: (1 - y.abs()) * (1 - y.abs()))
activation("Gelu", _gelu_slope)
activation("Mish", _mish_slope)
activation("Swish", _swish_slope)
activation("Shrink", lambda y, x, *, lambd=0.5, bias=0.0: x.abs() > lambd)


def _prelu_slope(y: Value, x: Value, slope: Value, *, sign: int = 1) -> Value:
    """`sign` is -1 where a pattern holds the negative of the slope; the operator itself has no such attribute."""
    on, below = x > 0, slope * (x <= 0)
    return on + below if sign > 0 else on - below


def _prelu_slope_of_slope(y: Value, x: Value, slope: Value, *, sign: int = 1) -> Value:
    below = x * (x <= 0)
    return below if sign > 0 else -below


elementwise("PRelu", _prelu_slope, _prelu_slope_of_slope, activation=True, formula="φ'(x)² v")


def _within_bounds(node: NodeView, y: Value, bounds: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    """1 strictly within a bound, 0 at and beyond it, for `min` and `max` as far as the node has them.

    Bounds are attributes before opset 11, and inputs from then on.
    """
    for name in ("min", "max"):
        limit = bounds.get(name, node.attr(name))
        if limit is not None:
            yield name, y > limit if name == "min" else y < limit


def _clip_slopes(node: NodeView) -> list[Slope | None]:
    """1 strictly between the bounds, 0 elsewhere; where a bound holds, it is the bound's slope that is 1.

    The upper bound comes last: where the bounds are the wrong way round, it is the one that holds.
    """
    given = [name for name, operand in zip(("min", "max"), node.inputs[1:]) if operand.present]

    def masks(y: Value, bounds: tuple[Value, ...]) -> dict[str, Value]:
        return dict(_within_bounds(node, y, dict(zip(given, bounds))))

    def of_x(y: Value, x: Value, *bounds: Value) -> Value | float:
        within = list(masks(y, bounds).values())
        return reduce(Value.__mul__, within) if within else 1

    def of_min(y: Value, x: Value, *bounds: Value) -> Value:
        within = masks(y, bounds)
        below = 1 - within["min"]
        return below * within["max"] if "max" in within else below

    def of_max(y: Value, x: Value, *bounds: Value) -> Value:
        return 1 - masks(y, bounds)["max"]

    return [of_x, of_min if "min" in given else None, of_max if "max" in given else None]


@rule("Clip", accuracy=FIRST_ORDER, activation=True, slopes=_clip_slopes)
def clip(node: NodeView) -> Value | None:
    """v strictly between the bounds, the variance of the bound at and beyond them."""
    bounds = {"min": node.input(1), "max": node.input(2)}
    given = {name: bound.mean for name, bound in bounds.items() if bound is not None}
    var = node.inputs[0].var
    for name, within in _within_bounds(node, node.output.mean, given):
        bound = bounds[name]
        var = None if var is None else var * within
        if bound is not None and bound.var is not None:
            at_bound = (1 - within) * bound.var
            var = at_bound if var is None else var + at_bound
    return var


deterministic("its slope is 0 almost everywhere", "Floor", "Ceil", "Round", "Sign")
