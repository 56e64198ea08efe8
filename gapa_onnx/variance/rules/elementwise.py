"""Operators that act on each element by itself: only the derivative is stated.

Derivatives use the output y where they can, so that the variance path taps as few intermediate
tensors as possible and the runtime keeps its fusions on the mean path. At a kink the derivative is
the one from the flat side (Relu at 0: 0), which is what a unit that is switched off passes on.
"""

from __future__ import annotations

from math import log, pi, sqrt

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.registry import Accuracy, deterministic, elementwise, first_order, rule
from gapa_onnx.variance.rules.view import NodeView

EXACT, FIRST_ORDER = Accuracy.EXACT, Accuracy.FIRST_ORDER


def activation(op_type: str, derivative) -> None:
    elementwise(op_type, derivative, activation=True, formula="φ'(x)² v")


# --------------------------------------------------------------------------- arithmetic

elementwise("Add", lambda y, a, b: 1, lambda y, a, b: 1, accuracy=EXACT)
elementwise("Sub", lambda y, a, b: 1, lambda y, a, b: -1, accuracy=EXACT)
elementwise("Div", lambda y, a, b: 1 / b, lambda y, a, b: -y / b)
elementwise("Neg", lambda y, x: -1, accuracy=EXACT)
elementwise("Abs", lambda y, x: 1)
elementwise("Reciprocal", lambda y, x: -(y * y))
elementwise("Exp", lambda y, x: y)
elementwise("Log", lambda y, x: 1 / x)
elementwise("Sqrt", lambda y, x: 0.5 / y)
# y = a - q b with a whole q, whichever way the quotient is rounded.
elementwise("Mod", lambda y, a, b: 1, lambda y, a, b: (y - a) / b)
elementwise("Erf", lambda y, x: (2 / sqrt(pi)) * (-(x * x)).exp())


@rule("Mul", accuracy=EXACT)
def product(node: NodeView) -> Value:
    """b² v_a + a² v_b + v_a v_b; a tensor times itself is 4 x² v, first order."""
    total = first_order(node, (lambda y, a, b: b, lambda y, a, b: a))
    a, b = node.inputs
    independent = not a.certain and not b.certain and a.tensor.name != b.tensor.name
    return total + a.var * b.var if independent else total


@rule("Pow", accuracy=FIRST_ORDER)
def power(node: NodeView) -> Value:
    """(b a^(b-1))² v_a; the exponent must be certain."""
    if not node.inputs[1].certain:
        raise node.refuse("the exponent is uncertain")

    def slope(y: Value, base: Value, exponent: Value) -> Value:
        exponent = node.graph.cast(exponent, base.dtype)  # it may be whole numbers
        return exponent * node.graph.emit("Pow", base, exponent - 1)

    return first_order(node, (slope,))


@rule("Sum", accuracy=EXACT)
def variadic_sum(node: NodeView) -> Value:
    """Σ_i v_i over the inputs."""
    return first_order(node, [lambda y, *x: 1] * len(node.inputs))


@rule("Mean", accuracy=EXACT)
def variadic_mean(node: NodeView) -> Value:
    """Σ_i v_i / n² over the n inputs."""
    share = 1 / len(node.inputs)
    return first_order(node, [lambda y, *x: share] * len(node.inputs))


@rule("Max", "Min", accuracy=FIRST_ORDER)
def extremum(node: NodeView) -> Value:
    """The variance of the chosen input; inputs that tie share it equally."""
    y = node.output.mean
    chosen = [(x.mean >= y) if node.op_type == "Max" else (x.mean <= y) for x in node.inputs]
    ties = sum(chosen[1:], chosen[0])
    terms = [mask * x.var for mask, x in zip(chosen, node.inputs) if not x.certain]
    return sum(terms[1:], terms[0]) / ties


# -------------------------------------------------------------- trigonometric, hyperbolic

elementwise("Sin", lambda y, x: x.cos())
elementwise("Cos", lambda y, x: -x.sin())
elementwise("Tan", lambda y, x: 1 + y * y)
elementwise("Asin", lambda y, x: 1 / (1 - x * x).sqrt())
elementwise("Acos", lambda y, x: 1 / (1 - x * x).sqrt())
elementwise("Atan", lambda y, x: 1 / (1 + x * x))
elementwise("Sinh", lambda y, x: (1 + y * y).sqrt())
elementwise("Cosh", lambda y, x: x.graph.emit("Sinh", x))
elementwise("Asinh", lambda y, x: 1 / (1 + x * x).sqrt())
elementwise("Acosh", lambda y, x: 1 / (x * x - 1).sqrt())
elementwise("Atanh", lambda y, x: 1 / (1 - x * x))

# -------------------------------------------------------------------------- activations


def _gelu_slope(y: Value, x: Value, *, approximate="none") -> Value:
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


def _swish_slope(y: Value, x: Value, *, alpha=1.0) -> Value:
    s = (alpha * x).sigmoid()
    return s + alpha * x * s * (1 - s)


def _leaky_slope(y: Value, x: Value, *, alpha=0.01) -> Value:
    on = (y if alpha >= 0 else x) > 0  # y has the sign of x unless the slope is negative
    return on + alpha * (1 - on)


def _elu_slope(y: Value, x: Value, *, alpha=1.0) -> Value:
    on = x > 0
    return on + (1 - on) * (y + alpha)  # α eˣ = y + α


def _selu_slope(
    y: Value, x: Value, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875
) -> Value:
    on = x > 0
    return gamma * on + (1 - on) * (y + alpha * gamma)


def _celu_slope(y: Value, x: Value, *, alpha=1.0) -> Value:
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


elementwise(
    "PRelu",
    lambda y, x, slope: (x > 0) + slope * (x <= 0),
    lambda y, x, slope: x * (x <= 0),
    activation=True,
    formula="φ'(x)² v",
)


@rule("Clip", accuracy=FIRST_ORDER, activation=True)
def clip(node: NodeView) -> Value:
    """v strictly between the bounds, the variance of the bound at and beyond them."""
    y = node.output.mean
    var = node.inputs[0].var
    for position, name, inside in ((1, "min", lambda b: y > b), (2, "max", lambda b: y < b)):
        bound = node.input(position)
        limit = node.attr(name) if bound is None else bound.mean
        if limit is None:
            continue
        within = inside(limit)
        var = None if var is None else var * within
        if bound is not None and not bound.certain:
            at_bound = (1 - within) * bound.var
            var = at_bound if var is None else var + at_bound
    return var


deterministic("its slope is 0 almost everywhere", "Floor", "Ceil", "Round", "Sign")
