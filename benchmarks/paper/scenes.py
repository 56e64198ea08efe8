"""Images to be segmented, made here: digits and drawn shapes over a textured background, 48 x 48 pixels.

Classes: 0 background, 1 digit (MNIST's where given, else a drawn stroke), 2 ball, a disc with light from one
side, 3 rectangle.
A scene has one to three objects; later ones cover earlier ones. Edges are soft, contrast is often low and
pixels are noisy, so that some of them cannot be told. A strange scene has one more object, labelled UNSEEN:

    shape      a star, filled as all objects are
    texture    a disc or a rectangle with stripes, which nothing in the training scenes has
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter, rotate, zoom

SIZE = 48
CLASSES = ("background", "digit", "ball", "rectangle")
STRANGE = ("shape", "texture")
UNSEEN = 255
NOISE = 0.04

_DOWN, _ACROSS = np.mgrid[:SIZE, :SIZE].astype(np.float64)


@dataclass(frozen=True)
class Scenes:
    """Images and, for each pixel, its class."""

    images: np.ndarray  # (n, 1, SIZE, SIZE) float32
    labels: np.ndarray  # (n, SIZE, SIZE) uint8

    def __len__(self) -> int:
        return len(self.images)


def digits(folder: Path, part: str) -> np.ndarray | None:
    """MNIST's images of a part, "train" or "test", in 0 … 1; None where there are none."""
    path = folder / "mnist.npz"
    if not path.exists():
        return None
    with np.load(path) as file:
        return file[f"x_{part}"].reshape(-1, 28, 28)[:5000].astype(np.float64) / 255


def make(count: int, seed: int, known: np.ndarray | None, strange: str | None = None) -> Scenes:
    """Scenes that depend on the arguments alone; `known` are images of digits."""
    generator = np.random.default_rng(seed)
    images = np.empty((count, 1, SIZE, SIZE), np.float32)
    labels = np.empty((count, SIZE, SIZE), np.uint8)
    for row in range(count):
        images[row, 0], labels[row] = _scene(generator, known, strange)
    return Scenes(images, labels)


def _scene(
    generator: np.random.Generator, known: np.ndarray | None, strange: str | None
) -> tuple[np.ndarray, np.ndarray]:
    level = generator.uniform(0.3, 0.7)
    image = level + 0.05 * _texture(generator, generator.uniform(1.5, 4))
    label = np.zeros((SIZE, SIZE), np.uint8)
    for _ in range(generator.integers(1, 4)):
        kind = int(generator.integers(1, len(CLASSES)))
        cover = _digit(generator, known) if kind == 1 else _drawn(generator, CLASSES[kind])
        fill = _fill(generator, level)
        if CLASSES[kind] == "ball":
            fill = fill + 0.15 * _tilt(generator, cover)
        image = image + cover * (fill - image)
        label[cover > 0.5] = kind
    if strange is not None:
        kind = "star" if strange == "shape" else str(generator.choice(["ball", "rectangle"]))
        cover, fill = _drawn(generator, kind), _fill(generator, level)
        if strange == "texture":
            fill = fill + 0.25 * np.sign(np.sin(_turned(generator)[0] * np.pi / 2))
        image = image + cover * (fill - image)
        label[cover > 0.5] = UNSEEN
    image = image + NOISE * generator.standard_normal(image.shape)
    return image.clip(0, 1), label


def _fill(generator: np.random.Generator, level: float) -> np.ndarray:
    """What an object is painted with: lighter or darker than the background, a little uneven."""
    contrast = generator.choice([-1, 1]) * generator.uniform(0.2, 0.45)
    return level + contrast + 0.03 * _texture(generator, 2)


def _texture(generator: np.random.Generator, width: float) -> np.ndarray:
    """Smooth noise of unit variance."""
    noise = gaussian_filter(generator.standard_normal((SIZE, SIZE)), width, mode="wrap")
    return noise / noise.std()


def _turned(generator: np.random.Generator, margin: float = SIZE / 2) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of all pixels from a random place, at least a margin from the rim, and by a random angle."""
    down, across = generator.uniform(margin, SIZE - margin, 2)
    angle = generator.uniform(0, 2 * np.pi)
    y, x = _DOWN - down, _ACROSS - across
    return np.cos(angle) * y + np.sin(angle) * x, np.cos(angle) * x - np.sin(angle) * y


def _drawn(generator: np.random.Generator, kind: str) -> np.ndarray:
    """How far each pixel is covered, 0 … 1, by a shape at a random place, turned, with a soft edge."""
    y, x = _turned(generator, margin=8)
    size, softness = generator.uniform(6, 10), generator.uniform(0.3, 1.2)
    if kind == "ball":
        outside = np.hypot(x, y) - size
    elif kind == "rectangle":
        outside = np.maximum(np.abs(x) - size, np.abs(y) - size * generator.uniform(0.6, 1))
    else:  # a star of five rays
        outside = np.hypot(x, y) - size * (1 + 0.5 * np.cos(5 * np.arctan2(y, x)))
    return 1 / (1 + np.exp(np.minimum(outside / softness, 50)))


def _tilt(generator: np.random.Generator, cover: np.ndarray) -> np.ndarray:
    """A slope in a random direction, from about -1 to 1 across what is covered."""
    angle = generator.uniform(0, 2 * np.pi)
    along = np.cos(angle) * _DOWN + np.sin(angle) * _ACROSS
    inside = cover > 0.5
    return (along - along[inside].mean()) / np.ptp(along[inside]) * 2


def _digit(generator: np.random.Generator, known: np.ndarray | None) -> np.ndarray:
    """How far each pixel is covered by a digit at a random place, or by a stroke where there are no digits."""
    if known is None:
        y, x = _turned(generator, margin=10)
        bend = generator.uniform(0.05, 0.12)
        outside = np.maximum(np.abs(y - bend * x * x) - 1.5, np.abs(x) - generator.uniform(7, 10))
        return 1 / (1 + np.exp(np.minimum(outside / 0.5, 50)))
    digit = rotate(known[generator.integers(len(known))], generator.uniform(-20, 20), reshape=False, order=1)
    digit = zoom(digit, generator.uniform(0.8, 1.2), order=1).clip(0, 1)
    cover = np.zeros((SIZE, SIZE))
    side = len(digit)
    down, across = generator.integers(0, SIZE - side + 1, 2)
    cover[down : down + side, across : across + side] = digit
    return cover
