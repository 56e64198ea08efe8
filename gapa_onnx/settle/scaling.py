"""τ by targets: how large variances are, where it can be known.

Without labels τ rests on a convention (`calibrate`): how fast the variance grows away from the data is known, how
large it is in units of the output is not. Targets y of rows that the model has not learnt from tell. With μ the
model's output, v_κ its variance when τ of every site is multiplied by κ, and c a constant noise,

    loss(κ) = min over c of the mean of ½ ((y - μ)² / (v_κ + c) + log (v_κ + c))        every row left out

and κ is the largest that costs at most 0.001 nats a row over the best: where the loss does not tell, the error bars
of strange inputs stay wide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import onnx

from gapa_onnx import record as provenance
from gapa_onnx.data import DataSource
from gapa_onnx.fit.calibrate import Calibration
from gapa_onnx.plan.targets import known_rows, require_rows
from gapa_onnx.settings import Settings
from gapa_onnx.settle.left_out import left_out_by_scale
from gapa_onnx.settle.noise import best_constant

FACTORS = 10.0 ** np.arange(-6, 1.25, 0.25)  # candidates for κ
TOLERANCE = 0.001  # nats a row and output


def scaled_by_targets(
    model: onnx.ModelProto,
    calibration: Calibration,
    data: DataSource,
    targets: Mapping[str, np.ndarray],
    settings: Settings,
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> Calibration:
    """The calibration with the same κ in τ of every site, chosen by all targets together."""
    losses = []
    for output, values in targets.items():
        require_rows(values, calibration.rows)
        variance = provenance.read(model)["heads"][output]["outputs"]["var"]
        residuals, variances = [], []
        for positions, answers in left_out_by_scale(
            model,
            calibration,
            data,
            [output, variance],
            FACTORS,
            among=known_rows(values),
            seed=settings.seed,
            progress=progress,
        ):
            mean = answers[0][output]
            true = values[positions].reshape(mean.shape).astype(np.float64)
            residuals.append((true - mean).reshape(len(positions), -1))
            variances.append([answer[variance].reshape(len(positions), -1) for answer in answers])
        losses.append(row_losses(np.concatenate(residuals), np.concatenate(variances, axis=1)))
    losses = [loss for loss in losses if loss.size]
    if not losses:
        return calibration
    factor = largest_factor(losses)
    fits = tuple(replace(fit, scale=float(np.float32(fit.scale * factor))) for fit in calibration.fits)
    return replace(calibration, fits=fits)


def row_losses(residuals: np.ndarray, variances: np.ndarray) -> np.ndarray:
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


def largest_factor(losses: list[np.ndarray]) -> float:
    """The largest factor that costs little over the best; one array (factors, n) for each output."""
    means = np.mean([loss.mean(axis=1) for loss in losses], axis=0)  # (factors,)
    return float(FACTORS[np.flatnonzero(means <= means.min() + TOLERANCE)[-1]])
