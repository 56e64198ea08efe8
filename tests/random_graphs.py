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
from numpy_rules import BILINEAR, Moments, Unfit, moments_after, node_function
from onnx import TensorProto, helper, numpy_helper

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

    @property
    def uncertain(self) -> list[str]:
        return [name for name in self.inputs if self.tensors[name].var is not None]

    @property
    def operators(self) -> set[str]:
        return {node.op_type for node in self.nodes}

    def model(self, dtype: type) -> onnx.ModelProto:
        graph = helper.make_graph(
            [_for_dtype(node, dtype) for node in self.nodes],
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
def random_graphs(
    draw: st.DrawFn, tree: bool = False, without: frozenset[str] = frozenset()
) -> RandomGraph:
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
        symbolic = self.coin()
        return RandomGraph(self.opset, self.nodes, self.drawn, constants, self.tensors, self.inputs, outputs, symbolic)

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
                return self.pick(lambda z: fits(z) and all(_broadcast(x, z) for x in others), but)
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


def _broadcast(a: np.ndarray, b: np.ndarray) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a.shape[::-1], b.shape[::-1]))


# ----------------------------------------------------------------------- operators

Adds = Callable[[Draft, str], object]
PALETTE: dict[str, Adds] = {}


def operator(*op_types: str) -> Callable[[Adds], Adds]:
    def decorate(adds: Adds) -> Adds:
        PALETTE.update(dict.fromkeys(op_types, adds))
        return adds

    return decorate


@operator("Relu", "Tanh", "Sigmoid", "Softplus", "Abs", "Neg", "Identity")
def unary(g: Draft, op_type: str):
    return g.add(op_type, g.pick())


@operator("LeakyRelu", "Elu")
def unary_with_alpha(g: Draft, op_type: str):
    return g.add(op_type, g.pick(), alpha=g.choose(0.1, 0.5))


@operator("HardSigmoid")
def hard_sigmoid(g: Draft, op_type: str):
    return g.add(op_type, g.pick(), alpha=g.choose(0.2, 0.5), beta=g.choose(0.5, 0.3))


@operator("Exp")
def exp(g: Draft, op_type: str):
    return g.add(op_type, g.pick(lambda x: x.max() < 2.5))


@operator("Sqrt", "Log")
def of_positive(g: Draft, op_type: str):
    return g.add(op_type, g.pick(lambda x: x.min() > 0.1))


@operator("Pow")
def power(g: Draft, op_type: str):
    exponent = g.choose(2.0, 3.0, 0.5)
    x = g.pick(lambda x: x.min() > 0.1 or exponent > 1)
    return g.add(op_type, x, g.constant(np.array(exponent)))


@operator("Add", "Sub", "Mul", "Max", "Min")
def binary(g: Draft, op_type: str):
    a = g.pick()
    b = g.companion(a)
    return g.add(op_type, *g.choose((a, b), (b, a)))


@operator("diamond")
def diamond(g: Draft, op_type: str):
    """A tensor and what was made of it: x·sigmoid(x), x - mean(x), …"""
    y = x = g.pick()
    for _ in range(g.integer(1, 3)):
        made = [node for node in g.nodes if x in node.output and node.input[0] in g.tensors]
        x = made[0].input[0] if made else x
    if x == y or not _broadcast(g.mean(x), g.mean(y)):
        raise Unfit("nothing was made of it")
    return g.add(g.choose("Mul", "Mul", "Add", "Sub", "Max", "Div"), *g.choose((x, y), (y, x)))


@operator("Div")
def division(g: Draft, op_type: str):
    def away_from_0(x: np.ndarray) -> bool:
        return np.abs(x).min() > 0.3

    if g.coin():
        a = g.pick()
        return g.add(op_type, a, g.companion(a, fits=away_from_0))
    b = g.pick(away_from_0)
    return g.add(op_type, g.companion(b), b)


@operator("Sum")
def variadic(g: Draft, op_type: str):
    a = g.pick()
    b = g.companion(a)
    c = g.companion(a, b)
    return g.add(op_type, *g.choose((a, b), (b, c, a), (a,)))


@operator("PRelu")
def prelu(g: Draft, op_type: str):
    x = g.pick()
    return g.add(op_type, x, g.constant(np.abs(g.compatible(x, grows=False)) / 3))


@operator("Clip")
def clip(g: Draft, op_type: str):
    low, high = g.choose((-0.5, 0.5), (0.0, 6.0), (-1.0, 0.3))
    x = g.pick()
    if g.opset < 11:
        return g.add(op_type, x, min=low, max=high)
    bounds = [g.constant(np.array(bound)) for bound in (low, high)]
    return g.add(op_type, x, *g.choose(bounds, bounds[:1], ["", bounds[1]]))


@operator("Where")
def where(g: Draft, op_type: str):
    a = g.pick()
    b = g.companion(a)
    mask = g.constant(g.compatible(a, b) > 0)
    return g.add(op_type, mask, *g.choose((a, b), (b, a)))


@operator("Cast")
def there_and_back(g: Draft, op_type: str):
    (y,) = g.add(op_type, g.pick(), to=TensorProto.FLOAT)
    try:
        return g.add(op_type, y, to=TensorProto.DOUBLE)
    finally:
        del g.tensors[y]  # of another type than all the others


# ------------------------------------------------------------------ layers with weights


@operator("MatMul")
def matmul(g: Draft, op_type: str):
    x = g.pick(lambda x: x.ndim >= 2)
    size = g.integer(1, 4)
    *batch, rows, columns = g.mean(x).shape
    if g.coin():
        return g.add(op_type, x, g.constant(g.numbers((columns, size))))
    batch = g.choose([], batch)
    return g.add(op_type, g.constant(g.numbers((*batch, size, rows))), x)


@operator("MatMul of two")
def matmul_of_two(g: Draft, op_type: str):
    """The second is transposed where it does not fit as it is."""
    a = g.pick(lambda x: x.ndim >= 2)
    x = g.mean(a)

    def fits(z: np.ndarray, axis: int) -> bool:
        return z.ndim >= 2 and z.shape[axis] == x.shape[-1] and _broadcast(x[..., 0, 0], z[..., 0, 0])

    b = g.pick(lambda z: fits(z, -2) or fits(z, -1), but=(a,))
    if not fits(g.mean(b), -2):
        rank = g.rank(b)
        (b,) = g.add("Transpose", b, perm=[*range(rank - 2), rank - 1, rank - 2])
    return g.add("MatMul", a, b)


@operator("Gemm")
def gemm(g: Draft, op_type: str):
    x = g.pick(lambda x: x.ndim == 2)
    trans_a, trans_b = g.integer(0, 1), g.integer(0, 1)
    rows, inner = g.mean(x).shape[:: -1 if trans_a else 1]
    size = g.integer(1, 4)
    weight = g.constant(g.numbers((size, inner) if trans_b else (inner, size)))
    bias = [g.constant(g.numbers(g.choose((size,), (1, size), (rows, 1), ())))]
    if g.opset >= 11 and g.coin():
        bias = []
    elif g.coin():  # an uncertain one
        y = np.zeros((rows, size))
        found = [n for n, t in g.tensors.items() if n != x and _broadcast(y, t.mean) and t.mean.ndim <= 2]
        found = [n for n in found if n not in g.read and (y + g.mean(n)).shape == y.shape]
        bias = found[-1:] or bias
    attrs = {"alpha": g.choose(1.0, 0.7), "beta": g.choose(1.0, 1.3)}
    return g.add(op_type, x, weight, *bias, transA=trans_a, transB=trans_b, **attrs)


def _window(g: Draft, x: str) -> dict[str, list[int]]:
    """Kernel, strides and pads that fit the spatial axes."""
    sizes = g.mean(x).shape[2:]
    kernel = [g.integer(1, min(3, size)) for size in sizes]
    pads = [g.integer(0, k - 1) for k in kernel * 2]
    return {"kernel_shape": kernel, "strides": [g.integer(1, 2) for _ in sizes], "pads": pads}


def _spatial(x: np.ndarray) -> bool:
    return x.ndim in (3, 4)


@operator("Conv")
def conv(g: Draft, op_type: str):
    x = g.pick(_spatial)
    channels = g.mean(x).shape[1]
    window = _window(g, x)
    dilations = [
        g.integer(1, 2) if 2 * (k - 1) < size else 1
        for k, size in zip(window["kernel_shape"], g.mean(x).shape[2:])
    ]
    group = g.choose(1, channels)
    weight = g.numbers((group * g.integer(1, 2), channels // group, *window["kernel_shape"]))
    bias = [g.constant(g.numbers(weight.shape[:1]))] if g.coin() else []
    return g.add(op_type, x, g.constant(weight), *bias, group=group, dilations=dilations, **window)


@operator("BatchNormalization")
def batch_normalization(g: Draft, op_type: str):
    x = g.pick(lambda x: x.ndim >= 2)
    channels = g.mean(x).shape[1]
    parameters = [g.numbers((channels,)) for _ in range(3)] + [g.rng.uniform(0.3, 2, channels)]
    return g.add(op_type, x, *(g.constant(parameter) for parameter in parameters), epsilon=1e-3)


# ------------------------------------------------------------------ pooling and reductions


@operator("MaxPool")
def max_pool(g: Draft, op_type: str):
    x = g.pick(_spatial)
    more = {"ceil_mode": g.integer(0, 1)} if g.opset >= 10 else {}
    return g.add(op_type, x, **_window(g, x), **more)


@operator("AveragePool")
def average_pool(g: Draft, op_type: str):
    x = g.pick(_spatial)
    return g.add(op_type, x, **_window(g, x), count_include_pad=g.integer(0, 1))


@operator("GlobalAveragePool", "GlobalMaxPool")
def global_pool(g: Draft, op_type: str):
    return g.add(op_type, g.pick(_spatial))


@operator("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")
def reduction(g: Draft, op_type: str):
    x = g.pick()
    rank = g.rank(x)
    axes = sorted({g.axis(x) % rank for _ in range(g.integer(1, 2))})
    if g.opset >= 11 and g.coin():
        axes = [axis - rank for axis in axes]
    keepdims = 1 if len(axes) == rank else g.integer(0, 1)
    if g.opset >= (13 if op_type == "ReduceSum" else 18):
        return g.add(op_type, x, g.ints(*axes), keepdims=keepdims)
    return g.add(op_type, x, axes=axes, keepdims=keepdims)


@operator("Softmax", "LogSoftmax")
def softmax(g: Draft, op_type: str):
    x = g.pick()
    return g.add(op_type, x, axis=g.axis(x))


# ----------------------------------------------------------------------------- moving


@operator("Transpose")
def transpose(g: Draft, op_type: str):
    x = g.pick()
    return g.add(op_type, x, perm=g.rng.permutation(g.rank(x)).tolist())


@operator("Reshape")
def reshape(g: Draft, op_type: str):
    """Two neighbouring axes become one, or one axis becomes two; one size is left to be found."""
    x = g.pick()
    shape = list(g.mean(x).shape)
    axis = g.integer(0, len(shape) - 1)
    size = shape[axis]
    if g.coin() and axis + 1 < len(shape):
        shape[axis : axis + 2] = [size * shape[axis + 1]]
    elif len(shape) < 4:
        factor = g.choose(*(d for d in range(1, size + 1) if size % d == 0))
        shape[axis : axis + 1] = [factor, size // factor]
    shape[g.integer(0, len(shape) - 1)] = -1
    return g.add(op_type, x, g.ints(*shape))


@operator("Flatten")
def flatten(g: Draft, op_type: str):
    x = g.pick()
    return g.add(op_type, x, axis=g.integer(0, g.rank(x)))


@operator("Concat")
def concat(g: Draft, op_type: str):
    a = g.pick()
    x, axis = g.mean(a), g.axis(a)

    def without(z: np.ndarray) -> list[int]:
        return [size for i, size in enumerate(z.shape) if i != axis % x.ndim]

    try:
        b = g.pick(lambda z: z.ndim == x.ndim and without(z) == without(x), but=(a,) if g.tree else ())
    except Unfit:
        b = g.constant(g.numbers(x.shape))
    return g.add(op_type, *g.choose((a, b), (b, a)), axis=axis)


@operator("Slice")
def slice_(g: Draft, op_type: str):
    x = g.pick()
    axis = g.axis(x)
    size = g.mean(x).shape[axis]
    start = g.integer(0, size - 1)
    end = g.choose(g.integer(start + 1, size), 2**31 - 1)
    if g.opset < 10:
        return g.add(op_type, x, axes=[axis], starts=[start], ends=[end])
    step = g.choose(1, 2, -1)
    if step < 0:
        start, end = g.choose((size - 1, -size - 1), (-1, 0))
    return g.add(op_type, x, *(g.ints(n) for n in (start, end, axis, step)))


@operator("Split")
def split(g: Draft, op_type: str):
    x = g.pick(lambda x: max(x.shape) > 1)
    shape = g.mean(x).shape
    axis = g.choose(*(i for i, size in enumerate(shape) if size > 1))
    first = g.integer(1, shape[axis] - 1)
    if g.opset >= 13 and g.coin():
        return g.add(op_type, x, g.ints(first, shape[axis] - first), outputs=2, axis=axis)
    if g.opset < 13 and g.coin():
        return g.add(op_type, x, outputs=2, axis=axis, split=[first, shape[axis] - first])
    if g.opset >= 18:
        return g.add(op_type, x, outputs=2, axis=axis, num_outputs=2)
    return g.add(op_type, x, outputs=shape[axis], axis=axis)


@operator("Gather")
def gather(g: Draft, op_type: str):
    x = g.pick()
    axis = g.axis(x)
    size = g.mean(x).shape[axis]
    lowest = -size if g.opset >= 11 else 0
    shape = g.choose((2,), (1, 2), ()) if g.rank(x) > 1 else (2,)
    indices = [g.integer(lowest, size - 1) for _ in range(math.prod(shape))]
    return g.add(op_type, x, g.constant(np.array(indices, np.int64).reshape(shape)), axis=axis)


@operator("Pad")
def pad(g: Draft, op_type: str):
    x = g.pick()
    mode = g.choose("constant", "edge", "reflect")
    sizes = g.mean(x).shape * 2
    pads = [g.integer(0, 1 if mode != "reflect" else min(1, size - 1)) for size in sizes]
    fill = g.choose(0.0, 0.7)
    if g.opset < 11:
        return g.add(op_type, x, pads=pads, mode=mode, value=fill)
    return g.add(op_type, x, g.ints(*pads), g.constant(np.array(fill)), mode=mode)


@operator("Unsqueeze")
def unsqueeze(g: Draft, op_type: str):
    x = g.pick(lambda x: x.ndim < 4)
    axis = g.integer(-g.rank(x) - 1 if g.opset >= 11 else 0, g.rank(x))
    return g.add(op_type, x, g.ints(axis)) if g.opset >= 13 else g.add(op_type, x, axes=[axis])


@operator("Squeeze")
def squeeze(g: Draft, op_type: str):
    x = g.pick(lambda x: 1 in x.shape and x.ndim > 1)
    axis = g.choose(*(i for i, size in enumerate(g.mean(x).shape) if size == 1))
    return g.add(op_type, x, g.ints(axis)) if g.opset >= 13 else g.add(op_type, x, axes=[axis])


@operator("Expand")
def expand(g: Draft, op_type: str):
    x = g.pick()
    shape = [g.choose(size, 1) if size > 1 else g.integer(1, 2) for size in g.mean(x).shape]
    return g.add(op_type, x, g.ints(*g.choose(shape, [2, *shape][-4:])))


@operator("Tile")
def tile(g: Draft, op_type: str):
    x = g.pick()
    return g.add(op_type, x, g.ints(*(g.integer(1, 2) for _ in range(g.rank(x)))))
