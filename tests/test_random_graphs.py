"""Graphs of random operators: what the rules make of a whole graph, against evaluations that know no rule."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime.capi.onnxruntime_pybind11_state as ort_errors
from hypothesis import HealthCheck, assume, given, settings
from numpy_rules import BILINEAR, Moments, chain, moments_after, node_function
from onnx.reference import ReferenceEvaluator
from random_graphs import PALETTE, RandomGraph, random_graphs
from rule_checks import (
    STANDARD_ERRORS,
    Erf,
    GlobalMaxPool,
    add_variances,
    propagate_inputs,
    squared_jacobian_product,
)

from gapa_onnx.load import load
from gapa_onnx.patterns import find_composites

EXAMPLES = 200
TREES = 60
SAMPLES = 3000
SMALL_STD = 1e-3  #: against that of random graphs; the next order is smaller by its square
TOLERANCE_DOUBLE = 1e-6
TOLERANCE_SINGLE = 1e-3
#: onnxruntime has no double kernel in some of the opsets
SINGLE_ONLY = {
    "LeakyRelu", "Elu", "Softplus", "HardSigmoid", "PRelu", "Clip", "Conv", "AveragePool",
    "GlobalAveragePool", "GlobalMaxPool",
}  # fmt: skip
#: ONNX's reference errs in some of their forms: one axis in opset 9 and 11, the stored statistics, indices
MISTAKEN = {"Softmax", "LogSoftmax", "BatchNormalization", "MaxPool"}
#: Composites whose rule is J² v. That of normalisations adds to it, that of attention leaves terms out.
FIRST_ORDER_COMPOSITES = {
    "Swish", "Gelu", "Mish", "HardSwish", "HardSigmoid", "LeakyRelu", "PRelu", "Softmax", "LogSoftmax",
    "Centering", "SumNormalization",
}  # fmt: skip


def exhaustively(examples: int) -> Callable:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def ort_session(model: onnx.ModelProto, optimised: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def double_session(model: onnx.ModelProto) -> ort.InferenceSession | ReferenceEvaluator | None:
    """Of onnxruntime, or of ONNX's reference where that has no double kernels; None where both fail."""
    try:
        return ort_session(model)
    except ort_errors.NotImplemented:
        if MISTAKEN & {node.op_type for node in model.graph.node}:
            return None
        return ReferenceEvaluator(model, new_ops=[GlobalMaxPool])


def expected(graph: RandomGraph) -> dict[str, Moments] | None:
    """Node by node, and each composite as one function; None where the rule of one is not J² v."""
    source = load(graph.model(np.float64)).graph
    composites = list(find_composites(source, visible=set(graph.uncertain)))
    if not composites:
        return graph.tensors
    if any(composite.node.op not in FIRST_ORDER_COMPOSITES for composite in composites):
        return None
    ends = {composite.last.outputs[0].name: composite for composite in composites}
    constants = {name: Moments(array) for name, array in graph.constants.items()}
    found = constants | {name: graph.tensors[name] for name in graph.inputs}
    for node in graph.nodes:
        group, inputs = [node], node.input
        if node.output[0] in ends:
            composite = ends[node.output[0]]
            inside = {tensor.name for member in composite.interior for tensor in member.outputs}
            group = [other for other in graph.nodes if other.output[0] in inside] + [node]
            inputs = [tensor.name for tensor in composite.node.inputs if tensor.name]
            inputs += [name for member in group for name in member.input if name in constants]
        function = chain(group, graph.opset)
        known = {name: found[name] for name in inputs if name}
        found.update(zip(node.output, moments_after(function, known, node.op_type in BILINEAR)))
    return found


@dataclass(frozen=True, eq=False)
class Converted:
    """A graph's model of one type, with variances."""

    graph: RandomGraph
    dtype: type
    std: float = 1.0  #: of the inputs, times what is drawn

    @functools.cached_property
    def model(self) -> onnx.ModelProto:
        return self.graph.model(self.dtype)

    @functools.cached_property
    def spliced(self) -> onnx.ModelProto:
        result = propagate_inputs(self.model, self.graph.uncertain)
        assert not result.refused, result.refused
        return add_variances(self.model, result)[0]

    @functools.cached_property
    def feeds(self) -> dict[str, np.ndarray]:
        return self.graph.feeds(self.dtype)

    @property
    def variances(self) -> dict[str, np.ndarray]:
        return {name: (self.std**2 * var).astype(self.dtype) for name, var in self.graph.variances().items()}

    @property
    def all_feeds(self) -> dict[str, np.ndarray]:
        return self.feeds | {f"{name}/own": var for name, var in self.variances.items()}

    def outputs(self, session: ort.InferenceSession | ReferenceEvaluator) -> dict[str, np.ndarray]:
        """By name, those of the source and their variances."""
        return dict(zip([output.name for output in self.spliced.graph.output], session.run(None, self.all_feeds)))


def check_moments(found: dict[str, np.ndarray], wanted: dict[str, Moments], graph: RandomGraph, rtol: float) -> None:
    """Means and variances of all outputs; a variance is absent where it should be.

    What is next to 0 against the tensor that it belongs to is so by cancellation.
    """
    largest = max(tensor.var.max() for tensor in wanted.values() if tensor.var is not None)
    for name in graph.outputs:
        mean, var = wanted[name].mean, wanted[name].var
        np.testing.assert_allclose(found[name], mean, rtol=rtol, atol=rtol, err_msg=name)
        assert (var is not None) == (f"{name}_var" in found)
        if var is not None:
            assert np.all(found[f"{name}_var"] >= 0)
            np.testing.assert_allclose(found[f"{name}_var"], var, rtol=rtol, atol=rtol**1.5 * largest, err_msg=name)


def check_source(converted: Converted) -> dict[str, np.ndarray]:
    """A valid model, in which the source's outputs keep every bit whatever onnxruntime optimises."""
    onnx.checker.check_model(converted.spliced, full_check=True)
    names = [output.name for output in converted.model.graph.output]
    for optimised in (False, True):
        found = converted.outputs(ort_session(converted.spliced, optimised))
        source = ort_session(converted.model, optimised).run(None, converted.feeds)
        for name, y in zip(names, source):
            assert found[name].tobytes() == y.tobytes(), f"{name}, optimised: {optimised}"
    return found


def check_graph(graph: RandomGraph, wanted: dict[str, Moments], counts: Counter) -> None:
    double, single = Converted(graph, np.float64), Converted(graph, np.float32)
    check_moments(check_source(single), wanted, graph, TOLERANCE_SINGLE)
    session = double_session(double.spliced)
    counts[f"double by {type(session).__name__}"] += 1
    if session is not None:
        tolerance = TOLERANCE_SINGLE if "Cast" in graph.drawn else TOLERANCE_DOUBLE
        check_moments(double.outputs(session), wanted, graph, tolerance)
    if isinstance(session, ort.InferenceSession):
        check_source(double)


def test_variances_of_random_graphs(record_property):
    counts = Counter()

    @exhaustively(EXAMPLES)
    @given(random_graphs())
    def check(graph: RandomGraph) -> None:
        counts["graphs"] += 1
        wanted = expected(graph)
        if wanted is None:
            counts["left out"] += 1
            return
        counts.update(graph.drawn)
        check_graph(graph, wanted, counts)

    check()
    for name, count in counts.items():
        record_property(name, count)
    assert set(PALETTE) <= set(counts)
    assert counts["left out"] <= 0.05 * counts["graphs"]
