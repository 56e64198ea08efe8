"""Calibrate probabilities by labels: a temperature T of the logits and a factor κ of τ, found together.

With m the logits, v_κ their variance when τ of every site is multiplied by κ, and y the label of a row of part A,

    loss(T, κ) = mean of -log softmax(m / sqrt(T² + π/8 v_κ))_y  +  (log10 κ / 0.25)² / 2n  +  (log T)² / 2n

A temperature makes a network humble everywhere, the variance only where inputs are strange. Labels of ordinary rows tell
the two apart badly: four CIFAR-10 ResNets with 400 labels lose 0.001 nats if κ is free, and gain nothing if there are
thousands. So κ stays near 1, what left-out shares say, unless many labels contradict; the last term keeps T from 0
where few rows are all predicted rightly. One T for all classes leaves the most probable one as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.errors import UserError
from gapa_onnx.plan.heads.promises import Promises
from gapa_onnx.plan.labels import require_classes
from gapa_onnx.progress import Progress, silent
from gapa_onnx.record import TemperatureRecord
from gapa_onnx.settle.left_out import LeftOutSample, Purpose
from gapa_onnx.settle.scaling import times
from gapa_onnx.settle.tail import Tail

BELIEVED = 0.25  # of log10 κ: τ from left-out shares is believed to this factor
FACTORS = 10.0 ** np.arange(
    -1.5, 1.75, 0.5
)  # at which variances are computed; between them by their logarithms
STEPS = np.arange(-1.5, 1.55, 0.1)  # of log10 κ
WIDEST = 4.0  # of |log T|
GOLDEN = (math.sqrt(5) - 1) / 2
ROUNDS = 30  # of the golden section: log T is then known to 5e-6


@dataclass(frozen=True)
class Logits:
    """Logits of labelled rows, and their variances."""

    mean: Array  #: (n, classes)
    var: Array  #: (factors, n, classes), or (factors, n, 1) where they enter by their mean
    labels: Array  #: (n,)

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
    rows = max((len(one.labels) for one in logits.values()), default=1)
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
        record = TemperatureRecord(temperature, factor, len(one.labels), after, before)
        promises[output] = replace(promises.get(output, Promises()), temperature=record)
    fits = times(numbers.fits, factor) if scaled else numbers.fits
    return replace(numbers, fits=fits, promises=promises)


def best_temperature(logits: Logits, step: float) -> tuple[float, float]:
    """T and its loss, with what keeps it from 0, at κ = 10^step: the best of a coarse grid, then by golden section."""
    var, rows = logits.var_at(step), len(logits.labels)

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
    total, done = max(sample.rows(Purpose.SCALING), 1), 0
    for batch in sample.batches(Purpose.SCALING):
        answers = [tail(batch, fits) for fits in candidates]
        for output, known in labels.items():
            mean, var = str(names[output].logits), str(names[output].logits_var)
            true = known[batch.positions]
            require_classes(true, answers[0][mean].shape[1], output)
            variances = np.stack([found[var] for found in answers]).astype(np.float64)
            if bridge == "shared":
                variances = variances.mean(axis=2, keepdims=True)
            logits = answers[0][mean].astype(np.float64)
            good = (true >= 0) & np.isfinite(logits).all(axis=1) & np.isfinite(variances).all(axis=(0, 2))
            parts[output].append((logits[good], variances[:, good], true[good]))
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
            np.concatenate(means), np.concatenate(by_factor, axis=1), np.concatenate(classes)
        )
    return found
