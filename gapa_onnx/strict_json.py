"""JSON to dataclasses and back, strictly: what does not fit an annotation is an error that names the place."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


class Damage(ValueError):
    """What is wrong at one place."""


_NAMES = {str: "text", int: "a whole number", float: "a finite number"}


def decoded(kind: Any, plain: Any, where: str) -> Any:
    """A value of the annotated type from what JSON gave; raises Damage."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(kind), plain, where)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, plain, where)
    if origin is tuple:
        _require(isinstance(plain, list), where, plain, "a list")
        return tuple(decoded(get_args(kind)[0], part, f"{where}[{i}]") for i, part in enumerate(plain))
    if origin is Mapping:
        _require(isinstance(plain, dict), where, plain, "an object")
        return {name: decoded(get_args(kind)[1], part, f"{where}.{name}") for name, part in plain.items()}
    if origin is Annotated:
        words = get_args(kind)[1:]
        _require(plain in words, where, plain, f"one of {', '.join(words)}")
        return plain
    _require(_fits(kind, plain), where, plain, _NAMES[kind])
    return float(plain) if kind is float else plain


def _fits(kind: type, plain: Any) -> bool:
    """Whether a value is text, a whole number or a finite number; for Python true is a number, for JSON it is not."""
    if kind is float:
        number = isinstance(plain, (int, float)) and not isinstance(plain, bool)
        return number and abs(plain) <= sys.float_info.max  # false for a NaN
    return isinstance(plain, kind) and not isinstance(plain, bool)


def _one_of(kinds: tuple[Any, ...], plain: Any, where: str) -> Any:
    """A value of the first type that fits; a whole number stays one where both kinds of number are allowed."""
    wanted = [kind for kind in kinds if kind is not types.NoneType]
    if plain is None and len(wanted) < len(kinds):
        return None
    if len(wanted) == 1:
        return decoded(wanted[0], plain, where)
    for kind in wanted:
        if _fits(kind, plain):
            return plain
    raise Damage(f"{where} is {shown(plain)}, not {' or '.join(_NAMES[kind] for kind in wanted)}")


def _dataclass(kind: Any, plain: Any, where: str) -> Any:
    _require(isinstance(plain, dict), where, plain, "an object")
    hints, values = get_type_hints(kind, include_extras=True), {}
    for part in dataclasses.fields(kind):
        place = f"{where}.{part.name}".lstrip(".")
        if part.name in plain:
            values[part.name] = decoded(hints[part.name], plain[part.name], place)
        elif part.default is dataclasses.MISSING and part.default_factory is dataclasses.MISSING:
            raise Damage(f"{place} is missing")
    unknown = sorted(set(plain) - set(hints))
    if unknown:
        raise Damage(f"{f'{where}.{unknown[0]}'.lstrip('.')} is not known")
    return kind(**values)


def _require(fits: bool, where: str, plain: Any, wanted: str) -> None:
    if not fits:
        raise Damage(f"{where} is {shown(plain)}, not {wanted}")


def shown(plain: Any) -> str:
    """What stands in the place of something else, in a few words."""
    if isinstance(plain, (list, dict)):
        return "a list" if isinstance(plain, list) else "an object"
    return json.dumps(plain)[:40]


def encoded(value: Any) -> Any:
    """A value as JSON has it; of a dataclass, what holds its default is left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((part, getattr(value, part.name)) for part in dataclasses.fields(value))
        return {part.name: encoded(held) for part, held in parts if held != _default(part)}
    if isinstance(value, Mapping):
        return {name: encoded(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(held) for held in value]
    return value


def _default(part: dataclasses.Field[Any]) -> Any:
    return part.default if part.default_factory is dataclasses.MISSING else part.default_factory()
