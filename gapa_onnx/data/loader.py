"""Data that Python code yields: loader.py:function, a CalibrationDataReader, any iterable of dicts."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.bundle import Bundle, Reader, bundle_of
from gapa_onnx.errors import UserError

#: What code that is not ours may raise, also where it means to end the program: then nothing would have been converted,
#: and yet all seem well.
FAILURES = (Exception, SystemExit)
_END = object()


def load_function(path: Path, name: str) -> Callable[[], Iterable[Mapping[str, Any]]]:
    """The function `name` of the Python file at `path`."""
    if not path.is_file():
        raise UserError(f"there is no file {path}", "the form is path/to/loader.py:function")
    # private, and one per file, so that no installed module is shadowed
    module_name = "_gapa_onnx_loader_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:  # Python knows source by the suffix .py, in small letters
        raise UserError(f"{path} is not a Python file", "the form is path/to/loader.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up here
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except FAILURES as error:
        sys.modules.pop(module_name, None)
        raise _failed(str(path), error) from error
    finally:
        with contextlib.suppress(ValueError):  # the file may have changed the path itself
            sys.path.remove(str(path.resolve().parent))
    function: Callable[[], Iterable[Mapping[str, Any]]] | None = getattr(module, name, None)
    if callable(function):
        return function
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    close = difflib.get_close_matches(name, own, n=1) or own[:1]
    raise UserError(
        f"{path} has no function '{name}'",
        f"did you mean {path}:{close[0]}?" if close else "define it; it takes no arguments and yields dicts",
    )


def function_reader(function: Callable[[], Any], name: str) -> Reader:
    """Calls the function anew for each pass."""

    def bundles() -> Iterator[Bundle]:
        with _failing(name):
            items = function()
        if items is None or not isinstance(items, Iterable):
            raise UserError(
                f"{name} returned {type(items).__name__}, not something to iterate over",
                "yield dicts of input name and array",
            )
        yield from _bundles([items] if isinstance(items, Mapping) else items, name)

    return Reader(name, bundles, count=lambda: None, eager=False)


def calibration_reader(reader: Any) -> Reader:
    """An onnxruntime CalibrationDataReader: get_next() gives a dict, or None at the end.

    A second pass calls the reader's rewind() where it has one, else what passed is kept on disk.
    """
    name = type(reader).__name__
    if not callable(getattr(reader, "rewind", None)):
        return iterable_reader(iter(reader.get_next, None), name)
    used = False

    def bundles() -> Iterator[Bundle]:
        nonlocal used
        if used:
            with _failing(name):
                reader.rewind()
        used = True
        yield from _bundles(iter(reader.get_next, None), name)

    return Reader(name, bundles, count=lambda: None, eager=False)


def iterable_reader(items: Iterable[Any], name: str) -> Reader:
    """Any iterable of dicts; an iterator, which runs only once, is kept on disk while it runs."""
    if iter(items) is items:
        items = _Replay(items, name)
    return Reader(name, lambda: _bundles(items, name), count=lambda: None, eager=False)


def as_arrays(item: Any, where: str) -> dict[str, Array]:
    """A dict of anything array-like as a dict of arrays."""
    if not isinstance(item, Mapping):
        raise UserError(
            f"{where} is of type {type(item).__name__}, not a dict", "yield dicts of input name and array"
        )
    arrays = {}
    for key, value in item.items():
        try:
            arrays[str(key)] = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
        except FAILURES as error:
            raise UserError(f"{where}: '{key}' is not an array: {error}", "give numpy arrays") from error
    return arrays


def _bundles(items: Iterable[Any], name: str) -> Iterator[Bundle]:
    with _failing(name):
        iterator = iter(items)
    number = 0
    while True:
        with _failing(name):
            item = next(iterator, _END)
        if item is _END:
            return
        where = f"item {number} of {name}"
        yield bundle_of(as_arrays(item, where), where)
        number += 1


@contextlib.contextmanager
def _failing(name: str) -> Iterator[None]:
    """What the loader's own code raises, as a sentence."""
    try:
        yield
    except UserError:
        raise
    except FAILURES as error:
        raise _failed(name, error) from error


def _failed(name: str, error: BaseException) -> UserError:
    if isinstance(error, SystemExit):
        return UserError(
            f"{name} ended the program", "a loader must not call sys.exit; let it return instead"
        )
    return UserError(
        f"{name} failed: {type(error).__name__}: {error}", "the error is raised by the loader's own code"
    )


class _Replay:
    """An iterator of dicts that can be iterated again: what has passed is in a temporary file.

    Memory stays bounded by one dict; the disk takes the size of the data. A pass that was left half
    way is no loss: the next one replays the file and then goes on with the iterator.
    """

    def __init__(self, items: Iterator[Any], name: str):
        self._items = items
        self._name = name
        self._file = tempfile.TemporaryFile()
        self._failure: BaseException | None = None
        self._kept: list[list[tuple[str, np.dtype, tuple[int, ...], int]]] = []  #: key, dtype, shape, offset

    def __iter__(self) -> Iterator[dict[str, Array]]:
        number = 0
        while True:
            if number == len(self._kept):
                try:
                    item = next(self._items)
                except StopIteration:
                    if self._failure is not None:
                        raise self._failure from None
                    return
                except FAILURES as error:
                    # a generator that failed looks finished the next time it is asked
                    self._failure = error
                    raise
                self._keep(as_arrays(item, f"item {number} of {self._name}"))
            yield {key: self._load(dtype, shape, at) for key, dtype, shape, at in self._kept[number]}
            number += 1

    def _keep(self, arrays: dict[str, Array]) -> None:
        places = []
        for key, array in arrays.items():
            if array.dtype.hasobject:
                # text is kept as fixed-width text; other objects have no bytes of their own
                if not all(isinstance(element, str) for element in array.flat):
                    raise UserError(
                        f"{self._name}: '{key}' is an array of Python objects", "give numbers or text"
                    )
                array = array.astype(np.str_)
            offset = self._file.seek(0, 2)
            self._file.write(array.tobytes())
            places.append((key, array.dtype, array.shape, offset))
        self._kept.append(places)

    def _load(self, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> Array:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._file.seek(offset)
        return np.frombuffer(self._file.read(size), dtype).reshape(shape) if size else np.empty(shape, dtype)
