"""The rows of the tables: sweeps of the method, its peers, wrong tokens, and the tool as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from lines import Lines, machine, say

from language import tool
from language.dump import TEMPERATURES
from language.judging import rejection
from language.method import Choice, Fitted, calibration_rows, fit
from language.peers import Mahalanobis, Nearest, laplace, laplace_epistemic
from language.task import Task, best_temperature, figure_columns, sequence_scores
from language.texts import HELDOUT, WEB

KEY = ("row", "place", "metric", "inducing", "m", "k", "quantity")
TOKEN_KEY = ("row", "text")
MEANS = (
    "epistemic",
    "entropy",
    "score",
)  #: of a share's consequences, averaged over a sequence as in the paper
BESIDE = {"place": "", "metric": "", "inducing": "", "m": "", "k": ""}
MIDDLE = 2 / 3  #: of the way through the blocks: where the tool's last witness is
#: calibration tokens that k-means sees: of up to 1000 points, and of more
SWEEP_ROWS, LARGE_ROWS = 20_000, 40_000
PEER_ROWS = 20_000

Tokens = Callable[[str], np.ndarray]
"""The scores (n, t) of the tokens of a set."""


# ----------------------------------------------------------------------------- the method


def middle(task: Task) -> int:
    return round(MIDDLE * (task.last - 1))


def choices(task: Task) -> Iterator[tuple[str, Choice]]:
    """What is tried, by the table that it belongs to."""
    rows = 400 if task.quick else 200_000
    sizes = (20, 50) if task.quick else (100, 1000, 10_000, 100_000)
    neighbours = (1, 5) if task.quick else (1, 10, 50)
    few, most = (50, 5) if task.quick else (1000, 50)
    made = [
        Choice(place, "euclidean", inducing, m, k, _seen(inducing, m, rows))
        for place, inducing, m, k in itertools.product(
            (task.last, middle(task)), ("random", "kmeans"), sizes, neighbours
        )
        if m <= 10_000 or place == task.last and inducing == "random" and k == most
    ]
    for choice in sorted(made, key=lambda one: one.m * (one.inducing == "kmeans")):  # what takes longest last
        yield "points", choice
    for metric in ("euclidean", "whitened-direction"):
        for place in range(task.last + 1):
            yield "layers", Choice(place, metric, "random", few, most, min(rows, SWEEP_ROWS))


def _seen(inducing: str, m: int, rows: int) -> int:
    """How many calibration tokens points are chosen from: k-means of all of them takes hours."""
    return rows if inducing == "random" else min(rows, LARGE_ROWS if m >= 10_000 else SWEEP_ROWS)


def sweep(task: Task, lines: Lines, table: str) -> None:
    """The lines of one of the two tables that are not there yet."""
    points: dict[Choice, np.ndarray] = {}
    for name, choice in choices(task):
        row = {"row": name, **_named(choice)}
        if name != table or lines.has(*row.values(), "share median"):
            continue
        same = replace(choice, k=0)
        fitted = fit(task.dump, choice, points.get(same))
        points = {same: fitted.points}
        for quantity, scores in _scores(task, fitted).items():
            _line(lines, name, _named(choice), quantity, task.told_apart(scores), rows=choice.rows)


def _line(
    lines: Lines, row: str, choice: dict[str, Any], quantity: str, figures: dict[str, Any], **more: Any
) -> None:
    """One line, with the columns that all have."""
    beside = {name: more.get(name, "") for name in ("rows", "chosen", "flagged")}
    lines.add({"row": row, **choice, "quantity": quantity, **figures, **beside, **machine()})


def _named(choice: Choice) -> dict[str, Any]:
    return {name: value for name, value in asdict(choice).items() if name != "rows"}


def _scores(task: Task, fitted: Fitted) -> dict[str, dict[str, np.ndarray]]:
    """Sequence scores (n,) by quantity and set."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for of in (HELDOUT, *task.sides):
        tokens = task.split(fitted, of, task.every)
        for name in MEANS:
            found.setdefault(name, {})[of] = sequence_scores(tokens[name], "mean")
        found.setdefault("share median", {})[of] = sequence_scores(tokens["share"], "median")
    return found


# --------------------------------------------------------------------------------- peers


def peers(task: Task, lines: Lines) -> None:
    """The lines of others that are not there yet."""
    for name, tokens in _peers(task).items():
        if not lines.has(name, *BESIDE.values(), "mean"):
            say(name)
            made = tokens()
            scores = {of: sequence_scores(made(of), "mean") for of in (HELDOUT, *task.sides)}
            _line(lines, name, BESIDE, "mean", task.told_apart(scores))
    name = "best temperature (oracle)"
    if WEB in task.sides and not lines.has(name, *BESIDE.values(), "mean"):
        at, _ = best_temperature(task, WEB)
        scores = {of: task.dump.array(of, "tempered")[..., at].mean(axis=1) for of in (HELDOUT, WEB)}
        _line(lines, name, BESIDE, "mean", task.told_apart(scores), chosen=TEMPERATURES[at])


def _peers(task: Task) -> dict[str, Callable[[], Tokens]]:
    """Functions that fit a peer, and give its scores."""
    vectors = {"last": task.last, "middle": middle(task)}
    found: dict[str, Callable[[], Tokens]] = {
        "source entropy": lambda: lambda of: task.said(of, "entropy"),
        "source NLL": lambda: lambda of: task.said(of, "nll"),
        "source perplexity": lambda: lambda of: -task.said(of, "top_logp")[..., 0],
        "last-layer Laplace": lambda: _laplace(task),
    }
    for where, place in vectors.items():
        found[f"Mahalanobis, {where}"] = lambda place=place: _of_vectors(task, Mahalanobis, place)
        found[f"kNN, {where}"] = lambda place=place: _of_vectors(task, Nearest, place)
    return found


def _laplace(task: Task) -> Tokens:
    fitted = laplace(task.dump, task.weights)

    def tokens(of: str) -> np.ndarray:
        logp, ids = (task.said(of, name, task.every) for name in ("top_logp", "top_ids"))
        flat = [x.reshape(-1, x.shape[-1]) for x in (task.hidden(of, task.last, task.every), logp, ids)]
        return laplace_epistemic(fitted, task.head, *flat).reshape(logp.shape[:2])

    return tokens


def _of_vectors(task: Task, made: Callable[[np.ndarray], Any], place: int) -> Tokens:
    fitted = made(calibration_rows(task.dump, place, PEER_ROWS))

    def tokens(of: str) -> np.ndarray:
        hidden = task.hidden(of, place)
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(np.float32)
        return np.asarray(fitted(flat)).reshape(hidden.shape[:2])

    return tokens


# --------------------------------------------------------------------------- wrong tokens


def wrong_tokens(task: Task, lines: Lines) -> None:
    """How well scores tell which next tokens the source gets wrong, in held-out text and in other text."""
    default = Choice(task.last, m=50, k=5, rows=400) if task.quick else Choice(task.last, rows=SWEEP_ROWS)
    texts = _texts(task)
    makers: dict[str, Callable[[], dict[str, Tokens]]] = {
        name: lambda name=name, made=made: {name: made()}
        for name, made in _peers(task).items()
        if "NLL" not in name
    }
    makers["method"] = lambda: _of_method(task, default)
    for made in makers.values():
        if all(lines.has(name, of) for name in _names(makers, made) for of in texts):
            continue
        for name, tokens in made().items():
            for of in texts:
                _wrong_line(task, lines, name, of, tokens)


def _texts(task: Task) -> list[str]:
    return [HELDOUT, *(of for of in (WEB,) if of in task.sides)]


def _names(makers: dict[str, Any], made: Any) -> list[str]:
    name = next(name for name, one in makers.items() if one is made)
    return [f"method, {quantity}" for quantity in MEANS] if name == "method" else [name]


def _of_method(task: Task, choice: Choice) -> dict[str, Tokens]:
    fitted = fit(task.dump, choice)
    kept: dict[str, dict[str, np.ndarray]] = {}

    def tokens(of: str, quantity: str) -> np.ndarray:
        if of not in kept:
            kept[of] = task.split(fitted, of, task.every)
        return kept[of][quantity]

    return {f"method, {one}": lambda of, one=one: tokens(of, one) for one in MEANS}


def _wrong_line(task: Task, lines: Lines, name: str, of: str, tokens: Tokens) -> None:
    """One line; a score of some positions is judged on these."""
    if lines.has(name, of):
        return
    scores = tokens(of)
    every = task.every if scores.shape[1] < task.said(of, "right").shape[1] else 1
    known = np.isfinite(task.said(of, "nll", every))[: len(scores)]  # what comes next is known
    right = task.said(of, "right", every)[: len(scores)][known]
    documents = np.broadcast_to(task.documents(of)[: len(scores), None], known.shape)[known]
    found = rejection(scores[known], ~right, documents)
    columns = figure_columns("auroc", found[0]) | figure_columns("prr", found[1])
    lines.add(
        {"row": name, "text": of, "tokens": len(right), "wrong": round(float(1 - right.mean()), 4), **columns}
    )


# ---------------------------------------------------------------------------------- the tool


def of_tool(task: Task, lines: Lines, token_lines: Lines) -> None:
    """The figures of what the converted file puts out, and how many sequences it flags."""
    sets = [HELDOUT, *(of for of in task.sides if tool.said(task.dump, of, "score") is not None)]
    for role in (*tool.TOKENS, *tool.SEQUENCES):
        found = {of: tool.said(task.dump, of, role) for of in sets}
        if any(answers is None for answers in found.values()):
            continue
        answers = {of: -array if role.endswith("pvalue") else array for of, array in found.items()}
        if answers[HELDOUT].ndim == 2:
            for how in ("mean", "median"):
                scores = {of: sequence_scores(array, how) for of, array in answers.items()}
                _line(lines, "tool", BESIDE, f"{role} {how}", task.told_apart(scores), rows=_read(scores))
            for of in set(_texts(task)) & set(sets):
                _wrong_line(task, token_lines, f"tool, {role}", of, answers.__getitem__)
        else:
            scores = {of: array.astype(np.float64).reshape(len(array)) for of, array in answers.items()}
            flagged = {of: round(float(array.mean()), 4) for of, array in scores.items()}
            told = " ".join(f"{of}:{share}" for of, share in flagged.items()) if role.endswith("ood") else ""
            _line(lines, "tool", BESIDE, role, task.told_apart(scores), flagged=told, rows=_read(scores))


def _read(scores: dict[str, np.ndarray]) -> str:
    """How many sequences of each set went through the converted file."""
    return " ".join(f"{of}:{len(one)}" for of, one in scores.items())
