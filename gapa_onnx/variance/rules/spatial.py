"""Operators that resample or rearrange space. Each is linear in its data, y = W x, with weights W that
do not depend on it, so v_y = W² v, squared element by element.

Interpolation along several axes is a product of one-dimensional ones, and so are its squared weights.
The weights of one axis are what the operator itself makes of an identity matrix: whatever its mode,
coordinates, antialiasing or treatment of borders, nothing is computed a second time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.registry import Accuracy, refused, rule, structural
from gapa_onnx.variance.rules.view import NodeView, Operand

EXACT = Accuracy.EXACT

structural("MaxUnpool", "CenterCropPad")  # what they fill in is zero, and certain

refused("it does not tell which element each maximum came from", "MaxRoiPool")


@rule("Col2Im", accuracy=EXACT)
def col2im(node: NodeView) -> Value:
    """The same node on the variance: each element is added to one place."""
    return node.again(node.inputs[0].var, *(operand.raw for operand in node.inputs[1:]))


# ------------------------------------------------------------------------- Resize


@rule("Resize", "Upsample", accuracy=EXACT)
def resize(node: NodeView) -> Value:
    """Σ w² v with the interpolation weights w; nearest: the same node on the variance."""
    x, parameters = node.inputs[0], node.inputs[1:]
    if any(not operand.certain for operand in parameters):
        raise node.refuse("its scales, sizes or region are uncertain")
    if node.attr("mode", "nearest") == "nearest":
        kept = [operand.raw if operand.present else None for operand in parameters]
        return node.again(x.var, *kept, **_outside(node))
    var = x.variance
    for axis, position in _resized_axes(node):
        var = _resize_axis(node, var, axis, position)
    return var


def _outside(node: NodeView) -> dict[str, float]:
    """What lies outside the region is a constant, and certain."""
    return {} if node.attr("extrapolation_value") is None else {"extrapolation_value": 0.0}


def _resize_axis(node: NodeView, var: Value, axis: int, position: int) -> Value:
    """Σ_i w_oi² v_i along one axis."""
    graph, rank = node.graph, node.inputs[0].rank
    if axis == rank - 2:
        return graph.emit("MatMul", _axis_weights(node, axis, position, rows=True).squared, var)
    weights = _axis_weights(node, axis, position, rows=False).squared
    if axis == rank - 1:
        return graph.emit("MatMul", var, weights)
    swap = list(range(rank))
    swap[axis], swap[-1] = swap[-1], swap[axis]
    last = graph.emit("Transpose", var, perm=swap)
    return graph.emit("Transpose", graph.emit("MatMul", last, weights), perm=swap)


def _axis_weights(node: NodeView, axis: int, position: int, rows: bool) -> Value:
    """The node on an identity matrix, resized along its rows (out, in) or its columns (in, out).

    Scales, sizes and region are those of the axis, which stand at `position` in the source's.
    """
    graph = node.graph
    size = _size(node, axis)
    eye = graph.eye(size, node.inputs[0].dtype)
    roi, scales, sizes = _parameters(node)
    attrs = _outside(node) | {"axes": None}

    def both(of_axis: Value, unchanged: Value) -> Value:
        return graph.emit("Concat", *((of_axis, unchanged) if rows else (unchanged, of_axis)), axis=0)

    def pick(operand: Operand | None, at: int) -> Value:
        if operand is None:
            raise node.refuse("its scales or its region are left out")
        return graph.emit("Gather", operand.raw, graph.ints(at), axis=0)

    if node.op_type == "Upsample" and node.opset < 9:
        scale = float(node.attr("scales")[position])
        return node.again(eye, scales=[scale, 1.0] if rows else [1.0, scale])
    one = np.ones(1, np.float32)
    if node.opset < 11:
        return node.again(eye, both(pick(scales, position), graph.constant(one)))
    region = graph.constant(np.zeros(0, np.float32))
    if _crops(node):
        count = len(node.attr("axes", ())) or node.inputs[0].rank
        start, end = (
            both(pick(roi, at), graph.constant(np.full(1, whole, node.inputs[1].tensor.dtype)))
            for at, whole in ((position, 0), (position + count, 1))
        )
        region = graph.emit("Concat", start, end, axis=0)
    if sizes is None:
        return node.again(eye, region, both(pick(scales, position), graph.constant(one)), **attrs)
    if node.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise node.refuse("keep_aspect_ratio_policy: the scale of one axis depends on the sizes of all")
    # Before opset 13 the scales cannot be left out.
    no_scales = graph.constant(np.zeros(0, np.float32)) if node.opset < 13 else None
    return node.again(eye, region, no_scales, both(pick(sizes, position), size), **attrs)


def _size(node: NodeView, axis: int) -> Value:
    x = node.inputs[0]
    if node.opset >= 9:
        return node.graph.dimension(x.raw, axis)
    size = x.sizes[axis]
    if not isinstance(size, int):
        raise node.refuse(
            f"before opset 9 the size of axis {axis} must be known: no identity matrix otherwise"
        )
    return node.graph.ints(size)


def _parameters(node: NodeView) -> tuple[Operand | None, Operand | None, Operand | None]:
    """Region, scales and sizes; before opset 11 there are only scales. Empty ones count as left out."""
    if node.opset < 11:
        return None, node.input(1), None
    roi, scales, sizes = node.input(1), node.input(2), node.input(3)
    return roi, None if sizes is not None else scales, sizes


def _crops(node: NodeView) -> bool:
    return bool(node.attr("coordinate_transformation_mode") == "tf_crop_and_resize")


def _resized_axes(node: NodeView) -> Iterator[tuple[int, int]]:
    """The axes that may change, each with its position among the scales or sizes."""
    x, output = node.inputs[0], node.output
    roi, scales, sizes = _parameters(node)
    factors = node.attr("scales") if scales is None else scales.constant
    axes = [axis % x.rank for axis in node.attr("axes", None) or range(x.rank)]
    for position, axis in enumerate(axes):
        if sizes is None:
            unchanged = factors is not None and factors[position] == 1
        else:
            after, size = output.shape or (), x.sizes[axis]
            unchanged = len(after) == x.rank and size is not None and size == after[axis]
        if _crops(node):
            region = None if roi is None else roi.constant
            unchanged &= region is not None and (region[position], region[position + len(axes)]) == (0, 1)
        if not unchanged:
            yield axis, position


# ---------------------------------------------------------------------- AffineGrid


@rule("AffineGrid", accuracy=EXACT)
def affine_grid(node: NodeView) -> Value:
    """The grid is θ (p, 1) at positions p, so Σ_j p_j² v_θij + v_θi,last."""
    theta, size = node.inputs
    graph, axes = node.graph, node.output.rank - 2
    identity = graph.constant(np.eye(axes, axes + 1, dtype=theta.dtype)[None])
    positions = node.again(graph.expand(identity, like=theta.raw), size.raw)  # (N, H, W, axes)
    between = list(range(1, axes + 1))
    linear = graph.unsqueeze(graph.slice(theta.variance, 2, 0, axes), between)  # (N, 1, 1, axes, axes)
    column = graph.emit("Gather", theta.var, graph.constant(np.int64(axes)), axis=2)
    shift = graph.unsqueeze(column, between)  # (N, 1, 1, axes)
    squares = graph.unsqueeze(positions.squared, [axes + 1])  # (N, H, W, 1, axes)
    return graph.reduce("ReduceSum", linear * squares, [axes + 2], keepdims=False) + shift
