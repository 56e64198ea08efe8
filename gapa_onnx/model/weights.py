"""Weights that stay in their file: mapped where a step reads them, never copied from step to step.

A model whose weights are large altogether is held with the large ones outside: their tensors name a file by its whole
path, an offset and a length, as ONNX's external data do. Copies of such a model are small, all sessions map the same
pages, and an array of a weight is a view of the file. Weights that came inside one file are written to a temporary one
first. A model with few weights is held as it always was, in memory.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import load_external_data_for_tensor

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.model.protos import duplicate
from gapa_onnx.model.sound import damaged, require_sound

LARGE_TENSOR = 1 << 16  # bytes; smaller ones may be shapes or axes, whose values matter
LARGE_MODEL = 64 << 20  # bytes of all weights together; below, copies cost less than files
MOVED = 1 << 10  # bytes of a weight from which on it leaves a model that protobuf cannot serialise
ALIGNMENT = 1 << 16  # of a weight in a file, so that every system can map it
PIECE = 1 << 24  # bytes that are copied at a time
INSIDE = "inside.weights"  #: the name of a temporary file of weights that were inside the model


@dataclass(frozen=True)
class Place:
    """Where the bytes of a weight are."""

    file: str
    offset: int
    length: int

    @property
    def temporary(self) -> bool:
        return Path(self.file).name == INSIDE


def is_outside(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def place_of(tensor: onnx.TensorProto) -> Place:
    """Of a tensor that is outside."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length = entries.get("length") or _size(tensor)
    return Place(entries["location"], int(entries.get("offset") or 0), int(length))


def placed(tensor: onnx.TensorProto, place: Place) -> onnx.TensorProto:
    """The same tensor with its bytes at another place."""
    moved = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    moved.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", place.file), ("offset", place.offset), ("length", place.length)):
        moved.external_data.add(key=key, value=str(value))
    return moved


def array_of(tensor: onnx.TensorProto) -> Array:
    """The values of a tensor, inside or outside; of most types a view that reads no more than is looked at."""
    if not is_outside(tensor):
        return onnx.numpy_helper.to_array(tensor)
    kind, place = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)), place_of(tensor)
    count = int(np.prod(tensor.dims, dtype=np.int64))
    if count and count * kind.itemsize == place.length:
        mapped = np.memmap(place.file, np.uint8, "r", place.offset, (place.length,))
        view: Array = mapped.view(kind).reshape(tuple(tensor.dims))
        return view
    return onnx.numpy_helper.to_array(brought_in(tensor))  # several numbers in one byte


def brought_in(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """The same tensor with its bytes in memory; itself where they are."""
    if not is_outside(tensor):
        return tensor
    held, place = (
        onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims),
        place_of(tensor),
    )
    with open(place.file, "rb") as file:
        file.seek(place.offset)
        held.raw_data = file.read(place.length)
    return held


def inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with all weights in memory; itself where they are."""
    return duplicate(model, brought_in) if any(map(is_outside, model.graph.initializer)) else model


def read(path: Path) -> onnx.ModelProto:
    """A model file; where it has many weights beside it, these stay there.

    Raises UserError for a damaged model or weights anywhere but beside it, and what `onnx.load` does.
    """
    model, folder = read_without_weights(path), str(path.resolve().parent)
    large = [
        tensor for tensor in model.graph.initializer if is_outside(tensor) and _size(tensor) >= LARGE_TENSOR
    ]
    if sum(map(_size, large)) < LARGE_MODEL:
        large = []
    for tensor in large:
        place = place_of(tensor)
        tensor.CopyFrom(placed(tensor, Place(os.path.join(folder, place.file), place.offset, place.length)))
    left = {tensor.name for tensor in large}
    for tensor in tensors(model):
        if is_outside(tensor) and tensor.name not in left:
            load_external_data_for_tensor(tensor, folder)
            tensor.ClearField("data_location")
            del tensor.external_data[:]
    return model


def read_without_weights(path: Path) -> onnx.ModelProto:
    """A model file without what lies beside it, which is known to lie there."""
    model = onnx.load(path, format="protobuf", load_external_data=False)
    require_sound(model, str(path))
    require_beside(model, path)
    return model


def require_beside(model: onnx.ModelProto, path: Path) -> None:
    """UserError unless all data outside of a model lie in ordinary files of its folder, and reach as far as it says.

    A model names a file and onnxruntime maps it, and some releases follow what leads out of the folder: whoever makes a
    model could have any file of this machine read. So neither absolute paths, nor `..`, nor links are followed.
    """
    folder, checked = path.resolve().parent, dict[str, int]()
    for tensor in tensors(model):
        if not is_outside(tensor):
            continue
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if location not in checked:
            checked[location] = _size_beside(folder, location, str(path))
        try:
            place = place_of(tensor)
        except ValueError:
            raise damaged(str(path), f"the place of {tensor.name!r} is no number") from None
        if place.offset < 0 or place.length < 0 or place.offset + place.length > checked[location]:
            raise damaged(
                str(path),
                f"{location} is cut short: {tensor.name!r} is at {place.offset} + {place.length} bytes",
            )


def _size_beside(folder: Path, location: str, label: str) -> int:
    """Bytes of a file of weights in the folder of its model."""
    hint = "keep them beside the model, as ordinary files"
    parts = location.replace("\\", "/").split("/")
    if {"", ".."} & set(parts) or ":" in parts[0] or "\0" in location:
        raise UserError(
            f"the external data of {label} are said to be in {location!r}, out of its folder", hint
        )
    for depth in range(1, len(parts) + 1):
        if folder.joinpath(*parts[:depth]).is_symlink():
            raise UserError(
                f"the external data of {label} are behind the link {'/'.join(parts[:depth])}", hint
            )
    file = folder.joinpath(*parts)
    if not file.is_file():
        raise UserError(f"the external data of {label} are not there: no such file: {location}", hint)
    found = file.stat()
    if found.st_nlink > 1:
        raise UserError(
            f"the external data of {label} are in {location}, which has another name elsewhere", hint
        )
    return found.st_size


def require_own_data(path: Path) -> None:
    """The same for a file that onnxruntime is about to open, which is not taken apart unless it may name others."""
    if path.suffix == ".ort" or not path.is_file() or not path.stat().st_size:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b"location") < 0:  # the key of every place outside
            return
    try:
        read_without_weights(path)
    except DecodeError as error:
        raise damaged(str(path), "it is not an ONNX file, or it is cut short") from error


class Scratch:
    """A temporary folder that is there as long as this object."""

    def __init__(self) -> None:
        self.folder = os.path.realpath(tempfile.mkdtemp(prefix="gapa-onnx-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


def put_outside(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Scratch | None]:
    """The model with its large weights in a temporary file, and the folder that has to be kept as long; the model itself
    where they are few, or outside already."""
    sizes = (len(tensor.raw_data) for tensor in model.graph.initializer)
    if sum(size for size in sizes if size >= LARGE_TENSOR) < LARGE_MODEL:
        return model, None
    scratch = Scratch()
    name = os.path.join(scratch.folder, INSIDE)
    with open(name, "wb") as file:
        writer = Writer(file, name)
        return duplicate(model, lambda tensor: writer.put(tensor, LARGE_TENSOR)), scratch


class Writer:
    """Writes weights one behind the other; weights that lie at one place stay at one."""

    def __init__(self, file: IO[bytes], location: str):
        self.file = file
        self.location = location
        self._written: dict[Place, Place] = {}

    def put(self, tensor: onnx.TensorProto, least: int = 0) -> onnx.TensorProto:
        """The tensor with its bytes in this file; itself where they are in memory and fewer than `least`."""
        if not is_outside(tensor):
            held = tensor.raw_data
            return tensor if len(held) < max(least, 1) else placed(tensor, self._add([held]))
        source = place_of(tensor)
        if source not in self._written:
            self._written[source] = self._add(pieces(source))
        return placed(tensor, self._written[source])

    def _add(self, pieces: Iterator[bytes] | list[bytes]) -> Place:
        offset = -(-self.file.tell() // ALIGNMENT) * ALIGNMENT
        self.file.seek(offset)
        for piece in pieces:
            self.file.write(piece)
        return Place(self.location, offset, self.file.tell() - offset)


def pieces(place: Place) -> Iterator[bytes]:
    with open(place.file, "rb") as file:
        file.seek(place.offset)
        left = place.length
        while left:
            piece = file.read(min(left, PIECE))
            if not piece:
                raise OSError(f"{place.file} is cut short")
            left -= len(piece)
            yield piece


def beneath(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    """The model with the places of its weights told from one folder, as a session wants them, and the folder."""
    files = {place_of(tensor).file for tensor in model.graph.initializer if is_outside(tensor)}
    if not files:
        return model, None
    folder = os.path.commonpath([os.path.dirname(file) for file in files])
    return relocated(model, {file: os.path.relpath(file, folder) for file in files}), Path(folder)


def relocated(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """The model whose files of weights have other names."""

    def moved(tensor: onnx.TensorProto) -> onnx.TensorProto:
        if not is_outside(tensor):
            return tensor
        place = place_of(tensor)
        return placed(tensor, Place(names.get(place.file, place.file), place.offset, place.length))

    return duplicate(model, moved)


def _size(tensor: onnx.TensorProto) -> int:
    """Bytes of a tensor; for types of less than a byte at least as many as it has."""
    kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return int(entries.get("length") or np.prod(tensor.dims, dtype=np.int64) * kind.itemsize)


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All tensors of a model, also those in attributes and bodies."""
    yield from model.graph.initializer
    pending = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while pending:
        for attribute in pending.pop().attribute:
            yield from ([attribute.t] if attribute.HasField("t") else [])
            yield from attribute.tensors
            for body in (attribute.g, *attribute.graphs):
                yield from body.initializer
                pending += body.node
