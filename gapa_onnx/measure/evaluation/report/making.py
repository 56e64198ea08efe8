"""The part of the page that says how the file was made, where its threshold is and what it costs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from gapa_onnx.measure.evaluation.report.markup import cards, section, table, text
from gapa_onnx.measure.evaluation.report.wording import ABSENT, number, whole
from gapa_onnx.measure.evaluation.result import Evaluation

_SITE_COLUMNS = ("Site", "Activation", "M", "K", "Length scale ℓ", "Scale τ", "Index", "Recall")


def making(evaluation: Evaluation) -> str:
    """Provenance, sites, settings, threshold and cost, as far as they are known."""
    record = evaluation.provenance
    rows = [
        cards([_threshold(evaluation), _cost(evaluation), _origin(record, evaluation.output)]),
        cards([_sites(record), _settings(record)]),
        cards([_cuts(record)]),
    ]
    return section(
        "How this file was made", "Where it comes from, where its threshold is, and what it costs.", rows
    )


def _threshold(evaluation: Evaluation) -> str:
    known = evaluation.threshold
    if not known:
        return ""
    quantile = known.get("quantile")
    command = f"gapa-onnx threshold {shlex.quote(evaluation.file)} \\\n  --quantile .99"
    lines = "\n".join(text(line) for line in command.split("\n"))
    flagged = "".join(
        f"<li>{text(number(share, percent=True))} of the {'OOD set' if name == 'ood' else text(name)} flagged</li>"
        for name, share in evaluation.flagged.items()
    )
    return (
        '<div class="card" id="threshold"><h3>Threshold</h3>'
        f"<p>An input is flagged when its score is above <strong>{text(number(known.get('threshold')))}</strong>"
        f"{'' if quantile is None else f', the {text(number(quantile, percent=True))} quantile of the calibration scores'}.</p>"
        f"{f'<ul>{flagged}</ul>' if flagged else ''}"
        f"<p>To change it without recalibrating:</p><pre><code>{lines}</code></pre></div>"
    )


def _cost(evaluation: Evaluation) -> str:
    cost = evaluation.cost
    if cost is None:
        return ""
    threads = (
        f"{whole(cost.threads)} thread{'' if cost.threads == 1 else 's'}" if cost.threads else "all threads"
    )
    return (
        '<div class="card" id="cost"><h3>Cost</h3>'
        f'<p class="figure-number">{cost.ratio:.2f} ×</p>'
        f"<p>the time of the source model, at batch size {whole(cost.batch)} on {threads}. Control: the source against "
        f"itself in the same run took {cost.control:.3f} ×.</p></div>"
    )


def _origin(record: Mapping[str, Any], output: str) -> str:
    source, data = record.get("source") or {}, record.get("data") or {}
    head = (record.get("heads") or {}).get(output) or {}
    points = head.get("points") or {}
    rows = whole(data.get("rows"))
    if data.get("dropped"):
        rows += f" ({whole(data['dropped'])} query rows dropped)"
    facts = {
        "Source": source.get("file"),
        "SHA-256": str(source["sha256"])[:12] if source.get("sha256") else None,
        "Opset": source.get("opset"),
        "Producer": source.get("producer"),
        "Calibration rows": rows if data.get("rows") is not None else None,
        "Task": head.get("reason") or head.get("task"),
        "Bridge": head.get("bridge"),
        "Integration": f"{points.get('kind')}, {points.get('count')} points" if points else None,
        "gapa-onnx": record.get("version"),
    }
    return _facts_card("provenance", "Provenance", facts)


def _settings(record: Mapping[str, Any]) -> str:
    settings = record.get("settings") or {}
    shown = {f"--{name.replace('_', '-')}": _shown(value) for name, value in sorted(settings.items())}
    return _facts_card("settings", "Settings", shown)


def _facts_card(name: str, title: str, facts: Mapping[str, object]) -> str:
    rows = "".join(
        f"<div><dt>{text(label)}</dt><dd>{text(value)}</dd></div>"
        for label, value in facts.items()
        if value not in (None, "")
    )
    return (
        f'<div class="card" id="{name}"><h3>{text(title)}</h3><dl class="facts-list">{rows}</dl></div>'
        if rows
        else ""
    )


def _sites(record: Mapping[str, Any]) -> str:
    rows = [
        [
            text(site.get("name", ABSENT)),
            text(site.get("activation") or ABSENT),
            whole(site.get("points")),
            whole(site.get("k")),
            text(number(site.get("length_scale"))),
            text(number(site.get("scale"))),
            text(site.get("index") or ABSENT),
            text(number(site.get("recall"), percent=True)),
        ]
        for site in record.get("sites") or ()
    ]
    if not rows:
        return ""
    note = "M inducing points, K of them per query; recall: neighbours that the index finds."
    grid = table(_SITE_COLUMNS, rows, "Sites where uncertainty is born", "tlnnnnln")
    return f'<div class="card pair" id="sites"><h3>Sites</h3>{grid}<p class="note">{note}</p></div>'


def _cuts(record: Mapping[str, Any]) -> str:
    rows = [
        [text(cut.get("node", ABSENT)), text(cut.get("operator", ABSENT)), text(cut.get("reason", ABSENT))]
        for cut in record.get("cuts") or ()
    ]
    if not rows:
        return ""
    grid = table(("Node", "Operator", "Reason"), rows, "Places where uncertainty does not pass", "tll")
    return f'<div class="card" id="cuts"><h3>Uncertainty does not pass these nodes</h3>{grid}</div>'


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else value
