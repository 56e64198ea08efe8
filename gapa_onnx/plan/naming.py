"""Sites by the names that a user gives, and what is at a place: an activation or a tensor, with its layout."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import onnx_graphsurgeon as gs

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.layers import Network, Node, holds_features, is_activation, is_merged_into_layer
from gapa_onnx.variance.qdq import dequantised
from gapa_onnx.variance.sites import Layout, Site


def site_at_activation(network: Network, node: Node, map_layout: Layout | None) -> Site:
    """The site whose Gaussian process stands for an activation."""
    query, output = node.inputs[0], node.outputs[0]
    return _site(network, node.name or output.name, query, output, node.op, map_layout)


def site_at_tensor(network: Network, tensor: gs.Tensor, map_layout: Layout | None) -> Site:
    """The site at a tensor, with the identity as its activation."""
    return _site(network, tensor.name, tensor, tensor, None, map_layout)


def _site(
    network: Network,
    name: str,
    query: gs.Tensor,
    output: gs.Tensor,
    activation: str | None,
    map_layout: Layout | None,
) -> Site:
    """`map_layout` is for tensors of more than two axes; None takes each position by itself."""
    rank = None if query.shape is None else len(query.shape)
    layout = Layout.ROWS
    if rank is not None and rank > 2:
        if map_layout is Layout.FLAT:
            layout = Layout.FLAT
        elif query.name in network.channels_first:
            layout = map_layout or Layout.POSITIONS
    return Site(name, query.name, output.name, activation, layout, rank)


def named_site(network: Network, text: str) -> Site:
    """The site at the node or tensor of this name, `name` or `name:layout`."""
    source = network.source
    name, layout = _split_layout(source, text)
    found = next((node for node in source.graph.nodes if _is_called(node, name)), None)
    if found is None:
        if all(tensor.name != name for tensor in source.graph.inputs):
            raise UserError(f"no node or tensor is called {name!r}", _hint(source, name))
        tensor = source.tensors[name]
        return _checked(site_at_tensor(network, tensor, layout), tensor, layout)
    tensor = found.outputs[0] if found.name == name else source.tensors[name]
    return _checked(_site_of(network, found, tensor, layout), tensor, layout)


def _is_called(node: gs.Node, name: str) -> bool:
    return node.name == name or any(tensor.name == name for tensor in node.outputs)


def _site_of(network: Network, node: gs.Node, tensor: gs.Tensor, layout: Layout | None) -> Site:
    """The site at a node if it is an activation, else at the tensor that it makes.

    An activation that quantisation merges into its layer does not exist by itself when the model runs; there the
    site is at what is dequantised from it.
    """
    if is_activation(node) and is_merged_into_layer(node):
        same = dequantised(network.source.graph).get(tensor.name)
        if same is not None:
            return site_at_tensor(network, network.source.tensors[same], layout)
    activation = network.activations.get(id(node)) or (node if is_activation(node) else None)
    if activation is None:
        return site_at_tensor(network, tensor, layout)
    return site_at_activation(network, activation, layout)


def _hint(source: SourceModel, name: str) -> str:
    near = difflib.get_close_matches(name, list(_candidates(source)), n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return "`gapa-onnx inspect MODEL` lists the names"


def _split_layout(source: SourceModel, text: str) -> tuple[str, Layout | None]:
    """`name:pooled` asks for a layout; a colon may also be part of the name."""
    name, colon, suffix = text.rpartition(":")
    if colon and text not in source.names and suffix in {layout.value for layout in Layout}:
        return name, Layout(suffix)
    return text, None


def _checked(site: Site, tensor: gs.Tensor, asked: Layout | None) -> Site:
    readers = tensor.outputs
    if len(readers) == 1 and is_activation(readers[0]) and is_merged_into_layer(readers[0]):
        raise UserError(
            f"{site.name!r} exists in whole numbers only: runtimes merge it into the {readers[0].op} behind it",
            f"name {readers[0].outputs[0].name!r} instead",
        )
    if not holds_features(tensor):
        raise UserError(
            f"{site.name!r} does not hold floating-point numbers", "name an activation or a float tensor"
        )
    if site.rank == 0:
        raise UserError(f"{site.name!r} is a single number, not a vector of features", "name another tensor")
    if asked is not None and asked is not site.layout:
        raise UserError(
            f"{site.name!r} cannot be queried as {asked.value!r}: it is not a map of known rank with channels first",
            "leave the layout out, or use :flat on a tensor of known rank",
        )
    return site


def _candidates(source: SourceModel) -> Iterator[str]:
    for node in source.graph.nodes:
        if node.name:
            yield node.name
        yield from (tensor.name for tensor in node.outputs)
    yield from (tensor.name for tensor in source.graph.inputs)
