"""Readings of the method side by side, without converting: activations once, then shares and logits by numpy.

A *subject* is a trained classifier with its activations at every site, on training rows, on test rows
(`known`) and on test rows of the other data set (`strange`). A *reading* is one way to fill what the method
leaves open:

    ℓ = multiple · median distance (at the site, or of the inputs)
    s by the native operator, over m inducing points and k neighbours
    v = c² τ s / (1 + max(τ/100 - 1, 0) s), or min(τ s, 1) c² if capped;  τ = target / median of leave-one-out s, or 1 without a target

The variances meet the logits as in a converted file: squared weights, squared slopes of tanh, sites add.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from backbones import CACHE, as_onnx, classifier, images, train_classifier  # noqa: E402
from lines import say  # noqa: E402

from gapa_onnx.fit import inducing, statistics
from gapa_onnx.measure.evaluation import metrics
from gapa_onnx.op.contract import DOMAIN, SCHEMAS, VERSION
from gapa_onnx.op.neighbourhoods import choose, neighbourhoods
from gapa_onnx.plan.heads import reference
from gapa_onnx.plan.heads.points import Points, latin
from gapa_onnx.sessions import runtime

OTHER = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}
CLASSES = 10
CEILING = 100.0  # of a neuron's variance where classes are predicted, in units of c²
PAIRS = 200_000  # for median distances


# ------------------------------------------------------------------------ subjects


@dataclass(frozen=True, eq=False)
class Site:
    """What one site receives, and what is behind it."""

    rows: np.ndarray = field(repr=False)  #: training rows (n, d)
    known: np.ndarray = field(repr=False)
    strange: np.ndarray = field(repr=False)
    left_out: np.ndarray = field(repr=False)  #: some of the training rows, for leave-one-out shares
    weight: np.ndarray = field(repr=False)  #: of the linear layer behind the activation, (d, next)
    tanh: bool  #: the activation; else the identity
    prior_var: np.ndarray = field(repr=False)  #: c² (d,)

    @cached_property
    def median(self) -> float:
        return statistics.median_distance(self.rows, pairs=PAIRS)

    def slope(self, part: str) -> np.ndarray | float:
        """φ'(z)² of a part's rows."""
        return (1 - np.tanh(getattr(self, part).astype(np.float64)) ** 2) ** 2 if self.tanh else 1.0


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained network and what it makes of known and strange rows."""

    network: str
    data: str
    sites: tuple[Site, ...] = field(repr=False)
    known: np.ndarray = field(repr=False)  #: logits (n, classes)
    strange: np.ndarray = field(repr=False)
    labels: np.ndarray = field(repr=False)
    input_median: float  #: median distance of the inputs


def subject(
    network: str, data: str, rows: int, folder: Path, *, calibration_rows: int, quick: bool = False
) -> Subject:
    """`mlp0` (2 x 200 tanh, seed 0), `deep0` (4 x 100 tanh), `lenet` or `resnet` (pooled features).

    All are trained on 55,000 rows, less if quick, of which the first are used for calibration.
    """
    known, strange = images(data, folder), images(OTHER[data], folder)
    if network in ("lenet", "resnet"):
        from convnets import trained

        path = trained(network, data, folder, quick=quick)
    else:
        path = _mlp(network, data, folder, quick=quick)
    parts = (known["x_train"][:calibration_rows], known["x_test"][:rows], strange["x_test"][:rows])
    labels = known["y_test"][:rows].astype(np.int64)
    # the median of 400 shares is known to a few percent
    return observed(onnx.load(path), network, data, parts, labels, left_out_rows=50 if quick else 400)


def observed(
    model: onnx.ModelProto,
    network: str,
    data: str,
    parts: tuple[np.ndarray, np.ndarray, np.ndarray],
    labels: np.ndarray,
    *,
    left_out_rows: int,
) -> Subject:
    """What a model does with training, known and strange rows.

    Its sites are `features`, before a Gemm with the initializer `weight`, or else z1, z2, … of `backbones.as_onnx`.
    """
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    tanh = "weight1" in weights
    names = [f"z{i}" for i in range(1, len(weights) // 2)] if tanh else ["features"]
    behind = [weights[f"weight{i}"] for i in range(2, len(names) + 2)] if tanh else [weights["weight"]]
    answers = [_run(model, [*names, "logits"], part) for part in parts]
    chosen = np.sort(np.random.default_rng(0).choice(len(parts[0]), left_out_rows, replace=False))
    sites = []
    for i, weight in enumerate(behind):
        rows, known, strange = (answer[i] for answer in answers)
        sites.append(
            Site(rows, known, strange, rows[chosen], weight, tanh, rows.astype(np.float64).var(axis=0))
        )
    logits = [answer[-1].astype(np.float64) for answer in answers[1:]]
    median = statistics.median_distance(parts[0][:5000], pairs=PAIRS)
    return Subject(network, data, tuple(sites), *logits, labels, median)


def _mlp(network: str, data: str, folder: Path, *, quick: bool) -> Path:
    kind, seed = network[:-1], int(network[-1])
    if kind == "mlp":
        return classifier(data, seed=seed, folder=folder, epochs=1 if quick else 12)
    epochs = 1 if quick else 5
    path = CACHE / f"{data}_{kind}_{epochs}_{seed}.onnx"
    if not path.exists():
        say(f"training {network} on {data}")
        rows = images(data, folder)
        widths = (100,) * 4
        weights = train_classifier(rows["x_train"], rows["y_train"], widths, seed=seed, epochs=epochs)
        CACHE.mkdir(exist_ok=True)
        onnx.save(as_onnx(weights), path)
    return path


def _run(model: onnx.ModelProto, names: list[str], x: np.ndarray) -> list[np.ndarray]:
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    listed = {value.name for value in model.graph.output}
    new = [name for name in names if name not in listed]
    exposed.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in new)
    session = runtime.open_session(exposed, "the network", runtime.session_options(threads=1))
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim][1:]
    given = model.graph.input[0].name
    answers = [
        session.run(names, {given: x[start : start + 500].reshape(-1, *shape)})
        for start in range(0, len(x), 500)
    ]
    return [np.concatenate(part) for part in zip(*answers)]


# ------------------------------------------------------------------------ readings


@dataclass(frozen=True)
class Reading:
    """One way to fill what the method leaves open; the defaults are those that docs/defaults.md argues for."""

    sites: tuple[int, ...] | None = None  #: numbers from the input on; None for the last
    inducing: str = "kmeans"
    m: int = 1000
    k: int = 50
    solver: str = "exact"
    of: str = "site"  #: whose median distance: site or input
    multiple: float = 1.0
    target: float | None = 0.05  #: of the median leave-one-out share
    capped: bool = False
    #: several sites: median variance of the logits of each over that of the last; None adds them as they are
    earlier: float | None = None
    jitter: float = 1e-6
    bridge: str = "shared"
    seed: int = 0


PAPER = Reading(of="input", multiple=1.0, target=None, bridge="per-class")


@dataclass(frozen=True, eq=False)
class Shares:
    """s at one site."""

    known: np.ndarray = field(repr=False)
    strange: np.ndarray = field(repr=False)
    left_out: np.ndarray = field(repr=False)  #: of training rows, each left out

    @property
    def median(self) -> float:
        return float(np.median(self.left_out))


def shares(subject: Subject, number: int, reading: Reading) -> Shares:
    """Kept: readings that differ behind the operator share its answers."""
    plain = {"sites": None, "target": None, "capped": False, "earlier": None, "bridge": "shared"}
    return _shares(subject, number, replace(reading, **plain))


@lru_cache(maxsize=64)
def _shares(subject: Subject, number: int, reading: Reading) -> Shares:
    site = subject.sites[number]
    length_scale = reading.multiple * (subject.input_median if reading.of == "input" else site.median)
    points = _points(subject, number, reading.inducing, reading.m, reading.seed)
    k = min(reading.k, len(points))
    near, table = None, None
    if reading.solver == "nearest":
        near = table = neighbourhoods(points, k)
    elif reading.solver == "cached":
        near = choose(points, site.rows, k, length_scale, reading.jitter, reading.seed)
        table = near.whole
    session = _operator(points, table, k, length_scale, reading.jitter)
    answers = [session.run(["s"], {"query": part})[0][:, 0] for part in (site.known, site.strange)]
    sizes = inducing.cluster_sizes(site.rows, points) if reading.inducing == "kmeans" else None
    left_out = statistics.leave_one_out_share(
        site.left_out, points, k, length_scale, reading.jitter, sizes, near
    )
    return Shares(*(answer.astype(np.float64) for answer in answers), left_out)


@lru_cache(maxsize=16)
def _points(subject: Subject, number: int, method: str, m: int, seed: int) -> np.ndarray:
    """Inducing points; k-means of 55,000 rows takes half a minute, so its centroids are kept in the cache."""
    rows = subject.sites[number].rows
    if method != "kmeans":
        return inducing.select(method, rows, m, seed)
    words = (subject.network, subject.data, number, len(rows), m, seed)
    path = CACHE / "paper" / f"kmeans_{'_'.join(map(str, words))}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, inducing.select(method, rows, m, seed))
    return np.load(path)


def _operator(
    points: np.ndarray, near: np.ndarray | None, k: int, length_scale: float, jitter: float
) -> ort.InferenceSession:
    """A model of the operator alone, in the native library."""
    schema = SCHEMAS["flat" if near is None else "local"]
    tensors = {"points": points, "k": [k], "length_scale": np.float32(length_scale)}
    tensors |= {"jitter": np.float32(jitter), "nprobe": [1], "list_offsets": [0, len(points)]}
    tensors |= {"neighbourhoods": near, "centroids": points.mean(axis=0, keepdims=True)}
    names = [port.name for port in schema.constants]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(schema.name, ["query", *names], ["s", "neighbours"], domain=DOMAIN)],
        "site",
        [value("query", onnx.TensorProto.FLOAT, ["n", points.shape[1]])],
        [value("s", onnx.TensorProto.FLOAT, ["n", 1])],
        [
            numpy_helper.from_array(np.asarray(tensors[port.name], port.dtype), port.name)
            for port in schema.constants
        ],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    options = runtime.session_options(threads=1)
    if not runtime.register(options):
        sys.exit("the native library is missing: `gapa-onnx doctor` tells more")
    return runtime.open_session(model, "the operator", options)


# ------------------------------------------------------------------------- figures


def variances(subject: Subject, reading: Reading) -> tuple[np.ndarray, np.ndarray]:
    """Of the logits, for known and strange rows, (n, classes) each."""
    numbers = reading.sites or (len(subject.sites) - 1,)
    born = {number: shares(subject, number, reading) for number in numbers}
    if reading.earlier is None:
        return tuple(_propagated(subject, born, reading, part) for part in ("known", "strange"))
    medians = [
        np.median(_propagated(subject, {number: born[number]}, reading, "left_out").mean(axis=1))
        for number in numbers
    ]
    weights = np.array([reading.earlier] * (len(numbers) - 1) + [1.0])
    factors = weights / weights.sum() * medians[-1] / np.array(medians)
    return tuple(
        sum(
            factor * _propagated(subject, {number: born[number]}, reading, part)
            for factor, number in zip(factors, numbers)
        )
        for part in ("known", "strange")
    )


def _propagated(subject: Subject, born: Mapping[int, Shares], reading: Reading, part: str) -> np.ndarray:
    var = None
    for number, site in enumerate(subject.sites):
        if var is not None:
            var = var * site.slope(part)
        if number in born:
            found = born[number]
            tau = 1.0 if reading.target is None else reading.target / max(found.median, reading.jitter)
            share = tau * getattr(found, part)
            levelled = share / (1 + max(tau / CEILING - 1, 0) * getattr(found, part))
            own = (np.minimum(share, 1.0) if reading.capped else levelled)[:, None] * site.prior_var
            var = own if var is None else var + own
        if var is not None:
            var = var @ site.weight.astype(np.float64) ** 2
    return var


def figures(subject: Subject, reading: Reading | None, points: Points | None = None) -> dict[str, Any]:
    """NLL, ECE and AUROCs of a reading; of the source network by itself for None."""
    if reading is None:
        probs = [reference.softmax(logits, 1) for logits in (subject.known, subject.strange)]
        entropies = [metrics.entropy_rows(p) for p in probs]
        return {**_calibration(subject, probs[0]), "entropy": _auroc(*entropies)}
    var = variances(subject, reading)
    logits = (subject.known, subject.strange)
    probs = [reference.bridge(m, v, 1, kind=reading.bridge) for m, v in zip(logits, var)]
    parts = [reference.split(m, v, 1, points or latin(CLASSES)) for m, v in zip(logits, var)]
    changed = sum(int((m.argmax(1) != p.argmax(1)).sum()) for m, p in zip(logits, probs))
    numbers = reading.sites or (len(subject.sites) - 1,)
    return {
        **_calibration(subject, probs[0]),
        "entropy": _auroc(*(part.entropy for part in parts)),
        "bald": _auroc(*(part.epistemic for part in parts)),
        "score": _auroc(*(v.mean(axis=1) for v in var)),
        "argmax_changed": changed,
        "left_out": float(f"{shares(subject, numbers[-1], reading).median:.3g}"),
    }


def _calibration(subject: Subject, probs: np.ndarray) -> dict[str, float]:
    right = probs.argmax(axis=1) == subject.labels
    bins = metrics.bin_sums(probs.max(axis=1), right)
    found = {
        "acc": right.mean(),
        "nll": metrics.log_loss_rows(probs, subject.labels).mean(),
        "ece": metrics.expected_calibration_error(bins),
    }
    return {name: round(float(value), 5) for name, value in found.items()}


def _auroc(known: np.ndarray, strange: np.ndarray) -> float:
    return round(metrics.detection(known, strange)["auroc"], 5)
