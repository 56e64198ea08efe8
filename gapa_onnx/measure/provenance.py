"""What a converted model is, by hashes: it holds its source, and is what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import onnx

from gapa_onnx.measure.agreement import Check
from gapa_onnx.model.digest import is_as_written, tensor_digest
from gapa_onnx.model.load import flattened
from gapa_onnx.model.weights import is_outside, place_of
from gapa_onnx.record import Record

HOLDS_SOURCE = "holds the nodes and weights of its source"
AS_WRITTEN = "is as it was written"


def provenance(source: onnx.ModelProto, converted: onnx.ModelProto, record: Record) -> list[Check]:
    """Whether the graph of the source is inside unchanged, and, where it has been written, whether all is as it was then."""
    faults = sorted(set(_faults(flattened(source), converted)))
    detail = "; ".join(faults[:3]) or f"{len(source.graph.initializer)} weights, bit for bit"
    checks = [Check(HOLDS_SOURCE, not faults, detail)]
    if record.digest is not None:
        same = is_as_written(converted, record)
        checks.append(Check(AS_WRITTEN, same, "its digest is the same" if same else "its digest differs"))
    return checks


def _faults(source: onnx.ModelProto, converted: onnx.ModelProto) -> Iterator[str]:
    """What of the source is not in the converted model, or means something else there."""
    there = iter([_hash(node) for node in converted.graph.node])
    for node in source.graph.node:
        if _hash(node) not in there:  # goes on behind the one before: source nodes keep their order
            yield f"the node {node.name or node.output[0]!r} is not there as it was"
            break
    weights = {tensor.name: tensor for tensor in converted.graph.initializer}
    for tensor in source.graph.initializer:
        held = weights.get(tensor.name)
        if held is None or not _same(tensor, held):
            yield f"the weight {tensor.name!r} is not what it was"
    yield from _other_meanings(source, converted)


def _other_meanings(source: onnx.ModelProto, converted: onnx.ModelProto) -> Iterator[str]:
    """Why the same nodes would do something else."""
    if _inputs(source.graph) != _inputs(converted.graph):
        yield "its inputs are others"
    opsets = {(entry.domain, entry.version) for entry in converted.opset_import}
    for entry in source.opset_import:
        if (entry.domain, entry.version) not in opsets:
            yield f"version {entry.version} of {entry.domain or 'ai.onnx'} is not imported"
    used = {(node.domain, node.op_type) for node in source.graph.node}
    for function in converted.functions:
        if (function.domain, function.name) in used:
            yield f"the operator {function.name} is replaced by a function"


def _hash(node: onnx.NodeProto) -> bytes:
    return hashlib.sha256(node.SerializeToString(deterministic=True)).digest()


def _inputs(graph: onnx.GraphProto) -> list[tuple[str, int]]:
    """What has to be fed: old files list their weights too."""
    weights = {tensor.name for tensor in graph.initializer}
    return [(one.name, one.type.tensor_type.elem_type) for one in graph.input if one.name not in weights]


def _same(ours: onnx.TensorProto, theirs: onnx.TensorProto) -> bool:
    """Whether two weights have the same numbers; those at one place of a file are not read."""
    if is_outside(ours) and is_outside(theirs) and place_of(ours) == place_of(theirs):
        return bool(ours.name == theirs.name and ours.dims == theirs.dims)
    return tensor_digest(ours) == tensor_digest(theirs)
