"""The section of RESULTS.md about language models."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from lines import say
from tables import Row, table

RESULTS = Path(__file__).resolve().parents[1] / "results"
FIGURES = {"points": "language_points.png", "layers": "language_layers.png"}
SETS = {"web": "OpenWebText", "shuffled": "shuffled tokens", "readme": "READMEs", "code": "Python"}
TEMPERATURE = "best temperature (oracle)"
TOOL, DEFAULT = "tool", "seq_score"
MEMORY = {
    "peak_gb": "memory at most",
    "own_gb": "own memory",
    "forward_own_gb": "own memory of the source alone",
}
LARGER = {"3B": 3.2e9, "8B": 8.0e9}
MARGIN, FLAGGED = 0.03, (0.03, 0.07)  # that were aimed at
TOOL_ROWS = {
    "seq_score": "**tool, score of the sequence**",
    "score mean": "tool, mean score of its tokens",
    "score median": "tool, median score of its tokens",
    "epistemic mean": "tool, mean epistemic part",
    "epistemic median": "tool, median epistemic part",
    "entropy mean": "tool, mean entropy",
    "entropy median": "tool, median entropy",
}
CONTROL = 0.02  # from 1: beyond it a ratio says little
TARGETS = {
    ("prefill", "cached"): 1.05,
    ("prefill", "gqa"): 1.05,
    ("prefill", "plain"): 1.05,
    ("prefill", "int4"): 1.10,
}
TARGETS |= {("step", form): limit for (_, form), limit in list(TARGETS.items())}
TARGETS |= {("load", form): 1.5 for form in ("cached", "gqa", "plain", "int4")}


def section(rows: list[Row]) -> str:
    parts = [
        "SmolLM2-135M-Instruct (weights of 4 bits, unfolded into float32), WikiText-103 against OpenWebText, as the paper does "
        "it with LLaMA-3.2-3B. Fitted on 2,084 sequences of 96 tokens of WikiText's training articles, 200,064 tokens. "
        "Figures are AUROCs of sequences: 640 of held-out articles against 640 of OpenWebText, or 160 of another set. Each "
        "is the mean over five draws of 512 sequences from each side, which overlap, ± its standard error by bootstrap over "
        "documents. Other sets are held-out sequences whose tokens were shuffled, what Python packages say about themselves, "
        "and Python source. **The form of the tool's score was decided on these, on others like them, and on WikiText**. OpenWebText had "
        "been read for a form before it, with two places along the blocks instead of one, and had no part in the choice of this one.\n",
        "### Beside others\n",
        "Means over the tokens of a sequence, but for the tool's own score of a sequence. *Oracle*: the temperature that "
        "tells these very sequences apart best.\n",
        beside(rows),
        aims(rows),
    ]
    parts += ["### Against the number of points, K, and how points are chosen\n", *_figure("points", rows)]
    parts += [
        "Epistemic part of the entropy, mean over tokens, against OpenWebText. The place is the input of the head, or the "
        "block two thirds of the way; a share at a block acts on the head's input directly, where the tool's own sites "
        "pass variance through the blocks. Sweeps read one token in three. k-means of 10,000 points sees 40,000 tokens, of "
        "fewer points 20,000; random points are from all. What is empty is not measured.\n",
        by_points(rows),
    ]
    parts += ["### Against the block\n", *_figure("layers", rows), by_layer(rows)]
    parts += _section("language_tokens.csv", "Is the next token wrong?", tokens)
    parts += _section("language_cost.csv", "What a converted decoder costs", cost)
    parts += _section("language_conversion.csv", "What a conversion takes", conversion)
    return "\n".join([*parts, origin(rows)])


def _section(file: str, title: str, made: object) -> list[str]:
    path = RESULTS / file
    if not path.exists():
        return []
    with open(path, newline="") as held:
        return [f"### {title}\n", made(list(csv.DictReader(held)))]  # type: ignore[operator]


def figure(row: Row, column: str) -> str:
    """A figure and its standard error."""
    if not row.get(column):
        return ""
    error = row.get(f"{column}_error")
    return f"{float(row[column]):.3f}" + (f" ± {float(error):.3f}" if error else "")


# -------------------------------------------------------------------------------- peers


def of_tool(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["quantity"]: row for row in rows if row["row"] == TOOL}


def beside(rows: Sequence[Row]) -> str:
    named = {row["row"]: row for row in rows if row["quantity"] == "mean" and row["row"] != TOOL}
    ours = {TOOL_ROWS[name]: row for name, row in of_tool(rows).items() if name in TOOL_ROWS}
    ordered = [(TOOL_ROWS[name], ours[TOOL_ROWS[name]]) for name in TOOL_ROWS if TOOL_ROWS[name] in ours]
    lines = [
        [_called(name, row), *(figure(row, side) for side in SETS)]
        for name, row in [*named.items(), *ordered]
    ]
    return table(["", *SETS.values()], lines)


def _called(name: str, row: Row) -> str:
    return f"{name}: {row['chosen']}" if row.get("chosen") else name


def aims(rows: Sequence[Row]) -> str:
    """What was aimed at, and what was found."""
    ours, oracle = of_tool(rows).get(DEFAULT), next((row for row in rows if row["row"] == TEMPERATURE), None)
    if ours is None or oracle is None:
        return "The tool's own score of a sequence is not measured yet.\n"
    found = float(ours["web"])
    peers = {row["row"]: float(row["web"]) for row in rows if row["quantity"] == "mean" and row["web"]}
    peers = {name: value for name, value in peers.items() if name != TOOL}
    best = max(peers, key=lambda name: peers[name])
    gap, above = found - float(oracle["web"]), found - peers[best]
    lines = [
        [
            f"score of a sequence at least {MARGIN} above the oracle's temperature",
            f"{gap:+.3f}",
            _met(gap >= MARGIN),
        ],
        ["above every peer", f"{above:+.3f} to {best}", _met(above > 0)],
    ]
    flags = of_tool(rows).get("seq_ood")
    if flags is not None and flags["flagged"]:
        shares = dict(part.split(":") for part in flags["flagged"].split())
        share = float(shares["heldout"])
        others = ", ".join(f"{SETS[name]} {float(one):.3f}" for name, one in shares.items() if name in SETS)
        lines.append(
            [
                f"share of held-out sequences flagged between {FLAGGED[0]} and {FLAGGED[1]}",
                f"{share:.3f} ({others})",
                _met(FLAGGED[0] <= share <= FLAGGED[1]),
            ]
        )
    read = ", ".join(
        f"{_set(name)} {count}" for name, count in (one.split(":") for one in ours["rows"].split())
    )
    return f"Sequences that went through the converted file: {read}.\n\n" + table(["aim", "found", ""], lines)


def _set(name: str) -> str:
    return SETS.get(name, "held-out WikiText")


def _met(yes: bool) -> str:
    return "met" if yes else "**not met**"


# ------------------------------------------------------------------------------- sweeps


def by_points(rows: Sequence[Row], quantity: str = "epistemic") -> str:
    chosen = [row for row in rows if row["row"] == "points" and row["quantity"] == quantity]
    sizes = sorted({int(row["m"]) for row in chosen})
    groups = dict.fromkeys((row["place"], row["inducing"], row["k"]) for row in chosen)
    lines = []
    for place, inducing, k in sorted(groups, key=lambda key: (-int(key[0]), key[1], int(key[2]))):
        at = {int(r["m"]): r for r in chosen if (r["place"], r["inducing"], r["k"]) == (place, inducing, k)}
        cells = [figure(at[m], "web") if m in at else "" for m in sizes]
        lines.append([f"{_place(rows, place)}, {inducing}, K = {k}", *cells])
    return table(["", *(f"M = {m:,}" for m in sizes)], lines)


def _place(rows: Sequence[Row], place: str) -> str:
    last = max(int(row["place"]) for row in rows if row["place"])
    return "head's input" if int(place) == last else "embeddings" if int(place) == 0 else f"block {place}"


def by_layer(rows: Sequence[Row]) -> str:
    chosen = [row for row in rows if row["row"] == "layers"]
    if not chosen:
        return "Not measured yet.\n"
    metrics = list(dict.fromkeys(row["metric"] for row in chosen))
    quantities = ("epistemic", "share median")
    lines = []
    for place in sorted({int(row["place"]) for row in chosen}):
        cells = [
            figure(row, "web")
            for metric in metrics
            for quantity in quantities
            for row in chosen
            if (int(row["place"]), row["metric"], row["quantity"]) == (place, metric, quantity)
        ]
        lines.append([_place(rows, str(place)), *cells])
    header = ["", *(f"{metric}, {quantity}" for metric in metrics for quantity in quantities)]
    m, k = chosen[0]["m"], chosen[0]["k"]
    said = f"{m} random points, K = {k}: mean epistemic part, and median share, by the geometry that vectors are compared in.\n\n"
    return said + table(header, lines)


def _figure(name: str, rows: Sequence[Row]) -> list[str]:
    path = RESULTS / FIGURES[name]
    try:
        from language import drawing
    except ImportError:
        say("no matplotlib: the figures stay as they are")
        return [f"![{name}](results/{path.name})\n"] if path.exists() else []
    drawn = {"points": drawing.points, "layers": drawing.layers}[name](rows, path)
    return [f"![{name}](results/{path.name})\n"] if drawn else []


# ------------------------------------------------------------------------ tokens, costs


def tokens(rows: Sequence[Row]) -> str:
    texts = {"heldout": "held-out WikiText", "web": "OpenWebText"}
    shares = {row["text"]: float(row["wrong"]) for row in rows}
    header = ["", *(f"{what}, {texts[text]}" for text in shares for what in ("AUROC", "PRR"))]
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        by_text = {row["text"]: row for row in rows if row["row"] == name}
        cells = [figure(by_text.get(text, {}), column) for text in shares for column in ("auroc", "prr")]
        lines.append([name, *cells])
    wrong = ", ".join(f"{share:.1%} of {texts[text]}" for text, share in shares.items())
    return (
        f"The most probable next token is not the one that came: {wrong}. AUROC of scores of tokens for telling which, and PRR: how "
        "much of what an oracle gains by rejecting tokens a score gains (0 is chance). *method*: 1000 points at the head's input, "
        "K = 50. What is strange is not what is wrong, so entropy and perplexity are the scores to beat.\n\n"
        + table(header, lines)
    )


def cost(rows: Sequence[Row]) -> str:
    named = {
        "prefill": "96 tokens",
        "step": "one token after 96",
        "load": "session load",
        "most": "memory of it",
        "stays": "of which stays",
    }
    lines = []
    for row in sorted(rows, key=lambda row: (row["form"], list(named).index(row["what"]))):
        if row["what"] in ("most", "stays"):
            gap = float(row["file"]) - float(row["source"])
            found = [f"{float(row['source']):.0f} MB", f"{float(row['file']):.0f} MB", f"{gap:+.0f} MB", ""]
            limit, met = ("+100 MB", gap <= 100) if row["what"] == "stays" else ("", True)
        else:
            factor = 1000 if row["what"] != "load" else 1000
            found = [f"{factor * float(row['source']):.1f} ms", f"{factor * float(row['file']):.1f} ms"]
            found += [f"{float(row['ratio']):.3f} ({float(row['low']):.3f} to {float(row['high']):.3f})"]
            found += [f"{float(row['control']):.3f}"]
            target = TARGETS.get((row["what"], row["form"]))
            limit, met = (f"≤ {target}", float(row["high"]) <= target) if target else ("", True)
            if abs(float(row["control"]) - 1) > CONTROL:
                limit, met = f"{limit}, not established: the control is off", True
        cells = [row["form"], named[row["what"]], row["rounds"], *found]
        lines.append([*cells, f"{limit}{'' if met else ' **not met**'}"])
    threads = ", ".join(sorted({row["threads"] for row in rows}))
    return (
        f"CPU time, native, default settings, {threads} thread. Source, source again (the control) and converted file take turns at each "
        f"run of a process, whose medians make a round; each is opened in a process of its own "
        "(`benchmarks/paper/language/cost.py`).\n\n"
        + table(["", "", "rounds", "source", "converted", "ratio (95%)", "control", "aim"], lines)
    )


def conversion(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["form"],
            f"{float(row['parameters']) / 1e6:.0f} M",
            f"{int(row['tokens']):,}",
            *(f"{float(row[what]):.2f} GB" if row[what] else "" for what in MEMORY),
            f"{float(row['seconds']):.0f} s",
            f"{float(row['cpu']):.0f} s",
            f"{float(row['forward_cpu']):.0f} s",
            ""
            if row["form"].startswith("random")
            else f"{float(row['cpu']) / float(row['forward_cpu']):.2f}",
        ]
        for row in rows
    ]
    header = [
        "",
        "parameters",
        "tokens",
        *MEMORY.values(),
        "time",
        "CPU",
        "CPU of the forward passes",
        "ratio",
    ]
    return (
        "`benchmarks/paper/language/conversion.py`; decoders with random weights by `slope.py`. The forward passes are those of the whole "
        "source over the same tokens. *Own memory* is no file's: what is mapped from the weights' files the system takes back when "
        "others need it. The source alone has some of its own because onnxruntime packs the matrices of a session, which copies "
        "them, and a conversion opens one session at a time.\n\n" + table(header, lines) + _larger(rows)
    )


def _larger(rows: Sequence[Row]) -> str:
    """What larger models would take, by lines through those with random weights."""
    made = [row for row in rows if row["form"].startswith("random")]
    if len(made) < 2:
        return ""
    counts = [float(row["parameters"]) for row in made]
    told = []
    for name, count in LARGER.items():
        by_line = {
            what: float(np.polyval(np.polyfit(counts, [float(row[what]) for row in made], 1), count))
            for what in (*MEMORY, "cpu", "forward_cpu")
        }
        apart = by_line["cpu"] - by_line["forward_cpu"]
        told.append(
            f"{name}: {by_line['own_gb']:.1f} GB of its own, where the source alone takes {by_line['forward_own_gb']:.1f} GB "
            f"({by_line['peak_gb']:.1f} GB with what is mapped), and {apart:.0f} CPU seconds beside the forward passes"
        )
    return "\nBy a line through those with random weights, " + "; ".join(told) + ".\n"


def origin(rows: Sequence[Row]) -> str:
    said = [
        f"{column.replace('_', '-')} {', '.join(sorted({row[column] for row in rows}))}"
        for column in ("gapa_onnx", "onnxruntime", "processor", "cores")
    ]
    return "; ".join(said) + ".\n"
