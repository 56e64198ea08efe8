"""Writing nodes for any opset from 7 on, as arithmetic on values.

A `GraphBuilder` collects nodes; `a * b + 1` on its values emits a Mul and an Add. It is the one place that knows
how Slice, Squeeze, TopK, Clip, ReduceSum, … changed over time. Identical nodes are emitted once. `graph` builds
what stands beside a source graph, `op.body` bodies of functions; constants and names are theirs to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import can_be_repeated
from gapa_onnx.model.nodes import names_read
from gapa_onnx.variance.values import Deferred, DType, Number, Value

Builder = TypeVar("Builder", bound="GraphBuilder")

END = int(np.iinfo(np.int32).max)  #: as the end of a Slice, the end of the axis, whatever its size


class GraphBuilder:
    """Nodes of one opset, in the order in which they were emitted.

    Parameters
    ----------
    opset: version of the default domain; every node is written for it.
    taken: names that are not given out.
    scope: what tensors without a name are called after.
    """

    def __init__(self, opset: int, taken: set[str], scope: str):
        self.opset = opset
        self.nodes: list[gs.Node] = []
        self._taken = set(taken)
        self._taken.discard("")
        self._counters: dict[str, int] = {}
        self._tensors: dict[str, gs.Tensor] = {}
        self._known: dict[tuple[object, ...], tuple[Value, ...]] = {}
        self._constants: set[str] = set()  #: names of tensors from outside that are the same in every run
        self._final: set[str] = set()  #: names that `rename` does not change again
        self._fixed: set[str] = set()  #: names that must not change: outputs, and what bodies read
        self._labels: dict[Deferred, str] = {}  #: what they will be called
        self._written: dict[Deferred, Value] = {}
        self._scope = scope

    # ------------------------------------------------------------------ values

    def tensor(self, name: str, dtype: DType) -> Value:
        """A tensor that is made elsewhere and read here by its name."""
        if name not in self._tensors:
            self._tensors[name] = gs.Variable(name)
        tensor = self._tensors[name]
        is_constant = isinstance(tensor, gs.Constant) or name in self._constants
        return Value(self, tensor, dtype, is_constant=is_constant)

    def constant(self, array: npt.ArrayLike, name: str | None = None) -> Value:
        """A value that is known now. Unnamed ones are shared."""
        raise NotImplementedError

    def written(self, value: Deferred) -> Value:
        """The tensor that a deferred value stands for; it is emitted when it is first asked for."""
        if value not in self._written:
            label = self._labels.get(value)
            if label is None:
                self._written[value] = value.write()
            else:
                with self.scope(label):
                    self._written[value] = self.rename(value.write(), label)
        return self._written[value]

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

    def _next_name(self, op_type: str) -> str:
        """What the output of a node is called that has not been given a name."""
        raise NotImplementedError

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """What is emitted inside is called after `name`."""
        outer, self._scope = self._scope, name
        try:
            yield
        finally:
            self._scope = outer

    def rename(self, value: Value, name: str) -> Value:
        """Give an emitted value its final name; a value from outside, or one that has a final name already,
        keeps its own."""
        if isinstance(value, Deferred):
            if value not in self._written:
                self._labels[value] = name
        elif self._tensors[value.name].inputs and value.name not in self._final:
            self._final.add(self._set_name(value.name, name))
        return value

    def output(self, value: Value, name: str) -> Value:
        """The value under the name of a graph output.

        No Identity if it can be helped: onnxruntime 1.31 fails to load a MatMul and BatchNormalization
        whose input is also read by an Identity that is an output.
        """
        value = value.tensor if isinstance(value, Deferred) else value
        if not self._tensors[value.name].inputs or value.name in self._fixed:
            return self.emit("Identity", value, names=(name,))
        self._fixed.add(self._set_name(value.name, name))
        return value

    def _set_name(self, old: str, name: str) -> str:
        """Rename a tensor; its values read their name from it."""
        tensor = self._tensors.pop(old)
        tensor.name = new = self.unique(name)
        producer = tensor.inputs[0]
        if producer.outputs[0] is tensor:
            producer.name = new
        self._tensors[new] = tensor
        return new

    # ------------------------------------------------------------------- nodes

    def emit(
        self,
        op_type: str,
        *inputs: Value | None,
        dtype: DType | None = None,
        domain: str = "",
        names: Sequence[str] = (),
        is_mask: bool = False,
        **attrs: Any,
    ) -> Value:
        """Emit a node and return its one output.

        It has the first input's type unless `dtype` says otherwise, and a name of the graph's choice unless `names`
        gives it; a named node is never shared.
        """
        dtypes = None if dtype is None else [dtype]
        return self.emit_several(
            op_type, *inputs, outputs=1, dtypes=dtypes, domain=domain, names=names, is_mask=is_mask, **attrs
        )[0]

    def emit_several(
        self,
        op_type: str,
        *inputs: Value | None,
        outputs: int,
        dtypes: Sequence[DType] | None = None,
        domain: str = "",
        names: Sequence[str] = (),
        is_mask: bool = False,
        **attrs: Any,
    ) -> tuple[Value, ...]:
        """As `emit`, for a node with so many outputs; their types may be given one by one."""
        if names and len(names) != outputs:
            raise ValueError(f"{op_type} has {outputs} outputs and {len(names)} names")
        read = tuple(i.name if i is not None else "" for i in inputs)
        key = (domain, op_type, read, outputs, tuple(names), repr(sorted(attrs.items())))
        if key not in self._known:
            given = [value for value in inputs if value is not None]
            dtypes = [given[0].dtype] * outputs if dtypes is None else dtypes
            node = self._new_node(op_type, read, names, outputs, domain, **attrs)
            constant = can_be_repeated(node) and all(value.is_constant for value in given)
            self._known[key] = tuple(
                Value(self, tensor, kind, is_mask, constant) for tensor, kind in zip(node.outputs, dtypes)
            )
        elif is_mask and not self._known[key][0].is_mask:
            self._known[key] = tuple(value.as_mask() for value in self._known[key])
        return self._known[key]

    def _new_node(
        self, op: str, read: Sequence[str], names: Sequence[str], count: int, domain: str, /, **attrs: Any
    ) -> gs.Node:
        """A node that reads tensors by their names, "" being none, and names its outputs if `names` does not."""
        made = [self.unique(name) for name in names] or [self._next_name(op) for _ in range(count)]
        variables = [gs.Variable(name) for name in made]
        self._tensors.update(zip(made, variables))
        tensors = [self._tensors[name] if name else gs.Variable.empty() for name in read]
        self.nodes.append(gs.Node(op, made[0], attrs, tensors, variables, domain or None))
        return self.nodes[-1]

    # ---------------------------------- what differs between versions of ONNX

    def cast(self, value: Value, dtype: DType, is_mask: bool = False) -> Value:
        if value.dtype == np.dtype(dtype):
            return value
        to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self.emit("Cast", value, to=int(to), dtype=dtype, is_mask=is_mask)

    def compare(self, comparison: str, a: Value, b: Value | Number) -> Value:
        """Greater, Less or Equal, as bool."""
        return self.emit(comparison, a, a.lift(b), dtype=np.bool_)

    def mask(self, comparison: str, a: Value, b: Value | Number) -> Value:
        """1 where the comparison holds and 0 elsewhere, in the type of `a`."""
        return self.cast(self.compare(comparison, a, b), a.dtype, is_mask=True)

    def reduce(self, op_type: str, value: Value, axes: Sequence[int] | None, keepdims: bool = True) -> Value:
        """ReduceSum takes its axes as an input from opset 13 on, the other reductions from 18 on."""
        if axes is None:
            return self.emit(op_type, value, keepdims=int(keepdims))
        if self.opset >= (13 if op_type == "ReduceSum" else 18):
            return self.emit(op_type, value, self.ints(*axes), keepdims=int(keepdims))
        return self.emit(op_type, value, axes=list(axes), keepdims=int(keepdims))

    def unsqueeze(self, value: Value, axes: Sequence[int]) -> Value:
        """With new dimensions of 1. Axes are an input from opset 13 on."""
        return self._with_axes("Unsqueeze", value, axes)

    def squeeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Without dimensions of 1. Axes are an input from opset 13 on."""
        return self._with_axes("Squeeze", value, axes)

    def _with_axes(self, op_type: str, value: Value, axes: Sequence[int]) -> Value:
        if self.opset >= 13:
            return self.emit(op_type, value, self.ints(*axes))
        return self.emit(op_type, value, axes=list(axes))

    def reshape(self, value: Value, shape: Value) -> Value:
        """To a shape that may have a dimension of 0, but none that is left open."""
        if self.opset >= 14:
            return self.emit("Reshape", value, shape, allowzero=1)
        # There a 0 means "copy the input's": ask for the dimension to be inferred instead, which is 0.
        return self.emit("Reshape", value, shape - self.mask("Equal", shape, self.ints(0)))

    def shape(self, value: Value) -> Value:
        return self.emit("Shape", value, dtype=np.int64)

    def count(self, value: Value, dtype: DType) -> Value:
        """How many elements a tensor has at run time, as a floating-point scalar."""
        return self.cast(self.emit("Size", value, dtype=np.int64), dtype)

    def dimension(self, value: Value, axis: int) -> Value:
        """The size of an axis at run time, a 1-d int64 tensor of one element."""
        if axis < 0 and self.opset < 11:
            raise ValueError("negative indices of Gather are known from opset 11 on")
        return self.emit("Gather", self.shape(value), self.ints(axis), axis=0)

    def expand(self, value: Value, like: Value) -> Value:
        """Broadcast to the shape of another tensor."""
        if self.opset >= 8:
            return self.emit("Expand", value, self.shape(like))
        return value + self.zeros(self.cast(like, value.dtype))

    def at_most(self, value: Value, bound: Value | Number) -> Value:
        """min(value, bound); a NaN stays one."""
        if self.opset >= 8:
            return self.emit("Min", value, value.lift(bound))
        return value * (value < bound) + bound * (value >= bound)

    def at_least(self, value: Value, bound: Value | Number) -> Value:
        """max(value, bound); a NaN stays one."""
        if self.opset >= 8:
            return self.emit("Max", value, value.lift(bound))
        return value * (value > bound) + bound * (value <= bound)

    def clip(self, value: Value, low: float, high: float) -> Value:
        """Between two bounds, which are inputs from opset 11 on; a NaN may become a number."""
        if self.opset >= 11:
            return self.emit("Clip", value, value.lift(low), value.lift(high))
        return self.emit("Clip", value, min=float(low), max=float(high))

    def slice(self, value: Value, axis: int, start: int | Value, end: int | Value | None) -> Value:
        """Elements start … end - 1 of an axis, to its end for None. Bounds may be tensors from opset 10 on."""
        end = END if end is None else end
        if not isinstance(start, Value) and not isinstance(end, Value):
            return self.block(value, [axis], [start], [end])
        if self.opset < 10:
            raise ValueError("Slice takes its bounds as inputs from opset 10 on")
        first, last = (b if isinstance(b, Value) else self.ints(b) for b in (start, end))
        return self.emit("Slice", value, first, last, self.ints(axis))

    def block(self, value: Value, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Value:
        """As `slice`, of several axes; `END` is the end of each. Bounds are inputs from opset 10 on."""
        if self.opset >= 10:
            return self.emit("Slice", value, self.ints(*starts), self.ints(*ends), self.ints(*axes))
        return self.emit("Slice", value, axes=list(axes), starts=list(starts), ends=list(ends))

    def split(self, value: Value, parts: int, axis: int) -> list[Value]:
        """Equal parts of an axis. Their number must be told apart from their outputs from opset 18 on."""
        count: dict[str, Any] = {"num_outputs": parts} if self.opset >= 18 else {}
        return list(self.emit_several("Split", value, outputs=parts, axis=axis, **count))

    def topk(self, value: Value, count: int | Value, axis: int) -> tuple[Value, Value]:
        """The largest elements of an axis in descending order, and their indices; the first of equal ones
        comes first. Their number is an input from opset 10 on, and a constant before."""
        both = (value.dtype, np.int64)
        if self.opset >= 10:
            count = count if isinstance(count, Value) else self.ints(count)
            values, indices = self.emit_several("TopK", value, count, outputs=2, dtypes=both, axis=axis)
        elif isinstance(count, Value):
            raise ValueError("TopK takes its count as an input from opset 10 on")
        else:
            values, indices = self.emit_several("TopK", value, outputs=2, dtypes=both, axis=axis, k=count)
        return values, indices

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """a where the condition (bool) holds, else b; what is not chosen may be NaN from opset 9 on."""
        if self.opset >= 9:
            return self.emit("Where", condition, a, b, dtype=a.dtype)
        chosen = self.cast(condition, a.dtype)
        return chosen * a + (1 - chosen) * b

    def positions(self, count: Value) -> Value:
        """0, 1, …, count - 1 as int64, from a 1-d count; for opset 9 and newer."""
        ones = self.emit("ConstantOfShape", count, value=gs.Constant("value", np.ones(1, np.int64)))
        return self.emit("Reshape", self.emit("NonZero", ones), self.ints(-1))

    def eye(self, size: Value, dtype: DType) -> Value:
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

    def child(self: Builder) -> Builder:
        """An empty graph for the body of an If, Loop or Scan; `close` ends it."""
        raise NotImplementedError

    def close(self: Builder, child: Builder) -> None:
        """Keep the names of a body from being given out again outside, where they would be shadowed."""
        self._taken |= child._taken

    def adopt(self, value: Value) -> Value:
        """A value of an enclosing graph, so that arithmetic with it emits nodes here."""
        if value.graph is self:
            return value
        tensor = value.graph._tensors[value.name]
        if isinstance(tensor, gs.Constant):  # what only a body reads would not be exported outside
            return self.constant(tensor.values)
        value.graph._final.add(value.name)
        value.graph._fixed.add(value.name)  # a body reads it by its name
        return self.tensor(value.name, value.dtype)

    def declare(self, variable: gs.Variable) -> Value:
        """An input of a body, whose type the file says."""
        self._tensors[variable.name] = variable
        return Value(self, variable, variable.dtype)

    def to_body(
        self, inputs: Sequence[gs.Variable], outputs: Sequence[Value], ranks: Sequence[int | None] = ()
    ) -> gs.Graph:
        """The graph as the body of a control-flow node; `ranks` are those of the outputs where they are told."""
        results = [self._tensors[value.name] for value in outputs]
        for position, (tensor, value) in enumerate(zip(results, outputs)):
            tensor.dtype = value.dtype
            rank = ranks[position] if ranks else None
            if rank is not None:
                tensor.shape = [None] * rank
        return gs.Graph(self._live(outputs), list(inputs), results, name="body", opset=self.opset)

    # ------------------------------------------------------------------ export

    def to_proto(self, wanted: Sequence[Value]) -> onnx.GraphProto:
        """The nodes that the wanted values need, in order, and their initializers."""
        graph = gs.Graph(nodes=self._live(wanted), name="variance", opset=self.opset)
        proto: onnx.GraphProto = gs.export_onnx(graph, do_type_check=False).graph
        return proto

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
