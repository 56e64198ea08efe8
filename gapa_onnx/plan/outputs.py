"""What stands beside an output: its variance, and what the task makes of it.

role                              output        for
var                               y_var         every output that a site reaches
cov                               y_cov         covariance="full"
probs, tokens                     y_probs …     classes
entropy, aleatoric, epistemic     y_entropy …   classes; the first is the sum of the others
score, ood                        y_score …     how strange an input is, and whether beyond the threshold
aleatoric_var, total_var          y_total_var … regression with a noise head (`heads.noise`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from gapa_onnx.model.dtypes import variance_dtype
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.heads import HeadOptions, emit_classes, head_points
from gapa_onnx.plan.heads.noise import NoiseTensors, emit_noise
from gapa_onnx.plan.tasks import Head, Task
from gapa_onnx.record import PointsRecord
from gapa_onnx.settings import Settings
from gapa_onnx.variance.covariance import cholesky, output_covariance
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.sites import Site

CLASS_TASKS = (Task.CLASSIFICATION, Task.MULTILABEL, Task.SEGMENTATION, Task.TOKENS)


@dataclass(frozen=True)
class Answer:
    """All that stands beside one output, as graph values, and the names of its parameters."""

    roles: dict[str, Value]  #: what becomes an output, by role
    spread: Value | None  #: mean variance, which sites are weighed by; None where there is no score
    threshold: str | None  #: the initializer that the score is compared with
    noise: NoiseTensors | None = None  #: of the noise head


def answer(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    variances: Mapping[str, Value],
    sites: Sequence[Site],
    own: Mapping[str, Value],
    settings: Settings,
) -> Answer:
    """Emit all that stands beside one output.

    `variances` are those of all tensors, `own` those that are born at each site, by its output.
    """
    roles = {"var": variances[head.output]}
    logits_var, factor = variances[head.logits], None
    if settings.covariance == "full":
        roles["cov"], roles["var"] = output_covariance(source, graph, sites, own, head.output)
        covariance, logits_var = roles["cov"], roles["var"]
        if head.logits != head.output:
            covariance, logits_var = output_covariance(source, graph, sites, own, head.logits)
        if _sees_covariance(head, settings):
            factor = cholesky(graph, covariance, f"{head.output}/factor")
    spread: Value | None
    if head.task in CLASS_TASKS:
        classes, spread = _classes(source, graph, head, logits_var, factor, settings)
        roles |= classes
    else:
        spread = _mean_variance(graph, head, roles["var"])
        if spread is not None:
            roles["score"] = spread
    threshold = None
    if "score" in roles:
        roles["ood"], threshold = _beyond_threshold(graph, head, roles["score"])
    return Answer(roles, spread, threshold)


def with_noise(
    source: SourceModel, graph: VarianceGraph, head: Head, answer: Answer, site: str, hidden: Value
) -> Answer:
    """Add the aleatoric and the total variance, by a noise head that reads the queries of a site."""
    output = source.tensors[head.output]
    mean, epistemic = graph.tensor(output.name, output.dtype or np.float32), answer.roles["var"]
    aleatoric, tensors = emit_noise(graph, site, hidden, mean, f"{head.output}/noise")
    aleatoric = graph.cast(aleatoric, epistemic.dtype)
    with graph.scope(f"{head.output}/total_var"):
        total = epistemic + aleatoric
    return replace(
        answer, roles={**answer.roles, "aleatoric_var": aleatoric, "total_var": total}, noise=tensors
    )


def rehearse(
    source: SourceModel, graph: VarianceGraph, head: Head, variances: Mapping[str, Value], settings: Settings
) -> None:
    """Raise UserError where a head cannot be written for this model."""
    if head.task in CLASS_TASKS:
        _classes(source, graph, head, variances[head.logits], None, settings)


def _classes(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    var: Value,
    factor: Value | None,
    settings: Settings,
) -> tuple[dict[str, Value], Value]:
    tensors = source.tensors
    output, logits = tensors[head.output], tensors[head.logits]
    mean = graph.cast(graph.tensor(logits.name, logits.dtype or np.float32), variance_dtype(logits.dtype))
    return emit_classes(
        graph,
        head,
        graph.tensor(output.name, output.dtype or np.float32),
        mean,
        var,
        _options(settings),
        classes=_class_count(source, head),
        factor=factor,
    )


def points_record(source: SourceModel, head: Head, settings: Settings) -> PointsRecord:
    """The record of the points that uncertainty is split at."""
    correlated = _sees_covariance(head, settings)
    return head_points(head, _options(settings), _class_count(source, head), correlated=correlated).record


def _sees_covariance(head: Head, settings: Settings) -> bool:
    """Whether the head depends on how logits vary together: with one choice among classes, not with labels."""
    return settings.covariance == "full" and head.task is Task.CLASSIFICATION and head.link == "softmax"


def _options(settings: Settings) -> HeadOptions:
    return HeadOptions(settings.bridge, settings.samples, settings.top_k, settings.score, settings.seed)


def _class_count(source: SourceModel, head: Head) -> int | None:
    shape = source.tensors[head.logits].shape
    size = None if shape is None else shape[head.axis]
    return size if isinstance(size, int) else None


def _mean_variance(graph: VarianceGraph, head: Head, var: Value) -> Value | None:
    """The mean variance of an output without classes, one number per sample."""
    if head.rank in (None, 0):
        return None
    if head.rank == 1:
        return var
    with graph.scope(f"{head.output}/score"):
        return graph.reduce("ReduceMean", var, list(range(1, head.rank)), keepdims=False)


def _beyond_threshold(graph: VarianceGraph, head: Head, score: Value) -> tuple[Value, str]:
    """Emit the flag not (score < threshold), which is true for a NaN; the threshold is a parameter."""
    with graph.scope(f"{head.output}/ood"):
        threshold = graph.constant(np.asarray(np.inf, score.dtype), f"{head.output}/score/threshold")
        return graph.emit("Not", graph.emit("Less", score, threshold, dtype=np.bool_)), threshold.name


def declare(output: onnx.ValueInfoProto, head: Head, role: str, value: Value) -> onnx.ValueInfoProto:
    """The declaration of what stands beside an output: its own type, and a shape made from the output's."""
    info = onnx.ValueInfoProto()
    info.CopyFrom(output)
    info.name = value.name
    kind = info.type
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = getattr(kind, kind.WhichOneof("value")).elem_type
    if kind.WhichOneof("value") not in (None, "tensor_type"):  # a list of maps has its variance as a tensor
        info.ClearField("type")
        kind = info.type
    tensor = kind.tensor_type
    tensor.elem_type = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    if not tensor.HasField("shape"):
        return info
    dims = list(tensor.shape.dim)
    if role == "cov":
        dims.append(dims[-1])
    elif role in ("probs", "tokens") and head.task is Task.TOKENS and head.axis is not None:
        dims[head.axis] = onnx.TensorShapeProto.Dimension()
    elif role not in ("var", "probs", "aleatoric_var", "total_var"):
        dims = dims[:1] if head.axis is None else dims[: head.axis] + dims[head.axis + 1 :]
    shape = onnx.TensorShapeProto(dim=dims)
    tensor.ClearField("shape")
    tensor.shape.CopyFrom(shape)
    return info
