"""How queries are compared: as they are, in units of the data's own spread, or by their directions alone.

    euclidean            z
    standardised         (z − mean) / standard deviation, number by number
    direction            u = z / |z|
    polar                u, and one coordinate more: how long z is, log |z|
    whitened             w = (z − mean) W, of unit variance along every principal axis
    whitened-direction   w / |w|
    projected            along the first principal axes: the direction of w, and along fewer of them u; and three lengths: of
                         z, of w, and of what these axes leave over of z − mean

Each is a map of z before a Gaussian kernel of the distance, which stays positive definite whatever the map is. A zero
vector has no direction: u is zero there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.threads import one_thread
from gapa_onnx.variance.sites import SHORTEST

_EPS = float(np.finfo(np.float32).eps)


LENGTH_WEIGHT = 0.25  # variance of the coordinate for lengths, over that of all others together
SHORT = 1e-3  # of the usual length: shorter vectors are hardly farther away, so that zero is not at infinity
ROUNDED = 10 * float(
    np.sqrt(64 * np.finfo(np.float32).eps)
)  # of a length, that a difference of squares tells badly from 0
OF_ROUNDING = 2.0  # standard deviation of logarithms that rounding is given, so that it stays small
MOST_AXES = 48  # principal axes of `projected`, half of all where that is fewer
FEW, OUT_OF_PROPORTION = 0.01, 100.0  # axes whose variance is so many times that of what lies behind them
FEWER_AXES = 4  # one in so many of them is enough for u: it varies most along the first


@dataclass(frozen=True)
class Lengths:
    """How lengths become coordinates, each: (log(length + short) − middle) · slope."""

    short: Array  #: (n,)
    middle: Array  #: (n,)
    slope: Array  #: (n,)

    def __call__(self, lengths: Array) -> Array:
        """Lengths (…, n) -> (…, n)."""
        logs = np.log(lengths + self.short.astype(np.float32))
        found: Array = ((logs - self.middle) * self.slope).astype(np.float32)
        return found


@dataclass(frozen=True)
class Axes:
    """Principal axes that queries are projected on."""

    along: Array = field(repr=False)  #: (d, r), orthonormal
    centre: Array = field(repr=False)  #: (d,)
    origin: Array = field(repr=False)  #: (f,): the centre along the first of them
    whitening: Array = field(repr=False)  #: (r,): one over the standard deviation along each
    factors: tuple[float, float]  #: of the direction of z, and of that of w, so that both vary alike
    short: float  #: what z is divided by at least, as a zero vector has no direction but rounding

    def __call__(self, queries: Array) -> tuple[Array, Array]:
        """Both directions of queries (…, d) side by side, (…, f + r), and three lengths (…, 3)."""
        centred = queries - self.centre
        inside = centred @ self.along
        white = inside * self.whitening
        size = _length(queries)
        plain = (inside[..., : len(self.origin)] + self.origin) / np.maximum(size, np.float32(self.short))
        directed = np.concatenate([plain * self.factors[0], directions(white) * self.factors[1]], axis=-1)
        over = np.sqrt(np.maximum(_length(centred) ** 2 - _length(inside) ** 2, 0))
        return directed, np.concatenate([size, _length(white), over], axis=-1)


@dataclass(frozen=True)
class Geometry:
    """The map that queries go through before they are compared: linear, or onto axes, then divided by its length where
    that is asked for, with coordinates for lengths."""

    metric: str  #: see above
    linear: tuple[Array, Array] | None = field(
        default=None, repr=False
    )  #: centre (d,), and map (d, d) or factors (d,)
    unit: bool = False
    axes: Axes | None = None
    lengths: Lengths | None = None

    @one_thread()
    def __call__(self, queries: Array) -> Array:
        """Queries (…, d) as they are compared, float32."""
        directed, lengths = self.parts(queries)
        if self.lengths is None:
            return directed
        found: Array = np.concatenate([directed, self.lengths(lengths)], axis=-1).astype(np.float32)
        return found

    def parts(self, queries: Array) -> tuple[Array, Array]:
        """All coordinates but those of lengths, and the lengths (…, n) that those are made of."""
        if self.axes is not None:
            return self.axes(queries)
        moved = queries
        if self.linear is not None:
            centre, by = self.linear
            moved = (queries - centre) @ by if by.ndim == 2 else (queries - centre) * by
        return directions(moved) if self.unit else moved, _length(moved)


def _length(rows: Array) -> Array:
    """The lengths of rows (…, d) -> (…, 1)."""
    found: Array = np.sqrt(np.einsum("...d,...d->...", rows, rows, dtype=np.float32))[..., None]
    return found


def is_whitened(metric: str) -> bool:
    """Whether a metric needs the covariance of queries."""
    return metric in ("whitened", "whitened-direction", "projected")


@one_thread()
def geometry_of(metric: str, rows: Array, mean: Array, std: Array, covariance: Array | None) -> Geometry:
    """The geometry by its name, from a sample of queries (n, d) and their moments; whitening needs the covariance."""
    if metric == "standardised":
        return Geometry(metric, standardising(mean, std))
    if not is_whitened(metric):
        plain = Geometry(metric, unit=metric != "euclidean")
        return _with_lengths(plain, rows) if metric == "polar" else plain
    assert covariance is not None
    centre, white = mean.astype(np.float32), whitening(mean, covariance)
    if metric != "projected":
        return Geometry(metric, (centre, white), unit=metric == "whitened-direction")
    return _with_lengths(Geometry(metric, axes=_axes(rows, centre, white)), rows)


def _axes(rows: Array, centre: Array, white: Array) -> Axes:
    """The first principal axes, from the whitening (d, d) of rows (n, d)."""
    first = white[:, : max(1, min(MOST_AXES, len(centre) // 2))].astype(np.float64)
    sizes = np.sqrt(np.einsum("dr,dr->r", first, first))  # one over the standard deviations
    along = np.ascontiguousarray(first / sizes, np.float32)
    fewer = max(1, len(sizes) // FEWER_AXES)
    origin = (centre @ along[:, :fewer]).astype(np.float32)
    short = max(SHORT * float(np.median(_length(rows))), SHORTEST)
    axes = Axes(along, centre, origin, sizes.astype(np.float32), (1.0, 1.0), short)
    spreads = np.split(axes(rows)[0].var(axis=0, dtype=np.float64), [fewer])
    one, other = (1 / max(float(np.sqrt(part.sum())), SHORTEST) for part in spreads)
    return replace(axes, factors=(one, other))


def _with_lengths(plain: Geometry, rows: Array) -> Geometry:
    """The geometry with a coordinate for each length, of a weight that is right for these rows (n, d)."""
    directed, lengths = plain.parts(rows)
    spread = directed.var(axis=0, dtype=np.float64).sum() / (1 if plain.axes is None else 2)
    usual = np.median(lengths, axis=0).astype(np.float64)
    short, least = np.maximum(SHORT * usual, SHORTEST), np.full(len(usual), 1e-6)
    if plain.axes is not None:
        floor = ROUNDED * float(np.median(_length(rows - plain.axes.centre)))
        if (
            usual[-1] < floor
        ):  # what the axes leave over of the data is a difference of squares, so rounding alone
            short[-1], least[-1] = floor, OF_ROUNDING
    logs = np.log(lengths.astype(np.float64) + short)
    slope = np.sqrt(LENGTH_WEIGHT * spread) / np.maximum(logs.std(axis=0), least)
    return replace(plain, lengths=Lengths(short, logs.mean(axis=0), slope))


def directions(rows: Array) -> Array:
    """Rows (…, d) divided by their lengths; a row of zeros stays one."""
    lengths = np.sqrt(np.einsum("...d,...d->...", rows, rows, dtype=np.float32))[..., None]
    found: Array = (rows / np.maximum(lengths, SHORTEST)).astype(np.float32)
    return found


def standardising(mean: Array, std: Array) -> tuple[Array, Array]:
    """The centre (d,) and the factors (d,) by which columns have mean 0 and standard deviation 1, float32.

    A column that is constant but for rounding keeps its unit: what it will differ by has no other.
    """
    rounding = _EPS * np.abs(mean)
    factors = np.where(std > rounding, 1 / np.maximum(std, np.finfo(np.float32).tiny), 1.0)
    return mean.astype(np.float32), factors.astype(np.float32)


def whitening(mean: Array, covariance: Array, floor: float = 1e-3) -> Array:
    """The PCA whitening W (d, d), float32: (z − mean) W has unit variance along every principal axis.

    W = U diag(max(λ, λ_floor))^-½ for covariance = U diag(λ) Uᵀ, largest λ first, and
    λ_floor = floor · λ_max. Axes below the floor are kept, at the floor's scale: a query that leaves the
    subspace of the data must not look near. Of a few axes that are out of all proportion, as transformers
    have for tokens that attention rests on, λ_max is not one: they would put all others at the floor. The
    floor is never below the variance that float32 rounding of `mean` alone can cause. An axis points to where its largest component (the first of equals) is
    positive.
    """
    values, axes = np.linalg.eigh(np.asarray(covariance, np.float64))
    values, axes = values[::-1], axes[:, ::-1]
    rounding = (_EPS * np.abs(mean).max()) ** 2
    if not values[0] > rounding:
        raise UserError(
            "the activation is constant over the calibration data, so it cannot be whitened",
            "choose another with `sites`, use `metric='euclidean'`, or check that the calibration data vary",
        )
    largest = axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])]
    axes = axes * np.where(largest < 0, -1.0, 1.0)
    behind = values[int(FEW * len(values))]
    largest_one = values[0] if values[0] <= OUT_OF_PROPORTION * behind else behind
    spread = np.sqrt(np.maximum(values, max(floor * largest_one, rounding)))  # (d,)
    whitened: Array = (axes / spread).astype(np.float32)
    return whitened
