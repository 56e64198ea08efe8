"""A small detector that really detects: coloured shapes on noise, fixed random features, a fitted last layer.

No framework is needed: the features are convolutions with seeded random weights, and the last 1x1 convolutions are
fitted in numpy, class scores by logistic regression and box sides by ridge regression on the cells inside an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from support.detectors import _Graph

SIZE, STRIDE = 64, 8
CELLS = SIZE // STRIDE
ANCHORS = CELLS * CELLS
CLASSES = ("red square", "green disc", "blue square")
FORMS = ("4+C", "5+C", "separate")
_COLOURS = np.array([[0.9, 0.2, 0.2], [0.2, 0.8, 0.3], [0.25, 0.3, 0.95]])
_STRANGE_COLOUR = np.array([0.9, 0.85, 0.1])
_WIDTHS = (32, 64, 128)
_CENTRES = (np.stack(np.meshgrid(np.arange(CELLS), np.arange(CELLS)), -1).reshape(-1, 2) + 0.5) * STRIDE


@dataclass(frozen=True)
class Scenes:
    """Images (n, 3, 64, 64) in 0 … 1, and for each its boxes (k, 4) as corners in pixels and labels (k,)."""

    images: np.ndarray
    boxes: tuple[np.ndarray, ...]
    labels: tuple[np.ndarray, ...]


def images(count: int, seed: int) -> Scenes:
    """Scenes of one to three objects; some overlap, the later one on top."""
    rng = np.random.default_rng(seed)
    pictures = _background(rng, count)
    boxes, labels = [], []
    for picture in pictures:
        kinds = rng.integers(0, len(CLASSES), rng.integers(1, 4))
        found: list[np.ndarray] = []
        for kind in kinds:
            corners = _place(rng, found)
            shape = "disc" if CLASSES[kind].endswith("disc") else "square"
            _draw(rng, picture, corners, shape, _COLOURS[kind])
            found.append(corners)
        boxes.append(np.stack(found))
        labels.append(kinds)
    return Scenes(pictures.clip(0, 1).astype(np.float32), tuple(boxes), tuple(labels))


def strange_images(kind: str, count: int, seed: int) -> np.ndarray:
    """Images unlike those: `noise`, `shuffled` tiles of ordinary ones, or `unseen` yellow crosses."""
    rng = np.random.default_rng(seed)
    if kind == "noise":
        return rng.random((count, 3, SIZE, SIZE)).astype(np.float32)
    if kind == "shuffled":
        tiles = images(count, seed).images.reshape(count, 3, 8, 8, 8, 8).transpose(0, 2, 4, 1, 3, 5)
        mixed = np.stack([rng.permutation(one.reshape(64, 3, 8, 8)) for one in tiles])
        return mixed.reshape(count, 8, 8, 3, 8, 8).transpose(0, 3, 1, 4, 2, 5).reshape(count, 3, SIZE, SIZE)
    if kind == "unseen":
        pictures = _background(rng, count)
        for picture in pictures:
            _draw(rng, picture, _place(rng, []), "cross", _STRANGE_COLOUR)
        return pictures.clip(0, 1).astype(np.float32)
    raise ValueError(kind)


def coco(scenes: Scenes, size: tuple[int, int] = (SIZE, SIZE), first_id: int = 1) -> dict[str, Any]:
    """The truth as a COCO file has it, for images of (width, height) that were scaled to the model's input."""
    scale = np.array(size) / SIZE
    listed: dict[str, Any] = {
        "images": [
            {"id": 100 + row, "file_name": file_name(row), "width": size[0], "height": size[1]}
            for row in range(len(scenes.images))
        ],
        "annotations": [],
        "categories": [{"id": first_id + 2 * i, "name": name} for i, name in enumerate(CLASSES)],
    }
    for row, (boxes, labels) in enumerate(zip(scenes.boxes, scenes.labels)):
        for box, label in zip(boxes, labels):
            low, high = box[:2] * scale, box[2:] * scale
            listed["annotations"].append(
                {
                    "id": len(listed["annotations"]),
                    "image_id": 100 + row,
                    "category_id": first_id + 2 * int(label),
                    "bbox": [*low.tolist(), *(high - low).tolist()],
                }
            )
    return listed


def file_name(row: int) -> str:
    return f"scene_{row:03d}.png"


def model(form: str = "4+C") -> onnx.ModelProto:
    """The detector; `form` says how its answers are laid out, for A = 64 candidates and C = 3 classes.

    4+C       `output0` (n, 4 + C, A): centre, width and height in pixels, class probabilities
    5+C       `output0` (n, A, 5 + C): the same, with the probability of any object before those of the classes
    separate  `boxes` (n, A, 4), corners as shares of the image, and `scores` (n, A, C)
    """
    fitted = _fitted()
    g = _Graph(seed=0)
    features = _features(g)
    sides = _flat(
        g, _last(g, features, fitted["sides"])
    )  # (n, 4, A): left, top, right, bottom of the cell's centre
    chances = g.add("Sigmoid", _flat(g, _last(g, features, fitted["classes"])))
    centres = g.weight(_CENTRES.T[None].astype(np.float32))
    first, last = (g.add("Slice", sides, g.ints(a), g.ints(b), g.ints(1)) for a, b in ((0, 2), (2, 4)))
    low, high = g.add("Sub", centres, first), g.add("Add", centres, last)
    if form == "separate":
        corners = g.add("Concat", low, high, axis=1)
        shares = g.add("Div", corners, g.weight(np.float32(SIZE)))
        g.add("Transpose", shares, name="boxes", perm=[0, 2, 1])
        g.add("Transpose", chances, name="scores", perm=[0, 2, 1])
        return _model(g, {"boxes": (ANCHORS, 4), "scores": (ANCHORS, len(CLASSES))})
    middle = g.add("Mul", g.add("Add", low, high), g.weight(np.float32(0.5)))
    numbers = [middle, g.add("Sub", high, low)]
    if form == "4+C":
        g.add("Concat", *numbers, chances, name="output0", axis=1)
        return _model(g, {"output0": (4 + len(CLASSES), ANCHORS)})
    if form == "5+C":
        objects = g.add("Sigmoid", _flat(g, _last(g, features, fitted["object"])))
        which = g.add("Sigmoid", _flat(g, _last(g, features, fitted["which"])))
        g.add("Transpose", g.add("Concat", *numbers, objects, which, axis=1), name="output0", perm=[0, 2, 1])
        return _model(g, {"output0": (ANCHORS, 5 + len(CLASSES))})
    raise ValueError(form)


# ------------------------------------------------------------------------------- drawing


def _background(rng: np.random.Generator, count: int) -> np.ndarray:
    level = rng.uniform(0.3, 0.6, (count, 1, 1, 1))
    return level + 0.04 * rng.normal(size=(count, 3, SIZE, SIZE))


def _place(rng: np.random.Generator, others: list[np.ndarray]) -> np.ndarray:
    """Corners in pixels that hide at most a part of each other object."""
    for _ in range(50):
        extent = rng.uniform(12, 28) * np.array([1.0, rng.uniform(0.8, 1.25)])
        low = rng.uniform(1, SIZE - 1 - extent)
        corners = np.concatenate([low, low + extent])
        middle = (corners[:2] + corners[2:]) / 2
        if all(np.abs(middle - (other[:2] + other[2:]) / 2).max() > 14 for other in others):
            break
    return corners


def _draw(
    rng: np.random.Generator, picture: np.ndarray, corners: np.ndarray, shape: str, colour: np.ndarray
) -> None:
    """Pixels whose centre lies in the shape; the colour varies a little from object to object."""
    middle, half = (corners[:2] + corners[2:]) / 2, (corners[2:] - corners[:2]) / 2
    ys, xs = np.mgrid[:SIZE, :SIZE] + 0.5
    u, v = (xs - middle[0]) / half[0], (ys - middle[1]) / half[1]
    inside = {
        "square": np.maximum(abs(u), abs(v)) <= 1,
        "disc": u**2 + v**2 <= 1,
        "cross": (np.minimum(abs(u), abs(v)) <= 0.3) & (np.maximum(abs(u), abs(v)) <= 1),
    }[shape]
    shade = colour + 0.08 * rng.normal(size=3)
    picture[:, inside] = shade[:, None] + 0.04 * rng.normal(size=(3, inside.sum()))


# --------------------------------------------------------------------------------- model


def _features(g: _Graph) -> str:
    """Three strided convolutions, each with a Relu; a feature sees 29 x 29 pixels."""
    x, width = "images", 3
    for wide in _WIDTHS:
        x, width = g.add("Relu", g.conv(x, width, wide, 5, stride=2)), wide
    return x


def _last(g: _Graph, features: str, weights: np.ndarray) -> str:
    """A 1x1 convolution with fitted weights (features + 1, outputs), the constant last."""
    kernel = weights[:-1].T[:, :, None, None].astype(np.float32)
    return g.add("Conv", features, g.weight(kernel), g.weight(weights[-1].astype(np.float32)))


def _flat(g: _Graph, x: str) -> str:
    return g.add("Reshape", x, g.ints(0, 0, -1))


def _model(g: _Graph, outputs: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    graph = helper.make_graph(
        g.nodes,
        "shapes",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, SIZE, SIZE])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape])
            for name, shape in outputs.items()
        ],
        g.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ------------------------------------------------------------------------------- fitting


@lru_cache(maxsize=1)
def _fitted() -> dict[str, np.ndarray]:
    """Weights (features + 1, outputs) of the last convolutions, from 400 scenes."""
    scenes = images(400, seed=1)
    g = _Graph(seed=0)
    backbone = _model(g, {_features(g): (_WIDTHS[-1], CELLS, CELLS)})
    session = ort.InferenceSession(backbone.SerializeToString(), providers=["CPUExecutionProvider"])
    maps = session.run(None, {"images": scenes.images})[0].astype(np.float64)  # (n, d, h, w)
    rows = maps.transpose(0, 2, 3, 1).reshape(-1, _WIDTHS[-1])
    rows = np.hstack([rows, np.ones((len(rows), 1))])
    owners, sides = map(np.concatenate, zip(*map(_targets, scenes.boxes, scenes.labels)))
    inside = owners >= 0
    hot = owners[:, None] == np.arange(len(CLASSES))
    return {
        "classes": np.stack([_logistic(rows, one) for one in hot.T], axis=1),
        "object": _logistic(rows, inside)[:, None],
        "which": np.stack([_logistic(rows[inside], one) for one in hot[inside].T], axis=1),
        "sides": _ridge(rows[inside], sides[inside]),
    }


def _targets(boxes: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each cell the class of the object whose middle part holds its centre, else -1; and that object's sides."""
    owners, sides = np.full(ANCHORS, -1), np.zeros((ANCHORS, 4))
    for box, label in zip(boxes, labels):  # a later object lies on top
        reach = np.maximum(0.3 * (box[2:] - box[:2]), STRIDE / 2)
        held = (np.abs(_CENTRES - (box[:2] + box[2:]) / 2) <= reach).all(axis=1)
        owners[held] = label
        sides[held] = np.hstack([_CENTRES[held] - box[:2], box[2:] - _CENTRES[held]])
    return owners, sides


def _ridge(rows: np.ndarray, targets: np.ndarray, penalty: float = 1e-3) -> np.ndarray:
    gram = rows.T @ rows
    return np.linalg.solve(gram + penalty * np.trace(gram) / len(gram) * np.eye(len(gram)), rows.T @ targets)


def _logistic(rows: np.ndarray, yes: np.ndarray, penalty: float = 1e-4, steps: int = 8) -> np.ndarray:
    """Newton's steps on the penalised log loss."""
    weights = np.zeros(rows.shape[1])
    for _ in range(steps):
        chance = 1 / (1 + np.exp(-np.clip(rows @ weights, -30, 30)))
        curvature = (rows * (chance * (1 - chance) + 1e-6)[:, None]).T @ rows
        slope = rows.T @ (chance - yes) + penalty * len(rows) * weights
        weights = weights - np.linalg.solve(curvature + penalty * len(rows) * np.eye(len(weights)), slope)
    return weights
