"""How a file keeps its inducing points: as they are, in half precision, or in 8 bits per coordinate.

    float16   p = float32(h)                        2 bytes per coordinate
    int8      p = float32(code) · step + least      1 byte; step and least belong to the coordinate

Points are rounded before anything is fitted to them. So what a file stores *is* its set of inducing points,
and the share s is exactly theirs. Here are the arithmetic and the nodes that repeat it, operation by operation
in float32: onnxruntime computes them once, at load, to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.variance.graph import Value, VarianceGraph

_MOST_CODE = 255
_LARGEST_HALF = float(np.finfo(np.float16).max)
_EPS = float(np.finfo(np.float32).eps)


class Codes(NamedTuple):
    """What 8 bits mean in each coordinate: float32(code) · step + least."""

    step: Array  #: (d,) float32
    least: Array  #: (d,) float32


@dataclass(frozen=True)
class Storage:
    """A format, and for int8 what its codes mean."""

    format: str = "float32"
    codes: Codes | None = None

    def encoded(self, points: Array) -> Array:
        """What the file holds for points (n, d); beyond the range of the codes the nearest of them."""
        if self.format == "float16":
            return np.clip(points, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16)
        if self.codes is not None:
            steps = (points.astype(np.float64) - self.codes.least) / self.codes.step
            return np.clip(np.rint(steps), 0, _MOST_CODE).astype(np.uint8)
        return np.asarray(points, np.float32)

    def decoded(self, stored: Array) -> Array:
        """The points (n, d) float32 that the operators see."""
        numbers: Array = stored.astype(np.float32)
        return numbers if self.codes is None else numbers * self.codes.step + self.codes.least

    def rounded(self, points: Array) -> Array:
        """The points as they come out of the file. Rounding again changes nothing."""
        return self.decoded(self.encoded(points))


def fit_storage(format: str, points: Array) -> Storage:
    """The storage of points (M, d); for int8 with the codes spread over each coordinate's range.

    A step is never so small that float32 could not tell one code from the next: 4 roundings of the largest
    number that comes up.
    """
    if format == "float16" and np.abs(points).max() > _LARGEST_HALF:
        raise UserError(
            f"an activation reaches {np.abs(points).max():.3g}, and half precision ends at {_LARGEST_HALF:.0f}",
            "use `points='int8'` or `points='float32'`",
        )
    if format != "int8":
        return Storage(format)
    least, most = points.min(axis=0), points.max(axis=0)  # (d,)
    largest = np.maximum(np.abs(least), np.abs(most)).astype(np.float64)
    step = np.maximum((most.astype(np.float64) - least) / _MOST_CODE, 4 * _EPS * largest)
    step = np.where(most > least, step, 1.0)  # a coordinate that never moves has code 0 throughout
    return Storage(format, Codes(step.astype(np.float32), least.astype(np.float32)))


def emit_points(graph: VarianceGraph, storage: Storage, points: Array, name: str) -> Value:
    """The points as the file keeps them, and behind them the nodes that decode them to `name`."""
    if storage.format == "float32":
        return graph.constant(points, name)
    stored = graph.constant(storage.encoded(points), f"{name}/{storage.format}")
    decoded = name if storage.format == "float16" else f"{name}/codes"
    to = onnx.TensorProto.FLOAT
    numbers: Value = graph.emit("Cast", stored, dtype=np.dtype(np.float32), names=[decoded], to=to)
    if storage.codes is None:
        return numbers
    step = graph.constant(storage.codes.step, f"{name}/step")
    least = graph.constant(storage.codes.least, f"{name}/least")
    scaled: Value = graph.emit("Mul", numbers, step, names=[f"{name}/scaled"])
    result: Value = graph.emit("Add", scaled, least, names=[name])
    return result


def read_points(model: onnx.ModelProto, name: str) -> Array:
    """The points that a converted file holds under `name`, decoded by numpy: (M, d) float32."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    if name in tensors:
        return onnx.numpy_helper.to_array(tensors[name])

    def held(part: str) -> Array:
        return onnx.numpy_helper.to_array(tensors[f"{name}/{part}"])

    if f"{name}/float16" in tensors:
        return Storage("float16").decoded(held("float16"))
    return Storage("int8", Codes(held("step"), held("least"))).decoded(held("int8"))
