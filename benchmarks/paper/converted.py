"""The rows that this tool makes: the ONNX file of the network converted, and run by onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Answer, Predict
from peers import Row
from scipy.special import softmax
from training import Problem

import gapa_onnx

ROLES = ("probs", "epistemic", "score")


@dataclass(frozen=True)
class Converted(Row):
    """A conversion with some choices; what is not given is the tool's default."""

    choices: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.choices.items()) or "defaults"

    def path(self, problem: Problem) -> Path:
        return problem.scale.folder / f"{problem.name}_{problem.seed}.{self.name.replace(' ', '_')}.onnx"


def converted(name: str, **choices: Any) -> Converted:
    def prepare(problem: Problem) -> Predict:
        path = row.path(problem)
        calibration = {"x": problem.data["x_train"]}
        gapa_onnx.convert(problem.onnx_path, calibration, path, seed=problem.seed, **choices)
        return predictor(path)

    row = Converted(name, prepare, choices=choices)
    return row


def predictor(path: Path) -> Callable[[np.ndarray], Answer]:
    session = gapa_onnx.session(path, gapa_onnx.sessions.runtime.session_options(threads=1))
    names = [f"logits_{role}" for role in ROLES]

    def predict(x: np.ndarray) -> Answer:
        probs, epistemic, score = session.run(names, {"x": x})
        return Answer(probs.astype(np.float64), epistemic, score)

    return predict


def source_predictor(problem: Problem) -> Predict:
    """The network as onnxruntime runs it."""
    session = gapa_onnx.session(problem.onnx_path, gapa_onnx.sessions.runtime.session_options(threads=1))
    return lambda x: Answer(softmax(session.run(["logits"], {"x": x})[0].astype(np.float64), axis=1))


#: What the Gaussian process alone says, at the last layer: no witnesses, and distances as they are.
LAST_LAYER = {"sites": "last", "witnesses": "none", "score": "variance", "metric": "euclidean"}

# The paper compresses its cache of training activations "optionally" and names no number of points for its table, so
# paper mode conditions on all of them. With 2500 points it stands here too. Nor does it say where the
# sites are; its own comparison of places, and our experiments, say the last hidden layer.
PAPER = {"paper": True, "bridge": "per-class", "sites": "last"}
CONVERTED = (
    converted("GAPA-Diag", **PAPER, inducing="all"),
    converted("GAPA-Full", **PAPER, inducing="all", covariance="full"),
    converted("GAPA-Diag, few points", **PAPER, m=2500),
    converted("gapa-onnx"),
    converted("gapa-onnx last layer", **LAST_LAYER, m=2500),
    converted("gapa-onnx last layer, all points", **LAST_LAYER, inducing="all"),
)
