"""The full covariance of an output, accumulated from the output backwards.

With v the variance born at a site, J = d output / d site tensor, and independent births,

    Σ = Σ_sites J diag(v) Jᵀ     (N, C, C)

J is the cotangent that arrives at the site when the identity is sent back from the output. What it
passes on its way, other sites included, it passes by their slopes. No matrix of d × d is ever made.

Where to look: `tail` walks; `registry` holds the table of pullbacks, which `elementwise`, `linear`,
`reduction`, `structural` and `normalisation` fill; `factor` takes a covariance apart.
"""

from __future__ import annotations

from gapa_onnx.variance.covariance import (  # noqa: F401  (they fill the table)
    elementwise,
    linear,
    normalisation,
    reduction,
    structural,
)
from gapa_onnx.variance.covariance.factor import cholesky
from gapa_onnx.variance.covariance.registry import PULLBACKS
from gapa_onnx.variance.covariance.tail import check_tail, output_covariance

__all__ = ["PULLBACKS", "check_tail", "cholesky", "output_covariance"]
