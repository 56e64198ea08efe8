"""Put what witnesses say on one scale, and rank scores by what ordinary inputs score.

Everything is found on left-out calibration rows. A score that witnesses make is computed here from their shares; any
other is read off the graph. Where rows are held out, those of part B are ranked instead, as the file itself scores them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import HeldOut
from gapa_onnx.emit.numbers import Numbers, ScoreNumbers
from gapa_onnx.emit.rewrite import ScoreKey, Template
from gapa_onnx.errors import UserError
from gapa_onnx.fit.calibrate import Calibration
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.plan.heads.strangeness import ENTROPY, Gauge, WitnessTensors
from gapa_onnx.plan.scores import ScoreTensors
from gapa_onnx.record import GaugeRecord, ScoreRecord, WitnessesRecord
from gapa_onnx.settings import Settings
from gapa_onnx.settle.held_out import FileRun, answers_in
from gapa_onnx.settle.left_out import LeftOutBatch, LeftOutSample
from gapa_onnx.settle.lengths import LengthFit, fit_lengths
from gapa_onnx.settle.scores import MOST_ORDINARY, ScoreSample, thinned, threshold_at
from gapa_onnx.settle.tail import Tail

LEFT_OUT = "left-out calibration rows"


def entropies(template: Template) -> list[str]:
    """The entropies that scores are made of, which the graph tells."""
    return [name for gauge in template.gauges if gauge.kind is ENTROPY for name in gauge.reads]


def tensors_of_scores(template: Template) -> list[str]:
    """What has to be read off the graph to rank its scores."""
    names = entropies(template)
    for one in template.scores.values():
        names += [] if one.summed else [one.ranked]
        names += [one.lengths.lengths] if one.lengths is not None else []
    return list(dict.fromkeys(names))


def gauged(template: Template, sample: LeftOutSample, numbers: Numbers) -> Numbers:
    """Find the scale of everything that witnesses say. It depends on no other number: shares and entropies do not."""
    if not template.gauges:
        return numbers
    tail = Tail(template, entropies(template))
    columns: dict[str, list[Array]] = {gauge.centre: [] for gauge in template.gauges}
    for batch in sample.batches(Purpose.SCORES):
        answers = tail(batch, numbers.fits)
        for gauge in template.gauges:
            columns[gauge.centre].append(_columns(batch, answers, gauge))
    found = {
        gauge.centre: gauge.fitted(np.concatenate(columns[gauge.centre]))
        for gauge in template.gauges
        if columns[gauge.centre]
    }
    return replace(numbers, gauges=found)


def ranked(
    template: Template, sample: LeftOutSample, numbers: Numbers, tail: Tail, settings: Settings
) -> Numbers:
    """Find the numbers of every score, and add them to the others."""
    drawn = {key: _Drawn(one, settings.seed) for key, one in template.scores.items()}
    rows = 0
    for batch in sample.batches(Purpose.SCORES):
        answers = tail(batch, numbers.fits)
        rows += len(batch.positions)
        for one in drawn.values():
            one.add(batch, answers, numbers)
    found = {key: one.numbers(template, rows, settings) for key, one in drawn.items()}
    lost = {
        output: "; no threshold, as every score on the data is NaN"
        for (output, _), one in found.items()
        if one is None
    }
    kept: dict[ScoreKey, ScoreNumbers] = {key: one for key, one in found.items() if one is not None}
    return replace(numbers, scores=kept, remarks={**numbers.remarks, **lost})


def ranked_by_held_out(
    template: Template, calibration: Calibration, held: HeldOut, numbers: Numbers, settings: Settings
) -> Numbers:
    """Put the scores of held-out rows, as the file computes them, in the place of those of left-out rows."""
    names = {key: template.scores[key].served for key in numbers.scores}
    if not names:
        return numbers
    run = FileRun(template, numbers, list(names.values()))
    samples = {key: ScoreSample(settings.seed) for key in names}
    rows = 0
    for positions, answers in answers_in(run, calibration, held, held.counting):
        rows += len(positions)
        for key, name in names.items():
            samples[key].add(answers[name])
    found = dict(numbers.scores)
    for key, sample in samples.items():
        if not len(sample.values):
            raise UserError("every score of the held-out rows is NaN", "check the data of `held_out`")
        quantiles = sample.table()
        record = replace(
            found[key].record,
            rows=rows,
            source="documents set apart" if held.apart else "held-out rows",
            holds="exactly" if len(sample.values) <= rows and not held.apart else "approximately",
            quantiles=quantiles,
            threshold=threshold_at(quantiles, settings.ood_quantile),
        )
        ordinary = thinned(
            sample.values, MOST_ORDINARY["rows" if len(sample.values) <= rows else "positions"]
        )
        found[key] = replace(found[key], record=record, ordinary=ordinary)
    return replace(numbers, scores=found)


class _Drawn:
    """What left-out rows say about one score."""

    def __init__(self, tensors: ScoreTensors, seed: int):
        self.tensors = tensors
        self.scores = ScoreSample(seed)
        self.values: list[Array] = []  # (n,) of scores that are levelled or combined
        self.lengths: list[Array] = []  # (n,)

    def add(self, batch: LeftOutBatch, answers: dict[str, Array], numbers: Numbers) -> None:
        tensors, witnesses = self.tensors, self.tensors.witnesses
        if tensors.summed and witnesses is not None:
            by_shares = tensors.ranked != tensors.score
            gauges = [g for g in witnesses.gauges if not (by_shares and g.kind is ENTROPY)]
            parts = [g(_columns(batch, answers, g), *numbers.gauges[g.centre]) for g in gauges]
            self.values.append(np.sum(parts, axis=0))
        elif tensors.lengths is not None:
            self.values.append(answers[tensors.ranked].astype(np.float64))
        else:
            self.scores.add(answers[tensors.ranked])
        if tensors.lengths is not None:
            self.lengths.append(answers[tensors.lengths.lengths].astype(np.float64))

    def numbers(self, template: Template, rows: int, settings: Settings) -> ScoreNumbers | None:
        """The numbers of the score; None where none of the rows has one."""
        level = None
        if self.values:
            values = np.concatenate(self.values)
            level = self._levels(values, settings)
            self.scores.add(values if level is None else self._levelled(values, level))
        values = self.scores.values
        if not len(values):
            return None
        ordinary = thinned(values, MOST_ORDINARY["rows" if len(values) <= rows else "positions"])
        record = self._record(template, values, rows, settings, level)
        table = None if level is None else level.table(self._logarithmic)
        return ScoreNumbers(record, ordinary, 1 - settings.ood_quantile, table)

    @property
    def _logarithmic(self) -> bool:
        return self.tensors.lengths is not None and self.tensors.lengths.logarithmic

    def _levels(self, values: Array, settings: Settings) -> LengthFit | None:
        if self.tensors.lengths is None:
            return None
        positive = np.exp(values) if self._logarithmic else values
        return fit_lengths(positive, np.concatenate(self.lengths), settings.ood_quantile)

    def _levelled(self, values: Array, level: LengthFit) -> Array:
        positive = np.exp(values) if self._logarithmic else values
        found = level.levelled(positive, np.concatenate(self.lengths))
        return np.log(found) if self._logarithmic else found

    def _record(
        self, template: Template, values: Array, rows: int, settings: Settings, level: LengthFit | None
    ) -> ScoreRecord:
        table, witnesses = self.tensors.table, self.tensors.witnesses
        quantiles = self.scores.table()
        return ScoreRecord(
            kind=self.tensors.kind,
            rows=rows,
            source=LEFT_OUT,
            holds="approximately",
            ranked=self.tensors.served,
            quantiles=quantiles,
            ordinary=table.scores,
            largest=table.largest,
            count=table.count,
            level=table.level,
            quantile=settings.ood_quantile,
            threshold=threshold_at(quantiles, settings.ood_quantile),
            lengths=None if level is None else level.numbers(),
            witnesses=None if witnesses is None else _witnesses_record(template, witnesses),
        )


def _columns(batch: LeftOutBatch, answers: dict[str, Array], gauge: Gauge) -> Array:
    """(n, columns): the shares or entropies that a gauge reads, of samples or of positions that are no padding."""
    parts = [answers[name] if gauge.kind is ENTROPY else batch.shares[name] for name in gauge.reads]
    rows: Array = np.concatenate(parts, axis=-1).astype(np.float64)
    real = [one for one in batch.valid.values() if one.shape == rows.shape[:-1]]
    return rows[real[0]] if real else rows.reshape(-1, rows.shape[-1])


def _witnesses_record(template: Template, witnesses: WitnessTensors) -> WitnessesRecord:
    shares = {place.output: place.share for place in template.places}

    def told(gauge: Gauge | None) -> GaugeRecord | None:
        if gauge is None:
            return None
        return GaugeRecord(tuple(shares.get(name, name) for name in gauge.reads), gauge.centre, gauge.slope)

    last = told(witnesses.last)
    assert last is not None
    return WitnessesRecord(last, told(witnesses.earlier), told(witnesses.entropy))
