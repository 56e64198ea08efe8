"""If, Loop and Scan: variance goes through their bodies by a twin.

The tensors inside a body are not visible outside, and a source node is never altered. So a second
node of the same kind stands beside the source's: its body holds copies of the source's nodes, which
give the means again, and the variance nodes that read them; it returns variances only. A body that
stays certain gets no twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.dtypes import is_float, variance_dtype
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.rules.registry import Accuracy, rule
from gapa_onnx.variance.rules.sequences import zero_sequence
from gapa_onnx.variance.rules.view import NodeView, Operand

COMPOSED = Accuracy.COMPOSED


@rule("If", accuracy=COMPOSED)
def if_(node: NodeView) -> tuple[Value | None, ...]:
    """The variance that the chosen branch gives, by a twin of the node."""
    branches = [node.attr("then_branch"), node.attr("else_branch")]
    graphs = [node.graph.child() for _ in branches]
    inside = [node.inside(body, graph, {}) for body, graph in zip(branches, graphs)]
    uncertain = [
        position
        for position in range(len(node.outputs))
        if any(body.outputs[position].name in found for body, found in zip(branches, inside))
    ]
    if not uncertain:
        return (None,) * len(node.outputs)
    bodies = []
    for body, graph, found in zip(branches, graphs, inside):
        results = [_result(graph, body.outputs[position], found) for position in uncertain]
        bodies.append(graph.to_body([], results))
        node.graph.close(graph)
    variances = _twin(node, [node.inputs[0].raw], uncertain, then_branch=bodies[0], else_branch=bodies[1])
    return tuple(variances.get(position) for position in range(len(node.outputs)))


@rule("Loop", accuracy=COMPOSED)
def loop(node: NodeView) -> tuple[Value | None, ...]:
    """Mean and variance states carried from step to step, by a twin of the node."""
    body: gs.Graph = node.attr("body")
    states = node.inputs[2:]
    count = len(states)
    uncertain, graph, found = _settled_states(node, body, 2, states)
    scans = [p for p in range(count, len(node.outputs)) if body.outputs[1 + p].name in found]
    if not uncertain and not scans:
        return (None,) * len(node.outputs)
    condition, *results = body.outputs
    inputs = [*body.inputs, *(_state_input(body.inputs[2 + p]) for p in uncertain)]
    outputs = [
        *(graph.tensor(t.name, t.dtype or np.float32) for t in (condition, *results[:count])),
        *(_result(graph, results[p], found) for p in uncertain),
        *(_result(graph, results[p], found) for p in scans),
    ]
    given = [operand.raw if operand.present else None for operand in node.inputs]
    given += [_initial(states[p]) for p in uncertain]
    twin_body = graph.to_body(
        inputs, outputs, [0, *_ranks(node, results, count, (*range(count), *uncertain, *scans))]
    )
    node.graph.close(graph)
    # The twin's outputs: the mean states again, then the variance states, then the scanned variances.
    dtypes = [node.outputs[p].dtype for p in (*range(count), *uncertain, *scans)]
    answers = node.graph.emit_several("Loop", *given, outputs=len(dtypes), dtypes=dtypes, body=twin_body)
    variances = dict(zip([*uncertain, *scans], answers[count:]))
    return tuple(variances.get(p) for p in range(len(node.outputs)))


@rule("Scan", accuracy=COMPOSED)
def scan(node: NodeView) -> tuple[Value | None, ...]:
    """Mean and variance states carried along the scanned axis, by a twin of the node."""
    if node.opset < 9:
        raise node.refuse("Scan of opset 8 has a batch axis of its own")
    body: gs.Graph = node.attr("body")
    count = len(node.inputs) - int(node.attr("num_scan_inputs"))
    states, sequences = node.inputs[:count], node.inputs[count:]
    read = [p for p, operand in enumerate(sequences) if not operand.certain]
    uncertain, graph, found = _settled_states(node, body, 0, states, [count + p for p in read])
    scans = [p for p in range(count, len(node.outputs)) if body.outputs[p].name in found]
    if not uncertain and not scans:
        return (None,) * len(node.outputs)
    twin_body = _scan_body(node, body, graph, found, count, uncertain, read, scans)
    node.graph.close(graph)
    dtypes = [node.outputs[p].dtype for p in (*range(count), *uncertain, *scans)]
    answers = node.graph.emit_several(
        "Scan",
        *(operand.raw for operand in states),
        *(_initial(states[p]) for p in uncertain),
        *(operand.raw for operand in sequences),
        *(sequences[p].var for p in read),
        outputs=len(dtypes),
        dtypes=dtypes,
        body=twin_body,
        **_scan_attributes(node, count, read, scans),
    )
    variances = dict(zip([*uncertain, *scans], answers[count:]))
    return tuple(variances.get(p) for p in range(len(node.outputs)))


def _scan_body(
    node: NodeView,
    body: gs.Graph,
    graph: VarianceGraph,
    found: dict[str, Value],
    count: int,
    uncertain: Sequence[int],
    read: Sequence[int],
    scans: Sequence[int],
) -> gs.Graph:
    """The body of the twin: variance states stand behind the `count` mean states, scanned variances behind
    the scanned means; of what is stacked it returns the variances alone."""
    inputs = [
        *body.inputs[:count],
        *(_state_input(body.inputs[p]) for p in uncertain),
        *body.inputs[count:],
        *(_state_input(body.inputs[count + p]) for p in read),
    ]
    outputs = [
        *(graph.tensor(t.name, t.dtype or np.float32) for t in body.outputs[:count]),
        *(_result(graph, body.outputs[p], found) for p in uncertain),
        *(_result(graph, body.outputs[p], found) for p in scans),
    ]
    ranks = _ranks(node, body.outputs, count, (*range(count), *uncertain, *scans))
    return graph.to_body(inputs, outputs, ranks)


def _scan_attributes(node: NodeView, count: int, read: Sequence[int], scans: Sequence[int]) -> dict[str, Any]:
    """Axes and directions of the twin: those of `read` inputs once more, and those of the outputs `scans` behind
    the `count` states."""
    attrs: dict[str, Any] = {"num_scan_inputs": int(node.attr("num_scan_inputs")) + len(read)}
    for name in ("scan_input_axes", "scan_input_directions"):
        if node.attr(name) is not None:
            attrs[name] = [*node.attr(name), *(node.attr(name)[p] for p in read)]
    for name in ("scan_output_axes", "scan_output_directions"):
        if node.attr(name) is not None:
            attrs[name] = [node.attr(name)[p - count] for p in scans]
    return attrs


# --------------------------------------------------------------------------- pieces


def _settled_states(
    node: NodeView, body: gs.Graph, first: int, states: Sequence[Operand], read: Sequence[int] = ()
) -> tuple[list[int], VarianceGraph, dict[str, Value]]:
    """Which states are uncertain at some step, and the walk of the body with those.

    A state that starts certain may become uncertain in the body, which may make others uncertain in
    the next step; each round adds at least one, so the search ends.
    """
    carried_out = body.outputs[1:] if first else body.outputs  # the first output of a Loop is its condition
    uncertain = [p for p, state in enumerate(states) if not state.certain]
    while True:
        graph = node.graph.child()
        names = [body.inputs[first + p].name for p in uncertain] + [body.inputs[p].name for p in read]
        tensors = {tensor.name: tensor for tensor in body.inputs}
        known = {name: graph.tensor(f"{name}/var", variance_dtype(tensors[name].dtype)) for name in names}
        found = node.inside(body, graph, known)
        grown = [
            p
            for p in range(len(states))
            if p in uncertain or _floats(carried_out[p]) and carried_out[p].name in found
        ]
        if grown == uncertain:
            return uncertain, graph, found
        uncertain = grown


def _ranks(
    node: NodeView, results: Sequence[gs.Tensor], count: int, positions: Sequence[int]
) -> list[int | None]:
    return [_rank(node, results, count, position) for position in positions]


def _rank(node: NodeView, results: Sequence[gs.Tensor], count: int, position: int) -> int | None:
    """How many axes a body's result has, as the body says or as follows from the node's output, where what is
    stacked has one more; None if nobody tells.

    onnxruntime wants a Scan's body to know, and cannot always infer it of variances. Sizes are not told: a Loop's
    may change from step to step.
    """
    if results[position].shape is not None:
        return len(results[position].shape)
    shape = node.outputs[position].shape if position < len(node.outputs) else None
    return None if shape is None else len(shape) - (position >= count)


def _floats(tensor: gs.Tensor) -> bool:
    return is_float(tensor.dtype)


def _state_input(tensor: gs.Tensor) -> gs.Variable:
    shape = None if tensor.shape is None else [None] * len(tensor.shape)
    return gs.Variable(f"{tensor.name}/var", variance_dtype(tensor.dtype), shape)


def _initial(state: Operand) -> Value:
    if state.var is not None:
        return state.var
    is_sequence = getattr(state.tensor, "type", None) == "sequence_type"
    return zero_sequence(state) if is_sequence else state.graph.zeros(state.mean)


def _result(graph: VarianceGraph, tensor: gs.Tensor, found: dict[str, Value]) -> Value:
    """The variance of a body's output, as a tensor of the body; zeros where it is certain there."""
    var = found.get(tensor.name)
    if var is None:
        mean = graph.tensor(tensor.name, tensor.dtype or np.float32)
        var = graph.zeros(graph.cast(mean, variance_dtype(tensor.dtype)))
    return graph.emit("Identity", var, names=(f"{tensor.name}/var/result",))


def _twin(
    node: NodeView, inputs: Sequence[Value], positions: Sequence[int], **bodies: gs.Graph
) -> dict[int, Value | None]:
    dtypes = [node.outputs[p].dtype for p in positions]
    answers = node.graph.emit_several(node.op_type, *inputs, outputs=len(positions), dtypes=dtypes, **bodies)
    return dict(zip(positions, answers))
