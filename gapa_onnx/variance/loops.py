"""Loops that rules emit of their own, for operators that repeat a step inside.

Loop is the one form of repetition that is the same in every opset: Scan comes with opset 8, where it
has a batch axis that opset 9 drops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.variance.graph import Value, VarianceGraph

Body = Callable[[VarianceGraph, Value, list[Value]], tuple[Sequence[Value], Sequence[Value]]]


def loop(
    graph: VarianceGraph, count: Value, states: Sequence[Value], body: Body, name: str
) -> tuple[list[Value], list[Value]]:
    """Emit a Loop of `count` steps; the last states, and what each step gave, stacked on a new first axis.

    `body(inner, step, states)` emits one step into the graph `inner` and returns the next states and
    the values to stack. It reads values from outside by `inner.adopt(value)`.

    Parameters
    ----------
    count: an int64 scalar or a tensor of one element.
    name: what the loop's tensors are called by.
    """
    inner = graph.child()
    step, running = inner.unique(f"{name}/step"), inner.unique(f"{name}/running")
    carried = [inner.unique(f"{name}/state/{position}") for position in range(len(states))]
    inputs = [gs.Variable(step, np.dtype(np.int64), ()), gs.Variable(running, np.dtype(np.bool_), ())]
    inputs += [gs.Variable(state, value.dtype) for state, value in zip(carried, states)]
    with inner.scope(name):
        given = [inner.tensor(state, value.dtype) for state, value in zip(carried, states)]
        following, stacked = body(inner, inner.tensor(step, np.int64), given)
        # A body may return a tensor twice, or one that it was given: each result is a tensor of its own.
        results = [inner.tensor(running, np.bool_), *following, *stacked]
        names = ["running/next", *(f"next/{p}" for p in range(len(following)))]
        names += [f"each/{p}" for p in range(len(stacked))]
        results = [inner.emit("Identity", r, names=(f"{name}/{n}",)) for r, n in zip(results, names)]
    closed = inner.to_body(inputs, results)
    graph.close(inner)
    answers = graph.emit_several(
        "Loop", count, None, *states, outputs=len(results) - 1, dtype=np.float32, body=closed
    )
    for answer, value in zip(answers, [*following, *stacked]):
        answer.dtype = value.dtype
    return list(answers[: len(states)]), list(answers[len(states) :])
