"""benchmarks/paper/RESULTS.md from the files in benchmarks/paper/results; no number on it is typed in by hand.

    python benchmarks/paper/page.py

A section whose file is missing says which command makes it. To add one: a line in SECTIONS with a function from the
rows of its CSV to markdown.
"""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tex_tables
from tables import Row, table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # for what the sections of others import
RESULTS = HERE / "results"
TITLES = {
    "mnist": "MNIST, out of distribution: Fashion-MNIST",
    "fashion_mnist": "Fashion-MNIST, out of distribution: MNIST",
}
FIGURES = {"acc": "ACC", "nll": "NLL", "ece": "ECE", "ood": "OOD", "bald": "BALD", "score": "score"}
SEEDS = 5  # that the table is meant to have
OURS, ALL_POINTS, PLAIN, PAPER_PLAIN = (
    "gapa-onnx",
    "gapa-onnx last layer, all points",
    "MAP",
    "MAP (backbone)",
)
PAPER_MODE = "GAPA-Diag"

# What was aimed at (not results): distances from the paper's GAPA-Diag on MNIST, and AUROCs of the default.
NEAR_PAPER = {"nll": 0.010, "ood": 0.015, "bald": 0.010}
WANTED_AUROC = {"mnist": 0.985, "fashion_mnist": 0.995}


def main() -> None:
    parts = [
        "# The paper's tables, on real data and beside real peers\n",
        "Made by `python benchmarks/paper/page.py` from the CSV files in `benchmarks/paper/results`.\n",
    ]
    for title, file, command, section in SECTIONS:
        parts.append(f"## {title}\n")
        path = RESULTS / file
        parts.append(section(read(path)) if path.exists() else f"Not measured yet: `python {command}`.\n")
    parts += ["## Ablations\n", ablations()]
    (HERE / "RESULTS.md").write_text("\n".join(parts))


def read(path: Path) -> list[Row]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def by_module(module: str, function: str = "section") -> Callable[[list[Row]], str]:
    """The section that a benchmark writes itself, by a function of the rows, without its title."""

    def section(rows: list[Row]) -> str:
        lines = getattr(importlib.import_module(module), function)(rows).lstrip().splitlines()
        return "\n".join(lines[1:] if lines[0].startswith("## ") else lines).strip() + "\n"

    return section


# ----------------------------------------------------------------- classification


def classification(rows: list[Row]) -> str:
    parts = [
        "One 2x200 tanh network per seed; all methods start from the same trained one. ACC, NLL and ECE on the test "
        "set; OOD, BALD and score are AUROCs against the other data set's test images, by the entropy of the "
        "prediction, its epistemic part, and the method's own score (mean variance of the logits where it has one, "
        "else its density or distance). *fit*: CPU seconds from the trained network to the method. *time*: of a "
        "batch over MAP's, in turns in one process; for converted files over the source file in onnxruntime, for "
        "the others over the network in torch. *changed*: test images of both sets, all seeds, whose most probable "
        "class is not the network's. Mean ± standard deviation over seeds; ensembles of different seeds share "
        "members, so theirs is too small. Empty: the method has no such notion, or the control of a timing was off.\n"
    ]
    for data, title in TITLES.items():
        chosen = [row for row in rows if row["data"] == data]
        if chosen:
            parts += [f"### {title}\n", table(*our_table(chosen)), caveats(chosen)]
            parts += ["Of the paper:\n", paper_table(data)]
    return "\n".join([*parts, "### What was aimed at\n", aims(rows), origin(rows)])


def our_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    header = ["", *FIGURES.values(), "fit (s)", "time", "changed", "seeds"]
    lines = []
    for name in names(rows):
        group = of(rows, name)
        figures = [spread(group, column, 3) for column in FIGURES]
        costs = [mean_text(group, "fit_seconds", 1), mean_text(group, "ratio", 2)]
        changed = str(sum(int(row["argmax_changed"]) for row in group))
        lines.append([name, *figures, *costs, changed, str(len(group))])
    return header, lines


def caveats(rows: list[Row]) -> str:
    """Rows that stand on fewer seeds or fewer test images than the others."""
    most = max(int(row["rows"]) for row in rows)
    groups = {name: of(rows, name) for name in names(rows)}
    fewer = [f"{name} ({group[0]['rows']})" for name, group in groups.items() if int(group[0]["rows"]) < most]
    short = [f"{name} ({len(group)})" for name, group in groups.items() if len(group) < SEEDS]
    said = []
    if fewer:
        said.append(f"On the first test images only, not {most}: {', '.join(fewer)}.")
    if short:
        said.append(f"Not all {SEEDS} seeds yet: {', '.join(short)}.")
    return " ".join(said) + "\n"


def paper_table(data: str) -> str:
    rows = [row for row in tex_tables.classification() if row["data"] == data]
    if not rows:
        return "The paper is not at hand.\n"
    columns = {**{key: title for key, title in FIGURES.items() if key != "score"}}
    columns |= {"fit_seconds": "train (s)", "test_seconds": "test (s)"}
    body = [[row["row"], *(row[column] for column in columns)] for row in rows]
    return table(["", *columns.values()], body) + f"\n({rows[0]['origin']}; another machine.)\n"


def aims(rows: list[Row]) -> str:
    lines = near_paper([row for row in rows if row["data"] == "mnist"])
    for data in WANTED_AUROC:
        chosen = [row for row in rows if row["data"] == data]
        if of(chosen, OURS) and of(chosen, PLAIN):
            lines += [
                [f"{data}: {what}", *cells] for what, *cells in beside_others(chosen, WANTED_AUROC[data])
            ]
    return table(["aim", "found", ""], lines) + backbone_gap(rows)


def near_paper(rows: list[Row]) -> list[list[str]]:
    """Paper mode against the paper."""
    printed, group = paper_row("mnist", PAPER_MODE), of(rows, PAPER_MODE)
    found = []
    for column, near in NEAR_PAPER.items() if group and printed else ():
        gap = np.mean(numbers(group, column)) - float(printed[column])
        what = f"mnist: {FIGURES[column]} of {PAPER_MODE} in paper mode within {near} of {printed[column]}"
        found.append([what, f"{gap:+.4f}", met(abs(gap) <= near, group)])
    return found


def beside_others(rows: list[Row], wanted: float) -> list[list[str]]:
    """The default against a figure, against every other row on the seeds that both have, and against MAP."""
    ours = of(rows, OURS)
    best = best_auroc(ours)
    found = [[f"BALD or score of {OURS} at least {wanted}", f"{best:.4f}", met(best >= wanted, ours)]]
    for name in (OURS, ALL_POINTS):
        found += above_others(rows, name)
    mine, plain = paired(ours, of(rows, PLAIN))
    gap = np.mean(numbers(mine, "nll")) - np.mean(numbers(plain, "nll"))
    found.append([f"NLL of {OURS} no worse than MAP's", f"{gap:+.4f}", met(gap <= 0, mine)])
    changed = sum(int(row["argmax_changed"]) for row in ours)
    return [
        *found,
        [f"most probable class of {OURS} unchanged", f"{changed} changed", met(not changed, ours)],
    ]


def above_others(rows: list[Row], name: str) -> list[list[str]]:
    """A row of ours against every row that is not."""
    margins = {}
    for other in names(rows):
        mine, theirs = paired(of(rows, name), of(rows, other))
        if not other.startswith(OURS) and numbers(theirs, "bald", "score"):
            margins[other] = (best_auroc(mine) - best_auroc(theirs), mine)
    if not margins:
        return []
    closest = min(margins, key=lambda other: margins[other][0])
    margin, mine = margins[closest]
    what = f"BALD or score of {name} above those of all {len(margins)} other rows that have one"
    return [[what, f"{margin:+.4f} to {closest}", met(margin > 0, mine)]]


def backbone_gap(rows: list[Row]) -> str:
    """How far the networks themselves are from the paper's, which no method on top of them can make up for."""
    said = []
    for data in TITLES:
        plain, printed = of([row for row in rows if row["data"] == data], PLAIN), paper_row(data, PAPER_PLAIN)
        if plain and printed:
            gaps = {c: np.mean(numbers(plain, c)) - float(printed[c]) for c in ("acc", "nll", "ood")}
            said.append(f"{data} " + ", ".join(f"{FIGURES[c]} {gap:+.3f}" for c, gap in gaps.items()))
    return f"\nMAP here minus the paper's MAP: {'; '.join(said)}.\n" if said else ""


def paper_row(data: str, name: str) -> Row | None:
    rows = tex_tables.classification()
    return next((row for row in rows if (row["data"], row["row"]) == (data, name)), None)


def paired(one: list[Row], other: list[Row]) -> tuple[list[Row], list[Row]]:
    """The lines of the seeds that both have."""
    seeds = {row["seed"] for row in one} & {row["seed"] for row in other}
    return [row for row in one if row["seed"] in seeds], [row for row in other if row["seed"] in seeds]


def met(yes: bool, rows: list[Row]) -> str:
    """The verdict, with the number of seeds that it stands on where there should be more."""
    verdict = "met" if yes else "**not met**"
    return verdict if len(rows) >= SEEDS else f"{verdict} ({len(rows)} of {SEEDS} seeds)"


def best_auroc(rows: list[Row]) -> float:
    """The larger of the mean AUROCs by BALD and by the score."""
    return max(float(np.mean(numbers(rows, column))) for column in ("bald", "score") if numbers(rows, column))


def of(rows: list[Row], name: str) -> list[Row]:
    return sorted((row for row in rows if row["row"] == name), key=lambda row: int(row["seed"]))


def names(rows: list[Row]) -> list[str]:
    """Methods in the order in which they were run, this one's last."""
    return sorted(dict.fromkeys(row["row"] for row in rows), key=lambda name: "gapa" in name.lower())


def numbers(rows: list[Row], *columns: str) -> list[float]:
    return [float(row[column]) for column in columns for row in rows if row[column]]


def spread(rows: list[Row], column: str, digits: int) -> str:
    found = numbers(rows, column)
    if len(found) < 2:
        return f"{found[0]:.{digits}f}" if found else ""
    return f"{np.mean(found):.{digits}f} ± {np.std(found, ddof=1):.{digits}f}"


def mean_text(rows: list[Row], column: str, digits: int) -> str:
    found = numbers(rows, column)
    return f"{np.mean(found):.{digits}f}" if found else ""


def origin(rows: list[Row]) -> str:
    """Versions, machine and settings that the lines name."""
    said = []
    for column in ("gapa_onnx", "onnxruntime", "torch", "laplace_torch", "processor", "cores"):
        said.append(f"{column.replace('_', '-')} {', '.join(sorted({row[column] for row in rows}))}")
    settings = {f"{row['row']}: `{row['settings']}`" for row in rows if row["settings"]}
    return "; ".join(said) + ". Settings: " + "; ".join(sorted(settings)) + ".\n"


# ----------------------------------------------------------------------- rotation


def rotation(rows: list[Row]) -> str:
    parts = []
    for data in TITLES:
        chosen = [row for row in rows if row["data"] == data]
        if not chosen:
            continue
        angles = sorted({int(row["angle"]) for row in chosen})
        shown = [angle for angle in angles if not angle % 45]
        header = ["", *(f"NLL {a}°" for a in shown), *(f"entropy {a}°" for a in shown), "images", "seeds"]
        lines = []
        for name in names(chosen):
            group = of(chosen, name)
            at = {angle: [row for row in group if int(row["angle"]) == angle] for angle in shown}
            cells = [mean_text(at[a], column, 3) for column in ("nll", "entropy") for a in shown]
            lines.append([name, *cells, group[0]["rows"], str(len({row["seed"] for row in group}))])
        parts += [f"### {data}\n", f"![{data}](results/rotation_{data}.png)\n", table(header, lines)]
    return "\n".join(parts)


# ---------------------------------------------------------------------- ablations


def recipes(rows: list[Row]) -> str:
    """Networks of about the same accuracy, trained in several ways: MAP, paper mode and the default on each."""
    header = ["recipe", "", *FIGURES.values(), "seeds"]
    lines = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        chosen = [row for row in rows if row["recipe"] == recipe]
        for name in names(chosen):
            group = of(chosen, name)
            figures = [spread(group, column, 3) for column in FIGURES]
            lines.append([recipe, name, *figures, str(len(group))])
    said = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        gaps = near_paper([row for row in rows if row["recipe"] == recipe])
        if gaps:
            said.append(
                f"{recipe}: " + ", ".join(f"{column} {gap}" for column, (_, gap, _) in zip(NEAR_PAPER, gaps))
            )
    return (
        "How far the figures hang on the way that the network was trained (MNIST): the paper names none, and the work "
        "that it follows publishes SGD. Columns are those of the table above.\n\n"
        + table(header, lines)
        + f"\n{PAPER_MODE} minus the paper's: {'; '.join(said)}.\n"
    )


def ablations() -> str:
    """The figures that benchmarks/paper/ablations.py drew, each with its CSV."""
    found = [path for path in sorted(RESULTS.glob("ablations_*.csv")) if path.with_suffix(".png").exists()]
    if not found:
        return "Not measured yet: `python benchmarks/paper/ablations.py`.\n"
    return "\n".join(
        f"![{path.stem}](results/{path.stem}.png) ([{path.name}](results/{path.name}))\n" for path in found
    )


SECTIONS = (
    ("Classification", "classification.csv", "benchmarks/paper/classification.py", classification),
    ("Networks trained in other ways", "recipes.csv", "benchmarks/paper/recipes.py", recipes),
    ("Rotation", "rotation.csv", "benchmarks/paper/rotation.py --only mnist", rotation),
    ("CIFAR-10", "cifar.csv", "benchmarks/paper/cifar/run.py", by_module("cifar.page")),
    (
        "Near the training set",
        "near.csv",
        "benchmarks/paper/cifar/run.py --nets near",
        by_module("cifar.page", "near"),
    ),
    ("Regression", "regression.csv", "benchmarks/paper/regression.py", by_module("regression_page")),
    ("Promises", "guarantees.csv", "benchmarks/paper/guarantees.py", by_module("guarantees_page")),
    ("Segmentation", "segmentation.csv", "benchmarks/paper/segmentation.py", by_module("segmentation")),
    ("Language", "language.csv", "benchmarks/paper/language/run.py", by_module("language.page")),
)

if __name__ == "__main__":
    main()
