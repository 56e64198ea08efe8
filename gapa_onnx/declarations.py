"""How a setting is declared: one function for each kind of value, which gives a dataclass field with its check.

What a field takes and means is its `Choice`, kept in the field's metadata: `settings` checks values by it, and the
command line makes its options of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import SupportsIndex

from gapa_onnx.errors import UserError


@dataclass(frozen=True)
class Choice:
    """What one setting takes and means; its name, type and default are the field's."""

    check: Callable[[str, object], object]  #: of a name and a value: the value as it is kept, or a UserError
    metavar: str  #: what help shows in place of a value
    help: str
    group: str | None
    text: type = str  #: what text is read as before it is checked: str, int or float


CHOICE = "choice"


def _declared(choice: Choice) -> Mapping[str, Choice]:
    return MappingProxyType({CHOICE: choice})


def one_of(*words: str, help: str, group: str | None = None) -> str:
    """One of these words; the first is the default."""

    def check(name: str, value: object) -> object:
        if value not in words:
            raise UserError(f"`{name}={value!r}` is not known", f"choose one of {', '.join(words)}")
        return value

    return field(default=words[0], metadata=_declared(Choice(check, "|".join(words), help, group)))


def words(*, default: str, metavar: str, help: str, group: str | None = None) -> str:
    """Words that only the model gives a meaning, such as names of its tensors."""

    def check(name: str, value: object) -> object:
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"`{name}={value!r}` says nothing", f"the default is {default}")
        return value

    return field(default=default, metadata=_declared(Choice(check, metavar, help, group)))


def count(*, default: int, least: int = 1, metavar: str = "N", help: str, group: str | None = None) -> int:
    """A whole number that is not below `least`."""

    def check(name: str, value: object) -> object:
        return _whole(name, value, least, f"the default is {default}")

    return field(default=default, metadata=_declared(Choice(check, metavar, help, group, int)))


def count_or_none(*, least: int, metavar: str, help: str, group: str | None = None) -> int | None:
    """A whole number that is not below `least`, or None, which is the default."""

    def check(name: str, value: object) -> object:
        return (
            None if value is None else _whole(name, value, least, f"give more of them, or leave `{name}` out")
        )

    return field(default=None, metadata=_declared(Choice(check, metavar, help, group, int)))


def word_or_count(word: str, *, default: int | None = None, help: str, group: str | None = None) -> str | int:
    """A word or a whole number from 1; the word is the default unless a number is."""
    usual: str | int = word if default is None else default

    def check(name: str, value: object) -> object:
        if value == word:
            return value
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                hint = f"choose {word} or a whole number"
                raise UserError(f"`{name}={value!r}` is not known", hint) from None
        return _whole(name, value, 1, f"the default is {usual}")

    return field(default=usual, metadata=_declared(Choice(check, f"{word}|N", help, group)))


def word_or_number(*words: str, help: str, group: str | None = None) -> str | float:
    """One of these words, of which the first is the default, or a positive number."""

    def check(name: str, value: object) -> object:
        if value in words:
            return value
        number = _number(value)
        if not 0 < number < float("inf"):
            hint = f"choose {', '.join(words)} or a positive number"
            raise UserError(f"`{name}={value!r}` is not known", hint)
        return number

    metavar = "|".join((*words, "NUMBER"))
    return field(default=words[0], metadata=_declared(Choice(check, metavar, help, group)))


def fraction(
    *, default: float, metavar: str, help: str, hint: str | None = None, group: str | None = None
) -> float:
    """A number between 0 and 1, and neither of them."""

    def check(name: str, value: object) -> object:
        number = _number(value)
        if not 0 < number < 1:
            raise UserError(
                f"`{name}` is {value}; it must be between 0 and 1", hint or f"the default is {default:g}"
            )
        return number

    return field(default=default, metadata=_declared(Choice(check, metavar, help, group, float)))


def fraction_or_none(*, metavar: str, help: str, group: str | None = None) -> float | None:
    """A number between 0 and 1, and neither of them, or None, which is the default."""

    def check(name: str, value: object) -> object:
        number = None if value is None else _number(value)
        if number is not None and not 0 < number < 1:
            raise UserError(f"`{name}` is {value}; it must be between 0 and 1", f"or leave `{name}` out")
        return number

    return field(default=None, metadata=_declared(Choice(check, metavar, help, group, float)))


def _whole(name: str, value: object, least: int, hint: str) -> int:
    if not isinstance(value, SupportsIndex):
        raise UserError(f"`{name}` is {value!r}; it must be a whole number", hint)
    number = operator.index(value)
    if number < least:
        raise UserError(f"`{name}` is {number}; it must be at least {least}", hint)
    return number


def _number(value: object) -> float:
    """NaN for what is no number, which every comparison then refuses."""
    try:
        return float(value)  # type: ignore[arg-type]  # whatever it is, float tells
    except (TypeError, ValueError):
        return float("nan")
