"""A tiny decoder with the usual names, made of ONNX text and random weights: RMS norms, rotary positions, grouped keys.

plain    input_ids, attention_mask (batch, sequence)                     -> logits
cached   the same, the mask over past and present, position_ids, past_key_values.i.key and .value
         (batch, 2, past, 8)                                             -> logits, present.i.key and .value
"""

from __future__ import annotations

import numpy as np
import onnx

from gapa_onnx.arrays import Array

VOCABULARY, WIDTH, INNER = 300, 32, 64
HEADS, KEY_HEADS, HEAD = 4, 2, 8
EPSILON = 1e-5
DOT = "__dot__"  # ONNX text has none in names
LOW = -1e9  # added to what may not be looked at

_PLAIN_START = """past = Constant<value_ints = [0]>()  steps_all = Shape<start = 1, end = 2>(input_ids)
    keys_all = Identity(steps_all)  zero0 = Squeeze(past)  end0 = Squeeze(steps_all)
    range0 = Range(zero0, end0, one0)  positions = Unsqueeze(range0, axis0)"""
_CACHED_START = """past = Shape<start = 2, end = 3>(past_key_values.0.key)
    steps_all = Shape<start = 1, end = 2>(input_ids)  keys_all = Shape<start = 1, end = 2>(attention_mask)
    zero0 = Squeeze(past)  end0 = Squeeze(keys_all)  range0 = Range(zero0, end0, one0)
    positions = Identity(position_ids)"""
#: cosine and sine of each position (…, 1, sequence, 8), and what is added to a score (batch, 1, sequence, keys)
_MASK = """angle_p = Cast<to = 1>(positions)  angle_u = Unsqueeze(angle_p, axis2)  angle_h = Mul(angle_u, frequencies)
    angle_2 = Concat<axis = -1>(angle_h, angle_h)  angle = Unsqueeze(angle_2, axis1)  cos = Cos(angle)  sin = Sin(angle)
    first_k = Identity(int_zero)  last_k = Squeeze(keys_all)  key_places = Range(first_k, last_k, one0)
    row_places = Unsqueeze(range0, axis1)  col_places = Unsqueeze(key_places, axis0)
    later = Greater(col_places, row_places)  later_4 = Unsqueeze(later, axes01)
    given = Cast<to = 9>(attention_mask)  unseen = Not(given)  unseen_4 = Unsqueeze(unseen, axes12)
    hidden = Or(later_4, unseen_4)  bias = Where(hidden, low, float_zero)
    x0 = Gather(embed.weight, input_ids)"""
_NORM = """{y}_sq = Pow({x}, two)  {y}_ms = ReduceMean<axes = [-1], keepdims = 1>({y}_sq)  {y}_me = Add({y}_ms, epsilon)
    {y}_rt = Sqrt({y}_me)  {y}_rc = Reciprocal({y}_rt)  {y}_un = Mul({x}, {y}_rc)  {y} = Mul({y}_un, {w})"""
_ROTARY = """{y}_a = Slice({x}, axis0, half, axis3)  {y}_b = Slice({x}, half, whole, axis3)  {y}_n = Neg({y}_b)
    {y}_r = Concat<axis = -1>({y}_n, {y}_a)  {y}_c = Mul({x}, cos)  {y}_s = Mul({y}_r, sin)  {y} = Add({y}_c, {y}_s)"""
_REPEAT = """{y}_u = Unsqueeze({x}, axis2)  {y}_e = Expand({y}_u, many)  {y} = Reshape({y}_e, merged)"""
_ATTENTION = """q{i}_f = MatMul(n{i}, q{i}.weight)  k{i}_f = MatMul(n{i}, k{i}.weight)  v{i}_f = MatMul(n{i}, v{i}.weight)
    q{i}_4 = Reshape(q{i}_f, split_q)  k{i}_4 = Reshape(k{i}_f, split_k)  v{i}_4 = Reshape(v{i}_f, split_k)
    q{i}_t = Transpose<perm = [0, 2, 1, 3]>(q{i}_4)  k{i}_t = Transpose<perm = [0, 2, 1, 3]>(k{i}_4)
    v{i}_t = Transpose<perm = [0, 2, 1, 3]>(v{i}_4)"""
_SCORES = """k{i}_x = Transpose<perm = [0, 1, 3, 2]>(k{i}_g)  s{i}_m = MatMul(q{i}_p, k{i}_x)  s{i}_s = Mul(s{i}_m, scale)
    s{i}_b = Add(s{i}_s, bias)  s{i} = Softmax<axis = -1>(s{i}_b)  c{i}_h = MatMul(s{i}, v{i}_g)
    c{i}_t = Transpose<perm = [0, 2, 1, 3]>(c{i}_h)  c{i} = Reshape(c{i}_t, joined)  o{i} = MatMul(c{i}, o{i}.weight)
    a{i} = Add(x{i}, o{i})"""
_INNER = """g{i} = MatMul(m{i}, gate{i}.weight)  g{i}_s = Sigmoid(g{i})  g{i}_a = Mul(g{i}, g{i}_s)
    u{i} = MatMul(m{i}, up{i}.weight)  gu{i} = Mul(g{i}_a, u{i})  d{i} = MatMul(gu{i}, down{i}.weight)
    x{i1} = Add(a{i}, d{i})"""


def decoder(
    *,
    cached: bool = False,
    tied: bool = False,
    blocks: int = 2,
    vocabulary: int = VOCABULARY,
    width: int = WIDTH,
    inner: int = INNER,
    seed: int = 0,
) -> onnx.ModelProto:
    """The decoder; where it is `tied`, the head is the table of the tokens, turned."""
    body = [_CACHED_START if cached else _PLAIN_START, _MASK]
    for i in range(blocks):
        body += [_NORM.format(x=f"x{i}", y=f"n{i}", w=f"norm{i}.weight"), _ATTENTION.format(i=i)]
        body += [_ROTARY.format(x=f"q{i}_t", y=f"q{i}_p"), _ROTARY.format(x=f"k{i}_t", y=f"k{i}_p")]
        body.append(_cache(i) if cached else f"k{i}_c = Identity(k{i}_p)  v{i}_c = Identity(v{i}_t)")
        body += [_REPEAT.format(x=f"k{i}_c", y=f"k{i}_g"), _REPEAT.format(x=f"v{i}_c", y=f"v{i}_g")]
        body += [_SCORES.format(i=i), _NORM.format(x=f"a{i}", y=f"m{i}", w=f"inner_norm{i}.weight")]
        body.append(_INNER.format(i=i, i1=i + 1))
    body.append(_NORM.format(x=f"x{blocks}", y="last", w="norm.weight"))
    turned = "head_t = Transpose<perm = [1, 0]>(embed.weight)  logits = MatMul(last, head_t)"
    body.append(turned if tied else "logits = MatMul(last, head.weight)")
    model = _parsed("\n".join(body), blocks, cached, vocabulary, width // HEADS)
    used = {name for node in model.graph.node for name in node.input}
    for name, array in {**_weights(blocks, vocabulary, width, inner, seed), **_constants(width)}.items():
        if name in used:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.checker.check_model(model)
    return model


def _cache(i: int) -> str:
    return (
        f"present.{i}.key = Concat<axis = 2>(past_key_values.{i}.key, k{i}_p)  k{i}_c = Identity(present.{i}.key)  "
        f"present.{i}.value = Concat<axis = 2>(past_key_values.{i}.value, v{i}_t)  v{i}_c = Identity(present.{i}.value)"
    )


def _parsed(body: str, blocks: int, cached: bool, vocabulary: int, head: int) -> onnx.ModelProto:
    inputs = ["int64[batch, sequence] input_ids"]
    inputs.append(f"int64[batch, {'total' if cached else 'sequence'}] attention_mask")
    outputs = [f"float[batch, sequence, {vocabulary}] logits"]
    if cached:
        inputs.append("int64[batch, sequence] position_ids")
        held = [f"{i}.{part}" for i in range(blocks) for part in ("key", "value")]
        inputs += [f"float[batch, {KEY_HEADS}, past, {head}] past_key_values.{name}" for name in held]
        outputs += [f"float[batch, {KEY_HEADS}, total, {head}] present.{name}" for name in held]
    text = (
        f'<ir_version: 8, opset_import: ["": 17]> decoder ({", ".join(inputs)}) => ({", ".join(outputs)}) {{'
    )
    model = onnx.parser.parse_model(f"{text}\n{body}\n}}".replace(".", DOT))
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace(DOT, ".")
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace(DOT, ".") for name in names]
    return model


def _constants(width: int) -> dict[str, Array]:
    head = width // HEADS
    numbers = {"two": 2.0, "epsilon": EPSILON, "low": LOW, "float_zero": 0.0, "scale": head**-0.5}
    places = {"axis0": [0], "axis1": [1], "axis2": [2], "axis3": [3], "axes01": [0, 1], "axes12": [1, 2]}
    places |= {"half": [head // 2], "whole": [head]}
    places |= {"split_q": [0, 0, HEADS, head], "split_k": [0, 0, KEY_HEADS, head], "joined": [0, 0, width]}
    places |= {"many": [1, 1, HEADS // KEY_HEADS, 1, 1], "merged": [0, HEADS, -1, head]}
    return {
        **{name: np.array(number, np.float32) for name, number in numbers.items()},
        **{name: np.array(place, np.int64) for name, place in places.items()},
        "one0": np.array(1, np.int64),
        "int_zero": np.array(0, np.int64),
        "frequencies": (100.0 ** -(np.arange(head // 2) / (head // 2))).astype(np.float32),
    }


def _weights(blocks: int, vocabulary: int, width: int, inner: int, seed: int) -> dict[str, Array]:
    """Random, of the size that keeps activations near 1; the same for the same seed whatever else is asked for."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, width), "norm.weight": (width,)}
    for i in range(blocks):
        shapes |= {f"norm{i}.weight": (width,), f"inner_norm{i}.weight": (width,)}
        shapes |= {f"{name}{i}.weight": (width, width) for name in ("q", "o")}
        shapes |= {f"{name}{i}.weight": (width, KEY_HEADS * width // HEADS) for name in ("k", "v")}
        shapes |= {f"{name}{i}.weight": (width, inner) for name in ("gate", "up")}
        shapes |= {f"down{i}.weight": (inner, width)}
    shapes["head.weight"] = (width, vocabulary)
    generator = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            made[name] = generator.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            size = 1.0 if name == "embed.weight" else shape[0] ** -0.5
            made[name] = (size * generator.standard_normal(shape)).astype(np.float32)
    return made


def token_rows(rows: int, length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> dict[str, Array]:
    """Tokens of which each follows from the one before it, mostly, and no padding: input_ids, attention_mask (n, t)."""
    generator = np.random.default_rng(seed)
    follows = np.random.default_rng(0).integers(0, vocabulary, (vocabulary, 4))
    ids = np.empty((rows, length), np.int64)
    ids[:, 0] = generator.integers(0, vocabulary, rows)
    for step in range(1, length):
        ids[:, step] = follows[ids[:, step - 1], generator.integers(0, 4, rows)]
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def with_empty_past(rows: dict[str, Array], blocks: int = 2) -> dict[str, Array]:
    """The same rows as a cached decoder takes them at first."""
    count, length = rows["input_ids"].shape
    positions = np.maximum(np.cumsum(rows["attention_mask"], axis=1) - 1, 0)
    empty = np.zeros((count, KEY_HEADS, 0, HEAD), np.float32)
    past = {f"past_key_values.{i}.{part}": empty for i in range(blocks) for part in ("key", "value")}
    return {**rows, "position_ids": positions, **past}
