"""Step 2, analyse: the plan of small models, and which plans cannot be carried out."""

from __future__ import annotations

import numpy as np
import pytest
from support.small_models import parse

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel, load
from gapa_onnx.plan.analyse import analyse, require_convertible
from gapa_onnx.plan.head import Task
from gapa_onnx.settings import Settings
from gapa_onnx.variance.rules import Options

WEIGHTS = {"w1": np.ones((3, 5)), "w2": np.ones((5, 4)), "w3": np.ones((5, 1))}


def model(body: str, outputs: str) -> SourceModel:
    return load(
        parse(f"net (float[n, 3] x) => ({outputs}) {{ z = MatMul(x, w1)  h = Tanh(z)  {body} }}", **WEIGHTS)
    )


def test_a_plan_names_sites_outputs_and_heads():
    body = (
        "logits = MatMul(h, w2)  p = Softmax<axis = 1>(logits)  v = MatMul(h, w3)  c = Exp(x)  i = ArgMax(p)"
    )
    outputs = "float[n, 4] p, float[n, 1] v, float[n, 3] c, int64[n, 1] i"
    source = model(body, outputs)
    plan = analyse(source, Settings())
    assert plan.source is source
    assert [(site.query, site.output, site.activation) for site in plan.sites] == [("z", "h", "Tanh")]
    assert plan.outputs == ("p", "v")
    assert plan.certain_outputs == ("c",)  # whole numbers are neither
    assert plan.refused == ()
    assert [(head.output, head.task, head.logits, head.link, head.axis) for head in plan.heads] == [
        ("p", Task.CLASSIFICATION, "logits", "softmax", 1),
        ("v", Task.REGRESSION, "v", "identity", None),
    ]
    require_convertible(plan, Settings())


def test_nothing_of_the_source_changes():
    source = model("y = MatMul(h, w2)", "float[n, 4] y")
    before = source.proto.SerializeToString(), [node.op for node in source.graph.nodes]
    analyse(source)
    assert (source.proto.SerializeToString(), [node.op for node in source.graph.nodes]) == before


def test_settings_reach_sites_tasks_and_rules():
    source = model("y = MatMul(h, w2)", "float[n, 4] y")
    plan = analyse(source, Settings(sites="x", task="none", attention="full"))
    assert [site.output for site in plan.sites] == ["x"]
    assert [head.task for head in plan.heads] == [Task.NONE]
    assert plan.options == Options(attention="full") and analyse(source).options == Options()


def test_a_head_that_was_assumed_gives_way_and_one_that_was_asked_for_does_not():
    """Sites behind the logits: the probabilities have a variance, the logits have none."""
    source = model(
        "l = MatMul(h, w2)  p = Softmax<axis = 1>(l)  y = Mul(p, p)", "float[n, 4] p, float[n, 4] y"
    )
    plan = analyse(source, Settings(sites="p"))
    (head, _) = plan.heads
    assert head.task == Task.NONE and "the sites lie behind 'l'" in head.reason
    with pytest.raises(UserError, match="the sites lie behind 'l'"):
        analyse(source, Settings(sites="p", task="p=classification,y=none"))


def test_nodes_without_a_rule_stop_a_conversion_unless_they_are_cut():
    source = model("a = com.example.F(h)  s = Add(h, a)  y = MatMul(s, w2)", "float[n, 4] y")
    plan = analyse(source, Settings(sites="h"))
    (refused,) = plan.refused
    assert "com.example" in str(refused)
    with pytest.raises(UserError, match="1 node.* no variance rule"):
        require_convertible(plan, Settings(sites="h"))
    cut = Settings(sites="h", on_unsupported="cut")
    plan = analyse(source, cut)
    assert plan.outputs == ("y",)  # by the other path
    require_convertible(plan, cut)


def test_a_plan_without_an_output_is_refused():
    source = model("y = MatMul(h, w2)  s = Sign(h)  t = MatMul(s, w3)", "float[n, 1] t")
    plan = analyse(source, Settings(sites="h"))
    assert plan.outputs == () and plan.certain_outputs == ("t",)
    with pytest.raises(UserError, match="no floating-point output depends on the site"):
        require_convertible(plan, Settings(sites="h"))


def test_a_covariance_that_cannot_be_carried_is_refused():
    full = Settings(sites="h", covariance="full", task="none")
    plain = model("y = MatMul(h, w2)", "float[n, 4] y")
    require_convertible(analyse(plain, full), full)
    product = model("m = MatMul(h, w2)  k = Transpose(m)  y = MatMul(m, k)", "float[n, n] y")
    with pytest.raises(UserError):
        require_convertible(analyse(product, full), full)
