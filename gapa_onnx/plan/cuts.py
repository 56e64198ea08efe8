"""The tensors that everything passes through on the way to a place: between stages and blocks, never inside of one.

What is followed are features, which begin at a layer, or at an embedding: a vector for each word or category, looked up
in a table of constants. A mask that every block reads is no way around one, and neither is a table that tells every
block the same of positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from gapa_onnx.plan.frontier import carries
from gapa_onnx.plan.layers import Network, is_numeric
from gapa_onnx.variance.graph import names_read

#: operators that look vectors up: which operand is the table, and which the indices into it
_LOOKUPS = {
    "Gather": (0, 1),
    "GatherND": (0, 1),
    "GatherBlockQuantized": (0, 1),
    "EmbedLayerNormalization": (2, 0),
    "QEmbedLayerNormalization": (2, 0),
}
_PACKED = ("GatherBlockQuantized",)  # of types that hold several numbers in one

#: norms that also hand on the sum that they are of, by the number of that output
_SUMS = {"SkipLayerNormalization": 3, "SkipSimplifiedLayerNormalization": 3}


@dataclass(frozen=True, eq=False)
class Cut:
    """A tensor that everything passes through."""

    tensor: gs.Tensor
    depth: int  #: how many layers lie before it
    bent: bool  #: whether an activation lies before it


def cut_tensors(network: Network, end: gs.Tensor) -> tuple[list[Cut], list[Cut]]:
    """The tensors that all features which `end` is made of pass through, in the order of the graph: those with a layer
    between them and `end`, and those without.

    Nodes are read in that order; where but one tensor of those made so far is still to be read, or one and its norm, and
    no features begin anew behind it, everything passes through it.
    """
    order = _nodes_before(network, end)
    begins = network.layers.keys() | _embeddings(network, order)
    last_read, begun = _last_read(order, begins)
    layers = [at for at, node in enumerate(order) if id(node) in network.layers]
    found: tuple[dict[str, Cut], dict[str, Cut]] = ({}, {})
    live: dict[str, gs.Tensor] = {}
    depth, bent = 0, False
    for at, node in enumerate(order):
        depth += id(node) in network.layers
        bent = bent or (id(node) in network.activations and not live.keys().isdisjoint(names_read(node)))
        live = {name: tensor for name, tensor in live.items() if last_read[name] > at}
        live |= {made.name: made for made in node.outputs if last_read.get(made.name, -1) > at}
        tensor = _whole(list(live.values())) if at >= begun else None
        if tensor is not None:
            name = tensor.name
            before, behind = found
            kept = before if layers and at < layers[-1] else behind
            if name not in before:  # a mask may be made ready while it waits
                kept.setdefault(name, Cut(tensor, depth, bent))
    return list(found[0].values()), list(found[1].values())


def _whole(live: Sequence[gs.Tensor]) -> gs.Tensor | None:
    """The one tensor that holds all that is still to be read, where there is one; of a sum and its norm the sum."""
    if len(live) == 1:
        return live[0]
    makers = {id(tensor.inputs[0]): tensor.inputs[0] for tensor in live if tensor.inputs}
    if len(makers) != 1:
        return None
    (maker,) = makers.values()
    at = _SUMS.get(maker.op, len(maker.outputs))
    return next((tensor for tensor in maker.outputs[at : at + 1] if tensor in live), None)


def _last_read(order: Sequence[gs.Node], begins: AbstractSet[int]) -> tuple[dict[str, int], int]:
    """The last of some nodes, by its place in their order, that reads each of the tensors with features; and the last
    where features begin that reads none of these: another branch of what is fed."""
    features: set[str] = set()
    last: dict[str, int] = {}
    begun = -1
    for at, node in enumerate(order):
        read = features.intersection(names_read(node))
        last.update(dict.fromkeys(read, at))
        if id(node) in begins and not read:
            begun = at
        if read or id(node) in begins:
            made = (
                node.outputs[:1] if node.op in _LOOKUPS else node.outputs
            )  # a mask may be made beside vectors
            features.update(tensor.name for tensor in made if tensor.name)
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


def _embeddings(network: Network, order: Sequence[gs.Node]) -> set[int]:
    """The embeddings by the identity of their nodes: what a layer reads, or what is joined with features once. What
    is joined with them again and again, such as the sines of positions, is no part of what blocks hand on."""
    alone: dict[str, frozenset[int]] = {}  # tensors that come from lookups and no layer
    features: set[str] = set()
    read_by_layer: set[int] = set()
    joined: Counter[int] = Counter()
    for node in order:
        read = set(names_read(node))
        looked_up = frozenset().union(*(alone[name] for name in read if name in alone))
        if id(node) in network.layers:
            read_by_layer |= looked_up
        elif features.isdisjoint(read):
            begun = looked_up | ({id(node)} if _looks_up(network, node) else set())
            alone.update((tensor.name, frozenset(begun)) for tensor in node.outputs if begun)
            continue
        else:
            joined.update(looked_up)
        features.update(tensor.name for tensor in node.outputs if tensor.name)
    return read_by_layer | {one for one, times in joined.items() if times == 1}


def _looks_up(network: Network, node: gs.Node) -> bool:
    """Whether a node takes vectors from a table that was learned, and what is fed says which."""
    if node.op not in _LOOKUPS:
        return False
    table, index = _LOOKUPS[node.op]
    if max(table, index) >= len(node.inputs):
        return False
    known = network.is_known(node.inputs[table])
    learned = node.op in _PACKED or is_numeric(node.inputs[table])
    return known and learned and network.follows_data(node.inputs[index].name)
