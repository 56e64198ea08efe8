"""What a folder can be made for. A stack is a line in `STACKS` and a module that says what is in its folder."""

from __future__ import annotations

import importlib
import itertools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from gapa_onnx.errors import UserError

if TYPE_CHECKING:
    from gapa_onnx.packaging.converted import ConvertedFile
    from gapa_onnx.packaging.folder import File

    #: What is in the folder of a stack: of a converted file, the folder that what belongs to it lies in, and the stack.
    Contents = Callable[[ConvertedFile, Path, str], Sequence[File]]


@dataclass(frozen=True)
class Stack:
    """Something that runs models in folders of its own form."""

    what: str
    module: str = "serving"  #: in this room; its `contents` are the `Contents`


STACKS: Mapping[str, Stack] = MappingProxyType(
    {
        "triton": Stack("Triton Inference Server"),
        "kserve": Stack("KServe"),
        "mlserver": Stack("MLServer"),
        "ray": Stack("Ray Serve"),
        "bentoml": Stack("BentoML"),
        "cpp": Stack("a program in C++"),
        "genai": Stack("onnxruntime-genai, which generates text with decoders", "genai"),
    }
)


@dataclass(frozen=True)
class Package:
    """A folder that was written."""

    folder: Path
    stack: str
    files: Mapping[str, str]  #: what each file is
    next: str  #: commands that start what is in it


def package(
    file: str | os.PathLike[str],
    stack: str,
    out: str | os.PathLike[str],
    *,
    beside: str | os.PathLike[str] | None = None,
) -> Package:
    """Write a folder that a stack runs as it is.

    Args:
        file: a converted file.
        stack: what the folder is for, one of `STACKS`.
        out: the folder, which must not be there yet, or be empty. It is written whole or not at all.
        beside: the folder with what belongs to the source model, such as a configuration and a tokenizer; that of
            `file` unless given.
    """
    if stack not in STACKS:
        raise UserError(f"there is no package for {stack!r}", f"choose one of {', '.join(STACKS)}")
    from gapa_onnx.packaging.converted import converted_file
    from gapa_onnx.packaging.folder import require_new, write_folder

    path, folder = Path(file), Path(out)
    require_new(folder)
    module = importlib.import_module(f"gapa_onnx.packaging.{STACKS[stack].module}")
    files = module.contents(converted_file(path), path.parent if beside is None else Path(beside), stack)
    write_folder(folder, files)
    what = {entry.name: entry.what for entry in files}
    return Package(folder, stack, what, _next(folder, (folder / "README.md").read_text(encoding="utf-8")))


def _next(folder: Path, readme: str) -> str:
    """The first commands of a README: those before one that has a comment, or that asks what has been started."""
    commands = [line.strip() for line in readme.splitlines() if line.startswith("    ")]
    first = itertools.takewhile(lambda line: "  #" not in line and "client.py" not in line, commands)
    return " && ".join([f"cd {shlex.quote(str(folder))}", *first])
