"""Where the features of a model without layers are: the place for a site where no linear layer shows one.

Such a model (trees, neighbours, a table of means) begins with preparation: columns are scaled, encoded, put side by
side. The features are the last tensor (n, d) of it that everything passes through. Where columns are never put into
one tensor, they are joined for the site, which then has a score alone: no one tensor could become uncertain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import has_subgraph
from gapa_onnx.model.dtypes import is_float, is_whole
from gapa_onnx.plan.layers import CARRIERS, Network
from gapa_onnx.variance.graph import names_read
from gapa_onnx.variance.rules import Rule, behaviour
from gapa_onnx.variance.sites import Layout, Site

_PREPARE = (
    "ArrayFeatureExtractor", "Cast", "Concat", "FeatureVectorizer", "Gather", "Imputer", "Scaler", "Slice", "Split",
    "Transpose", *CARRIERS,
)  # fmt: skip

_CHANGE_AXES = ("Flatten", "Gather", "OneHotEncoder", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def feature_site(network: Network) -> Site | None:
    """The site at the features, which compares them in units of their standard deviations; None without numbers."""
    prepared = _Preparation(network)
    for node in network.source.graph.nodes:
        prepared.visit(node)
    for tensor in reversed(prepared.features):
        if tensor.name in prepared.tables and not _has_a_way_past(network, tensor):
            rank = None if tensor.shape is None else 2
            return Site(
                tensor.name,
                tensor.name,
                tensor.name,
                None,
                Layout.ROWS,
                rank,
                -1 if rank is None else 1,
                standardised=True,
            )
    parts = prepared.born or [tensor for tensor in _fed(network) if is_whole(tensor.dtype)]
    return _joined(parts) if parts else None


def _joined(parts: Sequence[gs.Tensor]) -> Site:
    names = [tensor.name for tensor in parts]
    alone = parts[0].shape if len(parts) == 1 else None
    return Site(
        name=", ".join(names),
        query=names[0],
        output=names[0],
        activation=None,
        layout=Layout.FLAT,
        rank=None if alone is None else len(alone),
        joined=tuple(names[1:]),
        standardised=True,
    )


def _fed(network: Network) -> list[gs.Tensor]:
    """The inputs that outputs depend on."""
    live = {tensor.name for tensor in network.source.outputs}
    for node in reversed(network.source.graph.nodes):
        if any(tensor.name in live for tensor in node.outputs):
            live.update(names_read(node))
    return [tensor for tensor in network.source.graph.inputs if tensor.name in live]


@dataclass
class _Preparation:
    """The numbers that outputs are made of, as long as each is that of one column, found in the graph's order."""

    network: Network
    raw: set[str] = field(default_factory=set)  #: words and whole numbers that come from nothing else
    born: list[gs.Tensor] = field(default_factory=list)  #: float inputs, and what is encoded of words
    features: list[gs.Tensor] = field(default_factory=list)  #: these, and what is prepared from them
    tables: set[str] = field(default_factory=set)  #: those of them that are (n, d)

    def __post_init__(self) -> None:
        fed = _fed(self.network)
        self.raw = {tensor.name for tensor in fed if not is_float(tensor.dtype)}
        self.born = [tensor for tensor in fed if is_float(tensor.dtype)]
        self.features = list(self.born)
        self.tables = {tensor.name for tensor in self.born if _rank(tensor) in (2, None)}
        self._prepared = {tensor.name for tensor in self.born}

    def visit(self, node: gs.Node) -> None:
        data = [name for name in names_read(node) if self.network.follows_data(name)]
        if not data:
            return
        if self.raw.issuperset(data):
            self.raw.update(tensor.name for tensor in node.outputs if not is_float(tensor.dtype))
            self._add(node, new=True)
        elif self._prepared.issuperset(data) and self._prepares(node, len(data)):
            self._add(node, new=False)

    def _is_table(self, node: gs.Node, made: gs.Tensor) -> bool:
        """Whether a node makes (n, d). Where its shape is not told, as behind a Scaler, it does of (n, d) unless it
        changes the axes, or has numbers with more of them."""
        if made.shape is not None:
            return len(made.shape) == 2
        data = [tensor for tensor in node.inputs if self.network.follows_data(tensor.name)]
        others = [tensor for tensor in node.inputs if tensor.name and tensor not in data]
        kept = node.op not in _CHANGE_AXES and all((_rank(tensor) or 0) < 2 for tensor in others)
        return kept and all(tensor.name in self.tables for tensor in data)

    def _add(self, node: gs.Node, new: bool) -> None:
        tensors = [tensor for tensor in node.outputs if is_float(tensor.dtype)]
        self.tables.update(tensor.name for tensor in tensors if self._is_table(node, tensor))
        self._prepared.update(tensor.name for tensor in tensors)
        self.features += tensors
        if new:
            self.born += tensors

    def _prepares(self, node: gs.Node, data: int) -> bool:
        """Whether each number that a node makes is that of one column."""
        rule = behaviour(node.domain, node.op)
        elementwise = isinstance(rule, Rule) and rule.slopes is not None and data == 1
        return not has_subgraph(node) and (elementwise or node.op in _PREPARE)


def _rank(tensor: gs.Tensor) -> int | None:
    return None if tensor.shape is None else len(tensor.shape)


def _has_a_way_past(network: Network, tensor: gs.Tensor) -> bool:
    """Whether an output depends on what is fed by a way that does not lead through a tensor."""
    reached = {fed.name for fed in network.source.graph.inputs} - {tensor.name}
    for node in network.source.graph.nodes:
        if any(name in reached for name in _data_of(network, node)):
            reached.update(made.name for made in node.outputs if made.name != tensor.name)
    return any(output.name in reached for output in network.source.outputs)


def _data_of(network: Network, node: gs.Node) -> Iterator[str]:
    return (name for name in names_read(node) if network.follows_data(name))
