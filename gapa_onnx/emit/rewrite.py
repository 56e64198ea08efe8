"""Step 4, rewrite: the variance graph that stands beside the source graph, with its numbers left open.

At each site, for the query z:

    s = GapaActivation(z, …)       share of the prior variance that the data leave unexplained
    own variance                   amplitude · s / (s + half-way), by ordinary nodes that can be folded

and from there on whatever `propagation` says, down to one `<output>_var` per output, and what `outputs` puts beside
it. One walk makes one `Template`: τ, A and c² (as amplitude and half-way point of each site), thresholds and the
weights of noise heads are named parameters, initializers whose numbers `settle` finds and `emit` fills in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from gapa_onnx.emit.guarding import protect
from gapa_onnx.emit.places import SiteTensors, own_variance, share_at
from gapa_onnx.errors import UserError
from gapa_onnx.fit.calibrate import Calibration, SiteFit
from gapa_onnx.model.constants import has_subgraph
from gapa_onnx.model.load import SourceModel
from gapa_onnx.op.contract import DOMAIN
from gapa_onnx.op.function import body
from gapa_onnx.op.heads import head_bodies
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.plan.candidates import selections
from gapa_onnx.plan.head import Head
from gapa_onnx.plan.heads.noise import NoiseTensors
from gapa_onnx.plan.heads.promises import PromiseTensors
from gapa_onnx.plan.heads.strangeness import Gauge, Heard, Testimony
from gapa_onnx.plan.outputs import Answer, answer, declare, declare_scores, score_answer, with_noise
from gapa_onnx.plan.scores import ScoreTensors, is_told_by
from gapa_onnx.plan.soundness import watched_inputs
from gapa_onnx.settings import Settings
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.propagation import Propagation, RefusedNode, propagate
from gapa_onnx.variance.qdq import reading_graph
from gapa_onnx.variance.sites import Selection, Site

ScoreKey = tuple[str, str]  #: output and role of a score

MANY_SAMPLES = (
    64  # that a head takes: from here on, what its function computes for all rows at once is taken apart
)


@dataclass(frozen=True)
class Template:
    """The variance graph, which is added to the source model, with parameters that still lack their numbers."""

    plan: Plan = field(repr=False)
    additions: onnx.GraphProto = field(repr=False)  #: nodes and initializers, also those of `spreads`
    outputs: tuple[onnx.ValueInfoProto, ...] = field(repr=False)
    functions: tuple[onnx.FunctionProto, ...] = field(repr=False)
    sites: tuple[SiteTensors, ...]  #: those that are in the graph, in its order
    roles: Mapping[str, Mapping[str, str]]  #: output -> role -> the output that plays it
    spreads: Mapping[str, str]  #: output with a score -> its mean variance; not part of the file
    scores: Mapping[ScoreKey, ScoreTensors]  #: by output and role
    noise: Mapping[str, NoiseTensors]  #: output with targets -> parameters
    cuts: tuple[RefusedNode, ...]  #: nodes behind which outputs count as certain
    witnesses: tuple[SiteTensors, ...] = ()  #: those that a score or a variance needs, in the graph's order
    gauges: tuple[Gauge, ...] = ()  #: parameters by which what witnesses say is measured
    #: output -> parameters, and what is ranked
    promises: Mapping[str, PromiseTensors] = field(default_factory=dict)

    @property
    def places(self) -> tuple[SiteTensors, ...]:
        """Where a share is computed."""
        return (*self.sites, *self.witnesses)


def rewrite(
    plan: Plan,
    calibration: Calibration,
    settings: Settings,
    targets: Collection[str] = (),
    labels: Collection[str] = (),
    held_out: bool = False,
) -> Template:
    """Write the variance graph for a plan and its calibration; outputs with targets get a noise head and an interval,
    those with labels a temperature and sets. `held_out` is whether p-values will rank rows that the model was not fitted
    to."""
    fits = {fit.site.output: fit for fit in calibration.fits}
    source, tensors = plan.source, plan.source.tensors
    own: dict[str, Value] = {}
    at_sites: dict[str, SiteTensors] = {}
    chosen: dict[str, Selection] = {}
    witnesses = _Witnesses(plan, calibration, held_out)

    def birth(graph: VarianceGraph, site: Site) -> Value:
        if site.chosen and not chosen:  # all of them at once
            chosen.update(selections(source, graph, plan.sites, plan.heads, settings.candidates))
        query = graph.tensor(site.query, tensors[site.query].dtype or np.float32)
        selection = chosen.get(site.output)
        raised = witnesses.beyond(graph, site)
        value, at_sites[site.output] = own_variance(
            graph, source, fits[site.output], query, selection, raised
        )
        own[site.output] = _shaped_like(graph, source, site, query, value)
        return own[site.output]

    if plan.score_only:
        return _scores_alone(plan, fits[plan.sites[0].output], _watched(plan, calibration), settings)
    result = propagate(source, plan.sites, birth, cut=settings.cut, options=plan.options)
    graph = result.graph
    heard = witnesses.heard(graph, at_sites)
    prior = {name: float(np.mean(fits[name].prior_var, dtype=np.float64)) for name in own}
    answers = _answers(plan, calibration, result, own, prior, at_sites, settings, targets, heard, labels)
    infos, wanted, roles = _declared(plan, graph, answers)
    spreads, scores = _of_each(answers, "spread"), _scores(answers)
    additions = graph.to_proto([*wanted, *spreads.values(), *_ranked(answers)])
    protect(source, additions)
    return Template(
        plan=plan,
        additions=additions,
        outputs=tuple(infos),
        functions=tuple(_functions(source.opset, calibration.places, additions, settings, plan.heads)),
        sites=_within(
            additions,
            (replace(site, multiples=graph.multiples_of(site.amplitude)) for site in at_sites.values()),
        ),
        roles=roles,
        spreads={output: spread.name for output, spread in spreads.items()},
        scores=scores,
        noise=_of_each(answers, "noise"),
        cuts=result.refused,
        witnesses=_within(additions, witnesses.tensors),
        gauges=_gauges(scores, witnesses),
        promises=_of_each(answers, "promises"),
    )


def _declared(
    plan: Plan, graph: VarianceGraph, answers: Mapping[str, Answer]
) -> tuple[list[onnx.ValueInfoProto], list[Value], dict[str, dict[str, str]]]:
    """What becomes graph outputs: their declarations, their values, and their names by output and role."""
    infos: list[onnx.ValueInfoProto] = []
    wanted: list[Value] = []
    roles: dict[str, dict[str, str]] = {}
    for output, head in _outputs_with_heads(plan):
        named = _named(graph, head, answers[output.name])
        wanted += named.values()
        infos += (declare(output, head, role, value) for role, value in named.items())
        roles[output.name] = {role: value.name for role, value in named.items()}
    return infos, wanted, roles


def _answers(
    plan: Plan,
    calibration: Calibration,
    result: Propagation,
    own: Mapping[str, Value],
    prior: Mapping[str, float],
    at_sites: Mapping[str, SiteTensors],
    settings: Settings,
    targets: Collection[str],
    heard: Heard,
    labels: Collection[str],
) -> dict[str, Answer]:
    """What stands beside each output, in the order of the file."""
    watched = _watched(plan, calibration)
    source, graph, answers = plan.source, result.graph, {}
    for output, head in _outputs_with_heads(plan):
        labelled = output.name in labels
        found = answer(
            source,
            graph,
            head,
            result.variances,
            plan.sites,
            own,
            settings,
            prior,
            heard,
            labelled,
            watched[head.output],
        )
        if output.name in targets:
            last = _last_reaching(graph, at_sites, found.roles["var"])
            hidden = graph.tensor(last.queries, np.dtype(np.float32))
            found = with_noise(source, graph, head, found, last.output, hidden)
        answers[output.name] = found
    return answers


def _watched(plan: Plan, calibration: Calibration) -> dict[str, tuple[str, ...]]:
    """The inputs in which what is no number makes an output strange, by output; none where data are not by rows."""
    if calibration.fed.size is None:
        return {head.output: () for head in plan.heads}
    unwatched = calibration.fed.data.unwatched
    return {head.output: watched_inputs(plan.source, head, unwatched) for head in plan.heads}


class _Witnesses:
    """What witnesses say, written where the first one asks: their shares stand in front of all variances."""

    def __init__(self, plan: Plan, calibration: Calibration, held_out: bool):
        self.plan, self.calibration, self.held_out = plan, calibration, held_out
        self.tensors: list[SiteTensors] = []
        self.gauges: list[Gauge] = []
        self._heard: Heard | None = None

    def _written(self, graph: VarianceGraph) -> Heard:
        if self._heard is None:
            self._heard = Heard(*(Testimony(graph, self.held_out, rank) for rank in (2, 3)))
            for fit in reversed(self.calibration.witnesses):
                share, names = share_at(graph, self.plan.source, fit)
                self.tensors.insert(0, names)
                told = _that_hears(self._heard, fit)
                if told is not None:
                    told.shares[fit.site.output] = share
        return self._heard

    def beyond(self, graph: VarianceGraph, site: Site) -> Value | None:
        """How far what lies in front of a site is beyond the ordinary, (N, 1); None where nobody tells, or where a
        sample has several queries."""
        fit = next(fit for fit in self.calibration.fits if fit.site.output == site.output)
        testimony = self._written(graph).samples
        if not fit.single:
            return None
        before = self.plan.source.tensors[site.query]
        places = tuple(place for place in testimony.shares if is_told_by(self.plan.source, before, place))
        if not places:
            return None
        value, gauge = testimony.beyond(places, f"{site.prefix}/beyond")
        self.gauges.append(gauge)
        return value

    def heard(self, graph: VarianceGraph, at_sites: Mapping[str, SiteTensors]) -> Heard:
        """All that places say, the last place first."""
        heard = self._written(graph)
        of_sites: dict[int, dict[str, Value]] = {2: {}, 3: {}}
        for fit in reversed(self.calibration.fits):
            told = _that_hears(heard, fit)
            if told is not None and fit.site.output in at_sites:
                share = graph.tensor(at_sites[fit.site.output].share, np.dtype(np.float32))
                of_sites[told.rank][fit.site.output] = share
        for told in (heard.samples, heard.positions):
            told.shares = {**of_sites[told.rank], **told.shares}
        return heard


def _that_hears(heard: Heard, fit: SiteFit) -> Testimony | None:
    """Where the share of a place counts: among those of samples or of positions; None where it has other queries."""
    if fit.single:
        return heard.samples
    return heard.positions if fit.by_position else None


def _gauges(scores: Mapping[ScoreKey, ScoreTensors], witnesses: _Witnesses) -> tuple[Gauge, ...]:
    """Every gauge that is in use, once."""
    of_scores = [
        gauge for one in scores.values() if one.witnesses is not None for gauge in one.witnesses.gauges
    ]
    return tuple({gauge.centre: gauge for gauge in (*witnesses.gauges, *of_scores)}.values())


def _ranked(answers: Mapping[str, Answer]) -> list[Value]:
    """What `settle` reads of scores."""
    scores = [one for found in answers.values() for one in found.scores.values()]
    return [value for one in scores for value in (one.score, one.ranked, one.served)]


def _scores(answers: Mapping[str, Answer]) -> dict[ScoreKey, ScoreTensors]:
    """The tensors of every score, once their names are final."""
    return {
        (output, role): one.tensors for output, found in answers.items() for role, one in found.scores.items()
    }


def _scores_alone(
    plan: Plan, fit: SiteFit, watched: Mapping[str, tuple[str, ...]], settings: Settings
) -> Template:
    """The template of a plan without variances: the share of its one site is the score."""
    source, (head,) = plan.source, plan.heads
    graph = reading_graph(source)
    share, site = share_at(graph, source, fit)
    found = score_answer(source, graph, head, fit.site, share, watched[head.output])
    named = _named(graph, head, found)
    score = named["score"].name
    answers = {head.output: found}
    additions = graph.to_proto(list(named.values()))
    protect(source, additions)
    return Template(
        plan=plan,
        additions=additions,
        outputs=tuple(declare_scores(value) for value in named.values()),
        functions=tuple(_functions(source.opset, [fit], additions, settings)),
        sites=(site,),
        roles={head.output: {role: value.name for role, value in named.items()}},
        spreads={head.output: score},
        scores=_scores(answers),
        noise={},
        cuts=(),
    )


def _of_each(answers: Mapping[str, Answer], part: str) -> dict[str, Any]:
    """One part of each answer, where there is one, by output."""
    parts = {output: getattr(found, part) for output, found in answers.items()}
    return {output: one for output, one in parts.items() if one is not None}


def _outputs_with_heads(plan: Plan) -> Iterator[tuple[onnx.ValueInfoProto, Head]]:
    """What gets a variance, in the order of the file."""
    heads = {head.output: head for head in plan.heads}
    for output in plan.source.proto.graph.output:
        if output.name in heads:
            yield output, heads[output.name]


def _within(additions: onnx.GraphProto, sites: Iterable[SiteTensors]) -> tuple[SiteTensors, ...]:
    """The sites that are in the graph: those that an output needs."""
    made = {name for node in additions.node for name in node.output}
    return tuple(site for site in sites if site.share in made)


def _last_reaching(graph: VarianceGraph, sites: Mapping[str, SiteTensors], var: Value) -> SiteTensors:
    """The last site in the graph that an output's variance comes from."""
    needed = graph.names_behind(var)
    return [site for site in sites.values() if site.share in needed][-1]


def _named(graph: VarianceGraph, head: Head, found: Answer) -> dict[str, Value]:
    """The values that become graph outputs, by role, under the names `<output>_<role>`."""
    return {role: graph.output(value, f"{head.output}_{role}") for role, value in found.roles.items()}


def _functions(
    opset: int,
    fits: Sequence[SiteFit],
    additions: onnx.GraphProto,
    settings: Settings,
    heads: Sequence[Head] = (),
) -> Iterator[onnx.FunctionProto]:
    """The function of each index kind in use, and those of heads that are written as operators."""
    for kind in sorted({fit.index.kind for fit in fits}):
        alike = [fit for fit in fits if fit.index.kind == kind]
        many = any(fit.site.many for fit in alike)
        bodies = [body(kind, opset, fit.k, fit.index.tensors, many) for fit in alike]
        if any(other != bodies[0] for other in bodies[1:]):
            raise UserError(
                f"sites with an index of kind {kind!r} differ in size, which opset {opset} cannot express in one function",
                "use `index='flat'`, one site, or raise the model's opset to 10 or newer",
            )
        yield bodies[0]
    called = {node.op_type for node in additions.node if node.domain == DOMAIN}
    yield from head_bodies(opset, called, _many_rows(heads, settings))


def _many_rows(heads: Sequence[Head], settings: Settings) -> bool:
    """Whether what a head computes is too much to do for all rows at once."""
    several = any(head.axis is not None and head.rank != 2 for head in heads)
    return several or (settings.samples or 0) > MANY_SAMPLES


def _shaped_like(graph: VarianceGraph, source: SourceModel, site: Site, query: Value, own: Value) -> Value:
    """A site's own variance, of whose shape onnxruntime knows no more than of the mean's.

    The amplitude has the width of the calibration data. Where the model leaves it open and has branches, what
    onnxruntime concludes from it may contradict a branch that such data never take, and the file does not load.
    """
    shape = source.tensors[site.query].shape
    if shape is not None and all(isinstance(size, int) for size in shape[1:]):
        return own
    if not any(has_subgraph(node) for node in source.graph.nodes):
        return own
    with graph.scope(site.prefix):
        return graph.rename(graph.reshape(own, graph.shape(query)), f"{site.prefix}/own_var")
