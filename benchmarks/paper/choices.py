"""The tool's default on every kind of network, beside single choices changed and two peers: what docs/defaults.md rests on.

    python benchmarks/paper/choices.py [--quick] [--only NAME …] [--choices NAME …] [--fresh] [--data DIR]
                                       [--networks DIR] [--cache DIR]

Networks and their sets are those of `subjects.py`. Choices:

    source               the network by itself; its score is the entropy of its prediction
    kNN normalised       the network by itself; its score is the distance to the 50th neighbour among last features of length 1
    default              no option given
    its variance         the same file, ranked by the mean variance of the logits, which witnesses have raised
    witnesses none       no other places
    score variance       that file, ranked by the mean variance of the logits, and
    score epistemic      by the epistemic part: what `--score` gives, which asks no witnesses
    euclidean …          one geometry at every place; where the default has it everywhere its line stands again
    paper                `--paper` with a bridge per class

    acc nll ece          of the predicted probabilities on the test rows
    entropy_SET bald_SET score_SET    AUROC against a set, by the entropy of the probabilities, its epistemic part, the score
    flagged              share of the test rows that the file calls strange, where it was asked for .05
    argmax_changed       rows of all sets whose most probable class is not the network's
    places               each place and its geometry, the last first
    seconds              CPU seconds of the conversion

Writes results/choices.csv line by line; a line that is there is not measured again, `--fresh` does. Networks are trained
once and kept in `--networks`; torch is needed for that alone. `--cache` holds CIFAR-10's images. What is not at hand is
skipped with a reason. `--quick` takes few rows of networks that are hardly trained, and writes to a folder of the cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from subjects import HERE, SUBJECTS, Amount, Subject

import packages  # isort: skip  (subjects puts benchmarks/ on the path)
from backbones import CACHE, DATA  # isort: skip
from cifar.peers import PEERS  # isort: skip
from cifar.task import BATCH, Task  # isort: skip
from lines import Lines, machine, say  # isort: skip
from measuring import Answer, auroc, calibration, rounded  # isort: skip
from scipy.special import softmax
from threadpoolctl import threadpool_limits

import gapa_onnx
from gapa_onnx.measure.evaluation import metrics
from gapa_onnx.sessions.runtime import session_options

KEY = ("network", "data", "choice")
DEFAULT, SOURCE, NEIGHBOURS = "default", "source", "kNN normalised"
PEERS_HERE = (SOURCE, NEIGHBOURS)
#: Conversions by what is chosen otherwise than by default.
CONVERSIONS: Mapping[str, Mapping[str, Any]] = {
    DEFAULT: {},
    "witnesses none": {"witnesses": "none"},
    **{name: {"metric": name} for name in ("euclidean", "direction", "polar", "projected")},
    "paper": {"paper": True, "bridge": "per-class"},
}
DEEP = (
    "resnet32",
    "resnet44",
    "resnet56",
)  #: which take long: of conversions they have the default alone, as quick runs do
#: Other scores of a conversion's own file, by the answer that they are.
RANKED: Mapping[str, Mapping[str, str]] = {
    DEFAULT: {"its variance": "var"},
    "witnesses none": {"score variance": "var", "score epistemic": "bald"},
}
CHOICES = (*PEERS_HERE, *(name for choice in CONVERSIONS for name in (choice, *RANKED.get(choice, ()))))
QUICK = Amount(DATA, calibration=600, cifar_calibration=600, test=200, strange=100, quick=True)
QUICK_CHOICES = (SOURCE, NEIGHBOURS, DEFAULT, *RANKED[DEFAULT])
QUICK_SUBJECTS = ("mlp, Adam", "lstm", "reader")


@dataclass(frozen=True)
class Said(Answer):
    """What a converted file says, with the mean variance of the logits."""

    var: np.ndarray | None = None  #: (n,)


Answers = dict[str, Answer]  #: by set, `test` among them


def main() -> None:
    options = _arguments().parse_args()
    amount, results = _amount(options)
    lines = Lines(results / "choices.csv", KEY, fresh=options.quick)
    with threadpool_limits(1), tempfile.TemporaryDirectory() as scratch:
        for subject in _wanted(options):
            left = [
                c for c in _choices(subject, options) if options.fresh or not lines.has(*_key(subject), c)
            ]
            if not left:
                continue
            try:
                task = subject.make(subject, amount)
            except packages.Missing as reason:
                say(f"{subject.name} on {subject.data} is skipped: {reason}")
                continue
            say(f"{subject.name} on {subject.data}")
            for choice, figures in measured(task, left, Path(scratch)):
                counts = {"rows": len(task.test), "strange_rows": len(task.outside["far"])}
                counts["calibration_rows"] = len(task.x_train)
                known = dict(zip(KEY, (*_key(subject), choice)))
                lines.add({**known, **figures, **counts, "seen": subject.seen, **machine()})


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="words in names of networks")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--networks", type=Path, default=Amount.networks, help="where networks are kept")
    parser.add_argument("--cache", type=Path, default=Amount.pictures, help="where CIFAR-10's images are")
    return parser


def _amount(options: argparse.Namespace) -> tuple[Amount, Path]:
    """How much to compute, and where results go."""
    networks = CACHE / "quick" / "subjects" if options.quick else options.networks
    results = networks if options.quick else HERE / "results"
    networks.mkdir(parents=True, exist_ok=True)
    amount = QUICK if options.quick else Amount(options.data)
    return replace(amount, data=options.data, networks=networks, pictures=options.cache), results


def _wanted(options: argparse.Namespace) -> list[Subject]:
    named = [s for s in SUBJECTS if any(word in f"{s.name} {s.data}" for word in options.only)]
    if not options.quick:
        return named
    return [next(s for s in named if s.name == name) for name in QUICK_SUBJECTS if _has(named, name)]


def _choices(subject: Subject, options: argparse.Namespace) -> list[str]:
    few = QUICK_CHOICES if options.quick or subject.name in DEEP else CHOICES
    return [choice for choice in options.choices if choice in few]


def _has(subjects: list[Subject], name: str) -> bool:
    return any(subject.name == name for subject in subjects)


def _key(subject: Subject) -> tuple[str, str]:
    return subject.name, subject.data


# ---------------------------------------------------------------------------- one network


def measured(task: Task, choices: list[str], scratch: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of each choice."""
    for choice, answers in _peers(task).items():
        if choice in choices:
            yield choice, figures(task, answers)
    default: tuple[set[str], dict[str, Any]] | None = None  # its geometries and figures
    for choice, settings in CONVERSIONS.items():
        others = RANKED.get(choice, {})
        if not {choice, *others}.intersection(choices):
            continue
        if default is not None and default[0] == {settings.get("metric")}:
            yield choice, default[1]  # the very same file
            continue
        started = time.process_time()
        path = scratch / "converted.onnx"
        made = gapa_onnx.convert(task.path, {"x": task.x_train}, path, **settings)
        seconds = round(time.process_time() - started, 1)
        if made.path is None:
            say(f"  {choice}: no file, {'; '.join(c.name for c in made.checks if not c.passed)}")
            continue
        answers = _answers(path, task)
        about = {"places": places(made.calibration), "seconds": seconds}
        found = {choice: {**figures(task, answers), **about}}
        found |= {name: {**figures(task, ranked(answers, by)), **about} for name, by in others.items()}
        if choice == DEFAULT:
            default = {fit.geometry.metric for fit in made.calibration.places}, found[choice]
        yield from ((name, row) for name, row in found.items() if name in choices)


def _peers(task: Task) -> dict[str, Answers]:
    """What the network says by itself, ranked by its entropy and by neighbours of its last features."""
    knn = PEERS[NEIGHBOURS](task.bank)
    found: dict[str, Answers] = {SOURCE: {}, NEIGHBOURS: {}}
    for name, (features, logits) in task.said_of_sets.items():
        probs = softmax(logits.astype(np.float64), axis=1)
        found[SOURCE][name] = Answer(probs, score=metrics.entropy_rows(probs))
        found[NEIGHBOURS][name] = Answer(probs, score=knn(features, logits))
    return found


def _answers(path: Path, task: Task) -> Answers:
    """What a converted file says about all sets."""
    session = gapa_onnx.session(path, session_options(threads=1))
    there = {output.name for output in session.get_outputs()}
    roles = {"probs": "probs", "epistemic": "bald", "score": "score", "ood": "flagged", "var": "var"}
    wanted = {f"logits_{role}": name for role, name in roles.items() if f"logits_{role}" in there}

    def predict(x: np.ndarray) -> Said:
        found = dict(zip(wanted.values(), session.run(list(wanted), {"x": x})))
        probs = found["probs"].astype(np.float64)
        return Said(**{**found, "probs": probs, "var": found["var"].mean(axis=1)})

    def all_of(x: np.ndarray) -> Said:
        parts = [predict(x[start : start + BATCH]) for start in range(0, len(x), BATCH)]
        columns = {name: [getattr(part, name) for part in parts] for name in wanted.values()}
        return Said(**{name: np.concatenate(column) for name, column in columns.items()})

    return {name: all_of(x) for name, x in task.sets.items()}


def ranked(answers: Answers, by: str) -> Answers:
    """The same answers with another of them as the score; the flag is that of the first score, so there is none."""
    return {name: replace(said, score=getattr(said, by), flagged=None) for name, said in answers.items()}


def places(found: Any) -> str:
    """Each place of a calibration with its geometry, the last site first."""
    fits = (*reversed(found.fits), *found.witnesses)
    return "; ".join(f"{fit.site.output} {fit.geometry.metric}" for fit in fits)


def figures(task: Task, answers: Answers) -> dict[str, Any]:
    """How good the answers are; empty where there is nothing to measure."""
    known = answers["test"]
    found = dict(calibration(known, task.labels))
    own = {name: metrics.entropy_rows(said.probs) for name, said in answers.items()}
    for name in task.outside:
        found[f"entropy_{name}"] = auroc(own["test"], own[name])
        found[f"bald_{name}"] = auroc(known.bald, answers[name].bald)
        found[f"score_{name}"] = auroc(known.score, answers[name].score)
    found["flagged"] = None if known.flagged is None else known.flagged.mean()
    changed = sum(int((s.probs.argmax(axis=1) != task.choices[n]).sum()) for n, s in answers.items())
    return {**rounded(found), "argmax_changed": changed, "places": "", "seconds": ""}


if __name__ == "__main__":
    main()
