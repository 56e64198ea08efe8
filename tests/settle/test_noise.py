"""The noise head: its gradients, what it recovers, when it stays a constant, and the nodes it becomes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from gapa_onnx.emit.emit import put_tensor
from gapa_onnx.errors import UserError
from gapa_onnx.plan.heads.noise import NoiseHead, emit_noise
from gapa_onnx.settle import noise
from gapa_onnx.settle.noise import fit_noise
from gapa_onnx.variance.graph import VarianceGraph

WIDTH = 20
_MAP = np.random.default_rng(123).standard_normal((2, WIDTH))  # from inputs to the hidden representation


def hidden_of(x: np.ndarray) -> np.ndarray:
    """A fixed random layer (n, 20) of inputs (n, 2): units of unlike scale and offset, one of them dead."""
    h = np.tanh(x @ _MAP) * np.geomspace(0.01, 100, WIDTH) + np.linspace(-3, 3, WIDTH)
    h[:, 7] = 0
    return h.astype(np.float32)


def noise_std(x: np.ndarray) -> np.ndarray:
    """From 0.05 to 1.5, by both inputs."""
    return 0.05 + 0.6 / (1 + np.exp(-2 * x[:, 0])) * (1 + np.sin(2 * x[:, 1])) + 0.1 * np.abs(x[:, 1])


def noisy(rows: int, seed: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs in [-2, 2]², their residuals of known noise, and hidden representations."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (rows, 2))
    return x, scale * noise_std(x) * rng.standard_normal(rows), hidden_of(x)


def gaussian_nll(residual: np.ndarray, var: np.ndarray) -> float:
    return float(np.mean(residual**2 / (2 * var) + 0.5 * np.log(2 * np.pi * var)))


# -------------------------------------------------------------------------- gradients


def test_gradients_are_those_of_the_likelihood():
    rng = np.random.default_rng(0)
    sizes, rows = (5, 4, 3, 2), 11
    parameters = []
    for fan_in, fan_out in zip(sizes, sizes[1:]):
        parameters += [rng.standard_normal((fan_in, fan_out)), rng.standard_normal((1, fan_out))]
    x = rng.standard_normal((rows, sizes[0]))
    squared, epistemic = rng.chisquare(1, (rows, 2)), rng.uniform(0, 0.5, (rows, 2))

    def likelihood() -> float:
        """The formula of the paper, written out."""
        w1, b1, w2, b2, w3, b3 = parameters
        s = np.tanh(np.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3
        var = epistemic + np.log1p(np.exp(s)) + 1e-6
        return float(np.mean(squared / (2 * var) + 0.5 * np.log(2 * np.pi * var)))

    for array, gradient in zip(parameters, noise._gradients(parameters, x, squared, epistemic)):
        assert gradient.shape == array.shape
        for place in np.ndindex(array.shape):
            kept, step = array[place], 1e-5
            array[place] = kept + step
            above = likelihood()
            array[place] = kept - step
            below = likelihood()
            array[place] = kept
            # the error of a central difference is of the order step² = 1e-10, its rounding 1e-16 / step
            assert gradient[place] == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-9)


def test_gradients_of_folds_are_those_of_each():
    rng = np.random.default_rng(1)
    shapes = [(3, 4, 5), (3, 1, 5), (3, 5, 2), (3, 1, 2)]
    parameters = [rng.standard_normal(shape) for shape in shapes]
    x, squared, epistemic = rng.standard_normal((3, 6, 4)), rng.random((3, 6, 2)), rng.random((3, 6, 2))
    together = noise._gradients(parameters, x, squared, epistemic)
    for k in range(3):
        alone = noise._gradients([array[k] for array in parameters], x[k], squared[k], epistemic[k])
        for a, b in zip(together, alone):
            np.testing.assert_allclose(a[k], b, rtol=1e-12, atol=1e-15)


# --------------------------------------------------------------------------- recovery


def test_heteroscedastic_noise_is_recovered():
    """20,000 rows, two inputs behind 20 hidden units: std within 10% on average over fresh points."""
    _, residual, hidden = noisy(20_000, seed=0)
    head = fit_noise(hidden, residual, np.zeros_like(residual))
    x, fresh, hidden = noisy(5_000, seed=1)
    var = head(hidden)[:, 0]
    assert np.mean(np.abs(np.sqrt(var) / noise_std(x) - 1)) < 0.10
    truth = gaussian_nll(fresh, noise_std(x) ** 2)
    constant = gaussian_nll(fresh, np.full_like(fresh, np.mean(residual**2)))
    # an std off by a relative δ costs δ² nats: 0.01 for 10% everywhere, 0.02 where the δ are unlike
    assert gaussian_nll(fresh, var) - truth < 0.02 < constant - truth


def test_units_of_the_target_do_not_matter():
    """Powers of two change no rounding, so the two heads agree in every bit."""
    _, residual, hidden = noisy(500, seed=1)
    epistemic = np.full(500, 0.01)
    one = fit_noise(hidden, residual, epistemic)
    large = fit_noise(hidden, residual * 1024, epistemic * 1024**2)
    np.testing.assert_array_equal(one(hidden) * 1024**2, large(hidden))
    assert large.nll == pytest.approx(one.nll + np.log(1024))


def test_epistemic_variance_is_not_counted_twice():
    """Residuals of variance epistemic + noise: the head is left with the noise."""
    rng = np.random.default_rng(3)
    x, residual, hidden = noisy(10_000, seed=2)
    epistemic = 0.3 * np.exp(-x[:, 1])
    residual = residual + np.sqrt(epistemic) * rng.standard_normal(len(x))
    head = fit_noise(hidden, residual, epistemic)
    error = np.sqrt(head(hidden)[:, 0]) - noise_std(x)
    ignored = np.sqrt(fit_noise(hidden, residual, np.zeros_like(residual))(hidden)[:, 0]) - noise_std(x)
    assert np.mean(np.abs(error)) < 0.1 < np.mean(np.abs(ignored))


def test_targets_have_their_own_noise():
    x, first, hidden = noisy(10_000, seed=4)
    second = 50 * np.random.default_rng(5).standard_normal(len(x))
    head = fit_noise(hidden, np.stack([first, second], axis=1), np.zeros((len(x), 2)))
    std = np.sqrt(head(hidden))
    assert std.shape == (len(x), 2)
    assert np.mean(np.abs(std[:, 0] / noise_std(x) - 1)) < 0.10
    assert np.max(np.abs(std[:, 1] / 50 - 1)) < 0.05


def test_wide_representations_are_projected():
    """600 units that carry two inputs: more than are read as they are."""
    rng = np.random.default_rng(6)
    x, residual, _ = noisy(10_000, seed=6)
    layer = rng.standard_normal((2, 600))
    head = fit_noise(np.tanh(x @ layer), residual, np.zeros_like(residual))
    x, _, _ = noisy(2_000, seed=7)
    error = np.abs(np.sqrt(head(np.tanh(x @ layer))[:, 0]) / noise_std(x) - 1)
    assert head.weights[0][0].shape[0] == 600
    assert np.mean(error) < 0.10


# --------------------------------------------------------------------------- constant


@pytest.mark.parametrize("rows", [30, 300, 5_000])
def test_constant_noise_stays_constant(rows):
    """At most 2% of a nat worse than the constant fitted to the same rows, on average over data sets."""
    losses = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        hidden = hidden_of(rng.uniform(-2, 2, (rows, 2)))
        residual = 0.3 * rng.standard_normal(rows)
        head = fit_noise(hidden, residual, np.zeros(rows), seed=seed)
        assert head.nll <= head.constant_nll
        fresh = hidden_of(rng.uniform(-2, 2, (2_000, 2)))
        var, constant = head(fresh)[:, 0], np.mean(residual**2)
        # E[NLL] under the true variance 0.09: no noise of the test residuals in it
        losses.append(np.mean(0.5 * (0.09 / var + np.log(var))) - 0.5 * (0.09 / constant + np.log(constant)))
    assert np.mean(losses) < 0.02


def test_the_constant_solves_its_likelihood():
    """Against a fine search, with epistemic variances of many sizes."""
    rng = np.random.default_rng(8)
    epistemic = rng.exponential(0.5, (1_000, 1))
    squared = (epistemic + 0.4) * rng.chisquare(1, (1_000, 1))
    fine = np.linspace(0.01, 2, 20_000)
    losses = [np.mean(squared / (epistemic + c) + np.log(epistemic + c)) for c in fine]
    assert noise.best_constant(squared, epistemic)[0] == pytest.approx(fine[np.argmin(losses)], abs=2e-4)


def test_where_the_epistemic_variance_explains_all_the_noise_is_small():
    rng = np.random.default_rng(9)
    hidden = hidden_of(rng.uniform(-2, 2, (2_000, 2)))
    residual = rng.standard_normal(2_000)
    head = fit_noise(hidden, residual, np.full(2_000, 1.5))
    assert np.all(head(hidden) > 0)
    assert np.max(head(hidden)) < 0.05


# ---------------------------------------------------------------------- reported losses


def test_losses_are_in_nats_of_the_targets():
    _, residual, hidden = noisy(5_000, seed=10, scale=7.0)
    head = fit_noise(hidden, residual, np.zeros_like(residual))
    constant = gaussian_nll(residual, np.full_like(residual, np.mean(residual**2)))
    assert head.constant_nll == pytest.approx(constant, abs=1e-5)
    _, fresh, hidden = noisy(5_000, seed=11, scale=7.0)
    per_row = fresh**2 / (2 * head(hidden)[:, 0]) + 0.5 * np.log(2 * np.pi * head(hidden)[:, 0])
    margin = 5 * np.std(per_row) * np.sqrt(2 / len(per_row))
    assert head.nll == pytest.approx(np.mean(per_row), abs=margin)
    assert head.rows == 5_000


def test_rows_that_are_not_finite_are_left_out():
    _, residual, hidden = noisy(400, seed=12)
    spoilt_hidden = np.concatenate([hidden, np.full((3, WIDTH), np.nan, np.float32)])
    spoilt_residual = np.concatenate([residual, np.zeros(3)])
    spoilt_hidden[-1], spoilt_residual[-1] = 0, np.inf
    clean = fit_noise(hidden, residual, np.zeros(400))
    spoilt = fit_noise(spoilt_hidden, spoilt_residual, np.zeros(403))
    assert spoilt.rows == 400
    np.testing.assert_array_equal(clean(hidden), spoilt(hidden))


def test_rows_are_bounded(monkeypatch):
    monkeypatch.setattr(noise, "MOST_ROWS", 100)
    _, residual, hidden = noisy(400, seed=13)
    assert fit_noise(hidden, residual, np.zeros(400)).rows == 100


# ------------------------------------------------------------------------ determinism

PROGRAM = """
import hashlib, numpy as np
from gapa_onnx.settle.noise import fit_noise
rng = np.random.default_rng(0)
hidden = rng.standard_normal((3000, 300)).astype(np.float32)
residual = np.exp(hidden[:, 0]) * rng.standard_normal(3000)
head = fit_noise(hidden, residual, np.zeros(3000))
print(hashlib.sha256(b"".join(w.tobytes() + b.tobytes() for w, b in head.weights)).hexdigest())
"""


def test_threads_do_not_matter():
    """The same bytes with one thread and with two, also of representations that are projected."""
    digests = set()
    for threads in ("1", "2"):
        environment = os.environ | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
        )
        digests.add(run.stdout)
    assert len(digests) == 1


def test_seeds():
    _, residual, hidden = noisy(500, seed=14)
    first, again, other = (fit_noise(hidden, residual, np.zeros(500), seed=seed) for seed in (0, 0, 1))
    for (w1, b1), (w2, b2) in zip(first.weights, again.weights):
        assert w1.tobytes() == w2.tobytes() and b1.tobytes() == b2.tobytes()
    assert not np.array_equal(first(hidden), other(hidden))


def test_progress_ends_at_one():
    told = []
    _, residual, hidden = noisy(200, seed=15)
    fit_noise(hidden, residual, np.zeros(200), progress=lambda text, done: told.append(done))
    assert told == sorted(told) and told[0] == 0 and told[-1] == 1


# ------------------------------------------------------------------------------ nodes


@pytest.fixture(scope="module")
def heads() -> dict[int, NoiseHead]:
    """Heads of one and of two targets."""
    _, first, hidden = noisy(2_000, seed=16)
    _, second, _ = noisy(2_000, seed=17, scale=1e-3)
    both = np.stack([first, second], axis=1)
    return {t: fit_noise(hidden, both[:, :t], np.zeros((2_000, t))) for t in (1, 2)}


@pytest.mark.parametrize("opset", [7, 9, 13, 17, 18, 21, 22, 24, 26])
@pytest.mark.parametrize("shape", ["(N, 2)", "(N, 1)", "(N,)"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nodes_compute_what_the_head_computes(heads, opset, shape, dtype):
    head = heads[2 if shape == "(N, 2)" else 1]
    _, _, hidden = noisy(50, seed=18)
    hidden = hidden.astype(dtype)
    like = np.zeros((50,) if shape == "(N,)" else (50, len(head.scale)), dtype)
    var = _run(opset, head, hidden, like)
    assert var.shape == like.shape and var.dtype == dtype
    expected = head(hidden).reshape(like.shape)
    # float32 sums of 20 and 80 terms of size ≤ 300; float16 holds 11 bits, 6e-8 apart near zero
    tolerance = {"rtol": 2e-3, "atol": 1e-7} if dtype == np.float16 else {"rtol": 1e-4, "atol": 0}
    np.testing.assert_allclose(var, expected, **tolerance)


def _run(opset: int, head: NoiseHead, hidden: np.ndarray, like: np.ndarray) -> np.ndarray:
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip(f"onnx {onnx.__version__} does not know opset {opset}")
    graph = VarianceGraph(opset, {"h", "y"})
    h, y = graph.tensor("h", hidden.dtype), graph.tensor("y", like.dtype)
    value, names = emit_noise(graph, "h", h, y, "y/noise")
    value = graph.output(value, "y_aleatoric_var")
    proto = graph.to_proto([value])
    for name, array in head.tensors(names).items():
        assert put_tensor(proto, name, array)
    kind = helper.np_dtype_to_tensor_dtype(hidden.dtype)
    model = helper.make_model(
        helper.make_graph(
            list(proto.node),
            "g",
            [
                helper.make_tensor_value_info("h", kind, ["N", hidden.shape[1]]),
                helper.make_tensor_value_info("y", kind, ["N", *like.shape[1:]]),
            ],
            [helper.make_tensor_value_info(value.name, kind, ["N", *like.shape[1:]])],
            list(proto.initializer),
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=8,
    )
    onnx.checker.check_model(model)
    assert all(node.name.startswith("y/noise/") or node.name == "y_aleatoric_var" for node in proto.node)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"h": hidden, "y": like})[0]


def test_a_constant_head_becomes_nodes_too():
    layers = tuple(
        (np.zeros(shape, np.float32), np.zeros(1, np.float32)) for shape in ((4, 1), (1, 1), (1, 1))
    )
    head = NoiseHead(layers, np.array([3.0]), 0.0, 0.0, 20)
    var = _run(17, head, np.ones((6, 4), np.float32), np.zeros((6, 1), np.float32))
    np.testing.assert_allclose(var, 3 * (np.log(2) + 1e-6), rtol=1e-6)


# -------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "hidden, residual, epistemic, words",
    [
        (np.ones((30, 2, 2)), np.ones(30), np.ones(30), "one vector a row"),
        (np.eye(30), np.ones(29), np.ones(29), "30 rows"),
        (np.eye(30), np.ones((30, 2)), np.ones((30, 1)), "shape"),
        (np.eye(19), np.ones(19), np.ones(19), "only 19 of 19 rows"),
        (np.eye(30), np.full(30, np.nan), np.ones(30), "only 0 of 30 rows"),
        (np.full((30, 3), 0.1, np.float32), np.ones(30), np.ones(30), "same for every row"),
        (np.eye(30), np.ones(30), -np.ones(30), "negative"),
        (np.eye(30), np.zeros(30), np.ones(30), "equal the model's outputs"),
    ],
)
def test_bad_input_gets_a_sentence(hidden, residual, epistemic, words):
    with pytest.raises(UserError, match=words) as error:
        fit_noise(hidden, residual, epistemic)
    assert error.value.hint
