"""GapaClasses, the native operator for heads: values against extended precision, invariance, and bad files.

`GAPA_ONNX_ISA` is read once per process, so each instruction set runs in a process of its own: this file, run as
a program, makes the answers; the tests compare them with numpy's longest floating-point type.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.native_models import LIBRARY, session
from support.paths import ROOT, TESTS

from gapa_onnx.op.contract import CLASSES, DOMAIN, VERSION

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")
LEVELS = ("generic", "avx2", "avx512")  # a CPU without one falls back to the level below
BY_DAY = [pytest.param(level, marks=pytest.mark.nightly if level == "avx2" else ()) for level in LEVELS]
OUTPUTS = [port.name for port in CLASSES.outputs]
PARTS = ("entropy", "aleatoric", "epistemic")


def model(
    points: np.ndarray,
    shape: tuple | list | None,
    axis: int | np.ndarray | None = None,
    outputs: int = len(OUTPUTS),
    constant: bool = True,
) -> bytes:
    """A model that is the operator and nothing else; the classes are on the last axis unless told."""
    if axis is None:
        axis = 1 if shape is None else len(shape) - 1
    ports = [port.name for port in CLASSES.inputs]
    node = helper.make_node(CLASSES.name, ports, OUTPUTS[:outputs], domain=DOMAIN)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ports[:3]]
    if not constant:
        inputs.append(helper.make_tensor_value_info("points", TensorProto.FLOAT, points.shape))
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in OUTPUTS[:outputs]]
    constants = {"points": points, "axis": np.atleast_1d(np.asarray(axis, np.int64))}
    graph = helper.make_graph(
        [node],
        "one_node",
        inputs,
        declared,
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def feed(mean: np.ndarray, var: np.ndarray, output: np.ndarray | None = None) -> dict[str, np.ndarray]:
    return {"mean": mean, "var": var, "output": mean if output is None else output}


def run(points: np.ndarray, mean: np.ndarray, var: np.ndarray, threads: int = 1) -> list[np.ndarray]:
    running = session(model(points, (None,) * mean.ndim), threads)
    return running.run(OUTPUTS, feed(mean, var))


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


def probabilities(mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """The same for the bridge, before what keeps the prediction; the least that a class may have is 0."""
    wide = np.longdouble
    logits = np.maximum(mean.astype(wide), wide(np.float32(-1e30)))
    below = logits - logits.max(-1, keepdims=True)
    weights = np.exp(below / np.sqrt(1 + wide(np.pi) / 8 * var.astype(wide).mean(-1, keepdims=True)))
    return weights / weights.sum(-1, keepdims=True)


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
    found["32 classes, 16 points"] = (noise(16, 32), logits(100, 32), variances(100, 32))
    found["3 classes, 999 points"] = (noise(999, 3), logits(100, 3), variances(100, 3))
    found["all ruled out"] = (noise(16, 5), np.full((3, 5), -np.inf, np.float32), np.ones((3, 5), np.float32))
    return found


def answers() -> dict[str, np.ndarray]:
    """All rows at once, and "alone": each by itself."""
    out = {}
    for name, (points, mean, var) in cases().items():
        for role, value in zip(OUTPUTS, run(points, mean, var)):
            out[f"{name}/{role}"] = value
        running = session(model(points, (None, None)))
        rows = [running.run(OUTPUTS, feed(mean[i : i + 1], var[i : i + 1])) for i in range(len(mean))]
        for role, values in zip(OUTPUTS, zip(*rows)):
            out[f"{name}/{role}/alone"] = np.concatenate(values)
    return out


# ── values ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=BY_DAY)
def level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp(request.param) / "answers.npz"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path), str(ROOT)]),
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
def test_probabilities_equal_extended_precision(level, name: str) -> None:
    """One rounding to float32, and a rounding step or two where the prediction takes it."""
    _, mean, var = cases()[name]
    exact, found = probabilities(mean, var).astype(np.float64), level[f"{name}/probs"]
    np.testing.assert_allclose(found, exact, rtol=4e-7, atol=1e-37)
    assert (found[exact < 1e-300] == 0).all()
    np.testing.assert_array_equal(found.argmax(-1), mean.argmax(-1))
    spread = var.astype(np.longdouble).mean(-1).astype(np.float64)
    np.testing.assert_allclose(level[f"{name}/score"], spread, rtol=1e-7)


@pytest.mark.parametrize("name", list(cases()))
def test_values_equal_extended_precision(level, name: str) -> None:
    """Computed in float64, so what is left is one rounding to float32: 6e-8 of the value."""
    for role, exact in zip(PARTS, expected(name)):
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
    _, total, aleatoric, epistemic, score = run(
        points, np.zeros((1, 2), np.float32), np.float32([[a * a, 0]])
    )
    p = 1 / (1 + np.exp(-a))
    entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
    np.testing.assert_allclose([total[0], aleatoric[0]], [np.log(2), entropy], rtol=1e-6)
    np.testing.assert_allclose(epistemic[0], np.log(2) - entropy, rtol=1e-6)
    assert score[0] == a * a / 2


def test_a_column_belongs_to_a_rank() -> None:
    """With distinct logits the order of the classes changes no bit, and column r serves ranks r, r + R, …"""
    points, mean, var = cases()["33 classes, 31 points"]
    order = np.random.default_rng(2).permutation(33)
    for mine, theirs in zip(run(points, mean, var)[1:4], run(points, mean[:, order], var[:, order])[1:4]):
        assert mine.tobytes() == theirs.tobytes()
    tiled = np.tile(points, (1, 5))[:, :33]
    for mine, theirs in zip(run(points, mean, var), run(tiled, mean, var)):
        assert mine.tobytes() == theirs.tobytes()


# ── invariance ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", list(cases()))
def test_a_row_alone_has_the_bits_that_it_has_among_others(level, name: str) -> None:
    """A row by itself has its points in the lanes; of many rows with few classes a lane has one each."""
    for role in OUTPUTS:
        assert level[f"{name}/{role}"].tobytes() == level[f"{name}/{role}/alone"].tobytes(), role


@pytest.mark.parametrize("name", ["10 classes, 16 points", "700 classes, 32 points", "ties"])
def test_bits_do_not_depend_on_batch_position_or_threads(name: str) -> None:
    points, mean, var = cases()[name]
    whole = run(points, mean, var)
    for threads in (1, 2):
        running = session(model(points, ("n", mean.shape[1])), threads)
        for batch in (1, 7, 100):
            parts = [
                running.run(None, feed(mean[i : i + batch], var[i : i + batch]))
                for i in range(0, len(mean), batch)
            ]
            for all_rows, found in zip(whole, zip(*parts)):
                assert np.concatenate(found).tobytes() == all_rows.tobytes()
        many = feed(np.tile(mean[::-1], (9, 1)), np.tile(var[::-1], (9, 1)))
        for all_rows, found in zip(whole, running.run(None, many)):
            assert found.tobytes() == np.concatenate([all_rows[::-1]] * 9).tobytes()


def test_threads_share_a_session() -> None:
    points, mean, var = cases()["21 classes, 16 points"]
    running = session(model(points, ("n", 21)), threads=2)
    many = feed(np.tile(mean, (9, 1)), np.tile(var, (9, 1)))
    one = [part.tobytes() for part in running.run(None, many)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: running.run(None, many), range(16)):
            assert [part.tobytes() for part in found] == one


# ── shapes and special rows ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("leading", [(), (0,), (5,), (3, 0), (2, 3), (2, 1, 3)])
def test_any_rank_and_an_empty_batch(leading: tuple[int, ...]) -> None:
    points, mean, var = cases()["10 classes, 16 points"]
    count = int(np.prod(leading))
    rows = run(points, mean[:count], var[:count])
    shape = (*leading, 10)
    fed = feed(mean[:count].reshape(shape), var[:count].reshape(shape))
    for declared in (shape, [*(f"axis{i}" for i in range(len(leading))), 10], [None] * len(shape), None):
        running = session(model(points, declared, axis=len(leading)))
        for role, found, flat in zip(OUTPUTS, running.run(None, fed), rows):
            assert found.shape == (shape if role == "probs" else leading)
            assert found.tobytes() == flat.tobytes()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inner", [(1,), (2,), (15,), (16,), (17,), (3, 11), (150,)])
@pytest.mark.parametrize("outer", [(), (1,), (2,), (2, 3)])
def test_classes_in_front_of_other_axes(outer: tuple[int, ...], inner: tuple[int, ...], threads: int) -> None:
    """The same bits as with the classes last, whatever tiles and tasks the rows fall into."""
    rng = np.random.default_rng(4)
    shape = (*outer, *inner, 21)
    rows = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
    rows[1] **= 2
    points = noise(16, 21)
    last = session(model(points, shape)).run(None, feed(*rows))
    axis = len(outer)
    moved = [np.ascontiguousarray(np.moveaxis(array, -1, axis)) for array in rows]
    running = session(model(points, moved[0].shape, axis), threads)
    for output, place in ((rows[2], moved[2]), (rows[0], moved[0])):
        last = session(model(points, shape)).run(None, feed(*rows[:2], output))
        probs, *others = running.run(None, feed(*moved[:2], place))
        assert np.ascontiguousarray(np.moveaxis(probs, axis, -1)).tobytes() == last[0].tobytes()
        for mine, theirs in zip(others, last[1:]):
            assert mine.shape == (*outer, *inner) and mine.tobytes() == theirs.tobytes()


def test_the_prediction_of_the_source_is_kept() -> None:
    """Also where its output ties or swaps what the logits tell apart; the first of equal classes counts."""
    rng = np.random.default_rng(5)
    mean = (rng.normal(size=(2000, 5)) * 10 ** rng.uniform(-30, 4, size=(2000, 1))).astype(np.float32)
    mean[::7] = 0
    var = (10 ** rng.uniform(-10, 30, size=mean.shape)).astype(np.float32)
    for output in (mean, np.round(mean), -mean, np.zeros_like(mean)):
        probs = session(model(noise(16, 5), ("n", 5))).run(["probs"], feed(mean, var, output))[0]
        np.testing.assert_array_equal(probs.argmax(-1), output.argmax(-1))
        ranked = np.sort(probs, axis=-1)
        assert (ranked[:, -1] > ranked[:, -2]).all()
        np.testing.assert_allclose(ranked[:, -1], probabilities(mean, var).max(-1).astype(float), rtol=1e-7)


@pytest.mark.parametrize(
    "which, bad", [("mean", np.nan), ("mean", np.inf), ("var", np.nan), ("var", np.inf), ("var", -1e-30)]
)
@pytest.mark.parametrize("classes", [10, 700])
def test_a_row_with_a_nan_gets_nan(which: str, bad: float, classes: int) -> None:
    rng = np.random.default_rng(3)
    fed = {name: rng.random((9, classes)).astype(np.float32) for name in ("mean", "var", "output")}
    running = session(model(noise(16, classes), ("n", classes)))
    clean = running.run(None, fed)
    fed[which][4, classes - 1] = bad
    others = np.arange(9) != 4
    for role, found, before in zip(OUTPUTS, running.run(None, fed), clean):
        assert found[others].tobytes() == before[others].tobytes()
        if role in PARTS or np.isnan(bad) and (role, which) != ("score", "mean"):
            assert np.isnan(found[4]).all(), role


@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 5])
def test_later_outputs_are_optional(outputs: int) -> None:
    points, mean, var = cases()["10 classes, 16 points"]
    found = session(model(points, ("n", 10), outputs=outputs)).run(None, feed(mean, var))
    assert len(found) == outputs
    for mine, theirs in zip(found, run(points, mean, var)):
        assert mine.tobytes() == theirs.tobytes()


def test_unknown_shapes_between_nodes() -> None:
    """A row of unknown, unnamed axes must not become one of size -1."""
    points, mean, var = cases()["10 classes, 16 points"]
    proto = onnx.load_from_string(model(points, ("a", "b"), axis=2))
    names = ("mean", "var", "output")
    reshapes = [helper.make_node("Reshape", [name, "shape"], [f"{name}2"]) for name in names]
    head = proto.graph.node[0]
    head.input[:3] = [f"{name}2" for name in names]
    matmul = helper.make_node("MatMul", ["entropy", "weight"], ["sum"])
    nodes = [*reshapes, head, matmul]
    proto.graph.ClearField("node")
    proto.graph.node.extend(nodes)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([-1, 4, 10], np.int64), "shape"))
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 1), np.float32), "weight"))
    proto.graph.output.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, None))
    fed = feed(mean[:8].reshape(2, 40), var[:8].reshape(2, 40))
    entropy, total = session(proto.SerializeToString()).run(["entropy", "sum"], fed)
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
    assert f"GapaClasses: input 'points' {why}." in str(caught.value)


def test_points_that_are_not_constant_are_refused() -> None:
    with pytest.raises(Exception, match="GapaClasses: input 'points' must be a constant"):
        session(model(noise(4, 3), ("n", 3), constant=False))


@pytest.mark.parametrize(
    "axis, why",
    [
        (-1, "must be between 0 and 2147483647, but is -1"),
        (np.array([0, 1]), "must hold one number, but has shape (2,)"),
    ],
)
def test_a_bad_axis_is_refused_with_a_sentence(axis: int | np.ndarray, why: str) -> None:
    with pytest.raises(Exception) as caught:
        session(model(noise(4, 3), ("n", 3), axis))
    assert f"GapaClasses: input 'axis' {why}." in str(caught.value)


def test_rows_that_do_not_fit_are_refused_with_a_sentence() -> None:
    running = session(model(noise(4, 3), None))
    unlike = "must have the shape of 'mean', (2, 3), but has shape"
    missing = "'mean' must have classes on axis 1, but has shape"
    for shapes, why in (
        (((2, 3), (2, 4), (2, 3)), f"'var' {unlike} (2, 4)."),
        (((2, 3), (3,), (2, 3)), f"'var' {unlike} (3,)."),
        (((2, 3), (2, 3), (2, 1)), f"'output' {unlike} (2, 1)."),
        (((), (), ()), f"{missing} ()."),
        (((3,), (3,), (3,)), f"{missing} (3,)."),
        (((2, 0), (2, 0), (2, 0)), f"{missing} (2, 0)."),
    ):
        with pytest.raises(Exception) as caught:
            running.run(None, feed(*(np.zeros(shape, np.float32) for shape in shapes)))
        assert why in str(caught.value)
    found = running.run(None, feed(*[np.zeros((2, 3), np.float32)] * 2))
    np.testing.assert_allclose(found[1], np.log(3), rtol=1e-6)  # the session survives


if __name__ == "__main__":
    np.savez(sys.argv[1], **answers())
