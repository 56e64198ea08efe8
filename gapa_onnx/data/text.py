"""Text as a model's input: documents, their tokens, sequences of these, and what goes along with them.

A decoder reads *pieces*: the tokens of a document are cut into sequences of equal length one after another; a rest that
is shorter is dropped, unless it is all of the document, which is then a shorter sequence. An encoder reads *documents*:
the beginning of each is one row, with the tokens that the tokenizer puts around it, filled up with padding.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.bundle import Bundle, bundle_of
from gapa_onnx.data.documents import documents
from gapa_onnx.data.spec import InputSpec, TextOptions, TokenLimits
from gapa_onnx.data.token_inputs import TokenInputs, token_inputs
from gapa_onnx.data.tokenizer import (
    TokenizerFile,
    encoded,
    padding,
    surrounds,
    tokenizer_file,
    vocabulary,
)
from gapa_onnx.errors import UserError
from gapa_onnx.record import TextRecord

SEQ_LEN = 96  # where neither the model nor the user says
CALIBRATION_TOKENS = 200_000  # that a conversion reads, unless told otherwise
_TEXTS_AT_ONCE = 256  # documents
_CHARACTERS_AT_ONCE = 1 << 20
_ROWS_AT_ONCE = 64
_FOLLOWING_NONE = -1  # in place of the token that follows the last


@dataclass(frozen=True)
class Text:
    """Text that is open, as rows of tokens."""

    record: TextRecord
    tokenizer: TokenizerFile = field(repr=False)
    inputs: TokenInputs = field(repr=False)
    kept: TokenRows | SomeRows = field(repr=False)
    where: str
    pad: int

    @property
    def padded(self) -> bool:
        """Whether shorter sequences are filled up: where the model fixes the length, or each document is one row."""
        return self.record.rows == "documents" or self.inputs.seq_len is not None

    @property
    def goes_on(self) -> bool:
        """Whether each token is followed by what a model is to predict: as decoders read text."""
        return self.record.rows == "pieces"

    @property
    def uneven(self) -> bool:
        """Whether rows that have been read have several lengths, and are not filled up."""
        return not self.padded and len(set(self.kept.lengths)) > 1

    def bundles(self) -> Iterator[Bundle]:
        """The rows with all inputs, those of one length together."""
        for tokens, lengths in self.kept.read():
            width = self.record.seq_len
            equal = [(width, range(len(lengths)))] if self.padded else _runs(lengths)
            for size, rows in equal:
                part, long = tokens[rows, :size], lengths[rows]
                part[np.arange(size) >= long[:, None]] = self.pad
                yield bundle_of(self.inputs.arrays(part, long), self.where)

    def next_tokens(self) -> Array:
        """What follows each token (rows, T); -1 at the last, and beyond."""
        parts = []
        for tokens, lengths in self.kept.read():
            following = np.full(tokens.shape, _FOLLOWING_NONE, np.int64)
            following[:, :-1] = tokens[:, 1:]
            following[np.arange(tokens.shape[1]) >= lengths[:, None] - 1] = _FOLLOWING_NONE
            parts.append(following)
        width = max(self.kept.lengths) if not self.padded else self.record.seq_len
        joined: Array = np.concatenate(parts)[:, :width]
        return joined

    def apart(self, share: float, fewest: int, seed: int) -> tuple[Text, Text] | None:
        """The text without some documents, and these: so many, drawn at random, that they have a share of the rows. None
        where there are fewer documents than `fewest`, or where each is one row, which is then left out by itself."""
        if not isinstance(self.kept, TokenRows) or self.record.rows == "documents":
            return None
        rows, owners = self.kept.count(), np.array(self.kept.documents)
        numbers = np.unique(owners)
        if len(numbers) < fewest or len(numbers) == rows:
            return None
        order = np.random.default_rng(seed).permutation(numbers)
        counts = np.cumsum([(owners == number).sum() for number in order])
        drawn = order[: max(1, int(np.searchsorted(counts, share * rows, "right")))]
        away = np.isin(owners, drawn)
        return replace(self, kept=SomeRows(self.kept, ~away)), replace(self, kept=SomeRows(self.kept, away))

    def require_a_sequence(self) -> None:
        """Refuse text that has not the tokens of one whole sequence: nothing can be learned from so little."""
        count = 0
        for _, lengths in self.kept.read():
            count += int(lengths.sum())
            if count >= self.record.seq_len:
                return
        raise UserError(
            f"{self.where} has {count} tokens, fewer than one sequence of {self.record.seq_len}",
            "give more text, or shorter sequences with `TextOptions(seq_len=…)`",
        )


def open_text(
    files: Sequence[Path],
    where: str,
    inputs: Sequence[InputSpec],
    options: TextOptions,
    recorded: TextRecord | None = None,
) -> Text:
    """Text files for a model with these inputs. `recorded` is what a converted file remembers, for what its inputs do
    not tell."""
    before = (recorded.vocabulary, recorded.longest, recorded.head_size) if recorded else ()
    filled = token_inputs(inputs, where, TokenLimits(*before))
    file = _tokenizer(options, recorded, where)
    tokenizer = file.opened()
    _require_known(file, vocabulary(tokenizer), filled)
    rows = options.rows or _usual_rows(filled, tokenizer)
    seq_len = _seq_len(filled, options)
    if rows == "documents":
        _require_room(seq_len, tokenizer)
        tokenizer.enable_truncation(seq_len)
    name = options.field or "text"
    record = TextRecord(file.sha256, file.file, seq_len, name, rows, **vars(filled.limits))
    whole_only = rows == "pieces" and filled.seq_len is not None and not filled.masked
    pieces = _sequences(documents(files, name), tokenizer, record, options.tokens, whole_only, where)
    return Text(record, file, filled, TokenRows(pieces, seq_len), where, padding(tokenizer))


def differences(used: TextRecord, calibrated: TextRecord) -> str | None:
    """A sentence about what is not as it was when the file was calibrated; None where all is."""
    told = {
        "tokenizer": ("another tokenizer", f"that of sha256 {calibrated.tokenizer[:12]}…"),
        "seq_len": tuple(f"`TextOptions(seq_len={record.seq_len})`" for record in (used, calibrated)),
        "rows": tuple(f"`TextOptions(rows={record.rows!r})`" for record in (used, calibrated)),
    }
    differing = [pair for name, pair in told.items() if getattr(used, name) != getattr(calibrated, name)]
    if not differing:
        return None
    given, before = (" and ".join(pair[side] for pair in differing) for side in (0, 1))
    return f"this text is read with {given}, but the file was calibrated with {before}: scores will differ"


# ------------------------------------------------------------------------------ what is chosen


def _tokenizer(options: TextOptions, recorded: TextRecord | None, where: str) -> TokenizerFile:
    if options.tokenizer is not None:
        return tokenizer_file(options.tokenizer)
    if recorded is not None:
        raise UserError(
            f"the file was calibrated with {recorded.file or 'a tokenizer'} (sha256 {recorded.tokenizer[:12]}…), which was "
            "too large to keep in it",
            "give it again with `TextOptions(tokenizer=…)`",
        )
    raise UserError(
        f"{where} is text, and no tokenizer is given",
        "give the model's own with `TextOptions(tokenizer='tokenizer.json')`",
    )


def _require_known(file: TokenizerFile, given: int, inputs: TokenInputs) -> None:
    known = inputs.limits.vocabulary
    if known is not None and given > known:
        raise UserError(
            f"{file.where} has {given} tokens, but the model knows {known}: the table that '{inputs.ids.name}' picks from has "
            "no more rows",
            "give the tokenizer that the model was trained with",
        )


def _usual_rows(inputs: TokenInputs, tokenizer: Any) -> str:
    """Documents for encoders, which are known by what their tokenizers put around a text; pieces for decoders."""
    if inputs.cached:
        return "pieces"
    return "documents" if inputs.typed or surrounds(tokenizer) else "pieces"


def _seq_len(inputs: TokenInputs, options: TextOptions) -> int:
    """The tokens of a sequence: as the model fixes it, as asked, or as usual."""
    longest = inputs.limits.longest
    if inputs.seq_len is not None:
        if options.seq_len not in (None, inputs.seq_len):
            raise UserError(
                f"input '{inputs.ids.name}' takes {inputs.ids}, so sequences cannot have {options.seq_len} tokens",
                f"leave `TextOptions(seq_len={options.seq_len})` out",
            )
        return inputs.seq_len
    if options.seq_len is None:
        return min(SEQ_LEN, longest or SEQ_LEN)
    if longest is not None and options.seq_len > longest:
        raise UserError(
            f"the model takes sequences of at most {longest} tokens, not of {options.seq_len}: it has no more positions",
            f"use `TextOptions(seq_len={longest})` or less",
        )
    return int(options.seq_len)


def _require_room(seq_len: int, tokenizer: Any) -> None:
    around = tokenizer.num_special_tokens_to_add(False)
    if seq_len <= around:
        raise UserError(
            f"sequences of {seq_len} tokens have no room for text: the tokenizer puts {around} around it",
            f"use `TextOptions(seq_len={around + 1})` or more",
        )


# ---------------------------------------------------------------------------------------- rows


def _sequences(
    texts: Iterator[str],
    tokenizer: Any,
    record: TextRecord,
    most: int | None,
    whole_only: bool,
    where: str,
) -> Iterator[tuple[int, list[int]]]:
    """The tokens of each row and the number of its document, until so many tokens have been read."""
    left = float("inf") if most is None else most
    rows = read = longest = 0
    for batch in _batches(texts):
        for tokens in encoded(tokenizer, batch):
            read, longest = read + 1, max(longest, len(tokens))
            for piece in _pieces(tokens, record, whole_only):
                if len(piece) > left:
                    if not rows:
                        raise _too_few(most, len(piece))
                    return
                left, rows = left - len(piece), rows + 1
                yield read, piece
    if not read:
        raise UserError(f"{where} holds no text", "give at least one line that is not empty")
    if not rows:
        raise UserError(
            f"no document of {where} has the {record.seq_len} tokens of a sequence; the longest has {longest}",
            "give longer documents (one on each line), or shorter sequences if the model takes them",
        )


def _too_few(most: int | None, needed: int) -> UserError:
    return UserError(
        f"`TextOptions(tokens={most})` is less than the first sequence has, which are {needed}",
        f"use `TextOptions(tokens={needed})` or more",
    )


def _pieces(tokens: list[int], record: TextRecord, whole_only: bool) -> Iterable[list[int]]:
    """What rows a document gives."""
    size = record.seq_len
    if record.rows == "documents" or len(tokens) < size:
        return [] if whole_only or not tokens else [tokens]
    return (tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Documents in lists that are large enough to be worth it, and fit into memory."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == _TEXTS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _runs(lengths: Array) -> Iterator[tuple[int, range]]:
    """Neighbouring rows of one length."""
    start = 0
    for size, run in itertools.groupby(lengths.tolist()):
        rows = len(list(run))
        yield size, range(start, start + rows)
        start += rows


class TokenRows:
    """Rows of tokens in a temporary file, made as far as they have been asked for.

    Text is read once, whatever the number of passes, and memory holds a few rows.
    """

    def __init__(self, made: Iterator[tuple[int, list[int]]], width: int):
        self.lengths: list[int] = []
        self.documents: list[int] = []  # the number of each row's
        self._made, self._width = made, width
        self._file = tempfile.TemporaryFile()
        self._failure: Exception | None = None

    def count(self) -> int:
        while self._make():
            pass
        return len(self.lengths)

    def read(self) -> Iterator[tuple[Array, Array]]:
        """Rows (n, width) and their lengths (n,), a few at a time from the first; behind its length a row is zero."""
        start = 0
        while True:
            while len(self.lengths) < start + _ROWS_AT_ONCE and self._make():
                pass
            lengths = np.array(self.lengths[start : start + _ROWS_AT_ONCE], np.int64)
            if not len(lengths):
                return
            self._file.seek(4 * start * self._width)
            body = self._file.read(4 * len(lengths) * self._width)
            yield np.frombuffer(body, np.int32).reshape(len(lengths), self._width).copy(), lengths
            start += len(lengths)

    def _make(self) -> bool:
        """One more row, if there is one."""
        if self._failure is not None:  # a generator that failed looks finished the next time it is asked
            raise self._failure
        try:
            made = next(self._made, None)
        except Exception as error:
            self._failure = error
            raise
        if made is None:
            return False
        document, tokens = made
        row = np.zeros(self._width, np.int32)
        row[: len(tokens)] = tokens
        self._file.seek(4 * len(self.lengths) * self._width)
        self._file.write(row.tobytes())
        self.lengths.append(len(tokens))
        self.documents.append(document)
        return True


class SomeRows:
    """Some of the rows of tokens that are kept, in their order."""

    def __init__(self, rows: TokenRows, chosen: Array):
        self._rows, self._chosen = rows, chosen  # (rows,) bool
        self.lengths = [length for length, taken in zip(rows.lengths, chosen) if taken]

    def count(self) -> int:
        return len(self.lengths)

    def read(self) -> Iterator[tuple[Array, Array]]:
        """As TokenRows has them."""
        start = 0
        for tokens, lengths in self._rows.read():
            taken = self._chosen[start : start + len(lengths)]
            start += len(lengths)
            if taken.any():
                yield tokens[taken], lengths[taken]
