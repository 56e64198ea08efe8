"""Options that commands share, each with its help, and how their text is read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapa_onnx.cli.flags import as_flags, flag
from gapa_onnx.errors import UserError
from gapa_onnx.settings import GAUSSIAN_PROCESS, PAPER, PROMISES, Settings, choices

if TYPE_CHECKING:
    from gapa_onnx.data import ImageOptions, Preparation, TextOptions

    Prepared = Preparation
else:
    Prepared = object  # of an annotation that is only read: help is not to wait for numpy

_DEFAULTS = Settings()
_DATA_FORMS = "a folder (.npy, .npz, .pb, images, text), one .npy, .npz, .csv, .parquet, .txt (a document a line) or .jsonl, or loader.py:function, which is run"
_IMAGE_OPTIONS = {
    "mean": ("M,…", "Subtract from pixels in 0 … 1, one or per channel."),
    "std": ("S,…", "Then divide by, one or per channel."),
    "size": ("H,W", "Resize to, where the model takes any size."),
    "layout": ("first|last", "Where the channels are, if the input's shape does not tell."),
    "colors": ("rgb|bgr|grey", "What the channels are; rgb or grey by their number."),
}
_TEXT_OPTIONS: dict[str, tuple[str, str, type]] = {
    "tokenizer": ("FILE", "The model's tokenizer.json.", str),
    "seq_len": ("N", "Tokens of a sequence; as the model's input fixes it, else 96.", int),
    "tokens": ("N", "Read at most so many; convert reads 200,000 unless given, all others read all.", int),
    "text_field": ("FIELD", "Of a .jsonl, that holds the text; text unless given.", str),
    "text_rows": (
        "pieces|documents",
        "A document is cut into sequences one after another, as decoders take text, or its beginning is one row.",
        str,
    ),
}

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
CalibOrParts = Annotated[
    str | None,
    typer.Option(
        "--calib",
        metavar="PATH",
        help=f"Data like those of the training: {_DATA_FORMS}. This, or --parts.",
        show_default=False,
    ),
]
Parts = Annotated[
    str | None,
    typer.Option(
        "--parts",
        metavar="'PART*.npz'",
        help="What `gapa-onnx collect` has left of the data, all of it, in place of --calib; the parts hold all other "
        "options, but for --held-out with its --labels and --targets, and --strange.",
        show_default=False,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine", metavar="local|ray", help="Who reads --calib: this process, or workers of a Ray cluster."
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Of the Ray cluster; one that runs here, or a new one on this machine, unless given.",
        show_default=False,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="How many shards Ray reads at a time, each on one core; as many as it has cores unless given.",
        min=1,
        show_default=False,
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
        help="For regression: true values (.npy, .npz, .csv) of the --held-out rows, or of --calib where none are given; "
        "NaN for rows that the model was fitted to. They scale the variance and teach it the noise, and intervals hold them.",
        rich_help_panel=PROMISES,
        show_default=False,
    ),
]
Labels = Annotated[
    Path | None,
    typer.Option(
        "--labels",
        metavar="FILE",
        help="For classification: true classes (.npy, .npz, .csv; maps of them for segmentation) of the --held-out rows, or of --calib where none are "
        "given; -1 for rows that the model was fitted to. They calibrate the probabilities, and sets hold them. A few "
        "hundred suffice.",
        rich_help_panel=PROMISES,
        show_default=False,
    ),
]
HeldOut = Annotated[
    str | None,
    typer.Option(
        "--held-out",
        metavar="PATH",
        help="Rows that the model was not trained on: what is promised then holds exactly, not approximately.",
        rich_help_panel=PROMISES,
        show_default=False,
    ),
]
Strange = Annotated[
    str | None,
    typer.Option(
        "--strange",
        metavar="PATH",
        help="Inputs that the model is not made for, to choose --metric by, in place of some that are made of --calib.",
        rich_help_panel=GAUSSIAN_PROCESS,
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
    return _in_place_of("settings", [_option(name) for name in names or choices()], Settings)


def preparing_options(otherwise: str = ", where not as the file says") -> Callable[[Command], Command]:
    """A decorator for a command with a parameter `preparation`: in its place the command line takes options that say
    how images and text become inputs, and the command is given one `Preparation`."""
    taken = [
        *(
            _preparing(f"image_{name}", metavar, text, f"Images{otherwise}", str)
            for name, (metavar, text) in _IMAGE_OPTIONS.items()
        ),
        *(
            _preparing(name, metavar, text, f"Text{otherwise}", kind)
            for name, (metavar, text, kind) in _TEXT_OPTIONS.items()
        ),
    ]
    return _in_place_of("preparation", taken, _preparation)


def _preparing(name: str, metavar: str, text: str, panel: str, kind: type) -> inspect.Parameter:
    option = typer.Option(flag(name), metavar=metavar, help=text, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _in_place_of(
    name: str, taken: Sequence[inspect.Parameter], made: Callable[..., object]
) -> Callable[[Command], Command]:
    """A decorator that puts options in place of one parameter, which the command is given as it is made of them."""

    def with_options(command: Command) -> Command:
        declared = inspect.signature(command, eval_str=True)
        parameters = [
            option
            for parameter in declared.parameters.values()
            for option in (taken if parameter.name == name else [parameter])
        ]

        @functools.wraps(command)
        def take_options(**given: Any) -> int:
            chosen = {option.name: given.pop(option.name) for option in taken}
            return command(**given, **{name: made(**chosen)})

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


def _preparation(**given: Any) -> Prepared:
    """The options of images and of text."""
    from gapa_onnx.data import Preparation

    image = {name: given.pop(f"image_{name}") for name in _IMAGE_OPTIONS}
    return Preparation(_images(**image), _text(**given))


def _text(
    tokenizer: str | None,
    seq_len: int | None,
    tokens: int | None,
    text_field: str | None,
    text_rows: str | None,
) -> TextOptions:
    from gapa_onnx.data import TextOptions

    return TextOptions(tokenizer, seq_len, tokens, text_field, text_rows)


def _images(
    mean: str | None, std: str | None, size: str | None, layout: str | None, colors: str | None
) -> ImageOptions:
    """`0.5` or `0.485,0.456,0.406` as numbers, `224` or `224,320` as a height and a width."""
    from gapa_onnx.data import ImageOptions

    means, stds = _numbers("--image-mean", mean), _numbers("--image-std", std)
    if stds is not None and min(stds) <= 0:
        raise UserError(f"--image-std is {std}; pixels are divided by it", "give positive numbers")
    return ImageOptions(means, stds, _size(size), layout, colors)


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    sides = text.split(",")
    if len(sides) > 2 or not all(side.strip().isdecimal() and int(side) > 0 for side in sides):
        raise UserError(f"--image-size {text!r} is not a height and a width", "for example 224,224")
    return int(sides[0]), int(sides[-1])


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(
            f"{option} {text!r} is not a list of numbers", "for example 0.485,0.456,0.406"
        ) from error
