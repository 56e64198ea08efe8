"""How a step that takes time says how far it is."""

from __future__ import annotations

from collections.abc import Callable

# What is being done, and the fraction of it that is done; 0 where that is not known.
Progress = Callable[[str, float], None]


def silent(text: str, done: float) -> None:
    """Tell nobody."""
