"""Step 7, verify: the promises of a converted file, checked on data.

0. the nodes and weights of the source are inside, by hash, and a file is as it was written;
1. the source outputs are the same, bit for bit, with and without graph optimisation;
2. every variance is finite and not negative, and so is what the tasks make of it; where the bridge is
   shared, the most probable class is the source's;
3. what varies has a variance (`coverage`);
4. without our library, and at every optimisation level, the file runs and answers the same (`strangers`);
5. at every site, and where a head splits uncertainty, the native kernel, the portable function and the
   float64 reference agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from gapa_onnx.arrays import Array
from gapa_onnx.measure import strangers
from gapa_onnx.measure.agreement import Batch, Check, Operators, prints_of, run
from gapa_onnx.measure.candidates import candidate_scores
from gapa_onnx.measure.coverage import coverage
from gapa_onnx.measure.equality import bit_equal
from gapa_onnx.measure.provenance import provenance
from gapa_onnx.model.splice import exposed as exposing
from gapa_onnx.presence import require_described, require_outputs, require_promises, require_thresholds
from gapa_onnx.record import HeadRecord, Record, require
from gapa_onnx.sessions.inference import as_array

__all__ = ["Check", "bit_equal", "verify"]

HEAD_ROLES = ("probs", "entropy", "aleatoric", "epistemic")
PROBS_TOLERANCE = 1e-3  # of their sum over thousands of classes, in half precision or better


def verify(
    source: onnx.ModelProto,
    converted: onnx.ModelProto,
    batches: Iterable[Batch],
    *,
    allow_uncovered: bool = False,
) -> list[Check]:
    """Check a converted model against its source on some batches of inputs.

    `allow_uncovered` lets pass what varies and has no variance; it is told all the same.
    """
    record = require(converted, "the second file")
    batches = list(batches)
    names = [output.name for output in source.graph.output]
    if names != [output.name for output in converted.graph.output][: len(names)]:
        return [Check("source outputs come first, in order", False, f"expected {', '.join(names)}")]
    _require_described(record, converted)
    operators = Operators(converted, record)
    exposed = exposing(converted, operators.tensors)
    asked = strangers.questions(source, batches)
    first, both = len(asked.batches), [*asked.batches, *batches]
    before = {level: prints_of(source, both, level=level) for level in ("none", "all")}
    native = run(exposed, both, level="none")
    optimised = run(converted, both, level="all")
    asked = asked.answered(**{level: answers[:first] for level, answers in before.items()})
    return [
        *provenance(source, converted, record),
        _same_outputs(names, before["none"], native, "none"),
        _same_outputs(names, before["all"], optimised, "all"),
        *_sound_answers(record.heads, optimised),
        *_sound_heads(record.heads, optimised),
        coverage(source, record, batches, optimised[first:], allowed=allow_uncovered),
        *strangers.checks(
            record, converted, exposed, asked, {"none": native[:first], "all": optimised[:first]}
        ),
        *operators.checks(native[first:]),
    ]


def _require_described(record: Record, converted: onnx.ModelProto) -> None:
    """UserError where the record speaks of what the model does not have."""
    present = {output.name for output in converted.graph.output}
    require_described(record.heads, present)
    classes = {output: head for output, head in record.heads.items() if "probs" in head.outputs}
    require_outputs(classes, present, roles=HEAD_ROLES)
    require_thresholds(record, converted.graph)
    require_promises(record, converted.graph)


def _same_outputs(
    names: Sequence[str], before: Sequence[Mapping[str, Any]], after: Sequence[Batch], level: str
) -> Check:
    different = {n for old, new in zip(before, after) for n in names if not bit_equal(old[n], new[n])}
    detail = f"differs: {', '.join(sorted(different))}" if different else f"{len(names)} output(s)"
    return Check(f"source outputs bit-equal, optimisation {level}", not different, detail)


def _sound_answers(heads: Mapping[str, HeadRecord], answers: Sequence[Batch]) -> Iterator[Check]:
    """Of the variances, and of the scores where there are no variances."""
    variances = {
        head.outputs[role]: output if role == "var" else head.outputs[role]
        for output, head in heads.items()
        for role in ("var", "token_var", "class_var", "box_var")
        if role in head.outputs
    }
    scores = [head.outputs["score"] for head in heads.values() if head.score_only]
    if variances or not scores:
        yield _sound_variances(variances, answers)
    if scores:
        outside = {
            name for answer in answers for name in scores if ((answer[name] < 0) | (answer[name] > 1)).any()
        }
        detail = f"{', '.join(sorted(outside))} is not" if outside else ", ".join(scores)
        yield Check("scores between 0 and 1", not outside, detail)


def _sound_variances(variances: Mapping[str, str], answers: Sequence[Batch]) -> Check:
    """`variances` go to the tensors that they are of; those of candidates stand for themselves."""
    faults = set()
    for answer in answers:
        for name, output in variances.items():
            mean, var = answer[output], answer[name]
            if isinstance(var, list):  # of a sequence
                mean, var = (np.concatenate([np.ravel(part) for part in parts]) for parts in (mean, var))
            if isinstance(mean, np.ndarray):  # not a list of maps
                var = var[np.isfinite(mean)]  # what is not a number has no error bar
            if not np.isfinite(var).all():
                faults.add(f"{name} has NaN or infinity")
            elif (var < 0).any():
                faults.add(f"{name} is negative ({var.min():.3g})")
    detail = "; ".join(sorted(faults)) or ", ".join(variances)
    return Check("variances finite and not negative", not faults, detail)


def _sound_heads(heads: Mapping[str, HeadRecord], answers: Sequence[Batch]) -> list[Check]:
    """Of each output with classes: probabilities, the split of uncertainty, and the prediction."""
    checks = []
    for output, head in heads.items():
        roles = head.outputs
        if "probs" not in roles:
            continue
        axis = head.axis if head.axis is not None and head.detection is None else -1  # classes have one
        faults = {
            fault
            for answer in answers
            for fault in _head_faults(head, axis, _judged_by(head, output, answer), answer)
        }
        kept = "" if head.bridge != "shared" else "; the most probable class is the source's"
        detail = "; ".join(sorted(faults)) or f"{', '.join(roles[role] for role in HEAD_ROLES)}{kept}"
        checks.append(Check(f"{output}: {head.task} head", not faults, detail))
    return checks


def _judged_by(head: HeadRecord, output: str, answer: Batch) -> Array:
    """What a head's probabilities must agree with: the output, or the class scores of a detector's candidates. Where
    NonMaxSuppression selects among these, no output holds them, and nothing is left to agree with."""
    if head.detection is not None and head.detection.classes in answer:
        return candidate_scores(head, answer)
    held: Array = as_array(answer[output if head.detection is None else head.outputs["probs"]])
    return held


def _head_faults(head: HeadRecord, axis: int, mean: Array, answer: Batch) -> Iterator[str]:
    roles = head.outputs
    if not -mean.ndim <= axis < mean.ndim:
        yield f"the classes are said to be on axis {axis} of {mean.ndim}"
        return
    known = np.isfinite(mean).all(axis=axis)  # what is not a number has no error bar
    probs = np.moveaxis(answer[roles["probs"]], axis, -1)[known]  # (rows, classes)
    scores = np.moveaxis(mean, axis, -1)[known]
    if not ((probs >= 0) & (probs <= 1)).all():
        yield f"{roles['probs']} is not between 0 and 1"
    elif head.link == "softmax" and np.abs(probs.sum(axis=-1) - 1).max(initial=0.0) > PROBS_TOLERANCE:
        yield f"{roles['probs']} does not add up to 1"
    for role in HEAD_ROLES[1:]:
        if not (answer[roles[role]][known] >= 0).all():
            yield f"{roles[role]} is not a number, or negative"
    if head.bridge == "shared":
        most = probs.argmax(axis=-1)
        if "tokens" in roles:
            tokens = np.moveaxis(answer[roles["tokens"]], axis, -1)[known]
            most = np.take_along_axis(tokens, most[:, None], axis=-1)[:, 0]
        if (most != scores.argmax(axis=-1)).any():
            yield f"{roles['probs']} has another most probable class than {head.logits}"
