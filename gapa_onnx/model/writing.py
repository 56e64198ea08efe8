"""Writing files: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx

from gapa_onnx.errors import UserError
from gapa_onnx.model.protos import is_large, save_with_external_data


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model atomically: the same bytes for the same model, external data beyond 2 GB."""
    if not is_large(model):
        with replacing(path) as temporary:
            temporary.write_bytes(model.SerializeToString(deterministic=True))
        return
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        staged = Path(folder, path.name)
        data = save_with_external_data(model, staged)
        for file in (data, staged):  # the model comes last: it never stands there without its data
            os.replace(file, path.parent / file.name)


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
