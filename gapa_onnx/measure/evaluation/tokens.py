"""The next token at each position: log loss and perplexity, and scores averaged over each sequence.

A file keeps the probabilities of the k tokens with the highest logits. The k share the mass that the source
gives to them, and every other token keeps the source's own probability: a distribution over the whole
vocabulary, so that a target outside the k counts with what the source says about it.
The label at position t is the token that should follow there; negative labels do not count.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation.answers import MEAN, Answered
from gapa_onnx.measure.evaluation.dense import (
    SIDES,
    Places,
    detect_place_errors,
    reduce_row,
    sample_row,
    stacked,
    sum_up,
)
from gapa_onnx.measure.evaluation.labels import class_labels
from gapa_onnx.measure.evaluation.metrics import SMALLEST_PROBABILITY, entropy_rows
from gapa_onnx.measure.evaluation.rows import (
    VALID,
    Columns,
    Findings,
    flag_column,
    place_scores,
    score_columns,
)


def token_columns(
    answered: Answered, found: Mapping[str, Array], labels: Array | None, start: int, rows: int
) -> Columns:
    """Sums per sequence, for `rows` sequences in all."""
    means = answered.classes_last(found[MEAN])  # (n, t, vocabulary)
    top = found["probs"].shape[-1]
    probs, tokens = (found[role].reshape(len(means), -1, top) for role in ("probs", "tokens"))  # (n, t, k)
    places = answered.places(found[MEAN])
    if labels is not None and labels.ndim == 2 and (labels[:, means.shape[1] :] < 0).all():
        labels = labels[:, : means.shape[1]]  # sequences of several lengths, filled up to the longest
    target = None if labels is None else class_labels(labels, places, means.shape[-1], start)
    own = place_scores(answered, found)
    columns = []
    for row in range(len(means)):
        source = answered.source_probs(means[row])  # (t, vocabulary)
        mass = np.take_along_axis(source, tokens[row], axis=1).sum(axis=1)  # (t,)
        shares = probs[row].astype(np.float64)
        shares = shares / shares.sum(axis=1, keepdims=True) * mass[:, None]  # (t, k)
        scores = {name: values[row] for name, values in own.items()} | {
            "maxprob": 1 - shares.max(axis=1),
            "source_entropy": entropy_rows(source),
            "source_maxprob": 1 - source.max(axis=1),
        }
        line = {name: v[0] for name, v in score_columns({n: s[None] for n, s in scores.items()}).items()}
        line[VALID] = np.bool_(all(map(np.isfinite, line.values())))
        if target is not None:
            line |= _labelled(source, shares, tokens[row], scores, target[row], start + row, rows)
        columns.append(line)
    return {**stacked(columns), **flag_column(found)}


def _labelled(
    source: Array,
    shares: Array,
    tokens: Array,
    scores: Mapping[str, Array],
    target: Array,
    row: int,
    rows: int,
) -> Columns:
    counted = target >= 0
    true = target[counted]
    source, shares, tokens = np.nan_to_num(source)[counted], np.nan_to_num(shares)[counted], tokens[counted]
    inside = tokens == true[:, None]  # (t, k)
    own = np.take_along_axis(source, true[:, None], axis=1)[:, 0]
    ours = np.where(inside.any(axis=1), (shares * inside).sum(axis=1), own)
    best = np.take_along_axis(tokens, shares.argmax(axis=1)[:, None], axis=1)[:, 0]
    judged = {
        "source": Places(source.argmax(axis=1), source.max(axis=1), _surprise(own)),
        "gapa": Places(best, shares.max(axis=1), _surprise(ours)),
    }
    wrong = {side: judged[side].predicted != true for side in SIDES}
    return {
        **reduce_row(judged, true),
        "inside": np.float64(inside.any(axis=1).sum()),
        "top": np.int64(tokens.shape[1]),
        **sample_row({name: values[counted] for name, values in scores.items()}, wrong, row, rows),
    }


def _surprise(probs: Array) -> Array:
    return -np.log(np.maximum(probs, SMALLEST_PROBABILITY))


def token_findings(columns: Columns) -> Findings:
    """Perplexity is exp of the mean log loss over all labelled tokens."""
    if not columns["places"].sum():
        raise UserError("every label is negative, that is, to be ignored", "label some of the tokens")
    metrics, bins, rate = sum_up(columns)
    for side in SIDES:
        metrics[side]["perplexity"] = float(np.exp(metrics[side]["nll"]))
    inside = float(columns["inside"].sum() / columns["places"].sum())
    metrics["gapa"]["targets_in_top_k"] = inside
    errors, notes = detect_place_errors(columns, "token")
    if inside < 1:
        notes.append(
            f"{1 - inside:.2%} of the targets are not among the top {columns['top'][0]} tokens; they count with the "
            "source's own probability"
        )
    return Findings(metrics, rate, reliability=bins, error_detection=errors, notes=tuple(notes))
