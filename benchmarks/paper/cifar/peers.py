"""Scores of other detectors, each from the formula of its paper, on what a network's last layer reads.

A peer is a function from a `Bank`, all that the network says about its training rows, to a score: features h (n, d)
and logits z (n, c) in, (n,) out, larger for stranger inputs. ‖·‖ is the Euclidean norm, h̄ = h/‖h‖.

    energy         −log Σ_c exp z_c                                                       Liu et al. 2020
    GEN            Σ_c p_c^γ (1 − p_c)^γ over the largest p, γ = 0.1                      Liu et al. 2023
    kNN            distance of h̄ to its 50th neighbour among the training h̄               Sun et al. 2022
    ViM            α ‖the part of h − o outside the principal space‖ − log Σ_c exp z_c    Wang et al. 2022
    fDBD           −mean over c ≠ ŷ of (z_ŷ − z_c)/‖w_ŷ − w_c‖ over ‖h − mean‖            Liu and Qin 2024
    NNGuide        −e(h) · mean over 10 neighbours of e(h_i) h̄·h̄_i, e = log Σ_c exp z_c   Park et al. 2023
    Mahalanobis    min_c (h − μ_c)ᵀ Σ⁻¹ (h − μ_c), one Σ for all classes                  Lee et al. 2018
    … normalised   the same on h̄ (Mahalanobis++)                                          Müller and Hein 2025
    … relative     the same minus the distance under one Gaussian for all rows            Ren et al. 2021
    DDU            −log Σ_c π_c N(h; μ_c, Σ_c)                                            Mukhoti et al. 2023
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import faiss
import numpy as np
from scipy.special import logsumexp, softmax

NEIGHBOURS = 50  # of kNN: its paper's choice for CIFAR-10
GUIDES = 10  # neighbours of NNGuide; its bank is all training rows
GAMMA, LARGEST = 0.1, 100  # of GEN
RIDGE = 1e-3  # share of the identity in a class's covariance, as in the MNIST tables


@dataclass(frozen=True)
class Bank:
    """What a network says about its training rows, and its last layer."""

    features: np.ndarray  #: (n, d)
    logits: np.ndarray  #: (n, c)
    labels: np.ndarray  #: (n,)
    weight: np.ndarray  #: (c, d)
    bias: np.ndarray  #: (c,)


Score = Callable[[np.ndarray, np.ndarray], np.ndarray]  #: features and logits of new rows to (n,)


def energy(bank: Bank) -> Score:
    return lambda h, z: -logsumexp(z, axis=1)


def generalised_entropy(bank: Bank) -> Score:
    def score(h: np.ndarray, z: np.ndarray) -> np.ndarray:
        p = np.sort(softmax(z.astype(np.float64), axis=1), axis=1)[:, -LARGEST:]
        return ((p * (1 - p)) ** GAMMA).sum(axis=1)

    return score


def neighbours(bank: Bank) -> Score:
    index = faiss.IndexFlatL2(bank.features.shape[1])
    index.add(unit(bank.features))
    return lambda h, z: np.sqrt(np.maximum(index.search(unit(h), NEIGHBOURS)[0][:, -1], 0))


def virtual_logit(bank: Bank, dimensions: int | None = None) -> Score:
    """The origin o solves W o = −b; α makes the virtual logit as large as the largest logit, on average.

    `dimensions` of the principal space; None takes half of the features', close to what its authors take (1000 of
    2048, 512 of 768).
    """
    size = bank.features.shape[1]
    origin = -np.linalg.pinv(bank.weight.astype(np.float64)) @ bank.bias
    centred = bank.features - origin
    _, axes = np.linalg.eigh(centred.T @ centred)  # by rising variance
    outside = axes[:, : size - (dimensions or size // 2)]
    alpha = bank.logits.max(axis=1).mean() / np.linalg.norm(centred @ outside, axis=1).mean()

    def score(h: np.ndarray, z: np.ndarray) -> np.ndarray:
        return alpha * np.linalg.norm((h - origin) @ outside, axis=1) - logsumexp(z, axis=1)

    return score


def small_virtual_logit(bank: Bank) -> Score:
    """ViM with little more than a dimension per class, which is where the variance of these features is."""
    return virtual_logit(bank, bank.logits.shape[1] + 2)


def boundary_distance(bank: Bank) -> Score:
    centre = bank.features.mean(axis=0, dtype=np.float64)
    apart = np.linalg.norm(bank.weight[:, None] - bank.weight[None], axis=2)  # (c, c)
    np.fill_diagonal(apart, np.inf)  # a class has no boundary with itself

    def score(h: np.ndarray, z: np.ndarray) -> np.ndarray:
        top = z.argmax(axis=1)
        distances = (z.max(axis=1, keepdims=True) - z) / apart[top]
        return -distances.sum(axis=1) / (z.shape[1] - 1) / np.linalg.norm(h - centre, axis=1)

    return score


def guided_energy(bank: Bank) -> Score:
    index = faiss.IndexFlatIP(bank.features.shape[1])
    confidence = logsumexp(bank.logits, axis=1, keepdims=True)
    index.add((unit(bank.features) * confidence).astype(np.float32))
    return lambda h, z: -logsumexp(z, axis=1) * index.search(unit(h), GUIDES)[0].mean(axis=1)


def mahalanobis(bank: Bank) -> Score:
    return _to_nearest_class(bank.features.astype(np.float64), bank.labels)


def normalised_mahalanobis(bank: Bank) -> Score:
    distance = _to_nearest_class(unit(bank.features).astype(np.float64), bank.labels)
    return lambda h, z: distance(unit(h), z)


def relative_mahalanobis(bank: Bank) -> Score:
    features = bank.features.astype(np.float64)
    nearest = _to_nearest_class(features, bank.labels)
    overall = _to_nearest_class(features, np.zeros(len(features), np.int64))
    return lambda h, z: nearest(h, z) - overall(h, z)


def density(bank: Bank) -> Score:
    classes = []  # log π_c − log det Σ_c / 2, μ_c and what makes Σ_c the identity
    for c in range(bank.labels.max() + 1):
        rows = bank.features[bank.labels == c].astype(np.float64)
        covariance = (1 - RIDGE) * np.cov(rows.T, bias=True) + RIDGE * np.eye(rows.shape[1])
        root = np.linalg.cholesky(covariance)
        weight = np.log(len(rows) / len(bank.labels)) - np.log(np.diag(root)).sum()
        classes.append((weight, rows.mean(axis=0), np.linalg.inv(root).T))

    def score(h: np.ndarray, z: np.ndarray) -> np.ndarray:
        logs = [
            weight - (((h - mean) @ whitening) ** 2).sum(axis=1) / 2 for weight, mean, whitening in classes
        ]
        return -logsumexp(logs, axis=0)  # up to a constant that all inputs share

    return score


def unit(features: np.ndarray) -> np.ndarray:
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def _to_nearest_class(features: np.ndarray, labels: np.ndarray) -> Score:
    """Squared distance to the nearest class mean under the covariance within classes, features (n, d) in float64."""
    centres = np.stack([features[labels == c].mean(axis=0) for c in range(labels.max() + 1)])
    within = features - centres[labels]
    values, axes = np.linalg.eigh(within.T @ within / len(within))
    kept = values > values.max() * 1e-10  # a feature that is always 0 has no say, as in a pseudo-inverse
    whitening = axes[:, kept] / np.sqrt(values[kept])
    white = centres @ whitening

    def score(h: np.ndarray, z: np.ndarray) -> np.ndarray:
        rows = h @ whitening
        return ((rows[:, None] - white) ** 2).sum(axis=2).min(axis=1)

    return score


PEERS: dict[str, Callable[[Bank], Score]] = {
    "energy": energy,
    "GEN": generalised_entropy,
    "kNN normalised": neighbours,
    "ViM": virtual_logit,
    "ViM, 12 dimensions": small_virtual_logit,
    "fDBD": boundary_distance,
    "NNGuide": guided_energy,
    "Mahalanobis": mahalanobis,
    "Mahalanobis normalised": normalised_mahalanobis,
    "Mahalanobis relative": relative_mahalanobis,
    "DDU": density,
}
