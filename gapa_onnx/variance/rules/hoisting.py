"""A layer with a certain weight, on a variance that is not written out yet: what can be done at load is.

For y = f(x, w) with Var x in one of the forms of `values`,

    Scaled, f is a matrix product     s · (w² p)                      a vector, from numbers at conversion
    Scaled, f mixes features only     s · f(p, w²)                    only the vector changes
    Scaled, f is a convolution        f(s, Σ_c w²_c p_c)              one channel is read
    Upsampled, f is a convolution     s spread by f(kernel, w²)       two layers in one
    Partial                           Σ over parts of f(v, w² of it)  zeros are not read

and f(v, w²) else. Everything beside s and v follows from constants, and onnxruntime folds it. Where numbers are known at
conversion neither the square of a weight nor its unfolding is left to be made at load: a vocabulary's would be the
largest tensor of the file. Behind a layer with many outputs f(v, w²) is not written before all of it is wanted (`Wide`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.variance.chosen import rows_times
from gapa_onnx.variance.rules.view import NodeView, Operand
from gapa_onnx.variance.values import Deferred, Partial, Scaled, Upsampled, Value, Wide
from gapa_onnx.variance.weights import Weights, read_weights

MANY = 1000  # outputs of a layer from which on only some of them may be wanted
PRODUCTS = ("MatMul", "Gemm", "FusedMatMul")
WINDOW = ("kernel_shape", "strides", "pads", "dilations", "auto_pad")
CONVOLUTIONS = ("Conv", "ConvTranspose")


@dataclass(frozen=True)
class Layer:
    """f( · , w²): a node with its squared weight, or with some of that weight's inputs.

    Parameters
    ----------
    shape: of the weight, None where it is not a constant: then nothing can be done at load.
    further: inputs behind the weight.
    changed: attributes that are other than the source's.
    weight: where it comes from.
    part: some of the squared weight's inputs, in place of it.
    """

    node: NodeView
    weight: Operand
    shape: tuple[int, ...] | None
    further: Sequence[Value] = ()
    changed: dict[str, float] | None = None
    part: Value | None = None

    @staticmethod
    def of(node: NodeView, weight: Operand, further: Sequence[Value], changed: dict[str, float]) -> Layer:
        shape = weight.shape or ()
        sizes = tuple(size for size in shape if isinstance(size, int))
        known = weight.shape is not None and len(sizes) == len(shape) and weight.mean.is_constant
        return Layer(node, weight, sizes if known else None, further, changed)

    @property
    def squared(self) -> Value:
        """The squared weight."""
        return self.weight.mean.squared if self.part is None else self.part

    def __call__(self, var: Value) -> Value:
        """The variance behind the layer, from the one before it."""
        found: Value | None = None
        if isinstance(var, Scaled) and self.part is None:
            found = at_conversion(self.node, var, self._rows, self._factor)
        if found is not None:
            return found
        if self.shape is not None and isinstance(var, Scaled):
            found = self._on_vector(var) or self._on_one_channel(var)
        elif self.shape is not None and isinstance(var, Upsampled):
            found = self._with_upsampling(var)
        elif self.shape is not None and isinstance(var, Partial):
            axis = self._axis_of_inputs(var)
            found = None if axis is None else self._by_parts(var, axis)
        return found or self._on_many(var) or self._plain(var)

    def _plain(self, var: Value, squared: Value | None = None, **attrs: object) -> Value:
        changed = {**(self.changed or {}), **attrs}
        return self.node.again(var, squared or self.squared, *self.further, **changed)

    @property
    def _group(self) -> int:
        return int(self.node.attr("group", 1))

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The weight's shape, where it is a constant."""
        if self.shape is None:
            raise ValueError("the weight is no constant")
        return self.shape

    # ----------------------------------------------------------- matrix products

    @property
    def _factor(self) -> float:
        """What a matrix product is multiplied by, squared."""
        return (self.changed or {}).get("alpha", 1.0)

    @property
    def _outputs_axis(self) -> int | None:
        """The axis of the weight's outputs, for the product of data with a matrix."""
        node, shape = self.node, self.weight.shape
        if node.op_type not in PRODUCTS or shape is None or len(shape) != 2:
            return None
        if any(node.attr(name, 0) for name in ("transA", "transBatchA", "transBatchB")):
            return None
        return 0 if node.op_type != "MatMul" and node.attr("transB", 0) else 1

    def _rows(self) -> Weights | None:
        """The weight as numbers, one row for each output."""
        axis = self._outputs_axis
        weights = None if axis is None else read_weights(self.weight.tensor)
        return weights if weights is None or axis == 0 else weights.turned

    def _on_many(self, var: Value) -> Wide | None:
        """All outputs only where all are wanted."""
        axis, shape = self._outputs_axis, self.weight.shape
        if axis is None or shape is None or self.part is not None or var.dtype != np.float32:
            return None
        outputs, inputs = shape[axis], shape[1 - axis]
        if not isinstance(outputs, int) or not isinstance(inputs, int) or outputs < MANY:
            return None
        some = rows_times(self.weight.tensor, axis, self._factor)
        return None if some is None else Wide(var, inputs, some, lambda: self._plain(var))

    # -------------------------------------------------------------------- Scaled

    def _on_vector(self, var: Scaled) -> Scaled | None:
        """f(s·p, w²) = s·f(p, w²), where f mixes features only."""
        graph, node = self.node.graph, self.node
        last = node.op_type in ("MatMul", "Gemm") and var.axis == -1 and len(self._sizes) == 2
        if last and not node.attr("transA", 0):
            # A matrix for Gemm; for MatMul a vector, as the data may be one too.
            row = graph.emit("Reshape", var.profile, graph.ints(*([1] if node.op_type == "Gemm" else []), -1))
            return var.with_profile(self._plain(row))
        pointwise = node.op_type == "Conv" and var.axis == 1 and all(size == 1 for size in self._sizes[2:])
        pointwise = pointwise and set(node.attr("strides", [1])) == {1} and not any(node.attr("pads", [0]))
        if pointwise and _has_explicit_pads(node):
            position = graph.emit("Reshape", var.profile, graph.ints(1, -1, *self._sizes[2:]))
            return var.with_profile(self._plain(position, **dict.fromkeys(WINDOW)))
        return None

    def _on_one_channel(self, var: Scaled) -> Value | None:
        """A convolution of s, with the weights of each output summed over the channels that it reads."""
        node, graph = self.node, self.node.graph
        if node.op_type not in CONVOLUTIONS or var.axis != 1:
            return None
        groups, kernel = self._group, self._sizes[2:]
        ones = [1] * len(kernel)
        if node.op_type == "Conv":
            outputs, inputs = self._sizes[0] // groups, self._sizes[1]
            apart, profile, summed = (groups, outputs, inputs, *kernel), (groups, 1, inputs, *ones), 2
        else:
            inputs, outputs = self._sizes[0] // groups, self._sizes[1]
            apart, profile, summed = (groups, inputs, outputs, *kernel), (groups, inputs, 1, *ones), 1
        weights = graph.emit("Reshape", self.squared, graph.ints(*apart))
        weights = weights * graph.emit("Reshape", var.profile, graph.ints(*profile))
        weights = graph.reduce("ReduceSum", weights, [summed], keepdims=False)
        if node.op_type == "Conv":
            weights = graph.emit("Reshape", weights, graph.ints(groups * outputs, 1, *kernel))
            return self._plain(var.scale, weights, group=1)
        weights = graph.emit("Reshape", weights, graph.ints(1, groups * outputs, *kernel))
        return Upsampled(var.scale, weights, {**node.node.attrs, "group": 1})

    # ----------------------------------------------------------------- Upsampled

    def _with_upsampling(self, var: Upsampled) -> Value | None:
        """What one position spreads to behind both layers is what this one makes of the other's kernel.

        Borders allow it where the first one crops nothing: all that its kernel reaches is there to be read.
        """
        node, before = self.node, var.attrs
        if node.op_type != "Conv" or self._group != 1 or set(node.attr("strides", [1])) != {1}:
            return None
        axes = len(self._sizes) - 2
        plain = not any(before.get("pads", [0])) and set(before.get("dilations", [1])) == {1}
        plain = (
            plain and before.get("auto_pad", "NOTSET") in ("NOTSET", "VALID") and "output_shape" not in before
        )
        if not plain or not _has_explicit_pads(node):
            return None
        reach = [(size - 1) * d for size, d in zip(self._sizes[2:], node.attr("dilations", [1] * axes))]
        cropped = [r - p for r, p in zip(reach * 2, node.attr("pads", [0] * 2 * axes))]
        if min(cropped) < 0:
            return None
        kernel = self._plain(var.kernel, pads=reach * 2, auto_pad=None)
        attrs = {name: value for name, value in before.items() if name not in ("kernel_shape", "pads")}
        return node.graph.emit("ConvTranspose", var.scale, kernel, **attrs, pads=cropped)

    # ------------------------------------------------------------------- Partial

    def _axis_of_inputs(self, var: Partial) -> int | None:
        """The weight's axis that meets the one that is in parts; None if that is another one."""
        node = self.node
        if node.op_type in CONVOLUTIONS and var.axis == 1 and self._group == 1:
            return 1 if node.op_type == "Conv" else 0
        if node.op_type == "Gemm" and var.axis == 1 and not node.attr("transA", 0):
            return 1 if node.attr("transB", 0) else 0
        shape = node.inputs[0].shape
        if node.op_type == "MatMul" and len(self._sizes) == 2 and shape and var.axis == len(shape) - 1:
            return 0
        return None

    def _by_parts(self, var: Partial, axis: int) -> Value:
        """Parts that are deferred go through by themselves, the others together; `axis` is the weight's."""
        graph = self.node.graph
        terms: list[Value] = []
        tensors: list[Value] = []
        weights: list[Value] = []
        for start, end, part in var.uncertain:
            squared = graph.slice(self.squared, axis, start, end)
            if isinstance(part, Deferred):
                shape = (*self._sizes[:axis], end - start, *self._sizes[axis + 1 :])
                terms.append(replace(self, part=squared, shape=shape)(part))
            else:
                tensors.append(part)
                weights.append(squared)
        if tensors:
            joined = graph.emit("Concat", *tensors, axis=var.axis) if len(tensors) > 1 else tensors[0]
            squared = graph.emit("Concat", *weights, axis=axis) if len(weights) > 1 else weights[0]
            terms.append(self._plain(joined, squared))
        return sum(terms[1:], terms[0])


def _has_explicit_pads(node: NodeView) -> bool:
    return node.attr("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def at_conversion(
    node: NodeView, var: Scaled, rows: Callable[[], Weights | None], factor: float = 1.0
) -> Scaled | None:
    """s · (W² p) behind a layer with the rows W, as a vector of numbers; None where they are not known now."""
    graph, vector = node.graph, node.graph.vector_of(var.profile)
    if vector is None or var.axis != -1:
        return None
    weights = rows()
    if weights is None or weights.shape[1] != vector.size:
        return None
    behind = factor * weights.squares_times(vector.reshape(-1))
    return var.with_profile(
        graph.multiple(behind, f"{node.output.tensor.name}/var/profile", var.profile, var.dtype)
    )
