"""What the rows of the tables are made from: the dump, the head of the model, and what is read of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from language.dump import Dump
from language.judging import Figure, auroc, separation
from language.method import Fitted, Head, calibration_rows, head_weights
from language.texts import CALIBRATION, HELDOUT, OTHERS, WEB

SIDES = (HELDOUT, WEB, *OTHERS)
COLUMNS = tuple(f"{side}{what}" for side in SIDES[1:] for what in ("", "_error"))
PRIOR_ROWS = 20_000  # calibration tokens that c² is from


@dataclass(frozen=True)
class Task:
    """A model and what was kept of it."""

    model: Path
    dump: Dump
    every: int = 1  #: sweeps read one position in so many
    quick: bool = False

    @property
    def last(self) -> int:
        """The place that the head reads."""
        return self.dump.places - 1

    @property
    def sides(self) -> list[str]:
        """Sets that strange text may be from, as far as they are wanted and were made."""
        return [name for name in SIDES[1:] if name in self.dump.sets and self.dump.done(name)]

    @functools.cached_property
    def weights(self) -> np.ndarray:
        return head_weights(self.model)

    @functools.cached_property
    def head(self) -> Head:
        rows = calibration_rows(self.dump, self.last, PRIOR_ROWS)
        leading = self.dump.array(CALIBRATION, "top_ids").shape[-1]
        return Head(self.weights, rows.var(axis=0, dtype=np.float64), leading)

    def documents(self, of: str) -> np.ndarray:
        return np.asarray(self.dump.array(of, "documents"))

    def hidden(self, of: str, place: int, every: int = 1) -> np.ndarray:
        """(n, t, d) float16 of one position in so many, none of them the first: it looks like no other."""
        start = every - 1
        return np.asarray(self.dump.hidden(of, place)[:, start::every])

    def said(self, of: str, name: str, every: int = 1) -> np.ndarray:
        """An array of the source's answers, the same positions."""
        return np.asarray(self.dump.array(of, name)[:, every - 1 :: every])

    def split(self, fitted: Fitted, of: str, every: int = 1) -> dict[str, np.ndarray]:
        """Scores of tokens (n, t) by a place: the share, and what follows for the head."""
        shares = fitted.shares(self.hidden(of, fitted.choice.place, every))
        logp, ids = (self.said(of, name, every) for name in ("top_logp", "top_ids"))
        flat = [array.reshape(-1, array.shape[-1]) for array in (logp, ids)]
        found = self.head.by_shares(*flat, fitted.amplitude(shares).ravel())
        return {"share": shares, **{name: array.reshape(shares.shape) for name, array in found.items()}}

    def told_apart(self, scores: dict[str, np.ndarray]) -> dict[str, Any]:
        """AUROC of sequence scores (n,) of each set against the held-out ones, with standard errors; empty for a set
        without scores."""
        figures: dict[str, Any] = dict.fromkeys(COLUMNS, "")
        for side in scores.keys() - {HELDOUT}:
            both = [scores[of] for of in (HELDOUT, side)]  # of the first sequences, where not all were read
            documents = [self.documents(of)[: len(one)] for of, one in zip((HELDOUT, side), both)]
            found = separation(*both, *documents)
            figures |= {side: _rounded(found.value), f"{side}_error": _rounded(found.error)}
        return figures


def sequence_scores(tokens: np.ndarray, how: str) -> np.ndarray:
    """One number for each sequence of token scores (n, t)."""
    found: np.ndarray = {"mean": np.nanmean, "median": np.nanmedian}[how](tokens.astype(np.float64), axis=1)
    return found


def best_temperature(task: Task, side: str) -> tuple[int, float]:
    """The temperature, by its place in the list, whose mean entropy tells a set from the held-out one best, and how well."""
    known, strange = (task.dump.array(of, "tempered").mean(axis=1) for of in (HELDOUT, side))
    found = [auroc(known[:, at], strange[:, at]) for at in range(known.shape[1])]
    return int(np.argmax(found)), float(max(found))


def figure_columns(name: str, figure: Figure) -> dict[str, Any]:
    return {name: _rounded(figure.value), f"{name}_error": _rounded(figure.error)}


def _rounded(value: float) -> float | str:
    return round(float(value), 4) if np.isfinite(value) else ""
