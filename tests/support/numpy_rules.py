"""A slow evaluation of mean and variance in float64 numpy that knows no rule.

Every operator is a numpy function of its inputs. What the variance does is read off that function:

    v_y = Σ_j (∂y/∂x_j)² v_j     with slopes by central differences; a tensor that a node reads twice is
                                 one variable
        + Σ_jk (∂²y/∂a_j∂b_k)² v_j v_k    where y is bilinear in two different uncertain tensors: exact

What a tensor's elements depend on is kept beside: only where the elements that a node mixes depend on
different elements of the graph's inputs is this sum the variance of the whole graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view

STEP = 1e-5
KINK_STEP = 1e-4  #: no kink may be this close; float32 means err by less
#: Slopes to the left and to the right differ by KINK_STEP · f'' where there is no kink, and f'' is below
#: 100 (1 + |f'|) for what graphs hold; at a kink they differ by 0.1 at least.
KINK = 0.02
DEPENDS = 1e-7  #: a slope below is none: 10 times the error of differences

Arrays = dict[str, np.ndarray]


class Unfit(Exception):
    """A node that cannot be evaluated here: at a kink, out of its domain or of bounds."""


@dataclass(frozen=True, eq=False)
class Moments:
    """A tensor. `var` is None where it is certain."""

    mean: np.ndarray
    var: np.ndarray | None = None
    support: np.ndarray | None = None  #: (elements, elements of all inputs): what depends on what
    mixed: bool = False  #: somewhere on the way, elements were mixed that depend on the same


Function = Callable[[Arrays], list[np.ndarray]]


# ------------------------------------------------------------------------- moments


def moments_after(function: Function, inputs: dict[str, Moments], bilinear: bool = False) -> list[Moments]:
    """The outputs of a function of tensors whose elements count as independent."""
    means = {name: tensor.mean for name, tensor in inputs.items()}
    results = function(means)
    uncertain = {name: tensor for name, tensor in inputs.items() if tensor.var is not None}
    if not uncertain:
        return [Moments(y) for y in results]
    jacobians = {name: _jacobian(function, means, name, results) for name in uncertain}
    found = []
    for i, y in enumerate(results):
        slopes = np.concatenate([jacobians[name][i] for name in uncertain], axis=1)  # (|y|, Σ|x|)
        var = slopes**2 @ np.concatenate([x.var.ravel() for x in uncertain.values()])
        if bilinear and len(uncertain) > 1:
            var += _second_order(function, means, uncertain, i)
        depends = (np.abs(slopes) > DEPENDS).astype(int)
        counts = depends @ np.concatenate([x.support for x in uncertain.values()])
        mixed = counts.max(initial=0) > 1 or any(x.mixed for x in uncertain.values())
        found.append(Moments(y, var.reshape(y.shape), counts > 0, mixed))
    return found


def _jacobian(function: Function, means: Arrays, name: str, results: list[np.ndarray]) -> list[np.ndarray]:
    """∂y/∂x, (|y|, |x|) for each output, by central differences."""
    columns: list[list[np.ndarray]] = [[] for _ in results]
    for position in np.ndindex(means[name].shape):
        near, wide = (
            [_shifted(function, means, name, position, step) for step in (h, -h)] for h in (STEP, KINK_STEP)
        )
        for column, y, right, left, up, down in zip(columns, results, *near, *wide):
            slope = (right - left) / (2 * STEP)
            bend = np.abs(up + down - 2 * y) / KINK_STEP
            if not np.all(bend <= KINK * (1 + np.abs(slope))):
                raise Unfit("a kink")
            column.append(slope.ravel())
    return [
        np.stack(column, axis=1) if column else np.zeros((y.size, 0)) for column, y in zip(columns, results)
    ]


def _shifted(function: Function, means: Arrays, name: str, position: tuple, step: float) -> list[np.ndarray]:
    x = means[name].copy()
    x[position] += step
    return function(means | {name: x})


def _second_order(function: Function, means: Arrays, uncertain: dict[str, Moments], i: int) -> np.ndarray:
    """Σ_jk (∂²y/∂a_j∂b_k)² v_j v_k; differences of any length are exact, as y is linear in each."""
    total = np.zeros(function(means)[i].size)
    for a, b in itertools.combinations(uncertain, 2):
        steps = {name: _unit_steps(means[name]) for name in (a, b)}
        y = function(means)[i]
        along_a = [function(means | {a: x})[i] - y for x in steps[a]]
        for z, v_b in zip(steps[b], uncertain[b].var.ravel()):
            y = function(means | {b: z})[i]
            for x, slope, v_a in zip(steps[a], along_a, uncertain[a].var.ravel()):
                total += ((function(means | {a: x, b: z})[i] - y - slope) ** 2).ravel() * v_a * v_b
    return total


def _unit_steps(x: np.ndarray) -> list[np.ndarray]:
    """x with 1 added to each of its elements in turn."""
    return [x + e.reshape(x.shape) for e in np.eye(x.size)]


# ----------------------------------------------------------------------- operators


BILINEAR = {"Mul", "MatMul", "Gemm", "Conv"}


def node_function(node: onnx.NodeProto, opset: int) -> Function:
    """What a node computes, as a function of its inputs by name."""
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    attrs = {name: value.decode() if isinstance(value, bytes) else value for name, value in attrs.items()}
    compute, outputs = OPERATORS[node.op_type], len(node.output)

    def function(arrays: Arrays) -> list[np.ndarray]:
        inputs = [arrays[name] if name else None for name in node.input]
        result = compute(Call(inputs, attrs, opset, outputs))
        return list(result) if isinstance(result, (list, tuple)) else [np.asarray(result)]

    return function


def chain(nodes: Sequence[onnx.NodeProto], opset: int, outputs: Sequence[str] | None = None) -> Function:
    """Several nodes, in order, as one function; its outputs are those of the last unless they are named."""
    functions = [(node, node_function(node, opset)) for node in nodes]
    outputs = nodes[-1].output if outputs is None else outputs

    def function(arrays: Arrays) -> list[np.ndarray]:
        arrays = dict(arrays)
        for node, compute in functions:
            arrays.update(zip(node.output, compute(arrays)))
        return [arrays[name] for name in outputs]

    return function


@dataclass(frozen=True, eq=False)
class Call:
    """One evaluation of an operator."""

    inputs: list[np.ndarray | None]
    attrs: dict
    opset: int
    outputs: int

    @property
    def x(self) -> np.ndarray:
        return self.inputs[0]

    def attr(self, name: str, default=None):
        return self.attrs.get(name, default)

    def given(self, position: int, attribute: str, default=None):
        """What is an input in new opsets and an attribute in old ones."""
        if len(self.inputs) > position and self.inputs[position] is not None:
            return self.inputs[position].tolist()
        return self.attrs.get(attribute, default)


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[[Call], np.ndarray]:
    return lambda call: function(*call.inputs)


def _elu(call: Call) -> np.ndarray:
    return np.where(call.x > 0, call.x, call.attr("alpha", 1.0) * np.expm1(np.minimum(call.x, 0)))


def _hard_sigmoid(call: Call) -> np.ndarray:
    return np.clip(call.attr("alpha", 0.2) * call.x + call.attr("beta", 0.5), 0, 1)


def _clip(call: Call) -> np.ndarray:
    return np.clip(call.x, call.given(1, "min", -np.inf), call.given(2, "max", np.inf))


def _gemm(call: Call) -> np.ndarray:
    a, b = call.inputs[:2]
    a, b = a.T if call.attr("transA", 0) else a, b.T if call.attr("transB", 0) else b
    y = call.attr("alpha", 1.0) * (a @ b)
    return y + call.attr("beta", 1.0) * call.inputs[2] if len(call.inputs) > 2 else y


def _batch_normalization(call: Call) -> np.ndarray:
    shape = (1, -1) + (1,) * (call.x.ndim - 2)
    scale, bias, mean, variance = (parameter.reshape(shape) for parameter in call.inputs[1:])
    return scale * (call.x - mean) / np.sqrt(variance + call.attr("epsilon", 1e-5)) + bias


def _windows(call: Call, kernel: Sequence[int], fill: float) -> np.ndarray:
    """(n, c, places…, kernel…) of an input padded with `fill`."""
    x, rank = call.x, len(kernel)
    strides, dilations = call.attr("strides", [1] * rank), call.attr("dilations", [1] * rank)
    pads = list(call.attr("pads", [0] * (2 * rank)))
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations)]
    if call.attr("ceil_mode", 0):
        for axis in range(rank):
            free = x.shape[2 + axis] + pads[axis] + pads[rank + axis] - reach[axis]
            places = math.ceil(free / strides[axis]) + 1
            if (places - 1) * strides[axis] >= x.shape[2 + axis] + pads[axis]:
                raise Unfit("a window that starts in the padding: ONNX and onnxruntime disagree about it")
            pads[rank + axis] += max((places - 1) * strides[axis] - free, 0)
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:])], constant_values=fill)
    axes = tuple(range(2, 2 + rank))
    found = sliding_window_view(x, reach, axes)
    steps = [slice(None, None, s) for s in (*strides, *dilations)]
    return found[(slice(None), slice(None), *steps)]


def _conv(call: Call) -> np.ndarray:
    w, groups = call.inputs[1], call.attr("group", 1)
    rank = w.ndim - 2
    windows = _windows(call, w.shape[2:], 0.0)
    n, c, *places = windows.shape[: 2 + rank]
    windows = windows.reshape(n, groups, c // groups, math.prod(places), -1)
    w = w.reshape(groups, w.shape[0] // groups, c // groups, -1)
    y = np.einsum("ngcpk,gfck->ngfp", windows, w).reshape(n, -1, *places)
    return y + call.inputs[2].reshape(-1, *[1] * rank) if len(call.inputs) > 2 else y


def _max_pool(call: Call) -> np.ndarray:
    kernel = call.attr("kernel_shape")
    return _windows(call, kernel, -np.inf).max(axis=tuple(range(-len(kernel), 0)))


def _average_pool(call: Call) -> np.ndarray:
    kernel = call.attr("kernel_shape")
    windows = _windows(call, kernel, np.nan)
    axes = tuple(range(-len(kernel), 0))
    counts = math.prod(kernel) if call.attr("count_include_pad", 0) else (~np.isnan(windows)).sum(axis=axes)
    return np.nansum(windows, axis=axes) / counts


def _reduction(function: Callable[..., np.ndarray]) -> Callable[[Call], np.ndarray]:
    def compute(call: Call) -> np.ndarray:
        axes = call.given(1, "axes")
        return function(
            call.x, axis=None if axes is None else tuple(axes), keepdims=bool(call.attr("keepdims", 1))
        )

    return compute


def _softmax(call: Call) -> np.ndarray:
    if call.opset >= 13:
        e = np.exp(call.x)
        return e / e.sum(axis=call.attr("axis", -1), keepdims=True)
    axis = call.attr("axis", 1) % call.x.ndim
    e = np.exp(call.x).reshape(math.prod(call.x.shape[:axis]), -1)
    return (e / e.sum(axis=1, keepdims=True)).reshape(call.x.shape)


def _reshape(call: Call) -> np.ndarray:
    shape = [call.x.shape[i] if d == 0 else d for i, d in enumerate(call.inputs[1].tolist())]
    return call.x.reshape(shape)


def _flatten(call: Call) -> np.ndarray:
    return call.x.reshape(math.prod(call.x.shape[: call.attr("axis", 1)]), -1)


def _slice(call: Call) -> np.ndarray:
    starts, ends = call.given(1, "starts"), call.given(2, "ends")
    axes, steps = call.given(3, "axes"), call.given(4, "steps", [1] * len(starts))
    index = [slice(None)] * call.x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps):
        index[axis] = slice(start, None if end < -call.x.shape[axis] else end, step)
    return call.x[tuple(index)]


def _split(call: Call) -> list[np.ndarray]:
    axis = call.attr("axis", 0)
    sizes = call.given(1, "split")
    if sizes is None:
        size = math.ceil(call.x.shape[axis] / call.outputs)
        sizes = [size] * call.outputs
    return np.split(call.x, np.cumsum(sizes)[:-1], axis=axis)


def _pad(call: Call) -> np.ndarray:
    pads = call.given(1, "pads")
    rank, mode = call.x.ndim, call.attr("mode", "constant")
    fill = call.given(2, "value", 0.0)
    widths = list(zip(pads[:rank], pads[rank:]))
    return (
        np.pad(call.x, widths, constant_values=fill) if mode == "constant" else np.pad(call.x, widths, mode)
    )


def _unsqueeze(call: Call) -> np.ndarray:
    return np.expand_dims(call.x, tuple(call.given(1, "axes")))


def _squeeze(call: Call) -> np.ndarray:
    return np.squeeze(call.x, tuple(call.given(1, "axes")))


OPERATORS: dict[str, Callable[[Call], np.ndarray | list[np.ndarray]]] = {
    "Add": _elementwise(np.add),
    "Sub": _elementwise(np.subtract),
    "Mul": _elementwise(np.multiply),
    "Div": _elementwise(np.divide),
    "Pow": _elementwise(np.power),
    "Max": lambda call: np.max(np.broadcast_arrays(*call.inputs), axis=0),
    "Min": lambda call: np.min(np.broadcast_arrays(*call.inputs), axis=0),
    "Sum": lambda call: np.sum(np.broadcast_arrays(*call.inputs), axis=0),
    "Where": _elementwise(np.where),
    "Relu": _elementwise(lambda x: np.maximum(x, 0)),
    "Tanh": _elementwise(np.tanh),
    "Sigmoid": _elementwise(lambda x: 1 / (1 + np.exp(-x))),
    "Softplus": _elementwise(lambda x: np.log1p(np.exp(x))),
    "Exp": _elementwise(np.exp),
    "Log": _elementwise(np.log),
    "Sqrt": _elementwise(np.sqrt),
    "Abs": _elementwise(np.abs),
    "Neg": _elementwise(np.negative),
    "Identity": _elementwise(np.copy),
    "Cast": _elementwise(np.copy),  # between floats, without its rounding
    "PRelu": _elementwise(lambda x, slope: np.where(x > 0, x, slope * x)),
    "LeakyRelu": lambda call: np.where(call.x > 0, call.x, call.attr("alpha", 0.01) * call.x),
    "Elu": _elu,
    "HardSigmoid": _hard_sigmoid,
    "Clip": _clip,
    "MatMul": _elementwise(np.matmul),
    "Gemm": _gemm,
    "Conv": _conv,
    "BatchNormalization": _batch_normalization,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda call: call.x.mean(axis=tuple(range(2, call.x.ndim)), keepdims=True),
    "GlobalMaxPool": lambda call: call.x.max(axis=tuple(range(2, call.x.ndim)), keepdims=True),
    "ReduceMean": _reduction(np.mean),
    "ReduceSum": _reduction(np.sum),
    "ReduceMax": _reduction(np.max),
    "ReduceMin": _reduction(np.min),
    "Softmax": _softmax,
    "LogSoftmax": lambda call: np.log(_softmax(call)),
    "Transpose": lambda call: call.x.transpose(call.attr("perm")),
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Concat": lambda call: np.concatenate(call.inputs, axis=call.attr("axis")),
    "Slice": _slice,
    "Split": _split,
    "Gather": lambda call: np.take(call.x, call.inputs[1], axis=call.attr("axis", 0)),
    "Pad": _pad,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Expand": lambda call: np.array(call.x * np.ones(call.inputs[1])),
    "Tile": lambda call: np.tile(call.x, call.inputs[1]),
}
