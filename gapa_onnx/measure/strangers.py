"""The file as strangers load it: in a plain onnxruntime session, without our library, at every optimisation level.

The questions are few, since standard operators are slow: some rows between those of the data, where shares are not
near 0 and so can be compared, and one row alone; a batch as it is where the model fixes its size. What the source itself
does not answer is not asked.

At one optimisation level means are the same bit for bit, so a variance is a sum Σ w s of the shares at all sites, with weights w ≥ 0 that native
and portable have in common. Each share may be off by SHARE_TOLERANCE twice, once for either path, so a variance
may too. Shares below SMALLEST_SHARE are not compared: with weights that are alike they may move a variance by
SMALLEST_SHARE over the mean share, in units of the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnxruntime import InferenceSession

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.measure.agreement import (
    LEVELS,
    PREPARED_TOLERANCE,
    SHARE_TOLERANCE,
    SMALLEST_SHARE,
    Batch,
    Check,
    answer,
    opened,
    prints_of,
    run,
)
from gapa_onnx.measure.equality import bit_equal, fingerprints
from gapa_onnx.op.contract import PREPARED
from gapa_onnx.record import Record, ScoreRecord, WitnessesRecord
from gapa_onnx.sessions.runtime import first_line, library_path

ROWS = 2  # of one question
SUMS = 4  # units of rounding by which sums of a variance graph differ between optimisation levels, relative
PROBABILITY_SLOPE = 1.0  # |Δp| ≤ 0.12 |Δv| / v for the bridge of one class, and so 1 is ample
ROLES = (
    "var",
    "cov",
    "token_var",
    "total_var",
    "score",
    "probs",
    "class_var",
    "box_var",
    "image_score",
    "seq_score",
)


@dataclass(frozen=True)
class Rounding:
    """By how much shares of the two paths may differ."""

    relative: float
    beside: float

    @classmethod
    def of(cls, record: Record) -> Rounding:
        if any(place.index == PREPARED for place in record.places):
            return cls(SHARE_TOLERANCE + PREPARED_TOLERANCE[0], SMALLEST_SHARE + PREPARED_TOLERANCE[1])
        return cls(2 * SHARE_TOLERANCE, SMALLEST_SHARE)


@dataclass(frozen=True)
class Questions:
    """What strangers ask: a few small batches, and the source's answers by optimisation level."""

    batches: tuple[Batch, ...]
    expected: Mapping[str, Sequence[Mapping[str, Any]]] = field(repr=False)  #: fingerprints

    def answered(self, **expected: Sequence[Mapping[str, Any]]) -> Questions:
        """With what the source answered at further levels."""
        return replace(self, expected={**self.expected, **expected})

    @property
    def rows(self) -> str:
        counts = dict.fromkeys(
            max((a.shape[0] for a in b.values() if a.ndim), default=1) for b in self.batches
        )
        return " and ".join(map(str, counts))


def questions(source: onnx.ModelProto, batches: Sequence[Batch]) -> Questions:
    """The questions that the source answers; a whole batch where it answers no smaller one.

    Answers of the other two levels are for the caller to add, who asks the source there anyway.
    """
    candidates, session = list(_asked(source, batches)), opened(source, level="basic")
    answers = [_answer(session, batch) for batch in candidates]
    asked = [batch for batch, answered in zip(candidates, answers) if answered]
    found = fingerprints([answered for answered in answers if answered])
    if not asked:
        asked, found = [batches[0]], fingerprints([answer(session, batches[0])])
    del session, answers  # before the next one opens
    return Questions(tuple(asked), {"basic": found, "extended": prints_of(source, asked, level="extended")})


def _answer(session: InferenceSession, batch: Batch) -> Batch | None:
    try:
        return answer(session, batch)
    except Exception:  # onnxruntime has no common base class for its errors
        return None


def _asked(source: onnx.ModelProto, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Rows between those of the data, and one row; whole batches where their size is fixed."""
    free = {
        value.name
        for value in source.graph.input
        if value.type.tensor_type.shape.dim and not value.type.tensor_type.shape.dim[0].dim_value
    }
    first, between = batches[0], _between(batches)
    sizes = {name: len(array) for name, array in first.items() if name in free and array.ndim}
    rows = max(sizes.values(), default=0)

    def cut(batch: Batch, count: int) -> Batch:
        return {name: array[:count] if sizes.get(name) == rows else array for name, array in batch.items()}

    yield cut(between, ROWS)
    yield cut(first, 1)


def _between(batches: Sequence[Batch]) -> Batch:
    """a + b − c where inputs are floats, so near the data and none of them: of three batches, or of rows of one."""
    made = dict(batches[0])
    for name, array in batches[0].items():
        if not np.issubdtype(array.dtype, np.floating) or not array.ndim:
            continue
        if len(array) > 2:
            made[name] = array + np.roll(array, -1, axis=0) - np.roll(array, -2, axis=0)
        elif len(batches) > 2 and len({batch[name].shape for batch in batches[:3]}) == 1:
            made[name] = array + batches[1][name] - batches[2][name]
    return made


def checks(
    record: Record,
    converted: onnx.ModelProto,
    exposed: onnx.ModelProto,
    asked: Questions,
    native: Mapping[str, Sequence[Batch]],
) -> list[Check]:
    """Of a converted model without the library, beside its native answers by level; `exposed` has its shares as
    outputs, which the native answers at level none hold too."""
    if not converted.functions:
        return [Check("runs without the library", True, "it does not, as `portable` is none")]
    found: dict[str, Sequence[Batch]] = {}
    faults = []
    outputs = list(asked.expected["none"][0])
    for level in LEVELS:
        model = exposed if level == "none" else converted
        try:
            found[level] = run(model, asked.batches, level=level, native=False, label="the converted file")
        except Exception as error:  # onnxruntime has no common base class for its errors
            told = error.message if isinstance(error, UserError) else first_line(error)
            faults.append(f"optimisation {level}: {told}")
            continue
        pairs = zip(asked.expected[level], found[level])
        different = {name for old, new in pairs for name in outputs if not bit_equal(old[name], new[name])}
        faults += [f"optimisation {level}: {name} differs" for name in sorted(different)]
    detail = "; ".join(faults) or f"{', '.join(LEVELS)}: {asked.rows} row(s), source outputs bit-equal"
    loads = Check("runs without the library, at every optimisation", not faults, detail)
    if library_path() is None or "none" not in found:
        return [loads]
    return [loads, _agreement(record, converted, native, found)]


def _agreement(
    record: Record,
    converted: onnx.ModelProto,
    native: Mapping[str, Sequence[Batch]],
    portable: Mapping[str, Sequence[Batch]],
) -> Check:
    """Level by level: from one to another a quantised source rounds otherwise, and its variances follow."""
    name = "whole graph: native = portable"
    plain = native["none"]
    kept = [at for at, (a, b) in enumerate(zip(plain, portable["none"])) if _same_neighbours(record, a, b)]
    if not kept:
        return Check(name, True, "nothing could be compared: rounding chose other neighbours")
    worst, faults = 0.0, set()
    rounding = Rounding.of(record)
    raised = 1 + _raised(record, converted)
    for at in kept:
        floor = rounding.beside / max(_mean_share(record, converted, plain[at]), rounding.beside)
        for level in native.keys() & portable.keys():
            for output, role, score in _compared(record):
                a, b = (_numbers(answers[level][at][output]) for answers in (native, portable))
                if score is not None and score.witnesses is not None:
                    error = _beyond_by_witnesses(converted, score.witnesses, plain[at], a, b, rounding)
                else:
                    relative = rounding.relative * raised
                    error = _beyond(a, b, role, floor * raised, relative, one_sided=_misses(record))
                worst = max(worst, error)
                faults |= {f"{output} at optimisation {level}: {error:.1e}"} if error > 1 else set()
    detail = "; ".join(sorted(faults)) or f"differences ≤ {worst:.1e} of what single precision allows"
    return Check(name, not faults, detail)


def _compared(record: Record) -> Iterator[tuple[str, str, ScoreRecord | None]]:
    """Outputs beside the source's that follow from variances smoothly, with their roles; p-values do so in steps."""
    for head in record.heads.values():
        for role, output in head.outputs.items():
            score = head.scores.get(role)
            if role in ROLES and (score is None or score.kind != "epistemic"):
                yield output, role, score


def _beyond_by_witnesses(
    converted: onnx.ModelProto,
    witnesses: WitnessesRecord,
    shares: Batch,
    native: Array,
    portable: Array,
    rounding: Rounding,
) -> float:
    """The largest difference of two scores by witnesses in units of what is allowed.

    A score moves by at most all slopes together times what the logarithm of a share moves by.
    """
    if native.shape != portable.shape or (np.isfinite(native) != np.isfinite(portable)).any():
        return float("inf")
    gauges = [gauge for gauge in (witnesses.last, witnesses.earlier) if gauge is not None]
    held = [shares[name] for gauge in gauges for name in gauge.reads]
    least = np.min(
        [share.reshape(len(share), -1) for share in held], axis=0
    )  # (N, 1), or (N, T) of positions
    # A sequence moves by no more than the position of it that moves most.
    least = least.ravel() if least.size == native.size else least.min(axis=1)
    moved = rounding.relative + rounding.beside / np.maximum(least, rounding.beside)
    allowed = _steepest(converted, witnesses) * moved
    known = np.isfinite(native)
    return float((np.abs(native - portable)[known] / allowed[known]).max(initial=0.0))


def _steepest(converted: onnx.ModelProto, witnesses: WitnessesRecord, of_last: bool = True) -> float:
    """By how much a score, or how far witnesses are beyond the ordinary, follows the logarithm of all shares."""
    gauges = [witnesses.last] * of_last + [witnesses.earlier] * (witnesses.earlier is not None)
    names = {gauge.slope for gauge in gauges if gauge is not None}
    slopes = [onnx.numpy_helper.to_array(t) for t in converted.graph.initializer if t.name in names]
    return float(sum(np.abs(slope).sum() for slope in slopes))


def _raised(record: Record, converted: onnx.ModelProto) -> float:
    """By how much a variance may follow the logarithm of the shares of witnesses, relatively."""
    told = [score.witnesses for head in record.heads.values() for score in head.scores.values()]
    return max((_steepest(converted, one, of_last=False) for one in told if one is not None), default=0.0)


def _misses(record: Record) -> bool:
    """Whether the native search may miss a neighbour that the portable one finds, so that a variance is larger."""
    return any(site.index == "hnsw" for site in record.places)


def _same_neighbours(record: Record, native: Batch, portable: Batch) -> bool:
    """Whether both paths chose the same nearest points; what float32 cannot tell decides about a neighbourhood."""
    names = [site.share.removesuffix("share") + "neighbours" for site in record.places]
    return all(np.array_equal(native[n][..., :1], portable[n][..., :1]) for n in names if n in native)


def _mean_share(record: Record, converted: onnx.ModelProto, answer: Batch) -> float:
    """The smallest of the sites' mean shares, each levelled as its variance is: where that follows a share less and
    less, the small ones move it most."""
    held = {tensor.name: tensor for tensor in converted.graph.initializer}
    means = []
    for place in record.places:
        share = answer[place.share].astype(np.float64)
        half_way = held.get(place.share.removesuffix("share") + "half_way")
        if half_way is not None:
            half = float(onnx.numpy_helper.to_array(half_way))
            share = share * half / (share + half)
        means.append(float(np.nanmean(share)) if share.size else np.nan)
    return min((mean for mean in means if np.isfinite(mean)), default=0.0)


def _numbers(answer: Any) -> Array:
    parts: Iterable[Array] = answer if isinstance(answer, list) else [answer]
    return np.concatenate([np.ravel(part) for part in parts])


def _beyond(
    native: Array, portable: Array, role: str, floor: float, relative: float, *, one_sided: bool
) -> float:
    """The largest difference in units of what is allowed; infinite where one is a number and the other is not."""
    if native.shape != portable.shape or (np.isfinite(native) != np.isfinite(portable)).any():
        return float("inf")
    known = np.isfinite(native)
    relative += SUMS * float(np.finfo(native.dtype).eps)
    a, b = native[known].astype(np.float64), portable[known].astype(np.float64)
    if role == "probs":
        allowed = np.full(a.shape, PROBABILITY_SLOPE * (relative + floor))
    else:
        sizes = np.maximum(np.abs(a), np.abs(b))
        allowed = relative * sizes + floor * sizes.max(initial=0.0)
    difference = b - a if one_sided and role != "probs" else np.abs(b - a)
    if one_sided and role == "probs":
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        units = np.where(difference > 0, difference / allowed, 0.0)
    return float(units.max(initial=0.0))
