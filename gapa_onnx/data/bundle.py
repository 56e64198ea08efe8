"""What every reader yields: named arrays that say their shape before they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.record import ImageRecord

if TYPE_CHECKING:
    from gapa_onnx.data.text import Text


@dataclass(frozen=True)
class ArrayStream:
    """An array read along its first axis, piece by piece, so that it need not fit into memory.

    `read(step)` yields pieces of `step` rows (the last one may be shorter), and an array of rank 0 as
    it is. Each call starts anew. `where` names the array in messages.
    """

    where: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[int], Iterator[Array]]

    def whole(self) -> Array:
        pieces = self.read(max(1, self.shape[0]) if self.shape else 1)
        return next(pieces, np.empty(self.shape, self.dtype))


@dataclass(frozen=True)
class Bundle:
    """Arrays that belong together, row by row: one file, one test data set, one dict of a loader."""

    where: str
    arrays: Mapping[str, ArrayStream]


@dataclass(frozen=True)
class Reader:
    """A source of bundles; `bundles()` starts anew on each call.

    `count()` is the number of rows, or None where only reading everything would tell. `eager` readers
    may be tried when the data are opened: that has no side effects and costs one bundle. `files` are
    those of the rows, where each row is a file.
    """

    description: str
    bundles: Callable[[], Iterator[Bundle]]
    count: Callable[[], int | None] | None = None  #: None: add up the bundles, which is cheap here
    eager: bool = True
    files: tuple[Path, ...] = ()
    images: ImageRecord | None = None  #: how images become inputs, where the data are images
    text: Text | None = None  #: where the data are text


def stream_of(array: Array, where: str) -> ArrayStream:
    """An array that is in memory, or memory-mapped, as a stream."""

    def read(step: int) -> Iterator[Array]:
        if array.ndim == 0:
            yield array
            return
        for start in range(0, len(array), step):
            yield array[start : start + step]

    return ArrayStream(where, array.dtype, array.shape, read)


def bundle_of(arrays: Mapping[str, Array], where: str) -> Bundle:
    """Arrays in memory as a bundle."""
    return Bundle(where, {key: stream_of(array, f"{where}: '{key}'") for key, array in arrays.items()})


@contextmanager
def reading(where: object) -> Iterator[None]:
    """Turn what a parser throws at a broken file into a sentence that names the file.

    Parsers throw whatever their first surprise was: KeyError, TypeError, struct.error, SyntaxError.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{where} cannot be read: {reason}", "the file may be truncated, corrupt or of another format"
        ) from error
