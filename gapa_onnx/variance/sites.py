"""What a site is, and how a tensor there is cut into queries.

A site is an activation node (its input is the query, its output becomes uncertain) or any float or
quantised tensor (both at once, with the identity as activation). What one query is:

    rows       (…, d)         each index of the leading axes is a query, the last axis its features
    positions  (n, c, h, w)   each position of a convolutional map is a query of c features
    pooled     (n, c, h, w)   the mean over positions is the query, one per sample
    flat       (n, …)         the whole sample is the query
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from gapa_onnx.model.dtypes import is_quantised
from gapa_onnx.variance.graph import Value, VarianceGraph


class Layout(str, enum.Enum):
    ROWS = "rows"
    POSITIONS = "positions"
    POOLED = "pooled"
    FLAT = "flat"


@dataclass(frozen=True)
class Site:
    """A place where a Gaussian-process activation is inserted."""

    name: str  #: of the node or tensor, as shown to people
    query: str  #: the tensor that is compared with the inducing points
    output: str  #: the tensor that becomes uncertain
    activation: str | None  #: operator, None for the identity
    layout: Layout
    rank: int | None  #: of the query tensor, where it is known

    @property
    def many(self) -> bool:
        """Whether a row of the data has many queries, one for each token or pixel, or may have: the rank is not known."""
        return (self.rank is None or self.rank > 2) and self.layout in (Layout.ROWS, Layout.POSITIONS)

    @property
    def axes(self) -> int:
        """How many axes the query has, for layouts that depend on it."""
        if self.rank is None:
            raise ValueError(
                f"the rank of {self.query!r} is unknown, which the layout {self.layout.name} needs"
            )
        return self.rank

    @property
    def prefix(self) -> str:
        """Names of what the site emits start with this."""
        return f"{self.output}/gapa"


def arrange(graph: VarianceGraph, site: Site, tensor: Value) -> Value:
    """The query tensor as (…, d) float32."""
    if is_quantised(tensor.dtype):
        tensor = graph.cast(tensor, np.float32)
    if site.layout is Layout.POSITIONS:
        tensor = graph.emit("Transpose", tensor, perm=[0, *range(2, site.axes), 1])
    elif site.layout is Layout.POOLED:
        tensor = graph.emit("Flatten", graph.emit("GlobalAveragePool", tensor), axis=1)
    elif site.layout is Layout.FLAT:
        tensor = graph.emit("Flatten", tensor, axis=1)
    return graph.cast(tensor, np.float32)


def restore(graph: VarianceGraph, site: Site, share: Value) -> Value:
    """The op's answer (…, 1) in a shape that broadcasts against the query tensor."""
    if site.layout is Layout.POSITIONS:
        return graph.emit("Transpose", share, perm=[0, site.axes - 1, *range(1, site.axes - 1)])
    if site.layout in (Layout.POOLED, Layout.FLAT) and site.axes > 2:
        return graph.unsqueeze(share, list(range(2, site.axes)))
    return share
