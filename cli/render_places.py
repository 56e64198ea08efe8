"""Places with a share as text: witnesses, and how activations are compared at each place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gapa_onnx.cli.layout import legend, number, shape_text, table

WITNESSES = "witnesses: places that say how strange an input is, and pass no variance on"
QUANTILES = ("0.05", "0.5", "0.95", "0.99", "0.999")  # those that fit on a line; --json has all


def witnesses(places: Sequence[Mapping[str, Any]], asked: str | None = None) -> None:
    """The witnesses that a model would get."""
    rows = [(p["name"], p["layout"], p["query"], shape_text(p["shape"])) for p in places]
    title = WITNESSES if asked is None else f"{WITNESSES} (--witnesses {asked})"
    table(title, ("Witness", "Layout", "Query", "Shape"), rows)


def geometries(record: Mapping[str, Any]) -> None:
    """Of each place of a file: its metric, and what was tried."""
    places = [("site", site) for site in record["sites"]]
    places += [("witness", witness) for witness in record["witnesses"]]
    rows = [
        (
            place["name"],
            kind,
            place["layout"],
            str(place["points"]),
            str(place["width"]),
            place.get("metric", "euclidean"),
            _tried(place.get("metrics", {})),
        )
        for kind, place in places
    ]
    table("places: how activations are compared there", _HEADINGS, rows)
    legend(
        Metric="of distances between activations, which --metric sets",
        **{"AUROC": "of inputs that were made strange, by each metric that was tried"},
    )


_HEADINGS = ("Place", "Kind", "Layout", "#M", "#d", "Metric", "AUROC")


def _tried(metrics: Mapping[str, float]) -> str:
    best_first = sorted(metrics.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} {auroc:.3f}" for name, auroc in best_first) or "nothing was tried"


def shares(record: Mapping[str, Any]) -> None:
    """The unexplained share of ordinary inputs at each place."""
    places = [*record["sites"], *record["witnesses"]]
    rows = [(p["name"], *(number(p["share_quantiles"].get(q)) for q in QUANTILES)) for p in places]
    table(
        "unexplained share of the variance: near 0 for inputs like the data, 1 for inputs like none of them; "
        "its quantiles over the data, each row left out",
        ("Place", *("#" + q for q in QUANTILES)),
        rows,
    )
