"""Read and change what a converted file promises: its coverage, or the error of what it answers.

The file carries its lines at many levels, all counted on the same rows, so a level can be moved without converting
again. Between two levels of the table the one that keeps more than was asked is taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gapa_onnx.emit.emit import put_tensor, seal
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import read_proto
from gapa_onnx.model.writing import save
from gapa_onnx.plan.heads.promises import line_of
from gapa_onnx.presence import require_promises
from gapa_onnx.record import PromiseRecord, Record, require
from gapa_onnx.settle.conformal import level_in

KINDS = ("sets", "deferral", "intervals")


@dataclass(frozen=True)
class Promised:
    """One promise of a file about one output."""

    output: str
    name: str  #: sets, deferral or intervals
    promise: PromiseRecord


def promises(path: str | os.PathLike[str]) -> tuple[Promised, ...]:
    """What a converted file promises."""
    model = read_proto(Path(path))
    record = require(model, str(path))
    require_promises(record, model.graph)
    return tuple(_listed(record, None))


def move_promises(
    path: str | os.PathLike[str],
    *,
    coverage: float | None = None,
    max_error: float | None = None,
    output: str | None = None,
    out: str | os.PathLike[str] | None = None,
) -> tuple[Promised, ...]:
    """Move the levels of a converted file's promises; nothing else in it changes.

    Parameters
    ----------
    coverage: of sets and intervals.
    max_error: of what is answered.
    output: which output's; all that have the promise unless given.
    out: where to write; the file itself unless given.
    """
    path = Path(path)
    model = read_proto(path)
    record = require(model, str(path))
    require_promises(record, model.graph)
    heads = dict(record.heads)
    for asked, names in ((coverage, ("sets", "intervals")), (max_error, ("deferral",))):
        if asked is None:
            continue
        found = [entry for entry in _listed(record, output) if entry.name in names]
        if not found:
            raise _without(names)
        for entry in found:
            moved = _moved(entry, asked)
            put_tensor(model.graph, moved.tensor, line_of(moved))
            heads[entry.output] = replace(heads[entry.output], **{entry.name: moved})  # type: ignore[arg-type]
    record = replace(record, heads=heads)
    seal(model, record)
    save(model, Path(out) if out is not None else path)
    return tuple(_listed(record, None))


def _moved(entry: Promised, asked: float) -> PromiseRecord:
    promise, most = entry.promise, entry.name == "deferral"
    what = "max_error" if most else "coverage"
    if not 0 < asked < 1:
        raise UserError(
            f"`{what}` is {asked}; it must be between 0 and 1", "for example 0.05" if most else "0.9"
        )
    level = level_in(promise.table, asked, most=most)
    if level is None:
        end = (min if most else max)(promise.table, key=float)
        raise UserError(
            f"{promise.rows} rows were counted, which reach a {what.replace('_', ' ')} of {end}, not {asked:g}",
            "convert again with more known rows, or ask for less",
        )
    return replace(promise, level=float(level))


def _without(names: tuple[str, ...]) -> UserError:
    if "deferral" in names:
        return UserError("the file defers nothing, so it promises no error", "convert again with `max_error`")
    return UserError("the file has no sets and no intervals", "convert again with `labels` or `targets`")


def _listed(record: Record, output: str | None) -> Iterator[Promised]:
    for name, head in record.heads.items():
        for kind in KINDS:
            promise = getattr(head, kind)
            if promise is not None and output in (None, name):
                yield Promised(name, kind, promise)
