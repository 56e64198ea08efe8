"""Which elements of inner tensors some wanted elements of later tensors come from.

A detector answers for thousands of places and few of them matter. The walk goes back from the wanted elements, node by
node, and says at each tensor on the way which of its elements they depend on. It may say too many, never too few: what
it does not understand depends on everything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import constant_of, has_subgraph
from gapa_onnx.model.dtypes import is_float
from gapa_onnx.model.load import SourceModel
from gapa_onnx.variance.graph import Value, VarianceGraph, names_read
from gapa_onnx.variance.rules import Deterministic, behaviour
from gapa_onnx.variance.sites import Selection, Site

OLDEST_OPSET = 11  # whose GatherND and ScatterND take what is asked of a site, and put its answers back


@dataclass(frozen=True)
class Demand:
    """What is needed of a tensor: 1 there and 0 elsewhere, each axis as long as the tensor's or 1 long."""

    mask: Value  #: float32
    full: tuple[bool, ...]  #: which axes are as long as the tensor's

    def along(self, graph: VarianceGraph, axis: int) -> Demand:
        """With an axis that is 1 long: needed if any element along it is."""
        if not self.full[axis]:
            return self
        flags = tuple(flag and at != axis for at, flag in enumerate(self.full))
        return Demand(graph.reduce("ReduceMax", self.mask, [axis]), flags)


Needed = Demand | None  #: None for all of a tensor


def demand(
    source: SourceModel, graph: VarianceGraph, wanted: Mapping[str, Needed], places: Collection[str]
) -> dict[str, Needed]:
    """What is needed of the tensors at some places; those that nothing wanted depends on are left out."""
    walk = _Walk(source, graph, dict(wanted))
    left = set(places)
    for node in reversed(source.graph.nodes):
        if not left:
            break
        walk.visit(node)
        left.difference_update(tensor.name for tensor in node.outputs)
    return {name: walk.found[name] for name in places if name in walk.found}


def select(graph: VarianceGraph, site: Site, tensor: Value, needed: Demand) -> Selection:
    """The positions of a site that are needed, by their indices."""
    by_position = graph.squeeze(needed.along(graph, site.axis).mask, [site.axis])
    if all(needed.full[axis] for axis in site.others):
        sizes = graph.shape(by_position)  # which sites with the same needs share
    else:
        sizes = graph.emit("Gather", graph.shape(tensor), graph.ints(*site.others), axis=0)
        by_position = graph.emit("Expand", by_position, sizes)
    found = graph.emit("NonZero", by_position, dtype=np.int64)
    return Selection(graph.emit("Transpose", found, perm=[1, 0]), sizes)


class _Walk:
    def __init__(self, source: SourceModel, graph: VarianceGraph, found: dict[str, Needed]):
        self.source, self.graph, self.found = source, graph, found

    def visit(self, node: gs.Node) -> None:
        asked = [self.found[tensor.name] for tensor in node.outputs if tensor.name in self.found]
        if not asked or isinstance(behaviour(node.domain, node.op), Deterministic):
            return
        if has_subgraph(node):
            for name in names_read(node):
                self.found[name] = None
            return
        for at, operand in enumerate(node.inputs):
            if operand.name and operand.name not in self.source.constants and is_float(operand.dtype):
                self.note(operand.name, self.back(node, at, asked))

    def back(self, node: gs.Node, at: int, asked: Sequence[Needed]) -> Needed:
        """What a node needs of an operand for what is asked of its results."""
        rule = _BACK.get(node.op) if node.domain in (None, "", "ai.onnx") else None
        known = [needed for needed in asked if needed is not None]
        if rule is None or len(known) < len(asked) or node.inputs[at].shape is None:
            return None
        return rule(self, node, at, known)

    def note(self, name: str, needed: Needed) -> None:
        if name in self.found:
            before = self.found[name]
            if before is None or needed is None or len(before.full) != len(needed.full):
                needed = None
            else:
                mask = self.graph.emit("Max", before.mask, needed.mask)
                needed = Demand(mask, tuple(a or b for a, b in zip(before.full, needed.full)))
        self.found[name] = needed

    def mean(self, tensor: gs.Tensor) -> Value:
        return self.graph.tensor(tensor.name, np.dtype(tensor.dtype or np.float32))

    def fitted(self, needed: Demand, tensor: gs.Tensor, axis: int) -> Demand:
        """For a tensor that is 1 long along an axis, or as long as the mask; which of both is known when it runs."""
        if not needed.full[axis]:
            return needed
        graph, own = self.graph, self.size(tensor, axis)
        both = graph.emit("Concat", needed.mask, needed.along(graph, axis).mask, axis=axis)
        whole = graph.dimension(needed.mask, axis)
        shorter = graph.cast(graph.emit("Less", own, whole, dtype=np.bool_), np.int64)
        start = whole * shorter  # the mask itself is first, what any of it needs stands behind
        return Demand(graph.slice(both, axis, start, start + own), needed.full)

    def size(self, tensor: gs.Tensor, axis: int) -> Value:
        """The length of an axis, as a tensor of one number."""
        size = tensor.shape[axis]
        if isinstance(size, int) and size >= 0:
            return self.graph.ints(size)
        return self.graph.dimension(self.mean(tensor), axis)


Back = Callable[[_Walk, gs.Node, int, list[Demand]], Needed]


def _elementwise(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    """The same elements, of an operand that may have been broadcast."""
    operand, result = node.inputs[at], node.outputs[0]
    if result.shape is None or len(operand.shape) != len(result.shape):
        return None
    return _broadcast(walk, node, at, asked[0], range(len(operand.shape)))


def _broadcast(walk: _Walk, node: gs.Node, at: int, needed: Demand, axes: Iterable[int]) -> Demand:
    """What is needed of an operand as long as the result along some axes, or 1 long."""
    operand, result = node.inputs[at], node.outputs[0]
    others = [other.shape for place, other in enumerate(node.inputs) if place != at and other.name]
    for axis in axes:
        before, after = operand.shape[axis], result.shape[axis]
        if before == 1:
            needed = needed.along(walk.graph, axis)
        elif not (_same(before, after) or _alone(others, axis - len(operand.shape))):
            needed = walk.fitted(needed, operand, axis)
    return needed


def _same(size: object, other: object) -> bool:
    return size is not None and size == other


def _alone(others: Sequence[Sequence[object] | None], axis: int) -> bool:
    """Whether no other operand can be longer than 1 along an axis, counted from the last."""
    return all(shape is not None and (len(shape) < -axis or shape[axis] == 1) for shape in others)


def _first(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    """The same elements of the first operand; the others are numbers for each feature."""
    return asked[0] if at == 0 else None


def _softmax(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    """All elements along the axis; before opset 13 along all axes from it on."""
    needed, old = asked[0], walk.graph.opset < 13
    axis = int(node.attrs.get("axis", 1 if old else -1)) % len(needed.full)
    for each in range(axis, len(needed.full) if old else axis + 1):
        needed = needed.along(walk.graph, each)
    return needed


def _layer_normalisation(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    needed, axis = asked[0], int(node.attrs.get("axis", -1))
    if at != 0:
        return None
    for each in range(axis % len(needed.full), len(needed.full)):
        needed = needed.along(walk.graph, each)
    return needed


def _convolution(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    """All features, at the places that a kernel reaches."""
    weight = constant_of(node.inputs[1])
    if at != 0 or weight is None:
        return None
    kernel, needed = list(weight.shape[2:]), asked[0].along(walk.graph, 1)
    plain = all(step == 1 for name in ("strides", "dilations") for step in node.attrs.get(name, [1]))
    pads = [size // 2 for size in kernel] * 2
    same = list(node.attrs.get("pads", [0] * len(pads))) == pads and all(size % 2 for size in kernel)
    if not plain or not same or node.attrs.get("auto_pad", "NOTSET") != "NOTSET":
        return None
    if max(kernel) == 1:
        return needed
    if not all(needed.full[2:]):
        return None
    mask = walk.graph.emit("MaxPool", needed.mask, kernel_shape=kernel, pads=pads, strides=[1] * len(kernel))
    return Demand(mask, needed.full)


def _concat(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    needed, graph = asked[0], walk.graph
    axis = int(node.attrs["axis"]) % len(needed.full)
    if not needed.full[axis]:
        return needed
    start = graph.ints(0)
    for before in node.inputs[:at]:
        start = start + walk.size(before, axis)
    end = start + walk.size(node.inputs[at], axis)
    return Demand(graph.slice(needed.mask, axis, start, end), needed.full)


def _part(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    """Parts of one or more axes: all along these, wherever any of it is needed."""
    axes = _axes_of(node) if at == 0 else None
    if axes is None:
        return None
    for axis in axes:
        asked = [needed.along(walk.graph, axis) for needed in asked]
    masks = [needed.mask for needed in asked]
    full = tuple(any(flags) for flags in zip(*(needed.full for needed in asked)))
    return Demand(masks[0] if len(masks) == 1 else walk.graph.emit("Max", *masks), full)


def _axes_of(node: gs.Node) -> list[int] | None:
    """The axes that a Split or Slice cuts; None where they are not known."""
    shape = node.inputs[0].shape
    if node.op == "Split":
        return [int(node.attrs.get("axis", 0)) % len(shape)]
    axes = node.attrs.get("axes")
    if axes is None and len(node.inputs) > 3 and node.inputs[3].name:
        axes = constant_of(node.inputs[3])
        if axes is None:
            return None
    starts = node.attrs.get("starts") if "starts" in node.attrs else constant_of(node.inputs[1])
    count = len(shape) if starts is None else len(starts)
    return [int(axis) % len(shape) for axis in (range(count) if axes is None else axes)]


def _gather(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    """A choice along an axis: all along it, wherever any of it is needed. A choice of one takes the axis away."""
    rank, needed = len(node.inputs[0].shape), asked[0]
    if at != 0 or len(needed.full) not in (rank, rank - 1):
        return None
    axis = int(node.attrs.get("axis", 0)) % rank
    if len(needed.full) == rank:
        return needed.along(walk.graph, axis)
    return Demand(
        walk.graph.unsqueeze(needed.mask, [axis]), (*needed.full[:axis], False, *needed.full[axis:])
    )


def _transpose(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    order = list(node.attrs.get("perm", range(len(asked[0].full))[::-1]))
    inverse = [order.index(axis) for axis in range(len(order))]
    full = tuple(asked[0].full[axis] for axis in inverse)
    return Demand(walk.graph.emit("Transpose", asked[0].mask, perm=inverse), full)


def _reshape(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    """In the shape of the operand. Axes at the front and at the end that stay as they are stay short, too, and so do
    those between if all of them are."""
    operand, result, needed, graph = node.inputs[0], node.outputs[0], asked[0], walk.graph
    if at != 0 or result.shape is None:
        return None
    before, after = list(operand.shape), list(result.shape)
    front, back = _kept(before, after)
    inner = range(front, len(after) - back)
    spreads = any(needed.full[axis] for axis in inner)
    kept = {axis for axis in range(len(after)) if axis not in inner or not spreads}
    spread = graph.emit(
        "Concat",
        *(
            walk.size(result, axis) if axis not in kept or needed.full[axis] else graph.ints(1)
            for axis in range(len(after))
        ),
        axis=0,
    )
    sizes, full = [], []
    for axis in range(len(before)):
        twin = (
            axis if axis < front else axis + len(after) - len(before) if axis >= len(before) - back else None
        )
        full.append(spreads if twin is None else needed.full[twin])
        sizes.append(walk.size(operand, axis) if full[-1] else graph.ints(1))
    mask = graph.emit("Expand", needed.mask, spread)
    return Demand(graph.reshape(mask, graph.emit("Concat", *sizes, axis=0)), tuple(full))


def _kept(before: Sequence[object], after: Sequence[object]) -> tuple[int, int]:
    """How many axes at the front and at the end a reshape leaves as they are."""
    before, after = _with_one_name(before, after)
    shorter = min(len(before), len(after))
    front = 0
    while front < shorter and _same(before[front], after[front]):
        front += 1
    back = 0
    while back < shorter - front and _same(before[-back - 1], after[-back - 1]):
        back += 1
    return front, back


def _with_one_name(before: Sequence[object], after: Sequence[object]) -> tuple[list[object], list[object]]:
    """The sizes, where a single one that is not known has the same name on both sides: it is what the others leave."""
    numbers = [math.prod(size for size in sizes if isinstance(size, int)) for sizes in (before, after)]
    gone, new = _unknown(before) - _unknown(after), _unknown(after) - _unknown(before)
    if gone.total() != 1 or new.total() != 1 or numbers[0] != numbers[1] or not numbers[0]:
        return list(before), list(after)
    (old,), (name,) = gone, new
    return list(before), [old if size == name else size for size in after]


def _unknown(sizes: Sequence[object]) -> Counter[object]:
    """The sizes that are no numbers; each without a name is one of its own."""
    return Counter(object() if size is None else size for size in sizes if not isinstance(size, int))


def _product(walk: _Walk, node: gs.Node, at: int, asked: list[Demand]) -> Needed:
    """All features of the rows of the left factor, whose other axes may have been broadcast."""
    rank = len(asked[0].full)
    if at != 0 or len(node.inputs[0].shape) != rank or node.outputs[0].shape is None or rank < 2:
        return None
    rows = asked[0].along(walk.graph, rank - 1)
    return _broadcast(walk, node, at, rows, range(rank - 2))


_BACK: dict[str, Back] = {
    **dict.fromkeys(
        ("Add", "Sub", "Mul", "Div", "Sum", "Pow", "Max", "Min", "Sigmoid", "Relu", "LeakyRelu", "Tanh", "Exp", "Log",
         "Sqrt", "Abs", "Neg", "HardSigmoid", "HardSwish", "Elu", "Selu", "Softplus", "Erf", "Gelu", "Mish", "Identity",
         "Cast", "Dropout", "Clip", "PRelu", "Reciprocal", "Floor", "Where"),
        _elementwise,
    ),
    "BatchNormalization": _first,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "LayerNormalization": _layer_normalisation,
    "Conv": _convolution,
    "MatMul": _product,
    "Gemm": lambda walk, node, at, asked: None if node.attrs.get("transA", 0) else _product(walk, node, at, asked),
    "Concat": _concat,
    "Split": _part,
    "Slice": _part,
    "Gather": _gather,
    "Transpose": _transpose,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
}  # fmt: skip
