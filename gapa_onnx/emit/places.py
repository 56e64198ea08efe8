"""The nodes at one place: the share of its queries, and the variance that is born of it at a site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.emit.comparing import compared
from gapa_onnx.fit.calibrate import SiteFit
from gapa_onnx.model.load import SourceModel
from gapa_onnx.op.contract import DOMAIN, SCHEMAS
from gapa_onnx.op.storage import emit_points
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.sites import Layout, Selection, read_queries, restore
from gapa_onnx.variance.values import Scaled


@dataclass(frozen=True)
class SiteTensors:
    """Names of the tensors that the variance graph has at one site."""

    output: str  #: tensor of the source that becomes uncertain; which site it is
    queries: str  #: what the operator reads, (…, d)
    share: str  #: what it answers, (…, 1)
    levelled: str  #: s / (s + half-way)
    half_way: str  #: parameter
    amplitude: str  #: parameter
    lift: str  #: parameter, where witnesses raise the own variance
    #: parameters that are the amplitude's number times a vector: c² for itself, W² c² behind a layer
    multiples: Mapping[str, Array] = field(default_factory=dict, repr=False)


def own_variance(
    graph: VarianceGraph,
    source: SourceModel,
    fit: SiteFit,
    tensor: Value,
    selection: Selection | None = None,
    beyond: Value | None = None,
) -> tuple[Value, SiteTensors]:
    """amplitude · s / (s + half-way) at one site, in the shape of the site's tensor; both numbers are left open. It is
    1 + lift · beyond (N, 1) times that where witnesses find an input beyond the ordinary."""
    site, prefix = fit.site, fit.site.prefix
    share, names = share_at(graph, source, fit, selection)
    with graph.scope(prefix):
        half_way = graph.constant(np.float32(1), names.half_way)
        amplitude = graph.multiple(np.asarray(fit.prior_var, np.float64), names.amplitude)
        levelled = graph.emit("Div", share, share + half_way, names=[names.levelled])
        raised = levelled
        if beyond is not None:
            raised = levelled * (1.0 + beyond * graph.constant(np.float32(1), names.lift))
        scale = restore(graph, site, raised, selection)
        if site.layout is Layout.POOLED:
            scale = graph.expand(
                scale, like=graph.slice(tensor, site.axis, 0, 1)
            )  # one number for all positions
        own = Scaled(scale, amplitude, -1 if site.is_last else site.axis, f"{prefix}/own_var")
        # A flat map has features on several axes.
        value = own.tensor if site.layout is Layout.FLAT and (site.rank or 0) > 2 else own
    return value, replace(names, levelled=levelled.name, half_way=half_way.name, amplitude=amplitude.name)


def share_at(
    graph: VarianceGraph, source: SourceModel, fit: SiteFit, selection: Selection | None = None
) -> tuple[Value, SiteTensors]:
    """s of the queries at one site (…, 1), and the names of what is there or may be made of it."""
    site, prefix = fit.site, fit.site.prefix
    schema = SCHEMAS[fit.index.kind]
    parameters = {
        "k": np.array([fit.k], np.int64),
        "length_scale": np.float32(fit.length_scale),
        "jitter": np.float32(fit.jitter),
        **fit.index.tensors,
    }
    with graph.scope(prefix):
        query = read_queries(graph, source, site, selection)
        query = compared(graph, query, fit.geometry, site.query_axes, fit.index.points.shape[1], prefix)
        constants = [
            emit_points(graph, fit.storage, fit.index.points, f"{prefix}/points")
            if port.name == "points"
            else graph.constant(parameters[port.name], f"{prefix}/{port.name}")
            for port in schema.constants
        ]
        # A call of a function lists all its outputs, also the one that nobody reads.
        names = (f"{prefix}/share", f"{prefix}/neighbours")
        share, _ = graph.emit_several(schema.name, query, *constants, outputs=2, domain=DOMAIN, names=names)
    levelled, half_way, amplitude, lift = (
        f"{prefix}/{what}" for what in ("levelled", "half_way", "amplitude", "lift")
    )
    return share, SiteTensors(site.output, query.name, share.name, levelled, half_way, amplitude, lift)
