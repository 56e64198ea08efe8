"""The heads in float64 numpy, one point after another: what the emitted nodes and the operator `GapaClasses`
are tested against, and what `evaluate` uses where a file has no head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.op.classes import RULED_OUT
from gapa_onnx.plan.heads.points import Points


@dataclass(frozen=True)
class Split:
    """Entropies in nats, of the logits' shape without the class axis."""

    entropy: Array  #: of the mean prediction: total
    aleatoric: Array  #: mean entropy of a prediction
    epistemic: Array  #: their difference


def softmax(logits: Array, axis: int) -> Array:
    weights = np.exp(logits - logits.max(axis=axis, keepdims=True))
    shares: Array = weights / weights.sum(axis=axis, keepdims=True)
    return shares


def sigmoid(logits: Array) -> Array:
    odds = np.exp(-np.abs(logits))
    probs: Array = np.where(logits >= 0, 1.0, odds) / (1 + odds)
    return probs


def bridge(mean: Array, var: Array, axis: int, link: str = "softmax", kind: str = "shared") -> Array:
    """link(m / sqrt(1 + π/8 v)), with v the mean over the classes for the kind "shared"."""
    mean, var = np.asarray(mean, np.float64), np.asarray(var, np.float64)
    if link == "softmax":
        mean = np.maximum(mean, RULED_OUT)
    if kind == "shared":
        var = var.mean(axis=axis, keepdims=True)
    scaled = mean / np.sqrt(1 + np.pi / 8 * var)
    return sigmoid(scaled) if link == "sigmoid" else softmax(scaled, axis)


def as_predicted(probs: Array, output: Array, axis: int) -> Array:
    """The class that is the first of `output` on top, all others a rounding step of float32 below."""
    first = np.expand_dims(output.argmax(axis=axis), axis)
    highest = probs.max(axis=axis, keepdims=True)
    kept: Array = np.minimum(probs, highest * (1 - np.finfo(np.float32).eps))
    np.put_along_axis(kept, first, highest, axis=axis)
    return kept


def split(
    mean: Array,
    var: Array,
    axis: int,
    points: Points,
    link: str = "softmax",
    *,
    factor: Array | None = None,
) -> Split:
    """Total, aleatoric and epistemic entropy over fixed points.

    `factor`, (n, C, C), takes the place of the variance's root, for logits (n, C).
    """
    mean, var = np.asarray(mean, np.float64), np.asarray(var, np.float64)
    mean, std = np.moveaxis(mean, axis, -1), np.sqrt(np.moveaxis(var, axis, -1))  # (…, C)
    columns = np.broadcast_to(np.arange(mean.shape[-1]), mean.shape)
    if link == "softmax":
        mean = np.maximum(mean, RULED_OUT)
        order = np.argsort(-mean, axis=-1, kind="stable")
        columns = np.argsort(order, axis=-1, kind="stable")
    if points.kind != "grid":
        columns = columns % points.values.shape[1]
    weights = np.full(points.count, 1 / points.count) if points.weights is None else points.weights
    entropy_of = _binary_entropy if link == "sigmoid" else _entropy
    mixture, aleatoric = np.zeros_like(mean), np.zeros(mean.shape[:-1])
    for weight, point in zip(weights, points.values):
        noise = point if points.kind == "grid" else point[columns]
        shift = std * noise if factor is None or link == "sigmoid" else np.einsum("nij,nj->ni", factor, noise)
        probs = sigmoid(mean + shift) if link == "sigmoid" else softmax(mean + shift, -1)
        mixture = mixture + weight * probs
        aleatoric = aleatoric + weight * entropy_of(probs)
    total = entropy_of(mixture)
    return Split(total, aleatoric, total - aleatoric)


def score(var: Array, axis: int) -> Array:
    """Mean variance of the logits."""
    return np.asarray(np.asarray(var, np.float64).mean(axis=axis))


def leading(mean: Array, var: Array, axis: int, count: int) -> tuple[Array, ...]:
    """Indices, means and variances of the largest logits, in descending order."""
    indices = np.argsort(-mean, axis=axis, kind="stable")
    indices = np.take(indices, np.arange(min(count, mean.shape[axis])), axis=axis)
    return (
        indices,
        np.take_along_axis(mean, indices, axis=axis),
        np.take_along_axis(var, indices, axis=axis),
    )


def _entropy(probs: Array) -> Array:
    return np.asarray(-_x_log_x(probs).sum(axis=-1))


def _binary_entropy(probs: Array) -> Array:
    """Summed over the labels."""
    return np.asarray(-(_x_log_x(probs) + _x_log_x(1 - probs)).sum(axis=-1))


def _x_log_x(x: Array) -> Array:
    return np.where(x > 0, x * np.log(np.where(x > 0, x, 1)), np.where(np.isnan(x), np.nan, 0))
