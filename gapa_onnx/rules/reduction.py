"""Reductions, pooling and softmax: each output element gathers several inputs."""

from __future__ import annotations

from math import prod

import numpy as np

from gapa_onnx.graph import Value
from gapa_onnx.rules.registry import Accuracy, rule
from gapa_onnx.rules.view import NodeView, Operand

EXACT, FIRST_ORDER = Accuracy.EXACT, Accuracy.FIRST_ORDER


def _group_size(node: NodeView) -> Value:
    """How many input elements make one output element, at run time."""
    count, dtype = node.graph.count, node.inputs[0].dtype
    return count(node.inputs[0].raw, dtype) / count(node.output.raw, dtype)


def _same_node(node: NodeView, value: Value) -> Value:
    """The node on another tensor, with its axes where they are an input."""
    return node.again(value, *(operand.raw for operand in node.inputs[1:] if operand.present))


@rule("ReduceSum", accuracy=EXACT)
def reduce_sum(node: NodeView) -> Value:
    """Σ_j v_j"""
    return _same_node(node, node.inputs[0].var)


@rule("ReduceMean", "GlobalAveragePool", accuracy=EXACT)
def mean(node: NodeView) -> Value:
    """Σ_j v_j / n²"""
    return _same_node(node, node.inputs[0].var) / _group_size(node)


@rule("AveragePool", accuracy=EXACT)
def average_pool(node: NodeView) -> Value:
    """Σ_j v_j / n², with n the number of elements that the window averages over."""
    x = node.inputs[0]
    window = prod(node.attr("kernel_shape"))
    pooled = node.again(x.var)
    if node.attr("ceil_mode", 0):
        raise node.refuse("ceil_mode=1: runtimes disagree on what the last window divides by")
    padded = node.attr("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or any(node.attr("pads", ()))
    if not padded or node.attr("count_include_pad", 0):
        return pooled / window
    # Averaging ones with the padding counted gives the share of the window that is real.
    share = node.again(node.graph.zeros(x.mean) + 1, count_include_pad=1)
    return pooled / (window * share)


@rule("MaxPool", accuracy=FIRST_ORDER)
def max_pool(node: NodeView) -> tuple[Value | None, ...]:
    """The variance of the element that the maximum came from."""
    if node.opset < 8:
        raise node.refuse("MaxPool tells which element it took only from opset 8 on")
    x = node.inputs[0]
    # Row-major indices into the whole tensor, whatever order the source asks for.
    _, where = node.again(x.raw, outputs=2, storage_order=0)
    where.dtype = np.dtype(np.int64)
    flat = node.graph.emit("Reshape", x.var, node.graph.ints(-1))
    return (node.graph.emit("Gather", flat, where, axis=0), *[None] * (len(node.outputs) - 1))


@rule("GlobalMaxPool", accuracy=FIRST_ORDER)
def global_max_pool(node: NodeView) -> Value:
    """The variance of the element that the maximum came from; ties share it."""
    x = node.inputs[0]
    return _of_chosen(node, x, x.mean >= node.output.mean, list(range(2, x.rank)), keepdims=True)


@rule("ReduceMax", "ReduceMin", accuracy=FIRST_ORDER)
def reduce_extremum(node: NodeView) -> Value:
    """The variance of the element that the extremum came from; ties share it."""
    x = node.inputs[0]
    axes = node.attr("axes")
    if node.input(1) is not None:
        axes = node.input(1).constant
        if axes is None:
            raise node.refuse("its axes are not constant")
    if axes is None or len(axes) == 0:
        if node.attr("noop_with_empty_axes", 0):
            return x.var
        axes = range(x.rank)
    axes = [int(axis) for axis in axes]
    extremum = node.graph.reduce(node.op_type, x.mean, axes, keepdims=True)
    chosen = x.mean >= extremum if node.op_type == "ReduceMax" else x.mean <= extremum
    return _of_chosen(node, x, chosen, axes, keepdims=bool(node.attr("keepdims", 1)))


def _of_chosen(node: NodeView, x: Operand, chosen: Value, axes: list[int], keepdims: bool) -> Value:
    reduce = node.graph.reduce
    return reduce("ReduceSum", chosen * x.var, axes, keepdims) / reduce("ReduceSum", chosen, axes, keepdims)


def _normalised_sum(node: NodeView, terms: Value) -> Value:
    """The sum over the elements that are normalised together."""
    if node.opset >= 13:
        return node.graph.reduce("ReduceSum", terms, [node.attr("axis", -1)])
    # Before opset 13 the input is seen as a matrix: all axes from `axis` on are one.
    rows = node.graph.emit("Flatten", terms, axis=node.attr("axis", 1))
    total = node.graph.reduce("ReduceSum", rows, [1])
    spread = node.graph.expand(total, like=rows)
    return node.graph.emit("Reshape", spread, node.graph.shape(node.output.raw))


def _against_mean(node: NodeView, p: Value) -> Value:
    """(1 - 2 p_i) v_i + Σ_j p_j² v_j = (1 - p_i)² v_i + Σ_{j≠i} p_j² v_j, the variance of x_i - pᵀx.

    The first form cancels where p_i is near 1. At most one element is above 1/2: for that one the
    second form is used, with the sum of the others for 1 - p_i.
    """
    v = node.inputs[0].var
    large = p > 0.5
    small = 1 - large
    of_large = _normalised_sum(node, small * p).squared * v
    of_small = (1 - 2 * p) * v + _normalised_sum(node, large * p * p * v)
    return large * of_large + small * of_small + _normalised_sum(node, small * p * p * v)


@rule("Softmax", accuracy=FIRST_ORDER)
def softmax(node: NodeView) -> Value:
    """J = diag(p) - p pᵀ, so p_i² ((1 - 2 p_i) v_i + Σ_j p_j² v_j)."""
    p = node.output.mean
    return p * p * _against_mean(node, p)


@rule("LogSoftmax", accuracy=FIRST_ORDER)
def log_softmax(node: NodeView) -> Value:
    """J = I - 1 pᵀ, so (1 - 2 p_i) v_i + Σ_j p_j² v_j."""
    return _against_mean(node, node.output.mean.exp())
