"""docs/defaults.md: the default on every network, and one table per choice, made of results; no number is typed in.

    python benchmarks/paper/defaults.py [--check]

Networks and choices are those of `choices.py`, older tables those of `ablations.py`. `--check` writes nothing and fails if
the page is not what the results say.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
from ablation_tables import Row, Section, ablations, standard_error, table, verdict
from tables import table as markdown

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "defaults.md"
RESULTS = HERE / "results" / "choices.csv"
DEFAULT, SOURCE, NEIGHBOURS = "default", "source", "kNN normalised"
SETS = ("far", "blended", "noisy")
IMAGES = ("mnist", "fashion_mnist")
#: Networks and their data, in the order of the page.
NETWORKS = (
    ("mlp, Adam", "mnist"),
    ("mlp, Adam", "fashion_mnist"),
    ("mlp, Adam, weight decay 1e-4", "mnist"),
    ("mlp, SGD", "mnist"),
    *((network, data) for network in ("lenet", "resnet") for data in IMAGES),
    *((f"resnet{depth}", "cifar10") for depth in (20, 32, 44, 56)),
    ("lstm", "mnist"),
    ("transformer", "fashion_mnist"),
    ("reader", "text"),
)
MOST_NLL = 0.002  #: more than the network's own, without labels
BEHIND = 0.01  #: of an AUROC: what is said
QUANTITIES = {
    "nll": "NLL − network's",
    "ece": "ECE",
    "entropy_far": "entropy",
    "bald_far": "BALD",
    **{f"score_{name}": f"score, {name}" for name in SETS},
}

INTRODUCTION = """\
# Why the defaults are what they are

First the default on every kind of network that we have, then its choices one by one, then what the Gaussian process alone
rests on. This page is written by `benchmarks/paper/defaults.py` from the files in `benchmarks/paper/results`, which
`benchmarks/paper/choices.py` and `benchmarks/paper/ablations.py` measure.

## Networks

| network | what it is | data | far |
|---|---|---|---|
| mlp | 784-200-200-10, tanh, trained by Adam; with weight decay; by SGD | MNIST, Fashion-MNIST | the other of the two |
| lenet, resnet | three convolutions; a stem and three residual blocks | MNIST, Fashion-MNIST | the other |
| resnet20 to resnet56 | ResNets of 20 to 56 layers | CIFAR-10 | SVHN |
| lstm | two layers of 64 units over the rows of an image, the last step | MNIST | Fashion-MNIST |
| transformer | three blocks of 64 units over the rows of an image, a summary token | Fashion-MNIST | MNIST |
| reader | two blocks over 32 words, their mean: Wikipedia or the web | WikiText, OpenWebText | Python source |

*Blended* are equal mixtures of two test images (half a piece of text from either class), *noisy* are test images with noise
(a quarter of the words replaced by any others). Training rows calibrate, without labels; {rows} test rows are held against
{strange} strange ones. Two standard errors of an AUROC of {middle} are {noise}; answers about the same rows err
together, so that differences within a network are known better.

### What was chosen on which data

{chosen}
"""

#: Said by hand: results do not tell what was looked at before.
CHOSEN = """\
- *Geometries, their margin and the combination of the score*: on ResNet-20 and ResNet-44 with eleven made shifts, and on six
  fully connected networks and two LeNets trained without some classes (about 400 combinations). SVHN was read on ResNet-20 and
  44 for a first form and on 32 and 56 after it. That earlier places count together was then chosen on ResNet-20 and 44 (SVHN,
  blends) and two fully connected networks without two classes (these, blends, the other data set), among some 300. How much
  the entropy counts was chosen on ResNet-44 with fourteen made shifts, on four fully connected networks without two classes, on the
  LeNets and on blends to ResNet-20, and lowered by a ninth after SVHN had been read on all four ResNets.
- *Where witnesses of sequences lie*: by the graphs of the LSTM, the transformer and the reader, after figures with the former
  places had been read; no place was chosen for its figures.
- *What predictions may lose (0.0005 nats)*: on the LeNets, the LSTM, a fully connected network and, for the last halving, the small
  ResNets, whose test rows lost two to four times what left-out rows did.
- *M and K of witnesses, the number of axes of `projected`*: by cost, on MNIST and Fashion-MNIST networks. At a witness that is a
  vector 300 or 360 points in place of 400 move AUROCs by −.004 to +.002 on networks without two classes; it has 360.
- *Target of τ, length scale, points, K, jitter, bridge*: on two fully connected networks, a LeNet and a small ResNet, each on
  MNIST and Fashion-MNIST, in Euclidean distances (the tables at the end).

The column *chosen on* below says it for each network: itself, one like it, its places alone, or none.
"""

BY_NETWORK = """\
The network's own figures stand in brackets. AUROCs of the entropy of the prediction and of its epistemic part (BALD) are
against the far set. *Flagged* is the share of test rows that the file calls strange, calibrated on training rows alone and
asked for .05.
"""

BY_SCORE = """\
AUROC of the score against each set, with the source's entropy and kNN on normalised last features (50 neighbours among the same
calibration rows) behind it. The best of the three is in bold.
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
    rows = read(RESULTS)
    mine = [row for row in rows if row["choice"] == DEFAULT]
    auroc = float(np.median([float(row[f"score_{name}"]) for row in mine for name in SETS]))
    strange = int(mine[0]["strange_rows"])
    parts = [
        INTRODUCTION.format(
            rows=mine[0]["rows"],
            strange=strange,
            middle=f"{auroc:.3f}",
            noise=f"{2 * standard_error(auroc, strange):.4f}",
            chosen=CHOSEN.strip(),
        ),
        f"## The default, network by network\n\n{BY_NETWORK}\n{probabilities(rows)}\n{within(rows)}{missing(rows)}\n",
        f"### The score\n\n{BY_SCORE}\n{scores(rows)}\n{behind(rows)}\n",
        f"### Places and geometries\n\n{PLACES}\n{places(mine)}",
        "## The choices one by one\n\n" + CHOICES,
        *(_section(section, rows) for section in SECTIONS),
        "## The Gaussian process alone\n\n" + ALONE,
        ablations(),
    ]
    return "\n".join(parts)


def read(path: Path) -> list[Row]:
    """Lines of choices.csv by network, each with the network's own loss beside it, as tables of losses want it.

    A network whose default or peers are not measured yet is left out.
    """
    with open(path, newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: NETWORKS.index(_network(row)))
    whole = [network for network, by in _by_choice(rows).items() if {DEFAULT, SOURCE, NEIGHBOURS} <= set(by)]
    rows = [row for row in rows if _network(row) in whole]
    own = {_network(row): row["nll"] for row in rows if row["choice"] == SOURCE}
    return [{**row, "series": "", "value": row["choice"], "map_nll": own[_network(row)]} for row in rows]


def _network(row: Row) -> tuple[str, str]:
    return row["network"], row["data"]


def _by_choice(rows: list[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """Networks, each with its lines by choice."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(_network(row), {})[row["choice"]] = row
    return found


# ---------------------------------------------------------------------- network by network


def probabilities(rows: list[Row]) -> str:
    """What becomes of the prediction."""
    lines = []
    for (network, data), by in _by_choice(rows).items():
        mine, own = by[DEFAULT], by[SOURCE]
        lines.append(
            (
                network,
                data,
                mine["calibration_rows"],
                mine["seen"],
                f"{float(own['acc']):.3f}",
                f"{excess(mine):+.4f} ({float(own['nll']):.3f})",
                f"{float(mine['ece']):.3f} ({float(own['ece']):.3f})",
                f"{float(mine['entropy_far']):.3f} ({float(own['entropy_far']):.3f})",
                f"{float(mine['bald_far']):.3f}",
                f"{float(mine['flagged']):.3f}",
                mine["argmax_changed"],
            )
        )
    head = (
        "network",
        "data",
        "calibration rows",
        "chosen on",
        "accuracy",
        "NLL − network's",
        "ECE",
        "entropy",
        "BALD",
    )
    return markdown((*head, "flagged", "argmax changed"), lines)


def excess(row: Row) -> float:
    """NLL above that of the network by itself."""
    return float(row["nll"]) - float(row["map_nll"])


def within(rows: list[Row]) -> str:
    """Whether the NLL stays below the line on every network."""
    found = sorted(((excess(row), row) for row in rows if row["choice"] == DEFAULT), key=lambda one: -one[0])
    over = [f"{_name(row)} ({value:+.4f})" for value, row in found if value > MOST_NLL]
    line = f"The NLL without labels is to be at most the network's own + {MOST_NLL}: "
    if over:
        return f"{line}not so on {', '.join(over)}."
    return f"{line}so on every network; the largest is {found[0][0]:+.4f} ({_name(found[0][1])})."


def missing(rows: list[Row]) -> str:
    """The networks that have no line yet."""
    left = [network for network in NETWORKS if network not in _by_choice(rows)]
    return f" Not measured yet: {', '.join(' on '.join(network) for network in left)}." if left else ""


def _name(row: Row) -> str:
    return f"{row['network']} on {row['data']}"


def scores(rows: list[Row]) -> str:
    lines = []
    for (network, data), by in _by_choice(rows).items():
        cells = []
        for name in SETS:
            found = [float(by[choice][f"score_{name}"]) for choice in (DEFAULT, SOURCE, NEIGHBOURS)]
            best = max(f"{value:.3f}" for value in found)
            cells.append(" / ".join(f"**{v:.3f}**" if f"{v:.3f}" == best else f"{v:.3f}" for v in found))
        lines.append((network, data, *cells))
    return markdown(("network", "data", *(f"{name}: ours / entropy / kNN" for name in SETS)), lines)


def behind(rows: list[Row]) -> str:
    """Where the score is behind a peer, by more than is noise."""
    found = []
    for by in _by_choice(rows).values():
        for name in SETS:
            peers = {c: float(by[c][f"score_{name}"]) for c in (SOURCE, NEIGHBOURS)}
            best = max(peers, key=lambda choice: peers[choice])
            loss = peers[best] - float(by[DEFAULT][f"score_{name}"])
            if loss > BEHIND:
                word = "entropy" if best == SOURCE else "kNN"
                found.append(f"{_name(by[DEFAULT])}, {name} ({loss:.3f} behind {word})")
    if not found:
        return f"Nowhere is the score behind either by more than {BEHIND}."
    return f"The score is behind the better of the two by more than {BEHIND} on: {'; '.join(found)}."


PLACES = """\
The last place is the site; the others are witnesses. Geometries are chosen by inputs that are made strange of the calibration rows.
"""


def places(mine: list[Row]) -> str:
    lines = []
    for row in mine:
        last, *others = [place.rsplit(" ", 1) for place in row["places"].split("; ")]
        witnesses = ", ".join(f"`{name}` {metric}" for name, metric in others) or "none"
        lines.append((row["network"], row["data"], f"`{last[0]}` {last[1]}", witnesses))
    return markdown(("network", "data", "site", "witnesses"), lines)


# --------------------------------------------------------------------------- one by one

CHOICES = """\
Means over the networks that have every value of a table; in brackets the largest loss on any one of them against the best value
of the table. Entropy and BALD are AUROCs against the far set. The default is in bold.
"""

ALONE = """\
What follows was measured at the last site, in Euclidean distances, without witnesses, on small networks for MNIST and
Fashion-MNIST: mlp (784-200-200-10, tanh, two seeds), deep (four hidden layers of 100), lenet and resnet. It was not measured
again in other geometries. The score is the mean variance of the logits, AUROCs are against the other data set, and
tables show some of the values that were measured; losses are against all of them.
"""

SECTIONS = (
    Section(
        "Witnesses",
        "",
        ("", DEFAULT),
        """
Earlier places beside the last one tell what it has forgotten, and raise the variance where they are beyond the ordinary.""",
        ("", "choice"),
        [("", DEFAULT), ("", "witnesses none")],
    ),
    Section(
        "Score",
        "",
        ("", DEFAULT),
        """
What all places and the entropy say together (the default), the mean variance of the logits in the same file, which witnesses
have raised (*its variance*), and what `--score variance` and `--score epistemic` give, without witnesses.""",
        ("", "choice"),
        [("", name) for name in (DEFAULT, "its variance", "score variance", "score epistemic")],
    ),
    Section(
        "Geometry of each place",
        "",
        ("", DEFAULT),
        """
Chosen by place, or one for all places. Of the deep ResNets the 20-layer one stands here.""",
        ("", "choice"),
        [("", name) for name in (DEFAULT, "euclidean", "direction", "polar", "projected")],
    ),
    Section(
        "The paper's reading",
        "",
        ("", DEFAULT),
        """
`--paper` with a bridge per class: length scale of the inputs, no τ, Euclidean distances, no witnesses, the mean variance as
the score.""",
        ("", "choice"),
        [("", DEFAULT), ("", "paper")],
    ),
)


def _section(section: Section, rows: list[Row]) -> str:
    found = common(rows, [value for _, value in section.shown])
    if not found:
        return f"### {section.title}\n\nNot measured yet.\n"
    count = len({_network(row) for row in found})
    return (
        f"### {section.title}\n\n{section.text.strip()}\n\n{table(section, found, QUANTITIES)}\n"
        f"{verdict(section, found, QUANTITIES)} Networks: {count}.\n"
    )


def common(rows: list[Row], values: list[str]) -> list[Row]:
    """Lines of these values, of the networks that have all of them."""
    chosen = {network: by for network, by in _by_choice(rows).items() if set(values) <= set(by)}
    return [by[value] for by in chosen.values() for value in values]


if __name__ == "__main__":
    main()
