"""Where Gaussian-process activations go: `sites` is auto, last, all, or names.

`auto` is the penultimate representation: what goes into the last linear layer of each output, at its
activation if only reshaping lies between; and where fully connected layers lead there, also the first of their
activations, which still tells inputs apart that the last one no longer does (docs/defaults.md). `all` are the
activations with a linear layer behind them, `last` is the last of these.
"""

from __future__ import annotations

from math import prod

import onnx_graphsurgeon as gs

from gapa_onnx.errors import UserError
from gapa_onnx.model.constants import has_subgraph
from gapa_onnx.model.dtypes import is_quantised
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.layers import QUANTISERS, Network, holds_features, is_merged_into_layer
from gapa_onnx.plan.naming import named_site, site_at_activation, site_at_tensor
from gapa_onnx.variance.rules import Deterministic, behaviour
from gapa_onnx.variance.sites import Layout, Site

WIDEST_FLAT_QUERY = 4096  # beyond it `auto` pools: distances and file size grow with the width
MOST_POSITIONS = 1024  # beyond it `auto` pools: every position is a query of its own

_RESHAPERS = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
_CARRIERS = ("Dropout", "Identity", *_RESHAPERS, *QUANTISERS)


def find_sites(source: SourceModel, spec: str) -> tuple[Site, ...]:
    """Sites by `auto`, `last`, `all`, or names separated by commas, each with an optional `:layout`."""
    network = Network.of(source)
    if spec == "auto":
        sites = _auto(network)
    elif spec in ("last", "all"):
        hidden = _hidden_sites(network)
        sites = (hidden[-1:] if spec == "last" else hidden) or _auto(network)
    else:
        sites = [named_site(network, name.strip()) for name in spec.split(",") if name.strip()]
        if not sites:
            raise UserError("no site is named", "let `sites` be auto, last, all or names separated by commas")
    if not sites:
        raise UserError(
            f"no floating-point output of {source.label} comes from a linear layer with constant weights, "
            f"so no place for a site is obvious{_trees(source)}",
            "name one with `sites`; `gapa-onnx inspect MODEL` lists the tensors",
        )
    return tuple({site.output: site for site in sites}.values())


def _trees(source: SourceModel) -> str:
    """A remark on models that no site would help: they are constant but for jumps."""
    for node in source.graph.nodes:
        entry = behaviour(node.domain, node.op)
        if node.op.startswith("TreeEnsemble") and isinstance(entry, Deterministic):
            return f"; no variance would pass {node.op}: {entry.reason}"
    return ""


# ------------------------------------------------------------ auto: the penultimate representation


def _auto(network: Network) -> list[Site]:
    """What goes into the last linear layer of each output, at its activation if only reshaping lies between,
    else the identity there. In front of it the first vector."""
    read = [network.data_of(layer) for layer in _last_layers(network)]
    sites = []
    for data in {tensor.name: tensor for tensor in read if tensor is not None}.values():
        last = _at_data(network, data)
        sites += [*_first_vector(network, last), last]
    return sites


def _last_layers(network: Network) -> list[gs.Node]:
    """The linear layers with no other linear layer between them and an output, in graph order."""
    found: set[int] = set()
    seen: set[int] = set()
    pending = [tensor for tensor in network.source.outputs if holds_features(tensor)]
    while pending:
        tensor = pending.pop()
        for node in tensor.inputs:
            if id(node) in seen or (node.op == "DynamicQuantizeLinear" and tensor is not node.outputs[0]):
                continue  # a scale is no way past a layer
            seen.add(id(node))
            if id(node) in network.layers:
                found.add(id(node))
            else:
                pending.extend(node.inputs)
    # Along a residual path an earlier layer is found too; only layers that lead to no other count.
    leading_on = _nodes_before(network, found)
    return [node for key, node in network.layers.items() if key in found and key not in leading_on]


def _nodes_before(network: Network, nodes: set[int]) -> set[int]:
    """Identities of the nodes whose results some of these nodes depend on."""
    before: set[int] = set()
    for node in reversed(network.source.graph.nodes):
        readers = [id(reader) for tensor in node.outputs for reader in tensor.outputs]
        if any(reader in nodes or reader in before for reader in readers):
            before.add(id(node))
    return before


def _first_vector(network: Network, last: Site) -> list[Site]:
    """The first activation of the fully connected layers that end in a site, if it is another one: back
    from layer to layer, as long as each reads the activation of the one before and that is a vector."""
    first = last
    while (earlier := _vector_before(network, first)) is not None:
        first = earlier
    return [] if first is last else [first]


def _vector_before(network: Network, site: Site) -> Site | None:
    """The site at the activation, a vector per sample, that the layer in front of this one reads."""
    layer = _layer_before(network, network.source.tensors[site.query]) if _is_vector(site) else None
    data = None if layer is None else network.data_of(layer)
    found = None if data is None else _at_data(network, data)
    return found if found is not None and _is_vector(found) else None


def _is_vector(site: Site) -> bool:
    return site.activation is not None and site.rank == 2


def _layer_before(network: Network, tensor: gs.Tensor) -> gs.Node | None:
    """The linear layer that a tensor comes from, with nothing on the way where other data join: a bias is no data,
    nor is a single number, the scale of dynamic quantisation."""
    while len(tensor.inputs) == 1 and not has_subgraph(tensor.inputs[0]):
        node = tensor.inputs[0]
        if id(node) in network.layers:
            return node
        data = [t for t in node.inputs if not network.is_known(t) and t.shape not in ((), [])]
        if len(data) != 1:
            return None
        tensor = data[0]
    return None


def _at_data(network: Network, data: gs.Tensor) -> Site:
    """The site at the activation that a layer's data come from if only reshaping lies between, else at the data."""
    tensor, reshaped = data, False
    while len(tensor.inputs) == 1 and tensor.inputs[0].op in _CARRIERS:
        reshaped = reshaped or tensor.inputs[0].op in _RESHAPERS
        tensor = tensor.inputs[0].inputs[0]
    producer = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    activation = network.activations.get(id(producer))
    if activation is not None and not is_merged_into_layer(producer):
        return site_at_activation(network, activation, _map_layout(activation.inputs[0], reshaped))
    if len(data.inputs) == 1 and data.inputs[0].op == "DynamicQuantizeLinear":
        data = data.inputs[0].inputs[0]  # its steps differ from batch to batch
    return site_at_tensor(network, data, _map_layout(data, reshaped=False))


def _map_layout(tensor: gs.Tensor, reshaped: bool) -> Layout:
    """How `auto` queries a feature map. One that is flattened for the next layer is one query, else
    each position is one; either only while that is known to be cheap."""
    shape = tensor.shape
    if shape is None or len(shape) < 3 or not all(isinstance(size, int) for size in shape[1:]):
        return Layout.POOLED
    if reshaped:
        return Layout.FLAT if prod(shape[1:]) <= WIDEST_FLAT_QUERY else Layout.POOLED
    return Layout.POSITIONS if prod(shape[2:]) <= MOST_POSITIONS else Layout.POOLED


# ----------------------------------------------------------------- last, all: activations before layers


def _hidden_sites(network: Network) -> list[Site]:
    """Activations of data with a linear layer somewhere behind them, in graph order. Of an activation
    that quantisation has merged into its layer, what the next layer reads is left."""
    before_layer: set[str] = set()
    hidden = []
    for node in reversed(network.source.graph.nodes):
        leads_on = any(tensor.name in before_layer for tensor in node.outputs)
        activation = network.activations.get(id(node)) if leads_on else None
        if activation is not None and activation.inputs[0].name not in network.source.constants:
            if not is_merged_into_layer(node):
                hidden.append(site_at_activation(network, activation, Layout.POOLED))
        data = _merged_data(network, node)
        if data is not None:
            hidden.append(site_at_tensor(network, data, Layout.POOLED))
        if leads_on or id(node) in network.layers:
            before_layer.update(tensor.name for tensor in node.inputs if tensor.name)
    return hidden[::-1]


def _merged_data(network: Network, node: gs.Node) -> gs.Tensor | None:
    """What a layer reads, if it is quantised and comes from another layer with no activation of its own on the
    way."""
    if id(node) not in network.layers or has_subgraph(node):
        return None
    data = network.data_of(node)
    if data is None:
        return None
    quantised = is_quantised(data.dtype) or any(maker.op == "DequantizeLinear" for maker in data.inputs)
    return data if quantised and data.name in network.straight_from_layers else None
