"""Composite patterns: several source nodes that spell out one standard operator.

Seen node by node, the factors of x·sigmoid(x) would count as independent, and the delta method would
be wrong. Here such groups are found before rules apply, and each is presented to the rule of the
operator that it spells out. Source nodes are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from gapa_onnx.rules.view import VirtualNode


@dataclass(frozen=True, eq=False)
class Composite:
    """A group of nodes that is one operator."""

    node: VirtualNode  #: what the group is
    last: gs.Node  #: the group's node whose output is the operator's
    interior: tuple[gs.Node, ...]  #: the other nodes of the group


Pattern = Callable[[gs.Node], Composite | None]

PATTERNS: dict[str, list[Pattern]] = {}
"""By the operator type of the group's last node; the first that fits wins."""


def find_composites(graph: gs.Graph, visible: set[str]) -> Iterator[Composite]:
    """All composites of a graph that do not overlap, last nodes first.

    `visible` names the tensors that must keep a variance of their own: sites.
    """
    taken: set[int] = set()
    for node in reversed(graph.nodes):
        for pattern in PATTERNS.get(node.op, ()) if id(node) not in taken else ():
            composite = pattern(node)
            if composite is None or _breaks(composite, visible, taken):
                continue
            taken.update(id(member) for member in (composite.last, *composite.interior))
            yield composite
            break


def _breaks(composite: Composite, visible: set[str], taken: set[int]) -> bool:
    members = composite.interior
    return any(id(node) in taken or any(t.name in visible for t in node.outputs) for node in members)
