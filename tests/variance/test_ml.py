"""Classical models (ai.onnx.ml): what converts, and what is said of the rest."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from support.rule_checks import propagate_inputs, run_with_variances

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import OPSET_WHERE_NONE, load
from gapa_onnx.plan.analyse import operator_table
from gapa_onnx.plan.placement import find_sites
from gapa_onnx.variance.rules import TABLE, Deterministic, Refusal

ML = "ai.onnx.ml"
RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(3, 4)).round(3)
ROWS = {"x": RNG.normal(size=(200, 4)).astype(np.float32)}


def node(op_type: str, inputs: list[str], outputs: list[str], **attrs) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, outputs, domain=ML, **attrs)


def model(
    nodes: list[onnx.NodeProto], outputs: list[str], opset: int | None = 17, version: int = 1
) -> onnx.ModelProto:
    """With no version of ONNX's own operators if `opset` is None."""
    imports = [helper.make_opsetid(ML, version)] + ([helper.make_opsetid("", opset)] if opset else [])
    declared = {
        "label": helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["n"]),
        "y": helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", None]),
        "maps": helper.make_value_info("maps", maps_type()),
    }
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph(nodes, "classical", [x], [declared[name] for name in outputs])
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def maps_type() -> onnx.TypeProto:
    number = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
    return helper.make_sequence_type_proto(helper.make_map_type_proto(onnx.TensorProto.INT64, number))


def classifier(outputs: tuple[str, str] = ("label", "y")) -> onnx.NodeProto:
    return node("LinearClassifier", ["x"], list(outputs), coefficients=WEIGHTS.ravel().tolist(),
                intercepts=[0.1, 0.2, 0.3], classlabels_ints=[0, 1, 2], post_transform="SOFTMAX")  # fmt: skip


def regressor() -> onnx.NodeProto:
    return node("LinearRegressor", ["x"], ["y"], coefficients=WEIGHTS[0].tolist())


def tree(op_type: str = "TreeEnsembleRegressor") -> onnx.NodeProto:
    return node(op_type, ["x"], ["y"], n_targets=1, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2],
                nodes_featureids=[0, 0, 0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values=[0.0, 0.0, 0.0],
                nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0], target_treeids=[0, 0],
                target_nodeids=[1, 2], target_ids=[0, 0], target_weights=[1.0, 2.0])  # fmt: skip


def converted(proto: onnx.ModelProto, sites: str = "auto") -> tuple[gapa_onnx.Conversion, dict]:
    conversion = gapa_onnx.convert(proto, ROWS, sites=sites, m=32, k=8)
    assert [check for check in conversion.checks if not check.passed] == []
    session = gapa_onnx.session(conversion.model.SerializeToString())
    return conversion, dict(zip([output.name for output in session.get_outputs()], session.run(None, ROWS)))


# -------------------------------------------------------------------------- conversion


@pytest.mark.parametrize("opset", [17, 21, None])
@pytest.mark.parametrize("sites", ["auto", "all", "x"])
def test_a_linear_model_converts(opset, sites):
    proto = model([regressor()], ["y"], opset)
    conversion, found = converted(proto, sites)
    (site,) = conversion.plan.sites
    assert (site.output, site.activation) == ("x", None)
    assert (
        conversion.plan.source.opset == opset
        or opset is None
        and conversion.plan.source.opset == OPSET_WHERE_NONE
    )
    before = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, ROWS
    )
    np.testing.assert_array_equal(found["y"], before[0])
    assert found["y_var"].shape == (200, 1) and np.all(found["y_var"] > 0)


def test_a_file_without_an_onnx_version_is_given_one_and_stays_what_it_was(tmp_path):
    path = tmp_path / "only_ml.onnx"
    path.write_bytes(model([regressor()], ["y"], None).SerializeToString())
    source = load(path)
    assert not [entry for entry in source.given.opset_import if not entry.domain]
    emitted = gapa_onnx.convert(path, ROWS, m=32, k=8).model
    assert [entry.version for entry in emitted.opset_import if not entry.domain] == [OPSET_WHERE_NONE]
    assert source.given.graph.node[0] in list(emitted.graph.node)


def test_a_classifier_with_probabilities():
    steps = [classifier(("label", "p")), node("Normalizer", ["p"], ["y"], norm="L1")]
    conversion, found = converted(model(steps, ["label", "y"]))
    assert conversion.plan.outputs == ("y",)
    assert found["label"].dtype == np.int64 and "label_var" not in found
    assert found["y_var"].shape == (200, 3)


def test_a_pipeline_of_features():
    steps = [
        node("Imputer", ["x"], ["filled"], imputed_value_floats=[0.0], replaced_value_float=float("nan")),
        node("Scaler", ["filled"], ["scaled"], offset=[0.1], scale=[2.0]),
        node("LinearRegressor", ["scaled"], ["y"], coefficients=WEIGHTS[0].tolist()),
    ]
    conversion, found = converted(model(steps, ["y"]), "x")
    assert np.all(found["y_var"] > 0)
    assert [site.output for site in find_sites(conversion.plan.source, "auto")] == ["scaled"]


def test_maps_of_probabilities_have_their_variance_as_a_tensor():
    """What scikit-learn models look like unless told otherwise."""
    steps = [classifier(("label", "p")), node("ZipMap", ["p"], ["maps"], classlabels_int64s=[0, 1, 2])]
    conversion, found = converted(model(steps, ["label", "maps"]))
    assert conversion.plan.outputs == ("maps",)
    plain, tensors = converted(model([classifier()], ["label", "y"]))
    np.testing.assert_array_equal(found["maps_var"], tensors["y_var"])
    assert found["maps"][5] == dict(zip(range(3), tensors["y"][5]))


# ------------------------------------------------------------------------------- trees


@pytest.mark.parametrize("opset", [17, None])
def test_trees_say_that_nothing_carries_variance(opset):
    proto = model([tree()], ["y"], opset)
    (head,) = gapa_onnx.convert(proto, ROWS).plan.heads
    assert head.reason == "score only: no variance passes a tree ensemble, which is constant but for jumps"
    with pytest.raises(UserError, match="no floating-point output depends"):
        gapa_onnx.convert(proto, ROWS, sites="x")
    (row,) = operator_table(load(proto))
    assert row.behaviour == "deterministic" and "trees" in row.reason


# ------------------------------------------------------------------- rules in particulars


def variance(steps: list[onnx.NodeProto], x: list, v: list) -> np.ndarray:
    found = run_with_variances(model(steps, ["y"]), {"x": np.float32(x)}, {"x": np.float32(v)})
    return found["y_var"]


def test_missing_values_are_certain():
    nan, var = float("nan"), [[1, 2, 3, 4]]
    step = node("Imputer", ["x"], ["y"], imputed_value_floats=[5.0], replaced_value_float=nan)
    np.testing.assert_array_equal(variance([step], [[nan, 1, 0, nan]], [[nan, 2, 3, 4]]), [[0, 2, 3, 0]])
    step = node("Imputer", ["x"], ["y"], imputed_value_floats=[5.0], replaced_value_float=-1.0)
    np.testing.assert_array_equal(variance([step], [[-1, 1, 0, -1]], var), [[0, 2, 3, 0]])


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_rows_of_zeros_are_normalised_without_a_fault(norm):
    step = node("Normalizer", ["x"], ["y"], norm=norm)
    assert np.all(np.isfinite(variance([step], [[0, 0, 0, 0]], [[0, 0, 0, 0]])))


def test_classes_of_equal_weights_have_no_variance():
    """Their probabilities are equal whatever x is: a difference of large terms, 0 up to rounding, not below."""
    weights = np.tile(100 * WEIGHTS[:1], (2, 1)).ravel().tolist()
    step = node("LinearClassifier", ["x"], ["label", "y"], coefficients=weights, intercepts=[0.0, 0.0],
                classlabels_ints=[0, 1], post_transform="SOFTMAX")  # fmt: skip
    x, v = RNG.normal(size=(50, 4)), RNG.random((50, 4))
    found = variance([step], x, v)
    assert np.all(found >= 0)
    scores = v @ (100 * WEIGHTS[0]) ** 2  # (n,), of which float32 keeps 7 digits
    assert np.all(found <= 1e-6 * scores[:, None])


def test_a_confident_classifier_in_single_precision():
    """p within 1e-6 of 1: 1 - p is summed over the other classes, against float64 here."""
    step = classifier()
    x, v = (
        3 * np.array([[6.0, -5, -4, 3], [-9, 9, -6, 4]]),
        np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]),
    )
    scores = x @ WEIGHTS.T + [0.1, 0.2, 0.3]
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    jacobian = p[:, :, None] * (WEIGHTS[None] - (p @ WEIGHTS)[:, None])  # (n, e, d)
    wanted = (jacobian**2 @ v[:, :, None])[..., 0]
    assert np.max(p, axis=1).min() > 0.999
    np.testing.assert_allclose(variance([step], x, v), wanted, rtol=1e-4)


REFUSED = [
    (node("LinearRegressor", ["x"], ["y"], coefficients=[1.0] * 4, post_transform="LOGISTIC"), "single target"),
    (node("LinearClassifier", ["x"], ["label", "y"], coefficients=[1.0] * 4, intercepts=[0.0], classlabels_ints=[0, 1],
          post_transform="SOFTMAX"), "single score"),
    (node("SVMRegressor", ["x"], ["y"], coefficients=[1.0] * 4, kernel_params=[0.0] * 3, rho=[0.0],
          post_transform="LOGISTIC"), "single target"),
    (node("SVMClassifier", ["x"], ["label", "y"], coefficients=[1.0] * 2, support_vectors=[1.0] * 8, rho=[0.0],
          vectors_per_class=[1, 1], kernel_params=[0.0] * 3, classlabels_ints=[0, 1], prob_a=[1.0], prob_b=[1.0]), "iteration"),
    (node("SVMClassifier", ["x"], ["label", "y"], coefficients=[1.0] * 6, support_vectors=[1.0] * 12, rho=[0.0] * 3,
          vectors_per_class=[1, 1, 1], kernel_params=[0.5] * 3, classlabels_ints=[0, 1, 2], kernel_type="RBF"), "not linear"),
]  # fmt: skip


@pytest.mark.parametrize(
    "step, reason", REFUSED, ids=[f"{step.op_type} {reason}" for step, reason in REFUSED]
)
def test_refusals_tell_their_reason(step, reason):
    outputs = [name for name in step.output if name == "y"]
    (entry,) = propagate_inputs(model([step], outputs), ["x"]).refused
    assert reason in entry.reason


def test_a_one_class_machine_is_discrete():
    step = node(
        "SVMRegressor", ["x"], ["y"], coefficients=[1.0] * 4, kernel_params=[0.0] * 3, rho=[0.0], one_class=1
    )
    assert set(propagate_inputs(model([step], ["y"]), ["x"]).variances) == {"x"}


# ------------------------------------------------------------------------------ complete

DISCRETE = {
    "Binarizer", "OneHotEncoder", "LabelEncoder", "CategoryMapper", "DictVectorizer", "CastMap", "TreeEnsemble",
    "TreeEnsembleClassifier", "TreeEnsembleRegressor",
}  # fmt: skip


def test_every_operator_of_the_domain_has_a_behaviour():
    names = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ML}
    entries = {name: entry for (domain, name), entry in TABLE.items() if domain == ML}
    assert names == set(entries)
    assert {name for name, entry in entries.items() if isinstance(entry, Deterministic)} == DISCRETE
    assert not any(isinstance(entry, Refusal) for entry in entries.values())


@pytest.mark.parametrize(
    "step", [tree(), node("Binarizer", ["x"], ["y"], threshold=0.5)], ids=lambda step: step.op_type
)
def test_discrete_operators_drop_it(step):
    result = propagate_inputs(model([step], ["y"]), ["x"])
    assert set(result.variances) == {"x"} and not result.refused
