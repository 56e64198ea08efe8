"""Arithmetic on graph values: how rules write ONNX nodes as mathematics.

A `VarianceGraph` collects the nodes that are added beside the source graph; it never holds a
source node. A `Value` (`values`) is one tensor of either graph. `a * b + 1` emits a Mul and an Add.

Names: what is emitted for the source tensor `y` is called `y/var`, its intermediate steps
`y/var/1`, `y/var/2`, …, so that a viewer shows the variance beside what it belongs to.
Identical nodes are emitted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import DTypeLike

from gapa_onnx.variance.values import Deferred, Value

__all__ = ["Value", "VarianceGraph", "names_read"]


class VarianceGraph:
    """The nodes and initializers that are added to a model of one opset.

    Parameters
    ----------
    opset: the model's version of the default domain; every node is written for it.
    taken: names that the source graph uses; none of them is given out again.
    twins: tensors of the source graph that are read in place of others, see `qdq`.
    constants: tensors of the source graph that are the same in every run.
    """

    def __init__(
        self,
        opset: int,
        taken: set[str],
        twins: dict[str, str] | None = None,
        constants: frozenset[str] = frozenset(),
    ):
        self.opset = opset
        self._twins = twins or {}
        self._constants = constants
        self.nodes: list[gs.Node] = []
        self._taken = set(taken)
        self._taken.discard("")
        self._counters: dict[str, int] = {}
        self._tensors: dict[str, gs.Tensor] = {}
        self._known: dict[tuple, tuple[Value, ...]] = {}
        self._final: set[str] = set()  #: names of variances, which another variance does not take over
        self._fixed: set[str] = set()  #: names that must not change: outputs, and what bodies read
        self._scope = "gapa"

    # ------------------------------------------------------------------ values

    def tensor(self, name: str, dtype: np.dtype) -> Value:
        """A tensor of the source graph, as it is, or its twin."""
        name = self._twins.get(name, name)
        if name not in self._tensors:
            self._tensors[name] = gs.Variable(name)
        return Value(self, name, dtype)

    def constant(self, array: np.ndarray, name: str | None = None) -> Value:
        """An initializer. Unnamed ones are shared by value."""
        array = np.asarray(array)
        if name is not None:
            return self._initializer(array, name)
        key = ("constant", array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = (self._initializer(array, f"gapa/const/{_label(array)}"),)
        return self._known[key][0]

    def _initializer(self, array: np.ndarray, name: str) -> Value:
        name = self.unique(name)
        self._tensors[name] = gs.Constant(name, array)
        return Value(self, name, array.dtype)

    def is_constant(self, value: Value) -> bool:
        """Whether a value is the same in every run; what is deferred depends on a site."""
        if isinstance(value, Deferred):
            return False
        tensor = self._tensors[value.name]
        if isinstance(tensor, gs.Constant) or value.name in self._constants:
            return True
        return bool(tensor.inputs) and all(
            self.is_constant(Value(self, read.name, value.dtype)) for read in tensor.inputs[0].inputs
        )

    def ints(self, *numbers: int) -> Value:
        """A constant 1-d int64 tensor: axes, shapes, …"""
        return self.constant(np.asarray(numbers, np.int64))

    # ------------------------------------------------------------------- names

    def unique(self, name: str) -> str:
        """The name itself, or the name with a number where it is taken."""
        candidate = name
        while candidate in self._taken:
            self._counters[name] = self._counters.get(name, 0) + 1
            candidate = f"{name}/{self._counters[name]}"
        self._taken.add(candidate)
        return candidate

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """What is emitted inside is called `name/1`, `name/2`, …"""
        outer, self._scope = self._scope, name
        try:
            yield
        finally:
            self._scope = outer

    def rename(self, value: Value, name: str) -> Value:
        """Give an emitted value its final name; a value of the source graph, or one that has a
        final name already, keeps its own."""
        if isinstance(value, Deferred):
            value.label = value.label if value.is_written else name
            return value
        if not self._tensors[value.name].inputs or value.name in self._final:
            return value
        self._final.add(self._set_name(value, name))
        return value

    def output(self, value: Value, name: str) -> Value:
        """The value under the name of a graph output.

        No Identity if it can be helped: onnxruntime 1.31 fails to load a MatMul and BatchNormalization
        whose input is also read by an Identity that is an output.
        """
        value = value.tensor if isinstance(value, Deferred) else value
        if not self._tensors[value.name].inputs or value.name in self._fixed:
            return self.emit("Identity", value, names=(name,))
        self._fixed.add(self._set_name(value, name))
        return value

    def _set_name(self, value: Value, name: str) -> str:
        tensor = self._tensors.pop(value.name)
        tensor.name = self.unique(name)
        producer = tensor.inputs[0]
        if producer.outputs[0] is tensor:
            producer.name = tensor.name
        self._tensors[tensor.name] = tensor
        value.name = tensor.name  # the value object is shared by `_known`, which stays right
        return tensor.name

    # ------------------------------------------------------------------- nodes

    def emit(
        self,
        op_type: str,
        *inputs: Value | None,
        dtype: DTypeLike | None = None,
        domain: str = "",
        names: Sequence[str] | None = None,
        **attrs: Any,
    ) -> Value:
        """Emit a node of one output and return that.

        The output has the first input's type unless `dtype` says otherwise, and the next number of
        the scope for its name unless `names` gives it; a named node is never shared.
        """
        (value,) = self.emit_several(
            op_type, *inputs, outputs=1, dtype=dtype, domain=domain, names=names, **attrs
        )
        return value

    def emit_several(
        self,
        op_type: str,
        *inputs: Value | None,
        outputs: int,
        dtype: DTypeLike | None = None,
        domain: str = "",
        names: Sequence[str] | None = None,
        **attrs: Any,
    ) -> tuple[Value, ...]:
        """Emit a node and return its outputs, which have one type; see `emit`."""
        read = tuple(i.name if i else "" for i in inputs)
        key = (domain, op_type, read, outputs, tuple(names or ()), repr(sorted(attrs.items())))
        if key not in self._known:
            names = (
                [self._next_name() for _ in range(outputs)]
                if names is None
                else [self.unique(n) for n in names]
            )
            result_dtype = dtype if dtype is not None else next(i for i in inputs if i is not None).dtype
            variables = [gs.Variable(name) for name in names]
            self._tensors.update(zip(names, variables))
            tensors = [self._tensors[i.name] if i else gs.Variable.empty() for i in inputs]
            self.nodes.append(gs.Node(op_type, names[0], attrs, tensors, variables, domain or None))
            self._known[key] = tuple(Value(self, name, result_dtype) for name in names)
        return self._known[key]

    def _next_name(self) -> str:
        self._counters[self._scope] = self._counters.get(self._scope, 0) + 1
        return self.unique(f"{self._scope}/{self._counters[self._scope]}")

    # ---------------------------------- what differs between versions of ONNX

    def cast(self, value: Value, dtype: np.dtype) -> Value:
        if value.dtype == np.dtype(dtype):
            return value
        return self.emit(
            "Cast", value, to=int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))), dtype=dtype
        )

    def mask(self, comparison: str, a: Value, b: Value) -> Value:
        return self.as_mask(self.cast(self.emit(comparison, a, b, dtype=np.bool_), a.dtype))

    def as_mask(self, value: Value) -> Value:
        """The same value, known to consist of zeros and ones."""
        value.is_mask = True
        return value

    def reduce(self, op_type: str, value: Value, axes: Sequence[int] | None, keepdims: bool = True) -> Value:
        """ReduceSum takes its axes as an input from opset 13 on, the other reductions from 18 on."""
        if axes is None:
            return self.emit(op_type, value, keepdims=int(keepdims))
        if self.opset >= (13 if op_type == "ReduceSum" else 18):
            return self.emit(op_type, value, self.ints(*axes), keepdims=int(keepdims))
        return self.emit(op_type, value, axes=list(axes), keepdims=int(keepdims))

    def unsqueeze(self, value: Value, axes: Sequence[int]) -> Value:
        if self.opset >= 13:
            return self.emit("Unsqueeze", value, self.ints(*axes))
        return self.emit("Unsqueeze", value, axes=list(axes))

    def shape(self, value: Value) -> Value:
        return self.emit("Shape", value, dtype=np.int64)

    def count(self, value: Value, dtype: np.dtype) -> Value:
        """How many elements a tensor has at run time, as a floating-point scalar."""
        return self.cast(self.emit("Size", value, dtype=np.int64), dtype)

    def expand(self, value: Value, like: Value) -> Value:
        """Broadcast to the shape of another tensor."""
        if self.opset >= 8:
            return self.emit("Expand", value, self.shape(like))
        return value + self.zeros(self.cast(like, value.dtype))

    def at_most(self, value: Value, bound: Value | float) -> Value:
        """min(value, bound); a NaN stays one."""
        if self.opset >= 8:
            return self.emit("Min", value, value._lift(bound))
        return value * (value < bound) + bound * (value >= bound)

    def at_least(self, value: Value, bound: Value | float) -> Value:
        """max(value, bound); a NaN stays one."""
        if self.opset >= 8:
            return self.emit("Max", value, value._lift(bound))
        return value * (value > bound) + bound * (value <= bound)

    def slice(self, value: Value, axis: int, start: int, end: int | None) -> Value:
        """Elements start … end - 1 of an axis, to its end for None. Bounds are inputs from opset 10 on."""
        end = np.iinfo(np.int32).max if end is None else end
        if self.opset >= 10:
            return self.emit("Slice", value, self.ints(start), self.ints(end), self.ints(axis))
        return self.emit("Slice", value, axes=[axis], starts=[start], ends=[end])

    def split(self, value: Value, parts: int, axis: int) -> list[Value]:
        """Equal parts of an axis. Their number must be told apart from their outputs from opset 18 on."""
        count = {"num_outputs": parts} if self.opset >= 18 else {}
        return list(self.emit_several("Split", value, outputs=parts, axis=axis, **count))

    def topk(self, value: Value, count: int | Value, axis: int) -> tuple[Value, Value]:
        """The largest elements of an axis in descending order, and their indices; the first of equal ones
        comes first. Their number is an input from opset 10 on, and a constant before."""
        if self.opset >= 10:
            count = count if isinstance(count, Value) else self.ints(count)
            values, indices = self.emit_several("TopK", value, count, outputs=2, axis=axis)
        elif isinstance(count, Value):
            raise ValueError("TopK takes its count as an input from opset 10 on")
        else:
            values, indices = self.emit_several("TopK", value, outputs=2, axis=axis, k=count)
        indices.dtype = np.dtype(np.int64)
        return values, indices

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """a where the condition (bool) holds, else b; what is not chosen may be NaN from opset 9 on."""
        if self.opset >= 9:
            return self.emit("Where", condition, a, b, dtype=a.dtype)
        chosen = self.cast(condition, a.dtype)
        return chosen * a + (1 - chosen) * b

    def dimension(self, value: Value, axis: int) -> Value:
        """The size of an axis at run time, a 1-d int64 tensor of one element."""
        if axis < 0 and self.opset < 11:
            raise ValueError("negative indices of Gather are known from opset 11 on")
        return self.emit("Gather", self.shape(value), self.ints(axis), axis=0)

    def positions(self, count: Value) -> Value:
        """0, 1, …, count - 1 as int64, from a 1-d count; for opset 9 and newer."""
        ones = self.emit("ConstantOfShape", count, value=gs.Constant("value", np.ones(1, np.int64)))
        return self.emit("Reshape", self.emit("NonZero", ones), self.ints(-1))

    def eye(self, size: Value, dtype: np.dtype) -> Value:
        """An identity matrix, from a 1-d size; before opset 9 the size must be a constant."""
        if self.opset < 9:
            return self.constant(np.eye(int(self._tensors[size.name].values[0]), dtype=dtype))
        square = self.emit("Concat", size, size, axis=0)
        zero = gs.Constant("value", np.zeros(1, dtype))
        return self.emit("EyeLike", self.emit("ConstantOfShape", square, value=zero, dtype=dtype))

    def zeros(self, like: Value) -> Value:
        """Zeros in the shape of another tensor, also where that one holds an infinity."""
        if self.opset >= 9:
            zero = gs.Constant("value", np.zeros(1, like.dtype))
            return self.emit("ConstantOfShape", self.shape(like), value=zero, dtype=like.dtype)
        return self.mask("Greater", like, like)

    # --------------------------------------------------------------- subgraphs

    def child(self) -> VarianceGraph:
        """An empty graph for the body of an If, Loop or Scan; `close` ends it."""
        return VarianceGraph(self.opset, self._taken, self._twins, self._constants)

    def close(self, child: VarianceGraph) -> None:
        """Keep the names of a body from being given out again outside, where they would be shadowed."""
        self._taken |= child._taken

    def adopt(self, value: Value) -> Value:
        """A value of an enclosing graph, so that arithmetic with it emits nodes here."""
        tensor = value.graph._tensors[value.name]
        if isinstance(tensor, gs.Constant):  # what only a body reads would not be exported outside
            return self.constant(tensor.values)
        value.graph._final.add(value.name)
        value.graph._fixed.add(value.name)  # a body reads it by its name
        return self.tensor(value.name, value.dtype)

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

    def _copied(self, tensor: gs.Tensor, outside: set[str]) -> gs.Tensor:
        if not tensor.name:
            return gs.Variable.empty()
        if tensor.name not in self._tensors:
            own = isinstance(tensor, gs.Constant) and tensor.name not in outside
            copied = gs.Constant(tensor.name, tensor._values) if own else gs.Variable(tensor.name)
            self._tensors[tensor.name] = copied
        return self._tensors[tensor.name]

    def to_body(self, inputs: Sequence[gs.Variable], outputs: Sequence[Value]) -> gs.Graph:
        """The graph as the body of a control-flow node."""
        results = []
        for value in outputs:
            self._tensors[value.name].dtype = value.dtype
            results.append(self._tensors[value.name])
        return gs.Graph(self._live(outputs), list(inputs), results, name="body", opset=self.opset)

    # ------------------------------------------------------------------ export

    def to_proto(self, wanted: Sequence[Value]) -> onnx.GraphProto:
        """The nodes that the wanted values need, in order, and their initializers."""
        graph = gs.Graph(nodes=self._live(wanted), name="variance", opset=self.opset)
        return gs.export_onnx(graph, do_type_check=False).graph

    def names_behind(self, value: Value) -> set[str]:
        """Names of all tensors of this graph that a value is computed from."""
        return {tensor.name for node in self._live([value]) for tensor in node.outputs}

    def _live(self, wanted: Sequence[Value]) -> list[gs.Node]:
        needed = {value.name for value in wanted}
        live = []
        for node in reversed(self.nodes):
            if any(tensor.name in needed for tensor in node.outputs):
                needed.update(names_read(node))
                live.append(node)
        return live[::-1]


def names_read(node: gs.Node) -> Iterator[str]:
    """Names of all tensors that a node reads, also those that its subgraphs take from outside."""
    yield from (tensor.name for tensor in node.inputs if tensor.name)
    for value in node.attrs.values():
        if isinstance(value, gs.Graph):
            yield from (tensor.name for tensor in value.outputs)
            for inner in value.nodes:
                yield from names_read(inner)


def _label(array: np.ndarray) -> str:
    """A readable name for a small constant."""
    if array.size <= 4:
        return "_".join(f"{x:g}" for x in array.ravel().tolist()) + f"_{array.dtype.name}"
    return f"{array.dtype.name}_{'x'.join(map(str, array.shape))}"
