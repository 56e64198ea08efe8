"""Networks that cost what real ones cost: their shapes, with random weights, as exporters write them.

    resnet20      3 x 32 x 32 pixels, 9 residual blocks of 16, 32, 64 channels with BatchNormalization;
                  `features` (n, 64) are pooled, a Gemm makes 10 logits of them          41 M multiply-adds
    unet          3 x 64 x 64 pixels, 4 levels of 32 … 256 channels, skips, ConvTranspose; `bottleneck`
                  (n, 256, 8, 8); 4 classes per pixel                                      0.42 G
    transformer   128 tokens, 6 blocks of width 256 with 4 heads, erf-Gelu, LayerNormalization in nine nodes;
                  `block6/attention` and `block6/out` (n, 128, 256); 10 logits of the mean token   0.65 G

Weights keep the scale of activations (He), so that distances at the sites are of ordinary size.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
CLASSES = 10
TOKENS, WIDTH, HEADS, BLOCKS, VOCABULARY = 128, 256, 4, 6, 1000
PIXELS = {"resnet20": (3, 32, 32), "unet": (3, 64, 64)}


def make(name: str) -> onnx.ModelProto:
    """One of the networks, the same at every call."""
    return {"resnet20": resnet20, "unet": unet, "transformer": transformer}[name]()


def rows(name: str, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of a network: noise that is smooth over pixels, or tokens."""
    generator = np.random.default_rng(seed)
    if name == "transformer":
        return {"tokens": generator.integers(0, VOCABULARY, (count, TOKENS))}
    channels, height, width = PIXELS[name]
    coarse = generator.standard_normal((count, channels, height // 8, width // 8)).astype(np.float32)
    return {"image": coarse.repeat(8, axis=2).repeat(8, axis=3)}


class _Writer:
    """Nodes and weights, with a name for each."""

    def __init__(self):
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._generator = np.random.default_rng(0)

    def weight(self, name: str, *shape: int, fan_in: int) -> str:
        """He-initialised."""
        values = self._generator.standard_normal(shape) * np.sqrt(2 / fan_in)
        return self.constant(name, values.astype(np.float32))

    def constant(self, name: str, values: np.ndarray) -> str:
        if name not in {tensor.name for tensor in self.weights}:
            self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, operator: str, inputs: list[str], name: str, **attributes) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

    def model(self, name: str, given: onnx.ValueInfoProto, answer: onnx.ValueInfoProto) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, [given], [answer], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


# ------------------------------------------------------------------- convolutions


def resnet20() -> onnx.ModelProto:
    """Conv, BatchNormalization, Relu; BatchNormalization is left to the runtime to fold."""
    out = _Writer()
    last = _relu(out, _normed_conv(out, "image", "stem", 3, 16))
    channels = 16
    for stage, width in enumerate((16, 32, 64), start=1):
        for block in range(1, 4):
            name, stride = f"stage{stage}/block{block}", 2 if block == 1 and stage > 1 else 1
            inner = _relu(out, _normed_conv(out, last, f"{name}/1", channels, width, stride=stride))
            inner = _normed_conv(out, inner, f"{name}/2", width, width)
            if channels != width:
                last = _normed_conv(out, last, f"{name}/short", channels, width, size=1, stride=stride)
            last = _relu(out, out.node("Add", [inner, last], f"{name}/sum"))
            channels = width
    pooled = out.node("GlobalAveragePool", [last], "pooled")
    features = out.node("Flatten", [pooled], "features")
    _gemm(out, features, "logits", channels, CLASSES)
    return out.model("resnet20", _float("image", *PIXELS["resnet20"]), _float("logits", CLASSES))


def unet() -> onnx.ModelProto:
    """Two convolutions per level, down by MaxPool, up by ConvTranspose, joined with what was there before."""
    out = _Writer()
    last, channels, skips = "image", 3, []
    for level, width in enumerate((32, 64, 128), start=1):
        last = _two_convs(out, last, f"down{level}", channels, width)
        skips.append((last, width))
        last, channels = (
            out.node("MaxPool", [last], f"pool{level}", kernel_shape=[2, 2], strides=[2, 2]),
            width,
        )
    last, channels = _two_convs(out, last, "bottleneck", channels, 256, last="bottleneck"), 256
    for level, (skip, width) in zip((3, 2, 1), reversed(skips)):
        weight = out.weight(f"up{level}/weight", channels, width, 2, 2, fan_in=channels)
        up = out.node("ConvTranspose", [last, weight], f"up{level}", kernel_shape=[2, 2], strides=[2, 2])
        joined = out.node("Concat", [skip, up], f"join{level}", axis=1)
        last, channels = _two_convs(out, joined, f"merge{level}", 2 * width, width), width
    _conv(out, last, "logits", channels, 4, size=1)
    return out.model("unet", _float("image", *PIXELS["unet"]), _float("logits", 4, *PIXELS["unet"][1:]))


def _two_convs(out: _Writer, x: str, name: str, channels: int, width: int, last: str | None = None) -> str:
    inner = _relu(out, _conv(out, x, f"{name}/1", channels, width))
    return _relu(out, _conv(out, inner, f"{name}/2", width, width), last)


def _conv(
    out: _Writer, x: str, name: str, channels: int, width: int, *, size: int = 3, stride: int = 1
) -> str:
    weight = out.weight(f"{name}/weight", width, channels, size, size, fan_in=channels * size**2)
    bias = out.constant(f"{name}/bias", np.zeros(width, np.float32))
    pads, strides = [size // 2] * 4, [stride] * 2
    return out.node("Conv", [x, weight, bias], name, kernel_shape=[size] * 2, pads=pads, strides=strides)


def _normed_conv(out: _Writer, x: str, name: str, channels: int, width: int, **options: int) -> str:
    conv = _conv(out, x, f"{name}/conv", channels, width, **options)
    one, zero = np.ones(width, np.float32), np.zeros(width, np.float32)
    parameters = {"scale": one, "shift": zero, "mean": zero, "var": one}
    constants = [out.constant(f"{name}/{key}", values) for key, values in parameters.items()]
    return out.node("BatchNormalization", [conv, *constants], name)


def _relu(out: _Writer, x: str, name: str | None = None) -> str:
    return out.node("Relu", [x], name or f"{x}/relu")


# -------------------------------------------------------------------- transformer


def transformer() -> onnx.ModelProto:
    """Post-norm blocks; heads by Reshape and Transpose, attention by MatMul and Softmax."""
    out = _Writer()
    table = out.weight("embedding", VOCABULARY, WIDTH, fan_in=2)
    places = out.weight("places", TOKENS, WIDTH, fan_in=2)
    last = out.node("Gather", [table, "tokens"], "embedded")
    last = _layer_norm(out, out.node("Add", [last, places], "placed"), "embedded/norm")
    for block in range(1, BLOCKS + 1):
        name = f"block{block}"
        attended = _attention(out, last, name)
        last = _layer_norm(out, out.node("Add", [attended, last], f"{name}/sum1"), f"{name}/norm1")
        inner = _gelu(out, _dense(out, last, f"{name}/up", WIDTH, 4 * WIDTH), f"{name}/gelu")
        inner = _dense(out, inner, f"{name}/down", 4 * WIDTH, WIDTH)
        last = _layer_norm(out, out.node("Add", [inner, last], f"{name}/sum2"), f"{name}/out")
    mean = out.node("ReduceMean", [last], "sentence", axes=[1], keepdims=0)
    _gemm(out, mean, "logits", WIDTH, CLASSES)
    tokens = helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", TOKENS])
    return out.model("transformer", tokens, _float("logits", CLASSES))


def _attention(out: _Writer, x: str, block: str) -> str:
    size = WIDTH // HEADS
    apart = out.constant("heads_apart", np.array([0, 0, HEADS, size], np.int64))
    together = out.constant("heads_together", np.array([0, 0, WIDTH], np.int64))
    orders = {"query": [0, 2, 1, 3], "key": [0, 2, 3, 1], "value": [0, 2, 1, 3]}
    parts = []
    for part, order in orders.items():
        name = f"{block}/{part}"
        dense = _dense(out, x, name, WIDTH, WIDTH)
        split = out.node("Reshape", [dense, apart], f"{name}/heads")
        parts.append(out.node("Transpose", [split], f"{name}/turned", perm=order))
    query, key, value = parts
    products = out.node("MatMul", [query, key], f"{block}/products")
    root = out.constant("root_of_size", np.float32(np.sqrt(size)))
    scaled = out.node("Div", [products, root], f"{block}/scaled")
    weights = out.node("Softmax", [scaled], f"{block}/weights", axis=-1)
    mixed = out.node("MatMul", [weights, value], f"{block}/mixed")
    turned = out.node("Transpose", [mixed], f"{block}/mixed/turned", perm=[0, 2, 1, 3])
    joined = out.node("Reshape", [turned, together], f"{block}/mixed/joined")
    return _dense(out, joined, f"{block}/attention", WIDTH, WIDTH)


def _layer_norm(out: _Writer, x: str, name: str) -> str:
    two, small = out.constant("two", np.float32(2)), out.constant("small", np.float32(1e-5))
    scale = out.constant(f"{name}/scale", np.ones(WIDTH, np.float32))
    shift = out.constant(f"{name}/shift", np.zeros(WIDTH, np.float32))
    mean = out.node("ReduceMean", [x], f"{name}/mean", axes=[-1])
    centred = out.node("Sub", [x, mean], f"{name}/centred")
    square = out.node("Pow", [centred, two], f"{name}/square")
    var = out.node("ReduceMean", [square], f"{name}/mean_square", axes=[-1])
    root = out.node("Sqrt", [out.node("Add", [var, small], f"{name}/positive")], f"{name}/root")
    unit = out.node("Div", [centred, root], f"{name}/unit")
    return out.node("Add", [out.node("Mul", [unit, scale], f"{name}/scaled"), shift], name)


def _gelu(out: _Writer, x: str, name: str) -> str:
    root, one, half = (
        out.constant(key, np.float32(value))
        for key, value in {"root_of_two": np.sqrt(2), "one": 1, "half": 0.5}.items()
    )
    erf = out.node("Erf", [out.node("Div", [x, root], f"{name}/divided")], f"{name}/erf")
    raised = out.node("Add", [erf, one], f"{name}/raised")
    return out.node("Mul", [out.node("Mul", [x, raised], f"{name}/product"), half], name)


def _dense(out: _Writer, x: str, name: str, width_in: int, width_out: int) -> str:
    weight = out.weight(f"{name}/weight", width_in, width_out, fan_in=2 * width_in)
    bias = out.constant(f"{name}/bias", np.zeros(width_out, np.float32))
    return out.node("Add", [out.node("MatMul", [x, weight], f"{name}/product"), bias], name)


def _gemm(out: _Writer, x: str, name: str, width_in: int, width_out: int) -> str:
    weight = out.weight(f"{name}/weight", width_in, width_out, fan_in=width_in)
    bias = out.constant(f"{name}/bias", np.zeros(width_out, np.float32))
    return out.node("Gemm", [x, weight, bias], name)


def _float(name: str, *shape: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])
