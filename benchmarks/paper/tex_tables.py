"""The paper's own figures, read from its LaTeX source where that is at hand, kept as a CSV where it is not."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[2] / "shared" / "paper" / "gapa.tex"
KEPT = HERE / "results"

Row = dict[str, str]


@dataclass(frozen=True)
class Table:
    """A table whose lines are methods and whose columns come in groups."""

    label: str  #: in the source
    kept: str  #: the name of its CSV
    key: str  #: what a group is
    groups: tuple[str, ...]  #: in the order of the table
    columns: tuple[str, ...]  #: of each group


CLASSIFICATION = Table(
    "tab:results_classif_runtime_internal",
    "paper_classification.csv",
    "data",
    ("mnist", "fashion_mnist"),
    ("acc", "nll", "ece", "ood", "bald", "fit_seconds", "test_seconds"),
)
CIFAR = Table(
    "tab:resnet_full",
    "paper_cifar.csv",
    "net",
    ("resnet20", "resnet32", "resnet44", "resnet56"),
    ("acc", "nll", "ood", "fit_seconds", "test_seconds"),
)


def rows_of(table: Table, source: Path = SOURCE, folder: Path = KEPT) -> list[Row]:
    """A row per group and method; [] where neither the paper nor the CSV is here."""
    kept = folder / table.kept
    if source.exists():
        rows = parse(source.read_text(), source.name, table)
        with open(kept, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if not kept.exists():
        return []
    with open(kept, newline="") as file:
        return list(csv.DictReader(file))


def classification() -> list[Row]:
    return rows_of(CLASSIFICATION)


def cifar() -> list[Row]:
    return rows_of(CIFAR)


def parse(text: str, origin: str, table: Table = CLASSIFICATION) -> list[Row]:
    """The table's cells as they are printed; `origin` says where they are from."""
    place = text.index(rf"\label{{{table.label}}}")
    start = text.index(r"\midrule", place) + len(r"\midrule")
    body = _unformatted(text[start : text.index(r"\bottomrule", start)])
    width, found = len(table.columns), []
    for line in body.split(r"\\"):
        name, *cells = (cell.strip() for cell in line.split("&"))
        if not cells:
            continue  # what follows the last line
        if len(cells) != len(table.groups) * width:
            raise ValueError(f"{name!r} in {table.label} has {len(cells)} cells")
        for number, group in enumerate(table.groups):
            part = cells[number * width : (number + 1) * width]
            figures = {
                column: "" if set(cell) == {"-"} else cell for column, cell in zip(table.columns, part)
            }
            found.append({table.key: group, "row": name, **figures, "origin": f"{origin}, {table.label}"})
    return found


def _unformatted(text: str) -> str:
    """Without colours and bold type."""
    text = re.sub(r"\\textcolor\{\w+\}\{([^}]*)\}", r"\1", text)
    return re.sub(r"\\textbf\{([^}]*)\}", r"\1", text)
