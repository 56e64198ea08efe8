"""The source model with the queries of every site as outputs, and no more of it than they need."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnxruntime import InferenceSession

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch
from gapa_onnx.fit.resuming import resumed
from gapa_onnx.model.load import SourceModel
from gapa_onnx.model.splice import extract, splice
from gapa_onnx.model.weights import is_outside
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.plan.candidates import selections
from gapa_onnx.sessions.inference import row_count, run_batch
from gapa_onnx.sessions.runtime import open_session, session_options
from gapa_onnx.settings import Settings
from gapa_onnx.variance.masks import tensor_of, valid_positions
from gapa_onnx.variance.qdq import reading_graph
from gapa_onnx.variance.sites import Layout, Site, read_queries


@dataclass(frozen=True)
class QueryReader:
    """The source model with the queries of every site as outputs. Its session is opened when it is first asked."""

    model: onnx.ModelProto = field(repr=False)
    label: str
    names: tuple[str, ...]  #: the queries of each site
    maps: tuple[str, ...]  #: what pooled and flattened queries are made of
    masks: tuple[str, ...] = ()  #: tensors that tell padding, but for those that are fed
    resumed: tuple[str, ...] = ()  #: from which on later passes run the model, see `resuming`
    threads: int = 0  #: of a session; 0 for all cores
    _opened: list[InferenceSession] = field(default_factory=list, repr=False)

    @property
    def session(self) -> InferenceSession:
        if not self._opened:
            self._opened.append(open_session(self.model, self.label, session_options(threads=self.threads)))
        return self._opened[0]

    def rest(self) -> None:
        """Close the session of a large model, whose memory others need meanwhile."""
        if any(map(is_outside, self.model.graph.initializer)):
            self._opened.clear()

    def pruned(self) -> QueryReader:
        """The same reader with only the part of the model that its queries need: no head, whose answers are the
        largest tensors of many a model."""
        self._opened.clear()
        wanted = dict.fromkeys([*self.names, *self.maps, *self.masks, *self.resumed])
        return replace(self, model=extract(self.model, wanted), _opened=[])

    def only(self, names: Sequence[str], masks: Collection[str]) -> QueryReader:
        """A reader of some of the queries, which may need less of the model."""
        if tuple(names) == self.names:
            return self
        self.rest()
        kept = tuple(name for name in self.masks if name in masks)
        return replace(self, names=tuple(names), maps=(), masks=kept, resumed=(), _opened=[]).pruned()

    def read(self, batch: Batch) -> tuple[dict[str, np.ndarray], int]:
        """Queries, maps and masks of a batch, by name, and its rows, which the model's answers may have to tell."""
        wanted = [*self.names, *self.maps, *self.masks]
        told = [] if batch.rows is not None else [value.name for value in self.session.get_outputs()[:1]]
        found = self._run([*told, *wanted], batch)
        return dict(zip(wanted, found[len(told) :])), row_count(batch, found[: len(told)])

    def valid(self, site: Site, batch: dict[str, Array], answers: dict[str, Array]) -> Array | None:
        """Which positions (N, T) of a batch that was read are no padding at a site; None where it has no mask."""
        if site.mask is None:
            return None
        tensor = tensor_of(site.mask)
        return valid_positions(site.mask, batch[tensor] if tensor in batch else answers[tensor])

    def queries(self, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The queries (…, d) of each site for a batch that has been read before."""
        return self._run(self.names, batch)

    def resuming(self, batch: dict[str, np.ndarray]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """The same, and the tensors that later passes start from."""
        found = self._run([*self.names, *self.resumed], batch)
        return found[: len(self.names)], dict(zip(self.resumed, found[len(self.names) :]))

    def _run(self, wanted: Sequence[str], batch: dict[str, np.ndarray]) -> list[np.ndarray]:
        failed = "the model failed on the calibration data"
        return run_batch(self.session, wanted, batch, failed, "check the shape and range of the data")


def query_reader(plan: Plan, sites: Sequence[Site], settings: Settings, threads: int = 0) -> QueryReader:
    """The source model with the queries of each site as outputs, and the maps that are pooled or flattened."""
    source = plan.source
    graph = reading_graph(source)
    chosen = selections(source, graph, sites, plan.heads, settings.candidates)
    queries = []
    for site in sites:
        with graph.scope(f"{site.prefix}/query"):
            made = read_queries(graph, source, site, chosen.get(site.output))
            queries.append(graph.emit("Identity", made))
    mapped = (site.query for site in sites if site.layout in (Layout.POOLED, Layout.FLAT) and not site.joined)
    maps = list(dict.fromkeys(mapped))
    masks = _computed_masks(source, sites)
    names = [query.name for query in queries]
    existing = {value.name for value in source.proto.graph.output}
    later = resumed(plan)
    new = [name for name in dict.fromkeys([*names, *maps, *masks, *later]) if name not in existing]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in new]
    model = splice(source.proto, graph.to_proto(queries), outputs)
    return QueryReader(model, source.label, tuple(names), tuple(maps), tuple(masks), later, threads)


def _computed_masks(source: SourceModel, sites: Sequence[Site]) -> list[str]:
    """The tensors of masks that are not fed."""
    fed = {spec.name for spec in source.inputs}
    named = (tensor_of(site.mask) for site in sites if site.mask is not None)
    return [name for name in dict.fromkeys(named) if name not in fed]
