"""Small detectors with random weights, wired as those that people export.

Every builder takes the number of `classes`, of `scales` of the map, the `size` of an image's sides (None: symbolic),
the `width` of the hidden maps, the `batch` (a number, or the name of a symbol) and a `seed`. Scale i has size / 2^(i + 2)
squared positions, A candidates in all. The last hidden maps are called `box_i`, `cls_i` or `head_i`, what
the last layers make of them `boxes_i`, `classes_i`, `objects_i` or `numbers_i`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Size = int | str


class _Graph:
    """Nodes and weights of a model that is being written."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def add(self, op: str, *inputs: str, name: str | None = None, **attrs: object) -> str:
        name = name or f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"n_{name}", **attrs))
        return name

    def split(self, x: str, sizes: Sequence[int], axis: int, names: Sequence[str] = ()) -> list[str]:
        names = list(names) or [f"split_{len(self.nodes)}_{i}" for i in range(len(sizes))]
        split = [x, self.ints(*sizes)]
        self.nodes.append(helper.make_node("Split", split, names, name=f"n_{names[0]}", axis=axis))
        return list(names)

    def weight(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def ints(self, *values: int) -> str:
        return self.weight(np.array(values, np.int64))

    def floats(self, *values: float) -> str:
        return self.weight(np.array(values if len(values) > 1 else values[0], np.float32))

    def conv(
        self,
        x: str,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        name: str | None = None,
        bias: float = 0.0,
    ) -> str:
        w = self.rng.normal(size=(outputs, inputs, kernel, kernel)) / np.sqrt(inputs * kernel**2)
        shift = bias + 0.1 * self.rng.normal(size=outputs)
        pads, weights = [kernel // 2] * 4, [self.weight(array.astype(np.float32)) for array in (w, shift)]
        return self.add("Conv", x, *weights, name=name, strides=[stride] * 2, pads=pads)

    def dense(self, x: str, inputs: int, outputs: int, name: str | None = None, bias: float = 0.0) -> str:
        w = self.rng.normal(size=(inputs, outputs)) / np.sqrt(inputs)
        shift = bias + 0.1 * self.rng.normal(size=outputs)
        product = self.add("MatMul", x, self.weight(w.astype(np.float32)))
        return self.add("Add", product, self.weight(shift.astype(np.float32)), name=name)

    def silu(self, x: str, name: str | None = None) -> str:
        return self.add("Mul", x, self.add("Sigmoid", x), name=name)

    def cut(self, x: str, first: int, last: int, axis: int) -> str:
        return self.add("Slice", x, self.ints(first), self.ints(last), self.ints(axis))

    def reshape(self, x: str, *shape: int | tuple[str, int]) -> str:
        """Entries of the shape are numbers, or a tensor and the axis whose length is taken."""
        if all(isinstance(entry, int) for entry in shape):
            return self.add("Reshape", x, self.ints(*shape))
        parts = [
            self.ints(entry)
            if isinstance(entry, int)
            else self.add("Gather", self.add("Shape", entry[0]), self.ints(entry[1]), axis=0)
            for entry in shape
        ]
        return self.add("Reshape", x, self.add("Concat", *parts, axis=0))

    def model(
        self, name: str, size: int | None, batch: Size, outputs: Mapping[str, Sequence[Size]], opset: int = 17
    ) -> onnx.ModelProto:
        sides = [size, size] if size is not None else ["h", "w"]
        kinds = {"labels": TensorProto.INT64}
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, *sides])],
            [
                helper.make_tensor_value_info(output, kinds.get(output, TensorProto.FLOAT), shape)
                for output, shape in outputs.items()
            ],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def _pyramid(g: _Graph, scales: int, width: int) -> Iterator[tuple[int, str]]:
    """The map that the heads of each scale read."""
    x = g.silu(g.conv("images", 3, width, 3, stride=2))
    for i in range(scales):
        x = g.silu(g.conv(x, width, width, 3, stride=2))
        yield i, x


def _candidates(size: int | None, scales: int, anchors: int = 1) -> Size:
    return "a" if size is None else anchors * sum((size >> (i + 2)) ** 2 for i in range(scales))


def _grid(g: _Graph, maps: str, i: int, size: int | None) -> str:
    """(2, h w): x and y of each position of a map, in its own units."""
    if size is not None:
        side = size >> (i + 2)
        ys, xs = np.meshgrid(*[np.arange(side, dtype=np.float32)] * 2, indexing="ij")
        return g.weight(np.stack([xs.ravel(), ys.ravel()]))
    sides = g.add("Slice", g.add("Shape", maps), g.ints(2), g.ints(4))
    one = numpy_helper.from_array(np.ones(1, np.float32))
    places = g.add("NonZero", g.add("ConstantOfShape", sides, value=one))
    return g.add("Cast", g.add("Gather", places, g.ints(1, 0), axis=0), to=TensorProto.FLOAT)


def _yolo_parts(
    g: _Graph, classes: int, scales: int, size: int | None, width: int, bins: int, kernel: int
) -> tuple[str, str]:
    """Boxes (n, 4, A) and class logits (n, C, A) of `yolo_like`."""
    parts, anchors, strides = [], [], []
    rows = 4 * bins + classes
    for i, x in _pyramid(g, scales, width):
        box = g.silu(g.conv(x, width, width, 3), name=f"box_{i}")
        label = g.silu(g.conv(x, width, width, 3), name=f"cls_{i}")
        heads = [
            g.conv(box, width, 4 * bins, kernel, name=f"boxes_{i}"),
            g.conv(label, width, classes, kernel, name=f"classes_{i}"),
        ]
        joined = g.add("Concat", *heads, axis=1)
        parts.append(g.add("Reshape", joined, g.ints(0, rows, -1)))
        grid = _grid(g, joined, i, size)
        anchors.append(g.add("Add", grid, g.floats(0.5)))
        zeros = g.add("Mul", g.cut(grid, 0, 1, 0), g.floats(0.0))
        strides.append(g.add("Add", zeros, g.floats(2.0 ** (i + 2))))
    everything = g.add("Concat", *parts, axis=2) if scales > 1 else parts[0]
    box, label = g.split(everything, (4 * bins, classes), 1, ("box", "cls"))
    by_side = g.add("Reshape", box, g.ints(0, 4, bins, -1))
    chances = g.add("Softmax", g.add("Transpose", by_side, perm=[0, 2, 1, 3]), axis=1)
    distances = g.weight(np.arange(bins, dtype=np.float32).reshape(1, bins, 1, 1))
    sides = g.add("Reshape", g.add("Conv", chances, distances, name="dfl"), g.ints(0, 4, -1))
    first, last = (g.cut(sides, a, b, 1) for a, b in ((0, 2), (2, 4)))
    centres, strides_ = (
        g.add("Unsqueeze", g.add("Concat", *found, axis=1), g.ints(0)) for found in (anchors, strides)
    )
    low, high = g.add("Sub", centres, first), g.add("Add", centres, last)
    middle = g.add("Div", g.add("Add", low, high), g.floats(2))
    boxes = g.add("Concat", middle, g.add("Sub", high, low), axis=1)
    return g.add("Mul", boxes, strides_), label


def yolo_like(
    classes: int = 3,
    scales: int = 2,
    size: int | None = 32,
    width: int = 8,
    bins: int = 16,
    batch: Size = "n",
    seed: int = 0,
    kernel: int = 1,
) -> onnx.ModelProto:
    """A YOLOv8-like detector: `images` (n, 3, size, size) to `output0` (n, 4 + classes, A).

    The first 4 rows of the output are centre, width and height of a box in pixels, the others class probabilities.
    Box and class convolutions of each scale read `box_i` and `cls_i`, (n, width, h, w), and are joined before they are
    taken apart again; a box side is the mean of a distribution over `bins` distances, which a convolution with the
    weights 0 … bins - 1 takes of a softmax.
    """
    g = _Graph(seed)
    pixels, logits = _yolo_parts(g, classes, scales, size, width, bins, kernel)
    g.add("Concat", pixels, g.add("Sigmoid", logits), name="output0", axis=1)
    return g.model("yolo_like", size, batch, {"output0": [batch, 4 + classes, _candidates(size, scales)]})


def suppressed(
    classes: int = 3,
    scales: int = 2,
    size: int | None = 32,
    width: int = 8,
    batch: Size = "n",
    seed: int = 0,
    threshold: float = 0.5,
) -> onnx.ModelProto:
    """`yolo_like` with NonMaxSuppression behind it: `kept_boxes` (s, 4), `kept_scores` (s,) and `labels` (s,)."""
    g = _Graph(seed)
    pixels, logits = _yolo_parts(g, classes, scales, size, width, 8, 1)
    boxes = g.add("Transpose", pixels, name="all_boxes", perm=[0, 2, 1])
    scores = g.add("Sigmoid", logits, name="all_scores")
    most, overlap = g.ints(5), g.weight(np.array([0.6], np.float32))
    least = g.weight(np.array([threshold], np.float32))
    selected = g.add(
        "NonMaxSuppression", boxes, scores, most, overlap, least, name="selected", center_point_box=1
    )
    g.add("GatherND", boxes, g.add("Gather", selected, g.ints(0, 2), axis=1), name="kept_boxes")
    g.add("GatherND", scores, selected, name="kept_scores")
    g.add("Gather", selected, g.weight(np.array(1, np.int64)), name="labels", axis=1)
    return g.model("suppressed", size, batch, {"kept_boxes": ["s", 4], "kept_scores": ["s"], "labels": ["s"]})


def yolov5_like(
    classes: int = 3,
    scales: int = 2,
    size: int | None = 32,
    width: int = 8,
    batch: Size = "n",
    seed: int = 0,
    anchors: int = 3,
) -> onnx.ModelProto:
    """`output0` (n, A, 5 + classes), three anchors per position, one sigmoid over boxes, object and classes."""
    g = _Graph(seed)
    rows, parts = 5 + classes, []
    for i, x in _pyramid(g, scales, width):
        head = g.silu(g.conv(x, width, width, 3), name=f"head_{i}")
        made = g.conv(head, width, anchors * rows, name=f"numbers_{i}")
        side = None if size is None else size >> (i + 2)
        sides = ((made, 2), (made, 3)) if side is None else (side, side)
        by_anchor = g.reshape(made, 0, anchors, rows, *sides)
        chances = g.add("Sigmoid", g.add("Transpose", by_anchor, perm=[0, 1, 3, 4, 2]))
        xy, wh, rest = g.split(chances, (2, 2, 1 + classes), 4)
        turned = g.add("Transpose", _grid(g, made, i, size), perm=[1, 0])
        grid = g.reshape(turned, 1, 1, *sides, 2)
        centre = g.add("Add", g.add("Mul", xy, g.floats(2)), grid)
        scaled = g.add("Mul", centre, g.floats(2.0 ** (i + 2)))
        reach = g.weight(np.arange(4, 4 + 2 * anchors, dtype=np.float32).reshape(1, anchors, 1, 1, 2))
        extent = g.add("Mul", g.add("Pow", g.add("Mul", wh, g.floats(2)), g.floats(2)), reach)
        joined = g.add("Concat", scaled, extent, rest, axis=4)
        parts.append(g.add("Reshape", joined, g.ints(0, -1, rows)))
    g.add("Concat", *parts, name="output0", axis=1)
    return g.model("yolov5_like", size, batch, {"output0": [batch, _candidates(size, scales, anchors), rows]})


def yolox_like(
    classes: int = 3,
    scales: int = 2,
    size: int | None = 32,
    width: int = 8,
    batch: Size = "n",
    seed: int = 0,
) -> onnx.ModelProto:
    """`output0` (n, A, 5 + classes), where box, object and classes have convolutions of their own; not decoded."""
    g = _Graph(seed)
    rows, parts = 5 + classes, []
    for i, x in _pyramid(g, scales, width):
        box = g.silu(g.conv(x, width, width, 3), name=f"box_{i}")
        label = g.silu(g.conv(x, width, width, 3), name=f"cls_{i}")
        sides = g.conv(box, width, 4, name=f"boxes_{i}")
        known = g.add("Sigmoid", g.conv(box, width, 1, name=f"objects_{i}"))
        chances = g.add("Sigmoid", g.conv(label, width, classes, name=f"classes_{i}"))
        parts.append(g.reshape(g.add("Concat", sides, known, chances, axis=1), 0, rows, -1))
    joined = g.add("Concat", *parts, axis=2)
    g.add("Transpose", joined, name="output0", perm=[0, 2, 1])
    return g.model("yolox_like", size, batch, {"output0": [batch, _candidates(size, scales), rows]})


def _by_candidate(g: _Graph, maps: str, features: int) -> str:
    """(n, a f, h, w) as (n, h w a, f)."""
    return g.reshape(g.add("Transpose", maps, perm=[0, 2, 3, 1]), 0, -1, features)


def _two_outputs(
    squash: Callable[[_Graph, str], str],
    width_of_scores: int,
    scales: int,
    size: int | None,
    width: int,
    batch: Size,
    seed: int,
    bias: float = 0.0,
    names: tuple[str, str] = ("boxes", "scores"),
) -> onnx.ModelProto:
    """Boxes (n, A, 4) and scores (n, A, C): 3x3 heads over two anchors per position."""
    g, anchors = _Graph(seed), 2
    boxes, scores = [], []
    for i, x in _pyramid(g, scales, width):
        head = g.add("Relu", g.conv(x, width, width, 3), name=f"head_{i}")
        boxes.append(_by_candidate(g, g.conv(head, width, 4 * anchors, 3, name=f"boxes_{i}"), 4))
        made = g.conv(head, width, width_of_scores * anchors, 3, name=f"classes_{i}", bias=bias)
        scores.append(_by_candidate(g, made, width_of_scores))
    numbers = g.add("Concat", *boxes, axis=1)
    centre, extent = (g.cut(numbers, a, b, 2) for a, b in ((0, 2), (2, 4)))
    moved = g.add("Add", g.add("Mul", centre, g.floats(0.1)), g.floats(0.5))
    grown = g.add("Mul", g.add("Exp", g.add("Mul", extent, g.floats(0.2))), g.floats(0.3))
    half = g.add("Div", grown, g.floats(2))
    corners = g.add("Sub", moved, half), g.add("Add", moved, half)
    g.add("Concat", *corners, name=names[0], axis=2)
    g.add("Identity", squash(g, g.add("Concat", *scores, axis=1)), name=names[1])
    count = _candidates(size, scales, anchors)
    return g.model(
        "two_outputs",
        size,
        batch,
        {names[0]: [batch, count, 4], names[1]: [batch, count, width_of_scores]},
    )


def ssd_like(
    classes: int = 3,
    scales: int = 2,
    size: int | None = 32,
    width: int = 8,
    batch: Size = "n",
    seed: int = 0,
) -> onnx.ModelProto:
    """`boxes` (n, A, 4) and `scores` (n, A, 1 + classes), a softmax whose class 0 is the background."""
    return _two_outputs(
        lambda g, x: g.add("Softmax", x, axis=2), 1 + classes, scales, size, width, batch, seed
    )


def retina_like(
    classes: int = 3,
    scales: int = 2,
    size: int | None = 32,
    width: int = 8,
    batch: Size = "n",
    seed: int = 0,
    squashed: bool = True,
) -> onnx.ModelProto:
    """`boxes` (n, A, 4) and `scores` (n, A, classes), sigmoids; or their logits, as focal loss leaves them."""

    def squash(g: _Graph, x: str) -> str:
        return g.add("Sigmoid", x) if squashed else x

    names = ("boxes", "scores" if squashed else "logits")
    return _two_outputs(squash, classes, scales, size, width, batch, seed, bias=-3.0, names=names)


def detr_like(
    classes: int = 3,
    scales: int = 1,
    size: int | None = 32,
    width: int = 8,
    batch: Size = "n",
    seed: int = 0,
    queries: int = 20,
    joined: bool = False,
) -> onnx.ModelProto:
    """`logits` (n, queries, classes + 1) and `pred_boxes` (n, queries, 4) of queries that attend to a map; `joined`
    `output0` (n, queries, 4 + classes) with a sigmoid over the classes."""
    g = _Graph(seed)
    *_, (_, x) = _pyramid(g, scales, width)
    tokens = g.add("Transpose", g.reshape(x, 0, width, -1), perm=[0, 2, 1])
    learned = g.weight(g.rng.normal(size=(1, queries, width)).astype(np.float32))
    keys = g.add("Transpose", g.dense(tokens, width, width), perm=[0, 2, 1])
    seen = g.add(
        "MatMul", g.add("Softmax", g.add("MatMul", learned, keys), axis=2), g.dense(tokens, width, width)
    )
    hidden = g.add("Relu", g.dense(g.add("Add", seen, learned), width, width), name="head_0")
    box = g.add("Relu", g.dense(hidden, width, width, name="before_box"), name="box_0")
    if joined:
        boxes = g.add("Sigmoid", g.dense(box, width, 4))
        scores = g.add("Sigmoid", g.dense(hidden, width, classes))
        g.add("Concat", boxes, scores, name="output0", axis=2)
        return g.model("detr_joined", size, batch, {"output0": [batch, queries, 4 + classes]})
    g.dense(hidden, width, classes + 1, name="logits")
    g.add("Sigmoid", g.dense(box, width, 4, name="boxes_0"), name="pred_boxes")
    outputs = {"logits": [batch, queries, classes + 1], "pred_boxes": [batch, queries, 4]}
    return g.model("detr_like", size, batch, outputs)


#: Every form by its name.
FORMS: dict[str, Callable[..., onnx.ModelProto]] = {
    "yolo": yolo_like,
    "yolov5": yolov5_like,
    "yolox": yolox_like,
    "ssd": ssd_like,
    "retina": retina_like,
    "detr": detr_like,
    "suppressed": suppressed,
}


def pictures(rows: int, size: int = 32, seed: int = 0) -> dict[str, Any]:
    """What the detectors are fed: smooth noise, so that positions differ and images do, too."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=(rows, 3, size // 4, size // 4))
    images = coarse.repeat(4, axis=2).repeat(4, axis=3) + 0.3 * rng.normal(size=(rows, 3, size, size))
    return {"images": images.astype(np.float32)}
