"""Text that a model has read, token by token, with what it says of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gapa_onnx.cli.console import console
from gapa_onnx.cli.layout import gap, legend, number, table

if TYPE_CHECKING:
    from gapa_onnx.arrays import Array
    from gapa_onnx.data.text import Text

MOST_SEQUENCES = 3
MOST_TOKENS = 32  # of each
#: What is said of each token, by its role: a heading, and what it means.
_NUMBERS = {
    "score": ("Score", "how strange the text is up to here"),
    "pvalue": ("P-value", "the share of ordinary places that are as strange or stranger"),
    "ood": ("Flag", "where that is too rare"),
    "entropy": ("Entropy", "how open it is what follows, in nats"),
    "epistemic": ("Epistemic", "how much of that is because the model has not seen such text"),
}


@dataclass
class Reading:
    """The tokens of the first sequences, as they were fed."""

    text: Text
    rows: list[Array] = field(default_factory=list)

    def add(self, batch: Mapping[str, Array]) -> None:
        for row in batch[self.text.inputs.ids.name]:
            if len(self.rows) < MOST_SEQUENCES:
                self.rows.append(row[: self.text.kept.lengths[len(self.rows)]])


def spoken_of(heads: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, Array]) -> str | None:
    """The output that says something of each token; None where none does."""
    for output, head in heads.items():
        if {"score", "entropy"} & set(head["outputs"]) and any(
            role in _NUMBERS and arrays[name].ndim == 2 for role, name in head["outputs"].items()
        ):
            return output
    return None


def show_tokens(output: str, head: Mapping[str, Any], arrays: Mapping[str, Array], read: Reading) -> None:
    """A table for each of the first sequences, and what its columns mean."""
    tokenizer = read.text.tokenizer.opened()
    roles = {role: arrays[name] for role, name in head["outputs"].items() if name in arrays}
    shown = {role: words for role, words in _NUMBERS.items() if role in roles and roles[role].ndim == 2}
    headings = ["Token", *(f"#{heading}" for heading, _ in shown.values()), "Next", "#Probability"]
    for row, ids in enumerate(read.rows):
        most = min(len(ids), MOST_TOKENS)
        following = [_following(roles, arrays[output], (row, at), tokenizer) for at in range(most)]
        cells = [
            [_quoted(tokenizer, ids[at]), *(_cell(roles[role][row, at]) for role in shown), *following[at]]
            for at in range(most)
        ]
        table(f"row {row}: {len(ids)} tokens{_of_the_sequence(roles, row)}", headings, cells)
        if most < len(ids):
            console().print(f"  … {len(ids) - most} more tokens")
    legend(
        **{heading: meaning for heading, meaning in shown.values()},
        Next="the most probable token behind it, and its probability",
    )
    gap()


def _of_the_sequence(roles: Mapping[str, Array], row: int) -> str:
    """What is said of a sequence as a whole."""
    words = {"seq_score": "score", "seq_pvalue": "p-value", "seq_ood": "flagged"}
    said = [f"{word} {_cell(roles[role][row])}" for role, word in words.items() if role in roles]
    return f"; as a whole: {', '.join(said)}" if said else ""


def _following(
    roles: Mapping[str, Array], logits: Array, at: tuple[int, int], tokenizer: Any
) -> tuple[str, str]:
    """The most probable token behind a place, or its class where the model has no words for it."""
    probabilities = roles["probs"][at] if "probs" in roles else None
    if "tokens" in roles:
        best = int(roles["tokens"][at][0])
        chance = None if probabilities is None else probabilities[0]
    else:
        best = int(logits[at].argmax())
        chance = None if probabilities is None else probabilities[best]
    words = logits.shape[-1] >= tokenizer.get_vocab_size()
    text = _quoted(tokenizer, best) if words else f"class {best}"
    return text, "" if chance is None else f"{chance:.3f}"


def _quoted(tokenizer: Any, token: int) -> str:
    """A token so that blanks and ends of lines in it are seen."""
    return json.dumps(tokenizer.decode([int(token)], skip_special_tokens=False), ensure_ascii=False)


def _cell(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return number(float(value))
