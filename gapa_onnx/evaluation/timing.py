"""What a converted file costs beside its source: both timed in turns, with the source against itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gapa_onnx.evaluation.result import Cost
from gapa_onnx.inference import answers, open_model, row_count

THREADS = 1  # idle threads of the other sessions would disturb the one that is timed
WARM_UP = 2
ROUNDS = 15
ATTEMPTS = 3
SHORTEST = 0.005  # seconds of one measurement; shorter runs are repeated within it
TOLERATED = 0.03  # by which the source may differ from itself

Clock = Callable[[], float]


def measure_cost(
    source: str | Path, converted: object, batch: Mapping[str, np.ndarray], clock: Clock = time.perf_counter
) -> tuple[Cost | None, str]:
    """The cost ratio on one batch, or None, and a sentence: how it was measured, or why it is not given."""
    sessions = [open_model(source, threads=THREADS) for _ in range(2)] + [
        open_model(converted, threads=THREADS)
    ]
    runs = []
    for opened in sessions:
        names = [value.name for value in opened.get_outputs()]
        fed = {value.name: batch[value.name] for value in opened.get_inputs() if value.name in batch}
        runs.append(lambda opened=opened, names=names, fed=fed: answers(opened, names, fed))
    found = compare(runs, clock)
    if isinstance(found, str):
        return None, found
    ratio, control = found
    cost = Cost(ratio, control, row_count(batch), THREADS)
    return cost, f"batches of {cost.batch} rows, {THREADS} thread, source against itself {control:.3f}"


def compare(runs: Sequence[Callable[[], object]], clock: Clock) -> tuple[float, float] | str:
    """(third over first, second over first) in medians of alternating runs; a reason if the first two differ."""
    control = float("nan")
    for attempt in range(1, ATTEMPTS + 1):
        repeats = []
        for run in runs:
            for _ in range(WARM_UP):
                run()
            started = clock()
            run()
            repeats.append(max(1, int(SHORTEST / max(clock() - started, 1e-9))))
        repeats = [min(repeats)] * 2 + [repeats[2]]  # the same for both sides of the control
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(ROUNDS * attempt):
            for run, repeat, seconds in zip(runs, repeats, times):
                started = clock()
                for _ in range(repeat):
                    run()
                seconds.append((clock() - started) / repeat)
        first, second, third = map(statistics.median, times)
        control = second / first
        if abs(control - 1) <= TOLERATED:
            return third / first, control
    return (
        f"the cost ratio is not given: the source against itself gave {control:.2f} instead of 1.00, "
        "so this machine is too busy to measure"
    )
