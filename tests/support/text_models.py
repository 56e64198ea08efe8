"""Small text models: embeddings of token numbers, a network, an answer for each token and one for the text."""

from __future__ import annotations

import numpy as np
import onnx

from gapa_onnx.arrays import Array

WORDS, STRANGE, LOST = 50, 10, 1  # strange words are in no data; a lost one has no numbers for an embedding
WIDTH, HIDDEN, CLASSES = 6, 8, 3

_CONSTANTS = {
    "first": np.array([1]),
    "last": np.array([2]),
    "merged": np.array([-1, WIDTH]),
    "hidden": np.array([HIDDEN]),
    **{name: np.array(number, np.float32) for name, number in (("one", 1), ("low", -1e9), ("zero", 0))},
}

ATTENTION = """f = Transpose<perm = [0, 2, 1]>(e)  s = MatMul(e, f)  b = Cast<to = 1>(attention_mask)
    o = Unsqueeze(b, first)  i = Sub(one, o)  p = Mul(i, low)  m = Add(s, p)  a = Softmax(m)  c = MatMul(a, e)"""
PLAIN = "c = Identity(e)"
TANH = "z = MatMul(c, w1)  h = Tanh(z)"
CONVOLUTION = """x = Transpose<perm = [0, 2, 1]>(c)  z = Conv(x, k1)  h_ = Tanh(z)  h = Transpose<perm = [0, 2, 1]>(h_)"""
MERGED = """x = Reshape(c, merged)  z = MatMul(x, w1)  h_ = Tanh(z)  q = Shape<start = 0, end = 2>(c)
    shape = Concat<axis = 0>(q, hidden)  h = Reshape(h_, shape)"""
OF_TOKENS = "tokens = MatMul(h, w2)"
#: The mean of h over the real tokens, without a product, so that what is no number at padding does not come in.
POOLING = """v = Cast<to = 9>(attention_mask)  w = Unsqueeze(v, last)  kept = Where(w, h, zero)
    sum = ReduceSum<keepdims = 0>(kept, first)  n = Cast<to = 1>(w)  count = ReduceSum<keepdims = 0>(n, first)
    pooled = Div(sum, count)"""
OF_TEXTS = f"{POOLING}  g = MatMul(pooled, w3)  r3 = Relu(g)  logits = MatMul(r3, w4)"


def text_model(
    *parts: str, tokens: bool = False, texts: bool = False, positions: int | str = "t", inverted: bool = False
) -> onnx.ModelProto:
    """input_ids and attention_mask (n, t) -> tokens (n, t, 3), logits (n, 3). `inverted`: the mask that is fed is
    key_padding_mask, with ones at padding."""
    outputs = [f"float[n, {positions}, {CLASSES}] tokens"] * tokens + [f"float[n, {CLASSES}] logits"] * texts
    given = "key_padding_mask" if inverted else "attention_mask"
    body = ["attention_mask = Not(key_padding_mask)"] * inverted + ["e = Gather(table, input_ids)", *parts]
    body += [OF_TOKENS] * tokens + [OF_TEXTS] * texts
    kind = "bool" if inverted else "int64"
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> net '
        f"(int64[n, {positions}] input_ids, {kind}[n, {positions}] {given}) => ({', '.join(outputs)}) "
        f"{{ {'  '.join(body)} }}"
    )
    used = {name for node in model.graph.node for name in node.input}
    for name, array in {**weights(), **_CONSTANTS}.items():
        if name in used:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def weights() -> dict[str, Array]:
    generator = np.random.default_rng(0)
    shapes = {"table": (WORDS + STRANGE + LOST, WIDTH), "w1": (WIDTH, HIDDEN), "w2": (HIDDEN, CLASSES),
              "w3": (HIDDEN, HIDDEN), "w4": (HIDDEN, CLASSES)}  # fmt: skip
    found = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    found["table"][WORDS:] *= 4
    found["table"][WORDS + STRANGE :] = np.nan
    found["k1"] = np.ascontiguousarray(found["w1"].T)[:, :, None]
    return found


def texts(lengths: Array, positions: int, seed: int, padding: int = 0) -> dict[str, Array]:
    """Texts of known words, filled up with one word: input_ids and attention_mask (n, positions)."""
    mask = np.arange(positions) < np.asarray(lengths)[:, None]
    ids = np.random.default_rng(seed).integers(0, WORDS, mask.shape)
    return {"input_ids": np.where(mask, ids, padding), "attention_mask": mask.astype(np.int64)}


def repadded(rows: dict[str, Array], seed: int, lost: bool = False) -> dict[str, Array]:
    """The same texts, with strange words or a lost one where they are filled up."""
    shape = rows["input_ids"].shape
    others = np.random.default_rng(seed).integers(WORDS, WORDS + STRANGE, shape)
    filling = np.full(shape, WORDS + STRANGE) if lost else others
    return {**rows, "input_ids": np.where(rows["attention_mask"] == 1, rows["input_ids"], filling)}


def features(rows: dict[str, Array], attention: bool = False) -> Array:
    """z of each token (n, t, 8), in float64, without what is padding: NaN there."""
    w = {name: array.astype(np.float64) for name, array in weights().items()}
    real = rows["attention_mask"] == 1
    e = w["table"][np.where(real, rows["input_ids"], 0)]
    if attention:
        scores = np.where(real[:, None, :], e @ e.swapaxes(1, 2), -np.inf)
        powers = np.exp(scores - scores.max(axis=2, keepdims=True))
        e = powers / powers.sum(axis=2, keepdims=True) @ e
    return np.where(real[..., None], e @ w["w1"], np.nan)
