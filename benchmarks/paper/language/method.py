"""The method on vectors that were kept: inducing points, shares, and what a share at the head's input does to a token.

Fitted and computed by the tool's own code: geometries, points, length scales, left-out shares (`gapa_onnx.fit`), the
operators `GapaActivation` and `GapaClasses` in a model of one node each. What is different from a converted file: a share at
an inner block acts on the variance of the head's input directly, where propagation would pass it through all blocks between.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from gapa_onnx.fit import inducing, statistics, streams
from gapa_onnx.fit.calibrate import CEILINGS, MEDIAN_SHARE
from gapa_onnx.fit.geometry import Geometry, geometry_of, is_whitened
from gapa_onnx.op.classes import classes_body
from gapa_onnx.op.contract import CLASSES, DOMAIN, SCHEMAS
from gapa_onnx.op.function import body
from gapa_onnx.plan.heads.points import latin
from gapa_onnx.sessions.runtime import session, session_options
from language.dump import Dump
from language.texts import CALIBRATION

OPSET = 17
JITTER = 1e-6
LEFT_OUT = 500  # calibration rows whose left-out share tells τ
AT_ONCE = 4096  # queries


@dataclass(frozen=True)
class Choice:
    """What a figure is drawn against."""

    place: int
    metric: str = "euclidean"
    inducing: str = "kmeans"
    m: int = 1000
    k: int = 50
    rows: int = 200_000  #: calibration tokens that points are chosen from, at most


@dataclass(frozen=True)
class Fitted:
    """A place whose shares can be asked for."""

    choice: Choice
    geometry: Geometry = field(repr=False)
    points: np.ndarray = field(repr=False)  #: (m, d) as compared
    length_scale: float
    tau: float
    native: ort.InferenceSession = field(repr=False)

    def shares(self, queries: np.ndarray) -> np.ndarray:
        """s of queries (…, d) -> (…,)."""
        rows = queries.reshape(-1, queries.shape[-1])
        found = [
            self.native.run(
                ["s"], {"query": self.geometry(rows[start : start + AT_ONCE].astype(np.float32))}
            )[0]
            for start in range(0, len(rows), AT_ONCE)
        ]
        shares: np.ndarray = np.concatenate(found)[:, 0].reshape(queries.shape[:-1])
        return shares

    def amplitude(self, shares: np.ndarray) -> np.ndarray:
        """The own variance in units of the prior's: τ s / (1 + max(τ/A - 1, 0) s)."""
        damping = max(self.tau / CEILINGS["classes"] - 1, 0.0)
        grown: np.ndarray = self.tau * shares / (1 + damping * shares)
        return grown


@functools.lru_cache(maxsize=2)
def calibration_rows(dump: Dump, place: int, most: int) -> np.ndarray:
    """Vectors (n, d) of random calibration tokens, as many as there may be."""
    hidden = dump.hidden(CALIBRATION, place)
    rows = hidden.reshape(-1, hidden.shape[-1])
    if len(rows) > most:
        rows = rows[np.sort(np.random.default_rng(place).choice(len(rows), most, replace=False))]
    return np.asarray(rows, np.float32)


def fit(dump: Dump, choice: Choice, points: np.ndarray | None = None) -> Fitted:
    """The place with these choices; `points` that were chosen before, for other numbers of neighbours."""
    rows = calibration_rows(dump, choice.place, choice.rows)
    moments = streams.Moments(rows.shape[1], is_whitened(choice.metric))
    moments.add(rows)
    covariance = moments.covariance if is_whitened(choice.metric) else None
    geometry = geometry_of(choice.metric, rows, moments.mean, moments.std, covariance)
    compared = geometry(rows)
    length_scale = statistics.median_distance(compared)
    if points is None:
        points = inducing.select(choice.inducing, compared, choice.m)
    sizes = inducing.cluster_sizes(compared, points) if choice.inducing == "kmeans" else None
    k = min(choice.k, len(points))
    judged = compared[np.random.default_rng(0).permutation(len(compared))[:LEFT_OUT]]
    left_out = statistics.leave_one_out_share(judged, points, k, length_scale, JITTER, sizes)
    tau = MEDIAN_SHARE / max(float(np.median(left_out)), JITTER)
    return Fitted(choice, geometry, points, length_scale, tau, operator(points, k, length_scale))


def operator(points: np.ndarray, k: int, length_scale: float) -> ort.InferenceSession:
    """A model of one `GapaActivation` over these points."""
    schema = SCHEMAS["flat"]
    tensors = {
        "k": np.array([k], np.int64),
        "length_scale": np.array(length_scale, np.float32),
        "jitter": np.array(JITTER, np.float32),
        "points": points.astype(np.float32),
    }
    node = onnx.helper.make_node(
        schema.name, [port.name for port in schema.inputs], ["s", "neighbours"], domain=DOMAIN
    )
    return _of_one_node(node, {"query": (None, points.shape[1])}, tensors, body("flat", OPSET, k))


class Head:
    """What variances of the head's input say of the next token, by one `GapaClasses` over the leading tokens."""

    def __init__(self, weights: np.ndarray, prior_var: np.ndarray, leading: int):
        """Weights (v, d) of the head, and c² (d,) of its input."""
        self.per_token = (weights.astype(np.float64) ** 2 @ prior_var).astype(np.float32)  # (v,)
        ports = [port.name for port in CLASSES.outputs]
        node = onnx.helper.make_node(
            CLASSES.name, [port.name for port in CLASSES.inputs], ports, domain=DOMAIN
        )
        tensors = {"points": latin(leading).values.astype(np.float32), "axis": np.array([1], np.int64)}
        shapes = {name: (None, leading) for name in ("mean", "var", "output")}
        self._native = _of_one_node(node, shapes, tensors, classes_body(OPSET))

    def split(self, top_logp: np.ndarray, var: np.ndarray) -> dict[str, np.ndarray]:
        """Entropy, epistemic part and mean variance (n,) from log probabilities and variances (n, leading)."""
        wanted = ["entropy", "epistemic", "score"]
        parts = []
        for start in range(0, len(var), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            mean = np.ascontiguousarray(top_logp[part], np.float32)
            parts.append(self._native.run(wanted, {"mean": mean, "var": var[part], "output": mean}))
        return {name: np.concatenate([part[at] for part in parts]) for at, name in enumerate(wanted)}

    def by_shares(
        self, top_logp: np.ndarray, top_ids: np.ndarray, amplitude: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The same from the own variance (n,) at the head's input, which all its numbers share."""
        var = (self.per_token[top_ids] * amplitude[:, None]).astype(np.float32)
        return self.split(top_logp, var)


def head_weights(path: Path, logits: str = "logits") -> np.ndarray:
    """The matrix (v, d) of the last layer."""
    model = onnx.load(path)
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    name = made[logits].input[1]
    turned = made[name].op_type == "Transpose" if name in made else False
    if turned:
        name = made[name].input[0]
    weights = onnx.numpy_helper.to_array(held[name])
    return weights if turned else weights.T


def _of_one_node(
    node: onnx.NodeProto,
    inputs: Mapping[str, tuple[int | None, ...]],
    tensors: Mapping[str, np.ndarray],
    function: onnx.FunctionProto,
) -> ort.InferenceSession:
    """A session of a model that has one node, natively where the library is there."""
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()],
        [onnx.helper.make_tensor_value_info(name, 0, None) for name in node.output],
        [onnx.numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    for value in graph.output:
        kind = onnx.TensorProto.INT64 if value.name == "neighbours" else onnx.TensorProto.FLOAT
        value.type.tensor_type.elem_type = kind
    imports = [
        onnx.helper.make_opsetid("", OPSET),
        onnx.helper.make_opsetid(DOMAIN, function.opset_import[0].version),
    ]
    imports[1].version = 1
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8, functions=[function])
    return session(model.SerializeToString(), session_options(threads=2))
