"""A small overconfident classifier, rows with their true classes, and files that were converted with these."""

from __future__ import annotations

import numpy as np
import onnx

import gapa_onnx
from gapa_onnx.compiler import convert
from support.small_models import parse

SMALL = {"m": 60, "k": 10}
CLASSES = 5


def net(opset: int = 17, classes: str = "5") -> onnx.ModelProto:
    return parse(
        f"net (float[n, 3] x) => (float[n, {classes}] y) {{ z = MatMul(x, a)  h = Tanh(z)  y = MatMul(h, b) }}",
        opset,
        a=np.random.default_rng(0).normal(size=(3, 12)),
        b=2 * np.random.default_rng(1).normal(size=(12, CLASSES)),
    )


def rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and classes that are drawn with half the logits: the network is overconfident."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 3)).astype(np.float32)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in net().graph.initializer}
    logits = np.tanh(x @ weights["a"]) @ weights["b"] / 2 + generator.gumbel(size=(count, CLASSES))
    return x, logits.argmax(axis=1)


def converted(count: int = 500, **choices) -> onnx.ModelProto:
    more, labels = rows(count, 2)
    given = {"task": "classification", **SMALL, **choices}
    found = convert(net(), {"x": rows(300, 1)[0]}, labels=labels, held_out={"x": more}, **given)
    assert all(check.passed for check in found.checks)
    return found.model


def run(model: onnx.ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
    session = gapa_onnx.session(model.SerializeToString())
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x})))
