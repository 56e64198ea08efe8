"""What others make of the same forward pass: a score for each token, larger where text is stranger.

entropy, nll      of the source's own prediction; the second knows the token that came, as a sequence is given
temperature       the entropy at the temperature that tells the two sets apart best: an oracle, it sees the answer
laplace           last layer, posterior of the head's weights from calibration tokens. The curvature has a factor for
                  the head's input, E[h hᵀ], and for each token of the vocabulary E[p (1 - p)]; the prior's
                  precision maximises the evidence. Epistemic part of the entropy over the leading tokens
mahalanobis       distance of a token's vector to the mean of calibration tokens, by their covariance
knn               distance of its direction to the 50th nearest of 1000 calibration tokens
"""

from __future__ import annotations

from dataclasses import dataclass, field

import faiss
import numpy as np

from gapa_onnx.fit.geometry import directions
from language.dump import Dump
from language.method import Head, calibration_rows
from language.texts import CALIBRATION

SHRUNK = 1e-3  # of the mean eigenvalue, added to the covariance
REMEMBERED, NEIGHBOUR = 1000, 50
PRECISIONS = np.logspace(-2, 6, 33)
AT_ONCE = 2048


@dataclass(frozen=True)
class Laplace:
    """The posterior of the head's weights, each row of them on its own."""

    axes: np.ndarray = field(repr=False)  #: (d, d) eigenvectors of E[h hᵀ]
    sizes: np.ndarray = field(repr=False)  #: (d,) its eigenvalues
    curvature: np.ndarray = field(repr=False)  #: (v,) E[p (1 - p)] of each token
    tokens: int
    precision: float

    def variances(self, hidden: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Of the logits of tokens (n, w) for vectors (n, d) -> (n, w): Σ_i (u_i h)² / (n b a_i + λ)."""
        along = (hidden @ self.axes) ** 2  # (n, d)
        found = np.empty(ids.shape, np.float32)
        # the denominator depends on the token through one number alone, which varies smoothly: it is tabled
        table = np.logspace(-12, 0, 241)
        inverse = 1 / (self.tokens * table[:, None] * self.sizes + self.precision)  # (241, d)
        tabled = np.log(along @ inverse.T)  # (n, 241)
        place = np.interp(np.log(np.maximum(self.curvature, table[0])), np.log(table), np.arange(len(table)))
        for row, chosen in enumerate(ids):
            found[row] = np.exp(np.interp(place[chosen], np.arange(len(table)), tabled[row]))
        return found


def laplace(dump: Dump, weights: np.ndarray) -> Laplace:
    """Fitted to the calibration tokens."""
    rows = calibration_rows(dump, dump.places - 1, 20_000)
    sizes, axes = np.linalg.eigh(rows.T.astype(np.float64) @ rows / len(rows))
    sizes = np.maximum(sizes, 0)
    first, second, count = dump.squares()
    curvature = np.maximum((first - second) / count, 0)
    tokens = dump.done(CALIBRATION) * dump.array(CALIBRATION, "ids").shape[1]
    length = float((weights.astype(np.float64) ** 2).sum())
    best = max(PRECISIONS, key=lambda one: _evidence(one, length, sizes, curvature, tokens))
    return Laplace(axes.astype(np.float32), sizes, curvature, tokens, float(best))


def _evidence(
    precision: float, length: float, sizes: np.ndarray, curvature: np.ndarray, tokens: int
) -> float:
    """½ (P log λ - λ |W|² - log det(H + λ)), but for what does not depend on λ."""
    numbers, edges = np.histogram(np.log10(np.maximum(curvature, 1e-12)), 200)
    middle = 10 ** ((edges[1:] + edges[:-1]) / 2)
    logs = np.log(tokens * middle[:, None] * sizes + precision).sum(axis=1)
    return float(
        len(curvature) * len(sizes) * np.log(precision) - precision * length - (numbers * logs).sum()
    )


def laplace_epistemic(
    fitted: Laplace, head: Head, hidden: np.ndarray, logp: np.ndarray, ids: np.ndarray
) -> np.ndarray:
    """Epistemic parts (n,) for vectors (n, d), log probabilities and leading tokens (n, w)."""
    parts = []
    for start in range(0, len(hidden), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        var = fitted.variances(hidden[part].astype(np.float32), ids[part])
        parts.append(head.split(logp[part], var)["epistemic"])
    return np.concatenate(parts)


class Mahalanobis:
    """Distances to the mean of the calibration tokens of a place."""

    def __init__(self, rows: np.ndarray):
        self._mean = rows.mean(axis=0, dtype=np.float64)
        centred = rows - self._mean
        covariance = centred.T @ centred / len(rows)
        covariance += SHRUNK * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        self._half = np.linalg.cholesky(np.linalg.inv(covariance)).astype(np.float32)

    def __call__(self, queries: np.ndarray) -> np.ndarray:
        """Squared distances of queries (n, d) -> (n,)."""
        white = (queries - self._mean.astype(np.float32)) @ self._half
        found: np.ndarray = np.einsum("nd,nd->n", white, white)
        return found


class Nearest:
    """Distances to the 50th neighbour among some calibration tokens, of directions."""

    def __init__(self, rows: np.ndarray):
        chosen = np.random.default_rng(0).choice(len(rows), min(REMEMBERED, len(rows)), replace=False)
        self._index = faiss.IndexFlatL2(rows.shape[1])
        self._index.add(directions(rows[chosen]))

    def __call__(self, queries: np.ndarray) -> np.ndarray:
        count = min(NEIGHBOUR, self._index.ntotal)
        found: np.ndarray = self._index.search(directions(queries), count)[0][:, -1]
        return found
