"""Operators that read an image at given positions: each output is Σ w x over a few pixels, the taps of an
interpolation, so v_y = Σ w² v.

Linear interpolation at a fraction f between two pixels is squared by moving it: the node itself weighs
with (1 - f)² / s and f² / s if it reads at f² / s instead, where s = (1 - f)² + f²; the result times s.

Other interpolations are written out. Along each axis a tap has a pixel p and a weight c. Taps that fall on the same pixel (at a border, or
where samples lie close) add before they are squared; the first of them then stands for all. A pixel of
the image is a choice of one tap per axis, and its squared weight is the product of theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.registry import Accuracy, rule
from gapa_onnx.variance.rules.view import NodeView

EXACT, HEURISTIC = Accuracy.EXACT, Accuracy.HEURISTIC
CUBIC = -0.75  #: the parameter of cubic convolution that GridSample fixes
MOST_SAMPLES = 4  #: of RoiAlign's samples per axis; (2 · 4)² pixels are gathered per output


@dataclass(frozen=True)
class Tap:
    """One pixel that an interpolation reads along one axis."""

    pixel: Value  #: a whole number, in floating point
    weight: Value


def _squared(taps: Sequence[Tap]) -> list[Tap]:
    """The taps with squared weights: Σ over pixels (Σ over taps on the pixel c)²."""
    result = []
    for k, tap in enumerate(taps):
        total, others_before = tap.weight, []
        for other_k, other in enumerate(taps):
            if other_k != k:
                same = (tap.pixel - other.pixel).abs() < 0.5
                total = total + same * other.weight
                if other_k < k:
                    others_before.append(1 - same)
        result.append(Tap(tap.pixel, prod(others_before, start=total.squared)))
    return result


def _length(node: NodeView, axis: int) -> Value:
    """The size of an axis of the image, in floating point."""
    x = node.inputs[0]
    return node.graph.cast(node.graph.dimension(x.raw, axis), x.dtype)


def _between(node: NodeView, value: Value, low: float, high: Value) -> Value:
    return node.graph.emit("Min", node.graph.at_least(value, low), high)


def _moved(position: Value) -> tuple[Value, Value]:
    """Where to read so that linear weights are the squared ones but for a factor, and the factor."""
    whole = position.graph.emit("Floor", position)
    f = position - whole
    factor = f.squared + (1 - f).squared
    return whole + f.squared / factor, factor


# ---------------------------------------------------------------------- GridSample


@rule("GridSample", accuracy=EXACT)
def grid_sample(node: NodeView) -> Value:
    """Σ w² v with the interpolation weights w; nearest: the same node on the variance."""
    x, grid = node.inputs
    if not grid.certain:
        raise node.refuse("its grid is uncertain")
    mode = node.attr("mode", "linear" if node.opset >= 20 else "bilinear")
    if mode == "nearest":
        return node.again(x.var, grid.mean)
    axes = range(2, x.rank)
    positions = [_position(node, axis) for axis in axes]
    if mode in ("linear", "bilinear"):
        inside = [_brought_back(node, position, axis) for position, axis in zip(positions, axes)]
        places, factors = zip(*(_moved(position) for position in inside))
        return _read(node, places, mode) * _over_channels(node, factors)
    taps = [_squared(_cubic_taps(node, position, axis)) for position, axis in zip(positions, axes)]
    terms = [
        _read(node, [tap.pixel for tap in pixel], "nearest") * _over_channels(node, [t.weight for t in pixel])
        for pixel in itertools.product(*taps)
    ]
    return sum(terms[1:], terms[0])


def _read(node: NodeView, places: Sequence[Value], mode: str) -> Value:
    """The variance at these places, given in pixels for each axis; zero outside."""
    graph, x = node.graph, node.inputs[0]
    scaled = [(2 * place + 1) / _length(node, 2 + k) - 1 for k, place in enumerate(places)]
    last = x.rank - 1
    # The grid names the innermost axis first.
    grid = graph.emit("Concat", *(graph.unsqueeze(g, [last]) for g in reversed(scaled)), axis=last)
    return node.again(x.var, grid, mode=mode, padding_mode="zeros", align_corners=0)


def _over_channels(node: NodeView, factors: Sequence[Value]) -> Value:
    return node.graph.unsqueeze(prod(factors[1:], start=factors[0]), [1])


def _position(node: NodeView, axis: int) -> Value:
    """Where the grid points to along an axis, in pixels."""
    graph, grid, length = node.graph, node.inputs[1], _length(node, axis)
    component = graph.constant(np.int64(node.inputs[0].rank - 1 - axis))
    given = graph.emit("Gather", grid.mean, component, axis=grid.rank - 1)  # in -1 … 1
    return (given + 1) / 2 * (length - 1) if node.attr("align_corners", 0) else ((given + 1) * length - 1) / 2


def _brought_back(node: NodeView, place: Value, axis: int) -> Value:
    """A place beyond the border, as the padding mode has it."""
    padding, length = node.attr("padding_mode", "zeros"), _length(node, axis)
    if padding == "zeros":
        return place
    if padding == "reflection":  # a triangle wave between the borders
        low, extent = (0.0, length - 1) if node.attr("align_corners", 0) else (-0.5, length)
        turns = node.graph.emit("Floor", (place - low) / (2 * extent))
        place = low + extent - ((place - low) - 2 * extent * turns - extent).abs()
    return _between(node, place, 0.0, length - 1)


def _cubic_taps(node: NodeView, position: Value, axis: int) -> list[Tap]:
    """Pixels are brought back one by one, as PyTorch and onnxruntime do."""
    first = node.graph.emit("Floor", position)
    f, a = position - first, CUBIC

    def inner(t: Value) -> Value:  # |t| ≤ 1
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def outer(t: Value) -> Value:  # 1 ≤ |t| ≤ 2
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    weights = {-1: outer(f + 1), 0: inner(f), 1: inner(1 - f), 2: outer(2 - f)}
    return [Tap(_brought_back(node, first + shift, axis), weight) for shift, weight in weights.items()]


# ---------------------------------------------------------------------- DeformConv


@rule("DeformConv", accuracy=HEURISTIC, linear=True)
def deform_conv(node: NodeView) -> Value:
    """Σ_k w_k² m_k² Σ_c b_kc² v_c: weights, mask and bilinear weights squared; kernel elements that
    read the same pixel count as independent."""
    x, weight, offset = node.inputs[:3]
    bias, mask = node.input(3), node.input(4)
    if not weight.certain or not offset.certain or (mask is not None and not mask.certain):
        raise node.refuse("its weights, offsets or mask are uncertain")
    graph, axes = node.graph, x.rank - 2
    if x.certain and bias is not None:  # only the bias is uncertain
        column = graph.emit("Reshape", bias.variance, graph.ints(-1, *[1] * axes))
        return graph.expand(column, like=node.output.raw)
    moved, factors = _moved(offset.mean)  # a kernel's own places are whole
    # Offsets come as one channel per axis for each kernel element.
    parts = [
        graph.emit("Slice", factors, graph.ints(axis), graph.ints(2**31 - 1), graph.ints(1), graph.ints(axes))
        for axis in range(axes)
    ]
    factor = prod(parts[1:], start=parts[0])
    if mask is not None:
        factor = factor * mask.mean.squared
    var = node.again(x.var, weight.mean.squared, moved, None, factor)
    if bias is None or bias.certain:
        return var
    return var + graph.emit("Reshape", bias.var, graph.ints(-1, *[1] * axes))


# ------------------------------------------------------------------------ RoiAlign


@rule("RoiAlign", accuracy=HEURISTIC)
def roi_align(node: NodeView) -> Value:
    """Σ w² v with the weights w of the samples' pixels, exact; where the number of samples is chosen at
    run time or above 4 per axis, Σ w v · Σ w² / Σ w, exact where v is constant within a bin."""
    x, rois, batch = node.inputs
    if not rois.certain:
        raise node.refuse("its regions are uncertain")
    if node.attr("mode", "avg") != "avg":
        raise node.refuse("mode=max: runtimes disagree on what the maximum is taken of")
    samples = node.attr("sampling_ratio", 0)
    if 0 < samples <= MOST_SAMPLES:
        return _over_pixels(node, [_roi_taps(node, axis, samples) for axis in (2, 3)])
    concentration = [_concentration(node, axis, samples) for axis in (2, 3)]
    rows, columns = (node.graph.unsqueeze(c, axes) for c, axes in zip(concentration, ([1, 3], [1, 2])))
    return node.again(x.var, rois.mean, batch.raw) * rows * columns


def _over_pixels(node: NodeView, taps: list[list[Tap]]) -> Value:
    """Σ w² v over the pixels of each bin; taps are of shape (regions, bins of their axis)."""
    graph, x, batch = node.graph, node.inputs[0], node.inputs[2]
    channels_last = graph.emit("Transpose", x.var, perm=[0, 2, 3, 1])
    # The channels of each pixel are one row of a table, (N H W, C).
    width = graph.emit("Concat", graph.ints(-1), graph.dimension(x.raw, 1), axis=0)
    table = graph.emit("Reshape", channels_last, width)

    def whole(value: Value) -> Value:
        return graph.cast(value, np.int64)

    height, row_size = graph.dimension(x.raw, 2), graph.dimension(x.raw, 3)
    image = graph.unsqueeze(whole(batch.raw), [1]) * height  # (R, 1)
    terms = []
    for row, column in itertools.product(_squared(taps[0]), _squared(taps[1])):
        rows = graph.unsqueeze((image + whole(row.pixel)) * row_size, [2])  # (R, h, 1)
        at = rows + graph.unsqueeze(whole(column.pixel), [1])  # (R, h, w)
        weight = graph.unsqueeze(row.weight, [2, 3]) * graph.unsqueeze(column.weight, [1, 3])
        terms.append(graph.emit("Gather", table, at, axis=0) * weight)  # (R, h, w, C)
    return graph.emit("Transpose", sum(terms[1:], terms[0]), perm=[0, 3, 1, 2])


def _bins(node: NodeView, axis: int) -> tuple[Value, Value, int]:
    """Start of each region along an axis (R, 1), the size of its bins (R, 1), and how many there are."""
    graph, rois = node.graph, node.inputs[1]
    column = {2: (1, 3), 3: (0, 2)}[axis]  # x1, y1, x2, y2
    scale = node.attr("spatial_scale", 1.0)
    half = node.opset >= 16 and node.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    start, end = (
        graph.emit("Gather", rois.mean, graph.ints(k), axis=1) * scale - (0.5 if half else 0) for k in column
    )
    extent = end - start if half else graph.at_least(end - start, 1.0)
    count = node.attr("output_height" if axis == 2 else "output_width", 1)
    return start, extent / count, count


def _inside(node: NodeView, place: Value, axis: int) -> tuple[Value, Value]:
    """A sample's position kept in the image, and 1 unless it lies more than a pixel outside."""
    length = _length(node, axis)
    return _between(node, place, 0.0, length - 1), (place >= -1.0) * (place <= length)


def _roi_taps(node: NodeView, axis: int, samples: int) -> list[Tap]:
    """Two taps for each sample of a bin; pixels and weights are of shape (R, bins)."""
    graph = node.graph
    start, size, count = _bins(node, axis)
    taps = []
    for sample in range(samples):
        steps = np.arange(count)[None] + (sample + 0.5) / samples  # (1, bins)
        place = start + size * graph.constant(steps.astype(size.dtype))
        place, counts = _inside(node, place, axis)
        first = graph.emit("Floor", place)
        f, share = place - first, counts * (1 / samples)
        second = graph.emit("Min", first + 1, _length(node, axis) - 1)
        taps += [Tap(first, (1 - f) * share), Tap(second, f * share)]
    return taps


def _concentration(node: NodeView, axis: int, samples: int) -> Value:
    """Σ_i w_i² / Σ_i w_i over the pixels i of an axis, of shape (R, bins)."""
    graph = node.graph
    start, size, count = _bins(node, axis)
    number = graph.emit("Ceil", size) if samples == 0 else graph.zeros(size) + samples
    number = graph.at_least(number, 1.0)  # (R, 1); an empty region gives 0 whatever the weights
    one = graph.constant(np.ones(1, size.dtype))  # there may be no region at all
    all_numbers = graph.emit("Concat", graph.emit("Reshape", number, graph.ints(-1)), one, axis=0)
    most = graph.cast(graph.reduce("ReduceMax", all_numbers, [0]), np.int64)
    sample = graph.cast(graph.positions(most), size.dtype)  # (K,)
    taken = graph.unsqueeze(number, [2])  # (R, 1, 1)
    bins = graph.constant(np.arange(count).reshape(1, count, 1).astype(size.dtype))
    steps = bins + (sample + 0.5) / taken  # (R, bins, K)
    place, counts = _inside(node, graph.unsqueeze(start, [2]) + graph.unsqueeze(size, [2]) * steps, axis)
    counts = counts * (sample < taken)
    pixel = graph.cast(graph.positions(graph.dimension(node.inputs[0].raw, axis)), size.dtype)  # (L,)
    near = graph.emit("Relu", 1 - (graph.unsqueeze(place, [3]) - pixel).abs())  # (R, bins, K, L)
    weights = graph.reduce("ReduceSum", near * graph.unsqueeze(counts / taken, [3]), [2], keepdims=False)
    total = graph.reduce("ReduceSum", weights, [2], keepdims=False)
    # A bin outside the image has no weights: 0 / 1 instead of 0 / 0.
    return graph.reduce("ReduceSum", weights.squared, [2], keepdims=False) / (total + (total <= 0))
