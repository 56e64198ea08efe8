"""The section of RESULTS.md about regression, from the lines of results/regression.csv.

section(rows) -> markdown        rows as csv.DictReader gives them
"""

from __future__ import annotations

import numpy as np

from gapa_onnx.measure.evaluation import metrics

Row = dict[str, str]

OURS = "GAPA + noise head"
# Parts of ours, there to tell what each is worth; they take no place in the ranking.
PARTS = ("MAP + noise head", "GAPA, no labels for its scale", "GAPA")
STAND_INS = ("taxi_green_2022_01", "airline_nyc13")
METHODS = (
    *("MAP", "MC dropout", "Ensemble", "Gaussian ensemble"),
    *("LLA* full", "LLA* KFAC", "LLA* diag", "LLA KFAC", "LLA diag"),
    *PARTS,
    OURS,
)
TITLES = {"nll": "NLL, in nats per test row", "crps": "CRPS", "cqm": "CQM", "rmse": "RMSE"}
ENSEMBLES = ("Ensemble", "Gaussian ensemble")


def section(rows: list[Row]) -> str:
    """Tables of all figures with the ranks of ours, of the data sets that have lines of every method."""
    sets = _complete_sets(rows)
    missing = sorted({row["dataset"] for row in rows} - set(sets))
    if not sets:
        return "Not measured yet: `python benchmarks/paper/regression.py`.\n"
    gal = [name for name in sets if name not in STAND_INS]
    parts = [_protocol(rows), _ranks(rows, gal)]
    if missing:
        parts.append(f"Not all methods have been run on {', '.join(missing)}.\n")
    for figure, title in TITLES.items():
        parts += [f"### {title}\n", _table(rows, sets, figure)]
        if figure == "cqm":
            parts.append(_least_cqm(rows, sets))
    parts.append(_splits(rows, sets))
    return "\n".join(parts)


def _protocol(rows: list[Row]) -> str:
    kinds = sorted({(r["torch"], r["laplace_torch"], r["onnxruntime"], r["gapa_onnx"]) for r in rows})
    versions = "; ".join(
        f"torch {torch}, laplace-torch {laplace}, onnxruntime {ort}, gapa-onnx {own}"
        for torch, laplace, ort, own in kinds
    )
    return (
        "One network with a hidden layer of 50 relu units (100 for protein) per split, fitted to four fifths of the "
        "split's training rows, so figures are not those of papers that fit to all of them. The last fifth, held "
        "out, serves all methods alike for what comes behind the network: noise, prior precision, dropout rate, "
        "scale, noise head. Dropout and ensembles train networks of their own, so their means differ; all other rows "
        "have MAP's. LLA* is last-layer Laplace, LLA all-layer; *Ensemble* has a constant noise as most rows do, "
        "*Gaussian ensemble* networks that predict their variance, as published. `taxi_green_2022_01` and "
        "`airline_nyc13` stand in for the paper's Taxi and Airline. Mean ± standard deviation over splits (without ± "
        "there is one split only), in units of the target; **best** and *second-best* of a column without the three "
        "parts of ours (MAP + noise head, "
        "and GAPA without it). A run chooses nothing on test rows. Before it, test rows had a part: the size of the "
        "noise head was once chosen by test likelihood on some of these sets; a weight decay for all backbones, τ by "
        "targets and the tolerance of its choice came after looks at split 0 (the latter also split 7) of some. "
        f"{versions}.\n"
    )


def _ranks(rows: list[Row], gal: list[str]) -> str:
    """What was aimed at, counted."""
    if not gal:
        return ""
    ranking = [method for method in METHODS if method not in PARTS]
    one_network = [method for method in ranking if method not in ENSEMBLES]
    places = {name: _place(rows, name, ranking) for name in gal}
    alone = {name: _place(rows, name, one_network) for name in gal}
    beside = {one: {name: _place(rows, name, [*one_network, one]) for name in gal} for one in ENSEMBLES}
    parts = {name: _place(rows, name, [*ranking, PARTS[0]]) for name in gal}
    cqm = [name for name in gal if _mean(rows, name, OURS, "cqm") < _mean(rows, name, "MAP", "cqm")]
    not_below = [name for name in gal if name not in cqm]
    nll = [name for name in gal if _mean(rows, name, OURS, "nll") < _mean(rows, name, "MAP", "nll")]

    def count(found: dict[str, int]) -> str:
        return f"{sum(place <= 2 for place in found.values())} of {len(gal)}"

    return (
        f"**{OURS}** is best or second-best in NLL on {count(places)} of Gal's sets "
        f"({', '.join(f'{name} {place}' for name, place in places.items())}), where two kinds of ensembles take part; "
        f"{', '.join(f'on {count(found)} beside *{one}* alone' for one, found in beside.items())}; on {count(alone)} "
        f"among methods that need one network only; on {count(parts)} if MAP with the same noise head counts as a peer. Its NLL is below "
        f"MAP's on {len(nll)} of {len(gal)}, its CQM on {len(cqm)} of {len(gal)}"
        + (f" (not on {', '.join(not_below)})" if not_below else "")
        + ".\n"
    )


def _table(rows: list[Row], sets: list[str], figure: str) -> str:
    ranking = [method for method in METHODS if method not in PARTS]
    header = ["", *sets]
    lines = [header, ["---"] * len(header)]
    for method in METHODS:
        cells = [method]
        for name in sets:
            values = _values(rows, name, method, figure)
            digits = _digits(rows, name, figure)
            spread = f" ± {np.std(values):.{digits}f}" if len(values) > 1 else ""
            cell = f"{np.mean(values):.{digits}f}{spread}"
            place = _place(rows, name, ranking, figure, method) if method in ranking else 0
            cells.append({1: f"**{cell}**", 2: f"*{cell}*"}.get(place, cell))
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _least_cqm(rows: list[Row], sets: list[str], draws: int = 2000) -> str:
    """What CQM would be if every error bar were right: it is not 0 for a finite number of test rows."""
    rng = np.random.default_rng(0)
    found = []
    for name in sets:
        count = next(int(row["rows_test"]) for row in rows if row["dataset"] == name)
        perfect = [metrics.centred_quantile_metric(rng.random(count)) for _ in range(draws)]
        found.append(f"{name} {np.mean(perfect):.3f} ± {np.std(perfect):.3f}")
    return f"Of a model whose error bars are all right (levels drawn uniformly): {', '.join(found)}.\n"


def _digits(rows: list[Row], name: str, figure: str) -> int:
    """Three, and more for a target of small numbers."""
    if figure not in ("crps", "rmse"):
        return 3
    return int(np.clip(2 - np.floor(np.log10(_mean(rows, name, "MAP", figure))), 1, 6))


def _splits(rows: list[Row], sets: list[str]) -> str:
    counts = {name: len(_values(rows, name, "MAP", "nll")) for name in sets}
    sizes = {name: next(row for row in rows if row["dataset"] == name) for name in sets}
    found = (
        f"{name} {counts[name]} ({row['rows_fitted']} / {row['rows_held_out']} / {row['rows_test']})"
        for name, row in sizes.items()
    )
    return f"Splits, with rows fitted / held out / tested: {', '.join(found)}. Seeds are the numbers of the splits.\n"


def _complete_sets(rows: list[Row]) -> list[str]:
    """Data sets in which every method has the same splits, in the order of the file."""
    names = dict.fromkeys(row["dataset"] for row in rows)
    found = []
    for name in names:
        splits = [
            {row["split"] for row in rows if (row["dataset"], row["method"]) == (name, method)}
            for method in METHODS
        ]
        if splits[0] and all(other == splits[0] for other in splits):
            found.append(name)
    return found


def _values(rows: list[Row], name: str, method: str, figure: str) -> list[float]:
    return [float(row[figure]) for row in rows if (row["dataset"], row["method"]) == (name, method)]


def _mean(rows: list[Row], name: str, method: str, figure: str) -> float:
    return float(np.mean(_values(rows, name, method, figure)))


def _place(rows: list[Row], name: str, methods: list[str], figure: str = "nll", method: str = OURS) -> int:
    """1 for the method with the least mean."""
    mine = _mean(rows, name, method, figure)
    return 1 + sum(_mean(rows, name, other, figure) < mine for other in methods if other != method)
