"""Activations that are spelled out: x · g(x) in all orders and groupings, and bent lines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from gapa_onnx.variance.patterns.composite import NearMiss, Output, Spelled, pattern
from gapa_onnx.variance.patterns.formula import (
    affine,
    bounded,
    close,
    factor_candidates,
    is_polynomial,
    made_by,
    polynomial,
    product,
    same,
    slope,
)

# ------------------------------------------------------------------------------- x · g(x)


@dataclass(frozen=True, eq=False)
class Gated:
    """c x g, or c x / g where `inverse`."""

    c: float
    x: gs.Tensor
    gate: gs.Tensor
    inverse: bool


@pattern("Mul", "Div")
def gated(y: Output) -> Spelled | NearMiss | None:
    """A tensor times a function of itself."""
    missed: NearMiss | None = None
    if any(_may_be_gate(factor) for factor in (*y.factors.over, *y.factors.under)):
        for form in _gated_forms(y.tensor):
            for reading in (swish, gelu, mish, hard_swish):
                found = reading(form)
                if isinstance(found, Spelled):
                    return found
                missed = missed or found
    return missed


def _may_be_gate(tensor: gs.Tensor) -> bool:
    """A quick look, so that long products cost little."""
    if made_by(tensor, "Add", "Sub"):
        tensor = affine(tensor).core
    return made_by(tensor, *GATES) is not None


GATES = ("Sigmoid", "HardSigmoid", "Tanh", "Erf", "Exp", "Clip", "Relu", "Min", "Max")


def _gated_forms(y: gs.Tensor) -> Iterator[Gated]:
    for x in factor_candidates(y):
        found = product(y, keep=x)
        gates = [factor for factor in found.over if factor is not x]
        if len(found.over) - len(gates) == 1 and len(gates) + len(found.under) == 1 and not found.scales:
            yield Gated(found.coefficient, x, (gates + found.under)[0], bool(found.under))


def swish(y: Gated) -> Spelled | None:
    """x σ(αx), also with σ(z) = 1 / (1 + e⁻ᶻ)."""
    node = _one_plus_exp(y.gate) if y.inverse else made_by(y.gate, "Sigmoid")
    alpha = slope(node.inputs[0], y.x) if node is not None and close(y.c, 1) else None
    return None if alpha is None else Spelled("Swish", [y.x], {"alpha": -alpha if y.inverse else alpha})


def _one_plus_exp(tensor: gs.Tensor) -> gs.Node | None:
    """The exponential of 1 + eᶻ."""
    grown = affine(tensor)
    return made_by(grown.core, "Exp") if close(grown.a, 1) and close(grown.b, 1) else None


def gelu(y: Gated) -> Spelled | NearMiss | None:
    """x (1 + erf(x / √2)) / 2, or x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
    shifted = affine(y.gate)  # b + a erf(z)
    a, b = y.c * shifted.a, y.c * shifted.b
    node = made_by(shifted.core, "Erf", "Tanh")
    found = polynomial(node.inputs[0], y.x) if node is not None and not y.inverse else None
    if node is None or found is None or (node.op == "Tanh" and 3 not in found):
        return None  # a gate of another tensor, or x tanh(x)
    if not close(b, 0.5) or not close(abs(a), 0.5):
        return NearMiss("Gelu", f"x ({b:.6g} + {a:.6g} {node.op.lower()}(…)) in place of halves")
    sign = math.copysign(1, a)  # both functions are odd: 1 - erf(-z) = 1 + erf(z)
    root = math.sqrt(1 / 2 if node.op == "Erf" else 2 / math.pi)
    wanted = {1: sign * root} if node.op == "Erf" else {1: sign * root, 3: sign * 0.044715 * root}
    if not is_polynomial(found, wanted):
        terms = " + ".join(f"{value:.6g} x^{power}" for power, value in sorted(found.items()))
        return NearMiss("Gelu", f"{node.op.lower()} is taken of {terms}")
    return Spelled("Gelu", [y.x], {} if node.op == "Erf" else {"approximate": "tanh"})


def mish(y: Gated) -> Spelled | None:
    """x tanh(ln(1 + eˣ))"""
    node = made_by(y.gate, "Tanh")
    fits = node is not None and not y.inverse and close(y.c, 1) and _is_softplus(node.inputs[0], y.x)
    return Spelled("Mish", [y.x]) if fits else None


def _is_softplus(tensor: gs.Tensor, x: gs.Tensor) -> bool:
    node = made_by(tensor, "Softplus", "Log")
    if node is not None and node.op == "Log":
        node = _one_plus_exp(node.inputs[0])
    return node is not None and same(node.inputs[0], x)


def hard_swish(y: Gated) -> Spelled | None:
    """x clip(x / 6 + 1/2, 0, 1)"""
    line = _bent_line(y.gate, y.c) if not y.inverse else None
    found = polynomial(line.z, y.x) if line is not None else None
    if line is None or found is None:
        return None
    scaled = {power: line.alpha * value for power, value in found.items()}
    scaled[0] = scaled.get(0, 0) + line.beta
    return Spelled("HardSwish", [y.x]) if is_polynomial(scaled, {1: 1 / 6, 0: 1 / 2}) else None


@dataclass(frozen=True, eq=False)
class BentLine:
    """clip(αz + β, 0, 1)"""

    alpha: float
    beta: float
    z: gs.Tensor


def _bent_line(tensor: gs.Tensor, c: float) -> BentLine | None:
    """What c times the tensor is."""
    node = made_by(tensor, "HardSigmoid")
    if node is not None:
        alpha, beta = node.attrs.get("alpha", 0.2), node.attrs.get("beta", 0.5)
        return BentLine(alpha, beta, node.inputs[0]) if close(c, 1) else None
    line = bounded(tensor)
    fits = c > 0 and close(c * line.low, 0) and close(c * line.high, 1)
    return BentLine(c, 0.0, line.core) if fits else None


@pattern("Mul", "Div", "Clip", "Min", "Max")
def hard_sigmoid(y: Output) -> Spelled | None:
    """clip(αx + β, 0, 1)"""
    found = y.factors
    if len(found.over) != 1 or found.under or found.scales or made_by(found.over[0], "HardSigmoid"):
        return None
    line = _bent_line(found.over[0], found.coefficient)
    if line is None:
        return None
    inner = affine(line.z)
    attrs = {"alpha": line.alpha * inner.a, "beta": line.alpha * inner.b + line.beta}
    plain = close(attrs["alpha"], 1) and close(attrs["beta"], 0)  # Clip itself
    return None if plain else Spelled("HardSigmoid", [inner.core], attrs)


@pattern("Div", "Reciprocal")
def sigmoid(y: Output) -> Spelled | None:
    """1 / (1 + e⁻ˣ): step by step its variance would be ∞ · 0 where e⁻ˣ overflows."""
    x = sigmoid_of(y.tensor)
    return None if x is None else Spelled("Sigmoid", [x])


def sigmoid_of(tensor: gs.Tensor) -> gs.Tensor | None:
    """x where the tensor is σ(x), as one node or spelled out."""
    node = made_by(tensor, "Sigmoid", "Div", "Reciprocal", "Mul")
    if node is None or node.op == "Sigmoid":
        return None if node is None else node.inputs[0]
    found = product(tensor)
    if found.over or found.scales or len(found.under) != 1 or not close(found.coefficient, 1):
        return None
    exponential = _one_plus_exp(found.under[0])
    inner = affine(exponential.inputs[0]) if exponential is not None else None
    return inner.core if inner is not None and close(inner.a, -1) and close(inner.b, 0) else None


# ----------------------------------------------------------------------------- bent lines


@pattern("Max")
def leaky_relu(y: Output) -> Spelled | NearMiss | None:
    """max(x, αx) with α < 1"""
    missed: NearMiss | None = None
    if len(y.node.inputs) == 2:
        for x, other in (y.node.inputs, y.node.inputs[::-1]):
            alpha = slope(other, x)
            if alpha is not None and alpha < 1:
                return Spelled("LeakyRelu", [x], {"alpha": alpha})
            if alpha is not None:
                missed = NearMiss("LeakyRelu", f"its slope {alpha:.6g} is not below 1")
    return missed


@pattern("Add", "Sub")
def parametric_relu(y: Output) -> Spelled | NearMiss | None:
    """max(x, 0) + α min(x, 0), the second term as -α max(-x, 0), α (x - |x|) / 2 or α (x - max(x, 0)).

    Where α is a tensor, the source may hold its negative, which the rule is told as `sign`.
    """
    a, b = y.node.inputs
    sign = 1 if y.node.op == "Add" else -1
    for positive, negative in ((a, b), (b, a))[: 1 + (sign > 0)]:
        kept = bounded(positive)
        if kept.low != 0 or kept.high != math.inf:
            continue
        found = product(negative)
        share = _negative_part(found.over[0], kept.core) if len(found.over) == 1 else None
        if share is None or found.under or len(found.scales) > 1:
            continue
        alpha = sign * found.coefficient * share
        if not found.scales:
            return Spelled("LeakyRelu", [kept.core], {"alpha": alpha})
        if close(abs(alpha), 1):
            return Spelled("PRelu", [kept.core, found.scales[0]], {"sign": -1} if alpha < 0 else {})
        return NearMiss("PRelu", f"its slope is multiplied by {alpha:.6g}")
    return None


def _negative_part(tensor: gs.Tensor, x: gs.Tensor) -> float | None:
    """k where the tensor is k min(x, 0)."""
    line = bounded(tensor)
    if (line.low, line.high) == (-math.inf, 0) and same(line.core, x):
        return 1
    if (line.low, line.high) == (0, math.inf) and close(slope(line.core, x), -1):
        return -1
    node = made_by(tensor, "Sub")
    if node is None or not same(node.inputs[0], x):
        return None
    magnitude, kept = made_by(node.inputs[1], "Abs"), bounded(node.inputs[1])
    if magnitude is not None:
        return 2 if same(magnitude.inputs[0], x) else None
    return 1 if (kept.low, kept.high) == (0, math.inf) and same(kept.core, x) else None
