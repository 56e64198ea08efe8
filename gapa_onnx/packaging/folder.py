"""Writing a folder: whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gapa_onnx.errors import UserError
from gapa_onnx.files import new_folder


@dataclass(frozen=True)
class File:
    """A file of a folder: a copy of another, or a text."""

    name: str  #: with / between folders
    what: str  #: for whoever looks at the folder
    source: Path | str | bytes  #: what is copied, or what is in it


def require_new(folder: Path) -> None:
    """UserError unless a folder can be made there; found out before any work is done."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"cannot write {folder}: it is there and is no folder", "choose another name")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"cannot write {folder}: the folder is not empty", "choose a new one, or empty it")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise UserError(
            f"cannot write {folder}: the folder {parent} does not exist", "create it, or choose another"
        )
    if not os.access(parent, os.W_OK):
        raise UserError(f"cannot write {folder}: no permission in {parent}", "choose another place")


def write_folder(folder: Path, files: Sequence[File]) -> None:
    """Write all of the files, or nothing."""
    with new_folder(folder) as staged:
        for file in files:
            _write(staged / file.name, file.source)


def _write(path: Path, source: Path | str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(source, str):
        path.write_text(source, encoding="utf-8")
    elif isinstance(source, bytes):
        path.write_bytes(source)
    else:
        shutil.copyfile(source, path)  # not its permissions: whoever serves the folder is somebody else
