"""Small models from ONNX text that several tests convert."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper


def parse(text: str, opset: int = 17, ir: int = 8, **weights: np.ndarray) -> onnx.ModelProto:
    """A model from ONNX text, with its weights."""
    model = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]>\n' + text)
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array, np.float32), name))
    return model


NOISY_NET = """<ir_version: 8, opset_import: ["": %d]>
net (float[n, 2] x) => (float[n, 1] y) { z = MatMul(x, w1)  h = Tanh(z)  y = MatMul(h, w2) }"""


def noisy_net(opset: int = 17) -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    model = onnx.parser.parse_model(NOISY_NET % opset)
    for name, shape in (("w1", (2, 16)), ("w2", (16, 1))):
        array = generator.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def noise_std(x: np.ndarray) -> np.ndarray:
    """Of the targets, by input: between 1 and 3."""
    return 1 + 2 / (1 + np.exp(-3 * x[:, :1]))


def noisy_data(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.uniform(-1.5, 1.5, size=(rows, 2)).astype(np.float32)
    w = {t.name: onnx.numpy_helper.to_array(t) for t in noisy_net().graph.initializer}
    y = np.tanh(x @ w["w1"]) @ w["w2"]
    return x, y + noise_std(x) * generator.normal(size=(rows, 1))


def transformer_block(width: int = 16, count: int = 2) -> onnx.ModelProto:
    """Self-attention and a Gelu network, each with a residual and LayerNormalization, as PyTorch exports it."""
    rng = np.random.default_rng(0)
    size = width // count
    weights = {f"w{n}": rng.normal(size=(width, width)) / width**0.5 for n in "qkvo"}
    weights |= {f"b{n}": 0.1 * rng.normal(size=width) for n in "qkvo"}
    weights |= {"w1": rng.normal(size=(width, 32)) / 4, "b1": 0.1 * rng.normal(size=32)}
    weights |= {"w2": rng.normal(size=(32, width)) / 6, "b2": 0.1 * rng.normal(size=width)}
    weights |= {"g": rng.uniform(0.5, 1.5, width), "h": 0.1 * rng.normal(size=width)}
    weights |= {
        "root": np.array(size**0.5),
        "two": np.array(2**0.5),
        "one": np.array(1.0),
        "half": np.array(0.5),
    }
    initializers = [numpy_helper.from_array(np.asarray(a, np.float32), n) for n, a in weights.items()]
    initializers += [
        numpy_helper.from_array(np.array([0, 0, count, size], np.int64), "split"),
        numpy_helper.from_array(np.array([0, 0, width], np.int64), "join"),
    ]
    projections = "".join(
        f"{n}m = MatMul(x, w{n}) {n}b = Add(b{n}, {n}m) {n}r = Reshape({n}b, split) {n} = Transpose<perm={perm}>({n}r)"
        for n, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
    )
    body = (
        f"{projections} qk = MatMul(q, k) e = Div(qk, root) a = Softmax<axis=-1>(e) av = MatMul(a, v)"
        "t = Transpose<perm=[0,2,1,3]>(av) j = Reshape(t, join) om = MatMul(j, wo) o = Add(bo, om)"
        "r = Add(x, o) n = LayerNormalization<epsilon=0.00001>(r, g, h)"
        "f = MatMul(n, w1) fb = Add(f, b1) d = Div(fb, two) er = Erf(d) er1 = Add(er, one) m = Mul(fb, er1)"
        "gelu = Mul(m, half) p = MatMul(gelu, w2) pb = Add(p, b2) s = Add(n, pb)"
        "y = LayerNormalization<epsilon=0.00001>(s, g, h)"
    )
    text = f"block (float[batch, 3, {width}] x) => (float[batch, 3, {width}] y) {{ {body} }}"
    model = parse(text)
    model.graph.initializer.extend(initializers)
    return model
