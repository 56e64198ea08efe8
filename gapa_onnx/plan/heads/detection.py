"""The head of a detector, as graph nodes: answers for the candidates that matter.

With p_c the class probabilities of a candidate and o that of an object, where the model has one:

    confidence   max_c p_c · o                          by which candidates are chosen, the largest first
    class_var    variance of the class logits           logit p has the variance var(p) / (p (1 - p))²
    probs, …     as for labels or classes (`classes`)   one candidate is one row
    box_var      variance of the four box numbers       as the model decodes them, in their own units
    image_score  mean own variance, in prior variances, of all that was asked about an image: for boxes and for classes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.errors import UserError
from gapa_onnx.model.dtypes import variance_dtype
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.detection import Detector, Slab
from gapa_onnx.plan.head import Head
from gapa_onnx.plan.heads.classes import HeadOptions, emit_classes
from gapa_onnx.plan.heads.split import ClassAxis, log_softmax
from gapa_onnx.variance.demand import OLDEST_OPSET
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.values import Scaled

#: Probabilities are kept so far from 0 and 1 that their logits, and p (1 - p) squared, are numbers of single precision.
FAINTEST, SUREST = 1e-12, 1 - 2.0**-20

#: Labels that the entropies of a candidate are over: the others are out of the question, and cost as much.
LEADING = 3

#: Roles that are one number per candidate, or per row that NonMaxSuppression selects.
PER_CANDIDATE = ("entropy", "aleatoric", "epistemic", "score", "objectness")


@dataclass(frozen=True)
class Chosen:
    """The candidates that answers are for: by rank (N, K), or by row and place (s, 2)."""

    graph: VarianceGraph
    indices: Value
    by_rank: bool

    def of(self, slab: Slab, tensor: Value) -> Value:
        """The features of a slab of these candidates, from a tensor that lies as the slab's: (N, K, f) or (s, f)."""
        graph, end = self.graph, None if slab.count is None else slab.start + slab.count
        part = tensor
        if slab.start or end is not None:
            part = graph.slice(tensor, slab.axis, slab.start, end)
        if not self.by_rank:
            return graph.emit("GatherND", _features_last(graph, slab, part), self.indices)
        places = graph.unsqueeze(self.indices, [slab.axis])
        alike = graph.emit("Concat", *_sizes(graph, slab, part, self.indices), axis=0)
        spread = graph.emit("Expand", places, alike)
        return _features_last(
            graph, slab, graph.emit("GatherElements", part, spread, axis=slab.candidate_axis)
        )


def _sizes(graph: VarianceGraph, slab: Slab, part: Value, indices: Value) -> list[Value]:
    rows, features, count = (
        graph.dimension(part, 0),
        graph.dimension(part, slab.axis),
        graph.dimension(indices, 1),
    )
    return [rows, features, count] if slab.axis == 1 else [rows, count, features]


def _features_last(graph: VarianceGraph, slab: Slab, tensor: Value) -> Value:
    return tensor if slab.axis == 2 else graph.emit("Transpose", tensor, perm=[0, 2, 1])


def most_confident(graph: VarianceGraph, source: SourceModel, detector: Detector, count: str | int) -> Value:
    """The places of the most confident candidates: int64 (N, K), with K at most `count`."""
    with graph.scope(f"{detector.outputs[0]}/candidates"):
        slab = detector.classes
        tensor = _read(graph, source, slab.tensor)
        scores = graph.slice(
            tensor, slab.axis, slab.start, None if slab.count is None else slab.start + slab.count
        )
        if not detector.squashed:
            softmax = detector.link == "softmax"
            axis = ClassAxis(slab.axis, 3, slab.count)
            scores = log_softmax(graph, axis, scores).exp() if softmax else scores.sigmoid()
        if detector.background is not None:
            scores = _without(graph, slab, scores, detector.background)
        confidence = graph.reduce("ReduceMax", scores, [slab.axis], keepdims=False)
        if detector.objectness is not None:
            at = detector.objectness
            known = graph.squeeze(graph.slice(tensor, slab.axis, at, at + 1), [slab.axis])
            confidence = confidence * (known if detector.squashed else known.sigmoid())
        size = graph.dimension(confidence, 1)
        return graph.topk(confidence, size if isinstance(count, str) else _at_most(graph, size, count), 1)[1]


def _at_most(graph: VarianceGraph, size: Value, count: int) -> Value:
    """The smaller of two whole numbers; Min takes these from opset 12 on only."""
    limit = graph.ints(count)
    return graph.where(graph.compare("Less", size, limit), size, limit)


def _without(graph: VarianceGraph, slab: Slab, scores: Value, background: int) -> Value:
    """Class scores but for that of no object, which is the first or the last."""
    if background == 0:
        return graph.slice(scores, slab.axis, 1, None)
    return graph.slice(scores, slab.axis, 0, background)


def candidate_mask(graph: VarianceGraph, source: SourceModel, detector: Detector, indices: Value) -> Value:
    """1 at the candidates of these places, and at those that NonMaxSuppression selects: float32 (N, A)."""
    with graph.scope(f"{detector.outputs[0]}/candidates/mask"):
        slab = detector.classes
        tensor = _read(graph, source, slab.tensor)
        nobody = graph.zeros(graph.squeeze(graph.slice(tensor, slab.axis, 0, 1), [slab.axis]))
        nobody = graph.cast(nobody, np.float32)
        one = graph.emit("Expand", graph.constant(np.float32(1)), graph.shape(indices))
        mask = graph.emit("ScatterElements", nobody, indices, one, axis=1)
        if detector.selected is not None:
            places = selected_places(graph, detector)
            count = graph.dimension(places, 0)
            mask = graph.emit(
                "ScatterND", mask, places, graph.emit("Expand", graph.constant(np.float32(1)), count)
            )
        return mask


def selected_places(graph: VarianceGraph, detector: Detector) -> Value:
    """Row and candidate of what NonMaxSuppression selects: int64 (s, 2)."""
    assert detector.selected is not None
    return graph.emit("Gather", graph.tensor(detector.selected, np.int64), graph.ints(0, 2), axis=1)


def emit_detection(
    graph: VarianceGraph,
    source: SourceModel,
    head: Head,
    variances: Mapping[str, Value],
    options: HeadOptions,
    count: str | int,
    born: Sequence[tuple[Value, float]] = (),
) -> tuple[dict[str, Value], Value]:
    """Emit a detector's head: its outputs by role, and the mean variance of the class logits of each candidate.

    `born` are the variances that are born at the sites, each with the prior variance there.
    """
    detector = head.detector
    assert detector is not None
    if graph.opset < OLDEST_OPSET:
        raise UserError(
            f"a head for detectors needs opset {OLDEST_OPSET}; the model has opset {graph.opset}",
            "raise it, e.g. with onnx.version_converter, or choose `task='none'`",
        )
    indices = most_confident(graph, source, detector, count)
    roles, spread = _answers(
        graph, source, head, variances, options, Chosen(graph, indices, True), head.output
    )
    with graph.scope(f"{head.output}/image_score"):
        alike = [(own, prior) for own, prior in born if isinstance(own, Scaled)]
        if options.score != "epistemic" and alike and len(alike) == len(born):
            roles["image_score"] = _mean_of_queries(graph, alike)
        else:
            roles["image_score"] = graph.reduce("ReduceMean", roles["score"], [1], keepdims=False)
    if detector.selected is not None:
        chosen = Chosen(graph, selected_places(graph, detector), False)
        also, _ = _answers(graph, source, head, variances, options, chosen, f"{head.output}/selected")
        roles |= {f"selected_{role}": value for role, value in also.items()}
    return {"candidates": indices, **roles}, spread


def _mean_of_queries(graph: VarianceGraph, born: Sequence[tuple[Scaled, float]]) -> Value:
    """(N,): what all queries of an image found, each in units of the prior variance of its site.

    Where classes say little about what is strange, boxes may: shuffled parts of photographs end where no edge is.
    """
    sums, counts = [], []
    for own, prior in born:
        unit = graph.reduce("ReduceMean", own.profile, None, keepdims=False) / prior
        flat = graph.emit("Flatten", own.scale, axis=1)  # 0 where nothing was asked
        sums.append(graph.reduce("ReduceSum", flat, [1], keepdims=False) * unit)
        counts.append(graph.reduce("ReduceSum", flat > 0, [1], keepdims=False))
    total, count = sums[0], counts[0]
    for more, also in zip(sums[1:], counts[1:]):
        total, count = total + more, count + also
    return total / graph.at_least(count, 1.0)


def _answers(
    graph: VarianceGraph,
    source: SourceModel,
    head: Head,
    variances: Mapping[str, Value],
    options: HeadOptions,
    chosen: Chosen,
    prefix: str,
) -> tuple[dict[str, Value], Value]:
    """All roles that stand for each of some candidates."""
    detector = head.detector
    assert detector is not None
    classes, logits = detector.classes, detector.logits or detector.classes
    with graph.scope(f"{prefix}/detection"):
        output = chosen.of(classes, _read(graph, source, classes.tensor))
        mean = chosen.of(logits, _read(graph, source, logits.tensor))
        var = chosen.of(logits, variances[logits.tensor])
        if detector.logits is None and detector.squashed:
            mean, var = _logits(graph, detector.link, mean, var)
        box_var = chosen.of(detector.boxes, variances[detector.boxes.tensor])
        shape, last = graph.shape(var), 2 if chosen.by_rank else 1
        leading = graph.slice(shape, 0, 0, last)
        width = graph.emit("Concat", graph.ints(-1), graph.slice(shape, 0, last, None), axis=0)
        output_row, mean_row, var_row = (graph.emit("Reshape", v, width) for v in (output, mean, var))
    # A candidate is a row: no loop over points is needed, as it would be for positions of a map.
    flat = replace(
        head, output=prefix, axis=1, rank=2, logits=prefix if not detector.squashed else "", numbers=""
    )
    found = emit_classes(
        graph, flat, output_row, mean_row, var_row, options, classes=classes.count, leading=LEADING
    )
    with graph.scope(f"{prefix}/detection"):
        whole = {
            role: graph.emit("Reshape", value, shape if role == "probs" else leading)
            for role, value in found.roles.items()
        }
        spread = graph.emit("Reshape", found.spread, leading)
        if detector.objectness is not None:
            whole["objectness"] = _objectness(graph, source, detector, variances, chosen)
    roles = {role: whole[role] for role in ("probs", *PER_CANDIDATE) if role in whole}
    return {"class_var": var, "box_var": box_var, **roles}, spread


def _objectness(
    graph: VarianceGraph,
    source: SourceModel,
    detector: Detector,
    variances: Mapping[str, Value],
    chosen: Chosen,
) -> Value:
    """The probability of an object, with the bridge."""
    assert detector.objectness is not None
    slab = replace(detector.classes, start=detector.objectness, count=1)
    mean, var = chosen.of(slab, _read(graph, source, slab.tensor)), chosen.of(slab, variances[slab.tensor])
    if detector.squashed:
        mean, var = _logits(graph, "sigmoid", mean, var)
    return graph.squeeze((mean / (1 + math.pi / 8 * var).sqrt()).sigmoid(), [-1])


def _logits(graph: VarianceGraph, link: str, p: Value, var: Value) -> tuple[Value, Value]:
    """Logits of probabilities, and their variances to first order: logit p, or ln p where classes exclude each other."""
    p = graph.clip(p, FAINTEST, SUREST)
    if link == "softmax":
        return graph.emit("Log", p), var / p.squared
    rest = 1 - p
    return graph.emit("Log", p / rest), var / (p * rest).squared


def _read(graph: VarianceGraph, source: SourceModel, name: str) -> Value:
    tensor = source.tensors[name]
    return graph.cast(graph.tensor(name, tensor.dtype or np.float32), variance_dtype(tensor.dtype))
