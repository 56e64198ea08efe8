"""A head for classes as an operator: its standard-ops body in a stock onnxruntime, and what is registered under
its name, against float64 numpy."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.operator_models import LEVELS, NEWEST, session
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.measure.agreement import split_tolerance
from gapa_onnx.measure.verify import verify
from gapa_onnx.op import classes as body
from gapa_onnx.op.contract import CLASSES, DOMAIN, VERSION
from gapa_onnx.plan.heads import reference
from gapa_onnx.plan.heads.points import Points, latin, samples
from gapa_onnx.sessions.runtime import register, session_options

ROLES = [port.name for port in CLASSES.outputs]
PARTS = ROLES[1:4]
TOLERANCE = 1e-5
OPSETS = range(body.OLDEST_OPSET, NEWEST + 1)


def model_of(
    points: np.ndarray, rank: int = 2, opset: int = 17, axis: int | None = None, in_blocks: bool = True
) -> onnx.ModelProto:
    """One node, sizes unknown until it runs; the classes are on the last axis unless told."""
    sizes = [f"n{i}" for i in range(rank)]
    axis = rank - 1 if axis is None else axis
    node = helper.make_node(
        CLASSES.name, [port.name for port in CLASSES.inputs], ROLES, "head", domain=DOMAIN
    )
    leading = [size for i, size in enumerate(sizes) if i != axis]
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(port.name, TensorProto.FLOAT, sizes) for port in CLASSES.inputs[:3]],
        [
            helper.make_tensor_value_info(role, TensorProto.FLOAT, sizes if role == "probs" else leading)
            for role in ROLES
        ],
        [
            numpy_helper.from_array(points.astype(np.float32), "points"),
            numpy_helper.from_array(np.array([axis]), "axis"),
        ],
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, VERSION)],
        functions=[body.classes_body(opset, in_blocks)],
        ir_version=8,
    )


def draw(shape: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    """Logits and variances, and a source that gives another answer than its logits now and then."""
    rng = np.random.default_rng(seed)
    mean, var = 3 * rng.standard_normal(shape), np.exp(rng.standard_normal(shape))
    output = mean + rng.standard_normal(shape)
    return {name: x.astype(np.float32) for name, x in (("mean", mean), ("var", var), ("output", output))}


def expected(feeds: dict[str, np.ndarray], points: Points, axis: int = -1) -> list[np.ndarray]:
    with np.errstate(invalid="ignore"):  # of infinite logits
        parts = reference.split(feeds["mean"], feeds["var"], axis, points)
        probs = reference.bridge(feeds["mean"], feeds["var"], axis)
        if probs.size:
            probs = reference.as_predicted(probs, feeds["output"], axis)
    score = reference.score(feeds["var"], axis)
    return [probs, *(getattr(parts, part) for part in PARTS), score]


def assert_same(found: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = TOLERANCE) -> None:
    assert len(found) == len(wanted) == len(ROLES)
    for role, answer, exact in zip(ROLES, found, wanted):
        assert answer.dtype == np.float32 and answer.shape == exact.shape, role
        np.testing.assert_allclose(answer, exact, rtol=tolerance, atol=tolerance, err_msg=role)


def awkward() -> dict[str, np.ndarray]:
    """One row per trouble; the last one has none."""
    feeds = draw((9, 10), seed=3)
    mean, var = feeds["mean"], feeds["var"]
    mean[0, 4] = var[1, 7] = np.nan
    mean[2, 1] = np.inf
    mean[3, 2:6] = -np.inf
    mean[4] = -np.inf
    mean[5] = 1.5  # ties
    var[6] = 0
    mean[7] = [300, *[-300] * 9]
    return feeds | {"output": mean}


NOT_A_NUMBER = [0, 1, 2]


def check_awkward(found: list[np.ndarray]) -> None:
    assert_same(found, expected(awkward(), latin(10)))
    probs, entropy, _, epistemic, score = found
    for answer in found[1:4]:
        np.testing.assert_array_equal(np.flatnonzero(np.isnan(answer)), NOT_A_NUMBER)
        assert (np.delete(answer, NOT_A_NUMBER) >= 0).all()
    assert np.isnan(probs[NOT_A_NUMBER]).all() and not np.isnan(np.delete(probs, NOT_A_NUMBER, axis=0)).any()
    np.testing.assert_array_equal(
        np.flatnonzero(np.isnan(score)), [1]
    )  # the variances of the others are known
    # Ruled out alike, all are possible alike; and what is certain has nothing to tell.
    assert (probs[3, 2:6] == 0).all()
    np.testing.assert_allclose(probs[4], 0.1, rtol=1e-6)
    np.testing.assert_allclose(entropy[4], np.log(10), rtol=1e-6)
    assert epistemic[6] < 1e-6 and entropy[7] < 1e-6


# ------------------------------------------------------------------- the body


@pytest.mark.parametrize("classes", [2, 3, 10, 33, 200, 1500])
@pytest.mark.parametrize("kind", ["coarse", "fine", "samples"])
@pytest.mark.parametrize("in_blocks", [True, False])
def test_as_numpy(classes: int, kind: str, in_blocks: bool) -> None:
    points = samples(512, classes, seed=1) if kind == "samples" else latin(classes, fine=kind == "fine")
    rows = max(3, 20_000 // classes // points.count)
    feeds = draw((rows, classes), seed=classes)
    feeds["var"] *= np.float32(10.0) ** np.random.default_rng(0).uniform(-4, 1, (rows, 1)).astype(np.float32)
    model = model_of(points.values, in_blocks=in_blocks)
    assert_same(session(model).run(None, feeds), expected(feeds, points))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("in_blocks", [True, False])
def test_every_opset(opset: int, in_blocks: bool) -> None:
    model = model_of(latin(10).values, opset=opset, in_blocks=in_blocks)
    onnx.checker.check_model(model, full_check=True)
    for level in LEVELS:
        run = session(model, level).run
        check_awkward(run(None, awkward()))
        assert [part.shape for part in run(None, draw((0, 10)))] == [(0, 10), *[(0,)] * 4]


def test_all_rows_at_once_need_no_loop() -> None:
    """What many engines do not run is not there: loops, branches, double precision."""
    function = body.classes_body(17, in_blocks=False)
    assert {node.op_type for node in function.node}.isdisjoint({"Loop", "If", "Scan"})


@pytest.mark.parametrize("opset", range(NEWEST + 1, onnx.defs.onnx_opset_version() + 1))
def test_opsets_newer_than_onnxruntime_are_still_valid(opset: int) -> None:
    onnx.checker.check_model(model_of(latin(10).values, opset=opset), full_check=True)


def test_older_opsets_are_refused() -> None:
    with pytest.raises(ValueError, match="opset 10"):
        body.classes_body(10)


@pytest.mark.parametrize("opset", [11, 13, 14, NEWEST])
@pytest.mark.parametrize(
    "leading", [(), (5,), (2, 3), (2, 1, 3), (2, 3, 2, 2), (0,), (0, 3), (2, 0), (2, 0, 3)]
)
@pytest.mark.parametrize("in_blocks", [True, False])
def test_ranks(opset: int, leading: tuple[int, ...], in_blocks: bool) -> None:
    points, feeds = latin(7), draw((*leading, 7))
    model = model_of(points.values, len(leading) + 1, opset, in_blocks=in_blocks)
    assert_same(session(model).run(None, feeds), expected(feeds, points))


@pytest.mark.parametrize("opset", [11, 13, 18])
@pytest.mark.parametrize(
    "shape, axis",
    [((7, 5), 0), ((2, 7, 5), 1), ((2, 7, 3, 4), 1), ((3, 2, 7, 2), 2), ((2, 7, 0, 3), 1), ((0, 7, 2), 1)],
)
def test_classes_on_any_axis(shape: tuple[int, ...], axis: int, opset: int) -> None:
    points, feeds = latin(7), draw(shape)
    model = model_of(points.values, len(shape), opset, axis)
    assert_same(session(model).run(None, feeds), expected(feeds, points, axis))


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("shape, axis", [((50, 10), 1), ((2, 10, 4, 3), 1)])
def test_behind_a_quantised_output(shape: tuple[int, ...], axis: int, opset: int) -> None:
    """onnxruntime moves a DequantizeLinear on to what reads it, and the source's answer is read twice."""
    points, feeds = latin(10), draw(shape)
    model = model_of(points.values, len(shape), opset, axis)
    head = model.graph.node[0]
    head.input[0] = head.input[2] = "dequantised"
    quantise = helper.make_node("QuantizeLinear", ["mean", "step", "zero_point"], ["quantised"])
    back = helper.make_node("DequantizeLinear", ["quantised", "step", "zero_point"], ["dequantised"])
    nodes = [quantise, back, head]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    del model.graph.input[2]
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.125), "step"))
    model.graph.initializer.append(numpy_helper.from_array(np.uint8(128), "zero_point"))
    seen = np.clip(np.round(feeds["mean"] / 0.125), -128, 127).astype(np.float32) * np.float32(0.125)
    wanted = expected({"mean": seen, "var": feeds["var"], "output": seen}, points, axis)
    for level in LEVELS:
        found = session(model, level).run(None, {name: feeds[name] for name in ("mean", "var")})
        assert_same(found, wanted)
        np.testing.assert_array_equal(found[0].argmax(axis), seen.argmax(axis))


@pytest.mark.parametrize("opset", [11, 17])
def test_inlined(opset: int) -> None:
    points = latin(10)
    inlined = onnx.inliner.inline_local_functions(model_of(points.values, opset=opset))
    assert not inlined.functions and all(node.domain != DOMAIN for node in inlined.graph.node)
    for level in LEVELS:
        check_awkward(session(inlined, level).run(None, awkward()))


def test_columns_again_beyond_the_last() -> None:
    """Rank r takes column r mod R: 5 columns for 12 classes."""
    table, feeds = latin(5), draw((20, 12))
    found = session(model_of(table.values)).run(None, feeds)
    assert_same(found, expected(feeds, table))
    spelled = Points("latin", table.values[:, np.arange(12) % 5])
    assert_same(found, expected(feeds, spelled))


def test_equal_logits_rank_by_their_place() -> None:
    """Variances that differ tell which of the equal logits came first."""
    points = latin(3)
    mean = np.zeros((1, 3), np.float32)
    feeds = {"mean": mean, "var": np.float32([[4.0, 1.0, 0.2]]), "output": mean}
    found = session(model_of(points.values)).run(None, feeds)
    assert_same(found, expected(feeds, points))
    other = Points("latin", points.values[:, ::-1])
    assert abs(expected(feeds, other)[3] - found[3])[0] > 100 * TOLERANCE


@pytest.mark.parametrize("rows", [1, 2, 3, 408, 409, 410, 411, 818, 819, 5000])
def test_blocks_of_every_size(rows: int) -> None:
    """2¹⁶ // (16 · 10) + 2 = 411 rows fit into a block; what fills the last one up does not come out."""
    assert body.BLOCK // 160 + 2 == 411
    points, feeds = latin(10), draw((rows, 10))
    assert_same(session(model_of(points.values)).run(None, feeds), expected(feeds, points))


def test_rows_do_not_depend_on_their_block() -> None:
    points, feeds = latin(10), draw((1000, 10))
    run = session(model_of(points.values)).run
    together = run(None, feeds)
    for size in (1, 7):
        parts = [run(None, {name: x[i : i + size] for name, x in feeds.items()}) for i in range(0, 70, size)]
        for whole, apart in zip(together, zip(*parts)):
            # Vectorised exponentials differ in the last bit from those of the rest of a row.
            np.testing.assert_allclose(np.concatenate(apart), whole[:70], rtol=1e-6, atol=1e-6)


def test_a_wrong_column_would_be_seen() -> None:
    """The comparisons above can fail: with columns by class the parts differ by far more."""
    points, feeds = latin(10), draw((50, 10))
    found = session(model_of(points.values)).run(None, feeds)
    order = np.argsort(np.argsort(-feeds["mean"], axis=1), axis=1)
    by_class = [
        reference.split(
            feeds["mean"][i], feeds["var"][i], 0, Points("latin", points.values[:, np.argsort(o)])
        )
        for i, o in enumerate(order)
    ]
    assert max(abs(one.epistemic - part) for one, part in zip(by_class, found[3])) > 100 * TOLERANCE


def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    """512 points of a (64 × 64 × 10) map would be 80 MB a tensor; in a process of its own, as peaks stay."""
    script = """
import resource, sys
import numpy as np
import onnxruntime as ort
session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
def run(rows):
    zeros, ones = (fill((rows, 10), np.float32) for fill in (np.zeros, np.ones))
    session.run(None, {"mean": zeros, "var": ones, "output": zeros})
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
few = run(64)
print(run(64 * 64) - few)
"""
    path = tmp_path / "split.onnx"
    onnx.save(model_of(samples(512, 10, seed=0).values), path)
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 40


# -------------------------------------------------------- whatever is registered


def native_session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = session_options(threads=1)
    if not register(options):
        pytest.skip("the native library is not built")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_with_the_library() -> None:
    """The same answers with the native library, whether it has a kernel of this name or not."""
    for shape, axis in (
        *(((10,), 0), ((300, 10), 1), ((2, 5, 40), 2), ((4, 1500), 1), ((0, 10), 1)),
        *(((10, 33), 0), ((2, 21, 9, 8), 1), ((3, 2, 10, 50), 2), ((2, 10, 0), 1)),
    ):
        points, feeds = latin(shape[axis]), draw(shape)
        found = native_session(model_of(points.values, len(shape), axis=axis)).run(None, feeds)
        assert_same(found, expected(feeds, points, axis))
    check_awkward(native_session(model_of(latin(10).values)).run(None, awkward()))


# ------------------------------------------------------------------ in a file


@functools.cache
def digits() -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, np.ndarray]]:
    source = onnx.load(MODELS / "digits_mlp.onnx")
    converted = gapa_onnx.convert(source, MODELS / "digits_mlp_calibration.npz", m=100, k=10).model
    with np.load(MODELS / "digits_mlp_heldout.npz") as file:
        rows = {source.graph.input[0].name: file["pixels"][:64].astype(np.float32)}
    return source, converted, rows


def test_a_converted_file_has_the_function_once() -> None:
    _, converted, _ = digits()
    assert [function.name for function in converted.functions].count(CLASSES.name) == 1
    (node,) = (node for node in converted.graph.node if node.op_type == CLASSES.name)
    # The mean variance is not the score of the file, which witnesses make.
    assert list(node.output) == [*(f"logits_{role}" for role in ROLES[:-1]), "logits/classes/score"]
    plain = gapa_onnx.convert(
        MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz", m=100, k=10, task="none"
    ).model
    assert CLASSES.name not in [function.name for function in plain.functions]


def test_verify_checks_the_split() -> None:
    source, converted, rows = digits()
    checks = {check.name: check for check in verify(source, converted, [rows])}
    assert checks["logits/classes: portable = reference"].passed
    assert "64 rows" in checks["logits/classes: portable = reference"].detail
    assert all(check.passed for check in checks.values())


def test_verify_sees_a_wrong_split() -> None:
    """A body that takes the variance for the standard deviation."""
    source, converted, rows = digits()
    wrong = onnx.ModelProto()
    wrong.CopyFrom(converted)
    (function,) = (function for function in wrong.functions if function.name == CLASSES.name)
    *_, root = (node for node in function.node if node.op_type == "Sqrt")
    root.op_type = "Identity"
    checks = {check.name: check for check in verify(source, wrong, [rows])}
    assert not checks["logits/classes: portable = reference"].passed


@pytest.mark.parametrize("constant, value", [("pi_over_8", 0.4), ("below", 0.9)])
def test_verify_sees_wrong_probabilities(constant: str, value: float) -> None:
    source, converted, rows = digits()
    wrong = onnx.ModelProto()
    wrong.CopyFrom(converted)
    (function,) = (function for function in wrong.functions if function.name == CLASSES.name)
    (node,) = (node for node in function.node if node.output[0] == constant)
    node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(value)))
    checks = {check.name: check for check in verify(source, wrong, [rows])}
    assert not checks["logits/classes: portable = reference"].passed


def test_the_tolerance_of_verify_is_not_idle() -> None:
    """Room for rounding, here at some 30 times what is seen, and not for a change of a variance by 1%."""
    points, feeds = latin(10), draw((2000, 10))
    bound = split_tolerance(feeds["mean"], feeds["var"], points.values)
    wanted = expected(feeds, points)
    found = session(model_of(points.values)).run(None, feeds)
    found, wanted = found[1:4], wanted[1:4]
    error = np.abs(np.stack(found) - np.stack(wanted)).max(axis=0)
    assert (error <= bound).all() and np.max(error / bound) > 0.003
    other = expected({**feeds, "var": feeds["var"] * 1.01}, points)[1:4]
    assert np.mean(np.abs(np.stack(other) - np.stack(wanted)).max(axis=0) > bound) > 0.9
