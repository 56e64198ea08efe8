"""Writing nodes for any opset from 7 on: what the standard-ops functions are made with.

The one place that knows how the forms of TopK, Slice, Squeeze, Constant, Loop, … changed over time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_AXES_AS_INPUT = {"Squeeze": 13, "Unsqueeze": 13, "ReduceSum": 13, "ReduceMax": 18}  #: from this opset on


@dataclass(frozen=True)
class Size:
    """A count: the name of its int64 (1,) tensor, and its number where the opset wants an attribute."""

    name: str
    value: int | None


@dataclass(frozen=True)
class Slot:
    """A tensor that passes through the body of a loop. Its shape may change, so no dimension is named."""

    name: str
    dtype: int
    rank: int

    def info(self, suffix: str = "") -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(self.name + suffix, self.dtype, [None] * self.rank)


class Emitter:
    """Appends nodes; every call returns the name of the tensor that it made.

    `to` names the result; unnamed results are called after their operator. Constants are written
    once per name, just before their first use.
    """

    def __init__(self, opset: int, outer: Emitter | None = None):
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self._outer = outer
        self._uses: dict[str, int] = outer._uses if outer else {}
        self._constants: set[str] = set()

    def __call__(
        self, op: str, *inputs: str, to: str = "", to_type: int | None = None, **attributes: object
    ) -> str:
        """One node with one output; `to_type` is the attribute `to` of Cast."""
        if to_type is not None:
            attributes["to"] = to_type
        axes = attributes.get("axes")
        if axes is not None and self.opset >= _AXES_AS_INPUT.get(op, math.inf):
            del attributes["axes"]
            inputs = (*inputs, self.constant("axes_" + "_".join(map(str, axes)), axes))
        out = to or self._fresh(op)
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=out, **attributes))
        return out

    def _fresh(self, stem: str) -> str:
        stem = stem.lower()
        self._uses[stem] = self._uses.get(stem, 0) + 1
        return f"{stem}_{self._uses[stem]}"

    def constant(self, name: str, value: object) -> str:
        """A Constant node; Python lists and integers are int64."""
        if self._outer:
            return self._outer.constant(name, value)
        if name not in self._constants:
            self._constants.add(name)
            array = np.asarray(value)
            if array.dtype.kind != "i":
                self("Constant", to=name, value=numpy_helper.from_array(array))
            elif self.opset >= 9:
                self("Constant", to=name, value=numpy_helper.from_array(array.astype(np.int64)))
            else:  # there a Constant is always a floating-point number
                number = self("Constant", value=numpy_helper.from_array(array.astype(np.float64)))
                self("Cast", number, to_type=TensorProto.INT64, to=name)
        return name

    def double(self, x: str) -> str:
        """x as float64."""
        return self("Cast", x, to_type=TensorProto.DOUBLE)

    def reduce_sum(self, x: str, axis: int, to: str = "") -> str:
        """The sum over one axis, which stays as a dimension of 1."""
        return self("ReduceSum", x, axes=[axis], keepdims=1, to=to)

    def unsqueeze(self, x: str, axis: int) -> str:
        """x with a new dimension of 1."""
        return self("Unsqueeze", x, axes=[axis])

    def slice(self, x: str, starts: list[int], ends: list[int], axes: list[int], to: str = "") -> str:
        """x[starts:ends] along the axes."""
        if self.opset < 10:
            return self("Slice", x, starts=starts, ends=ends, axes=axes, to=to)
        bounds = []
        for kind, values in (("starts", starts), ("ends", ends), ("axes", axes)):
            label = "_".join("end" if v > 2**62 else str(v).replace("-", "minus") for v in values)
            bounds.append(self.constant(f"{kind}_{label}", values))
        return self("Slice", x, *bounds, to=to)

    def clip(self, x: str, low: float, high: float) -> str:
        """x between two float32 bounds."""
        if self.opset < 11:
            return self("Clip", x, min=low, max=high)
        lowest = self.constant(f"low_{low:g}", np.float32(low))
        return self("Clip", x, lowest, self.constant(f"high_{high:g}", np.float32(high)))

    def topk(self, x: str, count: Size, to: tuple[str, str]) -> tuple[str, str]:
        """The largest values along the last axis and where they are, largest first.

        Opset 1 to 9 takes the count as an attribute. The names in `to` may be "" for an output that
        nobody needs.
        """
        values, indices = to
        outputs = [values or self._fresh("topk_values"), indices or self._fresh("topk_indices")]
        if self.opset < 10:
            if count.value is None:
                raise ValueError(f"before opset 10 the number behind {count.name!r} must be known")
            node = helper.make_node("TopK", [x], outputs, name=outputs[0], axis=-1, k=count.value)
        else:
            node = helper.make_node("TopK", [x, count.name], outputs, name=outputs[0], axis=-1)
        self.nodes.append(node)
        return outputs[0], outputs[1]

    def topk_rows(self, x: str, count: Size, to: tuple[str, str]) -> tuple[str, str]:
        """As `topk` on (n, M), for n = 0 too: onnxruntime 1.17 divides by n and takes the process down."""
        rows = self("Gather", self("Shape", x), self.constant("first", np.int64(0)))
        some, none = self.inner(), self.inner()
        some.topk(x, count, to=(f"{to[0]}_some", f"{to[1]}_some"))
        if self.opset < 10:
            nothing = none.slice(x, [0], [count.value], [1], to=f"{to[0]}_none")  # (0, count)
        else:
            begin, axis = self.constant("axis_0", [0]), self.constant("axis_1", [1])
            nothing = none("Slice", x, begin, count.name, axis, to=f"{to[0]}_none")
        none("Cast", nothing, to_type=TensorProto.INT64, to=f"{to[1]}_none")
        branches = {
            branch: helper.make_graph(
                emitter.nodes,
                f"{to[0]}{suffix}",
                [],
                [
                    helper.make_tensor_value_info(f"{to[0]}{suffix}", TensorProto.FLOAT, [None, None]),
                    helper.make_tensor_value_info(f"{to[1]}{suffix}", TensorProto.INT64, [None, None]),
                ],
            )
            for branch, emitter, suffix in (("then_branch", none, "_none"), ("else_branch", some, "_some"))
        }
        empty = self("Equal", rows, "first")
        self.nodes.append(helper.make_node("If", [empty], list(to), name=to[0], **branches))
        return to

    def arange(self, count: Size, like: Callable[[], str]) -> str:
        """0, 1, … count−1 as int64; `like` emits any float tensor of shape (count,).

        There is no Range before opset 11. TopK orders equal values by index, so the order of equal
        numbers is the range.
        """
        if self.opset >= 11:
            scalar = self("Gather", count.name, self.constant("first", np.int64(0)))
            return self("Range", "first", scalar, self.constant("scalar_one", np.int64(1)))
        values = like()
        return self.topk(self("Sub", values, values), count, to=("", ""))[1]

    def inner(self) -> Emitter:
        """An emitter for a body or branch: names stay unique, constants stand outside."""
        return Emitter(self.opset, self)

    def loop(
        self,
        name: str,
        steps: str,
        body: Emitter,
        state: Sequence[tuple[str, Slot]] = (),
        each: Sequence[Slot] = (),
        *,
        to: Sequence[str],
    ) -> Sequence[str]:
        """Run `body` `steps` times.

        It may read `<name>_number`, counted from 0. What it reads as a slot of `state`, first the tensor
        that is given with it, it writes as `<slot>_out`. What it writes as a slot of `each` is stacked over
        the steps. `to` names the results: states, then stacks.
        """
        body("Identity", f"{name}_go_on", to=f"{name}_go_on_out")
        graph = helper.make_graph(
            body.nodes,
            name,
            [
                helper.make_tensor_value_info(f"{name}_number", TensorProto.INT64, []),
                helper.make_tensor_value_info(f"{name}_go_on", TensorProto.BOOL, []),
                *(slot.info() for _, slot in state),
            ],
            [
                helper.make_tensor_value_info(f"{name}_go_on_out", TensorProto.BOOL, []),
                *(slot.info("_out") for _, slot in state),
                *(slot.info() for slot in each),
            ],
        )
        starts = [start for start, _ in state]
        self.nodes.append(helper.make_node("Loop", [steps, "", *starts], list(to), name=to[0], body=graph))
        return to
