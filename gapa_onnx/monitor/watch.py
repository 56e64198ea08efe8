"""The drift test over a table of predictions, such as `gapa-onnx run -o` writes."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from gapa_onnx import record as records
from gapa_onnx.arrays import Array
from gapa_onnx.data.bundle import reading
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import read_proto
from gapa_onnx.monitor.drift import Drift, Ordinary, drift
from gapa_onnx.monitor.metrics import watched
from gapa_onnx.presence import require_thresholds

SUFFIXES = ("_score", "_pvalue")  #: of columns that are looked for where no file is given
KINDS = (".csv", ".parquet")


@dataclass(frozen=True)
class Stream:
    """What the test says of one column."""

    column: str
    against: str  #: what its rows were compared with
    drift: Drift
    holds: str | None  #: of the ordinary rows: exactly or approximately; None where there are none


@dataclass(frozen=True)
class _Known:
    """The ordinary scores of an output."""

    score: str | None  #: graph output that they are values of, if there is one
    pvalue: str | None
    values: Array
    source: str
    holds: str

    @property
    def columns(self) -> list[str]:
        """Those of a table that tell of it, the better one first."""
        return [name for name in (self.score, self.pvalue) if name is not None]


def watch(
    table: str | os.PathLike[str],
    file: str | os.PathLike[str] | None = None,
    *,
    column: str | None = None,
    level: float = 0.01,
    seed: int = 0,
) -> list[Stream]:
    """Ask of a table of predictions whether the input has changed, row after row, without labels.

    Args:
        table: a .csv or .parquet with a row for each prediction, in the order in which they were made.
        file: the converted file that made them: its ordinary rows are what is compared with. Without it the stream is
            compared with its own beginning.
        column: the one to read; the score of each output unless given, or its p-value where there is no score.
        level: the share of unchanged streams, of whatever length, in which an alarm is raised at most.
        seed: of the numbers that tell equal rows apart.
    """
    if not 0 < level < 1:
        raise UserError(f"level must lie between 0 and 1, not {level:g}", "0.01 is usual")
    columns = _columns(Path(table))
    if file is None:
        chosen: list[tuple[str, _Known | None]] = [
            (name, None) for name in _told(columns, column, Path(table))
        ]
    else:
        chosen = _of_file(columns, column, Path(table), _known(Path(file)))
    each = level / len(chosen)  # that no column at all raises a false alarm
    return [_tested(columns[name], name, known, Path(file or table), each, seed) for name, known in chosen]


def _tested(values: Array, name: str, known: _Known | None, path: Path, level: float, seed: int) -> Stream:
    if known is None:
        scores = -values if name.endswith("_pvalue") else values
        ordinary = Ordinary.of(np.empty(0))
        places = np.unique(scores, return_inverse=True)[1] * 2  # between each other, as no row is ordinary
        return Stream(name, "its own beginning", drift(ordinary, places, level, seed), None)
    ordinary = Ordinary.of(known.values)
    if name == known.score:
        places = ordinary.places(
            values.astype(known.values.dtype)
        )  # as the file has them, so that ties are ties
    else:
        _require_p_values(values, name)
        places = ordinary.places_of_p_values(values)
    against = f"{ordinary.rows} {known.source} of {path.name}"
    return Stream(name, against, drift(ordinary, places, level, seed), known.holds)


def _told(columns: Mapping[str, Array], column: str | None, table: Path) -> list[str]:
    """The columns to read where no file says which."""
    if column is not None:
        return [_required(columns, [column], table)]
    for suffix in SUFFIXES:
        found = [name for name in columns if name.endswith(suffix)]
        if found:
            return found
    raise UserError(
        f"{table} has no column that ends in {' or '.join(SUFFIXES)}: it has {_listed(columns)}",
        "name one with `column`",
    )


def _of_file(
    columns: Mapping[str, Array], column: str | None, table: Path, known: Sequence[_Known]
) -> list[tuple[str, _Known | None]]:
    """The column of each output of a file that has scores."""
    names = [name for one in known for name in one.columns]
    if column is not None:
        _required(columns, [column], table)
        if column not in names:
            raise UserError(
                f"the file has no ordinary rows of {column!r}", f"choose one of {', '.join(names)}"
            )
        return [(column, one) for one in known if column in one.columns]
    _required(columns, names, table)
    present = [([name for name in one.columns if name in columns], one) for one in known]
    return [(found[0], one) for found, one in present if found]


def _required(columns: Mapping[str, Array], wanted: Sequence[str], table: Path) -> str:
    for name in wanted:
        if name in columns:
            return name
    raise UserError(
        f"{table} has no column {' or '.join(wanted)}: it has {_listed(columns)}",
        "write the table with `gapa-onnx run … -o preds.csv`",
    )


def _listed(columns: Mapping[str, Array]) -> str:
    names = list(columns)
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "none with numbers"


def _require_p_values(values: Array, name: str) -> None:
    wrong = np.flatnonzero(~((values >= 0) & (values <= 1)))
    if len(wrong):
        raise UserError(
            f"row {wrong[0]} of {name} is {values[wrong[0]]:g}, which is no p-value",
            "they lie between 0 and 1",
        )


# ------------------------------------------------------------------- what a file calls ordinary


def _known(path: Path) -> list[_Known]:
    """The ordinary scores of a converted file, of each output that has any."""
    proto = read_proto(path)
    record = records.require(proto, str(path))
    require_thresholds(record, proto.graph)
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    outputs = {value.name for value in proto.graph.output}
    found = []
    for one in watched(record.as_json()):
        scores = record.heads[one.output].scores
        role = next((role for role in scores if record.heads[one.output].outputs[role] == one.score), None)
        if role is None:
            continue
        score = scores[role]
        table = onnx.numpy_helper.to_array(stored[score.ordinary]).ravel()
        ranked = score.ranked if score.ranked in outputs else None
        values = table[np.isfinite(table)]
        found.append(_Known(ranked, one.pvalue, values, score.source, score.holds))
    if not found:
        raise UserError(f"{path} has no score", "convert with another `score` or `task`")
    return found


# ------------------------------------------------------------------------------------ the table


def _columns(path: Path) -> dict[str, Array]:
    """The columns of numbers of a table; one that has an empty or other cell is not among them unless asked for."""
    if path.suffix.lower() not in KINDS:
        raise UserError(f"{path} is of a kind that cannot be watched", f"give a table: {' or '.join(KINDS)}")
    with reading(path):
        found = _of_csv(path) if path.suffix.lower() == ".csv" else _of_parquet(path)
    if not found or not len(next(iter(found.values()))):
        raise UserError(f"{path} has no rows of numbers", "write it with `gapa-onnx run … -o preds.csv`")
    return found


def _of_csv(path: Path) -> dict[str, Array]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        cells = [row for row in rows if row]
    uneven = next((number for number, row in enumerate(cells) if len(row) != len(header)), None)
    if uneven is not None:
        raise UserError(
            f"row {uneven} of {path} has {len(cells[uneven])} cells, the header {len(header)}", "mend it"
        )
    columns = {name.removeprefix("'"): [row[place] for row in cells] for place, name in enumerate(header)}
    return {name: values for name, texts in columns.items() if (values := _numbers(texts)) is not None}


def _numbers(texts: Sequence[str]) -> Array | None:
    try:
        return np.array(texts, np.float64)
    except ValueError:
        return None


def _of_parquet(path: Path) -> dict[str, Array]:
    try:
        from pyarrow import parquet, types
    except ImportError as error:
        raise UserError(
            f"{path} cannot be read without pyarrow", "pip install 'gapa-onnx[parquet]'"
        ) from error
    table = parquet.read_table(path)
    numeric = [
        field.name for field in table.schema if types.is_floating(field.type) or types.is_integer(field.type)
    ]
    return {name: table[name].to_numpy().astype(np.float64) for name in numeric if not table[name].null_count}
