"""The pass over the calibration data: what every site needs of them.

Memory is bounded whatever the size of the data: moments are running sums, rows are sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch, DataSource
from gapa_onnx.errors import UserError
from gapa_onnx.fit import statistics
from gapa_onnx.fit.choosing import JUDGED, metrics_for, metrics_of_positions
from gapa_onnx.fit.geometry import is_whitened
from gapa_onnx.fit.kept_rows import KeptRows
from gapa_onnx.fit.reader import QueryReader, query_reader
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.plan.head import Task
from gapa_onnx.plan.witnesses import any_has_positions
from gapa_onnx.progress import Progress, silent
from gapa_onnx.sessions.feeding import TENSORS_PER_OUTPUT, Feeding, feeding
from gapa_onnx.sessions.inference import row_count
from gapa_onnx.settings import Settings
from gapa_onnx.threads import one_thread
from gapa_onnx.variance.masks import tensor_of, valid_queries
from gapa_onnx.variance.sites import Layout, Site

SAMPLE_BYTES = 256 << 20  # rows kept for choosing inducing points, all sites together
INPUT_SAMPLE_BYTES = 64 << 20  # rows kept for the median distance of the inputs
FEWEST_CHOSEN = 20  # queries of candidates for each neighbour; as many points as a site has at least
HELD_OUT_ROWS = 2000  # rows for leave-one-out shares and for the recall of an index


@dataclass(frozen=True)
class Collected:
    """What one pass over the data left of it: moments and row samples of every site."""

    collectors: tuple[Collector, ...] = field(repr=False)
    inputs: InputSample | None = field(repr=False)
    classes: bool  #: whether some output is a choice of classes
    rows: int  #: batch rows read
    fed: Feeding = field(repr=False)  #: how the model takes the data
    description: str
    opset: int  #: of the model
    reader: QueryReader = field(repr=False)  #: for rows that are looked at again
    witnesses: int = 0  #: how many of the collectors, the last ones, are for places that pass no variance on
    #: queries (n, d) of strange inputs by kind, for each place; empty where geometries are not to be chosen
    strange: Mapping[str, Mapping[str, Array]] = field(default_factory=dict, repr=False)

    def propagates(self, collector: Collector) -> bool:
        """Whether variance is born at its place."""
        sites = len(self.collectors) - self.witnesses
        return any(one is collector for one in self.collectors[:sites])

    def strange_at(self, site: Site) -> Mapping[str, Array]:
        return self.strange.get(site.output, {})


def collect(
    plan: Plan,
    data: DataSource,
    settings: Settings,
    progress: Progress = silent,
    strange: DataSource | None = None,
) -> Collected:
    """The one pass over the data: the source model runs, and what the fit needs of its activations is kept.

    Which geometry is right at a place is found by `strange` inputs, or by some that are made of the data.
    """
    sequences = any_has_positions(plan.heads)
    collectors = tuple(Collector(site, settings, len(plan.places), sequences) for site in plan.places)
    inputs = InputSample(settings.seed) if settings.length_scale == "input" else None
    kept = KeptRows(settings.seed) if any(collector.chooses for collector in collectors) else None
    reader = query_reader(plan, plan.places, settings)
    fed = feeding(reader.session, data, TENSORS_PER_OUTPUT)
    if fed.size is not None:  # else the model's own answers tell how many rows a batch has
        reader = reader.pruned()
    rows, fed = _stream(reader, fed, collectors, inputs, kept, progress)
    reader, collectors = _going_together(plan, reader, collectors, rows)
    collectors = _with_all_positions(plan, collectors, fed, settings, progress)
    classes = any(head.task not in (Task.REGRESSION, Task.NONE) for head in plan.heads)
    found: dict[str, dict[str, Array]] = {}
    judged = [c for c in collectors if c.chooses and c.axes == 2]  # of the others no geometry is chosen
    if kept is not None and judged:
        mask = next((site.mask for site in plan.places if site.mask is not None), None)
        batches = kept.strange_batches(fed.batch_rows, mask) if strange is None else _given(strange, fed)
        found = strange_queries(_reader_of(judged, collectors, reader, fed), judged, batches)
    reader.rest()
    return Collected(
        collectors,
        inputs,
        classes,
        rows,
        fed,
        data.description,
        plan.source.opset,
        reader,
        len(collectors) - len(plan.sites),
        found,
    )


def _reader_of(
    some: Sequence[Collector], collectors: Sequence[Collector], reader: QueryReader, fed: Feeding
) -> QueryReader:
    """A reader of the queries of some collectors; the same where the model's answers tell how many rows a batch has."""
    names = [name for name, one in zip(reader.names, collectors) if one in some]
    masks = {tensor_of(one.site.mask) for one in some if one.site.mask is not None}
    return replace(reader, names=tuple(names)) if fed.size is None else reader.only(names, masks)


def _going_together(
    plan: Plan, reader: QueryReader, collectors: tuple[Collector, ...], rows: int
) -> tuple[QueryReader, tuple[Collector, ...]]:
    """Without witnesses that turned out to have queries of another kind than those of samples, or of the positions that
    the last site has: their axes are others."""
    witnesses = {site.output for site in plan.witnesses}
    last = [c for c in collectors if c.site.output not in witnesses][-1]
    fit = [c.site.output not in witnesses or c.one_each(rows) or c.as_many_as(last) for c in collectors]
    names = tuple(name for name, good in zip(reader.names, fit) if good)
    return replace(reader, names=names), tuple(c for c, good in zip(collectors, fit) if good)


def _with_all_positions(
    plan: Plan, collectors: tuple[Collector, ...], fed: Feeding, settings: Settings, progress: Progress
) -> tuple[Collector, ...]:
    """The collectors, where a place that candidates hardly ever come from has seen all of its positions.

    A detector's coarse maps are for large objects; where the data have none, a new image still may.
    """
    few = [c for c in collectors if c.site.chosen and c.seen < FEWEST_CHOSEN * settings.k]
    if not few:
        return collectors
    sites = tuple(replace(collector.site, chosen=False) for collector in few)
    again = {
        site.output: Collector(collector.site, settings, len(collectors))
        for site, collector in zip(sites, few)
    }
    _stream(query_reader(plan, sites, settings), fed, tuple(again.values()), None, None, progress)
    return tuple(again.get(collector.site.output, collector) for collector in collectors)


def _stream(
    reader: QueryReader,
    fed: Feeding,
    collectors: Sequence[Collector],
    inputs: InputSample | None,
    kept: KeptRows | None,
    progress: Progress,
) -> tuple[int, Feeding]:
    counts: list[int] = []
    for batch in fed.batches():
        answers, count = reader.read(batch)
        counts.append(count)
        for query, collector in zip(reader.names, collectors):
            valid = reader.valid(collector.site, batch, answers)
            collector.add(answers[query], answers.get(collector.site.query), valid)
        if inputs is not None:
            inputs.add(batch)
        if kept is not None:
            kept.add(batch, count)
        progress("reading calibration data", sum(counts) / fed.rows if fed.rows else 0.0)
    return sum(counts), replace(fed, counted=tuple(counts))


def strange_queries(
    reader: QueryReader, collectors: Sequence[Collector], batches: Iterable[tuple[str, Batch]]
) -> dict[str, dict[str, Array]]:
    """Queries (n, d) of strange inputs, by place and kind; of each kind some, where a row has many."""
    parts: dict[str, dict[str, list[Array]]] = {c.site.output: {} for c in collectors}
    for kind, batch in batches:
        try:
            answers, _ = reader.read(batch)
        except UserError:  # a model may refuse what is strange: a token that it does not know
            continue
        for name, collector in zip(reader.names, collectors):
            queries = answers[name].reshape(-1, answers[name].shape[-1])
            rows = _unpadded(queries, answers[name], reader.valid(collector.site, batch, answers))
            step = max(1, len(rows) // JUDGED)
            parts[collector.site.output].setdefault(kind, []).append(rows[::step])
    return {
        place: {kind: np.concatenate(held) for kind, held in kinds.items()} for place, kinds in parts.items()
    }


def _given(strange: DataSource, fed: Feeding) -> Iterator[tuple[str, Batch]]:
    """The first rows of strange inputs that a user has."""
    rows = 0
    for batch in replace(fed, data=strange, counted=()).batches():
        yield "given", batch
        rows += row_count(batch)
        if rows >= JUDGED:
            return


class Collector:
    """Running statistics of one site."""

    def __init__(self, site: Site, settings: Settings, sites: int, sequences: bool = False):
        self.site = site
        self.sequences = sequences  # whether positions of a sequence have scores of their own
        self.settings = settings
        self.budget = SAMPLE_BYTES // sites
        self.sample: statistics.RowSample | None = None  # made when the first batch tells the width
        self.dropped = 0
        self.axes = 0  # of the queries (…, d)

    @property
    def chooses(self) -> bool:
        """Whether its geometry may be chosen by strange inputs: that of a query which stands for a whole sample, or may,
        where only what is fed tells the number of axes."""
        open_ = self.settings.metric_at(self.site.chosen) == "auto"
        return open_ and not (self.site.standardised or (self.site.many and self.site.rank is not None))

    def one_each(self, rows: int) -> bool:
        """Whether each of so many rows of the data had one query, with no axis beside that of the rows."""
        return self.axes == 2 and self.seen + self.dropped == rows

    def as_many_as(self, other: Collector) -> bool:
        """Whether both have a query for each of the same positions (N, T)."""
        both = self.by_position and other.by_position
        return both and self.seen + self.dropped == other.seen + other.dropped

    @property
    def by_position(self) -> bool:
        """Whether its queries are those of the positions (N, T) of a sequence."""
        rows = self.site.layout is Layout.ROWS and not self.site.chosen
        return self.sequences and rows and self.axes == 3

    @property
    def seen(self) -> int:
        """The rows that came and were finite."""
        return self.sample.seen if self.sample else 0

    @one_thread()  # of products that a covariance is summed from
    def add(self, query: Array, feature_map: Array | None, valid: Array | None = None) -> None:
        """Take in the queries (…, d) of a batch; where positions are padding, `valid` (N, T) is false."""
        rows = query.reshape(-1, query.shape[-1]) if query.ndim else query.reshape(1, 1)  # (n, d)
        self.axes = max(self.axes, query.ndim)
        sample = self.sample or self._begin(rows.shape[1])
        if rows.shape[1] != self.width:
            raise UserError(
                f"site {self.site.name!r} is {self.width} wide on some calibration data and {rows.shape[1]} on others",
                "use data of one size, or another site or layout",
            )
        rows = _unpadded(rows, query, valid)
        finite = statistics.finite_rows(rows)
        self.dropped += int(len(rows) - finite.sum())
        rows = rows[finite]
        sample.add(rows)
        self.moments.add(rows)
        if feature_map is not None:
            self.map_shape = feature_map.shape[1:]
        if self.site.layout is Layout.POOLED and feature_map is not None:
            positions = feature_map.transpose(*self.site.others, self.site.axis)
            channels = positions.reshape(-1, self.width).astype(np.float32)
            channels = _unpadded(channels, positions, valid)
            self.channel_moments.add(channels[statistics.finite_rows(channels)])

    def _begin(self, width: int) -> statistics.RowSample:
        self.width = width
        self.sample = statistics.RowSample(self._capacity(self.settings), width, self.settings.seed)
        asked = self.settings.metric_at(self.site.chosen)
        open_ = (
            metrics_of_positions(width, passes=False)
            if self.by_position
            else metrics_for(width)
            if self.chooses
            else ()
        )
        candidates = open_ if asked == "auto" else (asked,)
        self.moments = statistics.Moments(width, covariance=any(map(is_whitened, candidates)))
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


def _unpadded(rows: Array, queries: Array, valid: Array | None) -> Array:
    """The rows (n, d) of queries (…, d) that are no padding."""
    kept = valid_queries(valid, queries)
    return rows if kept is None else rows[kept]


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
            self.width = rows.shape[1]
        if rows.shape[1] != self.width:
            raise UserError(
                f"rows of the calibration data hold {self.width} and {rows.shape[1]} numbers, so they have no distance",
                "use data of one size, or leave `length_scale` at `site`",
            )
        self.sample.add(rows[statistics.finite_rows(rows)])
