"""What the tables measure of a method: how good its answers are, and what they cost beside the network alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy.special import softmax

from gapa_onnx.measure import bench
from gapa_onnx.measure.evaluation import metrics

TIMED_SECONDS = 2.0  # that the timing of a slow method may take


@dataclass(frozen=True)
class Answer:
    """What a method says about n inputs."""

    probs: np.ndarray  #: (n, c)
    bald: np.ndarray | None = None  #: (n,) epistemic part of the entropy
    score: np.ndarray | None = None  #: (n,) larger for stranger inputs
    flagged: np.ndarray | None = None  #: (n,) whether the method itself calls an input strange
    pvalue: np.ndarray | None = None  #: (n,) of the score among held-out rows


Predict = Callable[[np.ndarray], Answer]


@dataclass(frozen=True)
class Fitted:
    """A method ready for use, and what it took to get there from the trained network, in CPU seconds."""

    predict: Predict
    seconds: float


def in_batches(predict: Predict, x: np.ndarray, batch: int) -> Answer:
    parts = [predict(x[start : start + batch]) for start in range(0, len(x), batch)]

    def joined(name: str) -> np.ndarray | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else np.concatenate(values)

    return Answer(**{field.name: joined(field.name) for field in fields(Answer)})


def from_samples(logits: np.ndarray) -> Answer:
    """Mean probabilities, H(mean p) − mean H(p) and mean variance of the logits, from draws (s, n, c)."""
    draws = softmax(logits.astype(np.float64), axis=-1)
    probs = draws.mean(axis=0)
    bald = metrics.entropy_rows(probs) - metrics.entropy_rows(draws).mean(axis=0)
    return Answer(probs, bald, logits.var(axis=0).mean(axis=-1))


# ------------------------------------------------------------------------- quality


def calibration(known: Answer, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, negative log-likelihood and expected calibration error on the test set."""
    top = known.probs.argmax(axis=1)
    bins = metrics.bin_sums(known.probs.max(axis=1), top == labels)
    return {
        "acc": (top == labels).mean(),
        "nll": metrics.log_loss_rows(known.probs, labels).mean(),
        "ece": metrics.expected_calibration_error(bins),
    }


def quality(known: Answer, strange: Answer, labels: np.ndarray) -> dict[str, Any]:
    entropies = [metrics.entropy_rows(answer.probs) for answer in (known, strange)]
    figures = calibration(known, labels) | {
        "ood": auroc(*entropies),
        "bald": auroc(known.bald, strange.bald),
        "score": auroc(known.score, strange.score),
    }
    return rounded(figures)


def rounded(figures: dict[str, float | None]) -> dict[str, Any]:
    """Five digits, and nothing where there is no figure."""
    return {name: "" if value is None else round(float(value), 5) for name, value in figures.items()}


def auroc(inside: np.ndarray | None, outside: np.ndarray | None) -> float | None:
    return None if inside is None else metrics.detection(inside, outside)["auroc"]


# ---------------------------------------------------------------------------- time


def beside(plainly: Predict, method: Predict, x: np.ndarray, rounds: int) -> bench.Comparison:
    """The method's time over the network's for one batch, again with more rounds while the control is off."""
    for attempt in range(bench.ATTEMPTS):
        found = bench.summary(readings(plainly, method, x, rounds * 2**attempt))
        if found.sound:
            break
    return found


def readings(plainly: Predict, method: Predict, x: np.ndarray, rounds: int) -> np.ndarray:
    """Seconds of the network, the network again and the method, which take turns: (3, rounds), fewer where a run is long."""
    runs = (plainly, plainly, method)
    once = [min(_seconds(run, x, 1) for _ in range(2)) for run in runs]
    repeats = [max(1, int(bench.SHORTEST / seconds)) for seconds in once]
    repeats = [min(repeats[:2])] * 2 + repeats[2:]  # the same for both sides of the control
    rounds = max(len(bench.ORDERS), min(rounds, int(TIMED_SECONDS / max(once))))
    seconds = np.empty((3, rounds))
    for number in range(rounds):
        for position in bench.ORDERS[number % len(bench.ORDERS)]:
            seconds[position, number] = _seconds(runs[position], x, repeats[position])
    return seconds


def _seconds(run: Predict, x: np.ndarray, repeat: int) -> float:
    started = time.thread_time()
    for _ in range(repeat):
        run(x)
    return (time.thread_time() - started) / repeat
