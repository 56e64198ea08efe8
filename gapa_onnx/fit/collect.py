"""The pass over the calibration data: what every site needs of them.

Memory is bounded whatever the size of the data: moments are running sums, rows are sampled. The data come in stretches of
whole batches, and what is kept of each depends on nothing outside of it (`streams`), so that several machines can read a
shard each: `Pass.join` puts together what they found, and a pass on one machine is one shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch, DataSource
from gapa_onnx.data.held_out import batch_digests
from gapa_onnx.data.strange import strange_batches
from gapa_onnx.errors import UserError
from gapa_onnx.fit.choosing import JUDGED
from gapa_onnx.fit.collector import Collector, InputSample, unpadded
from gapa_onnx.fit.kept_rows import ROWS, KeptRows, Purpose, is_fixed
from gapa_onnx.fit.reader import QueryReader, query_reader
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.plan.head import Task
from gapa_onnx.plan.witnesses import any_has_positions
from gapa_onnx.progress import Progress, silent
from gapa_onnx.sessions.feeding import TENSORS_PER_OUTPUT, Feeding, feeding, is_words
from gapa_onnx.sessions.inference import row_count
from gapa_onnx.settings import Settings
from gapa_onnx.variance.masks import tensor_of, valid_positions
from gapa_onnx.variance.sites import Site

FEWEST_CHOSEN = 20  # queries of candidates for each neighbour; as many points as a site has at least
STRETCH = 64  # rows at least that sums are kept of by themselves: merging them costs as much as some ten rows
LOOKED_AT = 16  # rows of the first batch, which tell how many queries a row has, and how large it is
MOST_QUERIES = 20_000  # of all sites together, for 2000 rows: each is a solve of K x K
FEWEST_ROWS = 32  # where a row has very many queries
FEWEST_IMAGES = 200  # of a detector, whose images have a score of their own
MOST_STRANGE_BYTES = 64 << 20
MOST_STRANGE_WORDS = 1 << 14  # of texts, which a model runs on once for each kind of strangeness

Known = Mapping[
    Purpose, Array
]  #: which rows may be taken, (rows,) bool, for purposes that not every row is good for


@dataclass(frozen=True)
class Shard:
    """One of so many parts of the data, counted from 1."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise UserError(f"there is no shard {self}", "shards of eight are 1/8 to 8/8")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def of(cls, text: str) -> Shard:
        """From `i/n`."""
        number, slash, count = text.partition("/")
        if not (slash and number.strip().isdigit() and count.strip().isdigit()):
            raise UserError(f"{text!r} is no shard", "shards of eight are 1/8 to 8/8")
        return cls(int(number), int(count))

    def ends(self, rows: int) -> tuple[int, int]:
        """The stretches that begin at the first of these rows, or behind it, and before the second are its own."""
        return rows * (self.number - 1) // self.count, rows * self.number // self.count


@dataclass
class Pass:
    """What is kept of the stretches that were read."""

    collectors: tuple[Collector, ...]
    inputs: InputSample | None
    kept: KeptRows
    rows: int  #: batch rows read
    fed: Feeding
    reader: QueryReader | None = None  #: that has read them, where it was here
    digests: Array = field(default_factory=lambda: np.empty(0, np.uint64))  #: (rows,) where a shard was read

    def begin(self, stretch: int) -> None:
        for collector in self.collectors:
            collector.begin(stretch)
        self.kept.begin(stretch)
        if self.inputs is not None:
            self.inputs.begin(stretch)

    def join(self, later: Pass) -> None:
        """Take in what was found on the stretches that come next."""
        for one, other in zip(self.collectors, later.collectors, strict=True):
            one.join(other)
        if self.inputs is not None and later.inputs is not None:
            self.inputs.join(later.inputs)
        self.kept.join(later.kept)
        self.rows += later.rows


@dataclass(frozen=True)
class Material:
    """What sites are fitted to: all that a pass has left, and queries of strange inputs."""

    collectors: tuple[Collector, ...] = field(repr=False)
    inputs: InputSample | None = field(repr=False)
    classes: bool  #: whether some output is a choice of classes
    rows: int  #: batch rows read
    fed: Feeding = field(repr=False)  #: how the model takes the data
    opset: int  #: of the model
    reader: QueryReader = field(repr=False)  #: for rows that are looked at again
    kept: KeptRows = field(repr=False)  #: these rows
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
    known: Known | None = None,
) -> Material:
    """The one pass over the data: the source model runs, and what the fit needs of its activations is kept.

    Which geometry is right at a place is found by `strange` inputs, or by some that are made of the data.
    """
    return material(plan, read(plan, data, settings, progress, known), settings, progress, strange)


def collectors_of(plan: Plan, settings: Settings) -> tuple[Collector, ...]:
    """What nothing has been read for yet."""
    sequences = any_has_positions(plan.heads)
    return tuple(Collector(site, settings, len(plan.places), sequences) for site in plan.places)


def read(
    plan: Plan,
    data: DataSource,
    settings: Settings,
    progress: Progress = silent,
    known: Known | None = None,
    shard: Shard | None = None,
    threads: int = 0,
) -> Pass:
    """Run the model over the data, or over a shard of them, on so many threads; 0 for all cores."""
    collectors = collectors_of(plan, settings)
    inputs = InputSample(settings.seed) if settings.length_scale == "input" else None
    reader = query_reader(plan, plan.places, settings, threads)
    fed = feeding(reader.session, data, TENSORS_PER_OUTPUT)
    if fed.size is not None:  # else the model's own answers tell how many rows a batch has
        reader = reader.pruned()
    if shard is not None:
        _require_cut(plan, fed)
    most = _most_rows(reader, fed, collectors, known or {})
    kept = KeptRows(settings.seed, most, known, is_fixed(fed.inputs))
    found = Pass(collectors, inputs, kept, 0, fed, reader)
    _stream(reader, found, progress, shard)
    reader.rest()
    return found


def _require_cut(plan: Plan, fed: Feeding) -> None:
    """Refuse data that cannot be read in shards."""
    reason = None
    if fed.size is None:
        reason = "the model takes batches as they were given, so that only its answers tell how many rows there are"
    elif fed.rows is None:
        reason = "only reading them all tells how many rows there are"
    elif any(site.chosen for site in plan.places):
        reason = "places of a detector that few candidates come from are read a second time"
    if reason is not None:
        raise UserError(
            f"{fed.description}: these data cannot be read in shards: {reason}",
            "convert on one machine, or save the data as .npy, .npz or .parquet",
        )


def material(
    plan: Plan,
    found: Pass,
    settings: Settings,
    progress: Progress = silent,
    strange: DataSource | None = None,
) -> Material:
    """What a whole pass has left, with queries of strange inputs, by which geometries are chosen."""
    fed, rows = found.fed, found.rows
    reader = found.reader or query_reader(plan, plan.places, settings).pruned()
    reader, collectors = _going_together(plan, reader, found.collectors, rows)
    collectors = _with_all_positions(plan, collectors, fed, settings, progress)
    classes = any(head.task not in (Task.REGRESSION, Task.NONE) for head in plan.heads)
    queries: dict[str, dict[str, Array]] = {}
    judged = [c for c in collectors if c.chooses and c.axes == 2]  # of the others no geometry is chosen
    if judged:
        mask = next((site.mask for site in plan.places if site.mask is not None), None)
        batches = _made_strange(found.kept, fed, mask) if strange is None else _given(strange, fed)
        queries = strange_queries(_reader_of(judged, collectors, reader, fed), judged, batches)
    reader.rest()
    return Material(
        collectors,
        found.inputs,
        classes,
        rows,
        fed,
        plan.source.opset,
        reader,
        found.kept,
        len(collectors) - len(plan.sites),
        queries,
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
    second = Pass(tuple(again.values()), None, KeptRows(settings.seed, {}), 0, fed)
    _stream(query_reader(plan, sites, settings), second, progress)
    return tuple(again.get(collector.site.output, collector) for collector in collectors)


def _most_rows(
    reader: QueryReader, fed: Feeding, collectors: Sequence[Collector], known: Known
) -> dict[Purpose, int]:
    """How many rows are kept for each purpose: fewer where each of them has many queries. The first rows of the data tell."""
    batch = next(fed.batches(LOOKED_AT))
    answers, rows = reader.read(batch)
    queries = 0
    for name, collector in zip(reader.names, collectors):
        found = answers[name]
        held = found.reshape(-1, found.shape[-1]) if found.ndim else found.reshape(1, 1)
        queries += len(unpadded(held, found, reader.valid(collector.site, batch, answers)))
    fewest = FEWEST_IMAGES if any(collector.site.chosen for collector in collectors) else FEWEST_ROWS
    most = {}
    for purpose in (Purpose.WEIGHING, Purpose.SCORES, *known):
        share = MOST_QUERIES * ROWS[purpose] / ROWS[Purpose.SCORES] * rows / max(queries, 1)
        most[purpose] = min(ROWS[purpose], max(fewest, int(share)))
    if any(collector.chooses for collector in collectors) and not batch.whole:
        most[Purpose.STRANGE] = _most_strange(batch, rows)
    return most


def _most_strange(batch: Batch, rows: int) -> int:
    """How many rows strange ones are made of: fewer where they are large."""
    size = sum(array.nbytes for name, array in batch.items() if name not in batch.constants) / rows
    words = max((array.shape[1] for array in batch.values() if is_words(array)), default=1)
    fits = min(int(MOST_STRANGE_BYTES / max(size, 1)), MOST_STRANGE_WORDS // max(words, 1))
    return max(1, min(ROWS[Purpose.STRANGE], fits))


def _stretches(fed: Feeding, shard: Shard | None) -> Iterator[tuple[int, int, Batch]]:
    """The batches of a shard, or all: number of the stretch, position of the first row, and what is fed. Whoever reads
    a batch as given has to say how many rows it has."""
    # where the model fixes the size of a batch, that is it
    rows = row_count(next(fed.batches())) if fed.size and is_fixed(fed.inputs) else fed.size
    several = 1 if rows is None else -(-STRETCH // rows)
    first, end = shard.ends(fed.rows or 0) if shard else (0, 0)
    start, inside = 0, True
    for number, batch in enumerate(fed.batches()):
        if shard and number % several == 0:
            inside = first <= start < end
            if start >= end:
                return
        if inside:
            yield number // several, start, batch
        start += row_count(batch)


def _stream(reader: QueryReader, into: Pass, progress: Progress, shard: Shard | None = None) -> None:
    """Read the batches of a shard, or all."""
    first, end = shard.ends(into.fed.rows or 0) if shard else (0, into.fed.rows or 0)
    counts: list[int] = []
    digests: list[Array] = []
    for stretch, start, batch in _stretches(into.fed, shard):
        answers, batch.rows = reader.read(batch)
        counts.append(batch.rows)
        into.begin(stretch)
        for query, collector in zip(reader.names, into.collectors):
            valid = reader.valid(collector.site, batch, answers)
            collector.add(answers[query], answers.get(collector.site.query), valid)
        if into.inputs is not None:
            into.inputs.add(batch)
        into.kept.add(batch, start, batch.rows)
        if shard:
            digests.append(batch_digests(batch))
        progress("reading calibration data", min(1.0, sum(counts) / (end - first)) if end > first else 0.0)
    into.rows = sum(counts)
    into.digests = np.concatenate(digests) if digests else into.digests
    if shard is None:
        into.fed = replace(into.fed, counted=tuple(counts))


def _made_strange(kept: KeptRows, fed: Feeding, mask: str | None) -> Iterator[tuple[str, Batch]]:
    """Strange versions of rows by kind, in batches of exactly so many as the model is fed or, at the end, fewer. `mask`
    tells padding, where it is fed."""
    alike: dict[object, list[tuple[Batch, dict[str, Array]]]] = {}
    for row, constants in kept.single(Purpose.STRANGE):
        alike.setdefault(tuple((name, array.shape) for name, array in row.items()), []).append(
            (row, constants)
        )
    for rows in alike.values():
        whole = {name: np.stack([row[name] for row, _ in rows]) for name in rows[0][0]}
        tensor = None if mask is None else whole.get(tensor_of(mask))
        valid = None if mask is None or tensor is None else valid_positions(mask, tensor)
        for kind, made in strange_batches(whole, kept.seed, valid):
            for start in range(0, len(rows), fed.batch_rows):
                part = {name: array[start : start + fed.batch_rows] for name, array in made.items()}
                constants = rows[start][1]
                yield kind, Batch(part | constants, min(fed.batch_rows, len(rows) - start), False, constants)


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
            rows = unpadded(queries, answers[name], reader.valid(collector.site, batch, answers))
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
