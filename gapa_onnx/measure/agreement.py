"""The operators of a converted file, computed three ways on the same rows: native kernel, portable function, float64 reference.

All operators of a file are run by their portable functions in one session, apart from the rest of its graph, which is
slow to inline.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnxruntime import GraphOptimizationLevel, InferenceSession, set_seed

from gapa_onnx.arrays import Array
from gapa_onnx.measure.equality import fingerprints
from gapa_onnx.model.weights import array_of
from gapa_onnx.op import reference
from gapa_onnx.op.contract import CLASSES, DOMAIN, PREPARED, SCHEMAS, OpSchema
from gapa_onnx.op.storage import read_points
from gapa_onnx.plan.heads import reference as heads_reference
from gapa_onnx.plan.heads.points import Points
from gapa_onnx.record import Record, damaged
from gapa_onnx.sessions.inference import run_as_is
from gapa_onnx.sessions.runtime import library_path, open_session, register, session_options

SHARE_TOLERANCE = (
    1e-4  # relative, where s > SMALLEST_SHARE: single precision of the answer, and its conditioning
)
SMALLEST_SHARE = 1e-6
PREPARED_TOLERANCE = (1e-3, 1e-5)  # of the body in float32: of s, and beside that
ROUNDING = 2.0**-24  # of single precision
LEVELS = {
    "none": GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": GraphOptimizationLevel.ORT_ENABLE_ALL,
}  #: of onnxruntime, by what we call them
HEAD_ROWS = 4096  # at most, to check a head's operator on: pixels are many
HEAD_NUMBERS = 1 << 20  # the same of rows times classes: words are many
SITE_QUERIES = 8192  # at most, to check a site's operator on

Batch = dict[str, Array]
Named = tuple[str, onnx.NodeProto]  #: what people call it, and the node


@dataclass(frozen=True)
class Check:
    """One promise, kept or not."""

    name: str
    passed: bool
    detail: str


def run(
    model: onnx.ModelProto,
    batches: Sequence[Batch],
    *,
    level: str,
    native: bool = True,
    label: str = "the model",
) -> list[Batch]:
    """All outputs of a model for each batch, by name, at one of the optimisation levels."""
    session = opened(model, level=level, native=native, label=label)
    return [answer(session, batch) for batch in batches]


def opened(
    model: onnx.ModelProto, *, level: str, native: bool = True, label: str = "the model"
) -> InferenceSession:
    """A session at one of the optimisation levels, with our library or without."""
    options = session_options()
    options.graph_optimization_level = LEVELS[level]
    if native:
        register(options)
    set_seed(0)  # for models with random operators: the same draws before and after
    return open_session(model, label, options)


def answer(session: InferenceSession, batch: Batch) -> Batch:
    """All outputs for one batch, by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, run_as_is(session, names, batch)))


def prints_of(model: onnx.ModelProto, batches: Sequence[Batch], *, level: str) -> list[dict[str, Any]]:
    """What `run` finds, of which only fingerprints are kept."""
    session = opened(model, level=level)
    return [fingerprints([answer(session, batch)])[0] for batch in batches]


@dataclass(frozen=True)
class Operators:
    """The operators that a file's record names: one at each site and witness, and those of heads."""

    model: onnx.ModelProto = field(repr=False)
    record: Record = field(repr=False)

    @property
    def sites(self) -> list[Named]:
        kinds = {schema.name for schema in SCHEMAS.values()}
        return self._nodes([(site.operator, site.operator) for site in self.record.places], kinds)

    @property
    def heads(self) -> list[Named]:
        named = self.record.heads.items()
        operators = [(f"{output}/classes", head.operator) for output, head in named if head.operator]
        return self._nodes(operators, {CLASSES.name})

    def _nodes(self, wanted: Sequence[tuple[str, str]], kinds: Collection[str]) -> list[Named]:
        """The nodes of some operators by label and name; they must be of the given kinds."""
        own = (node for node in self.model.graph.node if node.domain == DOMAIN and node.op_type in kinds)
        nodes = {node.name: node for node in own}
        missing = [name for _, name in wanted if name not in nodes]
        if missing:
            raise damaged(f"it names the operator {missing[0]!r}, which is not in the graph")
        return [(label, nodes[name]) for label, name in wanted]

    @property
    def tensors(self) -> list[str]:
        """What the operators read and answer."""
        at_sites = [name for _, node in self.sites for name in (node.input[0], *node.output)]
        return at_sites + [name for _, node in self.heads for name in (*node.input[:3], *node.output)]

    def checks(self, answers: Sequence[Batch]) -> list[Check]:
        """The operators' answers in a run of the whole model, held against function and reference."""
        queries = [_some(_rows(answers, node.input[0])) for _, node in self.sites]
        logits = [_head_rows(self.model, node, answers) for _, node in self.heads]
        fed = {node.output[0]: [rows] for (_, node), rows in zip(self.sites, queries)}
        fed |= {node.output[0]: _placed(rows, axis) for (_, node), (rows, axis, _) in zip(self.heads, logits)}
        operators = [node for _, node in (*self.sites, *self.heads)]
        portable = _portable(self.model, operators, fed) if self.model.functions else None
        found = []
        for (label, node), rows in zip(self.sites, queries):
            found += _site_checks(self.model, label, node, rows, answers, portable)
        for (label, node), head in zip(self.heads, logits):
            found += _head_checks(self.model, label, node, *head, answers, portable)
        if library_path() is None:
            found.append(Check("native library", True, "missing: only the portable functions were checked"))
        return found


# --------------------------------------------------------------------- sites


def _site_checks(
    model: onnx.ModelProto,
    label: str,
    node: onnx.NodeProto,
    queries: Array,
    answers: Sequence[Batch],
    portable: Batch | None,
) -> list[Check]:
    """The share s of one site."""
    if not len(queries):  # of a detector's scale that no candidate comes from
        return [Check(f"{label}: portable = reference", True, "nothing could be compared: no queries")]
    schema: OpSchema = next(schema for schema in SCHEMAS.values() if schema.name == node.op_type)
    ports = dict(zip((port.name for port in schema.constants), _constants(model, node)))
    answer = reference.evaluate(schema.index, ports, queries)
    exact, nearest = answer[0].reshape(-1), answer[1].reshape(len(queries), -1)
    local = schema.index in ("local", PREPARED)
    checks = []
    if portable is not None:
        share, found = (portable[name].reshape(len(queries), -1) for name in node.output)
        expected = _share_of(queries, ports, found, nearest, exact) if local else exact
        agree = _agrees_in_float32 if schema.index == PREPARED else _agree
        checks.append(agree(f"{label}: portable = reference", share[:, 0], expected))
    if library_path() is None:
        return checks
    share, found = (_some(_rows(answers, name)) for name in node.output)
    if schema.index != "hnsw":
        expected = _share_of(queries, ports, found, nearest, exact) if local else exact
        checks.append(_agree(f"{label}: native = reference", share[:, 0], expected))
    else:  # the function and the reference search exactly; the native walk may miss a neighbour
        lower = share[:, 0] < exact * (1 - SHARE_TOLERANCE) - SMALLEST_SHARE
        detail = f"{len(exact)} queries; a missed neighbour only raises the share"
        checks.append(Check(f"{label}: native not below reference", not lower.any(), detail))
    return checks


def _share_of(
    queries: Array,
    ports: dict[str, Array],
    found: Array,
    nearest: Array,
    exact: Array,
) -> Array:
    """The share by the neighbours found (n, k) where rounding alone may have led to them.

    Which of two points is nearer, or which of two lists is to be searched, if float32 cannot tell, decides
    about the whole neighbourhood.
    """
    swapped = np.flatnonzero((found[:, 0] != nearest[:, 0]) & (found[:, 0] >= 0) & (nearest[:, 0] >= 0))
    rows, points = queries[swapped].astype(np.float64), ports["points"].astype(np.float64)
    centre = points.mean(axis=0)

    def beyond(anchors: Array, chosen: Array, limit: Array) -> Array:
        """By how much ½‖q − a‖² of the chosen exceeds the limit's, in bounds of its rounding (d + 4) u (‖q‖ + ‖a‖) ‖a‖."""
        largest = np.linalg.norm(anchors - centre, axis=1).max()
        rounding = (np.linalg.norm(rows - centre, axis=1) + largest) * largest
        rounding *= (rows.shape[1] + 4) * np.finfo(np.float32).eps / 2
        halves = [((rows - anchors[ids]) ** 2).sum(axis=1) / 2 for ids in (chosen, limit)]
        roundings: Array = (halves[0] - halves[1]) / np.maximum(rounding, np.finfo(np.float64).tiny)
        return roundings

    tied = beyond(points, found[swapped, 0], nearest[swapped, 0]) <= 2
    centroids, probed = ports["centroids"].astype(np.float64), int(ports["nprobe"][0])
    if probed < len(centroids):
        order = np.argsort(((rows[:, None] - centroids) ** 2).sum(axis=2), axis=1, kind="stable")
        lists = np.searchsorted(ports["list_offsets"], found[swapped, 0], side="right") - 1
        tied |= beyond(centroids, lists, order[:, probed - 1]) <= 2
        # The list of the nearest point may have been left out in favour of one as near.
        tied |= beyond(centroids, order[:, probed], order[:, probed - 1]) <= 2
    swapped = swapped[tied]
    result: Array = exact.copy()
    result[swapped] = reference.unexplained_share(
        queries[swapped],
        ports["points"],
        found[swapped],
        float(ports["length_scale"]),
        float(ports["jitter"]),
    )
    return result


def _agree(name: str, share: Array, exact: Array) -> Check:
    counted = exact > SMALLEST_SHARE
    error = np.abs(share[counted] - exact[counted]) / exact[counted]
    worst = float(error.max(initial=0.0))
    same_nans = bool((np.isnan(share) == np.isnan(exact)).all())
    return Check(
        name, worst <= SHARE_TOLERANCE and same_nans, f"{len(exact)} queries, relative error ≤ {worst:.1e}"
    )


def _agrees_in_float32(name: str, share: Array, exact: Array) -> Check:
    """As `_agree`, for a body without double precision."""
    relative, beside = PREPARED_TOLERANCE
    known = ~np.isnan(exact)
    error = np.abs(share - exact)[known]
    same_nans = bool((np.isnan(share) == ~known).all())
    within = bool((error <= relative * exact[known] + beside).all())
    detail = f"{len(exact)} queries, error ≤ {error.max(initial=0.0):.1e}"
    return Check(name, within and same_nans, detail)


# --------------------------------------------------------------------- heads


def _head_rows(
    model: onnx.ModelProto, node: onnx.NodeProto, answers: Sequence[Batch]
) -> tuple[list[Array], int, int]:
    """Means, variances and outputs (n, C) that a head's operator read, its class axis, and the step between rows."""
    axis = int(_constants(model, node, first=3)[1][0])
    fed = [_rows(answers, name, axis) for name in node.input[:3]]
    most = max(1, min(HEAD_ROWS, HEAD_NUMBERS // max(1, fed[0].shape[1])))
    every = max(1, -(-len(fed[0]) // most))
    return [rows[::every] for rows in fed], axis, every


def _placed(rows: Sequence[Array], axis: int) -> list[Array]:
    """Rows (n, C) with the classes on the axis where the node wants them."""
    return [part.T if axis == 0 else part.reshape(len(part), *(1,) * (axis - 1), -1) for part in rows]


def _head_checks(
    model: onnx.ModelProto,
    label: str,
    node: onnx.NodeProto,
    rows: Sequence[Array],
    axis: int,
    every: int,
    answers: Sequence[Batch],
    portable: Batch | None,
) -> list[Check]:
    """The answers of a head's operator."""
    (mean, var, output), points = rows, _constants(model, node, first=3)[0]
    with np.errstate(invalid="ignore"):  # a logit of +inf has no answer
        split = heads_reference.split(mean, var, -1, Points("latin", points))
        probs = heads_reference.as_predicted(heads_reference.bridge(mean, var, -1), output, -1)
    score = heads_reference.score(var, -1)
    exact = np.vstack([probs.T, split.entropy, split.aleatoric, split.epistemic, score])  # (C + 4, n)
    bound = np.broadcast_to(split_tolerance(mean, var, points), exact.shape).copy()
    bound[-1] = ROUNDING * (mean.shape[1] + 4) * score
    checks = []
    if portable is not None:
        columns = _columns([portable], node, axis)
        checks.append(_head_agrees(f"{label}: portable = reference", columns, exact, bound))
    if library_path() is not None:
        native = _columns(answers, node, axis)[:, ::every]
        checks.append(_head_agrees(f"{label}: native = reference", native, exact, bound))
    return checks


def _columns(answers: Sequence[Batch], node: onnx.NodeProto, axis: int) -> Array:
    """All that a head's operator says about a row, as a column: (C + 4, n)."""
    probs = _rows(answers, node.output[0], axis)
    others = [np.concatenate([answer[name].reshape(-1) for answer in answers]) for name in node.output[1:]]
    return np.vstack([probs.T, *others])


def split_tolerance(mean: Array, var: Array, points: Array) -> Array:
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
    tolerance: Array = 3 * ROUNDING * rounded * (np.log(classes) + 1)
    return tolerance


def _head_agrees(name: str, parts: Array, exact: Array, bound: Array) -> Check:
    known = ~np.isnan(exact)
    same_nans = bool((np.isnan(parts) == ~known).all())
    error = np.where(known, np.abs(parts - exact), 0)
    within = bool((error <= bound).all(where=known))
    worst = float(error.max(initial=0.0))
    return Check(name, within and same_nans, f"{exact.shape[1]} rows, error ≤ {worst:.1e}")


# --------------------------------------------------------------------- rows


def _constants(converted: onnx.ModelProto, node: onnx.NodeProto, first: int = 1) -> list[Array]:
    wanted = set(node.input[first:])
    found = {t.name: array_of(t) for t in converted.graph.initializer if t.name in wanted}
    return [found[name] if name in found else read_points(converted, name) for name in node.input[first:]]


def _portable(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], fed: dict[str, list[Array]]) -> Batch:
    """All answers of some operators by their standard-ops functions, by name.

    `fed` has what stands for the first inputs of each node, by its first output.
    """
    if not nodes:
        return {}
    alone, inputs, batch = [], [], {}
    read: dict[str, None] = {}
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        for position, array in enumerate(fed[node.output[0]]):
            name = f"{node.output[0]}/fed/{position}"  # two operators may read the same tensor in other rows
            copy.input[position] = name
            batch[name] = array
            inputs.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, list(array.shape)))
        alone.append(copy)
        read |= dict.fromkeys(copy.input[len(fed[node.output[0]]) :])
    held = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in read}
    decoded = {name: read_points(model, name) for name in read if name and name not in held}
    initializers = [
        *held.values(),
        *(onnx.numpy_helper.from_array(array, name) for name, array in decoded.items()),
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for node in nodes for name in node.output]
    graph = onnx.helper.make_graph(alone, "operators", inputs, outputs, initializers)
    whole = onnx.helper.make_model(
        graph, opset_imports=model.opset_import, functions=model.functions, ir_version=model.ir_version
    )
    return run(whole, [batch], level="none", native=False)[0]


def _some(queries: Array) -> Array:
    """At most SITE_QUERIES of the rows, evenly spaced: where every pixel is a query, a few images have millions."""
    return queries[:: max(1, -(-len(queries) // SITE_QUERIES))]


def _rows(answers: Sequence[Batch], name: str, axis: int = -1) -> Array:
    """A tensor of all batches as rows (n, size of the axis)."""
    moved = [np.moveaxis(answer[name], axis, -1) for answer in answers]
    return np.concatenate([array.reshape(-1, array.shape[-1]) for array in moved])
