"""Answers as text for people, from the same records that `--json` prints."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from gapa_onnx.cli.console import console

if TYPE_CHECKING:
    from gapa_onnx.settle.thresholds import Threshold

MOST_NODES = 3  # names shown in a cell
MOST_TENSORS = 40
LONGEST_WHOLE = 18  # characters of a cell that a narrow terminal may not fold
QUANTILES = ("0.05", "0.5", "0.95", "0.99", "0.999")  # those that fit on a line; --json has all

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
    _trials(record)
    _fits(record["sites"])
    _heads(record["heads"])
    _gap()
    _lines(*_added(record["heads"]), *_certain(answer["certain_outputs"]))
    _gap()
    checks(answer["checks"])
    if answer["output"]:
        _gap()
        command = f"gapa-onnx run {shlex.quote(answer['output'])} --data {shlex.quote(calib)}"
        _lines(("next", command))


def plan(answer: Mapping[str, Any], row_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The summary of `convert --dry-run`."""
    rows = answer["data"]["rows"]
    fed = ", ".join(f"{name} {_shape(shape)}" for name, shape in row_shapes.items())
    _lines(
        ("would write", answer["output"]),
        (
            "data",
            f"{'an unknown number of' if rows is None else rows} rows of {answer['data']['description']}",
        ),
        ("one row", fed),
    )
    _sites("sites", answer["sites"])
    _heads(answer["heads"])
    _refused(answer["refused"])
    _gap()
    would_add = [
        ("would add", f"{name}_var, and what goes with {h['task']}") for name, h in answer["heads"].items()
    ]
    _lines(*would_add, *_certain(answer["certain_outputs"]))


def source(answer: Mapping[str, Any]) -> None:
    """`inspect` of a model that is not converted."""
    _lines(("model", f"{answer['file']}, opset {answer['opset']}"), *_ports(answer))
    if answer["problem"]:
        _lines(("sites", f"none: {answer['problem']}"))
    else:
        _sites(f"sites of --sites {answer['asked']}", answer["sites"])
        _heads(answer["heads"])
    _sites("candidates, as --sites all takes them; any float tensor can be named too", answer["candidates"])
    if answer["tensors"]:
        _lines(("tensors", _some(answer["tensors"], MOST_TENSORS)))
    headings = ("Operator", "#Count", "Behaviour", "Accuracy", "Reason", "Nodes")
    rows = [
        (
            row["operator"],
            str(row["count"]),
            row["behaviour"],
            row["accuracy"],
            row["reason"],
            _some(row["nodes"]),
        )
        for row in answer["operators"]
    ]
    _table("operators", headings, rows)
    _refused(answer["refused"])
    missed = [(entry["op"], entry["node"], entry["reason"]) for entry in answer["turned_down"]]
    _table("nearly one operator, and why not", ("Pattern", "Node", "Reason"), missed)
    _gap()
    _lines(*_cost(answer["cost"]))


def converted(answer: Mapping[str, Any]) -> None:
    """`inspect` of a converted file."""
    record = answer["provenance"]
    origin = record["source"]
    _lines(
        ("model", f"{answer['file']}, converted by gapa-onnx {record['version']}"),
        (
            "source",
            f"{origin['file'] or 'a model in memory'}, opset {origin['opset']}, sha256 {origin['sha256']}",
        ),
        *_ports(answer),
        ("data", f"{record['data']['rows']} rows, {_dropped(record['data']['dropped'])}"),
        ("settings", ", ".join(f"{name} {value}" for name, value in record["settings"].items())),
    )
    _trials(record)
    _fits(record["sites"])
    rows = [
        (site["name"], *(_number(site["share_quantiles"].get(q)) for q in QUANTILES))
        for site in record["sites"]
    ]
    _table(
        "quantiles of the unexplained share, leave-one-out on the data",
        ("Site", *("#" + q for q in QUANTILES)),
        rows,
    )
    _refused(record["cuts"], "cuts: what leaves these nodes counts as certain")
    _heads(record["heads"])
    _gap()
    _lines(*_added(record["heads"]))


def threshold(entry: Threshold, levels: Sequence[str], written: str | None) -> None:
    """Where the line of one output is, and where it could be."""
    _lines((entry.output, threshold_line(vars(entry))))
    rows = [
        (level, _number(entry.quantiles[level]), f"{100 * (1 - float(level)):.3g}%")
        for level in levels
        if level in entry.quantiles
    ]
    _table("thresholds by quantile", ("Quantile", "#Score", "#Flags of ordinary inputs"), rows)
    _gap()
    _lines(("written", written) if written else ("next", "--quantile Q moves the line"))


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


def _trials(record: Mapping[str, Any]) -> None:
    """What was tried to keep within a budget, and what it gave up against the first."""
    budget = record.get("budget", {})
    trials = budget.get("trials", ())
    rows = [
        (
            trial["solver"],
            str(trial["m"]),
            str(trial["k"]),
            f"{trial['ratio']:.2f}",
            f"{trial['control']:.3f}",
            f"{trial['recall']:.3f}",
            *(f"{trial[s] / trials[0][s]:.2f}" for s in ("share_median", "share_high")),
        )
        for trial in trials
    ]
    headings = ("Solver", "#M", "#K", "#Cost", "#Control", "#Recall", "#Share, median", "#Share, 0.95")
    _table(
        f"tried for a budget of {budget.get('limit')}: cost in times the model's own, and the unexplained share "
        "of left-out rows in times the first's; the last is taken",
        headings,
        rows,
    )


def _fits(sites: Sequence[Mapping[str, Any]]) -> None:
    headings = (
        "Site",
        "Activation",
        "Layout",
        "#M",
        "#d",
        "#K",
        "#Length",
        "#Scale",
        "Index",
        "#Recall",
        "#Error",
    )
    rows = [
        (
            s["name"],
            s["activation"] or "identity",
            s["layout"],
            *(str(s[name]) for name in ("points", "width", "k")),
            *(_number(s[name]) for name in ("length_scale", "scale")),
            s["index"],
            "" if s["recall"] is None else f"{s['recall']:.3f}",
            f"{s['share_error']:.1g}",
        )
        for s in sites
    ]
    _table("sites; Error is the largest that the index makes in the share of variance", headings, rows)
    formats = {s.get("storage", "float32") for s in sites} - {"float32"}
    if formats:
        worst = max(s["storage_error"] for s in sites)
        moved = f"the share of variance moves by at most {worst:.1g} on held-out rows"
        _gap()
        _lines(("points", f"stored as {', '.join(formats)}: {moved}"))


def _refused(entries: Sequence[Mapping[str, Any]], title: str = "no variance rule behind the sites") -> None:
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        groups.setdefault((entry["operator"], entry["reason"]), []).append(entry["node"])
    rows = [(op, str(len(nodes)), reason, _some(nodes)) for (op, reason), nodes in sorted(groups.items())]
    _table(title, ("Operator", "#Count", "Reason", "Nodes"), rows)


def _ports(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            kind,
            ", ".join(
                f"{port['name']} {port['type']} {_shape(port['shape'])}" for port in answer[f"{kind}s"]
            ),
        )
        for kind in ("input", "output")
    ]


def _heads(heads: Mapping[str, Mapping[str, Any]]) -> None:
    """What each output was taken for, and why."""
    rows = [(name, head["task"], head["reason"]) for name, head in heads.items()]
    _table("outputs; --task says otherwise", ("Output", "Task", "Why"), rows)


def _added(heads: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    lines = []
    for name, head in heads.items():
        roles = head["outputs"]
        lines += [("adds", f"{roles[r]}, {text.format(name)}") for r, text in _ROLES.items() if r in roles]
        lines += [("threshold", threshold_line(head["score"]))] if "score" in head else []
        if "noise" in head:
            noise = head["noise"]
            lines.append(
                ("noise", f"{noise['nll']:.4g} nats per row, {noise['constant_nll']:.4g} if it were constant")
            )
    return lines


_ROLES = {
    "var": "the variance of {}",
    "cov": "the covariance of the elements of {}",
    "probs": "probabilities that allow for the variance",
    "tokens": "the tokens that they are of",
    "entropy": "how uncertain the class is, in nats: the sum of the next two",
    "aleatoric": "because the classes overlap",
    "epistemic": "because the model has not seen such inputs",
    "score": "how strange the input is",
    "ood": "true where that is not below the threshold",
    "aleatoric_var": "the variance of the noise around {}",
    "total_var": "both variances together",
}


def threshold_line(score: Mapping[str, Any]) -> str:
    level = "given by hand" if score["quantile"] is None else f"quantile {score['quantile']:g}"
    return f"{score['threshold']:.4g}: {level} of {score['rows']} {score['source']}"


def _certain(outputs: Iterable[str]) -> list[tuple[str, str]]:
    return [("certain", f"{name}: no site reaches it, so it gets no variance") for name in outputs]


def _cost(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    def count(number: int | None) -> str:
        return "unknown" if number is None else f"{number:,}"

    ratio = "unknown" if cost["ratio"] is None else f"{cost['ratio']:.2f} times the model alone"
    return [
        ("cost", "in multiply-adds per sample, an estimate"),
        ("", f"model {count(cost['model'])}, sites {count(cost['sites'])}, together {ratio}"),
        (
            "",
            "per query M·d to search; to solve K·d + K²/2 where neighbourhoods are prepared, else K²·d + K³/3",
        ),
    ]


def _dropped(count: int) -> str:
    return f"{count} dropped at the sites for NaN or infinity" if count else "none dropped"


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Nothing for no rows. A heading that starts with # is of numbers; only long text is ever folded."""
    if not rows:
        return
    table = new_table()
    for heading, cells in zip(headings, zip(*rows)):
        number = heading.startswith("#")
        short = number or max(map(len, cells)) <= LONGEST_WHOLE
        table.add_column(
            heading.removeprefix("#"), justify="right" if number else "left", overflow="fold", no_wrap=short
        )
    for row in rows:
        table.add_row(*row)
    _gap()
    console().print(Text(title, "bold"))
    console().print(table)


def _gap() -> None:
    console().print()


def new_table() -> Table:
    """Two blanks between columns, a line under the headings."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def _lines(*lines: tuple[str, str]) -> None:
    out = console()
    for label, text in lines:
        out.print(Text.assemble((f"{label:<12}", "bold"), text), soft_wrap=True)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _shape(shape: Sequence[int | str | None] | None) -> str:
    return (
        "?" if shape is None else "(" + ", ".join("?" if size is None else str(size) for size in shape) + ")"
    )


def _some(names: Sequence[str], most: int = MOST_NODES) -> str:
    """The first names; fewer of them where the terminal is narrow and they are long."""
    room = most * console().width // 6
    while most > 1 and len(", ".join(names[:most])) > room:
        most -= 1
    return ", ".join(names[:most]) + (f", … {len(names) - most} more" if len(names) > most else "")


def _bytes(size: int) -> str:
    number = float(size)
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"
