"""Rotary embeddings: pairs of features turned by an angle that depends on the token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.attention import Uncertain, join_heads, split_heads
from gapa_onnx.variance.rules.registry import Accuracy, rule
from gapa_onnx.variance.rules.view import NodeView, Operand


@dataclass(frozen=True)
class Rotation:
    """Pairs of features turned by an angle that depends on the token.

    cos, sin are (batch, 1, tokens, width / 2); the first `width` features turn (None: all of them).
    Where x₁, x₂ are a pair, the variance of c x₁ - s x₂ is c² v₁ + s² v₂.
    """

    cos: Value
    sin: Value
    interleaved: bool
    width: int | None = None

    def __call__(self, x: Uncertain) -> Uncertain:
        squared = Rotation(self.cos.squared, self.sin.squared, self.interleaved, self.width)
        return Uncertain(self._turned(x.mean, -1), None if x.var is None else squared._turned(x.var, 1))

    def _turned(self, x: Value, sign: int) -> Value:
        """(c x₁ + sign · s x₂, s x₁ + c x₂); x is (batch, heads, tokens, d)."""
        graph = x.graph
        turning = x if self.width is None else graph.slice(x, 3, 0, self.width)
        axis, shape = (4, (0, 0, 0, -1, 2)) if self.interleaved else (3, (0, 0, 0, 2, -1))
        pairs = graph.emit("Reshape", turning, graph.ints(*shape))
        first, second = (
            graph.emit("Gather", pairs, graph.constant(np.asarray(i, np.int64)), axis=axis) for i in (0, 1)
        )
        real = self.cos * first + self.sin * second if sign > 0 else self.cos * first - self.sin * second
        turned = [graph.unsqueeze(part, [axis]) for part in (real, self.sin * first + self.cos * second)]
        joined = graph.emit("Concat", *turned, axis=axis)
        joined = graph.emit("Reshape", joined, graph.ints(0, 0, 0, -1))
        if self.width is None:
            return joined
        return graph.emit("Concat", joined, graph.slice(x, 3, self.width, None), axis=3)


def cached_angles(cache: Operand, positions: Value | None) -> Value:
    """cos or sin as (batch, 1, tokens, width / 2): rows of the cache, by the tokens' positions."""
    rows = cache.mean if positions is None else cache.graph.emit("Gather", cache.mean, positions, axis=0)
    return cache.graph.unsqueeze(rows, [1])


@rule("RotaryEmbedding", accuracy=Accuracy.EXACT)
def rotary_embedding(node: NodeView) -> Value:
    """cos² v₁ + sin² v₂ and sin² v₁ + cos² v₂ for each pair of features."""
    x, cos, sin = node.inputs[:3]
    if not (cos.certain and sin.certain):
        raise node.refuse("its angles are uncertain")
    given = node.input(3)
    positions = None if given is None else given.raw
    turn = Rotation(
        cached_angles(cos, positions),
        cached_angles(sin, positions),
        bool(node.attr("interleaved", 0)),
        node.attr("rotary_embedding_dim", 0) or None,
    )
    if x.rank == 3:
        return join_heads(turn(Uncertain.of(x).moved(split_heads(node.attr("num_heads")))).variance)
    return turn(Uncertain.of(x)).variance


@rule("RotaryEmbedding", accuracy=Accuracy.EXACT, domain="com.microsoft")
def microsoft_rotary_embedding(node: NodeView) -> Value:
    """cos² v₁ + sin² v₂ and sin² v₁ + cos² v₂ for each pair of features."""
    x, positions, cos, sin = node.inputs
    if not (cos.certain and sin.certain):
        raise node.refuse("its angles are uncertain")
    if node.attr("is_packed_batching", 0):
        raise node.refuse("its sequences are packed into one (is_packed_batching)")
    if node.attr("scale", 1.0) != 1.0:
        raise node.refuse("its scale is not 1: runtimes disagree on what it scales")
    graph, heads = node.graph, node.attr("num_heads", 0)
    value = Uncertain.of(x)
    flat = x.rank == 3
    if flat and heads:
        value = value.moved(split_heads(heads))
    elif flat:
        size = cos.shape[1] if cos.shape is not None else None
        if not isinstance(size, int):
            raise node.refuse("the width of its angles is unknown")
        value = value.moved(lambda t: _split_by_size(t, 2 * size))
    where = graph.cast(positions.raw, np.int64)
    if positions.rank == 1:  # the position of the first token
        steps = graph.positions(graph.dimension(value.mean, 2))
        where = graph.unsqueeze(graph.emit("Add", steps, where), [0])
    turn = Rotation(
        cached_angles(cos, where),
        cached_angles(sin, where),
        bool(node.attr("interleaved", 0)),
        node.attr("rotary_embedding_dim", 0) or None,
    )
    var = turn(value).variance
    return join_heads(var) if flat else var


def _split_by_size(x: Value, size: int) -> Value:
    """(batch, tokens, heads · d) -> (batch, heads, tokens, d), by d."""
    parted = x.graph.emit("Reshape", x, x.graph.ints(0, 0, -1, size))
    return x.graph.emit("Transpose", parted, perm=[0, 2, 1, 3])
