"""Random graphs for hypothesis: a few operators on small tensors, in the form that each opset asks for.

Hypothesis draws the opset, the number of operators and a seed, which decides all the rest. With fewer
operators the graph is the beginning of the same graph, so that failures shrink to the operator that
fails. (Drawn one by one, choices would repeat each other, and three graphs in ten would be Relus.)

A graph is evaluated while it is drawn, by `numpy_rules`: an operator is added only where its inputs
are in its domain and away from its kinks, and where numbers stay moderate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from cases import element_type
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from support.numpy_rules import BILINEAR, Moments, Unfit, moments_after, node_function

OPSETS = (9, 11, 13, 17, 21)
MOST_ELEMENTS = 40
LARGEST_MEAN = 20.0
LARGEST_VARIANCE = 1e3
STD = 0.3  #: of the inputs, some: large, so that products of variances count
FEWEST, MOST = 3, 12  #: operators
ATTEMPTS = 6  #: to add one more operator


@dataclass(frozen=True, eq=False)
class RandomGraph:
    """A model of any float type, and what its tensors should be."""

    opset: int
    nodes: list[onnx.NodeProto]
    drawn: list[str]  #: of the palette
    constants: dict[str, np.ndarray]
    tensors: dict[str, Moments]
    inputs: list[str]
    outputs: list[str]
    symbolic: bool  #: sizes of the inputs are names
    order: list[int]  #: of the nodes in the file, which need not be one in which they can run

    @property
    def uncertain(self) -> list[str]:
        return [name for name in self.inputs if self.tensors[name].var is not None]

    @property
    def operators(self) -> set[str]:
        return {node.op_type for node in self.nodes}

    @property
    def is_sorted(self) -> bool:
        return self.order == sorted(self.order)

    def model(self, dtype: type) -> onnx.ModelProto:
        graph = helper.make_graph(
            [_for_dtype(self.nodes[position], dtype) for position in self.order],
            "random",
            [self._info(name, dtype, self.symbolic) for name in self.inputs],
            [self._info(name, dtype, self.symbolic) for name in self.outputs],
            [numpy_helper.from_array(_cast(array, dtype), name) for name, array in self.constants.items()],
        )
        opset = helper.make_opsetid("", self.opset)
        return helper.make_model(graph, opset_imports=[opset], ir_version=10)

    def _info(self, name: str, dtype: type, symbolic: bool) -> onnx.ValueInfoProto:
        shape = self.tensors[name].mean.shape
        sizes = [f"{name}_{axis}" for axis in range(len(shape))] if symbolic else shape
        return helper.make_tensor_value_info(name, element_type(dtype), sizes)

    def feeds(self, dtype: type) -> dict[str, np.ndarray]:
        return {name: self.tensors[name].mean.astype(dtype) for name in self.inputs}

    def variances(self) -> dict[str, np.ndarray]:
        return {name: self.tensors[name].var for name in self.uncertain}

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        """What hypothesis shows of a graph that fails."""
        printer.text(onnx.printer.to_text(self.model(np.float64)))


def _cast(array: np.ndarray, dtype: type) -> np.ndarray:
    return array.astype(dtype) if array.dtype == np.float64 else array


def _for_dtype(node: onnx.NodeProto, dtype: type) -> onnx.NodeProto:
    """Casts are drawn for double models; in a float32 model they go the other way."""
    if node.op_type != "Cast" or dtype is np.float64:
        return node
    to = TensorProto.DOUBLE if node.attribute[0].i == TensorProto.FLOAT else TensorProto.FLOAT
    return helper.make_node("Cast", node.input, node.output, to=to)


# ------------------------------------------------------------------------ drawing


@st.composite
def random_graphs(draw: st.DrawFn, tree: bool = False, without: frozenset[str] = frozenset()) -> RandomGraph:
    """Graphs of 3 to 12 operators. In a `tree` no tensor is read twice, and no elements are mixed that
    depend on the same element of an input."""
    draft = Draft(draw(st.sampled_from(OPSETS)), draw(st.integers(0, 2**32 - 1)), tree)
    count = draw(st.integers(FEWEST, MOST))
    return draft.grown(count, [name for name in PALETTE if name not in without])


class Draft:
    """A graph that grows."""

    def __init__(self, opset: int, seed: int, tree: bool):
        self.opset = opset
        self.rng = np.random.default_rng(seed)
        self.tree = tree
        self.nodes: list[onnx.NodeProto] = []
        self.drawn: list[str] = []
        self.constants: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Moments] = {}
        self.inputs: list[str] = []
        self.read: set[str] = set()
        self._draw_inputs()

    def grown(self, count: int, palette: list[str]) -> RandomGraph:
        for _ in range(count * ATTEMPTS):
            if len(self.nodes) < count:
                self._try_to_add(self.choose(*palette))
        return self._finished()

    def _try_to_add(self, name: str) -> None:
        try:
            PALETTE[name](self, name)
            self.drawn.append(name)
        except Unfit:
            pass

    def _draw_inputs(self) -> None:
        uncertain = self.integer(1, 2)
        certain = self.integer(0, 3) == 0
        shapes = [self.shape() for _ in range(uncertain + certain)]
        if uncertain == 2 and self.coin():
            shapes[1] = shapes[0]
        sizes = [math.prod(shape) for shape in shapes[:uncertain]]
        supports = np.split(np.eye(sum(sizes), dtype=bool), np.cumsum(sizes)[:-1])
        for i, shape in enumerate(shapes):
            mean = self.numbers(shape)
            name = f"x{i}"
            if i < uncertain:
                self.tensors[name] = Moments(mean, STD**2 * self.rng.uniform(0.5, 1.5, shape), supports[i])
            else:
                self.tensors[name] = Moments(mean)
            self.inputs.append(name)

    def _finished(self) -> RandomGraph:
        """All tensors that nothing reads are outputs, and some of the others."""
        made = [name for node in self.nodes for name in node.output]
        read = {name for node in self.nodes for name in node.input}
        more = {name for name in made if self.integer(0, 3) == 0 and name in self.tensors}
        outputs = [name for name in made if name not in read or name in more]
        constants = {name: array for name, array in self.constants.items() if name in read}
        symbolic, count = self.coin(), len(self.nodes)
        order = self.rng.permutation(count).tolist() if self.coin() else list(range(count))
        return RandomGraph(
            self.opset, self.nodes, self.drawn, constants, self.tensors, self.inputs, outputs, symbolic, order
        )

    # ------------------------------------------------------------ what operators ask for

    def choose(self, *options):
        return options[self.rng.integers(len(options))]

    def coin(self) -> bool:
        return bool(self.rng.integers(2))

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def shape(self) -> tuple[int, ...]:
        rank = self.integer(2, 4)
        shape = [self.integer(1, 4) for _ in range(rank)]
        while math.prod(shape) > MOST_ELEMENTS:
            shape[int(np.argmax(shape))] -= 1
        return tuple(shape)

    def numbers(self, shape: tuple[int, ...], low: float = 0.2, high: float = 1.5) -> np.ndarray:
        """Of both signs, away from 0."""
        return self.rng.uniform(low, high, shape) * self.rng.choice([-1.0, 1.0], shape)

    def pick(self, fits: Callable[[np.ndarray], bool] = lambda x: True, but: tuple[str, ...] = ()) -> str:
        """The name of a tensor, often the newest."""
        names = [
            name
            for name, tensor in reversed(self.tensors.items())
            if fits(tensor.mean) and name not in but and not (self.tree and name in self.read)
        ]
        if not names:
            raise Unfit("no such tensor")
        return names[0] if self.coin() else self.choose(*names)

    def mean(self, name: str) -> np.ndarray:
        return self.tensors[name].mean

    def rank(self, name: str) -> int:
        return self.mean(name).ndim

    def axis(self, name: str) -> int:
        """Counted from the end by half of the opsets that allow it."""
        rank = self.rank(name)
        axis = self.integer(0, rank - 1)
        return axis - rank if self.opset >= 11 and self.coin() else axis

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def ints(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def compatible(self, *names: str, grows: bool = True) -> np.ndarray:
        """A constant that broadcasts with tensors, and may make them larger."""
        shape = np.broadcast_shapes(*(self._operand(name).mean.shape for name in names))
        kept = shape[self.integer(0, len(shape)) :]
        sizes = [self.choose(size, 1) if size > 1 or not grows else self.choose(1, 2) for size in kept]
        return self.numbers(tuple(sizes))

    def companion(self, *names: str, fits: Callable[[np.ndarray], bool] = lambda x: True) -> str:
        """Another operand: a tensor of the graph where one broadcasts, a same one, or a constant."""
        others = [self._operand(name).mean for name in names]
        if self.integer(0, 2):
            try:
                but = names if self.tree else ()
                return self.pick(lambda z: fits(z) and all(broadcast(x, z) for x in others), but)
            except Unfit:
                pass
        return self.constant(self.compatible(*names))

    def add(self, op_type: str, *inputs: str, outputs: int = 1, **attrs) -> list[str]:
        """A node, if it can be evaluated; the names of its outputs."""
        first = sum(len(node.output) for node in self.nodes)
        names = [f"t{first + i}" for i in range(outputs)]
        node = helper.make_node(op_type, list(inputs), names, **attrs)
        known = {name: self._operand(name) for name in inputs if name}
        with np.errstate(all="ignore"):
            results = moments_after(node_function(node, self.opset), known, op_type in BILINEAR)
        for y in results:
            if not 0 < y.mean.size <= MOST_ELEMENTS or not np.all(np.abs(y.mean) <= LARGEST_MEAN):
                raise Unfit("too large")
            if y.var is not None and not np.all(y.var <= LARGEST_VARIANCE) or self.tree and y.mixed:
                raise Unfit("too uncertain")
        self.nodes.append(node)
        self.tensors.update(zip(names, results))
        self.read.update(inputs)
        return names

    def _operand(self, name: str) -> Moments:
        return self.tensors[name] if name in self.tensors else Moments(self.constants[name])


def broadcast(a: np.ndarray, b: np.ndarray) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a.shape[::-1], b.shape[::-1]))


# ------------------------------------------------------------------------- palette

Adds = Callable[[Draft, str], object]
PALETTE: dict[str, Adds] = {}


def operator(*names: str) -> Callable[[Adds], Adds]:
    """A function that adds one of these operators to a draft, or raises Unfit."""

    def decorate(adds: Adds) -> Adds:
        PALETTE.update(dict.fromkeys(names, adds))
        return adds

    return decorate
