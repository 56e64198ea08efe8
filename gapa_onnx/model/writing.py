"""Writing models: one file, or one and a second with its weights, of which the first never stands there without the other.

The name of a file of weights holds a hash of what is in it, so that new weights never take the place of old ones: as
long as the model in front is the old one, so is what it reads. What no model reads any more goes last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Collection
from pathlib import Path

import onnx

from gapa_onnx.files import Staged, final, locked, staging, sync_folder, told
from gapa_onnx.model import protos
from gapa_onnx.model.protos import duplicate, is_large
from gapa_onnx.model.weights import MOVED, PIECE, Writer, inside, is_outside, place_of, relocated

NEVER = 1 << 62
DIGITS = 16  # of the hash in the name of a file of weights


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model atomically: the same bytes for the same model.

    Weights that lie outside it go into a second file, as all do beyond 2 GB; those that were inside the source do not.
    """
    with told(path):
        _save(model, final(path))


def _save(model: onnx.ModelProto, path: Path) -> None:
    places = [place_of(tensor) for tensor in model.graph.initializer if is_outside(tensor)]
    if (
        all(place.temporary for place in places)
        and sum(place.length for place in places) < protos.LARGEST_PROTO
    ):
        model, places = inside(model), []
    large, files = is_large(model), {place.file for place in places}
    if not large and all(_is_beside(Path(file), path) for file in files):  # they are there, or there are none
        names = {file: Path(file).name for file in files}
        _put(relocated(model, names) if names else model, path, names.values())
        return
    with staging(path.parent) as data:
        with open(data.path, "wb") as file:
            writer = Writer(file, str(data.path))
            beside = duplicate(model, lambda tensor: writer.put(tensor, MOVED if large else NEVER))
        name = f"{path.name}.{_hash(data.path)[:DIGITS]}.data"
        _put(relocated(beside, {str(data.path): name}), path, [name], data)


def _put(model: onnx.ModelProto, path: Path, names: Collection[str], data: Staged | None = None) -> None:
    """Put the model in place, behind its data if they are new; `names` are the files of weights that it reads."""
    with staging(path.parent) as staged:
        staged.path.write_bytes(model.SerializeToString(deterministic=True))
        with locked(path.parent):
            if data is not None:
                data.put(path.with_name(next(iter(names))))
            staged.put(path)
            for old in path.parent.iterdir():
                if _is_ours(old.name, path) and old.name not in names:
                    with contextlib.suppress(OSError):
                        old.unlink()
            sync_folder(path.parent)


def _is_beside(file: Path, path: Path) -> bool:
    """Whether a file holds the weights of the model at a path: beside it, under its name."""
    named = file.name == f"{path.name}.data" or _is_ours(file.name, path)
    return named and os.path.realpath(file.parent) == str(path.parent)


def _is_ours(name: str, path: Path) -> bool:
    """Whether a file of this name was written here, as the weights of the model at a path."""
    return re.fullmatch(rf"{re.escape(path.name)}\.[0-9a-f]{{{DIGITS}}}\.data", name) is not None


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
