"""Quantised operators. Differences are taken of what a node computes but for rounding (`smooth`)."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cases.framework import Given, between, case, const, number, steps

I8, U8, I32 = np.int8, np.uint8, np.int32


def zero(value: int, dtype: type = U8) -> Given:
    return Given(np.array(value, dtype))


def scales(*values: float) -> Given:
    return Given(np.array(values, np.float64))


def zeros(*values: int, dtype: type = U8) -> Given:
    return Given(np.array(values, dtype))


def weights(*shape: int, dtype: type = I8) -> object:
    # Without VNNI a processor adds two products of 8 bits in 16: 2 · 255 · 64 still fits.
    low, high = (-64, 64) if dtype is I8 else (20, 235)
    return steps(*shape, low=low, high=high, dtype=dtype, constant=True)


def column(values: np.ndarray, rank: int) -> np.ndarray:
    return np.reshape(values, (-1, *[1] * (rank - 1)))


# -------------------------------------------------------------------- in and out

QUANTIZE = "y = QuantizeLinear(x, s, z)"
case("QuantizeLinear", QUANTIZE, x=(2, 3), s=number(0.02), z=zero(128),
     smooth=lambda x, s, z: np.clip(x / s + z, 0, 255))  # fmt: skip
case("QuantizeLinear", QUANTIZE, 10, x=(5, 3), s=number(0.01), z=zero(3, I8),  # some are saturated
     smooth=lambda x, s, z: np.clip(x / s + z, -128, 127))  # fmt: skip
case("QuantizeLinear", "y = QuantizeLinear(x, s)", x=between(0.1, 1, 2, 3), s=number(0.01),
     smooth=lambda x, s: np.clip(x / s, 0, 255))  # fmt: skip
case("QuantizeLinear", "y = QuantizeLinear<axis=0>(x, s, z)", x=(2, 3), s=scales(0.02, 0.05), z=zeros(99, 5),
     smooth=lambda x, s, z: np.clip(x / column(s, 2) + column(z, 2), 0, 255))  # fmt: skip
case("QuantizeLinear", QUANTIZE, 13, x=(2, 3, 2), s=scales(0.02, 0.05, 0.03), z=zeros(9, 99, 5),
     smooth=lambda x, s, z: np.clip(x / column(s, 2) + column(z, 2), 0, 255))  # fmt: skip
case("QuantizeLinear", "y = QuantizeLinear<axis=-1>(x, s, z)", 13, x=(2, 3), s=scales(0.02, 0.05, 0.03),
     z=zeros(9, 99, 5), smooth=lambda x, s, z: np.clip(x / s + z, 0, 255))  # fmt: skip
case("QuantizeLinear", "y = QuantizeLinear<axis=1, block_size=2>(x, s, z)", 21, x=(2, 4),
     s=const(2, 2, low=0.03, high=0.06), z=Given(np.array([[100, 120], [128, 90]], U8)),
     smooth=lambda x, s, z: np.clip(x / np.repeat(s, 2, 1) + np.repeat(z, 2, 1), 0, 255))  # fmt: skip
case("QuantizeLinear", QUANTIZE, 21, x=(2, 3), s=number(0.001), z=zero(128, np.int16),
     smooth=lambda x, s, z: np.clip(x / s + z, -32768, 32767))  # fmt: skip
case("QuantizeLinear", "q = QuantizeLinear(x, s, z); y = Cast<to=6>(q)", 21, x=(3, 4), s=number(0.29), z=zero(0, ml_dtypes.int4),
     smooth=lambda x, s, z: np.clip(x / s, -8, 7))  # fmt: skip
case("QuantizeLinear", "y = com.microsoft.QuantizeLinear(x, s, z)", x=(2, 3), s=number(0.001), z=zero(8, np.int16),
     smooth=lambda x, s, z: np.clip(x / s + z, -32768, 32767))  # fmt: skip
case("DequantizeLinear", "y = DequantizeLinear(q, s, z)", q=steps(2, 3), s=number(0.02), z=zero(128),
     smooth=lambda q, s, z: (q - z) * s)  # fmt: skip
case("DequantizeLinear", "y = DequantizeLinear(q, s, z)", 10, q=steps(2, 3, low=-90, high=90, dtype=I8),
     s=number(0.02), z=zero(3, I8), smooth=lambda q, s, z: (q - z) * s)  # fmt: skip
case("DequantizeLinear", "y = DequantizeLinear(q, s)", q=steps(2, 3, low=-9999, high=9999, dtype=I32),
     s=number(0.02), smooth=lambda q, s: q * s)  # fmt: skip
case("DequantizeLinear", "y = DequantizeLinear(q, s, z)", 13, q=steps(2, 3, 2), s=scales(0.02, 0.05, 0.03),
     z=zeros(9, 99, 5), smooth=lambda q, s, z: (q - column(z, 2)) * column(s, 2))  # fmt: skip
case("DequantizeLinear", "y = DequantizeLinear<axis=-2>(q, s)", 13, q=steps(3, 2), s=scales(0.02, 0.05, 0.03),
     smooth=lambda q, s: q * column(s, 2))  # fmt: skip
case("DequantizeLinear", "y = DequantizeLinear<axis=0, block_size=3>(q, s)", 21, q=steps(6, 2),
     s=const(2, 2, low=0.03, high=0.06), smooth=lambda q, s: q * np.repeat(s, 3, 0))  # fmt: skip
case("DequantizeLinear", "y = com.microsoft.DequantizeLinear(q, s, z)", q=steps(2, 3, dtype=np.uint16),
     s=number(0.02), z=zero(128, np.uint16), smooth=lambda q, s, z: (q - z) * s)  # fmt: skip


case("DynamicQuantizeLinear", "q, s, z = DynamicQuantizeLinear(x); y = DequantizeLinear(q, s, z)", x=(4, 3),
     smooth=lambda x: x)  # fmt: skip

# ------------------------------------------------------------------------- layers


def conv(x: np.ndarray, w: np.ndarray, strides: int = 1, pads: int = 0, group: int = 1) -> np.ndarray:
    """A plain convolution (n, c, h, w) by (m, c / group, kh, kw)."""
    x = np.pad(x, ((0, 0), (0, 0), (pads, pads), (pads, pads)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))[
        :, :, ::strides, ::strides
    ]
    parts = [
        np.einsum("nchwij,mcij->nmhw", a, b)
        for a, b in zip(np.split(windows, group, axis=1), np.split(w, group, axis=0))
    ]
    return np.concatenate(parts, axis=1)


MATMUL = "y = MatMulInteger(a, b, p, q)"
case("MatMulInteger", MATMUL, a=steps(2, 3), b=weights(3, 4), p=zero(120), q=zero(3, I8),
     smooth=lambda a, b, p, q: (a - p) @ (b - q))  # fmt: skip
case("MatMulInteger", "y = MatMulInteger(a, b)", 10, a=steps(2, 2, 3), b=weights(3, 4, dtype=U8),
     smooth=lambda a, b: a @ b)  # fmt: skip
case("MatMulInteger", MATMUL, a=steps(2, 3), b=weights(3, 2), p=zero(120), q=zeros(3, -4, dtype=I8),
     smooth=lambda a, b, p, q: (a - p) @ (b - q))  # fmt: skip
case("MatMulInteger", MATMUL, a=steps(2, 3), b=steps(3, 4), p=zero(120), q=zero(30),
     smooth=lambda a, b, p, q: (a - p) @ (b - q))  # fmt: skip
case("MatMulInteger", MATMUL, a=steps(2, 3, certain=True), b=steps(3, 4), p=zero(120), q=zero(30),
     smooth=lambda a, b, p, q: (a - p) @ (b - q))  # fmt: skip
case("MatMulInteger", "i = MatMulInteger(a, b, p, q); f = Cast<to=1>(i); y = Mul(f, s)", a=steps(2, 3),
     b=weights(3, 2), p=zero(120), q=zero(3, I8), s=scales(0.002, 0.003),
     smooth=lambda a, b, p, q, s: (a - p) @ (b - q) * s)  # fmt: skip
case("MatMulInteger16", "y = com.microsoft.MatMulInteger16(a, b)", a=steps(2, 3, dtype=np.int16),
     b=steps(3, 4, dtype=np.int16, constant=True), smooth=lambda a, b: a @ b)  # fmt: skip
case("ConvInteger", "y = ConvInteger<pads=[1,1,1,1]>(x, w, p, q)", x=steps(1, 2, 4, 3), w=weights(3, 2, 3, 3, dtype=U8),
     p=zero(120), q=zero(100), smooth=lambda x, w, p, q: conv(x - p, w - q, pads=1))  # fmt: skip
case("ConvInteger", "y = ConvInteger<strides=[2,2], group=2>(x, w)", 10, x=steps(1, 2, 5, 5),
     w=weights(4, 1, 3, 3, dtype=U8), smooth=lambda x, w: conv(x, w, strides=2, group=2))  # fmt: skip

QCONV = "QLinearConv<pads=[1,1,1,1]>(x, sx, zx, w, sw, zw, sy, zy, b)"
QCONV_CASE = dict(
    x=steps(1, 2, 4, 3), sx=number(0.02), zx=zero(110), w=weights(3, 2, 3, 3), sw=scales(0.01, 0.012, 0.008),
    zw=zeros(0, 0, 0, dtype=I8), sy=number(0.11), zy=zero(128), b=Given(np.array([10, -2000, 300], I32)),
    smooth=lambda x, sx, zx, w, sw, zw, sy, zy, b: np.clip(
        (conv(x - zx, w, pads=1) + column(b, 3)) * (sx * column(sw, 3) / sy) + zy, 0, 255),
)  # fmt: skip
case("QLinearConv", f"y = {QCONV}", **QCONV_CASE)
case("QLinearConv", f"y = {QCONV}", 10, **QCONV_CASE)
case("QLinearConv", f"y = com.microsoft.{QCONV}", **QCONV_CASE)
case("QLinearConv", "y = QLinearConv<strides=[2,2], group=2>(x, sx, zx, w, sw, zw, sy, zy)", x=steps(1, 4, 5, 5),
     sx=number(0.02), zx=zero(110), w=weights(2, 2, 3, 3, dtype=U8), sw=number(0.01), zw=zero(120), sy=number(0.1),
     zy=zero(128), smooth=lambda x, sx, zx, w, sw, zw, sy, zy: np.clip(
         conv(x - zx, w - zw, strides=2, group=2) * (sx * sw / sy) + zy, 0, 255))  # fmt: skip
case("QLinearConv", "y = com.microsoft.QLinearConv<channels_last=1>(x, sx, zx, w, sw, zw, sy, zy)",
     x=steps(1, 4, 3, 2), sx=number(0.02), zx=zero(110), w=weights(3, 2, 2, 2, dtype=U8), sw=number(0.01), zw=zero(120),
     sy=number(0.05), zy=zero(128), smooth=lambda x, sx, zx, w, sw, zw, sy, zy: np.clip(
         np.moveaxis(conv(np.moveaxis(x, 3, 1) - zx, w - zw), 1, 3) * (sx * sw / sy) + zy, 0, 255))  # fmt: skip

QMATMUL = "y = QLinearMatMul(a, sa, za, b, sb, zb, sy, zy)"
Q_FACTORS = dict(sa=number(0.02), za=zero(110), sb=number(0.01), zb=zero(100), sy=number(0.02), zy=zero(128))


def qmatmul(a, sa, za, b, sb, zb, sy, zy):  # noqa: ANN001, ANN201
    return np.clip((a - za) @ (b - zb) * (sa * sb / sy) + zy, 0, 255)


case("QLinearMatMul", QMATMUL, a=steps(2, 3), b=weights(3, 4, dtype=U8), **Q_FACTORS, smooth=qmatmul)
case("QLinearMatMul", QMATMUL, 10, a=steps(2, 2, 3), b=weights(3, 4, dtype=U8), **Q_FACTORS, smooth=qmatmul)
case("QLinearMatMul", QMATMUL, a=steps(2, 3), b=steps(3, 4), **Q_FACTORS, smooth=qmatmul)
case("QLinearMatMul", QMATMUL, a=steps(2, 3), b=weights(3, 2, dtype=I8),
     **Q_FACTORS | {"sb": scales(0.01, 0.03), "zb": zeros(0, 0, dtype=I8)}, smooth=qmatmul)  # fmt: skip

QGEMM = "(a, sa, za, b, sb, zb, c, sy, zy)"
BIAS = Given(np.array([100, -200, 50, 0], I32))
case("QGemm", f"y = com.microsoft.QGemm{QGEMM}", a=steps(2, 3), b=weights(3, 4), c=BIAS,
     **Q_FACTORS | {"zb": zero(0, I8)}, smooth=lambda a, sa, za, b, sb, zb, c, sy, zy: np.clip(
         ((a - za) @ b + c) * (sa * sb / sy) + zy, 0, 255))  # fmt: skip
case("QGemm", f"y = com.microsoft.QGemm<alpha=0.5, transA=1, transB=1>{QGEMM}", a=steps(3, 2), b=weights(4, 3), c=BIAS,
     **Q_FACTORS | {"sb": scales(0.01, 0.03, 0.02, 0.01), "zb": zeros(0, 0, 0, 0, dtype=I8)},
     smooth=lambda a, sa, za, b, sb, zb, c, sy, zy: np.clip(
         ((a - za).T @ b.T + c) * (0.5 * sa * sb / sy) + zy, 0, 255))  # fmt: skip
case("QGemm", "y = com.microsoft.QGemm(a, sa, za, b, sb, zb, c)", a=steps(2, 3), b=weights(3, 4), c=BIAS,
     sa=number(0.02), za=zero(110), sb=scales(0.01, 0.03, 0.02, 0.01), zb=zeros(0, 0, 0, 0, dtype=I8),
     smooth=lambda a, sa, za, b, sb, zb, c: ((a - za) @ b + c) * (sa * sb))  # fmt: skip

case("MatMulIntegerToFloat", "y = com.microsoft.MatMulIntegerToFloat(a, b, sa, sb, za, zb, c)", a=steps(2, 3),
     b=weights(3, 2), sa=number(0.02), sb=scales(0.01, 0.03), za=zero(110), zb=zeros(0, 3, dtype=I8), c=const(2),
     smooth=lambda a, b, sa, sb, za, zb, c: (a - za) @ (b - zb) * (sa * sb) + c)  # fmt: skip
case("MatMulIntegerToFloat", "y = com.microsoft.MatMulIntegerToFloat(a, b, sa, sb)", 11, a=steps(2, 2, 3),
     b=weights(3, 4, dtype=U8), sa=number(0.02), sb=number(0.01),
     smooth=lambda a, b, sa, sb: a @ b * (sa * sb))  # fmt: skip
case("DynamicQuantizeMatMul", "y = com.microsoft.DynamicQuantizeMatMul(a, b, sb, zb, c)", a=(2, 3), b=weights(3, 2),
     sb=scales(0.01, 0.03), zb=zeros(0, 3, dtype=I8), c=const(2),
     smooth=lambda a, b, sb, zb, c: a @ ((b - zb) * sb) + c)  # fmt: skip
case("DynamicQuantizeMatMul", "y = com.microsoft.DynamicQuantizeMatMul(a, b, sb)", 11, a=(2, 2, 3),
     b=weights(3, 4, dtype=U8), sb=number(0.01), smooth=lambda a, b, sb: a @ (b * sb))  # fmt: skip

# ------------------------------------------------------------------ weights of few bits


def nbits(b: np.ndarray, bits: int, block: int, width: int, s: np.ndarray, z: object) -> np.ndarray:
    """Weights (width, n) from their bytes, one number at a time."""
    rows, per_byte = b.reshape(len(b), -1).astype(int), 8 // bits
    blocks = -(-width // block)
    w = np.zeros((width, len(b)))
    for n in range(len(b)):
        for k in range(width):
            number = rows[n, k // per_byte] >> (bits * (k % per_byte)) & (2**bits - 1)
            w[k, n] = (number - z(n, k // block)) * np.ravel(s)[n * blocks + k // block]
    return w


def _packed_zero(z: np.ndarray, bits: int, blocks: int) -> object:
    rows, per_byte = z.reshape(-1, -(-blocks * bits // 8)).astype(int), 8 // bits
    return lambda n, block: rows[n, block // per_byte] >> (bits * (block % per_byte)) & (2**bits - 1)


def packed(*shape: int) -> object:
    return steps(*shape, low=0, high=255, constant=True)


NBITS = "y = com.microsoft.MatMulNBits<K=40, N=3, bits={bits}, block_size=16>(a, b, s{more})"
case("MatMulNBits", NBITS.format(bits=4, more=""), a=(2, 40), b=packed(3, 3, 8), s=const(9, low=0.05, high=0.2),
     smooth=lambda a, b, s: a @ nbits(b, 4, 16, 40, s, lambda n, k: 8))  # fmt: skip
case("MatMulNBits", NBITS.format(bits=4, more=", z"), a=(2, 2, 40), b=packed(3, 3, 8), s=const(9, low=0.05, high=0.2),
     z=packed(6), smooth=lambda a, b, s, z: a @ nbits(b, 4, 16, 40, s, _packed_zero(z, 4, 3)))  # fmt: skip
case("MatMulNBits", NBITS.format(bits=4, more=", z, , c"), 11, a=(2, 40), b=packed(3, 3, 8), c=const(3),
     s=const(9, low=0.05, high=0.2), z=const(9, low=5, high=9),
     smooth=lambda a, b, s, z, c: a @ nbits(b, 4, 16, 40, s, lambda n, k: z[3 * n + k]) + c)  # fmt: skip
case("MatMulNBits", NBITS.format(bits=8, more=", z"), a=(2, 40), b=packed(3, 3, 16), s=const(9, low=0.005, high=0.02),
     z=packed(9), smooth=lambda a, b, s, z: a @ nbits(b, 8, 16, 40, s, _packed_zero(z, 8, 3)))  # fmt: skip
case("MatMulNBits", NBITS.format(bits=2, more=""), a=(2, 40), b=packed(3, 3, 4), s=const(9, low=0.1, high=0.5),
     smooth=lambda a, b, s: a @ nbits(b, 2, 16, 40, s, lambda n, k: 2))  # fmt: skip

# --------------------------------------------------------- elementwise, pooling, moving

Q_BINARY = "(a, sa, za, b, sb, zb, sy, zy)"


def qadd(a, sa, za, b, sb, zb, sy, zy):  # noqa: ANN001, ANN201
    return np.clip(((a - za) * sa + (b - zb) * sb) / sy + zy, 0, 255)


def qmul(a, sa, za, b, sb, zb, sy, zy):  # noqa: ANN001, ANN201
    return np.clip((a - za) * sa * (b - zb) * sb / sy + zy, 0, 255)


case(
    "QLinearAdd",
    f"y = com.microsoft.QLinearAdd{Q_BINARY}",
    a=steps(2, 3),
    b=steps(3),
    **Q_FACTORS,
    smooth=qadd,
)
case("QLinearAdd", f"y = com.microsoft.QLinearAdd{Q_BINARY}", a=steps(1, 3), b=steps(2, 3, constant=True), **Q_FACTORS,
     smooth=qadd)  # fmt: skip
case("QLinearAdd", "y = com.microsoft.QLinearAdd(a, sa, za, a, sb, zb, sy, zy)", a=steps(2, 3), **Q_FACTORS,
     smooth=lambda a, **rest: qadd(a=a, b=a, **rest))  # fmt: skip
case(
    "QLinearMul",
    f"y = com.microsoft.QLinearMul{Q_BINARY}",
    a=steps(2, 3),
    b=steps(3),
    **Q_FACTORS,
    smooth=qmul,
)
case("QLinearMul", f"y = com.microsoft.QLinearMul{Q_BINARY}", a=steps(1, 3), b=steps(2, 3, constant=True), **Q_FACTORS,
     smooth=qmul)  # fmt: skip
case("QLinearMul", "y = com.microsoft.QLinearMul(a, sa, za, a, sb, zb, sy, zy)", a=steps(2, 3), **Q_FACTORS,
     smooth=lambda a, **rest: qmul(a=a, b=a, **rest))  # fmt: skip

Q_UNARY = "(x, sx, zx, sy, zy)"
Q_STEPS = dict(sx=number(0.02), zx=zero(110), sy=number(1 / 256), zy=zero(0))
#: y is read from its whole number, off by up to 1/512. With y between 0.2 and 0.9 the slope y (1 - y) is off
#: by 0.8/512 of 0.09 at most, 1.7 %, its square by 3.5 %.
case("QLinearSigmoid", f"y = com.microsoft.QLinearSigmoid{Q_UNARY}", x=steps(3, 4), **Q_STEPS, tolerance=0.035,
     smooth=lambda x, sx, zx, sy, zy: 1 / (1 + np.exp(-(x - zx) * sx)) / sy + zy)  # fmt: skip
case("QLinearLeakyRelu", f"y = com.microsoft.QLinearLeakyRelu<alpha=0.3>{Q_UNARY}", x=steps(3, 4),
     **Q_STEPS | {"sy": number(0.012), "zy": zero(60)}, smooth=lambda x, sx, zx, sy, zy: np.clip(
         np.where(x > zx, 1, 0.3) * (x - zx) * sx / sy + zy, 0, 255))  # fmt: skip


def qsoftmax(x, sx, zx, sy, zy, axes=(-1,)):  # noqa: ANN001, ANN201
    e = np.exp((x - zx) * sx)
    return np.minimum(e / e.sum(axis=axes, keepdims=True) / sy + zy, 255)


#: p_i between 0.05 and 0.7 is off by 1/512: 4 % of p_i, 8 % of its square; the spread by as much again.
case("QLinearSoftmax", f"y = com.microsoft.QLinearSoftmax<axis=-1, opset=13>{Q_UNARY}",
     x=steps(2, 4, low=60, high=160), **Q_STEPS, smooth=qsoftmax, tolerance=0.1)  # fmt: skip
case("QLinearSoftmax", f"y = com.microsoft.QLinearSoftmax<axis=1, opset=11>{Q_UNARY}",
     x=steps(2, 2, 2, low=60, high=160), **Q_STEPS, tolerance=0.1,
     smooth=lambda **inputs: qsoftmax(**inputs, axes=(1, 2)))  # fmt: skip


def pooled(x: np.ndarray, counted: bool) -> np.ndarray:
    """The mean over windows of 2 x 2 with a margin of 1 above and left."""
    x, ones = (np.pad(a, ((0, 0), (0, 0), (1, 0), (1, 0))) for a in (x, np.ones_like(x)))
    total, real = (
        np.lib.stride_tricks.sliding_window_view(a, (2, 2), axis=(2, 3)).sum((4, 5)) for a in (x, ones)
    )
    return total / (4 if counted else real)


QPOOL = "y = com.microsoft.QLinearAveragePool<kernel_shape=[2,2]{more}>(x, sx, zx, sy, zy)"
Q_SAME = Q_STEPS | {"sy": number(0.012), "zy": zero(120)}
case("QLinearAveragePool", QPOOL.format(more=""), x=steps(1, 2, 4, 3), **Q_SAME,
     smooth=lambda x, sx, zx, sy, zy: np.clip(
         (pooled(x, True)[:, :, 1:, 1:] - zx) * (sx / sy) + zy, 0, 255))  # fmt: skip
case("QLinearAveragePool", QPOOL.format(more=", pads=[1,1,0,0]"), x=steps(1, 2, 3, 3), **Q_SAME,
     smooth=lambda x, sx, zx, sy, zy: np.clip(pooled(x - zx, False) * (sx / sy) + zy, 0, 255))  # fmt: skip
case("QLinearAveragePool", QPOOL.format(more=", pads=[1,1,0,0], count_include_pad=1"), x=steps(1, 2, 3, 3), **Q_SAME,
     smooth=lambda x, sx, zx, sy, zy: np.clip(pooled(x - zx, True) * (sx / sy) + zy, 0, 255))  # fmt: skip
case("QLinearGlobalAveragePool", f"y = com.microsoft.QLinearGlobalAveragePool{Q_UNARY}", x=steps(2, 3, 2, 3), **Q_SAME,
     smooth=lambda x, sx, zx, sy, zy: np.clip(
         (x.mean((2, 3), keepdims=True) - zx) * (sx / sy) + zy, 0, 255))  # fmt: skip
case("QLinearGlobalAveragePool", f"y = com.microsoft.QLinearGlobalAveragePool<channels_last=1>{Q_UNARY}",
     x=steps(2, 3, 2, 3), **Q_SAME, smooth=lambda x, sx, zx, sy, zy: np.clip(
         (x.mean((1, 2), keepdims=True) - zx) * (sx / sy) + zy, 0, 255))  # fmt: skip
case("QLinearConcat", "y = com.microsoft.QLinearConcat<axis=1>(sy, zy, a, sa, za, b, sb, zb)", a=steps(2, 3),
     b=steps(2, 2, certain=True), **Q_FACTORS, smooth=lambda a, sa, za, b, sb, zb, sy, zy: np.clip(
         np.concatenate([(a - za) * sa, (b - zb) * sb], axis=1) / sy + zy, 0, 255))  # fmt: skip
case("QLinearWhere", "y = com.microsoft.QLinearWhere(m, a, sa, za, b, sb, zb, sy, zy)",
     m=Given(np.array([True, False, True])), a=steps(2, 3), b=steps(3, constant=True), **Q_FACTORS,
     smooth=lambda m, a, sa, za, b, sb, zb, sy, zy: np.clip(
         np.where(m, (a - za) * sa, (b - zb) * sb) / sy + zy, 0, 255))  # fmt: skip
