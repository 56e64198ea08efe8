"""Two small convolutional classifiers for 28 x 28 images, trained by torch, written as ONNX by hand.

    lenet    three convolutions of 16, 32, 64 channels, ReLU                          1.2 M multiply-adds
    resnet   a stem and three residual blocks of 16, 32, 64 channels with BatchNorm   2.6 M

Both pool their last map into `features` (n, 64), of which one linear layer makes the logits. BatchNorm is folded
into the convolution before it, as exporters do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from backbones import CACHE, images  # noqa: E402
from lines import say  # noqa: E402

WIDTHS = (16, 32, 64)
EPOCHS = {"lenet": 3, "resnet": 1}
BATCH, RATE = 128, 4e-3


def trained(network: str, data: str, folder: Path, *, quick: bool = False, cache: Path = CACHE) -> Path:
    """The ONNX file of a network for a data set, trained unless it is there already."""
    path = cache / f"{data}_{network}_{'quick' if quick else EPOCHS[network]}.onnx"
    if not path.exists():
        say(f"training {network} on {data}")
        rows = images(data, folder)
        most, epochs = (5000, 1) if quick else (len(rows["x_train"]), EPOCHS[network])
        cache.mkdir(parents=True, exist_ok=True)
        onnx.save(_train(network, rows["x_train"][:most], rows["y_train"][:most], epochs), path)
    return path


def _train(network: str, x: np.ndarray, y: np.ndarray, epochs: int) -> onnx.ModelProto:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = _lenet() if network == "lenet" else _resnet()
    images_, labels = torch.from_numpy(x).reshape(-1, 1, 28, 28), torch.from_numpy(y.astype(np.int64))
    optimiser = torch.optim.Adam(net.parameters())
    steps = epochs * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(images_[rows]), labels[rows]).backward()
            optimiser.step()
            schedule.step()
    return _as_onnx(net.eval())


def _lenet():
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, WIDTHS[0], 5, 2, 2),
        nn.ReLU(),
        nn.Conv2d(WIDTHS[0], WIDTHS[1], 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(WIDTHS[1], WIDTHS[2], 3, 1, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTHS[2], 10),
    )


def _resnet():
    from torch import nn

    def normed(before: int, after: int, size: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)]

    class Block(nn.Module):
        def __init__(self, before: int, after: int):
            super().__init__()
            stride = 1 if before == after else 2
            self.inner = nn.Sequential(
                *normed(before, after, 3, stride), nn.ReLU(), *normed(after, after, 3, 1)
            )
            self.short = nn.Sequential(*(normed(before, after, 1, stride) if stride > 1 else ()))

        def forward(self, x):
            return nn.functional.relu(self.inner(x) + self.short(x))

    blocks = [Block(a, b) for a, b in zip((WIDTHS[0], *WIDTHS), WIDTHS)]
    stem = [*normed(1, WIDTHS[0], 3, 2), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[2], 10))


# --------------------------------------------------------------------------- ONNX


class _Writer:
    """Nodes and weights of a chain of torch modules."""

    def __init__(self):
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def constant(self, name: str, values) -> str:
        array = np.ascontiguousarray(values.detach().numpy())
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def node(self, operator: str, inputs: list[str], name: str | None = None, **attributes) -> str:
        name = name or f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

    def chain(self, modules, last: str) -> str:
        modules = list(modules)
        for module, behind in zip(modules, [*modules[1:], None]):
            kind = type(module).__name__
            if kind == "Conv2d":
                last = self.conv(module, behind if type(behind).__name__ == "BatchNorm2d" else None, last)
            elif kind == "ReLU":
                last = self.node("Relu", [last])
            elif kind == "Block":
                short = self.chain(module.short, last)
                last = self.node("Relu", [self.node("Add", [self.chain(module.inner, last), short])])
            elif kind == "AdaptiveAvgPool2d":
                last = self.node("GlobalAveragePool", [last])
            elif kind == "Flatten":
                last = self.node("Flatten", [last], "features")
            elif kind == "Linear":
                weights = [self.constant("weight", module.weight.T), self.constant("bias", module.bias)]
                last = self.node("Gemm", [last, *weights], "logits")
        return last

    def conv(self, conv, norm, last: str) -> str:
        """With y = γ (Wx − μ)/√(σ² + ε) + β folded into weight and bias, where there is a norm."""
        weight, bias = conv.weight, conv.bias
        if norm is not None:
            factor = norm.weight / (norm.running_var + norm.eps).sqrt()
            weight, bias = weight * factor[:, None, None, None], norm.bias - norm.running_mean * factor
        name = f"conv{len(self.nodes)}"
        inputs = [last, self.constant(f"{name}/weight", weight), self.constant(f"{name}/bias", bias)]
        pads = [conv.padding[0]] * 4
        return self.node(
            "Conv",
            inputs,
            name,
            kernel_shape=list(conv.kernel_size),
            strides=list(conv.stride),
            pads=pads,
        )


def _as_onnx(net) -> onnx.ModelProto:
    writer = _Writer()
    writer.chain(net, "x")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        writer.nodes,
        "convnet",
        [value("x", onnx.TensorProto.FLOAT, ["batch", 1, 28, 28])],
        [value("logits", onnx.TensorProto.FLOAT, ["batch", 10])],
        writer.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
