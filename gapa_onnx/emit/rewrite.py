"""Step 4, rewrite: the variance subgraph that stands beside the source graph.

At each site, for the query z:

    s = GapaActivation(z, …)       share of the prior variance that the data leave unexplained
    own variance                   τ c² s, with a ceiling (`calibrate`), by ordinary nodes that can be folded

and from there on whatever `propagation` says, down to one `<output>_var` per output, and what `answers`
puts beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from gapa_onnx.emit.guarding import protect
from gapa_onnx.errors import UserError
from gapa_onnx.fit.calibrate import Calibration, SiteFit
from gapa_onnx.op.classes import classes_body
from gapa_onnx.op.contract import CLASSES, DOMAIN, SCHEMAS
from gapa_onnx.op.function import body
from gapa_onnx.op.storage import emit_points
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.plan.outputs import answer, declare
from gapa_onnx.settings import Settings
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.propagation import RefusedNode, propagate
from gapa_onnx.variance.sites import Layout, Site, arrange, restore
from gapa_onnx.variance.values import Scaled


@dataclass(frozen=True)
class Rewritten:
    """What is added to the source model."""

    additions: onnx.GraphProto = field(repr=False)
    outputs: tuple[onnx.ValueInfoProto, ...] = field(repr=False)
    functions: tuple[onnx.FunctionProto, ...] = field(repr=False)
    roles: dict[str, dict[str, str]]  #: output -> role -> the output that plays it; see `answers`
    cuts: tuple[RefusedNode, ...]  #: nodes behind which outputs count as certain


def rewrite(plan: Plan, calibration: Calibration, settings: Settings) -> Rewritten:
    """Write the variance subgraph for a plan and its calibration."""
    fits = {fit.site.output: fit for fit in calibration.fits}
    source = plan.source
    tensors = source.graph.tensors()
    own: dict[str, Value] = {}

    def birth(graph: VarianceGraph, site: Site) -> Value:
        query = graph.tensor(site.query, tensors[site.query].dtype or np.float32)
        own[site.output] = own_variance(graph, fits[site.output], query)
        return own[site.output]

    result = propagate(source, plan.sites, birth, cut=settings.cut, options=plan.options)
    graph = result.graph
    heads = {head.output: head for head in plan.heads}
    wanted, infos, roles = [], [], {}
    for output in source.proto.graph.output:
        if output.name not in heads:
            continue
        head = heads[output.name]
        values = answer(source, graph, head, result.variances, plan.sites, own, settings)
        roles[output.name] = {}
        for role, value in values.items():
            wanted.append(graph.output(value, f"{output.name}_{role}"))
            infos.append(declare(output, head, role, wanted[-1]))
            roles[output.name][role] = wanted[-1].name
    additions = graph.to_proto(wanted)
    protect(source, additions)
    return Rewritten(
        additions=additions,
        outputs=tuple(infos),
        functions=tuple(_functions(source.opset, calibration.fits, additions)),
        roles=roles,
        cuts=result.refused,
    )


def _functions(
    opset: int, fits: Sequence[SiteFit], additions: onnx.GraphProto
) -> Iterator[onnx.FunctionProto]:
    """One function per index kind in use, and the heads' if there is one that is an operator."""
    for kind in sorted({fit.index.kind for fit in fits}):
        bodies = [body(kind, opset, fit.k, fit.index.tensors) for fit in fits if fit.index.kind == kind]
        if any(other != bodies[0] for other in bodies[1:]):
            raise UserError(
                f"sites with an index of kind {kind!r} differ in size, which opset {opset} cannot express in one function",
                "use --index flat, one site, or raise the model's opset to 10 or newer",
            )
        yield bodies[0]
    if any(node.domain == DOMAIN and node.op_type == CLASSES.name for node in additions.node):
        yield classes_body(opset)


def own_variance(graph: VarianceGraph, fit: SiteFit, tensor: Value) -> Value:
    """c² τ s / (1 + b s) at one site, in the shape of the site's tensor; b is the fit's damping."""
    site, prefix = fit.site, fit.site.prefix
    schema = SCHEMAS[fit.index.kind]
    parameters = {
        "k": np.array([fit.k], np.int64),
        "length_scale": np.float32(fit.length_scale),
        "jitter": np.float32(fit.jitter),
        **fit.index.tensors,
    }
    with graph.scope(prefix):
        query = arrange(graph, site, tensor)
        if fit.whitening is not None:
            centre, directions = fit.whitening
            query = query - graph.constant(centre, f"{prefix}/centre")
            query = graph.emit("MatMul", query, graph.constant(directions, f"{prefix}/whitening"))
        constants = [
            emit_points(graph, fit.storage, fit.index.points, f"{prefix}/points")
            if port.name == "points"
            else graph.constant(parameters[port.name], f"{prefix}/{port.name}")
            for port in schema.constants
        ]
        # A call of a function lists all its outputs, also the one that nobody reads.
        names = (f"{prefix}/share", f"{prefix}/neighbours")
        share, _ = graph.emit(schema.name, query, *constants, outputs=2, domain=DOMAIN, names=names)
        amplitude = fit.scale
        if fit.damping > 0:  # τ s / (1 + b s) = τ/b · s / (s + 1/b)
            amplitude = fit.scale / fit.damping
            share = share / (share + graph.constant(np.float32(1 / fit.damping), f"{prefix}/half_way"))
        prior_var = graph.constant(np.float32(amplitude) * fit.prior_var, f"{prefix}/prior_var")
        scale = restore(graph, site, share)
        if site.layout is Layout.POOLED:
            scale = graph.expand(scale, like=graph.slice(tensor, 1, 0, 1))  # one number for all positions
        axis = 1 if site.layout in (Layout.POSITIONS, Layout.POOLED) else -1
        own = Scaled(scale, prior_var, axis, f"{prefix}/own_var")
        # A flat map has features on several axes.
        return own.tensor if site.layout is Layout.FLAT and site.rank > 2 else own
