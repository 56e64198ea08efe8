"""The networks that the defaults are measured on, each with the rows that it knows and three sets that it does not.

    mlp           784 → 200 → 200 → 10, tanh, by three recipes (`recipes.py`)   MNIST, Fashion-MNIST
    lenet         three convolutions                                            MNIST, Fashion-MNIST
    resnet        a stem and three residual blocks (`convnets.py`)              MNIST, Fashion-MNIST
    resnet20 …    He et al.'s ResNets of 20, 32, 44 and 56 layers               CIFAR-10
    lstm          two layers over the rows of an image (`sequences.py`)         MNIST
    transformer   three blocks over the rows of an image                        Fashion-MNIST
    reader        a transformer of two blocks over 32 words                     Wikipedia or the web

Of each data set there is something far, which is of another kind; equal mixtures of two test rows (blended); and test rows
with noise (noisy). For texts these are pieces of Python's standard library; a half from either class; and a quarter of
the words from anywhere in the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import convnets  # noqa: E402
import packages  # noqa: E402
import sequences  # noqa: E402
from backbones import CACHE, as_onnx, images  # noqa: E402
from cifar.images import HELD_OUT, cifar10, normalised, shared  # noqa: E402
from cifar.near import blends  # noqa: E402
from cifar.nets import resnet  # noqa: E402
from cifar.shifts import blended, noisy  # noqa: E402
from cifar.task import Task  # noqa: E402
from lines import say  # noqa: E402

OTHER = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}
NOISE = 0.25  #: standard deviation, of pixels in 0 … 1
REPLACED = 0.25  #: share of the words
SETS = ("far", "blended", "noisy")


@dataclass(frozen=True)
class Amount:
    """How much is computed, and where it is kept."""

    data: Path  #: the folder of mnist.npz, cifar/ and text/
    networks: Path = CACHE / "subjects"
    pictures: Path = packages.cache_folder("cifar")
    calibration: int = 20_000
    cifar_calibration: int = 10_000  #: of the deep networks, which take long
    test: int = 2_000
    strange: int = 1_000
    quick: bool = False  #: networks that are hardly trained


@dataclass(frozen=True)
class Subject:
    """A network by its name and data."""

    name: str
    data: str
    make: Callable[[Subject, Amount], Task]
    seen: str = (
        "none"  #: what choices were made on: itself, one like it, where witnesses lie in its graph, or none
    )

    @property
    def file(self) -> str:
        return f"{self.data}_{self.name}".replace(", ", "_").replace(" ", "_")


def last_layer(model: onnx.ModelProto) -> tuple[str, tuple[str, str]]:
    """What the Gemm before the logits reads: features, then weight and bias."""
    node = next(node for node in model.graph.node if "logits" in node.output)
    if node.op_type != "Gemm":
        raise ValueError(f"logits come from {node.op_type} and not from a linear layer")
    features, weight, bias = node.input
    return features, (weight, bias)


def _task(
    subject: Subject, path: Path, amount: Amount, x_train: np.ndarray, y_train: np.ndarray, **rest: Any
) -> Task:
    features, weights = last_layer(onnx.load(path))
    few = slice(amount.calibration)
    return Task(
        name=subject.file,
        path=path,
        x_train=x_train[few],
        y_train=y_train[few],
        features=features,
        last_layer=weights,
        **rest,
    )


# ------------------------------------------------------------------- 28 × 28 images


def _image_task(
    subject: Subject, amount: Amount, path: Path, rows: Mapping[str, np.ndarray], shape: tuple[int, ...]
) -> Task:
    def given(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).reshape(-1, *shape)

    test, labels = rows["x_test"][: amount.test], rows["y_test"][: amount.test].astype(np.int64)
    strange = {
        "far": images(OTHER[subject.data], amount.data)["x_test"],
        "blended": blends(test, labels),
        "noisy": with_noise(test),
    }
    return _task(
        subject,
        path,
        amount,
        given(rows["x_train"]),
        rows["y_train"],
        test=given(test),
        labels=labels,
        outside={name: given(x[: amount.strange]) for name, x in strange.items()},
    )


def with_noise(x: np.ndarray, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, NOISE, x.shape).astype(np.float32)
    return np.clip(x + noise, 0, 1)


def _mlp(subject: Subject, amount: Amount) -> Task:
    rows = images(subject.data, amount.data)
    path = amount.networks / f"{subject.file}.onnx"
    if not path.exists():
        say(f"training {subject.name} on {subject.data}")
        _train_mlp(subject, amount, rows, path)
    return _image_task(subject, amount, path, rows, (28 * 28,))


def _train_mlp(subject: Subject, amount: Amount, rows: Mapping[str, np.ndarray], path: Path) -> None:
    import torch
    from recipes import RECIPES
    from training import Recipe, Scale, tensors, train

    torch.set_num_threads(1)
    recipe = RECIPES[subject.name.removeprefix("mlp, ")]
    if subject.data != "mnist":
        recipe = Scale().recipes[subject.data]
    if amount.quick:
        rows, recipe = {key: x[:2_000] for key, x in rows.items()}, Recipe(1)
    net = train(*tensors(dict(rows), "train"), recipe, seed=0)
    layers = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
    onnx.save(as_onnx([(w.weight.detach().numpy().T, w.bias.detach().numpy()) for w in layers]), path)


def _convnet(subject: Subject, amount: Amount) -> Task:
    path = convnets.trained(
        subject.name, subject.data, amount.data, quick=amount.quick, cache=amount.networks
    )
    return _image_task(subject, amount, path, images(subject.data, amount.data), (1, 28, 28))


def _rows_of_images(subject: Subject, amount: Amount) -> Task:
    rows = images(subject.data, amount.data)
    path = amount.networks / f"{subject.file}.onnx"
    if not path.exists():
        say(f"training {subject.name} on the rows of {subject.data}")
        most = 1_000 if amount.quick else None
        x = rows["x_train"][:most].reshape(-1, 28, 28)
        sequences.train(subject.name, x, rows["y_train"][:most], path, epochs=1 if amount.quick else None)
    return _image_task(subject, amount, path, rows, (28, 28))


# --------------------------------------------------------------------------- CIFAR-10


def _resnet(subject: Subject, amount: Amount) -> Task:
    weights = shared(amount.data, f"{subject.name}.npz")
    data = cifar10(amount.pictures, batches=1)
    path = amount.networks / f"{subject.file}.onnx"
    onnx.save(resnet(weights), path)
    test = data.x_test[HELD_OUT : HELD_OUT + amount.test]
    few = test[: amount.strange]
    strange = {
        "far": shared(amount.data, "svhn.npz")["x"][: amount.strange],
        "blended": blended(few),
        "noisy": noisy(few),
    }
    return _task(
        subject,
        path,
        amount,
        normalised(data.x_train[: amount.cifar_calibration]),
        data.y_train,
        test=normalised(test),
        labels=data.y_test[HELD_OUT : HELD_OUT + amount.test],
        outside={name: normalised(x) for name, x in strange.items()},
    )


# ------------------------------------------------------------------------------- text


def _reader(subject: Subject, amount: Amount) -> Task:
    if not (amount.data / "text").exists():
        raise packages.Missing(f"there is no {amount.data / 'text'}")
    texts = sequences.texts(amount.data / "text")
    path = amount.networks / f"{subject.file}.onnx"
    if not path.exists():
        say("training reader on pieces of texts")
        most = 1_000 if amount.quick else None
        epochs = 1 if amount.quick else None
        sequences.train(subject.name, texts.x_train[:most], texts.y_train[:most], path, epochs=epochs)
    test, labels = texts.x_test[: amount.test], texts.y_test[: amount.test]
    outside = {
        "far": texts.code,
        "blended": halves(test, labels),
        "noisy": with_other_words(test),
    }
    return _task(
        subject,
        path,
        amount,
        texts.x_train,
        texts.y_train,
        test=test,
        labels=labels,
        outside={name: x[: amount.strange] for name, x in outside.items()},
    )


def halves(pieces: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The first half of a piece of one class and the second half of a piece of the other."""
    first, second = (pieces[labels == label] for label in (0, 1))
    count, half = min(len(first), len(second)), pieces.shape[1] // 2
    return np.concatenate([first[:count, :half], second[:count, half:]], axis=1)


def with_other_words(pieces: np.ndarray, seed: int = 0) -> np.ndarray:
    """A share of the words in place of which stands any that has a number."""
    generator = np.random.default_rng(seed)
    others = generator.integers(0, sequences.COMMON, pieces.shape)
    return np.where(generator.random(pieces.shape) < REPLACED, others, pieces)


SUBJECTS = (
    Subject("mlp, Adam", "mnist", _mlp, "like it"),
    Subject("mlp, Adam", "fashion_mnist", _mlp, "like it"),
    Subject("mlp, Adam, weight decay 1e-4", "mnist", _mlp, "like it"),
    Subject("mlp, SGD", "mnist", _mlp, "like it"),
    *(
        Subject(name, data, _convnet, "itself" if name == "lenet" else "none")
        for name in ("lenet", "resnet")
        for data in OTHER
    ),
    *(
        Subject(f"resnet{depth}", "cifar10", _resnet, "itself" if depth in (20, 44) else "none")
        for depth in (20, 32, 44, 56)
    ),
    Subject("lstm", "mnist", _rows_of_images, "itself"),
    Subject("transformer", "fashion_mnist", _rows_of_images, "its places"),
    Subject("reader", "text", _reader, "its places"),
)
