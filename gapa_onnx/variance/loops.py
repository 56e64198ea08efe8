"""Loops that rules emit of their own, for operators that repeat a step inside.

Loop is the one form of repetition that is the same in every opset: Scan comes with opset 8, where it
has a batch axis that opset 9 drops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.variance.builder import GraphBuilder
from gapa_onnx.variance.values import Value

Builder = TypeVar("Builder", bound=GraphBuilder)
Body = Callable[[Builder, Value, list[Value]], tuple[Sequence[Value], Sequence[Value]]]


def loop(
    graph: Builder,
    count: Value,
    states: Sequence[Value],
    body: Body[Builder],
    name: str,
    ranks: Sequence[int] | None = None,
) -> tuple[list[Value], list[Value]]:
    """Emit a Loop of `count` steps; the last states, and what each step gave, stacked on a new first axis.

    `body(inner, step, states)` emits one step into the graph `inner` and returns the next states and
    the values to stack. It reads values from outside by `inner.adopt(value)`.

    Parameters
    ----------
    count: an int64 scalar or a tensor of one element.
    name: what the loop's tensors are called by.
    ranks: of the states and of what each step gives, where the file is to say them. Sizes may change from step
        to step, so no dimension is named.
    """
    inner = graph.child()
    step, running = inner.unique(f"{name}/step"), inner.unique(f"{name}/running")
    carried = [inner.unique(f"{name}/state/{position}") for position in range(len(states))]
    shapes = [None] * len(states) if ranks is None else [[None] * rank for rank in ranks]
    inputs = [
        gs.Variable(step, np.dtype(np.int64), ()),
        gs.Variable(running, np.dtype(np.bool_), ()),
        *(gs.Variable(state, value.dtype, shape) for state, value, shape in zip(carried, states, shapes)),
    ]
    with inner.scope(name):
        number, go_on, *given = map(inner.declare, inputs)
        following, stacked = body(inner, number, given)
        # A body may return a tensor twice, or one that it was given: each result is a tensor of its own.
        results = [go_on, *following, *stacked]
        names = ["running/next", *(f"next/{p}" for p in range(len(following)))]
        names += [f"each/{p}" for p in range(len(stacked))]
        results = [inner.emit("Identity", r, names=(f"{name}/{n}",)) for r, n in zip(results, names)]
    closed = inner.to_body(inputs, results, () if ranks is None else (0, *ranks))
    graph.close(inner)
    dtypes = [value.dtype for value in (*following, *stacked)]
    answers = graph.emit_several(
        "Loop", count, None, *states, outputs=len(dtypes), dtypes=dtypes, body=closed
    )
    return list(answers[: len(states)]), list(answers[len(states) :])
