"""True values of the calibration rows, for noise heads: an array or a file, checked against the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gapa_onnx.data import DataSource
from gapa_onnx.errors import UserError
from gapa_onnx.plan.head import Head, Task


def read_targets(
    given: Any, heads: Sequence[Head], data: DataSource, whose: str = "calibration"
) -> dict[str, np.ndarray]:
    """Targets (rows, …) by output.

    Parameters
    ----------
    given: an array for the one regression output, a mapping output -> array, or a .npy, .npz or .csv file.
    whose: the rows that they belong to: calibration, or held-out.

    A NaN stands for an unknown target. Rows that the model was fitted to are best given so: they serve as data
    that it has seen, while the noise is learnt from the other rows.
    """
    outputs = [head.output for head in heads if head.task is Task.REGRESSION]
    if not outputs:
        tasks = ", ".join(f"{head.output}: {head.task.value}" for head in heads)
        raise UserError(
            f"targets are for regression, and no output is taken for one ({tasks})",
            "leave `targets` out, or say `task='regression'`",
        )
    arrays = read_arrays(given, "targets")
    if not isinstance(arrays, Mapping):
        if len(outputs) > 1:
            raise UserError(
                f"the model has several regression outputs: {', '.join(outputs)}",
                "give a .npz with one array per output, named like it",
            )
        arrays = {outputs[0]: arrays}
    elif len(arrays) == 1 and len(outputs) == 1:
        arrays = {outputs[0]: next(iter(arrays.values()))}
    unknown = sorted(set(arrays) - set(outputs))
    if unknown:
        raise UserError(
            f"there are targets for {unknown[0]!r}, which is no regression output",
            f"name them like {', '.join(outputs)}",
        )
    rows = data.rows
    for array in arrays.values():
        if not array.ndim or array.dtype.kind not in "fiu":
            raise UserError(
                "the targets are not an array of numbers", "give one number, or one row, per sample"
            )
        if not len(known_rows(array)):
            raise UserError("none of the targets is a finite number", "give those of some hundred rows")
        if rows is not None:
            require_rows(array, rows, whose)
    return dict(arrays)


def require_rows(targets: np.ndarray, rows: int, whose: str = "calibration") -> None:
    """Raise UserError where there is not one target for each row."""
    if len(targets) != rows:
        raise UserError(
            f"there are {len(targets)} targets for {rows} {whose} rows",
            "give one target per row, in the same order",
        )


def known_rows(targets: np.ndarray) -> np.ndarray:
    """Positions of the rows whose targets are all finite; a NaN says that a row is not for the noise."""
    return np.flatnonzero(np.isfinite(targets.reshape(len(targets), -1).astype(np.float64)).all(axis=1))


def read_arrays(given: Any, name: str) -> np.ndarray | dict[str, np.ndarray]:
    """An array, or several by name, from memory or a file; `name` is the argument that it was given as."""
    if isinstance(given, Mapping):
        return {name: np.asarray(array) for name, array in given.items()}
    if not isinstance(given, (str, os.PathLike)):
        return np.asarray(given)
    path = Path(given)
    if not path.is_file():
        raise UserError(f"there is no file {path}", f"check the path given to `{name}`")
    try:
        if path.suffix == ".csv":
            return np.genfromtxt(path, delimiter=",", names=None, skip_header=_header_lines(path))
        loaded = np.load(path, allow_pickle=False)
        return {name: loaded[name] for name in loaded.files} if hasattr(loaded, "files") else loaded
    except (ValueError, OSError) as error:
        raise UserError(
            f"{path} cannot be read as numbers", "give a .npy, .npz or .csv of numbers"
        ) from error


def _header_lines(path: Path) -> int:
    """1 if the first line is not made of numbers."""
    with open(path, encoding="utf-8-sig") as file:
        first = file.readline().split(",")
    try:
        [float(word) for word in first]
    except ValueError:
        return 1
    return 0
