"""What one query is at a place: the one decision for sites that are found and for sites that are named.

A map, as convolutions have it, is one query per position where a last layer reads it and that is known to be
cheap, one query if the next layer reads it flattened, and its mean over positions else; `pixels` has more for
segmentation. Where a detector's candidates come from single positions, each of these is a query. Anything else, tokens for
one, is a query per position, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx_graphsurgeon as gs

from gapa_onnx.plan.axes import FeatureAxes, Features
from gapa_onnx.plan.candidates import Candidates
from gapa_onnx.plan.frontier import Frontier
from gapa_onnx.plan.layers import Network
from gapa_onnx.variance.sites import Layout

WIDEST_FLAT_QUERY = 4096  # beyond it a map is pooled: distances and file size grow with the width
MOST_POSITIONS = 1024  # beyond it a map is pooled: every position is a query of its own


def layout_at(network: Network, query: gs.Tensor, output: gs.Tensor) -> tuple[Layout, int]:
    """The layout of a place and the axis of its features; -1 where the rank is not known."""
    if query.shape is None:
        return Layout.ROWS, -1
    rank, features = len(query.shape), FeatureAxes.of(network.source).at(output)
    by_position = Layout.ROWS if features.axis == rank - 1 else Layout.POSITIONS
    if rank < 3:
        return by_position, features.axis
    numbers = _count(query.shape[1:])
    if features.flattened and numbers is not None and numbers <= WIDEST_FLAT_QUERY:
        return Layout.FLAT, features.axis
    if features.on_map and features.axis > 0 and not _is_cheap_by_position(network, query, output, features):
        return Layout.POOLED, features.axis
    return by_position, features.axis


def _is_cheap_by_position(network: Network, query: gs.Tensor, output: gs.Tensor, features: Features) -> bool:
    """Whether each position of a map can be a query: few of them before a last layer, or candidates'."""
    if output.name in Candidates.of(network.source).made_of:
        return True
    positions = _count([size for at, size in enumerate(query.shape) if at not in (0, features.axis)])
    last = output.name in Frontier.of(network.source).places and not features.flattened
    return last and positions is not None and positions <= MOST_POSITIONS


def _count(sizes: Sequence[object]) -> int | None:
    known = [size for size in sizes if isinstance(size, int)]
    return prod(known) if len(known) == len(sizes) else None
