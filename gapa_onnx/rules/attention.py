"""Attention, rotary embeddings and gated units.

For a query token t and key tokens s, per head, with a_ts the attention weights:

    e = scale · q kᵀ,   a = softmax(mask(softcap(e))),   y = a v

Options.attention says which of the paper's two variants is meant:

    values (A)   Var y_ti = Σ_s a_ts² Var v_si                       the weights count as certain
    full (B)     Var e = scale² (q² Var k + k² Var q + Var q Var k), then the rules of tanh and of
                 softmax, then Var y_ti = Σ_s (a² Var v + v² Var a + Var a Var v)

A is exact where only the values are uncertain. It leaves out, on purpose, what comes through the
weights: they follow from the same tokens as the values, and B counts the two as independent.

The weights are interior to a fused operator, so they are computed once more, from q and k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gapa_onnx.graph import Value, VarianceGraph
from gapa_onnx.rules.reduction import softmax_spread
from gapa_onnx.rules.registry import Accuracy, rule
from gapa_onnx.rules.view import NodeView, Operand


@dataclass(frozen=True)
class Uncertain:
    """A mean with its variance, `None` where it is certain."""

    mean: Value
    var: Value | None = None

    @staticmethod
    def of(operand: Operand) -> Uncertain:
        return Uncertain(operand.mean, operand.var)

    @property
    def known(self) -> Value:
        """The variance as a tensor, zeros where it is certain."""
        return self.mean.graph.zeros(self.mean) if self.var is None else self.var

    def moved(self, move: Callable[[Value], Value]) -> Uncertain:
        """The same elements elsewhere."""
        return Uncertain(move(self.mean), None if self.var is None else move(self.var))

    def joined(self, other: Uncertain, axis: int) -> Uncertain:
        def concat(a: Value, b: Value) -> Value:
            return a.graph.emit("Concat", a, b, axis=axis)

        certain = self.var is None and other.var is None
        return Uncertain(
            concat(self.mean, other.mean), None if certain else concat(self.known, other.known)
        )

    def added(self, other: Uncertain) -> Uncertain:
        """The sum of two that are independent; the variance keeps its shape, that of `self`."""
        terms = [var for var in (self.var, other.var) if var is not None]
        return Uncertain(self.mean + other.mean, sum(terms[1:], terms[0]) if terms else None)


# ----------------------------------------------------------------------- heads, tokens


def split_heads(heads: int) -> Callable[[Value], Value]:
    """(batch, tokens, heads · d) -> (batch, heads, tokens, d)"""

    def move(x: Value) -> Value:
        parted = x.graph.emit("Reshape", x, x.graph.ints(0, 0, heads, -1))
        return x.graph.emit("Transpose", parted, perm=[0, 2, 1, 3])

    return move


def join_heads(x: Value) -> Value:
    """(batch, heads, tokens, d) -> (batch, tokens, heads · d)"""
    tokens_first = x.graph.emit("Transpose", x, perm=[0, 2, 1, 3])
    return x.graph.emit("Reshape", tokens_first, x.graph.ints(0, 0, -1))


def repeat_heads(times: int, heads: int) -> Callable[[Value], Value]:
    """Each of the heads of keys or values serves `times` heads of queries."""

    def move(x: Value) -> Value:
        return x if times == 1 else x.graph.emit("Gather", x, x.graph.ints(*np.arange(heads) // times), axis=1)

    return move


def default_scale(q: Value, size: int | None) -> Value | float:
    """1 / √d, with d the head size, at run time where it is not known."""
    if size is not None:
        return 1 / float(size) ** 0.5
    return 1 / q.graph.cast(q.graph.dimension(q, 3), q.dtype).sqrt()


def token_positions(x: Value, axis: int) -> Value:
    """0, 1, 2, … along an axis, in the type of x: (1, 1, n, 1) for axis 2, (1, 1, 1, n) for axis 3."""
    graph = x.graph
    positions = graph.cast(graph.positions(graph.dimension(x, axis)), x.dtype)
    return graph.emit("Reshape", positions, graph.ints(1, 1, -1, 1) if axis == 2 else graph.ints(1, 1, 1, -1))


# ------------------------------------------------------------------------ the variants


@dataclass(frozen=True)
class Attention:
    """Attention of heads, (batch, heads, tokens, d) each; what is not asked for is not emitted.

    Parameters
    ----------
    bias: added to the scores, of a shape that broadcasts to (batch, heads, queries, keys).
    allowed: 1 where a query may see a key, 0 elsewhere; a query that sees none gets 0.
    sink: score of a key without a value, (1, heads, 1, 1): a further term of softmax's denominator.
    """

    q: Uncertain
    k: Uncertain
    v: Uncertain
    scale: Value | float
    softcap: float = 0.0
    bias: Uncertain | None = None
    allowed: Value | None = None
    sink: Value | None = None
    full: bool = False
    graph: VarianceGraph = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph", self.q.mean.graph)

    @property
    def raw_scores(self) -> Uncertain:
        """scale · q kᵀ (batch, heads, queries, keys); the variance is exact."""
        q, k = self.q, self.k.moved(lambda x: x.graph.emit("Transpose", x, perm=[0, 1, 3, 2]))
        return _product(q, k, self.scale)

    @property
    def capped_scores(self) -> Uncertain:
        scores = self.raw_scores
        if not self.softcap:
            return scores
        bent = (scores.mean / self.softcap).tanh()
        slope = 1 - bent * bent
        return Uncertain(self.softcap * bent, None if scores.var is None else slope.squared * scores.var)

    @property
    def biased_scores(self) -> Uncertain:
        scores = self.capped_scores
        if self.bias is None:
            return scores
        # A mask of -∞ in a whole row would make softmax NaN; `_visible` gives such a row 0.
        lowest = self.graph.at_least(self.bias.mean, float(np.finfo(scores.mean.dtype).min))
        terms = [var for var in (scores.var, self.bias.var) if var is not None]
        mean = scores.mean + lowest
        var = sum(terms[1:], terms[0]) if terms else None
        return Uncertain(mean, self.graph.expand(var, like=mean) if var is self.bias.var and var else var)

    @property
    def _visible(self) -> Value | None:
        """Keys that are neither disallowed nor at a score of -∞."""
        if self.bias is None:
            return self.allowed
        finite = self.bias.mean >= float(np.finfo(self.bias.mean.dtype).min)
        return finite if self.allowed is None else finite * self.allowed

    @property
    def weights(self) -> Uncertain:
        """softmax over the keys, first order."""
        scores = self.biased_scores
        mean, var, visible = scores.mean, scores.var, self._visible
        if visible is not None:
            mean = mean * visible + (1 - visible) * float(np.finfo(mean.dtype).min)
            var = None if var is None else var * visible
        if self.sink is not None:
            column = self.graph.reduce("ReduceSum", mean, [3]) * 0 + self.sink
            mean = self.graph.emit("Concat", mean, column, axis=3)
            var = None if var is None else self.graph.emit("Concat", var, self.graph.zeros(column), axis=3)
        p = self.graph.emit("Softmax", mean, axis=3)
        if var is not None:
            var = p * p * softmax_spread(p, var, lambda terms: self.graph.reduce("ReduceSum", terms, [3]))
        if self.sink is not None:
            p = self.graph.slice(p, 3, 0, -1)
            var = None if var is None else self.graph.slice(var, 3, 0, -1)
        if visible is not None:  # where no key is visible, softmax is uniform
            p, var = p * visible, None if var is None else var * visible
        return Uncertain(p, var)

    @property
    def variance(self) -> Value | None:
        """Var y (batch, heads, queries, d)"""
        return _attended(self.weights, self.v, self.full)


def _product(a: Uncertain, b: Uncertain, scale: Value | float = 1.0) -> Uncertain:
    """scale · a b, of two that are independent."""

    def times(x: Value, y: Value) -> Value:
        return x.graph.emit("MatMul", x, y)

    terms = []
    if a.var is not None:
        terms.append(times(a.var, b.mean.squared))
    if b.var is not None:
        terms.append(times(a.mean.squared, b.var))
    if a.var is not None and b.var is not None:
        terms.append(times(a.var, b.var))
    var = sum(terms[1:], terms[0]) * (scale * scale) if terms else None
    return Uncertain(times(a.mean, b.mean) * scale, var)


def _attended(weights: Uncertain, values: Uncertain, full: bool) -> Value | None:
    """Var Σ_s a_ts v_si, with the weights certain unless `full`."""
    return _product(weights if full else Uncertain(weights.mean), values).var


@rule("AttentionValues", accuracy=Accuracy.HEURISTIC, domain="ai.gapa.pattern")
def attention_values(node: NodeView) -> Value | None:
    """Σ_s a² v with the weights certain (values), or Σ_s (a² v_v + v² v_a + v_a v_v) (full).

    What is left of attention that is spelled out in MatMul, Softmax and MatMul: the last product.
    """
    weights, values = (Uncertain.of(operand) for operand in node.inputs)
    return _attended(weights, values, node.options.attention == "full")


# ------------------------------------------------------------------- ONNX: Attention


@rule("Attention", accuracy=Accuracy.HEURISTIC)
def attention(node: NodeView) -> tuple[Value | None, ...]:
    """Σ_s a² v with the weights certain (values), or with Var a by the rule of softmax (full)."""
    q, k, v = (Uncertain.of(operand) for operand in node.inputs[:3])
    flat = node.inputs[0].rank == 3
    if flat:
        q_heads, kv_heads = node.attr("q_num_heads"), node.attr("kv_num_heads")
        q = q.moved(split_heads(q_heads))
        k, v = k.moved(split_heads(kv_heads)), v.moved(split_heads(kv_heads))
    else:
        q_heads, kv_heads = (_static(node.inputs[i], 1) for i in (0, 1))
    past_key, past_value = node.input(4), node.input(5)
    offset = None
    if past_key is not None:
        offset = node.graph.cast(node.graph.dimension(past_key.raw, 2), q.mean.dtype)
        k, v = Uncertain.of(past_key).joined(k, 2), Uncertain.of(past_value).joined(v, 2)
    present = (k.var, v.var)
    k, v = (x.moved(_serve(q.mean, q_heads, kv_heads)) for x in (k, v))
    size = _static(node.inputs[0], 2 if flat else 3)
    scale = node.attr("scale") or default_scale(q.mean, size // q_heads if flat and size else size)
    bias, allowed = _onnx_mask(node, q.mean, k.mean, offset)
    attended = Attention(
        q, k, v, scale, node.attr("softcap", 0.0), bias, allowed, full=node.options.attention == "full"
    )
    var = attended.variance
    outputs = (join_heads(var) if flat and var is not None else var, *present)
    if len(node.outputs) > 3:
        outputs += (_inner_scores(node, attended),)
    return outputs[: len(node.outputs)]


def _static(operand: Operand, axis: int) -> int | None:
    size = operand.shape[axis] if operand.shape is not None else None
    return size if isinstance(size, int) else None


def _serve(q: Value, q_heads: int | None, kv_heads: int | None) -> Callable[[Value], Value]:
    """Each head of keys and values serves as many heads of queries, one after the other."""
    if q_heads is not None and kv_heads is not None:
        return repeat_heads(q_heads // kv_heads, q_heads)

    def move(x: Value) -> Value:
        graph, have, want = x.graph, x.graph.dimension(x, 1), x.graph.dimension(q, 1)
        each = graph.emit("Div", want, have)
        return graph.emit("Gather", x, graph.emit("Div", graph.positions(want), each), axis=1)

    return move


def _inner_scores(node: NodeView, attended: Attention) -> Value | None:
    stages = (attended.raw_scores, attended.capped_scores, attended.biased_scores, attended.weights)
    return stages[node.attr("qk_matmul_output_mode", 0)].var


def _onnx_mask(
    node: NodeView, q: Value, k: Value, offset: Value | None
) -> tuple[Uncertain | None, Value | None]:
    """What is added to the scores, and which keys a query may see."""
    graph, bias, allowed = node.graph, None, []
    mask = node.input(3)
    if mask is not None:
        if mask.tensor.dtype == np.bool_:
            allowed.append(_padded(node, mask, graph.cast(mask.raw, q.dtype), k, 0.0))
        else:
            bias = Uncertain.of(mask).moved(lambda x: _padded(node, mask, x, k, -np.inf))
    lengths = node.input(6)
    j = None
    if lengths is not None:
        j = token_positions(k, 2)
        j = graph.emit("Transpose", j, perm=[0, 1, 3, 2])
        valid = graph.emit("Reshape", graph.cast(lengths.raw, q.dtype), graph.ints(-1, 1, 1, 1))
        allowed.append(j < valid)
        if offset is None:
            offset = valid - graph.cast(graph.dimension(q, 2), q.dtype)
    left, right = node.attr("left_window_size", -1), node.attr("right_window_size", -1)
    right = 0 if node.attr("is_causal", 0) else right
    allowed += window(q, k, offset, left, right)
    total = allowed[0] if allowed else None
    for further in allowed[1:]:
        total = total * further
    return bias, total


def window(q: Value, k: Value, offset: Value | None, left: int, right: int) -> list[Value]:
    """Masks p - left ≤ j ≤ p + right for key j and the query at p = offset + i; -1 is no bound."""
    if left < 0 and right < 0:
        return []
    p = token_positions(q, 2)
    p = p if offset is None else p + offset
    j = q.graph.emit("Transpose", token_positions(k, 2), perm=[0, 1, 3, 2])
    bounds = []
    if right >= 0:
        bounds.append(j <= p + right)
    if left >= 0:
        bounds.append(j >= p - left)
    return bounds


def _padded(node: NodeView, mask: Operand, value: Value, k: Value, fill: float) -> Value:
    """A mask may be shorter than the keys; what it does not cover is masked."""
    keys, past = _static(node.inputs[1], node.inputs[1].rank - 2), node.input(4)
    past = 0 if past is None else _static(past, 2)
    width = mask.shape[-1] if mask.shape else None
    if width == 1 or (None not in (keys, past) and width == keys + past):
        return value
    graph = node.graph
    missing = graph.emit("Sub", graph.dimension(k, 2), graph.dimension(mask.raw, -1))
    pads = graph.emit("Concat", graph.ints(0), missing, axis=0)
    filler = graph.constant(np.asarray(fill, value.dtype))
    return graph.emit("Pad", value, pads, filler, graph.ints(-1))


# ------------------------------------------------------------------- rotary embedding


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
    positions = None if node.input(3) is None else node.input(3).raw
    turn = Rotation(
        cached_angles(cos, positions),
        cached_angles(sin, positions),
        bool(node.attr("interleaved", 0)),
        node.attr("rotary_embedding_dim", 0) or None,
    )
    if x.rank == 3:
        return join_heads(turn(Uncertain.of(x).moved(split_heads(node.attr("num_heads")))).var)
    return turn(Uncertain.of(x)).var


# ------------------------------------------------------------------------- gated units


@rule("SwiGLU", accuracy=Accuracy.FIRST_ORDER)
def swiglu(node: NodeView) -> Value:
    """(φ'(a) b)² v_a + φ(a)² v_b + φ'(a)² v_a v_b, with φ(a) = a · sigmoid(α a)."""
    a, b = node.inputs
    if not a.certain and a.tensor.name == b.tensor.name:
        raise node.refuse("its gate and its value are the same tensor")
    alpha = node.attr("alpha", 1.0)
    open_ = (alpha * a.mean).sigmoid()
    slope = open_ + alpha * a.mean * open_ * (1 - open_)
    gate = Uncertain(a.mean * open_, None if a.certain else slope.squared * a.var)
    return gated(gate, Uncertain.of(b))


def gated(gate: Uncertain, value: Uncertain) -> Value:
    """The variance of an elementwise product of two that are independent."""
    terms = []
    if gate.var is not None:
        terms.append(gate.var * value.mean.squared)
    if value.var is not None:
        terms.append(gate.mean.squared * value.var)
    if gate.var is not None and value.var is not None:
        terms.append(gate.var * value.var)
    return sum(terms[1:], terms[0])
