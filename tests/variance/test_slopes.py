"""The slopes of the rule table are derivatives with their sign, which a variance alone would not tell."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from cases import CASES, Case
from onnx.reference import ReferenceEvaluator
from support.covariance_checks import Gelu
from support.rule_checks import STEP, Erf, session

from gapa_onnx.model.load import load
from gapa_onnx.model.splice import splice
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.rules import TABLE, NodeView, Rule
from gapa_onnx.variance.rules.registry import Slopes, evaluated

TOLERANCE = 4e-5  #: float32, as in `rule_checks`


def slopes_of(case: Case) -> Slopes | None:
    entry = TABLE[case.key]
    return entry.slopes if isinstance(entry, Rule) else None


SLOPED = [case for case in CASES if slopes_of(case) is not None and len(case.nodes) == 1 and not case.smooth]


def with_slopes(case: Case, slopes: Slopes) -> tuple[onnx.ModelProto, list[str]]:
    """The case's model, with the slope of each uncertain input, times 1, as the outputs that are named."""
    source = load(case.model(np.float32))
    graph = VarianceGraph(source.opset, set(source.graph.tensors()))
    node = NodeView(graph, source.graph.nodes[0], lambda name: None)
    x = [operand.mean for operand in node.inputs if operand.present]
    wanted: dict[str, Value] = {}
    for operand, slope in zip(node.inputs, slopes(node)):
        if operand.tensor.name in case.uncertain:
            assert slope is not None
            value = graph.expand(graph.constant(np.float32(1)), like=node.output.raw) * evaluated(
                node, slope, node.output.mean, x
            )
            name = operand.tensor.name
            wanted[name] = wanted[name] + value if name in wanted else value
    found = [graph.output(value, f"{name}/slope") for name, value in wanted.items()]
    infos = [onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, None) for value in found]
    return splice(source.proto, graph.to_proto(found), infos), list(wanted)


@pytest.mark.parametrize("case", SLOPED, ids=[case.id for case in SLOPED])
def test_a_slope_is_the_signed_derivative(case: Case) -> None:
    """y(x + h) - y(x - h) over 2h in float64, with all elements of an input shifted at once."""
    slopes = slopes_of(case)
    assert slopes is not None
    model, names = with_slopes(case, slopes)
    found = dict(zip(names, session(model).run([f"{name}/slope" for name in names], case.feeds(np.float32))))
    reference = ReferenceEvaluator(case.model(np.float64), new_ops=[Erf, Gelu])
    feeds = case.feeds(np.float64)
    for name in names:
        upper, lower = (reference.run(None, feeds | {name: feeds[name] + h})[0] for h in (STEP, -STEP))
        wanted = (upper - lower) / (2 * STEP)
        np.testing.assert_allclose(found[name], wanted, rtol=TOLERANCE, atol=1e-6)
