"""Classical models (ai.onnx.ml): linear ones, support vectors, scaling of features, trees.

Their weights are attributes. Scores s = W x + b have variance W² v; what is applied to them inside
the same operator is seen through its Jacobian with respect to x, since scores share all of x.
"""

from __future__ import annotations

from math import pi

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.norms import lp_normalization
from gapa_onnx.variance.rules.registry import (
    Accuracy,
    deterministic,
    rule,
    structural,
    variance_or_zeros,
)
from gapa_onnx.variance.rules.view import NodeView, VirtualNode

EXACT, FIRST_ORDER = Accuracy.EXACT, Accuracy.FIRST_ORDER
ML = "ai.onnx.ml"


# ------------------------------------------------------------------------ linear models


def _rows(node: NodeView, value: Value, width: int) -> Value:
    """(n, width) in the type of the output's variance; a single sample may come without its axis."""
    value = node.graph.cast(value, node.outputs[-1].dtype)
    return node.graph.emit("Reshape", value, node.graph.ints(-1, width))


def _times(rows: Value, matrix: np.ndarray) -> Value:
    return rows.graph.emit("MatMul", rows, rows.graph.constant(matrix.astype(rows.dtype)))


def _linear_scores(node: NodeView, weights: np.ndarray, y: Value) -> Value:
    """The variance of y = g(W x + b) for the post-transform g of the node; W is (e, d)."""
    v = _rows(node, node.inputs[0].variance, weights.shape[1])  # (n, d)
    of_scores = _times(v, weights.T**2)  # (n, e)
    transform = node.attr("post_transform", "NONE")
    if transform == "NONE":
        return of_scores
    if transform == "LOGISTIC":
        return of_scores * (y * (1 - y)).squared
    if transform == "PROBIT":  # the quantile of the normal distribution: its slope is 1 / density
        return of_scores * (y * y).exp() * (2 * pi)
    if transform not in ("SOFTMAX", "SOFTMAX_ZERO"):
        raise node.refuse(f"its post_transform {transform!r} is unknown")
    # Scores that are exactly 0 stay 0 in SOFTMAX_ZERO: their p is 0, which the formula takes as it is.
    return _softmax_of_linear(y, v, of_scores, weights)


def _softmax_of_linear(p: Value, v: Value, of_scores: Value, weights: np.ndarray) -> Value:
    """p_i² Σ_f (W_if - m_f)² v_f with m = pᵀ W, the mean weight.

    Of a class with p_i > 1/2, W_i - m is a small difference: it is summed over the other classes. For
    the rest the square is multiplied out. Classes of equal weights give 0, up to rounding of either
    sign: that is what the bound at 0 is for.
    """
    graph = p.graph
    large = p > 0.5  # (n, e), one class at most
    small = 1 - large
    others = p * small
    rest = graph.reduce("ReduceSum", others, [1])
    off = _times(others, weights) - rest * _times(large, weights)  # (n, d): Σ_j p_j (W_j - W_i)
    of_large = graph.reduce("ReduceSum", off.squared * v, [1])
    mean = _times(p, weights)  # (n, d)
    of_mean = graph.reduce("ReduceSum", mean.squared * v, [1])
    of_small = graph.at_least(of_scores - 2 * _times(mean * v, weights.T) + of_mean, 0)
    return p * p * (large * of_large + small * of_small)


@rule("LinearRegressor", accuracy=FIRST_ORDER, linear=True, operands=(0,), domain=ML)
def linear_regressor(node: NodeView) -> Value:
    """W² v, exact; times the squared slope of the post-transform, first order."""
    targets = node.attr("targets", 1)
    if targets == 1 and node.attr("post_transform", "NONE") != "NONE":
        raise node.refuse("runtimes disagree on what a post_transform does to a single target")
    weights = np.reshape(node.attr("coefficients"), (targets, -1)).astype(np.float64)
    return _linear_scores(node, weights, node.output.mean)


@rule("LinearClassifier", accuracy=FIRST_ORDER, linear=True, operands=(0,), domain=ML)
def linear_classifier(node: NodeView) -> tuple[Value | None, ...]:
    """W² v of the scores, exact; times the squared slope of the post-transform, first order. Labels are certain."""
    scores = len(node.attr("intercepts", ())) or _classes(node)
    weights = np.reshape(node.attr("coefficients"), (scores, -1)).astype(np.float64)
    return (None, *_class_scores(node, weights)) if len(node.outputs) > 1 else (None,)


def _classes(node: NodeView) -> int:
    return len(node.attr("classlabels_ints") or node.attr("classlabels_strings") or ())


def _class_scores(node: NodeView, weights: np.ndarray) -> tuple[Value]:
    """Two classes may share one score s: it is shown as ±s, 1 - s and s, or σ(-s) and σ(s)."""
    y = node.outputs[1].mean
    if len(weights) == 1 and _classes(node) == 2:
        if node.attr("post_transform", "NONE") not in ("NONE", "LOGISTIC"):
            raise node.refuse(
                "runtimes disagree on what its post_transform does to a single score of two classes"
            )
        weights = np.repeat(weights, 2, axis=0)
    return (_linear_scores(node, weights, y),)


# ---------------------------------------------------------------------- support vectors


def _kernel_gradient(node: NodeView, coefficients: np.ndarray, vectors: np.ndarray) -> tuple[Value, Value]:
    """∂/∂x of Σ_i c_i K(x, s_i), (n, d), and the rows of v; c is (m,), the support vectors are (m, d)."""
    gamma, offset, degree = (float(number) for number in node.attr("kernel_params"))
    kind, graph = node.attr("kernel_type", "LINEAR"), node.graph
    v = _rows(node, node.inputs[0].variance, vectors.shape[1])
    x = _rows(node, node.inputs[0].mean, vectors.shape[1])
    if kind == "RBF":
        # exp(-γ |x - s|²); distances are never negative but for rounding, which exp turns into 1 ± ε.
        squares = graph.reduce("ReduceSum", x.squared, [1]) - 2 * _times(x, vectors.T)
        kernel = (-gamma * (squares + graph.constant((vectors**2).sum(1).astype(x.dtype)))).exp()  # (n, m)
        weighted = kernel * graph.constant((-2 * gamma * coefficients).astype(x.dtype))
        return x * graph.reduce("ReduceSum", weighted, [1]) - _times(weighted, vectors), v
    inner = _times(x, vectors.T) * gamma + offset  # (n, m)
    if kind == "POLY":
        power = graph.constant(np.asarray(degree - 1, x.dtype))
        slope = degree * graph.emit("Pow", inner, power) if degree != 1 else graph.zeros(inner) + 1
    elif kind == "SIGMOID":
        slope = 1 - inner.tanh().squared
    else:
        raise node.refuse(f"its kernel {kind!r} is unknown")
    return _times(slope * graph.constant((gamma * coefficients).astype(x.dtype)), vectors), v


def _kernel_score(node: NodeView, coefficients: np.ndarray, vectors: np.ndarray) -> Value:
    """Σ_f (∂s/∂x_f)² v_f for one score s, (n, 1)"""
    if node.attr("kernel_type", "LINEAR") == "LINEAR":
        v = _rows(node, node.inputs[0].variance, vectors.shape[1])
        return _times(v, (coefficients @ vectors)[:, None] ** 2)
    gradient, v = _kernel_gradient(node, coefficients, vectors)
    return node.graph.reduce("ReduceSum", gradient.squared * v, [1])


@rule("SVMRegressor", accuracy=FIRST_ORDER, linear=True, operands=(0,), domain=ML)
def svm_regressor(node: NodeView) -> Value | None:
    """Σ_f (Σ_i c_i ∂K(x, s_i)/∂x_f)² v_f; exact for a linear kernel."""
    if node.attr("one_class", 0):
        return None  # it tells the sides of a boundary apart: its slope is 0 almost everywhere
    if node.attr("post_transform", "NONE") != "NONE":
        raise node.refuse("runtimes disagree on what a post_transform does to a single target")
    coefficients = np.asarray(node.attr("coefficients"), np.float64)
    supports = node.attr("n_supports", 0)
    if not supports:  # the coefficients are weights themselves
        return _times(_rows(node, node.inputs[0].variance, len(coefficients)), coefficients[:, None] ** 2)
    return _kernel_score(node, coefficients, np.reshape(node.attr("support_vectors"), (supports, -1)))


@rule("SVMClassifier", accuracy=FIRST_ORDER, linear=True, operands=(0,), domain=ML)
def svm_classifier(node: NodeView) -> tuple[Value | None, ...]:
    """Σ_f (∂s/∂x_f)² v_f of the score s of each pair of classes; exact for a linear kernel. Labels are certain."""
    if node.attr("prob_a"):
        raise node.refuse("its probabilities are coupled by an iteration")
    if len(node.outputs) == 1:
        return (None,)
    coefficients = np.asarray(node.attr("coefficients"), np.float64)
    counts = node.attr("vectors_per_class") or ()
    if not counts:  # one row of weights per class
        return (None, *_class_scores(node, coefficients.reshape(_classes(node), -1)))
    if node.attr("post_transform", "NONE") != "NONE":
        raise node.refuse("it applies a post_transform to the scores of pairs of classes")
    vectors = np.reshape(node.attr("support_vectors"), (sum(counts), -1)).astype(np.float64)
    pairs = _pair_coefficients(coefficients.reshape(len(counts) - 1, -1), counts)  # (pairs, m)
    if len(pairs) == 1:
        one = _kernel_score(node, pairs[0], vectors)
        return (None, node.graph.emit("Concat", one, one, axis=1))
    if node.attr("kernel_type", "LINEAR") != "LINEAR":
        raise node.refuse("more than two classes with a kernel that is not linear")
    v = _rows(node, node.inputs[0].variance, vectors.shape[1])
    return (None, _times(v, (pairs @ vectors).T ** 2))


def _pair_coefficients(coefficients: np.ndarray, counts: list[int]) -> np.ndarray:
    """The coefficient of each support vector in the score of each pair of classes i < j.

    Row k of (classes - 1, m) holds, for a vector of class i, its coefficient against class k, or
    against class k + 1 if k ≥ i.
    """
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = []
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            row = np.zeros(starts[-1])
            row[starts[i] : starts[i + 1]] = coefficients[j - 1, starts[i] : starts[i + 1]]
            row[starts[j] : starts[j + 1]] = coefficients[i, starts[j] : starts[j + 1]]
            rows.append(row)
    return np.array(rows)


# ----------------------------------------------------------------------------- features


@rule("Scaler", accuracy=EXACT, domain=ML)
def scaler(node: NodeView) -> Value:
    """v scale²"""
    v = node.graph.cast(node.inputs[0].variance, node.output.dtype)
    scale = np.asarray(node.attr("scale"), np.float64)
    return (
        v * float(scale[0] ** 2) if scale.size == 1 else v * node.graph.constant((scale**2).astype(v.dtype))
    )


@rule("Imputer", accuracy=EXACT, domain=ML)
def imputer(node: NodeView) -> Value:
    """v, and 0 where a value was missing."""
    if node.opset < 9:
        raise node.refuse("missing values are told apart from opset 9 on")
    x, graph, replaced = node.inputs[0], node.graph, float(node.attr("replaced_value_float", 0.0))
    if np.isnan(replaced):
        missing = graph.emit("IsNaN", x.raw, dtype=np.dtype(np.bool_))
    else:  # two numbers are equal that differ either way not
        above, below = (
            graph.emit(op, x.mean, x.mean.lift(replaced), dtype=np.bool_) for op in ("Greater", "Less")
        )
        missing = graph.emit("Not", graph.emit("Or", above, below))
    return graph.emit("Where", missing, graph.zeros(x.variance), x.variance, dtype=x.dtype)


structural("ArrayFeatureExtractor", domain=ML)


@rule("FeatureVectorizer", accuracy=EXACT, domain=ML)
def feature_vectorizer(node: NodeView) -> Value:
    """The same node on the variances."""
    return node.again(*[variance_or_zeros(operand) for operand in node.inputs])


@rule("Normalizer", accuracy=FIRST_ORDER, domain=ML)
def normalizer(node: NodeView) -> Value:
    """Σ_j J_ij² v_j with J = (I - y gᵀ) / norm: g = y for L2, sign(x) for L1, the largest element for MAX"""
    x, graph, norm = node.inputs[0], node.graph, node.attr("norm", "MAX")
    if norm != "MAX":
        attrs = {"p": 2 if norm == "L2" else 1, "axis": -1 if x.shape is None else x.rank - 1}
        alike = VirtualNode("LpNormalization", node.node.name, attrs, node.node.inputs, node.node.outputs)
        view = NodeView(graph, alike, node.variance_of, node.options)
        return graph.cast(lp_normalization(view), node.output.dtype)
    axis = [-1 if x.shape is None else x.rank - 1]
    largest = graph.reduce("ReduceMax", x.mean, axis)
    by_zero = (largest >= 0) * (largest <= 0)  # such a row is left as it is
    divisor = largest + by_zero
    is_largest = (x.mean >= largest) * (1 - by_zero)
    total = graph.reduce("ReduceSum", is_largest * x.variance, axis)
    of_largest = total / (graph.reduce("ReduceSum", is_largest, axis) + by_zero)  # those that tie share it
    # At the largest element y is 1 whatever x is; the others move with themselves and with it.
    moved = x.variance + (x.mean / divisor).squared * of_largest
    return graph.cast((1 - is_largest) * moved / divisor.squared, node.output.dtype)


@rule("ZipMap", accuracy=EXACT, domain=ML)
def zip_map(node: NodeView) -> Value:
    """v, as a plain tensor with a column per class: there are no variances of maps."""
    return node.inputs[0].variance


# ------------------------------------------------------------------------------ discrete

deterministic(
    "it is a sum of trees, constant but for jumps: its slope is 0 almost everywhere",
    "TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor", domain=ML,
)  # fmt: skip
deterministic("its output is discrete", "Binarizer", "OneHotEncoder", domain=ML)
deterministic("it looks up an entry of a table", "LabelEncoder", "CategoryMapper", domain=ML)
deterministic("its input is a map, which carries no variance", "DictVectorizer", "CastMap", domain=ML)
