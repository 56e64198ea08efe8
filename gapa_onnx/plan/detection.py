"""Detectors: which numbers of which outputs are boxes and class scores of candidates.

    (N, 4 + C, A) or (N, A, 4 + C)      four box numbers and C class probabilities of each of A candidates
    (N, A, 5 + C)                       the same with the probability of an object between them
    boxes (N, A, 4), scores (N, A, C)   two outputs; raw logits with boxes are read as a set predictor's (DETR)
    NonMaxSuppression                   its own operands, (N, A, 4) and (N, C, A)

A tensor is taken apart along its features, back through what only arranges them, to see which of them a sigmoid made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
BOX_WORDS = ("box", "boxes", "bbox", "bboxes", "loc", "location", "rect", "reg", "coord")
SCORE_WORDS = ("score", "conf", "cls", "class", "logit", "label", "prob")
FOCAL_BIAS = (
    -2.0
)  # of class logits, on average, below which each is a question by itself: it starts at log(.01 / .99)
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
    cut: bool = False  #: out of more features that one sigmoid has squashed together


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
    return _one(output, axis, Run(sizes[axis] - first, _are_probabilities(output)), first, what)


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
        classes, first = _classes_in(found)
        if classes is None:
            continue
        what, sizes = ("boxes, an object and classes", "1 + ") if first > BOX else ("boxes and classes", "")
        reason = f"holds {what} of candidates along axis {3 - axis}: {BOX} + {sizes}{classes.size}"
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


def _classes_in(runs: Sequence[Run]) -> tuple[Run | None, int]:
    """The classes, and where they begin: right behind the box, or behind an object's probability."""
    start = 0
    for at, run in enumerate(runs):
        if start == BOX and run.squashed:
            following = runs[at + 1] if at + 1 < len(runs) else None
            if run.size == 1 and following is not None and following.squashed:
                return following, start + 1
            if run.cut and run.size > 1:  # one sigmoid over a box, an object and its classes
                return Run(run.size - 1, True), start + 1
            return run, start
        start += run.size
    return None, start


def _runs(tensor: gs.Tensor, axis: int, steps: int = _FARTHEST) -> list[Run] | None:
    """The features along an axis, in runs that came together; None where they cannot be told apart."""
    tensor = through(tensor)
    size = tensor.shape[axis] if tensor.shape is not None and axis < len(tensor.shape) else None
    whole = [Run(size, sigmoid_of(tensor) is not None)] if isinstance(size, int) and size > 0 else None
    if not tensor.inputs or steps == 0 or (whole and whole[0].squashed):
        return whole
    node = tensor.inputs[0]
    if node.op == "Concat":
        return _joined(node, axis, steps)
    if node.op in ("Transpose", "Reshape", "Squeeze", "Unsqueeze"):
        before = dict(enumerate(origins(node, 0))).get(axis)
        return whole if before is None else _runs(node.inputs[0], before, steps - 1)
    if node.op in ("Split", "Slice") and whole is not None:
        return [_cut(whole[0], _runs(node.inputs[0], axis, steps - 1) or [])]
    return whole


def _joined(node: gs.Node, axis: int, steps: int) -> list[Run] | None:
    """The features of all parts one after the other; those of any part where candidates are put together."""
    if int(node.attrs["axis"]) % len(node.outputs[0].shape) != axis:
        return _runs(node.inputs[0], axis, steps - 1)
    parts = [_runs(part, axis, steps - 1) for part in node.inputs]
    return None if None in parts else [run for part in parts for run in part or ()]


def _cut(run: Run, of: Sequence[Run]) -> Run:
    """A run that was cut out of others, which may all have been squashed."""
    squashed = bool(of) and all(other.squashed for other in of)
    return replace(run, squashed=squashed, cut=len(of) == 1 and (of[0].cut or of[0].size > run.size))


# ------------------------------------------------------------------------ two outputs


def _in_two(source: SourceModel, known: Mapping[str, Evidence]) -> Iterator[Detector]:
    """Boxes (N, A, 4) and scores (N, A, C) or (N, C, A) of the same candidates."""
    outputs = {output.name: output for output in source.outputs if known[output.name].is_float}
    for boxes in outputs.values():
        axis = next((at for at in (2, 1) if _sizes(boxes) and _sizes(boxes)[at] == BOX), None)
        if axis is None or not _may_be_boxes(known[boxes.name]):
            continue
        for scores in outputs.values():
            found = None if scores is boxes else _pair(known, boxes, axis, scores)
            if found is not None:
                yield found
                return


def _sizes(tensor: gs.Tensor) -> list[object]:
    return list(tensor.shape) if tensor.shape is not None and len(tensor.shape) == 3 else []


def _may_be_boxes(out: Evidence) -> bool:
    """Four numbers that are no classes: neither do they exclude each other, nor does their name speak of scores."""
    named = out.says(*BOX_WORDS)
    return (out.end is None or out.end.link == "sigmoid") and (named or not out.says(*SCORE_WORDS))


def _pair(known: Mapping[str, Evidence], boxes: gs.Tensor, axis: int, scores: gs.Tensor) -> Detector | None:
    """Boxes with scores of the same candidates, where a name speaks of either."""
    end, called = known[scores.name].end, known[boxes.name].says(*BOX_WORDS)
    class_axis = _class_axis(known[scores.name], _sizes(scores), _sizes(boxes)[3 - axis], called)
    if class_axis is None or (end is None and not called):
        return None
    width = _sizes(scores)[class_axis]
    if not isinstance(width, int) or (end is not None and end.axis not in (None, class_axis)):
        return None
    link, background = _link(end.link if end is not None else None, scores, width)
    what = f"holds class {'probabilities' if end is not None else 'logits'} of the candidates whose boxes are {boxes.name!r}"
    return Detector(
        boxes=Slab(boxes.name, axis, 0, BOX),
        classes=Slab(scores.name, class_axis, 0, width),
        link=link,
        squashed=end is not None,
        logits=None if end is None or end.derived else Slab(end.logits.name, class_axis, 0, width),
        reason=f"{what}; {link}{'' if background is None else f', class {background} is no object'}",
        background=background,
        outputs=(scores.name, boxes.name),
    )


def _class_axis(scores: Evidence, sizes: Sequence[object], count: object, called: bool) -> int | None:
    """The axis of the classes, beside that of as many candidates as there are boxes. Where their number is open, both
    names have to speak of it."""
    named = scores.says(*SCORE_WORDS)
    if not sizes or not (called or named):
        return None
    if count in sizes[1:] and count is not None:
        return 2 if sizes[1] == count else 1
    unknown = [at for at in (1, 2) if not isinstance(sizes[at], int)]
    return 3 - unknown[0] if len(unknown) == 1 and not isinstance(count, int) and called and named else None


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
    count, logits = classes if isinstance(classes, int) else None, sigmoid_of(through(scores))
    return Detector(
        boxes=Slab(boxes.name, 2, 0, BOX),
        classes=Slab(scores.name, 1, 0, count),
        link="sigmoid",
        squashed=_are_probabilities(scores),
        reason="holds what NonMaxSuppression selects among candidates",
        logits=None if logits is None else Slab(logits.name, 1, 0, count),
        selected=node.outputs[0].name,
        outputs=tuple(output.name for output in outputs),
    )


_REARRANGE = (
    "Concat",
    "Transpose",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Split",
    "Slice",
    "Gather",
    "Mul",
    "ReduceMax",
)


def _are_probabilities(tensor: gs.Tensor) -> bool:
    """Whether scores were made by a sigmoid or softmax, and rearranged or multiplied since."""
    pending, seen = [tensor], 0
    while pending and seen < _FARTHEST:
        made, seen = through(pending.pop()), seen + 1
        node = made.inputs[0] if made.inputs else None
        if sigmoid_of(made) is not None or (node is not None and node.op == "Softmax"):
            return True
        if node is not None and node.op in _REARRANGE:
            pending += [entry for entry in node.inputs if entry.inputs]
    return False


def _behind(source: SourceModel, first: gs.Node) -> set[str]:
    """The tensors that depend on a node."""
    found = {tensor.name for tensor in first.outputs}
    for node in source.graph.nodes:
        if not found.isdisjoint(names_read(node)):
            found.update(tensor.name for tensor in node.outputs)
    return found
