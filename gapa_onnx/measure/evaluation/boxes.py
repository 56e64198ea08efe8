"""Boxes in numpy: how a detector writes them, how far they overlap, which are shown, and which objects they find.

Inside, a box is its two corners (x0, y0, x1, y1) in pixels of the model's input. An overlap is the area of the
intersection over that of the union (IoU).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array


@dataclass(frozen=True)
class BoxFormat:
    """What the four numbers of a box are."""

    corners: bool  #: two corners; else the centre, width and height
    shares: bool  #: of the image's width and height, 0 … 1; else pixels

    def to_corners(self, numbers: Array, size: Array) -> Array:
        """Corners in pixels (…, 4) of boxes as the model writes them, in an image of (width, height) `size`."""
        if self.shares:
            numbers = numbers * np.tile(size, 2)
        if self.corners:
            return numbers
        middle, half = numbers[..., :2], numbers[..., 2:] / 2
        return np.concatenate([middle - half, middle + half], axis=-1)

    def from_corners(self, corners: Array, size: Array) -> Array:
        """The four numbers that the model would write for boxes with these corners: the inverse."""
        numbers = corners
        if not self.corners:
            low, high = corners[..., :2], corners[..., 2:]
            numbers = np.concatenate([(low + high) / 2, high - low], axis=-1)
        return numbers / np.tile(size, 2) if self.shares else numbers

    def __str__(self) -> str:
        what = "two corners" if self.corners else "centre, width and height"
        return f"{what}, {'as shares of the image' if self.shares else 'in pixels'}"


FORMATS = tuple(BoxFormat(corners, shares) for corners in (False, True) for shares in (False, True))


def overlaps(boxes: Array, others: Array) -> Array:
    """IoU of every box (k, 4) with every other (m, 4): (k, m); a box without an area overlaps nothing."""
    shared = _shared(boxes, others)
    union = _area(boxes)[:, None] + _area(others)[None] - shared
    return _ratio(shared, union)


def contained(boxes: Array, regions: Array) -> Array:
    """The share of every box (k, 4) that lies in each region (m, 4): (k, m)."""
    return _ratio(_shared(boxes, regions), _area(boxes)[:, None])


def _ratio(part: Array, whole: Array) -> Array:
    ratio: Array = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
    return ratio


def _shared(boxes: Array, others: Array) -> Array:
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return _extent(low, high)


def _area(boxes: Array) -> Array:
    return _extent(boxes[:, :2], boxes[:, 2:])


def _extent(low: Array, high: Array) -> Array:
    area: Array = np.clip(high - low, 0, None).prod(axis=-1)
    return area


def survivors(corners: Array, classes: Array, confidence: Array, most_overlap: float) -> Array:
    """Non-maximum suppression within each class: the boxes that stay, by falling confidence.

    A box goes where one of its class that is more confident, and stays, overlaps it by more than `most_overlap`.
    """
    order = np.argsort(-confidence, kind="stable")
    rivals = overlaps(corners[order], corners[order]) > most_overlap
    rivals &= classes[order][:, None] == classes[order][None]
    alive = np.ones(len(order), bool)
    for place in range(len(order)):
        if alive[place]:
            alive[place + 1 :] &= ~rivals[place, place + 1 :]
    return order[alive]


def owners(overlap: Array, confidence: Array, least_overlap: float) -> Array:
    """Which object each box finds, −1 for none: (k,), from overlaps (k, m) that are 0 for another class.

    Boxes choose by falling confidence, each the object that it overlaps most among those not yet found (as COCO).
    """
    found = np.full(len(overlap), -1)
    free = overlap.copy()
    if not overlap.shape[1]:
        return found
    for box in np.argsort(-confidence, kind="stable"):
        best = int(free[box].argmax())
        if free[box, best] >= least_overlap:
            found[box] = best
            free[:, best] = -1.0
    return found


def average_precision(confidence: Array, right: Array, objects: int) -> float:
    """Area under the precision-recall curve, where the precision at a recall is the best at that or any higher one.

    Boxes of equal confidence come in together, so that their order does not count.
    """
    order = np.argsort(-confidence, kind="stable")
    hits = np.cumsum(right[order])
    last = np.flatnonzero(np.append(np.diff(confidence[order]) != 0, True)) if len(order) else np.arange(0)
    recall, precision = hits[last] / objects, hits[last] / (last + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    return float((np.diff(recall, prepend=0.0) * best).sum())
