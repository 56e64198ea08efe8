"""Opening data: a path, a loader, a reader or arrays, as restartable batches that fit the model.

    folder        .npy, .npz, ONNX test data (test_data_set_*/input_*.pb), images or text, also in sub-folders
    file          one .npy, .npz, .pb, .csv, .parquet or image; text as .txt (a document a line) or .jsonl
    loader        path/to/loader.py:function, a function without arguments that yields dicts name -> array; its code is run
    Python        a dict of arrays, an iterable of dicts, a function, or an onnxruntime CalibrationDataReader

Rows with NaN or infinities are passed on: whoever uses the data counts them.
"""

from __future__ import annotations

import difflib
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import images, text
from gapa_onnx.data.batching import Batch, Batcher
from gapa_onnx.data.binding import bind, bind_whole
from gapa_onnx.data.bundle import Bundle, Reader, bundle_of
from gapa_onnx.data.folder import ACCEPTED, kind_of, open_files, open_folder, text_reader
from gapa_onnx.data.loader import (
    as_arrays,
    calibration_reader,
    function_reader,
    iterable_reader,
    load_function,
)
from gapa_onnx.data.remembered import Remembered
from gapa_onnx.data.spec import InputSpec, Preparation
from gapa_onnx.data.tables import csv_bundles, csv_count, parquet_bundles, parquet_count
from gapa_onnx.errors import DataWarning, UserError
from gapa_onnx.record import TextRecord

_HINT = f"{ACCEPTED}; one .npy, .npz, .csv, .parquet, .txt or .jsonl; or loader.py:function"


class DataSource:
    """Data that fit a model, as batches of one size, or as they were given.

    `description` says in a few words what was opened, `batch_size` how many rows the user wants a model to be run
    on at a time, `images` how images became inputs, where the data are images, `text` the same of text. Which of the two
    ways a model takes is found by `sessions.feeding`.
    """

    def __init__(self, reader: Reader, inputs: Sequence[InputSpec], batch_size: int | None = None):
        if batch_size is not None and batch_size < 1:
            raise UserError(f"the batch size is {batch_size}", "give at least 1")
        self.description = reader.description
        self.files = reader.files  #: one per row where the data are image files, else none
        self.images = reader.images
        self.text = reader.text
        self.inputs = tuple(inputs)
        self.batch_size = batch_size
        #: inputs that have held NaN, infinities or nothing at all in what was read so far, or are the same in every row
        self.unwatched: set[str] = set()
        self.remembered = Remembered(
            reader.images,
            *((None, None) if reader.text is None else (reader.text.record, reader.text.tokenizer)),
        )
        self.digests: Array | None = None  #: of all rows, where these are not at hand
        self._reader = reader

    @cached_property
    def rows(self) -> int | None:
        """The rows of the data, before a fixed batch size cuts off a remainder; None if not known."""
        if self._reader.count is not None:
            return self._reader.count()
        try:
            return sum(bind(bundle, self.inputs).rows for bundle in self._reader.bundles())
        except UserError:  # only what the model answers tells the rows of batches that are bound as a whole
            return None

    def rows_given_at_once(self) -> int | None:
        """The rows of the first of several batches in which the data were given; None where they came otherwise."""
        if self.text is not None:  # nobody has put its rows together
            return None
        first = list(itertools.islice(self._reader.bundles(), 2))
        return bind(first[0], self.inputs).rows if len(first) == 2 else None

    def as_given(self) -> Iterator[Batch]:
        """What was given together, together: neither cut nor joined along any axis."""
        empty = True
        for bundle in self._reader.bundles():
            whole = bind_whole(bundle, self.inputs)
            if any(array.size for array in whole.values() if array.ndim):
                empty = False
                yield Batch(whole, rows=None, whole=True)
        if empty:
            raise self._empty()

    def batches(self, batch_size: int = 256) -> Iterator[Batch]:
        """The rows, in order, from the first on each call; C-contiguous and of the inputs' types.

        Where the model fixes its batch size, that is the size, and a remainder is left out.
        """
        if batch_size < 1:
            raise UserError(f"the batch size is {batch_size}", "give at least 1")
        return self._noted(self._batches(batch_size))

    def _noted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, of which is remembered which inputs hold what is no number."""
        for batch in batches:
            self.unwatched |= batch.constants
            for name, array in batch.items():
                finite = array.dtype.kind != "f" or (array.size and np.isfinite(array).all())
                if name not in self.unwatched and not finite:
                    self.unwatched.add(name)
            yield batch

    def _batches(self, batch_size: int) -> Iterator[Batch]:
        batcher = Batcher(batch_size)
        size = None
        for bundle in self._reader.bundles():
            binding = bind(bundle, self.inputs)
            size = binding.size
            yield from batcher.add(binding)
        yield from batcher.flush()
        if not batcher.rows:
            raise self._empty()
        if not batcher.batches:
            raise UserError(
                f"{self.description}: {batcher.rows} rows do not fill one batch of {size}, which the model's "
                "inputs fix as their first dimension",
                f"give at least {size} rows",
            )

    def apart(self, share: float, fewest: int, seed: int) -> tuple[DataSource, DataSource] | None:
        """Text without some of its documents, and these; None where the data are no text, or it has too few."""
        parts = None if self.text is None else self.text.apart(share, fewest, seed)
        if parts is None:
            return None
        kept, away = (
            DataSource(
                replace(self._reader, bundles=text.bundles, count=text.kept.count, text=text),
                self.inputs,
                self.batch_size,
            )
            for text in parts
        )
        return kept, away

    def check(self) -> None:
        """Refuse data of which not even the first rows fit, before any work is spent on them."""
        if not self._reader.eager:
            return
        if not any(map(self._has_rows, self._reader.bundles())):
            raise self._empty()

    def _has_rows(self, bundle: Bundle) -> bool:
        """Whether a bundle holds something; UserError where it fits neither by rows nor as a whole."""
        try:
            return bind(bundle, self.inputs).rows > 0
        except UserError as error:
            try:
                return bool(bind_whole(bundle, self.inputs))
            except UserError:
                raise error from None

    def _empty(self) -> UserError:
        return UserError(f"{self.description}: there are no rows in the data", "give at least one sample")


def open_data(
    source: Any,
    inputs: Sequence[InputSpec],
    preparation: Preparation | None = None,
    batch_size: int | None = None,
    calibrated: Remembered | None = None,
) -> DataSource:
    """Open any of the forms above for a model with these inputs; `preparation` matters to images and text only.

    `batch_size` is how many rows to run a model on at a time; None leaves that to their size in memory. `calibrated`
    is how a converted file was given images or text: so are they given again, but for what `preparation` says, which is
    warned of.
    """
    if not inputs:
        raise UserError("the model has no inputs, so it takes no data", "give a model that takes data")
    before = calibrated or Remembered()
    options = before.complete(preparation or Preparation())
    data = DataSource(_reader(source, inputs, options, before.text), inputs, batch_size)
    data.check()
    for differing in _differences(data, before):
        warnings.warn(differing, DataWarning, stacklevel=2)
    return data


def recalled(
    batches: Sequence[tuple[int, Batch]],
    inputs: Sequence[InputSpec],
    remembered: Remembered,
    description: str,
    rows: int,
    unwatched: Set[str] = frozenset(),
    digests: Array | None = None,
) -> DataSource:
    """Data of which only some batches are at hand, and what was found of all of them when they were read."""
    bundles = [bundle_of(batch, description) for _, batch in batches]
    data = DataSource(
        Reader(description, lambda: iter(bundles), count=lambda: rows, images=remembered.images), inputs
    )
    data.remembered, data.digests, data.unwatched = remembered, digests, set(unwatched)
    return data


def _differences(data: DataSource, before: Remembered) -> Iterator[str]:
    """What is not as it was when the file was calibrated, in sentences."""
    found = []
    if data.images is not None and before.images is not None:
        found.append(images.differences(data.images, before.images))
    if data.text is not None and before.text is not None:
        found.append(text.differences(data.text.record, before.text))
    yield from (sentence for sentence in found if sentence is not None)


def _reader(
    source: Any, inputs: Sequence[InputSpec], options: Preparation, recorded: TextRecord | None
) -> Reader:
    if isinstance(source, (str, os.PathLike)):
        return _path_reader(os.fspath(source), inputs, options, recorded)
    if isinstance(source, Reader):
        return source
    if isinstance(source, np.ndarray):
        source = {inputs[0].name: source}
    if isinstance(source, Mapping):
        bundle = bundle_of(as_arrays(source, "the data"), "the data")
        return Reader("arrays in memory", lambda: iter([bundle]))
    if hasattr(source, "get_next"):
        return calibration_reader(source)
    if isinstance(source, Iterable):
        return iterable_reader(source, f"{type(source).__name__} of dicts")
    if callable(source):
        return function_reader(source, f"function {getattr(source, '__name__', type(source).__name__)}")
    raise UserError(f"data of type {type(source).__name__} cannot be read", _HINT)


def _path_reader(
    given: str, inputs: Sequence[InputSpec], options: Preparation, recorded: TextRecord | None
) -> Reader:
    path = Path(given)
    if path.is_dir():
        return open_folder(path, inputs, options, recorded)
    if not path.is_file():
        script, colon, function = given.rpartition(":")  # the last one: C:\x.py:load
        if colon and script.lower().endswith(".py"):
            return function_reader(load_function(Path(script), function), f"{script}:{function}")
        raise _no_such_file(path)
    readers: dict[str, Callable[[], Reader]] = {
        ".csv": lambda: Reader(
            f"file {path.name}", lambda: csv_bundles(path, inputs), count=lambda: csv_count(path, inputs)
        ),
        ".parquet": lambda: Reader(
            f"file {path.name}", lambda: parquet_bundles(path, inputs), count=lambda: parquet_count(path)
        ),
    }
    suffix = path.suffix.lower()
    if suffix in readers:
        return readers[suffix]()
    kind = kind_of(path)
    if kind == "text":
        return text_reader([path], str(path), f"file {path.name}", inputs, options, recorded)
    if kind is not None:
        return open_files(kind, [path], inputs, options, f"file {path.name}")
    if suffix == ".py":
        raise UserError(f"{path} is a Python file, but no function is named", f"write {path}:function")
    raise UserError(f"{path} is of a kind that cannot be read", _HINT)


def _no_such_file(path: Path) -> UserError:
    beside = sorted(os.listdir(path.parent)) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, n=1)
    return UserError(
        f"there is no file or folder {path}", f"did you mean {path.parent / close[0]}?" if close else _HINT
    )
