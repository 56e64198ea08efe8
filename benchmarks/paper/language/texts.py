"""Sequences of tokens for the benchmark: text to calibrate on, text of the same kind, and text of other kinds.

    calibration   WikiText-103, training split: what everything is fitted on
    heldout       WikiText-103, other articles: what must look ordinary
    shuffled      the same sequences as heldout, the tokens of each in random order
    readme        what Python packages say about themselves, as far as they are installed here
    code          modules of Python's standard library
    web           OpenWebText, read for the final tables alone

The tokens of a document are cut into sequences one after another, as the tool does it; a rest is dropped. Sequences are
in a random order that is the same each time.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from backbones import DATA
from packages import Missing
from support.decoders import VOCABULARY, token_rows

from gapa_onnx.data.documents import documents
from gapa_onnx.data.tokenizer import encoded, tokenizer_file

LENGTH = 96
CALIBRATION, HELDOUT, WEB = "calibration", "heldout", "web"
OTHERS = ("shuffled", "readme", "code")  #: what choices may be made on
FILES = {CALIBRATION: "wikitext_calibration.txt", HELDOUT: "wikitext_heldout.txt", WEB: "openwebtext.txt"}
LONGEST = 40_000  # characters of a document of `readme` and `code`: a few large ones must not be all of it


@dataclass(frozen=True)
class Sequences:
    """Sequences of equal length, and which document each is from."""

    ids: np.ndarray  #: (n, t)
    documents: np.ndarray  #: (n,)

    def first(self, count: int) -> Sequences:
        return Sequences(self.ids[:count], self.documents[:count])


def sequences(name: str, tokenizer: Path, count: int, data: Path = DATA) -> Sequences:
    """At most so many sequences of a set."""
    if name == "shuffled":
        return shuffled(sequences(HELDOUT, tokenizer, count, data))
    read: dict[str, Callable[[], Iterator[str]]] = {"readme": _readmes, "code": _modules}
    texts = list(read[name]() if name in read else _of_file(data / "text" / FILES[name]))
    return cut(encoded(tokenizer_file(tokenizer).opened(), texts), LENGTH).first(count)


def cut(tokens: list[list[int]], length: int, seed: int = 0) -> Sequences:
    """Documents of tokens as sequences, in random order."""
    pieces = [
        (number, document[start : start + length])
        for number, document in enumerate(tokens)
        for start in range(0, len(document) - length + 1, length)
    ]
    order = np.random.default_rng(seed).permutation(len(pieces))
    numbers, parts = zip(*(pieces[at] for at in order))
    return Sequences(np.array(parts, np.int64), np.array(numbers, np.int64))


def shuffled(ordered: Sequences, seed: int = 0) -> Sequences:
    """The tokens of each sequence in random order."""
    generator = np.random.default_rng(seed)
    return Sequences(generator.permuted(ordered.ids, axis=1), ordered.documents)


def made_up(name: str, count: int, length: int) -> Sequences:
    """Tokens for the tiny decoder: `heldout` is like `calibration`, all else is without its regularities."""
    seeds: dict[str, Any] = {CALIBRATION: 0, HELDOUT: 1}
    if name in seeds:
        ids = token_rows(count, length, seeds[name])["input_ids"]
    else:
        ids = np.random.default_rng(len(name)).integers(0, VOCABULARY, (count, length))
    return Sequences(ids, np.arange(count) // 4)


def _of_file(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise Missing(f"there is no {path}")
    return documents([path], "text")


def _readmes() -> Iterator[str]:
    found = {each.name: each for each in importlib.metadata.distributions() if each.name}
    for _, package in sorted(found.items()):
        text = package.metadata.get_payload() or package.metadata["Description"]
        if isinstance(text, str) and text.strip():
            yield text[:LONGEST]


def _modules() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")[:LONGEST]
