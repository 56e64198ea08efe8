"""Whether a file keeps what it promises: coverage and size of sets and intervals, and the error of what it answers.

Each is told of all rows, of the rows of each class, of thirds of the data by the file's own score, since a coverage
that holds on average may fail where inputs are strange, and of OOD rows, of which there is no truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.rows import SCORE, Columns

SIZE, COVERED = "set/size", "set/covered"
DEFERRED = "deferred"
WIDTH, WITHIN = "interval/width", "interval/covered"
_THIRDS = ("least strange third", "middle third", "strangest third")

Kept = dict[str, dict[str, dict[str, float]]]  #: promise -> group of rows -> what was found


def set_columns(found: Mapping[str, Array], target: Array | None) -> Columns:
    """Size of each set, whether the true class is in it, and which rows are deferred, where the file has that."""
    columns: Columns = {}
    if "set" in found:
        chosen = found["set"].reshape(len(found["set"]), -1)
        columns[SIZE] = chosen.sum(axis=1).astype(np.float64)
        if target is not None:
            columns[COVERED] = chosen[np.arange(len(chosen)), target]
    if "defer" in found:
        columns[DEFERRED] = found["defer"].reshape(-1)
    return columns


def interval_columns(found: Mapping[str, Array], target: Array | None) -> Columns:
    """Mean width of a row's intervals, and whether they hold all its targets (n, …), where the file has intervals."""
    if "lower" not in found:
        return {}
    lower, upper = (
        found[role].astype(np.float64).reshape(len(found[role]), -1) for role in ("lower", "upper")
    )
    columns: Columns = {WIDTH: (upper - lower).mean(axis=1)}
    if target is not None:
        columns[WITHIN] = np.all((lower <= target) & (target <= upper), axis=1)
    return columns


def kept(head: Mapping[str, Any], inside: Columns, outside: Columns) -> Kept:
    """What a file promises of one output, and what was found of it, by groups of rows.

    `head` is the file's record of the output.
    """
    found: Kept = {}
    for name, measured in (("sets", _sets), ("deferral", _deferral), ("intervals", _intervals)):
        if name in head:
            rows = {group: measured(inside, chosen) for group, chosen in _groups(inside)}
            rows["all"] = {"promised": head[name]["level"], **rows["all"]}
            if outside:
                rows["OOD rows"] = measured(outside, np.ones(len(next(iter(outside.values()))), np.bool_))
            found[name] = rows
    return found


def _groups(columns: Columns) -> Iterator[tuple[str, Array]]:
    """Groups of rows by name, as masks (n,)."""
    rows = len(next(iter(columns.values())))
    yield "all", np.ones(rows, np.bool_)
    score = columns.get(f"{SCORE}score")
    if score is not None and rows >= len(_THIRDS):
        ranks = np.argsort(np.argsort(score, kind="stable"), kind="stable")
        for number, name in enumerate(_THIRDS):
            yield name, ranks * len(_THIRDS) // rows == number
    if SIZE in columns and "target" in columns:
        for label in np.unique(columns["target"]):
            yield f"class {label}", columns["target"] == label


def _sets(columns: Columns, chosen: Array) -> dict[str, float]:
    return _means(columns, chosen, {"coverage": COVERED, "set_size": SIZE})


def _intervals(columns: Columns, chosen: Array) -> dict[str, float]:
    return _means(columns, chosen, {"coverage": WITHIN, "width": WIDTH})


def _deferral(columns: Columns, chosen: Array) -> dict[str, float]:
    answered = chosen & ~columns[DEFERRED]
    found = {"answered": float(answered.sum() / chosen.sum())}
    if "target" in columns and answered.any():
        found["error"] = float((columns["gapa/predicted"] != columns["target"])[answered].mean())
    return {**found, "rows": int(chosen.sum())}


def _means(columns: Columns, chosen: Array, names: Mapping[str, str]) -> dict[str, float]:
    """The mean of each column over some rows; one without any label does not count."""
    found = {}
    for name, column in names.items():
        values = columns.get(column, np.empty(len(chosen)))[chosen].astype(np.float64)
        if column in columns and np.isfinite(values).any():
            found[name] = float(np.nanmean(values))
    return {**found, "rows": int(chosen.sum())}
