"""An input that is no number is flagged, whatever layers make of it; unless calibration rows held such values there."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

import gapa_onnx

RNG = np.random.default_rng(5)


def made(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> net {text}')
    for name, shape in weights.items():
        array = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def saturating(last: str = "n") -> onnx.ModelProto:
    """Behind the sigmoid an infinity is 0 or 1, and the site behind it sees nothing odd."""
    return made(
        f"(float[n, 3] x) => (float[{last}, 2] y) {{ a = MatMul(x, u)  s = Sigmoid(a)  b = MatMul(s, v)  h = Tanh(b)"
        "  y = MatMul(h, w) }",
        u=(3, 6), v=(6, 6), w=(6, 2),
    )  # fmt: skip


def flags(converted: onnx.ModelProto, feed: dict[str, np.ndarray], output: str = "y") -> np.ndarray:
    return ort.InferenceSession(converted.SerializeToString()).run([f"{output}_ood"], feed)[0]


def rows(count: int = 200) -> np.ndarray:
    return RNG.standard_normal((count, 3)).astype(np.float32)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("last", ["n", "m"])  # what the output calls its rows: as the input, or not
def test_a_row_that_is_no_number_is_flagged_and_no_other(value, last):
    data = rows()
    converted = gapa_onnx.convert(saturating(last), {"x": data}, m=20, k=5, sites="last").model
    x = data[:20].copy()
    before = flags(converted, {"x": x})
    at = int(np.flatnonzero(~before)[3])  # one that is ordinary
    x[at, 1] = value
    after = flags(converted, {"x": x})
    assert after[at]
    assert (np.delete(after, at) == np.delete(before, at)).all()
    assert flags(converted, {"x": x[:1]}).shape == (1,)


def test_what_calibration_rows_held_is_ordinary():
    """A missing value that the model has a place for."""
    model = made(
        "(float[n, 3] x) => (float[n, 2] y) { odd = IsNaN(x)  z = Where(odd, zero, x)  a = MatMul(z, u)  h = Tanh(a)"
        "  y = MatMul(h, w) }",
        u=(3, 6), w=(6, 2),
    )  # fmt: skip
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0), "zero"))
    x = rows()
    x[::4, 0] = np.nan
    held = gapa_onnx.convert(model, {"x": x}, m=20, k=5).model
    never = gapa_onnx.convert(model, {"x": np.nan_to_num(x)}, m=20, k=5).model
    missing = np.array([[np.nan, 0.0, 0.0]], np.float32)
    assert not flags(held, {"x": missing})[0]
    assert flags(never, {"x": missing})[0]


def test_inputs_that_an_output_is_not_made_of_do_not_flag_it():
    model = made(
        "(float[n, 3] x, float[n, 3] other) => (float[n, 2] y, float[n, 2] q) { a = MatMul(x, u)  h = Tanh(a)"
        "  y = MatMul(h, w)  b = MatMul(other, u)  g = Tanh(b)  q = MatMul(g, w) }",
        u=(3, 6), w=(6, 2),
    )  # fmt: skip
    converted = gapa_onnx.convert(model, {"x": rows(), "other": rows()}, m=20, k=5).model
    feed = {"x": np.zeros((2, 3), np.float32), "other": np.array([[0, 0, 0], [0, np.inf, 0]], np.float32)}
    assert not flags(converted, feed).any()
    assert flags(converted, feed, "q").tolist() == [False, True]


def test_all_positions_of_a_map_are_flagged():
    model = made(
        "(float[n, 1, 4, 4] x) => (float[n, 3, 4, 4] y) { a = Conv(x, k)  s = Sigmoid(a)  y = Conv(s, w) }",
        k=(4, 1, 1, 1), w=(3, 4, 1, 1),
    )  # fmt: skip
    images = RNG.standard_normal((60, 1, 4, 4)).astype(np.float32)
    converted = gapa_onnx.convert(model, {"x": images}, m=20, k=5, task="segmentation").model
    feed = np.zeros((2, 1, 4, 4), np.float32)
    feed[1, 0, 2, 2] = np.inf
    found = flags(converted, {"x": feed})
    assert found.shape == (2, 4, 4) and found[1].all() and not found[0].all()
