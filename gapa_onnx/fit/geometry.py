"""How queries are compared: as they are, in units of the data's own spread, or by their directions alone.

    euclidean            z
    standardised         (z − mean) / standard deviation, number by number
    whitened             (z − mean) W, of unit variance along every principal axis
    direction            z / |z|
    whitened-direction   the direction of (z − mean) W

Each is a map z → u before a Gaussian kernel of |u − u'|, which stays positive definite whatever the map is. A zero vector
has no direction and stays zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.variance.sites import SHORTEST

_EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Geometry:
    """The map that queries go through before they are compared."""

    metric: str  #: see above
    linear: tuple[Array, Array] | None = field(
        default=None, repr=False
    )  #: centre (d,), and map (d, d) or factors (d,)

    @property
    def unit(self) -> bool:
        """Whether queries are divided by their lengths in the end."""
        return self.metric.endswith("direction")

    def __call__(self, queries: Array) -> Array:
        """Queries (…, d) as they are compared, (…, d) float32."""
        if self.linear is not None:
            centre, by = self.linear
            queries = (queries - centre) @ by if by.ndim == 2 else (queries - centre) * by
        return directions(queries) if self.unit else queries


def geometry_of(metric: str, mean: Array, std: Array, covariance: Array | None) -> Geometry:
    """The geometry by its name, from the moments of the queries; whitening needs their covariance."""
    if metric.startswith("whitened"):
        assert covariance is not None
        return Geometry(metric, (mean.astype(np.float32), whitening(mean, covariance)))
    return Geometry(metric, standardising(mean, std) if metric == "standardised" else None)


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
            "choose another site, use `metric='euclidean'`, or check that the calibration data vary",
        )
    largest = axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])]
    axes = axes * np.where(largest < 0, -1.0, 1.0)
    spread = np.sqrt(np.maximum(values, max(floor * values[0], rounding)))  # (d,)
    whitened: Array = (axes / spread).astype(np.float32)
    return whitened
