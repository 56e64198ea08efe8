"""Images as a model's input: layout, size, channels and scaling follow from the input's shape and type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.bundle import Bundle, reading, stream_of
from gapa_onnx.data.convert import kind
from gapa_onnx.data.spec import ImageOptions, InputSpec, fixed
from gapa_onnx.errors import UserError

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp")


@dataclass(frozen=True)
class ImageLayout:
    """How an image becomes one row of an input."""

    spec: InputSpec
    channels: int
    channels_first: bool
    height: int | None  #: None: as the image is
    width: int | None
    mean: Array | None  # (channels,) or (1,)
    std: Array | None  # (channels,) or (1,)


def image_layout(inputs: Sequence[InputSpec], options: ImageOptions) -> ImageLayout:
    """Read the layout off the model's single input, (N, C, H, W) or (N, H, W, C) with C = 1 or 3."""
    if len(inputs) != 1:
        names = ", ".join(repr(spec.name) for spec in inputs)
        raise UserError(
            f"images can feed a model with one input, but this one has {len(inputs)}: {names}",
            "give the data as .npz files, or write a loader.py:function",
        )
    (spec,) = inputs
    shape = spec.shape or ()
    if len(shape) != 4 or (shape[1] not in (1, 3) and shape[3] not in (1, 3)):
        raise UserError(
            f"images do not fit input '{spec.name}', which takes {spec}: "
            "neither (N, C, H, W) nor (N, H, W, C) with 1 or 3 channels",
            "write a loader.py:function that prepares the images as the model takes them",
        )
    first = shape[1] in (1, 3)
    height, width = shape[2:] if first else shape[1:3]
    channels = 3 if shape[1 if first else 3] == 3 else 1
    if kind(spec.dtype) not in ("float", "int") or spec.dtype == np.int8:
        raise UserError(
            f"images do not fit input '{spec.name}', which takes {spec}: pixels are 0 … 255 or 0.0 … 1.0",
            "write a loader.py:function that prepares the images as the model takes them",
        )
    mean, std = _normalisation(spec, options, channels)
    return ImageLayout(
        spec, channels, first, height if fixed(height) else None, width if fixed(width) else None, mean, std
    )


def _normalisation(
    spec: InputSpec, options: ImageOptions, channels: int
) -> tuple[Array | None, Array | None]:
    """Mean and std of pixels between 0 and 1, one for each channel, where they are given."""
    mean, std = _per_channel(options.mean, "mean", channels), _per_channel(options.std, "std", channels)
    if kind(spec.dtype) == "int" and (mean is not None or std is not None):
        raise UserError(
            f"input '{spec.name}' takes {spec}, so image mean and std do not apply", "leave them out"
        )
    mean_off = mean is not None and np.any(np.abs(mean) > 1)
    std_off = std is not None and np.any((std <= 0) | (std > 1))
    if mean_off or std_off:
        raise UserError(
            "image mean and std are for pixels between 0 and 1, so |mean| <= 1 and 0 < std <= 1",
            "divide values meant for pixels of 0 … 255 by 255",
        )
    return mean, std


def image_bundles(files: Sequence[Path], layout: ImageLayout) -> Iterator[Bundle]:
    """One bundle, of one row, per image."""
    for path in files:
        yield Bundle(str(path), {layout.spec.name: stream_of(load_image(path, layout)[None], str(path))})


def load_image(path: Path, layout: ImageLayout) -> Array:
    """One image as a row: (C, H, W) or (H, W, C), uint8 as stored or float (x / 255 − mean) / std."""
    Image = require_pillow()
    with reading(path, SyntaxError, Image.DecompressionBombError), Image.open(path) as image:
        image.load()
        if image.mode.startswith("I"):
            # 16-bit grey: converting clips at 255, so bring it to 8 bits first; 65535 = 257 · 255
            grey = (np.asarray(image).astype(np.float64) / 257).round().clip(0, 255)
            image = Image.fromarray(grey.astype(np.uint8))
        image = image.convert("RGB" if layout.channels == 3 else "L")
        width, height = layout.width or image.width, layout.height or image.height
        if (width, height) != image.size:
            image = image.resize((width, height), Image.BILINEAR)
        pixels = np.asarray(image).reshape(height, width, layout.channels)
    if kind(layout.spec.dtype) == "float":
        pixels = pixels.astype(np.float32) / np.float32(255)
        if layout.mean is not None:
            pixels = pixels - layout.mean
        if layout.std is not None:
            pixels = pixels / layout.std
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if layout.channels_first else pixels


def require_pillow() -> ModuleType:
    """Pillow's module `Image`; a UserError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("reading images needs Pillow", "pip install 'gapa-onnx[images]'") from error
    return Image


def _per_channel(values: Sequence[float] | None, name: str, channels: int) -> Array | None:
    if values is None:
        return None
    array = np.atleast_1d(np.asarray(values, np.float32))
    if array.shape not in ((1,), (channels,)) or not np.all(np.isfinite(array)):
        raise UserError(
            f"the image {name} has {array.size} values, but the model's images have {channels} channels",
            f"give one value, or {channels}",
        )
    return array
