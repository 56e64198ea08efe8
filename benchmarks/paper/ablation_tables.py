"""Tables of docs/defaults.md: one per choice, a line per value, means over networks with the largest loss on any.

For every network and quantity the *loss* of a value is how far it is behind the best value of the same table on that
network. A table shows the mean over networks and, behind it, the largest loss on any of them: a default may lose
no more than noise. `SECTIONS` are those of the Gaussian process alone, which `ablations.py` measures.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
QUANTITIES = {"nll": "NLL − network's", "ece": "ECE", "entropy": "entropy", "bald": "BALD", "score": "score"}
LOWER_IS_BETTER = ("nll", "ece")

Row = dict[str, str]


@dataclass(frozen=True)
class Section:
    """One default: its title, the results that it rests on, and what they say."""

    title: str
    ablation: str
    default: tuple[str, str]  #: series and value
    text: str
    heads: tuple[str, str] = ("series", "value")
    shown: Sequence[tuple[str, str]] = ()  #: series and values of the page, all where none are named


def ablations() -> str:
    """The sections of what has been measured."""
    parts = []
    for section in SECTIONS:
        found = _rows(section)
        if section.default in keys(found):
            parts.append(f"### {section.title}\n\n{section.text.strip()}\n\n{table(section, found)}")
            parts.append(
                f"{verdict(section, found)} Networks: {_subjects(found)}. [Figure]({_link(section)})\n"
            )
    return "\n".join(parts)


def table(section: Section, rows: list[Row], quantities: Mapping[str, str] = QUANTITIES) -> str:
    """Markdown: a line per series and value, in the order of the results."""
    shown = [key for key in keys(rows) if key in (section.shown or [key])]
    names = [name for name, used in zip(section.heads, zip(*shown)) if any(used)]
    lines = [
        "| " + " | ".join([*names, *quantities.values()]) + " |",
        "|" + "---|" * (len(names) + len(quantities)),
    ]
    for key in shown:
        cells = [word for word, name in zip(key, section.heads) if name in names]
        cells += [
            f"{mean:.4f} ({worst:.4f})" for mean, worst, _ in (losses(rows, key, q) for q in quantities)
        ]
        bold = "**" if key == section.default else ""
        lines.append("| " + " | ".join(f"{bold}{cell}{bold}" if cell else "" for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def losses(rows: list[Row], key: tuple[str, str], quantity: str) -> tuple[float, float, str]:
    """Mean of a quantity over networks, the largest loss, and where that is."""
    means, behind = [], []
    for network in dict.fromkeys((row["network"], row["data"]) for row in rows):
        mine = [row for row in rows if (row["network"], row["data"]) == network]
        own = [_value(row, quantity) for row in mine if (row["series"], row["value"]) == key]
        if not own:
            continue
        every = [_value(row, quantity) for row in mine]
        loss = own[0] - min(every) if quantity in LOWER_IS_BETTER else max(every) - own[0]
        means.append(own[0])
        behind.append((loss, " on ".join(network)))
    return float(np.mean(means)), *max(behind)


def verdict(section: Section, rows: list[Row], quantities: Mapping[str, str] = QUANTITIES) -> str:
    """Where the default loses most, by more than is shown as nothing."""
    found = {name: losses(rows, section.default, name) for name in quantities}
    parts = [
        f"{quantities[name].split(' −')[0]} {loss:.4f} ({where})"
        for name, (_, loss, where) in found.items()
        if loss >= 0.0005
    ]
    return f"The default's largest losses: {'; '.join(parts)}." if parts else "The default loses nowhere."


def _value(row: Row, quantity: str) -> float:
    return float(row[quantity]) - (float(row["map_nll"]) if quantity == "nll" else 0.0)


def standard_error(auroc: float, count: int) -> float:
    """Of an AUROC over `count` rows of each kind, by Hanley and McNeil."""
    first, second = auroc / (2 - auroc), 2 * auroc**2 / (1 + auroc)
    spread = auroc * (1 - auroc) + (count - 1) * (first + second - 2 * auroc**2)
    return float(np.sqrt(spread) / count)


def _subjects(rows: list[Row]) -> str:
    return ", ".join(
        f"{network} ({' and '.join(dict.fromkeys(r['data'] for r in rows if r['network'] == network))})"
        for network in dict.fromkeys(row["network"] for row in rows)
    )


def keys(rows: list[Row]) -> list[tuple[str, str]]:
    """Series and values that were measured on every network, in the order of the results."""
    networks = {(row["network"], row["data"]) for row in rows}
    on = {}
    for row in rows:
        on.setdefault((row["series"], row["value"]), set()).add((row["network"], row["data"]))
    return [key for key, found in on.items() if found == networks]


def _rows(section: Section) -> list[Row]:
    if not _path(section).exists():
        return []
    with open(_path(section), newline="") as file:
        return list(csv.DictReader(file))


def _path(section: Section) -> Path:
    return HERE / "results" / f"ablations_{section.ablation}.csv"


def _link(section: Section) -> str:
    return f"../benchmarks/paper/results/ablations_{section.ablation}.png"


SECTIONS = (
    Section(
        "Scale: τ from leave-one-out shares, without a hard cap",
        "scale",
        ("free", "0.05"),
        """
v = τ s c², and τ makes the median share of left-out calibration rows the target. *Capped* is min(τ s, 1) c². A cap makes
all strange rows equally strange, which costs score and BALD as soon as τ is large; without it the score does not depend
on τ at all. What τ decides is how far probabilities move: a larger target tells strange rows better by entropy and
BALD, until known rows are blurred as well. How much blur is right depends on how overconfident the network is, which
cannot be known without labels: an overconfident network gains by a larger target, an underconfident one loses.

Where data are so dense that τ passes 100, the variance levels off, c² τ s / (1 + (τ/100 − 1) s), which keeps the order
of inputs; for values in place of classes it does so at the prior variance c².""",
        ("", "target"),
        [
            *(("free", t) for t in ("none", "0.01", "0.02", "0.05", "0.1", "0.2")),
            ("capped", "0.05"),
            ("capped", "0.2"),
        ],
    ),
    Section(
        "Length scale: the median distance at the site",
        "length_scale",
        ("τ", "1"),
        """
With τ only the contrast between known and strange rows matters. A short length scale makes everything far (s is near 1
for known rows too), a long one brings s down to the jitter. `input` is the paper's: the median distance of the inputs,
which has no relation to distances at the site. Without τ the length scale decides the size of the variance as well.""",
        ("scale", "multiple"),
        [*(("τ", m) for m in ("0.25", "0.5", "1", "2", "4", "input")), ("no τ", "1"), ("no τ", "input")],
    ),
    Section(
        "Inducing points: 1000 by k-means",
        "points",
        ("kmeans", "1000"),
        """
More points tell strange rows better, and there is no number beyond which they stop to help: the leave-one-out share
falls on like a power of M. So M is a matter of cost. At the same M, k-means is ahead of random rows and of
farthest-first, which spends its points on outliers. Here the score is the mean variance. Scores by witnesses hardly gain beyond
500 points, so that the tool takes 20 for each neighbour.""",
        ("chosen by", "M"),
        [
            *(("kmeans", m) for m in ("100", "250", "1000")),
            ("fps", "1000"),
            *(("random", m) for m in ("1000", "4000", "all")),
        ],
    ),
    Section(
        "Neighbours: K = 50, cached neighbourhoods",
        "k",
        ("cached", "50"),
        """
`exact` solves for the query's own nearest points. `nearest` takes over the nearest points of its nearest point, whose factor
is computed once; `cached` does too, but of 2.5 K points near to that point it has chosen the K that leave least variance
to the data around, which costs nothing when a query comes. Few neighbours cost detection, very many gain little.""",
        ("solver", "K"),
        [(solver, k) for solver in ("exact", "nearest", "cached") for k in ("5", "20", "50", "200")],
    ),
    Section(
        "Jitter: 1e-6",
        "jitter",
        ("", "1e-06"),
        """
Relative to the prior variance. It bounds s from below, so it matters where shares are of its size.""",
        ("", "jitter"),
        [("", jitter) for jitter in ("1e-08", "1e-06", "1e-04", "1e-02")],
    ),
    Section(
        "Bridge: one factor for all logits",
        "bridge",
        ("default", "shared"),
        """
The shared factor keeps every most probable class, by construction; the paper's, one per class, does not.""",
        ("reading", "bridge"),
    ),
    Section(
        "Several sites: earlier ones half as loud as the last",
        "placement",
        ("half", "1+4"),
        """
By default there is one site, and earlier places are witnesses. Where `sites` names several, all of them propagate. Sites of
a tanh network with four hidden layers of 100 units (random points): *added* they keep their own τ, and the last one outweighs
the others. *Alike* gives each site the same median variance of the logits on left-out rows, *half* each but the last half of
the last one's, and all together that of the last alone. No weighing wins everywhere: on 2 x 200 units and Fashion-MNIST,
where the last layer sees best, alike loses .0007 in score and half .0002 (five seeds).""",
        ("sites", "layers"),
        [
            ("added", "4"),
            *((how, places) for how in ("added", "alike", "half") for places in ("1+4", "1+2+3+4")),
        ],
    ),
    Section(
        "Epistemic part: fixed points, no sampling",
        "split",
        ("", "fixed"),
        """
The same variances split at the fixed points of the file, and by Monte Carlo with so many draws: the points do what
several times as many draws do, and the answer is the same every time.""",
        ("", "draws"),
    ),
)
