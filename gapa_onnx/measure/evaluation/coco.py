"""What is true of images with objects in them: boxes and classes from a COCO-style .json, one row per image.

images        id, file_name, width and height in pixels
annotations   image_id, category_id, bbox [x, y, width, height] in pixels; iscrowd 1 for a region that is not counted
categories    id; by rising id they are the model's classes
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.bundle import reading
from gapa_onnx.errors import UserError

NO_OBJECT = -1  #: class of what fills up the rows of images with fewer objects
_BEYOND = 2.0  # pixels by which a box may reach beyond its image; annotations are rounded
_HINT = "give a COCO-style .json: images (id, file_name, width, height), annotations (image_id, category_id, bbox) and categories (id)"

_ONE_ENTRY = "give each image one entry, with its file_name"


@dataclass(frozen=True)
class Pictures:
    """The images that the model is run on."""

    files: Sequence[Path]  #: one per row where the data are image files, else none
    rows: int | None
    description: str
    size: tuple[int, int] | None  #: (width, height) of what the model sees; None: each image as it is


@dataclass(frozen=True)
class _Image:
    """One entry of `images`, and its objects."""

    name: str
    size: tuple[float, float]
    corners: list[tuple[float, float, float, float]]
    classes: list[int]
    crowd: list[bool]


def read_boxes(labels: Any, pictures: Pictures, classes: int) -> tuple[Array, tuple[str, ...]]:
    """One record per row of the data, and notes for people.

    Fields: `size` (2,) is (width, height) of what the model sees, `boxes` (most, 4) are corners in pixels of that,
    `classes` (most,) are numbers from 0 or NO_OBJECT, `crowd` (most,) marks regions that are not counted.
    """
    plain, where = _plain(labels)
    numbers, notes = _class_numbers(plain, where, classes)
    images = _images(plain, where)
    _annotate(images, plain, where, numbers)
    rows, unused = _by_row(list(images.values()), pictures, where)
    if unused:
        notes += (f"{unused} of the {len(images)} images in {where} are not among the data",)
    if not any(kind != NO_OBJECT for image in rows for kind in image.classes):
        raise UserError(f"{where} has no box for any image of the data", "check that both belong together")
    return _records(rows, pictures.size), notes


def _plain(labels: Any) -> tuple[Mapping[str, Any], str]:
    """The parsed file, or what Python was given, and its name in messages."""
    if isinstance(labels, Mapping):
        plain, where = labels, "the labels"
    elif isinstance(labels, (str, os.PathLike)):
        path, where = Path(labels), str(labels)
        if path.suffix.lower() != ".json":
            raise UserError(f"{where} holds no boxes, and a detector is judged by boxes", _HINT)
        if not path.is_file():
            raise UserError(f"there is no file {path}", _HINT)
        with reading(path):
            plain = json.loads(path.read_text(encoding="utf-8"))
    else:
        raise UserError(
            f"labels of type {type(labels).__name__} hold no boxes, and a detector is judged by boxes", _HINT
        )
    for key in ("images", "annotations", "categories"):
        entries = plain.get(key) if isinstance(plain, Mapping) else None
        if not isinstance(entries, (list, tuple)) or not all(isinstance(one, Mapping) for one in entries):
            raise UserError(f"{where} is not a COCO file: it has no list of {key}", _HINT)
    return plain, where


def _class_numbers(
    plain: Mapping[str, Any], where: str, classes: int
) -> tuple[dict[int, int], tuple[str, ...]]:
    """Category id -> class of the model."""
    ids = [
        _whole(one, "id", f"{where}, categories[{place}]") for place, one in enumerate(plain["categories"])
    ]
    if len(set(ids)) < len(ids):
        raise UserError(f"{where} has two categories of one id", "number them apart")
    if len(ids) == classes:
        return {one: number for number, one in enumerate(sorted(ids))}, ()
    if ids and min(ids) >= 0 and max(ids) < classes:  # as detectors with 91 classes for the 80 of COCO
        note = f"{where} has {len(ids)} categories and the model {classes} classes: ids are taken for class numbers"
        return {one: one for one in ids}, (note,)
    raise UserError(
        f"{where} has {len(ids)} categories, but the model has {classes} classes",
        "list all classes of the model; by rising id they are its classes from 0 on",
    )


def _images(plain: Mapping[str, Any], where: str) -> dict[int, _Image]:
    found: dict[int, _Image] = {}
    for place, entry in enumerate(plain["images"]):
        here = f"{where}, images[{place}]"
        key = _whole(entry, "id", here)
        if key in found:
            raise UserError(f"{here} has the id {key} of another image", "number them apart")
        size = (_whole(entry, "width", here), _whole(entry, "height", here))
        if min(size) < 1:
            raise UserError(f"{here} is {size[0]} x {size[1]} pixels", "give the size of the original image")
        found[key] = _Image(str(entry.get("file_name", key)), size, [], [], [])
    return found


def _annotate(
    images: Mapping[int, _Image], plain: Mapping[str, Any], where: str, numbers: Mapping[int, int]
) -> None:
    """Give every image its objects."""
    for place, entry in enumerate(plain["annotations"]):
        here = f"{where}, annotations[{place}]"
        key, category = _whole(entry, "image_id", here), _whole(entry, "category_id", here)
        if key not in images:
            raise UserError(f"{here} is of image {key}, which is not among the images", _HINT)
        if category not in numbers:
            raise UserError(f"{here} has the category {category}, which is not among the categories", _HINT)
        image = images[key]
        image.corners.append(_corners(entry.get("bbox"), image, here))
        image.classes.append(numbers[category])
        image.crowd.append(bool(entry.get("iscrowd", 0)))


def _corners(box: Any, image: _Image, here: str) -> tuple[float, float, float, float]:
    """The corners of a [x, y, width, height] that lies in its image."""
    if not isinstance(box, (list, tuple)) or len(box) != 4 or not all(map(_finite, box)):
        raise UserError(f"{here} has no bbox of four numbers", "write [x, y, width, height] in pixels")
    x, y, width, height = map(float, box)
    across, down = image.size
    outside = min(x, y) < -_BEYOND or x + width > across + _BEYOND or y + height > down + _BEYOND
    if outside or min(width, height) < 0:
        raise UserError(
            f"{here}: the box {[x, y, width, height]} does not lie in the image {image.name!r} of "
            f"{across} x {down} pixels",
            "boxes are [x, y, width, height] in pixels of the original image",
        )
    return max(x, 0.0), max(y, 0.0), min(x + width, across), min(y + height, down)


def _by_row(images: list[_Image], pictures: Pictures, where: str) -> tuple[list[_Image], int]:
    """The image of each row, and how many images are of no row: by file name, else by the order of `images`."""
    if not pictures.files:
        if pictures.rows is not None and len(images) != pictures.rows:
            raise UserError(
                f"{where} has {len(images)} images for {pictures.rows} rows of {pictures.description}",
                "image i belongs to row i of the data",
            )
        return images, 0
    by_name: dict[str, list[_Image]] = {}
    for image in images:
        by_name.setdefault(PurePosixPath(image.name).name, []).append(image)
    taken: dict[int, Path] = {}
    rows = []
    for path in pictures.files:
        image = _named(path, by_name.get(path.name, []), where)
        if id(image) in taken:
            raise UserError(
                f"{taken[id(image)]} and {path} both stand for the image {image.name!r} of {where}",
                _ONE_ENTRY,
            )
        taken[id(image)] = path
        rows.append(image)
    return rows, len(images) - len(rows)


def _named(path: Path, candidates: Sequence[_Image], where: str) -> _Image:
    """The image of a file; folders in the names tell files of one name apart."""
    with_folders = [one for one in candidates if f"/{path.as_posix()}".endswith(f"/{one.name}")]
    longest = max((len(one.name) for one in with_folders), default=0)
    found = [one for one in with_folders if len(one.name) == longest] or candidates
    if len(found) != 1:
        what = "is not among the images of" if not found else "is there several times in"
        raise UserError(f"{path} {what} {where}", _ONE_ENTRY)
    return found[0]


def _records(rows: Sequence[_Image], seen: tuple[int, int] | None) -> Array:
    most = max(1, max(len(image.classes) for image in rows))
    kinds = [
        ("size", np.float64, (2,)),
        ("boxes", np.float64, (most, 4)),
        ("classes", np.int64, (most,)),
        ("crowd", np.bool_, (most,)),
    ]
    found = np.zeros(len(rows), kinds)
    found["classes"] = NO_OBJECT
    for row, image in enumerate(rows):
        size, count = np.array(seen or image.size, float), len(image.classes)
        found["size"][row] = size
        if count:
            scale = np.tile(size / np.array(image.size), 2)
            found["boxes"][row, :count] = np.array(image.corners) * scale
            found["classes"][row, :count] = image.classes
            found["crowd"][row, :count] = image.crowd
    return found


def _whole(entry: Mapping[str, Any], key: str, here: str) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{here} has no whole number as {key}", _HINT)
    return value


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
