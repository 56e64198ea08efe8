"""Keep arrays that are needed several times, in memory up to a limit and beyond it in a temporary file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, cast

import numpy as np

from gapa_onnx.arrays import Array

IN_MEMORY = 256 << 20  # bytes of all kept parts together

Arrays = dict[str, Array]


@dataclass
class Kept:
    """A list of dicts of arrays; those beyond the limit of memory are read from the file when asked for."""

    limit: int = IN_MEMORY
    #: the arrays, or where they begin in the file; None where they were dropped
    _parts: list[Arrays | int | None] = field(default_factory=list)
    _bytes: int = 0
    _file: IO[bytes] | None = None

    def add(self, arrays: Arrays) -> int:
        """Keep a part; its number."""
        size = sum(array.nbytes for array in arrays.values())
        # Text has no plain form in a file; it is small.
        plain = not any(array.dtype.hasobject for array in arrays.values())
        if self._bytes + size <= self.limit or not plain:
            self._bytes += size
            self._parts.append(arrays)
            return len(self._parts) - 1
        if self._file is None:
            self._file = cast(IO[bytes], tempfile.TemporaryFile(prefix="gapa-onnx-"))
        self._file.seek(0, 2)
        self._parts.append(self._file.tell())
        np.lib.format.write_array(self._file, np.array(list(arrays)), allow_pickle=False)
        for array in arrays.values():
            np.lib.format.write_array(self._file, array, allow_pickle=False)
        return len(self._parts) - 1

    def drop(self, number: int) -> None:
        """Let a part go: its memory is free, its place in the file is not."""
        part = self._parts[number]
        if isinstance(part, dict):
            self._bytes -= sum(array.nbytes for array in part.values())
        self._parts[number] = None

    def __getitem__(self, number: int) -> Arrays:
        part = self._parts[number]
        if part is None:
            raise KeyError(number)
        if not isinstance(part, int):
            return part
        file = self._file
        assert file is not None
        file.seek(part)
        names = np.lib.format.read_array(file, allow_pickle=False)
        return {str(name): np.lib.format.read_array(file, allow_pickle=False) for name in names}

    def __iter__(self) -> Iterator[Arrays]:
        return (self[number] for number in range(len(self._parts)))

    def __len__(self) -> int:
        return len(self._parts)
