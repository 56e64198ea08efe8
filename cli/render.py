"""Answers as records for `--json`, and the same records as text for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gapa_onnx.cli.console import console
from rich import box
from rich.table import Table
from rich.text import Text

MOST_NODES = 3  # names shown in a cell
MOST_TENSORS = 40

# --------------------------------------------------------------------------- records


def plan_record(plan) -> dict[str, Any]:
    return {
        "sites": [site_record(site, plan.source) for site in plan.sites],
        "variance_outputs": list(plan.outputs),
        "certain_outputs": list(plan.certain_outputs),
        "refused": [vars(entry) for entry in plan.refused],
    }


def site_record(site, source) -> dict[str, Any]:
    shape = source.graph.tensors()[site.query].shape
    return {
        "name": site.name,
        "activation": site.activation,
        "layout": site.layout.value,
        "query": site.query,
        "output": site.output,
        "shape": None if shape is None else list(shape),
    }


def ports_record(proto) -> dict[str, Any]:
    """Inputs that have to be fed, and outputs: name, type and shape."""
    initializers = {tensor.name for tensor in proto.graph.initializer}
    return {
        "inputs": [_port(value) for value in proto.graph.input if value.name not in initializers],
        "outputs": [_port(value) for value in proto.graph.output],
    }


def _port(value) -> dict[str, Any]:
    import onnx

    if not value.type.HasField("tensor_type"):
        return {"name": value.name, "type": value.type.WhichOneof("value"), "shape": None}
    tensor = value.type.tensor_type
    shape = [d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim]
    return {
        "name": value.name,
        "type": onnx.TensorProto.DataType.Name(tensor.elem_type).lower(),
        "shape": shape if tensor.HasField("shape") else None,
    }


# -------------------------------------------------------------------- whole answers


def conversion(answer: Mapping[str, Any], source: str, data: str, calib: str) -> None:
    """The summary of `convert`."""
    record = answer["provenance"]
    size = f" ({_bytes(answer['bytes'])})" if answer["output"] else ""
    _lines(
        ("source", source),
        ("output", f"{answer['output'] or 'nothing was written: a check failed'}{size}"),
        ("data", f"{record['data']['rows']} rows of {data}, {_dropped(record['data']['dropped'])}"),
    )
    _fits(record["sites"])
    _lines(*_variances(record["outputs"], answer["certain_outputs"]))
    console().print()
    checks(answer["checks"])
    if answer["output"]:
        console().print()
        command = f"gapa-onnx run {shlex.quote(answer['output'])} --data {shlex.quote(calib)}"
        _lines(("next", command))


def plan(answer: Mapping[str, Any], row_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The summary of `convert --dry-run`."""
    rows = answer["data"]["rows"]
    fed = ", ".join(f"{name} {_shape(shape)}" for name, shape in row_shapes.items())
    _lines(
        ("would write", answer["output"]),
        ("data", f"{'an unknown number of' if rows is None else rows} rows of {answer['data']['description']}"),
        ("one row", fed),
    )
    _sites("sites", answer["sites"])
    _refused(answer["refused"])
    _lines(*_variances({name: f"{name}_var" for name in answer["variance_outputs"]}, answer["certain_outputs"]))


def source(answer: Mapping[str, Any]) -> None:
    """`inspect` of a model that is not converted."""
    _lines(("model", f"{answer['file']}, opset {answer['opset']}"), *_ports(answer))
    if answer["problem"]:
        _lines(("sites", f"none: {answer['problem']}"))
    else:
        _sites(f"sites of --sites {answer['asked']}", answer["sites"])
    _sites("candidates, as --sites all takes them; any float tensor can be named too", answer["candidates"])
    if answer["tensors"]:
        _lines(("tensors", _some(answer["tensors"], MOST_TENSORS)))
    headings = ("Operator", "#Count", "Behaviour", "Accuracy", "Reason", "Nodes")
    rows = [
        (row["operator"], str(row["count"]), row["behaviour"], row["accuracy"], row["reason"], _some(row["nodes"]))
        for row in answer["operators"]
    ]
    _table("operators", headings, rows)
    _refused(answer["refused"])
    _lines(*_cost(answer["cost"]))


def converted(answer: Mapping[str, Any]) -> None:
    """`inspect` of a converted file."""
    record = answer["provenance"]
    origin = record["source"]
    _lines(
        ("model", f"{answer['file']}, converted by gapa-onnx {record['version']}"),
        ("source", f"{origin['file'] or 'a model in memory'}, opset {origin['opset']}, sha256 {origin['sha256']}"),
        *_ports(answer),
        ("data", f"{record['data']['rows']} rows, {_dropped(record['data']['dropped'])}"),
        ("settings", ", ".join(f"{name} {value}" for name, value in record["settings"].items())),
    )
    _fits(record["sites"])
    quantiles = list(dict.fromkeys(q for site in record["sites"] for q in site["share_quantiles"]))
    rows = [
        (site["name"], *(_number(site["share_quantiles"].get(q)) for q in quantiles)) for site in record["sites"]
    ]
    _table("quantiles of the unexplained share, leave-one-out on the data", ("Site", *("#" + q for q in quantiles)), rows)
    _refused(record["cuts"], "cuts: what leaves these nodes counts as certain")
    _lines(*_variances(record["outputs"], ()))


def checks(entries: Iterable[Mapping[str, Any]]) -> None:
    """One line per check."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for entry in entries:
        mark = Text("pass", "green") if entry["passed"] else Text("FAIL", "bold red")
        table.add_row(mark, entry["name"], entry["detail"])
    console().print(table)


def findings(entries: Iterable[Mapping[str, Any]]) -> None:
    """One line per finding of `doctor`; what is only said has no mark."""
    marks = {True: Text("ok", "green"), False: Text("FAIL", "bold red"), None: Text("")}
    table = Table(box=None, show_header=False, pad_edge=False)
    for entry in entries:
        table.add_row(marks[entry["passed"]], entry["name"], entry["detail"])
    console().print(table)


# --------------------------------------------------------------------------- pieces


def _sites(title: str, sites: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (s["name"], s["activation"] or "identity", s["layout"], s["query"], _shape(s["shape"])) for s in sites
    ]
    _table(title, ("Site", "Activation", "Layout", "Query", "Shape"), rows)


def _fits(sites: Sequence[Mapping[str, Any]]) -> None:
    headings = (
        "Site", "Activation", "Layout", "#M", "#d", "#K", "#Length scale", "#Scale", "Index", "#Recall", "#Share error",
    )  # fmt: skip
    rows = [
        (
            s["name"],
            s["activation"] or "identity",
            s["layout"],
            *(str(s[name]) for name in ("points", "width", "k")),
            *(_number(s[name]) for name in ("length_scale", "scale")),
            s["index"],
            *(_number(s[name]) for name in ("recall", "share_error")),
        )
        for s in sites
    ]
    _table("sites", headings, rows)


def _refused(entries: Sequence[Mapping[str, Any]], title: str = "no variance rule behind the sites") -> None:
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        groups.setdefault((entry["operator"], entry["reason"]), []).append(entry["node"])
    rows = [(op, str(len(nodes)), reason, _some(nodes)) for (op, reason), nodes in sorted(groups.items())]
    _table(title, ("Operator", "#Count", "Reason", "Nodes"), rows)


def _ports(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (kind, ", ".join(f"{port['name']} {port['type']} {_shape(port['shape'])}" for port in answer[f"{kind}s"]))
        for kind in ("input", "output")
    ]


def _variances(variance_of: Mapping[str, str], certain: Iterable[str]) -> list[tuple[str, str]]:
    added = [("adds", f"{var}, the variance of {name}") for name, var in variance_of.items()]
    return added + [("certain", f"{name}: no site reaches it, so it gets no variance") for name in certain]


def _cost(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    def count(number: int | None) -> str:
        return "unknown" if number is None else f"{number:,}"

    ratio = "unknown" if cost["ratio"] is None else f"{cost['ratio']:.2f} times the model alone"
    return [
        ("cost", f"multiply-adds per sample, an estimate: model {count(cost['model'])}, sites {count(cost['sites'])}"),
        ("", f"together {ratio}; per query M·d to search, K²·d + K³/3 to solve, M = {cost['m']}, K = {cost['k']}"),
    ]


def _dropped(count: int) -> str:
    return f"{count} dropped at the sites for NaN or infinity" if count else "none dropped"


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Nothing at all for no rows; a heading that starts with # is of numbers."""
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        number = heading.startswith("#")
        table.add_column(heading.removeprefix("#"), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = console()
    out.print()
    out.print(Text(title, "bold"))
    out.print(table)


def _lines(*lines: tuple[str, str]) -> None:
    out = console()
    for label, text in lines:
        out.print(Text.assemble((f"{label:<12}", "bold"), text), soft_wrap=True)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _shape(shape: Sequence[int | str | None] | None) -> str:
    return "?" if shape is None else "(" + ", ".join("?" if size is None else str(size) for size in shape) + ")"


def _some(names: Sequence[str], most: int = MOST_NODES) -> str:
    return ", ".join(names[:most]) + (f", … {len(names) - most} more" if len(names) > most else "")


def _bytes(size: int) -> str:
    number = float(size)
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"
