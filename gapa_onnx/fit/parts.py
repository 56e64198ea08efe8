"""What shards of the data have left, as files: nobody needs the data again.

A part holds what a `Pass` over a shard has found, and a record of the choices that it was found with. Parts are read
strictly and never unpickled. Those that do not belong together are refused with a sentence.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime

from gapa_onnx import __version__
from gapa_onnx.arrays import Array
from gapa_onnx.data import HeldOut, Remembered, recalled
from gapa_onnx.data.tokenizer import TokenizerFile
from gapa_onnx.errors import DataWarning, UserError
from gapa_onnx.files import replacing
from gapa_onnx.fit.collect import Pass, Shard, collectors_of
from gapa_onnx.fit.collector import InputSample
from gapa_onnx.fit.kept_rows import KeptRows, Purpose, is_fixed
from gapa_onnx.fit.packing import Placed, packed, unpacked, within
from gapa_onnx.plan.analyse import Plan
from gapa_onnx.record import ImageRecord, TextRecord
from gapa_onnx.sessions.feeding import Feeding
from gapa_onnx.sessions.processor import processor
from gapa_onnx.settings import Settings
from gapa_onnx.strict_json import Damage, decoded, encoded

FORMAT = 1
FIRST_ROWS = 64  # of the data, that the first part keeps: a converted file is verified on them
_ENTRY = "part.json"

#: What all parts of one conversion have in common, as messages call it.
_COMMON = {
    "version": "by releases of gapa-onnx",
    "source": "from models",
    "settings": "with settings",
    "batch": "in batches",
    "rows": "from data",
    "begins": "from data",
    "held": "with labels or targets",
    "of": "as shards",
    "images": "with images prepared in ways",
    "text": "with text prepared in ways",
}
_SYSTEM = {
    "onnxruntime": "releases of onnxruntime",
    "numpy": "releases of numpy",
    "processor": "kinds of processor",
}


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """What a part says about itself."""

    format: int
    version: str  #: of gapa-onnx
    source: str  #: sha256 of the model
    settings: Settings
    description: str  #: of the data
    rows: int  #: of all data
    begins: str  #: a hash of their first batch
    batch: int  #: rows
    row_bytes: float
    texts: tuple[str, ...]
    most: Mapping[str, int]  #: rows that are kept, by purpose
    held: str  #: what promises rest on: nothing, rows that come later, calibration rows, documents set apart
    shard: int
    of: int
    read: int  #: rows
    digest: str  #: of all arrays
    onnxruntime: str
    numpy: str
    processor: str
    images: ImageRecord | None = None
    text: TextRecord | None = None
    tokenizer: str | None = None  #: its text
    unwatched: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """A record and its arrays."""

    record: PartRecord
    arrays: Mapping[str, Array] = field(repr=False)


@dataclass(frozen=True)
class Collected:
    """What one shard of the data has left, or several.

    Example
    -------
    >>> gapa_onnx.collect("model.onnx", "data/", shard="1/2").save("part1.npz")
    >>> whole = Collected.merge([Collected.load(path) for path in ("part1.npz", "part2.npz")])
    >>> gapa_onnx.convert("model.onnx", whole, "model.gapa.onnx")
    """

    parts: tuple[Part, ...]

    @classmethod
    def merge(cls, collected: Iterable[Collected]) -> Collected:
        """All shards of several, in the order of the data; UserError where they do not belong together."""
        parts = sorted((part for one in collected for part in one.parts), key=lambda part: part.record.shard)
        if not parts:
            raise UserError("there are no parts", "write some with `gapa_onnx.collect`")
        first = parts[0].record
        for part in parts[1:]:
            for name, words in _COMMON.items():
                if getattr(part.record, name) != getattr(first, name):
                    raise UserError(
                        f"parts {first.shard}/{first.of} and {part.record.shard}/{part.record.of} do not belong together: "
                        f"they were collected {words} that differ",
                        "collect all of them with the same release, model, data and options",
                    )
        numbers = [part.record.shard for part in parts]
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        if twice:
            raise UserError(f"there are two parts {twice[0]}/{first.of}", "give each part once")
        for name, words in _SYSTEM.items():
            found = sorted({getattr(part.record, name) for part in parts})
            if len(found) > 1:
                warnings.warn(
                    f"the parts come from several {words} ({'; '.join(found)}): the file is as good, but not byte for byte "
                    "that of one machine",
                    DataWarning,
                    stacklevel=2,
                )
        return cls(tuple(parts))

    @property
    def record(self) -> PartRecord:
        return self.parts[0].record

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all."""
        entries = [encoded(part.record) for part in self.parts]
        with replacing(Path(path)) as temporary, open(temporary, "wb") as file:
            with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
                archive.writestr(zipfile.ZipInfo(_ENTRY), json.dumps(entries))  # without the hour
                for number, part in enumerate(self.parts):
                    for name, array in part.arrays.items():
                        with archive.open(f"{number}/{name}.npy", "w", force_zip64=True) as member:
                            np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Collected:
        """Read a file that `save` has written."""
        if not Path(path).is_file():
            raise UserError(f"there is no part {path}", "write it with `gapa-onnx collect`")
        try:
            with zipfile.ZipFile(path) as archive:
                entries = json.loads(archive.read(_ENTRY))
                if not isinstance(entries, list) or not entries:
                    raise Damage("it has no record")
                return cls(tuple(_part(archive, number, plain) for number, plain in enumerate(entries)))
        except (
            zipfile.BadZipFile,
            KeyError,
            ValueError,
            EOFError,
            OSError,
            RecursionError,
            UserError,
        ) as error:
            reason = error.message if isinstance(error, UserError) else str(error).strip("'\"")
            raise UserError(
                f"{path} is no part, or it is damaged: {reason}", "collect it again with `gapa-onnx collect`"
            ) from error

    def require_all(self) -> None:
        """Refuse what is not all of the data."""
        of = self.record.of
        missing = sorted(set(range(1, of + 1)) - {part.record.shard for part in self.parts})
        if missing:
            named = ", ".join(f"{number}/{of}" for number in missing[:8])
            raise UserError(f"parts are missing: {named} ({len(missing)} of {of})", "give all of them")


def _part(archive: zipfile.ZipFile, number: int, plain: object) -> Part:
    record = decoded(PartRecord, plain, "")
    if record.format != FORMAT:
        raise Damage(f"its format is {record.format}, and {FORMAT} is known")
    arrays, start = {}, f"{number}/"
    for member in archive.namelist():
        if member.startswith(start) and member.endswith(".npy"):
            with archive.open(member) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            arrays[member.removeprefix(start).removesuffix(".npy")] = array
    if _digest(arrays) != record.digest:
        raise Damage("its numbers are not those that were written")
    return Part(record, arrays)


def _digest(arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.data.cast("B") if array.size else b"")
    return digest.hexdigest()


# ---------------------------------------------------------------------------------- from a pass and back


def part_of(
    found: Pass, plan: Plan, settings: Settings, held: HeldOut | None, later: bool, shard: Shard
) -> Collected:
    """What a pass over a shard has found, as a part. `later` says that rows are held out when the parts are converted."""
    fed = found.fed
    arrays = {f"kept/{name}": array for name, array in found.kept.arrays().items()}
    for number, collector in enumerate(found.collectors):
        arrays |= {f"place {number}/{name}": array for name, array in collector.arrays().items()}
    if found.inputs is not None:
        arrays |= {f"inputs/{name}": array for name, array in found.inputs.arrays().items()}
    arrays["digests"] = found.digests
    if shard.number == 1:
        arrays |= {f"first/{name}": array for name, array in packed(_first_rows(fed)).items()}
        arrays |= {} if held is None else _held_arrays(held)
    about = fed.data.remembered
    record = PartRecord(
        format=FORMAT,
        version=__version__,
        source=plan.source.sha256,
        settings=settings,
        description=fed.description,
        rows=fed.rows or 0,
        begins=_digest(packed([(0, next(fed.batches()))])),
        batch=fed.size or 0,
        row_bytes=fed.row_bytes,
        texts=tuple(sorted(fed.texts)),
        most={str(purpose.name): first.most for purpose, first in found.kept.first.items()},
        held="later" if later else _kind(held),
        shard=shard.number,
        of=shard.count,
        read=found.rows,
        digest=_digest(arrays),
        onnxruntime=onnxruntime.__version__,
        numpy=np.__version__,
        processor=processor(),
        images=about.images,
        text=about.text,
        tokenizer=about.tokenizer.text if about.tokenizer and shard.number == 1 else None,
        unwatched=tuple(sorted(fed.data.unwatched)),
    )
    return Collected((Part(record, arrays),))


def _kind(held: HeldOut | None) -> str:
    if held is None:
        return "nothing"
    return "documents" if held.apart else "calibration rows"


def _first_rows(fed: Feeding) -> Iterator[Placed]:
    start = 0
    for batch in fed.batches():
        yield start, batch
        start += batch.rows or 0
        if start >= FIRST_ROWS:
            return


def _held_arrays(held: HeldOut) -> dict[str, Array]:
    found = {"held/fitting": held.fitting, "held/counting": held.counting}
    found |= {f"held/targets/{output}": values for output, values in held.targets.items()}
    found |= {f"held/labels/{output}": values for output, values in held.labels.items()}
    if held.apart:
        start, placed = 0, []
        for batch in held.data.batches():
            placed.append((start, batch))
            start += batch.rows or 0
        found |= {f"held/rows/{name}": array for name, array in packed(placed).items()}
    return found


def restored(collected: Collected, plan: Plan) -> tuple[Pass, HeldOut | None]:
    """The pass over all data, and the rows that promises rest on, where the parts have them."""
    collected.require_all()
    if plan.source.sha256 != collected.record.source:
        raise UserError(
            f"the parts were collected from another model than {plan.source.label}",
            "give the model that they are from",
        )
    try:
        whole = _pass(collected.parts[0], collected, plan)
        for part in collected.parts[1:]:
            whole.join(_pass(part, collected, plan))
        return whole, _held(collected, plan)
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise UserError(f"a part does not hold what it should: {error}", "collect it again") from error


def _pass(part: Part, collected: Collected, plan: Plan) -> Pass:
    record, arrays, settings = part.record, part.arrays, part.record.settings
    collectors = collectors_of(plan, settings)
    for number, collector in enumerate(collectors):
        collector.restore(within(arrays, f"place {number}"))
    inputs = InputSample(settings.seed) if settings.length_scale == "input" else None
    if inputs is not None:
        inputs.restore(within(arrays, "inputs"))
    specs = plan.source.inputs
    kept = KeptRows(
        settings.seed, {Purpose[name]: most for name, most in record.most.items()}, None, is_fixed(specs)
    )
    kept.restore(within(arrays, "kept"))
    data = recalled(
        unpacked(within(collected.parts[0].arrays, "first")),
        specs,
        _remembered(collected.record),
        record.description,
        record.rows,
        {name for one in collected.parts for name in one.record.unwatched},
        np.concatenate([one.arrays["digests"] for one in collected.parts]),
    )
    fed = Feeding(data, record.batch, record.row_bytes, texts=frozenset(record.texts))
    return Pass(collectors, inputs, kept, record.read, fed)


def _remembered(record: PartRecord) -> Remembered:
    if record.text is None or record.tokenizer is None:
        return Remembered(record.images, record.text)
    file = TokenizerFile(record.tokenizer, record.text.file, record.text.file or "the tokenizer of the parts")
    return Remembered(record.images, record.text, file)


def _held(collected: Collected, plan: Plan) -> HeldOut | None:
    record, arrays = collected.record, within(collected.parts[0].arrays, "held")
    if record.held in ("nothing", "later"):
        return None
    apart = record.held == "documents"
    rows = unpacked(within(arrays, "rows")) if apart else []
    data = recalled(rows, plan.source.inputs, _remembered(record), record.description, len(arrays["fitting"]))
    truths = within(arrays, "targets"), within(arrays, "labels")
    return HeldOut(data, arrays["fitting"], arrays["counting"], apart, *truths, apart)
