"""What the file answers for held-out rows, with the numbers found so far.

Tables and quantiles are read off the file's own answers (`FileRun`), so that what is ranked is what is served. For
part A, which numbers are fitted to, the shares of the sites are enough (`take_in`): the `tail` then answers with any
numbers, as it does for left-out calibration rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gapa_onnx.arrays import Array
from gapa_onnx.data import HeldOut
from gapa_onnx.emit.emit import unrecorded
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.errors import UserError
from gapa_onnx.fit.calibrate import Calibration
from gapa_onnx.fit.kept_rows import Purpose
from gapa_onnx.fit.resuming import resumed
from gapa_onnx.model.splice import extract
from gapa_onnx.progress import Progress, silent
from gapa_onnx.sessions.feeding import Feeding
from gapa_onnx.sessions.inference import run_batch
from gapa_onnx.sessions.runtime import open_session, register, session_options
from gapa_onnx.settle.left_out import LeftOutBatch, LeftOutSample, chosen_rows, real_positions
from gapa_onnx.settle.tail import HINT

Answers = dict[str, Array]


class FileRun:
    """The file as it would be with these numbers, which answers with some of its tensors.

    While a noise head is not yet trained, it is the part of the file that these tensors need.
    """

    def __init__(self, template: Template, numbers: Numbers, wanted: Sequence[str]):
        self.wanted = list(dict.fromkeys(wanted))
        options = session_options()
        register(options)
        model = unrecorded(template, numbers, self.wanted)
        if set(template.noise) - set(numbers.noise):
            model = extract(model, self.wanted)
        self._session = open_session(model, "the converted model", options)

    def __call__(self, batch: Mapping[str, Array]) -> Answers:
        """The wanted tensors for a batch of inputs."""
        answers = run_batch(self._session, self.wanted, batch, "the variance graph failed", HINT)
        return dict(zip(self.wanted, answers))


def answers_in(
    run: FileRun, calibration: Calibration, held: HeldOut, part: Array
) -> Iterator[tuple[Array, Answers]]:
    """Positions (n,) and answers of the rows of a part of the held-out data, batch by batch; no other row is among
    them, also where the model wants batches of one size."""
    fed = fed_like(calibration, held)
    for positions, inputs in chosen_rows(fed, fed.batch_rows, part):
        inside = part[positions]
        found = {name: array[inside] for name, array in run(inputs).items()}
        yield positions[inside], found


def take_in(
    template: Template,
    calibration: Calibration,
    held: HeldOut,
    part: Array,
    purposes: Purpose,
    progress: Progress = silent,
) -> LeftOutSample:
    """The rows of a part as left-out rows: nothing was made from them, so their shares are those that the file has.

    Where the model wants batches of one size, other rows may be among them; these have no truth in this part.
    """
    names = [name for site in template.places for name in (site.share, site.queries)]
    later = resumed(template.plan)
    run = FileRun(template, Numbers(calibration.fits), [*names, *later])
    fed, sample = fed_like(calibration, held), LeftOutSample()
    done, total = 0, max(int(part.sum()), 1)
    for positions, inputs in chosen_rows(fed, fed.batch_rows, part):
        found = run(inputs)
        shares = {site.output: found[site.share] for site in template.places}
        queries = {site.output: found[site.queries] for site in template.places}
        kept = queries if Purpose.NOISE in purposes else {}
        behind, real = {name: found[name] for name in later}, real_positions(calibration.places, inputs)
        sample.add(purposes, LeftOutBatch(positions, {**inputs, **behind}, shares, kept, real))
        done += len(positions)
        progress("reading held-out rows", min(1.0, done / total))
    return sample


def fed_like(calibration: Calibration, held: HeldOut) -> Feeding:
    """The held-out rows, fed as the calibration rows are."""
    if calibration.fed.size is None:
        raise UserError(
            "held-out rows are cut one by one, and this model takes batches as they were given",
            "leave `held_out` out",
        )
    return replace(calibration.fed, data=held.data)
