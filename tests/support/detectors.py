"""Small detectors with random weights, wired as those that people export."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


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

    def weight(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.weight(np.array(values, np.int64))

    def conv(
        self, x: str, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, name: str | None = None
    ) -> str:
        w = self.rng.normal(size=(outputs, inputs, kernel, kernel)) / np.sqrt(inputs * kernel**2)
        bias = 0.1 * self.rng.normal(size=outputs)
        pads, weights = [kernel // 2] * 4, [self.weight(array.astype(np.float32)) for array in (w, bias)]
        return self.add("Conv", x, *weights, name=name, strides=[stride] * 2, pads=pads)

    def silu(self, x: str, name: str | None = None) -> str:
        return self.add("Mul", x, self.add("Sigmoid", x), name=name)


def yolo_like(
    classes: int = 3,
    scales: int = 2,
    size: int = 32,
    width: int = 8,
    bins: int = 16,
    batch: int | str = "n",
    seed: int = 0,
) -> onnx.ModelProto:
    """A YOLOv8-like detector: `images` (n, 3, size, size) to `output0` (n, 4 + classes, anchors).

    The first 4 rows of the output are centre, width and height of a box in pixels, the others class probabilities.
    Scale i has size / 2^(i + 2) squared anchors. Box and class convolutions of each scale read `box_i` and `cls_i`,
    (n, width, h, w), and are joined before they are taken apart again; a box side is the mean of a distribution over
    `bins` distances, which a convolution with the weights 0 … bins - 1 takes of a softmax.
    """
    g = _Graph(seed)
    x = g.silu(g.conv("images", 3, width, 3, stride=2))
    parts, anchors, strides = [], [], []
    rows = 4 * bins + classes
    for i in range(scales):
        x = g.silu(g.conv(x, width, width, 3, stride=2))
        box = g.silu(g.conv(x, width, width, 3), name=f"box_{i}")
        label = g.silu(g.conv(x, width, width, 3), name=f"cls_{i}")
        heads = [
            g.conv(box, width, 4 * bins, name=f"boxes_{i}"),
            g.conv(label, width, classes, name=f"classes_{i}"),
        ]
        joined = g.add("Concat", *heads, axis=1)
        parts.append(g.add("Reshape", joined, g.ints(0, rows, -1)))
        side = size >> (i + 2)
        ys, xs = np.meshgrid(*[np.arange(side) + 0.5] * 2, indexing="ij")
        anchors.append(np.stack([xs.ravel(), ys.ravel()]))
        strides.append(np.full(side * side, 2.0 ** (i + 2)))
    everything = g.add("Concat", *parts, axis=2) if scales > 1 else parts[0]
    g.nodes.append(
        helper.make_node(
            "Split", [everything, g.ints(4 * bins, classes)], ["box", "cls"], name="n_split", axis=1
        )
    )
    by_side = g.add("Reshape", "box", g.ints(0, 4, bins, -1))
    chances = g.add("Softmax", g.add("Transpose", by_side, perm=[0, 2, 1, 3]), axis=1)
    distances = g.weight(np.arange(bins, dtype=np.float32).reshape(1, bins, 1, 1))
    sides = g.add("Reshape", g.add("Conv", chances, distances, name="dfl"), g.ints(0, 4, -1))
    first, last = (g.add("Slice", sides, g.ints(a), g.ints(b), g.ints(1)) for a, b in ((0, 2), (2, 4)))
    centres = g.weight(np.concatenate(anchors, 1).astype(np.float32)[None])
    low, high = g.add("Sub", centres, first), g.add("Add", centres, last)
    middle = g.add("Div", g.add("Add", low, high), g.weight(np.float32(2)))
    boxes = g.add("Concat", middle, g.add("Sub", high, low), axis=1)
    pixels = g.add("Mul", boxes, g.weight(np.concatenate(strides).astype(np.float32)[None]))
    g.add("Concat", pixels, g.add("Sigmoid", "cls"), name="output0", axis=1)
    count = sum((size >> (i + 2)) ** 2 for i in range(scales))
    graph = helper.make_graph(
        g.nodes,
        "yolo_like",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, size, size])],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, [batch, 4 + classes, count])],
        g.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
