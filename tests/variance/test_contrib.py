"""onnxruntime's fused attention against the formulas, its refusals, and models that it optimised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from support.attention_reference import (
    FULL,
    SINGLE,
    attend,
    causal,
    check,
    draw,
    fused,
    heads,
    joined,
    variances,
)
from support.paths import ROOT
from support.rule_checks import parse, propagate_inputs, run_with_variances
from support.small_models import transformer_block

import gapa_onnx
from gapa_onnx.model.load import load
from gapa_onnx.variance.rules import TABLE, Deterministic, Options, Refusal

MODES = pytest.mark.parametrize("options", [Options(), FULL], ids=["values", "full"])

# ----------------------------------------------------------------------------- com.microsoft


def bias_of(mask: np.ndarray) -> np.ndarray:
    return np.where(mask > 0, 0.0, -10000.0)


PACKED = {  # mask, what it adds to the scores (batch, 1, queries, keys), further attributes
    "no mask": (None, 0.0, {}),
    "causal": (None, causal(3, 3), {"unidirectional": 1}),
    "lengths": (np.array([2, 3], np.int32), bias_of(np.array([[1, 1, 0], [1, 1, 1]]))[:, None, None], {}),
    "range": (np.array([3, 2, 1, 0], np.int32), bias_of(np.array([[0, 1, 1], [1, 1, 0]]))[:, None, None], {}),
    "rows": (
        np.array([[1, 0, 1], [0, 1, 1]], np.int32), bias_of(np.array([[1, 0, 1], [0, 1, 1]]))[:, None, None],
        {"scale": 0.8},
    ),
    "causal rows": (
        np.array([[1, 0, 1], [1, 1, 1]], np.int32),
        bias_of(np.array([[1, 0, 1], [1, 1, 1]]))[:, None, None] + causal(3, 3),
        {"unidirectional": 1},
    ),
}  # fmt: skip


@MODES
@pytest.mark.parametrize("form", PACKED)
def test_packed_attention(form: str, options: Options) -> None:
    mask, bias, attrs = PACKED[form]
    x, w, b = draw(2, 3, 6), 0.5 * draw(6, 24, seed=1), draw(24, seed=2)
    inputs = {"x": x, "w": w, "b": b} | ({} if mask is None else {"m": mask})
    model, feeds = fused("Attention", inputs, num_heads=2, **attrs)
    own = {"x": variances(2, 3, 6)}
    parts = [heads(part, 2) for part in (*np.split(x @ w + b, 3, -1), *np.split(own["x"] @ w**2, 3, -1))]
    mean, var, _, _ = attend(*parts, scale=attrs.get("scale", 0.5), bias=bias, full=options is FULL)
    check(model, feeds, own, {"y0": joined(mean), "y0_var": joined(var)}, options, SINGLE)


@MODES
def test_packed_attention_with_a_past(options: Options) -> None:
    x, w, b, past = draw(1, 2, 6), 0.5 * draw(6, 24, seed=1), draw(24, seed=2), draw(2, 1, 2, 3, 4, seed=3)
    inputs = {"x": x, "w": w, "b": b, "p": past}
    model, feeds = fused(
        "Attention", inputs, 2, num_heads=2, unidirectional=1, order=["x", "w", "b", "", "p"]
    )  # fmt: skip
    own = {"x": variances(1, 2, 6), "p": variances(2, 1, 2, 3, 4)}
    q, k, v, var_q, var_k, var_v = (
        heads(part, 2) for part in (*np.split(x @ w + b, 3, -1), *np.split(own["x"] @ w**2, 3, -1))
    )
    k, v = (np.concatenate([past[i], new], axis=2) for i, new in ((0, k), (1, v)))
    var_k, var_v = (np.concatenate([own["p"][i], new], axis=2) for i, new in ((0, var_k), (1, var_v)))
    mean, var, _, _ = attend(
        q, k, v, var_q, var_k, var_v, scale=0.5, bias=causal(2, 5, offset=3), full=options is FULL
    )
    wanted = {
        "y0": joined(mean),
        "y0_var": joined(var),
        "y1": np.stack([k, v]),
        "y1_var": np.stack([var_k, var_v]),
    }
    check(model, feeds, own, wanted, options, SINGLE)


@MODES
def test_multi_head_attention_with_biases_masks_and_a_past(options: Options) -> None:
    tensors = {"q": draw(2, 2, 8), "k": draw(2, 2, 8, seed=1), "v": draw(2, 2, 8, seed=2)}
    past = {"pk": draw(2, 2, 3, 4, seed=4), "pv": draw(2, 2, 3, 4, seed=5)}
    bias, added = draw(24, seed=6), draw(1, 2, 2, 5, seed=7)
    mask = np.array([[1, 0, 1, 1, 1], [1, 1, 0, 1, 1]], np.int32)
    own = {name: variances(*array.shape) for name, array in (tensors | past).items()}
    model, feeds = fused(
        "MultiHeadAttention", tensors | {"b": bias, "m": mask, "a": added} | past, 3, num_heads=2, scale=0.4,
        order=["q", "k", "v", "b", "m", "a", "pk", "pv"],
    )  # fmt: skip
    q, k, v = (heads(x + b, 2) for x, b in zip(tensors.values(), np.split(bias, 3)))
    k, v = np.concatenate([past["pk"], k], axis=2), np.concatenate([past["pv"], v], axis=2)
    var_q, var_k, var_v = (heads(own[n], 2) for n in "qkv")
    var_k, var_v = np.concatenate([own["pk"], var_k], axis=2), np.concatenate([own["pv"], var_v], axis=2)
    mean, var, _, _ = attend(
        q,
        k,
        v,
        var_q,
        var_k,
        var_v,
        scale=0.4,
        bias=added + bias_of(mask)[:, None, None],
        full=options is FULL,
    )
    wanted = {"y0": joined(mean), "y0_var": joined(var), "y1_var": var_k, "y2_var": var_v}
    check(model, feeds, own, wanted, options, SINGLE)


GROUPED = {
    "plain": {},
    "window": {"local_window_size": 2},
    "capped": {"softcap": 0.6},
    "sink": {"smooth_softmax": 1},
    "turned": {"do_rotary": 1},
    "turned from a position": {"do_rotary": 1, "start": 2},
}


@MODES
@pytest.mark.parametrize("form", GROUPED)
def test_grouped_query_attention_of_one_packed_tensor(form: str, options: Options) -> None:
    """4 heads of queries on 2 of keys and values, 16 features each, all in one tensor."""
    attrs = dict(GROUPED[form])
    start = attrs.pop("start", None)
    x, angle = draw(1, 3, 8 * 16), draw(6, 8, seed=1)
    inputs = {"x": x, "n": np.array([2], np.int32), "t": np.array(3, np.int32)}
    order = ["x", "", "", "", "", "n", "t"]
    if "do_rotary" in attrs:
        inputs |= {"c": np.cos(angle), "s": np.sin(angle)}
        order += ["c", "s"]
    if start is not None:
        inputs["p"] = np.array([[start, start + 1, start + 2]], np.int64)
        order += ["p"]
    model, feeds = fused("GroupQueryAttention", inputs, 3, num_heads=4, kv_num_heads=2, order=order, **attrs)
    own = {"x": variances(*x.shape)}
    cuts = (slice(0, 4), slice(4, 6), slice(6, 8))
    q, k, v, var_q, var_k, var_v = (heads(array, 8)[:, cut] for array in (x, own["x"]) for cut in cuts)
    if "do_rotary" in attrs:
        rows = angle[(start or 0) : (start or 0) + 3]
        c, s = np.cos(rows), np.sin(rows)
        q, k = (
            np.concatenate([c * z[..., :8] - s * z[..., 8:], s * z[..., :8] + c * z[..., 8:]], -1)
            for z in (q, k)
        )
        var_q, var_k = (
            np.concatenate([c**2 * z[..., :8] + s**2 * z[..., 8:], s**2 * z[..., :8] + c**2 * z[..., 8:]], -1)
            for z in (var_q, var_k)
        )
    bias = causal(3, 3)
    if "local_window_size" in attrs:
        bias = bias + np.where(np.arange(3) > np.arange(3)[:, None] - 2, 0.0, -np.inf)
    k4, v4, var_k4, var_v4 = (np.repeat(z, 2, axis=1) for z in (k, v, var_k, var_v))
    if "smooth_softmax" in attrs:  # a key of score 0 and value 0
        k4, v4, var_k4, var_v4 = (
            np.pad(z, [(0, 0), (0, 0), (0, 1), (0, 0)]) for z in (k4, v4, var_k4, var_v4)
        )
        bias = np.pad(bias, [(0, 0), (0, 1)])
    mean, var, _, _ = attend(
        q, k4, v4, var_q, var_k4, var_v4, scale=0.25, bias=bias, softcap=attrs.get("softcap", 0.0),
        full=options is FULL,
    )  # fmt: skip
    wanted = {"y0": joined(mean), "y0_var": joined(var), "y1": k, "y1_var": var_k, "y2_var": var_v}
    check(model, feeds, own, wanted, options, SINGLE)


def test_a_cache_longer_than_its_sequence() -> None:
    """One token each for two sequences of 3 and 2 tokens in buffers of 5: rows beyond are certain."""
    inputs = {
        "q": draw(2, 1, 32), "k": draw(2, 1, 16, seed=1), "v": draw(2, 1, 16, seed=2),
        "pk": draw(2, 2, 5, 8, seed=3), "pv": draw(2, 2, 5, 8, seed=4),
        "n": np.array([2, 1], np.int32), "t": np.array(3, np.int32),
    }  # fmt: skip
    model, feeds = fused("GroupQueryAttention", inputs, 3, num_heads=4, kv_num_heads=2)
    own = {"v": variances(2, 1, 16), "pv": variances(2, 2, 5, 8)}
    q, k, v, var_v = (
        heads(x, h) for x, h in ((inputs["q"], 4), (inputs["k"], 2), (inputs["v"], 2), (own["v"], 2))
    )
    found = run_with_variances(model, feeds, {n: x.astype(np.float32) for n, x in own.items()})
    for i, length in enumerate((3, 2)):
        keys = np.concatenate([inputs["pk"][i : i + 1, :, : length - 1], k[i : i + 1]], axis=2).repeat(
            2, axis=1
        )
        values = np.concatenate([inputs["pv"][i : i + 1, :, : length - 1], v[i : i + 1]], axis=2).repeat(
            2, axis=1
        )
        var = np.concatenate([own["pv"][i : i + 1, :, : length - 1], var_v[i : i + 1]], axis=2)
        zero = np.zeros_like(keys)
        mean, wanted, _, _ = attend(
            q[i : i + 1], keys, values, 0 * q[i : i + 1], zero, var.repeat(2, axis=1), scale=8**-0.5
        )
        np.testing.assert_allclose(found["y0"][i : i + 1], joined(mean), rtol=SINGLE, atol=SINGLE)
        np.testing.assert_allclose(found["y0_var"][i : i + 1], joined(wanted), rtol=SINGLE)
        np.testing.assert_allclose(found["y2_var"][i : i + 1, :, :length], var, rtol=1e-6)
        assert np.all(found["y2_var"][i, :, length:] == 0)


def test_first_run_of_sequences_of_different_length() -> None:
    """Padded on the right: the shorter one starts at position 0 too. What is padding is not looked at."""
    x, angle = draw(2, 3, 8 * 16), draw(6, 8, seed=1)
    inputs = {"x": x, "n": np.array([2, 1], np.int32), "t": np.array(3, np.int32)}
    inputs |= {"c": np.cos(angle), "s": np.sin(angle)}
    order = ["x", "", "", "", "", "n", "t", "c", "s"]
    model, feeds = fused(
        "GroupQueryAttention", inputs, 3, num_heads=4, kv_num_heads=2, order=order, do_rotary=1
    )
    alone = {name: array[1:, :2] if name == "x" else array for name, array in inputs.items()}
    alone |= {"n": np.array([1], np.int32), "t": np.array(2, np.int32)}
    short, short_feeds = fused(
        "GroupQueryAttention", alone, 3, num_heads=4, kv_num_heads=2, order=order, do_rotary=1
    )
    own = variances(*x.shape).astype(np.float32)
    for options in (Options(), FULL):
        both = run_with_variances(model, feeds, {"x": own}, options)
        one = run_with_variances(short, short_feeds, {"x": own[1:, :2]}, options)
        for name in ("y0", "y0_var"):
            np.testing.assert_allclose(both[name][1:, :2], one[name], rtol=SINGLE)


# ---------------------------------------------------------------------------------- refusals

REFUSALS = [
    ("Attention<num_heads=2, do_rotary=1>(x, w, b)", "do_rotary"),
    ("Attention<num_heads=2, past_present_share_buffer=1>(x, w, b)", "shared buffer"),
    ("Attention<num_heads=2>(c, x, b)", "weights are uncertain"),
    ("MultiHeadAttention<num_heads=2>(x, c, c, , , , , , n)", "shared buffer"),
    ("GroupQueryAttention<num_heads=2, kv_num_heads=2, sliding_window_cache=1>(x, c, c, , , n, n)", "forgets"),
    ("GroupQueryAttention<num_heads=2, kv_num_heads=2>(x, c, c, , , n, n, , , , , , w)", "quantised"),
    ("RotaryEmbedding<scale=2.0>(x, n, c, c)", "scale is not 1"),
    ("FusedGemm<activation=\"Sign\">(x, w)", "'Sign' is not known"),
    ("BiasDropout(x, c, c, c, n)", "training_mode"),
    ("PackedAttention<num_heads=2>(x, w, b, n, n)", "padded"),
    ("MoE<k=1>(x, w, w)", "experts"),
    ("BeamSearch(x)", "search over sequences"),
]  # fmt: skip


@pytest.mark.parametrize("call, reason", REFUSALS, ids=[call for call, _ in REFUSALS])
def test_refusals_tell_their_reason(call: str, reason: str) -> None:
    model = parse(
        "m (float[1, 2, 8] x, float[1, 2, 8] c, float[8, 24] w, float[24] b, int32[1] n) => (float[1, 2, 8] y)"
        f"{{ y = com.microsoft.{call} }}"
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    (entry,) = propagate_inputs(model, ["x"]).refused
    assert reason in entry.reason


def test_models_for_one_machine_are_refused_by_that_name() -> None:
    model = parse(
        "m (float[1, 8, 2, 2] x) => (float[1, 8, 2, 2] y) { y = com.microsoft.nchwc.MaxPool<kernel_shape=[1,1]>(x) }"
    )
    (entry,) = propagate_inputs(model, ["x"]).refused
    assert "one machine" in entry.reason


def test_discrete_operators_of_onnxruntime_drop_the_variance() -> None:
    entries = {
        op
        for (domain, op), entry in TABLE.items()
        if domain == "com.microsoft" and isinstance(entry, Deterministic)
    }
    assert {"IsAllFinite", "MurmurHash3", "Range"} <= entries
    model = parse("m (float[2] x) => (uint32[2] y) { y = com.microsoft.MurmurHash3(x) }")
    result = propagate_inputs(model, ["x"])
    assert set(result.variances) == {"x"} and not result.refused


def test_every_refusal_has_a_reason_that_is_not_its_absence() -> None:
    reasons = [
        e.reason
        for (domain, _), e in TABLE.items()
        if domain.startswith("com.microsoft") and isinstance(e, Refusal)
    ]
    assert reasons and all(reason and "no rule" not in reason for reason in reasons)


# --------------------------------------------------------------- models that onnxruntime optimised


def optimised(model: onnx.ModelProto, tmp_path: Path) -> onnx.ModelProto:
    """The model as onnxruntime saves it after its extended optimisations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


@MODES
def test_a_fused_transformer_has_the_variances_of_what_it_was_fused_from(
    tmp_path: Path, options: Options
) -> None:
    plain = transformer_block()
    fused_model = optimised(plain, tmp_path)
    kinds = {node.op_type for node in fused_model.graph.node if node.domain == "com.microsoft"}
    assert kinds == {"FusedMatMul", "SkipLayerNormalization", "BiasGelu"}
    feeds, own = (
        {"x": draw(2, 3, 16).astype(np.float32)},
        {"x": 0.01 * variances(2, 3, 16).astype(np.float32)},
    )
    one, other = (run_with_variances(model, feeds, own, options) for model in (plain, fused_model))
    for name in ("y", "y_var"):  # two layers of normalisation and the sums in another order
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-6)


def test_a_fused_transformer_converts(tmp_path: Path) -> None:
    x = draw(64, 3, 16).astype(np.float32)
    answers = []
    for attention in ("values", "full"):
        out = tmp_path / f"{attention}.onnx"
        fused_model = optimised(transformer_block(), tmp_path)
        converted = gapa_onnx.convert(
            fused_model, {"x": x[:48]}, out, m=32, k=8, sites="x:rows", attention=attention
        )
        assert all(check.passed for check in converted.checks), converted.checks
        answers.append(gapa_onnx.session(out).run(["y", "y_var"], {"x": x[48:]}))
    (mean, values), (same, full) = answers
    np.testing.assert_array_equal(mean, same)
    assert np.all(values > 0) and np.median(full / values) > 1


@pytest.mark.parametrize("sites", ["auto", "all"])
def test_an_optimised_network_of_convolutions_converts(tmp_path: Path, sites: str) -> None:
    model = onnx.load(ROOT / "models" / "digits_cnn.onnx")
    fused_model = optimised(model, tmp_path)
    kinds = {node.op_type for node in fused_model.graph.node if node.domain == "com.microsoft"}
    assert kinds == {"FusedConv", "FusedGemm"}
    calib = str(ROOT / "models" / "digits_cnn_calibration.npz")
    converted = gapa_onnx.convert(fused_model, calib, m=64, k=16, sites=sites)
    assert all(check.passed for check in converted.checks)


def test_types_and_shapes_behind_fused_operators_are_known() -> None:
    """ONNX's inference stops at them; GlobalMaxPool's rule needs the rank, float16 the type."""
    model = parse(
        "m (float16[n, 2, 4] x, float16[4] b) => (float16[n, 2, 1] y)"
        "{ g = com.microsoft.FastGelu(x, b) t = Neg(g) y = GlobalMaxPool(t) }"
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    tensors = load(model).graph.tensors()
    for name in ("g", "t"):
        assert tensors[name].dtype == np.float16 and list(tensors[name].shape) == ["n", 2, 4]
    assert not propagate_inputs(model, ["x"]).refused


def test_a_model_that_onnxruntime_lacks_operators_for_still_loads() -> None:
    model = parse("m (float[2] x) => (float[2] y) { g = com.example.Unknown(x) y = Neg(g) }")
    assert load(model).graph.tensors()["g"].dtype is None
