"""scikit-learn's exports: which task they have, and heads that are exact on logits that no tensor holds."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support import pipelines
from support.pipelines import Linear

import gapa_onnx
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.record import require
from gapa_onnx.sessions.runtime import open_session
from gapa_onnx.settings import Settings

WIDTH = 4
ROWS = np.random.default_rng(1).normal(size=(120, WIDTH)).astype(np.float32)
THREE, ONE = Linear.random(3, WIDTH), Linear.random(1, WIDTH)
TWO = Linear(np.concatenate([-ONE.weights, ONE.weights]), np.concatenate([-ONE.bias, ONE.bias]))


def log_sigmoid(scores):
    return -np.logaddexp(0, -scores)


def halves(scores):
    return np.concatenate([-scores, scores], axis=1) / 2


#: name: model, logits of rows in float64, W of the scores (C, d), slopes of the logits by the scores
CASES = {
    "softmax": (pipelines.logistic_regression(THREE, 3), THREE.scores, THREE, np.ones_like),
    "softmax, zipped": (
        pipelines.logistic_regression(THREE, 3, zipmap=True), THREE.scores, THREE, np.ones_like,
    ),
    "two rows": (
        pipelines.logistic_regression(TWO, 2, "LOGISTIC", normalised=False),
        lambda x: halves(ONE.scores(x)), Linear(TWO.weights / 2, TWO.bias / 2), np.ones_like,
    ),
    "one row": (
        pipelines.logistic_regression(ONE, 2, "LOGISTIC", normalised=False),
        lambda x: halves(ONE.scores(x)), Linear(TWO.weights / 2, TWO.bias / 2), np.ones_like,
    ),
    "labels divided by their sum": (
        pipelines.logistic_regression(THREE, 3, "LOGISTIC"),
        lambda x: log_sigmoid(THREE.scores(x)), THREE, lambda s: 1 / (1 + np.exp(s)),
    ),
    "spelled out": (
        pipelines.one_against_rest(THREE),
        lambda x: log_sigmoid(THREE.scores(x)), THREE, lambda s: 1 / (1 + np.exp(s)),
    ),
    "sigmoid pair": (
        pipelines.sigmoid_pair(ONE),
        lambda x: halves(ONE.scores(x)), Linear(TWO.weights / 2, TWO.bias / 2), np.ones_like,
    ),
    "sigmoid pair, zipped": (
        pipelines.sigmoid_pair(ONE, zipmap=True),
        lambda x: halves(ONE.scores(x)), Linear(TWO.weights / 2, TWO.bias / 2), np.ones_like,
    ),
}  # fmt: skip


def probabilities(session, rows):
    """What the model itself says, (N, C)."""
    found = session.run(None, {"X": rows})[-1]
    return (
        np.array([[row[name] for name in sorted(row)] for row in found]) if isinstance(found, list) else found
    )


def softmax(logits):
    grown = np.exp(logits - logits.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", CASES)
def test_the_head_reads_exact_logits(name):
    """softmax of the logits is what the model says, and probabilities follow from W² v of the rows (float64)."""
    model, logits, linear, slopes = CASES[name]
    source = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.concatenate([ROWS[:40], 4 * ROWS[40:60]])
    assert np.allclose(softmax(logits(rows)), probabilities(source, rows), atol=2e-6)

    converted = gapa_onnx.convert(model, {"X": ROWS}, k=10, score="variance")
    assert all(check.passed for check in converted.checks)
    ((output, head),) = require(converted.model, "it").heads.items()
    assert head.task == "classification" and head.link == "softmax" and head.axis == 1
    session = open_session(converted.model, "it")
    site = require(converted.model, "it").sites[0]
    roles = ("probs", "score")
    found = dict(zip(roles, session.run([head.outputs[role] for role in roles], {"X": rows})))
    fit = converted.numbers.fits[0]
    own = _own_variance(session, converted, site, fit, rows)  # (N, d) or (N, 1) of the site's tensor
    score = linear.scores(rows)
    var = (own @ (linear.weights.astype(np.float64) ** 2).T) * slopes(score) ** 2
    expected = softmax(logits(rows) / np.sqrt(1 + np.pi / 8 * var.mean(axis=1, keepdims=True)))
    assert np.allclose(found["score"], var.mean(axis=1), rtol=2e-4)
    assert np.allclose(found["probs"], expected, atol=1e-5)
    assert (found["probs"].argmax(axis=1) == probabilities(source, rows).argmax(axis=1)).all()


def _own_variance(session, converted, site, fit, rows):
    """amplitude · s / (s + half-way) at the site in float64, with the operator's own share s."""
    model = onnx.ModelProto()
    model.CopyFrom(converted.model)
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(site.share))
    share = open_session(model, "it").run([site.share], {"X": rows})[0].astype(np.float64)
    return fit.prior_var.astype(np.float64) * fit.scale * share / (1 + fit.damping * share)


def head_of(model, **settings):
    return analyse(load(model), Settings(**settings)).heads[-1]


def test_what_the_reason_says():
    assert "LinearClassifier with post_transform SOFTMAX" in head_of(CASES["softmax"][0]).reason
    assert "(1 - p, p)" in head_of(CASES["sigmoid pair"][0]).reason
    assert "division by their sum" in head_of(CASES["spelled out"][0]).reason


def test_labels_that_do_not_exclude_each_other_are_several():
    """σ of each class with nothing behind it: yes or no for each."""
    found = head_of(pipelines.logistic_regression(THREE, 3, "LOGISTIC", normalised=False))
    assert found.task.value == "multilabel" and found.link == "sigmoid" and found.derived is not None


def test_two_scores_that_are_not_opposite_are_two_labels():
    two = Linear.random(2, WIDTH, seed=5)
    found = head_of(pipelines.logistic_regression(two, 2, "LOGISTIC", normalised=False))
    assert found.task.value == "multilabel"


def test_a_sigmoid_beside_the_rest_of_another_is_no_pair():
    """(1 - σ(u), σ(v)) does not add up to 1."""
    model = pipelines.sigmoid_pair(ONE)
    other = next(node for node in model.graph.node if node.op_type == "Sub")
    add = next(node for node in model.graph.node if node.op_type == "Add")
    add.input[0] = "product"
    model.graph.node.insert(4, onnx.helper.make_node("Sigmoid", ["product"], ["another"]))
    other.input[1] = "another"
    assert head_of(model).task.value == "none"


def test_naive_bayes_ends_in_a_spelled_out_softmax():
    mean = np.random.default_rng(3).normal(size=(3, WIDTH)).astype(np.float32)
    found = head_of(pipelines.naive_bayes(mean), sites="X")
    assert found.task.value == "classification" and found.logits == "jll"


def test_the_full_covariance_of_a_pair():
    """-z/2 and z/2 move against each other: the split is that of one normal z, by quadrature in float64."""
    model = pipelines.sigmoid_pair(ONE, scaled=False)
    converted = gapa_onnx.convert(model, {"X": ROWS}, k=10, covariance="full", score="variance")
    assert all(check.passed for check in converted.checks)
    record = require(converted.model, "it")
    outputs, rows = record.heads["probabilities"].outputs, 2 * ROWS[:60]
    session = open_session(converted.model, "it")
    names = [outputs[role] for role in ("score", "entropy", "aleatoric")]
    score, entropy, aleatoric = (array.astype(np.float64) for array in session.run(names, {"X": rows}))
    own = _own_variance(session, converted, record.sites[0], converted.numbers.fits[0], rows)
    var = own @ (ONE.weights.astype(np.float64) ** 2).T  # (N, 1), of z
    assert np.allclose(score, var[:, 0] / 4, rtol=2e-4)
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    p = 1 / (1 + np.exp(-(ONE.scores(rows) + np.sqrt(var) * nodes)))  # (N, nodes)
    weights = weights / weights.sum()

    def binary(q):
        return -(q * np.log(q) + (1 - q) * np.log1p(-q))

    # The points of the split are a few dozen of two correlated normal variables: an error of some hundredths.
    assert np.allclose(entropy, binary(p @ weights), atol=0.03)
    assert np.allclose(aleatoric, binary(p) @ weights, atol=0.03)


def test_columns_of_a_csv_file(tmp_path):
    """A table with text: one column for each input, read by name."""
    linear = Linear.random(1, 5, seed=2)
    both = Linear(
        np.concatenate([-linear.weights, linear.weights]), np.concatenate([-linear.bias, linear.bias])
    )
    model, generator = pipelines.with_columns(both), np.random.default_rng(0)
    path = tmp_path / "people.csv"
    cities = generator.choice(["Basel", "Bern", "Chur"], 150)
    lines = [
        f"{a:.2f},{f:.2f},{c}"
        for a, f, c in zip(generator.normal(40, 10, 150), generator.normal(20, 20, 150), cities)
    ]
    path.write_text("\n".join(["age,fare,city", *lines]), encoding="utf-8")
    converted = gapa_onnx.convert(model, path, k=10)
    assert all(check.passed for check in converted.checks)
    assert [site.query for site in converted.plan.sites] == ["transformed"]
    head = require(converted.model, "it").heads["output_probability"]
    assert head.task == "classification"
    session = open_session(converted.model, "it")

    def fed(age, fare, city):
        columns = {"age": age, "fare": fare}
        numbers = {name: np.asarray(v, np.float32)[:, None] for name, v in columns.items()}
        wanted = [head.outputs["score"], head.outputs["ood"]]
        return session.run(wanted, {**numbers, "city": np.array(city, object)[:, None]})

    usual, _ = fed(
        generator.normal(40, 10, 50), generator.normal(20, 20, 50), generator.choice(["Basel", "Bern"], 50)
    )
    # Far away a linear model is sure, so that its entropy says nothing there: flags go by shares.
    strange, flags = fed(np.full(50, 40.0), np.full(50, 900.0), ["Chur"] * 50)
    assert np.median(strange) > np.quantile(usual, 0.75) and flags.all()
