"""Which positions of a site the candidates of a detector come from: only these are queries."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.detection import Detector, Slab, find_detectors
from gapa_onnx.plan.evidence import read_outputs
from gapa_onnx.plan.head import Head
from gapa_onnx.plan.heads.detection import candidate_mask, most_confident
from gapa_onnx.variance.demand import OLDEST_OPSET, Demand, Needed, demand, select
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.qdq import reading_graph
from gapa_onnx.variance.sites import Layout, Selection, Site


@dataclass(frozen=True, eq=False)
class Candidates:
    """The detectors of a model, and the tensors that a few candidates are made of in part only."""

    source: SourceModel = field(repr=False)

    @classmethod
    def of(cls, source: SourceModel) -> Candidates:
        """The one view of a model, which every caller shares."""
        return source.once(cls)

    @functools.cached_property
    def detectors(self) -> tuple[Detector, ...]:
        return find_detectors(self.source, read_outputs(self.source))

    @functools.cached_property
    def made_of(self) -> frozenset[str]:
        """The tensors of which candidates need only some positions."""
        if not self.detectors or self.source.opset < OLDEST_OPSET:
            return frozenset()
        graph = reading_graph(self.source)
        wanted: dict[str, Needed] = {}
        for detector in self.detectors:
            wanted |= _wanted(graph, detector, graph.tensor("candidates/mask", np.float32))
        found = demand(self.source, graph, wanted, list(self.source.tensors))
        return frozenset(name for name, needed in found.items() if needed is not None)


def with_candidates(
    source: SourceModel, sites: Sequence[Site], heads: Sequence[Head], count: str | int
) -> tuple[Site, ...]:
    """The sites, told which of them ask only for what candidates need."""
    if isinstance(count, str) or not any(_few(source, head, count) for head in heads):
        return tuple(sites)
    made_of, beside = Candidates.of(source).made_of, _needing_all(source, heads)
    if beside:
        return tuple(sites)
    return tuple(
        replace(site, chosen=True)
        if site.output in made_of and site.layout in (Layout.POSITIONS, Layout.ROWS) and site.rank
        else site
        for site in sites
    )


def _few(source: SourceModel, head: Head, count: int) -> bool:
    """Whether a detector may have more candidates than are asked for."""
    if head.detector is None:
        return False
    slab = head.detector.classes
    shape = source.tensors[slab.tensor].shape
    size = None if shape is None else shape[slab.candidate_axis]
    return not isinstance(size, int) or size > count


def _needing_all(source: SourceModel, heads: Sequence[Head]) -> list[str]:
    """Outputs with a head that are no part of a detector, and so need all that they are made of."""
    within = {name for head in heads if head.detector is not None for name in head.detector.outputs}
    return [head.output for head in heads if head.detector is None and head.output not in within]


def selections(
    source: SourceModel,
    graph: VarianceGraph,
    sites: Sequence[Site],
    heads: Sequence[Head],
    count: str | int,
) -> dict[str, Selection]:
    """The positions that are queries, by the output of each site that has not all of them."""
    chosen = [site for site in sites if site.chosen]
    if not chosen:
        return {}
    wanted: dict[str, Needed] = {}
    for head in heads:
        if head.detector is not None:
            indices = most_confident(graph, source, head.detector, count)
            mask = candidate_mask(graph, source, head.detector, indices)
            wanted |= _wanted(graph, head.detector, mask)
    found = {}
    with graph.scope("candidates/demand"):
        needs = demand(source, graph, wanted, [site.output for site in chosen])
        for site in chosen:
            needed = needs.get(site.output)
            if needed is not None:
                tensor = graph.tensor(site.query, source.tensors[site.query].dtype or np.float32)
                found[site.output] = select(graph, site, tensor, needed)
    return found


def _wanted(graph: VarianceGraph, detector: Detector, mask: Value) -> dict[str, Needed]:
    """What a mask of candidates (N, A) wants of the tensors that hold boxes and classes."""
    return {slab.tensor: _spread(graph, slab, mask) for slab in (detector.boxes, detector.classes)}


def _spread(graph: VarianceGraph, slab: Slab, mask: Value) -> Demand:
    full = (True, slab.axis == 2, slab.axis == 1)
    return Demand(graph.unsqueeze(mask, [slab.axis]), full)
