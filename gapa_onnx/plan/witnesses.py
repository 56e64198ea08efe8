"""Witnesses: places whose share is computed and not passed on, to say how strange an input looks there.

A late layer has forgotten much of what makes an input strange, and an early one knows nothing of classes, so places at
several depths see more than one. `auto` takes tensors that all features pass through, on the way to the last site:

    maps of several sizes       the last tensor of each size: the ends of the stages of a convolutional network
    one size throughout         a third and two thirds of the way: blocks of a transformer, layers of a recurrent network
    vectors                     the first of the fully connected layers

each pooled to one query per sample, at most `MOST` of them, and none of a stage that ends in the last site, which would
say the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.axes import FeatureAxes
from gapa_onnx.plan.frontier import carries, place_at
from gapa_onnx.plan.layers import RESHAPERS, Network
from gapa_onnx.plan.naming import named_site, site_at, site_at_activation, site_at_tensor
from gapa_onnx.variance.graph import names_read
from gapa_onnx.variance.sites import Layout, Site

MOST = 3  # beside the sites; each costs a query for every sample
WIDEST = 4096  # features of a query: distances and the size of the file grow with them


def find_witnesses(source: SourceModel, spec: str, sites: Sequence[Site]) -> tuple[Site, ...]:
    """The witnesses by `auto`, `none`, or names as those of sites; what is a site already is left out."""
    network = Network.of(source)
    if spec == "none":
        return ()
    if spec == "auto":
        found = _auto(network, sites)
    else:
        found = [_named(network, name.strip()) for name in spec.split(",") if name.strip()]
        if not found:
            raise UserError(
                "no witness is named", "let `witnesses` be auto, none or names separated by commas"
            )
    taken = {name for site in sites for name in (site.query, site.output)}
    return tuple({one.query: one for one in found if taken.isdisjoint((one.query, one.output))}.values())


def _named(network: Network, text: str) -> Site:
    """A place by its name, with one query for each sample."""
    site = named_site(network, text)
    pooled = _pooled(site)
    if pooled is None:
        raise UserError(
            f"{text!r} has no axis of samples beside that of its features, so it cannot be a witness",
            "name a tensor of shape (samples, features) or a map of these",
        )
    return pooled


def _pooled(site: Site) -> Site | None:
    """The same place with one query for each sample; None where its axes do not allow that."""
    if site.rank is None or site.rank < 2 or site.axis == 0:
        return None
    return site if site.rank == 2 else replace(site, layout=Layout.POOLED)


def _auto(network: Network, sites: Sequence[Site]) -> list[Site]:
    if not sites or any(site.chosen or site.joined or site.standardised for site in sites):
        return []
    last = network.source.tensors[sites[-1].output]
    cuts, same = cut_tensors(network, last)
    passed = _untold(network, [tensor for tensor in cuts if _is_place(network, tensor, last)], same)
    places = [site_at_tensor(network, tensor) for tensor in _ends_of_stages(network, passed)]
    places += _first_vector(network, passed)
    return _spread_out([one for one in map(_pooled, places) if one is not None])


def _untold(network: Network, passed: Sequence[gs.Tensor], same: Sequence[gs.Tensor]) -> list[gs.Tensor]:
    """Those of a stage that does not end in the last site; all, where there is but one stage."""
    stages = {tensor.name: _stage(network, tensor) for tensor in (*passed, *same)}
    told = {stages[tensor.name] for tensor in same} - {None}
    one_size = {stages[tensor.name] for tensor in passed} - {None} == told
    return [tensor for tensor in passed if one_size or stages[tensor.name] not in told]


def _first_vector(network: Network, passed: Sequence[gs.Tensor]) -> list[Site]:
    """The first of the tensors (N, d) that goes into an activation, else into a layer: what lies before may be fused with
    the layer that makes it. A map that is flattened is none."""
    vectors = [tensor for tensor in passed if len(tensor.shape) == 2 and tensor.inputs[0].op not in RESHAPERS]
    for tensor in vectors:
        found = next(
            (network.activations[id(node)] for node in tensor.outputs if id(node) in network.activations),
            None,
        )
        if found is not None:
            return [site_at_activation(network, found)]
    read = (tensor for tensor in vectors if any(id(node) in network.layers for node in tensor.outputs))
    return [site_at(network, place_at(network, tensor)) for tensor in read][:1]


def _ends_of_stages(network: Network, passed: Sequence[gs.Tensor]) -> list[gs.Tensor]:
    """The last map of each size; of maps that are all of one size, those a third and two thirds of the way."""
    stages: dict[object, list[gs.Tensor]] = {}
    for tensor in passed:
        if len(tensor.shape) > 2:
            stages.setdefault(_stage(network, tensor), []).append(tensor)
    if len(stages) == 1:
        (held,) = stages.values()
        return [held[len(held) // 3], held[2 * len(held) // 3]] if len(held) > 2 else held
    return [held[-1] for held in stages.values()]


def _spread_out(places: list[Site]) -> list[Site]:
    """At most `MOST`, the first and the last of them and what is evenly between."""
    if len(places) <= MOST:
        return places
    return [places[round(at * (len(places) - 1) / (MOST - 1))] for at in range(MOST)]


def _is_place(network: Network, tensor: gs.Tensor, last: gs.Tensor) -> bool:
    """Whether a tensor has features of known width, no wider than is cheap, and may have the axis of samples in front that
    the last place has; what was fed tells in the end (`fit.collect`)."""
    if tensor.shape is None or len(tensor.shape) < 2 or not network.holds_features(tensor):
        return False
    axis = FeatureAxes.of(network.source).at(tensor).axis
    width, rows = tensor.shape[axis], tensor.shape[0]
    fed = [spec.shape[0] for spec in network.source.inputs if spec.shape]
    return (
        axis != 0
        and isinstance(width, int)
        and 1 < width <= WIDEST
        and (not isinstance(rows, int) or rows < 0 or rows in fed)  # some files declare an open size as -1
        and not _are_others(network, rows, last.shape[0] if last.shape else None)
    )


def _are_others(network: Network, size: object, other: object) -> bool:
    """Whether two sizes are those of different axes of what is fed: time and samples, where time comes first."""
    declared = {one for spec in network.source.inputs for one in spec.shape or ()} - {None}
    return size != other and size in declared and other in declared


def _stage(network: Network, tensor: gs.Tensor) -> object:
    """What maps of one stage have in common: their size, or where that is open their width; None for what is no map."""
    if tensor.shape is None or len(tensor.shape) < 3:
        return None
    axis = FeatureAxes.of(network.source).at(tensor).axis % len(tensor.shape)
    sizes = tuple(size for at, size in enumerate(tensor.shape) if at not in (0, axis) and size != 1)
    return sizes if all(isinstance(size, int) for size in sizes) else tensor.shape[axis]


# --------------------------------------------------------------- what everything passes through


def cut_tensors(network: Network, end: gs.Tensor) -> tuple[list[gs.Tensor], list[gs.Tensor]]:
    """The tensors behind a layer that all features which `end` is made of pass through, in the order of the graph: those
    with a layer between them and `end`, and those without.

    Nodes are read in that order; where but one tensor of those made so far is still to be read, and no layer begins
    anew behind it, everything passes through it. Only what lies behind a layer counts: a mask that every block reads is
    no way around one.
    """
    order = _nodes_before(network, end)
    last_read, begun = _last_read(network, order)
    layers = [at for at, node in enumerate(order) if id(node) in network.layers]
    before: dict[str, gs.Tensor] = {}
    behind: dict[str, gs.Tensor] = {}
    live: dict[str, gs.Tensor] = {}
    for at, node in enumerate(order):
        live = {name: tensor for name, tensor in live.items() if last_read[name] > at}
        live |= {made.name: made for made in node.outputs if last_read.get(made.name, -1) > at}
        if len(live) == 1 and at >= begun:
            (before if layers and at < layers[-1] else behind).update(live)
    return list(before.values()), list(behind.values())


def _last_read(network: Network, order: Sequence[gs.Node]) -> tuple[dict[str, int], int]:
    """The last of some nodes, by its place in their order, that reads each of the tensors behind a layer; and the last
    layer that reads none of these: another branch of what is fed begins there."""
    features: set[str] = set()
    last: dict[str, int] = {}
    begun = -1
    for at, node in enumerate(order):
        read = features.intersection(names_read(node))
        last.update(dict.fromkeys(read, at))
        if id(node) in network.layers and not read:
            begun = at
        if read or id(node) in network.layers:
            features.update(tensor.name for tensor in node.outputs if tensor.name)
    return last, begun


def _nodes_before(network: Network, end: gs.Tensor) -> list[gs.Node]:
    """The nodes that a tensor is made by, by more than shapes and choices, in the order of the graph."""
    tensors = network.source.tensors
    seen: set[int] = set()
    pending = [end]
    while pending:
        for node in pending.pop().inputs:
            if id(node) not in seen:
                seen.add(id(node))
                read = (tensors[name] for name in names_read(node) if name in tensors)
                pending += [one for one in read if carries(one) and network.follows_data(one.name)]
    return [node for node in network.source.graph.nodes if id(node) in seen]
