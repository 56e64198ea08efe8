"""Coverage: what varies with the data and has no variance is found, named and measured, and honest zeros are not."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnx
import pytest
from onnx import helper
from support.small_models import parse

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.measure.coverage import NAME, Coverage, Part, find_uncovered, varying
from gapa_onnx.measure.verify import verify
from gapa_onnx.record import read

RNG = np.random.default_rng(0)
ROWS = {"x": np.random.default_rng(1).normal(size=(80, 4)).astype(np.float32)}
SMALL = {"m": 30, "k": 6, "task": "none"}

WEIGHTS = {"a": (4, 6), "b": (6, 3), "c": (4, 5)}

# Two branches, of which a site at h reaches one: 5 of 8 elements stay without variance.
TWO_BRANCHES = """net (float[n, 4] x) => (float[n, 8] y) {
    z = MatMul(x, a)  h = Tanh(z)  first = MatMul(h, b)  second = MatMul(x, c)  y = Concat<axis=1>(first, second) }"""
ANOTHER_OUTPUT = """net (float[n, 4] x) => (float[n, 3] y, float[n, 5] u) {
    z = MatMul(x, a)  h = Tanh(z)  y = MatMul(h, b)  u = MatMul(x, c) }"""


def model(text: str) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape) for name, shape in WEIGHTS.items()}
    return parse(text, **{name: w for name, w in weights.items() if f" {name})" in text})


def check_of(conversion: gapa_onnx.Conversion) -> Coverage:
    (check,) = (check for check in conversion.checks if isinstance(check, Coverage))
    assert check.name == NAME
    return check


def converted(text: str, **choices) -> gapa_onnx.Conversion:
    return gapa_onnx.convert(model(text), ROWS, **{**SMALL, **choices})


# --------------------------------------------------------------------- arrays


def test_an_element_counts_if_it_varies_and_its_variance_is_0_in_every_row():
    mean = RNG.normal(size=(10, 4)).astype(np.float32)
    mean[:, 3] = 7  # the same in every row
    var = np.ones_like(mean)
    var[:, 1] = var[:, 3] = 0
    var[1:, 2] = 0  # but for one row, as behind a Relu
    assert find_uncovered(mean, var).tolist() == [False, True, False, False]
    assert find_uncovered(mean, None).tolist() == [True, True, True, False]
    assert find_uncovered(mean, None, np.array([True, False, True, True])).tolist() == [
        True,
        False,
        True,
        False,
    ]


def test_what_does_not_vary():
    assert not varying(RNG.normal(size=(1, 5)).astype(np.float32)).any()  # one row
    rounding = np.float32([[1.0], [np.nextafter(np.float32(1), 2)]])
    assert not varying(rounding).any()
    assert varying(np.float32([[1.0], [1.001]])).all()
    # A variance of it, 1e-60, is no number of single precision; of double precision it is.
    assert not varying(np.float32([[1e-30], [2e-30]])).any()
    assert varying(np.array([[1e-30], [2e-30]])).all()


STEEP = """net (float[n, 4] x) => (float[n, 40] y) {
    z = MatMul(x, a)  h = Tanh(z)  l = MatMul(h, w)  o = Add(l, one)  s = Mul(o, factor)  y = Sigmoid(s) }"""


@pytest.mark.parametrize(
    "factor, task, passes", [(1e7, "auto", True), (1e7, "none", False), (1.0, "none", True)]
)
def test_probabilities_that_are_0_or_1_in_every_row_are_not_counted(factor, task, passes):
    """They vary with data and weights, and between 0 and 1 the slope of the sigmoid is no number in any row. Nothing
    is forgiven where the output is not known to hold probabilities."""
    rng = np.random.default_rng(0)
    weights = {"a": rng.normal(size=(4, 6)), "w": rng.normal(size=(6, 40)), "one": [1.0], "factor": [factor]}
    check = check_of(gapa_onnx.convert(parse(STEEP, **weights), ROWS, **{**SMALL, "task": task}))
    assert check.passed == passes, check.detail


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_no_error_bar(strange):
    mean = RNG.normal(size=(6, 2)).astype(np.float32)
    mean[2, 0] = strange
    assert varying(mean).tolist() == [False, True]


@pytest.mark.parametrize(
    "shape, where, rows_axis, class_axis, text",
    [
        ((22,), np.s_[4:], 0, 1, "classes 4..21 of 22 on axis 1 (81.8%)"),
        ((22, 100), np.s_[4:], 0, None, "elements 4..21 of 22 on axis 1 (81.8%)"),
        ((100, 22), np.s_[:, 4:], 0, 2, "classes 4..21 of 22 on axis 2 (81.8%)"),
        ((2, 5), np.s_[1], 1, None, "elements 1 of 2 on axis 0 (50%)"),  # rows in between
        ((4, 5), np.s_[0], None, None, "elements 0 of 4 on axis 0 (25%)"),  # no rows
        ((4, 5), np.s_[1, :2], 0, None, "elements 1 of 4 on axis 1, in part (10%)"),
        ((12,), np.s_[::2], 0, None, "elements 0, 2, 4, 6, … of 12 on axis 1 (50%)"),
        ((3, 4), np.s_[:], 0, None, "all of it"),
    ],
)
def test_words_for_a_part(shape, where, rows_axis, class_axis, text):
    mask = np.zeros(shape, bool)
    mask[where] = True
    assert Part(mask, np.ones(shape, bool), rows_axis).text(class_axis) == text


def test_words_where_not_all_varies():
    mask = np.array([False, True, True, False])
    assert Part(mask, mask, 0).text() == "all that varies of it (50%)"


# ----------------------------------------------------------------- conversions


def test_a_covered_model_passes():
    conversion = converted(TWO_BRANCHES, sites="x:rows")
    check = check_of(conversion)
    assert check.passed and check.uncovered == {} and "over 64 rows" in check.detail
    record = read(conversion.model)
    assert record.uncovered == () and record.heads["y"].uncovered is None


def test_a_part_without_variance_fails_and_is_named(tmp_path):
    conversion = converted(TWO_BRANCHES, sites="h", out=tmp_path / "out.onnx")
    check = check_of(conversion)
    assert not check.passed and [c for c in conversion.checks if not c.passed] == [check]
    assert check.uncovered == {"y": "elements 3..7 of 8 on axis 1 (62.5%)"}
    assert "y: elements 3..7 of 8" in check.detail and "`allow_uncovered`" in check.detail
    assert conversion.path is None and not (tmp_path / "out.onnx").exists()


def test_an_allowed_part_is_in_the_record(tmp_path):
    path = tmp_path / "out.onnx"
    conversion = converted(TWO_BRANCHES, sites="h", out=path, allow_uncovered=True)
    assert all(check.passed for check in conversion.checks) and conversion.path == path
    written = onnx.load(path)
    assert read(written).heads["y"].uncovered == "elements 3..7 of 8 on axis 1 (62.5%)"
    for allowed in (False, True):
        checks = verify(model(TWO_BRANCHES), written, [ROWS], allow_uncovered=allowed)
        assert [check.name for check in checks if not check.passed] == ([] if allowed else [NAME])


def test_an_output_without_variance(tmp_path):
    check = check_of(converted(ANOTHER_OUTPUT, sites="h"))
    assert not check.passed and check.uncovered == {"u": "all of it"}
    allowed = converted(ANOTHER_OUTPUT, sites="h", allow_uncovered=True)
    record = read(allowed.model)
    assert record.uncovered == ("u",) and record.heads["y"].uncovered is None


@pytest.mark.parametrize(
    "end",
    [
        "p = MatMul(h, b)  y = Relu(p)",
        "p = MatMul(h, b)  y = HardSigmoid<alpha=5.0>(p)",  # flat in most rows
        "p = MatMul(h, b)  s = Softmax<axis=-1>(p)  hundred = Constant<value_float=60.0>()  q = Mul(s, hundred)"
        "  y = Softmax<axis=-1>(q)",  # down to 1e-26
        "p = MatMul(h, b)  zero = Constant<value_float=0.0>()  y = Max(p, zero)",
    ],
)
def test_honest_zeros(end):
    """Where a slope is 0 the variance is, and nothing is missing."""
    text = f"net (float[n, 4] x) => (float[n, 3] y) {{ z = MatMul(x, a)  h = Tanh(z)  {end} }}"
    assert check_of(converted(text)).passed


def test_an_input_that_is_passed_on_is_certain():
    """Half of y and all of u are the input itself; no weight has a part in them."""
    text = """net (float[n, 4] x) => (float[n, 7] y, float[n, 4] u) {
        z = MatMul(x, a)  h = Tanh(z)  p = MatMul(h, b)  y = Concat<axis=1>(p, x)  u = Identity(x) }"""
    check = check_of(converted(text, sites="h"))
    assert check.passed and check.uncovered == {}


@pytest.mark.parametrize("spelling", ["initializer", "constant", "int8"])
def test_weights_are_found_however_they_are_kept(spelling):
    source = model(ANOTHER_OUTPUT)
    (at,) = (i for i, tensor in enumerate(source.graph.initializer) if tensor.name == "c")
    weight = onnx.numpy_helper.to_array(source.graph.initializer[at])
    if spelling != "initializer":
        del source.graph.initializer[at]
    if spelling == "constant":
        tensor = onnx.numpy_helper.from_array(weight, "c")
        source.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=tensor))
    if spelling == "int8":
        codes = np.round(weight / 0.05).clip(-127, 127).astype(np.int8)
        source.graph.initializer.append(onnx.numpy_helper.from_array(codes, "codes"))
        source.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.05), "step"))
        source.graph.node.insert(0, helper.make_node("DequantizeLinear", ["codes", "step"], ["c"]))
    check = check_of(gapa_onnx.convert(source, ROWS, sites="h", **SMALL))
    assert check.uncovered == {"u": "all of it"}


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_cut_is_told_and_passes(beside):
    """`cut` asks for it; what is uncovered for another reason still fails."""
    text = """net (float[n, 4] x) => (float[n, 3] y, float[n, 2, 2] u%s) {
        z = MatMul(x, a)  h = Tanh(z)  y = MatMul(h, b)  sizes = Constant<value_ints=[-1, 2, 2]>()
        k = MatMul(h, d)  square = Reshape(k, sizes)  u = com.microsoft.Inverse(square)  %s }"""
    source = model(text % ((", float[n, 5] w", "w = MatMul(x, c)") if beside else ("", "")))
    source.opset_import.add(domain="com.microsoft", version=1)
    source.graph.initializer.append(
        onnx.numpy_helper.from_array(RNG.normal(size=(6, 4)).astype(np.float32), "d")
    )
    conversion = gapa_onnx.convert(source, ROWS, sites="h", on_unsupported="cut", **SMALL)
    check = check_of(conversion)
    assert set(check.uncovered) == ({"u", "w"} if beside else {"u"})
    assert (
        check.passed != beside
        and "u: all of it (cut)" in check.detail
        and "w: all of it (cut)" not in check.detail
    )
    assert "u" in read(conversion.model).uncovered


def test_one_row_cannot_be_judged():
    source = parse(
        "net (float[1, 4] x) => (float[1, 3] y) { z = MatMul(x, a)  h = Tanh(z)  y = MatMul(h, b) }",
        **{name: np.random.default_rng(0).normal(size=WEIGHTS[name]) for name in "ab"},
    )
    rows = [{"x": row[None]} for row in ROWS["x"]]
    conversion = gapa_onnx.convert(source, rows, **SMALL)
    assert "over 4 rows" in check_of(conversion).detail  # of so many batches
    checks = verify(source, conversion.model, rows[:1])
    (check,) = (check for check in checks if isinstance(check, Coverage))
    assert check.passed and "nothing could be judged" in check.detail


def test_rows_on_another_axis():
    """A recurrent state has its rows in the middle."""
    text = """net (float[n, 4] x) => (float[2, n, 3] y) {
        z = MatMul(x, a)  h = Tanh(z)  p = MatMul(h, b)  axes = Constant<value_ints=[0]>()  q = Unsqueeze(p, axes)
        r = MatMul(x, d)  s = Unsqueeze(r, axes)  y = Concat<axis=0>(q, s) }"""
    source = model(text)
    source.graph.initializer.append(
        onnx.numpy_helper.from_array(RNG.normal(size=(4, 3)).astype(np.float32), "d")
    )
    conversion = gapa_onnx.convert(source, ROWS, sites="h", **SMALL)
    assert check_of(conversion).uncovered == {"y": "elements 1 of 2 on axis 0 (50%)"}


# ---------------------------------------------------------------- command line


def test_the_command_line(tmp_path, capsys):
    source, data, out = (tmp_path / name for name in ("model.onnx", "x.npz", "out.onnx"))
    onnx.save(model(ANOTHER_OUTPUT), source)
    np.savez(data, **ROWS)
    asked = ["convert", source, "--calib", data, "-o", out, "--sites", "h", "--m", "30", "--k", "6"]
    asked = [*map(str, asked)]
    assert main(asked) == 1 and not out.exists()
    assert "--allow-uncovered lets it pass" in " ".join(capsys.readouterr().out.split())
    assert main([*asked, "--allow-uncovered"]) == 0 and out.exists()
    assert "u: all of it varies with the data and has no variance" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["inspect", str(out)]) == 0
    assert "u: all of it varies with the data and has no variance" in " ".join(
        capsys.readouterr().out.split()
    )
    verified = ["verify", str(source), str(out), "--data", str(data), "--json"]
    assert main(verified) == 1
    answer = json.loads(capsys.readouterr().out)
    (check,) = (check for check in answer["checks"] if check["name"] == NAME)
    assert not check["passed"] and check["uncovered"] == {"u": "all of it"}
    assert main([*verified, "--allow-uncovered"]) == 0


def test_a_score_only_head_is_not_judged():
    """Its head says that no variance passes; the check is about variances that are missing."""
    conversion = converted(ANOTHER_OUTPUT, sites="x:rows")
    record = read(conversion.model)
    roles = {role: name for role, name in record.heads["u"].outputs.items() if role != "var"}
    heads = {**record.heads, "u": dataclasses.replace(record.heads["u"], outputs=roles)}
    from gapa_onnx.measure.agreement import run
    from gapa_onnx.measure.coverage import coverage

    answers = run(conversion.model, [ROWS], level="none")
    found = coverage(model(ANOTHER_OUTPUT), dataclasses.replace(record, heads=heads), [ROWS], answers)
    assert found.passed and found.detail == "y over 80 rows"
