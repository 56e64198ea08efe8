"""Step 5, emit: source and variance subgraph become one file, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from gapa_onnx import __version__, provenance
from gapa_onnx.analyse import Plan
from gapa_onnx.answers import points_record
from gapa_onnx.calibrate import Calibration, SiteFit
from gapa_onnx.errors import UserError
from gapa_onnx.load import SourceModel
from gapa_onnx.protos import is_large, save_with_external_data
from gapa_onnx.rewrite import Rewritten
from gapa_onnx.settings import Settings
from gapa_onnx.splice import splice
from gapa_onnx.tasks import Head


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


# --------------------------------------------------------------------- writing


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model atomically: the same bytes for the same model, external data beyond 2 GB."""
    if not is_large(model):
        with replacing(path) as temporary:
            temporary.write_bytes(model.SerializeToString(deterministic=True))
        return
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        staged = Path(folder, path.name)
        data = save_with_external_data(model, staged)
        for file in (data, staged):  # the model comes last: it never stands there without its data
            os.replace(file, path.parent / file.name)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place if all goes well, and is gone if not."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "choose another place with -o") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "choose another place with -o") from error
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
