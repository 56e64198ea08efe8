"""Inputs that can be shown: the most and the least certain ones, and segmented images.

An input can be shown if it is the only image-like one: (N, C, H, W) or (N, H, W, C) with 1 or 3 channels, or
(N, d) with d a square of at least 64 pixels. Only the few that are shown are ever kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import ImageOptions
from gapa_onnx.measure.evaluation.result import Example, SegmentationExample
from gapa_onnx.measure.evaluation.rows import VALID, Columns
from gapa_onnx.measure.evaluation.segmentation import PREDICTED, TARGET, UNCERTAINTY

SHOWN = 8
LARGEST = 128  #: pixels of a thumbnail's side
LARGEST_MAP = 256
_SMALLEST_SQUARE = 64  # pixels; below, a row of numbers is hardly an image

Shown = TypeVar("Shown")
Caption = Callable[[Columns, int], tuple[str, str]]


@dataclass
class Extremes(Generic[Shown]):
    """The rows with the lowest and the highest value of a running score; ties go to the earlier row."""

    most: int
    lowest: list[tuple[float, int, Shown]] = field(default_factory=list)
    highest: list[tuple[float, int, Shown]] = field(default_factory=list)

    def add(self, value: float, row: int, make: Callable[[], Shown]) -> None:
        """Keep what `make` gives if the row is among the extremes so far."""
        if not math.isfinite(value):
            return
        low = len(self.lowest) < self.most or value < self.lowest[-1][0]
        high = len(self.highest) < self.most or value > self.highest[-1][0]
        if not (low or high):
            return
        shown = make()
        if low:
            self.lowest = sorted([*self.lowest, (value, row, shown)], key=lambda e: e[:2])[: self.most]
        if high:
            self.highest = sorted([*self.highest, (value, row, shown)], key=lambda e: (-e[0], e[1]))[
                : self.most
            ]


class Gallery:
    """Collects examples while one data set streams by; `caption` says what is predicted and true of a row."""

    def __init__(self, images: ImageOptions, caption: Caption | None, origin: str):
        self._images, self._caption, self._origin = images, caption, origin
        self._by_score: Extremes[Example] = Extremes(SHOWN)
        self._by_error: Extremes[SegmentationExample] = Extremes(2)
        self._by_doubt: Extremes[SegmentationExample] = Extremes(4)

    def add(self, start: int, batch: Mapping[str, Array], columns: Columns, score: str) -> None:
        """One batch with its columns; `score` is the column that says how certain a row is."""
        name, caption = picture_input(batch), self._caption
        if name is None or caption is None:
            return
        for row in np.flatnonzero(columns[VALID]).tolist():

            def example(row: int = row) -> Example:
                predicted, target = caption(columns, row)
                image = thumbnail(batch[name][row], self._images)
                return Example(
                    start + row, image, float(columns[score][row]), predicted, target, self._origin
                )

            self._by_score.add(float(columns[score][row]), start + row, example)

    def add_maps(
        self, start: int, batch: Mapping[str, Array], columns: Columns, shape: tuple[int, ...]
    ) -> None:
        """Segmented images with their maps of shape (h, w)."""
        name = picture_input(batch)
        for row in np.flatnonzero(columns[VALID] & (columns["places"] > 0)).tolist():

            def example(row: int = row) -> SegmentationExample:
                step = -(-max(shape) // LARGEST_MAP)
                maps = [
                    columns[key][row].reshape(shape)[::step, ::step]
                    for key in (PREDICTED, TARGET, UNCERTAINTY)
                ]
                image = None if name is None else thumbnail(batch[name][row], self._images, LARGEST_MAP)
                return SegmentationExample(start + row, image, *maps)

            error = 1 - float(columns["gapa/correct"][row] / columns["places"][row])
            self._by_error.add(error, start + row, example)
            self._by_doubt.add(float(columns[UNCERTAINTY][row].mean()), start + row, example)

    @property
    def most_certain(self) -> tuple[Example, ...]:
        return tuple(example for _, _, example in self._by_score.lowest)

    @property
    def least_certain(self) -> tuple[Example, ...]:
        return tuple(example for _, _, example in self._by_score.highest)

    @property
    def segmented(self) -> tuple[SegmentationExample, ...]:
        """Up to four images: the two with most errors, the most uncertain of the others, the one with fewest."""
        chosen: dict[int, SegmentationExample] = {}
        for entries, most in (
            (self._by_error.highest, 2),
            (self._by_doubt.highest, 3),
            (self._by_error.lowest, 4),
        ):
            for _, row, example in entries:
                if len(chosen) < most:
                    chosen.setdefault(row, example)
        return tuple(chosen.values())


def picture_input(batch: Mapping[str, Array]) -> str | None:
    """The input that can be shown, if there is exactly one."""
    found = [name for name, array in batch.items() if array.dtype.kind in "fiu" and _layout(array.shape[1:])]
    return found[0] if len(found) == 1 else None


def _layout(shape: tuple[int, ...]) -> str | None:
    if len(shape) == 3 and min(shape) > 0:
        return "first" if shape[0] in (1, 3) else "last" if shape[2] in (1, 3) else None
    if len(shape) == 1 and shape[0] >= _SMALLEST_SQUARE and math.isqrt(shape[0]) ** 2 == shape[0]:
        return "square"
    return None


def thumbnail(row: Array, options: ImageOptions, largest: int = LARGEST) -> Array:
    """One row of an image input as uint8, (h, w) or (h, w, 3), averaged down to at most `largest` pixels.

    The normalisation of `options` and its order of colours are undone. What then lies within 0 … 1 is scaled by 255,
    what lies within 0 … 255 is taken as it is, and anything else runs from its own darkest to its own brightest value.
    """
    layout = _layout(row.shape)
    if layout == "square":
        side = math.isqrt(row.shape[0])
        pixels = row.reshape(side, side, 1)
    else:
        pixels = row.transpose(1, 2, 0) if layout == "first" else row
    integer = pixels.dtype.kind in "iu"
    pixels = pixels.astype(np.float64)
    mean = np.asarray(0.0 if options.mean is None else options.mean)
    std = np.asarray(1.0 if options.std is None else options.std)
    pixels = pixels * std + mean
    if options.colors == "bgr":
        pixels = pixels[..., ::-1]
    pixels = _smaller(np.nan_to_num(pixels), largest)
    low, high = pixels.min(), pixels.max()
    normalised = bool(np.any(mean != 0) or np.any(std != 1))
    if normalised or (not integer and low >= 0 and high <= 1):
        pixels = pixels * 255
    elif not (low >= 0 and high <= 255):
        pixels = (pixels - low) / (high - low) * 255
    shown: Array = pixels.round().clip(0, 255).astype(np.uint8)
    return shown[..., 0] if shown.shape[-1] == 1 else shown


def _smaller(pixels: Array, largest: int) -> Array:
    step = -(-max(pixels.shape[:2]) // largest)
    if step == 1:
        return pixels
    height, width = (max(1, size // step) for size in pixels.shape[:2])
    cut = pixels[: height * step, : width * step]
    rows = np.add.reduceat(cut, np.arange(0, len(cut), step), axis=0)
    both = np.add.reduceat(rows, np.arange(0, rows.shape[1], step), axis=1)
    means: Array = both[:height, :width] / (min(step, len(cut)) * min(step, cut.shape[1]))
    return means
