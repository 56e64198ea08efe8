"""Batches, and cutting rows into them, whatever the sizes in which they come."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.binding import Binding


class Batch(dict[str, Array]):
    """What a model is fed in one run, by input, and how many samples that is.

    A batch that is `whole` came so from the user, and is neither cut nor joined with another; its samples are known
    only from what the model answers, so that `rows` may be None. `constants` are inputs that go along with every row.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        rows: int | None,
        whole: bool = False,
        constants: Collection[str] = (),
    ):
        super().__init__(arrays)
        self.rows = rows
        self.whole = whole
        self.constants = frozenset(constants)


class Batcher:
    """Collects rows and gives them back in batches of equal size.

    Rows are batched together only if they can be: with the same trailing dimensions, the same batch
    size, and the same constants beside them. Where one of these changes, the open batch is given out
    short; a model with a fixed batch size cannot take a short batch, so there it is dropped.
    """

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self.rows = 0  #: rows seen
        self.batches = 0  #: batches given out
        self._binding: Binding | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: list[dict[str, Array]] = []
        self._pending = 0

    def add(self, binding: Binding) -> Iterator[Batch]:
        """The batches that the rows of one bundle complete."""
        size = binding.size or self.batch_size
        if self._binding is not None and not _same_company(self._binding, binding):
            yield from self.flush()
        self._binding = binding
        self.rows += binding.rows
        if not binding.streams:
            self.batches += 1
            yield Batch(binding.constants, 1, constants=binding.constants)
            return
        for piece in binding.pieces(size):
            shapes = {name: array.shape[1:] for name, array in piece.items()}
            if shapes != self._shapes:
                yield from self.flush()
            self._shapes = shapes
            self._pieces.append(piece)
            self._pending += len(next(iter(piece.values())))
            while self._pending >= size:
                yield self._take(size, binding)

    def flush(self) -> Iterator[Batch]:
        """The open batch, if the model takes it."""
        if self._pending and self._binding is not None and self._binding.size is None:
            yield self._take(self._pending, self._binding)
        self._pieces, self._pending = [], 0

    def _take(self, size: int, binding: Binding) -> Batch:
        pieces, self._pieces = self._pieces, []
        self._pending -= size
        self.batches += 1
        batch = (
            pieces[0]
            if len(pieces) == 1
            else {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        )
        if self._pending:
            self._pieces = [{name: array[size:] for name, array in batch.items()}]
            batch = {name: array[:size] for name, array in batch.items()}
        return Batch(batch | binding.constants, size, constants=binding.constants)


def _same_company(one: Binding, other: Binding) -> bool:
    if one.size != other.size or one.constants.keys() != other.constants.keys():
        return False
    # bytes, so that a NaN equals itself; text arrays hold references and are compared by value
    return all(
        a.shape == b.shape and (np.array_equal(a, b) if a.dtype.kind == "O" else a.tobytes() == b.tobytes())
        for a, b in ((one.constants[name], other.constants[name]) for name in one.constants)
    )
