"""What an output is for: its task, and how a head reads it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gapa_onnx.plan.detection import Detector
from gapa_onnx.plan.logits import Derived


class Task(str, enum.Enum):
    CLASSIFICATION = "classification"  #: one of the classes along an axis, per row or per position
    MULTILABEL = "multilabel"  #: yes or no for each label; with one label a binary classification
    REGRESSION = "regression"
    SEGMENTATION = "segmentation"  #: classification per pixel; link sigmoid: yes or no per channel
    TOKENS = "tokens"  #: classification over a vocabulary, per position
    DETECTION = "detection"  #: boxes and classes of candidates, see `detection`
    NONE = "none"  #: a variance and no more


@dataclass(frozen=True)
class Head:
    """What an output is for."""

    output: str  #: the graph's output
    task: Task
    logits: str  #: the tensor that the head reads: the output, or what its last Softmax or Sigmoid takes
    link: str  #: "softmax", "sigmoid" or "identity"
    axis: int | None  #: of the classes, counted from 0; None without classes
    rank: int | None  #: of the output; the logits have its shape
    reason: str  #: a sentence for people
    mask: str | None = None  #: what tells padding among the output's positions, see `variance.masks`
    lengths: str | None = None  #: the mask that tells how long an input is, where it has one score
    numbers: str = ""  #: the tensor that holds the output's numbers, where the output is a list of maps
    derived: Derived | None = field(default=None, compare=False)  #: of logits from the tensor that is read

    detector: Detector | None = None  #: where candidates have their boxes and classes

    @property
    def tensor(self) -> str:
        """The tensor that holds the output's numbers."""
        return self.numbers or self.output
