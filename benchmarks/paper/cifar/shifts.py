"""Images that are strange to a network trained on CIFAR-10: SVHN, digits, textures, and test images changed.

Each set is uint8 (n, 32, 32, 3) and the same in every run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter, zoom

from cifar.images import SIDE, shared

ROWS = 2_000  #: of the sets that are made here
BLUR, NOISE = 2.0, 40.0  #: standard deviations, in pixels and in grey levels

Sets = dict[str, np.ndarray]


def sets(folder: Path, test: np.ndarray, rows: int = ROWS) -> Sets:
    """All sets that can be had; the digits are left out where there is no mnist.npz."""
    found = {"svhn": shared(folder, "svhn.npz")["x"]}
    if (folder / "mnist.npz").exists():
        found["digits"] = digits(folder / "mnist.npz", rows)
    test = test[:rows]
    return found | {
        "textures": textures(rows),
        "blurred": blurred(test),
        "noisy": noisy(test),
        "blended": blended(test),
    }


def digits(path: Path, rows: int) -> np.ndarray:
    """MNIST's test digits in the middle of a black square, in grey."""
    with np.load(path) as file:
        grey = file["x_test"][:rows]
    edge = (SIDE - grey.shape[1]) // 2
    grey = np.pad(grey, ((0, 0), (edge, edge), (edge, edge)))
    return np.repeat(grey[..., None], 3, axis=3).astype(np.uint8)


def textures(rows: int, seed: int = 0) -> np.ndarray:
    """Stripes, cells, clouds and checks in random colours: pictures of nothing."""
    generator = np.random.default_rng(seed)
    kinds = (_stripes, _cells, _clouds, _checks)
    return np.stack([_coloured(kinds[i % len(kinds)](generator), generator) for i in range(rows)])


def blurred(images: np.ndarray) -> np.ndarray:
    soft = gaussian_filter(images.astype(np.float32), (0, BLUR, BLUR, 0), mode="nearest")
    return np.rint(soft).astype(np.uint8)


def noisy(images: np.ndarray, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, NOISE, images.shape)
    return np.clip(np.rint(images + noise), 0, 255).astype(np.uint8)


def blended(images: np.ndarray) -> np.ndarray:
    """Each image and the one half the set away, mixed in equal parts."""
    other = np.roll(images, len(images) // 2, axis=0)
    return ((images.astype(np.uint16) + other) // 2).astype(np.uint8)


# ------------------------------------------------------- patterns: (32, 32) in 0 … 1


def _stripes(generator: np.random.Generator) -> np.ndarray:
    angle, period = generator.uniform(0, np.pi), generator.uniform(3, 16)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    along = np.cos(angle) * columns + np.sin(angle) * rows
    return 0.5 + 0.5 * np.sin(2 * np.pi * along / period + generator.uniform(0, 2 * np.pi))


def _cells(generator: np.random.Generator) -> np.ndarray:
    """The distance to the nearest of some random points."""
    points = generator.uniform(0, SIDE, (generator.integers(4, 30), 2))
    places = np.stack(np.mgrid[:SIDE, :SIDE], axis=-1)[:, :, None]
    distance = np.sqrt(((places - points) ** 2).sum(axis=-1)).min(axis=-1)
    return distance / distance.max()


def _clouds(generator: np.random.Generator) -> np.ndarray:
    """Noise at several sizes, the coarse louder than the fine."""
    height = sum(
        zoom(generator.normal(size=(size, size)), SIDE / size, order=1) / size for size in (4, 8, 16, 32)
    )
    return (height - height.min()) / np.ptp(height)


def _checks(generator: np.random.Generator) -> np.ndarray:
    width, shift = generator.integers(2, 9), generator.integers(0, 9, 2)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    return (((rows + shift[0]) // width + (columns + shift[1]) // width) % 2).astype(np.float64)


def _coloured(pattern: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """From one random colour to another as the pattern rises."""
    low, high = generator.uniform(0, 255, (2, 3))
    return np.rint(low + pattern[..., None] * (high - low)).astype(np.uint8)
