"""What the model takes: its inputs, and how images are turned into one of them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TypeGuard

import numpy as np

from gapa_onnx.errors import UserError
from gapa_onnx.record import ImageRecord

LAYOUTS = ("first", "last")
COLORS = ("rgb", "bgr", "grey")


@dataclass(frozen=True)
class InputSpec:
    """One graph input that is not an initializer.

    A dimension is a number, a symbol, or None where nothing is known (a negative number counts as
    None). `shape` is None where even the rank is unknown. Text inputs have dtype object or str.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int | str | None, ...] | None

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
