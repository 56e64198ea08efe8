"""Sites by the names that a user gives, and what is at a place: an activation or a tensor, with its layout."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.frontier import Place
from gapa_onnx.plan.layers import Network, Node, is_activation, is_merged_into_layer, is_numeric
from gapa_onnx.plan.layouts import layout_at
from gapa_onnx.variance.qdq import dequantised
from gapa_onnx.variance.sites import Layout, Site


@dataclass(frozen=True)
class Asked:
    """What a user wants one query to be; None is left to the place."""

    layout: Layout | None = None
    axis: int | None = None


def site_at(network: Network, place: Place) -> Site:
    """The site at a place."""
    if place.activation is None:
        return site_at_tensor(network, place.tensor)
    return site_at_activation(network, place.activation)


def site_at_activation(network: Network, node: Node, asked: Asked = Asked()) -> Site:
    """The site whose Gaussian process stands for an activation."""
    query, output = node.inputs[0], node.outputs[0]
    return _site(network, node.name or output.name, query, output, node.op, asked)


def site_at_tensor(network: Network, tensor: gs.Tensor, asked: Asked = Asked()) -> Site:
    """The site at a tensor, with the identity as its activation."""
    return _site(network, tensor.name, tensor, tensor, None, asked)


def _site(
    network: Network, name: str, query: gs.Tensor, output: gs.Tensor, activation: str | None, asked: Asked
) -> Site:
    layout, axis = layout_at(network, query, output)
    rank = None if query.shape is None else len(query.shape)
    if asked.layout is not None:
        layout, axis = _as_asked(name, asked.layout, asked.axis, axis, rank)
    return Site(name, query.name, output.name, activation, layout, rank, axis)


def _as_asked(
    name: str, layout: Layout, asked: int | None, found: int, rank: int | None
) -> tuple[Layout, int]:
    """The layout that is asked for, and the axis that is asked for or else the one of the place."""
    if rank is None:
        if layout is Layout.ROWS and asked in (None, -1):
            return layout, -1
        raise UserError(
            f"{name!r} cannot be queried as {layout.value!r}: its number of axes is not known",
            "leave the layout out, or name a tensor of known rank",
        )
    axis = found if asked is None else asked
    if not -rank <= axis < rank:
        raise UserError(f"{name!r} has {rank} axes, and no axis {axis}", "count axes from 0")
    axis %= max(rank, 1)
    if layout is Layout.ROWS:
        if asked is not None and axis != rank - 1:
            raise UserError(
                f"the features of rows are on the last axis, and {name!r} is asked for those on axis {axis}",
                f"ask for {name}:positions@{axis}",
            )
        return layout, rank - 1
    if layout is not Layout.POSITIONS and (rank < 2 or axis == 0):
        raise UserError(
            f"{name!r} cannot be queried as {layout.value!r}: its axis 0 holds features, not samples",
            f"leave the layout out, or name the axis of the features, as in {name}:{layout.value}@1",
        )
    return layout, axis


def named_site(network: Network, text: str) -> Site:
    """The site at the node or tensor of this name, `name`, `name:layout` or `name:layout@axis`."""
    source = network.source
    name, asked = _split_layout(source, text)
    found = next((node for node in source.graph.nodes if _is_called(node, name)), None)
    if found is None:
        if all(tensor.name != name for tensor in source.graph.inputs):
            raise UserError(f"no node or tensor is called {name!r}", _hint(source, name))
        tensor = source.tensors[name]
        _check(network, name, tensor)
        return site_at_tensor(network, tensor, asked)
    tensor = found.outputs[0] if found.name == name else source.tensors[name]
    _check(network, name, tensor)
    return _site_of(network, found, tensor, asked)


def _is_called(node: gs.Node, name: str) -> bool:
    return node.name == name or any(tensor.name == name for tensor in node.outputs)


def _site_of(network: Network, node: gs.Node, tensor: gs.Tensor, asked: Asked) -> Site:
    """The site at a node if it is an activation, else at the tensor that it makes.

    An activation that quantisation merges into its layer does not exist by itself when the model runs; there the
    site is at what is dequantised from it.
    """
    if is_activation(node) and is_merged_into_layer(node):
        same = dequantised(network.source.graph).get(tensor.name)
        if same is not None:
            return site_at_tensor(network, network.source.tensors[same], asked)
    activation = network.activations.get(id(node)) or (node if is_activation(node) else None)
    if activation is None:
        return site_at_tensor(network, tensor, asked)
    return site_at_activation(network, activation, asked)


def _hint(source: SourceModel, name: str) -> str:
    near = difflib.get_close_matches(name, list(_candidates(source)), n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return "`gapa-onnx inspect MODEL` lists the names"


_LAYOUT = re.compile(rf"(.+):({'|'.join(layout.value for layout in Layout)})(?:@(-?[0-9]+))?", re.DOTALL)


def _split_layout(source: SourceModel, text: str) -> tuple[str, Asked]:
    """`name:pooled` asks for a layout, `name:pooled@2` for an axis too; a colon may also be part of the name."""
    found = None if text in source.names else _LAYOUT.fullmatch(text)
    if found is None:
        return text, Asked()
    name, layout, axis = found.groups()
    return name, Asked(Layout(layout), None if axis is None else int(axis))


def _check(network: Network, name: str, tensor: gs.Tensor) -> None:
    """Raise UserError where a tensor cannot be a site."""
    readers = tensor.outputs
    if len(readers) == 1 and is_activation(readers[0]) and is_merged_into_layer(readers[0]):
        raise UserError(
            f"{name!r} exists in whole numbers only: runtimes merge it into the {readers[0].op} behind it",
            f"name {readers[0].outputs[0].name!r} instead",
        )
    if not is_numeric(tensor):
        raise UserError(
            f"{name!r} does not hold floating-point numbers", "name an activation or a float tensor"
        )
    if not network.holds_features(tensor):
        raise UserError(
            f"{name!r} holds no features: it has no elements, or they follow from shapes and constants alone",
            "name a tensor that depends on what is fed",
        )
    if tensor.shape is not None and len(tensor.shape) == 0:
        raise UserError(f"{name!r} is a single number, not a vector of features", "name another tensor")


def _candidates(source: SourceModel) -> Iterator[str]:
    for node in source.graph.nodes:
        if node.name:
            yield node.name
        yield from (tensor.name for tensor in node.outputs)
    yield from (tensor.name for tensor in source.graph.inputs)
