"""Rows that a promise rests on, cut into a part for whatever is fitted and a part for nothing but counting.

A promise such as "nine of ten intervals hold the true value" is exact where it is counted on rows like those to come
that had no part in anything before. So the rows are cut by a hash of their bytes, whatever their order and the size
of batches: part A (`fitting`) is for temperature, τ and noise, part B (`counting`) for tables and quantiles alone.
The rows are held out from the calibration data, or, where there are none, those calibration rows whose truth is
known; a promise is then approximate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.batching import Batch
from gapa_onnx.data.source import DataSource
from gapa_onnx.errors import UserError

MOST_FITTING = 2000  # rows of part A where a few numbers are fitted: temperature and τ
APART = 1 / 3  # of the rows of a text, in documents that are set apart: points gain little from more rows
FEWEST_DOCUMENTS = 6  # of which some are set apart
MOST_GAUGED = 100  # rows of these that a few scales are found on
MOST_COUNTING = 2000  # rows of part B where a noise head learns from part A, and gains from every row of it

#: Share of part B among few known rows. A temperature gains from every row, and coverage 0.95 is kept by 19 of them; an
#: error, or the coverage of each class, needs more (docs/decisions.md).
COUNTING = {"labels": 1 / 5, "errors": 1 / 2, "targets": 1 / 3, "nothing": 1 / 2}

Truth = Mapping[str, Array]  #: by output, one entry or one row per row of the data


@dataclass(frozen=True)
class HeldOut:
    """The rows, their two parts, and what is known to be true of them."""

    data: DataSource = field(repr=False)
    fitting: Array = field(repr=False)  #: part A, one bool per row
    counting: Array = field(repr=False)  #: part B, one bool per row
    exact: bool  #: False where the rows are calibration rows
    targets: Truth = field(default_factory=dict, repr=False)  #: NaN where not known
    labels: Truth = field(
        default_factory=dict, repr=False
    )  #: whole numbers, one or a map, -1 where not known
    apart: bool = False  #: whether they are documents of the calibration text that were set apart

    @property
    def rows(self) -> int:
        return len(self.fitting)

    def targets_in(self, part: Array) -> dict[str, Array]:
        """The targets by output, NaN for all rows outside of a part."""
        inside = {output: np.array(values, np.float64) for output, values in self.targets.items()}
        for values in inside.values():
            values[~part] = np.nan
        return inside

    def labels_in(self, part: Array) -> dict[str, Array]:
        """The labels by output, -1 for all rows outside of a part."""
        inside = {output: values.copy() for output, values in self.labels.items()}
        for values in inside.values():
            values[~part] = -1
        return inside


def hold_out(
    data: DataSource,
    calib: DataSource | None,
    targets: Truth | None = None,
    labels: Truth | None = None,
    errors: bool = False,
    seed: int = 0,
) -> HeldOut:
    """Cut rows into two parts.

    Parameters
    ----------
    data: the rows.
    calib: the calibration data, of which none may be among the rows; None where the rows are calibration rows.
    targets, labels: what is true of the rows, by output. Where it is given, part A has known rows only.
    errors: whether more is counted than one coverage: an error, or the coverage of every class.
    seed: of the cut; the same rows fall into the same parts for the same seed.
    """
    targets, labels = targets or {}, labels or {}
    known = _known(targets, labels)
    digests = row_digests(data) if calib is not None else _digests_of_known(data, known)
    if calib is not None:
        _refuse_shared(
            digests,
            row_digests(calib),
            "held-out rows",
            "hold rows out that the model was not trained on, and leave them out of `calib`",
        )
        _require_truth(len(digests), targets, labels)
    digests = _mixed(digests, seed)
    known = np.ones(len(digests), np.bool_) if known is None else known
    fitting = _fitting(int(known.sum()), targets, labels, errors)
    part = known & (digests <= np.sort(digests[known])[fitting - 1]) if fitting else np.zeros_like(known)
    others = ~part if calib is not None else known & ~part
    return HeldOut(data, part, others, calib is not None, targets, labels)


def set_apart(data: DataSource, seed: int) -> tuple[DataSource, HeldOut | None]:
    """Calibration text without some of its documents, and these, which are held out.

    Sequences of one document are alike, so that each of them looks more ordinary beside the others than a new document
    does: what is ordinary has to be counted on documents that nothing was fitted to. Without documents to spare, or where
    each is one row, the data stay as they are.
    """
    parts = data.apart(APART, FEWEST_DOCUMENTS, seed)
    if parts is None:
        return data, None
    kept, away = parts
    every = np.ones(away.rows or 0, np.bool_)
    some = np.random.default_rng(seed).permutation(len(every)) < MOST_GAUGED
    return kept, HeldOut(away, some, every, exact=True, apart=True)


def _fitting(rows: int, targets: Truth, labels: Truth, errors: bool) -> int:
    """How many of the known rows are for part A."""
    kind = ("errors" if errors else "labels") if labels else "targets" if targets else "nothing"
    counting = int(rows * COUNTING[kind])
    return rows - min(counting, MOST_COUNTING) if kind == "targets" else min(rows - counting, MOST_FITTING)


def row_digests(data: DataSource) -> Array:
    """A hash (rows,) of the bytes of every row, all inputs together; equal rows have equal ones."""
    if data.digests is not None:
        return data.digests
    parts = [batch_digests(batch) for batch in data.batches()]
    return np.concatenate(parts)


def _mixed(digests: Array, seed: int) -> Array:
    """Other hashes for another seed, still equal for equal rows (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = digests + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Array = mixed ^ (mixed >> np.uint64(31))
    return found


def batch_digests(batch: Batch) -> Array:
    """The same of a batch."""
    names = [name for name in sorted(batch) if name not in batch.constants]
    if not names:  # one row, which has no batch axis
        return np.array([_digest(_content(batch[name]) for name in sorted(batch))], np.uint64)
    rows = zip(*(batch[name] for name in names))
    return np.array([_digest(map(_content, row)) for row in rows], np.uint64)


def _digest(contents: Iterable[bytes]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for content in contents:
        digest.update(content)
    return int.from_bytes(digest.digest(), "little")


def _content(values: Array) -> bytes:
    values = np.asarray(values)
    return repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()


def _digests_of_known(data: DataSource, known: Array | None) -> Array:
    """The hashes of calibration rows; of their positions where a model takes them as they were given, so that only its
    answers tell what is one row."""
    assert known is not None
    try:
        digests = row_digests(data)
    except UserError:
        digests = np.empty(0, np.uint64)
    if len(digests) != len(known):
        return np.array([_digest([str(row).encode()]) for row in range(len(known))], np.uint64)
    return digests


def _known(targets: Truth, labels: Truth) -> Array | None:
    """Which rows something is known of; None where no truth is given."""
    found: list[Array] = []
    for values in targets.values():
        found.append(np.all(np.isfinite(values.reshape(len(values), -1).astype(np.float64)), axis=1))
    found += [np.any(values.reshape(len(values), -1) >= 0, axis=1) for values in labels.values()]
    if len({len(one) for one in found}) > 1:
        raise UserError(
            f"targets and labels differ in rows: {', '.join(str(len(one)) for one in found)}",
            "give one entry per row, for all outputs",
        )
    return np.logical_or.reduce(found) if found else None


def _require_truth(rows: int, targets: Truth, labels: Truth) -> None:
    for what, truth in (("targets", targets), ("labels", labels)):
        for values in truth.values():
            if len(values) != rows:
                raise UserError(
                    f"there are {len(values)} {what} for {rows} held-out rows",
                    f"with `held_out`, `{what}` are those of its rows, in the same order",
                )


def require_apart(rows: DataSource, calib: DataSource, what: str, hint: str) -> None:
    """UserError where some of the rows are calibration rows; `what` they are called."""
    _refuse_shared(row_digests(rows), row_digests(calib), what, hint)


def _refuse_shared(digests: Array, calib: Array, what: str, hint: str) -> None:
    shared = np.flatnonzero(np.isin(digests, calib))
    if len(shared):
        raise UserError(
            f"{len(shared)} of {len(digests)} {what} are calibration rows too, the first is row {shared[0]}",
            hint,
        )
