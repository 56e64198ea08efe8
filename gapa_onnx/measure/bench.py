"""What a converted file costs beside its source, measured so that the figure can be believed.

Three sessions take turns in one process: the source, the source once more (the control), the converted file.

    control = median over rounds of t_control / t_source                       must be 1.00 ± 0.03
    ratio   = median over rounds of t_converted / ((t_source + t_control) / 2)

A control that is off says that the machine, not the model, was measured: the rounds are run again, twice as
many, and if that does not help there is a `Refusal` in place of a figure. What was found to disturb it:

- Idle thread pools. onnxruntime's threads spin for a while after a run, and take the cores from the session
  whose turn it is: with two threads on two cores a control read 0.6 to 7. So spinning is off in all sessions.
- Where memory happens to lie. Two sessions of a model of 40 µs differed by 6% as long as they lived. So the
  sessions are opened several times, each time in another order, and all rounds count.
- Other processes. With one thread, the CPU time of the calling thread is taken, which does not go on while
  another process has the core. With more threads it is wall time.
- What ran just before. Within the rounds all orders of the three occur equally often.
- Python. Making arrays of eight outputs takes 30 µs, no work of the model's: they stay with onnxruntime.

Where the time goes is `profiling`'s to tell.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch as FedBatch
from gapa_onnx.data import ImageOptions, Preparation, TextOptions, metadata, remembered
from gapa_onnx.errors import UserError
from gapa_onnx.measure import profiling
from gapa_onnx.measure.feeds import first_rows, made_up
from gapa_onnx.model.load import SourceModel, load, read_proto
from gapa_onnx.progress import Progress, silent
from gapa_onnx.record import require
from gapa_onnx.sessions.inference import row_count, run_batch
from gapa_onnx.sessions.runtime import open_session

TOLERATED = 0.03  # by which the source may differ from itself
ATTEMPTS = 3
LOADS = 6  # times that the sessions are opened, per attempt
WARM_UP = 2
ROUNDS = (24, 300)  # per attempt, whatever the time
SECONDS = 3.0  # that the first attempt takes, where the number of rounds allows
SHORTEST = 0.002  # seconds of one reading; shorter runs are repeated within it
ORDERS = tuple(itertools.permutations(range(3)))

Batch = Mapping[str, Array]
Clock = Callable[[], float]
Run = Callable[[], object]


@dataclass(frozen=True)
class Comparison:
    """Readings of three runs that took turns, summed up."""

    ratio: float  #: converted over source
    control: float  #: source over source
    ratio_quartiles: tuple[float, float]  #: over rounds
    control_quartiles: tuple[float, float]
    source_seconds: float  #: of one run
    converted_seconds: float
    rounds: int

    @property
    def sound(self) -> bool:
        return abs(self.control - 1) <= TOLERATED


@dataclass(frozen=True)
class Measurement:
    """What one batch costs."""

    batch: int
    threads: int
    comparison: Comparison
    clock: str  #: cpu, of the calling thread, or wall
    parts: dict[str, float]  #: seconds of one run of the converted file, see `profiling`; {} if not asked for

    @property
    def ratio(self) -> float:
        return self.comparison.ratio

    @property
    def control(self) -> float:
        return self.comparison.control

    @property
    def native(self) -> bool | None:
        """Whether the sites ran by the native library; None if that was not looked at."""
        return profiling.SITES not in self.parts if self.parts else None

    @property
    def added(self) -> dict[str, float]:
        """Shares of what is not the source's own nodes; they add up to 1."""
        return profiling.added_shares(self.parts)


@dataclass(frozen=True)
class Refusal:
    """A figure that is not given, and why."""

    batch: int
    threads: int
    comparison: Comparison  #: of the last attempt; its ratio is not to be trusted
    hint: str = "end what else runs on this machine, or take larger batches or `threads=1`, and try again"

    @property
    def reason(self) -> str:
        return (
            f"the cost ratio is not given: the source against itself gave {self.comparison.control:.2f} "
            f"instead of 1.00 ± {TOLERATED} in {ATTEMPTS} attempts, so this machine is too busy to measure"
        )


# -------------------------------------------------------------------------- files


def measure(
    source: str | os.PathLike[str] | onnx.ModelProto | SourceModel,
    converted: str | os.PathLike[str] | onnx.ModelProto,
    *,
    batch: int = 256,
    threads: int = 1,
    data: Any = None,
    rounds: int | None = None,
    parts: bool = True,
    native: bool = True,
    images: ImageOptions | None = None,
    text: TextOptions | None = None,
    progress: Progress = silent,
) -> Measurement | Refusal:
    """The cost ratio of a converted file to its source on one batch, with its control.

    Parameters
    ----------
    batch: rows per run, unless the model takes `data` only in the batches in which they are given.
    threads: that onnxruntime may use.
    data: what to feed: anything that `convert` takes. The first rows, repeated to fill the batch; None makes
        inputs up: normal numbers, zeros where whole numbers are wanted.
    rounds: of the first attempt, shared by several openings of the files; None takes a few seconds.
    parts: also tell where the time goes.
    native: with the native library; without it the file's portable functions are measured.
    images, text: how these become inputs; what is left open, or all, as the file was calibrated.

    Example
    -------
    >>> gapa_onnx.measure.bench.measure("model.onnx", "model.gapa.onnx", batch=32).ratio
    """
    for option, number in {"batch": batch, "threads": threads, "rounds": rounds}.items():
        if number is not None and number < 1:
            raise UserError(f"`{option}` is {number}; it must be at least 1")
    original = source if isinstance(source, SourceModel) else load(source)
    emitted = require_pair(original, converted)
    if data is None:
        feeds = made_up(original.inputs, batch)
    else:
        before = remembered(require(emitted, "the second model"), metadata(emitted))
        feeds = first_rows(data, original, batch, Preparation.of(images, text), before)
    _try(original.given, feeds, made=data is None)
    return measure_on(
        original.given,
        emitted,
        feeds,
        batch=None if isinstance(feeds, FedBatch) else batch,
        threads=threads,
        rounds=rounds,
        parts=parts and native,
        native=native,
        progress=progress,
    )


def measure_on(
    source: onnx.ModelProto,
    converted: onnx.ModelProto,
    feeds: Batch,
    *,
    batch: int | None = None,
    threads: int = 1,
    rounds: int | None = None,
    clock: Clock | None = None,
    parts: bool = True,
    native: bool = True,
    progress: Progress = silent,
) -> Measurement | Refusal:
    """`measure` on inputs that are there, without asking whether the models belong together.

    `batch` is what they count as, where the longest of them does not tell.
    """

    def openings() -> Iterator[list[Run]]:
        for order in itertools.cycle(ORDERS):
            runs: dict[int, Run] = {}
            for position in order:
                runs[position] = _run(source if position < 2 else converted, feeds, threads, native)
            yield [runs[position] for position in range(3)]

    name = "cpu" if threads == 1 and _fine(time.get_clock_info("thread_time")) else "wall"
    clock = clock or {"cpu": time.thread_time, "wall": time.perf_counter}[name]
    found = compare(openings(), clock, rounds=rounds, progress=progress)
    batch = batch or _rows(source, feeds)
    if not found.sound:
        return Refusal(batch, threads, found)
    progress("profiling", 0.0)
    split = profiling.split(source, converted, feeds, threads) if parts else {}
    return Measurement(batch, threads, found, name, split)


def _rows(source: onnx.ModelProto, feeds: Batch) -> int:
    """The rows of a batch, which of one as given the source's answers tell."""
    if not isinstance(feeds, FedBatch) or feeds.rows is not None:
        return row_count(feeds)
    return row_count(feeds, run_batch(open_session(source, "the source"), None, feeds))


def require_pair(source: SourceModel, converted: str | os.PathLike[str] | onnx.ModelProto) -> onnx.ModelProto:
    """The converted model, if it was made from this source: a ratio to some other model would mislead."""
    label = "the second model" if isinstance(converted, onnx.ModelProto) else os.fspath(converted)
    proto = converted if isinstance(converted, onnx.ModelProto) else read_proto(Path(converted))
    record = require(proto, label)
    if record.source.sha256 != source.sha256:
        raise UserError(
            f"{label} was not converted from {source.label}: sha256 differs",
            f"give the file that it was made from ({record.source.file or 'a model in memory'})",
        )
    return proto


def _try(source: onnx.ModelProto, feeds: Batch, *, made: bool) -> None:
    """A model that inputs made up do not fit is told from one that fails on the user's data."""
    try:
        _run(source, feeds, 1)()
    except UserError as error:
        if made and "failed on the data" in error.message:
            raise UserError(
                error.message.replace("the data", "inputs that were made up"), "give real ones with `data`"
            ) from error
        raise


def _run(model: onnx.ModelProto, feeds: Batch, threads: int, native: bool = True) -> Run:
    opened = profiling.open_quiet(model, threads, native)
    names = [value.name for value in opened.get_outputs()]
    fed = {value.name: feeds[value.name] for value in opened.get_inputs() if value.name in feeds}
    run_batch(opened, names, fed)  # says what is wrong with the data, if anything is
    kinds = {value.type for value in (*opened.get_inputs(), *opened.get_outputs())}
    if not all(kind.startswith("tensor(") and kind != "tensor(string)" for kind in kinds):
        return lambda: run_batch(opened, names, fed)  # what cannot be bound
    binding = opened.io_binding()
    bound = {name: np.ascontiguousarray(array) for name, array in fed.items()}
    for name, array in bound.items():
        binding.bind_cpu_input(name, array)
    for name in names:
        binding.bind_output(name)

    def run(kept: dict[str, Array] = bound) -> None:  # the binding reads what was fed, so that is kept
        opened.run_with_iobinding(binding)

    return run


def _fine(clock: Any) -> bool:
    """Whether a clock resolves a reading; that of CPU time has steps of 16 ms on Windows."""
    return bool(clock.resolution < SHORTEST / 1000)


# ---------------------------------------------------------------------- statistics


def compare(
    openings: Iterator[Sequence[Run]],
    clock: Clock,
    *,
    rounds: int | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Source, source again and converted in turns; the last attempt, whether its control is sound or not.

    `openings` gives the three as something to run, freshly opened each time that it is asked.
    """
    for attempt in range(ATTEMPTS):
        readings = []
        for opening in range(LOADS):
            progress("timing", opening / LOADS)
            readings.append(_readings(next(openings), clock, rounds, 2**attempt))
        found = summary(np.concatenate(readings, axis=1))
        if found.sound:
            break
    return found


def _readings(runs: Sequence[Run], clock: Clock, rounds: int | None, times: int) -> Array:
    """Seconds of one run, (3, rounds)."""
    taken = []
    for run in runs:
        for _ in range(WARM_UP):
            run()
        started = clock()
        run()
        taken.append(max(clock() - started, 1e-9))
    repeats = [max(1, int(SHORTEST / seconds)) for seconds in taken]
    repeats = [min(repeats[:2])] * 2 + repeats[2:]  # the same for both sides of the control
    if rounds is None:
        one = sum(seconds * repeat for seconds, repeat in zip(taken, repeats))
        rounds = int(min(max(SECONDS / one, ROUNDS[0]), ROUNDS[1]))
    rounds = max(1, rounds * times // LOADS)
    rounds += -rounds % len(ORDERS)
    seconds = np.empty((3, rounds))
    for number in range(rounds):
        for position in ORDERS[number % len(ORDERS)]:
            run, repeat = runs[position], repeats[position]
            started = clock()
            for _ in range(repeat):
                run()
            seconds[position, number] = (clock() - started) / repeat
    return seconds


def summary(seconds: Array) -> Comparison:
    """Medians and quartiles over rounds of source, control and converted: (3, rounds)."""
    source, control, converted = seconds
    ratios, controls = 2 * converted / (source + control), control / source
    return Comparison(
        ratio=float(np.median(ratios)),
        control=float(np.median(controls)),
        ratio_quartiles=_quartiles(ratios),
        control_quartiles=_quartiles(controls),
        source_seconds=statistics.median(source.tolist() + control.tolist()),
        converted_seconds=float(np.median(converted)),
        rounds=seconds.shape[1],
    )


def _quartiles(values: Array) -> tuple[float, float]:
    return float(np.quantile(values, 0.25)), float(np.quantile(values, 0.75))
