"""How patterns are found: each is tried where its last node may be, and says what the group spells."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import onnx_graphsurgeon as gs

from gapa_onnx.variance.patterns.formula import BROADCASTING, Product, is_constant, product, through
from gapa_onnx.variance.rules.view import VirtualNode

PATTERN_DOMAIN = "ai.gapa.pattern"  #: of operators that exist in patterns only
MOST_NODES = 48  #: a group is never larger


@dataclass(frozen=True, eq=False)
class Composite:
    """A group of nodes that is one operator."""

    node: VirtualNode  #: what the group is
    last: gs.Node  #: the group's node whose output is the operator's
    interior: tuple[gs.Node, ...]  #: the other nodes of the group

    def hidden(self, outputs: set[str]) -> set[int]:
        """Identities of the interior nodes that nothing outside needs: no node, no output of the graph."""
        members = {id(node): node for node in self.interior}
        group = {id(self.last), *members}
        needed = [node for node in self.interior if _is_read_outside(node, group, outputs)]
        while needed:  # and what these are made of
            node = needed.pop()
            if members.pop(id(node), None) is not None:
                needed += [maker for tensor in node.inputs for maker in tensor.inputs]
        return set(members)


def _is_read_outside(node: gs.Node, group: set[int], outputs: set[str]) -> bool:
    readers = [reader for tensor in node.outputs for reader in tensor.outputs]
    return any(id(reader) not in group for reader in readers) or any(t.name in outputs for t in node.outputs)


@dataclass(frozen=True, eq=False)
class Spelled:
    """The operator that a tensor spells out. An input that is left out is None."""

    op: str
    inputs: list[gs.Tensor | None]
    attrs: dict[str, Any] = field(default_factory=dict)
    domain: str | None = None
    keeps_shape: bool = True  #: the output has the shape of the first input


@dataclass(frozen=True, eq=False)
class Output:
    """A tensor that a group may end in, and what several patterns ask of it."""

    tensor: gs.Tensor
    opset: int

    @property
    def node(self) -> gs.Node:
        return self.tensor.inputs[0]

    @functools.cached_property
    def factors(self) -> Product:
        return product(self.tensor)


@dataclass(frozen=True)
class NearMiss:
    """A tensor that has the operators of a pattern and yet is not what it spells, and why."""

    op: str
    reason: str


@dataclass(frozen=True)
class TurnedDown:
    """A group of nodes that is nearly a composite: what it would spell, where it ends, and why it is none."""

    op: str
    node: str
    reason: str


Pattern = Callable[[Output], Spelled | NearMiss | None]

PATTERNS: dict[str, list[Pattern]] = {}
"""By the operator type of the group's last node; the first that fits wins."""


def pattern(*last: str) -> Callable[[Pattern], Pattern]:
    """A pattern whose last node is one of these operators."""

    def decorate(function: Pattern) -> Pattern:
        for op_type in last:
            PATTERNS.setdefault(op_type, []).append(function)
        return function

    return decorate


def find_composites(graph: gs.Graph, visible: set[str]) -> Iterator[Composite]:
    """All composites of a graph, last nodes first.

    `visible` names the tensors that must keep a variance of their own: sites. One may be a
    composite's input or output, but not in its interior. Composites may share nodes; one that is
    wholly hidden in another is left out.
    """
    for _, composite, _ in _look(graph, visible):
        if composite is not None:
            yield composite


def turned_down(graph: gs.Graph, visible: set[str]) -> list[TurnedDown]:
    """What is nearly a composite, in the order of the graph.

    Of nodes that follow each other the last one speaks for a pattern, and none where a composite of that
    kind is found in front of it or around it.
    """
    missed: dict[tuple[int, str], TurnedDown] = {}
    inside: set[int] = set()
    for node, composite, misses in _look(graph, visible):
        readers = [id(reader) for tensor in node.outputs for reader in tensor.outputs]
        if composite is not None:
            inside.update(id(member) for member in composite.interior)
            for reader in readers:
                missed.pop((reader, composite.node.op), None)
        elif id(node) not in inside:
            for miss in misses:
                if all((reader, miss.op) not in missed for reader in readers):
                    name = node.name or node.outputs[0].name
                    missed.setdefault((id(node), miss.op), TurnedDown(miss.op, name, miss.reason))
    return list(missed.values())[::-1]


def _look(graph: gs.Graph, visible: set[str]) -> Iterator[tuple[gs.Node, Composite | None, list[NearMiss]]]:
    """What is found at each node that may be the last of a group, last nodes first."""
    outputs = {tensor.name for tensor in graph.outputs}
    hidden: set[int] = set()
    for node in reversed(graph.nodes):
        if node.op in PATTERNS and node.domain in (None, "", "ai.onnx") and id(node) not in hidden:
            composite, misses = _composite_at(node, graph.opset, visible)
            if composite is not None:
                hidden |= composite.hidden(outputs)
            yield node, composite, misses


def _composite_at(last: gs.Node, opset: int, visible: set[str]) -> tuple[Composite | None, list[NearMiss]]:
    output = Output(last.outputs[0], opset)
    misses: list[NearMiss] = []
    for fits in PATTERNS[last.op]:
        spelled = fits(output)
        found = _enclose(last, spelled, visible) if isinstance(spelled, Spelled) else spelled
        if isinstance(found, Composite):
            return found, []
        if found is not None:
            misses.append(found)
    return None, misses


def _enclose(last: gs.Node, spelled: Spelled, visible: set[str]) -> Composite | NearMiss:
    """The composite that a group of nodes is, where it is closed and does not broadcast the first input."""
    inputs = [None if tensor is None else through(tensor) for tensor in spelled.inputs]
    group = _group(last, spelled.op, inputs, visible)
    if isinstance(group, NearMiss):
        return group
    read = [
        gs.Variable.empty() if tensor is None else group.entries.get(id(tensor), tensor) for tensor in inputs
    ]
    if spelled.keeps_shape and not _same_shape(last.outputs[0], read[0]):
        return NearMiss(
            spelled.op, f"its output has another shape than {read[0].name!r}: a constant broadcasts it"
        )
    virtual = VirtualNode(spelled.op, last.name, spelled.attrs, read, [last.outputs[0]], spelled.domain)
    return Composite(virtual, last, tuple(group.interior.values()))


@dataclass(frozen=True, eq=False)
class _Group:
    """The nodes between an operator's inputs and its last node."""

    interior: dict[int, gs.Node] = field(default_factory=dict)  #: by identity
    entries: dict[int, gs.Tensor] = field(
        default_factory=dict
    )  #: where an input is read, by the input's identity


def _group(last: gs.Node, op: str, inputs: list[gs.Tensor | None], visible: set[str]) -> _Group | NearMiss:
    """All that the last node is made of, back to the inputs and constants; a site inside keeps it open."""
    group = _Group()
    waiting = _read(last)
    while waiting:
        tensor = waiting.pop()
        source = through(tensor)
        is_input = any(source is known for known in inputs)
        if is_input and (tensor is source or tensor.name in visible):
            # A site on a copy of the input is an input itself, if everything is read from there.
            if group.entries.setdefault(id(source), tensor) is not tensor:
                return NearMiss(op, f"{source.name!r} is read both before and behind a site on it")
        elif not is_constant(tensor):
            node = tensor.inputs[0] if tensor.inputs else None
            if node is None:
                return NearMiss(op, f"it reads {tensor.name!r} besides its inputs")
            if tensor.name in visible:
                return NearMiss(op, f"{tensor.name!r} inside it is a site, which keeps its own variance")
            if len(group.interior) == MOST_NODES:
                return NearMiss(op, f"it would have more than {MOST_NODES} nodes")
            if id(node) not in group.interior:
                group.interior[id(node)] = node
                waiting += _read(node)
    return group


def _read(node: gs.Node) -> list[gs.Tensor]:
    """What a node takes values from; shapes, which are certain, do not count."""
    tensors = node.inputs[:1] if node.op in BROADCASTING else node.inputs
    return [tensor for tensor in tensors if tensor.name]


def _same_shape(output: gs.Tensor, x: gs.Tensor) -> bool:
    """False only where shapes are known to differ: constants may have broadcast x to more elements."""
    if output.shape is None or x.shape is None:
        return True
    known = [(a, b) for a, b in zip(output.shape, x.shape) if isinstance(a, int) and isinstance(b, int)]
    return len(output.shape) == len(x.shape) and all(a == b for a, b in known)
