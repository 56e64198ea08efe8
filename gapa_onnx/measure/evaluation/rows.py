"""What is kept of each row while data stream through, and what all tasks make of it.

A task turns a batch of answers into *columns*, arrays with one entry per row; all numbers of an evaluation
follow from them, so that memory is bounded by rows times a few numbers, and no number depends on how the
rows were batched. Columns whose name starts with `score/` order rows from usual to strange. Where a row has
any number of things (the boxes of an image), its entry is an array with one number for each of them: a *ragged* column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.answers import Answered
from gapa_onnx.measure.evaluation.metrics import detection
from gapa_onnx.measure.evaluation.result import Intervals, ReliabilityBin

SCORE = "score/"
FLAGGED = "flagged"  #: share of a row's places beyond the file's own threshold
FLAGGED_BOXES = "flagged boxes"  #: the same for each box of a detector; ragged
VALID = "valid"  #: no answer of the row is NaN
_HEAD_SCORES = ("entropy", "epistemic", "score")

Columns = dict[str, Array]


@dataclass(frozen=True)
class Findings:
    """What a task makes of the columns of labelled rows."""

    metrics: Mapping[str, Mapping[str, float]]
    losses: Array  #: (n,) what risk-coverage averages; NaN where a row has no label
    ordering: tuple[str, ...] | None = None  #: scores with one number for each loss; None: all
    risk: str = "error rate"
    reliability: Mapping[str, tuple[ReliabilityBin, ...]] = field(default_factory=dict)
    error_detection: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    intervals: Intervals | None = None
    notes: tuple[str, ...] = ()


def place_scores(answered: Answered, found: Mapping[str, Array]) -> Columns:
    """The head's own scores at each place of each row: (n, places)."""
    return {
        role: found[role].astype(np.float64).reshape(len(found[role]), -1)
        for role in _HEAD_SCORES
        if role in answered.outputs
    }


def score_columns(scores: Mapping[str, Array]) -> Columns:
    """The mean over each row's places of every score."""
    return {SCORE + name: values.mean(axis=1) for name, values in scores.items()}


def flag_column(found: Mapping[str, Array]) -> Columns:
    return {FLAGGED: found["ood"].reshape(len(found["ood"]), -1).mean(axis=1)} if "ood" in found else {}


def concatenate(batches: Iterable[Columns]) -> Columns:
    pieces = list(batches)
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def select(columns: Columns, rows: Array) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


def ragged(entries: Iterable[Array]) -> Array:
    """A column whose entries are arrays of different lengths."""
    listed = list(entries)
    column = np.empty(len(listed), object)
    for row, entry in enumerate(listed):  # all at once numpy would make a matrix of arrays of one length
        column[row] = entry
    return column


def flat(column: Array) -> Array:
    """What all rows hold, one after the other; a plain column as it is."""
    return np.concatenate(column) if column.dtype == object else column


def scores_in(columns: Columns) -> Columns:
    """Score by its plain name: (n,) each, or a number for each thing in the rows where the column is ragged."""
    return {name.removeprefix(SCORE): flat(v) for name, v in columns.items() if name.startswith(SCORE)}


def detect_errors(
    scores: Mapping[str, Array], wrong: Mapping[str, Array], what: str
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """How well each score tells wrong predictions from right ones, and a note where it cannot be said.

    `wrong` has the errors of "source" and "gapa": a score named source_… is held against the source's.
    """
    found, notes = {}, []
    for name, values in scores.items():
        errors = wrong["source" if name.startswith("source_") else "gapa"]
        if errors.all() or not errors.any():
            notes = [
                f"every {what} is {'wrong' if errors.all() else 'right'}: telling them apart is undefined"
            ]
            continue
        found[name] = detection(values[~errors], values[errors])
    return found, notes
