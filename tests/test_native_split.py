"""GapaSplit, the native operator for heads: values against extended precision, invariance, and bad files.

`GAPA_ONNX_ISA` is read once per process, so each instruction set runs in a process of its own: this file, run as
a program, makes the answers; the tests compare them with numpy's longest floating-point type.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_native import LIBRARY, session

from gapa_onnx.op.contract import DOMAIN, SPLIT, VERSION

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")
LEVELS = ("generic", "avx2", "avx512")  # a CPU without one falls back to the level below
OUTPUTS = [port.name for port in SPLIT.outputs]


def model(points: np.ndarray, shape: tuple | None, outputs: int = 3, constant: bool = True) -> bytes:
    """A model that is the operator and nothing else."""
    node = helper.make_node(
        SPLIT.name, [port.name for port in SPLIT.inputs], OUTPUTS[:outputs], domain=DOMAIN
    )
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("mean", "var")]
    if not constant:
        inputs.append(helper.make_tensor_value_info("points", TensorProto.FLOAT, points.shape))
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in OUTPUTS[:outputs]]
    graph = helper.make_graph(
        [node], "one_node", inputs, declared, [numpy_helper.from_array(points, "points")]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def run(points: np.ndarray, mean: np.ndarray, var: np.ndarray, threads: int = 1) -> list[np.ndarray]:
    running = session(model(points, (None,) * mean.ndim), threads)
    return running.run(OUTPUTS, {"mean": mean, "var": var})


def reference(points: np.ndarray, mean: np.ndarray, var: np.ndarray) -> tuple[np.ndarray, ...]:
    """The contract in extended precision; the epistemic part as a mean divergence, which cannot cancel."""
    wide = np.longdouble
    logits = np.maximum(mean.astype(wide), wide(np.float32(-1e30)))  # (…, C)
    order = np.argsort(-logits, axis=-1, kind="stable")
    logits = np.take_along_axis(logits, order, -1)
    std = np.sqrt(np.take_along_axis(var.astype(wide), order, -1))
    noise = points.astype(wide)[:, np.arange(mean.shape[-1]) % points.shape[1]]  # (S, C)
    sampled = logits[..., None, :] + std[..., None, :] * noise  # (…, S, C)
    below = sampled - sampled.max(-1, keepdims=True)
    log_p = below - np.log(np.exp(below).sum(-1, keepdims=True))
    p = np.exp(log_p)
    mixture = p.mean(-2, keepdims=True)  # (…, 1, C)
    log_mixture = np.log(np.where(mixture > 0, mixture, 1))
    aleatoric = -(p * np.where(p > 0, log_p, 0)).sum(-1).mean(-1)
    # u log u − u + 1 ≥ 0 for u = p / mixture
    ratio = p / np.where(mixture > 0, mixture, 1)
    excess = np.where(p > 0, ratio * np.log(np.where(p > 0, ratio, 1)), 0) - ratio + 1
    epistemic = (mixture * np.where(mixture > 0, excess, 0)).sum(-1).mean(-1)
    return -(mixture * log_mixture).sum(-1)[..., 0], aleatoric, epistemic


# ── cases ─────────────────────────────────────────────────────────────────────────────────────


def noise(count: int, columns: int, seed: int = 0) -> np.ndarray:
    """(count, columns); symmetric like those of a converted file where the count is even."""
    values = np.random.default_rng(seed).normal(size=((count + 1) // 2, columns))
    return np.concatenate([values, -values])[:count].astype(np.float32)


@cache
def cases() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Name -> points (S, R), mean and var (n, C)."""
    rng = np.random.default_rng(1)

    def logits(n: int, classes: int, size: float = 3.0) -> np.ndarray:
        return (rng.normal(size=(n, classes)) * size).astype(np.float32)

    def variances(n: int, classes: int, low: float = -6, high: float = 2) -> np.ndarray:
        scale = 10 ** rng.uniform(low, high, size=(n, 1))
        return (rng.normal(size=(n, classes)) ** 2 * scale).astype(np.float32)

    found = {
        f"{classes} classes, {count} points": (
            noise(count, min(columns, classes)), logits(300, classes), variances(300, classes)
        )
        for classes, count, columns in (
            (2, 16, 2), (3, 16, 3), (10, 16, 10), (16, 16, 16), (17, 5, 17), (21, 16, 21), (7, 1, 7),
            (33, 31, 8), (128, 16, 64), (129, 16, 64), (700, 32, 256),
        )
    }  # fmt: skip
    found["one class"] = (noise(16, 1), logits(5, 1), variances(5, 1))
    found["confident"] = (noise(16, 10), logits(400, 10, size=12.0), variances(400, 10, -4, -1))
    found["nearly no variance"] = (noise(16, 10), logits(200, 10), variances(200, 10, -9, -7))
    found["no variance"] = (noise(16, 10), logits(50, 10), np.zeros((50, 10), np.float32))
    found["huge variance"] = (noise(16, 10), logits(50, 10), variances(50, 10, 4, 30))
    found["huge logits"] = (noise(16, 10), logits(50, 10, size=1e20), variances(50, 10))
    ties = np.repeat(logits(200, 3), 7, axis=1)
    found["ties"] = (noise(16, 21), ties, variances(200, 21, -2, 1))
    many = np.round(logits(40, 500))
    many[many == 0] *= rng.choice([-1, 1], size=(many == 0).sum())  # 0 and -0 are equal
    found["ties of many"] = (noise(16, 500), many, variances(40, 500, -2, 1))
    for name, classes in (("ruled out", 12), ("ruled out of many", 300)):
        mean = logits(200, classes)
        mean[rng.random(mean.shape) < 0.5] = -np.inf
        mean[rng.random(mean.shape) < 0.2] = np.float32(-3e38)
        mean[:, 3] = 0
        found[name] = (noise(16, classes), mean, variances(200, classes))
    found["all ruled out"] = (noise(16, 5), np.full((3, 5), -np.inf, np.float32), np.ones((3, 5), np.float32))
    return found


def answers() -> dict[str, np.ndarray]:
    out = {}
    for name, (points, mean, var) in cases().items():
        for role, value in zip(OUTPUTS, run(points, mean, var)):
            out[f"{name}/{role}"] = value
    return out


# ── values ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp(request.param) / "answers.npz"
    root = Path(__file__).resolve().parent.parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path), str(root)]),
        "GAPA_ONNX_LIBRARY": str(LIBRARY),
        "GAPA_ONNX_ISA": request.param,
    }
    done = subprocess.run(
        [sys.executable, __file__, str(path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return np.load(path)


@cache
def expected(name: str) -> tuple[np.ndarray, ...]:
    return reference(*cases()[name])


@pytest.mark.parametrize("name", list(cases()))
def test_values_equal_extended_precision(level, name: str) -> None:
    """Computed in float64, so what is left is one rounding to float32: 6e-8 of the value."""
    for role, exact in zip(OUTPUTS, expected(name)):
        np.testing.assert_allclose(level[f"{name}/{role}"], exact.astype(np.float64), rtol=1e-7, atol=2e-15)


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="no type wider than float64 to compare with")
@pytest.mark.parametrize("name", ["confident", "nearly no variance", "10 classes, 16 points"])
def test_a_small_epistemic_part_keeps_its_digits(level, name: str) -> None:
    total, _, exact = expected(name)
    found = level[f"{name}/epistemic"]
    small = (exact < 1e-6) & (exact > 1e-12)
    assert small.sum() >= 20
    np.testing.assert_allclose(found[small], exact[small].astype(np.float64), rtol=1e-5)
    # It ranks rows: what differs by more than that is in the right order.
    order = np.argsort(exact)
    steps = exact[order][1:] > exact[order][:-1] * (1 + 1e-4) + 1e-14
    assert (np.diff(found[order])[steps] > 0).all()


def test_parts_by_hand() -> None:
    """Two classes, points ±1 on the first: logits (±a, 0), so p = σ(±a) and the mixture is even."""
    points = np.array([[1, 0], [-1, 0]], np.float32)
    a = 1.5
    total, aleatoric, epistemic = run(points, np.zeros((1, 2), np.float32), np.float32([[a * a, 0]]))
    p = 1 / (1 + np.exp(-a))
    entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
    np.testing.assert_allclose([total[0], aleatoric[0]], [np.log(2), entropy], rtol=1e-6)
    np.testing.assert_allclose(epistemic[0], np.log(2) - entropy, rtol=1e-6)


def test_a_column_belongs_to_a_rank() -> None:
    """With distinct logits the order of the classes changes no bit, and column r serves ranks r, r + R, …"""
    points, mean, var = cases()["33 classes, 31 points"]
    order = np.random.default_rng(2).permutation(33)
    for mine, theirs in zip(run(points, mean, var), run(points, mean[:, order], var[:, order])):
        assert mine.tobytes() == theirs.tobytes()
    tiled = np.tile(points, (1, 5))[:, :33]
    for mine, theirs in zip(run(points, mean, var), run(tiled, mean, var)):
        assert mine.tobytes() == theirs.tobytes()


# ── invariance ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["10 classes, 16 points", "700 classes, 32 points", "ties"])
def test_bits_do_not_depend_on_batch_position_or_threads(name: str) -> None:
    points, mean, var = cases()[name]
    whole = run(points, mean, var)
    for threads in (1, 2):
        running = session(model(points, ("n", mean.shape[1])), threads)
        for batch in (1, 7, 100):
            parts = [
                running.run(None, {"mean": mean[i : i + batch], "var": var[i : i + batch]})
                for i in range(0, len(mean), batch)
            ]
            for all_rows, found in zip(whole, zip(*parts)):
                assert np.concatenate(found).tobytes() == all_rows.tobytes()
        many = {"mean": np.tile(mean[::-1], (9, 1)), "var": np.tile(var[::-1], (9, 1))}
        for all_rows, found in zip(whole, running.run(None, many)):
            assert found.tobytes() == np.tile(all_rows[::-1], 9).tobytes()


def test_threads_share_a_session() -> None:
    points, mean, var = cases()["21 classes, 16 points"]
    running = session(model(points, ("n", 21)), threads=2)
    feed = {"mean": np.tile(mean, (9, 1)), "var": np.tile(var, (9, 1))}
    one = [part.tobytes() for part in running.run(None, feed)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: running.run(None, feed), range(16)):
            assert [part.tobytes() for part in found] == one


# ── shapes and special rows ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("leading", [(), (0,), (5,), (3, 0), (2, 3), (2, 1, 3)])
def test_any_rank_and_an_empty_batch(leading: tuple[int, ...]) -> None:
    points, mean, var = cases()["10 classes, 16 points"]
    count = int(np.prod(leading))
    rows = run(points, mean[:count], var[:count])
    feed = {"mean": mean[:count].reshape(*leading, 10), "var": var[:count].reshape(*leading, 10)}
    shape = (*leading, 10)
    for declared in (shape, [*(f"axis{i}" for i in range(len(leading))), 10], [None] * len(shape), None):
        for found, flat in zip(session(model(points, declared)).run(None, feed), rows):
            assert found.shape == leading and found.tobytes() == flat.tobytes()


@pytest.mark.parametrize(
    "which, bad", [("mean", np.nan), ("mean", np.inf), ("var", np.nan), ("var", np.inf), ("var", -1e-30)]
)
@pytest.mark.parametrize("classes", [10, 700])
def test_a_row_with_a_nan_gets_nan(which: str, bad: float, classes: int) -> None:
    rng = np.random.default_rng(3)
    feed = {name: rng.random((9, classes)).astype(np.float32) for name in ("mean", "var")}
    running = session(model(noise(16, classes), ("n", classes)))
    clean = running.run(None, feed)
    feed[which][4, classes - 1] = bad
    others = np.arange(9) != 4
    for found, before in zip(running.run(None, feed), clean):
        assert np.isnan(found[4]) and found[others].tobytes() == before[others].tobytes()


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_later_outputs_are_optional(outputs: int) -> None:
    points, mean, var = cases()["10 classes, 16 points"]
    found = session(model(points, ("n", 10), outputs)).run(None, {"mean": mean, "var": var})
    for mine, theirs in zip(found, run(points, mean, var)):
        assert mine.tobytes() == theirs.tobytes()


def test_shapes_are_known_to_the_nodes_behind() -> None:
    """A row of unknown, unnamed axes must not become one of size -1."""
    points, mean, var = cases()["10 classes, 16 points"]
    proto = onnx.load_from_string(model(points, ("a", "b")))
    reshapes = [helper.make_node("Reshape", [name, "shape"], [f"{name}2"]) for name in ("mean", "var")]
    split = proto.graph.node[0]
    split.input[0], split.input[1] = "mean2", "var2"
    matmul = helper.make_node("MatMul", ["entropy", "weight"], ["sum"])
    nodes = [*reshapes, split, matmul]
    proto.graph.ClearField("node")
    proto.graph.node.extend(nodes)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([-1, 4, 10], np.int64), "shape"))
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 1), np.float32), "weight"))
    proto.graph.output.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, None))
    feed = {"mean": mean[:8].reshape(2, 40), "var": var[:8].reshape(2, 40)}
    entropy, total = session(proto.SerializeToString()).run(["entropy", "sum"], feed)
    np.testing.assert_allclose(total, entropy.sum(1, keepdims=True), rtol=1e-6)


# ── bad files ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "points, why",
    [
        (np.zeros(4, np.float32), "must have rank 2 and no empty axis, but has shape (4,)"),
        (np.zeros((2, 3, 4), np.float32), "must have rank 2 and no empty axis, but has shape (2, 3, 4)"),
        (np.zeros((0, 4), np.float32), "must have rank 2 and no empty axis, but has shape (0, 4)"),
        (np.zeros((4, 0), np.float32), "must have rank 2 and no empty axis, but has shape (4, 0)"),
        (np.float32([[1, np.nan]]), "holds a NaN or an infinity at element 1"),
        (np.float32([[1], [-np.inf]]), "holds a NaN or an infinity at element 1"),
    ],
)
def test_corrupt_points_are_refused_with_a_sentence(points: np.ndarray, why: str) -> None:
    with pytest.raises(Exception) as caught:
        session(model(points, ("n", 4)))
    assert f"GapaSplit: input 'points' {why}." in str(caught.value)


def test_points_that_are_not_constant_are_refused() -> None:
    with pytest.raises(Exception, match="GapaSplit: input 'points' must be a constant"):
        session(model(noise(4, 3), ("n", 3), constant=False))


def test_rows_that_do_not_fit_are_refused_with_a_sentence() -> None:
    running = session(model(noise(4, 3), None))
    for mean, var, why in (
        (np.zeros((2, 3)), np.zeros((2, 4)), "'var' must have the shape of 'mean', (2, 3), but has shape (2, 4)."),
        (np.zeros((2, 3)), np.zeros((3,)), "'var' must have the shape of 'mean', (2, 3), but has shape (3,)."),
        (np.zeros(()), np.zeros(()), "'mean' must have classes on its last axis, but has shape ()."),
        (np.zeros((2, 0)), np.zeros((2, 0)), "'mean' must have classes on its last axis, but has shape (2, 0)."),
    ):  # fmt: skip
        with pytest.raises(Exception) as caught:
            running.run(None, {"mean": mean.astype(np.float32), "var": var.astype(np.float32)})
        assert why in str(caught.value)
    found = running.run(None, {name: np.zeros((2, 3), np.float32) for name in ("mean", "var")})
    np.testing.assert_allclose(found[0], np.log(3), rtol=1e-6)  # the session survives


if __name__ == "__main__":
    np.savez(sys.argv[1], **answers())
