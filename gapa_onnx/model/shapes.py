"""Types and shapes of a model's tensors, as far as they can be known before it runs.

ONNX's own inference stops at operators of other domains, and at everything behind them. Where a model
has such operators, onnxruntime is asked about what is left open: it knows its own.
"""

from __future__ import annotations

import onnx
import onnxruntime as ort

from gapa_onnx.model.opening import open_proto

_KNOWN = {"", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training"}
_TYPES = {
    "float": "FLOAT", "uint8": "UINT8", "int8": "INT8", "uint16": "UINT16", "int16": "INT16",
    "int32": "INT32", "int64": "INT64", "string": "STRING", "bool": "BOOL", "float16": "FLOAT16",
    "double": "DOUBLE", "uint32": "UINT32", "uint64": "UINT64", "bfloat16": "BFLOAT16",
}  # fmt: skip


def infer_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that declares types and shapes; the model itself where inference fails."""
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:  # a model with odd annotations may still run: what is unknown is met later
        inferred = proto
    if all(_is_inferred(node) for node in proto.graph.node):
        return inferred
    unknown = _undeclared(inferred.graph)
    if unknown:
        copy = onnx.ModelProto()
        copy.CopyFrom(inferred)
        answer = _asked_of_onnxruntime(copy, unknown)
        copy.CopyFrom(inferred)
        _declare(copy.graph, answer)
        return copy
    return inferred


def _is_inferred(node: onnx.NodeProto) -> bool:
    """Whether ONNX's inference knows an operator: not of other domains, not SimplifiedLayerNormalization,
    which onnxruntime puts into ONNX's own, and not GroupNormalization, which has none."""
    if node.domain not in _KNOWN:
        return False
    named = ("SimplifiedLayerNormalization", "GroupNormalization")
    return node.domain not in ("", "ai.onnx") or node.op_type not in named


def _undeclared(graph: onnx.GraphProto) -> list[str]:
    """Names of what nodes put out and nobody says the type of."""
    infos = (*graph.value_info, *graph.output)
    known = {
        info.name for info in infos if info.type.HasField("tensor_type") and info.type.tensor_type.elem_type
    }
    other = {info.name for info in infos if info.type.WhichOneof("value") not in (None, "tensor_type")}
    names = (name for node in graph.node for name in node.output if name)
    return [name for name in names if name not in known and name not in other]


def _asked_of_onnxruntime(model: onnx.ModelProto, names: list[str]) -> list[onnx.ValueInfoProto]:
    """What onnxruntime says of tensors once they are outputs; nothing where it cannot load the model."""
    listed = {info.name for info in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in listed)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = open_proto(model, options)
    except Exception:  # an operator that it lacks: what is unknown is met later
        return []
    wanted = set(names)
    return [info for info in map(_info, session.get_outputs()) if info is not None and info.name in wanted]


def _info(tensor: ort.NodeArg) -> onnx.ValueInfoProto | None:
    kind = _TYPES.get(tensor.type.removeprefix("tensor(").removesuffix(")"))
    if kind is None:  # a sequence, a map
        return None
    # No dimensions is what it says both of a scalar and of a tensor of unknown rank.
    return onnx.helper.make_tensor_value_info(
        tensor.name, getattr(onnx.TensorProto, kind), list(tensor.shape) if tensor.shape else None
    )


def _declare(graph: onnx.GraphProto, infos: list[onnx.ValueInfoProto]) -> None:
    outputs = {info.name: info for info in graph.output}
    for info in infos:
        if info.name in outputs:
            outputs[info.name].CopyFrom(info)
        else:
            graph.value_info.append(info)
