"""What the model takes: its inputs, and how images and text are turned into them."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeGuard

import numpy as np

from gapa_onnx.errors import UserError
from gapa_onnx.record import ImageRecord, TextRecord

LAYOUTS = ("first", "last")
COLORS = ("rgb", "bgr", "grey")
TEXT_ROWS = ("pieces", "documents")


@dataclass(frozen=True)
class TokenLimits:
    """What a model's graph says about the tokens that it takes; None where it does not tell."""

    vocabulary: int | None = None  #: how many tokens the model knows
    longest: int | None = None  #: tokens of a sequence at most
    head_size: int | None = None  #: numbers of one head in a cache


@dataclass(frozen=True)
class InputSpec:
    """One graph input that is not an initializer.

    A dimension is a number, a symbol, or None where nothing is known (a negative number counts as
    None). `shape` is None where even the rank is unknown. Text inputs have dtype object or str.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int | str | None, ...] | None
    limits: TokenLimits | None = None  #: where it takes tokens, and the graph was seen

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(_dimension(size) for size in self.shape))

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {shape_name(self.shape)}"


@dataclass(frozen=True)
class ImageOptions:
    """How images become inputs; what is None is as a converted file says, and else as the model's input is.

    Parameters
    ----------
    mean, std: the normalisation (x − mean) / std of float inputs, x in 0 … 1; one value, or one per channel in the
        order of the model's channels.
    size: (height, width) that images are resized to, where the model leaves it open.
    layout: "first" or "last", where the channels are, if the input's shape does not tell.
    colors: "rgb", "bgr" or "grey".
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: tuple[int, int] | None = None
    layout: str | None = None
    colors: str | None = None

    def __post_init__(self) -> None:
        for name, words in (("layout", LAYOUTS), ("colors", COLORS)):
            word = getattr(self, name)
            if word not in (None, *words):
                raise UserError(
                    f"`ImageOptions({name}={word!r})` is not known", f"choose one of {', '.join(words)}"
                )
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise UserError(
                f"`ImageOptions(size={self.size})` is not a height and a width", "for example 224,224"
            )

    def completed(self, recorded: ImageRecord | None) -> ImageOptions:
        """With what the record of a converted file says in place of what is None."""
        if recorded is None:
            return self
        size = self.size
        # an open side beside a fixed one is the model's doing, and will be so again
        if size is None and recorded.height is not None and recorded.width is not None:
            size = recorded.height, recorded.width
        return ImageOptions(
            mean=recorded.mean if self.mean is None else self.mean,
            std=recorded.std if self.std is None else self.std,
            size=size,
            layout=self.layout or recorded.layout,
            colors=self.colors or recorded.colors,
        )


@dataclass(frozen=True)
class TextOptions:
    """How text becomes inputs; what is None is as a converted file says, and else as follows.

    Parameters
    ----------
    tokenizer: path of a tokenizer.json, or of a folder with one, or a `tokenizers.Tokenizer`.
    seq_len: tokens of a sequence; as many as the model's input fixes, else 96.
    tokens: at most so many are read; all, and 200,000 by `convert`.
    field: of a .jsonl, that holds the text; "text".
    rows: "pieces", as a decoder takes text: a document is cut into sequences one after another. "documents", as an
        encoder does: its beginning is one row. By the model's inputs and the tokenizer.
    """

    tokenizer: Any = None
    seq_len: int | None = None
    tokens: int | None = None
    field: str | None = None
    rows: str | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "tokens"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, Integral) or number < 1):
                raise UserError(
                    f"`TextOptions({name}={number!r})` is not a number of tokens", "for example 96"
                )
        if self.rows not in (None, *TEXT_ROWS):
            raise UserError(
                f"`TextOptions(rows={self.rows!r})` is not known", f"choose one of {', '.join(TEXT_ROWS)}"
            )

    def completed(self, recorded: TextRecord | None, tokenizer: Any = None) -> TextOptions:
        """With what a converted file says in place of what is None: its record, and the tokenizer that it keeps."""
        if recorded is None:
            return self
        return TextOptions(
            tokenizer=tokenizer if self.tokenizer is None else self.tokenizer,
            seq_len=self.seq_len or recorded.seq_len,
            tokens=self.tokens,
            field=self.field or recorded.field,
            rows=self.rows or recorded.rows,
        )


@dataclass(frozen=True)
class Preparation:
    """How data that are no arrays become inputs; the one that matters is that of what is given."""

    images: ImageOptions = field(default_factory=ImageOptions)
    text: TextOptions = field(default_factory=TextOptions)

    @classmethod
    def of(cls, images: ImageOptions | None, text: TextOptions | None) -> Preparation:
        return cls(images or ImageOptions(), text or TextOptions())


def fixed(size: int | str | None) -> TypeGuard[int]:
    """Whether a dimension of a spec is a number."""
    return isinstance(size, int)


def matches(shape: tuple[int, ...], wanted: tuple[int | str | None, ...]) -> bool:
    """Whether an array's shape is one that the spec's dimensions allow."""
    return len(shape) == len(wanted) and all(not fixed(w) or w == s for s, w in zip(shape, wanted))


def dtype_name(dtype: np.dtype) -> str:
    return "text" if dtype.kind in "USO" else dtype.name


def shape_name(shape: tuple[int | str | None, ...] | None) -> str:
    if shape is None:
        return "of any shape"
    sizes = ["?" if size is None else str(size) for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _dimension(size: int | str | None) -> int | str | None:
    if isinstance(size, Integral):
        return int(size) if size >= 0 else None
    return size or None
