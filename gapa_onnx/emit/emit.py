"""Step 5, emit: source and variance subgraph become one model."""

from __future__ import annotations

from typing import Any

import onnx

from gapa_onnx import __version__
from gapa_onnx import record as provenance
from gapa_onnx.emit.rewrite import Rewritten
from gapa_onnx.fit.calibrate import Calibration, SiteFit
from gapa_onnx.model.load import SourceModel
from gapa_onnx.model.splice import splice
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.plan.outputs import points_record
from gapa_onnx.plan.tasks import Head
from gapa_onnx.settings import Settings


def emit(plan: Plan, calibration: Calibration, rewritten: Rewritten, settings: Settings) -> onnx.ModelProto:
    """The converted model, with its provenance."""
    model = splice(plan.source.proto, rewritten.additions, rewritten.outputs, rewritten.functions)
    _loosen_outputs(model, plan)
    provenance.write(model, record(plan, calibration, rewritten, settings))
    return model


def _loosen_outputs(model: onnx.ModelProto, plan: Plan) -> None:
    """Take back a number of rows that outputs declare where inputs leave it open.

    Some files declare the one row that they were exported with. onnxruntime believes it of all that is
    computed from such an output, and would reuse buffers of that size.
    """
    if not any(spec.shape and not isinstance(spec.shape[0], int) for spec in plan.source.inputs):
        return
    for output in model.graph.output:
        dims = output.type.tensor_type.shape.dim
        if len(dims) and dims[0].HasField("dim_value"):
            dims[0].ClearField("dim_value")


def record(plan: Plan, calibration: Calibration, rewritten: Rewritten, settings: Settings) -> dict[str, Any]:
    """What the file says about itself; see `provenance`."""
    source = plan.source
    return {
        "version": __version__,
        "source": {
            "file": source.path.name if source.path else None,
            "sha256": source.sha256,
            "opset": source.opset,
            "producer": source.proto.producer_name,
        },
        "settings": {**vars(settings)},
        "data": {"rows": calibration.rows, "dropped": calibration.dropped},
        "sites": [_site_record(fit) for fit in calibration.fits],
        "outputs": {output: roles["var"] for output, roles in rewritten.roles.items()},
        "heads": {
            head.output: _head_record(source, head, rewritten.roles[head.output], settings)
            for head in plan.heads
        },
        "cuts": [vars(entry) for entry in rewritten.cuts],
    }


def _site_record(fit: SiteFit) -> dict[str, Any]:
    return {
        "name": fit.site.name,
        "query": fit.site.query,
        "output": fit.site.output,
        "activation": fit.site.activation,
        "layout": fit.site.layout.value,
        "rows": fit.rows,
        "points": len(fit.index.points),
        "width": fit.index.points.shape[1],
        "k": fit.k,
        "length_scale": fit.length_scale,
        "scale": fit.scale,
        "ceiling": fit.ceiling,
        "jitter": fit.jitter,
        "index": fit.index.kind,
        "index_settings": fit.index.settings,
        "recall": fit.index.recall,
        "share_error": fit.share_error,
        "storage": fit.storage.format,
        "storage_error": fit.storage_error,
        "share_quantiles": fit.share_quantiles,
    }


def _head_record(
    source: SourceModel, head: Head, roles: dict[str, str], settings: Settings
) -> dict[str, Any]:
    classes = {}
    if "epistemic" in roles:
        classes = {"bridge": settings.bridge, "points": points_record(source, head, settings)}
    return {
        "task": head.task.value,
        "logits": head.logits,
        "link": head.link,
        "axis": head.axis,
        "reason": head.reason,
        "outputs": roles,
        **classes,
    }
