"""Step 7, verify: the promises of a converted file, checked on data.

1. the source outputs are the same, bit for bit, with and without graph optimisation;
2. every variance is finite and not negative, and so is what the tasks make of it; where the bridge is
   shared, the most probable class is the source's;
3. at every site, and where a head splits uncertainty, the native kernel, the portable function and the
   float64 reference agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnxruntime import set_seed

from gapa_onnx import record as provenance
from gapa_onnx.errors import UserError
from gapa_onnx.model.protos import duplicate
from gapa_onnx.op import reference
from gapa_onnx.op.contract import CLASSES, DOMAIN, SCHEMAS
from gapa_onnx.op.storage import read_points
from gapa_onnx.plan.heads import reference as heads_reference
from gapa_onnx.plan.heads.points import Points
from gapa_onnx.sessions.runtime import library_path, open_session, register, session_options
from gapa_onnx.settle.left_out import site_nodes

SHARE_TOLERANCE = (
    1e-4  # relative, where s > SMALLEST_SHARE: single precision of the answer, and its conditioning
)
SMALLEST_SHARE = 1e-6
HEAD_ROLES = ("probs", "entropy", "aleatoric", "epistemic")
PROBS_TOLERANCE = 1e-3  # of their sum over thousands of classes, in half precision or better
ROUNDING = 2.0**-24  # of single precision
HEAD_ROWS = 4096  # at most, to check a head's operator on: pixels are many

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Check:
    """One promise, kept or not."""

    name: str
    passed: bool
    detail: str


def verify(source: onnx.ModelProto, converted: onnx.ModelProto, batches: Iterable[Batch]) -> list[Check]:
    """Check a converted model against its source on some batches of inputs."""
    record = provenance.read(converted)
    if record is None:
        raise UserError(
            "the second file was not written by gapa-onnx", "give the source first, then the converted file"
        )
    batches = list(batches)
    names = [output.name for output in source.graph.output]
    if names != [output.name for output in converted.graph.output][: len(names)]:
        return [Check("source outputs come first, in order", False, f"expected {', '.join(names)}")]
    sites = site_nodes(converted)
    heads = [n for n in converted.graph.node if n.domain == DOMAIN and n.op_type == CLASSES.name]
    variances = record["outputs"]
    compared = [name for node in sites for name in (node.input[0], *node.output)]
    compared += [name for node in heads for name in (*node.input[:3], *node.output)]
    native = _answers(_exposing(converted, compared), batches, optimise=False)
    optimised = _answers(converted, batches, optimise=True)
    return [
        _same_outputs(names, _answers(source, batches, optimise=False), native, "none"),
        _same_outputs(names, _answers(source, batches, optimise=True), optimised, "all"),
        _sound_variances(variances, optimised),
        *_sound_heads(record["heads"], optimised),
        *_agreement(converted, sites, native),
        *_head_agreement(converted, heads, native),
        *_library_missing(),
    ]


def _answers(
    model: onnx.ModelProto, batches: Sequence[Batch], *, optimise: bool, native: bool = True
) -> list[Batch]:
    """All outputs of a model for each batch, by name."""
    options = session_options(optimise=optimise)
    if native:
        register(options)
    set_seed(0)  # for models with random operators: the same draws before and after
    session = open_session(model, "the model", options)
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(names, batch))) for batch in batches]


def _exposing(converted: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """The model with some of its tensors as further outputs."""
    exposed = duplicate(converted)
    present = {output.name for output in exposed.graph.output}
    for name in dict.fromkeys(names):
        if name not in present:
            exposed.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    return exposed


def _same_outputs(names: Sequence[str], before: Sequence[Batch], after: Sequence[Batch], level: str) -> Check:
    different = {n for old, new in zip(before, after) for n in names if not bit_equal(old[n], new[n])}
    detail = f"differs: {', '.join(sorted(different))}" if different else f"{len(names)} output(s)"
    return Check(f"source outputs bit-equal, optimisation {level}", not different, detail)


def bit_equal(a, b) -> bool:
    """The same type, shape and bytes; NaNs count as equal to themselves. Also for lists and dicts."""
    if isinstance(a, np.ndarray):
        same_kind = isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        return same_kind and (a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(bit_equal, a, b))
    return a == b


def _sound_variances(variances: dict[str, str], answers: Sequence[Batch]) -> Check:
    faults = set()
    for answer in answers:
        for output, name in variances.items():
            mean, var = answer[output], answer[name]
            if isinstance(var, list):  # of a sequence
                mean, var = (np.concatenate([np.ravel(part) for part in parts]) for parts in (mean, var))
            if isinstance(mean, np.ndarray):  # not a list of maps
                var = var[np.isfinite(mean)]  # what is not a number has no error bar
            if not np.isfinite(var).all():
                faults.add(f"{name} has NaN or infinity")
            elif (var < 0).any():
                faults.add(f"{name} is negative ({var.min():.3g})")
    detail = "; ".join(sorted(faults)) or ", ".join(variances.values())
    return Check("variances finite and not negative", not faults, detail)


def _sound_heads(heads: dict[str, dict], answers: Sequence[Batch]) -> list[Check]:
    """Of each output with classes: probabilities, the split of uncertainty, and the prediction."""
    checks = []
    for output, head in heads.items():
        roles = head["outputs"]
        if "probs" not in roles:
            continue
        faults = {fault for answer in answers for fault in _head_faults(head, answer[output], answer)}
        kept = "" if head["bridge"] != "shared" else "; the most probable class is the source's"
        detail = "; ".join(sorted(faults)) or f"{', '.join(roles[role] for role in HEAD_ROLES)}{kept}"
        checks.append(Check(f"{output}: {head['task']} head", not faults, detail))
    return checks


def _head_faults(head: dict, mean: np.ndarray, answer: Batch) -> Iterator[str]:
    roles, axis = head["outputs"], head["axis"]
    known = np.isfinite(mean).all(axis=axis)  # what is not a number has no error bar
    probs = np.moveaxis(answer[roles["probs"]], axis, -1)[known]  # (rows, classes)
    scores = np.moveaxis(mean, axis, -1)[known]
    if not ((probs >= 0) & (probs <= 1)).all():
        yield f"{roles['probs']} is not between 0 and 1"
    elif head["link"] == "softmax" and np.abs(probs.sum(axis=-1) - 1).max(initial=0.0) > PROBS_TOLERANCE:
        yield f"{roles['probs']} does not add up to 1"
    for role in HEAD_ROLES[1:]:
        if not (answer[roles[role]][known] >= 0).all():
            yield f"{roles[role]} is not a number, or negative"
    if head["bridge"] == "shared":
        most = probs.argmax(axis=-1)
        if "tokens" in roles:
            tokens = np.moveaxis(answer[roles["tokens"]], axis, -1)[known]
            most = np.take_along_axis(tokens, most[:, None], axis=-1)[:, 0]
        if (most != scores.argmax(axis=-1)).any():
            yield f"{roles['probs']} has another most probable class than {head['logits']}"


def _agreement(
    converted: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], answers: Sequence[Batch]
) -> list[Check]:
    """The share s of every site, computed three ways on the same queries."""
    checks = []
    for node in nodes:
        queries = _rows(answers, node.input[0])
        constants = _constants(converted, node)
        schema = next(schema for schema in SCHEMAS.values() if schema.name == node.op_type)
        ports = dict(zip((port.name for port in schema.constants), constants))
        answer = reference.evaluate(schema.index, ports, queries)
        exact, nearest = answer[0].reshape(-1), answer[1].reshape(len(queries), -1)
        local = schema.index == "local"
        portable, found = (array.reshape(len(queries), -1) for array in _portable(converted, node, [queries]))
        expected = _share_of(queries, ports, found, nearest, exact) if local else exact
        checks.append(_agree(f"{node.name}: portable = reference", portable[:, 0], expected))
        if library_path() is None:
            continue
        share, found = (_rows(answers, name) for name in node.output)
        share = share[:, 0]
        if schema.index != "hnsw":
            expected = _share_of(queries, ports, found, nearest, exact) if local else exact
            checks.append(_agree(f"{node.name}: native = reference", share, expected))
        else:  # the function and the reference search exactly; the native walk may miss a neighbour
            lower = share < exact * (1 - SHARE_TOLERANCE) - SMALLEST_SHARE
            detail = f"{len(exact)} queries; a missed neighbour only raises the share"
            checks.append(Check(f"{node.name}: native not below reference", not lower.any(), detail))
    return checks


def _share_of(
    queries: np.ndarray,
    ports: dict[str, np.ndarray],
    found: np.ndarray,
    nearest: np.ndarray,
    exact: np.ndarray,
) -> np.ndarray:
    """The share by the neighbours found (n, k) where rounding alone may have led to them.

    Which of two points is nearer, or which of two lists is to be searched, if float32 cannot tell, decides
    about the whole neighbourhood.
    """
    swapped = np.flatnonzero((found[:, 0] != nearest[:, 0]) & (found[:, 0] >= 0) & (nearest[:, 0] >= 0))
    rows, points = queries[swapped].astype(np.float64), ports["points"].astype(np.float64)
    centre = points.mean(axis=0)

    def beyond(anchors: np.ndarray, chosen: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """By how much ½‖q − a‖² of the chosen exceeds the limit's, in bounds of its rounding (d + 4) u (‖q‖ + ‖a‖) ‖a‖."""
        largest = np.linalg.norm(anchors - centre, axis=1).max()
        rounding = (np.linalg.norm(rows - centre, axis=1) + largest) * largest
        rounding *= (rows.shape[1] + 4) * np.finfo(np.float32).eps / 2
        halves = [((rows - anchors[ids]) ** 2).sum(axis=1) / 2 for ids in (chosen, limit)]
        return (halves[0] - halves[1]) / np.maximum(rounding, np.finfo(np.float64).tiny)

    tied = beyond(points, found[swapped, 0], nearest[swapped, 0]) <= 2
    centroids, probed = ports["centroids"].astype(np.float64), int(ports["nprobe"][0])
    if probed < len(centroids):
        order = np.argsort(((rows[:, None] - centroids) ** 2).sum(axis=2), axis=1, kind="stable")
        lists = np.searchsorted(ports["list_offsets"], found[swapped, 0], side="right") - 1
        tied |= beyond(centroids, lists, order[:, probed - 1]) <= 2
        # The list of the nearest point may have been left out in favour of one as near.
        tied |= beyond(centroids, order[:, probed], order[:, probed - 1]) <= 2
    swapped = swapped[tied]
    result = exact.copy()
    result[swapped] = reference.unexplained_share(
        queries[swapped],
        ports["points"],
        found[swapped],
        float(ports["length_scale"]),
        float(ports["jitter"]),
    )
    return result


def _head_agreement(
    converted: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], answers: Sequence[Batch]
) -> list[Check]:
    """The answers of a head's operator, computed three ways on the same logits."""
    checks = []
    for node in nodes:
        points, (axis,) = _constants(converted, node, first=3)
        fed = [_rows(answers, name, axis) for name in node.input[:3]]  # (n, C)
        every = max(1, -(-len(fed[0]) // HEAD_ROWS))
        mean, var, output = fed = [rows[::every] for rows in fed]
        with np.errstate(invalid="ignore"):  # a logit of +inf has no answer
            split = heads_reference.split(mean, var, -1, Points("latin", points))
            probs = heads_reference.as_predicted(heads_reference.bridge(mean, var, -1), output, -1)
        score = heads_reference.score(var, -1)
        exact = np.vstack([probs.T, split.entropy, split.aleatoric, split.epistemic, score])  # (C + 4, n)
        bound = np.broadcast_to(split_tolerance(mean, var, points), exact.shape).copy()
        bound[-1] = ROUNDING * (mean.shape[1] + 4) * score
        placed = [rows.T if axis == 0 else rows.reshape(len(rows), *(1,) * (axis - 1), -1) for rows in fed]
        portable = _portable(converted, node, placed)
        name = node.input[3].removesuffix("/points")
        portable = _columns([dict(zip(node.output, portable))], node, axis)
        checks.append(_head_agrees(f"{name}: portable = reference", portable, exact, bound))
        if library_path() is not None:
            native = _columns(answers, node, axis)[:, ::every]
            checks.append(_head_agrees(f"{name}: native = reference", native, exact, bound))
    return checks


def _columns(answers: Sequence[Batch], node: onnx.NodeProto, axis: int) -> np.ndarray:
    """All that a head's operator says about a row, as a column: (C + 4, n)."""
    probs = _rows(answers, node.output[0], axis)
    others = [np.concatenate([answer[name].reshape(-1) for answer in answers]) for name in node.output[1:]]
    return np.vstack([probs.T, *others])


def split_tolerance(mean: np.ndarray, var: np.ndarray, points: np.ndarray) -> np.ndarray:
    """What single precision may change in the entropies of a split, and more than it may change in a
    probability, per row: (n, C), (S, R) -> (n,).

    A logit l is off by δ ≤ 4 u |l|, from √v ε, the sum, and the largest logit that is taken off. An entropy is then
    off by 2 δ H, and sums over S points and C classes by (S + C) u (H + 1), with some u for exp and log, and
    H ≤ log C. The aleatoric part is made of three such sums. Only logits count that some point gives a
    probability that single precision can hold.
    """
    mean, var = mean.astype(np.float64), var.astype(np.float64)
    reach = np.abs(points).max() * np.sqrt(var)
    with np.errstate(invalid="ignore"):  # of infinite logits
        lowest = (mean - reach).max(axis=1, keepdims=True) + np.log(np.finfo(np.float32).tiny)
        counted = mean + reach >= lowest
    largest = np.where(counted, np.abs(mean) + reach, 0).max(axis=1)
    classes = mean.shape[1]
    rounded = 2 * 4 * largest + len(points) + classes + 16
    return 3 * ROUNDING * rounded * (np.log(classes) + 1)


def _head_agrees(name: str, parts: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> Check:
    known = ~np.isnan(exact)
    same_nans = bool((np.isnan(parts) == ~known).all())
    error = np.where(known, np.abs(parts - exact), 0)
    within = bool((error <= bound).all(where=known))
    worst = float(error.max(initial=0.0))
    return Check(name, within and same_nans, f"{exact.shape[1]} rows, error ≤ {worst:.1e}")


def _library_missing() -> list[Check]:
    if library_path() is not None:
        return []
    return [Check("native library", True, "missing: only the portable functions were checked")]


def _constants(converted: onnx.ModelProto, node: onnx.NodeProto, first: int = 1) -> list[np.ndarray]:
    wanted = set(node.input[first:])
    found = {t.name: onnx.numpy_helper.to_array(t) for t in converted.graph.initializer if t.name in wanted}
    return [found[name] if name in found else read_points(converted, name) for name in node.input[first:]]


def _portable(
    converted: onnx.ModelProto, node: onnx.NodeProto, arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """A node's answers by its standard-ops function: the node by itself, as the whole graph is slow to inline."""
    fed = dict(zip(node.input, arrays))
    initializers = [t for t in converted.graph.initializer if t.name in node.input and t.name not in fed]
    known = {tensor.name for tensor in initializers} | fed.keys()
    decoded = {name: read_points(converted, name) for name in node.input if name and name not in known}
    initializers += [onnx.numpy_helper.from_array(array, name) for name, array in decoded.items()]
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, list(array.shape))
        for name, array in fed.items()
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = onnx.helper.make_graph([node], "operator", inputs, outputs, initializers)
    model = onnx.helper.make_model(
        graph,
        opset_imports=converted.opset_import,
        functions=converted.functions,
        ir_version=converted.ir_version,
    )
    answers = _answers(model, [fed], optimise=False, native=False)[0]
    return [answers[name] for name in node.output]


def _rows(answers: Sequence[Batch], name: str, axis: int = -1) -> np.ndarray:
    """A tensor of all batches as rows (n, size of the axis)."""
    moved = [np.moveaxis(answer[name], axis, -1) for answer in answers]
    return np.concatenate([array.reshape(-1, array.shape[-1]) for array in moved])


def _agree(name: str, share: np.ndarray, exact: np.ndarray) -> Check:
    counted = exact > SMALLEST_SHARE
    error = np.abs(share[counted] - exact[counted]) / exact[counted]
    worst = float(error.max(initial=0.0))
    same_nans = bool((np.isnan(share) == np.isnan(exact)).all())
    return Check(
        name, worst <= SHARE_TOLERANCE and same_nans, f"{len(exact)} queries, relative error ≤ {worst:.1e}"
    )
