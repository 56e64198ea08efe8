"""The tokenizer of a model: read from its tokenizer.json, or from what a converted file keeps of it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapa_onnx.data.bundle import reading
from gapa_onnx.errors import UserError
from gapa_onnx.record import damaged

METADATA_KEY = "gapa_onnx_tokenizer"  #: under which a converted file keeps it
MOST_KEPT = 4 << 20  # bytes of a tokenizer, compressed, that a converted file keeps
LARGEST = 256 << 20  # bytes that one may have when it is unpacked
_PADDING = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>")
_HINT = "give the tokenizer.json that belongs to the model"


@dataclass(frozen=True)
class TokenizerFile:
    """The text of a tokenizer.json, and what it is called."""

    text: str = field(repr=False)
    file: str | None
    where: str  #: how messages call it

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def kept(self) -> str | None:
        """As a converted file keeps it; None where it is too large for that."""
        packed = zlib.compress(self.text.encode(), 9)
        return base64.b64encode(packed).decode("ascii") if len(packed) <= MOST_KEPT else None

    def opened(self) -> Any:  # tokenizers.Tokenizer, whose package may be missing
        """The tokenizer, without the padding and the cut that it may have been saved with."""
        tokenizers = require_tokenizers()
        try:
            found = tokenizers.Tokenizer.from_str(self.text)
            found.no_padding()
            found.no_truncation()
        except Exception as error:  # the package raises Exception itself
            raise UserError(f"{self.where} is not a tokenizer: {_reason(error)}", _HINT) from error
        return found


def unpacked(kept: str) -> str:
    """The tokenizer that a converted file keeps, as its text."""
    try:
        packed = zlib.decompressobj()
        text = packed.decompress(base64.b64decode(kept, validate=True), LARGEST)
        if not packed.eof:
            raise damaged("its tokenizer is cut short, or larger than any")
        return text.decode()
    except (binascii.Error, zlib.error, ValueError) as error:
        raise damaged(f"its tokenizer cannot be unpacked ({error})") from error


def tokenizer_file(given: Any) -> TokenizerFile:
    """A tokenizer as the user has it: a path of a file or folder, a `tokenizers.Tokenizer`, or its text."""
    if hasattr(given, "to_str"):
        return TokenizerFile(given.to_str(), None, "the tokenizer")
    if isinstance(given, TokenizerFile):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise UserError(f"a tokenizer of type {type(given).__name__} cannot be read", _HINT)
    path = Path(given)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"there is no tokenizer {path}", _HINT)
    with reading(path):
        text = path.read_bytes().decode()
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a tokenizer: it is not JSON", _HINT) from error
    if not isinstance(plain, dict) or not isinstance(plain.get("model"), dict):
        other = " but its settings" if path.name == "tokenizer_config.json" else ""
        raise UserError(f"{path} is not a tokenizer{other}: it has no model", _HINT)
    return TokenizerFile(text, path.name, str(path))


def require_tokenizers() -> Any:
    """The package `tokenizers`; a UserError where it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("reading text needs tokenizers", "pip install 'gapa-onnx[text]'") from error
    return tokenizers


def vocabulary(tokenizer: Any) -> int:
    """One more than the largest token."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def surrounds(tokenizer: Any) -> bool:
    """Whether it puts tokens around a text, such as [CLS] and [SEP], as those of encoders do."""
    return bool(tokenizer.num_special_tokens_to_add(False) >= 2)


def padding(tokenizer: Any) -> int:
    """The token that fills up a sequence."""
    known = (tokenizer.token_to_id(token) for token in _PADDING)
    return next((token for token in known if token is not None), 0)


def encoded(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, with those that the tokenizer adds."""
    try:
        return [found.ids for found in tokenizer.encode_batch(list(texts))]
    except Exception as error:  # as above
        raise UserError(f"the tokenizer failed on the text: {_reason(error)}", _HINT) from error


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
