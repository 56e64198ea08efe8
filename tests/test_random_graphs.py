"""Graphs of random operators: what the rules make of a whole graph, against evaluations that know no rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

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


def double_session(model: onnx.ModelProto) -> ort.InferenceSession | ReferenceEvaluator:
    try:
        return ort_session(model)
    except ort_errors.NotImplemented:
        return ReferenceEvaluator(model, new_ops=[Erf, GlobalMaxPool])


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


def check_variances(graph: RandomGraph, wanted: dict[str, Moments], dtype: type, single: bool) -> None:
    model = graph.model(dtype)
    result = propagate_inputs(model, graph.uncertain)
    assert not result.refused, result.refused
    spliced, names = add_variances(model, result)
    feeds = graph.feeds(dtype)
    own = {f"{name}/own": var.astype(dtype) for name, var in graph.variances().items()}
    check_model(model, spliced, feeds, own)
