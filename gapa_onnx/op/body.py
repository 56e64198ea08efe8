"""The body of a model-local function: nodes for any opset from 7 on, in a file that needs no library.

A body has no initializers, so constants are nodes. They stand outside of loops and branches, where onnxruntime
folds them at load. What is given no name is called after its operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from gapa_onnx.op.contract import DOMAIN, OpSchema
from gapa_onnx.variance.builder import END, GraphBuilder
from gapa_onnx.variance.values import Value

ANY_SIZE_OPSET = 10
"""From here on the counts of TopK and Slice are tensors, and one function serves sites of any size."""


@dataclass(frozen=True)
class Size:
    """A count: its int64 (1,) tensor, and its number where the opset wants an attribute."""

    tensor: Value
    number: int | None

    def within(self, body: FunctionBody) -> int | Value:
        """What `body` writes as the count of a TopK or the end of a Slice."""
        if body.opset >= ANY_SIZE_OPSET:
            return body.adopt(self.tensor)
        if self.number is None:
            raise ValueError(f"before opset 10 the number behind {self.tensor.name!r} must be known")
        return self.number


class FunctionBody(GraphBuilder):
    """The nodes of the function of an operator, or of a loop or branch in it.

    Parameters
    ----------
    opset: the model's version of the default domain, which a function must share.
    schema: what goes in and out.
    outer: the body around this one; names stay unique among them.
    """

    def __init__(self, opset: int, schema: OpSchema, outer: FunctionBody | None = None):
        super().__init__(opset, {port.name for port in schema.inputs}, scope="")
        self._schema = schema
        self._outer = outer
        self.inputs = {port.name: self.tensor(port.name, port.dtype) for port in schema.inputs}
        if outer is not None:
            self._taken, self._counters = outer._taken, outer._counters

    def constant(self, array: npt.ArrayLike, name: str | None = None) -> Value:
        """A Constant node, shared by value; `name` counts where it is written first."""
        if self._outer is not None:
            return self.adopt(self._outer.constant(array, name))
        array = np.asarray(array)
        key = ("constant", array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = (self._written_out(array, name or _called(array)),)
        return self._known[key][0]

    def _written_out(self, array: npt.NDArray[np.generic], name: str) -> Value:
        if array.dtype.kind != "i" or self.opset >= 9:
            value = gs.Constant("value", array)
            return self.emit("Constant", dtype=array.dtype, names=(name,), value=value)
        # There a Constant is always a floating-point number.
        value = gs.Constant("value", array.astype(np.float64))
        number = self.emit("Constant", dtype=np.float64, names=(f"{name}_as_float",), value=value)
        return self.rename(self.cast(number, array.dtype), name)

    def _next_name(self, op_type: str) -> str:
        """The operator and a number, behind the scope."""
        stem = f"{self._scope}/{op_type.lower()}" if self._scope else op_type.lower()
        self._counters[stem] = self._counters.get(stem, 0) + 1
        return self.unique(f"{stem}_{self._counters[stem]}")

    def child(self) -> FunctionBody:
        """An empty body for a loop or a branch; its constants stand outside."""
        return FunctionBody(self.opset, self._schema, self)

    # ------------------------------------------------------------------- forms

    def topk_rows(self, x: Value, count: Size, name: str) -> tuple[Value, Value]:
        """As `topk` on the last axis of (n, M), for n = 0 too: onnxruntime 1.17 divides by n and takes the
        process down."""
        rows = self.emit("Gather", self.shape(x), self.constant(np.int64(0)))
        empty = self.compare("Equal", rows, 0)
        none, some = self.child(), self.child()
        with none.scope(f"{name}/none"):
            nothing = none.slice(none.adopt(x), 1, 0, count.within(none))  # (0, count)
            then = none.to_body([], [nothing, none.cast(nothing, np.int64)], ranks=(2, 2))
        with some.scope(f"{name}/some"):
            otherwise = some.to_body([], some.topk(some.adopt(x), count.within(some), -1), ranks=(2, 2))
        dtypes = (x.dtype, np.int64)
        best, where = self.emit_several(
            "If", empty, outputs=2, dtypes=dtypes, then_branch=then, else_branch=otherwise
        )
        return self.rename(best, name), self.rename(where, f"{name}_rows")

    def arange(self, count: Size, like: Callable[[], Value]) -> Value:
        """0, 1, … count−1 as int64; `like` emits any float tensor of shape (count,).

        Before opset 9 nothing makes a tensor of a given size. TopK orders equal values by index, so the order
        of equal numbers is the range.
        """
        if self.opset >= 9:
            return self.positions(count.tensor)
        values = like()
        return self.topk(values - values, count.within(self), -1)[1]

    # ------------------------------------------------------------------ export

    def to_function(self, doc: str) -> onnx.FunctionProto:
        """The function, once each output has its name."""
        outputs = [self.tensor(port.name, port.dtype) for port in self._schema.outputs]
        return helper.make_function(
            DOMAIN,
            self._schema.name,
            list(self.inputs),
            [value.name for value in outputs],
            self.to_proto(outputs).node,
            [helper.make_opsetid("", self.opset)],
            doc_string=doc,
        )


def _called(array: npt.NDArray[np.generic]) -> str:
    """int_1 for a number, ints_0_end for a list."""
    kind = {"int64": "int", "float32": "float", "float64": "double"}[array.dtype.name]
    numbers = ("end" if x == END else f"{x:g}".replace("-", "minus") for x in array.ravel().tolist())
    return f"{kind}{'s' if array.ndim else ''}_{'_'.join(numbers)}"
