"""What stands beside an output, through the whole conversion, for each task."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from scipy.stats import spearmanr

import gapa_onnx
from gapa_onnx.compiler import convert
from gapa_onnx.errors import UserError
from gapa_onnx.plan.head import Task
from gapa_onnx.record import read

DENSE = "{ z = MatMul(x, w1)  h = Tanh(z)  l = MatMul(h, w2)  "
MAPS = "{ z = Conv(x, w1)  h = Relu(z)  l = Conv(h, w2)  "

#: task -> signature and last node, weights, one row of input, settings, what is added besides y_var
MODELS = {
    "classification": ("(float[n, 6] x) => (float[n, 5] y) " + DENSE + "y = Identity(l) }", (6, 9), (9, 5), {}),
    "softmax": ("(float[n, 6] x) => (float[n, 5] y) " + DENSE + "y = Softmax<axis = 1>(l) }", (6, 9), (9, 5), {}),
    "log softmax": (
        "(float[n, 6] x) => (float[n, 5] y) " + DENSE + "y = LogSoftmax<axis = 1>(l) }", (6, 9), (9, 5), {},
    ),
    "binary": ("(float[n, 6] x) => (float[n, 1] y) " + DENSE + "y = Sigmoid(l) }", (6, 9), (9, 1), {}),
    "multilabel": ("(float[n, 6] x) => (float[n, 4] y) " + DENSE + "y = Sigmoid(l) }", (6, 9), (9, 4), {}),
    "regression": ("(float[n, 6] x) => (float[n, 1] y) " + DENSE + "y = Identity(l) }", (6, 9), (9, 1), {}),
    "none": ("(float[n, 6] x) => (float[n, 2] y) " + DENSE + "y = Identity(l) }", (6, 9), (9, 2), {}),
    "tokens": (
        "(float[n, t, 6] x) => (float[n, t, 1200] y) " + DENSE + "y = Identity(l) }",
        (6, 9), (9, 1200), {"top_k": 20},
    ),
    "segmentation": (
        "(float[n, 3, 8, 8] x) => (float[n, 6, 8, 8] y) " + MAPS + "y = Softmax<axis = 1>(l) }",
        (7, 3, 1, 1), (6, 7, 1, 1), {},
    ),
    "mask": (
        "(float[n, 3, 8, 8] x) => (float[n, 1, 8, 8] y) " + MAPS + "y = Sigmoid(l) }",
        (7, 3, 1, 1), (1, 7, 1, 1), {},
    ),
}  # fmt: skip
TASKS = {
    "softmax": "classification",
    "log softmax": "classification",
    "binary": "multilabel",
    "mask": "segmentation",
}


def build(case: str, kind: str = "float", opset: int = 17) -> tuple[onnx.ModelProto, np.ndarray, dict]:
    """A model, rows of input for it, and settings."""
    signature, first, second, settings = MODELS[case]
    generator = np.random.default_rng(0)
    text = signature.replace("float[", f"{kind}[")
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> net {text}')
    dtype = {"float": np.float32, "double": np.float64, "float16": np.float16}[kind]
    for name, shape in (("w1", first), ("w2", second)):
        array = generator.normal(size=shape).astype(dtype)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    shape = {"tokens": (3, 6), "segmentation": (3, 8, 8), "mask": (3, 8, 8)}.get(case, (6,))
    return model, generator.normal(size=(120, *shape)).astype(dtype), settings


def answers(model: onnx.ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
    session = gapa_onnx.session(model.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x})))


def without(shape: tuple, axis: int | None) -> tuple:
    return shape[:1] if axis is None else shape[:axis] + shape[axis + 1 :]


@pytest.mark.parametrize("case", MODELS)
def test_every_task_through_the_whole_conversion(case):
    model, x, settings = build(case)
    conversion = convert(model, {"x": x}, m=40, k=10, **settings)
    assert all(check.passed for check in conversion.checks), conversion.checks
    onnx.checker.check_model(conversion.model, full_check=True)
    head = read(conversion.model).heads["y"]
    assert head.task == TASKS.get(case, case)
    found = answers(conversion.model, x[:50])
    axis, rank = head.axis, found["y"].ndim
    for role, name in head.outputs.items():
        expected = found["y"].shape
        if role.startswith("seq_"):
            expected = expected[:1]
        elif role not in ("var", "probs", "tokens", "token_var"):
            expected = without(expected, axis)
        elif case == "tokens" and role != "var":
            expected = (*expected[:-1], 20)
        assert found[name].shape == expected, role
    assert found["y_ood"].dtype == bool and found["y_score"].ndim == (rank - 1 if axis is not None else 1)
    declared = {o.name: len(o.type.tensor_type.shape.dim) for o in conversion.model.graph.output}
    assert declared == {name: array.ndim for name, array in found.items()}
    if axis is None:
        return
    np.testing.assert_allclose(found["y_entropy"], found["y_aleatoric"] + found["y_epistemic"], atol=1e-5)
    if case == "tokens":
        np.testing.assert_array_equal(found["y_tokens"][..., 0], found["y"].argmax(axis=-1))
    else:
        np.testing.assert_array_equal(found["y_probs"].argmax(axis=axis), found["y"].argmax(axis=axis))
    if head.link == "sigmoid":
        np.testing.assert_array_equal(found["y_probs"] > 0.5, found["y"] > 0.5)


@pytest.mark.parametrize("case", ["classification", "softmax", "multilabel", "regression", "segmentation"])
@pytest.mark.parametrize("kind", ["double", "float16"])
def test_other_precisions(case, kind):
    model, x, settings = build(case, kind)
    if case == "segmentation":
        pytest.skip("onnxruntime has float32 convolutions only on the CPU")
    conversion = convert(model, {"x": x}, m=40, k=10, **settings)
    assert all(check.passed for check in conversion.checks), conversion.checks


@pytest.mark.parametrize("case", ["classification", "softmax", "multilabel", "segmentation", "tokens"])
@pytest.mark.parametrize("opset", [11, 13, 21])
def test_opsets(case, opset):
    model, x, settings = build(case, opset=opset)
    if case == "segmentation" and opset < 13:
        pytest.skip("before opset 13 Softmax takes all axes behind the first as one")
    conversion = convert(model, {"x": x}, m=40, k=10, **settings)
    assert all(check.passed for check in conversion.checks), conversion.checks


# --------------------------------------------------------------------- full covariance


def test_full_covariance_against_the_jacobian():
    model, x, _ = build("softmax")
    conversion = convert(model, {"x": x}, m=40, k=10, covariance="full", sites="h,l")
    assert all(check.passed for check in conversion.checks), conversion.checks
    onnx.checker.check_model(conversion.model, full_check=True)
    found = answers(conversion.model, x[:20])
    np.testing.assert_array_equal(np.diagonal(found["y_cov"], axis1=1, axis2=2), found["y_var"])
    exposed = onnx.ModelProto()
    exposed.CopyFrom(conversion.model)
    own = ["h/var", "l/gapa/own_var"]  # nothing comes in at h, so its own variance is all of it
    exposed.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in own)
    at = answers(exposed, x[:20])
    w2 = onnx.numpy_helper.to_array(model.graph.initializer[1]).astype(np.float64)
    p = found["y"].astype(np.float64)
    for row in range(20):
        slope = np.diag(p[row]) - np.outer(p[row], p[row])
        logits = w2.T @ np.diag(at[own[0]][row].astype(np.float64)) @ w2 + np.diag(at[own[1]][row])
        expected = slope @ logits @ slope
        # float32 products of a dozen terms that cancel, and slopes p (1 - p) of a rounded p
        steep, spread = np.abs(slope), np.abs(logits)
        rounding = 3e-6 * (steep @ spread @ steep).max() + 2e-7 * (spread @ steep).max()
        np.testing.assert_allclose(found["y_cov"][row], expected, atol=rounding + 1e-9)


def test_the_head_sees_how_logits_vary_together():
    """Two classes whose logits move as one cannot be told apart by what is not known about them."""
    text = "(float[n, 6] x) => (float[n, 3] y) " + DENSE + "y = Identity(l) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> net {text}')
    generator = np.random.default_rng(3)
    w2 = 3 * np.repeat(generator.normal(size=(9, 1)), 3, axis=1)
    for name, array in (("w1", generator.normal(size=(6, 9))), ("w2", w2)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    x = generator.normal(size=(120, 6)).astype(np.float32)
    diagonal, full = (
        answers(convert(model, {"x": x}, m=40, k=10, covariance=c).model, 3 * x) for c in ("diag", "full")
    )
    np.testing.assert_allclose(full["y_var"], diagonal["y_var"], rtol=1e-4)
    assert diagonal["y_epistemic"].mean() > 0.1
    assert full["y_epistemic"].max() < 1e-3  # the factor is found in single precision


def test_monte_carlo_with_the_covariance():
    model, x, _ = build("classification")
    found = answers(convert(model, {"x": x}, m=40, k=10, covariance="full", scale="none").model, 2 * x[:30])
    generator = np.random.default_rng(4)
    expected = []
    for row in range(30):
        noise = generator.multivariate_normal(np.zeros(5), found["y_cov"][row], size=20_000)
        logits = found["y"][row] + noise
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        total = -(p.mean(axis=0) * np.log(p.mean(axis=0))).sum()
        expected.append(total + (p * np.log(p)).sum(axis=1).mean())
    # 16 points rank and are off by up to a tenth of the value; the error of the draws is far below that.
    assert spearmanr(found["y_epistemic"], expected).statistic > 0.95
    np.testing.assert_allclose(found["y_epistemic"], expected, rtol=0.25, atol=0.02)
    assert abs(np.mean(found["y_epistemic"] / expected) - 1) < 0.1


# --------------------------------------------------------------------------- refusals


def test_a_task_that_was_asked_for_is_not_dropped_in_silence():
    model, x, _ = build("softmax")
    with pytest.raises(UserError, match="the sites lie behind"):
        convert(model, {"x": x}, m=40, k=10, sites="y", task="classification")
    assumed = convert(model, {"x": x}, m=40, k=5, sites="y")
    [head] = assumed.plan.heads
    assert head.task is Task.NONE and "the sites lie behind 'l'" in head.reason


def test_full_covariance_of_a_map_is_refused_before_any_work():
    model, x, _ = build("segmentation")
    with pytest.raises(UserError) as caught:
        convert(model, {"x": x}, covariance="full")
    assert "`covariance='diag'`" in caught.value.hint
