"""A model's answers as a .npz, .csv or .json file, whatever the outputs are called.

A name is anybody's: in an archive it must not point out of the folder that it is unpacked into, in a table it must not
be a formula that a spreadsheet runs.
"""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gapa_onnx.cli.console import visible
from gapa_onnx.errors import UserError

Arrays = Mapping[str, np.ndarray]
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # that a cell of a spreadsheet's formula starts with
LONGEST_NAME = 1000  # bytes of a member of an archive; zip has two bytes for their number


def writer(path: Path) -> Callable[[Arrays], None]:
    """What writes a file of this kind, whole or not at all; found out before any work is done."""
    from gapa_onnx.files import replacing, writable

    kind = path.suffix.lower()
    if kind not in _WRITERS:
        raise UserError(f"{path} is of a kind that cannot be written", f"choose one of {', '.join(_WRITERS)}")
    writable(path)

    def write(arrays: Arrays) -> None:
        with replacing(path) as temporary:
            _WRITERS[kind](temporary, {name: _plain(array) for name, array in arrays.items()})

    return write


def flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1)  # (rows, elements)


def labels(name: str, array: np.ndarray) -> list[str]:
    """One per element of a row: name, name[i], name[i,j]."""
    if array.ndim == 1:
        return [name]
    return [f"{name}[{','.join(map(str, place))}]" for place in np.ndindex(array.shape[1:])]


def member_name(name: str) -> str:
    """An output's name as that of a member of an archive: itself, or with `%` and two digits for each byte that would let
    it leave the folder it is unpacked into, or that nobody sees. No two names become one."""
    parts = {part.strip() for part in name.split("/")}
    harmless = not parts & {"", ".", ".."} and visible(name) == name and not set(name) & set("%\\")
    kept = name if harmless else "".join(c if c.isalnum() or c in "_-:[]() " else _quoted(c) for c in name)
    if len(kept.encode()) > LONGEST_NAME:
        raise UserError(f"an output's name has {len(name)} characters", "write a .json instead")
    return kept


def _quoted(c: str) -> str:
    return "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))


def _plain(array: np.ndarray) -> np.ndarray:
    """Text as text: an array of Python objects would be pickled."""
    return array.astype(np.str_) if array.dtype == object else array


def _write_npz(path: Path, arrays: Arrays) -> None:
    """As np.savez, which takes an output named like one of its own arguments for that."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{member_name(name)}.npy")
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def _write_csv(path: Path, arrays: Arrays) -> None:
    # numpy's text of a float is the shortest that reads back as the same number
    columns = [_cells(flat(array)) for array in arrays.values()]
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        lines = csv.writer(file)
        lines.writerow([harmless(label) for name, array in arrays.items() for label in labels(name, array)])
        lines.writerows(np.concatenate(columns, axis=1).tolist())


def _cells(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind != "U":
        return array.astype(np.str_)
    return np.array([[harmless(cell) for cell in row] for row in array.tolist()], np.str_).reshape(
        array.shape
    )


def harmless(text: str) -> str:
    """Text for a cell, with an apostrophe in front of what a spreadsheet would take for a formula."""
    seen = visible(text, lines=True)
    return f"'{seen}" if seen.startswith(FORMULA) else seen


def _write_json(path: Path, arrays: Arrays) -> None:
    outputs = {name: _json_numbers(array) for name, array in arrays.items()}
    path.write_text(json.dumps({"outputs": outputs}, allow_nan=False), encoding="utf-8")


def _json_numbers(array: np.ndarray) -> Any:
    """Nested lists; NaN and infinity, which JSON does not have, become null."""
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array.tolist()
    numbers = array.astype(object)
    numbers[~np.isfinite(array)] = None
    return numbers.tolist()


_WRITERS: dict[str, Callable[[Path, Arrays], None]] = {
    ".npz": _write_npz,
    ".csv": _write_csv,
    ".json": _write_json,
}
