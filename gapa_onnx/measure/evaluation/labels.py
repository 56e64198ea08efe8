"""What is true of the data: labels from a file or an array, checked against what the model answers.

.npy          the array
.npz          its only array, or the one under y, labels or targets
.csv          its only column, or the one so named; several columns without such a name are a matrix
.txt          one row per line
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.arrays import npy_stream, npz_bundle
from gapa_onnx.data.bundle import reading
from gapa_onnx.errors import UserError

KEYS = ("y", "labels", "targets", "label", "target", "class")
IGNORED = 255  #: of segmentation maps, where the model has no such class; negative labels are ignored too
_KINDS = ".npy, .npz, .csv or .txt"


def read_labels(labels: Any) -> Array:
    """Labels of numbers, one row per sample; a .npy file is memory-mapped, so only rows in use are read."""
    if isinstance(labels, (str, os.PathLike)):
        found, where = _from_file(Path(labels)), str(labels)
    else:
        found, where = np.asarray(labels), "the labels"
    if found.dtype.kind not in "biuf":
        raise UserError(f"{where} holds {found.dtype.name}, not numbers", "number the classes from 0")
    if found.ndim == 0:
        raise UserError(f"{where} is a single number", "give one row of labels per sample")
    return found


def labels_beside(path: Path) -> Array | None:
    """Labels that a .npz file of data holds itself, None for any other data."""
    if path.suffix.lower() != ".npz" or not path.is_file():
        return None
    arrays = npz_bundle(path).arrays
    key = next((key for key in KEYS if key in arrays), None)
    return None if key is None else read_labels(arrays[key].whole())


def require_rows(labels: Array, rows: int | None, what: str) -> None:
    """One label per row, where the number of rows is known."""
    if rows is not None and len(labels) != rows:
        raise UserError(
            f"there are {len(labels)} labels for {rows} rows of {what}",
            "label i belongs to row i of the data",
        )


def class_labels(labels: Array, places: tuple[int, ...], classes: int, start: int) -> Array:
    """Whole numbers (n, p) for an output with p = prod(places) classified places per row; −1 is to ignore.

    One class index per place, or one-hot rows. Only where a row has several places may a label be
    negative, or 255 beyond the classes: those places do not count.
    """
    rows, count = len(labels), int(np.prod(places, dtype=np.int64))
    if labels.shape[1:] == (classes,) and count == 1 and classes > 1:
        labels = _from_one_hot(labels, start)
    if labels.size != rows * count or (len(places) > 1 and _plain(labels.shape[1:]) != _plain(places)):
        raise UserError(
            f"a row of labels has shape {labels.shape[1:]}, but the model classifies {places or (1,)} places",
            "give one class per place, counted from 0" + (", or one-hot rows" if count == 1 else ""),
        )
    found = _whole(labels, start).reshape(rows, count)
    ignored = (
        (found < 0) | ((found == IGNORED) & (classes <= IGNORED)) if count > 1 else np.zeros_like(found, bool)
    )
    beyond = ~ignored & ((found < 0) | (found >= classes))
    if beyond.any():
        row, place = np.argwhere(beyond)[0]
        raise UserError(
            f"the label of row {start + row} is {found[row, place]}, but the model has {classes} classes",
            f"classes count from 0 to {classes - 1}",
        )
    return np.where(ignored, -1, found)


def label_matrix(labels: Array, count: int, start: int) -> Array:
    """0 and 1 for each of the labels that an input can have at once: (n, count)."""
    rows = len(labels)
    if labels.size != rows * count:
        raise UserError(
            f"a row of labels has shape {labels.shape[1:]}, but the model predicts {count} labels at once",
            "give a matrix of 0 and 1, one column per label",
        )
    found = _whole(labels, start).reshape(rows, count)
    if ((found != 0) & (found != 1)).any():
        row, place = np.argwhere((found != 0) & (found != 1))[0]
        raise UserError(
            f"label {place} of row {start + row} is {found[row, place]}",
            "this output predicts several labels at once, so each is 0 or 1",
        )
    return found


def target_values(labels: Array, shape: tuple[int, ...], start: int) -> Array:
    """Numbers to predict, (n, elements of one answer)."""
    rows, count = len(labels), int(np.prod(shape, dtype=np.int64))
    if labels.size != rows * count:
        raise UserError(
            f"a row of targets has shape {labels.shape[1:]}, but the model predicts {shape or (1,)}",
            "give one number per predicted number",
        )
    found = np.asarray(labels, np.float64).reshape(rows, count)
    if not np.isfinite(found).all():
        row = int(np.argwhere(~np.isfinite(found))[0][0])
        raise UserError(f"the target of row {start + row} is not a finite number", "leave such rows out")
    return found


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _from_one_hot(labels: Array, start: int) -> Array:
    sums = np.asarray(labels, np.float64).sum(axis=1)
    bad = ~np.isin(labels, (0, 1)).all(axis=1) | (sums != 1)
    if bad.any():
        raise UserError(
            f"row {start + int(np.argmax(bad))} of the labels is not one-hot",
            "this output predicts one class per row: a single 1 among zeros, or the class as a number",
        )
    classes: Array = labels.argmax(axis=1)
    return classes


def _whole(labels: Array, start: int) -> Array:
    if labels.dtype.kind in "biu":
        return np.asarray(labels, np.int64)
    broken = ~(np.isfinite(labels) & (labels == np.rint(labels)))
    if broken.any():
        place = tuple(np.argwhere(broken)[0])
        raise UserError(
            f"the label of row {start + place[0]} is {labels[place]}, not a whole number",
            "this output predicts classes; number them from 0",
        )
    return labels.astype(np.int64)


# ------------------------------------------------------------------------------ files


def _from_file(path: Path) -> Array:
    if not path.is_file():
        raise UserError(f"there is no file {path}", f"labels are a {_KINDS} file")
    kind = path.suffix.lower()
    if kind == ".npy":
        npy_stream(path)  # refuses what numpy would unpickle, in a sentence
        with reading(path):
            large = path.stat().st_size > 1 << 20
            found: Array = np.load(path, mmap_mode="r" if large else None, allow_pickle=False)
            return found
    if kind == ".npz":
        arrays = npz_bundle(path).arrays
        named = [key for key in KEYS if key in arrays] or list(arrays)
        if len(named) > 1 and named[0] not in KEYS:
            raise UserError(
                f"{path} holds {', '.join(arrays)}: which of them are the labels?", f"name them {KEYS[0]!r}"
            )
        return arrays[named[0]].whole()
    if kind in (".csv", ".txt"):
        return _from_table(path, delimited=kind == ".csv")
    boxes = "; boxes in a .json are for detectors" if kind == ".json" else ""
    raise UserError(f"{path} is of a kind that labels cannot be read from", f"give a {_KINDS} file{boxes}")


def _from_table(path: Path, *, delimited: bool) -> Array:
    rows, delimiter = _cells(path, delimited=delimited)
    header = None if _numbers(rows[0]) is not None else [cell.strip().lower() for cell in rows.pop(0)]
    column = None
    if header is not None and len(header) > 1:
        column = next((header.index(key) for key in KEYS if key in header), None)
    width = len(rows[0]) if rows and column is None else 1
    values = []
    for number, row in enumerate(rows, start=1 if header is None else 2):
        cells = _numbers(row if column is None else row[column : column + 1])
        if cells is None or len(cells) != width:
            raise UserError(
                f"{path}, row {number}: {delimiter.join(row)!r} is not a row of numbers like the first",
                "classes are numbers from 0; one of several columns is named y, labels or targets",
            )
        values.append(cells)
    found = np.array(values, np.float64).reshape(len(values), width)
    return found[:, 0] if width == 1 else found


def _cells(path: Path, *, delimited: bool) -> tuple[list[list[str]], str]:
    """The rows of a table, and what stands between their cells."""
    with reading(path), path.open(newline="", encoding="utf-8-sig") as file:
        lines = [line for line in file if line.strip()]
        if not lines:
            raise UserError(f"{path} is empty", "give one row of labels per sample")
        delimiter = max(",;\t", key=lines[0].count)
        rows = list(csv.reader(lines, delimiter=delimiter)) if delimited else [line.split() for line in lines]
    return rows, delimiter


def _numbers(cells: Sequence[str]) -> list[float] | None:
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return None
