"""docs/defaults.md: one table per default, made of the results of ablations.py; no number is typed in.

    python benchmarks/paper/defaults.py [--check]

For every network and quantity the *loss* of a value is how far it is behind the best value of the same table on
that network. A table shows the mean over networks and, behind it, the largest loss on any of them: a default
may lose no more than noise. `--check` writes nothing and fails if the page is not what the results say.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "defaults.md"
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


INTRODUCTION = """\
# Why the defaults are what they are

Every choice that the method leaves open was varied by itself. Numbers below are means over the networks that
are named below each table: mlp (784-200-200-10, tanh, two seeds), deep (four hidden layers of 100), lenet and resnet
(small convolutional networks with pooled features), each on MNIST and on Fashion-MNIST; in brackets stands the
largest loss on any one of them against the best value of the same table. AUROCs tell {rows} test rows from as many of
the other data set (MNIST against Fashion-MNIST and the reverse): by the entropy of the prediction, by its epistemic
part (BALD), and by the score. With so many rows two standard errors of an AUROC of {middle} are {noise}; readings of
one network on the same rows err together, so that their differences are known better. The NLL is given less that of
the network by itself, so below zero is a gain. The default is in bold. Tables but that of the neighbours are of exact
solutions. Where no choice wins on every network the text says so.

This page is written by `benchmarks/paper/defaults.py` from the files in `benchmarks/paper/results`, which
`benchmarks/paper/ablations.py` measures.
"""


BY_NETWORK = """\
What the Gaussian process alone says, in Euclidean distances at the last site, and in brackets the network by itself. The
score is the mean variance of the logits, whose AUROC is that of the share s where there is one site. The default of the tool
adds witnesses and chooses geometries; it stands beside other methods in [RESULTS.md](../benchmarks/paper/RESULTS.md), and
how it was chosen in [decisions.md](decisions.md#plan).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = page()
    if options.check:
        sys.exit(None if PAGE.read_text() == text else f"{PAGE} is not what the results say: run defaults.py")
    PAGE.write_text(text)


def page() -> str:
    sections = [section for section in SECTIONS if section.default in _keys(_rows(section))]
    rows = [row for section in sections for row in _rows(section)]
    auroc = float(np.median([float(row["bald"]) for row in rows]))
    count = int(rows[0]["rows"])
    parts = [
        INTRODUCTION.format(
            rows=count,
            middle=f"{auroc:.3f}",
            noise=f"{2 * _standard_error(auroc, count):.4f}",
        )
    ]
    if sections[0].ablation == "readings":
        parts.append(f"## Network by network\n\n{BY_NETWORK}\n{by_network(_rows(sections[0]))}")
    for section in sections:
        found = _rows(section)
        parts.append(
            f"## {section.title}\n\n{section.text.strip()}\n\n{table(section, found)}\n{verdict(section, found)}\n"
        )
        parts.append(f"Networks: {_subjects(found)}. [Figure]({_link(section)})\n")
    return "\n".join(parts)


def by_network(rows: list[Row]) -> str:
    """Markdown: the default on each network, beside the network by itself."""
    lines = [
        "| network | data | NLL | ECE | entropy | BALD | score | argmax changed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["value"] == "default":
            pairs = (f"{float(row[q]):.4f} ({float(row['map_' + q]):.4f})" for q in ("nll", "ece", "entropy"))
            alone = (f"{float(row[q]):.4f}" for q in ("bald", "score"))
            cells = (row["network"], row["data"], *pairs, *alone, row["argmax_changed"])
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def table(section: Section, rows: list[Row]) -> str:
    """Markdown: a line per series and value, in the order of the results."""
    keys = _keys(rows)
    names = [name for name, used in zip(section.heads, zip(*keys)) if any(used)]
    lines = [
        "| " + " | ".join([*names, *QUANTITIES.values()]) + " |",
        "|" + "---|" * (len(names) + len(QUANTITIES)),
    ]
    for key in keys:
        cells = [word for word, name in zip(key, section.heads) if name in names]
        cells += [
            f"{mean:.4f} ({worst:.4f})" for mean, worst, _ in (losses(rows, key, q) for q in QUANTITIES)
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


def verdict(section: Section, rows: list[Row]) -> str:
    """Where the default loses most."""
    found = {name: losses(rows, section.default, name) for name in QUANTITIES}
    parts = [f"{QUANTITIES[name].split(' −')[0]} {found[name][1]:.4f} ({found[name][2]})" for name in found]
    return f"The default's largest losses: {', '.join(parts)}.\n"


def _value(row: Row, quantity: str) -> float:
    return float(row[quantity]) - (float(row["map_nll"]) if quantity == "nll" else 0.0)


def _standard_error(auroc: float, count: int) -> float:
    """Of an AUROC over `count` rows of each kind, by Hanley and McNeil."""
    first, second = auroc / (2 - auroc), 2 * auroc**2 / (1 + auroc)
    spread = auroc * (1 - auroc) + (count - 1) * (first + second - 2 * auroc**2)
    return float(np.sqrt(spread) / count)


def _subjects(rows: list[Row]) -> str:
    return ", ".join(
        f"{network} ({' and '.join(dict.fromkeys(r['data'] for r in rows if r['network'] == network))})"
        for network in dict.fromkeys(row["network"] for row in rows)
    )


def _keys(rows: list[Row]) -> list[tuple[str, str]]:
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
        "All together",
        "readings",
        ("", "default"),
        """
The default beside an earlier one and the paper's reading (length scale of the inputs, no τ, per-class bridge), with
1000 inducing points and with every calibration row as one.""",
        ("", "reading"),
    ),
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
    ),
    Section(
        "Metric: Euclidean",
        "metric",
        ("euclidean", "1"),
        """
Whitening (PCA, small eigenvalues lifted) makes all directions count alike. Points are random rows here, since k-means
would choose other points in the whitened space. There is no winner: whitening helps the score of the mlp on MNIST, where
k-means helps as much, and harms BALD and entropy on the convolutional networks. It also costs a product per query.""",
        ("metric", "multiple"),
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
    ),
    Section(
        "Jitter: 1e-6",
        "jitter",
        ("", "1e-06"),
        """
Relative to the prior variance. It bounds s from below, so it matters where shares are of its size.""",
        ("", "jitter"),
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
        "Sites: the last hidden layer, and the first vector",
        "placement",
        ("half", "1+4"),
        """
All subsets of the four hidden layers of a tanh network (4 x 100, random points). A site costs a search, so that
one, behind which the variance is a single number per row, is the cheapest (`--sites last`). No placement wins everywhere.
But the last layer alone can be far from the best: what it no longer tells apart cannot be strange there. First and last
together lose little anywhere, and their cost does not grow with the depth. The table of
[classification](../benchmarks/paper/RESULTS.md) has both readings on 2 x 200 units, where two sites gain on MNIST
and lose a little on Fashion-MNIST.
*Added* sites keep their own τ, and the last one outweighs the others. *Alike* gives each site the same median variance of
the logits on left-out rows, *half* each but the last half of the last one's, and all together that of the last alone. The
tool takes half wherever there are several: on 2 x 200 units and Fashion-MNIST, where the last layer sees best, alike
loses .0007 in score and half .0002 (five seeds).""",
        ("sites", "layers"),
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


if __name__ == "__main__":
    main()
