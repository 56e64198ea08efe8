"""What packages want of a converted file: its record, its ports, and the files that it consists of."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from gapa_onnx import record as records
from gapa_onnx.data import metadata
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import read_proto
from gapa_onnx.model.weights import is_outside, place_of, tensors
from gapa_onnx.packaging.folder import File
from gapa_onnx.presence import require_described
from gapa_onnx.sessions.runtime import LIBRARY_VARIABLE, library_path

#: ONNX's types of elements, as the open inference protocol calls them.
_DATATYPES = {
    onnx.TensorProto.FLOAT: "FP32",
    onnx.TensorProto.DOUBLE: "FP64",
    onnx.TensorProto.FLOAT16: "FP16",
    onnx.TensorProto.STRING: "BYTES",
} | {
    onnx.TensorProto.DataType.Value(name): name
    for name in ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
}


@dataclass(frozen=True)
class Port:
    """An input or output of a model."""

    name: str
    is_output: bool
    datatype: str | None  #: as the open inference protocol calls it; None for what that does not have
    shape: tuple[int, ...] | None  #: -1 for what is free; None where the rank is not known


@dataclass(frozen=True)
class ConvertedFile:
    """A converted file, without its weights."""

    path: Path
    record: records.Record
    ports: tuple[Port, ...]  #: inputs, then outputs, in the order of the graph
    data: tuple[str, ...]  #: files of weights, as seen from the folder of the model
    metadata: dict[str, str] = field(repr=False)

    def names(self, outputs: bool) -> frozenset[str]:
        return frozenset(port.name for port in self.ports if port.is_output is outputs)


def converted_file(path: Path) -> ConvertedFile:
    """Read a converted file; a UserError for any other model."""
    proto = without_weights(path)
    record = records.read(proto)
    if record is None:
        raise UserError(
            f"{path} is not converted: it has no uncertainty to serve",
            f"gapa-onnx convert {shlex.quote(str(path))} --calib … comes first",
        )
    outputs = frozenset(value.name for value in proto.graph.output)
    require_described(record.heads, outputs)
    initialised = {tensor.name for tensor in proto.graph.initializer}
    fed = [value for value in proto.graph.input if value.name not in initialised]
    ports = (*(_port(value, False) for value in fed), *(_port(value, True) for value in proto.graph.output))
    return ConvertedFile(path, record, ports, external_files(proto), metadata(proto))


def _port(value: onnx.ValueInfoProto, is_output: bool) -> Port:
    if not value.type.HasField("tensor_type"):
        return Port(value.name, is_output, None, None)
    tensor = value.type.tensor_type
    sizes = [size.dim_value if size.HasField("dim_value") else -1 for size in tensor.shape.dim]
    shape = tuple(sizes) if tensor.HasField("shape") else None
    return Port(value.name, is_output, _DATATYPES.get(tensor.elem_type), shape)


def without_weights(path: Path) -> onnx.ModelProto:
    """A model whose weights beside it are there, as its file names them, and are not read."""
    read_proto(path)  # whatever is missing, cut short or leads elsewhere is said in a sentence
    return onnx.load(path, load_external_data=False)


def external_files(proto: onnx.ModelProto) -> tuple[str, ...]:
    """The files in which a model has weights, as it names them."""
    return tuple(dict.fromkeys(place_of(tensor).file for tensor in tensors(proto) if is_outside(tensor)))


def model_files(file: ConvertedFile) -> Iterator[File]:
    """The model and its weights, under their own names, by which they find each other."""
    yield File(file.path.name, "the model, with its uncertainty", file.path)
    for name in file.data:
        yield File(name, "its weights", file.path.parent / name)


def library_file() -> File:
    """The native library, for the platform that this runs on."""
    library = library_path()
    if library is None:
        raise UserError(
            "the native library is missing, which belongs into the folder",
            f"`gapa-onnx doctor` tells more; {LIBRARY_VARIABLE} may name it",
        )
    return File(library.name, "the native library of gapa-onnx", library)
