"""Segmentation: which map tells about pixels, and what is said where none does.

The mean of a map over its positions is one query for the whole image: its variance ranks images, and says nothing
about where in one of them something is strange. The last map of a segmentation tells best about pixels, if its
positions are not too many to ask a query for each. A coarser map on the way there has fewer, and from each the variance
flows on to the pixels that are made of it. Of those with at most `MOST_QUERIES` positions the last is taken that has
half as many as the finest or more. Where sizes are left open they are compared for an input of `NOMINAL_SIDE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import onnx

from gapa_onnx.errors import UserError
from gapa_onnx.model.dtypes import is_float
from gapa_onnx.model.load import SourceModel
from gapa_onnx.model.shapes import infer_shapes
from gapa_onnx.plan.axes import FeatureAxes
from gapa_onnx.plan.frontier import comes_from
from gapa_onnx.plan.head import Head, Task
from gapa_onnx.plan.layers import Network, is_merged_into_layer
from gapa_onnx.plan.naming import Asked, site_at_activation
from gapa_onnx.plan.tasks import find_heads
from gapa_onnx.variance.rules import Refusal, behaviour
from gapa_onnx.variance.sites import Layout, Site

MOST_QUERIES = 128 * 128  #: for an image; a query takes about a millionth of a second
FEWEST_QUERIES = 16  #: fewer tell hardly more about pixels than one does
NOMINAL_SIDE = 256  #: of an image, where a model takes any

Sizes = Mapping[str, Sequence[int]]  #: of tensors whose shape is known whole, by name


def segmentations(source: SourceModel, task: str) -> frozenset[str]:
    """The outputs that are for segmentation, as far as `task` can be followed."""
    floats = [tensor.name for tensor in source.outputs if is_float(tensor.dtype)]
    try:
        heads = find_heads(source, floats, task)
    except UserError:  # what it is will be said when the outputs with a variance are known
        return frozenset()
    return frozenset(head.output for head in heads if head.task is Task.SEGMENTATION)


def site_for_pixels(network: Network, pooled: Site) -> Site | None:
    """The site at a pooled map, or at one before it, that tells about pixels; None where there is none."""
    sizes = network.source.once(_sizes)
    maps = [(_positions(sizes, site.query, site.axis), site) for site in _maps_up_to(network, pooled)]
    found = [(count, site) for count, site in maps if count and FEWEST_QUERIES <= count <= MOST_QUERIES]
    most = max((count for count, _ in found), default=0)
    return next((site for count, site in reversed(found) if 2 * count >= most), None)


def _positions(sizes: Sizes, name: str, features: int | None) -> int | None:
    """The positions of a map beside the axes of rows and features; None where its shape is not known."""
    shape = sizes.get(name)
    return None if shape is None else prod(n for axis, n in enumerate(shape) if axis not in (0, features))


def _maps_up_to(network: Network, last: Site) -> Iterator[Site]:
    """Sites per position at the activations that the tensor of a site comes from by nodes whose variance can be stated."""
    source, axes = network.source, FeatureAxes.of(network.source)
    behind = _carried_to(source, last.output)
    for node in source.graph.nodes:
        activation = network.activations.get(id(node))
        if activation is None or is_merged_into_layer(node):
            continue
        query, output = activation.inputs[0], activation.outputs[0]
        features = axes.at(output)
        on_map = query.shape is not None and len(query.shape) > 3 and features.on_map and features.axis > 0
        if output.name in behind and on_map and network.holds_features(query):
            yield site_at_activation(network, activation, Asked(Layout.POSITIONS))


def _carried_to(source: SourceModel, name: str) -> set[str]:
    """The tensor of this name and those that it comes from by nodes that have a rule."""
    found = {name}
    pending = [source.tensors[name]]
    while pending:
        for node in pending.pop().inputs:
            if not isinstance(behaviour(node.domain, node.op), Refusal):
                new = [tensor for tensor in node.inputs if tensor.name and tensor.name not in found]
                found.update(tensor.name for tensor in new)
                pending += new
    return found


def _sizes(source: SourceModel) -> Sizes:
    """The shapes of tensors; those that images of any size leave open as they are for one of NOMINAL_SIDE."""
    if all(isinstance(size, int) for spec in source.inputs for size in (spec.shape or ())[1:]):
        shapes = {name: [1, *tensor.shape[1:]] for name, tensor in source.tensors.items() if tensor.shape}
    else:
        shapes = {
            value.name: [size.dim_value or None for size in value.type.tensor_type.shape.dim]
            for value in infer_shapes(_with_nominal_sizes(source)).graph.value_info
        }
    known = {name: [size for size in shape if isinstance(size, int)] for name, shape in shapes.items()}
    return {name: sizes for name, sizes in known.items() if len(sizes) == len(shapes[name])}


def _with_nominal_sizes(source: SourceModel) -> onnx.ModelProto:
    """A copy of the model that takes one image of NOMINAL_SIDE, and says nothing about what is made of it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(source.proto)
    fed = {spec.name for spec in source.inputs}
    for value in copy.graph.input:
        sizes = value.type.tensor_type.shape.dim if value.name in fed else ()
        for axis, size in enumerate(sizes):
            size.dim_value = size.dim_value or (NOMINAL_SIDE if axis else 1)
    del copy.graph.value_info[:]
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    return copy


# ------------------------------------------------------------------------------ what is said


def said_about_pixels(network: Network, sites: Sequence[Site], head: Head) -> Head:
    """The head of a segmentation, whose reason says so where every query is about a whole image."""
    tensor = network.source.tensors[head.tensor]
    mine = [site for site in sites if comes_from(tensor, {site.output})]
    if head.task is not Task.SEGMENTATION or any(site.many for site in mine) or not mine:
        return head
    better = site_for_pixels(network, mine[-1]) or mine[-1]
    remark = "one query per image: variance and score rank images, not pixels"
    advice = f"for pixels let `sites` be {better.name}:{Layout.POSITIONS.value}"
    return replace(head, reason=f"{head.reason}; {remark}; {advice}")
