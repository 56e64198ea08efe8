"""Options that commands share, each with its help, and how their text is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gapa_onnx.errors import UserError
from gapa_onnx.settings import (
    ATTENTION,
    BRIDGES,
    COVARIANCES,
    INDEXES,
    INDUCING,
    METRICS,
    ON_UNSUPPORTED,
    POINT_FORMATS,
    SCORES,
    SOLVERS,
)

if TYPE_CHECKING:
    from gapa_onnx.data import ImageOptions

_DATA_FORMS = "a folder (.npy, .npz, .pb, images), one .npy, .npz, .csv or .parquet, or loader.py:function"
_GAUSSIAN_PROCESS = "Gaussian process"
_HEADS = "What the outputs mean"
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
    int, typer.Option("--batch-size", metavar="N", help="Rows per run of the model.", min=1)
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

Sites = Annotated[
    str,
    typer.Option(
        "--sites",
        metavar="S",
        help="auto (the input of the last layer; the first hidden vector too, where layers are fully connected), "
        "last, all, or names of nodes or tensors, "
        "separated by commas, each with an optional :rows, :positions, :pooled or :flat.",
    ),
]
OnUnsupported = Annotated[
    str,
    typer.Option(
        "--on-unsupported",
        metavar="|".join(ON_UNSUPPORTED),
        help="At an operator without a variance rule: stop, or count what leaves it as certain.",
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        "--attention",
        metavar="|".join(ATTENTION),
        help="What is uncertain where a model attends: the values, or the attention weights too.",
    ),
]
Inducing = Annotated[
    str,
    typer.Option(
        "--inducing",
        metavar="|".join(INDUCING),
        help="How inducing points are chosen from the calibration rows.",
        rich_help_panel=_GAUSSIAN_PROCESS,
    ),
]
Points = Annotated[
    str,
    typer.Option(
        "--m",
        metavar="auto|N",
        help="Inducing points per site; auto takes 50 for each neighbour, so 2500; 40 where each token or pixel is a query; down to 20 where activations are wide.",
        rich_help_panel=_GAUSSIAN_PROCESS,
    ),
]
Neighbours = Annotated[
    int, typer.Option("--k", metavar="N", help="Neighbours per query.", rich_help_panel=_GAUSSIAN_PROCESS)
]
Index = Annotated[
    str,
    typer.Option(
        "--index",
        metavar="|".join(INDEXES),
        help="How neighbours are searched; auto is exact while that is cheap.",
        rich_help_panel=_GAUSSIAN_PROCESS,
    ),
]
PointFormat = Annotated[
    str,
    typer.Option(
        "--points",
        metavar="|".join(POINT_FORMATS),
        help="How inducing points are stored: half precision or 8 bits make the file smaller; by how much that "
        "moves the variance is measured and told.",
        rich_help_panel=_GAUSSIAN_PROCESS,
    ),
]
Solver = Annotated[
    str,
    typer.Option(
        "--solver",
        metavar="|".join(SOLVERS),
        help="Neighbours of the query itself, or those of its nearest inducing point, which are prepared "
        "beforehand: faster, and never less uncertain than with all inducing points. auto prepares them if they take "
        "less than 48 MB.",
        rich_help_panel=_GAUSSIAN_PROCESS,
    ),
]
LengthScale = Annotated[
    str,
    typer.Option(
        "--length-scale",
        metavar="site|input|NUMBER",
        help="Of the kernel: the median distance at the site, that of the inputs, or a number.",
        rich_help_panel=_GAUSSIAN_PROCESS,
    ),
]
Scale = Annotated[
    str,
    typer.Option(
        "--scale",
        metavar="loo|none|NUMBER",
        help="Of the variance: from leave-one-out on the calibration rows, and --targets where given; 1, or a number.",
        rich_help_panel=_GAUSSIAN_PROCESS,
    ),
]
Metric = Annotated[
    str,
    typer.Option(
        "--metric",
        metavar="|".join(METRICS),
        help="Of distances between activations.",
        rich_help_panel=_GAUSSIAN_PROCESS,
    ),
]
Jitter = Annotated[
    float,
    typer.Option(
        "--jitter",
        metavar="NUMBER",
        help="Added to the kernel's diagonal, relative to the prior variance.",
        rich_help_panel=_GAUSSIAN_PROCESS,
    ),
]
Paper = Annotated[
    bool,
    typer.Option(
        "--paper",
        help="Read the open choices as the paper does: --length-scale input --scale none --metric euclidean.",
        rich_help_panel=_GAUSSIAN_PROCESS,
    ),
]
Task = Annotated[
    str,
    typer.Option(
        "--task",
        metavar="T",
        help="What outputs mean: auto, classification, multilabel, regression, segmentation, tokens, none, "
        "or OUTPUT=T,… for each.",
        rich_help_panel=_HEADS,
    ),
]
Covariance = Annotated[
    str,
    typer.Option(
        "--covariance",
        metavar="|".join(COVARIANCES),
        help="Of the elements of an output: variances only, or all of it as OUTPUT_cov.",
        rich_help_panel=_HEADS,
    ),
]
Bridge = Annotated[
    str,
    typer.Option(
        "--bridge",
        metavar="|".join(BRIDGES),
        help="From logits to probabilities: one factor for all classes, which never changes the most probable "
        "one, or one for each as in the paper.",
        rich_help_panel=_HEADS,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        metavar="S",
        help="Split uncertainty by S fixed random draws, as in the paper, in place of well-spread points.",
        rich_help_panel=_HEADS,
        show_default=False,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k", metavar="N", help="Logits that count where tokens are predicted.", rich_help_panel=_HEADS
    ),
]
Score = Annotated[
    str,
    typer.Option(
        "--score",
        metavar="|".join(SCORES),
        help="What the threshold is for: the mean variance, or the epistemic part of the entropy.",
        rich_help_panel=_HEADS,
    ),
]
OodQuantile = Annotated[
    float,
    typer.Option(
        "--ood-quantile",
        metavar="Q",
        help="Share of inputs like the calibration data that stay unflagged; `gapa-onnx threshold` changes it.",
        rich_help_panel=_HEADS,
    ),
]
Targets = Annotated[
    Path | None,
    typer.Option(
        "--targets",
        metavar="FILE",
        help="True values of the calibration rows (.npy, .npz, .csv): a noise head is trained on them.",
        rich_help_panel=_HEADS,
        show_default=False,
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="R",
        help="At most so many times the model's own time, measured here: solver, M and K give way until it is kept.",
        rich_help_panel=_GAUSSIAN_PROCESS,
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="The same seed gives the same bytes.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; write nothing.")]


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
