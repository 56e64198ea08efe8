"""Reductions, cumulative sums and products, norms, losses, einsum, determinant."""

from __future__ import annotations

from cases.framework import between, case, certain, const, ints

# -------------------------------------------------------------------------- reductions

case("ReduceL1", "y = ReduceL1<axes=[1]>(x)", 7, x=(2, 3, 2))
case("ReduceL1", "y = ReduceL1<axes=[-1], keepdims=0>(x)", 13, x=(2, 3))
case("ReduceL1", "y = ReduceL1(x, axes)", 18, x=(2, 3, 2), axes=ints(0, -1))
case("ReduceL1", "y = ReduceL1<noop_with_empty_axes=1>(x)", 18, x=(2, 3))
case("ReduceL2", "y = ReduceL2<axes=[0,2], keepdims=0>(x)", 7, x=(2, 3, 2))
case("ReduceL2", "y = ReduceL2(x)", 11, x=(2, 3))
case("ReduceL2", "y = ReduceL2<keepdims=0>(x, axes)", 18, x=(2, 3, 2), axes=ints(1))
case("ReduceL2", "y = ReduceL2<noop_with_empty_axes=1>(x)", 18, x=(2, 3))
case("ReduceLogSum", "y = ReduceLogSum<axes=[1], keepdims=0>(x)", 7, x=between(0.3, 2, 2, 3))
case("ReduceLogSum", "y = ReduceLogSum(x, axes)", 18, x=between(0.3, 2, 2, 3, 2), axes=ints(2))
case("ReduceLogSum", "y = ReduceLogSum<noop_with_empty_axes=1>(x)", 18, x=between(0.3, 2, 2, 3))
case("ReduceLogSumExp", "y = ReduceLogSumExp<axes=[1], keepdims=0>(x)", 7, x=(2, 3, 2))
case("ReduceLogSumExp", "y = ReduceLogSumExp(x)", 13, x=(2, 3))
case("ReduceLogSumExp", "y = ReduceLogSumExp<keepdims=0>(x, axes)", 18, x=(2, 3, 2), axes=ints(0, -1))
case("ReduceLogSumExp", "y = ReduceLogSumExp<noop_with_empty_axes=1>(x)", 18, x=(2, 3))
case("ReduceProd", "y = ReduceProd<axes=[1]>(x)", 7, x=(2, 3, 2))
case("ReduceProd", "y = ReduceProd<keepdims=0>(x)", 13, x=(2, 2))
case("ReduceProd", "y = ReduceProd<keepdims=0>(x, axes)", 18, x=(2, 3, 2), axes=ints(-2))
case("ReduceProd", "y = ReduceProd<noop_with_empty_axes=1>(x)", 18, x=(2, 3))
case("ReduceSumSquare", "y = ReduceSumSquare<axes=[1], keepdims=0>(x)", 7, x=(2, 3, 2))
case("ReduceSumSquare", "y = ReduceSumSquare(x, axes)", 18, x=(2, 3, 2), axes=ints(0, 1))
case("ReduceSumSquare", "y = ReduceSumSquare<noop_with_empty_axes=1>(x)", 18, x=(2, 3))

case("CumSum", "y = CumSum(x, axis)", 11, x=(2, 4), axis=ints(1))
case("CumSum", "y = CumSum<exclusive=1>(x, axis)", 14, x=(3, 2), axis=ints(0))
case("CumSum", "y = CumSum<reverse=1>(x, axis)", x=(2, 3, 2), axis=ints(-2))
case("CumSum", "y = CumSum<exclusive=1, reverse=1>(x, axis)", x=(2, 4), axis=ints(1))
case("CumProd", "y = CumProd(x, axis)", 26, x=(2, 4), axis=ints(1))
case("CumProd", "y = CumProd<exclusive=1>(x, axis)", 26, x=(3, 2), axis=ints(0))
case("CumProd", "y = CumProd<reverse=1>(x, axis)", 26, x=(2, 3, 2), axis=ints(-2))
case("CumProd", "y = CumProd<exclusive=1, reverse=1>(x, axis)", 26, x=(2, 4), axis=ints(1))

# ------------------------------------------------------------------------------ pooling

case("LpPool", "y = LpPool<kernel_shape=[2]>(x)", x=(2, 2, 5))
case("LpPool", "y = LpPool<kernel_shape=[2,3], strides=[2,1], pads=[1,0,0,1], p=3>(x)", 7, x=(1, 2, 4, 4))
case("LpPool", 'y = LpPool<kernel_shape=[3,2], auto_pad="SAME_UPPER", p=1>(x)', 11, x=(1, 2, 3, 4))
case("LpPool", "y = LpPool<kernel_shape=[2], dilations=[2], p=4>(x)", 18, x=(2, 2, 5))
case("LpPool", "y = LpPool<kernel_shape=[2], strides=[2], ceil_mode=1>(x)", 18, x=(2, 2, 5))
case("LpPool", "y = LpPool<kernel_shape=[2,2,2]>(x)", 22, x=(1, 1, 2, 3, 2))
case("GlobalLpPool", "y = GlobalLpPool(x)", x=(2, 3, 2, 2))
case("GlobalLpPool", "y = GlobalLpPool<p=1>(x)", 7, x=(2, 3, 4))
case("GlobalLpPool", "y = GlobalLpPool<p=3>(x)", 21, x=(2, 3, 4))

case("AveragePool", "y = AveragePool<kernel_shape=[2], strides=[2], ceil_mode=1>(x)", 10, x=(2, 2, 5))
case("AveragePool", "y = AveragePool<kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,0], ceil_mode=1>(x)",
     x=(1, 2, 5, 5))  # fmt: skip
case("AveragePool", "y = AveragePool<kernel_shape=[3], strides=[3], pads=[1,1], ceil_mode=1>(x)", x=(2, 1, 6))
case("AveragePool",
     "y = AveragePool<kernel_shape=[3], strides=[2], pads=[2,1], count_include_pad=1, ceil_mode=1>(x)", 11,
     x=(2, 1, 5))  # fmt: skip
case("AveragePool",
     "y = AveragePool<kernel_shape=[3,3], strides=[2,3], pads=[1,0,1,2], count_include_pad=1, ceil_mode=1>(x)",
     22, x=(1, 1, 4, 4))  # fmt: skip
case("AveragePool", "y = AveragePool<kernel_shape=[2], strides=[2], dilations=[2], ceil_mode=1>(x)",
     19, x=(2, 1, 6))  # fmt: skip
case("AveragePool", "y = AveragePool<kernel_shape=[2,2,2], strides=[2,2,2], ceil_mode=1>(x)",
     19, x=(1, 1, 3, 3, 2))  # fmt: skip
case("AveragePool", 'y = AveragePool<kernel_shape=[2], strides=[2], auto_pad="SAME_UPPER", ceil_mode=1>(x)',
     19, x=(2, 1, 5))  # fmt: skip

# ------------------------------------------------------------------------------- losses

LOSS = "NegativeLogLikelihoodLoss"
case(LOSS, f'y = {LOSS}<reduction="none">(x, t)', 12, x=(3, 4), t=ints(2, 0, 3))
case(LOSS, f'y = {LOSS}<reduction="sum">(x, t, w)', 13, x=(3, 4), t=ints(2, 0, 3), w=const(4))
case(LOSS, f"y = {LOSS}(x, t, w)", 22, x=(3, 4), t=ints(2, 0, 3), w=const(4, low=0.5, high=2))
case(LOSS, f"y = {LOSS}<ignore_index=0>(x, t)", 13, x=(3, 4), t=ints(2, 0, 3))
case(LOSS, f"y = {LOSS}<ignore_index=1>(x, t, w)", 13,
     x=(2, 3, 3), t=ints(2, 0, 1, 1, 2, 0, shape=(2, 3)), w=const(3, low=0.5, high=2))  # fmt: skip
case(LOSS, f'y = {LOSS}<ignore_index=-1, reduction="none">(x, t)', 13, x=(3, 4), t=ints(2, -1, 3))

ENTROPY = "SoftmaxCrossEntropyLoss"
case(ENTROPY, f'y = {ENTROPY}<reduction="none">(x, t)', 12, x=(3, 4), t=ints(2, 0, 3))
case(ENTROPY, f'y, p = {ENTROPY}<reduction="sum">(x, t, w)', 13, x=(3, 4), t=ints(2, 0, 3), w=const(4))
case(ENTROPY, f"y, p = {ENTROPY}(x, t)", 12, x=(2, 3, 2), t=ints(2, 0, 1, 1, shape=(2, 2)))
case(ENTROPY, f"y = {ENTROPY}<ignore_index=0>(x, t, w)", 13,
     x=(3, 4), t=ints(2, 0, 3), w=const(4, low=0.5, high=2))  # fmt: skip
case(ENTROPY, f'y, p = {ENTROPY}<ignore_index=-1, reduction="none">(x, t)', 13, x=(3, 4), t=ints(2, -1, 3))

# ------------------------------------------------------------------------- multilinear

case("Einsum", 'y = Einsum<equation="ij,jk->ik">(a, b)', 12, a=(2, 3), b=const(3, 2))
case("Einsum", 'y = Einsum<equation="ij,jk->ik">(a, b)', a=(2, 3), b=(3, 2))
case("Einsum", 'y = Einsum<equation="bhid,bhjd->bhij">(a, b)', a=(1, 2, 2, 3), b=(1, 2, 2, 3))
case("Einsum", 'y = Einsum<equation="ij,kj">(a, b)', a=certain(2, 3), b=(2, 3))
case("Einsum", 'y = Einsum<equation="...ij, jk -> ...ik">(a, b)', a=(2, 2, 3), b=const(3, 2))
case("Einsum", 'y = Einsum<equation="...i,...i->...">(a, b)', a=(2, 3), b=(1, 3))
case("Einsum", 'y = Einsum<equation="...ij->...ji">(x)', x=(2, 2, 3))
case("Einsum", 'y = Einsum<equation="ij->j">(x)', x=(3, 2))
case("Einsum", 'y = Einsum<equation="ii">(x)', x=(3, 3))
case("Einsum", 'y = Einsum<equation="ii->i">(x)', x=(3, 3))
case("Einsum", 'y = Einsum<equation="i,j->">(a, b)', a=(3,), b=(2,))
case("Einsum", 'y = Einsum<equation="ij,jk->i">(a, b)', a=(2, 3), b=(3, 2))
case("Einsum", 'y = Einsum<equation="i,i->i">(a, b)', a=(3,), b=(3,))
case("Einsum", 'y = Einsum<equation="i,j->ij">(a, b)', a=(3,), b=(2,))
case("Einsum", 'y = Einsum<equation="ij,jk,kl->il">(a, b, c)', a=(2, 2), b=const(2, 2), c=(2, 2))
case("Einsum", 'y = Einsum<equation="ij,kj,ik->i">(a, b, c)', a=(2, 2), b=(2, 2), c=(2, 2))
case("Einsum", 'y = Einsum<equation="ij,jk,ik->ik">(a, b, c)', a=const(2, 3), b=certain(3, 2), c=(2, 2))
case("Einsum", 'y = Einsum<equation="ij,kl->ij">(a, b)', a=(2, 2), b=const(2, 3))
case("Det", "y = Det(x)", 11, x=(3, 3))
case("Det", "y = Det(x)", x=(2, 2, 2))
case("Det", "y = Det(x)", 22, x=(2, 1, 4, 4))
case("Det", "y = Det(x)", x=(3, 1, 1))

# --------------------------------------------------------------------------- remainder

case("Mod", "y = Mod<fmod=1>(a, b)", a=between(1.1, 5, 3, 4), b=between(0.6, 0.9, 3, 4))
case("Mod", "y = Mod<fmod=1>(a, b)", 10, a=(2, 3), b=const(3, low=0.5, high=0.7))
case("Mod", "y = Mod<fmod=1>(a, b)", 13, a=certain(2, 3, low=-4, high=-2), b=between(0.6, 0.9, 1, 3))
