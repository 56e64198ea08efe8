"""Tables: .csv by the csv module, .parquet by pyarrow, both in chunks of rows.

Columns named as the inputs are the inputs (one value per row, or in parquet one list per row). Else, for
a model with one input, the numeric columns in their order are the values of a row: (N, d), or any other
trailing shape with d elements, in C order.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.binding import missing_inputs
from gapa_onnx.data.bundle import Bundle, reading, stream_of
from gapa_onnx.data.convert import kind
from gapa_onnx.data.spec import InputSpec, fixed
from gapa_onnx.errors import UserError

_CELLS_PER_CHUNK = 1 << 18


@dataclass(frozen=True)
class _Selection:
    """The columns that make up one input."""

    spec: InputSpec
    columns: tuple[int, ...]
    scalar: bool  #: one column named as the input, as opposed to columns side by side


def csv_bundles(path: Path, inputs: Sequence[InputSpec]) -> Iterator[Bundle]:
    """The rows of a csv file, comma, semicolon or tab separated, with or without a header.

    An empty cell is a missing value: NaN for a float input, an error for any other.
    """
    with reading(path), path.open(newline="", encoding="utf-8-sig") as file:
        opening = next((line for line in file if line.strip()), "")
        file.seek(0)
        rows = _numbered_rows(file, delimiter=max(",;\t", key=opening.count))
        first = next(rows, None)
        if first is None:
            return
        header = first[1] if _is_header(first[1], inputs) else None
        top = next(rows, None) if header else first
        if top is None:
            return
        numeric = [_is_number(cell) for cell in top[1]]
        selections = _select(str(path), header, numeric, inputs)
        step = max(1, _CELLS_PER_CHUNK // len(top[1]))
        width = len(first[1])
        chunk = [top]
        for row in rows:
            if len(chunk) == step:
                yield _csv_chunk(path, chunk, width, header, selections)
                chunk = []
            chunk.append(row)
        yield _csv_chunk(path, chunk, width, header, selections)


def csv_count(path: Path, inputs: Sequence[InputSpec]) -> int | None:
    """The rows of a csv file by its lines; None where quoted cells may run over several lines."""
    rows, first = 0, b""
    with path.open("rb") as file:
        for line in file:
            if b'"' in line:
                return None
            if line.strip():
                first = first or line
                rows += 1
    opening = first.decode("utf-8-sig", "replace").strip()
    cells = opening.split(max(",;\t", key=opening.count))
    return rows - _is_header(cells, inputs) if rows else 0


def _numbered_rows(file: IO[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that hold something, each with the number of its line."""
    reader = csv.reader(file, delimiter=delimiter)
    for row in reader:
        if row and (len(row) > 1 or row[0].strip()):
            yield reader.line_num, row


def _is_header(cells: Sequence[str], inputs: Sequence[InputSpec]) -> bool:
    """No number in it, or only the numbers that pandas gives to unnamed columns (0, 1, 2 …).

    A first row of data with one bad cell is not taken for a header: it should be reported, not lost.
    """
    if any(kind(spec.dtype) == "text" for spec in inputs):
        return any(spec.name in cells for spec in inputs)
    numbers = [cell for cell in cells if cell.strip() and _is_number(cell)]
    if len(numbers) == len(cells):
        return False
    start = numbers[0].strip() if numbers else "0"
    return start in ("0", "1") and all(cell.strip() == str(int(start) + i) for i, cell in enumerate(numbers))


def _is_number(cell: str) -> bool:
    if not cell.strip():
        return True  # a missing value of a column that may well be numeric
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _select(
    where: str, header: Sequence[str] | None, numeric: Sequence[bool], inputs: Sequence[InputSpec]
) -> list[_Selection]:
    names = [name.strip() for name in header or ()]
    missing = [spec.name for spec in inputs if spec.name not in names]
    if len(inputs) == 1 and (missing or (_row_size(inputs[0]) or 1) != 1):
        return [_Selection(inputs[0], _side_by_side(where, names, numeric, inputs[0]), False)]
    if missing and not names:
        raise UserError(
            f"{where} has no header, so its columns cannot be told apart as the model's {len(inputs)} inputs",
            f"name the columns {', '.join(spec.name for spec in inputs)}",
        )
    if missing:
        raise missing_inputs(where, missing, names)
    _require_single_values(where, inputs)
    return [_Selection(spec, (names.index(spec.name),), True) for spec in inputs]


def _require_single_values(where: str, inputs: Sequence[InputSpec]) -> None:
    for spec in inputs:
        if spec.shape is not None and _row_size(spec) not in (1, None):
            raise UserError(
                f"{where} has one column for input '{spec.name}', which takes {spec}",
                "several inputs of more than one value per row go into a .npz file",
            )


def _side_by_side(
    where: str, names: Sequence[str], numeric: Sequence[bool], spec: InputSpec
) -> tuple[int, ...]:
    """The columns of the only input: all, the numeric ones, or those of them that have a name."""
    every = tuple(range(len(numeric)))
    numbers = every if kind(spec.dtype) == "text" else tuple(column for column in every if numeric[column])
    # pandas leaves its index unnamed
    named = tuple(column for column in numbers if not names or names[column])
    wanted = _row_size(spec)
    if wanted is None:
        return named
    for columns in (every, numbers, named):
        if len(columns) == wanted:
            return columns
    count = f"{len(every)} columns" + (f" ({len(numbers)} numeric)" if numbers != every else "")
    raise UserError(
        f"{where} has {count}, but input '{spec.name}' takes {spec}, that is {wanted} per row",
        "leave out columns that are not inputs, such as labels",
    )


def _row_shape(spec: InputSpec) -> tuple[int, ...] | None:
    """The shape of one row, or None where the model leaves that open."""
    if spec.shape is None:
        return None
    sizes = tuple(size for size in spec.shape[1:] if fixed(size))
    return sizes if len(sizes) == len(spec.shape[1:]) else None


def _row_size(spec: InputSpec) -> int | None:
    """Elements of one row, or None where the model leaves that open."""
    shape = _row_shape(spec)
    return None if shape is None else math.prod(shape)


def _csv_chunk(
    path: Path,
    chunk: Sequence[tuple[int, Sequence[str]]],
    width: int,
    header: Sequence[str] | None,
    selections: Sequence[_Selection],
) -> Bundle:
    for line, row in chunk:
        if len(row) != width:
            raise UserError(
                f"{path}, line {line}: {len(row)} columns where the first line has {width}",
                "complete the row",
            )
    arrays = {}
    for selection in selections:
        spec, columns = selection.spec, selection.columns
        cells = [[row[column] for column in columns] for _, row in chunk]

        def name_cell(row: int, column: int, columns: tuple[int, ...] = columns) -> str:
            title = header[columns[column]].strip() if header else ""
            place = f"{path}, line {chunk[row][0]}, column {columns[column] + 1}"
            return f"{place} ('{title}')" if title else place

        values = _numbers(cells, spec, name_cell)  # (rows, columns)
        arrays[spec.name] = stream_of(_shaped(values, spec, str(path)), f"{path}: '{spec.name}'")
    return Bundle(str(path), arrays)


def _numbers(cells: list[list[str]], spec: InputSpec, name_cell: Callable[[int, int], str]) -> Array:
    """Cells as int64 where the input is an integer and they are too, else as float64."""
    if kind(spec.dtype) == "text":
        return np.array(cells, dtype=np.str_)
    if kind(spec.dtype) == "int":
        try:
            return np.array(cells, dtype=np.int64)
        except (ValueError, OverflowError):
            pass
    try:
        return np.array(cells, dtype=np.float64)
    except ValueError:
        pass
    missing = kind(spec.dtype) == "float"
    for number, row in enumerate(cells):
        for column, cell in enumerate(row):
            if not cell.strip() and missing:
                row[column] = "nan"
            elif not cell.strip() or not _is_number(cell):
                raise UserError(
                    f"{name_cell(number, column)}: {cell!r} is not a number",
                    f"input '{spec.name}' takes {spec}",
                )
    return np.array(cells, dtype=np.float64)


def _shaped(values: Array, spec: InputSpec, where: str) -> Array:
    """Rows of values (n, …) in the trailing shape of the input, where the model fixes it."""
    shape = _row_shape(spec)
    if spec.shape == () or shape is None:
        return values
    given, wanted = math.prod(values.shape[1:]), math.prod(shape)
    if given != wanted:
        raise UserError(
            f"{where} has {given} values per row for input '{spec.name}', which takes {spec}",
            "the values of a row must fill one row of the input",
        )
    return values.reshape(len(values), *shape)


def parquet_bundles(path: Path, inputs: Sequence[InputSpec]) -> Iterator[Bundle]:
    """The rows of a parquet file, record batch by record batch; null is NaN for a float input."""
    with reading(path), _open_parquet(path) as file:
        schema = file.schema_arrow
        scalars = [_is_numeric_type(field.type) for field in schema]
        lists = [_list_depth(field.type) for field in schema]
        selections = _select_parquet(str(path), schema.names, scalars, lists, inputs)
        used = sorted({column for selection in selections for column in selection.columns})
        step = max(1, _CELLS_PER_CHUNK // max(_row_size(spec) or len(used) for spec in inputs))
        for batch in file.iter_batches(step, columns=[schema.names[c] for c in used], use_threads=False):
            arrays = {}
            for selection in selections:
                spec = selection.spec
                names = [schema.names[column] for column in selection.columns]
                columns = [_column(batch.column(name), f"{path}: column '{name}'") for name in names]
                values = columns[0] if selection.scalar else np.stack(columns, axis=1)  # (rows, …)
                arrays[spec.name] = stream_of(_shaped(values, spec, str(path)), f"{path}: '{spec.name}'")
            yield Bundle(str(path), arrays)


def parquet_count(path: Path) -> int:
    """The rows of a parquet file, which it states itself."""
    with reading(path), _open_parquet(path) as file:
        rows: int = file.metadata.num_rows
        return rows


def _select_parquet(
    where: str,
    names: Sequence[str],
    scalars: Sequence[bool],
    lists: Sequence[int],
    inputs: Sequence[InputSpec],
) -> list[_Selection]:
    missing = [spec.name for spec in inputs if spec.name not in names]
    if not missing:
        named = [_Selection(spec, (names.index(spec.name),), True) for spec in inputs]
        # a scalar column that happens to bear the name of a vector input is one of its values
        if len(inputs) > 1 or lists[named[0].columns[0]] or _row_size(inputs[0]) in (1, None):
            return named
    if len(inputs) > 1:
        raise missing_inputs(where, missing, names)
    return [_select_for_one(where, names, scalars, lists, inputs[0])]


def _select_for_one(
    where: str, names: Sequence[str], scalars: Sequence[bool], lists: Sequence[int], spec: InputSpec
) -> _Selection:
    """The only list column, or scalar columns side by side, for an input that no column is named after."""
    vectors = tuple(column for column, depth in enumerate(lists) if depth)
    if len(vectors) == 1 and not (any(scalars) and sum(scalars) == _row_size(spec)):
        return _Selection(spec, vectors, True)
    if len(vectors) > 1 and not any(scalars):
        raise UserError(
            f"{where} has several list columns for input '{spec.name}': "
            f"{', '.join(repr(names[column]) for column in vectors)}",
            f"name one of them '{spec.name}'",
        )
    titles = ["" if name.startswith("__index_level_") else name for name in names]  # pandas' unnamed index
    return _Selection(spec, _side_by_side(where, titles, scalars, spec), False)


def _column(column: Any, where: str) -> Array:
    """A column as (n,), a list column as (n, k), a list of lists as (n, k, l)."""
    if not _list_depth(column.type):
        values: Array = column.to_numpy(zero_copy_only=False)
        return values
    if column.null_count:
        raise UserError(f"{where} has a null where a list should be", "leave such rows out")
    length = getattr(column.type, "list_size", None)  # only lists of a fixed size have it
    if length is None:
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        length, longest = int(lengths.min()), int(lengths.max())
        if length != longest:
            raise UserError(
                f"{where} has lists of {length} and of {longest} values", "all rows need the same length"
            )
    values = _column(column.flatten(), where)
    return values.reshape(len(column), length, *values.shape[1:])


def _is_numeric_type(dtype: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_integer(dtype) or types.is_floating(dtype) or types.is_boolean(dtype))


def _list_depth(dtype: Any) -> int:
    import pyarrow.types as types

    is_list = types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype)
    return 1 + _list_depth(dtype.value_type) if is_list else 0


def _open_parquet(path: Path) -> Any:
    # pyarrow has no types: a file, its columns and their types are Any here and above
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError("reading .parquet needs pyarrow", "pip install 'gapa-onnx[parquet]'") from error
    return ParquetFile(path)
