"""A network and all that the rows of a table may use of it: its training rows, its test rows, its strange sets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from cifar.nets import FEATURES, with_features
from cifar.peers import Bank
from gapa_onnx.sessions.runtime import session_options

BATCH = 250  #: rows that run at once, but where time is measured

Said = tuple[np.ndarray, np.ndarray]  #: features (n, d) and logits (n, c)


@dataclass(frozen=True)
class Task:
    """A network in an ONNX file whose output is `logits`. Inputs are as the network takes them."""

    name: str
    path: Path
    x_train: np.ndarray = field(repr=False)
    y_train: np.ndarray = field(repr=False)
    test: np.ndarray = field(repr=False)
    labels: np.ndarray = field(repr=False)  #: of `test`
    outside: Mapping[str, np.ndarray] = field(repr=False)
    held_out: tuple[np.ndarray, np.ndarray] | None = field(
        default=None, repr=False
    )  #: rows with their labels
    features: str = FEATURES  #: the tensor that the last layer reads
    last_layer: tuple[str, str] = ("linear.weight", "linear.bias")
    quick: bool = False

    @cached_property
    def sets(self) -> dict[str, np.ndarray]:
        """Everything that a row is measured on."""
        return {"test": self.test, **self.outside}

    @cached_property
    def plain(self) -> ort.InferenceSession:
        return _session(onnx.load(self.path))

    @cached_property
    def _telling(self) -> ort.InferenceSession:
        return _session(with_features(onnx.load(self.path), self.features))

    def logits(self, x: np.ndarray) -> np.ndarray:
        return self.plain.run(["logits"], {"x": x})[0]

    def said(self, x: np.ndarray) -> Said:
        """Features and logits of some rows, run at once."""
        features, logits = self._telling.run([self.features, "logits"], {"x": x})
        return features, logits

    def said_of_many(self, x: np.ndarray) -> Said:
        parts = [self.said(x[start : start + BATCH]) for start in range(0, len(x), BATCH)]
        features, logits = (np.concatenate(part) for part in zip(*parts))
        return features, logits

    @cached_property
    def choices(self) -> dict[str, np.ndarray]:
        """The class that the network itself chooses, for all rows of all sets."""
        return {
            name: np.concatenate(
                [self.logits(x[i : i + BATCH]).argmax(axis=1) for i in range(0, len(x), BATCH)]
            )
            for name, x in self.sets.items()
        }

    @cached_property
    def said_of_sets(self) -> dict[str, Said]:
        return {name: self.said_of_many(x) for name, x in self.sets.items()}

    @cached_property
    def _timed_bank(self) -> tuple[Bank, float]:
        started = time.process_time()
        features, logits = self.said_of_many(self.x_train)
        taken = time.process_time() - started
        tensors = {tensor.name: tensor for tensor in onnx.load(self.path).graph.initializer}
        weight, bias = (onnx.numpy_helper.to_array(tensors[name]) for name in self.last_layer)
        if weight.shape[0] != len(bias):  # Gemm without transB
            weight = weight.T
        return Bank(features, logits, self.y_train, weight, bias), taken

    @property
    def bank(self) -> Bank:
        return self._timed_bank[0]

    @property
    def bank_seconds(self) -> float:
        """CPU seconds that the network took for its training rows; part of what a row takes that needs them."""
        return self._timed_bank[1]


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    providers = ["CPUExecutionProvider"]
    return ort.InferenceSession(model.SerializeToString(), session_options(threads=1), providers=providers)
