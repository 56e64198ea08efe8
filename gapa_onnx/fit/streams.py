"""What calibration learns from a stream of activation rows, in memory that hardly grows with its length.

A stream comes in stretches, which `begin` numbers. What is learnt of one depends on its rows, its number and the seed
alone, and stretches are put together in one order, whoever has read them: streams that were read on several machines
`join` to what one machine would have found, to the bit. Where a batch ends within a stretch does not show. Rows are
finite throughout; `statistics.finite_rows` says which ones to hand over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array

_BLOCK_VALUES = 1 << 20  # float64 values per working block: 8 MB


def drawing(seed: int, *stretch: int) -> np.random.Generator:
    """What draws in a stretch of a stream: it depends on nothing that comes before."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stretch))


@dataclass(frozen=True)
class Sums:
    """Count, mean (d,) and summed deviations, or products of them, (d,) or (d, d) of some rows."""

    count: int
    mean: Array
    scatter: Array

    def with_more(self, other: Sums) -> Sums:
        """Chan's formula: S = S_a + S_b + (m_b − m_a)² n_a n_b / (n_a + n_b)."""
        if not self.count or not other.count:
            return other if other.count else self
        count = self.count + other.count
        shift = other.mean - self.mean
        weight = self.count * other.count / count
        products = np.outer(shift, shift) if self.scatter.ndim == 2 else shift * shift
        mean = self.mean + shift * (other.count / count)
        return Sums(count, mean, self.scatter + other.scatter + products * weight)


Node = tuple[int, int, Sums]  #: n, number among the nodes of this n, and what is summed


class Moments:
    """Mean and population variance of a stream of rows, and the covariance if asked for.

    Blocks of a fixed number of rows are centred on their own mean and merged, so an offset far above the spread costs no
    digits. Stretches are merged in pairs, pairs of them in pairs again: what covers 2^n of them that begin at a multiple
    of 2^n is one node, whoever has merged it, and all that there is are the nodes that no other belongs to.
    """

    def __init__(self, d: int, covariance: bool = False):
        self._tracks_covariance = covariance
        self._nodes: list[Node] = []
        self._stretch = 0
        self._block = np.empty((max(1, min(1024, _BLOCK_VALUES // d)), d))
        self._open = self._nothing()  # of the full blocks of the stretch
        self._filled = 0

    def begin(self, stretch: int) -> None:
        """What comes belongs to another stretch."""
        if stretch != self._stretch:
            self.close()
            self._stretch = stretch

    def close(self) -> None:
        """The stretch that is open has ended."""
        self._nodes = self._with_stretch()
        self._open, self._filled = self._nothing(), 0

    def add(self, rows: Array) -> None:
        """Take in rows (n, d)."""
        start = 0
        while start < len(rows):
            taken = min(len(rows) - start, len(self._block) - self._filled)
            self._block[self._filled : self._filled + taken] = rows[start : start + taken]
            self._filled += taken
            start += taken
            if self._filled == len(self._block):
                self._open, self._filled = self._of_stretch(), 0

    def join(self, later: Moments) -> None:
        """Take in what was found on the stretches that come next."""
        self.close()
        later.close()
        for node in later._nodes:
            _push(self._nodes, node)

    @property
    def count(self) -> int:
        return self._total().count

    @property
    def mean(self) -> Array:  # (d,)
        mean: Array = self._some().mean.copy()
        return mean

    @property
    def std(self) -> Array:  # (d,)
        found = self._some()
        squares = np.diagonal(found.scatter) if self._tracks_covariance else found.scatter
        std: Array = np.sqrt(squares / found.count)
        return std

    @property
    def covariance(self) -> Array:  # (d, d)
        if not self._tracks_covariance:
            raise ValueError("these moments were made without covariance=True")
        found = self._some()
        covariance: Array = found.scatter / found.count
        return covariance

    def arrays(self) -> dict[str, Array]:
        """All that there is, for `of`."""
        self.close()
        d = self._block.shape[1]
        shape = (0, d, d) if self._tracks_covariance else (0, d)
        nodes = self._nodes
        return {
            "nodes": np.array([(n, at, sums.count) for n, at, sums in nodes], np.int64).reshape(-1, 3),
            "means": np.array([sums.mean for _, _, sums in nodes]).reshape(-1, d),
            "scatters": np.stack([sums.scatter for _, _, sums in nodes]) if nodes else np.empty(shape),
        }

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Moments:
        means, scatters = arrays["means"], arrays["scatters"]
        found = cls(means.shape[1], covariance=scatters.ndim == 3)
        for (n, at, count), mean, scatter in zip(arrays["nodes"].tolist(), means, scatters, strict=True):
            _push(found._nodes, (n, at, Sums(count, mean, scatter)))
        return found

    def _nothing(self) -> Sums:
        d = self._block.shape[1]
        return Sums(0, np.zeros(d), np.zeros((d, d) if self._tracks_covariance else d))

    def _of_stretch(self) -> Sums:
        """Of the open stretch, with the rows of its unfinished block, which stays as it is."""
        block = self._block[: self._filled]  # (b, d)
        if not len(block):
            return self._open
        mean = block.mean(axis=0)
        deviation = block - mean
        scatter = (
            deviation.T @ deviation
            if self._tracks_covariance
            else np.einsum("ij,ij->j", deviation, deviation)
        )
        return self._open.with_more(Sums(len(block), mean, scatter))

    def _total(self) -> Sums:
        total = self._nothing()
        for _, _, sums in self._with_stretch():
            total = total.with_more(sums)
        return total

    def _with_stretch(self) -> list[Node]:
        """The nodes as they are once the open stretch has ended."""
        nodes, open_ = list(self._nodes), self._of_stretch()
        if open_.count:
            _push(nodes, (0, self._stretch, open_))
        return nodes

    def _some(self) -> Sums:
        total = self._total()
        if not total.count:
            raise ValueError("no rows were added")
        return total


def _push(nodes: list[Node], node: Node) -> None:
    """Append what comes next, together with what it belongs to."""
    n, at, sums = node
    while nodes and at % 2 and nodes[-1][:2] == (n, at - 1):
        sums = nodes.pop()[2].with_more(sums)
        n, at = n + 1, at // 2
    nodes.append((n, at, sums))


class RowSample:
    """A uniform sample without replacement of at most `capacity` rows from a stream of unknown length.

    Every row draws a key in stream order and the smallest keys stay, so the sample depends on the rows'
    positions and the seed, never on the batches. The buffer holds up to 1.25 capacity rows, and is
    thinned out only when it is full; growing it takes up to 1.9 capacity rows for a moment.
    """

    def __init__(self, capacity: int, d: int, seed: int):
        if capacity < 1:
            raise ValueError("the capacity must be at least 1")
        self._capacity = capacity
        self._limit = capacity + capacity // 4 + 1  # rows of a full buffer
        self._step = max(1, _BLOCK_VALUES // 4 // d)  # rows copied at a time
        self._seed = seed
        self._stretch = 0
        self._generator = drawing(seed, 0)
        self._buffer = np.empty((0, d), np.float32)
        self._keys = np.empty(0)
        self._held = 0
        self._highest = np.inf  # a key that is not below this one can no longer win
        self._seen = 0

    def begin(self, stretch: int) -> None:
        """What comes belongs to another stretch."""
        if stretch != self._stretch:
            self._stretch, self._generator = stretch, drawing(self._seed, stretch)

    @property
    def seen(self) -> int:
        return self._seen

    @property
    def rows(self) -> Array:  # (min(seen, capacity), d)
        """The sample so far, in stream order (a copy)."""
        return self.smaller(self._capacity)

    def smaller(self, capacity: int) -> Array:
        """The sample that a smaller capacity would have kept of the same stream: (min(seen, capacity), d)."""
        self._thin_out()
        if self._held <= capacity:
            everything: Array = self._buffer[: self._held].copy()
            return everything
        kept = np.sort(np.argsort(self._keys[: self._held], kind="stable")[:capacity])
        return self._buffer[kept]

    def add(self, rows: Array) -> None:
        """Offer rows (n, d)."""
        keys = self._generator.random(len(rows))  # one 64-bit draw per row, so cuts do not shift the stream
        self._offer(rows, keys, len(rows))

    def join(self, later: RowSample) -> None:
        """Take in the sample of the stretches that come next."""
        later._thin_out()
        self._offer(later._buffer[: later._held], later._keys[: later._held], later._seen)

    def arrays(self) -> dict[str, Array]:
        """All that there is, for `of`."""
        self._thin_out()
        numbers = np.array([self._capacity, self._seed, self._seen], np.int64)
        return {"numbers": numbers, "rows": self._buffer[: self._held], "keys": self._keys[: self._held]}

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> RowSample:
        capacity, seed, seen = arrays["numbers"].tolist()
        found = cls(capacity, arrays["rows"].shape[1], seed)
        found._offer(arrays["rows"], arrays["keys"], seen)
        return found

    def _offer(self, rows: Array, keys: Array, seen: int) -> None:
        self._seen += seen
        start = 0
        while start < len(rows):
            stop = start + min(self._step, self._limit - self._held)
            winners = start + np.flatnonzero(keys[start:stop] < self._highest)
            self._reserve(self._held + len(winners))
            self._buffer[self._held : self._held + len(winners)] = rows[winners]
            self._keys[self._held : self._held + len(winners)] = keys[winners]
            self._held += len(winners)
            start = stop
            if self._held == self._limit:
                self._thin_out()

    def _reserve(self, wanted: int) -> None:
        """Grow by doubling, past half the limit to all of it: a short stream costs little at any capacity."""
        if wanted <= len(self._buffer):
            return
        half = self._limit // 2
        size = self._limit if wanted > half else min(max(wanted, 2 * len(self._buffer)), half)
        buffer = np.empty((size, self._buffer.shape[1]), np.float32)
        buffer[: self._held] = self._buffer[: self._held]
        keys = np.empty(size)
        keys[: self._held] = self._keys[: self._held]
        self._buffer, self._keys = buffer, keys

    def _thin_out(self) -> None:
        """Keep the `capacity` smallest keys; of equal keys the earlier row."""
        if self._held <= self._capacity:
            return
        kept = np.sort(np.argsort(self._keys[: self._held], kind="stable")[: self._capacity])
        # kept[i] >= i: moving forward in slices never overwrites a row that is still to be moved
        for start in range(0, self._capacity, self._step):
            source = kept[start : start + self._step]
            self._buffer[start : start + len(source)] = self._buffer[source]
        self._keys[: self._capacity] = self._keys[kept]
        self._held = self._capacity
        self._highest = self._keys[: self._held].max()
