"""How strange inputs are: scores beside an output, with the p-value and the flag of each.

    score         of an input; of a position, token or candidate, where each of these has classes
    image_score   of a whole image, seq_score of a whole sequence, where its positions have scores of their own

Where one number stands for a sample it is made of what witnesses say (`heads.strangeness`), else it is the mean
variance. p-values rank a score among those of ordinary inputs (`heads.pvalues`). Of training rows the entropies are too
small to be ranked by: without held-out rows p-values go by the shares alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.frontier import comes_from
from gapa_onnx.plan.head import Head, Task
from gapa_onnx.plan.heads.lengths import LengthTensors, level_score
from gapa_onnx.plan.heads.pvalues import TableTensors, emit_flag, emit_p_value
from gapa_onnx.plan.heads.strangeness import Heard, Testimony, WitnessTensors, emit_strangeness
from gapa_onnx.plan.soundness import beside
from gapa_onnx.plan.witnesses import has_positions
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.masks import masked_mean, tensor_of, valid_in

OLDEST_LEVELLED = 8  # opset from which on Min and Max broadcast


@dataclass(frozen=True)
class Scored:
    """A score before it has a p-value."""

    role: str  #: score, image_score or seq_score
    value: Value
    rank: int
    kind: str  #: what it is made of: witnesses, variance, epistemic or share
    ranked: Value | None = None  #: what p-values rank in its place, where that is another
    witnesses: WitnessTensors | None = None
    positions: bool = (
        False  #: whether witnesses tell of positions, also where the score is of a whole sequence
    )


@dataclass(frozen=True)
class ScoreTensors:
    """Names of the tensors of one score."""

    kind: str
    score: str  #: before it is levelled over lengths; no number at padding
    ranked: str  #: the same for what p-values rank
    served: str  #: what p-values rank as the file has it, levelled
    table: TableTensors  #: parameters
    witnesses: WitnessTensors | None = None  #: parameters of their combination, where it is one
    lengths: LengthTensors | None = None  #: where it is levelled over lengths
    summed: bool = (
        False  #: whether shares and entropy of a sample add up to it; else positions have their own
    )


@dataclass(frozen=True)
class ScoreValues:
    """One score as graph values, whose names are not final yet."""

    kind: str
    score: Value
    ranked: Value
    served: Value
    table: TableTensors
    witnesses: WitnessTensors | None
    lengths: LengthTensors | None
    summed: bool

    @property
    def tensors(self) -> ScoreTensors:
        names = (self.score.name, self.ranked.name, self.served.name)
        return ScoreTensors(self.kind, *names, self.table, self.witnesses, self.lengths, self.summed)


@dataclass(frozen=True)
class Flagged:
    """Scores with their p-values and flags."""

    roles: dict[str, Value]
    spread: Value  #: mean variance; no number at padding
    scores: dict[str, ScoreValues]


def strange_by_witnesses(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    spread: Value,
    entropy: Callable[[], Value] | None,
    heard: Heard | None,
) -> list[Scored]:
    """The scores of an output by witnesses of samples or of positions; by the mean variance `spread` where there are none.
    Of a sequence whose positions have their own it is their mean."""
    plain = Scored("score", spread, score_rank(head), "variance")
    if heard is None or graph.opset < OLDEST_LEVELLED:
        return [plain]
    tensor = source.tensors[head.logits]

    def among(testimony: Testimony) -> tuple[str, ...]:
        return tuple(place for place in testimony.shares if is_told_by(source, tensor, place))

    of_samples, of_positions = among(heard.samples), among(heard.positions)
    if has_positions(head) and of_positions:
        by_position = _by_witnesses(head, heard.positions, of_positions, entropy)
        return [by_position, _of_sequence(source, graph, head, by_position)]
    if not of_samples:
        return [plain]
    if plain.rank > 1:
        role = "image_score" if head.task is Task.SEGMENTATION else "seq_score"
        score, _, tensors = emit_strangeness(heard.samples, of_samples, None, f"{head.output}/{role}")
        return [plain, Scored(role, score, 1, "witnesses", witnesses=tensors)]
    return [_by_witnesses(head, heard.samples, of_samples, entropy)]


def _by_witnesses(
    head: Head, testimony: Testimony, places: tuple[str, ...], entropy: Callable[[], Value] | None
) -> Scored:
    """The score by places and the entropy of the prediction.

    Of what a model was fitted to the entropy is too small to be ranked by. A language model has not learnt its
    calibration text by heart: there it counts.
    """
    own = None if entropy is None else entropy()
    score, by_shares, tensors = emit_strangeness(testimony, places, own, f"{head.output}/score")
    fair = testimony.held_out or own is None or head.task is Task.TOKENS
    ranked = None if fair else by_shares
    return Scored("score", score, testimony.rank - 1, "witnesses", ranked, tensors, testimony.rank > 2)


def _of_sequence(source: SourceModel, graph: VarianceGraph, head: Head, one: Scored) -> Scored:
    """The score of a whole sequence by those of its positions."""
    scope = f"{head.output}/seq_score"
    valid = valid_positions_of(source, graph, head.mask)

    def mean(value: Value) -> Value:
        with graph.scope(scope):
            if valid is None:
                return graph.reduce("ReduceMean", value, [1], keepdims=False)
            return masked_mean(graph, value, valid, 2)

    ranked = None if one.ranked is None else mean(one.ranked)
    return Scored("seq_score", mean(one.value), 1, one.kind, ranked, one.witnesses, True)


def is_told_by(source: SourceModel, tensor: gs.Tensor, place: str) -> bool:
    """Whether a tensor is made of what is at a place, sample by sample: rows may have become another axis on the way."""
    ours, theirs = (t.shape[0] if t.shape else None for t in (tensor, source.tensors[place]))
    apart = isinstance(ours, int) and isinstance(theirs, int) and min(ours, theirs) > 0 and ours != theirs
    return not apart and comes_from(tensor, {place})


def score_rank(head: Head) -> int:
    """The rank of a score of what a head describes: one number per sample, or per position that has classes."""
    return 1 if head.axis is None or head.rank is None else head.rank - 1


def with_flags(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    scores: Sequence[Scored],
    spread: Value,
    deviation: Value | None = None,
    watched: Sequence[str] = (),
) -> Flagged:
    """The scores as the file has them, their p-values and flags: 0 and no flag at padding where positions have their
    own, and levelled over lengths where an input has one. What has no finite `deviation`, or inputs of those `watched` that
    are no numbers, is flagged (`soundness`)."""
    whole_rank = max(one.rank for one in scores)
    roles: dict[str, Value] = {}
    values: dict[str, ScoreValues] = {}
    for one in scores:
        whose = one.role.removesuffix("score")
        prefix = f"{head.output}/{one.role}"
        value, ranked = one.value, one.ranked
        valid = _valid_like(source, graph, head) if one.role == "score" else None
        if valid is not None:
            with graph.scope(f"{prefix}/valid"):
                lost, zero = (graph.constant(np.asarray(number, value.dtype)) for number in (np.nan, 0))
                whole, spread = graph.where(valid, value, lost), graph.where(valid, spread, lost)
                before = whole if ranked is None else graph.where(valid, ranked, lost)
                value = graph.where(valid, value, zero)
        else:
            whole, before = value, value if ranked is None else ranked
        lengths = None
        if _is_levelled(graph, head, one):
            value, ranked, lengths = _levelled(source, graph, head, one, (value, ranked), prefix)
        served = value if ranked is None else ranked
        told_by = head.output if one.witnesses is None else one.witnesses.last.reads[0]
        known = beside(source, graph, head, value, deviation, one.rank, whole_rank, told_by, watched)
        rare, table = emit_p_value(graph, served, one.rank, prefix, known_by=known)
        flag = emit_flag(graph, rare, table, f"{head.output}/{whose}ood", known)
        if valid is not None:
            with graph.scope(f"{head.output}/{whose}ood"):
                flag = graph.emit("And", flag, valid)
        roles |= {one.role: value, f"{whose}pvalue": rare, f"{whose}ood": flag}
        summed = one.witnesses is not None and not one.positions
        values[one.role] = ScoreValues(one.kind, whole, before, served, table, one.witnesses, lengths, summed)
    return Flagged(roles, spread, values)


def _is_levelled(graph: VarianceGraph, head: Head, one: Scored) -> bool:
    """Whether a score is put where it would be at the usual length of inputs."""
    return (
        head.lengths is not None and one.role == "score" and one.rank == 1 and graph.opset >= OLDEST_LEVELLED
    )


def _levelled(
    source: SourceModel,
    graph: VarianceGraph,
    head: Head,
    one: Scored,
    values: tuple[Value, Value | None],
    prefix: str,
) -> tuple[Value, Value | None, LengthTensors]:
    """A score, and what is ranked in its place, as they would be at the usual length."""
    value, ranked = values
    with graph.scope(f"{tensor_of(head.lengths or '')}/valid"):
        told = valid_in(graph, source, head.lengths or "")
    logarithmic = one.kind == "witnesses"
    value, lengths = level_score(graph, value, told, prefix, logarithmic)
    if ranked is not None:
        ranked, _ = level_score(graph, ranked, told, prefix, logarithmic, lengths)
    return value, ranked, lengths


def _valid_like(source: SourceModel, graph: VarianceGraph, head: Head) -> Value | None:
    """Where positions are no padding, as it goes with a score per position, which may have more axes than (N, T)."""
    valid = valid_positions_of(source, graph, head.mask) if head.axis is not None else None
    if valid is None:
        return None
    assert head.rank is not None
    with graph.scope(f"{head.output}/ood"):
        return graph.unsqueeze(valid, list(range(2, head.rank - 1))) if head.rank > 3 else valid


def valid_positions_of(source: SourceModel, graph: VarianceGraph, mask: str | None) -> Value | None:
    """Where positions (N, T) are no padding; None without a mask."""
    if mask is None:
        return None
    with graph.scope(f"{tensor_of(mask)}/valid"):
        return valid_in(graph, source, mask)
