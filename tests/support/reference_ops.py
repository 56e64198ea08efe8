"""Operators in numpy, for ONNX's reference evaluator: what it lacks, or does not compute in float64.

The formulas are those of the specifications; nothing here knows of variances.
"""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun

Arrays = tuple[np.ndarray, ...]


def standardise(x: np.ndarray, axes: tuple[int, ...], epsilon: float, centred: bool) -> Arrays:
    """(x - m) / s, m and 1 / s."""
    mean = x.mean(axis=axes, keepdims=True)
    deviation = x - mean if centred else x
    inverse = 1 / np.sqrt((deviation**2).mean(axis=axes, keepdims=True) + epsilon)
    return deviation * inverse, mean, inverse


def last_axes(x: np.ndarray, first: int) -> tuple[int, ...]:
    return tuple(range(first % x.ndim, x.ndim))


class LayerNormalization(OpRun):
    op_domain = ""

    def _run(self, x, scale, bias=None, axis=-1, epsilon=1e-5, stash_type=None) -> Arrays:
        u, mean, inverse = standardise(x, last_axes(x, axis), epsilon, centred=True)
        outputs = (u * scale + (0 if bias is None else bias), mean, inverse)
        return outputs[: len(self.onnx_node.output)]


class SimplifiedLayerNormalization(OpRun):
    op_domain = ""

    def _run(self, x, scale, axis=-1, epsilon=1e-5, stash_type=None) -> Arrays:
        u, _, inverse = standardise(x, last_axes(x, axis), epsilon, centred=False)
        return (u * scale, inverse)[: len(self.onnx_node.output)]


class SkipLayerNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, skip, scale, shift=None, bias=None, epsilon=1e-12) -> Arrays:
        total = x + skip + (0 if bias is None else bias)
        u, mean, inverse = standardise(total, (-1,), epsilon, centred=True)
        outputs = (u * scale + (0 if shift is None else shift), mean, inverse, total)
        return outputs[: len(self.onnx_node.output)]


class SkipSimplifiedLayerNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, skip, scale, bias=None, epsilon=1e-12) -> Arrays:
        total = x + skip + (0 if bias is None else bias)
        u, mean, inverse = standardise(total, (-1,), epsilon, centred=False)
        return (u * scale, mean, inverse, total)[: len(self.onnx_node.output)]


class EmbedLayerNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(
        self, ids, kinds, word, place, kind, scale, bias, mask=None, places=None,
        epsilon=1e-12, mask_index_type=0,
    ) -> Arrays:  # fmt: skip
        total = word[ids] + place[np.arange(ids.shape[1]) if places is None else places]
        total = total if kind is None else total + kind[kinds]
        u, _, _ = standardise(total, (-1,), epsilon, centred=True)
        return (u * scale + bias, np.zeros(len(ids), np.int32), total)[: len(self.onnx_node.output)]


def normalise_groups(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray, groups: int, epsilon: float
) -> np.ndarray:
    """x (n, c, …), with parameters for each channel or for each group."""
    rows = x.reshape(len(x), groups, -1)
    u, _, _ = standardise(rows, (2,), epsilon, centred=True)
    of_parameter = u.reshape(len(x), len(scale), -1)
    return (of_parameter * scale[:, None] + bias[:, None]).reshape(x.shape)


class GroupNormalization(OpRun):
    op_domain = ""

    def _run(self, x, scale, bias, num_groups=None, epsilon=1e-5, stash_type=None) -> Arrays:
        return (normalise_groups(x, scale, bias, num_groups, epsilon),)


class SkipGroupNorm(OpRun):
    op_domain = "com.microsoft"

    def _run(
        self, x, scale, shift, skip=None, bias=None, activation=0, channels_last=1, epsilon=1e-5, groups=1
    ) -> Arrays:
        total = x if channels_last else x.transpose(0, 2, 3, 1)
        if skip is not None and skip.ndim == 2:
            skip = skip[:, None, None]
        elif skip is not None and not channels_last:
            skip = skip.transpose(0, 2, 3, 1)
        total = total + (0 if skip is None else skip) + (0 if bias is None else bias)
        y = normalise_groups(total.transpose(0, 3, 1, 2), scale, shift, groups, epsilon)
        y = y / (1 + np.exp(-y)) if activation else y
        if channels_last:
            y = y.transpose(0, 2, 3, 1)
        else:
            total = total.transpose(0, 3, 1, 2)
        dtype = x.dtype
        return (y.astype(dtype), total.astype(dtype))[: len(self.onnx_node.output)]


class GroupNorm(SkipGroupNorm):
    op_domain = "com.microsoft"


class MeanVarianceNormalization(OpRun):
    op_domain = ""

    def _run(self, x, axes=(0, 2, 3)) -> Arrays:
        axes = tuple(axes)
        deviation = x - x.mean(axis=axes, keepdims=True)
        return (deviation / (np.sqrt((deviation**2).mean(axis=axes, keepdims=True)) + 1e-9),)


class LRN(OpRun):
    """ONNX's own goes over as many channels as there are samples."""

    op_domain = ""

    def _run(self, x, alpha=1e-4, beta=0.75, bias=1.0, size=None) -> Arrays:
        before = (size - 1) // 2
        square = np.pad(x**2, [(0, 0), (before, size - 1 - before), (0, 0), (0, 0)])
        windows = sum(square[:, shift : shift + x.shape[1]] for shift in range(size))
        return (x / (bias + alpha / size * windows) ** beta,)


class GlobalLpPool(OpRun):
    op_domain = ""

    def _run(self, x, p=2) -> Arrays:
        axes = tuple(range(2, x.ndim))
        return ((np.abs(x) ** p).sum(axis=axes, keepdims=True) ** (1 / p),)


class LpPool(OpRun):
    """ONNX's own multiplies a mean by the size of a whole window, also at the end."""

    op_domain = ""

    def _run(
        self,
        x,
        auto_pad="NOTSET",
        ceil_mode=0,
        dilations=None,
        kernel_shape=None,
        p=2,
        pads=None,
        strides=None,
    ) -> Arrays:
        rank = x.ndim - 2
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        spans = [d * (k - 1) + 1 for d, k in zip(dilations, kernel_shape)]
        pads = pads or [0] * (2 * rank)
        if auto_pad == "SAME_UPPER":
            counts = [-(-n // s) for n, s in zip(x.shape[2:], strides)]
            missing = [max((c - 1) * s + w - n, 0) for c, s, w, n in zip(counts, strides, spans, x.shape[2:])]
            pads = [m // 2 for m in missing] + [m - m // 2 for m in missing]
        else:
            room = [n + pads[i] + pads[i + rank] - spans[i] for i, n in enumerate(x.shape[2:])]
            counts = [-(-r // s) + 1 if ceil_mode else r // s + 1 for r, s in zip(room, strides)]
        wide = [(0, 0), (0, 0), *((pads[i], pads[i + rank] + strides[i]) for i in range(rank))]
        powers = np.pad(np.abs(x) ** p, wide)
        total = 0
        for offset in np.ndindex(*kernel_shape):
            starts = [o * d for o, d in zip(offset, dilations)]
            ends = [start + s * (c - 1) + 1 for start, s, c in zip(starts, strides, counts)]
            total = total + powers[(slice(None), slice(None), *map(slice, starts, ends, strides))]
        return (total ** (1 / p),)


OPERATORS = [
    LayerNormalization, SimplifiedLayerNormalization, SkipLayerNormalization, SkipSimplifiedLayerNormalization,
    EmbedLayerNormalization, GroupNormalization, GroupNorm, SkipGroupNorm,
    MeanVarianceNormalization, LRN, LpPool, GlobalLpPool,
]  # fmt: skip
