"""Variances of chosen elements along the last axis, without those of all the others.

    Scaled      s · p                 the elements of p at the indices, times s
    Wide        v · w²                the rows of w at the indices, position by position
    else        the elements themselves

For tokens: of a vocabulary a few hundred logits count, and a variance of all of them would take a second head.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.loops import loop
from gapa_onnx.variance.values import Scaled, Wide

Some = Callable[[VarianceGraph, Value, Value], Value]


def chosen(graph: VarianceGraph, var: Value, indices: Value, axis: int, rank: int, name: str) -> Value:
    """The variances at indices (int64) along an axis, in the shape of the indices; `name` is for a loop's tensors."""
    if isinstance(var, Scaled) and axis == rank - 1 and var.axis == -1:
        # Single numbers are faster by GatherElements than by Gather, which copies blocks.
        profile, places = (graph.emit("Reshape", value, graph.ints(-1)) for value in (var.profile, indices))
        found = graph.emit("GatherElements", profile, places, axis=0)
        return var.scale * graph.reshape(found, graph.shape(indices))
    if isinstance(var, Wide) and axis == rank - 1:
        return _by_position(graph, var, indices, name)
    return graph.emit("GatherElements", var, indices, axis=axis)


def _by_position(graph: VarianceGraph, wide: Wide, indices: Value, name: str) -> Value:
    """One position after another, so that no more than the rows of one are held at a time."""
    shape = graph.shape(indices)
    places = graph.emit(
        "Reshape", indices, graph.emit("Concat", graph.ints(-1), graph.slice(shape, 0, -1, None), axis=0)
    )
    before = graph.emit("Reshape", wide.var, graph.ints(-1, wide.inputs))
    count = graph.emit("Gather", graph.shape(places), graph.constant(np.asarray(0, np.int64)), axis=0)

    def step(inner: VarianceGraph, number: Value, states: list[Value]) -> tuple[list[Value], list[Value]]:
        own, row = (inner.emit("Gather", inner.adopt(value), number, axis=0) for value in (places, before))
        return [], [wide.some(inner, row, own)]

    _, (found,) = loop(graph, count, [], step, name, ranks=(1,))
    return graph.reshape(found, shape)


def rows_times(weight: gs.Tensor, axis: int, factor: float) -> Some | None:
    """How Σ_d w²_vd v_d is emitted for some outputs v, which are on this axis of a matrix."""
    rows = _rows(weight, axis)
    if rows is None:
        return None

    def some(graph: VarianceGraph, var: Value, indices: Value) -> Value:
        weights, turned = rows(graph, indices)
        column = graph.emit("Reshape", var * factor, graph.ints(*((1, -1) if turned else (-1, 1))))
        both = (column, weights.squared) if turned else (weights.squared, column)
        return graph.emit("Reshape", graph.emit("MatMul", *both), graph.ints(-1))

    return some


Rows = Callable[[VarianceGraph, Value], tuple[Value, bool]]
"""(graph, indices (k,)) -> these outputs of a matrix in float32, and whether they are its columns: (d, k)."""


def _rows(tensor: gs.Tensor, axis: int) -> Rows | None:
    """Where they are read: in front of a Transpose, and in whole numbers where the matrix is quantised."""
    node = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    if node is not None and node.op == "Transpose" and list(node.attrs.get("perm", [1, 0])) == [1, 0]:
        return _rows(node.inputs[0], 1 - axis)
    if node is not None and node.op == "DequantizeLinear":
        return _quantised_rows(node, axis)
    if isinstance(tensor.dtype, int):
        return None
    dtype = np.dtype(tensor.dtype or np.float32)

    def rows(graph: VarianceGraph, indices: Value) -> tuple[Value, bool]:
        found = graph.emit("Gather", graph.tensor(tensor.name, dtype), indices, axis=axis)
        return graph.cast(found, np.float32), axis == 1

    return rows


def _quantised_rows(node: gs.Node, axis: int) -> Rows | None:
    """(q - z) s; None where scales are those of blocks, or where they are on the axis of the inputs."""
    steps = _rows(node.inputs[0], axis)
    parameters = [tensor for tensor in node.inputs[1:] if tensor.name]
    single = all(_is_one(tensor) for tensor in parameters)
    if steps is None or not (single or _are_along(node, parameters, axis)):
        return None

    def rows(graph: VarianceGraph, indices: Value) -> tuple[Value, bool]:
        found, turned = steps(graph, indices)
        at = None if single else indices
        scale, *zero = (_along_rows(graph, tensor, at, turned) for tensor in parameters)
        return (found - zero[0] if zero else found) * scale, turned

    return rows


def _is_one(tensor: gs.Tensor) -> bool:
    return tensor.shape is not None and int(np.prod(tensor.shape)) == 1


def _are_along(node: gs.Node, parameters: list[gs.Tensor], axis: int) -> bool:
    """Whether a DequantizeLinear of a matrix has one scale for each index of an axis."""
    vectors = all(tensor.shape is not None and len(tensor.shape) == 1 for tensor in parameters)
    return vectors and not node.attrs.get("block_size", 0) and int(node.attrs.get("axis", 1)) % 2 == axis


def _along_rows(graph: VarianceGraph, tensor: gs.Tensor, indices: Value | None, turned: bool) -> Value:
    """A scale or zero point of the rows at indices, or of all of them for None, in a shape that goes with these."""
    value = graph.tensor(tensor.name, np.dtype(tensor.dtype or np.float32))
    value = value if indices is None else graph.emit("Gather", value, indices, axis=0)
    value = graph.cast(value, np.float32)
    return graph.emit("Reshape", value, graph.ints(*((1, -1) if turned else (-1, 1))))
