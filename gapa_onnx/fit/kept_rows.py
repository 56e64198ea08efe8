"""A few rows of the calibration data as they were fed, for making strange inputs of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch
from gapa_onnx.data.strange import strange_batches
from gapa_onnx.sessions.feeding import is_words
from gapa_onnx.variance.masks import tensor_of, valid_positions

MOST_ROWS = 500
MOST_BYTES = 64 << 20
MOST_WORDS = 1 << 14  # of texts, which a model runs on once for each kind of strangeness


class KeptRows:
    """A random sample of rows of at most `MOST_ROWS`, fewer where they are large; it depends on the rows and the seed,
    not on how they came in batches."""

    def __init__(self, seed: int):
        self.seed = seed
        self._generator = np.random.default_rng(seed)
        self._rows: list[tuple[float, int, dict[str, Array]]] = []  # key, position, row
        self._constants: dict[str, Array] = {}
        self._seen = 0

    def add(self, batch: Batch, rows: int) -> None:
        """Offer the rows of a batch; one as given, which cannot be cut, is not taken."""
        keys = self._generator.random(rows)
        if batch.whole or batch.rows is None:
            return
        cut = {name: array for name, array in batch.items() if array.ndim and len(array) == rows}
        self._constants = {name: array for name, array in batch.items() if name not in cut}
        size = sum(array.nbytes for array in cut.values()) / max(rows, 1)
        words = max((array.shape[1] for array in cut.values() if is_words(array)), default=0)
        most = max(1, min(MOST_ROWS, int(MOST_BYTES / max(size, 1)), MOST_WORDS // max(words, 1)))
        for at in np.argsort(keys, kind="stable")[:most]:
            if len(self._rows) >= most and keys[at] >= self._rows[-1][0]:
                break
            row = {name: array[at].copy() for name, array in cut.items()}
            self._rows.append((float(keys[at]), self._seen + int(at), row))
            self._rows = sorted(self._rows, key=lambda held: held[:2])[:most]
        self._seen += rows

    def strange_batches(self, batch_rows: int, mask: str | None = None) -> Iterator[tuple[str, Batch]]:
        """Strange versions of the rows by kind, in batches of exactly so many rows or, at the end, fewer. `mask` tells
        padding, where it is fed."""
        by_shape: dict[object, list[dict[str, Array]]] = {}
        for _, _, row in sorted(self._rows, key=lambda held: held[1]):
            by_shape.setdefault(tuple((name, array.shape) for name, array in row.items()), []).append(row)
        for rows in by_shape.values():
            whole = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            tensor = None if mask is None else whole.get(tensor_of(mask))
            valid = None if mask is None or tensor is None else valid_positions(mask, tensor)
            for kind, made in strange_batches(whole, self.seed, valid):
                for start in range(0, len(rows), batch_rows):
                    part = {name: array[start : start + batch_rows] for name, array in made.items()}
                    count = min(batch_rows, len(rows) - start)
                    yield kind, Batch(part | self._constants, count)
