"""Normalisations that are spelled out: x is divided by a norm or a deviation of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from gapa_onnx.variance.patterns.composite import PATTERN_DOMAIN, NearMiss, Output, Spelled, pattern
from gapa_onnx.variance.patterns.formula import (
    Product,
    close,
    floored,
    inverse_root_of,
    is_constant,
    made_by,
    product,
    root_of,
    same,
)
from gapa_onnx.variance.patterns.reductions import (
    MeanSquare,
    Reduced,
    deviation_of,
    mean_of,
    reduced,
    second_moment_of,
    sum_square_of,
)


@dataclass(frozen=True, eq=False)
class Root:
    """A factor 1/√(q + ε), or 1/(√q + ε) with small ε, of a product."""

    square: gs.Tensor  #: q + ε
    factor: gs.Tensor
    floor: float = 0.0


def _root(found: Product) -> Root | None:
    for factor in found.under:
        bare = floored(factor)
        square = root_of(bare.core)
        if square is not None:
            return Root(square, factor, bare.floor)
    for factor in found.over:
        square = inverse_root_of(factor)
        if square is not None:
            return Root(square, factor)
    return None


def _others(found: Product, root: Root) -> list[gs.Tensor] | None:
    """The numerator besides the root; None where more stands below."""
    if any(factor is not root.factor for factor in found.under):
        return None
    return [factor for factor in found.over if factor is not root.factor]


# ------------------------------------------------- layer, instance and RMS normalisation


@dataclass(frozen=True, eq=False)
class Normalised:
    """scale · (x - mean) / √(variance + ε), or scale · x / √(mean square + ε)."""

    moment: MeanSquare
    scale: gs.Tensor | None
    epsilon: float

    def spelled(self, bias: gs.Tensor | None = None) -> Spelled | None:
        x, axes = self.moment.of.x, self.moment.of.axes
        inputs = [x, self.scale, bias]
        while inputs[-1] is None:
            inputs.pop()
        if axes == tuple(range(-len(axes), 0)):
            attrs = {"axis": -len(axes), "epsilon": self.epsilon}
            if self.moment.centred:
                return Spelled("LayerNormalization", inputs, attrs)
            return Spelled("RMSNormalization", inputs, attrs) if bias is None else None
        over = {"axes": list(axes), "epsilon": self.epsilon, "centred": int(self.moment.centred)}
        return Spelled("Normalization", inputs, over, PATTERN_DOMAIN)


def _normalised(y: gs.Tensor, found: Product) -> Normalised | NearMiss | None:
    root = _root(found)
    moment = second_moment_of(root.square) if root is not None else None
    if root is None or moment is None:
        return None
    x = moment.of.x
    if not moment.centred:  # x may be a product itself
        found = product(y, keep=x)
        root = _root(found)
        if root is None:
            return None
    numerator = _others(found, root)
    if numerator is None or len(numerator) != 1 or not _is_numerator(numerator[0], moment):
        return _other_mean(numerator, moment)
    op = "LayerNormalization" if moment.centred else "RMSNormalization"
    if len(found.scales) > 1 or not close(found.coefficient, 1):
        return NearMiss(op, f"it is multiplied by {found.coefficient:.6g} and {len(found.scales)} constants")
    if not moment.of.fits(root.factor):
        return NearMiss(op, f"its spread over the axes {moment.of.axes} does not stand beside its elements")
    return Normalised(moment, found.scales[0] if found.scales else None, max(moment.floor, root.floor**2))


def _other_mean(numerator: list[gs.Tensor] | None, moment: MeanSquare) -> NearMiss | None:
    """Why x less its mean is not divided by its own deviation."""
    mean = deviation_of(numerator[0]) if numerator is not None and len(numerator) == 1 else None
    if mean is None or not same(mean.x, moment.of.x):
        return None
    if mean.axes != moment.of.axes:
        reason = f"its mean is over the axes {mean.axes}, its spread over {moment.of.axes}"
    else:
        reason = "its spread is that about 0, not about its mean"
    return NearMiss("LayerNormalization", reason)


def _is_numerator(tensor: gs.Tensor, moment: MeanSquare) -> bool:
    if not moment.centred:
        return same(tensor, moment.of.x)
    mean = deviation_of(tensor)
    return mean is not None and same(mean.x, moment.of.x) and mean.axes == moment.of.axes


@pattern("Mul", "Div")
def normalisation(y: Output) -> Spelled | NearMiss | None:
    found = _normalised(y.tensor, y.factors)
    return found.spelled() if isinstance(found, Normalised) else found


@pattern("Add")
def shifted_normalisation(y: Output) -> Spelled | NearMiss | None:
    """A normalisation and a constant."""
    a, b = y.node.inputs
    for inner, bias in ((a, b), (b, a)):
        if is_constant(bias):
            found = _normalised(inner, product(inner))
            return found.spelled(bias) if isinstance(found, Normalised) else found
    return None


@pattern("Add", "Sub")
def scaled_and_shifted(y: Output) -> Spelled | None:
    """x s + (β - mean s), or x s - mean s, with s = scale / √(variance + ε)."""
    a, b = y.node.inputs
    adds = y.node.op == "Add"
    for scaled, shift in ((a, b), (b, a))[: 1 + adds]:
        bias = None
        if adds:
            difference = made_by(shift, "Sub")
            if difference is None or not is_constant(difference.inputs[0]):
                continue
            bias, shift = difference.inputs
        found = _scaled_alike(scaled, shift)
        if found is not None:
            return found.spelled(bias)
    return None


def _scaled_alike(scaled: gs.Tensor, shift: gs.Tensor) -> Normalised | None:
    """The normalisation where `scaled` is x s and `shift` is mean s."""
    first, second = made_by(scaled, "Mul"), made_by(shift, "Mul")
    if first is None or second is None:
        return None
    for x, s in (first.inputs, first.inputs[::-1]):
        for mean, other in (second.inputs, second.inputs[::-1]):
            middle = mean_of(mean) if same(s, other) else None
            if middle is None or not same(middle.x, x) or not middle.fits(mean):
                continue
            found = _over_deviation(s)
            if found is None:
                continue
            of = found.moment.of
            if same(of.x, x) and of.axes == middle.axes:
                return found
    return None


def _over_deviation(s: gs.Tensor) -> Normalised | None:
    """The normalisation that s = scale / √(variance + ε) is the factor of."""
    found = product(s)
    root = _root(found)
    moment = second_moment_of(root.square) if root is not None else None
    if root is None or moment is None or not moment.centred or _others(found, root) != []:
        return None
    if not moment.of.fits(root.factor) or len(found.scales) > 1 or not close(found.coefficient, 1):
        return None
    return Normalised(moment, found.scales[0] if found.scales else None, moment.floor)


# ------------------------------------------------------------- division by a norm, centring


@pattern("Mul", "Div")
def lp_normalisation(y: Output) -> Spelled | NearMiss | None:
    """x / ‖x‖ over one axis. The small number that keeps the norm from 0 is `epsilon`."""
    norm = _norm(y.factors)
    if norm is None:
        return None
    found = product(y.tensor, keep=norm.of.x)
    over = [factor for factor in found.over if factor is not norm.factor]
    under = [factor for factor in found.under if factor is not norm.factor]
    alone = not under and len(over) == 1 and not found.scales and close(found.coefficient, 1)
    if not alone or not same(over[0], norm.of.x) or not norm.of.fits(norm.factor):
        return None
    if len(norm.of.axes) != 1:
        return NearMiss("LpNormalization", f"its norm is over the axes {norm.of.axes}; the operator has one")
    attrs = {"axis": norm.of.axes[0], "p": norm.p, "epsilon": norm.floor}
    return Spelled("LpNormalization", [norm.of.x], attrs)


@dataclass(frozen=True, eq=False)
class Norm:
    """‖x‖_p, as the divisor of a product."""

    of: Reduced
    factor: gs.Tensor
    p: int
    floor: float


def _norm(found: Product) -> Norm | None:
    root = _root(found)
    if root is not None:
        bare = floored(root.square)
        total = sum_square_of(bare.core)
        if total is not None:
            loose = total.loose or bare.loose
            return Norm(replace(total, loose=loose), root.factor, 2, max(bare.floor, root.floor**2))
        return None
    for factor in found.under:
        bare = floored(factor)
        total = reduced(bare.core)
        if total is not None and total.op in ("ReduceL1", "ReduceL2") and close(total.coefficient, 1):
            power = int(total.op[-1])
            return Norm(replace(total, loose=total.loose or bare.loose), factor, power, bare.floor**power)
    return None


@pattern("Sub")
def centring(y: Output) -> Spelled | None:
    """x less its mean."""
    mean = deviation_of(y.tensor)
    return None if mean is None else Spelled("Centering", [mean.x], {"axes": list(mean.axes)}, PATTERN_DOMAIN)
