"""Losses that models carry as outputs: a sum of log-probabilities that labels choose."""

from __future__ import annotations

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.reduction import softmax_spread
from gapa_onnx.variance.rules.registry import Accuracy, Variances, rule
from gapa_onnx.variance.rules.view import NodeView


@rule("NegativeLogLikelihoodLoss", accuracy=Accuracy.EXACT)
def negative_log_likelihood(node: NodeView) -> Value:
    """Σ_n w_n² v_n over the chosen elements, divided by (Σ_n w_n)² for the mean"""
    _require_certain_weights(node)
    return _chosen(node, node.inputs[0].variance)


@rule("SoftmaxCrossEntropyLoss", accuracy=Accuracy.FIRST_ORDER)
def softmax_cross_entropy(node: NodeView) -> Variances:
    """Σ_n w_n² v_n of the chosen logarithms of the softmax, divided by (Σ_n w_n)² for the mean"""
    _require_certain_weights(node)
    scores, reduce = node.inputs[0], node.graph.reduce
    p = (scores.mean - reduce("ReduceLogSumExp", scores.mean, [1])).exp()
    log_prob = softmax_spread(p, scores.variance, lambda terms: reduce("ReduceSum", terms, [1]))
    return (_chosen(node, log_prob), log_prob)[: len(node.outputs)]


def _require_certain_weights(node: NodeView) -> None:
    weights = node.input(2)
    if node.inputs[0].certain or (weights is not None and not weights.certain):
        raise node.refuse("its weights are uncertain")


def _chosen(node: NodeView, v: Value) -> Value:
    """The variance of the loss, for v the variances of the log-probabilities."""
    weights = node.input(2)

    def loss(log_prob: Value, weights: Value | None, reduction: str) -> Value:
        attrs = {"ignore_index": node.attr("ignore_index")} if node.attr("ignore_index") is not None else {}
        inputs = [log_prob, node.inputs[1].raw] + ([] if weights is None else [weights])
        return node.graph.emit("NegativeLogLikelihoodLoss", *inputs, reduction=reduction, **attrs)

    reduction = node.attr("reduction", "mean")
    squares = None if weights is None else weights.mean.squared
    total = loss(-v, squares, "sum" if reduction == "mean" else reduction)
    if reduction != "mean":
        return total
    # The loss of a model that is certain to be e times wrong is the sum of the weights.
    weight = loss(node.graph.zeros(v) - 1, None if weights is None else weights.mean, "sum")
    return total / weight.squared
