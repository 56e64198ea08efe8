"""Operators that move elements: G moves back. What a node left out, or filled in, has a cotangent of 0."""

from __future__ import annotations

from math import prod

import numpy as np

from gapa_onnx.variance.covariance.registry import Cotangents, TailNode, pullback
from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.view import Operand

# --------------------------------------------------------------------------- reshaping


@pullback("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(node: TailNode, g: Value) -> Cotangents:
    """Reshape back; each sample must stay a sample."""
    x, y = node.inputs[0], node.output
    if not _keeps_samples(node, x, y):
        raise node.refuse("it is not known to keep the samples in the first axis")
    return node.reshaped(g, x)


def _keeps_samples(node: TailNode, x: Operand, y: Operand) -> bool:
    """Elements keep their order, so it is enough that the first axis keeps its size."""
    first = [operand.shape[0] if operand.shape else None for operand in (x, y)]
    if first[0] is not None and first[0] == first[1]:
        return True
    if node.op_type == "Flatten":
        return int(node.attr("axis", 1)) % (x.rank + 1) == 1
    given = node.input(1)
    asked = node.attr("axes") if given is None else given.constant
    if asked is None or x.shape is None:
        return False
    asked = [int(number) for number in asked]
    if node.op_type == "Squeeze":
        return bool(asked) and all(axis % x.rank for axis in asked)
    if node.op_type == "Unsqueeze":
        return all(axis % (x.rank + len(asked)) for axis in asked)
    return _target_keeps_samples(node, x, asked)


def _target_keeps_samples(node: TailNode, x: Operand, target: list[int]) -> bool:
    """A Reshape keeps the first axis by name, or by as many elements behind it as there were."""
    if target[0] == 0 and not node.attr("allowzero", 0):
        return True
    after = [x.sizes[i] if size == 0 and i < x.rank else size for i, size in enumerate(target)][1:]
    before = x.sizes[1:]
    elements = [[size for size in sizes if isinstance(size, int)] for sizes in (before, after)]
    known = len(elements[0]) == len(before) and len(elements[1]) == len(after) and -1 not in after
    return known and prod(elements[0]) == prod(elements[1])


@pullback("Transpose")
def transpose(node: TailNode, g: Value) -> Cotangents:
    """Transpose back"""
    perm = node.attr("perm") or list(range(node.output.rank))[::-1]
    if perm[0] != 0:
        raise node.refuse("it moves the axis of the samples")
    return node.graph.emit("Transpose", g, perm=[0, *(int(p) + 1 for p in np.argsort(perm))])


@pullback("Expand")
def expand(node: TailNode, g: Value) -> Cotangents:
    """The sum over all copies"""
    return node.summed(g, node.inputs[0], beside=[node.output])


# ----------------------------------------------------------------------- parts of an axis


def _placed(node: TailNode, g: Value, axis: int, before: int, after: int) -> Value:
    """G between zeros along an axis of the tensor."""
    if before == after == 0:
        return g
    rank = node.inputs[0].rank + 1
    pads = [0] * 2 * rank
    pads[axis + 1], pads[axis + 1 + rank] = before, after
    if node.opset < 11:
        return node.graph.emit("Pad", g, pads=pads)
    return node.graph.emit("Pad", g, node.graph.ints(*pads))


@pullback("Concat")
def concat(node: TailNode, g: Value) -> Cotangents:
    """To each input its own part of G"""
    axis = node.axis(node.attr("axis", 1), node.output)
    found, start = [], 0
    for operand in node.inputs:
        end = start + node.size(operand, axis)
        found.append(None if operand.certain else node.graph.slice(g, axis + 1, start, end))
        start = end
    return tuple(found)


@pullback("Split", several=True)
def split(node: TailNode, g: Value) -> Cotangents:
    """The parts of G side by side"""
    axis = node.axis(node.attr("axis", 0), node.inputs[0])
    total = node.size(node.inputs[0], axis)
    found, start = None, 0
    for operand, part in zip(node.outputs, node.cotangents):
        size = node.size(operand, axis)
        if part is not None:
            placed = _placed(node, part, axis, start, total - start - size)
            found = placed if found is None else found + placed
        start += size
    return found


@pullback("Slice")
def slice_(node: TailNode, g: Value) -> Cotangents:
    """G between zeros"""
    x = node.inputs[0]
    starts, ends, axes, steps = _bounds(node)
    for start, end, axis, step in zip(starts, ends, axes, steps):
        if axis % x.rank == 0 and (start, step) == (0, 1) and end >= np.iinfo(np.int32).max:
            continue  # all samples
        axis = node.axis(axis, x)
        size = node.size(x, axis)
        if step != 1:
            raise node.refuse("its steps are not 1")
        start, end, _ = slice(start, end).indices(size)
        g = _placed(node, g, axis, start, size - max(end, start))
    return g


def _bounds(node: TailNode) -> list[list[int]]:
    """Starts, ends, axes and steps; they are inputs from opset 10 on."""
    found = []
    for position, name in enumerate(("starts", "ends", "axes", "steps"), start=1):
        operand = node.input(position)
        values = node.attr(name) if operand is None else operand.constant
        if operand is not None and values is None:
            raise node.refuse("its bounds are not constant")
        found.append(None if values is None else [int(value) for value in values])
    starts, ends, axes, steps = found
    if starts is None or ends is None:
        raise node.refuse("its bounds are not stated")
    return [starts, ends, axes or list(range(len(starts))), steps or [1] * len(starts)]


@pullback("Pad")
def pad(node: TailNode, g: Value) -> Cotangents:
    """The part of G that is not padding"""
    x = node.inputs[0]
    if node.attr("mode", "constant") != "constant":
        raise node.refuse("it pads with elements of its input")
    pads = node.attr("pads") if node.opset < 11 else node.inputs[1].constant
    chosen = node.input(3)
    axes = chosen.constant if chosen is not None else range(x.rank)
    if pads is None or axes is None:
        raise node.refuse("its pads are not constant")
    for position, axis in enumerate(axes):
        before, after = int(pads[position]), int(pads[position + len(axes)])
        if before == after == 0:
            continue
        axis = node.axis(int(axis), x)
        if before < 0 or after < 0:
            raise node.refuse("it crops: a pad is negative")
        g = node.graph.slice(g, axis + 1, before, -after if after else None)
    return g


@pullback("Gather")
def gather(node: TailNode, g: Value) -> Cotangents:
    """G S, with S (k, size) that is 1 where an index points: what is picked twice adds up."""
    x, indices = node.inputs
    axis = node.axis(node.attr("axis", 0), x)
    if indices.rank > 1:
        raise node.refuse("its indices have more than one axis")
    graph, behind = node.graph, x.rank - axis - 1
    selection = _selection(node, x, indices, axis)
    if indices.rank == 0:
        places = graph.emit("Reshape", selection, graph.ints(-1, *[1] * behind))
        return graph.unsqueeze(g, [axis + 1]) * places
    turned = [*(a for a in range(x.rank + 1) if a != axis + 1), axis + 1]
    picked = graph.emit("MatMul", graph.emit("Transpose", g, perm=turned), selection)
    return graph.emit("Transpose", picked, perm=[int(a) for a in np.argsort(turned)])


def _selection(node: TailNode, x: Operand, indices: Operand, axis: int) -> Value:
    """(k, size), 1 where the index is the place."""
    graph, size = node.graph, x.sizes[axis]
    if indices.constant is not None and isinstance(size, int):
        rows = np.eye(size, dtype=node.output.dtype)[np.atleast_1d(indices.constant)]
        return graph.constant(rows)
    if node.opset < 11:
        raise node.refuse("before opset 11 its indices and the size of the axis must be known")
    length = graph.dimension(x.raw, axis)
    index = graph.cast(graph.emit("Reshape", indices.raw, graph.ints(-1, 1)), np.int64)
    index = index + length * (index < 0)  # counted from the end
    return graph.cast(graph.emit("Equal", index, graph.positions(length), dtype=np.bool_), node.output.dtype)
