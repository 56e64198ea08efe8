"""The steps of a conversion, one after another, for tests that look between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from gapa_onnx.data import DataSource, open_data
from gapa_onnx.emit.rewrite import Template, rewrite
from gapa_onnx.fit.calibrate import Calibration, SiteFit, calibrate
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import Plan, analyse
from gapa_onnx.settings import Settings
from gapa_onnx.settle.left_out import LeftOutSample, leave_out
from gapa_onnx.settle.tail import Tail


@dataclass(frozen=True)
class Steps:
    """A conversion up to its template, and the rows that are left out for all purposes."""

    plan: Plan
    data: DataSource
    calibration: Calibration
    template: Template
    sample: LeftOutSample
    settings: Settings

    def tail(self, *wanted: str) -> Tail:
        return Tail(self.template, wanted)

    def answers(
        self, *wanted: str, fits: Sequence[SiteFit] | None = None, purpose: Purpose = Purpose.SCORES
    ) -> dict[str, np.ndarray]:
        """Tensors of the left-out rows, in the order of the data, with the fits of the calibration or others."""
        tail, positions = self.tail(*wanted), []
        parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
        for batch in self.sample.batches(purpose):
            positions.append(batch.positions)
            for name, array in tail(batch, fits or self.calibration.fits).items():
                parts[name].append(array)
        order = np.argsort(np.concatenate(positions))
        return {name: np.concatenate(arrays)[order] for name, arrays in parts.items()}


def steps(model: onnx.ModelProto, rows: dict[str, np.ndarray], settings: Settings) -> Steps:
    """A conversion up to the point where its numbers are settled."""
    source = load(model)
    plan = analyse(source, settings)
    data = open_data(rows, source.inputs)
    known = {Purpose.SCALING: np.ones(data.rows or 0, np.bool_)}
    calibration = calibrate(plan, data, settings, known=known)
    template = rewrite(plan, calibration, settings)
    every = Purpose.WEIGHING | Purpose.SCORES | Purpose.SCALING
    sample = leave_out(calibration, every)
    return Steps(plan, data, calibration, template, sample, settings)
