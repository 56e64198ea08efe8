"""What a rule sees of a node: attributes, and for each tensor its mean and its variance.

The mean is the source graph's own tensor. A tensor that is certain has no variance at all
(`None`), never a tensor of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import constant_of
from gapa_onnx.model.dtypes import variance_dtype
from gapa_onnx.variance.graph import Value, VarianceGraph

Shape = tuple[int | str | None, ...]
"""Sizes of axes: numbers, names of what is known at run time only, or None."""


class Refused(Exception):
    """A rule cannot state the variance of this node; the message is the reason."""


@dataclass(frozen=True)
class Operand:
    """One input or output of a node."""

    graph: VarianceGraph
    tensor: gs.Tensor
    var: Value | None = None

    @property
    def present(self) -> bool:
        """Optional inputs may be left out."""
        return bool(self.tensor.name)

    @property
    def certain(self) -> bool:
        return self.var is None

    @property
    def variance(self) -> Value:
        """The variance of an operand that a rule takes for uncertain."""
        if self.var is None:
            raise Refused(f"only inputs other than {self.tensor.name!r} are uncertain")
        return self.var

    @property
    def raw(self) -> Value:
        """The tensor in its own type."""
        if isinstance(self.tensor.dtype, int):
            raise Refused(f"{self.tensor.name!r} is of a type that numpy lacks")
        return self.graph.tensor(self.tensor.name, self.tensor.dtype or np.float32)

    @property
    def mean(self) -> Value:
        """The tensor in the type that variances are computed in."""
        return self.graph.cast(self.raw, self.dtype)

    @property
    def dtype(self) -> np.dtype:
        return variance_dtype(self.tensor.dtype)

    @property
    def constant(self) -> np.ndarray | None:
        return constant_of(self.tensor)

    @property
    def shape(self) -> Shape | None:
        return None if self.tensor.shape is None else tuple(self.tensor.shape)

    @property
    def sizes(self) -> Shape:
        """The shape, where it must be known how many axes there are."""
        shape = self.shape
        if shape is None:
            raise Refused(f"the rank of {self.tensor.name!r} is unknown")
        return shape

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def same_shape(self, other: Operand) -> bool:
        """True only where shapes are known to be equal."""
        shape = self.shape
        return shape is not None and all(size is not None for size in shape) and shape == other.shape


@dataclass(frozen=True)
class Options:
    """Choices that rules may ask for."""

    attention: str = "values"  #: "values": attention weights are certain; "full": they are uncertain too


@dataclass(frozen=True, eq=False)
class VirtualNode:
    """Several source nodes seen as one standard operator; it has what rules read of a graphsurgeon node."""

    op: str
    name: str
    attrs: dict[str, Any]
    inputs: list[gs.Tensor]
    outputs: list[gs.Tensor]
    domain: str | None = None


@dataclass(frozen=True)
class NodeView:
    """One source node, as its rule sees it."""

    graph: VarianceGraph
    node: gs.Node | VirtualNode
    variance_of: Callable[[str], Value | None]
    options: Options = Options()
    #: variances inside a subgraph: (body, graph to emit into, variances of its inputs) -> by name
    within: Callable[[gs.Graph, VarianceGraph, dict[str, Value]], dict[str, Value]] | None = None

    @property
    def op_type(self) -> str:
        return self.node.op

    @property
    def opset(self) -> int:
        return self.graph.opset

    @property
    def inputs(self) -> list[Operand]:
        return [
            Operand(self.graph, t, self.variance_of(t.name) if t.name else None) for t in self.node.inputs
        ]

    @property
    def outputs(self) -> list[Operand]:
        return [Operand(self.graph, t) for t in self.node.outputs]

    @property
    def output(self) -> Operand:
        return self.outputs[0]

    def input(self, position: int) -> Operand | None:
        """The input, or None where it is left out."""
        inputs = self.inputs
        return inputs[position] if position < len(inputs) and inputs[position].present else None

    def attr(self, name: str, default: Any = None) -> Any:
        return self.node.attrs.get(name, default)

    def again(self, *inputs: Value | None, **changed: Any) -> Value:
        """The same node on other inputs, for its one output; `changed` attributes replace the source's,
        None drops one."""
        return self.again_several(*inputs, outputs=1, **changed)[0]

    def again_several(
        self,
        *inputs: Value | None,
        outputs: int,
        dtypes: Sequence[np.dtype[Any]] | None = None,
        **changed: Any,
    ) -> tuple[Value, ...]:
        """The same node on other inputs, with so many outputs; see `again`."""
        attrs = {k: v for k, v in {**self.node.attrs, **changed}.items() if v is not None}
        domain = self.node.domain or ""
        dtypes = [self.output.dtype] * outputs if dtypes is None else dtypes
        return self.graph.emit_several(
            self.op_type, *inputs, outputs=outputs, domain=domain, dtypes=dtypes, **attrs
        )

    def inside(self, body: gs.Graph, graph: VarianceGraph, known: dict[str, Value]) -> dict[str, Value]:
        """The variances inside a subgraph, by name, emitted into `graph`; `known` are those of its inputs."""
        if self.within is None:
            raise self.refuse("its subgraph cannot be walked here")
        return self.within(body, graph, known)

    def refuse(self, reason: str) -> Refused:
        return Refused(reason)
