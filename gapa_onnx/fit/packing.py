"""Batches as named arrays, as a file can hold them, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch
from gapa_onnx.errors import UserError

Placed = tuple[int, Batch]  #: the position of the first row, and what is fed


def packed(batches: Iterable[Placed]) -> dict[str, Array]:
    """Batches that are alike as one array for each input, with a new first axis; constants once."""
    alike: dict[object, list[Placed]] = {}
    for start, batch in batches:
        parts = sorted((name, array.shape, array.dtype.str) for name, array in batch.items())
        constants = tuple((name, batch[name].tobytes()) for name in sorted(batch.constants))
        alike.setdefault((tuple(parts), constants, batch.whole, batch.rows), []).append((start, batch))
    found: dict[str, Array] = {}
    for number, group in enumerate(alike.values()):
        first = group[0][1]
        found[f"{number}/starts"] = np.array([start for start, _ in group], np.int64)
        found[f"{number}/numbers"] = np.array([first.rows or 0, first.whole], np.int64)
        for name in first:
            if name in first.constants:
                found[f"{number}/constant/{name}"] = _plain(first[name], name)
            else:
                found[f"{number}/input/{name}"] = _plain(np.stack([batch[name] for _, batch in group]), name)
    return found


def unpacked(arrays: Mapping[str, Array]) -> list[Placed]:
    """The batches, in the order of their positions; raises ValueError where that cannot be."""
    groups: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        number, _, rest = name.partition("/")
        groups.setdefault(number, {})[rest] = array
    found = []
    for group in groups.values():
        starts, (rows, whole) = group.pop("starts"), group.pop("numbers").tolist()
        constants = {
            n.removeprefix("constant/"): _fed(a) for n, a in group.items() if n.startswith("constant/")
        }
        inputs = {n.removeprefix("input/"): _fed(a) for n, a in group.items() if n.startswith("input/")}
        if any(array.shape[:1] != starts.shape for array in inputs.values()):
            raise ValueError("inputs of rows are not as many as rows")
        for at, start in enumerate(starts.tolist()):
            batch = {name: array[at] for name, array in inputs.items()}
            found.append((start, Batch(batch | constants, rows, bool(whole), constants)))
    return sorted(found, key=lambda placed: placed[0])


def _plain(array: Array, name: str) -> Array:
    """An array that a file without Python objects can hold."""
    if array.dtype.hasobject:
        return np.array(array.tolist(), np.str_).reshape(array.shape)
    if array.dtype.kind == "V":
        raise UserError(
            f"input {name!r} is of type {array.dtype.name}, which parts do not hold", "convert on one machine"
        )
    return array


def _fed(array: Array) -> Array:
    return array.astype(object) if array.dtype.kind == "U" else array


def within(arrays: Mapping[str, Array], group: str) -> dict[str, Array]:
    """The arrays whose names begin with that of a group, without it."""
    return {name.removeprefix(f"{group}/"): a for name, a in arrays.items() if name.startswith(f"{group}/")}
