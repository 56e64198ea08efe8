"""Sequences of tokens for the benchmark: text to calibrate on, text of the same kind, and text of other kinds.

    calibration   WikiText-103, training split: what everything is fitted on
    heldout       WikiText-103, other articles: what must look ordinary
    shuffled      the same sequences as heldout, the tokens of each in random order
    readme        what Python packages say about themselves, as far as they are installed here
    code          modules of Python's standard library
    plain         heldout as people write it: WikiText has spaces around commas and between hyphens
    lower         heldout in lower case
    essays        pages of Debian's package anarchism, about politics
    history       pages of debian-history
    manuals       pages of developers-reference and debian-faq
    web           OpenWebText, read for the final tables alone

The tokens of a document are cut into sequences one after another, as the tool does it; a rest is dropped. Sequences are
in a random order that is the same each time.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from backbones import DATA
from packages import Missing, cache_folder, debian_pages
from support.decoders import VOCABULARY, token_rows

from gapa_onnx.data.documents import documents
from gapa_onnx.data.tokenizer import encoded, tokenizer_file

LENGTH = 96
CALIBRATION, HELDOUT, WEB = "calibration", "heldout", "web"
OTHERS = ("shuffled", "readme", "code")  #: what choices may be made on
NEAR = ("plain", "lower", "essays", "history", "manuals")  #: nearer text for the same purpose
PAGES = {
    "essays": (("anarchism", "**/html/sec*.html"),),
    "history": (("debian-history", "**/*.en.html"),),
    "manuals": (("developers-reference", "**/*.html"), ("debian-faq", "**/*.en.html")),
}
SHORTEST, FEWEST = 200, 1500  # characters of a paragraph and of a page: menus and lists are shorter
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
    read |= {"plain": lambda: map(_plain, _heldout(data)), "lower": lambda: map(str.lower, _heldout(data))}
    read |= {of: functools.partial(_pages, of) for of in PAGES}
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


def _heldout(data: Path) -> Iterator[str]:
    return _of_file(data / "text" / FILES[HELDOUT])


def _plain(text: str) -> str:
    """WikiText as people write it."""
    text = re.sub(r" @(.)@ ", r"\1", text)
    return re.sub(r"([(\[]) ", r"\1", re.sub(r" ([,.;:!?%)\]'])", r"\1", text))


def _pages(name: str) -> Iterator[str]:
    """The longer paragraphs of pages."""
    for package, pattern in PAGES[name]:
        for page in debian_pages(package, pattern, cache_folder("language")):
            reader = _Prose()
            reader.feed(page)
            paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", "".join(reader.parts)))
            text = " ".join(part for part in paragraphs if len(part) > SHORTEST)
            if len(text) > FEWEST:
                yield text[:LONGEST]


class _Prose(HTMLParser):
    """What a page says, with a line for each block."""

    BLOCKS, SILENT = ("p", "br", "div", "h1", "h2", "li"), ("script", "style", "head")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._silent += tag in self.SILENT
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in self.SILENT

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data)
