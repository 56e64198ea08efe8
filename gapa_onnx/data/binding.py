"""Which array of a bundle is which input of the model, and what its rows are.

The first axis of an array is the batch axis. An input belongs to the *batch* if its first dimension
is dynamic; in a model without any dynamic first dimension, the inputs of rank >= 2 that share the
fixed one do. Every other input (a scalar, a sampling rate of shape (1,), a state of shape (2, N, 64))
is *constant* when its array has exactly the input's shape, and goes along with every batch.

Where that is not how a model takes its inputs, a bundle is bound as a whole (`bind_whole`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gapa_onnx.arrays import Array
from gapa_onnx.data.bundle import ArrayStream, Bundle
from gapa_onnx.data.convert import convert, convertible, kind, require_convertible
from gapa_onnx.data.spec import InputSpec, fixed, matches, shape_name
from gapa_onnx.errors import UserError

#: Keys under which people keep a model's input; they decide only between arrays that fit equally well.
_USUAL_KEYS = ("x", "data", "images", "image", "input", "inputs", "features", "x_train")

_SHAPE_HINT = "samples go along the first axis, all other dimensions as the model has them"


@dataclass(frozen=True)
class Binding:
    """A bundle whose arrays fit the model's inputs."""

    rows: int
    size: int | None  #: rows per batch where the model or a constant fixes it
    streams: dict[str, tuple[InputSpec, ArrayStream, bool]]  #: bool: one row without its batch axis
    constants: dict[str, Array]

    def pieces(self, step: int) -> Iterator[dict[str, Array]]:
        """The rows, converted, in aligned pieces of `step`."""
        readers = {
            name: (stream.whole()[None] for _ in range(1)) if single else stream.read(step)
            for name, (_, stream, single) in self.streams.items()
        }
        for pieces in zip(*readers.values(), strict=True):
            yield {
                name: convert(piece, spec, stream.where)
                for piece, (name, (spec, stream, _)) in zip(pieces, self.streams.items())
            }


def bind(bundle: Bundle, inputs: Sequence[InputSpec]) -> Binding:
    """Match a bundle to the model's inputs: names first, then types, shapes and row counts."""
    size, batched = _batch_axis(inputs)
    streams, constants, rows = {}, {}, {}
    for spec, stream in choose(bundle, inputs):
        require_convertible(stream.dtype, spec, stream.where)
        outside = spec.name not in batched or spec.shape is None
        constant = _constant_shape(spec, stream) if outside else None
        if constant is not None:
            constants[spec.name] = convert(stream.whole().reshape(constant), spec, stream.where)
            continue
        single = _is_single_row(spec, stream)
        streams[spec.name] = (spec, stream, single)
        rows[spec.name] = 1 if single else stream.shape[0]
        if spec.shape and fixed(spec.shape[0]):
            size = _agreed(size, spec.shape[0], bundle)
    first_symbols = {spec.shape[0] for spec, _, _ in streams.values() if spec.shape}
    for extent in _fixed_by_constants(inputs, constants, first_symbols):
        size = _agreed(size, extent, bundle)
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"'{name}' has {count}" for name, count in rows.items())
        raise UserError(
            f"{bundle.where}: the inputs differ in rows: {counts}", "row i of every input is one sample"
        )
    return Binding(next(iter(rows.values()), 1), size, streams, constants)


def bind_whole(bundle: Bundle, inputs: Sequence[InputSpec]) -> dict[str, Array]:
    """The arrays of a bundle as the inputs take them all at once: no axis of theirs has to be that of the samples."""
    whole = {}
    for spec, stream in choose(bundle, inputs):
        require_convertible(stream.dtype, spec, stream.where)
        shape = _whole_shape(spec, stream)
        whole[spec.name] = convert(stream.whole().reshape(shape), spec, stream.where)
    return whole


def _whole_shape(spec: InputSpec, stream: ArrayStream) -> tuple[int, ...]:
    """The shape in which an input takes an array as a whole; a missing batch axis is put in front of it."""
    if spec.shape is None:
        return stream.shape
    if spec.shape == () and stream.shape == (1,):
        return ()
    for shape in (stream.shape, (1, *stream.shape)):
        if matches(shape, spec.shape):
            return shape
    raise UserError(
        f"{stream.where} has shape {shape_name(stream.shape)}, but input '{spec.name}' takes {spec}",
        _SHAPE_HINT,
    )


def _fixed_by_constants(
    inputs: Sequence[InputSpec], constants: Mapping[str, Array], batch: Container[int | str | None]
) -> Iterator[int]:
    """What constants say about the size of a batch: a state of shape (2, N, 64) beside an input (N, d) fixes N."""
    for spec in inputs:
        if spec.name in constants and spec.shape:
            for symbol, extent in zip(spec.shape, constants[spec.name].shape):
                if extent and isinstance(symbol, str) and symbol in batch:
                    yield extent


def choose(bundle: Bundle, inputs: Sequence[InputSpec]) -> list[tuple[InputSpec, ArrayStream]]:
    """The array for each input: by name, or for a single input the one array that fits."""
    missing = [spec.name for spec in inputs if spec.name not in bundle.arrays]
    if not missing:
        return [(spec, bundle.arrays[spec.name]) for spec in inputs]
    if len(inputs) > 1 or not bundle.arrays:
        raise missing_inputs(bundle.where, missing, bundle.arrays)
    (spec,), arrays = inputs, bundle.arrays
    fitting = _fitting(spec, arrays)
    if len(fitting) == 1:
        return [(spec, arrays[fitting[0]])]
    present = ", ".join(f"'{key}' {a.dtype.name} {shape_name(a.shape)}" for key, a in arrays.items())
    problem = "several arrays fit" if fitting else "no array fits"
    raise UserError(
        f"{bundle.where}: {problem} input '{spec.name}', which takes {spec}; there are {present}",
        f"name the array '{spec.name}'" if fitting else _SHAPE_HINT,
    )


def _fitting(spec: InputSpec, arrays: Mapping[str, ArrayStream]) -> list[str]:
    """The keys of the arrays that fit an input best."""
    fitting = list(arrays)
    if len(arrays) > 1:
        fitting = [key for key, stream in arrays.items() if _could_be(spec, stream)]
    narrowers: tuple[Callable[[str], bool], ...] = (
        lambda key: kind(arrays[key].dtype) == kind(spec.dtype),
        lambda key: key.lower() in _USUAL_KEYS,
    )
    for narrower in narrowers:
        if len(fitting) > 1:
            fitting = [key for key in fitting if narrower(key)] or fitting
    return fitting


def missing_inputs(where: str, missing: Sequence[str], present: Iterable[str]) -> UserError:
    """The error for inputs that the data do not have."""
    present = list(present)
    nearest = {name: difflib.get_close_matches(name, present, n=1) for name in missing}
    guesses = [f"'{close[0]}' to '{name}'" for name, close in nearest.items() if close]
    return UserError(
        f"{where} lacks the model's input{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}; "
        f"it has {', '.join(map(repr, present)) or 'nothing'}",
        f"rename {', '.join(guesses)}?" if guesses else "name the data as the model names its inputs",
    )


def _batch_axis(inputs: Sequence[InputSpec]) -> tuple[int | None, frozenset[str]]:
    """The fixed batch size, if there is one, and the inputs that certainly have a batch axis."""
    dynamic = [spec for spec in inputs if spec.shape is None or (spec.shape and not fixed(spec.shape[0]))]
    if dynamic:
        return None, frozenset(spec.name for spec in dynamic)
    first = _first_sizes(inputs, least_rank=2) or _first_sizes(inputs, least_rank=1)
    if not first:
        return None, frozenset()
    size = 1 if 1 in first.values() else next(iter(first.values()))
    return size, frozenset(name for name, own in first.items() if own == size)


def _first_sizes(inputs: Sequence[InputSpec], least_rank: int) -> dict[str, int]:
    """The fixed first dimensions of inputs of at least this rank."""
    shapes = {spec.name: spec.shape for spec in inputs if spec.shape and len(spec.shape) >= least_rank}
    return {name: shape[0] for name, shape in shapes.items() if fixed(shape[0]) and shape[0] > 0}


def _constant_shape(spec: InputSpec, stream: ArrayStream) -> tuple[int, ...] | None:
    """The shape in which an input outside the batch takes this array as a constant, or None."""
    if spec.shape is None:
        return None if stream.shape else ()
    if matches(stream.shape, spec.shape):
        return stream.shape
    if spec.shape and spec.shape[0] == 1 and matches(stream.shape, spec.shape[1:]):
        return (1, *stream.shape)
    return None


def _is_single_row(spec: InputSpec, stream: ArrayStream) -> bool:
    """Whether the array is one row rather than a stack of rows; a UserError where it is neither."""
    if spec.shape is None:
        return False
    if stream.shape and spec.shape and spec.shape[0] != 0 and matches(stream.shape[1:], spec.shape[1:]):
        return False
    if spec.shape and matches(stream.shape, spec.shape[1:]):
        return True
    raise UserError(
        f"{stream.where} has shape {shape_name(stream.shape)}, but input '{spec.name}' takes {spec}",
        _SHAPE_HINT,
    )


def _could_be(spec: InputSpec, stream: ArrayStream) -> bool:
    try:
        return convertible(stream.dtype, spec.dtype) and _is_single_row(spec, stream) is not None
    except UserError:
        return False


def _agreed(size: int | None, other: int, bundle: Bundle) -> int:
    if size is not None and size != other:
        raise UserError(
            f"{bundle.where}: the model's inputs ask for batches of {size} and of {other} rows at once",
            "give each input that is not batched exactly in the shape that the model declares",
        )
    return other
