"""Small regression networks in torch: several trained side by side, one of them written as ONNX.

A network is x -> standardise -> W1, b1 -> relu -> W2, b2 -> units of the target. Networks of one `Bundle` differ by
their first weights, the order of their rows, their weight decay and their dropout, and are trained at once, as one
batched product.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

STEPS = 2000  # of training
BATCH, RATE = 100, 1e-2  # the rate falls to 0 as a cosine
CHECKS = 50  # times that a network trained with `judge` is looked at
SMALLEST = 1e-4  # of predicted variances, in units of the target's variance, as the noise head's grid


@dataclass(frozen=True)
class Units:
    """Means and standard deviations of the rows that networks are fitted to; networks see standardised rows."""

    x_mean: np.ndarray
    x_std: np.ndarray
    y_mean: float
    y_std: float

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> Units:
        std = x.std(axis=0)
        return cls(x.mean(axis=0), np.where(std > 0, std, 1.0), float(y.mean()), float(y.std()))

    def rows(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(((x - self.x_mean) / self.x_std).astype(np.float32))

    def targets(self, y: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(((y - self.y_mean) / self.y_std).astype(np.float32))

    def back(self, mean: np.ndarray, var: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances in units of the target, float64."""
        mean, var = (np.asarray(array, np.float64) for array in (mean, var))
        return mean * self.y_std + self.y_mean, var * self.y_std**2


class Bundle(torch.nn.Module):
    """Networks (k, d) -> units -> outputs, with the network as the first axis of every parameter."""

    def __init__(self, count: int, inputs: int, units: int, outputs: int, generator: torch.Generator):
        super().__init__()

        def weight(fan_in: int, fan_out: int, gain: float) -> torch.nn.Parameter:
            values = torch.randn(count, fan_in, fan_out, generator=generator)
            return torch.nn.Parameter(values * (gain / fan_in) ** 0.5)

        self.w1, self.b1 = weight(inputs, units, 2.0), torch.nn.Parameter(torch.zeros(count, 1, units))
        self.w2, self.b2 = weight(units, outputs, 1.0), torch.nn.Parameter(torch.zeros(count, 1, outputs))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs (k, n, outputs) for rows (k, n, d) or (n, d); `mask` multiplies the hidden units."""
        hidden = torch.relu(x @ self.w1 + self.b1)
        return (hidden if mask is None else hidden * mask) @ self.w2 + self.b2

    def part(self, members: list[int]) -> Bundle:
        """Some of the networks."""
        some = copy.deepcopy(self)
        for value in some.parameters():
            value.data = value.data[members].clone()
        return some


def train(
    x: torch.Tensor,
    y: torch.Tensor,
    units: int,
    decay: list[float],
    dropout: list[float],
    *,
    judge: tuple[torch.Tensor, torch.Tensor] | None = None,
    seed: int,
    steps: int = STEPS,
) -> Bundle:
    """Networks of one target, one for each pair of `decay` and `dropout`, fitted to standardised rows by Adam.

    The loss of a network has decay · Σ w² added, over its weights. Without `judge` they learn the mean by squared error, for a number of steps that is given beforehand. With it
    they learn mean and log variance by likelihood, and each stays as it was when these rows liked it best.
    """
    generator = torch.Generator().manual_seed(seed)
    count, batch = len(dropout), min(BATCH, len(x))
    bundle = Bundle(count, x.shape[1], units, 2 if judge else 1, generator)
    per_epoch = len(x) // batch
    optimiser = torch.optim.Adam(bundle.parameters(), RATE, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    penalty = torch.tensor(decay)
    dropping = [k for k, rate in enumerate(dropout) if rate]
    keep = 1 - torch.tensor(dropout)[dropping, None, None]
    mask = torch.ones(count, batch, units) if dropping else None
    best, best_loss = None, torch.full((count,), torch.inf)
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.stack([torch.randperm(len(x), generator=generator) for _ in dropout])
        first = step % per_epoch * batch
        chosen = order[:, first : first + batch]
        if dropping:
            mask[dropping] = (torch.rand(len(dropping), batch, units, generator=generator) < keep) / keep
        squares = (bundle.w1**2).sum(dim=(1, 2)) + (bundle.w2**2).sum(dim=(1, 2))
        loss = (_loss(bundle(x[chosen], mask), y[chosen]).mean(dim=1) + penalty * squares).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if judge and (step + 1) % max(1, steps // CHECKS) == 0:
            with torch.no_grad():
                now = _loss(bundle(judge[0]), judge[1].expand(count, -1)).mean(dim=1)
            best = best or [value.detach().clone() for value in bundle.parameters()]
            for kept, value in zip(best, bundle.parameters()):
                kept[now < best_loss] = value.detach()[now < best_loss]
            best_loss = torch.minimum(now, best_loss)
    if best:
        for kept, value in zip(best, bundle.parameters()):
            value.data = kept
    return bundle.requires_grad_(False)


def _loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Squared errors (k, n), or, of two outputs, ½ ((y - μ)²/σ² + log σ²)."""
    if outputs.shape[-1] == 1:
        return (outputs[..., 0] - y) ** 2
    mean, var = mean_and_variance(outputs)
    return 0.5 * ((y - mean) ** 2 / var + var.log())


def mean_and_variance(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of networks with two outputs: the second is softplus⁻¹ of the variance."""
    return outputs[..., 0], torch.nn.functional.softplus(outputs[..., 1]) + SMALLEST


def as_module(bundle: Bundle, member: int = 0) -> torch.nn.Sequential:
    """One network of a bundle as the layers that packages for torch expect."""
    inputs, units = bundle.w1.shape[1:]
    module = torch.nn.Sequential(torch.nn.Linear(inputs, units), torch.nn.ReLU(), torch.nn.Linear(units, 1))
    for layer, weight, bias in ((module[0], bundle.w1, bundle.b1), (module[2], bundle.w2, bundle.b2)):
        layer.weight.data = weight[member].T.contiguous()
        layer.bias.data = bias[member, 0].clone()
    return module


def as_onnx(bundle: Bundle, units: Units, member: int = 0) -> onnx.ModelProto:
    """One network of a bundle from raw `x` to `y` in units of the target."""
    constants = {
        "x_mean": units.x_mean,
        "x_std": units.x_std,
        "w1": bundle.w1[member].numpy(),
        "b1": bundle.b1[member, 0].numpy(),
        "w2": bundle.w2[member].numpy(),
        "b2": bundle.b2[member, 0].numpy(),
        "y_std": np.array([units.y_std]),
        "y_mean": np.array([units.y_mean]),
    }
    nodes = [
        helper.make_node("Sub", ["x", "x_mean"], ["centred"]),
        helper.make_node("Div", ["centred", "x_std"], ["standard"]),
        helper.make_node("Gemm", ["standard", "w1", "b1"], ["z"]),
        helper.make_node("Relu", ["z"], ["h"]),
        helper.make_node("Gemm", ["h", "w2", "b2"], ["out"]),
        helper.make_node("Mul", ["out", "y_std"], ["scaled"]),
        helper.make_node("Add", ["scaled", "y_mean"], ["y"]),
    ]
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", len(units.x_mean)])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1])]
    graph = helper.make_graph(nodes, "regression", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model
