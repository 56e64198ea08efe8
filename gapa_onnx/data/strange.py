"""Strange inputs made of ordinary ones: what a place should find strange, where nobody has given examples.

    images      blurred; blended with another; with noise; their tiles in another order
    sequences   reversed in time; blended; with noise
    vectors     blended; some columns from other rows; with noise; smaller and larger
    tokens      in another order; from anywhere in the vocabulary

Each kind is a function of rows of the data and of a seed, so that the same data give the same inputs. Padding stays as
it is and has no part in what is made, and so do inputs that go along with tokens (masks, positions, caches), and words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.token_inputs import is_filled_in

MOST_CHANNELS = 4  # of an image
TILES = 4  # along either side of an image

Change = Callable[[Array, np.random.Generator], Array]


def strange_batches(
    batch: Mapping[str, Array], seed: int, valid: Array | None = None
) -> Iterator[tuple[str, dict[str, Array]]]:
    """The strange versions of a batch by kind; inputs of one kind are changed together. `valid` (N, T) says which
    positions are no padding."""
    rows = max((len(array) for array in batch.values() if array.ndim), default=0)
    changes = {
        name: {} if array.size == 0 or is_filled_in(name) else _changes(array)
        for name, array in batch.items()
        if array.ndim and len(array) == rows
    }
    for kind in dict.fromkeys(kind for found in changes.values() for kind in found):
        made = dict(batch)
        for name, found in changes.items():
            if kind in found:
                changed = _changed(batch[name], found[kind], np.random.default_rng(seed), valid)
                made[name] = np.ascontiguousarray(changed, batch[name].dtype)
        yield kind, made


def _changed(array: Array, change: Change, generator: np.random.Generator, valid: Array | None) -> Array:
    """An array changed; where it has padding, row by row without it."""
    if valid is None or valid.all() or array.shape[:2] != valid.shape:
        return change(array, generator)
    changed: Array = array.copy()
    for row, kept in enumerate(valid):
        other = array[row - 1][valid[row - 1]]
        own = array[row][kept]
        if len(own) and len(other):
            pair = np.stack(
                [np.resize(other, own.shape), own]
            )  # what is blended is blended with the row before
            changed[row][kept] = change(pair, generator)[1]
    return changed


def _changes(array: Array) -> dict[str, Change]:
    """The ways in which an input can be made strange, by what it holds."""
    noisy = {f"noise {share:g}": partial(_noisy, share=share) for share in (0.25, 0.5)}
    if array.dtype.kind == "f" or array.dtype == np.uint8:
        if array.ndim == 4 and _channel_axis(array) is not None:
            blurs = {f"blur {reach:g}": partial(_blurred, reach=reach) for reach in (1 / 32, 1 / 16)}
            return {**blurs, "blended": _blended, **noisy, "tiles": _shuffled_tiles}
        if array.ndim >= 3:
            return {"reversed": _reversed, "blended": _blended, **noisy}
        if array.ndim == 2:
            mixed = {f"mixed {share:g}": partial(_mixed, share=share) for share in (0.25, 0.5)}
            sizes = {f"times {size:g}": partial(_times, size=size) for size in (0.5, 1.5)}
            return {"blended": _blended, **mixed, "noise 0.5": noisy["noise 0.5"], **sizes}
        return {}
    tokens = array.dtype in (np.int32, np.int64) and array.ndim == 2 and np.ptp(array) > 1
    return {"shuffled": _shuffled, "foreign": _foreign} if tokens else {}


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


def _noisy(array: Array, generator: np.random.Generator, share: float) -> Array:
    """With noise of a share of the standard deviation; each column of a vector has its own, for it may be in any unit."""
    numbers = _as_floats(array)
    spread = numbers.std(axis=0) if array.ndim == 2 else numbers.std()
    noisy = numbers + share * spread * generator.standard_normal(array.shape, np.float32)
    return _within(noisy, numbers) if array.dtype == np.uint8 else noisy


def _mixed(array: Array, generator: np.random.Generator, share: float) -> Array:
    """A share of the numbers of each row from other rows: what columns have to do with each other is lost there."""
    others = np.stack([column[generator.permutation(len(column))] for column in array.T], axis=1)
    return np.where(generator.random(array.shape) < share, others, array)


def _times(array: Array, generator: np.random.Generator, size: float) -> Array:
    return _as_floats(array) * size


def _reversed(array: Array, generator: np.random.Generator) -> Array:
    return array[:, ::-1]


def _blurred(array: Array, generator: np.random.Generator, reach: float) -> Array:
    """The mean over a square around each pixel, which reaches this share of the image to either side."""
    channels = _channel_axis(array)
    assert channels is not None
    numbers = _as_floats(array)
    for axis in range(1, 4):
        if axis != channels:
            numbers = _means(numbers, axis, max(1, round(reach * array.shape[axis])))
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


def _shuffled_tiles(array: Array, generator: np.random.Generator) -> Array:
    """The tiles of an image in another order, the same for all images; what they do not cover stays."""
    rows, columns = (axis for axis in range(1, 4) if axis != _channel_axis(array))
    height, width = (array.shape[axis] // TILES for axis in (rows, columns))
    order = generator.permutation(TILES * TILES)
    changed: Array = array.copy()

    def tile(of: Array, number: int) -> Array:
        cut = [slice(None)] * 4
        for axis, size, at in ((rows, height, number // TILES), (columns, width, number % TILES)):
            cut[axis] = slice(at * size, (at + 1) * size)
        held: Array = of[tuple(cut)]
        return held

    for number, other in enumerate(order):
        tile(changed, number)[...] = tile(array, int(other))
    return changed


def _shuffled(array: Array, generator: np.random.Generator) -> Array:
    return generator.permuted(array, axis=1)


def _foreign(array: Array, generator: np.random.Generator) -> Array:
    return generator.integers(array.min(), array.max() + 1, array.shape)
