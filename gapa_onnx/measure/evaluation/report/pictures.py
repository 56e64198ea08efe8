"""Images of the data: thumbnails and maps, as data URIs for the page and as figures for files."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import partial

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from PIL import Image

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.report.drawing import COLOURS, Figure, Panel, Place, short
from gapa_onnx.measure.evaluation.report.wording import number, whole
from gapa_onnx.measure.evaluation.result import Evaluation, Example, SegmentationExample

THUMBNAIL, MAP = 96, 176  # longest side in pixels
MOST_THUMBNAILS, MOST_MAPS = 8, 6  # so that the page stays below 2 MB
UNLABELLED = 255  # the usual "ignore" label of segmentation data, as is any negative one
MAPS = ("Image", "Prediction", "Target", "Errors", "Uncertainty")

#: classes: told apart by people with any colour vision as far as can be, the first eight certainly
CLASS_COLOURS = (
    *("#332288", "#88ccee", "#44aa99", "#ddcc77", "#cc6677", "#117733", "#aa4499", "#999933"),
    *("#882255", "#6699cc", "#e69f00", "#004488", "#bbcc33", "#ee8866", "#77aadd", "#994455"),
)
RIGHT, WRONG, NOT_LABELLED = (226, 230, 236), (208, 74, 2), (128, 134, 142)


def data_uri(image: Image.Image) -> str:
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def picture(array: Array, longest: int) -> Image.Image:
    """A (h, w), (h, w, 1), (h, w, 3) or (h, w, 4) array as a grey or RGB image, made smaller if need be."""
    array = np.asarray(array)
    if array.ndim == 3:
        array = array[..., 0] if array.shape[2] < 3 else array[..., :3]
    if array.dtype != np.uint8:
        array = np.clip(np.nan_to_num(array.astype(float)), 0, 255).round().astype(np.uint8)
    return _smaller(Image.fromarray(np.ascontiguousarray(array)), longest, Image.Resampling.BOX)


def label_map(labels: Array) -> Image.Image:
    """Class indices in the colours of `CLASS_COLOURS`, unlabelled pixels grey."""
    labels = np.asarray(labels)
    indices = np.where(_ignored(labels), len(CLASS_COLOURS), labels.astype(int) % len(CLASS_COLOURS))
    return _indexed(indices, [*(_rgb(colour) for colour in CLASS_COLOURS), NOT_LABELLED])


def error_map(example: SegmentationExample) -> Image.Image:
    """Where prediction and target differ."""
    wrong = np.asarray(example.predicted) != np.asarray(example.target)
    return _indexed(np.where(_ignored(example.target), 2, wrong), [RIGHT, WRONG, NOT_LABELLED])


def uncertainty_map(example: SegmentationExample, most: float) -> Image.Image:
    """From dark (certain) to bright; `most` and above is the brightest."""
    levels = np.clip(np.nan_to_num(np.asarray(example.uncertainty, float)) / (most or 1.0), 0, 1)
    return _indexed((levels * 255).round().astype(int), [_rgb(colour) for colour in heat(256)])


def heat(count: int) -> list[str]:
    """`count` colours of the uncertainty map, certain first."""
    table = matplotlib.colormaps["inferno"](np.linspace(0, 1, count))
    return [matplotlib.colors.to_hex(colour) for colour in table]


def brightest(examples: Sequence[SegmentationExample]) -> float:
    """One scale for all maps, without the top hundredth, which would darken the rest."""
    values = np.concatenate([np.asarray(e.uncertainty, float).reshape(-1) for e in examples] or [np.zeros(1)])
    values = values[np.isfinite(values)]
    return float(np.quantile(values, 0.99)) if len(values) else 1.0


def wrong_share(example: SegmentationExample) -> float:
    """Share of labelled pixels that are wrong; NaN where none is labelled."""
    labelled = ~_ignored(example.target)
    wrong = np.asarray(example.predicted) != np.asarray(example.target)
    return float(wrong[labelled].mean()) if labelled.any() else float("nan")


def classes(examples: Sequence[SegmentationExample]) -> list[int]:
    """Every class in prediction or target."""
    found: set[int] = set()
    for example in examples:
        for labels in (np.asarray(example.predicted), np.asarray(example.target)):
            found.update(np.unique(labels[~_ignored(labels)]).astype(int).tolist())
    return sorted(found)


def class_colour(index: int) -> str:
    return CLASS_COLOURS[index % len(CLASS_COLOURS)]


def maps(example: SegmentationExample, most: float) -> list[Image.Image | None]:
    """What `MAPS` names, in that order."""
    image = None if example.image is None else picture(example.image, MAP)
    return [
        image,
        label_map(example.predicted),
        label_map(example.target),
        error_map(example),
        uncertainty_map(example, most),
    ]


def example_groups(evaluation: Evaluation) -> list[tuple[str, tuple[Example, ...]]]:
    """Most and least certain inputs of the data and of the OOD set, where there are any."""
    groups = []
    for origin in ("data", "ood"):
        for title, examples in (
            ("most certain", evaluation.most_certain),
            ("least certain", evaluation.least_certain),
        ):
            chosen = tuple(example for example in examples if (example.origin == "ood") == (origin == "ood"))
            if chosen:
                groups.append((f"{'OOD' if origin == 'ood' else 'Data'}, {title}", chosen[:MOST_THUMBNAILS]))
    return groups


def is_wrong(example: Example) -> bool:
    return example.origin != "ood" and bool(example.target) and example.predicted != example.target


def picture_figures(evaluation: Evaluation) -> list[Figure]:
    """The pictures as figures, for files."""
    found = []
    groups = example_groups(evaluation)
    if groups:
        panels = tuple(
            Panel(partial(_draw_examples, title, examples), f"{title}: {len(examples)} inputs.", 8.0, 1.85)
            for title, examples in groups
        )
        found.append(Figure("figure-examples", "Most and least certain inputs", "", panels, most_columns=1))
    shown = evaluation.segmentation[:MOST_MAPS]
    if shown:
        most = brightest(shown)
        panels = tuple(
            Panel(partial(_draw_maps, example, most), f"Maps of row {example.row}.", 8.0, 2.3)
            for example in shown
        )
        found.append(Figure("figure-segmentation", "Errors and uncertainty", "", panels, most_columns=1))
    return found


def _draw_examples(title: str, examples: Sequence[Example], place: Place) -> None:
    columns = MOST_THUMBNAILS
    axes = _canvas(place, columns, rows=-(-len(examples) // columns), row_height=1.45)
    axes.set_title(title)
    for index, example in enumerate(examples):
        x, y = index % columns, 1.45 * (index // columns)
        _lay(axes, picture(example.image, THUMBNAIL), x, y)
        words = [short(name) for name in (example.predicted, example.target) if name]
        colour = COLOURS["bad"] if is_wrong(example) else COLOURS["ink"]
        label = f"{' / '.join(words)}\n{number(example.score)}"
        axes.text(x + 0.5, y + 1.02, label, ha="center", va="top", fontsize=8, color=colour)


def _draw_maps(example: SegmentationExample, most: float, place: Place) -> None:
    axes = _canvas(place, len(MAPS), rows=1, row_height=1.15)
    axes.set_title(f"Row {whole(example.row)}")
    for x, (name, image) in enumerate(zip(MAPS, maps(example, most))):
        if image is not None:
            _lay(axes, image.convert("RGB"), x, 0)
            axes.text(x + 0.5, 1.02, name, ha="center", va="top", fontsize=8)


def _canvas(place: Place, columns: int, rows: int, row_height: float) -> Axes:
    """One set of axes for all pictures, 1 wide each: laying out one per picture takes seconds."""
    axes = place.subplots()
    axes.set_axis_off()
    axes.set(xlim=(0, columns), ylim=(rows * row_height, 0), aspect="equal")
    return axes


def _lay(axes: Axes, image: Image.Image, x: float, y: float) -> None:
    """Put a picture into the unit square below (x, y), centred, with a margin."""
    width, height = (0.47 * side / max(image.size) for side in image.size)
    corners = (x + 0.5 - width, x + 0.5 + width, y + 0.5 + height, y + 0.5 - height)
    limits = axes.get_xlim(), axes.get_ylim()
    how = "nearest" if max(image.size) < 64 else "antialiased"
    axes.imshow(image, extent=corners, cmap="gray", vmin=0, vmax=255, interpolation=how)
    axes.set(xlim=limits[0], ylim=limits[1])


def _ignored(labels: Array) -> Array:
    labels = np.asarray(labels)
    ignored: Array = (labels < 0) | (labels == UNLABELLED)
    return ignored


def _indexed(indices: Array, colours: Sequence[tuple[int, int, int]]) -> Image.Image:
    """An image with a palette: small, and without loss."""
    image = Image.fromarray(np.ascontiguousarray(indices, np.uint8))
    image.putpalette([part for colour in colours for part in colour])
    return _smaller(image, MAP, Image.Resampling.NEAREST)


def _smaller(image: Image.Image, longest: int, how: Image.Resampling) -> Image.Image:
    factor = longest / max(image.size)
    if factor >= 1:
        return image
    width, height = (max(1, round(side * factor)) for side in image.size)
    return image.resize((width, height), how)


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return red, green, blue
