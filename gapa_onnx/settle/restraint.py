"""Hold τ back where it would cost predictions more than it may.

Without labels nobody knows how sure a network ought to be. But if it is as right as it is sure, blurring its
probabilities p to q costs KL(p ‖ q) nats a row, and what that is on ordinary inputs can be counted: on left-out rows,
with v the variance that a site gives them,

    v = c² τ s (κ + λ beyond)        κ is the largest, at most 1, whose mean KL(p ‖ q) is at most `MOST_LOST`, with λ = 1

First only what ordinary inputs have is held back: where witnesses find an input beyond the ordinary its variance stays.
Where the least κ still loses more, as some ordinary inputs are beyond the ordinary too, λ is held back as well.
Overconfident networks are sure of their calibration rows, hardly lose, and keep their τ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.fit.calibrate import SiteFit
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.plan.head import Head, Task
from gapa_onnx.settle.left_out import LeftOutBatch, LeftOutSample
from gapa_onnx.settle.tail import Tail

MOST_LOST = (
    0.0005  # nats a row; networks that are less sure than they are right lose up to four times as much
)
FACTORS = 10.0 ** (np.arange(-100, 1) / 50)  # candidates for κ and λ; the last is 1
PLACES = 2000  # predictions that it is counted on, at least: of rows, or of positions of fewer rows
BLURRED = (Task.CLASSIFICATION, Task.SEGMENTATION, Task.TOKENS)
FAINTEST = 1e-30  # of a probability, so that it has a logarithm


@dataclass(frozen=True)
class _Predicted:
    """Where the probabilities of a head are, and what tells padding among them."""

    probs: str
    axis: int  #: of the classes
    real: str | None  #: the score of each position, which is no number at padding

    def __call__(self, answers: dict[str, Array]) -> Array:
        """Probabilities (n, classes): of each row, or of each of its positions that is no padding."""
        last = np.moveaxis(answers[self.probs], self.axis, -1)
        rows: Array = last.reshape(-1, last.shape[-1]).astype(np.float64)
        return rows if self.real is None else rows[np.isfinite(answers[self.real]).reshape(-1)]


def restrained(template: Template, sample: LeftOutSample, numbers: Numbers) -> Numbers:
    """Multiply τ of every site by one factor κ, and what witnesses add to it by λ."""
    heads = [_predicted(template, head) for head in template.plan.heads if _is_blurred(template, head)]
    if not heads:
        return numbers
    tail = Tail(template, [name for head in heads for name in (head.probs, head.real) if name], numbers)
    batches = list(_some(sample, lambda batch: len(heads[0](tail(batch, numbers.fits)))))

    def predicted(fits: Sequence[SiteFit]) -> list[Array]:
        parts = [tail(batch, fits) for batch in batches]
        return [np.concatenate([head(part) for part in parts]) for head in heads]

    certain = predicted(held_back(numbers.fits, float(FACTORS[0]) * 1e-9, 0.0))

    def too_much(factor: float, raised: float) -> bool:
        blurred = predicted(held_back(numbers.fits, factor, raised))
        return max(map(mean_divergence, certain, blurred)) > MOST_LOST

    if not too_much(1.0, 1.0):
        return numbers
    factor, raised = _largest(lambda factor: too_much(factor, 1.0)), 1.0
    if factor == FACTORS[0]:
        raised = _largest(lambda raised: too_much(factor, raised))
    return replace(numbers, fits=held_back(numbers.fits, factor, raised))


def _is_blurred(template: Template, head: Head) -> bool:
    """Whether an output has probabilities of classes that a variance blurs."""
    known = head.task in BLURRED and head.link == "softmax" and head.axis is not None
    return known and "probs" in template.roles.get(head.output, {})


def _predicted(template: Template, head: Head) -> _Predicted:
    score = template.scores.get((head.output, "score"))
    real = score.score if score is not None and head.mask is not None and (head.rank or 0) > 2 else None
    return _Predicted(template.roles[head.output]["probs"], head.axis or 0, real)


def _some(sample: LeftOutSample, count: Callable[[LeftOutBatch], int]) -> Iterator[LeftOutBatch]:
    """Left-out rows in batches, until they have `PLACES` predictions."""
    seen = 0
    for batch in sample.batches(Purpose.SCORES):
        if seen >= PLACES:
            return
        yield batch
        seen += count(batch)


def _largest(too_much: Callable[[float], bool]) -> float:
    """The largest of FACTORS that is not too much, and the least where all are; what is lost grows with them."""
    low, high = 0, len(FACTORS) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if too_much(float(FACTORS[middle])) else (middle, high)
    return float(FACTORS[low])


def held_back(fits: Sequence[SiteFit], factor: float, raised: float = 1.0) -> tuple[SiteFit, ...]:
    """Fits with κ times their τ, and λ times what witnesses add to it."""
    return tuple(
        replace(fit, scale=float(np.float32(fit.scale * factor)), lift=float(np.float32(raised / factor)))
        for fit in fits
    )


def mean_divergence(p: Array, q: Array) -> float:
    """Mean of KL(p ‖ q) over rows (n, classes), in nats; rows with anything that is no number are left out."""
    good = np.isfinite(p).all(axis=1) & np.isfinite(q).all(axis=1)
    if not good.any():
        return 0.0
    p, q = np.maximum(p[good], FAINTEST), np.maximum(q[good], FAINTEST)
    return float((p * (np.log(p) - np.log(q))).sum(axis=1).mean())
