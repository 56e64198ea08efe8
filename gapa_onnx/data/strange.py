"""Strange inputs made of ordinary ones: what a place should find strange, where nobody has given examples.

    images      blurred; blended with another; with noise; their quarters in another order
    sequences   reversed in time; blended; with noise
    vectors     blended; each column from another row; with noise
    tokens      in another order; from anywhere in the vocabulary

Each kind is a function of rows of the data and of a seed, so that the same data give the same inputs. Inputs that say
which positions count, and words, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from gapa_onnx.arrays import Array

NOISE = 0.5  # of added noise, in standard deviations of the numbers that it is added to
BLUR = 1 / 16  # of the width of an image that is averaged over, on either side
MOST_CHANNELS = 4  # of an image

Change = Callable[[Array, np.random.Generator], Array]


def strange_batches(batch: Mapping[str, Array], seed: int) -> Iterator[tuple[str, dict[str, Array]]]:
    """The strange versions of a batch by kind; inputs of one kind are changed together."""
    rows = max((len(array) for array in batch.values() if array.ndim), default=0)
    changes = {
        name: _changes(name, array) for name, array in batch.items() if array.ndim and len(array) == rows
    }
    for kind in dict.fromkeys(kind for found in changes.values() for kind in found):
        made = dict(batch)
        for name, found in changes.items():
            if kind in found:
                changed = found[kind](batch[name], np.random.default_rng(seed))
                made[name] = np.ascontiguousarray(changed, batch[name].dtype)
        yield kind, made


def _changes(name: str, array: Array) -> dict[str, Change]:
    if array.dtype.kind == "f" or array.dtype == np.uint8:
        if array.ndim == 4 and _channel_axis(array) is not None:
            return {"blurred": _blurred, "blended": _blended, "noisy": _noisy, "swapped": _swapped}
        if array.ndim >= 3:
            return {"reversed": _reversed, "blended": _blended, "noisy": _noisy}
        return {"blended": _blended, "mixed": _mixed, "noisy": _noisy} if array.ndim == 2 else {}
    tokens = array.dtype in (np.int32, np.int64) and array.ndim == 2 and np.ptp(array) > 1
    return {"shuffled": _shuffled, "foreign": _foreign} if tokens and "mask" not in name.lower() else {}


def _channel_axis(array: Array) -> int | None:
    """1 or 3, where an array holds images; None where it does not."""
    return next(
        (axis for axis in (1, 3) if array.shape[axis] <= MOST_CHANNELS < min(_places(array, axis))), None
    )


def _places(array: Array, channels: int) -> tuple[int, ...]:
    """Height and width."""
    return tuple(size for axis, size in enumerate(array.shape) if axis not in (0, channels))


def _as_floats(array: Array) -> Array:
    return array.astype(np.float32)


def _within(array: Array, like: Array) -> Array:
    """Numbers in the range of those that they are made from."""
    return np.clip(array, like.min(), like.max()) if like.size else array


def _blended(array: Array, generator: np.random.Generator) -> Array:
    """The mean of each row and another one."""
    return (_as_floats(array) + _as_floats(np.roll(array, 1, axis=0))) / 2


def _noisy(array: Array, generator: np.random.Generator) -> Array:
    """With noise; of a vector each column has its own, for a column may be in any unit."""
    numbers = _as_floats(array)
    spread = numbers.std(axis=0) if array.ndim == 2 else numbers.std()
    noisy = numbers + NOISE * spread * generator.standard_normal(array.shape, np.float32)
    return _within(noisy, numbers) if array.dtype == np.uint8 else noisy


def _mixed(array: Array, generator: np.random.Generator) -> Array:
    """Each column from rows in another order: what columns have to do with each other is lost."""
    return np.stack([column[generator.permutation(len(column))] for column in array.T], axis=1)


def _reversed(array: Array, generator: np.random.Generator) -> Array:
    return array[:, ::-1]


def _blurred(array: Array, generator: np.random.Generator) -> Array:
    """The mean over a square around each pixel."""
    channels = _channel_axis(array)
    assert channels is not None
    numbers = _as_floats(array)
    for axis in range(1, 4):
        if axis != channels:
            numbers = _means(numbers, axis, max(1, round(BLUR * array.shape[axis])))
    return numbers


def _means(array: Array, axis: int, reach: int) -> Array:
    """The mean over so many places to either side, edges repeated."""
    wide = [(0, 0)] * array.ndim
    wide[axis] = (reach + 1, reach)
    sums = np.cumsum(np.pad(array, wide, mode="edge"), axis=axis, dtype=np.float64)
    first, last = (
        np.take(sums, np.arange(at, at + array.shape[axis]), axis=axis) for at in (0, 2 * reach + 1)
    )
    means: Array = ((last - first) / (2 * reach + 1)).astype(np.float32)
    return means


def _swapped(array: Array, generator: np.random.Generator) -> Array:
    """The four quarters of an image, each in the place of the one across."""
    channels = _channel_axis(array)
    for axis in range(1, 4):
        if axis != channels:
            array = np.roll(array, array.shape[axis] // 2, axis=axis)
    return array


def _shuffled(array: Array, generator: np.random.Generator) -> Array:
    return generator.permuted(array, axis=1)


def _foreign(array: Array, generator: np.random.Generator) -> Array:
    return generator.integers(array.min(), array.max() + 1, array.shape)
