"""What the model takes: its inputs, and how images are turned into one of them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TypeGuard

import numpy as np


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
    """The normalisation (x − mean) / std of float image inputs, x in 0 … 1; one value or one per channel."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


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
