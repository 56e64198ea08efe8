"""A layer with a certain weight, on a variance that is not written out yet: what can be done at load is.

For y = f(x, w) with Var x in one of the forms of `values`,

    Scaled, f mixes features only     s · f(p, w²)                    only the vector changes
    Scaled, f is a convolution        f(s, Σ_c w²_c p_c)              one channel is read
    Upsampled, f is a convolution     s spread by f(kernel, w²)       two layers in one
    Partial                           Σ over parts of f(v, w² of it)  zeros are not read

and f(v, w²) else. Everything beside s and v follows from constants, and onnxruntime folds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gapa_onnx.variance.rules.view import NodeView, Operand
from gapa_onnx.variance.values import Deferred, Partial, Scaled, Upsampled, Value

WINDOW = ("kernel_shape", "strides", "pads", "dilations", "auto_pad")
CONVOLUTIONS = ("Conv", "ConvTranspose")


@dataclass(frozen=True)
class Layer:
    """f( · , w²): a node with its squared weight, or with some of that weight's inputs.

    Parameters
    ----------
    squared: the squared weight.
    shape: of the weight, None where it is not a constant: then nothing can be done at load.
    further: inputs behind the weight.
    changed: attributes that are other than the source's.
    """

    node: NodeView
    squared: Value
    shape: tuple[int, ...] | None
    further: Sequence[Value] = ()
    changed: dict[str, float] | None = None

    @staticmethod
    def of(node: NodeView, weight: Operand, further: Sequence[Value], changed: dict[str, float]) -> Layer:
        shape = weight.shape or ()
        sizes = tuple(size for size in shape if isinstance(size, int))
        known = weight.shape is not None and len(sizes) == len(shape) and weight.mean.is_constant
        return Layer(node, weight.mean.squared, sizes if known else None, further, changed)

    def __call__(self, var: Value) -> Value:
        """The variance behind the layer, from the one before it."""
        found: Value | None = None
        if self.shape is not None and isinstance(var, Scaled):
            found = self._on_vector(var) or self._on_one_channel(var)
        elif self.shape is not None and isinstance(var, Upsampled):
            found = self._with_upsampling(var)
        elif self.shape is not None and isinstance(var, Partial):
            axis = self._axis_of_inputs(var)
            found = None if axis is None else self._by_parts(var, axis)
        return self._plain(var) if found is None else found

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
                terms.append(replace(self, squared=squared, shape=shape)(part))
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
