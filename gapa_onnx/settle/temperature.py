"""Calibrate probabilities by labels: a temperature T of the logits and a factor κ of τ, found together.

With m the logits, v_κ their variance when τ of every site is multiplied by κ, and y the label of a row of part A,

    loss(T, κ) = mean of -log softmax(m / sqrt(T² + π/8 v_κ))_y  +  (log10 κ / 0.25)² / 2n  +  (log T)² / 2n

A temperature makes a network humble everywhere, the variance only where inputs are strange. Labels of ordinary rows tell
the two apart badly: on CIFAR-10 ResNets a free κ loses with hundreds of labels, and gains nothing with thousands. So κ
stays near 1, what left-out shares say, unless many labels contradict; the last term keeps T from 0 where few rows are
all predicted rightly. One T for all classes leaves the most probable one as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.errors import UserError
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.plan.heads.promises import Promises, PromiseTensors
from gapa_onnx.plan.labels import require_classes
from gapa_onnx.progress import Progress, silent
from gapa_onnx.record import TemperatureRecord
from gapa_onnx.settle.left_out import LeftOutSample
from gapa_onnx.settle.scaling import times
from gapa_onnx.settle.tail import Tail

BELIEVED = 0.25  # of log10 κ: τ from left-out shares is believed to this factor
FACTORS = 10.0 ** np.arange(
    -1.5, 1.75, 0.5
)  # at which variances are computed; between them by their logarithms
STEPS = np.arange(-1.5, 1.55, 0.1)  # of log10 κ
WIDEST = 4.0  # of |log T|
PLACES = 64  # of each map of labels: those of one image say much the same
GOLDEN = (math.sqrt(5) - 1) / 2
ROUNDS = 30  # of the golden section: log T is then known to 5e-6


@dataclass(frozen=True)
class Logits:
    """Logits of labelled rows, and their variances."""

    mean: Array  #: (n, classes)
    var: Array  #: (factors, n, classes), or (factors, n, 1) where they enter by their mean
    labels: Array  #: (n,)
    rows: int  #: that they are of; more than one may be a pixel of the same

    def losses(self, temperature: float, var: Array) -> Array:
        """Loss (n,) at a temperature, with variances (n, classes) or (n, 1)."""
        scaled = self.mean / np.sqrt(temperature**2 + math.pi / 8 * var)
        scaled -= scaled.max(axis=1, keepdims=True)
        told = np.take_along_axis(scaled, self.labels[:, None], axis=1)[:, 0]
        losses: Array = np.log(np.exp(scaled).sum(axis=1)) - told
        return losses

    def var_at(self, step: float) -> Array:
        """The variances at κ = 10^step, between two of FACTORS by their logarithms: exact where they go with a power."""
        steps = np.log10(FACTORS)
        low = int(np.clip(np.searchsorted(steps, step) - 1, 0, len(steps) - 2))
        share = (step - steps[low]) / (steps[low + 1] - steps[low])
        lower, upper = (np.log(np.maximum(self.var[k], np.finfo(np.float64).tiny)) for k in (low, low + 1))
        var: Array = np.exp(lower + share * (upper - lower))
        return var


def tempered(
    template: Template,
    sample: LeftOutSample,
    numbers: Numbers,
    labels: Mapping[str, Array],
    *,
    bridge: str,
    scaled: bool,
    progress: Progress = silent,
) -> Numbers:
    """Find the temperature of each output with labels, and with `scaled` one factor of τ by all of them together."""
    logits = _logits(template, sample, numbers, labels, bridge, progress)
    steps = STEPS if scaled else np.zeros(1)
    found = [[best_temperature(one, step) for one in logits.values()] for step in steps]
    rows = max((one.rows for one in logits.values()), default=1)
    losses = [
        np.mean([loss for _, loss in row]) + (step / BELIEVED) ** 2 / (2 * rows)
        for step, row in zip(steps, found)
    ]
    best = int(np.argmin(losses))
    factor = float(10 ** round(float(steps[best]), 2))
    promises = dict(numbers.promises)
    for (output, one), (temperature, _) in zip(logits.items(), found[best]):
        after, before = (
            float(one.losses(value, one.var_at(step)).mean())
            for value, step in ((temperature, float(steps[best])), (1.0, 0.0))
        )
        record = TemperatureRecord(temperature, factor, one.rows, after, before)
        promises[output] = replace(promises.get(output, Promises()), temperature=record)
    fits = times(numbers.fits, factor) if scaled else numbers.fits
    return replace(numbers, fits=fits, promises=promises)


def best_temperature(logits: Logits, step: float) -> tuple[float, float]:
    """T and its loss, with what keeps it from 0, at κ = 10^step: the best of a coarse grid, then by golden section."""
    var, rows = logits.var_at(step), logits.rows

    def loss(log: float) -> float:
        return float(logits.losses(math.exp(log), var).mean()) + log**2 / (2 * rows)

    coarse = np.linspace(-WIDEST, WIDEST, 17)
    middle = float(coarse[int(np.argmin([loss(log) for log in coarse]))])
    log = _golden(loss, middle - 0.5, middle + 0.5)
    return math.exp(log), loss(log)


def _golden(loss: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum between two numbers has it."""
    inner = [high - GOLDEN * (high - low), low + GOLDEN * (high - low)]
    values = [loss(one) for one in inner]
    for _ in range(ROUNDS):
        if values[0] < values[1]:
            high, inner[1], values[1] = inner[1], inner[0], values[0]
            inner[0] = high - GOLDEN * (high - low)
            values[0] = loss(inner[0])
        else:
            low, inner[0], values[0] = inner[0], inner[1], values[1]
            inner[1] = low + GOLDEN * (high - low)
            values[1] = loss(inner[1])
    return (low + high) / 2


def _logits(
    template: Template,
    sample: LeftOutSample,
    numbers: Numbers,
    labels: Mapping[str, Array],
    bridge: str,
    progress: Progress,
) -> dict[str, Logits]:
    """Logits and variances of the rows of part A whose label is known, by output."""
    names = {output: template.promises[output] for output in labels}
    tail = Tail(template, [name for one in names.values() for name in (one.logits, one.logits_var) if name])
    candidates = [times(numbers.fits, factor) for factor in FACTORS]
    parts: dict[str, list[tuple[Array, Array, Array]]] = {output: [] for output in labels}
    rows = dict.fromkeys(labels, 0)
    total, done = max(sample.rows(Purpose.SCALING), 1), 0
    axes = {head.output: head.axis for head in template.plan.heads}
    for batch in sample.batches(Purpose.SCALING):
        answers = [tail(batch, fits) for fits in candidates]
        for output, known in labels.items():
            true = known[batch.positions]
            one = _piece(answers, names[output], true, axes[output], output, bridge)
            parts[output].append((one.mean, one.var, one.labels))
            rows[output] += one.rows
        done += len(batch.positions)
        progress("calibrating by the labels", done / total)
    found = {}
    for output, pieces in parts.items():
        if not sum(len(true) for _, _, true in pieces):
            raise UserError(
                f"no labelled row of {output!r} is left to fit a temperature to", "label more rows"
            )
        means, by_factor, classes = zip(*pieces)
        found[output] = Logits(
            np.concatenate(means), np.concatenate(by_factor, axis=1), np.concatenate(classes), rows[output]
        )
    return found


def _piece(
    answers: Sequence[Mapping[str, Array]],
    names: PromiseTensors,
    true: Array,
    axis: int | None,
    output: str,
    bridge: str,
) -> Logits:
    """The labelled places of some rows: labels (n, …), and answers for each of FACTORS."""
    logits = _by_place(answers[0][str(names.logits)], axis)
    require_classes(true, logits.shape[-1], output)
    variances = np.stack([_by_place(found[str(names.logits_var)], axis) for found in answers])
    if bridge == "shared":
        variances = variances.mean(axis=-1, keepdims=True)
    shape, true = true.shape[1:], true.reshape(len(true), -1)
    if true.shape[1] != logits.shape[1]:
        raise UserError(
            f"the labels of a row have shape {shape}, and {output!r} has {logits.shape[1]} places",
            "give one label per place",
        )
    good = (true >= 0) & np.isfinite(logits).all(axis=-1) & np.isfinite(variances).all(axis=(0, -1))
    good &= _some(good)
    return Logits(logits[good], variances[:, good], true[good], int(good.any(axis=1).sum()))


def _by_place(values: Array, axis: int | None) -> Array:
    """(n, places, classes) in double precision, of numbers with classes along an axis."""
    moved = np.moveaxis(values, axis if axis is not None else -1, -1).astype(np.float64)
    return moved.reshape(len(moved), -1, moved.shape[-1])


def _some(good: Array) -> Array:
    """Of the good places (n, places) of each row as many as are kept, evenly spread."""
    rank = np.cumsum(good, axis=1) - 1
    step = np.maximum(1, good.sum(axis=1, keepdims=True) // PLACES)
    chosen: Array = rank % step == 0
    return chosen
