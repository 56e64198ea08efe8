"""How data are fed to a model: rows in batches of one size, or batches as they were given.

Most models take samples along the first axis of their inputs, as many as one likes; data are then cut and joined to
batches whose tensors fit into memory. Some do not: they want rows in fours, time on the first axis, a state with one
column per sample. Such a model is fed what the user has put together. Which of the two a model takes is found here,
by trying, and everything that runs a model over data asks here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnxruntime import InferenceSession

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch, DataSource, InputSpec
from gapa_onnx.errors import UserError
from gapa_onnx.sessions.inference import row_count, run_batch

MOST_ROWS = 256
MEMORY = (
    256 << 20
)  # bytes of a batch and its answers: as much as the rows that a fit keeps, so that neither dominates
INPUT_NUMBERS = (
    1 << 20
)  # per batch: what a model computes on the way, which no output shows, grows with its inputs
NUMBERS_OF_A_TOKEN = 512  # a whole number that is fed may be a word, which a model makes a vector of
FEWEST_POSITIONS = 8  # that a text is cut to
TENSORS_PER_OUTPUT = (
    3  # of a source, in the converted file: itself, its variance, and what a head makes of them
)
SAME_ANSWER = 1e-3  # of the largest answer: more than rounding, less than what a sequence remembers


@dataclass(frozen=True)
class Feeding:
    """Data with the way in which a model takes them."""

    data: DataSource = field(repr=False)
    size: int | None  #: rows of a batch; None: batches as they were given
    row_bytes: float  #: of one row and its answers
    counted: tuple[int, ...] = ()  #: rows of each batch as given, where that is known
    texts: frozenset[str] = (
        frozenset()
    )  #: inputs (rows, positions) that the model also takes cut to their first positions

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        return self.data.inputs

    @property
    def description(self) -> str:
        return self.data.description

    @property
    def rows(self) -> int | None:
        """The rows of the data; None if not known."""
        if self.size is not None:
            return self.data.rows
        return sum(self.counted) if self.counted else None

    @property
    def batch_rows(self) -> int:
        """Rows of a batch, of the largest where they are as given."""
        return self.size or max(self.counted, default=1)

    def batches(self, most: int | None = None) -> Iterator[Batch]:
        """The batches from the first on, with at most so many rows each, unless they are as given."""
        if self.size is not None:
            yield from self.data.batches(min(self.size, most or self.size))
            return
        for number, batch in enumerate(self.data.as_given()):
            batch.rows = self.counted[number] if number < len(self.counted) else None
            yield batch

    def verified(self, rows: int, least: int, most: float) -> Iterator[Batch]:
        """Small batches, of at most so many rows and bytes of a row and its answers. Texts are cut to their first
        positions where fewer than `least` rows would fit."""
        fits = int(most / max(self.row_bytes, 1))
        for batch in self.batches(max(1, least if self.texts and fits < least else min(rows, fits))):
            length = max((batch[name].shape[1] for name in self.texts), default=0)
            if fits < least and length > FEWEST_POSITIONS:
                positions = int(length * most / (least * self.row_bytes))
                batch = cut_texts(batch, self.texts, min(length, max(FEWEST_POSITIONS, positions)))
            yield batch


def feeding(session: InferenceSession, data: DataSource, copies: int = 1) -> Feeding:
    """Find how a model takes data. Where it takes them neither by rows nor as given, say what it says to the latter.

    `copies` is for how many tensors of its size each output stands, where not all are outputs of this session.
    """
    by_rows = _by_rows(session, data, copies)
    if isinstance(by_rows, Feeding) and _rows_are_samples(session, data):
        return by_rows
    try:
        first = next(data.as_given())
    except UserError as error:
        raise by_rows if isinstance(by_rows, UserError) else error from None
    answers = run_batch(session, None, first)
    return Feeding(data, None, _row_bytes(first, answers, row_count(first, answers), copies))


def _by_rows(session: InferenceSession, data: DataSource, copies: int) -> Feeding | UserError:
    """Batches of one size; the error that says why not.

    Some models declare a free batch axis and yet take one row only; they are found out here.
    """
    try:
        one = next(iter(data.batches(data.batch_size or 1)))
        answers = run_batch(session, None, one)
    except UserError as error:
        return error
    rows = row_count(one)
    row_bytes = _row_bytes(one, answers, rows, copies)
    if data.batch_size is not None:
        return Feeding(data, data.batch_size, row_bytes)
    numbers = (
        sum(array.size * (NUMBERS_OF_A_TOKEN if is_words(array) else 1) for array in one.values()) / rows
    )
    size = int(max(1, min(MOST_ROWS, INPUT_NUMBERS / max(1, numbers), MEMORY / max(1, row_bytes))))
    if size > 1:
        try:
            run_batch(session, None, next(iter(data.batches(2))))
        except UserError:
            size = 1
    return Feeding(data, size, row_bytes, texts=_texts(session, one, data.inputs))


def _texts(session: InferenceSession, batch: Batch, inputs: Sequence[InputSpec]) -> frozenset[str]:
    """The inputs of words, masks and the like that can be cut to fewer positions, as has been tried on a batch."""
    free = {
        spec.name
        for spec in inputs
        if spec.shape is not None and len(spec.shape) == 2 and not isinstance(spec.shape[1], int)
    }
    found = {
        name: array.shape[1] for name, array in batch.items() if name in free and array.dtype.kind in "iub"
    }
    if len(set(found.values())) != 1 or max(found.values()) <= FEWEST_POSITIONS:
        return frozenset()
    names = frozenset(found)
    try:
        run_batch(session, None, cut_texts(batch, names, FEWEST_POSITIONS))
    except UserError:
        return frozenset()
    return names


def cut_texts(batch: Batch, texts: Collection[str], positions: int) -> Batch:
    """A batch whose texts end after so many positions."""
    cut = {name: array[:, :positions] if name in texts else array for name, array in batch.items()}
    return Batch(cut, batch.rows, batch.whole, batch.constants)


def is_words(array: Array) -> bool:
    """Whether an input may hold words by their numbers: (rows, positions) of whole numbers that are no bytes."""
    return array.ndim == 2 and array.dtype.kind == "i" and array.dtype.itemsize >= 4


def _rows_are_samples(session: InferenceSession, data: DataSource) -> bool:
    """Whether the last row of a batch as given is answered by itself as it is in its company.

    Where time is on the first axis it is not, and yet the model takes sequences of any length. Asked only where the
    user has put batches together, and asked of the first.
    """
    rows = data.rows_given_at_once()
    if rows is None or not 1 < rows <= MOST_ROWS:
        return True
    try:
        given = next(data.as_given())
        together = run_batch(session, None, given)
        last = {name: array[-1:] if _length(array) == rows else array for name, array in given.items()}
        alone = run_batch(session, None, last)
    except UserError:
        return True  # rows are taken, as has been tried
    pairs = [(a, b) for a, b in zip(together, alone) if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
    if not pairs:
        return True
    whole, single = pairs[0]
    if _length(whole) != rows or _length(single) != 1 or whole.shape[1:] != single.shape[1:]:
        return False
    largest = np.abs(whole, where=np.isfinite(whole), out=np.zeros_like(whole)).max(initial=0.0)
    return bool(np.allclose(whole[-1], single[0], rtol=0, atol=SAME_ANSWER * largest, equal_nan=True))


def _length(array: Array) -> int | None:
    """The size of the first axis; None for a number."""
    return array.shape[0] if array.ndim else None


def _row_bytes(batch: Batch, answers: Sequence[Any], rows: int, copies: int) -> float:
    """Bytes of a row, with its answers and those that stand for others of the same size."""
    tensors = sum(found.nbytes for found in answers if isinstance(found, np.ndarray))
    return (sum(array.nbytes for array in batch.values()) + copies * tensors) / max(rows, 1)


def first_batches(session: InferenceSession, fed: Feeding, rows: int, most: int | None = None) -> list[Batch]:
    """Whole batches of at most `most` rows each until there are that many rows; each knows how many it has."""
    found: list[Batch] = []
    for batch in fed.batches(most):
        batch.rows = row_count(batch, () if batch.rows is not None else run_batch(session, None, batch))
        found.append(batch)
        if sum(map(row_count, found)) >= rows:
            break
    return found
