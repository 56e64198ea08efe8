"""The axis of features decides what is strange: a small SqueezeNet ending, on colours that its data do not have.

A fire module joins two expanded maps along the channels, and the last layer is a convolution, so that a query is the
channels at one position. Read along the last axis, a query is one channel's row of pixels: it sees patterns and no
colours. Weights are random, of three networks: what is shown is what the site sees, not what training adds.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.small_models import parse

import gapa_onnx
from gapa_onnx.compiler import convert
from gapa_onnx.model.load import load
from gapa_onnx.plan.placement import find_sites
from gapa_onnx.variance.sites import Layout

SIZE = 12
ENDING = f"""net (float[n, 3, {SIZE}, {SIZE}] x) => (float[n, 4, 1, 1] y) {{
    stem = Conv<strides = [2, 2]>(x, w0, b0)  s = Relu(stem)
    squeezed = Conv(s, w1, b1)  q = Relu(squeezed)
    one = Conv(q, w2, b2)  e1 = Relu(one)
    three = Conv<pads = [1, 1, 1, 1]>(q, w3, b3)  e3 = Relu(three)
    fire = Concat<axis = 1>(e1, e3)  dropped = Dropout(fire)
    last = Conv(dropped, w4, b4)  r = Relu(last)  pooled = GlobalAveragePool(r)  y = Softmax<axis = 1>(pooled) }}"""
SHAPES = ((24, 3, 3, 3), (12, 24, 1, 1), (16, 12, 1, 1), (16, 12, 3, 3), (4, 32, 1, 1))
KNOWN = np.array([(1, 0.2, 0.2), (0.2, 1, 0.2), (1, 1, 0.2)])  # red, green, yellow
STRANGE = np.array([(0.2, 0.2, 1), (0.2, 1, 1), (1, 0.2, 1)])  # blue, cyan, magenta


def squeezenet_ending(seed: int) -> onnx.ModelProto:
    generator = np.random.default_rng(seed)
    weights = {}
    for number, shape in enumerate(SHAPES):
        weights[f"w{number}"] = generator.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        weights[f"b{number}"] = 0.1 * generator.normal(size=shape[0])
    return parse(ENDING, **weights)


def waves(rows: int, colours: np.ndarray, seed: int) -> np.ndarray:
    """Images of one wave in one colour, nearly."""
    generator = np.random.default_rng(seed)
    angle, frequency, phase = (
        generator.uniform(low, high, (rows, 1, 1)) for low, high in ((0, np.pi), (0.3, 0.6), (0, 2 * np.pi))
    )
    down, right = np.mgrid[:SIZE, :SIZE]
    wave = np.sin(frequency * (np.cos(angle) * right + np.sin(angle) * down) + phase)
    colour = colours[generator.integers(0, len(colours), rows)] + 0.05 * generator.normal(size=(rows, 3))
    return ((wave[:, None] + 1.5) / 2 * colour[:, :, None, None]).astype(np.float32)


def found_by(model: onnx.ModelProto, sites: str) -> float:
    """AUROC of the score between new images in known colours and such in strange ones."""
    conversion = convert(model, {"x": waves(200, KNOWN, 1)}, sites=sites, m=200, k=10)
    assert all(check.passed for check in conversion.checks)
    session = gapa_onnx.session(conversion.model.SerializeToString())
    known, strange = (
        session.run(["y_score"], {"x": waves(200, colours, seed)})[0]
        for colours, seed in ((KNOWN, 2), (STRANGE, 3))
    )
    return float((strange[:, None] > known).mean())


@pytest.fixture(scope="module")
def models() -> list[onnx.ModelProto]:
    return [squeezenet_ending(seed) for seed in range(3)]


def test_the_joined_maps_are_read_along_their_channels(models):
    (site,) = find_sites(load(models[0]), "auto")
    assert (site.output, site.layout, site.axis) == ("dropped", Layout.POSITIONS, 1)


def test_strange_colours_are_found_along_the_channels_and_not_along_rows_of_pixels(models):
    by_channels = [found_by(model, "auto") for model in models]
    by_rows = [found_by(model, "fire:rows") for model in models]
    assert min(by_channels) >= 0.9  # measured: 1.000, .992 and 1.000
    assert np.mean(by_rows) < 0.8  # measured: .58, .62 and .74
