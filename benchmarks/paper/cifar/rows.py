"""The lines of the CIFAR tables: how each is fitted, what it answers, and what it costs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Answer, Fitted, Predict, beside, in_batches
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

import gapa_onnx
from cifar.peers import PEERS, Bank, Score
from cifar.task import BATCH, Task
from gapa_onnx.measure import bench
from gapa_onnx.sessions.runtime import session_options

#: By whether the run is a quick one:
TIMED_BATCH = {False: 256, True: 32}
ROUNDS = {False: 48, True: 6}  #: of a timing
PRIOR_STEPS = {False: 50, True: 3}  #: of laplace-torch's search for the prior precision
OURS = "gapa-onnx"
HALF, EIGHT = "float16", "int8"  #: what the names of networks end with that are not float32

Judge = Callable[[np.ndarray, np.ndarray], Answer]  #: features and logits to answers


@dataclass(frozen=True)
class Row(ABC):
    """A line of the table."""

    name: str

    @abstractmethod
    def fit(self, task: Task) -> Fitted:
        """The method on inputs, and the CPU seconds from the network to it."""

    @abstractmethod
    def answers(self, fitted: Fitted, task: Task) -> dict[str, Answer]:
        """What it says about all sets."""

    @abstractmethod
    def timed(self, fitted: Fitted, task: Task) -> bench.Comparison:
        """One batch beside the network alone."""

    @property
    def settings(self) -> str:
        return ""


class NotWritten(Exception):
    """The checks of a conversion that failed, so that there is no file to measure."""


@dataclass(frozen=True)
class _Judging(Fitted):
    judge: Judge


@dataclass(frozen=True)
class OnFeatures(Row):
    """A method that needs only the network's features and logits, which are computed once for all of them."""

    prepare: Callable[[Task], Judge]
    needs_training_rows: bool = True

    def fit(self, task: Task) -> _Judging:
        extra = task.bank_seconds if self.needs_training_rows else 0.0
        started = time.process_time()
        judge = self.prepare(task)
        seconds = time.process_time() - started + extra
        return _Judging(lambda x: judge(*task.said(x)), seconds, judge)

    def answers(self, fitted: Fitted, task: Task) -> dict[str, Answer]:
        assert isinstance(fitted, _Judging)
        return {name: _in_parts(fitted.judge, *said) for name, said in task.said_of_sets.items()}

    def timed(self, fitted: Fitted, task: Task) -> bench.Comparison:
        return beside(plainly(task), fitted.predict, task.test[: TIMED_BATCH[task.quick]], ROUNDS[task.quick])


@dataclass(frozen=True)
class Converted(Row):
    """A conversion by this tool with some choices; what is not given is its default."""

    choices: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.choices.items()) or "defaults"

    def path(self, task: Task) -> Path:
        return task.path.with_suffix(f".{self.name.replace(' ', '_')}.onnx")

    def fit(self, task: Task) -> Fitted:
        started = time.process_time()
        made = gapa_onnx.convert(task.path, {"x": task.x_train}, self.path(task), **self.choices)
        if made.path is None:
            raise NotWritten("; ".join(f"{c.name}: {c.detail}" for c in made.checks if not c.passed))
        return Fitted(predictor(self.path(task)), time.process_time() - started)

    def answers(self, fitted: Fitted, task: Task) -> dict[str, Answer]:
        return {name: in_batches(fitted.predict, x, BATCH) for name, x in task.sets.items()}

    def timed(self, fitted: Fitted, task: Task) -> bench.Comparison:
        x = task.test[: TIMED_BATCH[task.quick]]
        return bench.measure(
            task.path, self.path(task), batch=len(x), data={"x": x}, rounds=ROUNDS[task.quick], parts=False
        ).comparison


def plainly(task: Task) -> Predict:
    """The network alone."""
    return lambda x: Answer(softmax(task.logits(x), axis=1))


def predictor(path: Path) -> Predict:
    """A converted file; a role that it has no output for is None."""
    session = gapa_onnx.session(path, session_options(threads=1))
    there = {output.name for output in session.get_outputs()}
    roles = {"probs": "probs", "epistemic": "bald", "score": "score", "ood": "flagged", "pvalue": "pvalue"}
    wanted = {f"logits_{role}": name for role, name in roles.items() if f"logits_{role}" in there}

    def predict(x: np.ndarray) -> Answer:
        found = dict(zip(wanted.values(), session.run(list(wanted), {"x": x})))
        return Answer(**{**found, "probs": found["probs"].astype(np.float64)})

    return predict


def _in_parts(judge: Judge, features: np.ndarray, logits: np.ndarray) -> Answer:
    rows = np.arange(len(features))
    return in_batches(lambda part: judge(features[part], logits[part]), rows, BATCH)


# ---------------------------------------------------------------- methods on features


def _most_probable(task: Task) -> Judge:
    return lambda h, z: Answer(softmax(z.astype(np.float64), axis=1))


def _temperature(task: Task) -> Judge:
    assert task.held_out is not None
    x, labels = task.held_out
    t = best_temperature(task.said_of_many(x)[1], labels)
    return lambda h, z: Answer(softmax(z.astype(np.float64) / t, axis=1))


def best_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The t whose softmax(z / t) has the least log loss."""

    def loss(log_t: float) -> float:
        return -log_softmax(logits / np.exp(log_t), axis=1)[np.arange(len(labels)), labels].mean()

    return float(np.exp(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x))


def _scored(make: Callable[[Bank], Score], needs_training_rows: bool) -> Callable[[Task], Judge]:
    """The network's probabilities, and a peer's score."""

    def prepare(task: Task) -> Judge:
        score = make(task.bank if needs_training_rows else None)
        return lambda h, z: Answer(softmax(z.astype(np.float64), axis=1), score=score(h, z))

    return prepare


def _laplace(structure: str) -> Callable[[Task], Judge]:
    """laplace-torch on the last layer alone, with the features as its inputs: the same as on the whole network."""

    def prepare(task: Task) -> Judge:
        import torch
        from peers import posterior

        bank = task.bank
        layer = torch.nn.Linear(*bank.weight.shape[::-1])
        layer.load_state_dict({"weight": torch.tensor(bank.weight), "bias": torch.tensor(bank.bias)})
        rows = torch.utils.data.TensorDataset(torch.tensor(bank.features), torch.tensor(bank.labels))
        loader = torch.utils.data.DataLoader(rows, batch_size=1000)
        net = torch.nn.Sequential(torch.nn.Identity(), layer).eval()
        steps = PRIOR_STEPS[task.quick]
        answer = posterior(net, loader, "last_layer", structure, steps=steps, seed=0)
        return lambda h, z: answer(h)

    return prepare


FROM_LOGITS = ("energy", "GEN")  #: peers that need no training rows
PAPER = {"paper": True, "bridge": "per-class", "sites": "last"}
ROWS: tuple[Row, ...] = (
    OnFeatures("MAP", _most_probable, needs_training_rows=False),
    OnFeatures("temperature scaling", _temperature, needs_training_rows=False),
    *(
        OnFeatures(name, _scored(make, name not in FROM_LOGITS), needs_training_rows=name not in FROM_LOGITS)
        for name, make in PEERS.items()
    ),
    *(OnFeatures(f"Laplace last-layer {kind}", _laplace(kind)) for kind in ("diag", "kron", "full")),
    Converted("GAPA-Diag", PAPER),
    Converted(OURS),
)
QUICK = (
    "MAP",
    "temperature scaling",
    "energy",
    "kNN normalised",
    "ViM",
    "Mahalanobis",
    "Laplace last-layer kron",
    OURS,
)
