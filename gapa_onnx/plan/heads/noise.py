"""The noise head of a regression output, as numbers and as graph nodes; `settle.noise` trains it.

    σ_ale²(h) = unit · (softplus(s(h)) + 1e-6)        h: what the last site compares, one vector a row

s is a network of two hidden layers with tanh between them. Its weights are named parameters of the graph, which stay
open until they are trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.variance.graph import Value, VarianceGraph

LAYERS = 3
FLOOR = 1e-6  # of softplus(s), in units of the mean squared residual

Layer = tuple[Array, Array]


@dataclass(frozen=True)
class NoiseHead:
    """A trained noise head."""

    weights: tuple[Layer, ...] = field(repr=False)  #: W (in, out) and b (out,), float32; tanh between them
    scale: Array  #: (targets,) mean squared residual: the unit
    nll: float  #: mean over rows and targets, each row by a network that has not learnt from it
    constant_nll: float  #: the same of the best constant noise
    rows: int  #: that it was fitted to

    def __call__(self, hidden: Array) -> Array:
        """Aleatoric variances (n, targets) of hidden representations (n, d)."""
        x = np.asarray(hidden, np.float32)
        for weight, bias in self.weights[:-1]:
            x = np.tanh(x @ weight + bias)
        weight, bias = self.weights[-1]
        variances: Array = self.scale.astype(np.float32) * (softplus(x @ weight + bias) + np.float32(FLOOR))
        return variances

    def tensors(self, names: NoiseTensors) -> dict[str, Array]:
        """The numbers of a head's parameters, by the names that they have in the graph."""
        named = {names.unit: self.scale.astype(np.float32)}
        for (weight, bias), (weight_name, bias_name) in zip(self.weights, names.layers):
            named |= {weight_name: weight, bias_name: bias}
        return named


@dataclass(frozen=True)
class NoiseTensors:
    """Names of the parameters of one noise head."""

    reads: str  #: output of the site whose queries are h
    layers: tuple[tuple[str, str], ...]  #: weight and bias of each layer
    unit: str


def softplus(s: Array) -> Array:
    smooth: Array = np.logaddexp(s, s.dtype.type(0))
    return smooth


def emit_noise(
    graph: VarianceGraph, site: str, hidden: Value, like: Value, prefix: str
) -> tuple[Value, NoiseTensors]:
    """The aleatoric variance as nodes: from h (N, d), in the shape and type of `like`, (N, t) or (N,).

    h are the queries of the site whose output is named. Computed in float32 whatever the model's type; valid in every opset from 7 on. The weights are left open.
    """
    still_open = np.zeros(1, np.float32)
    names = []
    with graph.scope(prefix):
        x = graph.cast(hidden, np.float32)
    for k in range(1, LAYERS + 1):
        if k > 1:
            x = graph.emit("Tanh", x, names=[f"{prefix}/tanh_{k - 1}"])
        weight = graph.constant(still_open, f"{prefix}/weight_{k}")
        bias = graph.constant(still_open, f"{prefix}/bias_{k}")
        names.append((weight.name, bias.name))
        x = graph.emit("MatMul", x, weight, names=[f"{prefix}/product_{k}"])
        x = graph.emit("Add", x, bias, names=[f"{prefix}/linear_{k}"])
    unit = graph.constant(still_open, f"{prefix}/unit")
    x = graph.emit("Softplus", x, names=[f"{prefix}/softplus"])
    with graph.scope(prefix):
        var = unit * (x + FLOOR)
        var = graph.cast(graph.emit("Reshape", var, graph.shape(like)), like.dtype)
    return var, NoiseTensors(site, tuple(names), unit.name)
