"""Logits that no tensor of the model holds: those inside an operator, or behind probabilities that were put together.

    LinearClassifier SOFTMAX     softmax(x Wᵀ + b)                     logits x Wᵀ + b
    two classes, one score z     (1 - σ(z), σ(z))                      logits (-z/2, z/2)
    each class by itself         σ(z) / Σ σ(z)                         logits log σ(z)

In each case the softmax of these logits is what the model puts out, so a head on them is exact. They are computed
beside the source from a tensor that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.arrays import Array
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.patterns.activations import sigmoid_of
from gapa_onnx.variance.patterns.formula import affine, close, made_by, through

ML = "ai.onnx.ml"
SAME_SCORE = 1e-6  # of the largest weight: two rows of float32 that are one score and its negative


@dataclass(frozen=True, eq=False)
class Derived:
    """Logits g(t A + b) of a tensor t (N, d) of the source, with g the identity or log σ."""

    weights: Array | None = field(repr=False)  #: A (d, C); None for the identity
    bias: Array | None = field(repr=False)  #: b (C,)
    bent: bool = False  #: g is log σ

    @property
    def classes(self) -> int | None:
        return None if self.weights is None else int(self.weights.shape[1])

    def mean(self, graph: VarianceGraph, tensor: Value) -> Value:
        """The logits (N, C)."""
        scores = self._scores(graph, tensor)
        return 0 - graph.emit("Softplus", 0 - scores) if self.bent else scores

    def var(self, graph: VarianceGraph, tensor: Value, var: Value) -> Value:
        """Their variances (N, C): exact under independence, and to first order where g bends."""
        if self.weights is not None:
            var = graph.emit("MatMul", var, graph.constant((self.weights**2).astype(var.dtype)))
        return var * (0 - self._scores(graph, tensor)).sigmoid().squared if self.bent else var

    def covariance(self, graph: VarianceGraph, tensor: Value, covariance: Value) -> Value:
        """D Aᵀ Σ A D (N, C, C) for the covariance Σ (N, d, d) of the tensor, with D the slopes of g."""
        if self.weights is not None:
            matrix = self.weights.astype(covariance.dtype)
            covariance = graph.emit("MatMul", graph.constant(matrix.T), covariance)
            covariance = graph.emit("MatMul", covariance, graph.constant(matrix))
        if not self.bent:
            return covariance
        slope = (0 - self._scores(graph, tensor)).sigmoid()
        return covariance * graph.unsqueeze(slope, [1]) * graph.unsqueeze(slope, [2])

    def _scores(self, graph: VarianceGraph, tensor: Value) -> Value:
        if self.weights is not None:
            tensor = graph.emit("MatMul", tensor, graph.constant(self.weights.astype(tensor.dtype)))
        return tensor if self.bias is None else tensor + graph.constant(self.bias.astype(tensor.dtype))


@dataclass(frozen=True, eq=False)
class Squashed:
    """Probabilities as a function of a tensor: softmax or σ of its derived logits."""

    tensor: gs.Tensor  #: of the source
    derived: Derived | None  #: None where the tensor holds the logits
    link: str  #: softmax or sigmoid
    what: str  #: the operators, for people


def squashed(tensor: gs.Tensor, classes: int | None = None) -> Squashed | None:
    """How probabilities (N, C) were made of logits, where neither Softmax nor Sigmoid is their last node.

    `classes` is C where it is known; shapes behind operators of ai.onnx.ml often are not.
    """
    node = tensor.inputs[0] if tensor.inputs else None
    if node is None:
        return None
    if node.domain == ML and node.op == "LinearClassifier":
        return _classifier(node) if len(node.outputs) > 1 and tensor is node.outputs[1] else None
    if _is_normalised(node):
        return _normalised(node.inputs[0], node.op, classes)
    if node.op == "Concat":
        return _one_and_its_rest(node, classes)
    return _spelled_out(tensor, classes)


# ------------------------------------------------------------------ inside LinearClassifier


def _classifier(node: gs.Node) -> Squashed | None:
    """The scores of a LinearClassifier, whose post_transform squashes them."""
    labels = node.attrs.get("classlabels_ints") or node.attrs.get("classlabels_strings") or ()
    transform, x = node.attrs.get("post_transform", "NONE"), node.inputs[0]
    bias = np.asarray(node.attrs.get("intercepts") or np.zeros(len(labels)), np.float64)
    if transform not in ("SOFTMAX", "LOGISTIC") or not len(bias) or len(labels) < 2 or not _may_be_rows(x):
        return None
    weights = np.reshape(node.attrs["coefficients"], (len(bias), -1)).astype(np.float64)
    what = f"LinearClassifier with post_transform {transform}"
    if len(bias) == 1 and len(labels) == 2 and transform == "LOGISTIC":
        half = Derived(np.stack([-weights[0], weights[0]], axis=1) / 2, np.array([-bias[0], bias[0]]) / 2)
        return Squashed(x, half, "softmax", what)
    if len(bias) != len(labels):
        return None  # of other single scores runtimes make different things
    scores = Derived(weights.T, bias)
    if transform == "LOGISTIC" and _are_opposite(weights, bias):
        return Squashed(x, Derived(weights.T / 2, bias / 2), "softmax", what)
    return Squashed(x, scores, "softmax" if transform == "SOFTMAX" else "sigmoid", what)


def _may_be_rows(tensor: gs.Tensor) -> bool:
    """Whether a tensor is (N, d), as far as is known."""
    return tensor.shape is None or len(tensor.shape) == 2


def _are_opposite(weights: Array, bias: Array) -> bool:
    """Whether two classes have one score, with either sign."""
    if len(bias) != 2:
        return False
    rows = np.column_stack([weights, bias])
    return bool(np.abs(rows.sum(axis=0)).max() <= SAME_SCORE * np.abs(rows).max())


# --------------------------------------------------------------------- put together by nodes


def _is_normalised(node: gs.Node) -> bool:
    """Whether a node divides each row by the sum of its magnitudes."""
    if node.op == "Normalizer" and node.domain == ML:
        return bool(node.attrs.get("norm", "MAX") == "L1")
    last = node.attrs.get("axis", -1) in (1, -1)
    return bool(node.op == "LpNormalization" and node.attrs.get("p", 2) == 1 and last)


def _normalised(tensor: gs.Tensor, op: str, classes: int | None) -> Squashed | None:
    """Probabilities divided by their sum: nothing for those of a softmax, log σ for those of labels."""
    found = squashed(through(tensor), classes) or _labels(tensor)
    if found is None or found.link == "softmax":
        return found
    derived = found.derived or Derived(None, None)
    return replace(
        found, derived=replace(derived, bent=True), link="softmax", what=f"{found.what}, then {op}"
    )


def _labels(tensor: gs.Tensor) -> Squashed | None:
    """σ of a tensor of two axes."""
    logits = sigmoid_of(tensor)
    if logits is None or logits.shape is not None and len(logits.shape) != 2:
        return None
    return Squashed(logits, None, "sigmoid", "Sigmoid")


def _one_and_its_rest(node: gs.Node, classes: int | None) -> Squashed | None:
    """(1 - σ(z), σ(z)) along the last of two axes, in this order or the other."""
    if len(node.inputs) != 2 or node.attrs.get("axis") not in (1, -1):
        return None
    for at, sign in ((1, 1.0), (0, -1.0)):
        yes, no = node.inputs[at], node.inputs[1 - at]
        logits, rest = sigmoid_of(yes), affine(no)
        is_rest = close(rest.a, -1) and close(rest.b, 1) and through(rest.core) is through(yes)
        if logits is not None and is_rest and _is_column(logits, classes):
            return Squashed(
                logits, Derived(sign * np.array([[-0.5, 0.5]]), None), "softmax", "Sigmoid, as (1 - p, p)"
            )
    return None


def _is_column(tensor: gs.Tensor, classes: int | None) -> bool:
    """Whether a tensor is (N, 1), as it must be where two of its kind side by side are two classes."""
    return classes == 2 if tensor.shape is None else len(tensor.shape) == 2 and tensor.shape[1] == 1


def _spelled_out(tensor: gs.Tensor, classes: int | None) -> Squashed | None:
    """exp(a - log Σ exp a), or σ(z) / Σ σ(z) with or without a guard for rows that are all 0."""
    exponential = made_by(tensor, "Exp")
    if exponential is not None:
        difference = made_by(exponential.inputs[0], "Sub")
        total = None if difference is None else _arranged(difference.inputs[1])
        if difference is None or total is None or total.op != "ReduceLogSumExp":
            return None
        same = through(total.inputs[0]) is through(difference.inputs[0])
        return Squashed(difference.inputs[0], None, "softmax", "a spelled-out softmax") if same else None
    quotient = made_by(tensor, "Div")
    if quotient is None:
        return None
    part, total = _unguarded(quotient.inputs[0]), _arranged(_unguarded(quotient.inputs[1]))
    if total is None or total.op != "ReduceSum" or through(total.inputs[0]) is not through(part):
        return None
    return _normalised(part, "a division by their sum", classes)


def _arranged(tensor: gs.Tensor) -> gs.Node | None:
    """The node that made a tensor, or what was only given other axes to make it."""
    node = made_by(tensor, "Reshape", "Unsqueeze", "Squeeze")
    made = through(tensor if node is None else node.inputs[0])
    return made.inputs[0] if made.inputs else None


def _unguarded(tensor: gs.Tensor) -> gs.Tensor:
    """x where the tensor is x + m with a mask m that is 0 but for rows without any probability."""
    node = made_by(tensor, "Add")
    if node is None:
        return tensor
    masks = [_is_mask(part) for part in node.inputs]
    return node.inputs[masks.index(False)] if sum(masks) == 1 else tensor


def _is_mask(tensor: gs.Tensor) -> bool:
    scaled = made_by(tensor, "Mul")
    cast = made_by(tensor if scaled is None else affine(tensor).core, "Cast")
    return cast is not None and made_by(cast.inputs[0], "Not") is not None
