"""Division by a norm: that of an axis (LpNormalization), or one of neighbouring channels (LRN)."""

from __future__ import annotations

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.normalisation import NEARLY_ZERO, Normalised, over
from gapa_onnx.variance.rules.registry import Accuracy, rule
from gapa_onnx.variance.rules.view import NodeView

FIRST_ORDER = Accuracy.FIRST_ORDER


@rule("LpNormalization", accuracy=FIRST_ORDER)
def lp_normalization(node: NodeView) -> Value:
    """Σ_j J_ij² v_j with J = (I - y yᵀ) / ‖x‖ for p = 2, (I - y sign(x)ᵀ) / ‖x‖ for p = 1"""
    x, graph, axes = node.inputs[0], node.graph, [node.attr("axis", -1)]
    if axes[0] < 0 and x.shape is not None:
        axes = [axes[0] % x.rank]  # before opset 11 axes are not negative
    if node.attr("p", 2) == 2:  # the root mean square is the norm but for √n
        normalised = Normalised(x.mean, x.var, over(graph, axes), NEARLY_ZERO, centred=False)
        return normalised.variance / normalised.size

    def total(value: Value) -> Value:
        return graph.reduce("ReduceSum", value, axes)

    v = x.variance
    norm = total((x.mean.squared + v).sqrt())
    norm = norm + (norm <= 0)  # certain zeros only: 0 / 1
    share = x.mean.abs() / norm  # |y_i|
    large = share > 0.5  # one element at most, which leaves its own variance out of the sum
    small = 1 - large
    of_small = (1 - 2 * share) * v + share.squared * total(large * v)
    spread = small * of_small + large * ((1 - share).squared * v) + share.squared * total(small * v)
    return spread / norm.squared


@rule("LRN", accuracy=FIRST_ORDER)
def local_response_normalization(node: NodeView) -> Value:
    """d^-2β ((1 - g_i x_i)² v_i + g_i² Σ_{j≠i} x_j² v_j) over the window, g = 2 α β x / (size d)

    d = bias + α / size Σ_j (x_j² + v_j) is the expected denominator.
    """
    graph, size = node.graph, node.attr("size")
    alpha, beta = node.attr("alpha", 1e-4), node.attr("beta", 0.75)
    before = (size - 1) // 2
    window = np.ones((1, 1, size, 1), np.float32)
    others = window.copy()
    others[0, 0, before] = 0

    def summed(value: Value, weights: np.ndarray) -> Value:
        """Over neighbouring channels of (n, 1, c, positions)."""
        pads = [before, 0, size - 1 - before, 0]
        return graph.emit("Conv", value, graph.constant(weights.astype(value.dtype)), pads=pads)

    def arranged(value: Value) -> Value:
        return graph.unsqueeze(graph.emit("Reshape", value, graph.ints(0, 0, -1)), [1])

    x, v = arranged(node.inputs[0].mean), arranged(node.inputs[0].variance)
    d = node.attr("bias", 1.0) + (alpha / size) * summed(x.squared + v, window)
    g = (2 * alpha * beta / size) * x / d
    spread = (1 - g * x).squared * v + g.squared * summed(x.squared * v, others)
    power = graph.emit("Pow", d, graph.constant(np.asarray(-2 * beta, d.dtype)))
    return graph.emit("Reshape", power * spread, graph.shape(node.inputs[0].raw))
