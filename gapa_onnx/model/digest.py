"""The digest of a converted model: what it computes by, and what it says about itself, as they were when it was written.

It stands in the record and tells damage, not malice: whoever changes a file on purpose can write another one. Where
weights lie makes no difference, nor what others put into the metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import onnx

from gapa_onnx.model.weights import is_outside, pieces, place_of
from gapa_onnx.record import Record, read

Update = Callable[[bytes], object]


def digest_of(model: onnx.ModelProto) -> str:
    """SHA-256 over a model and its record, but for the digest in that."""
    digest = hashlib.sha256()
    graph = model.graph
    record = read(model)
    if record is not None:
        _framed(digest.update, json.dumps(replace(record, digest=None).as_json(), sort_keys=True).encode())
    for entry in model.opset_import:
        digest.update(entry.SerializeToString(deterministic=True))
    for message in (*graph.input, *graph.output, *graph.node, *graph.sparse_initializer, *model.functions):
        _framed(digest.update, message.SerializeToString(deterministic=True))
    for tensor in graph.initializer:
        _add_tensor(digest.update, tensor)
    return digest.hexdigest()


def is_as_written(model: onnx.ModelProto, record: Record) -> bool:
    """Whether a model is what it was when its record was written."""
    return record.digest is not None and digest_of(model) == record.digest


def tensor_digest(tensor: onnx.TensorProto) -> str:
    """SHA-256 over a tensor's name, type, shape and numbers, wherever these are."""
    digest = hashlib.sha256()
    _add_tensor(digest.update, tensor)
    return digest.hexdigest()


def _add_tensor(update: Update, tensor: onnx.TensorProto) -> None:
    _framed(update, f"{tensor.name}\0{tensor.data_type}\0{list(tensor.dims)}".encode("utf-8", "replace"))
    for piece in _numbers(tensor):
        update(piece)


def _numbers(tensor: onnx.TensorProto) -> Iterator[bytes]:
    if is_outside(tensor):
        yield from pieces(place_of(tensor))
    elif tensor.HasField("raw_data"):
        yield tensor.raw_data
    else:
        bare = onnx.TensorProto()
        bare.CopyFrom(tensor)
        for part in ("name", "doc_string"):
            bare.ClearField(part)
        yield bare.SerializeToString(deterministic=True)


def _framed(update: Update, content: bytes) -> None:
    """With its length in front, so that no two models are one row of bytes."""
    update(len(content).to_bytes(8, "little"))
    update(content)
