"""RNN, GRU and LSTM: the variance of the state is carried from step to step.

Each step is exact to first order (`cells`). Between steps only the covariances within one unit are kept:
v_h, and for LSTM v_c and cov(h, c). Correlation *between units* is dropped, which is why the rules are
heuristic for more than one step of more than one unit.

Gates are interior to the source's node, so a Loop beside it computes the means again with the variances.
Products with the data do not wait for the state and are made for all steps at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.loops import loop
from gapa_onnx.variance.rules.attention import Uncertain
from gapa_onnx.variance.rules.cells import (
    Activation,
    Cell,
    State,
    Weights,
    activations_of,
    clipped,
    gru_step,
    lstm_step,
    matmul,
    rnn_step,
)
from gapa_onnx.variance.rules.registry import Accuracy, rule
from gapa_onnx.variance.rules.view import NodeView

HEURISTIC = Accuracy.HEURISTIC


@rule("RNN", accuracy=HEURISTIC, linear=True)
def rnn(node: NodeView) -> tuple[Value | None, ...]:
    """φ'² ((W∘W) v_x + (R∘R) v_h), step by step; correlation between units is dropped after each."""
    return _layer(node, Cell("h", "h", ["Tanh"], rnn_step), _plain_weights(node))


@rule("GRU", accuracy=HEURISTIC, linear=True)
def gru(node: NodeView) -> tuple[Value | None, ...]:
    """J² v of each step in closed form; correlation between units is dropped after each."""
    return _layer(node, Cell("zrh", "zrh", ["Sigmoid", "Tanh"], gru_step), _plain_weights(node))


@rule("LSTM", accuracy=HEURISTIC, linear=True)
def lstm(node: NodeView) -> tuple[Value | None, ...]:
    """J² v of each step in closed form, with v_h, v_c, cov(h, c) of each unit as its state;
    correlation between units is dropped after each."""
    return _layer(node, _lstm_cell(node), _plain_weights(node))


@rule("DynamicQuantizeLSTM", accuracy=HEURISTIC, linear=True, domain="com.microsoft")
def quantised_lstm(node: NodeView) -> tuple[Value | None, ...]:
    """As LSTM, on dequantised weights; the rounding of data and state is not seen."""
    if any(not operand.certain for operand in node.inputs[8:]):
        raise node.refuse("its scales are uncertain")

    def weights(position: int, direction: int) -> Value:
        """(…, K·H)"""
        at = (1, 9, 8) if position == 1 else (2, 11, 10)
        values, zero, scale = (_pick(node.graph, node.inputs[p].mean, direction) for p in at)
        return (values - zero) * scale

    return _layer(node, _lstm_cell(node), weights)


def _lstm_cell(node: NodeView) -> Cell:
    coupled = node.attr("input_forget", 0)  # f = 1 - i: its own weights are not used
    return Cell("iofc", "ioc" if coupled else "iofc", ["Sigmoid", "Tanh", "Tanh"], lstm_step)


def _plain_weights(node: NodeView) -> Callable[[int, int], Value]:
    def weights(position: int, direction: int) -> Value:
        """(…, K·H)"""
        one = _pick(node.graph, node.inputs[position].mean, direction)
        return node.graph.emit("Transpose", one, perm=[1, 0])

    return weights


def _layer(node: NodeView, cell: Cell, weights: Callable[[int, int], Value]) -> tuple[Value | None, ...]:
    """The variances of Y, Y_h, Y_c. `weights(position, direction)` gives an input as (…, K·H)."""
    graph = node.graph
    _check(node)
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    backwards = directions[node.attr("direction", "forward")]
    batch_first = bool(node.attr("layout", 0))
    data = Uncertain.of(node.inputs[0])
    if batch_first:
        data = data.moved(lambda value: graph.emit("Transpose", value, perm=[1, 0, 2]))
    x, v_x = data.mean, data.var  # (T, B, I)
    activations = activations_of(node, cell.activations, len(backwards))
    name = next(output.tensor.name for output in node.outputs if output.present)
    wanted = [output.present for output in node.outputs] + [False] * 2
    found = []
    with graph.scope(f"{name}/var"):  # of the first output that is there
        for d, backward in enumerate(backwards):
            w = _gather_weights(node, cell, weights, d, x, v_x)
            start = _initial_state(node, d, w.data[cell.used[0]], "c" in cell.used)
            functions = [clipped(a, node.attr("clip")) for a in activations[d][:2]] + activations[d][2:]
            found.append(
                _run(node, cell, functions, w, start, x, backward, f"{name}/var/steps{d}", wanted[0])
            )
        each, last_h, last_c = zip(*found)
        results = (
            _joined(graph, each, axis=1, perm=[2, 0, 1, 3] if batch_first else None) if wanted[0] else None,
            _joined(graph, last_h, axis=0, perm=[1, 0, 2] if batch_first else None) if wanted[1] else None,
            _joined(graph, last_c, axis=0, perm=[1, 0, 2] if batch_first else None) if wanted[2] else None,
        )
    return results[: len(node.outputs)]


def _check(node: NodeView) -> None:
    for position, what in ((1, "W"), (2, "R"), (3, "B"), (7, "P")):
        operand = node.input(position)
        if operand is not None and not operand.certain:
            raise node.refuse(f"its weights {what} are uncertain")


def _hidden_size(node: NodeView) -> int:
    size = node.attr("hidden_size")
    if size is None and node.inputs[2].shape is not None:
        size = node.inputs[2].shape[-1]
    if not isinstance(size, int):
        raise node.refuse("its hidden_size is not stated")
    return size


def _gather_weights(
    node: NodeView,
    cell: Cell,
    weights: Callable[[int, int], Value],
    direction: int,
    x: Value,
    v_x: Value | None,
) -> Weights:
    """All that does not depend on the state."""
    graph, hidden = node.graph, _hidden_size(node)

    def by_gate(value: Value, gates: str) -> dict[str, Value]:
        return dict(zip(gates, graph.split(value, len(gates), axis=1)))

    of_data, of_state = (by_gate(weights(position, direction), cell.gates) for position in (1, 2))
    data = {gate: matmul(x, of_data[gate]) for gate in cell.used}
    data, recurrence_bias = _with_bias(node, cell, direction, data)
    data_pairs, peepholes = {}, {}
    if v_x is not None:
        data_pairs = {pair: matmul(v_x, of_data[pair[0]] * of_data[pair[1]]) for pair in cell.pairs}
    given = node.input(7)
    if cell.gates == "iofc" and given is not None:
        peepholes = dict(zip("iof", graph.split(_pick(graph, given.mean, direction), 3, axis=0)))
    diagonal = graph.constant(np.arange(hidden, dtype=np.int64) * (hidden + 1))
    flat = {gate: graph.emit("Reshape", of_state[gate], graph.ints(-1)) for gate in cell.used}
    return Weights(
        data=data,
        data_pairs=data_pairs,
        recurrence={gate: of_state[gate] for gate in cell.used},
        recurrence_pairs={pair: of_state[pair[0]] * of_state[pair[1]] for pair in cell.pairs},
        own={gate: graph.emit("Gather", flat[gate], diagonal, axis=0) for gate in cell.used},
        peepholes=peepholes,
        recurrence_bias=recurrence_bias,
    )


def _with_bias(
    node: NodeView, cell: Cell, direction: int, data: dict[str, Value]
) -> tuple[dict[str, Value], dict[str, Value]]:
    """The products with the data plus both biases, but for what a GRU may add to the state before its reset."""
    bias = node.input(3)
    if bias is None:
        return data, {}
    found, of_state = dict(data), {}
    after_reset = cell.gates == "zrh" and node.attr("linear_before_reset", 0)
    parts = node.graph.split(_pick(node.graph, bias.mean, direction), 2 * len(cell.gates), axis=0)
    for gate, own, recurrent in zip(cell.gates, parts, parts[len(cell.gates) :]):
        if gate == "h" and after_reset:
            found[gate] = data[gate] + own
            of_state[gate] = recurrent
        elif gate in data:
            found[gate] = data[gate] + (own + recurrent)
    return found, of_state


def _initial_state(node: NodeView, direction: int, data: Value, has_cell: bool) -> State:
    """Means and variances before the first step; zeros where nothing is given."""
    graph = node.graph
    zeros = graph.zeros(_pick(graph, data, 0))  # (B, H)
    axis = 1 if node.attr("layout", 0) else 0
    state = {}
    for name, position in (("h", 5), ("c", 6))[: 1 + has_cell]:
        operand = node.input(position)
        given = (None, None) if operand is None else (operand.mean, operand.var)
        for key, value in zip((name, f"v_{name}"), given):
            state[key] = zeros if value is None else _pick(graph, value, direction, axis)
    if has_cell:  # different tensors are independent
        h, c = node.input(5), node.input(6)
        state["hc"] = state["v_h"] if h and c and h.tensor.name == c.tensor.name else zeros
    return state


def _run(
    node: NodeView,
    cell: Cell,
    activations: list[Activation],
    weights: Weights,
    start: State,
    x: Value,
    backward: bool,
    name: str,
    stack: bool,
) -> tuple[Value | None, Value, Value | None]:
    """One direction: v_h of each step (T, B, H), the last v_h and the last v_c (B, H)."""
    graph = node.graph
    count = graph.emit("Gather", graph.shape(x), graph.constant(np.int64(0)), axis=0)
    last = count - 1
    given = node.input(4)
    lengths = None if given is None else graph.unsqueeze(graph.cast(given.raw, x.dtype), [1])  # (B, 1)

    def step(inner: VarianceGraph, number: Value, states: list[Value]) -> tuple[list[Value], list[Value]]:
        position = inner.adopt(last) - number if backward else number
        old = dict(zip(start, states))
        new = cell.step(node, activations, weights.within(inner).at(position), old)
        shown = new["v_h"]
        if lengths is not None:
            # Beyond the end of a sequence its state stands still: backwards, until its end is reached.
            inside = inner.emit(
                "Greater", inner.adopt(lengths), inner.cast(position, x.dtype), dtype=np.bool_
            )
            new = {key: inner.where(inside, new[key], old[key]) for key in old}
            shown = inner.where(inside, shown, inner.constant(np.zeros((), x.dtype)))
        return [new[key] for key in old], [shown, position] if backward and stack else [shown][: int(stack)]

    states, each = loop(graph, count, list(start.values()), step, name)
    found = dict(zip(start, states))
    if lengths is not None:  # a sequence of no steps has a final state of 0, whatever it starts with
        some = graph.emit("Greater", lengths, graph.constant(np.zeros((), x.dtype)), dtype=np.bool_)
        found = {
            key: graph.where(some, value, graph.constant(np.zeros((), x.dtype)))
            for key, value in found.items()
        }
    # Steps were taken from the last to the first; the positions that they tell undo this.
    ordered = each[0] if each else None
    if len(each) == 2:
        ordered = graph.emit("Gather", each[0], each[1], axis=0)
    return ordered, found["v_h"], found.get("v_c")


def _pick(graph: VarianceGraph, value: Value, index: int, axis: int = 0) -> Value:
    return graph.emit("Gather", value, graph.constant(np.int64(index)), axis=axis)


def _joined(graph: VarianceGraph, values: tuple[Value, ...], axis: int, perm: list[int] | None) -> Value:
    """Directions on an axis of their own."""
    parts = [graph.unsqueeze(value, [axis]) for value in values]
    joined = graph.emit("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]
    return joined if perm is None else graph.emit("Transpose", joined, perm=perm)
