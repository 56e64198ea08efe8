"""Caches of keys and values among inputs and outputs: a decoder has two for each block, and they are told as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

FEWEST = 3  # that are told together
_NAMES = re.compile(r"(?<![a-z])(past|present|(kv)?caches?)(?![a-z])", re.IGNORECASE)

T = TypeVar("T")


def many_caches(names: Iterable[str], known: Sequence[str] = ()) -> list[str]:
    """The caches among names, by the names that exports of decoders give them; none where they are few.

    `known` are caches whatever they are called.
    """
    found = [name for name in names if _NAMES.search(name) or name in known]
    return found if len(found) >= FEWEST else []


def told_as_one(
    entries: Iterable[T], name: Callable[[T], str] = str, known: Sequence[str] = ()
) -> list[tuple[T, str]]:
    """Entries with their names; many caches are one entry, the first of them, with a name that stands for all."""
    every = list(entries)
    together = many_caches(map(name, every), known)
    left = set(together[1:])
    text = f"{together[0]} … {together[-1]} ({len(together)} caches)" if together else ""
    return [
        (entry, text if name(entry) in together else name(entry))
        for entry in every
        if name(entry) not in left
    ]


def names_told(names: Iterable[str], known: Sequence[str] = ()) -> str:
    """Names in a sentence."""
    return ", ".join(text for _, text in told_as_one(names, known=known))
