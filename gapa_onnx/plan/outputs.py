"""What stands beside an output: its variance, and what the task makes of it.

role                              output        for
var                               y_var         every output that a site reaches
cov                               y_cov         covariance="full"
probs                             y_probs       classes
tokens, token_var                 y_tokens …    tokens: those with the largest logits, and the variances of these; `var` on request
entropy, aleatoric, epistemic     y_entropy …   classes; the first is the sum of the others
score, pvalue, ood                y_score …     how strange an input is, how rare that is, and whether too rare
image_score, seq_score, …         y_seq_score … the same of a whole image or sequence whose positions have their own
aleatoric_var, total_var          y_total_var … regression with a noise head (`heads.noise`)
set, defer                        y_set …       classes with labels: what is promised (`heads.promises`)
lower, upper                      y_lower …     regression with targets: the same
candidates, box_var, class_var    y_box_var …   detectors; all roles but image_score and image_ood per candidate
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from gapa_onnx.model.dtypes import variance_dtype
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.detection import BOX, Detector
from gapa_onnx.plan.head import Head, Task
from gapa_onnx.plan.heads import Classes, HeadOptions, emit_classes, head_points
from gapa_onnx.plan.heads.detection import emit_detection
from gapa_onnx.plan.heads.noise import NoiseTensors, emit_noise
from gapa_onnx.plan.heads.promises import (
    PromiseTensors,
    cooled,
    emit_deferral,
    emit_interval,
    emit_set,
    joined,
)
from gapa_onnx.plan.heads.pvalues import emit_flag, read_p_value
from gapa_onnx.plan.heads.strangeness import Heard, emit_entropy
from gapa_onnx.plan.scores import (
    Scored,
    ScoreValues,
    score_rank,
    strange_by_witnesses,
    valid_positions_of,
    with_flags,
)
from gapa_onnx.plan.soundness import emit_candidate_deviation, emit_deviation, flagged_unless_sound
from gapa_onnx.record import PointsRecord
from gapa_onnx.settings import Settings
from gapa_onnx.variance.covariance import cholesky, output_covariance
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.masks import masked_mean, valid_in
from gapa_onnx.variance.sites import Site

CLASS_TASKS = (Task.CLASSIFICATION, Task.MULTILABEL, Task.SEGMENTATION, Task.TOKENS)


@dataclass(frozen=True)
class Answer:
    """All that stands beside one output, as graph values, and the names of its parameters."""

    roles: dict[str, Value]  #: what becomes an output, by role
    spread: Value | None  #: mean variance, which sites are weighed by; None where there is no score
    noise: NoiseTensors | None = None  #: of the noise head
    scores: dict[str, ScoreValues] = field(default_factory=dict)  #: how strange inputs are, by role
    promises: PromiseTensors = PromiseTensors()


def answer(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    variances: Mapping[str, Value],
    sites: Sequence[Site],
    own: Mapping[str, Value],
    settings: Settings,
    prior: Mapping[str, float] | None = None,
    heard: Heard | None = None,
    labelled: bool = False,
    watched: Sequence[str] = (),
) -> Answer:
    """Emit all that stands beside one output.

    `variances` are those of all tensors, `own` those that are born at each site, by its output, and `prior` the mean
    prior variance there; `heard` is what witnesses say. Where inputs that are `watched` hold what is no number, all is
    flagged. Classes of `labelled` rows have a temperature, and promises.
    """
    if head.detector is not None:
        born = [(value, (prior or {}).get(name, 1.0)) for name, value in own.items()]
        return _detection(source, graph, head, variances, settings, born, watched)
    roles, logits_var, factor = _variances(source, graph, head, variances, sites, own, settings)
    spread: Value | None
    leading: Value | None = None
    promises = PromiseTensors()
    if head.task in CLASS_TASKS:
        classes, promises = _classes(source, graph, head, logits_var, factor, settings, labelled)
        roles, spread = roles | classes.roles, classes.spread
        leading = classes.logits if head.task is Task.TOKENS else None
    else:
        spread = _mean_variance(graph, head, roles["var"], valid_positions_of(source, graph, head.mask))
        if spread is not None:
            roles["score"] = spread
    if spread is None:
        return Answer(roles, None)
    scores = _scores(source, graph, head, roles["score"], leading, heard, settings)
    deviation = emit_deviation(source, graph, head, roles)
    flagged = with_flags(source, graph, head, scores, spread, deviation, watched)
    found = Answer({**roles, **flagged.roles}, flagged.spread, scores=flagged.scores, promises=promises)
    return _with_sets(source, graph, head, found, settings) if labelled else found


def _scores(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    own: Value,
    leading: Value | None,
    heard: Heard | None,
    settings: Settings,
) -> Sequence[Scored]:
    """What one sample is ranked by: the head's `own` score, or it put together with what witnesses say."""
    if settings.score != "witnesses":
        return [Scored("score", own, score_rank(head), settings.score)]
    entropy = _entropy_of(source, graph, head, leading) if head.task in CLASS_TASKS else None
    return strange_by_witnesses(source, graph, head, own, entropy, heard)


def _variances(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    variances: Mapping[str, Value],
    sites: Sequence[Site],
    own: Mapping[str, Value],
    settings: Settings,
) -> tuple[dict[str, Value], Value, Value | None]:
    """The variances that become outputs, by role; that of the logits; the factor of their covariance where it is seen."""
    # Of a vocabulary only on request: all of it would take as much as the head itself.
    roles = {} if _few_tokens(head, settings) else {"var": variances[head.output]}
    if settings.covariance != "full":
        return roles, variances[head.logits], None
    covariance, logits_var = output_covariance(source, graph, sites, own, head.tensor)
    roles |= {"cov": covariance, "var": logits_var}
    if head.logits != head.tensor:
        covariance, logits_var = output_covariance(source, graph, sites, own, head.logits)
    if not _sees_covariance(head, settings):
        return roles, logits_var, None
    if head.derived is not None:
        covariance = head.derived.covariance(graph, _read(source, graph, head), covariance)
    return roles, logits_var, cholesky(graph, covariance, f"{head.output}/factor")


def _few_tokens(head: Head, settings: Settings) -> bool:
    """Whether only the tokens with the largest logits have a variance."""
    return head.task is Task.TOKENS and settings.top_k != "all"


def _entropy_of(
    source: SourceModel, graph: VarianceGraph, head: Head, leading: Value | None
) -> Callable[[], Value] | None:
    """The entropy (…, 1) of the source's own prediction, where it is one for each sample or for each position of a
    sequence; emitted when it is asked for. Of a vocabulary it is that of the `leading` logits: the rest has next to none."""
    if head.axis is None or head.rank not in (2, 3) or head.axis != head.rank - 1:
        return None
    axis = head.axis

    def emitted() -> Value:
        logits = leading
        if logits is None:
            logits = _read(source, graph, head)
            with graph.scope(f"{head.output}/logits"):
                if head.derived is not None:
                    logits = head.derived.mean(graph, logits)
        scope = f"{head.output}/own_entropy"
        return emit_entropy(graph, graph.cast(logits, np.float32), head.link, scope, axis)

    return emitted


def _with_sets(
    source: SourceModel, graph: VarianceGraph, head: Head, found: Answer, settings: Settings
) -> Answer:
    """Add the set of classes, and whether a row is deferred where an error is promised."""
    probs = found.roles["probs"]
    chosen, tensors = emit_set(graph, head, probs, settings.sets, class_count(source, head))
    roles, promises = {**found.roles, "set": chosen}, joined(found.promises, tensors)
    if settings.max_error is not None:
        roles["defer"], tensors = emit_deferral(graph, head, probs)
        promises = joined(promises, tensors)
    return replace(found, roles=roles, promises=promises)


def _detection(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    variances: Mapping[str, Value],
    settings: Settings,
    born: Sequence[tuple[Value, float]],
    watched: Sequence[str],
) -> Answer:
    """All that stands beside a detector's class scores; a variance of the whole output only where all is asked for."""
    count = settings.candidates
    roles, spread = emit_detection(graph, source, head, variances, _options(settings), count, born)
    if count == "all" and head.output in variances:
        roles = {"var": variances[head.output], **roles}
    kind = settings.score if settings.score == "epistemic" else "variance"
    scored = [Scored("score", roles["score"], 2, kind), Scored("image_score", roles["image_score"], 1, kind)]
    deviation = emit_candidate_deviation(graph, roles, 2)
    found = with_flags(source, graph, head, scored, spread, deviation, watched)
    if "selected_score" in roles:
        table = found.scores["score"].table
        score = roles["selected_score"]
        known = score + emit_candidate_deviation(graph, roles, 1, "selected_")
        rare = read_p_value(graph, score, 1, table, f"{head.output}/selected_p", known)
        roles["selected_pvalue"] = rare
        roles["selected_ood"] = emit_flag(graph, rare, table, f"{head.output}/selected_ood", known)
    return Answer({**roles, **found.roles}, spread, scores=found.scores)


def score_answer(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    site: Site,
    share: Value,
    watched: Sequence[str] = (),
) -> Answer:
    """Emit the score of a file that has no variance: the unexplained share (…, 1), the mean over a row's queries."""
    with graph.scope(f"{head.output}/score"):
        if site.many and site.mask is not None and site.rank is not None:
            share = masked_mean(graph, share, valid_in(graph, source, site.mask), site.rank)
        score = graph.reduce("ReduceMean", graph.emit("Flatten", share, axis=1), [1], keepdims=False)
    found = with_flags(source, graph, head, [Scored("score", score, 1, "share")], score, None, watched)
    return Answer(found.roles, score, scores=found.scores)


def declare_scores(value: Value) -> onnx.ValueInfoProto:
    """The declaration of one number for each row, whatever the output that it stands beside."""
    return onnx.helper.make_tensor_value_info(
        value.name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), [None]
    )


def with_noise(
    source: SourceModel, graph: VarianceGraph, head: Head, answer: Answer, site: str, hidden: Value
) -> Answer:
    """Add the aleatoric and the total variance, by a noise head that reads the queries of a site, and an interval."""
    output = source.tensors[head.output]
    mean, epistemic = graph.tensor(output.name, output.dtype or np.float32), answer.roles["var"]
    aleatoric, tensors = emit_noise(graph, site, hidden, mean, f"{head.output}/noise")
    aleatoric = graph.cast(aleatoric, epistemic.dtype)
    with graph.scope(f"{head.output}/total_var"):
        total = epistemic + aleatoric
    bounds, promises = emit_interval(graph, head, mean, total)
    roles = {**answer.roles, "aleatoric_var": aleatoric, "total_var": total, **bounds}
    return replace(
        answer,
        roles={**roles, **flagged_unless_sound(source, graph, head, roles, "total_var")},
        noise=tensors,
        promises=joined(answer.promises, promises),
    )


def rehearse(
    source: SourceModel, graph: VarianceGraph, head: Head, variances: Mapping[str, Value], settings: Settings
) -> None:
    """Raise UserError where a head cannot be written for this model."""
    if head.detector is not None:
        emit_detection(graph, source, head, variances, _options(settings), settings.candidates)
    if head.task in CLASS_TASKS:
        _classes(source, graph, head, variances[head.logits], None, settings)


def _classes(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    var: Value,
    factor: Value | None,
    settings: Settings,
    labelled: bool = False,
) -> tuple[Classes, PromiseTensors]:
    """What a head for classes makes of its logits, and where their temperature is."""
    output, mean = source.tensors[head.tensor], _read(source, graph, head)
    if head.derived is not None:
        with graph.scope(f"{head.output}/logits"):
            mean, var = head.derived.mean(graph, mean), head.derived.var(graph, mean, var)
    temperature = PromiseTensors()
    if labelled:
        mean, var, factor, temperature = cooled(graph, head, mean, var, factor)
    found = emit_classes(
        graph,
        head,
        graph.tensor(output.name, output.dtype or np.float32),
        mean,
        var,
        _options(settings),
        classes=class_count(source, head),
        factor=factor,
    )
    return found, temperature


def _read(source: SourceModel, graph: VarianceGraph, head: Head) -> Value:
    """The tensor that a head reads: the logits, or what they are derived from."""
    tensor = source.tensors[head.logits]
    return graph.cast(graph.tensor(tensor.name, tensor.dtype or np.float32), variance_dtype(tensor.dtype))


def points_record(source: SourceModel, head: Head, settings: Settings) -> PointsRecord:
    """The record of the points that uncertainty is split at."""
    correlated = _sees_covariance(head, settings)
    return head_points(head, _options(settings), class_count(source, head), correlated=correlated).record


def _sees_covariance(head: Head, settings: Settings) -> bool:
    """Whether the head depends on how logits vary together: with one choice among classes, not with labels."""
    return settings.covariance == "full" and head.task is Task.CLASSIFICATION and head.link == "softmax"


def _options(settings: Settings) -> HeadOptions:
    return HeadOptions(settings.bridge, settings.samples, settings.top_k, settings.score, settings.seed)


def class_count(source: SourceModel, head: Head) -> int | None:
    """The number of classes of an output; None where the model leaves it open, or which axis they are on."""
    if head.derived is not None and head.derived.classes is not None:
        return head.derived.classes
    shape = source.tensors[head.logits].shape
    size = None if shape is None or head.axis is None else shape[head.axis]
    return size if isinstance(size, int) else None


def _mean_variance(graph: VarianceGraph, head: Head, var: Value, valid: Value | None) -> Value | None:
    """The mean variance of an output without classes, one number per sample; padding does not enter."""
    if head.rank is None or head.rank == 0:
        return None
    if head.rank == 1:
        return var
    with graph.scope(f"{head.output}/score"):
        if valid is not None:
            inner = list(range(2, head.rank))
            by_position = graph.reduce("ReduceMean", var, inner, keepdims=False) if inner else var
            return masked_mean(graph, by_position, valid, 2)
        return graph.reduce("ReduceMean", var, list(range(1, head.rank)), keepdims=False)


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
    if head.detector is not None and role != "var":
        _declare_candidates(tensor, head.detector, role)
        return info
    if not tensor.HasField("shape"):
        return info
    dims = list(tensor.shape.dim)
    if role == "cov":
        dims.append(dims[-1])
    elif role in ("probs", "tokens", "token_var") and head.task is Task.TOKENS and head.axis is not None:
        dims[head.axis] = onnx.TensorShapeProto.Dimension()
    elif role not in ("var", "probs", "set", "aleatoric_var", "total_var", "lower", "upper"):
        whole = head.axis is None or role.startswith(("image_", "seq_"))  # one number for a sample
        dims = dims[:1] if whole else dims[: head.axis] + dims[(head.axis or 0) + 1 :]
    shape = onnx.TensorShapeProto(dim=dims)
    tensor.ClearField("shape")
    tensor.shape.CopyFrom(shape)
    return info


def _declare_candidates(tensor: onnx.TypeProto.Tensor, detector: Detector, role: str) -> None:
    """Rows, then candidates, then features, as many as the role has; only features have known sizes."""
    rows = list(tensor.shape.dim[:1]) if detector.selected is None else []
    features = {"probs": detector.classes.count, "class_var": detector.classes.count, "box_var": BOX}
    width = features.get(role.removeprefix("selected_"), 0)
    dims = [onnx.TensorShapeProto.Dimension() for _ in range(1 + (role[:5] not in ("image", "selec")))]
    dims[: len(rows)] = rows
    if width != 0:
        dims.append(onnx.TensorShapeProto.Dimension(dim_value=width))
    tensor.ClearField("shape")
    tensor.shape.CopyFrom(onnx.TensorShapeProto(dim=dims))
