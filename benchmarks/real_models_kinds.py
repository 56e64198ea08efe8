"""Rows of each kind that a model may be made for, and the three strange sets of each.

    photographs  pets, resized                           noise, shuffled tiles, blurred
    digits       MNIST                                   noise, shuffled tiles, Fashion-MNIST
    signals      sums of harmonics in bursts             noise, shuffled pieces, square waves
    spectra      the logarithm of such signals' spectra  the same
    letters      text as numbers                         shuffled letters, random ids, one letter repeated
    one-hot      the same, one column a letter           the same
    words        categories that the model knows         random ones, all the same, unknown ones
    Gaussian     correlated columns of unlike scale      shuffled columns, uniform, three times as far

Strange sets are made from held-out rows. Files of ../shared/data are used where they are; without them pictures and
text are Gaussian numbers and random letters.
"""

from __future__ import annotations

import functools
import io
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
LIKE = ("calibration", "held-out")
STRANGE = {
    "photographs": ("noise", "shuffled tiles", "blurred"),
    "digits": ("noise", "shuffled tiles", "Fashion-MNIST"),
    "signals": ("noise", "shuffled pieces", "square waves"),
    "spectra": ("noise", "shuffled pieces", "square waves"),
    "letters": ("shuffled letters", "random ids", "one letter repeated"),
    "one-hot": ("shuffled letters", "random ids", "one letter repeated"),
    "words": ("random words", "one word repeated", "unknown words"),
    "Gaussian": ("shuffled columns", "uniform", "three times as far"),
}


@dataclass(frozen=True)
class Spec:
    """One input: how it is fed, and its shape behind the rows, all sizes known."""

    name: str
    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  #: with the rows in front, where it has any
    pixels: str = "unit"
    symbols: int = 0  #: letters that there are numbers for
    words: tuple[tuple[str, ...], ...] = ()  #: that each column may hold


def _generator(label: str, spec: Spec, which: str | int) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{label} {spec.name} {which}".encode()))


def _gaussian(label: str, spec: Spec, which: str | int, rows: int) -> np.ndarray:
    """Correlated columns of unlike scale; a row has a few degrees of freedom, as most data have."""
    shape = spec.shape[1:]
    width = int(np.prod(shape))
    fixed = _generator(label, spec, "columns")
    rank = max(1, min(width // 2, 16))
    mixing = fixed.standard_normal((rank, width)) / np.sqrt(rank)
    scales, centres = fixed.uniform(0.5, 1.5, width), 0.3 * fixed.standard_normal(width)
    rng = _generator(label, spec, which if which == "calibration" else "held-out")
    plain = (
        rng.standard_normal((rows, rank)) @ mixing + 0.1 * rng.standard_normal((rows, width))
    ) * scales + centres
    rng = _generator(label, spec, which)
    if which == 0 and width > 1:
        plain = rng.permuted(plain, axis=0)
    elif which == 1:
        plain = rng.uniform(plain.min(axis=0), plain.max(axis=0) + 1e-6, plain.shape)
    elif which in (0, 2):
        plain = centres + 3 * (plain - centres)
    return plain.reshape(rows, *shape)


def _letters(label: str, spec: Spec, which: str | int, rows: int) -> np.ndarray:
    shape = spec.shape[1:]
    length = int(np.prod(shape))
    rng = _generator(label, spec, which)
    text = _text("calibration" if which == "calibration" else "heldout")
    byte = spec.symbols > 256
    starts = _generator(label, spec, str(which in LIKE and which)).integers(0, len(text) - length, rows)
    found = np.stack([text[start : start + length] for start in starts])
    if not byte:
        ranks = np.argsort(np.argsort(-np.bincount(_text("calibration"), minlength=256)))
        found = 1 + np.minimum(ranks[found], spec.symbols - 3)
    if which == 0:
        found = rng.permuted(found, axis=1)
    elif which == 1:
        found = rng.integers(1, min(spec.symbols, 256), found.shape)
    elif which == 2:
        found = np.broadcast_to(found[:, :1], found.shape)
    return found.reshape(rows, *shape)


def _one_hot(label: str, spec: Spec, which: str | int, rows: int) -> np.ndarray:
    ids = _letters(label, Spec(spec.name, "", spec.dtype, spec.shape[:-1], symbols=spec.symbols), which, rows)
    return np.eye(spec.shape[-1], dtype=np.float32)[ids]


def _word_rows(label: str, spec: Spec, which: str | int, rows: int) -> np.ndarray:
    """Common words are likelier than rare ones, but in the strange sets."""
    rng = _generator(label, spec, which)
    columns = []
    for words in spec.words:
        odds = 1 / np.arange(1, len(words) + 1) if which in LIKE else np.ones(len(words))
        chosen = rng.choice(len(words), rows, p=odds / odds.sum())
        columns.append([("unknown" if which == 2 else words[0 if which == 1 else c]) for c in chosen])
    return np.array(columns, dtype=object).T.reshape(rows, *spec.shape[1:])


def _signals(label: str, spec: Spec, which: str | int, rows: int) -> np.ndarray:
    return np.stack(
        [wave for wave in _waves(label, spec, which, rows, int(np.prod(spec.shape[1:])))]
    ).reshape(rows, *spec.shape[1:])


def _waves(label: str, spec: Spec, which: str | int, rows: int, length: int) -> Iterator[np.ndarray]:
    """Voices, roughly: harmonics of a gliding pitch in bursts of a few syllables a second, at 16 kHz."""
    rng = _generator(label, spec, which if which == "calibration" else "held-out")
    strange = _generator(label, spec, which)
    time = np.arange(length) / 16_000
    for _ in range(rows):
        pitch = rng.uniform(90, 260) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(0.5, 3) * time))
        phase = 2 * np.pi * np.cumsum(pitch) / 16_000
        bursts = np.clip(np.sin(2 * np.pi * rng.uniform(2, 5) * time + rng.uniform(0, 6)) + 0.6, 0, 1)
        voice = sum(rng.uniform(0.3, 1) / k * np.sin(k * phase + rng.uniform(0, 6)) for k in range(1, 12))
        wave = 0.1 * bursts * voice + 0.003 * rng.standard_normal(length)
        if which == 0:
            wave = 0.1 * strange.standard_normal(length)
        elif which == 1:
            pieces = np.array_split(wave, 40)
            wave = np.concatenate([pieces[i] for i in strange.permutation(len(pieces))])
        elif which == 2:
            wave = 0.3 * np.sign(np.sin(2 * np.pi * strange.uniform(1000, 4000) * time))
        yield wave


def _spectra(label: str, spec: Spec, which: str | int, rows: int) -> np.ndarray:
    """Frames of 400 samples in as many bands as the model has, on a logarithmic scale of loudness."""
    sizes = [size for size in spec.shape[1:] if size != 1]
    bands, frames = min(sizes), max(sizes)
    found = []
    for wave in _waves(label, spec, which, rows, 160 * frames + 240):
        pieces = np.lib.stride_tricks.sliding_window_view(wave, 400)[::160][:frames]
        power = np.abs(np.fft.rfft(pieces * np.hanning(400), axis=1)) ** 2
        edges = np.unique(np.geomspace(2, power.shape[1] - 1, bands + 1).astype(int))
        edges = np.linspace(1, power.shape[1] - 1, bands + 1).astype(int) if len(edges) <= bands else edges
        mel = np.log10(np.add.reduceat(power, edges[:-1], axis=1) + 1e-8)
        found.append(mel if spec.shape[1] == frames else mel.T)
    return np.stack(found).reshape(rows, *spec.shape[1:])


# --------------------------------------------------------------------------- pictures


def _pictures(label: str, spec: Spec, which: str | int, rows: int) -> np.ndarray:
    digits = spec.kind == "digits"
    last = len(spec.shape) == 4 and spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3)
    shape = spec.shape[1:]
    sides = tuple(shape) if len(shape) == 2 else shape[:2] if last else shape[1:]
    channels = 1 if len(shape) == 2 else shape[2] if last else shape[0]
    if not DATA.exists():
        return _gaussian(label, spec, which, rows)
    if digits:
        found = _digits("fashion_mnist" if which == 2 else "mnist", which == "calibration", rows)
    else:
        found = _photographs(which == "calibration", rows, sides, blurred=which == 2)
    rng = _generator(label, spec, which)
    if which == 0:
        found = rng.integers(0, 256, found.shape).astype(np.float32)
    elif which == 1:
        found = np.stack([_tiles(picture, rng) for picture in found])
    if channels == 1 and found.shape[-1] == 3:
        found = found.mean(axis=-1, keepdims=True)
    found = _PIXELS[spec.pixels](found)
    return (found if last else np.moveaxis(found, -1, 1)).reshape(rows, *shape)


_PIXELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "unit": lambda x: x / 255,
    "symmetric": lambda x: x / 127.5 - 1,
    "bytes": lambda x: x,
    "imagenet": lambda x: (x / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225],
}


def _tiles(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Four by four tiles in another order; what does not divide stays."""
    height, width = picture.shape[0] // 4, picture.shape[1] // 4
    result = picture.copy()
    for target, source in enumerate(rng.permutation(16)):
        (a, b), (c, d) = divmod(target, 4), divmod(int(source), 4)
        result[a * height : (a + 1) * height, b * width : (b + 1) * width] = picture[
            c * height : (c + 1) * height, d * width : (d + 1) * width
        ]
    return result


def _digits(name: str, calibration: bool, rows: int) -> np.ndarray:
    with np.load(DATA / f"{name}.npz") as file:
        images = file["x_train" if calibration else "x_test"][:rows]
    return images[..., None].astype(np.float32)


def _photographs(calibration: bool, rows: int, sides: Sequence[int], blurred: bool) -> np.ndarray:
    from PIL import Image

    found = []
    for data in _files("trainval" if calibration else "test")[:rows]:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        if blurred:
            image = image.resize((12, 12), Image.Resampling.BILINEAR)
        image = image.resize((sides[1], sides[0]), Image.Resampling.BILINEAR)
        found.append(np.asarray(image, np.float32))
    return np.resize(np.stack(found), (rows, *found[0].shape))


@functools.cache
def _files(split: str) -> list[bytes]:
    with tarfile.open(DATA / "pets128.tar") as archive:
        members = {member.name.removeprefix("./"): member for member in archive.getmembers()}
        root = next(name for name in members if name.endswith(f"{split}.txt")).removesuffix(f"{split}.txt")
        names = archive.extractfile(members[f"{root}{split}.txt"]).read().decode().split()
        return [archive.extractfile(members[f"{root}images/{name}.jpg"]).read() for name in names[:300]]


@functools.cache
def _text(part: str) -> np.ndarray:
    path = DATA / "text" / f"wikitext_{part}.txt"
    if not path.exists():
        odds = 1 / np.arange(1, 41)
        return np.random.default_rng(len(part)).choice(np.arange(60, 100), 200_000, p=odds / odds.sum())
    return np.frombuffer(path.read_bytes()[:2_000_000], np.uint8).astype(np.int64)


MAKERS: dict[str, Callable[[str, Spec, str | int, int], np.ndarray]] = {
    "photographs": _pictures,
    "digits": _pictures,
    "signals": _signals,
    "spectra": _spectra,
    "letters": _letters,
    "one-hot": _one_hot,
    "words": _word_rows,
    "Gaussian": _gaussian,
}
