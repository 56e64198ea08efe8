"""The pass over the calibration data: what every site needs of them.

Memory is bounded whatever the size of the data: moments are running sums, rows are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnxruntime import InferenceSession

from gapa_onnx.arrays import Array
from gapa_onnx.data import DataSource
from gapa_onnx.errors import UserError
from gapa_onnx.fit import statistics
from gapa_onnx.model.load import SourceModel
from gapa_onnx.model.splice import splice
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.plan.tasks import Task
from gapa_onnx.progress import Progress, silent
from gapa_onnx.sessions.inference import row_count
from gapa_onnx.sessions.runtime import first_line, open_session
from gapa_onnx.settings import Settings
from gapa_onnx.variance.qdq import reading_graph
from gapa_onnx.variance.sites import Layout, Site, arrange

SAMPLE_BYTES = 256 << 20  # rows kept for choosing inducing points, all sites together
INPUT_SAMPLE_BYTES = 64 << 20  # rows kept for the median distance of the inputs
MOST_BATCH_ROWS = 256
BATCH_NUMBERS = 1 << 20  # input numbers per batch: 256 rows of 64 x 64 pixels
HELD_OUT_ROWS = 2000  # rows for leave-one-out shares and for the recall of an index


@dataclass(frozen=True)
class Collected:
    """What one pass over the data left of it: moments and row samples of every site."""

    collectors: tuple[Collector, ...] = field(repr=False)
    inputs: InputSample | None = field(repr=False)
    classes: bool  #: whether some output is a choice of classes
    rows: int  #: batch rows read
    batch_rows: int  #: rows that were fed at a time
    description: str
    reader: QueryReader = field(repr=False)  #: for rows that are looked at again


def collect(plan: Plan, data: DataSource, settings: Settings, progress: Progress = silent) -> Collected:
    """The one pass over the data: the source model runs, and what the fit needs of its activations is kept."""
    collectors = tuple(Collector(site, settings, len(plan.sites)) for site in plan.sites)
    inputs = InputSample(settings.seed) if settings.length_scale == "input" else None
    reader = _query_reader(plan.source, plan.sites)
    rows, batch_rows = _stream(reader, data, collectors, inputs, progress)
    classes = any(head.task not in (Task.REGRESSION, Task.NONE) for head in plan.heads)
    return Collected(collectors, inputs, classes, rows, batch_rows, data.description, reader)


def _stream(
    reader: QueryReader,
    data: DataSource,
    collectors: Sequence[Collector],
    inputs: InputSample | None,
    progress: Progress,
) -> tuple[int, int]:
    rows, batch_rows = 0, _batch_rows(reader.session, data)
    for batch in data.batches(batch_rows):
        answers = reader.read(batch)
        rows += row_count(batch)
        for query, collector in zip(reader.names, collectors):
            collector.add(answers[query], answers.get(collector.site.query))
        if inputs is not None:
            inputs.add(batch)
        progress("reading calibration data", rows / data.rows if data.rows else 0.0)
    return rows, batch_rows


@dataclass(frozen=True)
class QueryReader:
    """The source model with the queries of every site as outputs."""

    session: InferenceSession = field(repr=False)
    names: tuple[str, ...]  #: the queries of each site
    maps: tuple[str, ...]  #: what pooled and flattened queries are made of

    def read(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Queries and maps of a batch, by name."""
        wanted = [*self.names, *self.maps]
        try:
            return dict(zip(wanted, self.session.run(wanted, batch)))
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise UserError(
                f"the model failed on the calibration data: {first_line(error)}",
                "check the shape and range of the data",
            ) from error

    def queries(self, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The queries (…, d) of each site for a batch that has been read before."""
        return list(self.session.run(list(self.names), batch))


def _batch_rows(session: InferenceSession, data: DataSource) -> int:
    """Rows to feed at a time, by the size of the first row: memory is bounded by a batch, not by the data.

    Some models declare a free batch axis and yet take one row only; they are found out here.
    """
    first = next(iter(data.batches(1)))
    rows = max(1, min(MOST_BATCH_ROWS, BATCH_NUMBERS // max(1, sum(array.size for array in first.values()))))
    if rows > 1:
        try:
            session.run(None, next(iter(data.batches(2))))
        except Exception:  # the pass itself says what is wrong, if one row fails as well
            return 1
    return rows


def _query_reader(source: SourceModel, sites: Sequence[Site]) -> QueryReader:
    """The source model with the queries of each site as outputs, and the maps that are pooled or flattened."""
    graph = reading_graph(source)
    tensors = source.tensors
    queries = []
    for site in sites:
        with graph.scope(f"{site.prefix}/query"):
            tensor = graph.tensor(site.query, np.dtype(tensors[site.query].dtype or np.float32))
            queries.append(graph.emit("Identity", arrange(graph, site, tensor)))
    maps = list(dict.fromkeys(site.query for site in sites if site.layout in (Layout.POOLED, Layout.FLAT)))
    names = [query.name for query in queries]
    existing = {value.name for value in source.proto.graph.output}
    new = [name for name in dict.fromkeys([*names, *maps]) if name not in existing]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in new]
    session = open_session(splice(source.proto, graph.to_proto(queries), outputs), source.label)
    return QueryReader(session, tuple(names), tuple(maps))


class Collector:
    """Running statistics of one site."""

    def __init__(self, site: Site, settings: Settings, sites: int):
        self.site = site
        self.settings = settings
        self.budget = SAMPLE_BYTES // sites
        self.sample: statistics.RowSample | None = None  # made when the first batch tells the width
        self.dropped = 0

    @property
    def seen(self) -> int:
        """The rows that came and were finite."""
        return self.sample.seen if self.sample else 0

    def add(self, query: Array, feature_map: Array | None) -> None:
        rows = query.reshape(-1, query.shape[-1]) if query.ndim else query.reshape(1, 1)  # (n, d)
        sample = self.sample or self._begin(rows.shape[1])
        if rows.shape[1] != self.width:
            raise UserError(
                f"site {self.site.name!r} is {self.width} wide on some calibration data and {rows.shape[1]} on others",
                "use data of one size, or another site or layout",
            )
        finite = statistics.finite_rows(rows)
        self.dropped += int(len(rows) - finite.sum())
        rows = rows[finite]
        sample.add(rows)
        self.moments.add(rows)
        if feature_map is not None:
            self.map_shape = feature_map.shape[1:]
        if self.site.layout is Layout.POOLED and feature_map is not None:
            channels = np.moveaxis(feature_map, 1, -1).reshape(-1, feature_map.shape[1]).astype(np.float32)
            self.channel_moments.add(channels[statistics.finite_rows(channels)])

    def _begin(self, width: int) -> statistics.RowSample:
        self.width = width
        self.sample = statistics.RowSample(self._capacity(self.settings), width, self.settings.seed)
        self.moments = statistics.Moments(width, covariance=self.settings.metric == "whitened")
        self.channel_moments = statistics.Moments(width)  # used where the query is a pooled map
        return self.sample

    def rows(self, settings: Settings) -> Array:
        """The sample that these settings call for: (n, width)."""
        return self.sample.smaller(self._capacity(settings)) if self.sample else np.empty((0, 0), np.float32)

    def _capacity(self, settings: Settings) -> int:
        capacity = max(settings.k + 1, self.budget // (4 * self.width))
        if settings.inducing != "all":
            capacity = min(capacity, max(256 * settings.most_points, 2 * HELD_OUT_ROWS))
        return capacity


class InputSample:
    """A sample of the model's inputs, each row flattened, for their median distance."""

    def __init__(self, seed: int):
        self.seed = seed
        self.sample: statistics.RowSample | None = None

    @property
    def rows(self) -> Array:
        """The sampled rows: (n, D)."""
        return self.sample.rows if self.sample else np.empty((0, 0), np.float32)

    def add(self, batch: dict[str, Array]) -> None:
        parts = [
            a.reshape(len(a), -1) for a in batch.values() if a.ndim and np.issubdtype(a.dtype, np.number)
        ]
        rows = np.concatenate([p for p in parts if len(p) == len(parts[0])], axis=1).astype(
            np.float32
        )  # (n, D)
        if self.sample is None:
            capacity = max(2, INPUT_SAMPLE_BYTES // (4 * rows.shape[1]))
            self.sample = statistics.RowSample(min(capacity, 20_000), rows.shape[1], self.seed)
        self.sample.add(rows[statistics.finite_rows(rows)])
