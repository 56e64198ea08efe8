"""Detectors: which numbers of which outputs are boxes and class scores of candidates.

    (N, 4 + C, A) or (N, A, 4 + C)      four box numbers and C class probabilities of each of A candidates
    (N, A, 5 + C)                       the same with the probability of an object between them
    boxes (N, A, 4), scores (N, A, C)   two outputs; raw logits with boxes are read as a set predictor's (DETR)
    NonMaxSuppression                   its own operands, (N, A, 4) and (N, C, A)

A tensor is taken apart along its features, back through what only arranges them, to see which of them a sigmoid made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import constant_of
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.axes import origins
from gapa_onnx.plan.evidence import Evidence
from gapa_onnx.variance.graph import names_read
from gapa_onnx.variance.patterns.activations import sigmoid_of
from gapa_onnx.variance.patterns.formula import through

BOX = 4  # numbers of a box
BOX_WORDS = ("box", "bbox", "loc", "location", "rect", "reg", "coord")
SCORE_WORDS = ("score", "conf", "cls", "class", "logit", "label", "prob")
FOCAL_BIAS = (
    -2.0
)  # mean bias of class logits below which each is a question by itself: they start at log(.01 / .99)
_FARTHEST = 40  # nodes between an output and what its features are made of


@dataclass(frozen=True)
class Slab:
    """Some features of every candidate, in a tensor (N, …) of three axes."""

    tensor: str
    axis: int  #: of the features
    start: int
    count: int | None  #: None: all from there on

    @property
    def candidate_axis(self) -> int:
        return 3 - self.axis


@dataclass(frozen=True)
class Detector:
    """Where a model's candidates have their boxes and class scores."""

    boxes: Slab
    classes: Slab
    link: str  #: of the class scores: sigmoid or softmax
    squashed: bool  #: the scores are probabilities, not logits
    reason: str
    logits: Slab | None = None  #: of the class scores, where a tensor holds them in the same order
    objectness: int | None = None  #: feature of the classes' tensor: the probability of an object
    background: int | None = None  #: class that means "no object"
    selected: str | None = None  #: what NonMaxSuppression selects, int64 (s, 3): row, class, candidate
    outputs: tuple[str, ...] = ()  #: of the graph that hold boxes and scores; answers stand beside the first

    @property
    def spoken_for(self) -> tuple[str, ...]:
        """Outputs that need no variance of their own, since the answers of candidates hold it. What NonMaxSuppression
        selects is another matter: its outputs are small."""
        return self.outputs[1:] if self.selected is None else ()


@dataclass(frozen=True)
class Run:
    """Neighbouring features of one kind."""

    size: int
    squashed: bool  #: by a sigmoid


def find_detectors(source: SourceModel, known: Mapping[str, Evidence]) -> tuple[Detector, ...]:
    """The detectors among the outputs of a model: behind NonMaxSuppression, in one output, or in two."""
    chosen = _before_suppression(source)
    if chosen is not None:
        return (chosen,)
    found = []
    for output in source.outputs:
        detector = _in_one(output) if known[output.name].is_float else None
        if detector is not None:
            found.append(detector)
    return tuple(found) or tuple(_in_two(source, known))


def by_shape(output: gs.Tensor) -> Detector | None:
    """A detector in one output of which the user says that it is one, by its sizes alone."""
    shape = output.shape
    if shape is None or len(shape) != 3:
        return None
    sizes = {axis: shape[axis] for axis in (1, 2) if isinstance(shape[axis], int) and shape[axis] > BOX}
    if not sizes:
        return None
    axis = min(sizes, key=lambda at: sizes[at])
    first = BOX + (axis == 2 and sizes[axis] > BOX + 1)
    what = (
        f"is asked for: {BOX} box numbers{', an object' if first > BOX else ''} and classes along axis {axis}"
    )
    return _one(output, axis, Run(sizes[axis] - first, True), first, what)


# ------------------------------------------------------------------------- one output


def _in_one(output: gs.Tensor) -> Detector | None:
    """Four numbers that no sigmoid made, or each by itself, and behind them class probabilities."""
    if output.shape is None or len(output.shape) != 3:
        return None
    for axis in (1, 2):
        size, other = output.shape[axis], output.shape[3 - axis]
        if not isinstance(size, int) or size <= BOX or (isinstance(other, int) and other <= size):
            continue
        found = _runs(output, axis)
        if found is None or sum(run.size for run in found) != size:
            continue
        start, classes, first = _classes_in(found, axis)
        if classes is None:
            continue
        what = "boxes, an object and classes" if first > start else "boxes and classes"
        reason = f"holds {what} of candidates along axis {3 - axis}: {BOX} + {'1 + ' if first > start else ''}{classes.size}"
        return _one(output, axis, classes, first, reason)
    return None


def _one(output: gs.Tensor, axis: int, classes: Run, first: int, reason: str) -> Detector:
    name = output.name
    return Detector(
        boxes=Slab(name, axis, 0, BOX),
        classes=Slab(name, axis, first, classes.size),
        link="sigmoid",
        squashed=classes.squashed,
        reason=reason,
        logits=_joined_logits(output, axis, first, classes.size),
        objectness=BOX if first > BOX else None,
        outputs=(name,),
    )


def _joined_logits(output: gs.Tensor, axis: int, first: int, count: int) -> Slab | None:
    """The logits of classes that are the last thing to be put behind boxes."""
    node = through(output).inputs[0] if through(output).inputs else None
    if node is None or node.op != "Concat" or int(node.attrs["axis"]) % 3 != axis:
        return None
    start = 0
    for part in node.inputs:
        size = part.shape[axis] if part.shape is not None and len(part.shape) == 3 else None
        logits = sigmoid_of(through(part))
        if start == first and size == count and logits is not None:
            return Slab(logits.name, axis, 0, count)
        if not isinstance(size, int):
            return None
        start += size
    return None


def _classes_in(runs: Sequence[Run], axis: int) -> tuple[int, Run | None, int]:
    """Where the boxes end, the classes, and where these begin: behind an object's probability, if there is one."""
    start = 0
    for at, run in enumerate(runs):
        if start == BOX and run.squashed:
            following = runs[at + 1] if at + 1 < len(runs) else None
            if run.size == 1 and following is not None and following.squashed:
                return start, following, start + 1
            if axis == 2 and run.size > 1:  # one sigmoid over an object and its classes
                return start, Run(run.size - 1, True), start + 1
            return start, run, start
        start += run.size
    return start, None, start


def _runs(tensor: gs.Tensor, axis: int, steps: int = _FARTHEST) -> list[Run] | None:
    """The features along an axis, in runs that came together; None where they cannot be told apart."""
    tensor = through(tensor)
    size = tensor.shape[axis] if tensor.shape is not None and axis < len(tensor.shape) else None
    whole = [Run(size, False)] if isinstance(size, int) and size > 0 else None
    if not tensor.inputs or steps == 0:
        return whole
    node = tensor.inputs[0]
    if sigmoid_of(tensor) is not None:
        return None if whole is None else [Run(whole[0].size, True)]
    if node.op == "Concat":
        if int(node.attrs["axis"]) % len(tensor.shape) != axis:
            return _runs(node.inputs[0], axis, steps - 1)
        parts = [_runs(part, axis, steps - 1) for part in node.inputs]
        return None if None in parts else [run for part in parts for run in part or ()]
    if node.op in ("Transpose", "Reshape", "Squeeze", "Unsqueeze"):
        origin = origins(node, 0)
        before = origin[axis] if axis < len(origin) else None
        return whole if before is None else _runs(node.inputs[0], before, steps - 1)
    if node.op in ("Split", "Slice") and whole is not None:
        cut = _runs(node.inputs[0], axis, steps - 1)
        alike = cut is not None and len({run.squashed for run in cut}) == 1
        return [Run(whole[0].size, cut[0].squashed)] if alike and cut else whole
    return whole


# ------------------------------------------------------------------------ two outputs


def _in_two(source: SourceModel, known: Mapping[str, Evidence]) -> Iterator[Detector]:
    """Boxes (N, A, 4) and scores (N, A, C) or (N, C, A) of the same candidates."""
    outputs = {output.name: output for output in source.outputs if known[output.name].is_float}
    for boxes in outputs.values():
        axis = next((at for at in (2, 1) if _sizes(boxes) and _sizes(boxes)[at] == BOX), None)
        if axis is None:
            continue
        for scores in outputs.values():
            found = None if scores is boxes else _pair(source, known, boxes, axis, scores)
            if found is not None:
                yield found
                return


def _sizes(tensor: gs.Tensor) -> list[object]:
    return list(tensor.shape) if tensor.shape is not None and len(tensor.shape) == 3 else []


def _pair(
    source: SourceModel, known: Mapping[str, Evidence], boxes: gs.Tensor, axis: int, scores: gs.Tensor
) -> Detector | None:
    sizes, count = _sizes(scores), _sizes(boxes)[3 - axis]
    among = [at for at in (1, 2) if sizes and sizes[at] == count and count is not None]
    end, called = known[scores.name].end, known[boxes.name].says(*BOX_WORDS)
    told = called or known[scores.name].says(*SCORE_WORDS)
    if not among or (end is None and not called) or not told:
        return None
    class_axis = 3 - among[0]
    width = sizes[class_axis]
    if not isinstance(width, int) or (end is not None and end.axis not in (None, class_axis)):
        return None
    link, background = _link(end.link if end is not None else None, scores, width)
    what = f"holds class {'probabilities' if end is not None else 'logits'} of the candidates whose boxes are {boxes.name!r}"
    logits = end is not None and end.derived is None and _sizes(end.logits)[1:] == sizes[1:]
    return Detector(
        boxes=Slab(boxes.name, axis, 0, BOX),
        classes=Slab(scores.name, class_axis, 0, width),
        link=link,
        squashed=end is not None,
        logits=Slab(end.logits.name, class_axis, 0, width) if end is not None and logits else None,
        reason=f"{what}; {link}{'' if background is None else f', class {background} is no object'}",
        background=background,
        outputs=(scores.name, boxes.name),
    )


def _link(told: str | None, scores: gs.Tensor, width: int) -> tuple[str, int | None]:
    """How scores are squashed, and which class is no object. Raw logits beside boxes are those of a set predictor,
    whose last class is none; where their biases say that each class was trained by itself, all are classes."""
    if told == "sigmoid" or width == 1:
        return "sigmoid", None
    if told == "softmax":
        return "softmax", 0
    bias = _bias(scores)
    return ("sigmoid", None) if bias is not None and bias < FOCAL_BIAS else ("softmax", width - 1)


def _bias(tensor: gs.Tensor) -> float | None:
    """The mean of what the last layer adds."""
    for _ in range(_FARTHEST):
        node = tensor.inputs[0] if tensor.inputs else None
        if node is None:
            return None
        if node.op in ("Add", "Gemm", "Conv"):
            constants = [constant_of(entry) for entry in node.inputs[(2 if node.op != "Add" else 0) :]]
            found = [entry for entry in constants if entry is not None and entry.size > 1]
            return float(np.mean(found[0])) if found else None
        tensor = node.inputs[0]
    return None


# ----------------------------------------------------------------------- in the graph


def _before_suppression(source: SourceModel) -> Detector | None:
    """What NonMaxSuppression selects from, where it is in the graph once."""
    nodes = [node for node in source.graph.nodes if node.op == "NonMaxSuppression"]
    if len(nodes) != 1:
        return None
    (node,) = nodes
    boxes, scores = node.inputs[:2]
    behind = _behind(source, node)
    outputs = [
        output for output in source.outputs if output.name in behind and output.dtype in (np.float32, float)
    ]
    if not outputs or not node.outputs:
        return None
    classes = _sizes(scores)[1] if _sizes(scores) else None
    squashed = sigmoid_of(through(scores)) is not None or _came_from_sigmoid(scores)
    return Detector(
        boxes=Slab(boxes.name, 2, 0, BOX),
        classes=Slab(scores.name, 1, 0, classes if isinstance(classes, int) else None),
        link="sigmoid",
        squashed=squashed,
        reason="holds what NonMaxSuppression selects among candidates",
        selected=node.outputs[0].name,
        outputs=tuple(output.name for output in outputs),
    )


def _came_from_sigmoid(tensor: gs.Tensor) -> bool:
    """Whether scores are probabilities: made by a sigmoid or softmax, rearranged or multiplied since."""
    pending, seen = [tensor], 0
    while pending and seen < _FARTHEST:
        made, seen = through(pending.pop()), seen + 1
        if sigmoid_of(made) is not None:
            return True
        node = made.inputs[0] if made.inputs else None
        if node is not None and node.op == "Softmax":
            return True
        if node is not None and node.op in (
            "Concat",
            "Transpose",
            "Reshape",
            "Squeeze",
            "Unsqueeze",
            "Split",
            "Slice",
            "Mul",
        ):
            pending += [entry for entry in node.inputs if entry.inputs]
    return False


def _behind(source: SourceModel, first: gs.Node) -> set[str]:
    """The tensors that depend on a node."""
    found = {tensor.name for tensor in first.outputs}
    for node in source.graph.nodes:
        if not found.isdisjoint(names_read(node)):
            found.update(tensor.name for tensor in node.outputs)
    return found
