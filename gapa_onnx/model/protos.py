"""Models in memory, also those beyond the 2 GB that protobuf can serialise as one message.

A message of that size can be neither serialised, measured nor copied as a whole; its parts can.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import onnx
from google.protobuf.message import Message

LARGEST_PROTO = (1 << 31) - (1 << 24)  # protobuf's limit, with room for what is not a weight


def is_large(model: onnx.ModelProto) -> bool:
    """Whether a model is beyond protobuf's limit; its weights are what counts."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) >= LARGEST_PROTO


def duplicate(
    model: onnx.ModelProto,
    weight: Callable[[onnx.TensorProto], onnx.TensorProto | None] = lambda tensor: tensor,
) -> onnx.ModelProto:
    """A copy, made part by part; `weight` may put something else, or nothing, in place of an initializer."""
    copy = onnx.ModelProto()
    _copy_fields(model, copy, leave="graph")
    _copy_fields(model.graph, copy.graph, leave="initializer")
    for tensor in model.graph.initializer:
        kept = weight(tensor)
        if kept is not None:
            copy.graph.initializer.append(kept)
    return copy


def _copy_fields(source: Message, target: Message, leave: str) -> None:
    for field, value in source.ListFields():
        if field.name == leave:
            continue
        if isinstance(value, (int, str)):
            setattr(target, field.name, value)
        else:
            getattr(target, field.name).extend(value)


def sha256(model: onnx.ModelProto) -> str:
    """Of the serialised model; of its parts where there is no such thing."""
    if not is_large(model):
        return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    digest = hashlib.sha256()
    for tensor in model.graph.initializer:
        digest.update(tensor.name.encode())
        digest.update(tensor.raw_data)
    for node in model.graph.node:
        digest.update(node.SerializeToString(deterministic=True))
    return digest.hexdigest()
