"""Attention, and gated units.

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

from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.rules.reduction import softmax_spread
from gapa_onnx.variance.rules.registry import Accuracy, rule
from gapa_onnx.variance.rules.view import NodeView, Operand


@dataclass(frozen=True)
class Uncertain:
    """A mean with its variance, `None` where it is certain."""

    mean: Value
    var: Value | None = None

    @staticmethod
    def of(operand: Operand) -> Uncertain:
        return Uncertain(operand.mean, operand.var)

    @property
    def variance(self) -> Value:
        """The variance of what is uncertain."""
        if self.var is None:
            raise ValueError("it is certain: it has no variance")
        return self.var

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
        return Uncertain(concat(self.mean, other.mean), None if certain else concat(self.known, other.known))


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
        return (
            x if times == 1 else x.graph.emit("Gather", x, x.graph.ints(*np.arange(heads) // times), axis=1)
        )

    return move


def default_scale(q: Value, size: int | None) -> Value | float:
    """1 / √d, with d the head size, at run time where it is not known."""
    if size is not None:
        root: float = float(size) ** 0.5
        return 1 / root
    return 1 / q.graph.cast(q.graph.dimension(q, 3), q.dtype).sqrt()


def query_positions(q: Value) -> Value:
    """0, 1, 2, … over the tokens of (batch, heads, tokens, d), as (1, 1, tokens, 1)."""
    return _positions(q, (1, 1, -1, 1))


def key_positions(k: Value) -> Value:
    """0, 1, 2, … over the tokens of (batch, heads, tokens, d), as (1, 1, 1, tokens)."""
    return _positions(k, (1, 1, 1, -1))


def _positions(x: Value, shape: tuple[int, ...]) -> Value:
    graph = x.graph
    return graph.emit(
        "Reshape", graph.cast(graph.positions(graph.dimension(x, 2)), x.dtype), graph.ints(*shape)
    )


def window(q: Value, k: Value, offset: Value | None, left: int, right: int) -> list[Value]:
    """Masks p - left ≤ j ≤ p + right for key j and the query at p = offset + i; -1 is no bound."""
    if left < 0 and right < 0:
        return []
    p = query_positions(q) if offset is None else query_positions(q) + offset
    j = key_positions(k)
    bounds = [j <= p + right] if right >= 0 else []
    return bounds + ([j >= p - left] if left >= 0 else [])


def every(masks: list[Value]) -> Value | None:
    """1 where all masks are."""
    total = None
    for mask in masks:
        total = mask if total is None else total * mask
    return total


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
        mean = scores.mean + lowest
        if self.bias.var is None:
            return Uncertain(mean, scores.var)
        return Uncertain(mean, self.graph.expand(self.bias.var, like=mean) + (scores.var or 0))

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
            column = self.graph.zeros(self.graph.slice(mean, 3, 0, 1)) + self.sink
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
    past_key = node.input(4)
    offset = None
    if past_key is not None:
        offset = node.graph.cast(node.graph.dimension(past_key.raw, 2), q.mean.dtype)
        k, v = Uncertain.of(past_key).joined(k, 2), Uncertain.of(node.inputs[5]).joined(v, 2)
    present = (k.var, v.var)
    k, v = (x.moved(_serve(q.mean, q_heads, kv_heads)) for x in (k, v))
    size = _static(node.inputs[0], 2 if flat else 3)
    scale = node.attr("scale") or default_scale(q.mean, size // q_heads if flat and size else size)
    bias, allowed = _onnx_mask(node, q.mean, k.mean, offset)
    attended = Attention(
        q, k, v, scale, node.attr("softcap", 0.0), bias, allowed, full=node.options.attention == "full"
    )
    var = attended.variance
    outputs: tuple[Value | None, ...] = (join_heads(var) if flat and var is not None else var, *present)
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
    if lengths is not None:
        valid = graph.emit("Reshape", graph.cast(lengths.raw, q.dtype), graph.ints(-1, 1, 1, 1))
        allowed.append(key_positions(k) < valid)
        if offset is None:
            offset = valid - graph.cast(graph.dimension(q, 2), q.dtype)
    left, right = node.attr("left_window_size", -1), node.attr("right_window_size", -1)
    right = 0 if node.attr("is_causal", 0) else right
    return bias, every(allowed + window(q, k, offset, left, right))


def _padded(node: NodeView, mask: Operand, value: Value, k: Value, fill: float) -> Value:
    """A mask may be shorter than the keys; what it does not cover is masked."""
    before = node.input(4)
    keys, past = (
        _static(node.inputs[1], node.inputs[1].rank - 2),
        0 if before is None else _static(before, 2),
    )
    width = mask.shape[-1] if mask.shape else None
    if width == 1 or (keys is not None and past is not None and width == keys + past):
        return value
    graph = node.graph
    missing = graph.emit("Sub", graph.dimension(k, 2), graph.dimension(mask.raw, -1))
    pads = graph.emit("Concat", graph.ints(0), missing, axis=0)
    filler = graph.constant(np.asarray(fill, value.dtype))
    return graph.emit("Pad", value, pads, filler, graph.ints(-1))


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
