"""Count on part B what a file promises: coverage of sets and intervals, and the error of what is not deferred.

Everything is read off the file's own answers with all its other numbers in place. Held-out rows are answered by the
file itself; calibration rows, of which it knows too much, as left-out rows by its tail, and a promise is then
approximate. docs: `conformal` has the mathematics, `plan.heads.promises` the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import HeldOut
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.errors import UserError
from gapa_onnx.fit.calibrate import Calibration
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.plan.head import Task
from gapa_onnx.plan.heads.promises import CERTAIN, Promises
from gapa_onnx.record import PromiseRecord
from gapa_onnx.settings import Settings
from gapa_onnx.settle import conformal
from gapa_onnx.settle.held_out import Answers, FileRun, answers_in
from gapa_onnx.settle.left_out import LeftOutSample
from gapa_onnx.settle.tail import Tail


@dataclass(frozen=True)
class Counting:
    """The rows that promises rest on, and who answers for them."""

    template: Template
    calibration: Calibration
    held: HeldOut
    sample: LeftOutSample  #: of the calibration rows, where the rows are among them
    settings: Settings

    def answers(
        self, numbers: Numbers, wanted: list[str], *, fitting: bool = False
    ) -> Iterator[tuple[Array, Answers]]:
        """Positions and answers of the rows of part B, or of part A."""
        part = self.held.fitting if fitting else self.held.counting
        if self.held.exact:
            yield from answers_in(FileRun(self.template, numbers, wanted), self.calibration, self.held, part)
            return
        tail = Tail(self.template, wanted, numbers)
        for batch in self.sample.batches(Purpose.SCALING if fitting else Purpose.COUNTING):
            inside = part[batch.positions]
            found = {name: array[inside] for name, array in tail(batch, numbers.fits).items()}
            yield batch.positions[inside], found

    def labelled(
        self, numbers: Numbers, output: str, wanted: list[str], *, fitting: bool = False
    ) -> list[Array]:
        """Labels (n,) of the rows of a part, and some tensors for them; rows without a label are left out."""
        labels, parts = self.held.labels[output], []
        for positions, found in self.answers(numbers, wanted, fitting=fitting):
            known = labels[positions] >= 0
            parts.append((labels[positions][known], *(found[name][known] for name in wanted)))
        if not parts:
            raise UserError(f"no labelled row of {output!r} is left to count on", "label more rows")
        return [np.concatenate(columns) for columns in zip(*parts)]

    def predicted(
        self, numbers: Numbers, output: str, *, fitting: bool = False
    ) -> Iterator[tuple[Array, Array, Array]]:
        """Means, total variances and targets (n, …) of the rows of a part whose targets are known."""
        total, targets = self.template.roles[output]["total_var"], self.held.targets[output]
        for positions, found in self.answers(numbers, [output, total], fitting=fitting):
            true = np.asarray(targets[positions], np.float64).reshape(found[output].shape)
            known = np.isfinite(true.reshape(len(true), -1)).all(axis=1)
            yield found[output][known], found[total][known], true[known]

    def record(
        self, kind: str, level: float, rows: int, tensor: str, table: conformal.Table
    ) -> PromiseRecord:
        holds = "exactly" if self.held.exact else "approximately"
        return PromiseRecord(kind, level, rows, holds, tensor, table)


def with_promises(counting: Counting, numbers: Numbers) -> Numbers:
    """Find the lines of all promises, and add them to the numbers."""
    for output in counting.held.labels:
        if counting.settings.sets == "raps":
            numbers = _penalised(counting, numbers, output)
        numbers = _with(numbers, output, sets=_sets(counting, numbers, output))
        if counting.settings.max_error is not None:
            numbers = _with(numbers, output, deferral=_deferral(counting, numbers, output))
    for output in counting.held.targets:
        numbers = _with(numbers, output, reach=_reach(counting, numbers, output))
        numbers = _with(numbers, output, intervals=_intervals(counting, numbers, output))
    return numbers


def _with(numbers: Numbers, output: str, **found: object) -> Numbers:
    promises = replace(numbers.promises.get(output, Promises()), **found)  # type: ignore[arg-type]
    return replace(numbers, promises={**numbers.promises, output: promises})


def _penalised(counting: Counting, numbers: Numbers, output: str) -> Numbers:
    """The penalties of RAPS, from the ranks of true classes in part A."""
    role = counting.template.roles[output]["probs"]
    labels, probs = counting.labelled(numbers, output, [role], fitting=True)
    ranks = (probs > np.take_along_axis(probs, labels[:, None], axis=1)).sum(axis=1)
    found = conformal.penalties(ranks, counting.settings.coverage, probs.shape[1])
    return _with(numbers, output, penalties=found)


def _pixel_sets(counting: Counting, numbers: Numbers, output: str, axis: int) -> PromiseRecord:
    """Of maps of labels: the mean share of the pixels of an image whose class is in its set."""
    names, settings, risk = counting.template.promises[output], counting.settings, conformal.PixelRisk()
    labels, wanted = counting.held.labels[output], str(names.set_scores)
    for positions, found in counting.answers(numbers, [wanted]):
        every = np.moveaxis(found[wanted], axis, -1).reshape(len(positions), -1, found[wanted].shape[axis])
        true = labels[positions].reshape(len(positions), -1)
        scores = np.take_along_axis(every, np.maximum(true, 0)[..., None], axis=-1)[..., 0]
        scores = np.where(np.isnan(scores), CERTAIN, scores)
        for row in range(len(positions)):
            if (true[row] >= 0).any():
                risk.add(scores[row, true[row] >= 0])
    table = risk.lines(settings.coverage, output)
    return counting.record(settings.sets, settings.coverage, risk.rows, str(names.set_line), table)


def _sets(counting: Counting, numbers: Numbers, output: str) -> PromiseRecord:
    head = next(head for head in counting.template.plan.heads if head.output == output)
    if head.task is Task.SEGMENTATION and head.axis is not None:
        return _pixel_sets(counting, numbers, output, head.axis)
    names, settings = counting.template.promises[output], counting.settings
    labels, every = counting.labelled(numbers, output, [str(names.set_scores)])
    scores = np.take_along_axis(every, labels[:, None], axis=1)[:, 0].astype(np.float64)
    scores = np.where(np.isnan(scores), CERTAIN, scores)  # such a class is in every set
    if settings.per_class == "yes":
        table = conformal.lines_by_class(scores, labels, every.shape[1], settings.coverage, output)
    else:
        table = conformal.lines(scores, settings.coverage, output)
    return counting.record(settings.sets, settings.coverage, len(labels), str(names.set_line), table)


def _deferral(counting: Counting, numbers: Numbers, output: str) -> PromiseRecord:
    names, settings = counting.template.promises[output], counting.settings
    asked = settings.max_error
    assert asked is not None
    wanted = [str(names.confidence), counting.template.roles[output]["probs"]]
    told, counted = (
        (confidence, probs.argmax(axis=1) != labels)
        for labels, confidence, probs in (
            counting.labelled(numbers, output, wanted, fitting=fitting) for fitting in (True, False)
        )
    )
    found = {
        error: conformal.answered_from(told, counted, error, settings.confidence)
        for error in sorted({*conformal.ERRORS, asked})
    }
    table: conformal.Table = {f"{error:g}": (line,) for error, line in found.items() if line is not None}
    if f"{asked:g}" not in table:
        raise _not_kept(asked, settings.confidence, len(counted[0]), table)
    record = counting.record("error", asked, len(counted[0]), str(names.answered_from), table)
    return replace(record, confidence=settings.confidence)


def _not_kept(asked: float, confidence: float, rows: int, table: conformal.Table) -> UserError:
    """What to do about an error that cannot be promised."""
    needed = conformal.answers_needed(asked, confidence)
    if rows < needed:
        return UserError(
            f"an error of at most {asked:g} with confidence {confidence:g} needs {needed} rows to count on, and there "
            f"are {rows}",
            f"label about {2 * needed + 2} rows that the model was not fitted to, at least, or allow more error",
        )
    least = f", the least is {min(table, key=float)}" if table else ""
    return UserError(
        f"no {needed} rows can be answered with an error of at most {asked:g} with confidence {confidence:g}{least}",
        "allow more error with `max_error`, or label more rows",
    )


def _reach(counting: Counting, numbers: Numbers, output: str) -> Array:
    """How far intervals reach to either side, from part A: (2, …) in the shape of a row."""
    parts = list(counting.predicted(numbers, output, fitting=True))
    mean, var, true = (np.concatenate(columns) for columns in zip(*parts))
    found = conformal.reaches(mean, var, true, counting.settings.coverage)
    return found.astype(np.float32).reshape(2, *mean.shape[1:])  # as the file holds them


def _intervals(counting: Counting, numbers: Numbers, output: str) -> PromiseRecord:
    reach = numbers.promises[output].reach
    assert reach is not None
    flat = reach.reshape(2, -1)
    parts = [
        conformal.interval_scores(mean, var, true, flat)
        for mean, var, true in counting.predicted(numbers, output)
    ]
    scores = np.concatenate(parts) if parts else np.empty(0)
    coverage = counting.settings.coverage
    table = conformal.lines(scores, coverage, output)
    factor = str(counting.template.promises[output].factor)
    return counting.record("interval", coverage, len(scores), factor, table)
