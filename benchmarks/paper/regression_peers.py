"""Error bars of one regression network by other methods, and the noise that all methods get alike.

A method is a function rows -> (mean, variance) of the network's function, in standardised units. To every variance
the constant noise is added that makes the held-out rows most likely; what else a method has to choose (a prior
precision, a dropout rate, a scale) is chosen by the likelihood of the same rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from regression_networks import Bundle, as_module, mean_and_variance
from scipy.optimize import minimize_scalar
from torch.utils.data import DataLoader, TensorDataset

from gapa_onnx.measure.evaluation import metrics

# Laplace approximations by subset of weights and structure of the curvature, as laplace-torch names them.
LAPLACE = {
    "LLA* full": ("last_layer", "full"),
    "LLA* KFAC": ("last_layer", "kron"),
    "LLA* diag": ("last_layer", "diag"),
    "LLA KFAC": ("all", "kron"),
    "LLA diag": ("all", "diag"),
}
PRIOR_PRECISIONS = np.geomspace(1e-3, 1e4, 8)
PRIOR_ROWS = 1000  # held-out rows that a prior precision is chosen by, at most
CURVATURE_ROWS = 500  # at a time
DROPOUT_RATES = (0.01, 0.05, 0.1)
DROPOUT_SAMPLES = 100

Answer = tuple[np.ndarray, np.ndarray]  # mean and variance, each (n,)
Method = Callable[[torch.Tensor], Answer]


# ----------------------------------------------------------------------------- noise


def likelihood(answer: Answer, y: np.ndarray) -> float:
    """Mean negative log likelihood."""
    mean, var = answer
    return float(np.mean(metrics.gaussian_log_loss(mean, np.sqrt(var), y)))


def best_noise(answer: Answer, y: np.ndarray) -> float:
    """The constant variance that, added to the answer's, makes the targets most likely."""
    mean, var = (np.asarray(array, np.float64) for array in answer)
    largest = np.mean((y - mean) ** 2)
    found = minimize_scalar(
        lambda log_noise: likelihood((mean, var + np.exp(log_noise)), y),
        bounds=(np.log(largest * 1e-4), np.log(largest * 10)),
        method="bounded",
        options={"xatol": 1e-5},
    )
    return float(np.exp(found.x))


def with_noise(answer: Answer, noise: float) -> Answer:
    return answer[0], answer[1] + noise


def _chosen(methods: list[Method], x: torch.Tensor, y: np.ndarray) -> Method:
    """The method that, with its best noise, makes held-out rows most likely."""
    losses = []
    for method in methods:
        answer = method(x)
        losses.append(likelihood(with_noise(answer, best_noise(answer, y)), y))
    return methods[int(np.argmin(losses))]


# ----------------------------------------------------------------------------- peers


def point(bundle: Bundle) -> Method:
    """The network alone (MAP): no variance of its own."""

    def answer(x: torch.Tensor) -> Answer:
        mean = bundle(x)[0, :, 0].double().numpy()
        return mean, np.zeros_like(mean)

    return answer


def ensemble(bundle: Bundle) -> Method:
    """Mean and variance over the networks of a deep ensemble that learnt the mean only."""

    def answer(x: torch.Tensor) -> Answer:
        means = bundle(x)[..., 0].double().numpy()
        return means.mean(axis=0), means.var(axis=0)

    return answer


def gaussian_ensemble(bundle: Bundle) -> Method:
    """Deep ensemble as published: networks of mean and variance, their mixture by its two moments."""

    def answer(x: torch.Tensor) -> Answer:
        means, variances = (part.double().numpy() for part in mean_and_variance(bundle(x)))
        return means.mean(axis=0), means.var(axis=0) + variances.mean(axis=0)

    return answer


def dropout(bundle: Bundle, rates: tuple[float, ...], x: torch.Tensor, y: np.ndarray, seed: int) -> Method:
    """MC dropout, with the network (and its rate) that held-out rows like best."""
    return _chosen([_dropout(bundle.part([k]), rate, seed) for k, rate in enumerate(rates)], x, y)


def _dropout(one: Bundle, rate: float, seed: int) -> Method:
    def answer(x: torch.Tensor) -> Answer:
        generator = torch.Generator().manual_seed(seed)
        units = one.w1.shape[2]
        total = squares = 0.0
        for _ in range(DROPOUT_SAMPLES):  # one mask a row and sample
            mask = (torch.rand(1, len(x), units, generator=generator) < 1 - rate) / (1 - rate)
            mean = one(x, mask)[0, :, 0].double().numpy()
            total, squares = total + mean, squares + mean**2
        mean = total / DROPOUT_SAMPLES
        return mean, np.maximum(squares / DROPOUT_SAMPLES - mean**2, 0)

    return answer


def laplace(
    bundle: Bundle, kind: str, fitted: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, y: np.ndarray
) -> Method:
    """A linearised Laplace approximation by laplace-torch.

    The noise that its curvature needs is the mean squared error of the held-out rows, its prior precision the one
    that they like best; the network stays as it is.
    """
    from laplace import Laplace

    module = as_module(bundle).double()  # in float32 some curvatures are not positive definite
    fitted, x = [part.double() for part in fitted], x.double()
    subset, structure = LAPLACE[kind]
    x, y = x[:PRIOR_ROWS], y[:PRIOR_ROWS]
    noise = float(np.sqrt(np.mean((module(x)[:, 0].detach().numpy() - y) ** 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages about each other
        posterior = Laplace(
            module, "regression", subset_of_weights=subset, hessian_structure=structure, sigma_noise=noise
        )
        rows = DataLoader(TensorDataset(fitted[0], fitted[1][:, None]), batch_size=CURVATURE_ROWS)
        torch.set_default_dtype(torch.float64)  # of the identity by which the package forms a full curvature
        try:
            posterior.fit(rows)
        finally:
            torch.set_default_dtype(torch.float32)

    backend = posterior.backend
    slopes = backend.last_layer_jacobians if subset == "last_layer" else backend.jacobians

    def answer(jacobian: torch.Tensor, mean: torch.Tensor) -> Answer:
        var = posterior.functional_variance(jacobian)
        mean, var = (part.detach().reshape(-1).numpy() for part in (mean, var))
        return mean, np.maximum(var, 0)

    def loss(precision: float) -> float:
        posterior.prior_precision = torch.tensor([precision], dtype=torch.float64)
        held_out = answer(*known)
        return likelihood(with_noise(held_out, best_noise(held_out, y)), y)

    known = slopes(x)
    posterior.prior_precision = torch.tensor([min(PRIOR_PRECISIONS, key=loss)], dtype=torch.float64)

    def method(x: torch.Tensor) -> Answer:
        parts = [answer(*slopes(part)) for part in x.double().split(CURVATURE_ROWS)]
        return np.concatenate([mean for mean, _ in parts]), np.concatenate([var for _, var in parts])

    return method
