"""Sums, means, norms and maxima over axes or windows: each element of x has its share in G."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from gapa_onnx.variance.covariance.registry import Cotangents, TailNode, pullback
from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules import TABLE, Rule
from gapa_onnx.variance.rules.reduction import constant_axes
from gapa_onnx.variance.rules.registry import Gathered, Share


def _axes(node: TailNode) -> list[int]:
    """Counted from the front; empty where nothing is reduced."""
    x = node.inputs[0]
    if node.op_type.startswith("Global"):
        return list(range(2, x.rank))
    return [node.axis(axis, x) for axis in constant_axes(node)]


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
    x, axes = node.inputs[0], _axes(node)
    g = _with_axes(node, g, axes)
    sizes = [x.sizes[axis] for axis in axes]
    known = [size for size in sizes if isinstance(size, int)]
    n: Value | float
    if len(known) == len(sizes):
        n = prod(known)
    else:
        n = node.graph.count(x.raw, g.dtype) / node.graph.count(node.output.raw, g.dtype)
    return node.spread(g / n, x)


def _define(op_type: str, domain: str, share: Share) -> None:
    @pullback(op_type, domain=domain)
    def reduction(node: TailNode, g: Value) -> Cotangents:
        """G ∂y/∂x_j for each element, from the slopes of the rule table"""
        graph, x, axes = node.graph, node.inputs[0], _axes(node)
        kept = bool(node.attr("keepdims", 1)) or not axes

        def whole() -> Value:
            return node.output.mean if kept else graph.unsqueeze(node.output.mean, sorted(axes))

        def total(value: Value) -> Value:
            return graph.reduce("ReduceSum", value, axes) if axes else value

        slope = graph.unsqueeze(share(Gathered(x.mean, whole, total)), [1])
        return _with_axes(node, g, axes) * slope


for (_domain, _op_type), _entry in TABLE.items():
    if isinstance(_entry, Rule) and _entry.share is not None:
        _define(_op_type, _domain, _entry.share)


@pullback("MaxPool")
def max_pool(node: TailNode, g: Value) -> Cotangents:
    """G for the element that each maximum came from"""
    x, graph = node.inputs[0], node.graph
    kernel = node.attr("kernel_shape")
    apart = all(size <= stride for size, stride in zip(kernel, node.attr("strides") or [1] * len(kernel)))
    if node.opset < (11 if apart else 16):
        raise node.refuse(f"before opset {11 if apart else 16} its windows cannot be put back")
    both = (x.raw.dtype, np.dtype(np.int64))
    _, where = node.again_several(x.raw, outputs=2, dtypes=both, storage_order=0)  # places in the whole of x
    size = graph.reduce("ReduceProd", graph.slice(graph.shape(x.raw), 0, 2, None), [0])
    where = where - where / size * size  # in the channel
    lead = [graph.dimension(x.raw, 0), graph.dimension(g, 1), graph.dimension(x.raw, 1)]
    taken = graph.reduce("ReduceProd", graph.slice(graph.shape(node.output.raw), 0, 2, None), [0])
    of_windows, of_elements = (graph.emit("Concat", *lead, end, axis=0) for end in (taken, size))
    zeros = graph.emit("Expand", graph.constant(np.zeros(1, g.dtype)), of_elements)
    updates = graph.emit("Expand", graph.emit("Reshape", g, graph.ints(0, 0, 0, -1)), of_windows)
    places = graph.unsqueeze(graph.emit("Reshape", where, graph.ints(0, 0, -1)), [1])
    places = graph.emit("Expand", places, of_windows)  # (N, C, c, windows)
    adding: dict[str, Any] = {} if apart else {"reduction": "add"}
    back = graph.emit("ScatterElements", zeros, places, updates, axis=3, **adding)
    return node.reshaped(back, x)
