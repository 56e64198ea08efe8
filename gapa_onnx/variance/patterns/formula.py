"""Reading source tensors as formulas: the vocabulary that patterns are written in.

Every function takes a tensor, looks back at the nodes that made it, and answers what it is, or None.
The number of steps is bounded, so that looking for patterns costs the same at each node. Copies,
casts between float types and dropout (which does nothing at inference) are looked through, and
constants are initializers or Constant nodes alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import constant_of
from gapa_onnx.model.dtypes import is_float

TOLERANCE = 2**-9  #: of constants: half a unit in the last place of bfloat16, the coarsest type in use
STEPS = 6  #: how deep a formula may be nested
MOST_FACTORS = 10
SMALL = 0.01  #: the largest number that is taken for one that only keeps a divisor from 0

# ---------------------------------------------------------------------- nodes and constants


def made_by(tensor: gs.Tensor, *op_types: str) -> gs.Node | None:
    """The node that made a tensor, if it is one of these standard operators."""
    node = _producer(through(tensor))
    return node if node is not None and node.op in op_types else None


def _producer(tensor: gs.Tensor) -> gs.Node | None:
    node = tensor.inputs[0] if tensor.inputs else None
    return node if node is not None and node.domain in (None, "", "ai.onnx") else None


def through(tensor: gs.Tensor) -> gs.Tensor:
    """What was copied, cast or passed by a dropout to give this tensor."""
    for _ in range(STEPS):
        node = _producer(tensor)
        if node is None or not _keeps_values(node) or tensor is not node.outputs[0]:
            break
        tensor = node.inputs[0]
    return tensor


def _keeps_values(node: gs.Node) -> bool:
    if node.op == "Cast":
        return is_float(node.inputs[0].dtype) and is_float(node.outputs[0].dtype)
    if node.op == "Dropout":
        training = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2].name else None
        return training is None or scalar(training) == 0
    return bool(node.op == "Identity")


def same(a: gs.Tensor, b: gs.Tensor) -> bool:
    return through(a) is through(b)


def is_constant(tensor: gs.Tensor) -> bool:
    tensor = through(tensor)
    return isinstance(tensor, gs.Constant) or made_by(tensor, "Constant") is not None


def scalar(tensor: gs.Tensor) -> float | None:
    """The value of a constant with one element."""
    for _ in range(STEPS):  # unlike `through`, from whole numbers too
        node = _producer(tensor)
        if node is None or node.op not in ("Cast", "Identity"):
            break
        tensor = node.inputs[0]
    if isinstance(tensor, gs.Constant) and math.prod(tensor.shape) != 1:
        return None  # without reading large weights
    value = constant_of(tensor)
    if value is None or np.size(value) != 1:
        return None
    try:
        return float(np.reshape(value, ()))
    except (TypeError, ValueError):
        return None


def close(value: float | None, wanted: float) -> bool:
    return value is not None and math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=1e-6)


def operand_and_scalar(node: gs.Node) -> Iterator[tuple[gs.Tensor, float]]:
    """The ways to read a node of two inputs as one of a tensor and a number, either order."""
    if len(node.inputs) == 2:
        for tensor, other in (node.inputs, node.inputs[::-1]):
            value = scalar(other)
            if value is not None:
                yield tensor, value


# ------------------------------------------------------------------ products, polynomials


@dataclass
class Product:
    """coefficient · Π scales · Π over / Π under."""

    coefficient: float = 1.0
    scales: list[gs.Tensor] = field(default_factory=list)  #: constants of several elements
    over: list[gs.Tensor] = field(default_factory=list)
    under: list[gs.Tensor] = field(default_factory=list)


def product(tensor: gs.Tensor, keep: gs.Tensor | None = None) -> Product:
    """The factors of a tensor, however they are grouped; `keep` is not taken apart.

    Nearest factors first: a long product is taken apart only so far.
    """
    found = Product()
    waiting, steps = deque([(tensor, False)]), MOST_FACTORS
    while waiting:
        tensor, inverse = waiting.popleft()
        tensor = through(tensor)
        value = scalar(tensor)
        kept = steps == 0 or keep is not None and same(tensor, keep)
        node = None if kept else made_by(tensor, "Mul", "Div", "Neg", "Reciprocal")
        steps -= node is not None
        if value is not None and (value != 0 or not inverse):
            found.coefficient *= 1 / value if inverse else value
        elif node is None:
            _leaf(tensor, found, inverse)
        elif node.op in ("Neg", "Reciprocal"):
            found.coefficient *= -1 if node.op == "Neg" else 1
            waiting.append((node.inputs[0], inverse != (node.op == "Reciprocal")))
        else:
            waiting.append((node.inputs[0], inverse))
            waiting.append((node.inputs[1], inverse != (node.op == "Div")))
    return found


def _leaf(tensor: gs.Tensor, found: Product, inverse: bool) -> None:
    if is_constant(tensor) and not inverse:
        found.scales.append(tensor)
    else:
        (found.under if inverse else found.over).append(tensor)


def factor_candidates(tensor: gs.Tensor, steps: int = 3) -> Iterator[gs.Tensor]:
    """Every tensor of a tree of products, taken apart or not, but constants."""
    node = made_by(tensor, "Mul", "Div")
    if node is not None and steps:
        for operand in node.inputs:
            if not is_constant(operand):
                yield through(operand)
                yield from factor_candidates(operand, steps - 1)


def polynomial(tensor: gs.Tensor, x: gs.Tensor, steps: int = STEPS) -> dict[int, float] | None:
    """The coefficients by power of x, of degree 3 at most; None where it is no polynomial of x alone."""
    if same(tensor, x):
        return {1: 1.0}
    value = scalar(tensor)
    if value is not None:
        return {0: value}
    node = made_by(tensor, "Add", "Sub", "Mul", "Div", "Neg", "Pow")
    if node is None or steps == 0:
        return None
    a = polynomial(node.inputs[0], x, steps - 1)
    if a is None or node.op == "Neg":
        return a and {power: -c for power, c in a.items()}
    b = polynomial(node.inputs[1], x, steps - 1)
    return None if b is None else _combine(node.op, a, b)


def _combine(op_type: str, a: dict[int, float], b: dict[int, float]) -> dict[int, float] | None:
    total: dict[int, float] = {}
    if op_type in ("Add", "Sub"):
        sign = 1 if op_type == "Add" else -1
        return {power: a.get(power, 0) + sign * b.get(power, 0) for power in a.keys() | b.keys()}
    if op_type == "Mul":
        for p, left in a.items():
            for q, right in b.items():
                total[p + q] = total.get(p + q, 0) + left * right
        return total if max(total) <= 3 else None
    number = b.get(0, 0.0)
    if b.keys() != {0} or number == 0:
        return None
    if op_type == "Div":
        return {power: c / number for power, c in a.items()}
    squared = _combine("Mul", a, a)
    if number == 2 or squared is None:
        return squared
    return _combine("Mul", squared, a) if number == 3 else None


def is_polynomial(found: dict[int, float] | None, wanted: dict[int, float]) -> bool:
    """Whether all coefficients are as wanted; those not named are 0."""
    return found is not None and all(
        close(found.get(p, 0), wanted.get(p, 0)) for p in found.keys() | wanted.keys()
    )


def slope(tensor: gs.Tensor, x: gs.Tensor) -> float | None:
    """α where the tensor is αx."""
    found = polynomial(tensor, x)
    return found[1] if found and 1 in found and is_polynomial(found, {1: found[1]}) else None


@dataclass(frozen=True)
class Affine:
    """a · core + b with numbers a, b."""

    a: float
    b: float
    core: gs.Tensor


def affine(tensor: gs.Tensor) -> Affine:
    """The tensor behind all scaling and shifting by numbers."""
    a, b = 1.0, 0.0
    for _ in range(STEPS):
        node = made_by(tensor, "Add", "Sub", "Mul", "Div", "Neg")
        if node is None:
            break
        if node.op == "Neg":
            a, tensor = -a, node.inputs[0]
            continue
        inner, value = next(operand_and_scalar(node), (None, 0.0))
        first = inner is node.inputs[0]
        if inner is None or node.op == "Div" and (not first or value == 0):
            break
        if node.op == "Mul":
            a *= value
        elif node.op == "Div":
            a /= value
        elif node.op == "Add":
            b += a * value
        elif first:
            b -= a * value
        else:
            a, b = -a, b + a * value
        tensor = inner
    return Affine(a, b, through(tensor))


# ------------------------------------------------------------------- bounds, roots, squares


@dataclass(frozen=True)
class Bounded:
    """core, not below `low` and not above `high`."""

    core: gs.Tensor
    low: float = -math.inf
    high: float = math.inf


def bounded(tensor: gs.Tensor) -> Bounded:
    """The tensor behind all Clip, Relu, Max and Min with numbers."""
    found = Bounded(through(tensor))
    for _ in range(STEPS):
        node = made_by(found.core, "Clip", "Relu", "Max", "Min")
        limits = _limits(node) if node is not None else None
        if limits is None:
            break
        # Outer bounds are applied last: inner ones count only as far as the outer let them through.
        low, high = (min(max(limit, found.low), found.high) for limit in limits[1:])
        found = Bounded(through(limits[0]), low, high)
    return found


def _limits(node: gs.Node) -> tuple[gs.Tensor, float, float] | None:
    if node.op == "Relu":
        return node.inputs[0], 0.0, math.inf
    if node.op == "Clip":
        low, high = clip_bounds(node)
        return None if low is None or high is None else (node.inputs[0], low, high)
    inner, value = next(operand_and_scalar(node), (None, 0.0))
    if inner is None:
        return None
    return (inner, value, math.inf) if node.op == "Max" else (inner, -math.inf, value)


def clip_bounds(node: gs.Node) -> tuple[float | None, float | None]:
    """The bounds of a Clip; None for one that is not constant."""
    bounds: list[float | None] = [node.attrs.get("min", -math.inf), node.attrs.get("max", math.inf)]
    for position, tensor in enumerate(node.inputs[1:3]):
        if tensor.name:
            bounds[position] = scalar(tensor)
    return bounds[0], bounds[1]


def root_of(tensor: gs.Tensor) -> gs.Tensor | None:
    """q where the tensor is √q."""
    node = made_by(tensor, "Sqrt", "Pow")
    if node is None or node.op == "Pow" and not close(scalar(node.inputs[1]), 0.5):
        return None
    return node.inputs[0]


def inverse_root_of(tensor: gs.Tensor) -> gs.Tensor | None:
    """q where the tensor is 1/√q, spelled as one power."""
    node = made_by(tensor, "Pow")
    return node.inputs[0] if node is not None and close(scalar(node.inputs[1]), -0.5) else None


def square_of(tensor: gs.Tensor) -> gs.Tensor | None:
    """d where the tensor is d²."""
    node = made_by(tensor, "Pow", "Mul")
    if node is None:
        return None
    d, other = node.inputs
    if close(scalar(other), 2.0) if node.op == "Pow" else _equal(d, other):
        return through(d)
    return None


def _equal(a: gs.Tensor, b: gs.Tensor) -> bool:
    """The same tensor, or the same difference computed twice."""
    if same(a, b):
        return True
    left, right = made_by(a, "Sub"), made_by(b, "Sub")
    return left is not None and right is not None and all(map(same, left.inputs, right.inputs))


RESHAPING = ("Reshape", "Unsqueeze", "Squeeze")
BROADCASTING = ("Expand", *RESHAPING)  #: as they are used to make a reduced tensor fit again


@dataclass(frozen=True)
class Floored:
    """core, kept away from 0 by a small number: its sum with it, a Max or a Clip."""

    core: gs.Tensor
    floor: float = 0.0
    loose: bool = False  #: reshaped on the way


def floored(tensor: gs.Tensor) -> Floored:
    floor, loose = 0.0, False
    for _ in range(STEPS):
        node = made_by(tensor, "Add", "Max", "Clip", "Relu", *BROADCASTING)
        if node is None:
            break
        if node.op in BROADCASTING:
            loose |= node.op in RESHAPING
            tensor = node.inputs[0]
            continue
        inner, value = next(operand_and_scalar(node), (None, 0.0))
        if node.op in ("Clip", "Relu"):
            inner, value, high = _limits(node) or (None, 0.0, math.inf)
            inner = None if high < math.inf else inner
        if inner is None or value > SMALL or -math.inf < value < 0:
            break
        tensor, floor = inner, max(floor, value)
    return Floored(through(tensor), floor, loose)
