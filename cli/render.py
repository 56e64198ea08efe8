"""Answers as text for people, from the same records that `--json` prints."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from gapa_onnx.cli import render_places
from gapa_onnx.cli.added import PROMISES, added, kept_of_data, promise_line, threshold_line
from gapa_onnx.cli.console import console
from gapa_onnx.cli.flags import as_flags
from gapa_onnx.cli.layout import (
    gap,
    image_text,
    legend,
    lines,
    number,
    shape_text,
    size_text,
    some,
    table,
    text_text,
)
from gapa_onnx.model.caches import told_as_one

if TYPE_CHECKING:
    from gapa_onnx.settle.thresholds import Threshold

MOST_TENSORS = 40

# -------------------------------------------------------------------- whole answers


def conversion(answer: Mapping[str, Any], source: str, data: str, calib: str) -> None:
    """The summary of `convert`."""
    record = answer["provenance"]
    size = f" ({size_text(answer['bytes'])})" if answer["output"] else ""
    lines(
        ("source", source),
        ("output", f"{answer['output'] or 'nothing was written: a check failed'}{size}"),
        ("data", f"{record['data']['rows']} rows of {data}, {_dropped(record['data']['dropped'])}"),
        *_held_out(record["data"]),
        *_prepared(record),
    )
    _trials(record)
    _fits(record["sites"])
    render_places.geometries(record)
    _heads(record["heads"])
    gap()
    lines(*added(record["heads"]), *_certain(answer["certain_outputs"]), *_uncovered(record))
    gap()
    checks(answer["checks"])
    if answer["output"]:
        gap()
        command = f"gapa-onnx run {shlex.quote(answer['output'])} --data {shlex.quote(calib)}"
        lines(("next", command))


def plan(answer: Mapping[str, Any], row_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The summary of `convert --dry-run`."""
    rows = answer["data"]["rows"]
    fed = ", ".join(f"{text} {shape_text(row_shapes[name])}" for name, text in told_as_one(row_shapes))
    lines(
        ("would write", answer["output"]),
        (
            "data",
            f"{'an unknown number of' if rows is None else rows} rows of {answer['data']['description']}",
        ),
        *_prepared(answer),
        ("one row", fed),
    )
    _sites(_SITES, answer["sites"], explained=True)
    render_places.witnesses(answer["witnesses"])
    _heads(answer["heads"])
    _refused(answer["refused"])
    gap()
    would_add = [
        (
            "would add",
            f"{name}_{'token_var' if h['task'] == 'tokens' else 'var'}, and what goes with {h['task']}"
            if answer["variance_outputs"]
            else f"{name}_score and {name}_ood",
        )
        for name, h in answer["heads"].items()
    ]
    lines(*would_add, *_certain(answer["certain_outputs"]))


def source(answer: Mapping[str, Any]) -> None:
    """`inspect` of a model that is not converted."""
    lines(("model", f"{answer['file']}, opset {answer['opset']}"), *_ports(answer))
    if answer["problem"]:
        lines(("sites", f"none: {as_flags(answer['problem'])}"))
    else:
        _sites(f"{_SITES} (--sites {answer['asked']})", answer["sites"], explained=True)
        render_places.witnesses(answer["witnesses"], answer["asked_witnesses"])
        _heads(answer["heads"])
    _sites(
        "places for sites, as --sites all takes them; any float tensor can be named",
        answer["candidates"],
        explained=not answer["sites"],
    )
    if answer["tensors"]:
        lines(("tensors", some(answer["tensors"], MOST_TENSORS)))
    headings = ("Operator", "#Count", "Behaviour", "Accuracy", "Reason", "Nodes")
    rows = [
        (
            row["operator"],
            str(row["count"]),
            row["behaviour"],
            row["accuracy"],
            row["reason"],
            some(row["nodes"]),
        )
        for row in answer["operators"]
    ]
    table("operators, and what becomes of a variance v in each", headings, rows)
    legend(Accuracy="exact or first order (for small variances), for independent inputs")
    _refused(answer["refused"])
    missed = [(entry["op"], entry["node"], entry["reason"]) for entry in answer["turned_down"]]
    table("nearly one operator, and why not", ("Pattern", "Node", "Reason"), missed)
    gap()
    lines(*_cost(answer["cost"]))


def converted(answer: Mapping[str, Any]) -> None:
    """`inspect` of a converted file."""
    record = answer["provenance"]
    origin = record["source"]
    lines(
        ("model", f"{answer['file']}, converted by gapa-onnx {record['version']}"),
        (
            "source",
            f"{origin['file'] or 'a model in memory'}, opset {origin['opset']}, sha256 {origin['sha256']}",
        ),
        *_ports(answer),
        ("data", f"{record['data']['rows']} rows, {_dropped(record['data']['dropped'])}"),
        *_held_out(record["data"]),
        kept_of_data(record),
        *_prepared(record),
        ("settings", ", ".join(f"{name} {value}" for name, value in record["settings"].items())),
    )
    _trials(record)
    _fits(record["sites"])
    render_places.geometries(record)
    render_places.shares(record)
    _refused(record["cuts"], "cuts: what leaves these nodes counts as certain")
    _heads(record["heads"])
    gap()
    lines(*added(record["heads"]), *_uncovered(record))


def threshold(entry: Threshold, levels: Sequence[str]) -> None:
    """Where the line of one output is, and where it could be."""
    lines((entry.name, threshold_line(vars(entry))))
    rows = [
        (level, number(entry.quantiles[level]), f"{100 * (1 - float(level)):.3g}%")
        for level in levels
        if level in entry.quantiles
    ]
    table("thresholds by quantile", ("Quantile", "#Score", "#Flags of ordinary inputs"), rows)
    gap()


def promised(entries: Sequence[tuple[str, str, Mapping[str, Any]]], written: str | None) -> None:
    """What a file promises, the levels that it can be moved to, and what to do next."""
    for output, name, promise in entries:
        levels = sorted(promise["table"], key=float)
        lines((output, promise_line(promise, PROMISES[name])))
        lines(("", f"can be moved between {levels[0]} and {levels[-1]}"))
    options = ["--quantile Q moves the line"]
    options += ["--coverage C or --max-error R what is promised"] if entries else []
    lines(("written", written) if written else ("next", ", ".join(options)))


def checks(entries: Iterable[Mapping[str, Any]]) -> None:
    """One line per check, and who is compared with whom."""
    shown = Table(box=None, show_header=False, pad_edge=False)
    named = ""
    for entry in entries:
        mark = Text("pass", "green") if entry["passed"] else Text("FAIL", "bold red")
        shown.add_row(mark, entry["name"], as_flags(entry["detail"]))
        named += entry["name"]
    console().print(Text("checks of the converted model", "bold"))
    console().print(shown)
    parts = {word: meaning for word, meaning in _COMPARED.items() if word in named}
    if parts:
        legend(**parts)


def findings(entries: Iterable[Mapping[str, Any]]) -> None:
    """One line per finding of `doctor`; what is only said has no mark."""
    marks = {True: Text("ok", "green"), False: Text("FAIL", "bold red"), None: Text("")}
    shown = Table(box=None, show_header=False, pad_edge=False)
    for entry in entries:
        shown.add_row(marks[entry["passed"]], entry["name"], entry["detail"])
    console().print(shown)


# --------------------------------------------------------------------------- pieces

_SITES = "sites: the places where uncertainty enters the model"
_QUERIES = {
    "rows": "a vector, for each row or token",
    "positions": "the channels at each position of a map",
    "pooled": "the mean of a map over its positions",
    "flat": "a map as one long vector",
}
_SEARCHES = {
    "flat": "all points are compared",
    "ivf": "points in lists, of which some are compared",
    "hnsw": "a walk along a graph of points",
    "ivfpq": "points in lists, in compressed form",
    "local": "the nearest point, whose neighbours were prepared",
    "prepared": "the nearest point, whose neighbours were prepared, with what a portable engine needs of them",
}
_COMPARED = {
    "share": "the part of a site's variance that the data leave unexplained",
    "portable": "standard operators alone, as any onnxruntime runs them",
    "native": "the library of gapa-onnx, which is faster",
    "reference": "the same computed in double precision by numpy",
}


def _sites(title: str, sites: Sequence[Mapping[str, Any]], explained: bool = False) -> None:
    rows = [
        (s["name"], s["activation"] or "identity", s["layout"], s["query"], shape_text(s["shape"]))
        for s in sites
    ]
    table(title, ("Site", "Activation", "Layout", "Query", "Shape"), rows)
    if explained and sites:
        legend(
            Layout=_of(_QUERIES, (s["layout"] for s in sites)),
            Query="the tensor that is compared with those of the data",
        )


def _of(meanings: Mapping[str, str], words: Iterable[str]) -> str:
    """What the words that occur mean."""
    return "; ".join(f"{word}: {meanings[word]}" for word in dict.fromkeys(words) if word in meanings)


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
    table(
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
            *(number(s[name]) for name in ("length_scale", "scale")),
            s["index"],
            "" if s["recall"] is None else f"{s['recall']:.3f}",
            f"{s['share_error']:.1g}",
        )
        for s in sites
    ]
    table(_SITES, headings, rows)
    legend(
        Layout=_of(_QUERIES, (s["layout"] for s in sites)),
        M="inducing points: calibration activations that the file keeps",
        d="numbers in each of them",
        K="neighbours: the inducing points that an input is compared with",
        Length="length scale: the distance over which activations are alike",
        Scale="τ: what the unexplained share of the variance is multiplied by",
        Index=_of(_SEARCHES, (s["index"] for s in sites)),
        Recall="part of the nearest inducing points that the search finds",
        Error="the largest error of the unexplained share by that",
    )
    formats = {s.get("storage", "float32") for s in sites} - {"float32"}
    if formats:
        worst = max(s["storage_error"] for s in sites)
        moved = f"the share of variance moves by at most {worst:.1g} on held-out rows"
        gap()
        lines(("points", f"stored as {', '.join(formats)}: {moved}"))


def _refused(entries: Sequence[Mapping[str, Any]], title: str = "no variance rule behind the sites") -> None:
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        groups.setdefault((entry["operator"], entry["reason"]), []).append(entry["node"])
    rows = [
        (op, str(len(nodes)), as_flags(reason), some(nodes)) for (op, reason), nodes in sorted(groups.items())
    ]
    table(title, ("Operator", "#Count", "Reason", "Nodes"), rows)


def _ports(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            kind,
            ", ".join(
                f"{name} {port['type']} {shape_text(port['shape'])}"
                for port, name in told_as_one(answer[f"{kind}s"], lambda port: str(port["name"]))
            ),
        )
        for kind in ("input", "output")
    ]


def _prepared(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How images or text became inputs, where the data are either."""
    texts = {"images": image_text, "text": text_text}
    return [(name, text(record[name])) for name, text in texts.items() if record.get(name)]


def _heads(heads: Mapping[str, Mapping[str, Any]]) -> None:
    """What each output was taken for, and why."""
    rows = [(name, head["task"], as_flags(head["reason"])) for name, head in heads.items()]
    table("outputs: what each is taken for, which --task changes", ("Output", "Task", "Why"), rows)


def _certain(outputs: Iterable[str]) -> list[tuple[str, str]]:
    return [
        ("certain", f"{text}: no site reaches it, so it gets no variance") for _, text in told_as_one(outputs)
    ]


def _uncovered(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What varies with the data and has no variance, of outputs in part and as a whole."""
    parts = {name: head["uncovered"] for name, head in record["heads"].items() if "uncovered" in head}
    parts |= dict.fromkeys(record.get("uncovered", ()), "all of it")
    return [
        ("uncovered", f"{name}: {part} varies with the data and has no variance")
        for name, part in parts.items()
    ]


def _cost(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    def count(number: int | None) -> str:
        return "unknown" if number is None else f"{number:,}"

    ratio = "unknown" if cost["ratio"] is None else f"{cost['ratio']:.2f} times the model alone"
    return [
        ("cost", "multiply-adds for each input, an estimate"),
        ("", f"model {count(cost['model'])}, sites and witnesses {count(cost['sites'])}, together {ratio}"),
        (
            "",
            "at a site M·d to search M inducing points of d numbers for the K nearest, then K·d + K²/2 where "
            "neighbours are prepared, else K²·d + K³/3",
        ),
    ]


def _held_out(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How many rows were fitted to, and how many were for counting alone."""
    held = data.get("held_out")
    if held is None:
        return []
    apart = "" if held["among"] == "held-out rows" else ", so what is promised is approximate"
    text = f"{held['fitting']} for fitting, {held['counting']} for nothing but counting"
    return [("known", f"{held['among']}: {text}{apart}")]


def _dropped(count: int) -> str:
    return f"{count} dropped at the sites for NaN or infinity" if count else "none dropped"
