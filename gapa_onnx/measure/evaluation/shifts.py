"""A folder of ever stranger data sets: which there are, in which order, with which labels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation.labels import KEYS, labels_beside

# The last number of a name; a minus is a sign only behind an underscore, as in rotate_-15.
_NUMBER = re.compile(r"(?:(?<=_)-)?\d+(?:\.\d+)?(?!.*\d)")
_DATA = (".npy", ".npz", ".csv", ".parquet", ".pb")


@dataclass(frozen=True)
class ShiftedSet:
    """One data set of the folder."""

    name: str
    position: float
    path: Path
    labels: Array | None  #: its own, None where those of the unshifted data apply


def shifted_sets(folder: Path) -> list[ShiftedSet]:
    """Files and sub-folders, ordered by the text and then the number of their names: noise_9, noise_10."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder", "shifted data are files or sub-folders of one folder")
    names = {}
    for path in folder.iterdir():
        name = path.name if path.is_dir() else path.stem
        usable = path.is_dir() or path.suffix.lower() in _DATA
        if usable and not path.name.startswith(".") and name.lower() not in KEYS:
            names[path] = name
    if not names:
        raise UserError(
            f"the folder {folder} holds no data sets", f"put {', '.join(_DATA)} files or folders in it"
        )
    order = sorted(
        names, key=lambda path: (_NUMBER.sub("", names[path]), _number(names[path]) or 0, path.name)
    )
    found = []
    for place, path in enumerate(order):
        number = _number(names[path])
        position = float(place) if number is None else number
        found.append(ShiftedSet(names[path], position, path, labels_beside(path)))
    return found


def _number(name: str) -> float | None:
    match = _NUMBER.search(name)
    return None if match is None else float(match[0])
