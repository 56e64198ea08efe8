"""Calibration by Ray: shards are read by tasks on a cluster, and put together to the file that one machine would make.

A task that dies is tried again, on another machine if need be, and loses nothing but its own shard: what others have found is
with Ray, and a shard that is read twice gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx

from gapa_onnx import compiler
from gapa_onnx.data.bundle import Bundle, Reader, bundle_of
from gapa_onnx.errors import UserError
from gapa_onnx.fit.parts import Collected
from gapa_onnx.progress import Progress, silent

SHARDS_OF_A_WORKER = 4  # a worker that dies loses one of so many
RETRIES = 5  # of a shard whose worker died


def convert(
    model: str | os.PathLike[str] | onnx.ModelProto,
    calib: Any,
    out: str | os.PathLike[str] | None = None,
    *,
    address: str | None = None,
    workers: int | None = None,
    held_out: Any = None,
    targets: Any = None,
    labels: Any = None,
    strange: Any = None,
    allow_uncovered: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> compiler.Conversion:
    """`gapa_onnx.convert`, with the calibration data read by the workers of a Ray cluster; the same file, byte for byte.

    Parameters
    ----------
    calib: a Ray Dataset whose columns are the inputs of the model, as it takes them (its rows stay in their order); or
        what `gapa_onnx.convert` takes, a path on every machine of the cluster.
    address: of a cluster; None for one that is running here, or a new one on this machine.
    workers: how many shards are read at a time, each on one core; as many as the cluster has cores.

    All others are as in `gapa_onnx.convert`, `budget` excepted.
    """
    later = {"targets": targets, "labels": labels}
    now = {} if held_out is not None else later
    parts = collect(
        model,
        calib,
        address=address,
        workers=workers,
        held_out=held_out is not None,
        progress=progress,
        **now,
        **options,
    )
    return compiler.convert(
        model,
        parts,
        out,
        held_out=held_out,
        strange=strange,
        allow_uncovered=allow_uncovered,
        progress=progress,
        **(later if held_out is not None else {}),
    )


def collect(
    model: str | os.PathLike[str] | onnx.ModelProto,
    calib: Any,
    *,
    address: str | None = None,
    workers: int | None = None,
    shards: int | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Collected:
    """All shards of the data, each read by a task of Ray; four for each worker, unless `shards` says how many."""
    ray = _ray()
    if workers is not None and workers < 1:
        raise UserError(f"`workers` is {workers}", "give at least 1")
    with _cluster(ray, address):
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        shards = shards or SHARDS_OF_A_WORKER * count
        data = _dataset(calib) if _is_dataset(calib) else calib
        # A task reads its shard in a process of its own, which holds the model as long as that takes.
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_shard)
        given = ray.put((os.fspath(model) if isinstance(model, os.PathLike) else model, data, options))
        waiting, found = list(range(1, shards + 1)), []
        running: dict[Any, int] = {}
        while waiting or running:
            while waiting and len(running) < count:
                number = waiting.pop(0)
                running[task.remote(given, number, shards)] = number
            done, _ = ray.wait(list(running), num_returns=1)
            for one in done:
                del running[one]
                found.append(_answer(ray, one))
            progress("reading calibration data", len(found) / shards)
        return Collected.merge(found)


def _shard(given: tuple[Any, Any, dict[str, Any]], number: int, shards: int) -> Collected | UserError:
    """One shard, read on one thread; what is the user's to fix is handed back, as trying again does not help."""
    model, data, options = given
    try:
        return compiler.collect(model, data, shard=(number, shards), threads=1, **options)
    except UserError as error:
        return error


def _answer(ray: Any, task: Any) -> Collected:
    try:
        found = ray.get(task)
    except (
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.OutOfMemoryError,
    ) as error:
        raise UserError(
            f"a worker of Ray died {RETRIES + 1} times on one shard: {str(error).splitlines()[0]}",
            "see Ray's logs; with less memory, give a smaller `batch_size`",
        ) from error
    if isinstance(found, UserError):
        raise found
    collected: Collected = found
    return collected


def _ray() -> Any:
    """The package `ray`; a UserError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UserError("calibration by Ray needs ray", "pip install 'gapa-onnx[ray]'") from error
    return ray


@contextmanager
def _cluster(ray: Any, address: str | None) -> Iterator[None]:
    """A connection to a cluster; one that was made here ends here."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"no cluster of Ray at {address}: {str(error).splitlines()[0]}",
            "start one, or leave `address` out",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _is_dataset(calib: Any) -> bool:
    return type(calib).__module__.split(".")[0] == "ray" and hasattr(calib, "to_numpy_refs")


class _Blocks:
    """The blocks of a Ray Dataset in their order, as a reader of data."""

    def __init__(self, blocks: list[Any], rows: int):
        self.blocks, self.rows = blocks, rows

    def __call__(self) -> Iterator[Bundle]:
        ray = _ray()
        for block in self.blocks:
            columns = {name: _whole(column) for name, column in ray.get(block).items()}
            if len(next(iter(columns.values()))):
                yield bundle_of(columns, "the Ray dataset")

    def count(self) -> int:
        return self.rows


def _dataset(calib: Any) -> Reader:
    """A Ray Dataset as data; its rows come in its order, which Ray keeps where it is told to."""
    options = calib.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        whole = calib.materialize()
        blocks = _Blocks(whole.to_numpy_refs(), whole.count())
    finally:
        options.preserve_order = before
    return Reader("Ray dataset", blocks, count=blocks.count)


def _whole(column: Any) -> np.ndarray:
    """A column as one array: rows of one shape may come as an array of arrays."""
    array = np.asarray(column)
    if array.dtype == object and len(array) and isinstance(array[0], np.ndarray):
        if len({row.shape for row in array}) > 1:
            raise UserError(
                "rows of the Ray dataset have several shapes",
                "map it to arrays of one shape, as the model takes them",
            )
        return np.stack(list(array))
    return array
