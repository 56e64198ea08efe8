"""The inverse factors of neighbourhoods, as a file holds them for the portable body of `GapaActivationPrepared`.

With L Lᵀ = G + jitter·I, a query with kernel vector k has s = 1 − ‖L⁻¹k‖². The first j rows of L⁻¹ are those of the first j
neighbours alone, so one factor serves every smaller k. L⁻¹ is computed in float64 and stored in float32: it is the
conditioning of G that costs digits, not the storage, and what is left of them is enough
(|Δs| ≤ 10⁻³ s + 10⁻⁵; half precision is not).

A lower triangle of N = 2h rows is folded into a block without gaps, N + 1 rows by h columns:

    L⁻¹ = ⎡ A  0 ⎤        folded row r, column c =  A[r − 1, c]  where r > c     for r = 0 … h
          ⎣ B  C ⎦                                  C[c, r]      where r ≤ c
                          and B below, rows h + 1 … 2h.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.op import reference
from gapa_onnx.op.contract import PREPARED
from gapa_onnx.op.index import Index

MOST_FACTORS = 16_000_000
"""Bytes that the factors of a place may take in a file: 3000 points of 50 neighbours."""

_BLOCK_VALUES = 1 << 21  #: float64 values of a working block: 16 MB


def with_factors(index: Index, k: int, length_scale: float, jitter: float) -> Index:
    """A local index with the factors of its neighbourhoods, where they are not too large for a file; else as it is."""
    if index.kind != "local" or bytes_of(len(index.points), k) > MOST_FACTORS:
        return index
    table = even(index.tensors["neighbourhoods"])
    folded = factors(index.points, table, k, float(np.float32(length_scale)), float(np.float32(jitter)))
    if folded is None:
        return index
    of_row = reference.list_of_row(index.tensors["list_offsets"]).astype(np.int32)
    more = {"neighbourhoods": table, "list_of_row": of_row, "factors": folded}
    return replace(index, kind=PREPARED, tensors={**index.tensors, **more})


def bytes_of(count: int, k: int) -> int:
    """What the factors of `count` neighbourhoods of k points take in a file."""
    half = -(-k // 2)
    return 4 * count * half * (2 * half + 1)


def even(neighbourhoods: Array) -> Array:
    """Neighbourhoods (M, k) with an even number of columns: the point itself once more where k is odd."""
    if neighbourhoods.shape[1] % 2 == 0:
        return neighbourhoods
    own = np.arange(len(neighbourhoods), dtype=neighbourhoods.dtype)
    return np.concatenate([neighbourhoods, own[:, None]], axis=1)


def factors(points: Array, neighbourhoods: Array, k: int, length_scale: float, jitter: float) -> Array | None:
    """L⁻¹ of the first k of each of the neighbourhoods (M, N), folded -> (M, N + 1, N / 2) float32; rows beyond k are 0.

    None where a kernel matrix is singular to float64.
    """
    count, width = neighbourhoods.shape
    folded = np.empty((count, width + 1, width // 2), np.float32)
    points = points.astype(np.float64)
    step = max(1, _BLOCK_VALUES // (width * max(points.shape[1], width)))
    for start in range(0, count, step):
        part = slice(start, start + step)
        group = points[neighbourhoods[part, :k]]
        offsets = (group - group[:, :1]) / length_scale  # small numbers: no digit is lost in products of them
        squares = np.einsum("bkd,bkd->bk", offsets, offsets)
        gram = offsets @ offsets.transpose(0, 2, 1) - (squares[:, :, None] + squares[:, None, :]) / 2
        gram = np.exp(np.minimum(gram, 0))
        gram[:, range(k), range(k)] = 1 + jitter
        try:
            factor = np.linalg.cholesky(gram)
        except np.linalg.LinAlgError:
            return None
        inverse = np.zeros((len(gram), width, width))
        inverse[:, :k, :k] = np.linalg.solve(factor, np.eye(k))
        folded[part] = fold(inverse)
    return folded


def fold(inverse: Array) -> Array:
    """Lower triangles (b, N, N), N even -> (b, N + 1, N / 2)."""
    count, width, _ = inverse.shape
    half = width // 2
    folded = np.zeros((count, width + 1, half), inverse.dtype)
    folded[:, 1 : half + 1] = np.tril(inverse[:, :half, :half])
    folded[:, :half] += np.tril(inverse[:, half:, half:]).transpose(0, 2, 1)
    folded[:, half + 1 :] = inverse[:, half:, :half]
    return folded
