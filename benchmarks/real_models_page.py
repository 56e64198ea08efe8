"""docs/real-models.md from the rows of `real_models.py`; no number on it is typed in by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page import table

Row = dict[str, Any]
FAULTS = ("TRACEBACK", "uncovered, NOT SAID", "NOT BIT-EQUAL", "CHECK FAILED")
LEFT_OUT = ("not to be had", "does not run")
TITLES = {
    "example": "The examples of models/",
    "zoo": "The zoo",
    "package": "Out of packages",
    "scikit-learn": "scikit-learn's estimators",
}
HEAD = ["model", "state", "task", "sites", "covered", "AUROC of the score", "s", "MB", "says"]
INTRODUCTION = """\
# Models that people have

Made by `python benchmarks/real_models.py`; no number is typed in by hand. Each model is converted with no options,
on rows like those it is meant for where such rows are at hand, and then asked about held-out rows and three strange
sets of them. Where a row is large, few are used, and k follows; both stand under the model's name.

- *state*: **covered** (every element of an output that varies over the rows has a variance above 0), **score only**
  (no variance passes the model; it gets `_score` and `_ood`, and says so), **uncovered, said** (a part has no
  variance, and `convert` names it), **refused** (with the sentence on the right). What must not be: *uncovered, NOT
  SAID*, *NOT BIT-EQUAL*, *CHECK FAILED*, *TRACEBACK*.
- *sites*: what is a query (rows, positions, pooled, flat), along which axis of the tensor, and how wide it is.
- *covered*: of the elements that vary, read from the converted model's answers, not from its record.
- *AUROC*: held-out rows against each strange set, in the order that the heading or the cell names; the mean where
  a model has several outputs. Where data are Gaussian numbers, the model was made for something else, and so is the figure.
- *s*, *MB*: processor seconds of the whole conversion, and the peak of the process with its data.
"""


def page(rows: Sequence[Row]) -> str:
    parts = [INTRODUCTION, "\n".join(f"- {text}" for text in totals(rows)) + "\n"]
    for kind, title in TITLES.items():
        mine = [row for row in rows if row["kind"] == kind]
        if mine:
            parts += [f"## {title}\n", table(HEAD, [cells(row) for row in mine])]
    return "\n".join(parts)


def totals(rows: Sequence[Row]) -> list[str]:
    """The figures that the table is for."""
    count = {
        state: sum(row["state"] == state for row in rows) for state in dict.fromkeys(r["state"] for r in rows)
    }
    asked = [row for row in rows if row["state"] not in LEFT_OUT]
    full, score = count.get("covered", 0), count.get("score only", 0)
    total = max(len(asked), 1)
    areas = [area for row in asked for area in row.get("auroc", {}).values() if area is not None]
    silent = sum(
        not any(area is not None for area in row["auroc"].values()) for row in asked if "auroc" in row
    )
    high = sum(area >= 0.9 for area in areas)
    return [
        f"{len(asked)} models: " + ", ".join(f"{number} {state}" for state, number in sorted(count.items())),
        f"fully covered: {full / max(total - score, 1):.1%} of the models that a variance passes (goal 90%), "
        f"{full / total:.1%} of all; with a score at least: {(full + score) / total:.1%}",
        f"uncovered without a word: {count.get('uncovered, NOT SAID', 0)} (goal 0)",
        f"tracebacks: {count.get('TRACEBACK', 0)} (goal 0)",
        f"source outputs that changed: {count.get('NOT BIT-EQUAL', 0)} (goal 0)",
        f"another check that failed: {count.get('CHECK FAILED', 0)} (goal 0)",
        f"converted without a score: {silent} (goal 0)",
        f"AUROC at least .90 in {high} of {len(areas)} comparisons, below .50 in {sum(a < 0.5 for a in areas)}",
    ]


def line(row: Row) -> str:
    """A row while it is measured."""
    areas = " ".join("  — " if area is None else f"{area:.2f}" for area in row.get("auroc", {}).values())
    says = " | ".join(row.get("says", ()))[:150]
    return f"{row['state']:<20} {_name(row)[:44]:<44} {covered(row):>6} {areas:<16} {row.get('seconds', '')!s:>6} s  {says}"


def cells(row: Row) -> list[str]:
    auroc = row.get("auroc", {})
    areas = ", ".join(f"{what} {'—' if area is None else f'{area:.2f}'}" for what, area in auroc.items())
    state = f"**{row['state']}**" if row["state"] in FAULTS else row["state"]
    tasks = ", ".join(dict.fromkeys(row.get("tasks", {}).values()))
    k = f", k = {row['k']}" if "k" in row else ""
    data = f"{row['rows']} rows, {row['data']}{k}" if "data" in row else ""
    name = _name(row) + (f"<br>{row['what']}, {row['version']}" if "what" in row else "")
    return [
        _cell(text)
        for text in (
            f"{name}<br>*{data}*" if data else name,
            state,
            tasks or "—",
            sites(row),
            covered(row),
            areas or "—",
            str(row.get("seconds", "")),
            str(row.get("peak_mb", "")),
            _short("; ".join(row.get("says", ()))),
        )
    ]


def sites(row: Row) -> str:
    found = row.get("sites", [])
    shown = [
        f"{_tail(site['name'])}: {site['layout']}"
        + (f", axis {site['axis']}" if site["axis"] is not None else "")
        + f", {site['width']}"
        for site in found[:3]
    ]
    return "<br>".join(shown) + (f"<br>and {len(found) - 3} more" if len(found) > 3 else "") or "—"


def covered(row: Row) -> str:
    """The share over all outputs that vary, each element counted once."""
    parts = [part for part in row.get("cover", {}).values()]
    if parts and all(part["score_only"] for part in parts):
        return "score"
    elements = sum(part["elements"] for part in parts)
    if not elements:
        return "—"
    share = sum(part["share"] * part["elements"] for part in parts) / elements
    return "100%" if share == 1 else f"{min(share, 0.999):.1%}"


def _name(row: Row) -> str:
    if row["kind"] != "zoo":
        return row["model"]
    origin, *_, last = row["model"].split("__")
    inner = row["model"].split("__")[-2] if last == "model" else ""
    return f"{inner or last} ({origin})"


def _tail(name: str) -> str:
    return name if len(name) <= 32 else f"…{name[-31:]}"


def _short(text: str) -> str:
    return text if len(text) <= 240 else f"{text[:239]}…"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
