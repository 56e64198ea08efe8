"""onnxruntime's fused attention operators (domain com.microsoft), down to the shared formulas.

Each brings its inputs into the form of `attention.Attention`, (batch, heads, tokens, d), and its
masks into a bias of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.attention import (
    Attention,
    Uncertain,
    default_scale,
    every,
    join_heads,
    key_positions,
    repeat_heads,
    split_heads,
    window,
)
from gapa_onnx.variance.rules.registry import Accuracy, refused, rule
from gapa_onnx.variance.rules.rotary import Rotation, cached_angles
from gapa_onnx.variance.rules.view import NodeView, Operand

MICROSOFT = "com.microsoft"


def _full(node: NodeView) -> bool:
    return node.options.attention == "full"


def _refuse_inputs(node: NodeView, reasons: dict[int, str]) -> None:
    for position, reason in reasons.items():
        if node.input(position) is not None:
            raise node.refuse(reason)


def _head_size(operand: Operand, axis: int, heads: int) -> int | None:
    size = operand.shape[axis] if operand.shape is not None else None
    return size // heads if isinstance(size, int) else None


def _scaled(node: NodeView, q: Uncertain, size: int | None) -> Value | float:
    return node.attr("scale", 0.0) or default_scale(q.mean, size)


# ------------------------------------------------------------------------------- masks


def _column(x: Value) -> Value:
    """(n, …) as (n, 1, 1, 1)"""
    return x.graph.emit("Reshape", x, x.graph.ints(-1, 1, 1, 1))


def _mask_bias(node: NodeView, mask: Operand | None, q: Value, k: Value, past: Value | None) -> Value | None:
    """What a mask adds to the scores: nothing at keys that are seen, `mask_filter_value` elsewhere."""
    if mask is None:
        return None
    graph = node.graph
    values = graph.cast(mask.raw, q.dtype)
    if mask.rank == 1:
        seen = _seen_range(node, values, q, k)
    elif mask.rank == 4:  # (batch, 1, longest, longest)
        rows = graph.positions(graph.dimension(q, 2))
        rows = rows if past is None else rows + past
        values = graph.emit("Gather", values, rows, axis=2)
        seen = graph.emit("Gather", values, graph.positions(graph.dimension(k, 2)), axis=3) > 0
    else:
        seen = graph.unsqueeze(values, [1, 2] if mask.rank == 2 else [1]) > 0
    filtered: float = node.attr("mask_filter_value", -10000.0)
    return (1 - seen) * filtered


def _seen_range(node: NodeView, lengths: Value, q: Value, k: Value) -> Value:
    """Keys before the end of each sequence, (batch,), and from its start on where (2 · batch,) tells it."""
    graph = node.graph
    batch = graph.dimension(q, 0)
    first = graph.positions(batch)
    # With zeros behind it, the second half is the starts, or zeros where there are none.
    zeros = graph.cast(graph.emit("Sub", first, first), lengths.dtype)
    both = graph.emit("Concat", lengths, zeros, axis=0)
    ends, starts = (
        graph.emit("Gather", both, rows, axis=0) for rows in (first, graph.emit("Add", first, batch))
    )
    j = key_positions(k)
    return (j < _column(ends)) * (j >= _column(starts))


def _with_bias(node: NodeView, mask: Value | None, added: Operand | None) -> Uncertain | None:
    if added is None:
        return None if mask is None else Uncertain(mask)
    bias = Uncertain.of(added)
    return bias if mask is None else Uncertain(bias.mean + mask, bias.var)


# ------------------------------------------------------------------------------- rules


@rule("Attention", accuracy=Accuracy.HEURISTIC, domain=MICROSOFT, linear=True)
def packed_attention(node: NodeView) -> tuple[Value | None, ...]:
    """(q, k, v) = x W + b with v_x W² for their variances, then as Attention."""
    x, weights, projection_bias = node.inputs[0], node.inputs[1], node.input(2)
    _refuse_inputs(node, {6: "its keys and values live in a shared buffer"})
    if node.attr("past_present_share_buffer", 0):
        raise node.refuse("its keys and values live in a shared buffer")
    if node.attr("do_rotary", 0):
        raise node.refuse("it turns its queries and keys by itself (do_rotary)")
    if not weights.certain or (projection_bias is not None and not projection_bias.certain):
        raise node.refuse("its weights are uncertain")
    graph, heads = node.graph, node.attr("num_heads")
    sizes = node.attr("qkv_hidden_sizes") or _equal_thirds(node, weights)
    mean = graph.emit("MatMul", x.mean, weights.mean)
    mean = mean if projection_bias is None else mean + projection_bias.mean
    var = None if x.certain else graph.emit("MatMul", x.var, weights.mean.squared)
    ends = np.cumsum(sizes).tolist()
    together = Uncertain(mean, var)
    q, k, v = (
        together.moved(_sliced(2, end - size, end)).moved(split_heads(heads))
        for size, end in zip(sizes, ends)
    )
    past, offset, whole = node.input(4), None, None
    if past is not None:
        both = Uncertain.of(past)
        k = both.moved(lambda t: graph.emit("Gather", t, _scalar(node, 0), axis=0)).joined(k, 2)
        v = both.moved(lambda t: graph.emit("Gather", t, _scalar(node, 1), axis=0)).joined(v, 2)
        whole = graph.dimension(past.raw, 3)
        offset = graph.cast(whole, mean.dtype)
    mask = _mask_bias(node, node.input(3), q.mean, k.mean, whole)
    attended = Attention(
        q, k, v,
        scale=_scaled(node, q, int(sizes[0]) // heads),
        bias=_with_bias(node, mask, node.input(5)),
        allowed=every(window(q.mean, k.mean, offset, -1, 0 if node.attr("unidirectional", 0) else -1)),
        full=_full(node),
    )  # fmt: skip
    return _flat_output(node, attended, _stacked(k, v))


def _stacked(k: Uncertain, v: Uncertain) -> Value | None:
    """The state that ms Attention hands on: keys and values as (2, batch, heads, tokens, d)."""
    if k.var is None and v.var is None:
        return None
    graph = k.mean.graph
    return graph.emit("Concat", *(graph.unsqueeze(x.known, [0]) for x in (k, v)), axis=0)


def _scalar(node: NodeView, number: int) -> Value:
    return node.graph.constant(np.asarray(number, np.int64))


def _equal_thirds(node: NodeView, weights: Operand) -> list[int]:
    width = weights.shape[1] if weights.shape is not None else None
    if not isinstance(width, int):
        raise node.refuse("the width of its weights is unknown")
    return [width // 3] * 3


def _flat_output(node: NodeView, attended: Attention, *present: Value | None) -> tuple[Value | None, ...]:
    """(batch, tokens, heads · d), and the states behind it as far as the node has them."""
    var = attended.variance
    return (None if var is None else join_heads(var), *present)[: len(node.outputs)]


@rule("MultiHeadAttention", accuracy=Accuracy.HEURISTIC, domain=MICROSOFT)
def multi_head_attention(node: NodeView) -> tuple[Value | None, ...]:
    """As Attention, on q + b_q, k + b_k, v + b_v."""
    reasons = {
        8: "its keys and values live in a shared buffer",
        9: "it reads its cache by beam (cache_indirection)",
    }
    _refuse_inputs(node, reasons)
    if len(node.outputs) > 3 and node.outputs[3].present:
        raise node.refuse("it puts out its scores (qk)")
    graph, heads = node.graph, node.attr("num_heads")
    q, k, v = _projected(node, heads)
    query = node.inputs[0]
    size = _head_size(query, 4, 1) if query.rank == 5 else _head_size(query, 2, heads)
    offset, past_key = None, node.input(6)
    if past_key is not None:
        offset = graph.cast(graph.dimension(past_key.raw, 2), q.mean.dtype)
        k, v = Uncertain.of(past_key).joined(k, 2), Uncertain.of(node.inputs[7]).joined(v, 2)
    mask = _mask_bias(node, node.input(4), q.mean, k.mean, None)
    attended = Attention(
        q, k, v,
        scale=_scaled(node, q, size),
        bias=_with_bias(node, mask, node.input(5)),
        allowed=every(window(q.mean, k.mean, offset, -1, 0 if node.attr("unidirectional", 0) else -1)),
        full=_full(node),
    )  # fmt: skip
    return _flat_output(node, attended, k.var, v.var)


def _projected(node: NodeView, heads: int) -> tuple[Uncertain, Uncertain, Uncertain]:
    """Queries, keys and values by head, whichever way they are packed."""
    graph, query, key, value, bias = node.graph, node.inputs[0], node.input(1), node.input(2), node.input(3)

    def part(packed: Operand, i: int) -> Uncertain:  # of (batch, tokens, heads, parts, d)
        def move(x: Value) -> Value:
            one = graph.emit("Gather", x, _scalar(node, i), axis=3)
            return graph.emit("Transpose", one, perm=[0, 2, 1, 3])

        return Uncertain.of(packed).moved(move)

    if key is None:
        return part(query, 0), part(query, 1), part(query, 2)
    biases = _bias_parts(node, query, bias)
    q = _by_head(Uncertain.of(query), biases[0], heads)
    if value is None:
        return q, part(key, 0), part(key, 1)
    if key.rank == 4:  # already by head, and with its bias
        return q, Uncertain.of(key), Uncertain.of(value)
    return q, _by_head(Uncertain.of(key), biases[1], heads), _by_head(Uncertain.of(value), biases[2], heads)


def _by_head(x: Uncertain, bias: Value | None, heads: int) -> Uncertain:
    return (x if bias is None else replace(x, mean=x.mean + bias)).moved(split_heads(heads))


def _bias_parts(node: NodeView, query: Operand, bias: Operand | None) -> list[Value | None]:
    """The biases of queries, keys and values; the first two are as wide as the queries."""
    if bias is None:
        return [None] * 3
    if not bias.certain:
        raise node.refuse("its bias is uncertain")
    graph = node.graph
    width, whole = graph.dimension(query.raw, 2), graph.dimension(bias.raw, 0)
    twice = graph.emit("Add", width, width)
    rest = graph.emit("Sub", whole, twice)
    counts = ((width, None), (width, width), (rest, twice))
    positions = [
        graph.positions(count) if start is None else graph.emit("Add", graph.positions(count), start)
        for count, start in counts
    ]
    return [graph.emit("Gather", bias.mean, rows, axis=0) for rows in positions]


# ---------------------------------------------------------------- grouped-query attention


@rule("GroupQueryAttention", accuracy=Accuracy.HEURISTIC, domain=MICROSOFT)
def group_query_attention(node: NodeView) -> tuple[Value | None, ...]:
    """As Attention, with rotary embedding, keys and values joined to those of a cache."""
    _refuse_inputs(node, {
        12: "its cache is quantised", 13: "its cache is quantised",
        14: "it normalises its queries and keys by itself", 15: "it normalises its queries and keys by itself",
    })  # fmt: skip
    if node.attr("sliding_window_cache", 0):
        raise node.refuse("its cache forgets tokens (sliding_window_cache)")
    if len(node.outputs) > 3 and node.outputs[3].present:
        raise node.refuse("it puts out its scores (output_qk)")
    graph, heads, kv_heads = node.graph, node.attr("num_heads"), node.attr("kv_num_heads")
    q, k, v = _grouped(node, heads, kv_heads)
    cache = _Cache(node, q.mean)
    if node.attr("do_rotary", 0):
        turn = _rotation(node, cache)
        q, k = turn(q), turn(k)
    k, v = cache.merged(node.input(3), k), cache.merged(node.input(4), v)
    allowed = window(q.mean, k.mean, cache.before, _left_window(node), 0 if node.attr("causal", 1) else -1)
    if not node.attr("causal", 1):
        allowed.append(key_positions(k.mean) < cache.total)
    packed = node.input(1) is None
    size = _head_size(node.inputs[0], 2, heads + 2 * kv_heads if packed else heads)
    given = node.input(11)
    if given is not None and not given.certain:
        raise node.refuse("its sink is uncertain")
    sink = None if given is None else graph.emit("Reshape", given.mean, graph.ints(1, -1, 1, 1))
    if sink is None and node.attr("smooth_softmax", -1) == 1:
        sink = graph.constant(np.zeros((1, 1, 1, 1), q.mean.dtype))
    repeat = repeat_heads(heads // kv_heads, heads)
    attended = Attention(
        q, k.moved(repeat), v.moved(repeat),
        scale=_scaled(node, q, size),
        softcap=node.attr("softcap", 0.0),
        bias=_with_bias(node, None, node.input(10)),
        allowed=every(allowed),
        sink=sink,
        full=_full(node),
    )  # fmt: skip
    return _flat_output(node, attended, k.var, v.var)


def _left_window(node: NodeView) -> int:
    """Its window counts the token itself."""
    size = node.attr("local_window_size", -1)
    return size - 1 if size > 0 else -1


def _grouped(node: NodeView, heads: int, kv_heads: int) -> tuple[Uncertain, Uncertain, Uncertain]:
    query, key = node.inputs[0], node.input(1)
    if key is not None:
        split = split_heads(kv_heads)
        return (
            Uncertain.of(query).moved(split_heads(heads)),
            Uncertain.of(key).moved(split),
            Uncertain.of(node.inputs[2]).moved(split),
        )
    packed = Uncertain.of(query).moved(split_heads(heads + 2 * kv_heads))
    keys, values, end = heads, heads + kv_heads, heads + 2 * kv_heads
    return (
        packed.moved(_sliced(1, 0, keys)),
        packed.moved(_sliced(1, keys, values)),
        packed.moved(_sliced(1, values, end)),
    )


def _sliced(axis: int, start: int, end: int) -> Callable[[Value], Value]:
    return lambda value: value.graph.slice(value, axis, start, end)


class _Cache:
    """Where the new tokens of each sequence go among those of before.

    before, total: tokens without and with the new ones, (batch, 1, 1, 1). In the first run, told by
    all tokens being new, there are none before, however long the buffer is.
    """

    def __init__(self, node: NodeView, q: Value):
        graph = self.graph = node.graph
        self.new = graph.dimension(q, 2)
        self.new_count = graph.cast(self.new, q.dtype)
        self.longest = graph.emit("Reshape", graph.cast(node.inputs[6].raw, np.int64), graph.ints(1))
        self.total = _column(graph.cast(node.inputs[5].raw, q.dtype)) + 1
        self.later = graph.cast(self.longest, q.dtype) > self.new_count  # 0 in the first run
        self.before = (self.total - self.new_count) * self.later

    def merged(self, past: Operand | None, new: Uncertain) -> Uncertain:
        """(batch, heads, tokens, d) of all tokens; what lies behind the last one is certain."""
        if past is None:
            return new
        graph = self.graph
        room = graph.emit("Max", self.longest, graph.dimension(past.raw, 2))
        j = graph.emit("Reshape", graph.cast(graph.positions(room), new.mean.dtype), graph.ints(1, 1, -1, 1))
        old = j < self.before
        among_new = graph.at_least(j - self.before, 0)
        last = self.new_count - 1
        among_new = graph.emit("Min", among_new, last)
        held = graph.cast(graph.dimension(past.raw, 2), j.dtype)
        rows = graph.cast(old * j + (1 - old) * (held + among_new), np.int64)
        spread = graph.emit(
            "Concat",
            graph.ints(1),
            graph.dimension(new.mean, 1),
            graph.ints(1),
            graph.dimension(new.mean, 3),
            axis=0,
        )
        rows = graph.emit("Expand", rows, spread)
        joined = Uncertain.of(past).joined(new, 2)
        found = joined.moved(lambda x: graph.emit("GatherElements", x, rows, axis=2))
        var = found.var
        return Uncertain(found.mean, None if var is None else var * (j < self.before + self.new_count))


def _rotation(node: NodeView, cache: _Cache) -> Rotation:
    graph, cos, sin, given = node.graph, node.inputs[7], node.inputs[8], node.input(9)
    dtype = cache.before.dtype
    i = graph.emit("Reshape", graph.cast(graph.positions(cache.new), dtype), graph.ints(1, -1))
    if given is None:
        positions = graph.emit("Reshape", cache.before, graph.ints(-1, 1)) + i
    else:  # in the first run only the first position is read
        stated = graph.cast(given.raw, dtype)
        start = graph.emit("Gather", graph.emit("Reshape", stated, graph.ints(-1)), graph.ints(0), axis=0)
        positions = cache.later * stated + (1 - cache.later) * (start + i)
    positions = graph.cast(positions, np.int64)
    width = cos.shape[1] if cos.shape is not None else None
    return Rotation(
        cached_angles(cos, positions),
        cached_angles(sin, positions),
        bool(node.attr("rotary_interleaved", 0)),
        2 * width if isinstance(width, int) else None,
    )


# --------------------------------------------------------------------------- refusals

refused(
    "its sequences are packed into one tensor without padding; export the model with padded batches",
    "PackedAttention", "PackedMultiHeadAttention", "PagedAttention", "SparsePagedAttention",
    domain=MICROSOFT,
)  # fmt: skip
refused(
    "it attends to a part of the tokens that it chooses by itself",
    "LongformerAttention", "SparseAttention", "DynamicSparseAttention", "SparseAttentionIndexer",
    "PackedSparseAttentionIndexer",
    domain=MICROSOFT,
)  # fmt: skip
refused(
    "it decodes one token with a cache in shared buffers; convert the model as it was before that fusion",
    "DecoderAttention", "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention",
    domain=MICROSOFT,
)  # fmt: skip
