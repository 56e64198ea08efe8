"""Step 5, settle: find the numbers of a template from what it computes for left-out calibration rows.

    gauge       the scale of what each witness says
    weigh       several sites: factors of τ and A, so that each counts in the score
    scale       targets given: τ of all sites, by how far predictions are off
    temperature labels given: of the logits, and τ of all sites
    restrain    none given: τ of all sites, so that predictions lose next to nothing
    rank        the scores of ordinary inputs, and the level of flags
    noise       targets given: σ²(h) of the targets, from residuals beside the left-out variance
    promises    targets or labels given: sets, intervals and deferral, counted on rows of their own

Each is a function from numbers to numbers; the rows and their left-out shares are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import HeldOut
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.errors import UserError
from gapa_onnx.fit.calibrate import Calibration
from gapa_onnx.fit.kept_rows import FROM_TRUTH, Purpose
from gapa_onnx.plan.targets import require_rows
from gapa_onnx.progress import Progress, silent
from gapa_onnx.settings import Settings
from gapa_onnx.settle.held_out import take_in
from gapa_onnx.settle.left_out import LeftOutSample, leave_out
from gapa_onnx.settle.noise import fit_noise
from gapa_onnx.settle.promises import Counting, with_promises
from gapa_onnx.settle.ranking import gauged, ranked, ranked_by_held_out, tensors_of_scores
from gapa_onnx.settle.restraint import restrained
from gapa_onnx.settle.scaling import scaled_by_targets
from gapa_onnx.settle.tail import Tail
from gapa_onnx.settle.temperature import tempered
from gapa_onnx.settle.weighing import weighed


def settle(
    template: Template,
    calibration: Calibration,
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
    sample, fitting = _samples(template, calibration, held, purposes, progress)
    scored = tensors_of_scores(template)
    wanted = [*_spreads(template), *_beside_targets(template, targets)]
    numbers = gauged(template, sample, numbers)
    tail = Tail(template, wanted or scored, numbers)
    if Purpose.WEIGHING in purposes:
        numbers = weighed(template, sample, numbers, tail, settings.seed, progress)
    if held is not None:
        numbers = _scaled(template, fitting, numbers, tail, settings, held, progress)
    if Purpose.SCORES in purposes:
        numbers = _held_back(template, sample, numbers, settings, held)
        same = set(scored) <= set(tail.wanted) and not numbers.promises
        by_score = tail if same else Tail(template, scored, numbers)
        numbers = ranked(template, sample, numbers, by_score, settings)
    for output, values in targets.items():
        numbers = _with_noise(template, fitting, numbers, tail, output, values, settings, progress)
    if held is not None:
        if held.exact:
            numbers = ranked_by_held_out(template, calibration, held, numbers, settings)
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


def _held_back(
    template: Template, sample: LeftOutSample, numbers: Numbers, settings: Settings, held: HeldOut | None
) -> Numbers:
    """τ as large as predictions allow, unless it was given, or labels have found it."""
    found = settings.scale != "loo" or (held is not None and held.labels)
    return numbers if found else restrained(template, sample, numbers)


def _samples(
    template: Template,
    calibration: Calibration,
    held: HeldOut | None,
    purposes: Purpose,
    progress: Progress,
) -> tuple[LeftOutSample, LeftOutSample]:
    """Left-out calibration rows, and the rows that what is known to be true is read from: the same, or held out."""
    if held is None:
        sample = leave_out(calibration, purposes, progress)
        return sample, sample
    if held.apart:  # of documents that calibrate, sequences are more ordinary than those of others
        sample = take_in(template, calibration, held, held.fitting, purposes, progress)
        return sample, sample
    if held.exact:
        of_truth = purposes & FROM_TRUTH & ~Purpose.COUNTING  # which is for the file itself
        sample = leave_out(calibration, purposes & ~FROM_TRUTH, progress)
        if not of_truth:
            return sample, sample
        return sample, take_in(template, calibration, held, held.fitting, of_truth, progress)
    for values in (*held.targets.values(), *held.labels.values()):
        require_rows(values, calibration.rows)
    sample = leave_out(calibration, purposes, progress)
    return sample, sample


def _purposes(template: Template, settings: Settings, held: HeldOut | None) -> Purpose:
    """What left-out rows are needed for."""
    purposes = Purpose(0)
    if template.spreads:
        purposes |= Purpose.SCORES
        chosen = any(site.chosen for site in template.plan.sites)
        if len(template.plan.sites) > 1 and settings.scale == "loo" and not chosen:
            purposes |= Purpose.WEIGHING
    if held is not None and (held.targets or held.labels):
        purposes |= Purpose.SCALING | Purpose.COUNTING
        if held.targets:
            purposes |= Purpose.NOISE
    return purposes


def _spreads(template: Template) -> list[str]:
    """The mean variances, where sites are weighed by them."""
    return list(template.spreads.values()) if len(template.plan.sites) > 1 else []


def _beside_targets(template: Template, targets: Mapping[str, Array]) -> list[str]:
    return [name for output in targets for name in (output, template.roles[output]["var"])]


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
