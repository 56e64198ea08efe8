"""Attention with uncertain values, rotary embeddings, gated units.

With queries and keys certain the default rule is exact; `test_attention` has the other half.
"""

from __future__ import annotations

import numpy as np

from cases.framework import Given, case, certain, const, define, ints, truths

# ------------------------------------------------------------------------- ONNX: Attention

HEADS = dict(q=certain(2, 3, 8), k=certain(2, 4, 8))  # 2 heads of 4 features
MASK = truths(1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1)


def shaped(given: Given, *shape: int) -> Given:
    return Given(given.values.reshape(shape))


def attention(
    attributes: str, inputs: str = "q, k, v", opset: int = 23, outputs: str = "y", **tensors
) -> None:
    case("Attention", f"{outputs} = Attention<{attributes}>({inputs})", opset, exact=True, **tensors)


attention("q_num_heads=2, kv_num_heads=2", **HEADS, v=(2, 4, 6))
attention("q_num_heads=2, kv_num_heads=2, scale=0.9, is_causal=1", **HEADS, v=(2, 4, 6))
attention("q_num_heads=2, kv_num_heads=2, softcap=0.7", **HEADS, v=(2, 4, 6))
attention("q_num_heads=4, kv_num_heads=2", q=certain(2, 3, 16), k=certain(2, 4, 8), v=(2, 4, 6))
attention("scale=0.3", q=certain(2, 2, 3, 4), k=certain(2, 2, 5, 4), v=(2, 2, 5, 3))
attention("is_causal=1", q=certain(1, 4, 3, 4), k=certain(1, 2, 3, 4), v=(1, 2, 3, 4))
attention("q_num_heads=2, kv_num_heads=2", "q, k, v, m", **HEADS, v=(2, 4, 6), m=shaped(MASK, 3, 4))
attention("q_num_heads=2, kv_num_heads=2", "q, k, v, m", **HEADS, v=(2, 4, 6), m=const(2, 1, 3, 4))
attention("q_num_heads=2, kv_num_heads=2", "q, k, v, m", **HEADS, v=(2, 4, 6),
          m=Given(np.where(MASK.values.reshape(3, 4), 0.3, -np.inf)))  # fmt: skip
attention("q_num_heads=2, kv_num_heads=2, is_causal=1", "q, k, v, m", 24, **HEADS, v=(2, 4, 6),
          m=shaped(MASK, 3, 4))  # fmt: skip
attention("q_num_heads=2, kv_num_heads=2, is_causal=1", "q, k, v, , pk, pv", outputs="y, nk, nv",
          q=certain(2, 2, 8), k=certain(2, 2, 8), v=(2, 2, 6),
          pk=certain(2, 2, 3, 4), pv=certain(2, 2, 3, 3))  # fmt: skip
attention("q_num_heads=2, kv_num_heads=2", "q, k, v, , pk, pv", outputs="y, nk, nv",
          q=certain(1, 2, 4), k=certain(1, 2, 4), v=(1, 2, 4),
          pk=certain(1, 2, 2, 2), pv=(1, 2, 2, 2))  # fmt: skip
attention("q_num_heads=2, kv_num_heads=2", "q, k, v, , , , n", 24, **HEADS, v=(2, 4, 6), n=ints(4, 2))

# From opset 25 on, which onnxruntime does not run yet: windows, and masks that cover only some keys.
attention(
    "q_num_heads=2, kv_num_heads=2, left_window_size=1, right_window_size=1", opset=27, **HEADS, v=(2, 4, 6)
)
attention("q_num_heads=2, kv_num_heads=2, left_window_size=1, is_causal=1", opset=27, **HEADS, v=(2, 4, 6))
attention(
    "q_num_heads=2, kv_num_heads=2",
    "q, k, v, m",
    27,
    **HEADS,
    v=(2, 4, 6),
    m=shaped(truths(1, 1, 0, 1, 1, 1), 3, 2),
)

# ----------------------------------------------------------------- what patterns leave of it

define("ai.gapa.pattern", "AttentionValues", "(a, v) => (y)", "y = MatMul(a, v)")
case(
    "AttentionValues",
    "y = ai.gapa.pattern.AttentionValues(a, v)",
    exact=True,
    a=certain(2, 3, 4),
    v=(2, 4, 5),
)
case("AttentionValues", "y = ai.gapa.pattern.AttentionValues(a, v)", 9, exact=True, a=const(3, 4), v=(4, 5))

# ------------------------------------------------------------------------ rotary, gated units

case("RotaryEmbedding", "y = RotaryEmbedding(x, c, s, p)", 23, x=(1, 2, 3, 4), c=const(6, 2), s=const(6, 2),
     p=ints(4, 0, 2, shape=(1, 3)))  # fmt: skip
case("RotaryEmbedding", "y = RotaryEmbedding<interleaved=1>(x, c, s)", 23, x=(2, 2, 3, 4), c=const(2, 3, 2),
     s=const(2, 3, 2))  # fmt: skip
case("RotaryEmbedding", "y = RotaryEmbedding<num_heads=2>(x, c, s)", 23, x=(2, 3, 8), c=const(2, 3, 2),
     s=const(2, 3, 2))  # fmt: skip
case("RotaryEmbedding", "y = RotaryEmbedding<num_heads=2, rotary_embedding_dim=4>(x, c, s, p)", 23,
     x=(1, 2, 12), c=const(4, 2), s=const(4, 2), p=ints(3, 1, shape=(1, 2)))  # fmt: skip
case("RotaryEmbedding", "y = RotaryEmbedding<rotary_embedding_dim=2, interleaved=1>(x, c, s, p)", 23,
     x=(1, 2, 2, 6), c=const(4, 1), s=const(4, 1), p=ints(3, 1, shape=(1, 2)))  # fmt: skip
case("SwiGLU", "y = SwiGLU(a, b)", 28, a=(2, 3), b=(2, 3))
case("SwiGLU", "y = SwiGLU<alpha=1.7>(a, b)", 28, a=(2, 3), b=certain(2, 3))
case("SwiGLU", "y = SwiGLU(a, b)", 28, a=certain(2, 3), b=(2, 3))
