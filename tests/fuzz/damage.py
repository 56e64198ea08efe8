"""What is done to bytes, texts, JSON and protobuf messages. The same generator does the same damage."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from google.protobuf.message import Message

WHOLE = (0, 1, -1, 2, 7, 127, 255, 2**31 - 1, -(2**31), 2**31, 2**40, 2**63 - 1, -(2**63))
REAL = (0.0, -1.0, 1e-45, 1e10, -1e10, 3.4e38, 1e308, float("nan"), float("inf"), float("-inf"))
WORDS = (
    "", " ", "x", "../x", "/etc/passwd", "\x1b[2J", "a" * 300, "=1+1", "nan", "-inf", "1e999", "99999999999999999999",
    "é", "\u202e", "\x00", "{}", "[", '"', "'", ",", "\n", "null", "true", "0x10", "1_000", "file", "allow_pickle",
)  # fmt: skip


def some_bytes(content: bytes, random: Random) -> bytes:
    """Some bytes flipped, set, lost, doubled or cut off."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        if not changed:
            return random.randbytes(random.randrange(20))
        at, size = random.randrange(len(changed)), random.choice((1, 2, 4, 8, random.randrange(1, 65)))
        match random.randrange(7):
            case 0 | 1:
                changed[at] ^= 1 << random.randrange(8)
            case 2:
                changed[at] = random.randrange(256)
            case 3:
                del changed[at : at + size]
            case 4:
                changed[at:at] = changed[at : at + size]
            case 5:
                number = random.choice(WHOLE) % 2 ** (8 * size)
                changed[at : at + size] = number.to_bytes(size, random.choice(("little", "big")))
            case 6 if random.random() < 0.3:
                del changed[at:]
    return bytes(changed)


def a_text(text: str, random: Random) -> str:
    """Numbers and words replaced, lines lost, doubled or exchanged."""
    for _ in range(random.choice((1, 1, 2, 4))):
        pieces = re.split(r"(\W+)", text) if random.random() < 0.7 else text.splitlines(keepends=True)
        if not pieces:
            return random.choice(WORDS)
        at = random.randrange(len(pieces))
        match random.randrange(4):
            case 0 | 1:
                pieces[at] = random.choice(WORDS)
            case 2:
                pieces[at] = ""
            case 3:
                pieces[at] *= random.choice((2, 3, 50))
        text = "".join(pieces)
    return text


def some_json(value: Any, random: Random) -> Any:
    """The value with something inside of another kind, size or name."""
    if isinstance(value, dict) and value and random.random() < 0.93:
        key = random.choice(list(value))
        match random.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, random.choice((*WORDS, *value)): value[key]}
            case _:
                return {**value, key: some_json(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.85:
        at = random.randrange(len(value))
        match random.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[: at + 1] + value[at:]
            case _:
                return value[:at] + [some_json(value[at], random)] + value[at + 1 :]
    return random.choice(
        (None, True, [], {}, [value], {"x": value}, str(value), *random.sample(WHOLE, 3), *random.sample(REAL, 3),
         *random.sample(WORDS, 3))
    )  # fmt: skip


def json_text(text: str, random: Random) -> str:
    if random.random() < 0.2:
        return a_text(text, random)
    return json.dumps(some_json(json.loads(text), random))


def _names(message: Message, found: list[str], most: int = 400) -> list[str]:
    for field, value in message.ListFields():
        for one in value if field.is_repeated else (value,):
            if len(found) >= most:
                return found
            if isinstance(one, Message):
                _names(one, found, most)
            elif isinstance(one, str):
                found.append(one)
    return found


def _scalar(field: Any, value: Any, random: Random, names: list[str]) -> Any:
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return random.choice(REAL)
    if isinstance(value, str):
        return random.choice((*names, *WORDS)) if names else random.choice(WORDS)
    if isinstance(value, bytes):
        return some_bytes(value, random)
    whole = random.choice((*WHOLE, value + 1, value - 1, random.randrange(20)))
    if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_ENUM):
        return (whole + 2**31) % 2**32 - 2**31
    if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
        return whole % 2**32
    return whole


def _of_many(message: Message, field: Any, random: Random, names: list[str]) -> None:
    """One of a repeated field is lost, doubled, moved or changed."""
    values = getattr(message, field.name)
    at = random.randrange(len(values))
    match random.randrange(5):
        case 0:
            del values[at]
        case 1:
            values.append(values[at])
        case 2:
            order = list(values)
            order.insert(random.randrange(len(order)), order.pop(at))
            copies = [
                type(one).FromString(one.SerializeToString()) if isinstance(one, Message) else one
                for one in order
            ]
            del values[:]
            values.extend(copies)
        case _:
            if field.message_type is None:
                values[at] = _scalar(field, values[at], random, names)
            else:
                _somewhere(values[at], random, names)


def _somewhere(message: Message, random: Random, names: list[str]) -> None:
    fields = [field for field, _ in message.ListFields()]
    # Now and then a field that is not there yet.
    if not fields or random.random() < 0.08:
        plain = [f for f in message.DESCRIPTOR.fields if f.message_type is None and not f.is_repeated]
        if plain:
            field = random.choice(plain)
            setattr(message, field.name, _scalar(field, getattr(message, field.name), random, names))
        return
    field = random.choice(fields)
    inside = field.message_type is not None
    if field.is_repeated:
        values = getattr(message, field.name)
        if inside and random.random() < 0.85:
            _somewhere(values[random.randrange(len(values))], random, names)
        else:
            _of_many(message, field, random, names)
    elif inside and random.random() < 0.9:
        _somewhere(getattr(message, field.name), random, names)
    elif inside or random.random() < 0.15:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(field, getattr(message, field.name), random, names))


def a_message(message: Message, random: Random) -> None:
    """Anything anywhere in it is lost, doubled, moved or changed; names become those of others."""
    names = _names(message, [])
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        try:
            _somewhere(message, random, names)
        except (ValueError, TypeError, UnicodeError):
            pass  # what protobuf itself refuses to hold cannot be in a file
