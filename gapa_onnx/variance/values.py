"""Values: tensors of the source or the variance graph, with operators that emit nodes.

A `Value` is one tensor: `a * b + 1` emits a Mul and an Add. A `Deferred` value is a variance that is known in a
form that takes less work than the tensor itself, which is written only if something reads it:

    Scaled      s · p               one number per query times a vector that follows from constants
    Upsampled   s spread by a transposed convolution of one channel
    Partial     variances of some parts of an axis; the other parts are certain
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gapa_onnx.variance.graph import VarianceGraph

Number = int | float

STEEPEST = 2.0**127
"""As the slope of a HardSigmoid this makes 1 of every normal float32 above 0."""


class Value:
    """One tensor, with operators that emit nodes."""

    __slots__ = ("graph", "name", "dtype", "is_mask")

    def __init__(self, graph: VarianceGraph, name: str, dtype: np.dtype):
        self.graph = graph
        self.name = name
        self.dtype = np.dtype(dtype)
        self.is_mask = False  #: of zeros and ones, which are their own squares

    def __repr__(self) -> str:
        return f"Value({self.name!r}, {self.dtype})"

    def __add__(self, other: Value | Number) -> Value:
        return self if _is(other, 0) else self.graph.emit("Add", self, self._lift(other))

    def __radd__(self, other: Number) -> Value:
        return self + other

    def __sub__(self, other: Value | Number) -> Value:
        return self if _is(other, 0) else self.graph.emit("Sub", self, self._lift(other))

    def __rsub__(self, other: Number) -> Value:
        return self.graph.emit("Sub", self._lift(other), self)

    def __mul__(self, other: Value | Number) -> Value:
        if _is(other, 1) or (other is self and self.is_mask):
            return self
        return self.graph.emit("Mul", self, self._lift(other))

    def __rmul__(self, other: Number) -> Value:
        return self * other

    def __truediv__(self, other: Value | Number) -> Value:
        return self if _is(other, 1) else self.graph.emit("Div", self, self._lift(other))

    def __rtruediv__(self, other: Number) -> Value:
        return self.graph.emit("Div", self._lift(other), self)

    def __neg__(self) -> Value:
        return self.graph.emit("Neg", self)

    def __gt__(self, other: Value | Number) -> Value:
        """1 where true and 0 elsewhere, in this value's own type, so that masks multiply.

        min(max(α x, 0), 1) with a huge α is x > 0 in one node, which onnxruntime runs in the blocked layout
        of its convolutions; a comparison would take the feature map out of it and back.
        """
        if _is(other, 0) and self.dtype == np.float32:
            return self.graph.as_mask(self.graph.emit("HardSigmoid", self, alpha=STEEPEST, beta=0.0))
        return self.graph.mask("Greater", self, self._lift(other))

    def __lt__(self, other: Value | Number) -> Value:
        return self.graph.mask("Less", self, self._lift(other))

    def __ge__(self, other: Value | Number) -> Value:
        return 1 - (self < other)

    def __le__(self, other: Value | Number) -> Value:
        return 1 - (self > other)

    @property
    def squared(self) -> Value:
        return self * self

    def exp(self) -> Value:
        return self.graph.emit("Exp", self)

    def tanh(self) -> Value:
        return self.graph.emit("Tanh", self)

    def sigmoid(self) -> Value:
        return self.graph.emit("Sigmoid", self)

    def erf(self) -> Value:
        return self.graph.emit("Erf", self)

    def sqrt(self) -> Value:
        return self.graph.emit("Sqrt", self)

    def cos(self) -> Value:
        return self.graph.emit("Cos", self)

    def sin(self) -> Value:
        return self.graph.emit("Sin", self)

    def abs(self) -> Value:
        return self.graph.emit("Abs", self)

    def _lift(self, other: Value | Number) -> Value:
        return other if isinstance(other, Value) else self.graph.constant(np.asarray(other, self.dtype))


def _is(other: Value | Number, number: Number) -> bool:
    return not isinstance(other, Value) and other == number


# ------------------------------------------------------------------------ deferred


class Deferred(Value):
    """A variance that becomes one tensor only when something reads it as such, by its name.

    `label` is the name of that tensor, the next one of the scope for None.
    """

    __slots__ = ("label", "_tensor")

    def __init__(self, graph: VarianceGraph, dtype: np.dtype, label: str | None = None):
        self.graph, self.dtype, self.is_mask = graph, np.dtype(dtype), False
        self.label = label
        self._tensor: Value | None = None

    def _write(self) -> Value:
        """Emit the nodes of the tensor."""
        raise NotImplementedError

    @property
    def tensor(self) -> Value:
        if self._tensor is None and self.label is None:
            self._tensor = self._write()
        elif self._tensor is None:
            with self.graph.scope(self.label):
                self._tensor = self.graph.rename(self._write(), self.label)
        return self._tensor

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_written(self) -> bool:
        return self._tensor is not None


class Scaled(Deferred):
    """scale · profile.

    Behind a site the variance is one number per query times a constant vector. A layer maps it to the same
    number times another vector, and vectors that follow from constants alone are computed once, at load:
    what is left at run time is one multiplication.

    Parameters
    ----------
    scale: 1 long on the axis of the features.
    profile: the features; all other axes are missing or 1 long.
    axis: of the features: -1 (the last) or 1 (of feature maps).
    """

    __slots__ = ("scale", "profile", "axis")

    def __init__(self, scale: Value, profile: Value, axis: int, label: str | None = None):
        super().__init__(scale.graph, scale.dtype, label)
        self.scale, self.profile, self.axis = scale, profile, axis

    def __repr__(self) -> str:
        return f"Scaled({self.scale!r}, {self.profile!r})"

    def _write(self) -> Value:
        return self.graph.emit("Mul", self.scale, self.profile)

    def with_profile(self, profile: Value) -> Scaled:
        """The same scale of another vector."""
        return Scaled(self.scale, profile, self.axis)

    def __mul__(self, other: Value | Number) -> Value:
        if not isinstance(other, Value) or self.graph.is_constant(other):
            return self if _is(other, 1) else self.with_profile(self.profile * other)
        return super().__mul__(other)

    def __truediv__(self, other: Value | Number) -> Value:
        if not isinstance(other, Value) or self.graph.is_constant(other):
            return self if _is(other, 1) else self.with_profile(self.profile / other)
        return super().__truediv__(other)


class Upsampled(Deferred):
    """ConvTranspose(scale, kernel), which a convolution behind it may take into its own.

    Parameters
    ----------
    scale: (n, 1, …), one number per position.
    kernel: (1, channels, …), what one position spreads to; it follows from constants.
    attrs: of the ConvTranspose.
    """

    __slots__ = ("scale", "kernel", "attrs")

    def __init__(self, scale: Value, kernel: Value, attrs: dict[str, Any]):
        super().__init__(scale.graph, scale.dtype)
        self.scale, self.kernel, self.attrs = scale, kernel, attrs

    def _write(self) -> Value:
        return self.graph.emit("ConvTranspose", self.scale, self.kernel, **self.attrs)


@dataclass(frozen=True)
class Part:
    """Neighbouring elements of an axis, with their variance; None where they are certain."""

    size: int
    var: Value | None
    mean: Value  #: whose shape zeros would take


class Partial(Deferred):
    """A variance that only some parts of an axis have; zeros stand for the others once it is one tensor."""

    __slots__ = ("parts", "axis")

    def __init__(self, parts: Sequence[Part], axis: int):
        super().__init__(parts[0].mean.graph, next(part.var for part in parts if part.var is not None).dtype)
        self.parts, self.axis = tuple(parts), axis

    def _write(self) -> Value:
        zeros = self.graph.zeros
        variances = [zeros(part.mean) if part.var is None else part.var for part in self.parts]
        return self.graph.emit("Concat", *variances, axis=self.axis)

    @property
    def uncertain(self) -> Iterator[tuple[int, int, Value]]:
        """Start, end and variance of each part that has one."""
        start = 0
        for part in self.parts:
            if part.var is not None:
                yield start, start + part.size, part.var
            start += part.size

    def each(self, change: Callable[[int, int, Value], Value]) -> Partial:
        """The same parts with `change(start, end, variance)` for what is uncertain; no shape changes."""
        changed = iter([change(*part) for part in self.uncertain])
        parts = [part if part.var is None else replace(part, var=next(changed)) for part in self.parts]
        return Partial(parts, self.axis)

    def __mul__(self, other: Value | Number) -> Value:
        if isinstance(other, Value):
            return super().__mul__(other)
        return self if _is(other, 1) else self.each(lambda start, end, var: var * other)
