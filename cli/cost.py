"""An estimate of what error bars cost, in multiply-adds per sample.

At a site with M inducing points of width d and K neighbours, one query costs

    M d          the exact search
    K d + K²/2   to compare with a prepared neighbourhood, or else
    K² d + K³/3  the kernel matrix of the neighbours, and its solution

The model's own cost counts its Conv, ConvTranspose, Gemm and MatMul nodes from their static shapes. Time
does not follow multiply-adds exactly; `None` stands for what shapes alone do not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import onnx_graphsurgeon as gs

from gapa_onnx.model.load import SourceModel
from gapa_onnx.settings import Settings
from gapa_onnx.variance.sites import Layout, Site

Shape = Sequence[int | str | None]

_DEFAULTS = Settings()
_UNCOUNTED = {
    "Attention", "ConvInteger", "DeformConv", "Einsum", "GRU", "If", "LSTM", "Loop", "MatMulInteger",
    "QLinearConv", "QLinearMatMul", "RNN", "Scan",
}  # fmt: skip


def estimate(
    source: SourceModel,
    sites: Sequence[Site],
    witnesses: Sequence[Site] = (),
    settings: Settings = _DEFAULTS,
) -> dict[str, Any]:
    """Multiply-adds per sample of the model and of all places, and their ratio; None where unknown."""
    model = _model(source)
    added = [_site(source, site, settings) for site in sites]
    added += [_site(source, site, settings.of_witness(), witness=True) for site in witnesses]
    known = [count for count in added if count is not None]
    total = sum(known) if added and len(known) == len(added) else None
    return {
        "model": model,
        "sites": total,
        "ratio": (model + total) / model if model and total is not None else None,
    }


def _site(source: SourceModel, site: Site, settings: Settings, witness: bool = False) -> int | None:
    width: int | None
    queries: int | None
    shape = source.tensors[site.query].shape
    if not shape or len(shape) < 2:
        return None
    if site.layout is Layout.FLAT:
        width, queries = _product(shape[1:]), 1
    else:
        features = site.axis % len(shape)
        beside = [
            size for axis, size in enumerate(shape) if axis and axis != features
        ]  # the first is the batch's
        width = _product([shape[features]])
        queries = 1 if site.layout is Layout.POOLED else _product(beside)
    if width is None or queries is None:
        return None
    pooled = site.layout is Layout.POOLED
    m, k = settings.points_for(width, site.many, witness=witness, pooled=pooled), settings.k
    solve = k * width + k * k // 2 if settings.cached else k * k * width + k**3 // 3
    return queries * (m * width + solve)


def _model(source: SourceModel) -> int | None:
    total = 0
    for node in source.graph.nodes:
        if node.domain not in (None, "", "ai.onnx") or node.op in _UNCOUNTED:
            return None
        if node.op not in _NODE:
            continue
        data, weight, out = node.inputs[0].shape, node.inputs[1].shape, node.outputs[0].shape
        if not (data and weight and out):
            return None
        count = _NODE[node.op](node, data, weight, out)
        if count is None:
            return None
        total += count
    return total


def _gemm(node: gs.Node, data: Shape, weight: Shape, out: Shape) -> int | None:
    return _product([*out[1:], data[0 if node.attrs.get("transA") else -1]])


_NODE: dict[str, Callable[..., int | None]] = {  # the first axis is the batch's
    "Conv": lambda node, data, weight, out: _product([*out[1:], *weight[1:]]),
    "ConvTranspose": lambda node, data, weight, out: _product([*data[1:], *weight[1:]]),
    "Gemm": _gemm,
    "MatMul": lambda node, data, weight, out: _product([*out[1:], data[-1]]),
}


def _product(sizes: Shape) -> int | None:
    known = [size for size in sizes if isinstance(size, int)]
    return prod(known) if len(known) == len(sizes) else None
