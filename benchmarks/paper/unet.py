"""A small U-Net whose bottleneck is a vector of 64 numbers: trained in torch, written to ONNX by hand.

    image (n, 1, 48, 48) ─ down1 (8 channels) ─ down2 (16, 24 x 24) ─ down3 (32, 12 x 12)
        ─ averages of 4 x 4 ─ Gemm ─ embedding (n, 64) ─ Gemm ─ (16, 6 x 6) ─ up3 (16, 12 x 12)
        ─ up2, joined with down2 ─ merge2 (16) ─ up1, joined with down1 ─ merge1 (8) ─ logits (4)

Every level has 3 x 3 convolutions with BatchNormalization and Relu, one at full resolution and two below; `down1`
… `merge1` are what leaves it.
As in the paper the decoder sees the deepest level through the embedding only, and the others by skips.
"""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from scenes import CLASSES, SIZE, Scenes
from torch import nn

EMBEDDING, SEED_MAP = 64, (16, 6, 6)
WIDTHS = (8, 16, 32)
DROPOUT = 0.1
BATCH = 16
NORM = ("weight", "bias", "running_mean", "running_var")  #: as ONNX orders them


class UNet(nn.Module):
    """The network; dropout behind the embedding and behind each level of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        one, two, three = WIDTHS
        self.down1, self.down2, self.down3 = _level(1, one), _level(one, two, two), _level(two, three, three)
        self.embedding = nn.Linear(three * 9, EMBEDDING)
        self.expand = nn.Linear(EMBEDDING, int(np.prod(SEED_MAP)))
        self.up3 = nn.ConvTranspose2d(SEED_MAP[0], two, 2, 2)
        self.up2 = nn.ConvTranspose2d(two, two, 2, 2)
        self.merge2 = _level(2 * two, two, two)
        self.up1 = nn.ConvTranspose2d(two, one, 2, 2)
        self.merge1 = _level(2 * one, one)
        self.logits = nn.Conv2d(one, len(CLASSES), 1)
        self.forget, self.forget_channels = nn.Dropout(DROPOUT), nn.Dropout2d(DROPOUT)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        down1 = self.down1(image)
        down2 = self.down2(nn.functional.max_pool2d(down1, 2))
        down3 = self.down3(nn.functional.max_pool2d(down2, 2))
        embedding = self.embedding(nn.functional.avg_pool2d(down3, 4).flatten(1))
        seed = self.expand(self.forget(embedding)).relu().reshape(-1, *SEED_MAP)
        up3 = self.up3(seed).relu()
        merge2 = self.forget_channels(self.merge2(torch.cat([down2, self.up2(up3)], 1)))
        merge1 = self.forget_channels(self.merge1(torch.cat([down1, self.up1(merge2)], 1)))
        return self.logits(merge1)


def _level(*widths: int) -> nn.Sequential:
    """Convolutions from each width to the next."""
    parts = []
    for channels, width in zip(widths, widths[1:]):
        parts += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*parts)


def train(scenes: Scenes, epochs: int, seed: int) -> UNet:
    """Adam on the cross-entropy of all pixels, its rate rising to 0.01 and falling to zero again."""
    torch.manual_seed(seed)
    net = UNet().train().to(memory_format=torch.channels_last)  # half the time of the other layout
    images, labels = torch.from_numpy(scenes.images), torch.from_numpy(scenes.labels).long()
    optimiser = torch.optim.Adam(net.parameters())
    steps = epochs * -(-len(scenes) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(scenes)).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimiser.step()
            schedule.step()
    return net.eval()


def sampled_probs(net: UNet, images: np.ndarray, draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """MC dropout: the mean of the probabilities (n, c, h, w) and of their entropies (n, h, w)."""
    torch.manual_seed(seed)
    for dropout in (net.forget, net.forget_channels):  # the statistics of BatchNorm stay as they are
        dropout.train()
    probs, entropy = [], []
    with torch.no_grad():
        for rows in torch.from_numpy(images).split(BATCH):
            drawn = [net(rows).log_softmax(1) for _ in range(draws)]
            probs.append(sum(one.exp() for one in drawn) / draws)
            entropy.append(sum(-(one.exp() * one).sum(1) for one in drawn) / draws)
    net.eval()
    return torch.cat(probs).numpy(), torch.cat(entropy).numpy()


def as_onnx(net: UNet) -> onnx.ModelProto:
    """The same network as exporters write it, without dropout."""
    nodes = []
    values = {name: np.ascontiguousarray(value.numpy()) for name, value in net.state_dict().items()}
    weights = [
        numpy_helper.from_array(v, n) for n, v in values.items() if not n.endswith("num_batches_tracked")
    ]
    weights.append(numpy_helper.from_array(np.array([-1, *SEED_MAP], np.int64), "seed_shape"))

    def add(operator: str, inputs: list[str], name: str, **attributes) -> str:
        nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

    def layer(operator: str, x: str, module: str, name: str, **attributes) -> str:
        return add(operator, [x, f"{module}.weight", f"{module}.bias"], name, **attributes)

    def level(x: str, name: str) -> str:
        convolutions = len(getattr(net, name)) // 3
        for number in range(convolutions):
            out = name if number == convolutions - 1 else f"{name}/inner"
            conv, norm = f"{name}.{3 * number}", f"{name}.{3 * number + 1}"
            x = layer("Conv", x, conv, f"{out}/conv", kernel_shape=[3, 3], pads=[1] * 4)
            x = add("BatchNormalization", [x, *(f"{norm}.{part}" for part in NORM)], f"{out}/norm")
            x = add("Relu", [x], out)
        return x

    def pool(operator: str, x: str, size: int) -> str:
        return add(operator, [x], f"{x}/pooled", kernel_shape=[size] * 2, strides=[size] * 2)

    def up(x: str, name: str) -> str:
        return layer("ConvTranspose", x, name, name, kernel_shape=[2, 2], strides=[2, 2])

    down1 = level("image", "down1")
    down2 = level(pool("MaxPool", down1, 2), "down2")
    down3 = level(pool("MaxPool", down2, 2), "down3")
    flat = add("Flatten", [pool("AveragePool", down3, 4)], "averages")
    embedding = layer("Gemm", flat, "embedding", "embedding", transB=1)
    seed = add("Relu", [layer("Gemm", embedding, "expand", "expand", transB=1)], "expanded")
    up3 = add("Relu", [up(add("Reshape", [seed, "seed_shape"], "seed"), "up3")], "up3/relu")
    merge2 = level(add("Concat", [down2, up(up3, "up2")], "join2", axis=1), "merge2")
    merge1 = level(add("Concat", [down1, up(merge2, "up1")], "join1", axis=1), "merge1")
    layer("Conv", merge1, "logits", "logits", kernel_shape=[1, 1])

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "unet",
        [value("image", TensorProto.FLOAT, ["batch", 1, SIZE, SIZE])],
        [value("logits", TensorProto.FLOAT, ["batch", len(CLASSES), SIZE, SIZE])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
