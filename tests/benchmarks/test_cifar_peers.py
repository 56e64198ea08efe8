"""Each peer of the CIFAR tables against its paper's formula, written out row by row for tiny data."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from support.paths import BENCHMARKS

pytest.importorskip("scipy")
PAPER = BENCHMARKS / "paper"
N, D, C = 240, 6, 3


@pytest.fixture(scope="module")
def peers():
    before, paths = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(PAPER), str(PAPER.parent)]
    yield importlib.import_module("cifar.peers")
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if str(PAPER.parent) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def bank(peers):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, C, N)
    stretch = np.linspace(0.4, 1.5, D)
    features = generator.normal(size=(N, D)) * stretch + 2 * np.eye(D)[labels] + 1
    features = np.maximum(features, 0).astype(np.float32)
    weight, bias = generator.normal(size=(C, D)).astype(np.float32), np.array([0.3, -0.2, 0.1], np.float32)
    return peers.Bank(features, features @ weight.T + bias, labels, weight, bias)


@pytest.fixture(scope="module")
def new(bank):
    features = np.abs(np.random.default_rng(1).normal(size=(9, D)) * 3).astype(np.float32)
    return features, features @ bank.weight.T + bank.bias


def log_sum_exp(z: np.ndarray) -> float:
    return float(np.log(np.exp(z.astype(np.float64)).sum()))


def test_energy(peers, bank, new):
    np.testing.assert_allclose(peers.energy(bank)(*new), [-log_sum_exp(z) for z in new[1]], rtol=1e-5)


def test_generalised_entropy(peers, bank, new):
    expected = []
    for z in new[1].astype(np.float64):
        p = np.exp(z) / np.exp(z).sum()
        expected.append(sum(q**0.1 * (1 - q) ** 0.1 for q in p))
    np.testing.assert_allclose(peers.generalised_entropy(bank)(*new), expected, rtol=1e-6)


def test_generalised_entropy_counts_the_largest_only(peers, bank, new, monkeypatch):
    monkeypatch.setattr(peers, "LARGEST", 2)
    z = new[1][0].astype(np.float64)
    p = np.sort(np.exp(z) / np.exp(z).sum())[1:]
    expected = sum((q * (1 - q)) ** 0.1 for q in p)
    np.testing.assert_allclose(peers.generalised_entropy(bank)(*new)[0], expected, rtol=1e-6)


def test_neighbours(peers, bank, new):
    expected = []
    for h in new[0]:
        others = [np.linalg.norm(h / np.linalg.norm(h) - t / np.linalg.norm(t)) for t in bank.features]
        expected.append(sorted(others)[49])
    np.testing.assert_allclose(peers.neighbours(bank)(*new), expected, rtol=1e-3)


@pytest.mark.parametrize("dimensions, kept", [(None, 3), (2, 2)])
def test_virtual_logit(peers, bank, new, dimensions, kept):
    origin = np.linalg.lstsq(bank.weight.astype(np.float64), -bank.bias, rcond=None)[0]
    centred = bank.features.astype(np.float64) - origin
    principal = np.linalg.svd(centred, full_matrices=False)[2][:kept]  # rows, by falling variance

    def residual(h):
        return np.linalg.norm((h - origin) - principal.T @ (principal @ (h - origin)))

    alpha = bank.logits.max(axis=1).mean() / np.mean([residual(h) for h in bank.features])
    found = peers.virtual_logit(bank, dimensions)(*new)
    for h, z, score in zip(*new, found):
        logits = np.append(z.astype(np.float64), alpha * residual(h))
        probability = (
            np.exp(logits)[-1] / np.exp(logits).sum()
        )  # of the virtual class: what the paper scores by
        np.testing.assert_allclose(1 / (1 + np.exp(-score)), probability, rtol=1e-4)


def test_boundary_distance(peers, bank, new):
    centre = bank.features.mean(axis=0)
    expected = []
    for h, z in zip(*new):
        top = int(z.argmax())
        apart = [
            abs(z[top] - z[c]) / np.linalg.norm(bank.weight[top] - bank.weight[c])
            for c in range(C)
            if c != top
        ]
        expected.append(-np.mean(apart) / np.linalg.norm(h - centre))
    np.testing.assert_allclose(peers.boundary_distance(bank)(*new), expected, rtol=1e-5)


def test_guided_energy(peers, bank, new):
    expected = []
    for h, z in zip(*new):
        guides = [
            log_sum_exp(logits) * (h @ t) / np.linalg.norm(h) / np.linalg.norm(t)
            for t, logits in zip(bank.features, bank.logits)
        ]
        expected.append(-log_sum_exp(z) * np.mean(sorted(guides)[-10:]))
    np.testing.assert_allclose(peers.guided_energy(bank)(*new), expected, rtol=1e-4)


def class_distance(features, labels, h):
    """min_c of the squared Mahalanobis distance with the covariance within classes."""
    centres = {c: features[labels == c].mean(axis=0) for c in set(labels)}
    within = np.array([f - centres[c] for f, c in zip(features, labels)])
    precision = np.linalg.inv(within.T @ within / len(within))
    return min((h - m) @ precision @ (h - m) for m in centres.values())


def test_mahalanobis(peers, bank, new):
    features = bank.features.astype(np.float64)
    expected = [class_distance(features, bank.labels, h) for h in new[0]]
    np.testing.assert_allclose(peers.mahalanobis(bank)(*new), expected, rtol=1e-5)


def test_normalised_mahalanobis(peers, bank, new):
    features = np.array([f / np.linalg.norm(f) for f in bank.features.astype(np.float64)])
    expected = [class_distance(features, bank.labels, h / np.linalg.norm(h)) for h in new[0]]
    np.testing.assert_allclose(peers.normalised_mahalanobis(bank)(*new), expected, rtol=1e-3)


def test_relative_mahalanobis(peers, bank, new):
    features = bank.features.astype(np.float64)
    mean, precision = features.mean(axis=0), np.linalg.inv(np.cov(features.T, bias=True))
    expected = [
        class_distance(features, bank.labels, h) - (h - mean) @ precision @ (h - mean) for h in new[0]
    ]
    np.testing.assert_allclose(peers.relative_mahalanobis(bank)(*new), expected, rtol=1e-4, atol=1e-5)


def test_a_feature_that_is_always_zero_has_no_say(peers, bank, new):
    padded = peers.Bank(
        np.pad(bank.features, ((0, 0), (0, 1))),
        bank.logits,
        bank.labels,
        np.pad(bank.weight, ((0, 0), (0, 1))),
        bank.bias,
    )
    h = np.pad(new[0], ((0, 0), (0, 1)), constant_values=5)
    np.testing.assert_allclose(peers.mahalanobis(padded)(h, new[1]), peers.mahalanobis(bank)(*new), rtol=1e-6)


def test_density(peers, bank, new, monkeypatch):
    monkeypatch.setattr(peers, "RIDGE", 0.0)
    expected = []
    for h in new[0].astype(np.float64):
        total = 0.0
        for c in range(C):
            rows = bank.features[bank.labels == c].astype(np.float64)
            centre, covariance = rows.mean(axis=0), np.cov(rows.T, bias=True)
            gap = h - centre
            density = np.exp(-gap @ np.linalg.solve(covariance, gap) / 2) / np.sqrt(np.linalg.det(covariance))
            total += len(rows) / N * density
        expected.append(-np.log(total))
    np.testing.assert_allclose(peers.density(bank)(*new), expected, rtol=1e-4)


def test_every_peer_scores_far_rows_as_strange_as_its_formula_says(peers, bank):
    """All peers take a batch of one and of many alike."""
    many = bank.features[:5], bank.logits[:5]
    for name, make in peers.PEERS.items():
        if name == "ViM, 12 dimensions":
            continue  # more dimensions than these features have
        score = make(bank)
        one = np.concatenate([score(h[None], z[None]) for h, z in zip(*many)])
        np.testing.assert_allclose(one, score(*many), rtol=1e-4, err_msg=name)
