"""Fourier transforms, linear in the signal: v_y = W² v, with cos² and sin² (times window²) for weights.

The weights are what the operator itself makes of unit vectors, one per real or imaginary part of a
sample. cos² + sin² = 1 would allow a fast transform of the variance instead, but as a difference that
cancels wherever one of the two is small, such as for the imaginary part of the mean.
"""

from __future__ import annotations

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.registry import Accuracy, deterministic, rule
from gapa_onnx.variance.rules.view import NodeView

MOST_SAMPLES = 8192  #: of a transform: its weights are 2 · 8192² numbers then

deterministic(
    "it depends on its settings only", "BlackmanWindow", "HannWindow", "HammingWindow", "MelWeightMatrix"
)


def _unit_vectors(node: NodeView, samples: Value) -> Value:
    """(samples · parts, samples, parts): a signal for each number that a signal consists of."""
    graph, x = node.graph, node.inputs[0]
    parts = graph.dimension(x.raw, x.rank - 1)
    eye = graph.eye(samples * parts, x.dtype)
    return graph.emit("Reshape", eye, graph.emit("Concat", graph.ints(-1), samples, parts, axis=0))


def _squared_weights(node: NodeView, response: Value) -> Value:
    """(samples · parts, numbers of an output)"""
    return node.graph.emit("Reshape", response.squared, node.graph.ints(0, -1))


def _check_size(node: NodeView, samples: int | np.integer | str | None) -> None:
    if isinstance(samples, (int, np.integer)) and samples > MOST_SAMPLES:
        raise node.refuse(f"a transform of {samples} samples: its weights would not fit into memory")


@rule("DFT", accuracy=Accuracy.EXACT)
def dft(node: NodeView) -> Value:
    """Σ w² v with w = cos and sin of the transform."""
    x, length = node.inputs[0], node.input(1)
    graph, rank = node.graph, x.rank
    axis = node.attr("axis", 1)
    if node.opset >= 20:
        given = node.input(2)
        axis = -2 if given is None else given.constant
        if axis is None:
            raise node.refuse("its axis is not constant")
    axis = int(np.ravel(axis)[0]) % rank
    _check_size(node, x.sizes[axis])
    vectors = _unit_vectors(node, graph.dimension(x.raw, axis))
    if node.opset >= 20:
        samples = None if length is None else length.raw
        response = node.again(vectors, samples, graph.constant(np.int64(1)))
    else:
        response = node.again(vectors, *([] if length is None else [length.raw]), axis=1)
    weights = _squared_weights(node, response)

    swap = list(range(rank))
    swap[axis], swap[rank - 2] = swap[rank - 2], swap[axis]
    moved = graph.emit("Transpose", x.var, perm=swap)
    flat = graph.emit("Reshape", moved, graph.ints(*[0] * (rank - 2), -1))  # (…, samples · parts)
    shape = graph.emit("Gather", graph.shape(node.output.raw), graph.ints(*swap), axis=0)
    var = graph.emit("Reshape", graph.emit("MatMul", flat, weights), shape)
    return graph.emit("Transpose", var, perm=swap)


@rule("STFT", accuracy=Accuracy.EXACT)
def stft(node: NodeView) -> Value:
    """Σ w² v over each frame, with w = cos and sin of the transform times the window."""
    x, step, window, length = node.inputs[0], node.inputs[1], node.input(2), node.input(3)
    if window is not None and not window.certain:
        raise node.refuse("its window is uncertain")
    graph = node.graph
    if length is not None:
        samples = graph.emit("Reshape", graph.cast(length.raw, np.int64), graph.ints(1))
    else:
        samples = graph.dimension(x.raw, 1) if window is None else graph.dimension(window.raw, 0)
    if window is not None:
        _check_size(node, None if window.shape is None else window.shape[0])
    else:
        known = None if length is None else length.constant
        _check_size(node, None if known is None else int(np.ravel(known)[0]))
    vectors = _unit_vectors(node, samples)
    frame = [None if window is None else window.mean, None if length is None else length.raw]
    response = node.again(vectors, step.raw, *(frame if length is not None else frame[:1]))
    weights = _squared_weights(node, response)

    frames = graph.positions(graph.dimension(node.output.raw, 1))  # (F,)
    starts = graph.unsqueeze(frames * graph.cast(step.raw, np.int64), [1])
    cut = graph.emit("Gather", x.var, starts + graph.positions(samples), axis=1)  # (B, F, samples, parts)
    flat = graph.emit("Reshape", cut, graph.ints(0, 0, -1))
    return graph.emit("Reshape", graph.emit("MatMul", flat, weights), graph.shape(node.output.raw))
