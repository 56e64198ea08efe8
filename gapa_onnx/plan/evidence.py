"""The evidence of an output's task: its shape, the Softmax or Sigmoid that it ends in, the linear layer that it
comes from, and the words of its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from gapa_onnx.model.dtypes import is_float
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.layers import Network, Node, is_layer
from gapa_onnx.plan.logits import ML, Derived, squashed
from gapa_onnx.variance.patterns.activations import sigmoid_of
from gapa_onnx.variance.patterns.formula import through

Size = int | str | None


@dataclass(frozen=True, eq=False)
class End:
    """The Softmax, LogSoftmax or Sigmoid that an output ends in."""

    op: str
    logits: gs.Tensor  #: or what they are derived from
    axis: int | None = None  #: of a softmax along one axis
    weighs: bool = False  #: its result is multiplied with others, as attention is
    derived: Derived | None = None  #: the logits, where no tensor holds them
    what: str = ""  #: the operators that stand for it, where it is no node of its own

    def __str__(self) -> str:
        return self.what or self.op

    @property
    def link(self) -> str:
        return "sigmoid" if self.op == "Sigmoid" else "softmax"


@dataclass(frozen=True, eq=False)
class Evidence:
    """What can be seen of the task of one output of the graph."""

    name: str
    is_float: bool
    shape: tuple[Size, ...] | None
    end: End | None
    features: int | None  #: axis of what a linear layer makes, if the output comes straight from one
    maker: str  #: the operator that it ends in
    rearranged: str | None  #: how it is made of probabilities whose logits are out of reach
    input_side: int  #: of the largest map among the model's inputs, where known, else 0
    words: frozenset[str]  #: of its name
    value: str  #: the tensor that it is a copy of, or itself
    numbers: str  #: the tensor that holds its numbers: itself, or what a list of maps was made of

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def class_axis(self) -> int | None:
        """Where the classes are, if there are any: as softmax or a layer says, else where usual."""
        if self.rank is None or self.rank < 2:
            return None
        known = self.features if self.end is None or self.end.axis is None else self.end.axis
        return known if known is not None else 2 if self.rank == 3 else 1

    def size(self, axis: int | None) -> int | None:
        """The length of an axis, where it is known."""
        size = self.shape[axis] if self.shape is not None and axis is not None else None
        return size if isinstance(size, int) else None

    @property
    def positions(self) -> list[Size]:
        """The lengths of the axes that are neither of the rows nor of the classes."""
        return [size for at, size in enumerate(self.shape or ()) if at not in (0, self.class_axis)]

    @property
    def is_one_position(self) -> bool:
        """Whether the classes are there once per row."""
        return all(size == 1 for size in self.positions)

    def says(self, *words: str) -> bool:
        return any(word in self.words or f"{word}s" in self.words for word in words)

    def __str__(self) -> str:
        """Its shape, as people write it."""
        places = iter({3: "T", 4: "HW", 5: "DHW"}.get(self.rank or 0, ""))
        names = ["N" if at == 0 else "C" if at == self.class_axis else next(places, "?")
                 for at in range(self.rank or 0)]  # fmt: skip
        sizes = [str(size) if isinstance(size, int) else name for size, name in zip(self.shape or (), names)]
        return f"({', '.join(sizes)}{',' if self.rank == 1 else ''})"


_KEEP_VALUES = ("QuantizeLinear", "DequantizeLinear")  # beside those that `through` looks through
_REARRANGE = (
    "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Concat", "Gather", "GatherND", "GatherElements",
    "Slice", "Split", "Expand", "Tile", "Pad", "TopK", "ReduceMean", "ReduceMax", "ReduceMin", "AveragePool",
    "MaxPool", "GlobalAveragePool", "GlobalMaxPool", "Resize", "Upsample", "Normalizer", "Log",
)  # fmt: skip
_CONVOLUTIONS = ("Conv", "ConvTranspose", "QLinearConv", "ConvInteger")
_LINEAR = ("Gemm", "MatMul", "FusedMatMul", "TransposeMatMul", "QLinearMatMul", "QGemm", "DynamicQuantizeMatMul",
           "MatMulIntegerToFloat", "MatMulNBits", "LinearRegressor", "LinearClassifier", *_CONVOLUTIONS)  # fmt: skip
_RESHAPE = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
_SAME_FEATURES = ("Transpose", "Resize", "Upsample", "GlobalAveragePool", *_RESHAPE)
_FARTHEST = 24  # nodes; between an output and its last layer there are a few


def read_outputs(source: SourceModel) -> dict[str, Evidence]:
    """The evidence of every output, by its name."""
    network = Network.of(source)
    # A layer stays one, whatever distribution it may read.
    composites = {
        c.last.outputs[0].name: c.node for c in network.composites if id(c.last) not in network.layers
    }
    reading = _Reading(source.opset, source.constants, composites)
    kinds = {info.name: info.type.WhichOneof("value") or "tensor_type" for info in source.proto.graph.output}
    maps = [spec.shape[1:] for spec in source.inputs if spec.shape is not None and len(spec.shape) > 3]
    side = max((size for shape in maps for size in shape if isinstance(size, int)), default=0)
    return {
        tensor.name: reading.output(tensor, kinds[tensor.name] == "tensor_type", side)
        for tensor in source.outputs
    }


@dataclass(frozen=True, eq=False)
class _Reading:
    """Looking back from an output."""

    opset: int
    constants: AbstractSet[str]
    composites: Mapping[str, Node]  #: by the name of what they make

    def output(self, output: gs.Tensor, is_tensor: bool, input_side: int) -> Evidence:
        tensor, width = _unzipped(output)
        is_tensor = is_tensor or width is not None
        last = self.before_copies(tensor)
        node = self.maker(last)
        known = _merged(tensor.shape, last.shape, None if width is None else (None, width))
        end = self.end(last, known)
        shape = _merged(known, _shape_of_logits(end)) if is_tensor else None
        way = [] if end is not None else self.from_probabilities(last, set()) or []
        axis = None if end and end.derived else self.features(end.logits if end else last, shape)
        words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", f"{output.name} {_symbol(shape, axis)}")
        return Evidence(
            name=output.name,
            is_float=is_tensor and is_float(tensor.dtype),
            shape=shape,
            end=end,
            features=axis,
            maker="the input" if node is None else node.op,
            rearranged=", then ".join(way) or None,
            input_side=input_side,
            words=frozenset(map(str.lower, words)),
            value=last.name,
            numbers=tensor.name,
        )

    def maker(self, tensor: gs.Tensor) -> Node | None:
        return self.composites.get(tensor.name) or (tensor.inputs[0] if tensor.inputs else None)

    def before_copies(self, tensor: gs.Tensor) -> gs.Tensor:
        """What was copied, cast, or rounded to whole steps to give a tensor."""
        for _ in range(_FARTHEST):
            tensor = through(tensor)
            if not tensor.inputs or tensor.inputs[0].op not in _KEEP_VALUES:
                break
            tensor = tensor.inputs[0].inputs[0]
        return tensor

    def end(self, tensor: gs.Tensor, shape: tuple[Size, ...] | None) -> End | None:
        node = self.maker(tensor)
        op = node.op if node is not None and node.domain in (None, "", "ai.onnx") else ""
        if node is None or op not in ("Softmax", "LogSoftmax"):
            logits = node.inputs[0] if node is not None and op == "Sigmoid" else sigmoid_of(tensor)
            if logits is None:
                return self.composed_end(tensor, shape)
            return End("Sigmoid", logits) if is_float(logits.dtype) else None
        logits = node.inputs[0]
        if not is_float(logits.dtype):
            return None
        axis = self.softmax_axis(node, _merged(shape, logits.shape))
        products = [reader for reader in tensor.outputs if reader.op == "MatMul"]
        weighs = any(self.constants.isdisjoint(factor.name for factor in node.inputs) for node in products)
        return End(op, logits, axis, weighs)

    def composed_end(self, tensor: gs.Tensor, shape: tuple[Size, ...] | None) -> End | None:
        """The end of probabilities (N, C) that an operator makes inside, or several nodes together."""
        classes = shape[1] if shape is not None and len(shape) == 2 else None
        known = classes if isinstance(classes, int) else None
        found = squashed(tensor, known) if shape is None or len(shape) == 2 else None
        if found is None or not is_float(tensor.dtype):
            return None
        op, axis = ("Softmax", 1) if found.link == "softmax" else ("Sigmoid", None)
        return End(op, found.tensor, axis, derived=found.derived, what=found.what)

    def softmax_axis(self, node: Node, shape: tuple[Size, ...] | None) -> int | None:
        """Before opset 13 all axes from the given one on are one, which is a softmax along a single
        axis if the others have length 1."""
        axis: int = node.attrs.get("axis", 1 if self.opset < 13 else -1)
        if shape is None or not -len(shape) <= axis < len(shape):
            return None
        axis %= len(shape)
        if self.opset < 13:
            longer = [at for at in range(axis, len(shape)) if shape[at] != 1] or [axis]
            return longer[0] if len(longer) == 1 else None
        return axis

    def from_probabilities(self, tensor: gs.Tensor, seen: set[str]) -> list[str] | None:
        """The operators from a Softmax or Sigmoid on that only rearrange, pick or average its results."""
        tensor = self.before_copies(tensor)
        node = self.maker(tensor)
        if node is None or tensor.name in seen or len(seen) > _FARTHEST:
            return None
        seen.add(tensor.name)
        squashes = node.op.endswith(("Softmax", "Sigmoid")) and node.op != "HardSigmoid"
        if squashes or node.attrs.get("post_transform", "NONE") != "NONE":
            return [node.op]
        ways = (self.from_probabilities(earlier, seen) for earlier in _rearranged_by(node, tensor))
        return next(([*way, node.op] for way in ways if way is not None), None)

    def features(self, tensor: gs.Tensor, shape: tuple[Size, ...] | None) -> int | None:
        """The axis that a linear layer with constant weights has made, if only scaling, shifting,
        resizing or another arrangement with the same features lies behind it."""
        way = self.way_from_layer(tensor, len(shape)) if shape is not None else None
        if shape is None or way is None or way.layer.attrs.get("post_transform", "NONE") != "NONE":
            return None
        return way.axis_reshaped(shape) if way.reshaped else way.axis_moved(shape)

    def way_from_layer(self, tensor: gs.Tensor, rank: int) -> _Way | None:
        """The last linear layer before a tensor, and what was done to its features since."""
        moves: list[list[int]] = []
        reshaped = False
        for _ in range(_FARTHEST):
            tensor = self.before_copies(tensor)
            node = self.maker(tensor)
            if node is None:
                return None
            if node.op in _LINEAR and is_layer(node, self.constants):
                return _Way(node, tensor.shape, tuple(moves), reshaped)
            data = self.same_features(node)
            if data is None or node.op == "Transpose" and reshaped:
                return None
            if node.op == "Transpose":
                moves.append(list(node.attrs.get("perm", range(rank)[::-1])))
            reshaped = reshaped or node.op in _RESHAPE
            tensor = data
        return None

    def same_features(self, node: Node) -> gs.Tensor | None:
        """The tensor whose features a node only scales, shifts, resizes or arranges in another way."""
        data = [entry for entry in node.inputs if entry.name and entry.name not in self.constants]
        if node.op in ("Add", "Sub", "Mul", "Div"):
            alone = len(data) == 1 and (node.op != "Div" or data[0] is node.inputs[0])
            return data[0] if alone else None
        return data[0] if data and node.op in _SAME_FEATURES else None


@dataclass(frozen=True, eq=False)
class _Way:
    """A linear layer, and what happens to its features on the way to an output."""

    layer: Node
    made: Sequence[Size] | None  #: the shape of what the layer puts out
    moves: tuple[list[int], ...]  #: orders of axes, the last one first
    reshaped: bool

    @property
    def convolves(self) -> bool:
        return self.layer.op in _CONVOLUTIONS

    def axis_reshaped(self, shape: Sequence[Size]) -> int | None:
        """Where the features are behind a Reshape: they are still an axis if their number is."""
        if self.moves or not self.made:
            return None
        size = self.made[1 if self.convolves and len(self.made) > 1 else -1]
        to = 1 if self.convolves else len(shape) - 1
        return to if to < len(shape) and size == shape[to] and isinstance(shape[to], int) else None

    def axis_moved(self, shape: Sequence[Size]) -> int | None:
        """Where the features are behind transpositions; None where they were broadcast."""
        made = shape if self.made is None else self.made
        if len(made) == 0:
            return None
        axis = 1 if self.convolves and len(made) > 1 else len(made) - 1
        for order in reversed(self.moves):
            axis = order.index(axis)
        broadcast = axis < len(shape) and not self.moves and made[axis] == 1 != shape[axis]
        return axis if 0 < axis < len(shape) and not broadcast else None


def _rearranged_by(node: Node, tensor: gs.Tensor) -> list[gs.Tensor]:
    """The tensors that a node rearranges, picks from or averages to make a tensor; none for other nodes."""
    if node.op == "If":
        at = next(at for at, made in enumerate(node.outputs) if made is tensor)
        return [body.outputs[at] for body in node.attrs.values() if isinstance(body, gs.Graph)]
    if node.op == "Concat":
        return list(node.inputs)
    return list(node.inputs[:1]) if node.op in _REARRANGE else []


def _unzipped(output: gs.Tensor) -> tuple[gs.Tensor, int | None]:
    """What a list of maps, one for each row, was made of, and how many classes they have; else the output itself."""
    node = output.inputs[0] if output.inputs else None
    if node is None or node.op != "ZipMap" or node.domain != ML:
        return output, None
    labels = node.attrs.get("classlabels_int64s") or node.attrs.get("classlabels_strings") or ()
    return node.inputs[0], len(labels)


def _shape_of_logits(end: End | None) -> tuple[Size, ...] | None:
    """The shape of the logits of an output, as far as it is known."""
    if end is None or end.derived is None:
        return None if end is None or end.logits.shape is None else tuple(end.logits.shape)
    shape = end.logits.shape
    rows, width = (shape[0], shape[-1]) if shape else (None, None)
    return rows, end.derived.classes or width


def _merged(*shapes: Sequence[Size] | None) -> tuple[Size, ...] | None:
    """The shape that several tensors share, as far as any of them tells it; a length counts before a symbol."""
    known = [shape for shape in shapes if shape is not None]
    known = [shape for shape in known if len(shape) == len(known[0])]
    if not known:
        return None
    return tuple(
        next((s for s in sizes if isinstance(s, int) and s > 0), None)
        or next((s for s in sizes if isinstance(s, str)), None)
        for sizes in zip(*known)
    )


def _symbol(shape: tuple[Size, ...] | None, axis: int | None) -> str:
    size = shape[axis] if shape is not None and axis is not None else None
    return size if isinstance(size, str) else ""
