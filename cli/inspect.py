"""`gapa-onnx inspect`: what a model is made of, or what a converted file says about itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import print_json, warn
from gapa_onnx.errors import UserError
from gapa_onnx.settings import Settings

if TYPE_CHECKING:
    from gapa_onnx.model.load import SourceModel


@options.settings_options("sites", "witnesses")
def inspect(
    context: typer.Context,
    model: options.Model,
    *,
    settings: Settings,
    as_json: options.Json = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show groups of nodes that are nearly one operator, and the trace of an error."
        ),
    ] = False,
) -> int:
    """Show a model's sites, witnesses, operators and cost, or a converted file's provenance."""
    context.obj.debug = context.obj.debug or debug
    from gapa_onnx.cli import records, render
    from gapa_onnx.model.digest import is_as_written
    from gapa_onnx.model.load import read_proto
    from gapa_onnx.record import read

    proto = read_proto(model)
    record = read(proto)
    intact = record is None or record.digest is None or is_as_written(proto, record)
    if record is not None:
        answer = {
            "kind": "converted",
            "file": str(model),
            **records.ports_record(proto),
            "as_written": intact,
            "provenance": record.as_json(),
        }
        show = render.converted
    else:
        answer = {
            "kind": "source",
            "file": str(model),
            **_source_record(model, settings, context.obj.debug),
        }
        show = render.source
    if as_json:
        print_json(answer)
    else:
        show(answer)
    if not intact:
        warn(f"{model} is not what it was when gapa-onnx wrote it: convert the source model again")
    return 0 if intact else 1


def _source_record(path: Path, settings: Settings, debug: bool) -> dict[str, Any]:
    from gapa_onnx.cli import cost, records
    from gapa_onnx.model.load import load
    from gapa_onnx.plan.analyse import analyse, operator_table
    from gapa_onnx.plan.placement import find_sites
    from gapa_onnx.variance.patterns import turned_down

    source = load(path)
    problem = None
    try:
        plan = analyse(source, settings)
    except UserError as error:
        if settings.sites != "auto":
            raise
        plan, problem = None, error.message  # the operators are worth showing all the same
    try:
        candidates = find_sites(source, "all")
    except UserError:
        candidates = ()
    visible = {site.output for site in plan.sites} if plan else set()
    return {
        "opset": source.opset,
        "sha256": source.sha256,
        **records.ports_record(source.proto),
        "problem": problem,
        "asked": settings.sites,
        "asked_witnesses": settings.witnesses,
        **(records.plan_record(plan) if plan else {"sites": [], "witnesses": [], "heads": {}, "refused": []}),
        "candidates": [records.site_record(site, source) for site in candidates],
        "tensors": [] if candidates else _float_tensors(source),
        "operators": [{**vars(row), "nodes": list(row.nodes)} for row in operator_table(source)],
        "turned_down": [vars(entry) for entry in turned_down(source.graph, visible)] if debug else [],
        "cost": cost.estimate(source, plan.sites, plan.witnesses) if plan else cost.estimate(source, ()),
    }


def _float_tensors(source: SourceModel) -> list[str]:
    """Where a site could be named, for a model without an obvious place."""
    from gapa_onnx.model.dtypes import is_float

    return [
        tensor.name
        for node in source.graph.nodes
        for tensor in node.outputs
        if tensor.name and is_float(tensor.dtype) and tensor.shape != []
    ]
