"""Several sites: each counts at the outputs, the last twice.

By itself every site has the τ that makes the median of its own variance 0.05 c² (`calibrate`). What arrives
of it at an output differs by orders of magnitude with the layers between, and the largest part hides what the
others see. With m_i the median of an output's score over left-out calibration rows where site i alone adds
variance, and w_i = 1 for the last of the sites that the output feels, ½ for the others,

    f_i = w_i m_last / (m_i Σ w)      own variance of site i times f_i: both its τ and its ceiling A

so that the others have half the median of the last one there, and all together have about that of the last one
alone. Half: where the last site sees strange inputs well, alike would lose (docs/defaults.md). As τ/A stays,
the own variance is f_i times what it was also where it levels off, and no node is added. One pass is
exact where variances pass on linearly, and near enough behind normalisations, which saturate.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx

from gapa_onnx import record as provenance
from gapa_onnx.data import DataSource
from gapa_onnx.emit.emit import emit
from gapa_onnx.emit.rewrite import rewrite
from gapa_onnx.fit.calibrate import Calibration, SiteFit
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.progress import Progress
from gapa_onnx.settings import Settings
from gapa_onnx.settle.left_out import ScoreSample, left_out_by_scale, share_name, site_nodes

EARLIER = 0.5  # what a site counts that is not the last, which counts 1
FAINTEST = 1e-12  # of the largest median: a part that is less has died out, and its factor might overflow
ROWS = 500  # at most: the median of so many is off by 6% of their standard deviation


def balanced(
    plan: Plan,
    calibration: Calibration,
    data: DataSource,
    settings: Settings,
    progress: Progress = lambda text, done: None,
) -> Calibration:
    """The calibration with sites that count as said; as it is for one site, and where τ was given."""
    if len(calibration.fits) == 1 or settings.scale != "loo":
        return calibration
    # The epistemic part of classes is bounded, so that parts of it do not add up: variances are compared.
    settings = replace(settings, score="variance")
    model = emit(plan, calibration, rewrite(plan, calibration, settings), settings)
    medians = medians_alone(model, calibration, data, settings, progress)
    if not len(medians):
        return calibration
    order = _graph_order(model, calibration)
    fits = list(calibration.fits)
    for number, factor in zip(order, factors(medians[:, order])):
        fits[number] = _times(fits[number], factor)
    return replace(calibration, fits=tuple(fits))


def medians_alone(
    model: onnx.ModelProto,
    calibration: Calibration,
    data: DataSource,
    settings: Settings,
    progress: Progress = lambda text, done: None,
) -> np.ndarray:
    """Median score of left-out rows with the variance of one site alone: (outputs with a score, sites).

    NaN where no score is finite.
    """
    roles = (head["outputs"] for head in provenance.read(model)["heads"].values())
    scores = [outputs["score"] for outputs in roles if "score" in outputs]
    sites = len(calibration.fits)
    samples = [[ScoreSample(settings.seed) for _ in range(sites)] for _ in scores]
    if scores:
        for _, answers in left_out_by_scale(
            model,
            calibration,
            data,
            scores,
            np.eye(sites),
            most=ROWS,
            seed=settings.seed,
            progress=lambda _, done: progress("balancing the sites", done),
        ):
            for name, alone in zip(scores, samples):
                for sample, answer in zip(alone, answers):
                    sample.add(answer[name])
    medians = [np.median(s.values) if len(s.values) else np.nan for alone in samples for s in alone]
    return np.reshape(medians, (len(scores), sites))


def factors(medians: np.ndarray) -> np.ndarray:
    """f (sites,) from the medians (outputs, sites) of each site alone, the last site nearest to the outputs.

    Only sites that an output feels enter its factors. The factor of a site is the geometric mean over the
    outputs that feel it, so that each of them counts alike, whatever its unit; 1 / sites if none does.
    """
    finite = np.where(np.isfinite(medians), medians, 0.0)
    felt = finite > FAINTEST * finite.max(axis=1, keepdims=True)
    logs = np.zeros(medians.shape)
    for output, reached in enumerate(felt):
        present = medians[output, reached]
        if len(present):
            weights = np.where(np.arange(len(present)) == len(present) - 1, 1.0, EARLIER)
            logs[output, reached] = np.log(weights / weights.sum() * present[-1] / present)
    outputs = felt.sum(axis=0)
    return np.where(outputs > 0, np.exp(logs.sum(axis=0) / np.maximum(outputs, 1)), 1 / medians.shape[1])


def _graph_order(model: onnx.ModelProto, calibration: Calibration) -> list[int]:
    """Numbers of the fits as their sites follow each other in the graph; first those it does without."""
    place = {node.output[0]: position for position, node in enumerate(site_nodes(model))}
    return sorted(
        range(len(calibration.fits)), key=lambda number: place.get(share_name(calibration.fits[number]), -1)
    )


def _times(fit: SiteFit, factor: float) -> SiteFit:
    """The fit with so many times its own variance."""
    return replace(
        fit, scale=float(np.float32(fit.scale * factor)), ceiling=float(np.float32(fit.ceiling * factor))
    )
