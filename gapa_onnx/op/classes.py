"""`GapaClasses` as a model-local function in standard ONNX ops, so that a file runs without the library.

Rows of logits have nothing to do with each other. All but the split is done for all of them at once; the split
takes some rows at a time, at all points:

    bring the classes to the last axis → rows → bridge, with the source's first class on top → probs
    → Loop over blocks of rows: TopK → m + √v ε → LogSoftmax → means over the points → sums
    → the shape of the logits without their classes.

A block has about `BLOCK` numbers, whatever the number of rows, classes and points: one step where there are
few rows, and temporary tensors that stay in the processor's cache where there are many. All sizes are read
at run time, so that one body serves every node of a model. Its float64 reference is in `heads.reference`.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper

from gapa_onnx.op.contract import CLASSES, DOMAIN
from gapa_onnx.op.emitter import Emitter, Size, Slot

OLDEST_OPSET = 11  #: the first with GatherElements

BLOCK = 1 << 16  #: logits of one step, at all points

RULED_OUT = -1e30
"""What a mean is at least. For a logit of -inf, a class that is ruled out, 0 · log 0 must come out as 0."""

_END = np.iinfo(np.int64).max
_SPLIT = ("entropy", "aleatoric", "epistemic")
_DOC = (
    "Probabilities of a softmax whose logits have means and variances, and a split of its entropy. probs is "
    "softmax(mean / sqrt(1 + pi/8 score)) with score the mean of var over the classes, which are on the given "
    "axis; the class that is largest in `output` keeps the largest probability. With the logits in descending "
    "order, e_s the rows of `points` and p_s = softmax(mean + sqrt(var) e_s): entropy is that of the mean of "
    "p_s, aleatoric the mean entropy of p_s, epistemic their difference. Classes with a NaN get NaN. "
    "This body is the portable form of the native operator of the same name."
)


def classes_body(opset: int) -> onnx.FunctionProto:
    """The function for an opset."""
    if opset < OLDEST_OPSET:
        raise ValueError(f"there is no GapaClasses for opset {opset}, only from {OLDEST_OPSET} on")
    e = Emitter(opset)
    _sizes(e)
    # Before anything is reshaped: onnxruntime 1.31 moves a DequantizeLinear in front past a Reshape and on to
    # the reader, and aborts where that is the body of a Loop. Where leaves a NaN as it is.
    lowest = e.constant("ruled_out", np.float32(RULED_OUT))
    e("Where", e("Less", "mean", lowest), lowest, "mean", to="possible_mean")
    mean = _as_rows(e, "possible_mean", to="mean_rows")
    var = _as_rows(e, "var", to="var_rows")
    _bridge(e, mean, var)
    _split(e, mean, var)
    return helper.make_function(
        DOMAIN,
        CLASSES.name,
        [port.name for port in CLASSES.inputs],
        [port.name for port in CLASSES.outputs],
        e.nodes,
        [helper.make_opsetid("", opset)],
        doc_string=_DOC,
    )


# ------------------------------------------------------------------------------ shapes


def _sizes(e: Emitter) -> None:
    """The logits are (outer, C, inner): the sizes, as numbers and as shapes to go there and back."""
    shape = e("Shape", "mean", to="shape")
    one, zero, end = e.constant("one", [1]), e.constant("zero", [0]), e.constant("end", [_END])
    after = e("Add", "axis", one, to="axis_after")
    e("Slice", shape, "axis", after, to="class_count")  # (1,)
    _size(e, "class_count", 0, to="class_number")
    before, behind = e("Slice", shape, zero, "axis"), e("Slice", shape, after, end)
    e("Concat", before, behind, axis=0, to="leading_shape")
    # No rows may be because of an empty axis behind the classes: a 0 would be taken for "as it is".
    inner = e("ReduceProd", e("Concat", one, behind, axis=0), keepdims=1)
    inner = e("Where", e("Equal", inner, zero), one, inner)
    any_size = e.constant("any", [-1])
    e("Concat", any_size, "class_count", inner, axis=0, to="apart_shape")
    e("Concat", any_size, inner, "class_count", axis=0, to="together_shape")
    e("Concat", any_size, "class_count", axis=0, to="rows_shape")


def _as_rows(e: Emitter, x: str, to: str) -> str:
    """(n, C), the classes of a row one after the other."""
    apart = e("Reshape", x, "apart_shape")
    return e("Reshape", e("Transpose", apart, perm=[0, 2, 1]), "rows_shape", to=to)


def _size(e: Emitter, shape: str, axis: int, to: str = "") -> str:
    """One number of a shape, a scalar."""
    return e("Gather", shape, e.constant(f"number_{axis}", np.int64(axis)), to=to)


def _restore(e: Emitter, x: str, shape: str, to: str) -> None:
    """Reshape to a shape that may have a dimension of 0."""
    if e.opset >= 14:
        e("Reshape", x, shape, allowzero=1, to=to)
        return
    # There a 0 means "copy the input's": ask for the dimension to be inferred instead, which is 0.
    empty = e("Cast", e("Equal", shape, "zero"), to_type=TensorProto.INT64)
    e("Reshape", x, e("Sub", shape, empty), to=to)


# ----------------------------------------------------------------------- probabilities


def _bridge(e: Emitter, mean: str, var: str) -> None:
    """`probs` and `score`. Not by Softmax, where no exponential of onnxruntime's falls to 0."""
    numbers = e("Range", "number_0", "class_number", e.constant("number_1", np.int64(1)), to="class_numbers")
    count = e("Cast", "class_count", to_type=TensorProto.FLOAT)
    spread = e("Div", e.reduce_sum(var, axis=1), count, to="spread")  # (n, 1)
    _restore(e, spread, "leading_shape", to="score")
    whole = e.constant("whole", np.float32(1))
    factor = e("Mul", spread, e.constant("pi_over_8", np.float32(math.pi / 8)))
    scaled = e("Div", mean, e("Sqrt", e("Add", factor, whole)), to="scaled")
    p = e("Exp", e("LogSoftmax", scaled, axis=1), to="bridged")

    first = e("ArgMax", e("Reshape", "output", "apart_shape"), axis=1, keepdims=0)  # (outer, inner)
    first = e("Reshape", first, e.constant("column", [-1, 1]), to="first")
    highest = e("ReduceMax", p, axes=[1], keepdims=1, to="highest")
    below = e("Mul", highest, e.constant("below", np.float32(1 - np.finfo(np.float32).eps)))
    kept = e("Where", e("Equal", first, numbers), highest, e("Min", p, below), to="probs_rows")
    together = e("Reshape", kept, "together_shape")
    _restore(e, e("Transpose", together, perm=[0, 2, 1]), "shape", to="probs")


# ------------------------------------------------------------------------------- split


def _split(e: Emitter, mean: str, var: str) -> None:
    """`entropy`, `aleatoric` and `epistemic`, block by block."""
    rows = _size(e, e("Shape", mean), 0, to="row_count")
    points_shape = e("Shape", "points", to="points_shape")
    point_count = _size(e, points_shape, 0, to="point_count")
    columns = e("Mod", "class_numbers", _size(e, points_shape, 1), to="columns")
    noise = e.unsqueeze(e("Gather", "points", columns, axis=1), axis=1)  # (S, 1, C)

    blocks = _blocks(e, rows, e("Mul", point_count, "class_number"))
    step = _step(e, mean, var, noise)
    # onnxruntime 1.17 divides by the number of rows in TopK: without rows there is no step.
    steps = e("Where", e("Greater", rows, "number_0"), blocks, "number_0", to="step_count")
    each = [Slot(f"{part}_block", TensorProto.FLOAT, 1) for part in _SPLIT]
    e.loop("block", steps, step, each=each, to=[f"{part}_blocks" for part in _SPLIT])
    all_rows = e.unsqueeze(rows, axis=0)
    for part in _SPLIT:
        flat = e("Reshape", f"{part}_blocks", "any")
        flat = e("Slice", flat, "zero", all_rows, to=f"{part}_rows")
        _restore(e, flat, "leading_shape", to=part)


def _blocks(e: Emitter, rows: str, per_row: str) -> str:
    """How many blocks there are; the rows of each are in `row_numbers` (blocks, rows of a block).

    Blocks are of one size, as their answers are stacked; row 0 fills up the last one. Each may have two rows
    at least: then (rows - 1) / most + 1 is never 0, also for no rows at all, as whole numbers are rounded
    towards 0.
    """
    one = e.constant("number_1", np.int64(1))
    fitting = e("Div", e.constant("block", np.int64(BLOCK)), per_row)
    most = e("Add", fitting, e.constant("number_2", np.int64(2)), to="most_rows")
    count = e("Add", e("Div", e("Sub", rows, one), most), one, to="block_count")
    size = e("Div", e("Add", rows, e("Sub", count, one)), count, to="block_rows")
    numbers = e("Range", "number_0", e("Mul", count, size), one)
    numbers = e("Where", e("Less", numbers, rows), numbers, "number_0")
    table = e("Concat", e.unsqueeze(count, axis=0), "any", axis=0)
    e("Reshape", numbers, table, to="row_numbers")
    return count


def _step(e: Emitter, mean: str, var: str, noise: str) -> Emitter:
    """What is done with one block of r rows."""
    smallest = e.constant("smallest", np.float32(np.finfo(np.float32).tiny))
    nothing = e.constant("nothing", np.float32(0))
    points = e.unsqueeze("point_count", axis=0)
    weight = e("Div", "whole", e("Cast", points, to_type=TensorProto.FLOAT))
    weights = e("Expand", weight, e("Concat", "one", points, axis=0), to="weights")  # (1, S)
    by_point = e("Concat", points, "any", axis=0, to="by_point")

    step = e.inner()
    numbers = step("Gather", "row_numbers", "block_number", axis=0, to="numbers")
    logits, var = (step("Gather", rows, numbers, axis=0) for rows in (mean, var))  # (r, C)
    # All of a row with a NaN becomes NaN: TopK must not sort a mixture of NaN and numbers.
    poison = step.reduce_sum(step("Sub", logits, logits), axis=1)
    logits = step("Add", logits, poison, to="logits")
    ranked, order = step.topk(logits, Size("class_count", None), to=("ranked", "order"))
    std = step("Sqrt", step("GatherElements", var, order, axis=1))
    spread = step("Mul", step.unsqueeze(std, axis=0), noise)  # (S, r, C)
    log_p = step("LogSoftmax", step("Add", step.unsqueeze(ranked, axis=0), spread), axis=2, to="log_p")
    p = step("Exp", log_p, to="p")
    f = step("Sub", step("Mul", p, log_p), p, to="f")

    # Means over the points as products of matrices: onnxruntime is slow to reduce the first axis.
    sums = [step("MatMul", weights, step("Reshape", x, by_point)) for x in (p, f)]  # (1, r·C)
    mean_p, mean_f = (step("Reshape", x, "rows_shape") for x in sums)  # (r, C)
    p_log_p = step("Mul", mean_p, step("Log", step("Max", mean_p, smallest)), to="p_log_p")
    gaps = step("Sub", mean_f, step("Sub", p_log_p, mean_p), to="gaps")
    total = step("Neg", step("ReduceSum", p_log_p, axes=[1], keepdims=0), to="entropy_block")
    # Rounding can leave a sum of gaps that are all 0 a little below it.
    gap = step("ReduceSum", gaps, axes=[1], keepdims=0)
    epistemic = step("Max", gap, nothing, to="epistemic_block")
    step("Max", step("Sub", total, epistemic), nothing, to="aleatoric_block")
    return step
