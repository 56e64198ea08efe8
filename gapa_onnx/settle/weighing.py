"""Weigh several sites against each other, so that each of them counts in the score.

By itself every site has the τ that makes the median of its own variance 0.05 c² (`calibrate`). What arrives of it at
an output differs by orders of magnitude with the layers between, and the largest part hides what the others see. With
m_i the median of an output's mean variance over left-out rows where site i alone adds variance, and w_i = 1 for the
last of the sites that reach the output, ½ for the others,

    f_i = w_i m_last / (m_i Σ w)      own variance of site i times f_i: both its τ and its ceiling A

so that the others have half the median of the last one there, and all together have about that of the last one
alone. Half: where the last site sees strange inputs well, equal weights would lose (docs/defaults.md). As τ/A stays,
the own variance is f_i times what it was also where it levels off. One pass is exact where variances pass on
linearly, and near enough behind normalisations, which saturate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.fit.calibrate import SiteFit
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.progress import Progress, silent
from gapa_onnx.settle.left_out import LeftOutSample
from gapa_onnx.settle.scores import ScoreSample
from gapa_onnx.settle.tail import Tail

EARLIER = 0.5  # weight of a site that is not the last, which has 1
FAINTEST = 1e-12  # of the largest median: a part that is less has died out, and its factor might overflow


def weighed(
    template: Template,
    sample: LeftOutSample,
    numbers: Numbers,
    tail: Tail,
    seed: int = 0,
    progress: Progress = silent,
) -> Numbers:
    """Multiply τ and A of every site by its factor."""
    medians = medians_alone(template, sample, numbers.fits, tail, seed, progress)
    order = _graph_order(template, numbers.fits)
    fits = list(numbers.fits)
    for number, factor in zip(order, factors(medians[:, order])):
        fits[number] = _times(fits[number], factor)
    return replace(numbers, fits=tuple(fits))


def medians_alone(
    template: Template,
    sample: LeftOutSample,
    fits: Sequence[SiteFit],
    tail: Tail,
    seed: int = 0,
    progress: Progress = silent,
) -> Array:
    """Median of the mean variance of left-out rows with one site alone: (outputs with a score, sites).

    NaN where no variance is finite.
    """
    alone = [[fit if fit is one else replace(fit, scale=0.0) for fit in fits] for one in fits]
    samples = [[ScoreSample(seed) for _ in fits] for _ in template.spreads]
    total, done = sample.rows(Purpose.WEIGHING), 0
    for batch in sample.batches(Purpose.WEIGHING):
        for site, these in enumerate(alone):
            answers = tail(batch, these)
            for spread, of_output in zip(template.spreads.values(), samples):
                of_output[site].add(answers[spread])
        done += len(batch.positions)
        progress("weighing the sites", done / total)
    medians = [np.median(one.values) if len(one.values) else np.nan for row in samples for one in row]
    table: Array = np.reshape(medians, (len(samples), len(fits)))
    return table


def factors(medians: Array) -> Array:
    """f (sites,) from the medians (outputs, sites) of each site alone, the last site nearest to the outputs.

    Only sites that reach an output enter its factors. The factor of a site is the geometric mean over the
    outputs that it reaches, so that each of them counts alike, whatever its unit; 1 / sites if there is none.
    """
    finite = np.where(np.isfinite(medians), medians, 0.0)
    reaches = finite > FAINTEST * finite.max(axis=1, keepdims=True)
    logs = np.zeros(medians.shape)
    for output, reached in enumerate(reaches):
        present = medians[output, reached]
        if len(present):
            weights = np.where(np.arange(len(present)) == len(present) - 1, 1.0, EARLIER)
            logs[output, reached] = np.log(weights / weights.sum() * present[-1] / present)
    outputs = reaches.sum(axis=0)
    factor: Array = np.where(
        outputs > 0, np.exp(logs.sum(axis=0) / np.maximum(outputs, 1)), 1 / medians.shape[1]
    )
    return factor


def _graph_order(template: Template, fits: Sequence[SiteFit]) -> list[int]:
    """Indices of the fits in the order of their sites in the graph; sites that are not in the graph come first."""
    place = {site.output: position for position, site in enumerate(template.sites)}
    return sorted(range(len(fits)), key=lambda number: place.get(fits[number].site.output, -1))


def _times(fit: SiteFit, factor: float) -> SiteFit:
    """Multiply the own variance of a fit by a factor, by way of τ and A."""
    return replace(
        fit, scale=float(np.float32(fit.scale * factor)), ceiling=float(np.float32(fit.ceiling * factor))
    )
