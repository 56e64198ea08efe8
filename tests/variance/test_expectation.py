"""Means of constants under a softmax: where they are seen as one operator, numbers at the edges, and a detector's
boxes from the logits of their sides to pixels.

The forms themselves are lines of `support.spellings`.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from support.covariance_checks import assert_close, assert_is_covariance, covariance, in_double
from support.detectors import yolo_like
from support.rule_checks import parse, run_with_variances, squared_jacobian_product

import gapa_onnx.variance.propagation
from gapa_onnx.model.load import load
from gapa_onnx.plan.placement import find_sites
from gapa_onnx.variance.patterns import find_composites, turned_down

BINS = 6
CONSTANTS = {
    "bins": np.arange(BINS).reshape(1, BINS, 1),
    "grouped": np.ones((BINS, 1, 1)),
    "wide": np.ones((1, BINS, 2)),
    "bias": np.ones(1),
    "vector": np.arange(BINS),
    "pair": np.stack([np.arange(BINS), 40 - np.arange(BINS) ** 2], axis=1),
    "stack": np.ones((2, BINS, 2)),
    "many": np.ones((4, 1, 1, BINS)),
}


def model(body: str, opset: int = 17, shape: str = f"2, {BINS}, {BINS}") -> onnx.ModelProto:
    """From x and another input v to y, and p where the body has it as an output."""
    outputs = "float[] y, float[] p" if "also p" in body else "float[] y"
    axes = "int64[1] first = {1}, int64[1] last = {-1}, int64[2] both = {1, 2}"
    text = f"m (float[{shape}] x, float[{BINS}] v) => ({outputs}) <{axes}> {{ {body.replace('also p', '')} }}"
    made = parse(text, opset)
    made.graph.initializer.extend(
        onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in CONSTANTS.items()
    )
    return made


def found_in(made: onnx.ModelProto, *visible: str) -> list[str]:
    return [composite.node.op for composite in find_composites(load(made).graph, set(visible))]


# ------------------------------------------------------------------------ where it is not


@pytest.mark.parametrize(
    "body, opset",
    [
        ("p = Softmax(x) y = Conv(p, bins)", 17),  # along another axis than it is summed over
        ("p = Softmax<axis=1>(x) y = MatMul(p, vector)", 17),
        ("p = Softmax<axis=1>(x) q = Mul(p, bins) y = ReduceSum(q, last)", 17),
        ("p = Softmax<axis=1>(x) q = Mul(p, bins) y = ReduceSum(q, both)", 17),
        ('p = Softmax<axis=1>(x) y = Einsum<equation="nsk,k->ns">(p, vector)', 17),
        ("p = Softmax<axis=1>(x) t = Transpose<perm=[0, 2, 1]>(p) y = Conv(t, bins)", 17),
        ("p = Softmax<axis=1>(x) y = Conv(p, bins)", 11),  # of all axes from 1 on
        ("p = Sigmoid(x) y = MatMul(p, vector)", 17),
        ("p = Softmax(x) y = MatMul(p, v)", 17),  # v is no constant: attention
        ("p = Softmax(x) q = Mul(p, v) y = ReduceSum(q, last)", 17),
        ('p = Softmax(x) y = Einsum<equation="nsk,k->ns">(p, v)', 17),
        ('p = Softmax(x) y = Einsum<equation="nsk,k->sn">(p, vector)', 17),  # in another order
        ("p = Softmax(x) y = MatMul(p, stack)", 17),  # one matrix for each sample
        ("p = Softmax(x) q = Mul(p, many) y = ReduceSum(q, last)", 17),  # as many means
        ("p = Softmax<axis=1>(x) y = Conv<group=6>(p, grouped)", 17),
        ("p = Softmax<axis=1>(x) y = Conv(p, wide)", 17),  # of several positions
        ("p = Softmax<axis=1>(x) y = Conv<strides=[2]>(p, bins)", 17),
        ("p = Softmax<axis=1>(x) y = Conv<pads=[1, 1]>(p, bins)", 17),
        ("p = Softmax<axis=1>(x) y = Conv(p, bins, bias)", 17),
    ],
)
def test_what_is_no_mean_of_a_distribution(body: str, opset: int) -> None:
    assert found_in(model(body, opset)) == []


def test_a_site_on_the_distribution_keeps_its_own_variance() -> None:
    made = model("p = Softmax(x) y = MatMul(p, vector)")
    assert found_in(made, "x") == found_in(made) == ["SoftmaxExpectation"]
    assert found_in(made, "p") == []
    (missed,) = turned_down(load(made).graph, {"p"})
    assert missed.op == "SoftmaxExpectation" and "'p' inside it is a site" in missed.reason


def test_a_distribution_that_is_an_output_too_has_both_variances() -> None:
    x, v = values((2, BINS, BINS))
    made = model("p = Softmax(x) y = MatMul(p, vector) also p")
    found = run_with_variances(made, {"x": x, "v": np.ones(BINS, np.float32)}, {"x": v})
    of_p, of_y = two_forms(x, v, np.arange(BINS))
    np.testing.assert_allclose(found["p_var"], of_p, rtol=1e-4)
    np.testing.assert_allclose(found["y_var"], of_y, rtol=1e-4)


# ------------------------------------------------------------------------------- numbers


def values(shape: tuple[int, ...], width: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(0, width, shape).astype(np.float32), rng.uniform(0.5, 1.5, shape).astype(np.float32)


def two_forms(x: np.ndarray, v: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Var p and Var Σ p w along the last axis, by the whole Jacobian diag(p) - p pᵀ in float64."""
    x = x.astype(np.float64)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    jacobian = p[..., None] * np.eye(x.shape[-1]) - p[..., None] * p[..., None, :]
    others = e[..., None, :] * (
        1 - np.eye(x.shape[-1])
    )  # 1 - p as the sum of the others, which does not cancel
    diagonal = p * others.sum(axis=-1) / e.sum(axis=-1, keepdims=True)
    jacobian[..., range(x.shape[-1]), range(x.shape[-1])] = diagonal
    slopes = np.einsum("...ij,i...m->...jm", jacobian, w.reshape(len(w), *[1] * (x.ndim - 1), -1))
    of_p = np.einsum("...ij,...j->...i", jacobian**2, v)
    of_y = np.einsum("...jm,...j->...m", slopes**2, v)
    return of_p, of_y[..., 0] if w.ndim == 1 else of_y


@pytest.mark.parametrize("weights", ["vector", "pair"])
@pytest.mark.parametrize("logit", [0, 3, 8, 12])
def test_a_distribution_with_one_large_element(logit: int, weights: str) -> None:
    """Where p is near 1, w - y is what is left of larger numbers: it errs by ε y of float32, 5 units of it here."""
    x, v = values((2, BINS, BINS), 0.5)
    x[..., 4] += logit
    found = run_with_variances(
        model(f"p = Softmax(x) y = MatMul(p, {weights})"), {"x": x, "v": v[0, 0]}, {"x": v}
    )
    w = CONSTANTS[weights].astype(np.float64)
    _, wanted = two_forms(x, v, w)
    error = 5 * np.finfo(np.float32).eps * np.abs(w).max()
    np.testing.assert_allclose(np.sqrt(found["y_var"]), np.sqrt(wanted), rtol=1e-4, atol=2 * error)


@pytest.mark.parametrize("weights", ["vector", "pair"])
def test_equal_weights_leave_no_variance(weights: str) -> None:
    """y is then the same number whatever x: 0 but for rounding, and never below."""
    x, v = values((2, BINS, BINS))
    made = model(f"p = Softmax(x) y = MatMul(p, {weights})")
    (stored,) = [entry for entry in made.graph.initializer if entry.name == weights]
    flat = np.full(CONSTANTS[weights].shape, 15, np.float32)
    stored.CopyFrom(onnx.numpy_helper.from_array(flat, weights))
    var = run_with_variances(made, {"x": x, "v": v[0, 0]}, {"x": v})["y_var"]
    assert (0 <= var).all() and var.max() < (15 * 1e-6) ** 2


# ---------------------------------------------------------------------- the full covariance

TAILS = {  # and the weights, one row for each bin
    "p = Softmax<axis=1>(x) c = Conv(p, bins) y = Flatten(c)": "vector",
    "t = Transpose<perm=[0, 2, 1]>(x) p = Softmax(t) m = MatMul(p, pair) y = Flatten(m)": "pair",
    "t = Transpose<perm=[0, 2, 1]>(x) p = Softmax(t) y = MatMul(p, vector)": "vector",
    "p = Softmax<axis=1>(x) q = Mul(p, bins) y = ReduceSum<keepdims=0>(q, first)": "vector",
}


@pytest.mark.parametrize("body", TAILS)
def test_full_covariance(body: str) -> None:
    """J diag(v) Jᵀ, and its diagonal is what the rule gives."""
    made = model(body, shape=f"N, {BINS}, 3")
    del made.graph.input[1]  # v, which nothing reads
    weights = CONSTANTS[TAILS[body]].reshape(BINS, -1)
    made.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", 1, ["N", 3 * weights.shape[1]]))
    x, v = values((2, BINS, 3))

    def means(x: np.ndarray) -> np.ndarray:
        e = np.exp(x)
        return np.einsum("nks,km->nsm", e / e.sum(axis=1, keepdims=True), weights).reshape(2, -1)

    cov, diagonal = covariance(made, {"x": x}, {"x": v})
    assert_is_covariance(cov, diagonal)
    steps = 1e-5 * np.eye(BINS * 3).reshape(-1, BINS, 3)
    slopes = [(means(x + step) - means(x - step)) / 2e-5 for step in steps]
    jacobian = np.stack(slopes, axis=-1)  # (samples, elements of y, elements of x)
    assert_close(cov, np.einsum("nij,nj,nkj->nik", jacobian, v.reshape(2, -1), jacobian))
    np.testing.assert_allclose(diagonal, run_with_variances(made, {"x": x}, {"x": v})["y_var"], rtol=1e-4)


# ------------------------------------------------------------------------------- a detector


def decoding(bins: int) -> tuple[onnx.ModelProto, int]:
    """The part of a YOLO-like detector behind the logits of its sides, and how many anchors it has."""
    whole = yolo_like(scales=1, bins=bins, batch=1)
    inferred = onnx.shape_inference.infer_shapes(whole)
    sizes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in inferred.graph.value_info}
    graph = onnx.utils.Extractor(inferred).extract_model(["box", "cls"], ["output0"])
    return graph, sizes["box"][-1]


def test_boxes_of_a_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    """From logits to sides, behind softmax and projection, exactly as J² v. A box's centre and size each take two
    different sides, so that independence holds to the end; node by node they would be too large."""
    made, anchors = decoding(bins=16)
    rng = np.random.default_rng(0)
    feeds = {"box": rng.normal(0, 2, (1, 64, anchors)), "cls": rng.normal(size=(1, 3, anchors))}
    own = {"box": rng.uniform(0.1, 0.3, (1, 64, anchors))}
    run = functools.partial(ReferenceEvaluator(in_double(made)).run, None)
    wanted = squared_jacobian_product(run, feeds, own)[0][:, :4]
    single = {name: array.astype(np.float32) for name, array in feeds.items()}
    given = {"box": own["box"].astype(np.float32)}
    var = run_with_variances(made, single, given)["output0_var"][:, :4]
    # float32: terms (w - y)² where y is 15 at most, among them some that nearly vanish
    np.testing.assert_allclose(var, wanted, rtol=1e-4)
    monkeypatch.setattr(gapa_onnx.variance.propagation, "find_composites", lambda graph, visible: ())
    apart = run_with_variances(made, single, given)["output0_var"][:, :4]
    assert np.median(apart / wanted) > 2


def test_sites_of_a_detector_lie_before_its_boxes_and_classes() -> None:
    source = load(yolo_like())
    assert sorted(site.output for site in find_sites(source, "auto")) == ["box_0", "box_1", "cls_0", "cls_1"]
    found = list(find_composites(source.graph, {"box_0", "box_1", "cls_0", "cls_1"}))
    assert [c.last.outputs[0].name for c in found if c.node.op == "SoftmaxExpectation"] == ["dfl"]
