"""One walk over the source graph that gives every uncertain tensor its variance.

At a site, with own variance σ² (born there) and incoming variance v:

    activation φ:  v_y = σ² + φ'(z)² v      (noisy-input GP)
    identity:      v_y = σ² + v
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from gapa_onnx.model.collector import collector_paused
from gapa_onnx.model.dtypes import is_float, is_quantised, variance_dtype
from gapa_onnx.model.load import SourceModel
from gapa_onnx.variance.expansion import expansion
from gapa_onnx.variance.graph import Value, VarianceGraph, names_read
from gapa_onnx.variance.patterns import Composite, find_composites
from gapa_onnx.variance.qdq import reading_graph
from gapa_onnx.variance.rules import (
    Deterministic,
    NodeView,
    Options,
    Refusal,
    Refused,
    VirtualNode,
    behaviour,
    is_declared,
)
from gapa_onnx.variance.sites import Site


@dataclass(frozen=True)
class RefusedNode:
    """A node whose variance cannot be stated, and why."""

    node: str
    operator: str
    reason: str

    @classmethod
    def of(cls, node: gs.Node | VirtualNode, refusal: Refused) -> RefusedNode:
        operator = f"{node.domain}::{node.op}" if node.domain else node.op
        return cls(node.name or first_output(node), operator, str(refusal))


@dataclass(frozen=True)
class Propagation:
    """The variance of every uncertain tensor, by the tensor's name."""

    graph: VarianceGraph = field(repr=False)
    variances: dict[str, Value] = field(repr=False)
    refused: tuple[RefusedNode, ...]


def refusal_table(refused: Sequence[RefusedNode]) -> str:
    """Operator / count / reason / nodes, one line per operator and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in refused:
        groups.setdefault((entry.operator, entry.reason), []).append(entry.node)
    return "\n".join(
        f"  {operator:<24} {len(nodes):>4}  {reason}  [{_some(nodes)}]"
        for (operator, reason), nodes in sorted(groups.items())
    )


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


Birth = Callable[[VarianceGraph, Site], Value]


def propagate(
    source: SourceModel,
    sites: Sequence[Site],
    birth: Birth,
    *,
    cut: bool = False,
    options: Options = Options(),
) -> Propagation:
    """Walk the graph in order and apply each node's behaviour.

    `birth` emits the variance that a site adds. A refused node is recorded; with `cut` its outputs
    count as certain, without it the walk goes on behind it, so that all refusals are found.
    """
    graph = reading_graph(source)
    walk = _Walk(source, graph, {site.output: site for site in sites}, birth, cut, options)
    walk.outside = set(source.tensors)
    for tensor in source.graph.inputs:
        walk.settle(tensor, None)
    with collector_paused():
        walk.visit_all(source.graph, live_tensors(source.graph))
    return Propagation(graph, walk.variances, tuple(walk.refused))


class _Walk:
    """One pass over the nodes of a graph, in order."""

    def __init__(
        self,
        source: SourceModel,
        graph: VarianceGraph,
        sites: dict[str, Site],
        birth: Birth,
        cut: bool,
        options: Options,
    ):
        self.source = source
        self.graph = graph
        self.sites = sites
        self.birth = birth
        self.cut = cut
        self.options = options
        self.outside: set[str] = set()  #: names that are visible in subgraphs
        self.variances: dict[str, Value] = {}
        self.refused: dict[RefusedNode, None] = {}  #: in the order of their first refusal

    def visit_all(self, graph: gs.Graph, live: set[str]) -> None:
        found = find_composites(graph, visible=set(self.sites))
        # One without a rule would be spelled out again, for ever.
        composites = {id(c.last): c for c in found if is_declared(c.node.domain, c.node.op)}
        hidden = _hidden_nodes(composites.values(), {tensor.name for tensor in graph.outputs})
        for node in graph.nodes:
            if id(node) not in hidden and any(tensor.name in live for tensor in node.outputs):
                self._visit(composites[id(node)].node if id(node) in composites else node)

    def _visit(self, node: gs.Node | VirtualNode) -> None:
        uncertain = any(name in self.variances for name in names_read(node))
        arriving = self._arriving(node) if uncertain else [None] * len(node.outputs)
        for tensor, var in zip(node.outputs, arriving):
            self.settle(tensor, var)

    def _arriving(self, node: gs.Node | VirtualNode) -> Sequence[Value | None]:
        """The variance of each output, from what came in."""
        entry = behaviour(node.domain, node.op)
        nothing = [None] * len(node.outputs)
        if isinstance(entry, Deterministic):
            return nothing
        try:
            if isinstance(entry, Refusal):
                body = None if is_declared(node.domain, node.op) else expansion(node, self.graph)
                if body is None:
                    raise Refused(entry.reason)
                return self._through(body)
            with self.graph.scope(f"{first_output(node)}/var"):
                view = NodeView(self.graph, node, self.variances.get, self.options, self._within)
                result = entry.apply(view)
            return result if isinstance(result, tuple) else (result,)
        except Refused as refusal:
            # The body of a loop may be walked more than once.
            self.refused.setdefault(RefusedNode.of(node, refusal))
            return nothing if self.cut else [self._stand_in(tensor) for tensor in node.outputs]

    def _within(self, body: gs.Graph, graph: VarianceGraph, known: dict[str, Value]) -> dict[str, Value]:
        """The variances inside a subgraph, emitted into `graph`; `known` are those of its inputs."""
        walk = _Walk(self.source, graph, {}, self.birth, self.cut, self.options)
        walk.refused = self.refused
        captured = {name for node in body.nodes for name in names_read(node)} | {t.name for t in body.outputs}
        walk.variances = {name: graph.adopt(var) for name, var in self.variances.items() if name in captured}
        walk.variances.update(known)
        graph.copy(body.nodes, outside=self.outside)
        walk.outside = self.outside | set(body.tensors())
        walk.visit_all(body, live_tensors(body))
        return walk.variances

    def _through(self, body: gs.Graph) -> list[Value | None]:
        """The variances of an operator that is spelled out by others, which compute its means again."""
        outside = self.outside | {tensor.name for tensor in body.inputs}
        self.graph.copy(body.nodes, outside)
        self.visit_all(body, live_tensors(body))
        return [self.variances.get(tensor.name) for tensor in body.outputs]

    def _stand_in(self, tensor: gs.Tensor) -> Value | None:
        if not tensor.name or not (is_float(tensor.dtype) or is_quantised(tensor.dtype)):
            return None
        return self.graph.tensor(f"{tensor.name}/var", variance_dtype(tensor.dtype))

    def settle(self, tensor: gs.Tensor, var: Value | None) -> None:
        """Record the variance of a tensor; a site there adds its own."""
        site = self.sites.get(tensor.name)
        if site is not None:
            own = self.birth(self.graph, site)
            with self.graph.scope(f"{tensor.name}/var"):
                own = self.graph.cast(own, variance_dtype(tensor.dtype))
                var = own if var is None else own + var
        if var is not None:
            self.variances[tensor.name] = self.graph.rename(var, f"{tensor.name}/var")


def first_output(node: gs.Node | VirtualNode) -> str:
    """The name of the first output that is not left out."""
    return str(next(tensor.name for tensor in node.outputs if tensor.name))


def _hidden_nodes(composites: Iterable[Composite], outputs: set[str]) -> set[int]:
    """Interior nodes of composites that nothing outside their group needs."""
    return set().union(*(composite.hidden(outputs) for composite in composites))


def live_tensors(graph: gs.Graph) -> set[str]:
    """Names of the tensors that some output depends on."""
    live = {tensor.name for tensor in graph.outputs}
    for node in reversed(graph.nodes):
        if any(tensor.name in live for tensor in node.outputs):
            live.update(names_read(node))
    return live
