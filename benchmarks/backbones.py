"""Networks that the benchmarks convert: trained here, in numpy, and kept beside the results.

The classifier is the one of the paper's MNIST experiments: 784 → 200 → 200 → 10 with tanh, Adam 1e-3,
dropout 0.1 while training, pixels / 255, 55,000 rows. Training takes about half a minute.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import onnx

HERE = Path(__file__).parent
CACHE = HERE / "cache"
DATA = Path(os.environ.get("GAPA_ONNX_DATA", HERE.parent.parent / "shared" / "data"))
TRAINING_ROWS = 55_000


def images(name: str, folder: Path = DATA) -> dict[str, np.ndarray]:
    """mnist or fashion_mnist: x_train, y_train, x_valid, y_valid, x_test, y_test; pixels in 0 … 1, (n, 784)."""
    path = folder / f"{name}.npz"
    if not path.exists():
        sys.exit(f"{path} is not here: give the folder of mnist.npz and fashion_mnist.npz with --data")
    with np.load(path) as file:
        arrays = {key: file[key] for key in ("x_train", "y_train", "x_test", "y_test")}
    for key in ("x_train", "x_test"):
        arrays[key] = arrays[key].reshape(len(arrays[key]), -1).astype(np.float32) / np.float32(255)
    for key in "xy":
        rows = arrays[f"{key}_train"]
        arrays[f"{key}_train"], arrays[f"{key}_valid"] = rows[:TRAINING_ROWS], rows[TRAINING_ROWS:]
    return arrays


def classifier(name: str, seed: int = 0, folder: Path = DATA, epochs: int = 12) -> Path:
    """The ONNX file of the classifier for a data set, trained unless it is there already."""
    path = CACHE / f"{name}_mlp_{epochs}_{seed}.onnx"
    if not path.exists():
        print(f"training the {name} classifier, seed {seed}", file=sys.stderr)
        data = images(name, folder)
        weights = train_classifier(data["x_train"], data["y_train"], seed=seed, epochs=epochs)
        CACHE.mkdir(exist_ok=True)
        onnx.save(as_onnx(weights), path)
    return path


def train_classifier(
    x: np.ndarray,
    y: np.ndarray,
    widths: tuple[int, ...] = (200, 200),
    *,
    epochs: int = 12,
    batch: int = 256,
    rate: float = 1e-3,
    dropout: float = 0.1,
    seed: int = 0,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights (in, out) and biases of a tanh network, by Adam on the cross-entropy."""
    generator = np.random.default_rng(seed)
    sizes = (x.shape[1], *widths, int(y.max()) + 1)
    layers = [
        [
            generator.uniform(-1, 1, (a, b)).astype(np.float32) / np.float32(np.sqrt(a)),
            generator.uniform(-1, 1, b).astype(np.float32) / np.float32(np.sqrt(a)),
        ]
        for a, b in zip(sizes, sizes[1:])
    ]
    moments = [[np.zeros((2, *p.shape), np.float32) for p in layer] for layer in layers]
    step = 0
    for _ in range(epochs):
        order = generator.permutation(len(x))
        for start in range(0, len(x), batch):
            rows = order[start : start + batch]
            step += 1
            for layer, moment, slopes in zip(
                layers, moments, _slopes(layers, x[rows], y[rows], dropout, generator)
            ):
                for parameter, (first, second), slope in zip(layer, moment, slopes):
                    first += np.float32(0.1) * (slope - first)
                    second += np.float32(0.001) * (slope * slope - second)
                    size = rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
                    parameter -= np.float32(size) * first / (np.sqrt(second) + np.float32(1e-8))
    return [tuple(layer) for layer in layers]


def _slopes(layers, x: np.ndarray, y: np.ndarray, dropout: float, generator: np.random.Generator):
    """Gradients of the mean cross-entropy, layer by layer."""
    inputs, kept = [x], []
    for weight, bias in layers[:-1]:
        mask = (generator.random((len(x), len(bias)), np.float32) >= dropout) / np.float32(1 - dropout)
        kept.append((np.tanh(inputs[-1] @ weight + bias), mask))
        inputs.append(kept[-1][0] * mask)
    logits = inputs[-1] @ layers[-1][0] + layers[-1][1]
    error = np.exp(logits - logits.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    slopes = []
    for position in reversed(range(len(layers))):
        slopes.append((inputs[position].T @ error, error.sum(axis=0)))
        if position:
            hidden, mask = kept[position - 1]
            error = (error @ layers[position][0].T) * mask * (1 - hidden * hidden)
    return slopes[::-1]


def as_onnx(weights: list[tuple[np.ndarray, np.ndarray]], output: str = "logits") -> onnx.ModelProto:
    """x (n, d) through Gemm and Tanh to the output, (n, classes) for logits."""
    nodes, constants, last = [], [], "x"
    for number, (weight, bias) in enumerate(weights, start=1):
        constants += [
            onnx.numpy_helper.from_array(np.ascontiguousarray(weight), f"weight{number}"),
            onnx.numpy_helper.from_array(bias, f"bias{number}"),
        ]
        out = output if number == len(weights) else f"z{number}"
        nodes.append(onnx.helper.make_node("Gemm", [last, f"weight{number}", f"bias{number}"], [out], out))
        if number < len(weights):
            last = f"h{number}"
            nodes.append(onnx.helper.make_node("Tanh", [out], [last], last))
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "mlp",
        [value("x", onnx.TensorProto.FLOAT, ["batch", weights[0][0].shape[0]])],
        [value(output, onnx.TensorProto.FLOAT, ["batch", weights[-1][0].shape[1]])],
        constants,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
