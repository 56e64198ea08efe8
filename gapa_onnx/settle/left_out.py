"""Calibration rows, each as if it had not been among the data: what the numbers of a template are found on.

A calibration row lies near the inducing points because some of them were made from it, so in the converted file its
variance is smaller than that of a new row of the same kind. Here the share s of each site is computed without the
row's own part in the inducing points (`statistics.leave_one_out_share`). These shares depend on neither τ nor A, so
they are computed once, for rows that are read once; the part of the graph behind the sites (`tail`) then answers
for them as it would for new rows, with any numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch
from gapa_onnx.fit.calibrate import Calibration, SiteFit
from gapa_onnx.fit.kept import Kept
from gapa_onnx.fit.kept_rows import Purpose, is_fixed, put_together
from gapa_onnx.progress import Progress, silent
from gapa_onnx.sessions.feeding import Feeding
from gapa_onnx.sessions.inference import row_count
from gapa_onnx.variance.masks import tensor_of, valid_positions

Arrays = dict[str, Array]
_GROUPS = ("inputs", "shares", "queries", "valid")


@dataclass(frozen=True)
class LeftOutBatch:
    """Some left-out rows: their positions in the data, the model's inputs, and shares and queries of the sites."""

    positions: Array  #: (n,)
    inputs: Arrays  #: also the tensors from which on the model is run again, see `resuming`
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


def _unpacked(arrays: Arrays) -> LeftOutBatch:
    groups: dict[str, Arrays] = {part: {} for part in _GROUPS}
    for name, array in arrays.items():
        group, colon, rest = name.partition(":")
        if colon:
            groups[group][rest] = array
    return LeftOutBatch(arrays["positions"], **groups)


def leave_out(calibration: Calibration, purposes: Purpose, progress: Progress = silent) -> LeftOutSample:
    """The calibration rows that were kept for some purposes, with their left-out shares."""
    kept, fed = calibration.kept, calibration.fed
    sample, done = LeftOutSample(), 0
    total = max([kept.rows(purpose) for purpose in Purpose if purpose in purposes], default=0)
    by_sample = any(fit.site.chosen for fit in calibration.fits)
    parts = kept.batches(purposes)
    for positions, inputs, of in put_together(parts, 1 if by_sample else fed.batch_rows, kept.fixed):
        queries, behind = calibration.reader.resuming(inputs)
        places = calibration.places
        by_site = {fit.site.output: fit.as_compared(rows) for fit, rows in zip(places, queries)}
        shares = {fit.site.output: left_out_share(fit, by_site[fit.site.output]) for fit in places}
        held = by_site if Purpose.NOISE in of else {}
        real = real_positions(places, inputs)
        sample.add(of, LeftOutBatch(positions, {**inputs, **behind}, shares, held, real))
        done += len(positions)
        progress("leaving rows out", min(1.0, done / max(total, 1)))
    calibration.reader.rest()
    return sample


def real_positions(places: Sequence[SiteFit], inputs: Arrays) -> dict[str, Array]:
    """Where positions (N, T) are no padding, by the place that has queries for them; of masks that are fed."""
    masks = {
        fit.site.output: fit.site.mask for fit in places if fit.by_position and fit.site.mask is not None
    }
    return {
        output: valid_positions(mask, inputs[tensor_of(mask)])
        for output, mask in masks.items()
        if tensor_of(mask) in inputs
    }


def chosen_rows(data: Feeding, batch_rows: int, wanted: Array) -> Iterator[tuple[Array, Batch]]:
    """The rows of some data that are wanted (rows,), in batches; other rows are among them where the model takes no part
    of a batch."""

    def parts() -> Iterator[tuple[Array, Batch, Array]]:
        start = 0
        for batch in data.batches(batch_rows):
            rows = row_count(batch)
            yield start + np.arange(rows), batch, wanted[start : start + rows].astype(np.uint8)
            start += rows

    for positions, batch, _ in put_together(parts(), batch_rows, is_fixed(data.inputs)):
        yield positions, batch


def left_out_share(fit: SiteFit, queries: Array) -> Array:
    """Shares of left-out rows in the shape of the operator's answer: (…, d) -> (…, 1). The candidates of an image, which is
    then a batch, are left out together."""
    rows = queries.reshape(-1, queries.shape[-1])
    shares = fit.leave_sample_out(rows) if fit.site.chosen else fit.leave_one_out(rows)
    return shares.astype(np.float32).reshape(*queries.shape[:-1], 1)
