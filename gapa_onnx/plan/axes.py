"""Which axis of a tensor holds its features.

It follows from the layer that reads the tensor: a convolution adds up along axis 1, a matrix product along the last.
Between the two there may be operators that leave every axis where it is, or move it (Transpose, Reshape, Gather, …):
`origins` says where each axis of a result comes from. Where no layer reads a tensor, what made it tells; and where
nothing tells, it is the last axis. Every node is looked at once for the one and once for the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import constant_names, constant_of, has_subgraph
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.layers import CARRIERS, Network, is_layer
from gapa_onnx.variance.rules import Rule, behaviour

Axes = list[int | None]  #: for each axis of a result the axis of an operand that it is, None for none

_CONVOLUTIONS = {
    "Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "FusedConv", "DeformConv", "ConvTransposeWithDynamicPads",
}  # fmt: skip
_ON_MAPS = {
    "BatchNormalization", "InstanceNormalization", "GroupNormalization", "MaxPool", "AveragePool", "GlobalAveragePool",
    "GlobalMaxPool", "LpPool", "LRN", "Resize", "Upsample", "DepthToSpace", "SpaceToDepth", "QLinearAveragePool",
    "QLinearGlobalAveragePool",
}  # fmt: skip
_PRODUCTS = {"Gemm", "QGemm", "FusedGemm", "GemmFastGelu"}
_BATCHED_PRODUCTS = {
    "MatMul", "FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", "QLinearMatMul", "MatMulInteger",
    "MatMulInteger16", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits",
}  # fmt: skip
_SAME_RANK = {"Concat", "Split", "Slice", "Pad", "Tile", "DepthToSpace", "SpaceToDepth", "QLinearConcat"}


@dataclass(frozen=True, order=True)
class Reading:
    """How a tensor is read, by the nearest layer behind it; those with less count before others."""

    weak: bool  #: by an operator that has no weights
    steps: int  #: operators on the way
    axis: int  #: of the features
    on_map: bool  #: by a convolution, or through pooling and the like: the other axes are positions of a map

    def through(self, axis: int, on_map: bool = False) -> Reading:
        """The same, one operator earlier, which may be one on maps."""
        return Reading(self.weak, self.steps + 1, axis, self.on_map or on_map)


@dataclass(frozen=True)
class Features:
    """Where the features of a tensor are."""

    axis: int  #: counted from 0, or -1 where the rank is not known
    on_map: bool  #: whether the other axes are positions of a map, as convolutions make and read them
    flattened: bool  #: whether the next layer reads the whole sample as one vector


@dataclass(frozen=True, eq=False)
class FeatureAxes:
    """The feature axes of all tensors of a model."""

    source: SourceModel = field(repr=False)

    @classmethod
    def of(cls, source: SourceModel) -> FeatureAxes:
        """The one view of a model, which every caller shares."""
        return source.once(cls)

    def at(self, tensor: gs.Tensor) -> Features:
        """Where the features of a tensor are."""
        read, flat = self._read.axes.get(tensor.name), self._read.flat.get(tensor.name)
        flattened = flat is not None and (read is None or read.weak or flat <= read.steps)
        rank = 0 if tensor.shape is None else len(tensor.shape)
        made, on_map = self._made.get(tensor.name, (-1, False))
        made = made % rank if -rank <= made < rank else rank - 1
        if read is not None:
            # Features that were turned to the last axis are those of tokens, also where a convolution made them.
            on_map = read.on_map or (on_map and read.axis == made != rank - 1)
        return Features(made if read is None else read.axis, on_map, flattened)

    @functools.cached_property
    def _read(self) -> _Readings:
        readings = _Readings({}, {})
        _read_by(self.source.graph, readings, (self.source.constants,))
        return readings

    @functools.cached_property
    def _made(self) -> dict[str, tuple[int, bool]]:
        """The axis that each tensor has from what made it, and whether that made a map."""
        made: dict[str, tuple[int, bool]] = {}
        layers = Network.of(self.source).layers
        for node in self.source.graph.nodes:
            if id(node) in layers:
                found: tuple[int, bool] | None = _made_by_layer(node)
            else:
                found = _carried(node, made) or ((1, True) if node.op in _ON_MAPS else None)
            if found is not None:
                made.update((tensor.name, found) for tensor in node.outputs)
        return made


def _made_by_layer(layer: gs.Node) -> tuple[int, bool]:
    if layer.op in _CONVOLUTIONS:
        return 1, True
    left = layer.op in _BATCHED_PRODUCTS and isinstance(layer.inputs[0], gs.Constant)
    return (-2 if left else -1), False


def _carried(node: gs.Node, made: dict[str, tuple[int, bool]]) -> tuple[int, bool] | None:
    """The axis of the first operand that has one, as the result has it."""
    if has_subgraph(node):
        return None
    for at, operand in enumerate(node.inputs):
        if operand.name in made and operand.shape is not None:
            axis, on_map = made[operand.name]
            origin = origins(node, at)
            axis = axis % len(operand.shape) if -len(operand.shape) <= axis < len(operand.shape) else -1
            if axis in origin:
                return origin.index(axis), on_map
    return None


# ------------------------------------------------------------------------- what layers read


@dataclass
class _Readings:
    """What has been found of a graph, from its end to its beginning."""

    axes: dict[str, Reading]
    flat: dict[str, int]  #: steps to a layer that reads the whole sample as one vector

    def note(self, tensor: gs.Tensor, reading: Reading) -> None:
        if tensor.name and (tensor.name not in self.axes or reading < self.axes[tensor.name]):
            self.axes[tensor.name] = reading

    def note_flat(self, tensor: gs.Tensor, steps: int) -> None:
        self.flat[tensor.name] = min(steps, self.flat.get(tensor.name, steps))


def _read_by(graph: gs.Graph, readings: _Readings, known: tuple[frozenset[str], ...]) -> None:
    """Note what every node reads, the last first: all readers of a result have been seen before its maker."""
    for node in reversed(graph.nodes):
        if has_subgraph(node):
            _read_by_bodies(node, readings, known)
        elif is_layer(node, *known):
            for at, axis, on_map in _axes_of_layer(node):
                operand = node.inputs[at]
                if not any(operand.name in names for names in known):
                    readings.note(operand, Reading(False, 0, axis, on_map))
        else:
            _pass_back(node, readings)


def _axes_of_layer(node: gs.Node) -> Iterator[tuple[int, int, bool]]:
    """The operands of a layer, the axis that it adds up of each, and whether that is one of a map."""
    rule = behaviour(node.domain, node.op)
    assert isinstance(rule, Rule)  # a layer has one
    for which, at in enumerate(rule.operands):
        if at >= len(node.inputs):
            continue
        shape = node.inputs[at].shape
        rank = 0 if shape is None else len(shape)
        axis, on_map = -1, False
        if node.op in _CONVOLUTIONS:
            axis, on_map = 1, True
        elif node.op in ("NhwcConv", "NhwcFusedConv"):
            on_map = True
        elif node.op == "Einsum":
            axis = _summed(node, at)
        elif node.op in _PRODUCTS or node.op in _BATCHED_PRODUCTS:
            turned = bool(node.attrs.get("transB" if which else "transA", 0))
            axis = -1 if turned is bool(which) else -2
        if -rank <= axis < rank:
            yield at, axis % rank, on_map


def _summed(node: gs.Node, at: int) -> int:
    """The axis of an operand of Einsum that is not in the result; the last where that is not plain."""
    terms, _, result = str(node.attrs.get("equation", "")).replace(" ", "").partition("->")
    letters = terms.split(",")[at] if at < len(terms.split(",")) else ""
    gone = [axis for axis, letter in enumerate(letters) if letter not in result]
    return gone[-1] if gone and "." not in letters else -1


def _pass_back(node: gs.Node, readings: _Readings) -> None:
    """What is read of a node's results is read of its operands, as far as their axes are those of the result."""
    found = [readings.axes[t.name] for t in node.outputs if t.name in readings.axes]
    if not found and node.op in _ON_MAPS:
        found = [Reading(True, 0, 1, True)]
    if found:
        reading = min(found)
        for at, operand in enumerate(node.inputs):
            if isinstance(operand, gs.Constant):
                continue
            origin = origins(node, at)
            axis = origin[reading.axis] if reading.axis < len(origin) else None
            if axis is not None:
                readings.note(operand, reading.through(axis, node.op in _ON_MAPS))
            elif node.op in CARRIERS and at == 0:
                readings.note_flat(operand, reading.steps + 1)
    flat = readings.flat.get(node.outputs[0].name) if node.outputs else None
    if flat is not None and node.op in CARRIERS:
        readings.note_flat(node.inputs[0], flat + 1)


def _read_by_bodies(node: gs.Node, readings: _Readings, known: tuple[frozenset[str], ...]) -> None:
    """What the bodies of control flow read of tensors from outside, by name or as their own inputs."""
    for body in (value for value in node.attrs.values() if isinstance(value, gs.Graph)):
        constants = frozenset(constant_names(body))
        inside = _Readings({}, {})
        _read_by(body, inside, (constants, *known))
        own = {tensor.name for inner in body.nodes for tensor in inner.outputs} | {
            t.name for t in body.inputs
        }
        for name, reading in inside.axes.items():
            if name not in own and name not in constants:
                readings.note(gs.Variable(name), reading.through(reading.axis))
        if node.op == "Loop":
            _note_inputs(node.inputs[2:], body.inputs[2:], inside, readings)
        elif node.op == "Scan":
            states = len(body.inputs) - int(node.attrs.get("num_scan_inputs", 0))
            _note_inputs(node.inputs[:states], body.inputs[:states], inside, readings)
            _note_inputs(node.inputs[states:], body.inputs[states:], inside, readings, shift=1)


def _note_inputs(
    outer: Sequence[gs.Tensor],
    inner: Sequence[gs.Tensor],
    inside: _Readings,
    readings: _Readings,
    shift: int = 0,
) -> None:
    for tensor, own in zip(outer, inner):
        if own.name in inside.axes:
            reading = inside.axes[own.name]
            readings.note(tensor, reading.through(reading.axis + shift))


# --------------------------------------------------------------- where the axes of a result come from


def origins(node: gs.Node, at: int) -> Axes:
    """For each axis of a node's first result the axis of one operand that it is, None where it is none of them;
    empty where a rank is not known."""
    operand, result = node.inputs[at], node.outputs[0]
    if operand.shape is None or result.shape is None:
        return []
    before, after = list(operand.shape), list(result.shape)
    if node.op in _MOVES and at == 0:
        return _MOVES[node.op](node, before, after)
    if node.op in _MOVES:
        return [None] * len(after)
    if node.op in _SAME_RANK:
        return list(range(len(after))) if len(before) == len(after) else [None] * len(after)
    if node.op in _BATCHED_PRODUCTS:
        kept = len(before) - (1 if at else 2)
        same = _from_the_end(before, after)
        return [
            axis if axis == kept or (axis is not None and axis < len(before) - 2) else None for axis in same
        ]
    return _from_the_end(before, after)


def _from_the_end(before: Sequence[object], after: Sequence[object]) -> Axes:
    """Axes as broadcasting pairs them; a length that differs is another axis."""
    shift = len(after) - len(before)
    paired = [axis - shift if axis >= shift else None for axis in range(len(after))]
    return [None if at is None or _differ(before[at], after[axis]) else at for axis, at in enumerate(paired)]


def _differ(size: object, other: object) -> bool:
    return isinstance(size, int) and isinstance(other, int) and size != other


def _transposed(node: gs.Node, before: Sequence[object], after: Sequence[object]) -> Axes:
    perm = node.attrs.get("perm")
    return [*perm] if perm is not None else [*range(len(before))][::-1]


def _reshaped(node: gs.Node, before: Sequence[object], after: Sequence[object]) -> Axes:
    """The axes of the same length before the first that differs, and behind the last. The rows of a batch stay
    the first axis, whatever their number is called."""
    origin: Axes = [None] * len(after)
    shorter = min(len(before), len(after))
    front = 0
    while front < shorter and (
        _same(before[front], after[front]) or (front == 0 and not _differ(before[0], after[0]))
    ):
        origin[front] = front
        front += 1
    for back in range(1, shorter - front + 1):
        if not _same(before[-back], after[-back]):
            break
        origin[-back] = len(before) - back
    return origin


def _same(size: object, other: object) -> bool:
    return size is not None and size == other


def _numbers(node: gs.Node, rank: int) -> list[int] | None:
    """The axes that a node is given as an attribute or as its second operand; None where they are not known."""
    axes = node.attrs.get("axes")
    if axes is None and len(node.inputs) > 1 and node.inputs[1].name:
        axes = constant_of(node.inputs[1])
        if axes is None:
            return None
    return [] if axes is None else [int(axis) % rank for axis in axes]


def _squeezed(node: gs.Node, before: Sequence[object], after: Sequence[object]) -> Axes:
    gone = _numbers(node, len(before)) if before else None
    if gone == []:
        gone = [axis for axis, size in enumerate(before) if size == 1]
    kept: Axes = [axis for axis in range(len(before)) if axis not in (gone or ())]
    return kept if gone is not None and len(kept) == len(after) else [None] * len(after)


def _unsqueezed(node: gs.Node, before: Sequence[object], after: Sequence[object]) -> Axes:
    new = _numbers(node, len(after)) if after else None
    if new is None or len(new) + len(before) != len(after):
        return [None] * len(after)
    left = iter(range(len(before)))
    return [None if axis in new else next(left) for axis in range(len(after))]


def _reduced(node: gs.Node, before: Sequence[object], after: Sequence[object]) -> Axes:
    gone = _numbers(node, len(before)) if before else None
    if not gone:
        return [None] * len(after)
    if len(after) == len(before):
        return [None if axis in gone else axis for axis in range(len(before))]
    kept: Axes = [axis for axis in range(len(before)) if axis not in gone]
    return kept if len(kept) == len(after) else [None] * len(after)


def _gathered(node: gs.Node, before: Sequence[object], after: Sequence[object]) -> Axes:
    if not before:
        return [None] * len(after)
    axis, new = int(node.attrs.get("axis", 0)) % len(before), len(after) - len(before) + 1
    chosen: Axes = [axis] if new == 1 else [None] * new  # a choice of features is still an axis of features
    return [*range(axis), *chosen, *range(axis + 1, len(before))]


_MOVES = {
    "Transpose": _transposed,
    "Reshape": _reshaped,
    "Flatten": _reshaped,
    "Squeeze": _squeezed,
    "Unsqueeze": _unsqueezed,
    "Gather": _gathered,
    **dict.fromkeys(
        ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
         "ReduceLogSumExp", "ReduceSumSquare"),
        _reduced,
    ),
}  # fmt: skip
