"""The numbers that a template leaves open, and the tensors that they become.

At a site with scale τ, ceiling A and prior variance c², b = max(τ/A − 1, 0):

    own variance = c² τ s / (1 + b s) = c² (τ/b) · s / (s + 1/b)        amplitude c² τ/b, half-way point 1/b
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.emit.places import SiteTensors
from gapa_onnx.emit.rewrite import ScoreKey, Template
from gapa_onnx.fit.calibrate import SiteFit
from gapa_onnx.plan.heads.noise import NoiseHead
from gapa_onnx.plan.heads.promises import Promises
from gapa_onnx.record import ScoreRecord

SMALLEST_DAMPING = 1e-6  # stands for b = 0 where the formula must hold: c² τ s to so much of itself


@dataclass(frozen=True)
class ScoreNumbers:
    """The numbers of one score."""

    record: ScoreRecord
    ordinary: Array  #: (n,) what p-values rank, of ordinary inputs
    level: float  #: p at and below which an input is flagged
    lengths: Array | None = None  #: the table by which it is levelled over lengths


@dataclass(frozen=True)
class Numbers:
    """The numbers of all parameters of a template, as `settle` finds them."""

    fits: tuple[SiteFit, ...] = field(repr=False)  #: with the τ and A of the file
    scores: Mapping[ScoreKey, ScoreNumbers] = field(default_factory=dict, repr=False)  #: by output and role
    #: centre and slope by the centre's parameter: the scale of what witnesses say
    gauges: Mapping[str, tuple[Array, Array]] = field(default_factory=dict, repr=False)
    noise: Mapping[str, NoiseHead] = field(default_factory=dict, repr=False)  #: by output
    promises: Mapping[str, Promises] = field(default_factory=dict, repr=False)  #: by output
    remarks: Mapping[str, str] = field(default_factory=dict)  #: by output: what could not be found, and why


def site_tensors(template: Template, fits: Sequence[SiteFit]) -> dict[str, Array]:
    """Amplitude, half-way point and lift of every site, by the parameter's name; b = 0 is approached by a tiny b."""
    tensors = {}
    for site, fit in at_sites(template, fits):
        damping = max(fit.damping, SMALLEST_DAMPING)
        tensors[site.half_way] = np.asarray(1 / damping, np.float32)
        tensors |= _amplitudes(site, fit.scale / damping)
        tensors[site.lift] = np.asarray(fit.lift, np.float32)
    return tensors


def _amplitudes(site: SiteTensors, number: float) -> dict[str, Array]:
    """The amplitude of a site, and what layers behind it have made of that."""
    return {name: (number * vector).astype(np.float32) for name, vector in site.multiples.items()}


def file_tensors(template: Template, numbers: Numbers) -> dict[str, Array]:
    """All parameters as the file holds them, by name. What is not found, or not yet, is left out."""
    tensors = site_tensors(template, numbers.fits)
    for site, fit in at_sites(template, numbers.fits):
        if not fit.damping:  # s itself stands there in place of s / (s + 1/b)
            tensors |= _amplitudes(site, fit.scale)
    for key, found in numbers.scores.items():
        score = template.scores[key]
        tensors |= score.table.filled(found.ordinary) | {score.table.level: np.asarray(found.level)}
        if score.lengths is not None and found.lengths is not None:
            tensors[score.lengths.table] = found.lengths
    return tensors | head_tensors(template, numbers)


def head_tensors(template: Template, numbers: Numbers) -> dict[str, Array]:
    """The parameters of witnesses, noise heads, temperatures and promises, as far as they are known."""
    tensors: dict[str, Array] = {}
    for gauge in template.gauges:
        tensors |= dict(zip((gauge.centre, gauge.slope), numbers.gauges.get(gauge.centre, ())))
    for output, head in numbers.noise.items():
        tensors |= head.tensors(template.noise[output])
    for output, promises in numbers.promises.items():
        tensors |= promises.tensors(template.promises[output])
    return tensors


def at_sites(template: Template, fits: Sequence[SiteFit]) -> list[tuple[SiteTensors, SiteFit]]:
    """The tensors and the fit of each site that is in the graph, in the graph's order."""
    by_output = {fit.site.output: fit for fit in fits}
    return [(site, by_output[site.output]) for site in template.sites]
