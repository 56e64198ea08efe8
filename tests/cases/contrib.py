"""onnxruntime's fused operators: activations, layers, attention (domain com.microsoft)."""

from __future__ import annotations

import numpy as np

from cases.framework import Given, between, case, certain, const, define, ints

MICROSOFT = "com.microsoft"


def fused(op_type: str, call: str, opset: int = 17, outputs: str = "y", **tensors) -> None:
    """A line about an operator of com.microsoft: `call` is its attributes and inputs."""
    case(op_type, f"{outputs} = {MICROSOFT}.{op_type}{call}", opset, **tensors)


def whole(*values: int, shape: tuple[int, ...] | None = None) -> Given:
    """An initializer of int32."""
    array = np.array(values, np.int32)
    return Given(array if shape is None else array.reshape(shape))


SIX_DIGITS = dict(tolerance=5e-5)  # of the constants that onnxruntime writes √(2/π) with, at slopes near 0


def signed(*shape: int, levels: tuple[float, ...], axis: int = 0) -> Given:
    """Weights near one level per output, which keep activations with kinks away from them."""
    spread = np.random.default_rng(0).uniform(0.8, 1.2, shape)
    places = [1] * len(shape)
    places[axis] = len(levels)
    return Given(spread * np.reshape(levels, places))


# -------------------------------------------------------------------- activations, biases

fused("Gelu", "(x)", x=(4, 5))
fused("QuickGelu", "(x)", x=(4, 5))
fused("QuickGelu", "<alpha=1.1>(x)", x=(4, 5))
fused("BiasGelu", "(x, b)", x=(4, 5), b=const(5))
fused("BiasGelu", "(x, b)", x=(4, 5), b=(5,))
fused("FastGelu", "(x)", **SIX_DIGITS, x=(4, 5))
fused("FastGelu", "(x, b)", 11, **SIX_DIGITS, x=(4, 5), b=const(5))
fused("FastGelu", "(x, b)", **SIX_DIGITS, x=certain(4, 5), b=(5,))
fused("ScaledSiLU", "<alpha=0.7>(x)", x=(4, 5))

define(MICROSOFT, "BiasSplitGelu", "(x, b) => (y)",
       "z = Add(x, b) l, r = Split<axis=-1>(z) c = Constant<value_float=0.70710678>() c2 = CastLike(c, r)"
       "t = Mul(r, c2) e = Erf(t) one = CastLike(o, r) f = Add(e, one) g = Mul(f, r) i = Mul(g, l)"
       "h = Constant<value_float=0.5>() h2 = CastLike(h, r) y = Mul(i, h2)"
       .replace("t = Mul", "o = Constant<value_float=1.0>() t = Mul"))  # fmt: skip
fused("BiasSplitGelu", "(x, b)", x=(1, 2, 6), b=const(6))
define(MICROSOFT, "BiasAdd", "(x, b, s) => (y)", "z = Add(x, b) y = Add(z, s)")
fused("BiasAdd", "(x, b, s)", x=(1, 2, 3), b=const(3), s=(1, 2, 3))
fused("BiasAdd", "(x, b, s)", x=certain(1, 2, 3), b=(3,), s=(1, 2, 3))
define(MICROSOFT, "BiasDropout", "(x, b, s) => (y)", "z = Add(x, b) y = Add(z, s)")
fused("BiasDropout", "(x, b, s)", x=(2, 3), b=const(3), s=(2, 3))
define(MICROSOFT, "BiasSoftmax", "<axis, is_inner_broadcast>(x, b) => (y)",
       "z = Add(x, b) f = Flatten<axis: int = @axis>(z) p = Softmax<axis=1>(f) s = Shape(x) y = Reshape(p, s)")  # fmt: skip
fused("BiasSoftmax", "<axis=2, is_inner_broadcast=0>(x, b)", x=(2, 3, 4), b=const(3, 4))
fused("BiasSoftmax", "<axis=1, is_inner_broadcast=1>(x, b)", 12, x=(2, 3, 2), b=const(2, 1, 2))

# --------------------------------------------------------------------------------- layers

fused("FusedMatMul", "(a, b)", a=(2, 3), b=const(3, 4))
fused("FusedMatMul", "<alpha=0.5, transA=1>(a, b)", a=(3, 2), b=(3, 4))
fused("FusedMatMul", "<alpha=0.5, transB=1>(a, b)", 11, a=(2, 2, 3), b=const(2, 4, 3))
fused("FusedMatMul", "<transBatchA=1>(a, b)", a=(2, 3, 4), b=const(3, 4, 2))
fused("FusedMatMul", "<transBatchB=1, transB=1>(a, b)", a=const(3, 2, 4), b=(5, 3, 4))
fused("TransposeMatMul", "<alpha=2.0, transB=1>(a, b)", a=(2, 3), b=const(4, 3))
MAP = between(0.5, 1.5, 1, 2, 4, 4)
fused(
    "FusedConv", '<activation="Relu">(x, w, b)', x=MAP, w=signed(2, 2, 3, 3, levels=(0.5, -0.5)), b=const(2)
)
fused("FusedConv", '<activation="Tanh", pads=[1,1,1,1], strides=[2,2]>(x, w)', x=(1, 2, 4, 4),
      w=const(2, 2, 3, 3, low=-0.2, high=0.3))  # fmt: skip
fused("FusedConv", '<activation="Sigmoid", group=2>(x, w)', x=(1, 2, 4, 4),
      w=const(2, 1, 2, 2, low=-0.3, high=0.4))  # fmt: skip
fused("FusedConv", '<activation="LeakyRelu", activation_params=[0.2]>(x, w)', x=MAP,
      w=signed(2, 2, 3, 3, levels=(0.5, -0.5)))  # fmt: skip
fused("FusedConv", '<activation="Clip", activation_params=[0.0, 6.0]>(x, w)', x=MAP,
      w=signed(3, 2, 3, 3, levels=(0.1, -0.3, 0.8)))  # fmt: skip
fused("FusedConv", '<activation="HardSigmoid", activation_params=[0.2, 0.5]>(x, w)', x=MAP,
      w=signed(3, 2, 3, 3, levels=(0.05, -0.5, 0.5)))  # fmt: skip
fused("FusedConv", '<activation="Relu">(x, w, b, z)', x=between(0.5, 1.5, 1, 2, 3, 3),
      w=signed(2, 2, 2, 2, levels=(0.7, -0.7)), b=const(2, low=-0.1, high=0.1),
      z=between(-0.5, 0.5, 1, 2, 2, 2))  # fmt: skip
fused("FusedConv", "(x, w, , z)", x=certain(1, 2, 3, 3), w=const(2, 2, 2, 2), z=(1, 2, 2, 2))
ROWS = between(0.5, 1.5, 2, 3)
fused("FusedGemm", '<activation="Relu", alpha=0.5, transB=1>(a, b, c)', a=ROWS,
      b=signed(4, 3, levels=(2, -2, 1.5, -1.5)), c=const(4, low=-0.1, high=0.1))  # fmt: skip
fused("FusedGemm", '<activation="Tanh">(a, b)', a=(2, 3), b=const(3, 4))
fused("FusedGemm", '<activation="LeakyRelu", activation_alpha=0.3>(a, b, c)', 9, a=ROWS,
      b=signed(3, 2, levels=(1, -1), axis=1), c=const(2, low=-0.1, high=0.1))  # fmt: skip
fused("FusedGemm", '<activation="Sigmoid", beta=0.5>(a, b, c)', a=(2, 3), b=const(3, 4), c=(4,))
fused("FusedGemm", '<activation="Elu", activation_alpha=0.7>(a, b, c)', a=ROWS,
      b=signed(3, 2, levels=(0.7, -0.7), axis=1), c=const(2, low=-0.1, high=0.1))  # fmt: skip
define(MICROSOFT, "FusedMatMulActivation", "<activation>(a, b) => (y)", "z = MatMul(a, b) y = Tanh(z)")
fused("FusedMatMulActivation", '<activation="Tanh">(a, b)', a=(2, 3), b=const(3, 4))
define(MICROSOFT, "GemmFastGelu", "(x, w, b) => (y)",
       'p = MatMul(x, w) z = Add(p, b) y = Gelu<approximate="tanh">(z)')  # fmt: skip
fused("GemmFastGelu", "(x, w, b)", 20, x=(2, 3), w=const(3, 4), b=const(4))
define(MICROSOFT, "NhwcConv", "<pads>(x, w, b) => (y)",
       "t = Transpose<perm=[0,3,1,2]>(x) c = Conv<pads: ints = @pads>(t, w, b) y = Transpose<perm=[0,2,3,1]>(c)")  # fmt: skip
fused("NhwcConv", "<pads=[1,0,0,1]>(x, w, b)", x=(1, 3, 4, 2), w=const(3, 2, 2, 2), b=const(3))
define(MICROSOFT, "NhwcFusedConv", "<activation>(x, w, b, s) => (y)",
       "t = Transpose<perm=[0,3,1,2]>(x) c = Conv(t, w, b) u = Transpose<perm=[0,2,3,1]>(c)" "z = Add(u, s) y = Relu(z)")  # fmt: skip
fused("NhwcFusedConv", '<activation="Relu">(x, w, b, s)', x=between(0.5, 1.5, 1, 3, 4, 2),
      w=signed(3, 2, 2, 2, levels=(0.7, -0.7, 0.7)), b=const(3, low=-0.1, high=0.1),
      s=between(-0.5, 0.5, 1, 2, 3, 3))  # fmt: skip
fused("ConvTransposeWithDynamicPads", "<strides=[2,2]>(x, w, p)", x=(1, 2, 3, 3), w=const(2, 2, 3, 3),
      p=ints(1, 0, 0, 1))  # fmt: skip

# ------------------------------------------------------------------------- moved elements

fused("Trilu", "<upper=0>(x)", x=(3, 4))
fused("GatherND", "(x, i)", x=(2, 3, 2), i=ints(1, 2, 0, 1, shape=(2, 2)))
fused("ExpandDims", "(x, a)", x=(2, 3), a=Given(np.array(1, np.int32)))
fused("GridSample", "(x, g)", x=(1, 2, 3, 3), g=certain(1, 2, 2, 2, low=-0.9, high=0.9))
fused(
    "GridSample",
    '<mode="nearest", align_corners=1>(x, g)',
    x=(1, 2, 3, 3),
    g=certain(1, 2, 2, 2, low=-0.9, high=0.9),
)
fused("SampleOp", "(x)", x=(2, 3))
fused("Pad", "(x, p)", x=(2, 3), p=ints(1, 0, 0, 2))
fused("Pad", '<mode="edge">(x, p)', x=(2, 3), p=ints(1, 0, 0, 2))
define(MICROSOFT, "NhwcMaxPool", "<kernel_shape>(x) => (y)",
       "t = Transpose<perm=[0,3,1,2]>(x) c = MaxPool<kernel_shape: ints = @kernel_shape>(t)"
       "y = Transpose<perm=[0,2,3,1]>(c)")  # fmt: skip
fused("NhwcMaxPool", "<kernel_shape=[2,2]>(x)", x=(2, 3, 4, 2))

# ------------------------------------------------------------------------------ attention

SELF = dict(exact=True, q=certain(2, 3, 8), k=certain(2, 4, 8))  # 2 heads of 4 features


def multi_head(call: str, opset: int = 17, outputs: str = "y", **tensors) -> None:
    fused("MultiHeadAttention", call, opset, outputs, **tensors)


multi_head("<num_heads=2>(q, k, v)", **SELF, v=(2, 4, 6))
multi_head("<num_heads=2, scale=0.9>(q, k, v, b)", 11, **SELF, v=(2, 4, 8), b=const(24))
multi_head("<num_heads=2>(q, k, v, , m)", **SELF, v=(2, 4, 8), m=whole(1, 1, 0, 1, 0, 1, 1, 1, shape=(2, 4)))
multi_head("<num_heads=2>(q, k, v, , m)", **SELF, v=(2, 4, 8), m=whole(2, 4))
multi_head("<num_heads=2>(q, k, v, , , b)", **SELF, v=(2, 4, 8), b=const(1, 2, 3, 4))
multi_head("<num_heads=2, unidirectional=1>(q, k, v)", exact=True, q=certain(2, 3, 8), k=certain(2, 3, 8),
           v=(2, 3, 8))  # fmt: skip
multi_head("<num_heads=2>(q, k, v)", exact=True, q=certain(2, 3, 8), k=certain(2, 2, 4, 4), v=(2, 2, 4, 4))
multi_head("<num_heads=2>(q, k, v, , , , pk, pv)", outputs="y, nk, nv", exact=True, q=certain(1, 2, 8),
           k=certain(1, 2, 8), v=(1, 2, 8), pk=certain(1, 2, 3, 4), pv=(1, 2, 3, 4))  # fmt: skip

GROUPED = dict(exact=True, q=certain(1, 3, 32), k=certain(1, 3, 16))  # 4 heads on 2, of 8 features


def grouped(attributes: str, inputs: str = "q, k, v, , , n, t", **tensors) -> None:
    lengths = dict(n=whole(2), t=Given(np.array(3, np.int32)))
    text = f"<num_heads=4, kv_num_heads=2{attributes}>({inputs})"
    fused("GroupQueryAttention", text, 17, "y, nk, nv", **({**GROUPED, "v": (1, 3, 16), **lengths} | tensors))


TURNS = dict(c=const(8, 8), s=const(8, 8), q=certain(1, 3, 64), k=certain(1, 3, 32), v=(1, 3, 32))
CACHE = dict(
    q=certain(1, 1, 32), k=certain(1, 1, 16), v=(1, 1, 16), n=whole(3), t=Given(np.array(4, np.int32))
)

grouped("")
grouped(", scale=0.3, softcap=0.8")
grouped(", local_window_size=2")
grouped(", smooth_softmax=1")
grouped(", do_rotary=1", "q, k, v, , , n, t, c, s", **TURNS)
grouped(", do_rotary=1, rotary_interleaved=1", "q, k, v, , , n, t, c, s", **TURNS)
grouped("", "q, k, v, pk, pv, n, t", **CACHE, pk=certain(1, 2, 3, 8), pv=(1, 2, 3, 8))
grouped(", do_rotary=1", "q, k, v, pk, pv, n, t, c, s", **TURNS | dict(
        q=certain(2, 1, 64), k=certain(2, 1, 32), v=(2, 1, 32), n=whole(3, 2), t=Given(np.array(4, np.int32)),
        pk=certain(2, 2, 3, 16), pv=(2, 2, 3, 16)))  # fmt: skip
grouped("", "q, k, v, , , n, t, , , , b", b=const(1, 4, 3, 3))
grouped("", "q, k, v, , , n, t, , , , , h", h=const(4))
grouped(", causal=0", n=whole(1))

fused("RotaryEmbedding", "(x, p, c, s)", x=(1, 3, 8), p=ints(2), c=const(6, 2), s=const(6, 2))
fused("RotaryEmbedding", "<interleaved=1>(x, p, c, s)", x=(1, 2, 3, 4), p=ints(4, 0, 2, shape=(1, 3)),
      c=const(6, 2), s=const(6, 2))  # fmt: skip
fused("RotaryEmbedding", "<num_heads=2, rotary_embedding_dim=4>(x, p, c, s)", x=(1, 2, 12),
      p=ints(3, 1, shape=(1, 2)), c=const(6, 2), s=const(6, 2))  # fmt: skip

# The weights of queries and keys are 0: tokens are weighed by masks alone, and values alone matter.
VALUES_ONLY = np.concatenate([np.zeros((6, 16)), np.random.default_rng(0).normal(size=(6, 8))], axis=1)
PACKED = dict(exact=True, x=(2, 3, 6), w=Given(VALUES_ONLY))


def packed(attributes: str, inputs: str = "x, w", opset: int = 17, **tensors) -> None:
    fused("Attention", f"<num_heads=2{attributes}>({inputs})", opset, **(PACKED | tensors))


packed("", "x, w, b", 11, b=const(24))
packed(", unidirectional=1", "x, w, b", b=const(24))
packed(", scale=0.7", "x, w, b, m", b=const(24), m=whole(1, 0, 1, 1, 1, 0, shape=(2, 3)))
packed("", "x, w, b, m", b=const(24), m=whole(2, 3))
packed("", "x, w, b, m", b=const(24), m=whole(3, 3, 1, 0))
packed("", "x, w, b, m", b=const(24), m=whole(*([1, 0, 1] * 5 + [0, 1, 1]), shape=(2, 3, 3)))
packed("", "x, w, b, , , a", b=const(24), a=const(2, 2, 3, 3))
packed(", qkv_hidden_sizes=[8,8,4]", "x, w, b", b=const(20), w=Given(VALUES_ONLY[:, :20]))
