"""`GapaClasses` as a model-local function in standard ONNX ops, so that a file runs without the library.

Rows of logits have nothing to do with each other. All but the split is done for all of them at once; the split
takes some rows at a time, at all points:

    bring the classes to the last axis → rows → bridge, with the source's first class on top → probs
    → TopK → m + √v ε → LogSoftmax → means over the points → sums
    → the shape of the logits without their classes.

Where a sample has one row of logits, all rows are done at once, in operators that every engine has. Where it has a row
for each pixel or token, the split is in a Loop over blocks of about `BLOCK` numbers, whatever the number of rows, classes and
points: temporary tensors are as many times larger than the logits as there are points. All sizes are read at run time, so that one
body serves every node of a model. Its float64 reference is in `heads.reference`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx

from gapa_onnx.op.body import FunctionBody
from gapa_onnx.op.contract import CLASSES
from gapa_onnx.variance.loops import loop
from gapa_onnx.variance.values import Value

OLDEST_OPSET = 11  #: the first with GatherElements

BLOCK = 1 << 16  #: logits of one step, at all points

RULED_OUT = -1e30
"""What a mean is at least. For a logit of -inf, a class that is ruled out, 0 · log 0 must come out as 0."""

_SPLIT = ("entropy", "aleatoric", "epistemic")
_DOC = (
    "Probabilities of a softmax whose logits have means and variances, and a split of its entropy. probs is "
    "softmax(mean / sqrt(1 + pi/8 score)) with score the mean of var over the classes, which are on the given "
    "axis; the class that is largest in `output` keeps the largest probability. With the logits in descending "
    "order, e_s the rows of `points` and p_s = softmax(mean + sqrt(var) e_s): entropy is that of the mean of "
    "p_s, aleatoric the mean entropy of p_s, epistemic their difference. Classes with a NaN get NaN. "
    "This body is the portable form of the native operator of the same name."
)


def classes_body(opset: int, in_blocks: bool = True) -> onnx.FunctionProto:
    """The function for an opset; `in_blocks` where rows may be many."""
    if opset < OLDEST_OPSET:
        raise ValueError(f"there is no GapaClasses for opset {opset}, only from {OLDEST_OPSET} on")
    e = FunctionBody(opset, CLASSES)
    sizes = _sizes(e)
    # Before anything is reshaped: onnxruntime 1.31 moves a DequantizeLinear in front past a Reshape and on to
    # the reader, and aborts where that is the body of a Loop. Where leaves a NaN as it is.
    mean, lowest = e.inputs["mean"], e.constant(np.float32(RULED_OUT), "ruled_out")
    possible = e.rename(e.where(e.compare("Less", mean, lowest), lowest, mean), "possible_mean")
    means = e.rename(_as_rows(e, possible, sizes), "mean_rows")
    variances = e.rename(_as_rows(e, e.inputs["var"], sizes), "var_rows")
    _bridge(e, means, variances, sizes)
    _split(e, means, variances, sizes, in_blocks)
    return e.to_function(_DOC)


# ------------------------------------------------------------------------------ shapes


@dataclass(frozen=True)
class _Sizes:
    """The logits are (outer, C, inner): the sizes, as numbers and as shapes to go there and back."""

    shape: Value
    leading: Value  #: the shape without the classes
    classes: Value  #: C, (1,)
    class_number: Value  #: C, a scalar
    class_numbers: Value  #: 0 … C - 1
    apart: Value  #: (-1, C, inner)
    together: Value  #: (-1, inner, C)
    rows: Value  #: (-1, C)


def _sizes(e: FunctionBody) -> _Sizes:
    shape, axis, one, any_size = e.shape(e.inputs["mean"]), e.inputs["axis"], e.ints(1), e.ints(-1)
    after = e.rename(axis + 1, "axis_after")
    classes = e.rename(e.slice(shape, 0, axis, after), "class_count")
    number = e.rename(_size(e, classes, 0), "class_number")
    before, behind = e.slice(shape, 0, 0, axis), e.slice(shape, 0, after, None)
    inner = e.emit("ReduceProd", _joined(e, one, behind), keepdims=1)
    # No rows may be because of an empty axis behind the classes: a 0 would be taken for "as it is".
    inner = e.where(e.compare("Equal", inner, 0), one, inner)
    numbers = e.emit("Range", e.constant(np.int64(0)), number, e.constant(np.int64(1)))
    return _Sizes(
        shape,
        e.rename(_joined(e, before, behind), "leading_shape"),
        classes,
        number,
        e.rename(numbers, "class_numbers"),
        e.rename(_joined(e, any_size, classes, inner), "apart_shape"),
        e.rename(_joined(e, any_size, inner, classes), "together_shape"),
        e.rename(_joined(e, any_size, classes), "rows_shape"),
    )


def _joined(e: FunctionBody, *shapes: Value) -> Value:
    return e.emit("Concat", *shapes, axis=0)


def _as_rows(e: FunctionBody, x: Value, sizes: _Sizes) -> Value:
    """(n, C), the classes of a row one after the other."""
    apart = e.emit("Reshape", x, sizes.apart)
    return e.emit("Reshape", e.emit("Transpose", apart, perm=[0, 2, 1]), sizes.rows)


def _size(e: FunctionBody, shape: Value, axis: int) -> Value:
    """One number of a shape, a scalar."""
    return e.emit("Gather", shape, e.constant(np.int64(axis)))


# ----------------------------------------------------------------------- probabilities


def _bridge(e: FunctionBody, mean: Value, var: Value, sizes: _Sizes) -> None:
    """`probs` and `score`. Not by Softmax, where no exponential of onnxruntime's falls to 0."""
    spread = e.reduce("ReduceSum", var, [1]) / e.cast(sizes.classes, np.float32)
    spread = e.rename(spread, "spread")  # (n, 1)
    e.output(e.reshape(spread, sizes.leading), "score")
    pi_over_8 = e.constant(np.float32(math.pi / 8), "pi_over_8")
    scaled = e.rename(mean / (spread * pi_over_8 + 1).sqrt(), "scaled")
    p = e.rename(e.emit("LogSoftmax", scaled, axis=1).exp(), "bridged")

    apart = e.emit("Reshape", e.inputs["output"], sizes.apart)
    first = e.emit("ArgMax", apart, axis=1, keepdims=0, dtype=np.int64)  # (outer, inner)
    first = e.rename(e.emit("Reshape", first, e.ints(-1, 1)), "first")
    highest = e.rename(e.reduce("ReduceMax", p, [1]), "highest")
    below = highest * e.constant(np.float32(1 - np.finfo(np.float32).eps), "below")
    kept = e.where(e.compare("Equal", first, sizes.class_numbers), highest, e.at_most(p, below))
    together = e.emit("Reshape", e.rename(kept, "probs_rows"), sizes.together)
    e.output(e.reshape(e.emit("Transpose", together, perm=[0, 2, 1]), sizes.shape), "probs")


# ------------------------------------------------------------------------------- split


@dataclass(frozen=True)
class _Noise:
    """The points, as a block of rows takes them."""

    points: Value  #: (S, 1, C)
    weights: Value  #: (1, S)
    by_point: Value  #: the shape (S, -1)


def _split(e: FunctionBody, mean: Value, var: Value, sizes: _Sizes, in_blocks: bool) -> None:
    """`entropy`, `aleatoric` and `epistemic`."""
    points = e.inputs["points"]
    point_count = e.rename(_size(e, e.shape(points), 0), "point_count")
    columns = e.rename(e.emit("Mod", sizes.class_numbers, _size(e, e.shape(points), 1)), "columns")
    count = e.unsqueeze(point_count, [0])
    weights = e.emit("Expand", 1 / e.cast(count, np.float32), _joined(e, e.ints(1), count))
    noise = _Noise(
        e.unsqueeze(e.emit("Gather", points, columns, axis=1), [1]),
        e.rename(weights, "weights"),
        e.rename(_joined(e, count, e.ints(-1)), "by_point"),
    )
    each = (
        _by_blocks(e, mean, var, noise, sizes, point_count)
        if in_blocks
        else _at_once(e, mean, var, noise, sizes)
    )
    for part, found in zip(_SPLIT, each):
        e.output(e.reshape(e.rename(found, f"{part}_rows"), sizes.leading), part)


def _at_once(e: FunctionBody, mean: Value, var: Value, noise: _Noise, sizes: _Sizes) -> list[Value]:
    """The parts of `_SPLIT` of all rows, (n,) each."""
    # One more row, as onnxruntime 1.17 divides by the number of rows in TopK.
    spare = e.emit("ConstantOfShape", _joined(e, e.ints(1), sizes.classes), dtype=np.float32)
    logits, spread = (_joined(e, x, spare) for x in (mean, var))
    return [e.slice(part, 0, 0, -1) for part in _step(e, logits, spread, noise, sizes)]


def _by_blocks(
    e: FunctionBody, mean: Value, var: Value, noise: _Noise, sizes: _Sizes, point_count: Value
) -> list[Value]:
    """The same, block by block."""
    rows = e.rename(_size(e, e.shape(mean), 0), "row_count")
    blocks, row_numbers = _blocks(e, rows, point_count * sizes.class_number)

    def step(inner: FunctionBody, number: Value, states: list[Value]) -> tuple[list[Value], list[Value]]:
        taken = inner.emit("Gather", inner.adopt(row_numbers), number, axis=0)
        logits, spread = (inner.emit("Gather", inner.adopt(x), taken, axis=0) for x in (mean, var))  # (r, C)
        return [], _step(inner, logits, spread, noise, sizes)

    # onnxruntime 1.17 divides by the number of rows in TopK: without rows there is no step.
    steps = e.rename(e.where(e.compare("Greater", rows, 0), blocks, e.constant(np.int64(0))), "step_count")
    _, stacks = loop(e, steps, [], step, "block", ranks=(1, 1, 1))
    all_rows = e.unsqueeze(rows, [0])
    return [e.slice(e.emit("Reshape", stack, e.ints(-1)), 0, 0, all_rows) for stack in stacks]


def _blocks(e: FunctionBody, rows: Value, per_row: Value) -> tuple[Value, Value]:
    """How many blocks there are, and the rows of each: (blocks, rows of a block).

    Blocks are of one size, as their answers are stacked; row 0 fills up the last one. Each may have two rows
    at least: then (rows - 1) / most + 1 is never 0, also for no rows at all, as whole numbers are rounded
    towards 0.
    """
    zero, one = e.constant(np.int64(0)), e.constant(np.int64(1))
    most = e.rename(e.constant(np.int64(BLOCK), "block_size") / per_row + 2, "most_rows")
    count = e.rename((rows - 1) / most + 1, "block_count")
    size = e.rename((rows + (count - 1)) / count, "block_rows")
    numbers = e.emit("Range", zero, count * size, one)
    numbers = e.where(e.compare("Less", numbers, rows), numbers, zero)
    table = e.emit("Reshape", numbers, _joined(e, e.unsqueeze(count, [0]), e.ints(-1)))
    return count, e.rename(table, "row_numbers")


def _step(e: FunctionBody, logits: Value, var: Value, noise: _Noise, sizes: _Sizes) -> list[Value]:
    """What is done with one block of r rows: the parts of `_SPLIT`, (r,) each."""
    # All of a row with a NaN becomes NaN: TopK must not sort a mixture of NaN and numbers.
    logits = e.rename(logits + e.reduce("ReduceSum", logits - logits, [1]), "logits")
    ranked, order = e.topk(logits, e.adopt(sizes.classes), -1)
    std = e.emit("GatherElements", var, order, axis=1).sqrt()
    spread = e.unsqueeze(std, [0]) * e.adopt(noise.points)  # (S, r, C)
    log_p = e.rename(e.emit("LogSoftmax", e.unsqueeze(ranked, [0]) + spread, axis=2), "log_p")
    p = e.rename(log_p.exp(), "p")
    f = e.rename(p * log_p - p, "f")

    # Means over the points as products of matrices: onnxruntime is slow to reduce the first axis.
    weights, by_point, rows = (e.adopt(x) for x in (noise.weights, noise.by_point, sizes.rows))
    sums = [weights @ e.emit("Reshape", x, by_point) for x in (p, f)]  # (1, r·C)
    mean_p, mean_f = (e.emit("Reshape", x, rows) for x in sums)  # (r, C)
    smallest = float(np.finfo(np.float32).tiny)
    p_log_p = e.rename(mean_p * e.emit("Log", e.at_least(mean_p, smallest)), "p_log_p")
    gaps = e.rename(mean_f - (p_log_p - mean_p), "gaps")
    total = -e.reduce("ReduceSum", p_log_p, [1], keepdims=False)
    # Rounding can leave a sum of gaps that are all 0 a little below it.
    epistemic = e.at_least(e.reduce("ReduceSum", gaps, [1], keepdims=False), 0)
    return [total, e.at_least(total - epistemic, 0), epistemic]
