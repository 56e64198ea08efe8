"""Sums, means, norms and maxima over axes or windows: each element of x has its share in G."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from gapa_onnx.variance.covariance.registry import Cotangents, TailNode, pullback
from gapa_onnx.variance.graph import Value


def _axes(node: TailNode) -> list[int]:
    """Counted from the front; empty where nothing is reduced."""
    x, axes = node.inputs[0], node.attr("axes")
    if node.input(1) is not None:
        axes = node.input(1).constant
        if axes is None:
            raise node.refuse("its axes are not constant")
    if axes is None or len(axes) == 0:
        axes = [] if node.attr("noop_with_empty_axes", 0) else range(x.rank)
    return [node.axis(int(axis), x) for axis in axes]


def _with_axes(node: TailNode, g: Value, axes: list[int]) -> Value:
    """Reduced axes stand as axes of size 1."""
    kept = node.attr("keepdims", 1) or not axes
    return g if kept else node.graph.unsqueeze(g, sorted(axis + 1 for axis in axes))


@pullback("ReduceSum")
def reduce_sum(node: TailNode, g: Value) -> Cotangents:
    """G for each element of the sum"""
    return node.spread(_with_axes(node, g, _axes(node)), node.inputs[0])


@pullback("ReduceMean", "GlobalAveragePool")
def mean(node: TailNode, g: Value) -> Cotangents:
    """G / n for each of the n elements"""
    x = node.inputs[0]
    axes = list(range(2, x.rank)) if node.op_type == "GlobalAveragePool" else _axes(node)
    if node.op_type == "ReduceMean":
        g = _with_axes(node, g, axes)
    sizes = [x.shape[axis] for axis in axes]
    if all(isinstance(size, int) for size in sizes):
        n = prod(sizes)
    else:
        n = node.graph.count(x.raw, g.dtype) / node.graph.count(node.output.raw, g.dtype)
    return node.spread(g / n, x)


def _define(op_type: str, derivative: Callable[[Value, Value], Value]) -> None:
    @pullback(op_type)
    def reduction(node: TailNode, g: Value) -> Cotangents:
        """G ∂y/∂x, from y with its reduced axes and x"""
        x, y, axes = node.inputs[0], node.output.mean, _axes(node)
        if axes and not node.attr("keepdims", 1):
            y = node.graph.unsqueeze(y, sorted(axes))
        return _with_axes(node, g, axes) * node.graph.unsqueeze(derivative(y, x.mean), [1])


_define("ReduceSumSquare", lambda y, x: 2 * x)
_define("ReduceL1", lambda y, x: (x > 0) - (x < 0))
_define("ReduceL2", lambda y, x: x / (y + (y <= 0)))  # a norm of 0 has no slope
_define("ReduceLogSum", lambda y, x: x.graph.expand((-y).exp(), like=x))
_define("ReduceLogSumExp", lambda y, x: (x - y).exp())


@pullback("ReduceMax", "ReduceMin", "GlobalMaxPool")
def extremum(node: TailNode, g: Value) -> Cotangents:
    """G for the element that the extremum came from; those that tie share it."""
    x, pool = node.inputs[0], node.op_type == "GlobalMaxPool"
    axes = list(range(2, x.rank)) if pool else _axes(node)
    if not axes:
        return g
    largest = node.graph.reduce("ReduceMax" if pool else node.op_type, x.mean, axes)
    chosen = x.mean <= largest if node.op_type == "ReduceMin" else x.mean >= largest
    share = chosen / node.graph.reduce("ReduceSum", chosen, axes)
    return (g if pool else _with_axes(node, g, axes)) * node.graph.unsqueeze(share, [1])


@pullback("MaxPool")
def max_pool(node: TailNode, g: Value) -> Cotangents:
    """G for the element that each maximum came from"""
    x, graph = node.inputs[0], node.graph
    kernel = node.attr("kernel_shape")
    apart = all(size <= stride for size, stride in zip(kernel, node.attr("strides") or [1] * len(kernel)))
    if node.opset < (11 if apart else 16):
        raise node.refuse(f"before opset {11 if apart else 16} its windows cannot be put back")
    _, where = node.again_several(x.raw, outputs=2, storage_order=0)  # places in the whole of x
    where.dtype = np.dtype(np.int64)
    size = graph.reduce("ReduceProd", graph.slice(graph.shape(x.raw), 0, 2, None), [0])
    where = where - where / size * size  # in the channel
    lead = [graph.dimension(x.raw, 0), graph.dimension(g, 1), graph.dimension(x.raw, 1)]
    taken = graph.reduce("ReduceProd", graph.slice(graph.shape(node.output.raw), 0, 2, None), [0])
    of_windows, of_elements = (graph.emit("Concat", *lead, end, axis=0) for end in (taken, size))
    zeros = graph.emit("Expand", graph.constant(np.zeros(1, g.dtype)), of_elements)
    updates = graph.emit("Expand", graph.emit("Reshape", g, graph.ints(0, 0, 0, -1)), of_windows)
    places = graph.unsqueeze(graph.emit("Reshape", where, graph.ints(0, 0, -1)), [1])
    places = graph.emit("Expand", places, of_windows)  # (N, C, c, windows)
    adding = {} if apart else {"reduction": "add"}
    back = graph.emit("ScatterElements", zeros, places, updates, axis=3, **adding)
    return node.reshaped(back, x)
