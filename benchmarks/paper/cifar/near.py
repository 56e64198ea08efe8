"""Strange images that are near: networks trained without two classes, and the test images of those two.

mnist, fashion_mnist    784 → 200 → 200 → 8 with tanh (`backbones.py`), trained in numpy
cifar10                 ResNet-20 (`near_training.py`), trained by torch where its weights are not in the cache

acc                     of the network on the test images of the classes that it knows
unseen, blended         AUROC of a row's score for those against the test images of the other two classes, and
                        against equal mixtures of two test images of different classes that it knows
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import packages
from backbones import as_onnx, images, train_classifier
from lines import Lines, machine, say
from measuring import Answer, auroc

from cifar.images import Cifar, cifar10, normalised
from cifar.nets import resnet
from cifar.rows import OURS, ROWS
from cifar.task import Task
from gapa_onnx.measure.evaluation import metrics

KEY = ("data", "row")
#: 4 resembles 9 and 7 resembles 1; a shirt resembles a T-shirt, a boot a sneaker; an automobile a truck, a cat a dog.
LEFT_OUT = {"mnist": (4, 7), "fashion_mnist": (6, 9), "cifar10": (1, 3)}
SHOWN = {
    "MAP": "source entropy",
    "kNN normalised": "kNN normalised",
    OURS: OURS,
}  #: rows, and what they are called
EPOCHS = 12  #: of the small networks


def table(lines: Lines, options: argparse.Namespace, cache: Path) -> None:
    """A line per data set and row; what is not at hand is skipped with a reason."""
    for name in LEFT_OUT:
        rows = [
            row
            for row in ROWS
            if row.name in SHOWN and any(w.lower() in SHOWN[row.name].lower() for w in options.rows)
        ]
        wanted = [row for row in rows if options.fresh or not lines.has(name, SHOWN[row.name])]
        if not wanted or (options.quick and name != "mnist"):
            continue
        try:
            task = _task(name, options, cache)
        except packages.Missing as reason:
            say(f"{name} without two classes is skipped: {reason}")
            continue
        for row in wanted:
            say(f"{name} without {LEFT_OUT[name]}: {SHOWN[row.name]}")
            figures = measured(row.answers(row.fit(task), task), task)
            about = {"left_out": " ".join(map(str, LEFT_OUT[name])), "rows": len(task.test)}
            lines.add({"data": name, "row": SHOWN[row.name], **about, **figures, **machine()})


def measured(answers: dict[str, Answer], task: Task) -> dict[str, Any]:
    """By the score, or by the entropy where there is none."""
    scores = {
        name: metrics.entropy_rows(answer.probs) if answer.score is None else answer.score
        for name, answer in answers.items()
    }
    found = {name: round(auroc(scores["test"], scores[name]), 5) for name in task.outside}
    return {"acc": round(float((answers["test"].probs.argmax(axis=1) == task.labels).mean()), 5), **found}


def _task(name: str, options: argparse.Namespace, cache: Path) -> Task:
    return _resnet(options, cache) if name == "cifar10" else _small(name, options, cache)


# ------------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class Parts:
    """A data set with two classes taken out of it."""

    known: Cifar  #: labels are places among the classes that remain
    unseen: np.ndarray  #: test images of the two

    @classmethod
    def of(cls, data: Cifar, left_out: tuple[int, ...]) -> Parts:
        return cls(data.only(kept_classes(left_out)), data.x_test[np.isin(data.y_test, left_out)])

    @property
    def blended(self) -> np.ndarray:
        return blends(self.known.x_test, self.known.y_test)


def kept_classes(left_out: tuple[int, ...], classes: int = 10) -> np.ndarray:
    """The classes that remain; output i of a network is the i-th of them."""
    return np.array([c for c in range(classes) if c not in left_out])


def blends(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Equal mixtures of each image with the one half the set away, where that is of another class."""
    other = np.roll(np.arange(len(x)), len(x) // 2)
    rows = np.flatnonzero(labels != labels[other])
    mixed = (x[rows].astype(np.float32) + x[other[rows]]) / 2
    return mixed.astype(x.dtype)


# ---------------------------------------------------------------------- the networks


def _small(name: str, options: argparse.Namespace, cache: Path) -> Task:
    if not (options.data / f"{name}.npz").exists():
        raise packages.Missing(f"there is no {name}.npz in {options.data}")
    arrays = images(name, options.data)
    most = 4_000 if options.quick else None
    pieces = (arrays[key][:most] for key in ("x_train", "y_train", "x_test", "y_test"))
    parts = Parts.of(Cifar(*pieces), LEFT_OUT[name])
    path = cache / f"near_{name}.onnx"
    if not path.exists():
        say(f"training the {name} classifier without {LEFT_OUT[name]}")
        known = parts.known
        weights = train_classifier(known.x_train, known.y_train, epochs=3 if options.quick else EPOCHS)
        onnx.save(as_onnx(weights), path)
    return Task(
        name=path.stem,
        path=path,
        x_train=parts.known.x_train,
        y_train=parts.known.y_train,
        test=parts.known.x_test,
        labels=parts.known.y_test,
        outside={"unseen": parts.unseen, "blended": parts.blended},
        features="h2",
        last_layer=("weight3", "bias3"),
        quick=options.quick,
    )


def _resnet(options: argparse.Namespace, cache: Path) -> Task:
    parts = Parts.of(cifar10(options.cache), LEFT_OUT["cifar10"])
    known, path = parts.known, cache / "near_resnet20.onnx"
    x_train = normalised(known.x_train)
    onnx.save(resnet(_weights(cache / "near_resnet20.npz", x_train, known.y_train)), path)
    return Task(
        name=path.stem,
        path=path,
        x_train=x_train,
        y_train=known.y_train,
        test=normalised(known.x_test),
        labels=known.y_test,
        outside={"unseen": normalised(parts.unseen), "blended": normalised(parts.blended)},
    )


def _weights(path: Path, x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """From the cache, or trained and kept there, with a note of the classes that are left out."""
    if not path.exists():
        try:
            import torch
        except ImportError:
            raise packages.Missing(f"there is no {path}, and no torch to train it") from None
        from cifar import near_training

        torch.set_num_threads(1)
        say("training a ResNet-20 without two classes, about 20 minutes")
        net = near_training.train(
            torch.from_numpy(x), torch.from_numpy(y), epochs=near_training.EPOCHS, say=say
        )
        np.savez(path, **near_training.weights(net))
        note = {"left_out": LEFT_OUT["cifar10"], "classes": kept_classes(LEFT_OUT["cifar10"]).tolist()}
        path.with_suffix(".json").write_text(json.dumps(note) + "\n")
    with np.load(path) as file:
        return dict(file)
