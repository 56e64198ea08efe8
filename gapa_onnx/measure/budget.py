"""`budget`: the most exact settings whose measured cost stays within what is allowed.

Settings are tried from the most exact to the cheapest: first as they were given, where what was left open
(`auto`) takes the best, then with neighbourhoods that are prepared (`solver="cached"`), then with fewer
inducing points, then with fewer neighbours. Where there are several sites, one with many points comes before
several with few, if there is one output, and so does a site without witnesses. The data are read once for each choice of
places; each candidate is
fitted and emitted, and timed beside the source model with a control (`bench`). The
first within the budget is taken, and what it gave up is told against the first tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gapa_onnx.data import DataSource
from gapa_onnx.emit.emit import emit
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import rewrite
from gapa_onnx.errors import UserError
from gapa_onnx.fit.calibrate import Calibration, fit
from gapa_onnx.fit.collect import Known, collect
from gapa_onnx.measure.bench import Refusal, measure
from gapa_onnx.plan.analyse import Plan, analyse, require_convertible
from gapa_onnx.progress import Progress
from gapa_onnx.record import BudgetRecord, TrialRecord
from gapa_onnx.sessions.inference import row_count
from gapa_onnx.settings import CACHED_INDEXES, LEAST_POINTS, Settings

POINTS = (4000, 2500, 1500, 1000, 500, 250, 125, 64)
FEWER_NEIGHBOURS = (20, 10)
LARGEST_BATCH = 256


@dataclass(frozen=True)
class Choice:
    """The settings to use and what was found with them; the last trial of the record is theirs."""

    settings: Settings
    plan: Plan
    calibration: Calibration
    record: BudgetRecord


def within_budget(
    plan: Plan,
    data: DataSource,
    settings: Settings,
    budget: float,
    progress: Progress,
    strange: DataSource | None = None,
    known: Known | None = None,
) -> Choice:
    """The first settings that keep the budget."""
    if not 1 < budget < float("inf"):
        raise UserError(
            f"`budget` is {budget:g}; a converted model does all that its source does and more",
            "give a number above 1, such as 1.5",
        )
    trials: list[TrialRecord] = []
    tried, collected = plan, None
    places = settings.sites, settings.witnesses
    # The last site alone might leave one of several outputs without a variance.
    count = len(plan.sites) if len(plan.source.outputs) == 1 else 1
    for candidate in candidates(settings, count, len(plan.witnesses)):
        if (candidate.sites, candidate.witnesses) != places:
            places = candidate.sites, candidate.witnesses
            tried, collected = analyse(plan.source, candidate), None
            require_convertible(tried, candidate)
        collected = collected or collect(tried, data, candidate, progress, strange, known)
        calibration = fit(collected, candidate, progress)
        template = rewrite(tried, calibration, candidate)
        model = emit(template, Numbers(calibration.fits), calibration, candidate)
        progress("measuring the cost", 0.0)
        batch = next(calibration.fed.batches(LARGEST_BATCH))
        found = measure(plan.source, model, batch=row_count(batch), data=batch, parts=False)
        if isinstance(found, Refusal):
            raise UserError(f"the budget cannot be kept: {found.reason}", found.hint)
        trials.append(_trial(candidate, calibration, found.ratio, found.control))
        progress("measuring the cost", 1.0)
        if found.ratio <= budget:
            return Choice(candidate, tried, calibration, BudgetRecord(budget, tuple(trials)))
    cheapest = min(trials, key=lambda trial: trial.ratio)
    raise UserError(
        f"no settings stay within a budget of {budget:g}: the cheapest, `m={cheapest.m}` and `k={cheapest.k}`, cost "
        f"{cheapest.ratio:.2f} times the source",
        f"allow `budget={cheapest.ratio * 1.05:.2f}`, or leave it out",
    )


def candidates(settings: Settings, sites: int, witnesses: int = 0) -> Iterator[Settings]:
    """From the most exact to the cheapest."""
    seen = set()
    for candidate in _ladder(settings, sites, witnesses):
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


def _ladder(settings: Settings, sites: int, witnesses: int) -> Iterator[Settings]:
    open_m = settings.m == "auto" and settings.inducing != "all"
    first = replace(settings, m=max(POINTS[0], settings.most_points)) if open_m else settings
    yield replace(first, solver="exact") if settings.solver == "auto" else first
    index = settings.index if settings.index in CACHED_INDEXES else "auto"
    cached = replace(first, solver="cached", index=index)
    if sites + witnesses > 1:
        yield cached
        yield from _fewer_points(cached, LEAST_POINTS * settings.k)
        cached = replace(cached, sites="last" if sites > 1 else settings.sites, witnesses="none")
    fewer = [cached, *_fewer_points(cached, settings.k)]
    yield from fewer
    for k in FEWER_NEIGHBOURS:
        if k < settings.k:
            yield replace(fewer[-1], k=k)


def _fewer_points(settings: Settings, least: int) -> Iterator[Settings]:
    everything = settings.inducing == "all"
    for m in POINTS:
        if least <= m and (everything or m < settings.most_points):
            yield replace(settings, m=m, inducing="kmeans" if everything else settings.inducing)


def _trial(settings: Settings, calibration: Calibration, ratio: float, control: float) -> TrialRecord:
    fits = calibration.fits

    def share(level: str) -> float:
        return sum(fit.share_quantiles[level] for fit in fits) / len(fits)

    recalls = [fit.index.recall for fit in fits if fit.index.recall is not None]
    return TrialRecord(
        sites=settings.sites,
        solver=settings.solver,
        m=max(len(fit.index.points) for fit in fits),
        k=settings.k,
        ratio=ratio,
        control=control,
        share_median=share("0.5"),
        share_high=share("0.95"),
        recall=min(recalls, default=1.0),
    )
