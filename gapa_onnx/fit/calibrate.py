"""Step 3, calibrate: what one pass over the data left (`collect`) fits every site.

Per site, with z the query and τ the scale:

    prior variance   c_i² = Var(z_i) over the data
    length scale     ℓ = median distance between data points (at the site, or of the inputs)
    inducing points  M of them, chosen from a bounded random sample of the rows
    scale            τ = 0.05 / median of the leave-one-out share s
    own variance     c² τ s / (1 + max(τ/A - 1, 0) s): τ s for small shares, min(τ, A) for s = 1

The ceiling A is 1 where values are predicted: far from the data the prior variance remains. Where classes
are, it is 100: an input must be able to lose all confidence, however large its logits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import DataSource
from gapa_onnx.errors import UserError
from gapa_onnx.fit import inducing, statistics
from gapa_onnx.fit.choosing import USUAL, choose_geometry, metrics_for, metrics_of_positions
from gapa_onnx.fit.collect import Known, Material, collect
from gapa_onnx.fit.collector import HELD_OUT_ROWS, Collector, InputSample
from gapa_onnx.fit.geometry import Geometry, geometry_of, is_whitened
from gapa_onnx.fit.kept_rows import KeptRows
from gapa_onnx.fit.reader import QueryReader
from gapa_onnx.op import prepared
from gapa_onnx.op.approximation import rounding_error, share_error
from gapa_onnx.op.body import ANY_SIZE_OPSET
from gapa_onnx.op.factors import with_factors
from gapa_onnx.op.index import Index, build_index
from gapa_onnx.op.neighbourhoods import choose
from gapa_onnx.op.storage import Storage, fit_storage
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.progress import Progress, silent
from gapa_onnx.sessions.feeding import Feeding
from gapa_onnx.settings import Settings
from gapa_onnx.threads import one_thread
from gapa_onnx.variance.sites import Layout, Site

MEDIAN_SHARE = 0.05  # target of the default scale: docs/defaults.md
CEILINGS = {"classes": 100.0, "values": 1.0}  # of the own variance, in units of c²
CHOOSING_SHARE = 0.4  # of a fit's progress that choosing points takes; measured, 0.15 to 0.5 of its time
SMALLEST_STD = 1e-6  # of a neuron; a unit that never moves still gets a prior


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
    prior_var: Array = field(repr=False)  #: c², in a shape that broadcasts against the tensor
    geometry: Geometry  #: how queries are compared
    sizes: Array | None = field(repr=False)  #: rows that each inducing point is the mean of
    least_rows: int  #: the fewest of these; 1 where rows themselves are among the points
    share_quantiles: dict[str, float] = field(repr=False)  #: of the leave-one-out share
    share_error: float  #: largest error of s that the index makes on held-out rows
    storage: Storage = field(repr=False)  #: of the inducing points
    storage_error: float  #: by which s moves at most on held-out rows since the points are rounded
    rows: int
    single: bool = True  #: whether each row of the data has one query
    by_position: bool = False  #: or one for each position (N, T) of a sequence
    lift: float = 1.0  #: of what witnesses raise the own variance by; more where τ was held back
    #: mean AUROC of left-out rows against strange ones, by the metric that was tried; empty where none was chosen by it
    metrics: Mapping[str, float] = field(default_factory=dict)
    #: leave-one-out shares of the held-out rows, by the digest of a row: of few data, later steps ask for them again
    judged: Mapping[bytes, float] = field(default_factory=dict, repr=False)

    @property
    def damping(self) -> float:
        """max(τ/A - 1, 0)"""
        return max(self.scale / self.ceiling - 1, 0.0)

    def as_compared(self, queries: Array) -> Array:
        """Queries (…, d) as they are compared with the inducing points."""
        return self.geometry(queries)

    def leave_one_out(self, queries: Array) -> Array:
        """s for calibration rows (q, d), each as if it had not been among the data -> (q,)."""
        shares = np.array([self.judged.get(_digest(row), np.nan) for row in queries], np.float64)
        new = np.flatnonzero(np.isnan(shares))
        if len(new):
            shares[new] = _leave_one_out(
                self.index,
                self.storage,
                queries[new],
                self.k,
                self.length_scale,
                self.jitter,
                self.sizes,
                self._search,
            )
        return shares

    def leave_sample_out(self, queries: Array) -> Array:
        """s for all queries (q, d) of one sample, as if none of them had been among the data -> (q,).

        Neighbouring places of an image look alike: with the others still there, a place would seem known.
        """
        if not len(queries):
            return np.empty(0)
        points = self.index.points
        owners = self._search.candidates(queries, 1)[:, 0]
        others = statistics.points_without(points, self.sizes, queries, owners)
        return statistics.leave_one_out_share(
            queries, others, self.k, self.length_scale, self.jitter, None, self.index.groups
        )

    @cached_property
    def _search(self) -> statistics.NearestSearch:
        return statistics.NearestSearch(self.index.points)


@dataclass(frozen=True)
class Calibration:
    """What the data said."""

    fits: tuple[SiteFit, ...]  #: of the sites
    rows: int  #: batch rows read
    fed: Feeding = field(repr=False)  #: how the model takes the data
    dropped: int  #: query rows left out for a NaN or an infinity, at the site where they were most
    description: str
    reader: QueryReader = field(repr=False)  #: for rows that are looked at again
    kept: KeptRows = field(repr=False)  #: these rows
    witnesses: tuple[SiteFit, ...] = ()  #: of places that pass no variance on

    @property
    def places(self) -> tuple[SiteFit, ...]:
        """In the order in which the reader has their queries."""
        return (*self.fits, *self.witnesses)


def calibrate(
    plan: Plan,
    data: DataSource,
    settings: Settings,
    progress: Progress = silent,
    strange: DataSource | None = None,
    known: Known | None = None,
) -> Calibration:
    """Run the source model over the data and fit each site and witness. `known` tells which rows are for what only those
    with a truth are good for."""
    return fit(collect(plan, data, settings, progress, strange, known), settings, progress)


@one_thread()
def fit(material: Material, settings: Settings, progress: Progress = silent) -> Calibration:
    """Fit each site to what was collected.

    The settings may ask for another index, solver or storage than those it was collected with, and for fewer
    inducing points or neighbours: the result is the same as that of `calibrate`, to the bit, without another
    pass. Sites, metric, length scale and seed must be the same.
    """
    fits = []
    sites = len(material.collectors)
    for number, collector in enumerate(material.collectors):

        def report(what: str, done: float, name: str = collector.site.name, before: int = number) -> None:
            progress(f"{what} {name}", (before + done) / sites)

        fits.append(_fit(collector, settings, material, report))
    progress("fitting", 1.0)
    dropped = max(collector.dropped for collector in material.collectors)
    sites = len(fits) - material.witnesses
    return Calibration(
        tuple(fits[:sites]),
        material.rows,
        material.fed,
        dropped,
        material.fed.description,
        material.reader,
        material.kept,
        tuple(fits[sites:]),
    )


def _fit(collector: Collector, settings: Settings, material: Material, progress: Progress) -> SiteFit:
    site, witness = collector.site, not material.propagates(collector)
    settings = settings.of_witness() if witness and material.opset >= ANY_SIZE_OPSET else settings
    progress("fitting", 0.0)
    _require_rows(collector, settings)
    rows = collector.rows(settings)  # (n, d)
    how, metrics = _geometry(collector, rows, settings, material)
    rows = how(rows)
    length_scale = _length_scale(site, rows, settings, material.inputs)
    pooled = site.layout is Layout.POOLED
    wanted = settings.points_for(rows.shape[1], site.many, site.chosen, witness, pooled)
    settings = settings.within_space(rows.shape[1])
    chosen = inducing.select(
        settings.inducing,
        rows,
        wanted,
        settings.seed,
        lambda done: progress("choosing points at", CHOOSING_SHARE * done),
    )
    chosen = inducing.of_many(rows, chosen, settings.private)
    progress("fitting", CHOOSING_SHARE)
    storage = fit_storage(settings.points, chosen)
    points = _as_stored(storage, chosen)
    if len(points) < settings.k:
        raise UserError(
            f"site {site.name!r} has only {len(points)} distinct calibration rows, fewer than K = {settings.k}"
            if settings.private == 1
            else f"site {site.name!r} has only {len(points)} means of {settings.private} rows or more, fewer than "
            f"K = {settings.k}",
            f"give more varied data, or choose `k={len(points)}`",
        )
    held_out = _held_out(rows, settings.seed)
    index = _build_index(points, rows, held_out, length_scale, settings, _search(material, settings))
    if settings.portable != "none" and material.opset >= prepared.OLDEST_OPSET:
        index = with_factors(index, settings.k, length_scale, settings.jitter)
    sizes = inducing.cluster_sizes(rows, index.points) if settings.inducing == "kmeans" else None
    jitter, k = settings.jitter, settings.k
    shares = _leave_one_out(index, storage, held_out, k, length_scale, jitter, sizes)
    return SiteFit(
        site=site,
        index=index,
        k=k,
        length_scale=length_scale,
        jitter=jitter,
        scale=_scale(settings, shares),
        ceiling=CEILINGS["classes" if material.classes else "values"],
        prior_var=_prior_var(collector),
        geometry=how,
        metrics=metrics,
        sizes=sizes,
        least_rows=settings.private if sizes is None or settings.private > 1 else max(1, int(sizes.min())),
        share_quantiles=statistics.quantile_table(shares),
        share_error=share_error(index, held_out, length_scale, jitter, k).max,
        storage=storage,
        storage_error=rounding_error(points, chosen, held_out, length_scale, jitter, k).max,
        rows=collector.seen,
        single=collector.one_each(material.rows),
        by_position=collector.by_position,
        judged={_digest(row): float(share) for row, share in zip(held_out, shares)},
    )


def _geometry(
    collector: Collector, rows: Array, settings: Settings, material: Material
) -> tuple[Geometry, dict[str, float]]:
    """How queries of a place are compared, and how well each geometry that was tried tells strange ones apart."""
    moments, site = collector.moments, collector.site
    asked = settings.metric_at(site.chosen)
    # How large an error of a number is follows distances; which class is in doubt follows what tells classes apart.
    of_numbers = material.propagates(collector) and not material.classes
    if asked == "auto" and collector.by_position and not of_numbers:
        passes = material.propagates(collector)
        (asked,) = metrics_of_positions(rows.shape[1], collector.seen, passes=passes)
    elif asked == "auto" and (of_numbers or not collector.chooses or collector.axes != 2):
        asked = "standardised" if site.standardised else USUAL

    def made(metric: str) -> Geometry:
        covariance = moments.covariance if is_whitened(metric) else None
        return geometry_of(metric, rows, moments.mean, moments.std, covariance)

    if asked != "auto":
        return made(asked), {}
    candidates = [made(metric) for metric in metrics_for(rows.shape[1], len(rows))]
    return choose_geometry(candidates, rows, material.strange_at(site), settings)


def _as_stored(storage: Storage, chosen: Array) -> Array:
    """The inducing points (≤ M, d) that the file holds for those that were chosen (M, d).

    Everything else is fitted to these. Points that rounding makes equal are one point.
    """
    if storage.format == "float32":
        return chosen
    rounded = storage.rounded(chosen)
    return rounded[inducing.distinct_rows(rounded)]


def _search(material: Material, settings: Settings) -> str:
    """How neighbours are searched. Before opset 10 several lists need a function for their sizes, and there is one
    function for all sites: there all points are compared."""
    several = len(material.collectors) > 1 and material.opset < ANY_SIZE_OPSET
    return "flat" if several and settings.index == "auto" else settings.index


def _build_index(
    points: Array, rows: Array, held_out: Array, length_scale: float, settings: Settings, search: str
) -> Index:
    return build_index(
        "local" if settings.cached else search,
        points,
        k=settings.k,
        held_out=held_out,
        seed=settings.seed,
        search=search,
        groups=lambda listed, k: choose(listed, rows, k, length_scale, settings.jitter, settings.seed),
    )


def _leave_one_out(
    index: Index,
    storage: Storage,
    rows: Array,
    k: int,
    length_scale: float,
    jitter: float,
    sizes: Array | None,
    search: statistics.NearestSearch | None = None,
) -> Array:
    """The operator's s for calibration rows (q, d), each as if it had not been among the data -> (q,)."""
    rounded = None if storage.format == "float32" else storage.rounded(rows)
    return statistics.leave_one_out_share(
        rows, index.points, k, length_scale, jitter, sizes, index.groups, rounded, search
    )


def _digest(row: Array) -> bytes:
    """A short name of a row (d,) that no other row has."""
    return hashlib.blake2b(row.tobytes(), digest_size=16).digest()


def _require_rows(collector: Collector, settings: Settings) -> None:
    site, seen = collector.site, collector.seen
    if collector.dropped > seen:
        raise UserError(
            f"{collector.dropped} of {collector.dropped + seen} calibration rows at site {site.name!r} hold NaN or infinity",
            "check the data; at most half of the rows may be dropped",
        )
    if seen < settings.k:
        raise UserError(
            f"the calibration data give {seen} rows at site {site.name!r}, fewer than K = {settings.k}",
            f"give more data, or choose `k={max(1, seen // 2)}`",
        )


def _length_scale(site: Site, rows: Array, settings: Settings, inputs: InputSample | None) -> float:
    if isinstance(settings.length_scale, float):
        return settings.length_scale
    sample = inputs.rows if inputs is not None else rows
    length_scale = float(np.float32(statistics.median_distance(sample, seed=settings.seed)))
    if not length_scale > 0:
        what = "the inputs are" if inputs is not None else f"site {site.name!r} is"
        raise UserError(
            f"{what} constant over the calibration data, so distances mean nothing there",
            "choose another site with `sites`, give more varied data, or a number for `length_scale`",
        )
    return length_scale


def _held_out(rows: Array, seed: int) -> Array:
    if len(rows) <= HELD_OUT_ROWS:
        return rows
    chosen = np.random.default_rng(seed).choice(len(rows), HELD_OUT_ROWS, replace=False)
    return rows[np.sort(chosen)]


def _scale(settings: Settings, shares: Array) -> float:
    if settings.scale == "none":
        return 1.0
    if isinstance(settings.scale, float):
        return settings.scale
    # The floor is for data whose every row nearly equals another: s is then at the level of the jitter.
    return float(np.float32(MEDIAN_SHARE / max(float(np.median(shares)), settings.jitter)))


def _prior_var(collector: Collector) -> Array:
    """c² in a shape that broadcasts against the site's tensor."""
    site = collector.site
    moments = collector.channel_moments if site.layout is Layout.POOLED else collector.moments
    var = np.maximum(moments.std, SMALLEST_STD).astype(np.float32) ** 2
    if site.layout in (Layout.POSITIONS, Layout.POOLED):
        return var.reshape(-1, *[1] * (site.axes - 1 - site.axis))
    if (
        site.layout is Layout.FLAT and not site.joined and site.axes > 1
    ):  # one axis has no rows, and no variance
        return var.reshape(collector.map_shape)
    return var
