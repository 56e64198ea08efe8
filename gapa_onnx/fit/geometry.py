"""How queries are compared: as they are, in units of the data's own spread, or by their directions alone.

    euclidean            z
    standardised         (z − mean) / standard deviation, number by number
    direction            u = z / |z|
    polar                u, and one coordinate more: how long z is, log |z|
    whitened, whitened-direction, polar-pair       w = (z − mean) W, of unit variance along every principal axis; its
                         direction; and both of z and w in polar coordinates, side by side

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


@dataclass(frozen=True)
class Lengths:
    """How the length of a vector becomes a coordinate: (½ log(|z|² + short²) − middle) · slope."""

    short: float
    middle: float
    slope: float


@dataclass(frozen=True)
class Block:
    """One map of a query; the coordinates of several stand side by side."""

    linear: tuple[Array, Array] | None = field(
        default=None, repr=False
    )  #: centre (d,), and map (d, d) or factors (d,)
    unit: bool = False  #: whether what comes of it is divided by its length
    lengths: Lengths | None = None  #: of the coordinate that keeps the length, where there is one
    factor: float = 1.0  #: of all its coordinates

    def __call__(self, queries: Array) -> Array:
        """Queries (…, d) -> (…, d) or (…, d + 1), float32."""
        if self.linear is not None:
            centre, by = self.linear
            queries = (queries - centre) @ by if by.ndim == 2 else (queries - centre) * by
        if not self.unit:
            return queries
        found = directions(queries)
        if self.lengths is not None:
            found = np.concatenate([found, self._lengths(queries)[..., None]], axis=-1)
        scaled: Array = (found * np.float32(self.factor)).astype(np.float32)
        return scaled

    def _lengths(self, queries: Array) -> Array:
        assert self.lengths is not None
        squares = np.einsum("...d,...d->...", queries, queries, dtype=np.float32)
        logs = 0.5 * np.log(squares + np.float32(self.lengths.short**2))
        found: Array = ((logs - self.lengths.middle) * self.lengths.slope).astype(np.float32)
        return found


@dataclass(frozen=True)
class Geometry:
    """The map that queries go through before they are compared."""

    metric: str  #: see above
    blocks: tuple[Block, ...]

    @one_thread()
    def __call__(self, queries: Array) -> Array:
        """Queries (…, d) as they are compared, float32."""
        parts = [block(queries) for block in self.blocks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def is_whitened(metric: str) -> bool:
    """Whether a metric needs the covariance of queries."""
    return metric in ("whitened", "whitened-direction", "polar-pair")


@one_thread()
def geometry_of(metric: str, rows: Array, mean: Array, std: Array, covariance: Array | None) -> Geometry:
    """The geometry by its name, from a sample of queries (n, d) and their moments; whitening needs the covariance."""
    if metric == "standardised":
        return Geometry(metric, (Block(standardising(mean, std)),))
    if not is_whitened(metric):
        plain = _polar(rows, None) if metric == "polar" else Block(unit=metric == "direction")
        return Geometry(metric, (plain,))
    assert covariance is not None
    linear = (mean.astype(np.float32), whitening(mean, covariance))
    if metric != "polar-pair":
        return Geometry(metric, (Block(linear, unit=metric == "whitened-direction"),))
    pair = (_polar(rows, None), _polar(rows, linear))
    spreads = [float(np.sqrt(block(rows).var(axis=0, dtype=np.float64).sum())) for block in pair]
    return Geometry(metric, tuple(replace(b, factor=1 / max(s, SHORTEST)) for b, s in zip(pair, spreads)))


def _polar(rows: Array, linear: tuple[Array, Array] | None) -> Block:
    """Polar coordinates of rows (n, d), with a weight for lengths that is right for these."""
    moved = Block(linear)(rows)
    lengths = np.sqrt(np.einsum("nd,nd->n", moved, moved, dtype=np.float64))
    short = SHORT * float(np.median(lengths))
    logs = 0.5 * np.log(lengths**2 + max(short, SHORTEST) ** 2)
    spread = directions(moved).var(axis=0, dtype=np.float64).sum()
    slope = np.sqrt(LENGTH_WEIGHT * spread) / max(float(logs.std()), 1e-6)
    return Block(linear, True, Lengths(max(short, SHORTEST), float(logs.mean()), float(slope)))


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
