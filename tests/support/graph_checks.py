"""What a random graph's variances should be, by evaluations that know no rule, and what is found.

node by node   that of `numpy_rules`, each composite as one function
trees          J² v with J of the whole graph, and Monte Carlo
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime.capi.onnxruntime_pybind11_state as ort_errors
from onnx.reference import ReferenceEvaluator

from gapa_onnx.model.load import load
from gapa_onnx.variance.patterns import Composite, find_composites
from support.numpy_rules import BILINEAR, Arrays, Function, Moments, chain, moments_after
from support.random_graphs import RandomGraph
from support.rule_checks import (
    STANDARD_ERRORS,
    GlobalMaxPool,
    add_variances,
    propagate_inputs,
    squared_jacobian_product,
)

SAMPLES = 1000
SMALL = 1e-5  #: times the std that is drawn: 5 of it stay on one side of every kink
ROUNDING = 1e-14  #: of numbers that are 20 at most, in double

#: ONNX's reference errs in some forms of these: their axes before opset 13, statistics before 14, indices.
MISTAKEN = {"Softmax", "LogSoftmax", "BatchNormalization", "MaxPool"}
#: Composites whose rule is J² v. That of normalisations adds to it, that of attention leaves terms out.
FIRST_ORDER_COMPOSITES = {
    "Swish", "Gelu", "Mish", "HardSwish", "HardSigmoid", "LeakyRelu", "PRelu", "Softmax", "LogSoftmax",
    "Centering", "SumNormalization", "SoftmaxExpectation", "SoftmaxMixture",
}  # fmt: skip


@dataclass(frozen=True)
class Tolerance:
    """Relative for variances, with a floor relative to the largest variance of the graph."""

    mean: float
    var: float
    floor: float


#: Differences err by 2 ε |f| / STEP + STEP² |f'''| / 6 ≈ 1e-9, and squares of slopes by twice as much over
#: the slope: 1e-5 for slopes of 2e-4. Those that are smaller are below the floor.
DOUBLE = Tolerance(1e-12, 1e-5, 1e-9)
#: Some tens of operations of ε = 6e-8 each, on differences of numbers that are 20 at most.
SINGLE = Tolerance(2e-5, 3e-4, 1e-8)


# ------------------------------------------------------------------- what is expected


def composites_of(graph: RandomGraph) -> list[Composite]:
    return list(find_composites(load(graph.model(np.float64)).graph, visible=set(graph.uncertain)))


def expected(graph: RandomGraph) -> dict[str, Moments] | None:
    """Node by node, and each composite as one function; None where the rule of one is not J² v."""
    composites = {composite.last.outputs[0].name: composite for composite in composites_of(graph)}
    if not composites:
        return graph.tensors
    if any(composite.node.op not in FIRST_ORDER_COMPOSITES for composite in composites.values()):
        return None
    found = {name: Moments(array) for name, array in graph.constants.items()}
    found |= {name: graph.tensors[name] for name in graph.inputs}
    for node in graph.nodes:
        composite = composites.get(node.output[0])
        group, inputs = ([node], node.input) if composite is None else _members(graph, composite)
        known = {name: found[name] for name in inputs if name}
        bilinear = composite is None and node.op_type in BILINEAR
        found.update(zip(node.output, moments_after(chain(group, graph.opset), known, bilinear)))
    return found


def _members(graph: RandomGraph, composite: Composite) -> tuple[list[onnx.NodeProto], list[str]]:
    """The nodes of a composite in order, and what they read: its inputs and constants."""
    members = {tensor.name for node in (*composite.interior, composite.last) for tensor in node.outputs}
    nodes = [node for node in graph.nodes if node.output[0] in members]
    read = {name for node in nodes for name in node.input}
    return nodes, sorted(read - {name for node in nodes for name in node.output})


# ---------------------------------------------------------------------- what is found


@dataclass(frozen=True, eq=False)
class Converted:
    """A graph's model of one type, with variances."""

    graph: RandomGraph
    dtype: type
    scale: float = 1.0  #: of the inputs' standard deviations

    @functools.cached_property
    def model(self) -> onnx.ModelProto:
        return self.graph.model(self.dtype)

    @functools.cached_property
    def spliced(self) -> onnx.ModelProto:
        result = propagate_inputs(self.model, self.graph.uncertain)
        assert not result.refused, result.refused
        return add_variances(load(self.model).proto, result)[0]

    @functools.cached_property
    def variances(self) -> Arrays:
        return {name: self.scale**2 * var for name, var in self.graph.variances().items()}

    def outputs(self, session: ort.InferenceSession | ReferenceEvaluator) -> Arrays:
        """By name, those of the source and their variances."""
        own = {f"{name}/own": var.astype(self.dtype) for name, var in self.variances.items()}
        names = [output.name for output in self.spliced.graph.output]
        return dict(zip(names, session.run(None, self.graph.feeds(self.dtype) | own)))


def ort_session(model: onnx.ModelProto, optimised: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def double_session(model: onnx.ModelProto) -> ort.InferenceSession | ReferenceEvaluator | None:
    """Of onnxruntime, or of ONNX's reference where that lacks a double kernel; None where both fail.

    Not optimised: a factor that onnxruntime fuses into a MatMul of doubles is rounded to float32.
    """
    try:
        return ort_session(model, optimised=False)
    except ort_errors.NotImplemented:
        if MISTAKEN & {node.op_type for node in model.graph.node}:
            return None
        return ReferenceEvaluator(model, new_ops=[GlobalMaxPool])


# ----------------------------------------------------------------------------- checks


def check_moments(
    found: Arrays, wanted: dict[str, Moments], graph: RandomGraph, tolerance: Tolerance
) -> None:
    """Means and variances of all outputs; a variance is absent where it should be."""
    largest = max(tensor.var.max() for tensor in wanted.values() if tensor.var is not None)
    for name in graph.outputs:
        mean, var = wanted[name].mean, wanted[name].var
        np.testing.assert_allclose(found[name], mean, tolerance.mean, tolerance.mean, err_msg=name)
        assert (var is not None) == (f"{name}_var" in found), name
        if var is not None:
            assert np.all(found[f"{name}_var"] >= 0), name
            floor = tolerance.floor * largest
            np.testing.assert_allclose(found[f"{name}_var"], var, tolerance.var, floor, err_msg=f"{name}_var")


def check_source(converted: Converted) -> Arrays:
    """A valid model, in which the source's outputs keep every bit whatever onnxruntime optimises."""
    onnx.checker.check_model(converted.spliced, full_check=True)
    feeds = converted.graph.feeds(converted.dtype)
    for optimised in (False, True):
        found = converted.outputs(ort_session(converted.spliced, optimised))
        source = ort_session(converted.model, optimised).run(converted.graph.outputs, feeds)
        for name, y in zip(converted.graph.outputs, source):
            assert found[name].tobytes() == y.tobytes(), f"{name}, optimised: {optimised}"
    return found


def check_graph(graph: RandomGraph, wanted: dict[str, Moments], counts: Counter) -> None:
    single, double = Converted(graph, np.float32), Converted(graph, np.float64)
    check_moments(check_source(single), wanted, graph, SINGLE)
    session = double_session(double.spliced)
    counts[f"double by {type(session).__name__}"] += 1
    if session is not None:
        check_moments(double.outputs(session), wanted, graph, SINGLE if "Cast" in graph.drawn else DOUBLE)
    if isinstance(session, ort.InferenceSession):
        check_source(double)


# ------------------------------------------------------------------------------ trees


def check_tree(graph: RandomGraph) -> None:
    double, single = Converted(graph, np.float64, SMALL), Converted(graph, np.float32, SMALL)
    session = double_session(double.spliced)
    found = single.outputs(ort_session(single.spliced)) if session is None else double.outputs(session)
    in_ort = isinstance(session, ort.InferenceSession) and "Cast" not in graph.drawn
    run = whole_graph_in_ort(graph) if in_ort else whole_graph(graph)
    tolerance = SINGLE if session is None or "Cast" in graph.drawn else DOUBLE
    check_jacobian(double, run, found, tolerance)
    check_monte_carlo(double, run, found)


def whole_graph(graph: RandomGraph) -> Function:
    """The source's outputs in float64, whatever onnxruntime lacks; casts do not round."""
    run = chain(graph.nodes, graph.opset, graph.outputs)
    return lambda feeds: run(graph.constants | feeds)


def whole_graph_in_ort(graph: RandomGraph) -> Function:
    return functools.partial(ort_session(graph.model(np.float64), optimised=False).run, graph.outputs)


def check_jacobian(converted: Converted, run: Function, found: Arrays, tolerance: Tolerance) -> None:
    """J² v, with J of the whole graph by central differences."""
    graph = converted.graph
    wanted = squared_jacobian_product(run, graph.feeds(np.float64), converted.variances)
    floor = tolerance.floor * max(v.max() for v in (*wanted, *converted.variances.values()))
    for name, var in zip(graph.outputs, wanted):
        np.testing.assert_allclose(found.get(f"{name}_var", 0 * var), var, tolerance.var, floor, err_msg=name)


def check_monte_carlo(converted: Converted, run: Function, found: Arrays) -> None:
    """The sample variance, within five standard errors of itself."""
    graph, rng = converted.graph, np.random.default_rng(1)
    feeds = graph.feeds(np.float64)
    drawn = {
        n: feeds[n] + rng.normal(size=(SAMPLES, *v.shape)) * np.sqrt(v)
        for n, v in converted.variances.items()
    }
    outputs = [run(feeds | {n: x[i] for n, x in drawn.items()}) for i in range(SAMPLES)]
    for name, values in zip(graph.outputs, zip(*outputs)):
        values = np.array(values)  # (samples, …)
        values -= values[0]  # what is constant is exactly 0 from here on
        squares = (values - values.mean(axis=0)) ** 2
        estimate, error = squares.mean(axis=0), squares.std(axis=0) / np.sqrt(SAMPLES)
        var = found.get(f"{name}_var", np.zeros(error.shape))
        close = np.abs(estimate - var) <= STANDARD_ERRORS * error + ROUNDING**2
        assert np.all(close), f"{name}: sampled {estimate}, by the rules {var}, standard error {error}"
