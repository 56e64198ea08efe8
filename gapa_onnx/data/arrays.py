"""Files that hold arrays: .npy, .npz and ONNX test data (.pb). Nothing here ever unpickles."""

from __future__ import annotations

import math
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import onnx
from onnx import numpy_helper

from gapa_onnx.arrays import Array
from gapa_onnx.data.bundle import ArrayStream, Bundle, reading, stream_of
from gapa_onnx.data.spec import InputSpec
from gapa_onnx.errors import UserError
from gapa_onnx.tensors import fault, is_text

_NO_OBJECTS = "save it with a numeric or text dtype; arrays of Python objects are never loaded from a file"


def npy_stream(path: Path) -> ArrayStream:
    """The array of a .npy file, memory-mapped: only the rows in use are in memory."""
    with reading(path):
        with path.open("rb") as file:
            shape, _, dtype = _npy_header(file, str(path))
        # numpy cannot map an array without elements on every platform
        empty = math.prod(shape) == 0
        array = np.empty(shape, dtype) if empty else np.load(path, mmap_mode="r", allow_pickle=False)
    return stream_of(array, str(path))


def npz_bundle(path: Path) -> Bundle:
    """The arrays of a .npz file, by key, each read in pieces straight from its zip member."""
    arrays = {}
    with reading(path), zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
        for member in members:
            key = member.removesuffix(".npy")
            where = f"{path}: '{key}'"
            with archive.open(member) as file:
                try:
                    shape, fortran, dtype = _npy_header(file, where)
                except UserError:
                    # labels or notes kept as objects beside the data are no reason to refuse the data
                    if len(members) == 1:
                        raise
                    continue
            _require_whole(archive.getinfo(member), where, shape, dtype)
            arrays[key] = _member_stream(path, member, where, shape, fortran, dtype)
    if not arrays:
        raise UserError(f"{path} holds no array that can be read", _NO_OBJECTS)
    return Bundle(str(path), arrays)


def _npy_header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise UserError(f"{where} is a structured array (npy format {version[0]})", _NO_OBJECTS)
    first = version == (1, 0)
    shape, fortran, dtype = (
        np.lib.format.read_array_header_1_0(file) if first else np.lib.format.read_array_header_2_0(file)
    )
    if any(size < 0 for size in shape):
        raise UserError(f"{where} is said to have the shape {shape}", "save the file again")
    if dtype.hasobject or dtype.names:
        elements = "records" if dtype.names else "Python objects"
        raise UserError(f"{where} is an array of {elements}", _NO_OBJECTS)
    return shape, fortran, dtype


def _member_stream(
    path: Path, member: str, where: str, shape: tuple[int, ...], fortran: bool, dtype: np.dtype
) -> ArrayStream:
    def read(step: int) -> Iterator[Array]:
        with reading(path), zipfile.ZipFile(path) as archive, archive.open(member) as file:
            if fortran or not shape:
                # column by column in the file: a row is complete only when all has been read
                yield from stream_of(np.lib.format.read_array(file, allow_pickle=False), where).read(step)
                return
            _npy_header(file, where)
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            for start in range(0, shape[0], step):
                rows = min(step, shape[0] - start)
                body = file.read(rows * row_bytes)
                if len(body) < rows * row_bytes:
                    raise UserError(f"{where} ends after {start} of {shape[0]} rows", "save the file again")
                yield np.frombuffer(body, dtype).reshape(rows, *shape[1:])
            file.read(1)  # the checksum is compared at the end of the member, not before

    return ArrayStream(where, dtype, shape, read)


def _require_whole(member: zipfile.ZipInfo, where: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Refuse a member that says that it holds more than it does, before memory is taken for that."""
    wanted = math.prod(shape) * dtype.itemsize
    if member.file_size < wanted:
        raise UserError(
            f"{where} has {member.file_size} bytes, where the shape {shape} needs {wanted}",
            "save the file again",
        )


def load_tensor(path: Path) -> tuple[str, Array]:
    """The name (often empty) and the value of a TensorProto in a file."""
    with reading(path):
        tensor = onnx.TensorProto.FromString(path.read_bytes())
        if tensor.data_type == onnx.TensorProto.UNDEFINED:
            raise UserError(f"{path} holds no tensor", "ONNX test data are serialized TensorProto messages")
        wrong = fault(tensor)
        if not is_text(tensor.name) or wrong is not None:
            raise UserError(f"the tensor of {path} {wrong or 'has no name in UTF-8'}", "save the file again")
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise UserError(
                f"the data of {path} are in another file, which is not followed", "save them inside the .pb"
            )
        return tensor.name, numpy_helper.to_array(tensor)


def tensor_bundles(files: Sequence[Path], inputs: Sequence[InputSpec]) -> Iterator[Bundle]:
    """Records from .pb files, in any number of folders such as test_data_set_*.

    For several inputs, a folder is one bundle: tensors go by their names, and input_<k>.pb by position
    if the names do not tell. For one input, a folder is one bundle per file, unless some of its files
    bear the input's name: then those; in a test_data_set_* folder else the first.
    """
    folders: dict[Path, list[Path]] = {}
    for path in files:
        folders.setdefault(path.parent, []).append(path)
    for folder, members in folders.items():
        members.sort(key=_position)
        if len(inputs) > 1:
            yield _tensor_set(folder, members, inputs)
            continue
        if len(members) > 1:
            # one file at a time: a folder may hold many samples
            named = [path for path in members if load_tensor(path)[0] == inputs[0].name]
            # in a test data set, input_<k> is a position, so that only the first can be meant
            members = named or (members[:1] if folder.name.startswith("test_data_set") else members)
        for path in members:
            yield Bundle(str(path), {inputs[0].name: stream_of(load_tensor(path)[1], str(path))})


def _tensor_set(folder: Path, members: Sequence[Path], inputs: Sequence[InputSpec]) -> Bundle:
    by_name, by_position = {}, {}
    for path in members:
        name, array = load_tensor(path)
        stream = stream_of(array, str(path))
        by_name[name or path.stem] = stream
        position, _ = _position(path)
        if position < len(inputs):
            by_position[inputs[position].name] = stream
    named = sum(spec.name in by_name for spec in inputs)
    if named < len(inputs) and len(by_position) > named:
        return Bundle(str(folder), by_position)
    return Bundle(str(folder), by_name)


def _position(path: Path) -> tuple[int, str]:
    """What files are sorted by: the k of input_<k>, those without one last, then the name."""
    number = re.fullmatch(r"input_(\d+)", path.stem)
    return (int(number[1]) if number else sys.maxsize, path.name)
