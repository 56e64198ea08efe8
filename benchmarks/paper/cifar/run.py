"""ResNets on CIFAR-10 against SVHN and other strange images: this tool beside its peers, on the same networks.

    python benchmarks/paper/cifar/run.py [--quick] [--data DIR] [--nets 20,32,44,56,near] [--rows NAME …]
                                         [--fresh] [--untimed] [--cache DIR]

    acc nll ece        of the predicted probabilities on the test set, but for the 500 images that temperature
                       scaling sees
    ood bald           AUROC against SVHN: by the entropy of the probabilities, by its epistemic part
    score_SET          AUROC of the method's own score against a set of `shifts.py`
    argmax_changed     rows of the test set and SVHN whose most probable class is not the network's
    flagged low_p      shares of the test set that the method calls strange, and whose p-value is at most 0.05
    fit_seconds        CPU seconds from the trained network to the method ready for use
    ratio, control     time of a batch over the network's, and the network's over itself, in turns in one process, on
                       one thread (`gapa_onnx.measure.bench`); all in onnxruntime

Writes results/cifar.csv line by line; a line that is there is not run again. ResNet-20 also in float16 and int8.
`near` is the table of `near.py`, which writes results/near.csv. `--rows kNN gapa` takes only rows whose names contain
one of the words, `--fresh` runs the chosen ones again; with `--untimed` the time of a line that is there stays, for
machines that are busy, on which times tell nothing. `--quick` takes few rows of ResNet-20 and few images, and writes
to a folder of the cache. What is not at hand is skipped with a reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1])]  # not this folder: its modules are those of a package

import onnx  # noqa: E402
import packages  # noqa: E402
from backbones import DATA  # noqa: E402
from lines import Lines, machine, say  # noqa: E402
from measuring import auroc, calibration, rounded  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

from cifar import near  # noqa: E402
from cifar.images import HELD_OUT, cifar10, normalised, shared  # noqa: E402
from cifar.nets import ACCURACY, eight_bits, half_precision, resnet  # noqa: E402
from cifar.rows import EIGHT, HALF, OURS, QUICK, ROWS, NotWritten, Row  # noqa: E402
from cifar.shifts import ROWS as STRANGE_ROWS  # noqa: E402
from cifar.shifts import sets  # noqa: E402
from cifar.task import Task  # noqa: E402
from gapa_onnx.measure.evaluation import metrics  # noqa: E402

KEY = ("net", "row")
NEAR = "near"
LOW_P = 0.05
OPTIONAL = ("torch", "laplace")  #: packages that a row may need


def main() -> None:
    options = _arguments().parse_args()
    cache = options.cache / "quick" if options.quick else options.cache
    results = cache if options.quick else HERE.parent / "results"
    cache.mkdir(parents=True, exist_ok=True)
    with threadpool_limits(1):  # CPU time of the calling thread is then all of the time
        try:
            _tables(options, cache, results)
        except packages.Missing as reason:
            say(f"skipped: {reason}")
        if NEAR in options.nets:
            near.table(Lines(results / "near.csv", near.KEY, fresh=False), options, cache)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--cache", type=Path, default=packages.cache_folder("cifar"))
    parser.add_argument("--nets", type=_nets, default=[*map(str, ACCURACY), NEAR], metavar="20,32,…")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--untimed", action="store_true")
    return parser


def _nets(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in (*map(str, ACCURACY), NEAR):
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(map(str, ACCURACY))}, {NEAR}")
    return names


def _tables(options: argparse.Namespace, cache: Path, results: Path) -> None:
    lines = Lines(results / "cifar.csv", KEY, fresh=False)
    depths = [int(name) for name in options.nets if name != NEAR][: 1 if options.quick else None]
    for task, rows in _tasks(depths, options, cache):
        for row in matching(rows, options.rows):
            if options.fresh or not lines.has(task.name, row.name):
                say(f"{task.name}: {row.name}")
                try:
                    known = {"net": task.name, "row": row.name}
                    times = _times(lines, known) if options.untimed else None
                    lines.add({**known, **measured(row, task, times), **machine()})
                except ModuleNotFoundError as error:
                    if error.name not in OPTIONAL:
                        raise
                    say(f"  skipped: {error.name} is not installed")
                except NotWritten as failed:
                    say(f"  no line: {failed}")


def _times(lines: Lines, known: Mapping[str, str]) -> dict[str, Any]:
    """The time of a line that is there, and none where it is not."""
    there = [line for line in lines.rows if all(str(line[name]) == known[name] for name in KEY)]
    return {name: there[0][name] if there else "" for name in ("ratio", "control")}


def matching(rows: Sequence[Row], words: Sequence[str]) -> list[Row]:
    """Rows whose names contain one of the words."""
    return [row for row in rows if any(word.lower() in row.name.lower() for word in words)]


def _tasks(
    depths: Sequence[int], options: argparse.Namespace, cache: Path
) -> Iterator[tuple[Task, Sequence[Row]]]:
    """Networks, each with the rows that it has: all, or in other number formats MAP and the default."""
    if not depths:
        return
    everything = {depth: shared(options.data, f"resnet{depth}.npz") for depth in depths}
    data = cifar10(options.cache, batches=1 if options.quick else 5)
    train, most, strange = (2_000, 1_000, 250) if options.quick else (50_000, len(data.x_test), STRANGE_ROWS)
    images = sets(options.data, data.x_test[HELD_OUT:], strange)
    outside = {name: normalised(x[:strange] if options.quick else x) for name, x in images.items()}
    x_train, x_test = normalised(data.x_train[:train]), normalised(data.x_test[: HELD_OUT + most])
    for depth, weights in everything.items():
        path = cache / f"resnet{depth}.onnx"
        onnx.save(resnet(weights), path)
        task = Task(
            name=path.stem,
            path=path,
            x_train=x_train,
            y_train=data.y_train[:train],
            test=x_test[HELD_OUT:],
            labels=data.y_test[HELD_OUT : len(x_test)],
            outside=outside,
            held_out=(x_test[:HELD_OUT], data.y_test[:HELD_OUT]),
            quick=options.quick,
        )
        if not options.quick:
            require_published(task, ACCURACY[depth])
        yield task, [row for row in ROWS if not options.quick or row.name in QUICK]
        if depth == min(ACCURACY) and not options.quick:
            for variant in (HALF, EIGHT):
                yield _other_numbers(task, variant), [row for row in ROWS if row.name in ("MAP", OURS)]


def require_published(task: Task, accuracy: float) -> None:
    """Stop where a network is not the published one on all test images, held-out ones too."""
    assert task.held_out is not None
    x, labels = task.held_out
    right = (task.logits(x).argmax(axis=1) == labels).sum() + (task.choices["test"] == task.labels).sum()
    found = right / (len(labels) + len(task.labels))
    if abs(found - accuracy) > 0.0005:
        sys.exit(
            f"{task.name} is right on {found:.4f} of the test images and not on {accuracy}, as published"
        )


def _other_numbers(task: Task, kind: str) -> Task:
    """The same network in float16, or in int8 with ranges from 500 training images."""
    path = task.path.with_name(f"{task.path.stem}_{kind}.onnx")
    if kind == HALF:
        onnx.save(half_precision(onnx.load(task.path)), path)
    else:
        eight_bits(task.path, path, task.x_train[:500])
    return replace(task, name=f"{task.name} {kind}", path=path)


# ------------------------------------------------------------------------ one line


def measured(row: Row, task: Task, times: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The figures of a row; its time too, unless `times` are given."""
    fitted = row.fit(task)
    answers = row.answers(fitted, task)
    known, svhn = answers["test"], answers["svhn"]
    figures = calibration(known, task.labels) | {
        "ood": auroc(metrics.entropy_rows(known.probs), metrics.entropy_rows(svhn.probs)),
        "bald": auroc(known.bald, svhn.bald),
    }
    figures |= {f"score_{name}": auroc(known.score, answers[name].score) for name in task.outside}
    figures |= {
        "flagged": None if known.flagged is None else known.flagged.mean(),
        "low_p": None if known.pvalue is None else (known.pvalue <= LOW_P).mean(),
    }
    changed = sum(
        (answers[name].probs.argmax(axis=1) != task.choices[name]).sum() for name in ("test", "svhn")
    )
    if times is None:
        time = row.timed(fitted, task)
        times = {"ratio": round(time.ratio, 3) if time.sound else "", "control": round(time.control, 3)}
    return {
        "rows": len(task.test),
        **rounded(figures),
        "argmax_changed": int(changed),
        "fit_seconds": round(fitted.seconds, 2),
        **times,
        "settings": row.settings,
    }


if __name__ == "__main__":
    main()
