"""Which task each output serves, and where its logits are: what the heads of a converted file read.

An output that ends in Softmax, LogSoftmax or Sigmoid says it by itself. Without such an end its shape
and its name are all there is; what follows from these is an assumption, and `Head.reason` says so.
Where they do not tell, the task is NONE: a variance and no head. `spec` (the setting `task`) overrules all that.
What is seen of an output is in `evidence`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.detection import BOX, Detector, by_shape, find_detectors
from gapa_onnx.plan.evidence import End, Evidence, read_outputs
from gapa_onnx.plan.head import Head, Task

WIDE_AS_A_VOCABULARY = 1000  #: classes per position from which on these are taken for tokens
MORE_THAN_AN_IMAGE = 5  #: channels of a map from which on these are taken for classes
COARSEST_SEGMENTATION = 8  #: pixels of the input per position of the map; detectors are coarser


def find_heads(source: SourceModel, outputs: Sequence[str], spec: str = "auto") -> tuple[Head, ...]:
    """The head of each of these outputs, which carry a variance.

    `spec` is "auto", a task for all outputs that it fits, or "name=task,name=task" for some; the
    outputs that it leaves out are as in "auto". Raises UserError where a task fits no output, or not
    the one that it is given for.
    """
    known = read_outputs(source)
    asked = _asked(spec, outputs)
    heads, misfits = [], []
    detectors = _detectors(source, known, outputs, asked)
    asked = _beside(detectors, asked)
    for name in outputs:
        if name in detectors:
            heads.append(_of_detector(known[name], detectors[name]))
            continue
        try:
            head = _as_asked(known[name], asked[name]) if name in asked else _detected(known[name], known)
        except _Misfit as misfit:
            if "=" in spec:
                raise UserError(
                    f"output {name!r} cannot be of task {asked[name].value!r}: {misfit}",
                    f"leave it to auto, or give it one of {_TASK_WORDS}",
                ) from misfit
            misfits.append(f"{name!r}: {misfit}")
            head = _detected(known[name], known)
            head = replace(head, reason=f"{head.reason} (not {asked[name].value}: {misfit})")
        heads.append(head)
    if misfits and len(misfits) == len(heads):
        raise UserError(
            f"`task={spec.strip()!r}` fits no output ({'; '.join(misfits)})",
            f"let `task` be auto, one of {_TASK_WORDS}, or name=task for single outputs",
        )
    return tuple(heads)


def _detectors(
    source: SourceModel, known: Mapping[str, Evidence], outputs: Sequence[str], asked: Mapping[str, Task]
) -> dict[str, Detector]:
    """The detectors by the output that has their head: those that are seen, unless another task is asked for."""
    found = {
        detector.outputs[0]: detector
        for detector in find_detectors(source, known)
        if all(asked.get(name, Task.DETECTION) is Task.DETECTION for name in detector.outputs[:1])
    }
    within = {name for detector in found.values() for name in detector.outputs}
    for name, task in asked.items():
        if task is Task.DETECTION and name not in within:
            by_its_sizes = by_shape(source.tensors[name])
            if by_its_sizes is not None:
                found[name] = by_its_sizes
    return {name: detector for name, detector in found.items() if name in outputs}


def _beside(detectors: Mapping[str, Detector], asked: Mapping[str, Task]) -> dict[str, Task]:
    """What is asked of outputs; not that a detector's second output be another one."""
    within = {name for detector in detectors.values() for name in detector.outputs}
    return {name: task for name, task in asked.items() if task is not Task.DETECTION or name not in within}


def _of_detector(out: Evidence, detector: Detector) -> Head:
    logits = detector.logits or detector.classes
    return Head(out.name, Task.DETECTION, logits.tensor, detector.link, logits.axis, out.rank, detector.reason,
                detector=detector)  # fmt: skip


_TASK_WORDS = ", ".join(task.value for task in Task)


class _Misfit(Exception):
    """A task that an output cannot have; the message is the reason."""


# -------------------------------------------------------------------------------- what is asked


def _asked(spec: str, outputs: Sequence[str]) -> dict[str, Task]:
    """The tasks that are asked for, by output. Names may hold commas and equals signs themselves."""
    if "=" not in spec:
        task = _task(spec)
        return {} if task is None else dict.fromkeys(outputs, task)
    asked: dict[str, Task] = {}
    named: set[str] = set()
    rest = spec.strip()
    while rest:
        fitting = [
            name for name in outputs if rest.startswith(name) and rest[len(name) :].lstrip()[:1] == "="
        ]
        if not fitting:
            name = rest.partition("=")[0].strip()
            near = difflib.get_close_matches(name, list(outputs), n=1, cutoff=0.5)
            raise UserError(
                f"`task` names {name!r}, which is no output with a variance",
                (f"did you mean {near[0]!r}? " if near else "")
                + f"the outputs with a variance are {', '.join(map(repr, outputs))}; "
                "the form is name=task,name=task",
            )
        name = max(fitting, key=len)
        word, _, rest = rest[len(name) :].lstrip()[1:].partition(",")
        task, rest = _task(word), rest.strip()
        if name in named:
            raise UserError(f"`task` names output {name!r} twice", "give each output one task")
        named.add(name)
        if task is not None:
            asked[name] = task
    return asked


def _task(word: str) -> Task | None:
    """The task of that name; None for auto."""
    word = word.strip().lower()
    if word == "auto":
        return None
    if word not in {task.value for task in Task}:
        raise UserError(f"there is no task {word!r}", f"the tasks are auto, {_TASK_WORDS}")
    return Task(word)


# ------------------------------------------------------------------------- tasks that are seen

_GIVE = "give `task` if you know"
_CLASS_WORDS = (
    "prob", "probability", "probabilities", "class", "classes", "cls", "classifier", "score", "label",
)  # fmt: skip
_TOKEN_WORDS = ("vocab", "vocabulary", "token", "lm")
_MAP_WORDS = ("logit", "mask", "seg", "segmentation")
_IMAGE_WORDS = ("image", "img", "rgb", "recon", "reconstruction", "reconstructed", "generated")
_OTHER_WORDS = (
    "box", "boxes", "bbox", "bboxes", "loc", "landmark", "keypoint", "offset", "pose", "depth", "flow", "mel",
    "embedding", "embed", "feature", "hidden", "state", "action", "value", "regression", *_IMAGE_WORDS,
)  # fmt: skip


def _head(out: Evidence, task: Task, reason: str, link: str = "identity", axis: int | None = None) -> Head:
    """A head that reads the logits before the link, or else the output."""
    end = out.end if out.end is not None and link == out.end.link else None
    logits, derived = (out.numbers, None) if end is None else (end.logits.name, end.derived)
    numbers = "" if out.numbers == out.name else out.numbers
    return Head(out.name, task, logits, link, axis, out.rank, reason, numbers=numbers, derived=derived)


def _none(out: Evidence, reason: str) -> Head:
    return _head(out, Task.NONE, reason)


def _detected(out: Evidence, known: Mapping[str, Evidence]) -> Head:
    if out.end is not None:
        return _by_sigmoid(out) if out.end.op == "Sigmoid" else _by_softmax(out, out.end)
    if not out.is_float:
        return _none(out, "is no tensor of floating-point numbers, and no logits are in sight")
    for other in known.values():
        if other.end is None or other.end.derived is not None:
            continue
        if other.end.logits.name in (out.name, out.value):
            head = _detected(other, known)
            reason = f"holds what goes into the end of output {other.name!r}, which {head.reason}"
            return replace(head, output=out.name, logits=out.name, reason=reason)
    if out.rearranged is not None:
        return _none(out, f"holds probabilities whose logits are out of reach ({out.rearranged})")
    return _by_shape(out, known)


def _by_softmax(out: Evidence, end: End) -> Head:
    op, axis = str(end), end.axis
    reason = f"ends in {op} along axis {axis}"
    if axis is None:
        return _none(out, f"ends in {op}, but not along one axis that is known")
    if end.weighs or out.says("attention", "attn"):
        return _none(out, f"{reason}, which weighs other values as attention does")
    if axis == 0:
        return _none(out, f"{reason}, which is that of the rows")
    if out.size(axis) == 1:
        return _none(out, f"{reason}, which has a single class")
    if out.rank == 3 and axis == 2 and _is_vocabulary(out, axis):
        return _head(out, Task.TOKENS, f"{reason}, over a vocabulary", "softmax", axis)
    if out.rank == 2 or out.is_one_position:
        return _head(out, Task.CLASSIFICATION, reason, "softmax", axis)
    if out.rank == 3:
        return _head(out, Task.CLASSIFICATION, f"{reason}, at each position", "softmax", axis)
    if out.rank is not None and axis in (1, out.rank - 1):
        return _head(out, Task.SEGMENTATION, f"{reason} of a {out} map", "softmax", axis)
    return _none(out, f"{reason} of {out}, which is no usual place for classes; {_GIVE}")


def _is_vocabulary(out: Evidence, axis: int | None) -> bool:
    return (out.size(axis) or 0) >= WIDE_AS_A_VOCABULARY or out.says(*_TOKEN_WORDS)


def _by_sigmoid(out: Evidence) -> Head:
    axis, width = out.class_axis, out.size(out.class_axis)
    if not out.rank:
        return _none(out, f"ends in Sigmoid, but its rank is {'unknown' if out.rank is None else 0}; {_GIVE}")
    image = out.rank > 3 and width == 3 and not out.says(*_MAP_WORDS)
    if image or out.says(*_IMAGE_WORDS):
        return _none(out, f"ends in Sigmoid, but {out} may be an image as well as probabilities; {_GIVE}")
    if out.rank > 3 and not out.is_one_position:
        reason = f"ends in Sigmoid: yes or no for each channel and position of a {out} map"
        return _head(out, Task.SEGMENTATION, reason, "sigmoid", axis)
    return _head(out, Task.MULTILABEL, f"ends in {out.end}: {_yes_or_no(out)}", "sigmoid", axis)


def _yes_or_no(out: Evidence) -> str:
    rank = out.rank or 0
    width = out.size(out.class_axis) if rank > 1 else 1
    per_position = "" if rank < 3 or out.is_one_position else " at each position"
    if width == 1:
        return f"a binary classification{per_position}, which is multilabel with one label"
    return f"yes or no for each of {width or 'several'} labels{per_position}"


def _by_shape(out: Evidence, known: Mapping[str, Evidence]) -> Head:
    """What the shape tells where neither Softmax nor Sigmoid is at the end: assumptions, all of them."""
    if not out.rank:
        return _none(out, f"its rank is {'unknown' if out.rank is None else 0}; {_GIVE}")
    if out.maker in ("If", "Loop", "Scan"):
        return _none(out, f"comes out of {out.maker}, whose inside is out of reach; {_GIVE}")
    one = out.is_one_position
    if out.rank == 1 or one and out.size(out.class_axis) == 1:
        return _single(out)
    if out.rank == 3 and (not one or _is_vocabulary(out, out.class_axis)):
        return _positions(out)
    return _classes(out, known) if one else _map(out, known)


def _single(out: Evidence) -> Head:
    if out.rank == 1 and out.size(0) not in (None, 1):
        return _none(out, f"{out} may be {out.size(0)} rows or {out.size(0)} features of one row; {_GIVE}")
    if out.says("logit"):
        reason = f"no Sigmoid at the end, but {out} with 'logit' in its name: assumed to be {_yes_or_no(out)}"
        return _head(
            out, Task.MULTILABEL, f"{reason}; `task='regression'` if it is not", "sigmoid", out.class_axis
        )
    if out.says("prob", "probability"):
        return _none(
            out, f"its name speaks of a probability, but it ends in {out.maker}, not in Sigmoid; {_GIVE}"
        )
    return _head(
        out,
        Task.REGRESSION,
        f"{out} that does not end in Sigmoid: assumed to be a regression; "
        "`task='multilabel'` if it is the logit of a yes or no",
    )


def _classes(out: Evidence, known: Mapping[str, Evidence]) -> Head:
    width, linear = out.size(out.class_axis), out.features is not None
    named = out.says("logit") or linear and out.says(*_CLASS_WORDS)
    if not linear and not named:
        return _none(out, f"{out} ends in {out.maker}: neither Softmax, Sigmoid nor a linear layer; {_GIVE}")
    if not named:
        if width is None or width < 3:
            return _none(
                out, f"{out} from a linear layer may be {width or 'several'} classes or numbers; {_GIVE}"
            )
        if out.says(*_OTHER_WORDS):
            return _none(out, f"{out} from a linear layer, but its name does not speak of classes; {_GIVE}")
        beside = [f"{other.name!r} with its {other.end.op}" for other in known.values() if other.end]
        if beside:
            return _none(
                out, f"{out} from a linear layer, beside {beside[0]}: not taken for classes; {_GIVE}"
            )
    origin = "named like logits" if named else "from a linear layer"
    reason = (
        f"no Softmax at the end, but {out} {origin}: assumed to be logits of {width or 'several'} classes"
    )
    return _head(
        out, Task.CLASSIFICATION, f"{reason}; `task='regression'` if they are not", "softmax", out.class_axis
    )


def _positions(out: Evidence) -> Head:
    axis, linear = out.class_axis, out.features is not None
    change = "`task='none'` if they are not"
    if out.says("logit") or linear and not out.says(*_OTHER_WORDS):
        if axis == 2 and _is_vocabulary(out, axis):
            reason = f"no Softmax at the end, but {out}: assumed to be logits over a vocabulary; {change}"
            return _head(out, Task.TOKENS, reason, "softmax", axis)
        if out.says("logit", *_CLASS_WORDS):
            reason = f"no Softmax at the end, but named like logits: assumed to be logits along axis {axis} of {out}; {change}"
            return _head(out, Task.CLASSIFICATION, reason, "softmax", axis)
    return _none(out, f"{out} may be classes, features or numbers at each position; {_GIVE}")


def _map(out: Evidence, known: Mapping[str, Evidence]) -> Head:
    axis, width = out.class_axis, out.size(out.class_axis)
    linear = out.features is not None
    named = out.says("logit") or linear and out.says(*_MAP_WORDS)
    if not linear and not named:
        return _none(out, f"{out} ends in {out.maker}: neither Softmax, Sigmoid nor a linear layer; {_GIVE}")
    doubt = None if named else _doubt_about_map(out, known)
    if doubt is not None:
        return _none(out, f"{doubt}; {_GIVE}")
    link, what = (
        ("sigmoid", "the logit of a mask")
        if width == 1
        else ("softmax", f"logits of {width or 'several'} classes")
    )
    reason = (
        f"no Softmax at the end, but a {out} map: assumed to be {what} per position; `task='none'` if not"
    )
    return _head(out, Task.SEGMENTATION, reason, link, axis)


def _doubt_about_map(out: Evidence, known: Mapping[str, Evidence]) -> str | None:
    """Why a map from a linear layer, whose name says nothing, may hold something else than classes."""
    width = out.size(out.class_axis)
    if width is None or width < MORE_THAN_AN_IMAGE or out.says(*_OTHER_WORDS):
        classes = "a mask" if width == 1 else f"{width or 'several'} classes"
        return f"a {out} map may be an image or {classes}"
    if any(other.rank == out.rank and other.positions != out.positions for other in known.values()):
        return f"{out} is one of several maps, as detectors have them"
    sides = [size for size in out.positions if isinstance(size, int)]
    if sides and out.input_side > COARSEST_SEGMENTATION * max(sides):
        return f"a {out} map is much coarser than the input, as detectors' are"
    return None


# ------------------------------------------------------------------------- tasks that are asked for


def _as_asked(out: Evidence, task: Task) -> Head:
    """The head for a task that the user gives; raises _Misfit where it cannot be."""
    if task is Task.NONE:
        return _none(out, "as `task` says")
    if not out.is_float and (out.end is None or task is Task.REGRESSION):
        raise _Misfit("it does not hold floating-point numbers")
    if task is Task.REGRESSION:
        return _head(out, task, "as `task` says")
    rank = _rank_for(out, task)
    if out.end is not None and out.end.link == "softmax":
        return _asked_with_softmax(out, out.end, task, rank)
    axis = rank - 1 if task is Task.TOKENS else out.class_axis
    several = out.size(axis) != 1
    if task is Task.TOKENS and (out.end is not None or not several):
        raise _Misfit("tokens need several classes that exclude each other")
    if out.end is None and several and task is not Task.MULTILABEL:
        reason = f"as `task` says; no Softmax at the end, so {out} is read as logits along axis {axis}"
        return _head(out, task, reason, "softmax", axis)
    return _asked_with_sigmoid(out, task, rank, axis)


def _rank_for(out: Evidence, task: Task) -> int:
    """The number of axes of an output whose logits can be read for this task."""
    if task is Task.DETECTION:
        raise _Misfit(f"{out} is not (N, A, F) or (N, F, A) with more than {BOX} features of candidates")
    if out.rearranged is not None:
        raise _Misfit(f"it holds probabilities whose logits are out of reach ({out.rearranged})")
    if out.rank is None:
        raise _Misfit("its rank is unknown")
    least = {Task.MULTILABEL: 1, Task.SEGMENTATION: 4}.get(task, 2)
    if out.rank < least:
        raise _Misfit(f"it has {out.rank} axes, and {task.value} needs {least} or more")
    return out.rank


def _asked_with_sigmoid(out: Evidence, task: Task, rank: int, axis: int | None) -> Head:
    ends = out.end is not None
    place = "it ends in Sigmoid" if ends else f"no Sigmoid at the end, so {out} is read as logits"
    if task is Task.CLASSIFICATION:  # of several yes or no, or of one
        task = Task.MULTILABEL if rank < 4 or out.is_one_position else Task.SEGMENTATION
    return _head(out, task, f"as `task` says; {place}: {_yes_or_no(out)}", "sigmoid", axis)


def _asked_with_softmax(out: Evidence, end: End, task: Task, rank: int) -> Head:
    op, axis = str(end), end.axis
    if task is Task.MULTILABEL:
        raise _Misfit(f"it ends in {op}, whose classes exclude each other")
    if not axis:
        raise _Misfit(f"it ends in {op}, but not along one axis of classes that is known")
    if task is Task.TOKENS and axis != rank - 1:
        raise _Misfit(f"it ends in {op} along axis {axis}, and tokens need the last one")
    return _head(out, task, f"as `task` says; ends in {op} along axis {axis}", "softmax", axis)
