"""Layers with weights and averages: y = W x, so G_x = G W, which is the transposed operator on G."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from gapa_onnx.variance.covariance.registry import Cotangents, TailNode, pullback
from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.linear import require_stored_statistics
from gapa_onnx.variance.rules.view import Operand, Shape

# -------------------------------------------------------------------------- matrices


def _times(node: TailNode, g: Value, matrix: Value) -> Value:
    """G times a matrix; where G is the identity, the matrix itself."""
    return node.graph.unsqueeze(matrix, [0]) if g is node.identity else node.graph.emit("MatMul", g, matrix)


@pullback("Gemm")
def gemm(node: TailNode, g: Value) -> Cotangents:
    """y = α a B + β c: α G Bᵀ for a, β G for c"""
    a, b = node.inputs[:2]
    c = node.input(2)
    of_a = of_c = None
    if not a.certain:
        if node.attr("transA", 0):
            raise node.refuse("transA=1: its data have their samples in the second axis")
        transposed = b.mean if node.attr("transB", 0) else node.graph.emit("Transpose", b.mean, perm=[1, 0])
        of_a = _times(node, g, transposed) * node.attr("alpha", 1.0)
    if c is not None and not c.certain:
        of_c = node.summed(g * node.attr("beta", 1.0), c)
    return of_a, None, of_c


@pullback("MatMul")
def matmul(node: TailNode, g: Value) -> Cotangents:
    """y = A B: G Bᵀ for A, Aᵀ G for B"""
    a, b = node.inputs
    if b.rank == 1 < a.rank and b.certain:
        return node.graph.unsqueeze(g, [a.rank]) * b.mean
    if min(a.rank, b.rank) < 2:
        raise node.refuse("one of its factors is a vector")
    rank, stacked = node.output.rank, range(1, node.output.rank - 2)
    of_a = of_b = None
    if not a.certain:
        matrix = _transposed(node, b)
        product = _times(node, g, matrix) if rank == 2 else node.graph.emit("MatMul", g, matrix)
        of_a = node.summed(product, a, among=stacked)
    if not b.certain:
        if rank == 2:
            raise node.refuse("the axis of the samples is summed over")
        of_b = node.summed(node.graph.emit("MatMul", _transposed(node, a), g), b, among=stacked)
    return of_a, of_b


def _transposed(node: TailNode, factor: Operand) -> Value:
    """A factor with its last two axes exchanged, which broadcasts against cotangents."""
    last = factor.rank - 1
    turned = node.graph.emit("Transpose", factor.mean, perm=[*range(last - 1), last, last - 1])
    return node.lifted(factor, turned) if factor.rank > 2 else turned


@pullback("BatchNormalization")
def batch_normalization(node: TailNode, g: Value) -> Cotangents:
    """G γ / √(σ² + ε): affine with the stored statistics"""
    require_stored_statistics(node)
    x, scale, _, _, variance = node.inputs
    slope = scale.mean / (variance.mean + node.attr("epsilon", 1e-5)).sqrt()  # (c)
    return g * (node.graph.unsqueeze(slope, list(range(1, x.rank - 1))) if x.rank > 2 else slope)


# -------------------------------------------------------------------------- windows


@pullback("Conv")
def conv(node: TailNode, g: Value) -> Cotangents:
    """ConvTranspose of G with the same weights"""
    x, weights = node.inputs[:2]
    window = _Window.of(node, weights.shape[2:] if weights.shape else None)
    folded = node.graph.emit("Reshape", g, node.shape_like((-1,), node.output))
    moved = window.transposed(folded, weights.mean, group=node.attr("group", 1))
    return _unfolded(node, moved, g, x)


@pullback("ConvTranspose")
def conv_transpose(node: TailNode, g: Value) -> Cotangents:
    """Conv of G with the same weights"""
    if node.attr("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or node.attr("output_shape") is not None:
        raise node.refuse("its padding follows from auto_pad or output_shape")
    x, weights = node.inputs[:2]
    kept = ("strides", "pads", "dilations", "group", "kernel_shape")
    attrs = {name: node.attr(name) for name in kept if node.attr(name) is not None}
    folded = node.graph.emit("Reshape", g, node.shape_like((-1,), node.output))
    return _unfolded(node, node.graph.emit("Conv", folded, weights.mean, **attrs), g, x)


@pullback("AveragePool")
def average_pool(node: TailNode, g: Value) -> Cotangents:
    """G / n goes to each of the n elements of a window."""
    x, y, kernel = node.inputs[0], node.output, node.attr("kernel_shape")
    window = _Window.of(node, kernel)
    if any(window.pads) and not node.attr("count_include_pad", 0):
        g = g * node.graph.constant((1 / window.counts()).astype(g.dtype))
    else:
        g = g * (1 / prod(kernel))
    folded = node.graph.emit("Reshape", g, node.shape_like((-1, 1), y, start=2))  # each channel by itself
    ones = node.graph.constant(np.ones((1, 1, *kernel), g.dtype))
    return _unfolded(node, window.transposed(folded, ones), g, x)


def _unfolded(node: TailNode, value: Value, g: Value, x: Operand) -> Value:
    """(N C, …), as convolutions want it, as (N, C, …)."""
    lead = node.graph.slice(node.graph.shape(g), 0, 0, 2)
    return node.graph.emit("Reshape", value, node.shape_like(lead, x))


class _Window:
    """Where the windows of a convolution or pooling lie, from its attributes and the size of its input."""

    def __init__(self, node: TailNode, kernel: Sequence[int], sizes: Shape):
        axes = len(kernel)
        self.node, self.kernel, self.sizes = node, kernel, sizes
        self.strides = list(node.attr("strides") or [1] * axes)
        self.dilations = list(node.attr("dilations") or [1] * axes)
        self.reach = [(k - 1) * d + 1 for k, d in zip(kernel, self.dilations)]
        self.pads = self._pads(node.attr("auto_pad", "NOTSET"))
        self.left_over = [self._left_over(axis) for axis in range(axes)]
        if node.attr("ceil_mode", 0) and any(self.left_over):
            raise node.refuse("ceil_mode=1: its last windows reach beyond the input")

    @classmethod
    def of(cls, node: TailNode, kernel: Sequence[int | str | None] | None) -> _Window:
        x = node.inputs[0]
        known = [size for size in kernel or () if isinstance(size, int)]
        if kernel is None or len(known) < len(kernel):
            raise node.refuse("the size of its kernel is not known")
        return cls(node, known, x.shape[2:] if x.shape is not None else (None,) * len(kernel))

    def _size(self, axis: int) -> int:
        size = self.sizes[axis]
        if not isinstance(size, int):
            raise self.node.refuse(f"the size of axis {axis + 2} of its input is not known")
        return size

    def _pads(self, auto_pad: str) -> list[int]:
        """All the begins, then all the ends."""
        axes = range(len(self.kernel))
        if auto_pad == "NOTSET":
            return list(self.node.attr("pads") or [0] * 2 * len(axes))
        if auto_pad == "VALID":
            return [0] * 2 * len(axes)
        totals = []
        for axis in axes:
            stride, reach = self.strides[axis], self.reach[axis]
            short = 0 if stride == 1 else -self._size(axis) % stride  # of a multiple of the stride
            totals.append(max(reach - stride + short, 0))
        less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
        return less + more if auto_pad == "SAME_UPPER" else more + less

    def _left_over(self, axis: int) -> int:
        """Elements at the end that no window reaches."""
        if self.strides[axis] == 1:
            return 0
        before, after = self.pads[axis], self.pads[axis + len(self.kernel)]
        return int((self._size(axis) + before + after - self.reach[axis]) % self.strides[axis])

    def transposed(self, value: Value, weights: Value, **attrs: Any) -> Value:
        """What the windows took, put back."""
        return value.graph.emit(
            "ConvTranspose",
            value,
            weights,
            kernel_shape=list(self.kernel),
            strides=self.strides,
            dilations=self.dilations,
            pads=self.pads,
            output_padding=self.left_over,
            **attrs,
        )

    def counts(self) -> np.ndarray:
        """How many elements each window has that are not padding."""
        total = np.ones(())
        for axis, (k, stride, dilation) in enumerate(zip(self.kernel, self.strides, self.dilations)):
            size, before, after = self._size(axis), self.pads[axis], self.pads[axis + len(self.kernel)]
            starts = np.arange(0, size + before + after - self.reach[axis] + 1, stride) - before
            places = starts[:, None] + dilation * np.arange(k)  # (windows, k)
            total = np.multiply.outer(total, ((places >= 0) & (places < size)).sum(axis=1))
        return total
