"""Step 3, calibrate: one streaming pass over the data fits every site.

Per site, with z the query and τ the scale:

    prior variance   c_i² = Var(z_i) over the data
    length scale     ℓ = median distance between data points (at the site, or of the inputs)
    inducing points  M of them, chosen from a bounded random sample of the rows
    scale            τ = 0.05 / median of the leave-one-out share s
    own variance     c² τ s / (1 + max(τ/A - 1, 0) s): τ s for small shares, min(τ, A) for s = 1

The ceiling A is 1 where values are predicted: far from the data the prior variance remains. Where classes
are, it is 100: an input must be able to lose all confidence, however large its logits.

Memory is bounded whatever the size of the data: moments are running sums, rows are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx
from onnxruntime import InferenceSession

from gapa_onnx import inducing, statistics
from gapa_onnx.analyse import Plan
from gapa_onnx.data import DataSource
from gapa_onnx.errors import UserError
from gapa_onnx.inference import row_count
from gapa_onnx.load import SourceModel
from gapa_onnx.op.approximation import rounding_error, share_error
from gapa_onnx.op.index import Index, build_index
from gapa_onnx.op.neighbourhoods import choose
from gapa_onnx.op.storage import Storage, fit_storage
from gapa_onnx.qdq import reading_graph
from gapa_onnx.runtime import first_line, open_session
from gapa_onnx.settings import Settings
from gapa_onnx.sites import Layout, Site, arrange
from gapa_onnx.splice import splice
from gapa_onnx.tasks import Task

SAMPLE_BYTES = 256 << 20  # rows kept for choosing inducing points, all sites together
INPUT_SAMPLE_BYTES = 64 << 20  # rows kept for the median distance of the inputs
MOST_BATCH_ROWS = 256
BATCH_NUMBERS = 1 << 20  # input numbers per batch: 256 rows of 64 x 64 pixels
HELD_OUT_ROWS = 2000  # rows for leave-one-out shares and for the recall of an index
MEDIAN_SHARE = 0.05  # target of the default scale: docs/defaults.md
CEILINGS = {"classes": 100.0, "values": 1.0}  # of the own variance, in units of c²
SMALLEST_STD = 1e-6  # of a neuron; a unit that never moves still gets a prior

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class SiteFit:
    """All numbers of one site."""

    site: Site
    index: Index = field(repr=False)
    k: int
    length_scale: float
    jitter: float
    scale: float  #: τ
    ceiling: float  #: A
    prior_var: np.ndarray = field(repr=False)  #: c², in a shape that broadcasts against the tensor
    whitening: tuple[np.ndarray, np.ndarray] | None = field(
        repr=False
    )  #: centre (d,) and map (d, r) of queries
    sizes: np.ndarray | None = field(repr=False)  #: rows that each inducing point is the mean of
    share_quantiles: dict[str, float] = field(repr=False)  #: of the leave-one-out share
    share_error: float  #: largest error of s that the index makes on held-out rows
    storage: Storage = field(repr=False)  #: of the inducing points
    storage_error: float  #: by which s moves at most on held-out rows since the points are rounded
    rows: int

    @property
    def damping(self) -> float:
        """max(τ/A - 1, 0)"""
        return max(self.scale / self.ceiling - 1, 0.0)

    def own_share(self, share: np.ndarray) -> np.ndarray:
        """The own variance in units of c², for shares s."""
        return self.scale * share / (1 + self.damping * share)

    def share_for(self, own: np.ndarray) -> np.ndarray:
        """The s that an own variance in units of c² belongs to."""
        return own / (self.scale - self.damping * own)

    def leave_one_out(self, queries: np.ndarray) -> np.ndarray:
        """s for calibration rows (q, d), each as if it had not been among the data -> (q,)."""
        return _leave_one_out(
            self.index,
            self.storage,
            queries,
            self.k,
            self.length_scale,
            self.jitter,
            self.sizes,
            self._search,
        )

    @cached_property
    def _search(self) -> statistics.NearestSearch:
        return statistics.NearestSearch(self.index.points)


@dataclass(frozen=True)
class Calibration:
    """What the data said."""

    fits: tuple[SiteFit, ...]
    rows: int  #: batch rows read
    batch_rows: int  #: rows that were fed at a time
    dropped: int  #: query rows left out for a NaN or an infinity
    description: str


@dataclass(frozen=True)
class Collected:
    """What one pass over the data left of it: moments and row samples of every site."""

    collectors: tuple[_Collector, ...] = field(repr=False)
    inputs: _InputSample | None = field(repr=False)
    classes: bool  #: whether some output is a choice of classes
    rows: int  #: batch rows read
    batch_rows: int  #: rows that were fed at a time
    description: str


def calibrate(
    plan: Plan, data: DataSource, settings: Settings, progress: Progress = lambda text, done: None
) -> Calibration:
    """Run the source model over the data and fit each site."""
    return fit(collect(plan, data, settings, progress), settings, progress)


def collect(
    plan: Plan, data: DataSource, settings: Settings, progress: Progress = lambda text, done: None
) -> Collected:
    """The one pass over the data: the source model runs, and what the fit needs of its activations is kept."""
    collectors = tuple(_Collector(site, settings, len(plan.sites)) for site in plan.sites)
    inputs = _InputSample(settings.seed) if settings.length_scale == "input" else None
    rows, batch_rows = _stream(plan, data, collectors, inputs, progress)
    classes = any(head.task not in (Task.REGRESSION, Task.NONE) for head in plan.heads)
    return Collected(collectors, inputs, classes, rows, batch_rows, data.description)


def fit(
    collected: Collected, settings: Settings, progress: Progress = lambda text, done: None
) -> Calibration:
    """Fit each site to what was collected.

    The settings may ask for another index, solver or storage than those it was collected with, and for fewer
    inducing points or neighbours: the result is the same as that of `calibrate`, to the bit, without another
    pass. Sites, metric, length scale and seed must be the same.
    """
    fits = []
    for number, collector in enumerate(collected.collectors):
        progress(f"fitting {collector.site.name}", number / len(collected.collectors))
        fits.append(_fit(collector, settings, collected))
    progress("fitting", 1.0)
    dropped = sum(collector.dropped for collector in collected.collectors)
    return Calibration(tuple(fits), collected.rows, collected.batch_rows, dropped, collected.description)


# ------------------------------------------------------------------ the pass


def _stream(
    plan: Plan,
    data: DataSource,
    collectors: Sequence[_Collector],
    inputs: _InputSample | None,
    progress: Progress,
) -> tuple[int, int]:
    session, queries, maps = _exposing_session(plan.source, plan.sites)
    rows, batch_rows = 0, _batch_rows(session, data)
    for batch in data.batches(batch_rows):
        try:
            answers = session.run([*queries, *maps], batch)
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise UserError(
                f"the model failed on the calibration data: {first_line(error)}",
                "check the shape and range of the data",
            ) from error
        rows += row_count(batch)
        tensors = dict(zip([*queries, *maps], answers))
        for query, collector in zip(queries, collectors):
            collector.add(tensors[query], tensors.get(collector.site.query))
        if inputs is not None:
            inputs.add(batch)
        progress("reading calibration data", rows / data.rows if data.rows else 0.0)
    return rows, batch_rows


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


def _exposing_session(
    source: SourceModel, sites: Sequence[Site]
) -> tuple[InferenceSession, list[str], list[str]]:
    """The source model with the queries of each site as outputs, and the maps that are pooled or flattened."""
    graph = reading_graph(source)
    tensors = source.graph.tensors()
    queries = []
    for site in sites:
        with graph.scope(f"{site.prefix}/query"):
            tensor = graph.tensor(site.query, tensors[site.query].dtype or np.float32)
            queries.append(graph.emit("Identity", arrange(graph, site, tensor)))
    maps = list(dict.fromkeys(site.query for site in sites if site.layout in (Layout.POOLED, Layout.FLAT)))
    names = [query.name for query in queries]
    existing = {value.name for value in source.proto.graph.output}
    new = [name for name in dict.fromkeys([*names, *maps]) if name not in existing]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in new]
    return open_session(splice(source.proto, graph.to_proto(queries), outputs), source.label), names, maps


class _Collector:
    """Running statistics of one site."""

    def __init__(self, site: Site, settings: Settings, sites: int):
        self.site = site
        self.settings = settings
        self.budget = SAMPLE_BYTES // sites
        self.sample: statistics.RowSample | None = None  # made when the first batch tells the width
        self.dropped = 0

    def add(self, query: np.ndarray, feature_map: np.ndarray | None) -> None:
        rows = query.reshape(-1, query.shape[-1]) if query.ndim else query.reshape(1, 1)  # (n, d)
        if self.sample is None:
            self._begin(rows.shape[1])
        elif rows.shape[1] != self.width:
            raise UserError(
                f"site {self.site.name!r} is {self.width} wide on some calibration data and {rows.shape[1]} on others",
                "use data of one size, or another site or layout",
            )
        finite = statistics.finite_rows(rows)
        self.dropped += int(len(rows) - finite.sum())
        rows = rows[finite]
        self.sample.add(rows)
        self.moments.add(rows)
        if feature_map is not None:
            self.map_shape = feature_map.shape[1:]
        if self.site.layout is Layout.POOLED:
            channels = np.moveaxis(feature_map, 1, -1).reshape(-1, feature_map.shape[1]).astype(np.float32)
            self.channel_moments.add(channels[statistics.finite_rows(channels)])

    def _begin(self, width: int) -> None:
        self.width = width
        self.sample = statistics.RowSample(self._capacity(self.settings), width, self.settings.seed)
        self.moments = statistics.Moments(width, covariance=self.settings.metric == "whitened")
        self.channel_moments = statistics.Moments(width)  # used where the query is a pooled map

    def rows(self, settings: Settings) -> np.ndarray:
        """The sample that these settings call for: (n, width)."""
        return self.sample.smaller(self._capacity(settings))

    def _capacity(self, settings: Settings) -> int:
        capacity = max(settings.k + 1, self.budget // (4 * self.width))
        if settings.inducing != "all":
            capacity = min(capacity, max(256 * settings.most_points, 2 * HELD_OUT_ROWS))
        return capacity


class _InputSample:
    """A sample of the model's inputs, each row flattened, for their median distance."""

    def __init__(self, seed: int):
        self.seed = seed
        self.sample: statistics.RowSample | None = None

    def add(self, batch: dict[str, np.ndarray]) -> None:
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


# ------------------------------------------------------------------- the fit


def _fit(collector: _Collector, settings: Settings, collected: Collected) -> SiteFit:
    site = collector.site
    _require_rows(collector, settings)
    rows = collector.rows(settings)  # (n, d)
    whitening = None
    if settings.metric == "whitened":
        moments = collector.moments
        whitening = (moments.mean.astype(np.float32), statistics.whitening(moments.mean, moments.covariance))
        rows = (rows - whitening[0]) @ whitening[1]
    length_scale = _length_scale(site, rows, settings, collected.inputs)
    wanted = settings.points_for(rows.shape[1], site.many)
    chosen = inducing.select(settings.inducing, rows, wanted, settings.seed)
    storage = fit_storage(settings.points, chosen)
    points = _as_stored(storage, chosen)
    if len(points) < settings.k:
        raise UserError(
            f"site {site.name!r} has only {len(points)} distinct calibration rows, fewer than K = {settings.k}",
            f"give more varied data, or --k {len(points)}",
        )
    held_out = _held_out(rows, settings.seed)
    index = _build_index(points, rows, held_out, length_scale, settings)
    sizes = inducing.cluster_sizes(rows, index.points) if settings.inducing == "kmeans" else None
    kernel = {"length_scale": length_scale, "jitter": settings.jitter, "k": settings.k}
    shares = _leave_one_out(index, storage, held_out, settings.k, length_scale, settings.jitter, sizes)
    return SiteFit(
        site=site,
        index=index,
        k=settings.k,
        length_scale=length_scale,
        jitter=settings.jitter,
        scale=_scale(settings, shares),
        ceiling=CEILINGS["classes" if collected.classes else "values"],
        prior_var=_prior_var(collector),
        whitening=whitening,
        sizes=sizes,
        share_quantiles=statistics.quantile_table(shares),
        share_error=share_error(index, held_out, **kernel).max,
        storage=storage,
        storage_error=rounding_error(points, chosen, held_out, **kernel).max,
        rows=collector.sample.seen,
    )


def _as_stored(storage: Storage, chosen: np.ndarray) -> np.ndarray:
    """The inducing points (≤ M, d) that the file holds for those that were chosen (M, d).

    Everything else is fitted to these. Points that rounding makes equal are one point.
    """
    if storage.format == "float32":
        return chosen
    rounded = storage.rounded(chosen)
    return rounded[inducing.distinct_rows(rounded)]


def _build_index(
    points: np.ndarray, rows: np.ndarray, held_out: np.ndarray, length_scale: float, settings: Settings
) -> Index:
    return build_index(
        "local" if settings.cached else settings.index,
        points,
        k=settings.k,
        held_out=held_out,
        seed=settings.seed,
        search=settings.index,
        groups=lambda listed, k: choose(listed, rows, k, length_scale, settings.jitter, settings.seed),
    )


def _leave_one_out(
    index: Index,
    storage: Storage,
    rows: np.ndarray,
    k: int,
    length_scale: float,
    jitter: float,
    sizes: np.ndarray | None,
    search: statistics.NearestSearch | None = None,
) -> np.ndarray:
    """The operator's s for calibration rows (q, d), each as if it had not been among the data -> (q,)."""
    twins = None if storage.format == "float32" else storage.rounded(rows)
    return statistics.leave_one_out_share(
        rows, index.points, k, length_scale, jitter, sizes, index.groups, twins, search
    )


def _require_rows(collector: _Collector, settings: Settings) -> None:
    site, seen = collector.site, collector.sample.seen if collector.sample else 0
    if collector.dropped > seen:
        raise UserError(
            f"{collector.dropped} of {collector.dropped + seen} calibration rows at site {site.name!r} hold NaN or infinity",
            "check the data; at most half of the rows may be dropped",
        )
    if seen < settings.k:
        raise UserError(
            f"the calibration data give {seen} rows at site {site.name!r}, fewer than K = {settings.k}",
            f"give more data, or --k {max(1, seen // 2)}",
        )


def _length_scale(site: Site, rows: np.ndarray, settings: Settings, inputs: _InputSample | None) -> float:
    if isinstance(settings.length_scale, float):
        return settings.length_scale
    sample = inputs.sample.rows if inputs is not None else rows
    length_scale = float(np.float32(statistics.median_distance(sample, seed=settings.seed)))
    if not length_scale > 0:
        what = "the inputs are" if inputs is not None else f"site {site.name!r} is"
        raise UserError(
            f"{what} constant over the calibration data, so distances mean nothing there",
            "choose another site with --sites, give more varied data, or a number for --length-scale",
        )
    return length_scale


def _held_out(rows: np.ndarray, seed: int) -> np.ndarray:
    if len(rows) <= HELD_OUT_ROWS:
        return rows
    chosen = np.random.default_rng(seed).choice(len(rows), HELD_OUT_ROWS, replace=False)
    return rows[np.sort(chosen)]


def _scale(settings: Settings, shares: np.ndarray) -> float:
    if settings.scale == "none":
        return 1.0
    if isinstance(settings.scale, float):
        return settings.scale
    # The floor is for data whose every row has a near twin: s is then at the level of the jitter.
    return float(np.float32(MEDIAN_SHARE / max(float(np.median(shares)), settings.jitter)))


def _prior_var(collector: _Collector) -> np.ndarray:
    """c² in a shape that broadcasts against the site's tensor."""
    site = collector.site
    moments = collector.channel_moments if site.layout is Layout.POOLED else collector.moments
    var = np.maximum(moments.std, SMALLEST_STD).astype(np.float32) ** 2
    if site.layout in (Layout.POSITIONS, Layout.POOLED):
        return var.reshape(-1, *[1] * (site.rank - 2))
    if site.layout is Layout.FLAT:
        return var.reshape(collector.map_shape)
    return var
