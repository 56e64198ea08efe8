"""Rows of the calibration data that are kept as they were fed, for all that is found on them after the pass.

Every row draws a key that depends on its position and the seed alone, and each purpose takes the rows with the smallest
keys: where one takes fewer than another, they are among the other's. Which rows are kept depends neither on batches nor
on how many machines have read the data.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch
from gapa_onnx.fit.kept import Kept
from gapa_onnx.fit.packing import packed, unpacked, within
from gapa_onnx.fit.streams import drawing

_KEYS = 1  # of the stretches, beside those of queries


class Purpose(enum.IntFlag):
    """What a row is for. Where one purpose takes fewer rows than another, they are among the other's."""

    WEIGHING = enum.auto()
    SCORES = enum.auto()
    SCALING = enum.auto()
    NOISE = enum.auto()
    COUNTING = enum.auto()
    STRANGE = enum.auto()  # to make strange inputs of


ROWS = {
    Purpose.WEIGHING: 500,  # the median of so many is off by 6% of their standard deviation
    Purpose.SCORES: 2000,  # quantile 0.95 is then known to about half a percent
    Purpose.SCALING: 2000,
    Purpose.NOISE: 20_000,
    Purpose.COUNTING: 2000,  # coverage 0.9 is then known to about 0.7%
    Purpose.STRANGE: 500,
}
FROM_TRUTH = Purpose.SCALING | Purpose.NOISE | Purpose.COUNTING  # only rows whose target or label is known


@dataclass
class First:
    """The positions with the smallest keys, among those that may be taken."""

    most: int
    among: Array | None = None  #: (rows,) bool; None: all
    keys: Array = field(default_factory=lambda: np.empty(0))  # ascending
    positions: Array = field(default_factory=lambda: np.empty(0, np.int64))

    def offer(self, keys: Array, positions: Array) -> bool:
        """Take in what is among the first; whether something is."""
        if len(self.keys) >= self.most and not keys.min(initial=np.inf) < self.keys[-1]:
            return False
        if self.among is not None:
            inside = positions < len(self.among)
            inside[inside] = self.among[positions[inside]]
            keys, positions = keys[inside], positions[inside]
        keys, positions = np.concatenate([self.keys, keys]), np.concatenate([self.positions, positions])
        order = np.lexsort((positions, keys))[: self.most]
        self.keys, self.positions = keys[order], positions[order]
        return True


@dataclass
class Unit:
    """Rows that are kept together: one, or a whole batch where the model takes no part of it."""

    part: int  #: number in the store
    rows: int
    constants: int  #: number of those that go along with it
    whole: bool


class KeptRows:
    """What is kept of a stream of batches. `fixed` batches are kept whole, as the model takes no others."""

    def __init__(
        self,
        seed: int,
        most: Mapping[Purpose, int],
        known: Mapping[Purpose, Array] | None = None,
        fixed: bool = False,
    ):
        self.seed, self.fixed = seed, fixed
        self.first = {purpose: First(count, (known or {}).get(purpose)) for purpose, count in most.items()}
        self.units: dict[int, Unit] = {}  # by the position of their first row
        self._kept = Kept()
        self._constants: list[dict[str, Array]] = []
        self._stretch, self._generator = 0, drawing(seed, 0, _KEYS)
        self._pruned = 0

    def begin(self, stretch: int) -> None:
        """What comes belongs to another stretch."""
        if stretch != self._stretch:
            self._stretch, self._generator = stretch, drawing(self.seed, stretch, _KEYS)

    def add(self, batch: Batch, start: int, rows: int) -> None:
        """Offer the rows of a batch, the first of which has this position."""
        keys, positions = self._generator.random(rows), start + np.arange(rows)
        taken = [first for first in self.first.values() if first.offer(keys, positions)]
        new = np.unique(np.concatenate([first.positions for first in taken])) if taken else positions[:0]
        new = new[(new >= start) & (new < start + rows)] - start
        if not len(new):
            return
        constants = self._constants_of(batch)
        arrays = {name: array for name, array in batch.items() if name not in batch.constants}
        by_rows = all(array.shape[:1] == (rows,) for array in arrays.values())
        if batch.whole or self.fixed or not by_rows:
            self.units[start] = Unit(self._kept.add(dict(arrays)), rows, constants, batch.whole)
        else:
            for at in new.tolist():
                row = {name: array[at : at + 1].copy() for name, array in arrays.items()}
                self.units[start + at] = Unit(self._kept.add(row), 1, constants, False)
        if len(self.units) > 2 * self._pruned + 64:
            self.prune()

    def join(self, later: KeptRows) -> None:
        """Take in what was kept of the stretches that come next."""
        for purpose, first in self.first.items():
            first.offer(later.first[purpose].keys, later.first[purpose].positions)
        for start, unit in later.units.items():
            constants = self._number(later._constants[unit.constants])
            self.units[start] = Unit(self._kept.add(later._kept[unit.part]), unit.rows, constants, unit.whole)
        self.prune()

    def prune(self) -> None:
        """Let go what no purpose takes any more."""
        starts = np.array(sorted(self.units), np.int64)
        live = [first.positions for first in self.first.values()]
        at = np.searchsorted(starts, np.concatenate(live), "right") - 1
        for start in np.setdiff1d(starts, starts[at] if len(starts) else starts).tolist():
            self._kept.drop(self.units.pop(start).part)
        self._pruned = len(self.units)

    def batches(self, purposes: Purpose) -> Iterator[tuple[Array, Batch, Array]]:
        """What is kept for these purposes in the order of the data: positions, what was fed, and the purposes of each row
        as numbers, 0 for a row that only goes along."""
        self.prune()
        of = np.zeros(1 + max((start + unit.rows for start, unit in self.units.items()), default=0), np.uint8)
        for purpose, first in self.first.items():
            if purpose in purposes:
                of[first.positions] |= np.uint8(purpose)
        for start, unit in sorted(self.units.items()):
            positions = start + np.arange(unit.rows)
            if of[positions].any():
                yield positions, self.batch(unit), of[positions]

    def batch(self, unit: Unit) -> Batch:
        """What was fed."""
        constants = self._constants[unit.constants]
        return Batch(self._kept[unit.part] | constants, unit.rows, unit.whole, constants)

    def arrays(self) -> dict[str, Array]:
        """All that there is, for `restore`."""
        self.prune()
        placed = [(start, self.batch(unit)) for start, unit in sorted(self.units.items())]
        found = {f"rows/{name}": array for name, array in packed(placed).items()}
        for purpose, first in self.first.items():
            found |= {f"{purpose.name}/keys": first.keys, f"{purpose.name}/positions": first.positions}
        return found

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Be what another was; raises ValueError where that cannot be."""
        for start, batch in unpacked(within(arrays, "rows")):
            fed = {name: array for name, array in batch.items() if name not in batch.constants}
            self.units[start] = Unit(
                self._kept.add(fed), batch.rows or 1, self._constants_of(batch), batch.whole
            )
        for purpose, first in self.first.items():
            keys, positions = arrays[f"{purpose.name}/keys"], arrays[f"{purpose.name}/positions"]
            if keys.shape != positions.shape or len(keys) > first.most:
                raise ValueError(f"{purpose.name} has {len(keys)} keys of {len(positions)} rows")
            first.offer(keys, positions)

    def rows(self, purpose: Purpose) -> int:
        """How many rows a purpose has."""
        return len(self.first[purpose].positions) if purpose in self.first else 0

    def single(self, purpose: Purpose) -> Iterator[tuple[Batch, dict[str, Array]]]:
        """The rows for a purpose one by one, with the constants that go along; not those of batches as given."""
        for _, batch, of in self.batches(purpose):
            if batch.whole:
                continue
            constants = {name: batch[name] for name in batch.constants}
            cut = {
                name: array
                for name, array in batch.items()
                if name not in constants and array.shape[:1] == of.shape
            }
            constants |= {name: array for name, array in batch.items() if name not in cut}
            for at in np.flatnonzero(of):
                yield Batch({name: array[at] for name, array in cut.items()}, None), constants

    def _constants_of(self, batch: Batch) -> int:
        return self._number({name: batch[name] for name in batch.constants})

    def _number(self, constants: dict[str, Array]) -> int:
        """The number of what goes along with rows, which is kept once."""
        for number, held in enumerate(self._constants):
            if held.keys() == constants.keys() and all(_same(held[name], constants[name]) for name in held):
                return number
        self._constants.append(constants)
        return len(self._constants) - 1


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


class Group:
    """Joins rows of several batches into one, where their shapes agree and every input is given by rows, but for those
    that are constant."""

    def __init__(self, batch_rows: int):
        self.batch_rows = batch_rows
        self.held: list[tuple[Array, Batch]] = []
        self.company: object = None

    def add(
        self, positions: Array, inside: Array, batch: Mapping[str, Array]
    ) -> Iterator[tuple[Array, Batch]]:
        """Take in some rows of a batch; yields those before them if the two do not go together."""
        constants = batch.constants if isinstance(batch, Batch) else frozenset()
        by_row = {
            name: array.shape[:1] == positions.shape for name, array in batch.items() if name not in constants
        }
        before, self.company = self.company, None
        if all(by_row.values()):
            shapes = {name: batch[name].shape[1:] for name in by_row}
            self.company = shapes, {name: (batch[name].shape, batch[name].tobytes()) for name in constants}
        full = sum(len(held) for held, _ in self.held) + len(inside) > self.batch_rows
        if full or self.company is None or self.company != before:
            yield from self.flush()
        part = {name: array[inside] if by_row.get(name) else array for name, array in batch.items()}
        self.held.append((positions[inside], Batch(part, len(inside), constants=constants)))

    def flush(self) -> Iterator[tuple[Array, Batch]]:
        held, self.held = self.held, []
        if len(held) == 1:
            yield held[0]
        elif held:
            positions, batches = zip(*held)
            constants = batches[0].constants
            joined = {
                name: batches[0][name] if name in constants else np.concatenate([b[name] for b in batches])
                for name in batches[0]
            }
            together: Array = np.concatenate(positions)
            yield together, Batch(joined, len(together), constants=constants)


def put_together(
    parts: Iterator[tuple[Array, Batch, Array]], batch_rows: int, fixed: bool
) -> Iterator[tuple[Array, Batch, Purpose]]:
    """Batches of the rows that have a purpose; all rows of a batch have the same purposes.

    They are as large as they may be; where the model fixes the size of a batch, or takes batches as they were given,
    those of the data stay whole, and are for all that one of their rows is for.
    """
    groups: dict[int, Group] = {}
    for positions, batch, of in parts:
        if fixed or getattr(batch, "whole", False):
            if of.any():
                yield positions, batch, Purpose(int(np.bitwise_or.reduce(of)))
            continue
        for purposes in np.unique(of[of > 0]).tolist():
            group = groups.setdefault(purposes, Group(batch_rows))
            for joined, inputs in group.add(positions, np.flatnonzero(of == purposes), batch):
                yield joined, inputs, Purpose(purposes)
    for purposes, group in groups.items():
        for joined, inputs in group.flush():
            yield joined, inputs, Purpose(purposes)


def is_fixed(inputs: Sequence[object]) -> bool:
    """Whether the model fixes the size of a batch."""
    shapes = (getattr(spec, "shape", None) for spec in inputs)
    return any(shape and isinstance(shape[0], int) for shape in shapes)
