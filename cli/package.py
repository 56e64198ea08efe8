"""`gapa-onnx package`: a converted file as a folder that a server or a runtime takes as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import print_json
from gapa_onnx.packaging.stacks import STACKS, Package

_For = Annotated[
    str,
    typer.Option(
        "--for",
        metavar="|".join(STACKS),
        help=f"What will run it: {'; '.join(f'{name} ({stack.what})' for name, stack in STACKS.items())}.",
        show_default=False,
    ),
]
_Out = Annotated[
    Path,
    typer.Option("-o", "--out", metavar="DIR", help="The folder, new or empty.", show_default=False),
]
_Beside = Annotated[
    Path | None,
    typer.Option(
        "--beside",
        metavar="DIR",
        help="The folder with what belongs to the source model, such as genai_config.json and the tokenizer; that of FILE unless given.",
        show_default=False,
    ),
]
_File = Annotated[Path, typer.Argument(metavar="FILE", help="The converted file.", show_default=False)]


def package(
    file: _File, stack: _For, out: _Out, *, beside: _Beside = None, as_json: options.Json = False
) -> int:
    """Write a folder that a server or a runtime takes as it is: model, native library, settings, a client."""
    from gapa_onnx.packaging.stacks import package as write

    made = write(file, stack, out, beside=beside)
    if as_json:
        print_json({"folder": str(out), "for": stack, "files": dict(made.files), "next": made.next})
    else:
        _show(made)
    return 0


def _show(made: Package) -> None:
    """What is in a folder that was written, and what to do with it."""
    from gapa_onnx.cli.layout import gap, lines, size_text, table

    lines(("written", str(made.folder)))
    sizes = {name: size_text((made.folder / name).stat().st_size) for name in made.files}
    table(
        "files", ("File", "#Size", "What"), [(name, sizes[name], what) for name, what in made.files.items()]
    )
    gap()
    lines(("next", made.next))
