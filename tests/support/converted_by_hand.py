"""The detector of shapes with the outputs of a converted detector beside its own, each a known function of them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from support import shapes_detector
from support.answering_models import EMPTY_RECORD, write_record

CANDIDATES = 40
THRESHOLD = 0.6
CLASSES = len(shapes_detector.CLASSES)

#: Where boxes and class scores lie, as the record says it.
PLACES: dict[str, dict[str, Any]] = {
    "4+C": {
        "boxes": "output0", "box_axis": 1, "box_start": 0, "candidate_axis": 2,
        "classes": "output0", "class_axis": 1, "class_start": 4, "objectness": None,
    },
    "5+C": {
        "boxes": "output0", "box_axis": 2, "box_start": 0, "candidate_axis": 1,
        "classes": "output0", "class_axis": 2, "class_start": 5, "objectness": 4,
    },
    "separate": {
        "boxes": "boxes", "box_axis": 2, "box_start": 0, "candidate_axis": 1,
        "classes": "scores", "class_axis": 2, "class_start": 0, "objectness": None,
    },
}  # fmt: skip


class _Added:
    """Nodes behind a model's own."""

    def __init__(self, graph: onnx.GraphProto):
        self.graph = graph

    def add(self, op: str, *inputs: str | np.ndarray, name: str | None = None, **attrs: object) -> str:
        name = name or f"hand_{len(self.graph.node)}"
        self.graph.node.append(helper.make_node(op, list(map(self._name, inputs)), [name], **attrs))
        return name

    def pair(self, op: str, *inputs: str | np.ndarray, names: tuple[str, str], **attrs: object) -> None:
        self.graph.node.append(helper.make_node(op, list(map(self._name, inputs)), list(names), **attrs))

    def cut(self, x: str, start: int, end: int, axis: int) -> str:
        return self.add("Slice", x, *(np.array([value], np.int64) for value in (start, end, axis)))

    def output(self, name: str, kind: int, shape: list[int | str]) -> None:
        self.graph.output.append(helper.make_tensor_value_info(name, kind, shape))

    def _name(self, given: str | np.ndarray) -> str:
        if isinstance(given, str):
            return given
        name = f"hand_constant_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(given, name))
        return name


def converted(form: str = "4+C", **head: Any) -> onnx.ModelProto:
    """A converted file of the detector, with `head` in place of what its record would say.

    score = epistemic = the first box number modulo a seventh of the image, probs = p (1 - 0.4 score), objectness = 0.9 o,
    box_var = (0.1 side)² with the sides w, h, w, h (of corners alike), entropy = 1 - confidence of the source,
    image_score = the mean score of all candidates, and a flag is a score above THRESHOLD.
    """
    model = copy.deepcopy(shapes_detector.model(form))
    place, g = PLACES[form], _Added(model.graph)
    rows = {
        name: g.add("Transpose", name, perm=[0, 2, 1]) if place["box_axis"] == 1 else name
        for name in (place["boxes"], place["classes"])
    }
    boxes = g.cut(rows[place["boxes"]], 0, 4, 2)
    probs = g.cut(rows[place["classes"]], place["class_start"], place["class_start"] + CLASSES, 2)
    confidence = g.add("ReduceMax", probs, axes=[2], keepdims=1)
    if place["objectness"] is not None:
        objects = g.cut(rows[place["classes"]], 4, 5, 2)
        confidence = g.add("Mul", confidence, objects)
    flat = g.add("Squeeze", confidence, np.array([2], np.int64))
    g.pair("TopK", flat, np.array([CANDIDATES], np.int64), names=("top", "y_candidates"), axis=1)
    chosen = g.add("Unsqueeze", "y_candidates", np.array([2], np.int64))

    def gathered(x: str) -> str:
        return g.add("GatherND", x, chosen, batch_dims=1)

    def number(value: float) -> np.ndarray:
        return np.array(value, np.float32)

    numbers = gathered(boxes)
    sides = g.cut(numbers, 2, 4, 2)
    if form == "separate":
        sides = g.add("Sub", sides, g.cut(numbers, 0, 2, 2))
    bars = g.add("Mul", g.add("Concat", sides, sides, axis=2), number(0.1))
    g.add("Mul", bars, bars, name="y_box_var")
    first = g.add("Squeeze", g.cut(numbers, 0, 1, 2), np.array([2], np.int64))
    unit = 1 / 7 if form == "separate" else shapes_detector.SIZE / 7
    g.add("Mod", g.add("Div", first, number(unit)), number(1.0), name="y_score", fmod=1)
    doubt = g.add("Sub", number(1.0), g.add("Mul", "y_score", number(0.4)))
    g.add("Mul", gathered(probs), g.add("Unsqueeze", doubt, np.array([2], np.int64)), name="y_probs")
    g.add("Identity", "y_score", name="y_epistemic")
    g.add("Sub", number(1.0), "top", name="y_entropy")
    g.add("Greater", "y_score", number(THRESHOLD), name="y_ood")
    g.add("ReduceMean", "y_score", name="y_image_score", axes=[1], keepdims=0)
    g.add("Greater", "y_image_score", number(THRESHOLD), name="y_image_ood")
    shapes: dict[str, tuple[int, list[int | str]]] = {
        "candidates": (TensorProto.INT64, ["n", CANDIDATES]),
        "probs": (TensorProto.FLOAT, ["n", CANDIDATES, CLASSES]),
        "box_var": (TensorProto.FLOAT, ["n", CANDIDATES, 4]),
        **{role: (TensorProto.FLOAT, ["n", CANDIDATES]) for role in ("entropy", "epistemic", "score")},
        "ood": (TensorProto.BOOL, ["n", CANDIDATES]),
        "image_score": (TensorProto.FLOAT, ["n"]),
        "image_ood": (TensorProto.BOOL, ["n"]),
    }
    if place["objectness"] is not None:
        thinned = g.add("Mul", gathered(objects), number(0.9))
        g.add("Squeeze", thinned, np.array([2], np.int64), name="y_objectness")
        shapes["objectness"] = (TensorProto.FLOAT, ["n", CANDIDATES])
    for role, (kind, shape) in shapes.items():
        g.output(f"y_{role}", kind, shape)
    whole = {
        "task": "detection",
        "logits": "somewhere inside",
        "link": "sigmoid",
        "axis": place["class_axis"],
        "reason": "by hand",
        "outputs": {role: f"y_{role}" for role in shapes},
        "detection": {**place, "classes_count": CLASSES, "background": None, "candidates": CANDIDATES},
        **head,
    }
    write_record(model, {**EMPTY_RECORD, "heads": {place["classes"]: whole}})
    onnx.checker.check_model(model)
    return model
