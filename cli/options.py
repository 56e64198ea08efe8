"""Options that commands share, each with its help, and how their text is read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapa_onnx.cli.flags import as_flags, flag
from gapa_onnx.errors import UserError
from gapa_onnx.settings import GAUSSIAN_PROCESS, HEADS, PAPER, Settings, choices

if TYPE_CHECKING:
    from gapa_onnx.data import ImageOptions

_DEFAULTS = Settings()
_DATA_FORMS = "a folder (.npy, .npz, .pb, images), one .npy, .npz, .csv or .parquet, or loader.py:function"
_IMAGES = "Images"

# ------------------------------------------------------------------ files and data

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="The ONNX file.", show_default=False)]
Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="The original ONNX file.", show_default=False)]
Converted = Annotated[Path, typer.Argument(metavar="OUT", help="The converted file.", show_default=False)]
Calib = Annotated[
    str,
    typer.Option(
        "--calib", metavar="PATH", help=f"Data like those of the training: {_DATA_FORMS}.", show_default=False
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data", metavar="PATH", help=f"What to feed the model: {_DATA_FORMS}.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="N",
        help="Rows per run of the model; as many as fit well into memory unless given.",
        min=1,
        show_default=False,
    ),
]

ImageMean = Annotated[
    str | None,
    typer.Option(
        "--image-mean",
        metavar="M,…",
        help="Subtract from pixels in 0 … 1, one or per channel.",
        rich_help_panel=_IMAGES,
    ),
]
ImageStd = Annotated[
    str | None,
    typer.Option(
        "--image-std", metavar="S,…", help="Then divide by, one or per channel.", rich_help_panel=_IMAGES
    ),
]

# ---------------------------------------------------------------------- conversion

Paper = Annotated[
    bool,
    typer.Option(
        "--paper",
        help=f"Read the open choices as the paper does: {' '.join(map(flag, PAPER, PAPER.values()))}.",
        rich_help_panel=GAUSSIAN_PROCESS,
    ),
]
Targets = Annotated[
    Path | None,
    typer.Option(
        "--targets",
        metavar="FILE",
        help="True values of the calibration rows (.npy, .npz, .csv): a noise head is trained on them.",
        rich_help_panel=HEADS,
        show_default=False,
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="R",
        help="At most so many times the model's own time, measured here: solver, M and K give way until it is kept.",
        rich_help_panel=GAUSSIAN_PROCESS,
        show_default=False,
    ),
]
AllowUncovered = Annotated[
    bool,
    typer.Option(
        "--allow-uncovered",
        help="Pass also where part of an output varies with the data and has no variance; the part is told.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; write nothing.")]

Command = Callable[..., int]


def settings_options(*names: str) -> Callable[[Command], Command]:
    """A decorator for a command with a parameter `settings`: in its place the command line takes one option
    for each of the settings named, or for all of them, and the command is given one `Settings`."""

    def with_options(command: Command) -> Command:
        declared = inspect.signature(command, eval_str=True)
        parameters = [
            option
            for name, parameter in declared.parameters.items()
            for option in (map(_option, names or choices()) if name == "settings" else [parameter])
        ]

        @functools.wraps(command)
        def take_options(**given: Any) -> int:
            chosen = {name: given.pop(name) for name in names or choices()}
            return command(**given, settings=Settings(**chosen))

        # What typer reads: the signature, and in older versions the annotations too.
        signature = declared.replace(parameters=parameters)
        vars(take_options)["__signature__"] = signature
        take_options.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return take_options

    return with_options


def _option(name: str) -> inspect.Parameter:
    """The option of one setting, as its declaration has it."""
    choice, default = choices()[name], getattr(_DEFAULTS, name)
    option = typer.Option(
        flag(name),
        metavar=choice.metavar,
        help=as_flags(choice.help),
        rich_help_panel=choice.group,
        show_default=default is not None,
    )
    kind = choice.text if default is not None else choice.text | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def image_options(mean: str | None, std: str | None) -> ImageOptions:
    """`0.5` or `0.485,0.456,0.406`, as numbers."""
    from gapa_onnx.data import ImageOptions

    options = ImageOptions(_numbers("--image-mean", mean), _numbers("--image-std", std))
    if options.std is not None and min(options.std) <= 0:
        raise UserError(f"--image-std is {std}; pixels are divided by it", "give positive numbers")
    return options


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(
            f"{option} {text!r} is not a list of numbers", "for example 0.485,0.456,0.406"
        ) from error
