"""Step 2, analyse: where the sites are, and what becomes of the variance behind them.

Nothing is calibrated or written yet; whatever would stop the conversion later is found here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.errors import UserError
from gapa_onnx.model.dtypes import is_float, is_quantised
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.layers import Network
from gapa_onnx.plan.masks import find_masks, head_with_mask, with_mask
from gapa_onnx.plan.outputs import rehearse
from gapa_onnx.plan.pixels import said_about_pixels
from gapa_onnx.plan.placement import find_sites
from gapa_onnx.plan.tasks import Head, Task, find_heads
from gapa_onnx.settings import Settings
from gapa_onnx.variance.covariance import check_tail
from gapa_onnx.variance.expansion import schema_with_body
from gapa_onnx.variance.propagation import Propagation, RefusedNode, propagate, refusal_table
from gapa_onnx.variance.rules import Deterministic, Options, Rule, behaviour, is_declared
from gapa_onnx.variance.sites import Site


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


def analyse(source: SourceModel, settings: Settings | None = None) -> Plan:
    """Choose the sites and rehearse the propagation with stand-ins for their variances."""
    settings = settings or Settings()
    cut, options = settings.cut, Options(attention=settings.attention)
    masks = find_masks(source, settings.mask)
    chosen = tuple(
        with_mask(source, site, masks) for site in find_sites(source, settings.sites, settings.task)
    )
    rehearsal = propagate(
        source,
        chosen,
        lambda graph, site: graph.tensor(f"{site.prefix}/own", np.dtype(np.float32)),
        cut=cut,
        options=options,
    )
    floats = [tensor.name for tensor in source.outputs if is_float(tensor.dtype)]
    carriers = [
        tensor.name for tensor in source.outputs if is_float(tensor.dtype) or is_quantised(tensor.dtype)
    ]
    outputs = tuple(name for name in carriers if name in rehearsal.variances)
    return Plan(
        source=source,
        sites=chosen,
        outputs=outputs,
        certain_outputs=tuple(name for name in floats if name not in rehearsal.variances),
        refused=rehearsal.refused,
        heads=tuple(
            said_about_pixels(Network.of(source), chosen, head_with_mask(source, head, masks))
            for head in _heads(source, outputs, rehearsal, settings)
        ),
        options=options,
    )


def _heads(
    source: SourceModel, outputs: Sequence[str], rehearsal: Propagation, settings: Settings
) -> Iterator[Head]:
    """The heads that can be written; one that was only assumed gives way to a plain variance."""
    for head in find_heads(source, outputs, settings.task):
        try:
            if head.logits not in rehearsal.variances:
                raise UserError(
                    f"the sites lie behind {head.logits!r}, so it has no variance", "choose earlier sites"
                )
            rehearse(source, rehearsal.graph, head, rehearsal.variances, settings)
            yield head
        except UserError as error:
            if settings.task != "auto":
                raise
            reason = f"{head.reason}; but {error.message}, so there is only a variance"
            plain = replace(
                head, task=Task.NONE, logits=head.tensor, derived=None, link="identity", axis=None
            )
            yield replace(plain, reason=reason)


def require_convertible(plan: Plan, settings: Settings) -> None:
    """Raise UserError where the plan cannot be carried out."""
    if plan.refused and not settings.cut:
        raise UserError(
            f"{len(plan.refused)} node(s) behind the sites have no variance rule:\n{refusal_table(plan.refused)}",
            "choose later sites with `sites`, or pass `on_unsupported='cut'` to treat their outputs as certain",
        )
    if not plan.outputs:
        sites = ", ".join(site.name for site in plan.sites)
        raise UserError(
            f"no floating-point output depends on the site(s) {sites} by a path that carries variance",
            "choose other sites with `sites`; `gapa-onnx inspect MODEL` lists them",
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
