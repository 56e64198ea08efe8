"""Values: tensors of the source or the variance graph, with operators that emit nodes.

A `Value` is one tensor: `a * b + 1` emits a Mul and an Add. A `Deferred` value is a variance that is known in a
form that takes less work than the tensor itself, which is written only if something reads it:

    Scaled      s · p               one number per query times a vector that follows from constants
    Upsampled   s spread by a transposed convolution of one channel
    Partial     variances of some parts of an axis; the other parts are certain
    Wide        v · w² of a layer with so many outputs that only some of them may be wanted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import onnx_graphsurgeon as gs

if TYPE_CHECKING:
    from gapa_onnx.variance.builder import GraphBuilder

Number = int | float
DType = np.dtype[Any] | type[np.generic] | type[float]

STEEPEST = 2.0**127
"""As the slope of a HardSigmoid this makes 1 of every normal float32 above 0."""


class Value:
    """One tensor, with operators that emit nodes. It does not change; only its graph may give it another name."""

    __slots__ = ("graph", "dtype", "is_mask", "is_constant", "_variable")

    graph: GraphBuilder
    dtype: np.dtype[Any]
    is_mask: bool  #: of zeros and ones, which are their own squares
    is_constant: bool  #: the same in every run
    _variable: gs.Tensor

    def __init__(
        self,
        graph: GraphBuilder,
        variable: gs.Tensor,
        dtype: DType,
        is_mask: bool = False,
        is_constant: bool = False,
    ):
        _fix(self, graph=graph, dtype=np.dtype(dtype), is_mask=is_mask, is_constant=is_constant)
        _fix(self, _variable=variable)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} of {self!r} cannot be set: values do not change")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} of {self!r} cannot be deleted: values do not change")

    @property
    def name(self) -> str:
        """What the graph calls it now."""
        name: str = self._variable.name
        return name

    def as_mask(self) -> Value:
        """The same tensor, known to consist of zeros and ones."""
        return Value(self.graph, self._variable, self.dtype, is_mask=True, is_constant=self.is_constant)

    def __repr__(self) -> str:
        return f"Value({self.name!r}, {self.dtype})"

    def __add__(self, other: Value | Number) -> Value:
        return self if _is(other, 0) else self.graph.emit("Add", self, self.lift(other))

    def __radd__(self, other: Number) -> Value:
        return self + other

    def __sub__(self, other: Value | Number) -> Value:
        return self if _is(other, 0) else self.graph.emit("Sub", self, self.lift(other))

    def __rsub__(self, other: Number) -> Value:
        return self.graph.emit("Sub", self.lift(other), self)

    def __mul__(self, other: Value | Number) -> Value:
        if _is(other, 1) or (other is self and self.is_mask):
            return self
        return self.graph.emit("Mul", self, self.lift(other))

    def __rmul__(self, other: Number) -> Value:
        return self * other

    def __truediv__(self, other: Value | Number) -> Value:
        return self if _is(other, 1) else self.graph.emit("Div", self, self.lift(other))

    def __rtruediv__(self, other: Number) -> Value:
        return self.graph.emit("Div", self.lift(other), self)

    def __matmul__(self, other: Value) -> Value:
        return self.graph.emit("MatMul", self, other)

    def __neg__(self) -> Value:
        return self.graph.emit("Neg", self)

    def __gt__(self, other: Value | Number) -> Value:
        """1 where true and 0 elsewhere, in this value's own type, so that masks multiply.

        min(max(α x, 0), 1) with a huge α is x > 0 in one node, which onnxruntime runs in the blocked layout
        of its convolutions; a comparison would take the feature map out of it and back.
        """
        if _is(other, 0) and self.dtype == np.float32:
            return self.graph.emit("HardSigmoid", self, alpha=STEEPEST, beta=0.0, is_mask=True)
        return self.graph.mask("Greater", self, other)

    def __lt__(self, other: Value | Number) -> Value:
        return self.graph.mask("Less", self, other)

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

    def lift(self, other: Value | Number) -> Value:
        """A number as a constant of this value's type and graph."""
        return other if isinstance(other, Value) else self.graph.constant(np.asarray(other, self.dtype))


def _fix(value: Value, **fields: object) -> None:
    """Set what does not change any more."""
    for name, field in fields.items():
        object.__setattr__(value, name, field)


def _is(other: Value | Number, number: Number) -> bool:
    return not isinstance(other, Value) and other == number


# ------------------------------------------------------------------------ deferred


class Deferred(Value):
    """A variance that becomes one tensor only when something reads it as such, by its name.

    Its graph knows that tensor, and what it is called: `label`, the next name of the scope for None.
    """

    __slots__ = ()

    def __init__(self, graph: GraphBuilder, dtype: DType, label: str | None = None):
        _fix(self, graph=graph, dtype=np.dtype(dtype), is_mask=False, is_constant=False)
        if label is not None:
            graph.rename(self, label)

    def write(self) -> Value:
        """Emit the nodes of the tensor."""
        raise NotImplementedError

    @property
    def tensor(self) -> Value:
        return self.graph.written(self)

    @property
    def name(self) -> str:
        return self.tensor.name


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

    scale: Value
    profile: Value
    axis: int

    def __init__(self, scale: Value, profile: Value, axis: int, label: str | None = None):
        super().__init__(scale.graph, scale.dtype, label)
        _fix(self, scale=scale, profile=profile, axis=axis)

    def __repr__(self) -> str:
        return f"Scaled({self.scale!r}, {self.profile!r})"

    def write(self) -> Value:
        return self.graph.emit("Mul", self.scale, self.profile)

    def with_profile(self, profile: Value) -> Scaled:
        """The same scale of another vector."""
        return Scaled(self.scale, profile, self.axis)

    def __mul__(self, other: Value | Number) -> Value:
        if not isinstance(other, Value) or other.is_constant:
            return self if _is(other, 1) else self.with_profile(self.profile * other)
        return super().__mul__(other)

    def __truediv__(self, other: Value | Number) -> Value:
        if not isinstance(other, Value) or other.is_constant:
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

    scale: Value
    kernel: Value
    attrs: dict[str, Any]

    def __init__(self, scale: Value, kernel: Value, attrs: dict[str, Any]):
        super().__init__(scale.graph, scale.dtype)
        _fix(self, scale=scale, kernel=kernel, attrs=attrs)

    def write(self) -> Value:
        tensor: Value = self.graph.emit("ConvTranspose", self.scale, self.kernel, **self.attrs)
        return tensor


@dataclass(frozen=True)
class Part:
    """Neighbouring elements of an axis, with their variance; None where they are certain."""

    size: int
    var: Value | None
    mean: Value  #: whose shape zeros would take


class Partial(Deferred):
    """A variance that only some parts of an axis have; zeros stand for the others once it is one tensor."""

    __slots__ = ("parts", "axis")

    parts: tuple[Part, ...]
    axis: int

    def __init__(self, parts: Sequence[Part], axis: int):
        super().__init__(parts[0].mean.graph, next(part.var for part in parts if part.var is not None).dtype)
        _fix(self, parts=tuple(parts), axis=axis)

    def write(self) -> Value:
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


class Wide(Deferred):
    """v · w²: behind a layer with many outputs, of which single ones can be had without the others.

    Parameters
    ----------
    var: (…, inputs) in front of the layer.
    inputs: how many these are.
    some: (graph, v (inputs,), indices (k,)) -> the variances (k,) of these outputs, emitted into that graph.
    whole: emits all of them.
    """

    __slots__ = ("var", "inputs", "some", "whole")

    var: Value
    inputs: int
    some: Callable[[Any, Value, Value], Value]
    whole: Callable[[], Value]

    def __init__(
        self, var: Value, inputs: int, some: Callable[[Any, Value, Value], Value], whole: Callable[[], Value]
    ):
        super().__init__(var.graph, var.dtype)
        _fix(self, var=var, inputs=inputs, some=some, whole=whole)

    def write(self) -> Value:
        return self.whole()
