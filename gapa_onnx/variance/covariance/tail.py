"""The walk from an output back to the sites, and the covariance that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.errors import UserError
from gapa_onnx.model.dtypes import is_float, is_quantised, variance_dtype
from gapa_onnx.model.load import SourceModel
from gapa_onnx.variance.covariance.registry import PULLBACKS, Pullback, TailNode
from gapa_onnx.variance.graph import Value, VarianceGraph, names_read
from gapa_onnx.variance.patterns import find_composites
from gapa_onnx.variance.propagation import RefusedNode, first_output, refusal_table
from gapa_onnx.variance.qdq import reading_graph
from gapa_onnx.variance.rules import Deterministic, Refused, VirtualNode, behaviour
from gapa_onnx.variance.sites import Site

Node: TypeAlias = gs.Node | VirtualNode
ANOTHER_WAY = "use `covariance='diag'`, or choose later sites with `sites`"


def output_covariance(
    source: SourceModel,
    graph: VarianceGraph,
    sites: Sequence[Site],
    own: Mapping[str, Value],
    output: str,
) -> tuple[Value, Value]:
    """Σ = Σ_sites J diag(v) Jᵀ (N, C, C) of an output (N, C), and its diagonal (N, C).

    Parameters
    ----------
    graph: where the nodes go; the same that the variances were propagated in.
    own: the variance born at each site, by the name of its output tensor, whose shape it broadcasts to.
    output: an output of the model or any tensor inside, of two axes.

    Raises UserError where a node between the sites and the output has no pullback.
    """
    tail = _Tail.between(source, sites, output)
    cotangents = _pull(graph, tail)
    with graph.scope(f"{output}/cov"):
        terms = [
            graph.cast(_contribution(graph, cotangents[name], own[name], tail.tensors[name]), tail.dtype)
            for name in tail.sites
        ]
        covariance = graph.rename(sum(terms[1:], terms[0]), f"{output}/cov")
        diagonal = graph.reduce("ReduceSum", covariance * tail.identity(graph), [2], keepdims=False)
    return covariance, diagonal


def check_tail(source: SourceModel, sites: Sequence[Site], output: str) -> None:
    """Raise the UserError of `output_covariance`, if any, without writing anything."""
    _pull(reading_graph(source), _Tail.between(source, sites, output))


# ------------------------------------------------------------------------- the tail


@dataclass(frozen=True)
class _Tail:
    """What lies between the sites and an output."""

    output: gs.Tensor
    sites: tuple[str, ...]  #: names of the site tensors that reach the output
    nodes: tuple[Node, ...] = field(repr=False)  #: in the order of the graph
    uncertain: frozenset[str] = field(repr=False)  #: tensors that depend on a site
    tensors: Mapping[str, gs.Tensor] = field(repr=False)

    @classmethod
    def between(cls, source: SourceModel, sites: Sequence[Site], output: str) -> _Tail:
        tensors = source.tensors
        _require_rows(tensors[output], source.opset)
        births = [site.output for site in sites]
        nodes = _seen_as_one(source.graph, {*births, output})
        uncertain = _reached(nodes, births)
        needed, tail = {output}, []
        for node in reversed(nodes):
            if any(t.name in needed and t.name in uncertain for t in node.outputs):
                needed.update(name for name in names_read(node) if name in uncertain)
                tail.append(node)
        reaching = tuple(name for name in dict.fromkeys(births) if name in needed)
        if not reaching:
            raise UserError(
                f"no site reaches {output!r} by a path that carries variance",
                "choose other sites with `sites`; `gapa-onnx inspect MODEL` lists them",
            )
        return cls(tensors[output], reaching, tuple(tail[::-1]), frozenset(uncertain), tensors)

    @property
    def dtype(self) -> np.dtype:
        return variance_dtype(self.output.dtype)

    def identity(self, graph: VarianceGraph) -> Value:
        """(1, C, C)"""
        size = self.output.shape[1]
        raw = graph.tensor(self.output.name, self.output.dtype or np.float32)
        known = isinstance(size, int) and size >= 0  # some files declare -1
        count = graph.ints(size) if known else graph.dimension(raw, 1)
        return graph.unsqueeze(graph.eye(count, self.dtype), [0])


def _require_rows(output: gs.Tensor, opset: int) -> None:
    shape = output.shape
    if shape is None or len(shape) != 2:
        found = "unknown rank" if shape is None else f"{len(shape)} axes"
        raise UserError(
            f"the full covariance is for outputs of two axes, samples and elements; {output.name!r} has {found}",
            "use `covariance='diag'`",
        )
    if opset < 9 and not isinstance(shape[1], int):
        raise UserError(
            f"before opset 9 the number of elements of {output.name!r} must be known",
            "raise the model's opset, or use `covariance='diag'`",
        )


def _seen_as_one(graph: gs.Graph, visible: set[str]) -> list[Node]:
    """The nodes in order, composites in place of their groups where they have a pullback."""
    outputs = {tensor.name for tensor in graph.outputs} | visible
    composites = {id(c.last): c for c in find_composites(graph, visible) if _pullback(c.node) is not None}
    hidden = set().union(*(composite.hidden(outputs) for composite in composites.values()))
    return [
        composites[id(node)].node if id(node) in composites else node
        for node in graph.nodes
        if id(node) not in hidden
    ]


def _reached(nodes: Sequence[Node], births: Sequence[str]) -> set[str]:
    """Names of the tensors that depend on a site by a path that carries variance."""
    reached = set(births)
    for node in nodes:
        if isinstance(behaviour(node.domain, node.op), Deterministic):
            continue
        if any(name in reached for name in names_read(node)):
            reached.update(t.name for t in node.outputs if t.name and _carries(node, t))
    return reached


def _carries(node: Node, tensor: gs.Tensor) -> bool:
    """Whole numbers stand for real ones behind a quantisation, but not behind a cast."""
    return is_float(tensor.dtype) or is_quantised(tensor.dtype) and node.op not in ("Cast", "CastLike")


def _pullback(node: Node) -> Pullback | None:
    return PULLBACKS.get(("" if node.domain in (None, "ai.onnx") else node.domain, node.op))


# ------------------------------------------------------------------------- the walk


def _pull(graph: VarianceGraph, tail: _Tail) -> dict[str, Value]:
    """The cotangent of every uncertain tensor of the tail; a tensor that is read twice has the sum."""
    identity = tail.identity(graph)
    cotangents = {tail.output.name: identity}
    refused: list[RefusedNode] = []

    def mean(name: str) -> Value | None:  # only asked whether there is one
        return graph.tensor(name, np.float32) if name in tail.uncertain else None

    for node in reversed(tail.nodes):
        arrived = tuple(cotangents.get(tensor.name) for tensor in node.outputs)
        if all(g is None for g in arrived):
            continue
        with graph.scope(f"{first_output(node)}/jac"):
            view = TailNode(graph, node, mean, cotangents=arrived, identity=identity)
            try:
                found = _through(view)
            except Refused as refusal:
                refused.append(RefusedNode.of(node, refusal))
                found = [graph.tensor(f"{t.name}/jac", variance_dtype(t.dtype)) for t in node.inputs]
            for tensor, g in zip(node.inputs, found):
                if tensor.name in tail.uncertain and g is not None:
                    before = cotangents.get(tensor.name)
                    cotangents[tensor.name] = g if before is None else before + g
    if refused:
        raise UserError(
            f"{len(refused)} node(s) between the sites and {tail.output.name!r} have no pullback, which the "
            f"full covariance needs:\n{refusal_table(refused)}",
            ANOTHER_WAY,
        )
    return cotangents


def _through(view: TailNode) -> Sequence[Value | None]:
    """The cotangents of a node's inputs."""
    entry = _pullback(view.node)
    if entry is None:
        raise view.refuse("its derivative is not in the table")
    first, *others = view.cotangents
    if not entry.several and (first is None or any(g is not None for g in others)):
        raise view.refuse("more than its first output is read")
    arrived = next(g for g in view.cotangents if g is not None)
    stated = entry.apply(view, arrived)
    stated = stated if isinstance(stated, tuple) else (stated,)
    found = [*stated, *[None] * (len(view.inputs) - len(stated))]
    for operand, g in zip(view.inputs, found):
        if not operand.certain and g is None:
            raise view.refuse(f"its input {operand.tensor.name!r} is uncertain")
    return found


def _contribution(graph: VarianceGraph, g: Value, own: Value, tensor: gs.Tensor) -> Value:
    """G diag(v) Gᵀ, as the product of G √v with its own transpose: symmetric, no diagonal entry below 0."""
    like = graph.tensor(tensor.name, tensor.dtype or np.float32)
    std = graph.expand(graph.cast(own, g.dtype), like).sqrt()
    scaled = g * graph.unsqueeze(std, [1])  # (N, C, …)
    if len(tensor.shape) == 1:
        scaled = graph.unsqueeze(scaled, [2])
    elif len(tensor.shape) > 2:
        scaled = graph.emit("Reshape", scaled, _flat(graph, tensor, like))  # (N, C, d)
    return graph.emit("MatMul", scaled, graph.emit("Transpose", scaled, perm=[0, 2, 1]))


def _flat(graph: VarianceGraph, tensor: gs.Tensor, like: Value) -> Value:
    sizes = tensor.shape[1:]
    if all(isinstance(size, int) for size in sizes):
        return graph.ints(0, 0, prod(sizes))
    rest = graph.reduce("ReduceProd", graph.slice(graph.shape(like), 0, 1, None), [0])
    return graph.emit("Concat", graph.ints(0, 0), rest, axis=0)
