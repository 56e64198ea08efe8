"""Calibration rows, each as if it had not been among the data: what the numbers of a template are found on.

A calibration row lies near the inducing points because some of them were made from it, so in the converted file its
variance is smaller than that of a new row of the same kind. Here the share s of each site is computed without the
row's own part in the inducing points (`statistics.leave_one_out_share`). These shares depend on neither τ nor A, so
they are computed once, for rows that are read once; the part of the graph behind the sites (`tail`) then answers
for them as it would for new rows, with any numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import DataSource
from gapa_onnx.fit.calibrate import Calibration, SiteFit
from gapa_onnx.progress import Progress, silent
from gapa_onnx.sessions.feeding import Feeding
from gapa_onnx.sessions.inference import row_count
from gapa_onnx.settle.kept import Kept
from gapa_onnx.variance.masks import tensor_of, valid_positions

MOST_QUERIES = 20_000  # of all sites together, for 2000 rows: each is a solve of K x K
FEWEST_ROWS = 32  # where a row has very many queries
FEWEST_IMAGES = 200  # of a detector, whose images have a score of their own

Batch = dict[str, Array]
_GROUPS = ("inputs", "shares", "queries", "valid")


class Purpose(enum.IntFlag):
    """What a row is for. Where one purpose takes fewer rows than another, they are among the other's."""

    WEIGHING = enum.auto()
    SCORES = enum.auto()
    SCALING = enum.auto()
    NOISE = enum.auto()
    COUNTING = enum.auto()


ROWS = {
    Purpose.WEIGHING: 500,  # the median of so many is off by 6% of their standard deviation
    Purpose.SCORES: 2000,  # quantile 0.95 is then known to about half a percent
    Purpose.SCALING: 2000,
    Purpose.NOISE: 20_000,
    Purpose.COUNTING: 2000,  # coverage 0.9 is then known to about 0.7%
}
FROM_TRUTH = Purpose.SCALING | Purpose.NOISE | Purpose.COUNTING  # only rows whose target or label is known


@dataclass(frozen=True)
class LeftOutBatch:
    """Some left-out rows: their positions in the data, the model's inputs, and shares and queries of the sites."""

    positions: Array  #: (n,)
    inputs: Batch  #: also the tensors from which on the model is run again, see `resuming`
    shares: dict[str, Array]  #: by the output of the site, in the shape of the operator's answer
    queries: dict[str, Array]  #: the same for what the operator reads
    valid: dict[str, Array] = field(
        default_factory=dict
    )  #: by the site: where its positions (N, T) are no padding


@dataclass(frozen=True)
class LeftOutSample:
    """All rows that are left out, in batches of rows with the same purposes."""

    _purposes: list[Purpose] = field(default_factory=list, repr=False)
    _kept: Kept = field(default_factory=Kept, repr=False)

    def add(self, purposes: Purpose, batch: LeftOutBatch) -> None:
        self._purposes.append(purposes)
        groups = {part: getattr(batch, part) for part in _GROUPS}
        named = {f"{group}:{name}": array for group, held in groups.items() for name, array in held.items()}
        self._kept.add({"positions": batch.positions, **named})

    def batches(self, purpose: Purpose) -> Iterator[LeftOutBatch]:
        """The rows that are for this purpose."""
        for number, purposes in enumerate(self._purposes):
            if purpose in purposes:
                yield _unpacked(self._kept[number])

    def rows(self, purpose: Purpose) -> int:
        return sum(len(batch.positions) for batch in self.batches(purpose))


def _unpacked(arrays: Batch) -> LeftOutBatch:
    groups: dict[str, Batch] = {part: {} for part in _GROUPS}
    for name, array in arrays.items():
        group, colon, rest = name.partition(":")
        if colon:
            groups[group][rest] = array
    return LeftOutBatch(arrays["positions"], **groups)


def leave_out(
    calibration: Calibration,
    data: DataSource,
    purposes: Purpose,
    known: Mapping[Purpose, Array] | None = None,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> LeftOutSample:
    """Some calibration rows, chosen at random, with their left-out shares.

    Parameters
    ----------
    purposes: what rows are wanted for.
    known: positions of the rows that may be taken, for the purposes that not every row is good for.
    """
    wanted = choose(calibration, purposes, known, seed)
    sample, done, total = LeftOutSample(), 0, int(np.count_nonzero(wanted))
    fed = replace(calibration.fed, data=data)
    by_sample = any(fit.site.chosen for fit in calibration.fits)
    for positions, inputs, of in chosen_rows(fed, 1 if by_sample else fed.batch_rows, wanted):
        queries, behind = calibration.reader.resuming(inputs)
        places = calibration.places
        by_site = {fit.site.output: fit.as_compared(rows) for fit, rows in zip(places, queries)}
        shares = {fit.site.output: left_out_share(fit, by_site[fit.site.output]) for fit in places}
        kept = by_site if Purpose.NOISE in of else {}
        real = real_positions(places, inputs)
        sample.add(of, LeftOutBatch(positions, {**inputs, **behind}, shares, kept, real))
        done += len(positions)
        progress("leaving rows out", min(1.0, done / max(total, 1)))
    calibration.reader.rest()
    return sample


def real_positions(places: Sequence[SiteFit], inputs: Batch) -> dict[str, Array]:
    """Where positions (N, T) are no padding, by the place that has queries for them; of masks that are fed."""
    masks = {
        fit.site.output: fit.site.mask for fit in places if fit.by_position and fit.site.mask is not None
    }
    return {
        output: valid_positions(mask, inputs[tensor_of(mask)])
        for output, mask in masks.items()
        if tensor_of(mask) in inputs
    }


def choose(
    calibration: Calibration, purposes: Purpose, known: Mapping[Purpose, Array] | None, seed: int
) -> Array:
    """The purposes of each row of the data as numbers (rows,); 0 for a row that is not used.

    All purposes take the first rows of one random order, so that what is computed for one serves the others too.
    """
    rows = calibration.rows
    generator = np.random.default_rng(seed)
    first = generator.choice(rows, min(rows, _count(calibration, Purpose.WEIGHING)), replace=False)
    order = np.concatenate([first, generator.permutation(np.setdiff1d(np.arange(rows), first))])
    wanted = np.zeros(rows, np.uint8)
    for purpose in Purpose:
        if purpose in purposes:
            good = order[np.isin(order, known[purpose])] if known and purpose in known else order
            wanted[good[: _count(calibration, purpose)]] |= np.uint8(purpose)
    return wanted


def _count(calibration: Calibration, purpose: Purpose) -> int:
    """Rows for a purpose: fewer where each of them has many queries."""
    per_row = sum(fit.rows for fit in calibration.places) / calibration.rows
    queries = MOST_QUERIES * ROWS[purpose] / ROWS[Purpose.SCORES]
    fewest = FEWEST_IMAGES if any(fit.site.chosen for fit in calibration.fits) else FEWEST_ROWS
    return min(ROWS[purpose], max(fewest, int(queries / max(per_row, 1e-9))))


def chosen_rows(data: Feeding, batch_rows: int, wanted: Array) -> Iterator[tuple[Array, Batch, Purpose]]:
    """Batches of the rows that have a purpose; all rows of a batch have the same purposes.

    They are as large as they may be; where the model fixes the size of a batch, or takes batches as they were given,
    those of the data stay whole, and are for all that one of their rows is for.
    """
    fixed = any(spec.shape and isinstance(spec.shape[0], int) for spec in data.inputs)
    start = 0
    held: dict[int, _Group] = {}
    for batch in data.batches(batch_rows):
        rows = row_count(batch)
        of = wanted[start : start + rows]
        if fixed or getattr(batch, "whole", False):
            if of.any():
                yield start + np.arange(rows), batch, Purpose(int(np.bitwise_or.reduce(of)))
        else:
            for purposes in np.unique(of[of > 0]).tolist():
                group = held.setdefault(purposes, _Group(batch_rows))
                for positions, inputs in group.add(start, rows, np.flatnonzero(of == purposes), batch):
                    yield positions, inputs, Purpose(purposes)
        start += rows
    for purposes, group in held.items():
        for positions, inputs in group.flush():
            yield positions, inputs, Purpose(purposes)


class _Group:
    """Joins rows of several batches into one, where their shapes agree and every input is given by rows."""

    def __init__(self, batch_rows: int):
        self.batch_rows = batch_rows
        self.held: list[tuple[Array, Batch]] = []
        self.shapes: dict[str, tuple[int, ...]] | None = None

    def add(self, start: int, rows: int, inside: Array, batch: Batch) -> Iterator[tuple[Array, Batch]]:
        """Take in some rows of a batch; yields those before them if the two do not go together."""
        by_row = {name: array.shape[:1] == (rows,) for name, array in batch.items()}
        before, self.shapes = self.shapes, None
        if all(by_row.values()):
            self.shapes = {name: array.shape[1:] for name, array in batch.items()}
        full = sum(len(positions) for positions, _ in self.held) + len(inside) > self.batch_rows
        if full or self.shapes is None or self.shapes != before:
            yield from self.flush()
        part = {name: array[inside] if by_row[name] else array for name, array in batch.items()}
        self.held.append((start + inside, part))

    def flush(self) -> Iterator[tuple[Array, Batch]]:
        held, self.held = self.held, []
        if held:
            positions, batches = zip(*held)
            joined = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
            yield (np.concatenate(positions), joined) if len(held) > 1 else held[0]


def left_out_share(fit: SiteFit, queries: Array) -> Array:
    """Shares of left-out rows in the shape of the operator's answer: (…, d) -> (…, 1). The candidates of an image, which is
    then a batch, are left out together."""
    rows = queries.reshape(-1, queries.shape[-1])
    shares = fit.leave_sample_out(rows) if fit.site.chosen else fit.leave_one_out(rows)
    return shares.astype(np.float32).reshape(*queries.shape[:-1], 1)
