"""Other ways to uncertainty for the same network, from the packages that their authors or others maintain.

    MAP, temperature       softmax of the logits, plain or divided by a number fitted on validation rows (scipy)
    MC dropout, ensemble   mean of 20 passes with dropout, or of 5 networks
    Laplace …              laplace-torch: linearised predictive, prior precision by marginal likelihood
    DDU                    class-wise Gaussians on the last hidden layer: scikit-learn's quadratic discriminants
    kNN                    distance to the 50th neighbour of the normalised last hidden layer: FAISS
    Mahalanobis            distance to the nearest class mean, shared covariance: scikit-learn
    linear probing         logistic regression on the last hidden layer: scikit-learn

The density and distance rows keep MAP's probabilities and add a score. What a row has no notion of is None.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import faiss
import numpy as np
import torch
from measuring import Answer, Fitted, Predict, from_samples
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp, softmax
from sklearn.covariance import EmpiricalCovariance
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from training import CLASSES, Problem, plain

PASSES = 20  # of MC dropout
DRAWS = 100  # of the logits, for laplace-torch's predictive
NEIGHBOURS = 50
RIDGE = 1e-3  # share of the identity in a class's covariance; tanh units that saturate make it singular


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    prepare: Callable[[Problem], Predict]
    all_layers: bool = False  #: too expensive for all test rows
    trains: bool = False  #: needs networks of its own, whose training counts

    @property
    def batch(self) -> int:
        """Rows at a time; a Jacobian of all weights takes 8 MB per row."""
        return 16 if self.all_layers else 256

    def fit(self, problem: Problem) -> Fitted:
        torch.manual_seed(problem.seed)
        own = sum(member.seconds for member in problem.members) if self.trains else 0.0
        _ = problem.net  # trained or loaded before the clock starts
        started = time.process_time()
        predict = self.prepare(problem)
        return Fitted(predict, time.process_time() - started + own)


# ------------------------------------------------------------------------ sampling


def most_probable(problem: Problem) -> Predict:
    logits = _logits(problem.net)
    return lambda x: Answer(softmax(logits(x), axis=1))


def temperature(problem: Problem) -> Predict:
    logits = _logits(problem.net)
    known, labels = logits(problem.data["x_valid"]), problem.data["y_valid"].astype(np.int64)

    def loss(log_t: float) -> float:
        return -log_softmax(known / np.exp(log_t), axis=1)[np.arange(len(labels)), labels].mean()

    t = np.exp(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x)
    return lambda x: Answer(softmax(logits(x) / t, axis=1))


def dropout(problem: Problem) -> Predict:
    net = deepcopy(problem.net).train()

    def predict(x: np.ndarray) -> Answer:
        torch.manual_seed(problem.seed)
        with torch.no_grad():
            return from_samples(np.stack([net(torch.from_numpy(x)).numpy() for _ in range(PASSES)]))

    return predict


def ensemble(problem: Problem) -> Predict:
    members = [_logits(member.net) for member in problem.members]
    return lambda x: from_samples(np.stack([logits(x) for logits in members]))


# ------------------------------------------------------------------------- Laplace


def laplace(weights: str, structure: str) -> Callable[[Problem], Predict]:
    def prepare(problem: Problem) -> Predict:
        loader = problem.loader(1000 if structure == "full" else 250)
        return posterior(
            plain(problem.net), loader, weights, structure, steps=problem.scale.prior_steps, seed=problem.seed
        )

    return prepare


def posterior(
    net: torch.nn.Module,
    loader: torch.utils.data.DataLoader,
    weights: str,
    structure: str,
    *,
    steps: int,
    seed: int,
) -> Predict:
    """laplace-torch on a network: the linearised predictive, its prior precision by that many steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the packages
        from laplace import Laplace
        from laplace.curvature import BackPackGGN, CurvlinopsGGN

        # The backends agree; BackPACK is the cheaper one for diagonals.
        backend = BackPackGGN if structure == "diag" else CurvlinopsGGN
        fitted = Laplace(deepcopy(net), "classification", weights, structure, backend=backend)
        fitted.fit(loader)
        fitted.optimize_prior_precision(method="marglik", n_steps=steps, lr=0.2)

    def predict(x: np.ndarray) -> Answer:
        generator = torch.Generator().manual_seed(seed)
        draws = fitted.functional_samples(torch.from_numpy(x), n_samples=DRAWS, generator=generator)
        return from_samples(draws.detach().numpy())

    return predict


# --------------------------------------------------------------- features of the net


def density(problem: Problem) -> Predict:
    features, labels = _training_features(problem)
    model = QuadraticDiscriminantAnalysis(reg_param=RIDGE).fit(features, labels)
    # log π_c + log N(h; μ_c, Σ_c), up to a constant that all inputs share
    return _scored(problem, lambda h: -logsumexp(model.decision_function(h), axis=1))


def neighbours(problem: Problem) -> Predict:
    features, _ = _training_features(problem)
    index = faiss.IndexFlatL2(features.shape[1])
    index.add(_normalised(features))
    return _scored(problem, lambda h: index.search(_normalised(h), NEIGHBOURS)[0][:, -1])


def mahalanobis(problem: Problem) -> Predict:
    features, labels = _training_features(problem)
    centres = np.stack([features[labels == c].mean(axis=0) for c in range(CLASSES)])
    shared = EmpiricalCovariance(assume_centered=True).fit(features - centres[labels])
    return _scored(problem, lambda h: np.min([shared.mahalanobis(h - c) for c in centres], axis=0))


def probing(problem: Problem) -> Predict:
    model = LogisticRegression(max_iter=200).fit(*_training_features(problem))
    return lambda x: Answer(model.predict_proba(problem.features(x)))


def _scored(problem: Problem, score: Callable[[np.ndarray], np.ndarray]) -> Predict:
    logits = _logits(problem.net)
    return lambda x: Answer(softmax(logits(x), axis=1), score=score(problem.features(x)))


def _training_features(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    return problem.features(problem.data["x_train"]), problem.data["y_train"].astype(np.int64)


def _normalised(features: np.ndarray) -> np.ndarray:
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def _logits(net: torch.nn.Sequential) -> Callable[[np.ndarray], np.ndarray]:
    evaluated = plain(net)

    def logits(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return evaluated(torch.from_numpy(x)).numpy()

    return logits


PEERS = (
    Row("MAP", most_probable),
    Row("temperature scaling", temperature),
    Row("MC dropout", dropout),
    Row("deep ensemble", ensemble, trains=True),
    Row("Laplace last-layer diag", laplace("last_layer", "diag")),
    Row("Laplace last-layer kron", laplace("last_layer", "kron")),
    Row("Laplace last-layer full", laplace("last_layer", "full")),
    Row("Laplace all-layer diag", laplace("all", "diag"), all_layers=True),
    Row("Laplace all-layer kron", laplace("all", "kron"), all_layers=True),
    Row("DDU", density),
    Row("kNN distance", neighbours),
    Row("Mahalanobis", mahalanobis),
    Row("linear probing", probing),
)
