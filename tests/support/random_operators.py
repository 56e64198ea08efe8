"""The palette of random graphs: how each operator is added to a draft, in the form of its opset."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from support.numpy_rules import Unfit
from support.random_graphs import Draft, broadcast, operator


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


@operator("spelled out")
def spelled_out(g: Draft, op_type: str):
    """Composites. What they are made of stays in the graph, for others to read."""
    x = g.pick()
    spelling = g.choose(swish, mish, hard_swish, leaky_relu, centring, sum_normalisation, softmax_by_hand)
    return spelling(g, x)


def swish(g: Draft, x: str):
    return g.add("Mul", x, *g.add("Sigmoid", x))


def mish(g: Draft, x: str):
    return g.add("Mul", *g.add("Tanh", *g.add("Softplus", x)), x)


def hard_swish(g: Draft, x: str):
    return g.add("Mul", x, *g.add("HardSigmoid", x, alpha=1 / 6, beta=0.5))


def leaky_relu(g: Draft, x: str):
    return g.add("Max", x, *g.add("Mul", x, g.constant(np.array(0.3))))


def centring(g: Draft, x: str):
    return g.add("Sub", x, *_reduced(g, "ReduceMean", x, g.axis(x)))


def sum_normalisation(g: Draft, x: str):
    total = _reduced(g, "ReduceSum", x, g.axis(x))
    return g.add("Div", x, *total)


def softmax_by_hand(g: Draft, x: str):
    return sum_normalisation(g, *g.add("Exp", x))


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
        return z.ndim >= 2 and z.shape[axis] == x.shape[-1] and broadcast(x[..., 0, 0], z[..., 0, 0])

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
        found = [n for n, t in g.tensors.items() if n != x and broadcast(y, t.mean) and t.mean.ndim <= 2]
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
    return _reduced(g, op_type, x, *axes, keepdims=1 if len(axes) == rank else g.integer(0, 1))


def _reduced(g: Draft, op_type: str, x: str, *axes: int, keepdims: int = 1) -> list[str]:
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
