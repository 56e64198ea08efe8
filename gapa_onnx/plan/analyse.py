"""Step 2, analyse: where the sites are, and what becomes of the variance behind them.

Nothing is calibrated or written yet; whatever would stop the conversion later is found here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.errors import UserError
from gapa_onnx.model.dtypes import is_float
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.candidates import with_candidates
from gapa_onnx.plan.frontier import Frontier
from gapa_onnx.plan.head import Head, Task
from gapa_onnx.plan.layers import Network, is_numeric
from gapa_onnx.plan.masks import find_masks, head_with_mask, with_mask
from gapa_onnx.plan.outputs import rehearse
from gapa_onnx.plan.pixels import said_about_pixels
from gapa_onnx.plan.placement import find_sites
from gapa_onnx.plan.score_only import score_head, score_site, stopped
from gapa_onnx.plan.tasks import find_heads
from gapa_onnx.plan.witnesses import find_witnesses
from gapa_onnx.settings import SCORE_ONLY, Settings
from gapa_onnx.variance.covariance import check_tail
from gapa_onnx.variance.expansion import schema_with_body
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.propagation import Propagation, RefusedNode, propagate, refusal_table
from gapa_onnx.variance.rules import Deterministic, Options, Rule, behaviour, is_declared
from gapa_onnx.variance.sites import Layout, Site


@dataclass(frozen=True)
class OperatorRow:
    """One line of the operator table."""

    operator: str
    count: int
    behaviour: str  #: rule, spelled out, deterministic or refused
    accuracy: str
    reason: str  #: the formula of a rule, else why
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What will be done with a model."""

    source: SourceModel
    sites: tuple[Site, ...]
    outputs: tuple[str, ...]  #: graph outputs that get a variance
    certain_outputs: tuple[str, ...]  #: float outputs that no site reaches
    refused: tuple[RefusedNode, ...]  #: nodes behind a site whose variance cannot be stated
    heads: tuple[Head, ...] = ()  #: what each of the outputs with a variance means
    options: Options = Options()  #: choices that rules ask for
    states: tuple[str, ...] = ()  #: certain outputs that are handed on to the next call, and are no answers
    score_only: bool = False  #: no variance reaches an output: the one head has a score of the one site
    witnesses: tuple[Site, ...] = ()  #: places that say how strange an input is, and pass no variance on

    @property
    def places(self) -> tuple[Site, ...]:
        """Where a share is computed."""
        return (*self.sites, *self.witnesses)


def analyse(source: SourceModel, settings: Settings | None = None) -> Plan:
    """Choose the sites and rehearse the propagation with stand-ins for their variances."""
    settings = settings or Settings()
    cut, options = settings.cut, Options(attention=settings.attention)
    masks = find_masks(source, settings.mask)
    spec = "auto" if settings.sites == SCORE_ONLY else settings.sites
    chosen = tuple(with_mask(source, site, masks) for site in find_sites(source, spec, settings.task))
    rehearsal = _rehearse(source, chosen, options, cut)
    why = _why_none(source, chosen, rehearsal, settings)
    if why is not None:
        return _score_only(source, chosen, why, settings)
    reached = rehearsal.variances.keys()
    outputs = tuple(tensor.name for tensor in source.outputs if is_numeric(tensor) and tensor.name in reached)
    heads = tuple(_heads(source, outputs, rehearsal, settings))
    certain = tuple(name for name in _floats(source) if name not in reached)
    sites = with_candidates(source, chosen, heads, settings.candidates)
    asked = settings.witnesses if settings.score == "witnesses" else "none"
    found = find_witnesses(source, asked, sites, heads)
    return Plan(
        source=source,
        sites=sites,
        witnesses=tuple(with_mask(source, witness, masks) for witness in found),
        outputs=outputs,
        certain_outputs=certain,
        states=tuple(name for name in certain if name in Frontier.of(source).states),
        refused=rehearsal.refused,
        heads=tuple(
            said_about_pixels(Network.of(source), chosen, head_with_mask(source, head, masks))
            for head in heads
        ),
        options=options,
    )


def _floats(source: SourceModel) -> list[str]:
    """The outputs that hold floating-point numbers."""
    return [tensor.name for tensor in source.outputs if is_float(tensor.dtype)]


def _rehearse(source: SourceModel, sites: Sequence[Site], options: Options, cut: bool) -> Propagation:
    """The walk with stand-ins for the variances of the sites."""

    def own(graph: VarianceGraph, site: Site) -> Value:
        return graph.tensor(f"{site.prefix}/own", np.dtype(np.float32))

    return propagate(source, sites, own, cut=cut, options=options)


def _why_none(
    source: SourceModel, sites: Sequence[Site], rehearsal: Propagation, settings: Settings
) -> str | None:
    """Why the file will have a score only, in words; None where it will have variances, or the user chose sites."""
    if settings.sites == SCORE_ONLY:
        return "no variance is asked for"
    if settings.sites != "auto":
        return None
    if sites[-1].joined:
        return "no single tensor holds all that is fed"
    if sites[-1].layout is Layout.FLAT and (sites[-1].rank or 0) < 2:
        return f"it is not known which axis of {sites[-1].query!r} is that of the rows"
    if rehearsal.refused and not settings.cut:
        rehearsal = _rehearse(source, sites, Options(attention=settings.attention), cut=True)
    return stopped(source, sites[-1], rehearsal, half_way=not sites[-1].standardised)


def _score_only(source: SourceModel, sites: Sequence[Site], why: str, settings: Settings) -> Plan:
    """The plan for a model whose outputs get no variance."""
    head = score_head(source, why, settings)
    return Plan(
        source=source,
        sites=(score_site(sites),),
        outputs=(),
        certain_outputs=tuple(name for name in _floats(source) if name != head.output),
        refused=(),
        heads=(head,),
        score_only=True,
    )


def _heads(
    source: SourceModel, outputs: Sequence[str], rehearsal: Propagation, settings: Settings
) -> Iterator[Head]:
    """The heads that can be written; one that was only assumed gives way to a plain variance. What a detector's head
    speaks for has none of its own, unless all candidates are asked for."""
    found = find_heads(source, outputs, settings.task)
    spoken_for = {name for head in found if head.detector for name in head.detector.spoken_for}
    for head in found:
        if head.output in spoken_for and settings.candidates != "all":
            continue
        try:
            if any(name not in rehearsal.variances for name in _read_by(head)):
                raise UserError(
                    f"the sites lie behind {head.logits!r}, so it has no variance", "choose earlier sites"
                )
            rehearse(source, rehearsal.graph, head, rehearsal.variances, settings)
            yield head
        except UserError as error:
            if settings.task != "auto":
                raise
            reason = f"{head.reason}; but {error.message}, so there is only a variance"
            plain = replace(head, task=Task.NONE, logits=head.tensor, derived=None, link="identity", axis=None,
                            detector=None)  # fmt: skip
            yield replace(plain, reason=reason)


def _read_by(head: Head) -> tuple[str, ...]:
    """The tensors whose variances a head reads."""
    return (head.logits,) if head.detector is None else (head.logits, head.detector.boxes.tensor)


def require_convertible(plan: Plan, settings: Settings) -> None:
    """Raise UserError where the plan cannot be carried out."""
    if plan.refused and not settings.cut:
        raise UserError(
            f"{len(plan.refused)} node(s) behind the sites have no variance rule:\n{refusal_table(plan.refused)}",
            "choose later sites with `sites`, pass `on_unsupported='cut'` to treat their outputs as certain, or "
            f"`sites='{SCORE_ONLY}'` for a score without variances",
        )
    if plan.score_only:
        return
    if not plan.outputs:
        sites = ", ".join(site.name for site in plan.sites)
        raise UserError(
            f"no floating-point output depends on the site(s) {sites} by a path that carries variance",
            "choose other sites with `sites`; `gapa-onnx inspect MODEL` lists them, and "
            f"`sites='{SCORE_ONLY}'` gives a score without variances",
        )
    if settings.covariance == "full":
        for tensor in dict.fromkeys(name for head in plan.heads for name in (head.tensor, head.logits)):
            check_tail(plan.source, plan.sites, tensor)


def operator_table(source: SourceModel) -> tuple[OperatorRow, ...]:
    """Every operator of the model with its behaviour, by name; then the composites that count as one."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for node in source.graph.nodes:
        nodes.setdefault((node.domain or "", node.op), []).append(node.name or node.outputs[0].name)
    composites: dict[tuple[str, str], list[str]] = {}
    for composite in Network.of(source).composites:
        node = composite.node
        composites.setdefault((node.domain or "", node.op), []).append(node.name or node.outputs[0].name)
    return (
        *(_operator_row(source, f"{domain}::{op}" if domain else op, (domain, op), names)
          for (domain, op), names in sorted(nodes.items())),
        *(_operator_row(source, f"{op} (composite)", (domain, op), names)
          for (domain, op), names in sorted(composites.items())),
    )  # fmt: skip


def _operator_row(source: SourceModel, label: str, key: tuple[str, str], names: Sequence[str]) -> OperatorRow:
    entry = behaviour(*key)
    if not is_declared(*key) and schema_with_body(*key, source.opset):
        return OperatorRow(
            label, len(names), "spelled out", "composed", "the rules of its function body", tuple(names)
        )
    if isinstance(entry, Rule):
        return OperatorRow(label, len(names), "rule", entry.accuracy.value, entry.formula, tuple(names))
    kind = "deterministic" if isinstance(entry, Deterministic) else "refused"
    return OperatorRow(label, len(names), kind, "", entry.reason, tuple(names))
