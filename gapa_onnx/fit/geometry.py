"""How queries are compared: as they are, in units of the data's own spread, or by their directions alone.

    euclidean            z
    standardised         (z − mean) / standard deviation, number by number
    direction            u = z / |z|
    polar                u, and one coordinate more: how long z is, log |z|
    whitened             w = (z − mean) W, of unit variance along every principal axis
    whitened-direction   w / |w|
    projected            the first numbers of w in polar coordinates, and one more: how far z is from what they span

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
MOST_AXES = 64  # principal axes of `projected`, half of all where that is fewer


@dataclass(frozen=True)
class Lengths:
    """How a length becomes a coordinate: (½ log(length² + short²) − middle) · slope."""

    short: float
    middle: float
    slope: float

    def __call__(self, squares: Array) -> Array:
        """Squared lengths (…) -> (…, 1)."""
        logs = 0.5 * np.log(np.maximum(squares, 0) + np.float32(self.short**2))
        found: Array = ((logs - self.middle) * self.slope).astype(np.float32)[..., None]
        return found


@dataclass(frozen=True)
class Geometry:
    """The map that queries go through before they are compared: linear, then divided by its length, if these are asked for,
    with coordinates for the length and for what the linear map leaves over."""

    metric: str  #: see above
    linear: tuple[Array, Array] | None = field(
        default=None, repr=False
    )  #: centre (d,), and map (d, r) or factors (d,)
    unit: bool = False
    lengths: Lengths | None = None
    rest: tuple[Array, Lengths] | None = field(
        default=None, repr=False
    )  #: variances along the axes (r,): the length of z − mean without them

    @one_thread()
    def __call__(self, queries: Array) -> Array:
        """Queries (…, d) as they are compared, float32."""
        moved, over = queries, None
        if self.linear is not None:
            centre, by = self.linear
            centred = queries - centre
            moved = centred @ by if by.ndim == 2 else centred * by
            if self.rest is not None:
                over = _squares(centred) - (moved * moved) @ self.rest[0]
        if not self.unit:
            return moved
        parts = [directions(moved)]
        parts += [] if self.lengths is None else [self.lengths(_squares(moved))]
        parts += [] if self.rest is None or over is None else [self.rest[1](over)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _squares(rows: Array) -> Array:
    """The squared lengths of rows (…, d) -> (…)."""
    found: Array = np.einsum("...d,...d->...", rows, rows, dtype=np.float32)
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
        return replace(plain, lengths=_lengths(plain, _squares(rows), rows)) if metric == "polar" else plain
    assert covariance is not None
    centre, axes = mean.astype(np.float32), whitening(mean, covariance)
    if metric != "projected":
        return Geometry(metric, (centre, axes), unit=metric == "whitened-direction")
    first = np.ascontiguousarray(axes[:, : max(1, min(MOST_AXES, len(mean) // 2))])
    variances = (1 / np.einsum("dr,dr->r", first, first, dtype=np.float64)).astype(np.float32)
    plain = Geometry(metric, (centre, first), unit=True)
    moved = (rows - centre) @ first
    over = np.maximum(_squares(rows - centre) - (moved * moved) @ variances, 0)
    lengths, rest = _lengths(plain, _squares(moved), rows), _lengths(plain, over, rows)
    return replace(plain, lengths=lengths, rest=(variances, rest))


def _lengths(plain: Geometry, squares: Array, rows: Array) -> Lengths:
    """A coordinate for lengths whose squares are given (n,), beside those of a geometry without it."""
    short = max(SHORT * float(np.sqrt(np.median(squares))), SHORTEST)
    logs = 0.5 * np.log(squares.astype(np.float64) + short**2)
    spread = plain(rows).var(axis=0, dtype=np.float64).sum()
    slope = np.sqrt(LENGTH_WEIGHT * spread) / max(float(logs.std()), 1e-6)
    return Lengths(short, float(logs.mean()), float(slope))


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
    subspace of the data must not look near. The floor is never below the variance that float32 rounding
    of `mean` alone can cause. An axis points to where its largest component (the first of equals) is
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
    spread = np.sqrt(np.maximum(values, max(floor * values[0], rounding)))  # (d,)
    whitened: Array = (axes / spread).astype(np.float32)
    return whitened
