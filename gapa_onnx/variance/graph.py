"""The variance graph: what is written beside a source graph, as mathematics.

A `VarianceGraph` collects the nodes that are added beside the source graph; it never holds a
source node. A `Value` (`values`) is one tensor of either graph. `a * b + 1` emits a Mul and an Add.

Names: what is emitted for the source tensor `y` is called `y/var`, its intermediate steps
`y/var/1`, `y/var/2`, …, so that a viewer shows the variance beside what it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from gapa_onnx.arrays import Array
from gapa_onnx.model.constants import can_be_repeated
from gapa_onnx.model.nodes import names_read
from gapa_onnx.variance.builder import GraphBuilder
from gapa_onnx.variance.values import DType, Value

__all__ = ["Value", "VarianceGraph", "names_read"]


class VarianceGraph(GraphBuilder):
    """The nodes and initializers that are added to a model of one opset.

    Parameters
    ----------
    opset: the model's version of the default domain; every node is written for it.
    taken: names that the source graph uses; none of them is given out again.
    read_instead: tensors of the source graph that are read in place of others, see `qdq`.
    constants: tensors of the source graph that are the same in every run.
    """

    def __init__(
        self,
        opset: int,
        taken: set[str],
        read_instead: Mapping[str, str] | None = None,
        constants: AbstractSet[str] = frozenset(),
    ):
        super().__init__(opset, taken, scope="gapa")
        self._read_instead = read_instead or {}
        self._source_constants = constants
        self._constants = set(constants)
        #: initializers that are a vector times a number which is still open, by name: whose number, and the vector
        self.multiples: dict[str, tuple[str, Array]] = {}

    def tensor(self, name: str, dtype: DType) -> Value:
        """A tensor of the source graph, or the one that is read instead of it."""
        return super().tensor(self._read_instead.get(name, name), dtype)

    def constant(self, array: npt.ArrayLike, name: str | None = None) -> Value:
        """An initializer. Unnamed ones are shared by value."""
        array = np.asarray(array)
        if name is not None:
            return self._initializer(array, name)
        key = ("constant", array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = (self._initializer(array, f"gapa/const/{label(array)}"),)
        return self._known[key][0]

    def _initializer(self, array: npt.NDArray[np.generic], name: str) -> Value:
        name = self.unique(name)
        self._tensors[name] = gs.Constant(name, array)
        return Value(self, self._tensors[name], array.dtype, is_constant=True)

    def multiple(self, vector: Array, name: str, of: Value | None = None, dtype: DType = np.float32) -> Value:
        """An initializer that is a vector (float64) times a number that is still open: its own, or the one of
        another such initializer, which it follows from."""
        value = self._initializer(np.asarray(vector, dtype), name)
        whose = value.name if of is None else self.multiples[of.name][0]
        self.multiples[value.name] = (whose, vector)
        return value

    def multiples_of(self, name: str) -> dict[str, Array]:
        """The vectors of all such initializers that have the number of this one, by name."""
        return {own: vector for own, (whose, vector) in self.multiples.items() if whose == name}

    def vector_of(self, value: Value) -> Array | None:
        """The vector that such an initializer is a multiple of."""
        return self.multiples[value.name][1] if value.name in self.multiples else None

    def _next_name(self, op_type: str) -> str:
        """The next number of the scope."""
        self._counters[self._scope] = self._counters.get(self._scope, 0) + 1
        return self.unique(f"{self._scope}/{self._counters[self._scope]}")

    def child(self) -> VarianceGraph:
        """An empty graph for the body of an If, Loop or Scan; `close` ends it."""
        return VarianceGraph(self.opset, self._taken, self._read_instead, self._source_constants)

    def copy(self, nodes: Iterable[gs.Node], outside: set[str]) -> None:
        """Take in copies of source nodes, for means that are not visible outside of a body.

        Initializers named in `outside` are read from there, all others are taken along.
        """
        for node in nodes:
            inputs, outputs = (
                [self._copied(tensor, outside) for tensor in tensors]
                for tensors in (node.inputs, node.outputs)
            )
            self.nodes.append(gs.Node(node.op, node.name, node.attrs, inputs, outputs, node.domain))
            if can_be_repeated(node) and all(self._is_constant(tensor) for tensor in inputs):
                self._constants.update(tensor.name for tensor in outputs)

    def _is_constant(self, tensor: gs.Tensor) -> bool:
        return isinstance(tensor, gs.Constant) or not tensor.name or tensor.name in self._constants

    def _copied(self, tensor: gs.Tensor, outside: set[str]) -> gs.Tensor:
        if not tensor.name:
            return gs.Variable.empty()
        if tensor.name not in self._tensors:
            own = isinstance(tensor, gs.Constant) and tensor.name not in outside
            copied = gs.Constant(tensor.name, tensor._values) if own else gs.Variable(tensor.name)
            self._tensors[tensor.name] = copied
        return self._tensors[tensor.name]


def label(array: npt.NDArray[np.generic]) -> str:
    """A readable name for a small constant."""
    if array.size <= 4:
        return "_".join(f"{x:g}" for x in array.ravel().tolist()) + f"_{array.dtype.name}"
    return f"{array.dtype.name}_{'x'.join(map(str, array.shape))}"
