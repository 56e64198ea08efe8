"""Conversion with targets: the noise head inside the file, and what is said about targets that do not fit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from scipy.stats import norm
from support.small_models import noise_std, noisy_data, noisy_net

import gapa_onnx
from gapa_onnx.compiler import convert
from gapa_onnx.errors import UserError
from gapa_onnx.record import read
from gapa_onnx.settle.scaling import TOLERANCE


@pytest.fixture(scope="module")
def converted() -> onnx.ModelProto:
    x, y = noisy_data(4000, seed=1)
    conversion = convert(noisy_net(), {"x": x}, targets=y, m=300, k=20)
    assert all(check.passed for check in conversion.checks)
    return conversion.model


def test_the_noise_is_found_and_added(converted):
    x, y = noisy_data(4000, seed=2)
    names = ["y", "y_var", "y_aleatoric_var", "y_total_var", "y_score"]
    mean, var, aleatoric, total, score = gapa_onnx.session(converted.SerializeToString()).run(names, {"x": x})
    assert aleatoric.shape == total.shape == y.shape
    np.testing.assert_allclose(total, var + aleatoric, rtol=1e-6)
    error = np.abs(np.sqrt(total) / noise_std(x) - 1)
    # A tenth of the noise, and what the scale may cost: a relative error e of σ costs e² nats, to second order.
    assert error.mean() < 0.1 + np.sqrt(TOLERANCE)
    constant = norm.logpdf(y, mean, (y - mean).std()).mean()
    best = norm.logpdf(y, mean, noise_std(x)).mean()
    # τ is one of a grid, found on 2000 rows: a step beside the best costs up to a tenth of the gain here.
    assert norm.logpdf(y, mean, np.sqrt(total)).mean() > constant + 0.8 * (best - constant)
    noise = read(converted).heads["y"].noise
    assert noise.nll < noise.constant_nll and noise.rows == 4000 - 4000 // 3
    np.testing.assert_allclose(score, var[:, 0], rtol=1e-6)  # what is strange is not what is noisy


def test_the_outputs_are_declared_and_the_source_is_untouched(converted):
    onnx.checker.check_model(converted, full_check=True)
    assert [output.name for output in converted.graph.output] == [
        "y", "y_var", "y_score", "y_ood", "y_aleatoric_var", "y_total_var", "y_lower", "y_upper"
    ]  # fmt: skip
    source = [node.SerializeToString() for node in noisy_net().graph.node]
    inside = {node.SerializeToString() for node in converted.graph.node}
    assert all(node in inside for node in source)


def test_same_targets_same_bytes():
    x, y = noisy_data(300, seed=3)
    first, second = (convert(noisy_net(), {"x": x}, targets=y, m=50, k=10).model for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


@pytest.mark.parametrize("opset", [9, 13, 21])
def test_opsets(opset):
    x, y = noisy_data(200, seed=4)
    model = convert(noisy_net(opset), {"x": x}, targets=y[:, 0], m=50, k=10).model
    total = gapa_onnx.session(model.SerializeToString()).run(["y_total_var"], {"x": x})[0]
    assert total.shape == (200, 1) and (total > 0).all()


def test_targets_from_files(tmp_path):
    x, y = noisy_data(200, seed=5)
    np.save(tmp_path / "y.npy", y)
    np.savez(tmp_path / "y.npz", anything=y)
    np.savetxt(tmp_path / "y.csv", y, header="price", comments="")
    noises = []
    for name in ("y.npy", "y.npz", "y.csv"):
        model = convert(noisy_net(), {"x": x}, targets=tmp_path / name, m=50, k=10).model
        noises.append(read(model).heads["y"].noise)
    assert noises[0] == noises[1] and noises[2].nll == pytest.approx(noises[0].nll, rel=1e-6)


@pytest.mark.parametrize(
    "targets, settings, message",
    [
        (np.zeros(7), {}, "7 targets for 200 calibration rows"),
        (np.zeros(200), {"task": "none"}, "no output is taken for one"),
        (np.array(["a"] * 200), {}, "not an array of numbers"),
        ("nowhere.npy", {}, "there is no file"),
        ({"z": np.zeros(200), "y": np.zeros(200)}, {}, "which is no regression output"),
        (np.full(200, np.nan), {}, "target"),
    ],
)
def test_targets_that_do_not_fit(targets, settings, message):
    x, _ = noisy_data(200, seed=6)
    with pytest.raises(UserError, match=message):
        convert(noisy_net(), {"x": x}, targets=targets, m=50, k=10, **settings)
