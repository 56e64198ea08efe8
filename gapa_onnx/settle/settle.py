"""Step 5, settle: find the numbers of a template from what it computes for left-out calibration rows.

    weigh       several sites: factors of τ and A, so that each counts in the score
    scale       targets given: τ of all sites, by how far predictions are off
    temperature labels given: of the logits, and τ of all sites
    thresholds  the chosen quantile of each output's score
    noise       targets given: σ²(h) of the targets, from residuals beside the left-out variance
    promises    targets or labels given: sets, intervals and deferral, counted on rows of their own

Each is a function from numbers to numbers; the rows and their left-out shares are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import DataSource, HeldOut
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.errors import UserError
from gapa_onnx.fit.calibrate import Calibration
from gapa_onnx.plan.targets import require_rows
from gapa_onnx.progress import Progress, silent
from gapa_onnx.record import ScoreRecord
from gapa_onnx.settings import Settings
from gapa_onnx.settle.held_out import take_in
from gapa_onnx.settle.left_out import FROM_TRUTH, LeftOutSample, Purpose, leave_out
from gapa_onnx.settle.lengths import LengthFit, fit_lengths
from gapa_onnx.settle.noise import fit_noise
from gapa_onnx.settle.promises import Counting, with_promises
from gapa_onnx.settle.scaling import scaled_by_targets
from gapa_onnx.settle.scores import ScoreSample, threshold_at
from gapa_onnx.settle.tail import Tail
from gapa_onnx.settle.temperature import tempered
from gapa_onnx.settle.weighing import weighed


def settle(
    template: Template,
    calibration: Calibration,
    data: DataSource,
    settings: Settings,
    held: HeldOut | None = None,
    progress: Progress = silent,
) -> Numbers:
    """Find the numbers of all parameters of a template. A τ that the user has given stays as it is.

    `held` are rows whose truth may be known, see `data.held_out`.
    """
    numbers, targets = Numbers(calibration.fits), held.targets_in(held.fitting) if held else {}
    purposes = _purposes(template, settings, held)
    if not purposes:
        return numbers
    sample, fitting = _samples(template, calibration, data, settings, held, purposes, progress)
    scores = _scores(template, settings)
    wanted = [*_by_variance(template, scores), *_beside_targets(template, targets)]
    scored = [
        *scores.values(),
        *(one.lengths for one in template.lengths.values()),
        *template.image_scores.values(),
    ]
    tail = Tail(template, wanted or scored)
    if Purpose.WEIGHING in purposes:
        numbers = weighed(template, sample, numbers, tail, settings.seed, progress)
    if held is not None:
        numbers = _scaled(template, fitting, numbers, tail, settings, held, progress)
    if Purpose.SCORES in purposes:
        same = set(scored) <= set(tail.wanted) and not numbers.promises
        by_score = tail if same else Tail(template, scored, numbers)
        numbers = with_thresholds(template, sample, numbers, by_score, scores, settings)
    for output, values in targets.items():
        numbers = _with_noise(template, fitting, numbers, tail, output, values, settings, progress)
    if held is not None:
        numbers = with_promises(Counting(template, calibration, held, sample, settings), numbers)
    return numbers


def _scaled(
    template: Template,
    sample: LeftOutSample,
    numbers: Numbers,
    tail: Tail,
    settings: Settings,
    held: HeldOut,
    progress: Progress,
) -> Numbers:
    """τ by the truth of part A, unless it was given, and the temperature by its labels."""
    open_scale = settings.scale == "loo"
    if held.targets and open_scale:
        targets = held.targets_in(held.fitting)
        numbers = scaled_by_targets(template, sample, numbers, tail, targets, progress)
    if not held.labels:
        return numbers
    labels, scaled = held.labels_in(held.fitting), open_scale and not held.targets
    return tempered(
        template, sample, numbers, labels, bridge=settings.bridge, scaled=scaled, progress=progress
    )


def _samples(
    template: Template,
    calibration: Calibration,
    data: DataSource,
    settings: Settings,
    held: HeldOut | None,
    purposes: Purpose,
    progress: Progress,
) -> tuple[LeftOutSample, LeftOutSample]:
    """Left-out calibration rows, and the rows that what is known to be true is read from: the same, or held out."""
    if held is None:
        sample = leave_out(calibration, data, purposes, seed=settings.seed, progress=progress)
        return sample, sample
    if held.exact:
        of_truth = purposes & FROM_TRUTH & ~Purpose.COUNTING  # which is for the file itself
        sample = leave_out(calibration, data, purposes & ~FROM_TRUTH, seed=settings.seed, progress=progress)
        if not of_truth:
            return sample, sample
        return sample, take_in(template, calibration, held, held.fitting, of_truth, progress)
    for values in (*held.targets.values(), *held.labels.values()):
        require_rows(values, calibration.rows)
    parts = {Purpose.SCALING: held.fitting, Purpose.NOISE: held.fitting, Purpose.COUNTING: held.counting}
    known = {purpose: np.flatnonzero(part) for purpose, part in parts.items()}
    sample = leave_out(calibration, data, purposes, known, seed=settings.seed, progress=progress)
    return sample, sample


def _purposes(template: Template, settings: Settings, held: HeldOut | None) -> Purpose:
    """What left-out rows are needed for."""
    purposes = Purpose(0)
    if template.spreads:
        purposes |= Purpose.SCORES
        if len(template.plan.sites) > 1 and settings.scale == "loo" and not template.image_scores:
            purposes |= Purpose.WEIGHING
    if held is not None and (held.targets or held.labels):
        purposes |= Purpose.SCALING | Purpose.COUNTING
        if held.targets:
            purposes |= Purpose.NOISE
    return purposes


def _scores(template: Template, settings: Settings) -> dict[str, str]:
    """The tensor that each output is scored by. The mean variance is there without running its head."""
    if settings.score == "variance":
        return dict(template.spreads)
    return dict(template.scores)


def _by_variance(template: Template, scores: Mapping[str, str]) -> list[str]:
    """The mean variances, where sites are weighed or outputs scored by them."""
    several = len(template.plan.sites) > 1
    by_variance = set(scores.values()) == set(template.spreads.values())
    lengths = [one.lengths for one in template.lengths.values()] if by_variance else []
    return [*template.spreads.values(), *lengths] if several or by_variance else []


def _beside_targets(template: Template, targets: Mapping[str, Array]) -> list[str]:
    return [name for output in targets for name in (output, template.roles[output]["var"])]


# ------------------------------------------------------------------- thresholds


def with_thresholds(
    template: Template,
    sample: LeftOutSample,
    numbers: Numbers,
    tail: Tail,
    scores: Mapping[str, str],
    settings: Settings,
) -> Numbers:
    """Find the threshold of each output that has a score, and add it to the numbers."""
    drawn = _drawn(template, sample, numbers, tail, scores, settings)
    kinds = _kinds(template, scores, settings)
    found = {
        output: _score_record(template.thresholds[output], one, drawn, kinds[output], settings)
        for output, one in drawn.samples.items()
        if len(one.values)
    }
    of_images = {
        output: _score_record(template.image_thresholds[output], one, drawn, kinds[output], settings)
        for output, one in drawn.images.items()
        if len(one.values)
    }
    for output, level in drawn.levels.items():
        if output in found:
            found[output] = replace(found[output], lengths=level.numbers())
    lost = {
        output: "; no threshold, as every score on the data is NaN"
        for output in scores
        if output not in found
    }
    return replace(
        numbers,
        scores=found,
        image_scores=of_images,
        lengths={output: level.table() for output, level in drawn.levels.items() if output in found},
        remarks={**numbers.remarks, **lost},
    )


@dataclass(frozen=True)
class _Drawn:
    """The scores of left-out rows."""

    samples: Mapping[str, ScoreSample]  #: by output
    images: Mapping[str, ScoreSample]  #: by the output of a detector, of whole images
    levels: Mapping[str, LengthFit]  #: how scores follow lengths, by output
    rows: int


def _drawn(
    template: Template,
    sample: LeftOutSample,
    numbers: Numbers,
    tail: Tail,
    scores: Mapping[str, str],
    settings: Settings,
) -> _Drawn:
    samples = {output: ScoreSample(settings.seed) for output in scores}
    images = {output: ScoreSample(settings.seed) for output in template.image_scores}
    to_level: dict[str, list[Array]] = {output: [] for output in scores if output in template.lengths}
    rows = 0
    for batch in sample.batches(Purpose.SCORES):
        answers = tail(batch, numbers.fits)
        rows += len(batch.positions)
        for output, tensor in scores.items():
            if output in to_level:
                lengths = answers[template.lengths[output].lengths]
                to_level[output].append(np.stack([answers[tensor], lengths]).astype(np.float64))
            else:
                samples[output].add(answers[tensor])
        for output, tensor in template.image_scores.items():
            images[output].add(answers[tensor])
    levels = {}
    for output, parts in to_level.items():
        values, lengths = np.concatenate(parts, axis=1)
        level = fit_lengths(values, lengths, settings.ood_quantile)
        if level is not None:
            levels[output], values = level, level.levelled(values, lengths)
        samples[output].add(values)
    return _Drawn(samples, images, levels, rows)


def _kinds(template: Template, scores: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """What each score is: the mean variance, the share where there is none, or the epistemic part."""
    by_variance = "share" if template.plan.score_only else "variance"
    return {
        output: by_variance if tensor == template.spreads[output] else settings.score
        for output, tensor in scores.items()
    }


def _score_record(
    tensor: str, scores: ScoreSample, drawn: _Drawn, kind: str, settings: Settings
) -> ScoreRecord:
    quantiles = scores.table()
    return ScoreRecord(
        kind=kind,
        rows=drawn.rows,
        source="left-out calibration rows",
        quantiles=quantiles,
        tensor=tensor,
        quantile=settings.ood_quantile,
        threshold=threshold_at(quantiles, settings.ood_quantile),
    )


# ------------------------------------------------------------------- noise


def _with_noise(
    template: Template,
    sample: LeftOutSample,
    numbers: Numbers,
    tail: Tail,
    output: str,
    targets: Array,
    settings: Settings,
    progress: Progress,
) -> Numbers:
    """Train the noise head of one output on the queries of its last site, and add it to the numbers."""
    hidden, var = template.noise[output].reads, template.roles[output]["var"]
    parts: list[tuple[Array, ...]] = []
    for batch in sample.batches(Purpose.NOISE):
        answers = tail(batch, numbers.fits)
        features = batch.queries[hidden]
        if features.ndim != 2 or len(features) != len(batch.positions):
            raise UserError(
                "a noise head needs one query per sample at the last site",
                "choose a site or layout that has one, such as NAME:pooled or NAME:flat",
            )
        true = targets[batch.positions].reshape(answers[output].shape).astype(np.float64)
        parts.append((batch.positions, features, _columns(true - answers[output]), _columns(answers[var])))
    positions, *columns = (np.concatenate(part) for part in zip(*parts))
    # In the order of the data: what is learnt does not depend on how rows were put into batches.
    features, residuals, variances = (column[np.argsort(positions)] for column in columns)
    head = fit_noise(features, residuals, variances, seed=settings.seed, progress=progress)
    return replace(numbers, noise={**numbers.noise, output: head})


def _columns(array: Array) -> Array:
    return np.asarray(array, np.float64).reshape(len(array), -1)  # (n, targets)
