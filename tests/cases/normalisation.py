"""Normalisations, of the standard and of com.microsoft."""

from __future__ import annotations

import numpy as np

from cases.framework import Given, between, case, certain, const

# -------------------------------------------------------------------- over the last axes

case("LayerNormalization", "y = LayerNormalization(x, g)", x=(2, 6), g=const(6))
case(
    "LayerNormalization", "y = LayerNormalization<epsilon=0.3>(x, g, b)", x=(2, 3, 4), g=const(4), b=const(4)
)
case(
    "LayerNormalization", "y = LayerNormalization<axis=1>(x, g, b)", x=(2, 3, 2), g=const(3, 2), b=const(3, 2)
)
case("LayerNormalization", "y = LayerNormalization<axis=-2>(x, g)", x=(2, 3, 2), g=const(3, 2))
case("LayerNormalization", "y = LayerNormalization<epsilon=0.1>(x, g)", x=(3, 2), g=const(2))
case("LayerNormalization", "y, m, s = LayerNormalization(x, g)", x=(2, 5), g=const(5))
case("LayerNormalization", "y, m = LayerNormalization<axis=0>(x, g)", x=(2, 3), g=const(2, 3))
case("LayerNormalization", "y = LayerNormalization(x, g, b)", x=(2, 5), g=(5,), b=(5,))
case("LayerNormalization", "y = LayerNormalization(x, g, b)", x=certain(2, 5), g=const(5), b=(5,))
case("LayerNormalization", "y = LayerNormalization(x, g)", x=certain(2, 5), g=(5,))
case("RMSNormalization", "y = RMSNormalization(x, g)", 23, x=(2, 6), g=const(6))
case("RMSNormalization", "y = RMSNormalization<axis=1, epsilon=0.3>(x, g)", 23, x=(2, 3, 2), g=const(3, 2))
case("RMSNormalization", "y = RMSNormalization<axis=-1>(x, g)", 23, x=(2, 3, 4), g=(4,))
case("SimplifiedLayerNormalization", "y = SimplifiedLayerNormalization(x, g)", x=(2, 6), g=const(6))
case("SimplifiedLayerNormalization", "y = SimplifiedLayerNormalization<axis=1, epsilon=0.3>(x, g)",
     x=(2, 3, 2), g=const(3, 2))  # fmt: skip
case("SimplifiedLayerNormalization", "y, s = SimplifiedLayerNormalization(x, g)", x=(2, 5), g=const(5))

# ----------------------------------------------------------------------- sums, normalised

SKIP = "com.microsoft.SkipLayerNormalization"
case(
    "SkipLayerNormalization", f"y = {SKIP}<epsilon=0.1>(x, skip, g)", x=(1, 2, 4), skip=(1, 2, 4), g=const(4)
)
case("SkipLayerNormalization", f"y, , , s = {SKIP}<epsilon=0.1>(x, skip, g, b, c)",
     x=(2, 2, 4), skip=(1, 2, 4), g=const(4), b=const(4), c=const(4))  # fmt: skip
case("SkipLayerNormalization", f"y, m, i, s = {SKIP}<epsilon=0.1>(x, skip, g, b)",
     x=(1, 2, 4), skip=certain(1, 2, 4), g=const(4), b=const(4))  # fmt: skip
case("SkipLayerNormalization", f"y, , , s = {SKIP}<epsilon=0.1>(x, skip, g)",
     x=certain(2, 2, 4), skip=(2, 4), g=const(4))  # fmt: skip
case("SkipLayerNormalization", f"y = {SKIP}<epsilon=0.1>(x, x, g, , c)", x=(1, 2, 4), g=const(4), c=const(4))

SKIP_RMS = "com.microsoft.SkipSimplifiedLayerNormalization"
case("SkipSimplifiedLayerNormalization", f"y = {SKIP_RMS}<epsilon=0.1>(x, skip, g)",
     x=between(0.5, 1.5, 1, 2, 4), skip=(1, 2, 4), g=const(4))  # fmt: skip
case("SkipSimplifiedLayerNormalization", f"y, , , s = {SKIP_RMS}<epsilon=0.1>(x, skip, g, c)",
     x=between(0.5, 1.5, 3, 4), skip=(3, 4), g=const(4), c=const(4))  # fmt: skip
case("SkipSimplifiedLayerNormalization", f"y, , i, s = {SKIP_RMS}<epsilon=0.1>(x, skip, g)",
     x=certain(1, 2, 4, low=0.5, high=1.5), skip=(1, 2, 4), g=const(4))  # fmt: skip


def ids(*values: int, shape: tuple[int, ...]) -> Given:
    return Given(np.array(values, np.int32).reshape(shape))


EMBED = "com.microsoft.EmbedLayerNormalization"
case("EmbedLayerNormalization", f"y, , s = {EMBED}<epsilon=0.1>(i, , word, place, , g, b)",
     i=ids(2, 0, 1, 1, 3, 2, shape=(2, 3)), word=(4, 4), place=const(5, 4), g=const(4), b=const(4))  # fmt: skip
case("EmbedLayerNormalization", f"y, m = {EMBED}<epsilon=0.1>(i, k, word, place, kind, g, b, , p)",
     i=ids(2, 0, shape=(1, 2)), k=ids(1, 0, shape=(1, 2)), p=ids(3, 1, shape=(1, 2)),
     word=const(4, 4), place=(5, 4), kind=(2, 4), g=const(4), b=const(4))  # fmt: skip

# ------------------------------------------------------------- over channels and positions

case("InstanceNormalization", "y = InstanceNormalization(x, g, b)", x=(2, 2, 5), g=const(2), b=const(2))
case("InstanceNormalization", "y = InstanceNormalization<epsilon=0.3>(x, g, b)",
     7, x=(1, 3, 2, 3), g=const(3), b=const(3))  # fmt: skip
case("InstanceNormalization", "y = InstanceNormalization(x, g, b)", 22, x=(2, 2, 2, 3), g=(2,), b=(2,))
case("GroupNormalization", "y = GroupNormalization<num_groups=2>(x, g, b)",
     18, x=(2, 4, 3), g=const(2), b=const(2))  # fmt: skip
case("GroupNormalization", "y = GroupNormalization<num_groups=2, epsilon=0.3>(x, g, b)",
     21, x=(1, 4, 2, 2), g=const(4), b=const(4))  # fmt: skip
case("GroupNormalization", "y = GroupNormalization<num_groups=3>(x, g, b)",
     22, x=(2, 6, 2), g=(6,), b=(6,))  # fmt: skip
case("MeanVarianceNormalization", "y = MeanVarianceNormalization(x)", 9, x=(2, 2, 2, 3))
case("MeanVarianceNormalization", "y = MeanVarianceNormalization<axes=[1,2]>(x)", 13, x=(2, 3, 2))

case("GroupNorm", "y = com.microsoft.GroupNorm<groups=2, activation=0>(x, g, b)",
     x=(2, 1, 3, 4), g=const(4), b=const(4))  # fmt: skip
case("GroupNorm", "y = com.microsoft.GroupNorm<groups=2, activation=1, epsilon=0.3>(x, g, b)",
     x=(1, 2, 2, 4), g=const(4), b=const(4))  # fmt: skip
case("GroupNorm", "y = com.microsoft.GroupNorm<groups=2, activation=1, channels_last=0>(x, g, b)",
     x=(1, 4, 2, 2), g=const(4), b=const(4))  # fmt: skip
case("SkipGroupNorm", "y, s = com.microsoft.SkipGroupNorm<groups=2, activation=0>(x, g, b, skip, c)",
     x=(1, 2, 2, 4), g=const(4), b=const(4), skip=(1, 2, 2, 4), c=const(4))  # fmt: skip
case("SkipGroupNorm", "y = com.microsoft.SkipGroupNorm<groups=2, activation=1>(x, g, b, skip)",
     x=(2, 1, 2, 4), g=const(4), b=const(4), skip=certain(2, 4))  # fmt: skip
case("SkipGroupNorm", "y, s = com.microsoft.SkipGroupNorm<groups=2, activation=0, channels_last=0>(x, g, b, skip, c)",
     x=(2, 4, 1, 2), g=const(4), b=const(4), skip=certain(2, 4), c=const(4))  # fmt: skip
case("SkipGroupNorm", "y, s = com.microsoft.SkipGroupNorm<groups=1, activation=0, channels_last=0>(x, g, b, skip)",
     x=certain(1, 4, 2, 1), g=const(4), b=const(4), skip=(1, 4, 2, 1))  # fmt: skip

# ------------------------------------------------------------------------- without groups

case("LpNormalization", "y = LpNormalization(x)", x=(2, 4))
case("LpNormalization", "y = LpNormalization<axis=1>(x)", 7, x=(2, 4, 2))
case("LpNormalization", "y = LpNormalization<p=1>(x)", x=(2, 4))
case("LpNormalization", "y = LpNormalization<p=1, axis=0>(x)", 22, x=(3, 4))
# onnxruntime runs images and windows of an odd number of channels only.
case("LRN", "y = LRN<size=3>(x)", x=(2, 4, 1, 2))
case("LRN", "y = LRN<size=5, alpha=0.8, beta=0.6, bias=0.7>(x)", 7, x=(1, 6, 2, 2))
case("LRN", "y = LRN<size=3, alpha=2.0>(x)", 13, x=(1, 5, 2, 1))
