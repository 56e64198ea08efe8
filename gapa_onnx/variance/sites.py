"""What a site is, and how a tensor there is cut into queries.

A site is an activation node (its input is the query, its output becomes uncertain) or any float or
quantised tensor (both at once, with the identity as activation). What one query is:

    rows       (…, d)         each index of the leading axes is a query, the last axis its features
    positions  (n, c, h, w)   each index of the axes beside that of the features is a query of c features
    pooled     (n, c, h, w)   the mean over positions is the query, one per sample
    flat       (n, …)         the whole sample is the query

The features are on the axis that the next layer adds up along: 1 before a convolution, the last before a matrix
product.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.dtypes import is_quantised
from gapa_onnx.model.load import SourceModel
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.masks import pooled, valid_in

SHORTEST = 1e-12  # length of a query, below which it has no direction


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
    axis: int = -1  #: of the query tensor's features, counted from 0 where the rank is known
    mask: str | None = None  #: what tells padding among its queries, see `masks`
    chosen: bool = False  #: only positions that a detector's candidates come from are queries, see `demand`
    joined: tuple[str, ...] = ()  #: further tensors, whose numbers are put behind those of the query
    standardised: bool = (
        False  #: queries are compared in units of the standard deviation of each of their numbers
    )
    samples: int = 0  #: the axis of samples, where a witness is pooled: that of time may come before it

    @property
    def others(self) -> list[int]:
        """The axes of the query tensor that are not that of the features, that of the samples first."""
        rest = [axis for axis in range(self.axes) if axis not in (self.axis, self.samples)]
        return rest if self.samples == self.axis else [self.samples, *rest]

    @property
    def in_order(self) -> bool:
        """Whether the axis of the samples is the first, and that of the features the last."""
        return self.samples == 0 and self.is_last

    @property
    def is_last(self) -> bool:
        """Whether the features are on the last axis."""
        return self.layout is Layout.ROWS or self.axis in (-1, self.axes - 1)

    @property
    def many(self) -> bool:
        """Whether a row of the data has many queries, one for each token or pixel, or may have: the rank is not known."""
        return (self.rank is None or self.rank > 2) and self.layout in (Layout.ROWS, Layout.POSITIONS)

    @property
    def query_axes(self) -> int | None:
        """How many axes the queries (…, d) have; None where that is not known."""
        return 2 if self.chosen or self.layout in (Layout.POOLED, Layout.FLAT) else self.rank

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


@dataclass(frozen=True)
class Selection:
    """The positions of a site's tensor that are queries, where not all of them are."""

    indices: Value  #: int64 (q, rank - 1), in the order of the axes that are not that of the features
    sizes: Value  #: int64 (rank - 1,): of these axes


def read_queries(
    graph: VarianceGraph, source: SourceModel, site: Site, selection: Selection | None = None
) -> Value:
    """The queries of a site as (…, d) float32."""

    def tensor(name: str) -> Value:
        value = graph.tensor(name, np.dtype(source.tensors[name].dtype or np.float32))
        if value.dtype == np.float16:
            value = _viewed_again(graph, source, name)
        return graph.cast(value, np.float32) if is_quantised(value.dtype) else value

    if site.layout is not Layout.FLAT:
        return _arranged(graph, site, tensor(site.query), valid_for_mean(graph, source, site), selection)
    names = (site.query, *site.joined)
    axis = 0 if _are_one_sample([source.tensors[name].shape for name in names]) else 1
    parts = [graph.cast(graph.emit("Flatten", tensor(name), axis=axis), np.float32) for name in names]
    return parts[0] if len(parts) == 1 else graph.emit("Concat", *parts, axis=1)


def _viewed_again(graph: VarianceGraph, source: SourceModel, name: str) -> Value:
    """A tensor in half precision, made again from what it is flattened from.

    onnxruntime computes most of half precision in single precision and takes two casts in a row for none, also past a
    Flatten that nothing else reads: a second reader makes it round there, and changes the last bits of the prediction.
    A Reshape does the same and is not merged with it.
    """
    tensor = source.tensors[name]
    node = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    value = graph.tensor(name, np.dtype(np.float16))
    if node is None or node.op != "Flatten" or node.attrs.get("axis", 1) != 1:
        return value
    return graph.emit("Reshape", graph.tensor(node.inputs[0].name, value.dtype), graph.ints(0, -1))


def _are_one_sample(shapes: Sequence[Sequence[object] | None]) -> bool:
    """Whether tensors have no axis of rows: first axes of fixed sizes that differ, or no other axes."""
    first = [shape[0] if shape else None for shape in shapes]
    fixed = all(isinstance(size, int) for size in first)
    return fixed and (len(set(first)) > 1 or any(shape is not None and len(shape) == 1 for shape in shapes))


def _arranged(
    graph: VarianceGraph,
    site: Site,
    tensor: Value,
    valid: Value | None,
    selection: Selection | None = None,
) -> Value:
    """The query tensor as (…, d) float32; `valid` (N, T) is the site's mask as bool, where it has one."""
    if site.layout is Layout.POSITIONS and not site.is_last:
        tensor = graph.emit("Transpose", tensor, perm=[*site.others, site.axis])
    elif site.layout is Layout.POOLED and site.axes > 2 and valid is not None:
        turned = tensor if site.in_order else graph.emit("Transpose", tensor, perm=[*site.others, site.axis])
        tensor = pooled(graph, turned, valid, site.axes)
    elif site.layout is Layout.POOLED and site.axes > 2:
        tensor = _mean_over_positions(graph, site, tensor)
    if selection is not None:
        tensor = graph.emit("GatherND", tensor, selection.indices)
    return graph.cast(tensor, np.float32)


def valid_for_mean(graph: VarianceGraph, source: SourceModel, site: Site) -> Value | None:
    """Which positions (N, T) the mean of a pooled site is over; None where there is no padding to leave out."""
    return valid_in(graph, source, site.mask) if site.layout is Layout.POOLED and site.mask else None


def restore(graph: VarianceGraph, site: Site, share: Value, selection: Selection | None = None) -> Value:
    """The op's answer (…, 1) in a shape that broadcasts against the query tensor; 0 where nothing was asked."""
    if selection is not None:
        shape = graph.emit("Concat", selection.sizes, graph.ints(1), axis=0)
        zero = gs.Constant("value", np.zeros(1, share.dtype))
        nothing = graph.emit("ConstantOfShape", shape, value=zero, dtype=share.dtype)
        share = graph.emit("ScatterND", nothing, selection.indices, share)
    if site.layout is Layout.POSITIONS and not site.is_last:
        last = site.axes - 1
        return graph.emit("Transpose", share, perm=[*range(site.axis), last, *range(site.axis, last)])
    if site.layout in (Layout.POOLED, Layout.FLAT) and site.axes > 2:
        return graph.unsqueeze(share, list(range(2, site.axes)))
    return share


def _mean_over_positions(graph: VarianceGraph, site: Site, tensor: Value) -> Value:
    """(n, d). Behind a convolution onnxruntime keeps maps in blocks of channels, which GlobalAveragePool reads as
    they are; it knows no other axis."""
    if site.axis == 1 and site.samples == 0:
        return graph.emit("Flatten", graph.emit("GlobalAveragePool", tensor), axis=1)
    return graph.reduce("ReduceMean", tensor, site.others[1:], keepdims=False)
