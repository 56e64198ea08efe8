"""Writing files: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx

from gapa_onnx.errors import UserError
from gapa_onnx.model import protos
from gapa_onnx.model.protos import duplicate, is_large
from gapa_onnx.model.weights import MOVED, Writer, inside, is_outside, place_of, relocated

NEVER = 1 << 62


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model atomically: the same bytes for the same model.

    Weights that lie outside it go into a second file, as all do beyond 2 GB; those that were inside the source do not.
    """
    data = path.with_name(f"{path.name}.data")
    places = [place_of(tensor) for tensor in model.graph.initializer if is_outside(tensor)]
    if (
        all(place.temporary for place in places)
        and sum(place.length for place in places) < protos.LARGEST_PROTO
    ):
        model, places = inside(model), []
    large = is_large(model)
    if not places and not large:
        with replacing(path) as temporary:
            temporary.write_bytes(model.SerializeToString(deterministic=True))
        return
    if not large and {place.file for place in places} == {os.path.realpath(data)}:  # they are there
        beside = relocated(model, {os.path.realpath(data): data.name})
        with replacing(path) as temporary:
            temporary.write_bytes(beside.SerializeToString(deterministic=True))
        return
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            staged = Path(folder, path.name)
            with open(staged.with_name(data.name), "wb") as file:
                writer = Writer(file, data.name)
                beside = duplicate(model, lambda tensor: writer.put(tensor, MOVED if large else NEVER))
            staged.write_bytes(beside.SerializeToString(deterministic=True))
            for name in (
                data.name,
                path.name,
            ):  # the model comes last: it never stands there without its data
                os.replace(Path(folder, name), path.parent / name)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "choose another place") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place if all goes well, and is gone if not."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "choose another place") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "choose another place") from error
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
