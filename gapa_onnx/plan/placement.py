"""Where Gaussian-process activations go: `sites` is auto, last, all, or names.

`auto` is the penultimate representation: what goes into the last linear layer of each output, at its
activation if only reshaping lies between. `all` are the activations with a linear layer behind them, `last` is the last
of these. A model without such layers has its site at its `features`. Earlier places that tell inputs apart which the last
one no longer does are `witnesses`.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from gapa_onnx.errors import UserError
from gapa_onnx.model.constants import has_subgraph
from gapa_onnx.model.dtypes import is_quantised
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.features import feature_site
from gapa_onnx.plan.frontier import Frontier, comes_from
from gapa_onnx.plan.layers import Network, is_merged_into_layer
from gapa_onnx.plan.naming import named_site, site_at, site_at_activation, site_at_tensor
from gapa_onnx.plan.pixels import segmentations, site_for_pixels
from gapa_onnx.variance.sites import Layout, Site


def find_sites(source: SourceModel, spec: str, task: str = "auto") -> tuple[Site, ...]:
    """Sites by `auto`, `last`, `all`, or names separated by commas, each with an optional `:layout`
    or `:layout@axis`. `task` is the setting, which tells what is a segmentation."""
    network = Network.of(source)
    if spec == "auto":
        features = None if Frontier.of(source).places else feature_site(network)
        sites = _auto(network, task) if features is None else [features]
    elif spec in ("last", "all"):
        hidden = _hidden_sites(network)
        sites = (hidden[-1:] if spec == "last" else hidden) or _auto(network, task)
    else:
        sites = [named_site(network, name.strip()) for name in spec.split(",") if name.strip()]
        if not sites:
            raise UserError("no site is named", "let `sites` be auto, last, all or names separated by commas")
    if not sites:
        raise UserError(
            f"no output of {source.label} comes from a linear layer with constant weights or from numbers that are "
            "fed, so no place for a site is obvious",
            "name one with `sites`; `gapa-onnx inspect MODEL` lists the tensors",
        )
    return tuple({site.output: site for site in sites}.values())


# ------------------------------------------------------------ auto: the penultimate representation


def _auto(network: Network, task: str) -> list[Site]:
    """What goes into the last linear layers of each output, at its activation if only reshaping lies between,
    else the identity there. A state that is handed on has sites of its own only
    where all others lie behind it, and none where it is a cache that grows. For a segmentation a map that tells about pixels stands for one that is pooled."""
    source, frontier = network.source, Frontier.of(network.source)
    sites, for_pixels = [], segmentations(source, task)
    for place, outputs in frontier.places.values():
        last = site_at(network, place)
        if last.layout is Layout.POOLED and outputs & for_pixels:
            last = site_for_pixels(network, last) or last
        sites.append(last)
    for state in frontier.states:
        if sites and frontier.grows(state):
            continue
        if not comes_from(source.tensors[state], {site.output for site in sites}):
            sites = [*(site_at(network, place) for place in frontier.places_of(state)), *sites]
    return sites


# ----------------------------------------------------------------- last, all: activations before layers


def _hidden_sites(network: Network) -> list[Site]:
    """Activations of data with a linear layer somewhere behind them, in graph order. Of an activation
    that quantisation has merged into its layer, what the next layer reads is left."""
    before_layer: set[str] = set()
    hidden = []
    for node in reversed(network.source.graph.nodes):
        leads_on = any(tensor.name in before_layer for tensor in node.outputs)
        activation = network.activations.get(id(node)) if leads_on else None
        if activation is not None and network.holds_features(activation.inputs[0]):
            if not is_merged_into_layer(node):
                hidden.append(site_at_activation(network, activation))
        data = _merged_data(network, node)
        if data is not None:
            hidden.append(site_at_tensor(network, data))
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
