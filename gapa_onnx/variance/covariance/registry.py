"""The table of pullbacks: how the derivatives of the outputs go backwards through one node.

For an output of C elements per sample, the cotangent of a tensor t (N, …) is

    G_t = d output / d t     (N, C, …), or (1, C, …) while it is the same for all samples

and a pullback says what G of a node's output makes of each of its inputs. Samples do not mix: every
node of a tail keeps the first axis, and a pullback refuses where that is not sure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.view import NodeView, Operand, Shape

Cotangents = Value | None | tuple[Value | None, ...]  #: of the first input, or one per input
Key = tuple[str, str]  # domain ("" for ONNX's own), operator


@dataclass(frozen=True)
class TailNode(NodeView):
    """A node as its pullback sees it; an operand is certain where it depends on no site."""

    cotangents: tuple[Value | None, ...] = ()  #: of each output, None where nothing reads it
    identity: Value | None = None  #: (1, C, C), where the walk starts; compared by `is`

    def lifted(self, operand: Operand, value: Value | None = None) -> Value:
        """The operand's mean, or another tensor of its shape, such that it broadcasts against cotangents.

        (N, …) becomes (N, 1, …). Fewer axes than the output has mean that there are no samples.
        """
        value = operand.mean if value is None else value
        return self.graph.unsqueeze(value, [1]) if operand.rank == self.output.rank else value

    def summed(
        self,
        g: Value,
        operand: Operand,
        among: range | None = None,
        beside: Sequence[Operand] | None = None,
    ) -> Value:
        """The cotangent of an operand that was broadcast: over all places that an element went to.

        `among` are the axes that broadcast, all but that of the samples unless given, and `beside` what
        it was broadcast against, the other inputs unless given.
        """
        if operand.rank != self.output.rank:
            raise self.refuse(f"{operand.tensor.name!r} has fewer axes than the output: samples may mix")
        if operand.sizes[0] == 1 != self.output.sizes[0]:
            raise self.refuse(f"one sample of {operand.tensor.name!r} is spread over several")
        if beside is None:
            beside = [x for x in self.inputs if x.present and x.tensor.name != operand.tensor.name]
        among = range(1, operand.rank) if among is None else among
        spread = self._spread_axes(operand, among, beside)
        if spread is None:
            return self._summed_at_run_time(g, operand, among)
        return self.graph.reduce("ReduceSum", g, [axis + 1 for axis in spread]) if spread else g

    def _spread_axes(self, operand: Operand, among: range, beside: Sequence[Operand]) -> list[int] | None:
        """Those of the axes along which an operand is broadcast; None where only a run tells."""
        spread = []
        for axis in among:
            size, full = operand.sizes[axis], self.output.sizes[axis]
            if size == 1 and full != 1:
                spread.append(axis)
            elif not isinstance(size, int) and (size is None or size != full):
                if any(_size_at(axis - operand.rank, other.shape) != 1 for other in beside):
                    return None
        return spread

    def _summed_at_run_time(self, g: Value, operand: Operand, among: range) -> Value:
        """Over those of the axes whose sizes turn out to differ, for sizes that are not known before."""
        if self.opset < 13:
            raise self.refuse(
                f"sizes of {operand.tensor.name!r} are not known, which opset 13 could do without"
            )
        graph = self.graph
        size, full = (
            graph.slice(graph.shape(x.raw), 0, among.start, among.stop) for x in (operand, self.output)
        )
        same = graph.emit("Equal", size, full, dtype=np.bool_)
        places = graph.emit("NonZero", graph.emit("Not", same), dtype=np.int64)
        axes = graph.emit("Reshape", places, graph.ints(-1)) + (among.start + 1)
        return graph.emit("ReduceSum", g, axes, keepdims=1, noop_with_empty_axes=1)

    def shape_like(self, lead: Sequence[int] | Value, operand: Operand, start: int = 1) -> Value:
        """The sizes `lead` and then those of an operand's axes from `start` on, as a target of Reshape."""
        graph, sizes = self.graph, operand.shape[start:] if operand.shape is not None else (None,)
        numbers = [size for size in sizes if isinstance(size, int)]
        known = len(numbers) == len(sizes)
        if known and not isinstance(lead, Value):
            return graph.ints(*lead, *numbers)
        lead = lead if isinstance(lead, Value) else graph.ints(*lead)
        behind = graph.ints(*numbers) if known else graph.slice(graph.shape(operand.raw), 0, start, None)
        return graph.emit("Concat", lead, behind, axis=0)

    def reshaped(self, g: Value, operand: Operand) -> Value:
        """(N, C, …) with the axes of an operand behind."""
        return self.graph.emit("Reshape", g, self.shape_like((0, 0), operand))

    def spread(self, g: Value, operand: Operand) -> Value:
        """(N, C, …) repeated to the size of an operand, with axes of 1 where it has more."""
        if self.opset >= 8:
            return self.graph.emit("Expand", g, self.shape_like((1, 1), operand))
        return g + self.graph.unsqueeze(self.graph.zeros(operand.mean), [1])

    def size(self, operand: Operand, axis: int) -> int:
        """The size of an axis, where it must be known."""
        size = operand.sizes[axis % operand.rank]
        if not isinstance(size, int) or size < 0:
            raise self.refuse(f"the size of axis {axis} of {operand.tensor.name!r} is not known")
        return size

    def axis(self, axis: int, operand: Operand) -> int:
        """Counted from the front; never that of the samples."""
        axis %= operand.rank
        if axis == 0:
            raise self.refuse("it works along the axis of the samples")
        return axis


def _size_at(axis: int, shape: Shape | None) -> int | str | None:
    """The size of an axis that is counted from the end; 1 where there is none."""
    if shape is None:
        return None
    return shape[axis] if len(shape) >= -axis else 1


@dataclass(frozen=True)
class Pullback:
    """States the cotangent of each input of a node."""

    apply: Callable[[TailNode, Value], Cotangents]
    several: bool  #: reads the cotangents of all outputs, not of the first that has one alone


PULLBACKS: dict[Key, Pullback] = {}


Apply = TypeVar("Apply", bound=Callable[[TailNode, Value], Cotangents])


def pullback(*op_types: str, domain: str = "", several: bool = False) -> Callable[[Apply], Apply]:
    """A function of the node and the cotangent of its output, which returns those of its inputs.

    Inputs that it says nothing about must be certain.
    """

    def decorate(function: Apply) -> Apply:
        for op_type in op_types:
            if (domain, op_type) in PULLBACKS:
                raise ValueError(f"{op_type} has a pullback already")
            PULLBACKS[domain, op_type] = Pullback(function, several)
        return function

    return decorate
