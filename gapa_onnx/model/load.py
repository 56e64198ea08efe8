"""Step 1, load: an ONNX file becomes a `SourceModel` that the other steps read and never change."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx.inliner
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.logger import G_LOGGER

from gapa_onnx.arrays import Array
from gapa_onnx.data import InputSpec
from gapa_onnx.errors import UserError
from gapa_onnx.model import weights
from gapa_onnx.model.collector import collector_paused
from gapa_onnx.model.constants import constant_names
from gapa_onnx.model.order import in_order
from gapa_onnx.model.protos import sha256
from gapa_onnx.model.shapes import infer_shapes
from gapa_onnx.model.sound import require_sound
from gapa_onnx.model.tables import Tables
from gapa_onnx.record import METADATA_KEY

OLDEST_OPSET = 7  # before it, broadcasting was an attribute of each operator
# For models of ai.onnx.ml operators only; the oldest onnxruntime that we serve knows it.
OPSET_WHERE_NONE = 17


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SourceModel:
    """A model as it was given, with a view of its graph that knows types and shapes; the same only as itself.

    The graph never changes, so what takes a walk over all of it is found once and kept.
    """

    given: onnx.ModelProto = field(repr=False)  #: as it came; what the converted file is held against
    proto: onnx.ModelProto = field(
        repr=False
    )  #: its nodes in order, its own functions inlined, else the same
    graph: gs.Graph = field(repr=False)  #: read only; types and shapes inferred
    opset: int  #: of the default domain
    sha256: str
    path: Path | None
    inputs: tuple[InputSpec, ...]  #: what has to be fed: initializers are not among them
    names: frozenset[str] = field(repr=False)  #: every name that the file uses
    _scratch: weights.Scratch | None = field(
        default=None, repr=False
    )  #: of weights that came inside the file, as long as the model lives
    _views: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  #: see `once`

    @property
    def label(self) -> str:
        return str(self.path) if self.path else (self.proto.graph.name or "model")

    @property
    def outputs(self) -> list[gs.Tensor]:
        return list(self.graph.outputs)

    def once(self, view: Callable[[SourceModel], T]) -> T:
        """What `view` makes of the model; made when it is first asked for, and kept as long as the model."""
        if view not in self._views:
            self._views[view] = view(self)
        made: T = self._views[view]
        return made

    @functools.cached_property
    def tensors(self) -> Mapping[str, gs.Tensor]:
        """Every tensor of the graph by its name."""
        return MappingProxyType(self.graph.tensors())

    @functools.cached_property
    def constants(self) -> frozenset[str]:
        """Names of the tensors that do not depend on what is fed. An initializer may also be listed as an
        input, which old files had to do."""
        initializers = {tensor.name for tensor in self.proto.graph.initializer}
        return frozenset(constant_names(self.graph, initializers))


def load(model: str | os.PathLike[str] | onnx.ModelProto) -> SourceModel:
    """Read a model from a file, or take one that is in memory.

    Raises UserError for what is not a model that onnxruntime could run.
    """
    path = None if isinstance(model, onnx.ModelProto) else Path(model)
    given = model if isinstance(model, onnx.ModelProto) else read_proto(Path(model))
    if path is None:
        require_sound(given, "the model")
    if not given.graph.node:
        raise UserError(f"{_name(path)} has no nodes", "give a trained model in ONNX format")
    if any(entry.key == METADATA_KEY for entry in given.metadata_props):
        raise UserError(
            f"{_name(path)} was converted by gapa-onnx already", "give convert the original model instead"
        )
    opset = max(
        (entry.version for entry in given.opset_import if entry.domain in ("", "ai.onnx")), default=None
    )
    if opset is not None and opset < OLDEST_OPSET:
        raise UserError(
            f"{_name(path)} uses opset {opset}; opsets {OLDEST_OPSET} and newer are supported",
            "raise it with onnx.version_converter.convert_version(model, 13)",
        )
    digest = file_sha256(path) if path else sha256(given)
    given, scratch = weights.put_outside(given)
    proto = flattened(given, path)
    if opset is None:
        proto, opset = _with_default_domain(proto), OPSET_WHERE_NONE
    inferred = infer_shapes(proto)
    G_LOGGER.severity = G_LOGGER.CRITICAL  # graphsurgeon prints to stdout, which is the user's
    with collector_paused():
        graph = _with_mapped_weights(gs.import_onnx(inferred))
    return SourceModel(
        given=given,
        proto=proto,
        graph=graph,
        opset=opset,
        sha256=digest,
        path=path,
        inputs=_inputs(proto),
        names=frozenset(_all_names(proto.graph)),
        _scratch=scratch,
    )


class _Mapped(LazyValues):  # type: ignore[misc]
    """The values of a weight that lies outside the model."""

    def load(self) -> Array:
        return weights.array_of(self.tensor)


def _with_mapped_weights(graph: gs.Graph) -> gs.Graph:
    """The same graph, whose constants are read from where they lie."""
    for tensor in graph.tensors().values():
        lazy = getattr(tensor, "_values", None)
        if isinstance(lazy, LazyValues) and weights.is_outside(lazy.tensor):
            tensor.values = _Mapped(lazy.tensor)
    return graph


def _name(path: Path | None) -> str:
    return str(path) if path else "the model"


def read_proto(path: Path) -> onnx.ModelProto:
    """The model of a file; UserError where it has none, or a damaged one."""
    return _read(path, weights.read)


def read_inputs(path: Path) -> tuple[InputSpec, ...]:
    """What has to be fed to the model of a file, with the limits that its graph tells; weights that lie outside of the
    file are not read."""
    return _inputs(in_order(_read(path, weights.read_without_weights), str(path)))


def require_readable(path: Path) -> None:
    """UserError for a file that has no model, or a damaged one: what onnxruntime is not to be given."""
    _read(path, weights.read_without_weights)


def _read(path: Path, read: Callable[[Path], onnx.ModelProto]) -> onnx.ModelProto:
    if path.is_dir():
        raise UserError(f"{path} is a folder", "give the .onnx file inside it")
    if not path.exists():
        raise UserError(f"no such file: {path}", "check the path of the model")
    try:
        proto = read(path)
    except (DecodeError, ValueError) as error:
        raise UserError(
            f"{path} is not an ONNX file, or it is cut short", "export the model again"
        ) from error
    except onnx.checker.ValidationError as error:
        raise UserError(
            f"the external data of {path} cannot be read: {error}", "keep them beside the model"
        ) from error
    if not proto.HasField("graph"):
        raise UserError(f"{path} is not an ONNX file, or it is cut short", "export the model again")
    return proto


def file_sha256(path: Path) -> str:
    """Of the bytes of a file; those of weights outside of it have no part in that."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flattened(model: onnx.ModelProto, path: Path | None = None) -> onnx.ModelProto:
    """The model as a converted one holds it: its nodes in order, its own functions in place of their calls."""
    return _inline(in_order(model, _name(path)), path)


def _inline(proto: onnx.ModelProto, path: Path | None) -> onnx.ModelProto:
    """A model's own functions put in place of their calls, which onnxruntime does first of all too:
    their layers and activations become visible, and the graph that runs is the same."""
    if not proto.functions:
        return proto
    try:
        return onnx.inliner.inline_local_functions(proto)
    except Exception as error:
        raise UserError(
            f"the functions of {_name(path)} cannot be inlined: {error}", "export it without functions"
        ) from error


def _with_default_domain(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, which imports ONNX's own operators too: variances are computed with them."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    model.opset_import.add(domain="", version=OPSET_WHERE_NONE)
    return model


def _inputs(proto: onnx.ModelProto) -> tuple[InputSpec, ...]:
    initializers = {tensor.name for tensor in proto.graph.initializer}
    initializers |= {tensor.values.name for tensor in proto.graph.sparse_initializer}
    tables = Tables(proto.graph)
    specs = []
    for info in proto.graph.input:
        if info.name in initializers or not info.type.HasField("tensor_type"):
            continue
        tensor = info.type.tensor_type
        shape = None
        if tensor.HasField("shape"):
            shape = tuple(
                d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim
            )
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        specs.append(InputSpec(info.name, dtype, shape, tables.limits(info.name)))
    return tuple(specs)


def _all_names(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        yield node.name
        yield from node.output
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _all_names(subgraph)
