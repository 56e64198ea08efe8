"""Scale τ of all sites by the targets, so that variances are as large as the model's errors say.

Without labels τ rests on a convention (`calibrate`): how fast the variance grows away from the data is known, how
large it is in units of the output is not. Targets y of rows that the model has not learnt from tell. With μ the
model's output, v_κ its variance when τ of every site is multiplied by κ, and c a constant noise,

    loss(κ) = min over c of the mean of ½ ((y - μ)² / (v_κ + c) + log (v_κ + c))        every row left out

and κ is the largest that costs at most 0.001 nats a row over the best: where the loss does not tell, the error bars
of strange inputs stay wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.fit.calibrate import SiteFit
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.progress import Progress, silent
from gapa_onnx.settle.left_out import LeftOutSample
from gapa_onnx.settle.noise import best_constant
from gapa_onnx.settle.tail import Tail

FACTORS = 10.0 ** np.arange(-6, 1.25, 0.25)  # candidates for κ
TOLERANCE = 0.001  # nats a row and output


def scaled_by_targets(
    template: Template,
    sample: LeftOutSample,
    numbers: Numbers,
    tail: Tail,
    targets: Mapping[str, Array],
    progress: Progress = silent,
) -> Numbers:
    """Multiply τ of every site by one factor κ, which is chosen by all targets together."""
    candidates = [times(numbers.fits, factor) for factor in FACTORS]
    residuals: dict[str, list[Array]] = {output: [] for output in targets}
    variances: dict[str, list[list[Array]]] = {output: [] for output in targets}
    total, done = sample.rows(Purpose.SCALING), 0
    for batch in sample.batches(Purpose.SCALING):
        answers = [tail(batch, fits) for fits in candidates]
        rows = len(batch.positions)
        for output, values in targets.items():
            mean, var = answers[0][output], template.roles[output]["var"]
            true = values[batch.positions].reshape(mean.shape).astype(np.float64)
            residuals[output].append((true - mean).reshape(rows, -1))
            variances[output].append([answer[var].reshape(rows, -1) for answer in answers])
        done += rows
        progress("scaling by the targets", done / total)
    losses = [
        row_losses(np.concatenate(residuals[output]), np.concatenate(variances[output], axis=1))
        for output in targets
        if residuals[output]
    ]
    losses = [loss for loss in losses if loss.size]
    if not losses:
        return numbers
    return replace(numbers, fits=times(numbers.fits, largest_factor(losses)))


def times(fits: Sequence[SiteFit], factor: float) -> tuple[SiteFit, ...]:
    """Multiply τ of every fit by a factor; the ceiling A stays."""
    return tuple(replace(fit, scale=float(np.float32(fit.scale * factor))) for fit in fits)


def row_losses(residuals: Array, variances: Array) -> Array:
    """Loss (factors, n) of each row, the mean over targets, for residuals (n, t) and variances (factors, n, t).

    Rows with anything that is not finite are left out, and targets that the model meets exactly.
    """
    good = np.isfinite(residuals).all(axis=1) & np.isfinite(variances).all(axis=(0, 2))
    residuals, variances = residuals[good], variances[:, good].astype(np.float64)
    unit = np.mean(residuals**2, axis=0) if len(residuals) else np.zeros(residuals.shape[1])
    residuals, variances, unit = residuals[:, unit > 0], variances[..., unit > 0], unit[unit > 0]
    if not len(unit):
        return np.zeros((len(variances), 0))
    squared, variances = residuals**2 / unit, variances / unit
    losses = []
    for var in variances:
        total = var + best_constant(squared, var)
        losses.append(0.5 * np.mean(squared / total + np.log(total), axis=1))
    return np.array(losses)


def largest_factor(losses: list[Array]) -> float:
    """The largest of FACTORS whose mean loss is within TOLERANCE of the best, from losses (factors, n) per output."""
    means = np.mean([loss.mean(axis=1) for loss in losses], axis=0)  # (factors,)
    return float(FACTORS[np.flatnonzero(means <= means.min() + TOLERANCE)[-1]])
