"""What `--json` prints about models and plans."""

from __future__ import annotations

from typing import Any

import onnx

from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.variance.sites import Site


def plan_record(plan: Plan) -> dict[str, Any]:
    return {
        "sites": [site_record(site, plan.source) for site in plan.sites],
        "witnesses": [site_record(witness, plan.source) for witness in plan.witnesses],
        "variance_outputs": list(plan.outputs),
        "heads": {
            head.output: {
                "task": head.task.value,
                "reason": head.reason,
                "logits": head.logits,
                "axis": head.axis,
            }
            for head in plan.heads
        },
        "certain_outputs": list(plan.certain_outputs),
        "refused": [vars(entry) for entry in plan.refused],
    }


def site_record(site: Site, source: SourceModel) -> dict[str, Any]:
    shape = source.tensors[site.query].shape
    return {
        "name": site.name,
        "activation": site.activation,
        "layout": site.layout.value,
        "query": site.query,
        "output": site.output,
        "shape": None if shape is None else list(shape),
    }


def ports_record(proto: onnx.ModelProto) -> dict[str, Any]:
    """Inputs that have to be fed, and outputs: name, type and shape."""
    initializers = {tensor.name for tensor in proto.graph.initializer}
    return {
        "inputs": [_port(value) for value in proto.graph.input if value.name not in initializers],
        "outputs": [_port(value) for value in proto.graph.output],
    }


def _port(value: onnx.ValueInfoProto) -> dict[str, Any]:
    if not value.type.HasField("tensor_type"):
        return {"name": value.name, "type": value.type.WhichOneof("value"), "shape": None}
    tensor = value.type.tensor_type
    shape = [d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim]
    return {
        "name": value.name,
        "type": onnx.TensorProto.DataType.Name(tensor.elem_type).lower(),
        "shape": shape if tensor.HasField("shape") else None,
    }
