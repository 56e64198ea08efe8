"""What the case table cannot say of spatial, selection and sequence operators: approximations and how
far they are off, sizes that are known at run time only, refusals, certain sequences."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from support.rule_checks import parse, propagate_inputs, run_with_variances, session, squared_jacobian_product


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def single(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def first_order_variance(model: onnx.ModelProto, feeds: dict, variances: dict) -> np.ndarray:
    """J² v of a model that is linear in its uncertain inputs, by long steps."""
    run = session(model).run
    return squared_jacobian_product(lambda fed: run(None, fed), feeds, variances, 1.0)[0]


# ------------------------------------------------------------------------- Resize


def test_upsample_before_opset_9_needs_known_sizes_unless_nearest(rng: np.random.Generator) -> None:
    text = 'm (float[1, 2, 3, SIZE] x) => (float[1, 2, 6, 10] y) { y = Upsample<mode="linear", scales=SCALES>(x) }'
    text = text.replace("SCALES", "[1.0, 1.0, 2.0, 2.5]")
    model = parse(text.replace("SIZE", "4"), 7)
    feeds = {"x": rng.normal(size=(1, 2, 3, 4)).astype(np.float32)}
    variances = {"x": rng.random((1, 2, 3, 4)).astype(np.float32)}
    found = run_with_variances(model, feeds, variances)
    np.testing.assert_allclose(found["y_var"], first_order_variance(model, feeds, variances), rtol=4e-5)
    (entry,) = propagate_inputs(parse(text.replace("SIZE", "w"), 7), ["x"]).refused
    assert "size of axis 3 must be known" in entry.reason


def test_axes_that_keep_their_size_cost_nothing() -> None:
    """Named sizes that stay equal, as exporters write them, are not multiplied by an identity matrix."""
    model = parse(
        "m (float[n, c, h, w] x) => (float[n, c, 8, 8] y) <int64[2] size = {8, 8}, int64[1] zero = {0},"
        "int64[1] two = {2}> { s = Shape(x) kept = Slice(s, zero, two) sizes = Concat<axis=0>(kept, size)"
        'y = Resize<mode="linear">(x, , , sizes) }'
    )
    nodes = [node.op for node in propagate_inputs(model, ["x"]).graph.nodes]
    assert nodes.count("Resize") == nodes.count("MatMul") == 2


# ------------------------------------------------------------ RoiAlign, DeformConv


def roi_align(samples: int, opset: int = 16) -> onnx.ModelProto:
    return parse(
        "m (float[1, 2, 16, 16] x, float[R, 4] rois, int64[R] batch) => (float[R, 2, 3, 3] y)"
        f"{{ y = RoiAlign<output_height=3, output_width=3, sampling_ratio={samples}>(x, rois, batch) }}",
        opset,
    )


ROIS = single(0.3, 1.2, 12.9, 14.5, 2, 2, 4, 5, -5, -5, 8, 30, 40, 40, 50, 50, 3, 3, 3, 3).reshape(5, 4)


@pytest.mark.parametrize("opset", [10, 16])
@pytest.mark.parametrize("samples", [0, 5])
def test_roi_align_with_many_samples(samples: int, opset: int, rng: np.random.Generator) -> None:
    """Exact where the variance is constant. Where it differs threefold from pixel to pixel, each bin is
    near the truth and the bins together are at it."""
    model = roi_align(samples, opset)
    feeds = {"x": np.zeros((1, 2, 16, 16), np.float32), "rois": ROIS, "batch": np.zeros(5, np.int64)}
    constant = {"x": np.full((1, 2, 16, 16), 0.7, np.float32)}
    found = run_with_variances(model, feeds, constant)["y_var"]
    np.testing.assert_allclose(found, first_order_variance(model, feeds, constant), rtol=1e-4, atol=1e-7)

    varied = {"x": rng.uniform(0.5, 1.5, (1, 2, 16, 16)).astype(np.float32)}
    found = run_with_variances(model, feeds, varied)["y_var"]
    true = first_order_variance(model, feeds, varied)
    inside = true > 1e-6
    ratio = found[inside] / true[inside]
    assert 0.75 < ratio.min() and ratio.max() < 1.3
    assert abs(np.log(ratio).mean()) < 0.02


@pytest.mark.parametrize("samples", [0, 2])
def test_roi_align_of_no_regions(samples: int) -> None:
    feeds = {"x": np.zeros((1, 2, 16, 16), np.float32), "rois": ROIS[:0], "batch": np.zeros(0, np.int64)}
    found = run_with_variances(roi_align(samples), feeds, {"x": np.ones((1, 2, 16, 16), np.float32)})
    assert found["y_var"].shape == (0, 2, 3, 3)


def test_deform_conv_where_kernel_elements_share_pixels(rng: np.random.Generator) -> None:
    """Their covariance is left out: of either sign, it averages out over weights of either sign."""
    x, v = rng.normal(size=(1, 4, 7, 7)), rng.uniform(0.5, 1.5, (1, 4, 7, 7))
    w, o = rng.normal(size=(8, 4, 3, 3)), rng.uniform(-1, 1, (1, 18, 5, 5))
    model = parse(
        "m (double[1, 4, 7, 7] x, double[8, 4, 3, 3] w, double[1, 18, 5, 5] o) => (double[1, 8, 5, 5] y)"
        "{ y = DeformConv(x, w, o) }",
        19,
    )
    feeds = {"x": x, "w": w, "o": o}
    found = run_with_variances(model, feeds, {"x": v})["y_var"]
    ratio = found / first_order_variance(model, feeds, {"x": v})
    assert abs(np.log(ratio).mean()) < 0.1
    assert 0.5 < ratio.min() and ratio.max() < 2


# ------------------------------------------------------------------------ selection


def test_scatter_of_a_maximum_shares_ties() -> None:
    model = parse(
        "m (float[3] x, float[3] u) => (float[3] y) <int64[3] i = {0, 0, 1}>"
        '{ y = ScatterElements<reduction="max">(x, i, u) }',
        18,
    )
    feeds = {"x": single(1, 5, 2), "u": single(1, 0, 3)}
    found = run_with_variances(model, feeds, {"x": single(2, 3, 4), "u": single(6, 7, 8)})
    np.testing.assert_allclose(found["y_var"], [(2 + 6) / 2, 3, 4])


def test_cast_like_carries_the_variance_in_its_type() -> None:
    model = parse(
        "m (double[2] x) => (float[2] y, int64[2] z) <float t = {0}, int64 k = {0}>"
        "{ y = CastLike(x, t) z = CastLike(x, k) }"
    )
    found = run_with_variances(model, {"x": np.array([1.0, 2.0])}, {"x": np.array([0.1, 1e6])})
    assert found["y_var"].dtype == np.float32 and "z_var" not in found
    np.testing.assert_allclose(found["y_var"], [0.1, 1e6], rtol=1e-7)


def test_one_hot_of_uncertain_places_is_certain() -> None:
    model = parse(
        "m (float[2] x) => (float[2, 3] y) <int64 d = {3}, float[2] v = {0, 1}> { y = OneHot(x, d, v) }"
    )
    result = propagate_inputs(model, ["x"])
    assert set(result.variances) == {"x"} and not result.refused


# ------------------------------------------------------------------------ sequences


def test_a_sequence_that_starts_empty() -> None:
    for dtype, number in ((np.float32, 1), (np.float64, 11)):
        name = {1: "float", 11: "double"}[number]
        model = parse(
            f"m ({name}[2] x, {name}[2] c) => ({name}[4] y, int64 n) {{ e = SequenceEmpty<dtype={number}>()"
            "s = SequenceInsert(e, x) t = SequenceInsert(s, c) y = ConcatFromSequence<axis=0>(t)"
            "n = SequenceLength(t) }"
        )
        found = run_with_variances(
            model, {"x": np.ones(2, dtype), "c": np.ones(2, dtype)}, {"x": np.ones(2, dtype)}
        )
        np.testing.assert_array_equal(found["y_var"], [1, 1, 0, 0])
        assert found["y_var"].dtype == dtype and found["n"] == 2 and "n_var" not in found


def test_half_floats_in_a_sequence_have_single_variances() -> None:
    model = parse(
        "m (float16[2] x, float16[1] c) => (float16[3] y)"
        "{ s = SequenceConstruct(x, c) y = ConcatFromSequence<axis=0>(s) }"
    )
    feeds = {"x": np.ones(2, np.float16), "c": np.ones(1, np.float16)}
    found = run_with_variances(model, feeds, {"x": single(1e6, 2)})
    assert found["y_var"].dtype == np.float32
    np.testing.assert_array_equal(found["y_var"], single(1e6, 2, 0))


def test_a_certain_sequence_from_outside_is_refused() -> None:
    model = parse(
        "m (float[2] x, seq(float[2]) s) => (float[n] y) { t = SequenceInsert(s, x) y = ConcatFromSequence<axis=0>(t) }"
    )
    (entry, *_) = propagate_inputs(model, ["x"]).refused
    assert entry.operator == "SequenceInsert" and "certain sequence" in entry.reason


# -------------------------------------------------------------------------- refusals

REFUSALS = [
    ("y = GridSample(x, g)", 16, ["g"], "grid is uncertain"),
    ("y = RoiAlign(x, r, b)", 16, ["r"], "regions are uncertain"),
    ('y = RoiAlign<mode="max">(x, r, b)', 16, ["x"], "mode=max"),
    ("y = MaxRoiPool<pooled_shape=[1, 1]>(x, r)", 16, ["x"], "which element"),
    (
        'y = Resize<mode="linear", keep_aspect_ratio_policy="not_larger">(x, , , n)',
        18,
        ["x"],
        "keep_aspect_ratio",
    ),
    ('y = Resize<mode="linear">(x, , s)', 18, ["s"], "uncertain"),
    ("y = DeformConv(x, x, x)", 19, ["x"], "offsets"),
    ('y = ScatterND<reduction="mul">(x, b, x)', 18, ["x"], "reduction=mul"),
    ("y = STFT(x, k, s)", 17, ["s"], "window is uncertain"),
    ("y = DFT(x, , b)", 20, ["x"], "axis is not constant"),
    ("y = DFT<axis=1>(long)", 17, ["long"], "10000 samples"),
    ("y = STFT(long, k, , count)", 17, ["long"], "9000 samples"),
    ("y = BitCast<to=6>(x)", 26, ["x"], "bits"),
]


@pytest.mark.parametrize("text, opset, uncertain, reason", REFUSALS, ids=[text for text, *_ in REFUSALS])
def test_refusals_tell_their_reason(text: str, opset: int, uncertain: list[str], reason: str) -> None:
    model = parse(
        "m (float[1, 1, 4, 4] x, float[1, 2, 2, 2] g, float[1, 4] r, int64[1] b, float[4] s, float[1, 10000, 1] long)"
        " => (float y) <int64[4] n = {1, 1, 2, 2}, int64 k = {1}, int64 count = {9000}>"
        f"{{ {text} }}",
        opset,
    )
    result = propagate_inputs(model, uncertain)
    assert [entry.operator for entry in result.refused] == [model.graph.node[0].op_type]
    assert reason in result.refused[0].reason


def test_operators_of_training_are_refused() -> None:
    node = helper.make_node(
        "Adam", ["r", "t", "x", "g", "v", "h"], ["y", "w", "k"], domain="ai.onnx.preview.training"
    )
    inputs = [helper.make_tensor_value_info(name, 1, [2]) for name in node.input]
    outputs = [helper.make_tensor_value_info("y", 1, [2])]
    model = helper.make_model(helper.make_graph([node], "m", inputs, outputs))
    (entry,) = propagate_inputs(model, ["x"]).refused
    assert "training" in entry.reason
