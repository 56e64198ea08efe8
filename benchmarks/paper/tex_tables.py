"""The paper's own figures, read from its LaTeX source where that is at hand, kept as a CSV where it is not."""

from __future__ import annotations

import csv
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[2] / "shared" / "paper" / "gapa.tex"
KEPT = HERE / "results" / "paper_classification.csv"
LABEL = "tab:results_classif_runtime_internal"
COLUMNS = ("acc", "nll", "ece", "ood", "bald", "fit_seconds", "test_seconds")
DATA_SETS = ("mnist", "fashion_mnist")  #: in the order of the table's column groups

Row = dict[str, str]


def classification(source: Path = SOURCE, kept: Path = KEPT) -> list[Row]:
    """A row per data set and method; [] where neither the paper nor the CSV is here."""
    if source.exists():
        rows = parse(source.read_text(), source.name)
        with open(kept, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if not kept.exists():
        return []
    with open(kept, newline="") as file:
        return list(csv.DictReader(file))


def parse(text: str, origin: str) -> list[Row]:
    """The table's cells as they are printed; `origin` says where they are from."""
    place = text.index(rf"\label{{{LABEL}}}")
    start = text.index(r"\midrule", place) + len(r"\midrule")
    body = _unformatted(text[start : text.index(r"\bottomrule", start)])
    found = []
    for line in body.split(r"\\"):
        name, *cells = (cell.strip() for cell in line.split("&"))
        if not cells:
            continue  # what follows the last line
        if len(cells) != len(DATA_SETS) * len(COLUMNS):
            raise ValueError(f"{name!r} in {LABEL} has {len(cells)} cells")
        for number, data in enumerate(DATA_SETS):
            part = cells[number * len(COLUMNS) : (number + 1) * len(COLUMNS)]
            figures = {column: "" if cell == "---" else cell for column, cell in zip(COLUMNS, part)}
            found.append({"data": data, "row": name, **figures, "origin": f"{origin}, {LABEL}"})
    return found


def _unformatted(text: str) -> str:
    """Without colours and bold type."""
    text = re.sub(r"\\textcolor\{\w+\}\{([^}]*)\}", r"\1", text)
    return re.sub(r"\\textbf\{([^}]*)\}", r"\1", text)
