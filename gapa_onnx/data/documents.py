"""Text files as documents: each line of a .txt that is not empty, or one field of each record of a .jsonl.

Files are read line by line, so that they need not fit into memory; a line that is itself as long as a book is taken in
parts, cut at white space.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from gapa_onnx.data.bundle import reading
from gapa_onnx.errors import UserError

EXTENSIONS = (".txt", ".jsonl")
LONGEST_PART = 1 << 20  # characters of a line of a .txt that are one document


def documents(files: Sequence[Path], field: str) -> Iterator[str]:
    """The documents of all files that are not empty, in order."""
    for path in files:
        with reading(path), path.open(encoding="utf-8-sig") as file:
            found = _records(file, path, field) if path.suffix.lower() == ".jsonl" else _lines(file)
            yield from (text for text in found if text.strip())


def _lines(file: IO[str]) -> Iterator[str]:
    """The lines, those that are too long in parts."""
    rest = ""
    while part := file.readline(LONGEST_PART):
        part = rest + part
        whole = part.endswith("\n")
        cut = len(part) if whole or len(part) < LONGEST_PART else _last_space(part)
        rest = part[cut:]
        yield part[:cut].rstrip("\r\n")
    yield rest


def _last_space(text: str) -> int:
    """Where the last word of a text begins, with the space before it; its end where it is all one word."""
    return max(text.rfind(" "), text.rfind("\t")) if len(text.split(None, 1)) > 1 else len(text)


def _records(file: IO[str], path: Path, field: str) -> Iterator[str]:
    """The text of each line of a .jsonl."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{where} is not JSON: {error}", "a .jsonl has one JSON object on each line"
            ) from error
        if not isinstance(record, dict):
            raise UserError(f"{where} is not a JSON object", 'for example {"text": "…"}')
        if field not in record:
            raise UserError(f"{where} has no field {field!r}{_present(record)}", _named_field(record, field))
        if not isinstance(record[field], str):
            raise UserError(f"{where}: the field {field!r} holds no text", _named_field(record, field))
        yield record[field]


def _present(record: dict[str, object]) -> str:
    names = [repr(name) for name in list(record)[:10]]
    return f"; it has {', '.join(names)}" if names else ""


def _named_field(record: dict[str, object], field: str) -> str:
    """What to do where a field is not the text."""
    texts = [name for name, value in record.items() if isinstance(value, str)]
    close = (
        difflib.get_close_matches(field, texts, n=1)
        or sorted(texts, key=lambda name: len(str(record[name])))[-1:]
    )
    if not close:
        return "a record has its text in one field"
    return f"name the field that holds the text: `TextOptions(field={close[0]!r})`?"
