"""How queries are compared: their directions, or in units of the data's own spread."""

from __future__ import annotations

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.variance.sites import SHORTEST

_EPS = float(np.finfo(np.float32).eps)


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
