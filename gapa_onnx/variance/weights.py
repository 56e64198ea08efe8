"""The weights of a layer as numbers, some rows or columns at a time, however the model stores them.

    initializer, Constant     as it is                    Transpose     of what is read in turn
    DequantizeLinear          (q - z) s                   Cast, Identity
    MatMulNBits               2, 4 or 8 bits, a scale and a zero point for each block

A weight is never unfolded as a whole: a vocabulary of 4-bit rows would be eight times its size in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.arrays import Array
from gapa_onnx.model.constants import numbers_of
from gapa_onnx.model.dtypes import is_float

BLOCK = 1 << 20  # numbers that are held at a time, in float64

Part = Callable[[int, int, int], Array]
"""(axis, start, end) -> these elements of an axis and all of the others, in float64."""


@dataclass(frozen=True)
class Weights:
    """A constant matrix that is read in parts; rows are its axis 0."""

    shape: tuple[int, int]
    part: Part

    @property
    def turned(self) -> Weights:
        rows, columns = self.shape
        return Weights((columns, rows), lambda axis, start, end: self.part(1 - axis, start, end).T)

    def squares_times(self, vector: Array) -> Array:
        """W² p in float64, for a vector p as long as a row."""
        rows, columns = self.shape
        step = max(1, BLOCK // max(columns, 1))
        parts = [self.part(0, start, min(start + step, rows)) ** 2 @ vector for start in range(0, rows, step)]
        return np.concatenate(parts) if parts else np.zeros(0)


def read_weights(tensor: gs.Tensor) -> Weights | None:
    """A matrix that follows from constants alone; None for what is none, or comes about in another way."""
    shape, part = tensor.shape, _part(tensor)
    if part is None or shape is None or len(shape) != 2 or not all(isinstance(size, int) for size in shape):
        return None
    return Weights((int(shape[0]), int(shape[1])), part)


def _part(tensor: gs.Tensor) -> Part | None:
    array = numbers_of(tensor)
    if array is not None:
        return lambda axis, start, end: _cut(array, axis, start, end).astype(np.float64)
    node = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    if node is None or node.domain not in (None, "", "ai.onnx"):
        return None
    if node.op == "Identity" or (node.op == "Cast" and is_float(tensor.dtype)):
        return _part(node.inputs[0])
    if node.op == "DequantizeLinear":
        return _dequantised(node)
    inner = _part(node.inputs[0]) if node.op == "Transpose" else None
    if inner is None:
        return None
    perm = node.attrs.get("perm") or range(len(tensor.shape))[::-1]
    return lambda axis, start, end: inner(perm[axis], start, end).transpose(perm)


def _cut(array: Array, axis: int, start: int, end: int) -> Array:
    return array[(slice(None),) * axis + (slice(start, end),)]


def _dequantised(node: gs.Node) -> Part | None:
    """(q - z) s, with one scale, one for each index of an axis, or one for each block of it."""
    steps, scale = _part(node.inputs[0]), numbers_of(node.inputs[1])
    given = len(node.inputs) > 2 and bool(node.inputs[2].name)
    zero = numbers_of(node.inputs[2]) if given else np.zeros(1)
    shape, block = node.inputs[0].shape, int(node.attrs.get("block_size", 0))
    if steps is None or scale is None or zero is None or shape is None:
        return None
    along = int(node.attrs.get("axis", 1)) % len(shape)

    def spread(numbers: Array, axis: int, start: int, end: int) -> Array:
        numbers = np.asarray(numbers).astype(np.float64)
        if numbers.size == 1:
            return numbers.reshape(())
        if not block:
            numbers = numbers.reshape([-1 if i == along else 1 for i in range(len(shape))])
            return _cut(numbers, axis, start, end) if axis == along else numbers
        if axis == along:
            return np.take(numbers, np.arange(start, end) // block, axis=along)
        return np.take(_cut(numbers, axis, start, end), np.arange(shape[along]) // block, axis=along)

    return lambda axis, start, end: (
        (steps(axis, start, end) - spread(zero, axis, start, end)) * spread(scale, axis, start, end)
    )


# ------------------------------------------------------------------------------- few bits


def read_packed(node: gs.Node) -> Weights | None:
    """The weights (N, K) of a MatMulNBits; None where they are no constants, or in an order of their own."""
    packed, scales = numbers_of(node.inputs[1]), numbers_of(node.inputs[2])
    given = len(node.inputs) > 3 and bool(node.inputs[3].name)
    zeros = numbers_of(node.inputs[3]) if given else None
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs["block_size"])
    width, rows = int(node.attrs["K"]), int(node.attrs["N"])
    if packed is None or scales is None or (given and zeros is None):
        return None
    blocks = math.ceil(width / block)

    def some(start: int, end: int) -> Array:
        steps = unpacked(packed.reshape(rows, -1)[start:end], bits)[:, : blocks * block]
        if zeros is None:
            zero = np.full((end - start, blocks), 2.0 ** (bits - 1))
        elif zeros.dtype == np.uint8:  # packed as the weights are, each row by itself
            zero = unpacked(zeros.reshape(rows, -1)[start:end], bits)[:, :blocks]
        else:
            zero = zeros.reshape(rows, blocks)[start:end]
        scale = scales.reshape(rows, blocks)[start:end].astype(np.float64)
        grouped = steps.reshape(-1, blocks, block) - zero.astype(np.float64)[..., None]
        return (grouped * scale[..., None]).reshape(len(steps), -1)[:, :width]

    def part(axis: int, start: int, end: int) -> Array:
        return some(start, end) if axis == 0 else some(0, rows)[:, start:end]

    return Weights((rows, width), part)


def unpacked(packed: Array, bits: int) -> Array:
    """Bytes (n, m) of several numbers each, the first in the lowest bits, as float64 (n, m · 8 / bits)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    found: Array = numbers.reshape(len(packed), -1).astype(np.float64)
    return found
