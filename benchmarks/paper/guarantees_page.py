"""The section of RESULTS.md about promises, from the lines of results/guarantees.csv.

section(rows) -> markdown        rows as csv.DictReader gives them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Row = dict[str, str]

REGRESSION = ("protein", "kin8nm", "naval", "airline", "taxi")
SETS = ("lac", "aps", "raps")


def section(rows: list[Row]) -> str:
    """Tables of intervals, of probabilities and sets, and of deferral; means over splits ± their standard error."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["method"]), []).append(row)
    names = list(dict.fromkeys(row["data"] for row in rows))
    parts = [
        _intervals(groups, [name for name in REGRESSION if name in names]),
        _classes(groups, [name for name in names if name not in REGRESSION]),
    ]
    return (
        "\n".join(part for part in parts if part)
        or "Not measured yet: `python benchmarks/paper/guarantees.py`.\n"
    )


def _intervals(groups: dict[tuple[str, str], list[Row]], names: Sequence[str]) -> str:
    if not names:
        return ""
    lines, ratios = [], []
    for name in names:
        ours, skewed, plain = (groups[name, method] for method in ("normalised", "skewed", "unscaled"))
        ratios.append(_mean(ours, "winkler") / _mean(plain, "winkler"))
        cells = [name, str(len(ours)), _shown(ours, "coverage"), _shown(plain, "coverage")]
        cells += [f"{_mean(ours, 'size'):.4g}", f"{_mean(plain, 'size'):.4g}", f"{ratios[-1]:.3f}"]
        lines.append([*cells, f"{_mean(skewed, 'winkler') / _mean(plain, 'winkler'):.3f}"])
    heads = ["set", "splits", "coverage", "unscaled", "width", "unscaled", "interval score", "skewed alone"]
    text = (
        f"Coverage 0.9 asked for, counted on a third of the held-out rows. Interval (Winkler) scores are over those of unscaled residuals, "
        f"y ± one quantile of all held-out residuals: {np.mean(ratios):.3f} in the mean. *Skewed alone* has two quantiles of these, one for "
        "each side, and no variance. One network per set; splits differ in which unseen rows are held out. Protein has more splits as its "
        "first 30 came out low, by more than two standard errors: the others were run to see whether that is chance.\n"
    )
    return f"{text}\n{_table(heads, lines)}"


def _classes(groups: dict[tuple[str, str], list[Row]], names: Sequence[str]) -> str:
    if not names:
        return ""
    lines = []
    for name in names:
        ours, scaled = groups[name, "file, lac"], groups[name, "temperature"]
        cells = [
            name,
            str(len(ours)),
            _shown(ours, "nll"),
            _shown(scaled, "nll"),
            _shown(ours, "ece"),
            ours[0]["nominal"],
        ]
        for kind in SETS:
            of_kind = groups[name, f"file, {kind}"]
            cells.append(f"{_shown(of_kind, 'coverage')}, {_mean(of_kind, 'size'):.2f}")
        deferral = groups.get((name, "deferral"), [])
        cells.append(f"{_mean(deferral, 'answered'):.3f}, {_mean(deferral, 'error'):.4f}" if deferral else "")
        counted = bool(deferral) and all(row.get("flagged") for row in deferral)
        cells.append(_shown(deferral, "flagged") if counted else "")
        lines.append(cells)
    heads = [
        "network",
        "splits",
        "NLL",
        "temperature",
        "ECE",
        "asked",
        *(f"{k.upper()}: coverage, size" for k in SETS),
        "answered, error",
        "flagged at 0.05",
    ]
    changed = sum(int(row["argmax_changed"] or 0) for name in names for row in groups[name, "file, lac"])
    empty = sum(
        int(row["empty"] or 0) for name in names for kind in SETS for row in groups[name, f"file, {kind}"]
    )
    text = (
        "500 labels: 400 for temperature and τ, 100 to count sets on; beside it temperature scaling by all 500. Deferral with an error of at "
        "most 0.05 and confidence 0.9 by 2000 labels: the share of rows that are answered, and their error; beside it the share of test rows that the same file calls strange. "
        "Of ResNets, what their places read went through a network that passes just that. Predictions that changed: "
        f"{changed}; empty sets: {empty}.\n"
    )
    return f"{text}\n{_table(heads, lines)}"


def _mean(rows: Iterable[Row], column: str) -> float:
    return float(np.mean([float(row[column]) for row in rows]))


def _shown(rows: Sequence[Row], column: str) -> str:
    values = [float(row[column]) for row in rows]
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return f"{np.mean(values):.4f} ± {error:.4f}"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
