"""Step 6, complete: what only the converted model's own answers can settle.

Calibration rows are run, each as if it had not been among the data (`scores`). Of each output

    threshold   = the chosen quantile of its score
    noise head  = σ²(h) of the targets, trained on residuals beside the left-out variance (regression)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from gapa_onnx import record as provenance
from gapa_onnx.data import DataSource
from gapa_onnx.errors import UserError
from gapa_onnx.fit.calibrate import Calibration
from gapa_onnx.model.dtypes import variance_dtype
from gapa_onnx.model.splice import splice
from gapa_onnx.plan.outputs import declare
from gapa_onnx.plan.targets import known_rows, require_rows
from gapa_onnx.plan.tasks import Head, Task
from gapa_onnx.progress import Progress
from gapa_onnx.settings import Settings
from gapa_onnx.settle.left_out import ScoreSample, left_out, site_nodes, threshold_at
from gapa_onnx.settle.noise import NoiseHead, emit_noise, fit_noise
from gapa_onnx.settle.thresholds import put_threshold
from gapa_onnx.variance.graph import VarianceGraph

NOISE_ROWS = 20_000  # at most, to train a noise head


def complete(
    model: onnx.ModelProto,
    calibration: Calibration,
    data: DataSource,
    settings: Settings,
    targets: Mapping[str, np.ndarray] | None = None,
    progress: Progress = lambda text, done: None,
) -> onnx.ModelProto:
    """The converted model with its thresholds set, and a noise head for each output that has targets."""
    _set_thresholds(model, calibration, data, settings, progress)
    for output, values in (targets or {}).items():
        model = _with_noise(model, output, values, calibration, data, settings, progress)
    return model


def _set_thresholds(
    model: onnx.ModelProto,
    calibration: Calibration,
    data: DataSource,
    settings: Settings,
    progress: Progress,
) -> None:
    record = provenance.read(model)
    scores = {
        output: head["outputs"]["score"]
        for output, head in record["heads"].items()
        if "score" in head["outputs"]
    }
    if not scores:
        return
    samples = {output: ScoreSample(settings.seed) for output in scores}
    rows = 0
    tensors = list(scores.values())
    for positions, answers in left_out(
        model, calibration, data, tensors, seed=settings.seed, progress=progress
    ):
        rows += len(positions)
        for output, name in scores.items():
            samples[output].add(answers[name])
    for output, sample in samples.items():
        if not len(sample.values):
            record["heads"][output]["reason"] += "; no threshold, as every score on the data is NaN"
            continue
        quantiles = sample.table()
        record["heads"][output]["score"] = {
            "kind": settings.score if record["heads"][output]["axis"] is not None else "variance",
            "rows": rows,
            "from": "left-out calibration rows",
            "quantiles": quantiles,
        }
        put_threshold(
            model, record, output, settings.ood_quantile, threshold_at(quantiles, settings.ood_quantile)
        )
    provenance.write(model, record)


# ------------------------------------------------------------------ noise head


def _with_noise(
    model: onnx.ModelProto,
    output: str,
    targets: np.ndarray,
    calibration: Calibration,
    data: DataSource,
    settings: Settings,
    progress: Progress,
) -> onnx.ModelProto:
    """A copy of the model with the aleatoric and the total variance of one output."""
    require_rows(targets, calibration.rows)
    record = provenance.read(model)
    roles = record["heads"][output]["outputs"]
    hidden = _hidden(model)
    wanted = [output, roles["var"], hidden]
    parts: list[tuple[np.ndarray, ...]] = []
    rows = {"among": known_rows(targets), "most": NOISE_ROWS, "seed": settings.seed}
    for positions, answers in left_out(model, calibration, data, wanted, **rows, progress=progress):
        mean, var, features = (answers[name] for name in wanted)
        if features.ndim != 2 or len(features) != len(positions):
            raise UserError(
                "a noise head needs one query per sample at the last site",
                "choose a site or layout that has one, such as NAME:pooled or NAME:flat",
            )
        true = targets[positions].reshape(mean.shape).astype(np.float64)
        parts.append((features, _columns(true - mean), _columns(var)))
    features, residuals, variances = (np.concatenate(part) for part in zip(*parts))
    head = fit_noise(features, residuals, variances, seed=settings.seed, progress=progress)
    record["heads"][output]["noise"] = {"rows": head.rows, "nll": head.nll, "constant_nll": head.constant_nll}
    completed = _splice_noise(model, record, output, head, hidden)
    provenance.write(completed, record)
    return completed


def _hidden(model: onnx.ModelProto) -> str:
    """The query of the last site: the representation nearest to the output."""
    return site_nodes(model)[-1].input[0]


def _columns(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float64).reshape(len(array), -1)  # (n, targets)


def _splice_noise(
    model: onnx.ModelProto, record: dict[str, Any], output: str, noise: NoiseHead, hidden: str
) -> onnx.ModelProto:
    infos = {info.name: info for info in model.graph.output}
    names = {name for node in model.graph.node for name in (*node.input, *node.output, node.name)}
    names |= {tensor.name for tensor in model.graph.initializer}
    graph = VarianceGraph(record["source"]["opset"], names)
    kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(infos[output].type.tensor_type.elem_type))
    mean = graph.tensor(output, kind)
    epistemic = graph.tensor(record["heads"][output]["outputs"]["var"], variance_dtype(kind))
    prefix = f"{output}/noise"
    aleatoric = emit_noise(graph, noise, graph.tensor(hidden, np.float32), mean, prefix)
    aleatoric = graph.cast(aleatoric, epistemic.dtype)
    with graph.scope(f"{output}/total_var"):
        total = epistemic + aleatoric
    declared, wanted = [], []
    head = Head(output, Task.REGRESSION, output, "identity", None, None, "")
    for role, value in (("aleatoric_var", aleatoric), ("total_var", total)):
        wanted.append(graph.output(value, f"{output}_{role}"))
        declared.append(declare(infos[output], head, role, wanted[-1]))
        record["heads"][output]["outputs"][role] = wanted[-1].name
    return splice(model, graph.to_proto(wanted), declared)
