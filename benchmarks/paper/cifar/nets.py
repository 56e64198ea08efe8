"""The CIFAR ResNets of He et al. (2016) as ONNX files, straight from their weights.

    x (n, 3, 32, 32) → Conv, Relu → three stages of blocks → GlobalAveragePool → Flatten → Gemm → logits (n, c)

BatchNormalization is folded into the Conv before it, as exporters do for inference:
W' = W γ/√(σ² + ε), b' = β − μ γ/√(σ² + ε). Where a stage halves the image, the shortcut takes every second row and
column and pads the channels with zeros on both sides (option A): Slice and Pad.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.transformers.float16 import convert_float_to_float16

EPSILON = 1e-5
FEATURES = "features"  #: what the last layer reads, (n, 64)
#: Published accuracy on the 10,000 test images of the shared weights, by the number of layers.
ACCURACY = {20: 0.9173, 32: 0.9263, 44: 0.9310, 56: 0.9339}

Weights = Mapping[str, np.ndarray]


def resnet(weights: Weights) -> onnx.ModelProto:
    """The network of these weights; its depth and its classes are theirs."""
    graph = _Graph(weights)
    last = graph.relu(graph.convolution("x", "conv1", "bn1", stride=1))
    for stage in (1, 2, 3):
        for block in range(_blocks(weights, stage)):
            last = graph.block(last, f"layer{stage}.{block}")
    pooled = graph.node("GlobalAveragePool", [last])
    graph.node("Flatten", [pooled], FEATURES)
    last_layer = [graph.constant("linear.weight"), graph.constant("linear.bias")]
    graph.node("Gemm", [FEATURES, *last_layer], "logits", transB=1)
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        graph.nodes,
        "resnet",
        [value("x", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [value("logits", TensorProto.FLOAT, ["batch", len(weights["linear.bias"])])],
        list(graph.constants.values()),
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def with_features(model: onnx.ModelProto, name: str = FEATURES) -> onnx.ModelProto:
    """The same network with one of its tensors as a second output, whose type onnxruntime finds."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    model.graph.output.append(onnx.ValueInfoProto(name=name))
    return model


def half_precision(model: onnx.ModelProto) -> onnx.ModelProto:
    """The network in float16, its input and output still float32."""
    return convert_float_to_float16(onnx.ModelProto.FromString(model.SerializeToString()), keep_io_types=True)


def eight_bits(source: Path, target: Path, images: np.ndarray) -> None:
    """The network in int8 between QuantizeLinear and DequantizeLinear, ranges from these images."""
    quantize_static(
        source,
        target,
        _Images(images),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )


class _Images(CalibrationDataReader):
    def __init__(self, images: np.ndarray, batch: int = 100) -> None:
        self._feeds: Iterator[dict[str, np.ndarray]] = (
            {"x": images[start : start + batch]} for start in range(0, len(images), batch)
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def _blocks(weights: Weights, stage: int) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith(f"layer{stage}.")})


class _Graph:
    """Nodes and constants as they are added."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def node(self, kind: str, inputs: list[str], output: str = "", **attributes: object) -> str:
        output = output or f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], output, **attributes))
        return output

    def constant(self, name: str, value: np.ndarray | None = None) -> str:
        if name not in self.constants:
            array = self.weights[name] if value is None else value
            self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def relu(self, name: str) -> str:
        return self.node("Relu", [name])

    def convolution(self, data: str, conv: str, norm: str, stride: int) -> str:
        weight, scale, bias, mean, var = (
            self.weights[name].astype(np.float64)
            for name in (
                f"{conv}.weight",
                *(f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")),
            )
        )
        slope = scale / np.sqrt(var + EPSILON)
        folded = self.constant(f"{conv}.weight", (weight * slope[:, None, None, None]).astype(np.float32))
        offset = self.constant(f"{conv}.bias", (bias - mean * slope).astype(np.float32))
        choices = {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [stride] * 2}
        return self.node("Conv", [data, folded, offset], **choices)

    def block(self, data: str, name: str) -> str:
        width, inside = self.weights[f"{name}.conv1.weight"].shape[:2]
        stride = 1 if width == inside else 2
        first = self.relu(self.convolution(data, f"{name}.conv1", f"{name}.bn1", stride))
        second = self.convolution(first, f"{name}.conv2", f"{name}.bn2", 1)
        shortcut = data if stride == 1 else self.narrowed(data, (width - inside) // 2)
        return self.relu(self.node("Add", [second, shortcut]))

    def narrowed(self, data: str, channels: int) -> str:
        """Every second row and column; zeros for the channels that are missing, half of them on either side."""
        starts = self.constant("starts", np.array([0, 0]))
        ends = self.constant("ends", np.array([2**31 - 1] * 2))
        axes, steps = self.constant("axes", np.array([2, 3])), self.constant("steps", np.array([2, 2]))
        half = self.node("Slice", [data, starts, ends, axes, steps])
        pads = self.constant(f"pads{channels}", np.array([0, channels, 0, 0, 0, channels, 0, 0]))
        return self.node("Pad", [half, pads])
