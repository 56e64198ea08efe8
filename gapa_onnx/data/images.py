"""Images as a model's input: layout, size, channels and scaling follow from the input's shape and type, and what these
leave open from the options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.bundle import Bundle, reading, stream_of
from gapa_onnx.data.convert import kind
from gapa_onnx.data.spec import ImageOptions, InputSpec, fixed, matches
from gapa_onnx.errors import UserError
from gapa_onnx.record import ImageRecord

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp")
#: Of these extensions, by which alone Pillow may open a file: it knows many more by their first bytes, and hands some of
#: them to programs that run what is written in them.
FORMATS = ("PNG", "JPEG", "BMP")
Shape = tuple[int | str | None, ...]
_CHANNEL_AXES = {"first": 1, "last": 3}


@dataclass(frozen=True)
class ImageLayout:
    """How an image becomes one row of an input."""

    spec: InputSpec
    record: ImageRecord

    @property
    def channels(self) -> int:
        return 1 if self.record.colors == "grey" else 3


def image_layout(inputs: Sequence[InputSpec], options: ImageOptions) -> ImageLayout:
    """Read the layout off the model's single input, (N, C, H, W) or (N, H, W, C), and what is open off the options."""
    if len(inputs) != 1:
        names = ", ".join(repr(spec.name) for spec in inputs)
        raise UserError(
            f"images can feed a model with one input, but this one has {len(inputs)}: {names}",
            "give the data as .npz files, or write a loader.py:function",
        )
    (spec,) = inputs
    shape = (None,) * 4 if spec.shape is None else spec.shape
    layout = _channel_layout(spec, shape, options)
    colors = _colors(spec, shape[1 if layout == "first" else 3], options)
    height, width = _size(spec, shape[2:] if layout == "first" else shape[1:3], options)
    if kind(spec.dtype) not in ("float", "int") or spec.dtype == np.int8:
        raise UserError(
            f"images do not fit input '{spec.name}', which takes {spec}: pixels are 0 … 255 or 0.0 … 1.0",
            "write a loader.py:function that prepares the images as the model takes them",
        )
    mean, std = _normalisation(spec, options, 1 if colors == "grey" else 3)
    white = 1 if kind(spec.dtype) == "float" else 255
    return ImageLayout(spec, ImageRecord(height, width, layout, colors, white, mean, std))


def _channel_layout(spec: InputSpec, shape: Shape, options: ImageOptions) -> str:
    """Where the channels are: the first of both places that has 1 or 3 of them, unless that is given."""
    sizes = {name: shape[axis] for name, axis in _CHANNEL_AXES.items()} if len(shape) == 4 else {}
    known = [name for name, size in sizes.items() if size in (1, 3)]
    possible = [name for name, size in sizes.items() if size in (1, 3) or not fixed(size)]
    if options.layout in possible:
        return options.layout
    if options.layout is None and known:
        return known[0]
    loader = "write a loader.py:function that prepares the images as the model takes them"
    told = f"say where the channels are with `ImageOptions(layout={possible[0]!r})`, or " if possible else ""
    raise UserError(
        f"images do not fit input '{spec.name}', which takes {spec}: "
        "neither (N, C, H, W) nor (N, H, W, C) with 1 or 3 channels"
        + (f" {options.layout}" if options.layout else ""),
        told + loader,
    )


def _colors(spec: InputSpec, channels: int | str | None, options: ImageOptions) -> str:
    """What the channels are: colours in the order red, green, blue, or grey if there is one, unless that is given."""
    colors = options.colors or ("grey" if channels == 1 else "rgb")
    if fixed(channels) and (channels == 1) != (colors == "grey"):
        raise UserError(
            f"input '{spec.name}' takes {spec}, so images cannot be {colors}",
            f"leave `ImageOptions(colors={colors!r})` out",
        )
    return colors


def _size(spec: InputSpec, wanted: Shape, options: ImageOptions) -> tuple[int | None, int | None]:
    """Height and width: the model's where it fixes them, else as given, else None for each image's own."""
    if options.size is not None and not matches(options.size, wanted):
        raise UserError(
            f"input '{spec.name}' takes {spec}, so images cannot be {options.size[0]} × {options.size[1]}",
            "leave the image size out: images are resized as the model takes them",
        )
    height, width = options.size or wanted
    return height if fixed(height) else None, width if fixed(width) else None


def _normalisation(
    spec: InputSpec, options: ImageOptions, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of pixels between 0 and 1, one value or one for each channel; 0 and 1 unless given."""
    mean = _per_channel(0.0 if options.mean is None else options.mean, "mean", channels)
    std = _per_channel(1.0 if options.std is None else options.std, "std", channels)
    if kind(spec.dtype) == "int" and (any(mean) or any(value != 1 for value in std)):
        raise UserError(
            f"input '{spec.name}' takes {spec}, so image mean and std do not apply", "leave them out"
        )
    if any(abs(value) > 1 for value in mean) or any(not 0 < value <= 1 for value in std):
        raise UserError(
            "image mean and std are for pixels between 0 and 1, so |mean| <= 1 and 0 < std <= 1",
            "divide values meant for pixels of 0 … 255 by 255",
        )
    return mean, std


def differences(used: ImageRecord, calibrated: ImageRecord) -> str | None:
    """A sentence about what is not as it was when the file was calibrated; None where all is."""
    channels = 1 if used.colors == calibrated.colors == "grey" else 3
    now, then = _comparable(used, channels), _comparable(calibrated, channels)
    names = [name for name in now if now[name] != then[name]]
    if not names:
        return None
    given, before = (" and ".join(_spelled(name, record) for name in names) for record in (used, calibrated))
    return (
        f"these images are read with {given}, but the file was calibrated with {before}: scores will differ"
    )


def _comparable(record: ImageRecord, channels: int) -> dict[str, object]:
    """What tells two ways of reading images apart; one value is the same for every channel."""
    each = {
        name: values * channels if len(values) == 1 else values
        for name, values in (("mean", record.mean), ("std", record.std))
    }
    return {
        **each, "size": (record.height, record.width), "layout": record.layout, "colors": record.colors,
    }  # fmt: skip


def _spelled(name: str, record: ImageRecord) -> str:
    """One part of a record as the option that asks for it."""
    if name == "size":
        if record.height is None or record.width is None:
            return "images in their own sizes"
        return f"`ImageOptions(size=({record.height}, {record.width}))`"
    value = getattr(record, name)
    if name in ("mean", "std"):
        value = tuple(float(f"{number:.7g}") for number in value)  # as many digits as a float32 has
        value = value[0] if len(value) == 1 else value
    return f"`ImageOptions({name}={value!r})`"


def image_bundles(files: Sequence[Path], layout: ImageLayout) -> Iterator[Bundle]:
    """One bundle, of one row, per image."""
    for path in files:
        yield Bundle(str(path), {layout.spec.name: stream_of(load_image(path, layout)[None], str(path))})


def load_image(path: Path, layout: ImageLayout) -> Array:
    """One image as a row: (C, H, W) or (H, W, C), uint8 as stored or float (x / 255 − mean) / std."""
    Image = require_pillow()
    with reading(path), Image.open(path, formats=FORMATS) as image:
        image.load()
        if image.mode.startswith("I"):
            # 16-bit grey: converting clips at 255, so bring it to 8 bits first; 65535 = 257 · 255
            grey = (np.asarray(image).astype(np.float64) / 257).round().clip(0, 255)
            image = Image.fromarray(grey.astype(np.uint8))
        record = layout.record
        image = image.convert("RGB" if layout.channels == 3 else "L")
        width, height = record.width or image.width, record.height or image.height
        if (width, height) != image.size:
            image = image.resize((width, height), Image.BILINEAR)
        pixels = np.asarray(image).reshape(height, width, layout.channels)
    if record.colors == "bgr":
        pixels = pixels[..., ::-1]
    if kind(layout.spec.dtype) == "float":
        pixels = pixels.astype(np.float32) / np.float32(255)
        pixels = (pixels - np.asarray(record.mean, np.float32)) / np.asarray(record.std, np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1) if record.layout == "first" else pixels)


def require_pillow() -> ModuleType:
    """Pillow's module `Image`; a UserError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("reading images needs Pillow", "pip install 'gapa-onnx[images]'") from error
    return Image


def _per_channel(values: float | Sequence[float], name: str, channels: int) -> tuple[float, ...]:
    array = np.atleast_1d(np.asarray(values, np.float64))
    if array.shape not in ((1,), (channels,)) or not np.all(np.isfinite(array)):
        raise UserError(
            f"the image {name} has {array.size} values, but the model's images have {channels} channels",
            f"give one value, or {channels}",
        )
    return tuple(array.tolist())
