"""The unexplained share s of many rows at a time, by matrix products; `reference` has it plain and slow.

Offsets are from the row, so ‖a‖² + ‖b‖² − 2ab loses no digits that a float64 solve would not.
"""

from __future__ import annotations

import numpy as np

from gapa_onnx.arrays import Array

_CACHED = 1 << 16  #: float64 values that are worked on at a time: half a MB, what a cache holds


def rows_at_once(k: int, d: int) -> int:
    """How many rows of width d with k neighbours each are worked on at a time."""
    return max(1, _CACHED // (k * max(d, k)))


def unexplained_share(queries: Array, points: Array, ids: Array, length_scale: float, jitter: float) -> Array:
    """s of finite queries (n, d) from their neighbours (n, k) among points (M, d) -> (n,). Those that are -1 do not count."""
    share = np.empty(len(queries))
    step = rows_at_once(ids.shape[1], queries.shape[1])
    for start in range(0, len(queries), step):
        part = slice(start, start + step)
        offsets = points[ids[part]].astype(np.float64) - queries[part, None, :]
        share[part] = share_by_offsets(offsets / length_scale, ids[part] >= 0, jitter)
    return share


def share_by_offsets(offsets: Array, present: Array, jitter: float) -> Array:
    """s of each row from the offsets (b, k, d) to its neighbours in length scales, those that are present -> (b,)."""
    squares = np.einsum("bkd,bkd->bk", offsets, offsets)
    counts = present.astype(np.float64)
    gram = offsets @ offsets.transpose(0, 2, 1)  # (b, k, k)
    gram -= (squares[:, :, None] + squares[:, None, :]) / 2
    np.exp(gram, out=gram)
    gram *= counts[:, :, None]
    gram *= counts[:, None, :]
    each = range(gram.shape[1])
    gram[:, each, each] = 1 + jitter  # also of those that do not count: they are then unrelated points
    to_row = np.exp(-squares / 2) * counts
    explained = np.einsum("bk,bk->b", to_row, np.linalg.solve(gram, to_row[:, :, None])[:, :, 0])
    share: Array = np.clip(1 - explained, 0, 1)
    return share
