"""Shares by dense solves in float64, and the points and rows to try them on."""

from __future__ import annotations

import numpy as np
from scipy.spatial.distance import cdist

U64 = 2.0**-53


def solve_tolerance(m: int, jitter: float) -> float:
    """The condition of G + jitter·I is at most m / jitter, and a solve loses about m·u times that."""
    return 10 * m * U64 * m / jitter


def kernel(a: np.ndarray, b: np.ndarray, length_scale: float) -> np.ndarray:
    return np.exp(-cdist(a, b, "sqeuclidean") / (2 * length_scale**2))


def dense_share(row: np.ndarray, points: np.ndarray, length_scale: float, jitter: float) -> float:
    """s given all of the points, by a dense solve."""
    to_row = kernel(points, row[None], length_scale)[:, 0]
    gram = kernel(points, points, length_scale) + jitter * np.eye(len(points))
    return float(np.clip(1 - to_row @ np.linalg.solve(gram, to_row), 0, 1))


def by_definition(points: np.ndarray, k: int) -> np.ndarray:
    """Itself first, then by (distance, row), where distances are exact: for points on a grid."""
    squares = cdist(points.astype(float), points.astype(float), "sqeuclidean")
    np.fill_diagonal(squares, -1)
    return np.argsort(squares, axis=1, kind="stable")[:, :k]


def clustered(m: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = (2 * rng.normal(size=(30, d)))[rng.integers(0, 30, m + 500)] + rng.normal(size=(m + 500, d))
    return tuple(np.split(rows.astype(np.float32), [m]))


def share_without(points: np.ndarray, row: int, k: int, length_scale: float, jitter: float) -> float:
    """s of one of the points, given the others, by a plain solve in float64."""
    others = np.delete(points, row, axis=0)
    near = others[np.argsort(((others - points[row]) ** 2).sum(axis=1), kind="stable")[:k]]

    def kernel(a, b):
        return np.exp(-((a[:, None] - b) ** 2).sum(axis=2) / (2 * length_scale**2))

    to_row = kernel(near, points[row : row + 1])[:, 0]
    return 1 - to_row @ np.linalg.solve(kernel(near, near) + jitter * np.eye(len(near)), to_row)
