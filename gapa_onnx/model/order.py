"""Nodes in an order in which each stands behind those that it reads.

ONNX asks for such an order and onnxruntime does not: it runs files whose nodes stand anyhow. Every walk of a graph
here goes by the list of its nodes, so it is put in order when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx

from gapa_onnx.errors import UserError
from gapa_onnx.model.protos import duplicate


def in_order(model: onnx.ModelProto, label: str = "the model") -> onnx.ModelProto:
    """The model with every list of nodes in order, also those of bodies and functions; itself if they are already.

    A node that stands too late is moved in front of the first that reads it, and all others stay. Raises UserError
    for nodes that wait for each other.
    """
    if _is_ordered(model.graph.node) and all(_is_ordered(function.node) for function in model.functions):
        return model
    model = duplicate(model)
    for holder in (model.graph, *model.functions):
        _put_in_order(holder, label)
    return model


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _reads(node: onnx.NodeProto) -> dict[str, None]:
    """What a node needs to be there: its inputs, and what its bodies take from outside; in order, each once."""
    names = dict.fromkeys(name for name in node.input if name)
    for body in _bodies(node):
        names.update(_taken_from_outside(body))
    return names


def _taken_from_outside(body: onnx.GraphProto) -> dict[str, None]:
    own = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
    own.update(tensor.values.name for tensor in body.sparse_initializer)
    own.update(name for node in body.node for name in node.output)
    read = [name for node in body.node for name in _reads(node)]
    return dict.fromkeys(name for name in (*read, *(value.name for value in body.output)) if name not in own)


def _is_ordered(nodes: Iterable[onnx.NodeProto]) -> bool:
    nodes = list(nodes)
    ahead = {name for node in nodes for name in node.output if name}
    for node in nodes:
        if not ahead.isdisjoint(_reads(node)):
            return False
        if not all(_is_ordered(body.node) for body in _bodies(node)):
            return False
        ahead.difference_update(node.output)
    return True


def _put_in_order(holder: onnx.GraphProto | onnx.FunctionProto, label: str) -> None:
    nodes = holder.node
    for node in nodes:
        for body in _bodies(node):
            _put_in_order(body, label)
    order = _order(nodes, label)
    if order != list(range(len(nodes))):
        moved = [onnx.NodeProto.FromString(nodes[position].SerializeToString()) for position in order]
        del nodes[:]
        nodes.extend(moved)


def _order(nodes: Sequence[onnx.NodeProto], label: str) -> list[int]:
    """Positions of the nodes in order: each node in turn, behind those that it waits for."""
    makers = {name: position for position, node in enumerate(nodes) for name in node.output if name}
    order: list[int] = []
    placed = [False] * len(nodes)
    for first in range(len(nodes)):
        # The nodes that wait, each for the next, with what is still to be looked at of what they read.
        waiting = {} if placed[first] else {first: iter(_reads(nodes[first]))}
        while waiting:
            current = next(reversed(waiting))
            for name in waiting[current]:
                needed = makers.get(name)
                if needed is None or placed[needed]:
                    continue
                if needed in waiting:
                    raise _cycle(nodes, list(waiting)[list(waiting).index(needed) :], label)
                waiting[needed] = iter(_reads(nodes[needed]))
                break
            else:
                del waiting[current]
                placed[current] = True
                order.append(current)
    return order


def _cycle(nodes: Sequence[onnx.NodeProto], positions: Sequence[int], label: str) -> UserError:
    names = [nodes[position].name or nodes[position].output[0] for position in positions]
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return UserError(f"the nodes of {label} wait for each other: {shown}", "export the model again")
