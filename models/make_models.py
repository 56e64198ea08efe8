"""Trains the example models on scikit-learn's built-in data and writes them and their data beside it.

    pip install torch scikit-learn onnx onnxruntime
    python models/make_models.py

writes three .onnx files, their calibration, held-out and shifted rows as .npz, `provenance.json`
(versions, settings, measured accuracy, sha256 of every file), and the measured table in README.md.
On one machine with the same package versions, the same bytes come out. The ONNX graphs are built node
by node from the trained weights, not by an exporter, so that every name is ours and BatchNormalization
stays a node.
Torch is imported only where it is used, because the tests read `measured_table` without it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
SEED = 0
OPSET, IR_VERSION = 17, 8
TOLERANCE = 1e-5  #: onnxruntime against torch, relative to the largest output
TABLE_BEGIN, TABLE_END = "<!-- measured: written by make_models.py -->", "<!-- end of measured -->"


# ---- data ------------------------------------------------------------------------------------------------


def digits_rows() -> dict[str, np.ndarray]:
    """scikit-learn's digits, split 75:25 by class, and three sets that are not upright digits.

    Every set keeps the 17 grey levels 0, 1/16, …, 1, so none gives itself away by its number format.
    rotated: each held-out digit by 90°. A turned 0 still reads as a 0, so this set is not all foreign.
    shuffled: each held-out digit with its 64 pixels in a random order of its own; same grey levels.
    noise: independent uniform grey levels.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)  # (1797, 64)
    train, heldout, train_labels, heldout_labels = train_test_split(
        images, labels, test_size=0.25, random_state=SEED, stratify=labels
    )
    random = np.random.default_rng(SEED)
    return {
        "train": train,
        "train_labels": train_labels.astype(np.int64),
        "heldout": heldout,
        "heldout_labels": heldout_labels.astype(np.int64),
        "rotated": np.rot90(heldout.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64).copy(),
        "shuffled": random.permuted(heldout, axis=1),
        "noise": (random.integers(0, 17, heldout.shape) / 16).astype(np.float32),
    }


def diabetes_rows() -> tuple[dict[str, np.ndarray], dict[str, list]]:
    """scikit-learn's diabetes, split 75:25 and standardised by the training rows; and that scaling.

    shifted: held-out row i with feature i mod 10 moved 5 standard deviations away from the mean.
    """
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

    data = load_diabetes(scaled=False)  # the scaled form is standardised with the held-out rows included
    train, heldout, train_labels, heldout_labels = train_test_split(
        data.data, data.target, test_size=0.25, random_state=SEED
    )
    mean, std = train.mean(axis=0), train.std(axis=0)  # (10,)
    train, heldout = ((rows - mean) / std for rows in (train, heldout))
    shifted, row = heldout.copy(), np.arange(len(heldout))
    shifted[row, row % 10] += np.where(shifted[row, row % 10] >= 0, 5.0, -5.0)
    rows = {
        "train": train,
        "train_labels": train_labels[:, None],
        "heldout": heldout,
        "heldout_labels": heldout_labels[:, None],
        "shifted": shifted,
    }
    scaling = {"features": list(data.feature_names), "mean": mean.tolist(), "std": std.tolist()}
    return {name: value.astype(np.float32) for name, value in rows.items()}, scaling


# ---- training --------------------------------------------------------------------------------------------


def networks():
    """The three architectures, layer by named layer; each layer becomes the ONNX node of that name."""
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    digits_cnn = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            bn1=nn.BatchNorm2d(16),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(512, 64),
            relu3=nn.ReLU(),
            fc2=nn.Linear(64, 10),
        )
    )
    digits_mlp = nn.Sequential(
        OrderedDict(
            fc1=nn.Linear(64, 64),
            tanh1=nn.Tanh(),
            fc2=nn.Linear(64, 64),
            tanh2=nn.Tanh(),
            fc3=nn.Linear(64, 10),
        )
    )
    diabetes_mlp = nn.Sequential(
        OrderedDict(
            fc1=nn.Linear(10, 32),
            relu1=nn.ReLU(),
            fc2=nn.Linear(32, 32),
            relu2=nn.ReLU(),
            fc3=nn.Linear(32, 1),
        )
    )
    return digits_cnn, digits_mlp, diabetes_mlp


def train(network, rows: np.ndarray, labels: np.ndarray, epochs: int, weight_decay: float) -> dict:
    """AdamW with a cosine schedule for a fixed number of epochs; the held-out rows choose nothing.

    Integer labels mean cross-entropy. Real labels mean squared error on the standardised label; the
    scaling back to the label's unit is folded into the last linear layer, which is exact.
    """
    import torch
    from torch.nn import functional

    x, y = torch.from_numpy(rows), torch.from_numpy(labels)
    regression = y.is_floating_point()
    mean, std = (y.mean(), y.std()) if regression else (0, 1)
    y = (y - mean) / std if regression else y
    loss_of = functional.mse_loss if regression else functional.cross_entropy
    batch, rate = 64, 2e-3
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    shuffle = torch.Generator().manual_seed(SEED)
    network.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=shuffle).split(batch):
            optimizer.zero_grad()
            loss_of(network(x[chosen]), y[chosen]).backward()
            optimizer.step()
        schedule.step()
    network.eval()
    if regression:
        with torch.no_grad():
            network[-1].weight.mul_(std)
            network[-1].bias.mul_(std).add_(mean)
    settings = {"optimizer": "AdamW, cosine schedule", "learning_rate": rate, "weight_decay": weight_decay}
    return {**settings, "epochs": epochs, "batch_size": batch, "seed": SEED}


# ---- export ----------------------------------------------------------------------------------------------


def onnx_model(name: str, network, input_name: str, output_name: str, sample: np.ndarray, about: str):
    """The ONNX graph of a Sequential: one node per layer, tensors named after the layer that makes them."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    kinds = {  # torch layer -> ONNX operator, parameters in the operator's order, attributes
        "Conv2d": lambda m: ("Conv", "weight bias", {"kernel_shape": m.kernel_size, "pads": m.padding * 2}),
        "BatchNorm2d": lambda m: (
            "BatchNormalization", "weight bias running_mean running_var", {"epsilon": m.eps}
        ),
        "Linear": lambda m: ("Gemm", "weight bias", {"transB": 1}),
        "MaxPool2d": lambda m: (
            "MaxPool", "", {"kernel_shape": [m.kernel_size] * 2, "strides": [m.stride] * 2}
        ),
        "Flatten": lambda m: ("Flatten", "", {"axis": 1}),
        "ReLU": lambda m: ("Relu", "", {}),
        "Tanh": lambda m: ("Tanh", "", {}),
    }  # fmt: skip
    state, layers = network.state_dict(), list(network.named_children())
    nodes, initializers, value = [], [], input_name
    for position, (layer, module) in enumerate(layers):
        operator, parameters, attributes = kinds[type(module).__name__](module)
        constants = [f"{layer}.{parameter}" for parameter in parameters.split()]
        initializers += [numpy_helper.from_array(state[key].numpy(), key) for key in constants]
        result = output_name if position == len(layers) - 1 else f"{layer}_out"
        nodes.append(helper.make_node(operator, [value, *constants], [result], name=layer, **attributes))
        value = result
    width = layers[-1][1].out_features
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(input_name, TensorProto.FLOAT, ["batch", *sample.shape[1:]])],
        [helper.make_tensor_value_info(output_name, TensorProto.FLOAT, ["batch", width])],
        initializers,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="gapa-onnx models/make_models.py",
        doc_string=about,
    )
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)  # so that viewers show every shape
    onnx.checker.check_model(model, full_check=True)
    return model


def run(path: Path, rows: np.ndarray) -> np.ndarray:
    """The model's only output on the rows given to its only input."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: rows})[0]


def difference_from_torch(path: Path, network, rows: np.ndarray) -> float:
    """The largest difference of onnxruntime from torch over the rows, relative to the largest output."""
    import torch

    with torch.no_grad():
        expected = network(torch.from_numpy(rows)).numpy()
    difference = float(np.abs(run(path, rows) - expected).max() / np.abs(expected).max())
    if not difference <= TOLERANCE:
        raise SystemExit(f"error: {path.name} differs from torch by {difference:.1e} of the largest output")
    return difference


# ---- what was made ----------------------------------------------------------------------------------------


def accuracy(path: Path, rows: np.ndarray, labels: np.ndarray) -> tuple[str, float]:
    """The measure's name and value: R² for real labels, the share of right classes for integer ones."""
    answer = run(path, rows).astype(np.float64)
    if np.issubdtype(labels.dtype, np.integer):
        return "accuracy", float((answer.argmax(axis=1) == labels).mean())
    residual = ((labels - answer) ** 2).sum() / ((labels - labels.mean(dtype=np.float64)) ** 2).sum()
    return "R2", float(1 - residual)


def linear_baseline(rows: dict[str, np.ndarray]) -> float:
    """Held-out R² of ordinary least squares on the same rows: what the regressor is to be compared with."""
    from sklearn.linear_model import LinearRegression

    fit = LinearRegression().fit(rows["train"].astype(np.float64), rows["train_labels"])
    return float(fit.score(rows["heldout"].astype(np.float64), rows["heldout_labels"]))


def measured_table(provenance: dict) -> str:
    """The table of README.md, from provenance.json alone."""
    lines = [
        "| model | size | training rows | held-out rows | measure | on training | on held-out | from torch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, made in provenance["models"].items():
        size = provenance["files"][f"{name}.onnx"]["bytes"] / 1024
        lines.append(
            f"| {name}.onnx | {size:.0f} KiB | {made['rows']['calibration']} | {made['rows']['heldout']} "
            f"| {made['measure']} | {made['calibration']:.4f} | {made['heldout']:.4f} "
            f"| {made['difference_from_torch']:.0e} |"
        )
    versions = ", ".join(f"{package} {version}" for package, version in provenance["versions"].items())
    baseline = provenance["models"]["diabetes_mlp"]["linear_regression_heldout"]
    notes = f"Least squares on the same diabetes rows has a held-out R2 of {baseline:.4f}."
    return "\n".join([*lines, "", f"{notes} Made with {versions}."])


def write_readme(provenance: dict) -> None:
    """Replace the measured table in README.md; the prose around it is written by hand."""
    path = HERE / "README.md"
    before, rest = path.read_text(encoding="utf-8").split(TABLE_BEGIN)
    after = rest.split(TABLE_END)[1]
    table = measured_table(provenance)
    path.write_text(f"{before}{TABLE_BEGIN}\n{table}\n{TABLE_END}{after}", encoding="utf-8")


def versions() -> dict[str, str]:
    """The packages that decide the bytes."""
    import platform
    from importlib.metadata import version

    packages = ("torch", "numpy", "scikit-learn", "onnx", "onnxruntime")
    return {"Python": platform.python_version(), **{package: version(package) for package in packages}}


def main() -> None:
    import onnx
    import torch

    torch.set_num_threads(1)  # sums in one order, so the same bytes whatever the number of cores
    torch.use_deterministic_algorithms(True)
    digits, (diabetes, scaling) = digits_rows(), diabetes_rows()
    cnn, mlp, regressor = networks()
    jobs = (  # name, network, input, its shape, output, rows, epochs, weight decay, doc string
        ("digits_cnn", cnn, "image", (1, 8, 8), "logits", digits, 40, 1e-2,
         "Handwritten digits, 8x8 grey levels in [0, 1], to ten logits."),
        ("digits_mlp", mlp, "pixels", (64,), "logits", digits, 60, 1e-2,
         "Handwritten digits, 64 grey levels in [0, 1] row by row, to ten logits."),
        ("diabetes_mlp", regressor, "features", (10,), "progression", diabetes, 60, 1.0,
         "Ten standardised measurements of a patient to the progression of diabetes one year later."),
    )  # fmt: skip
    provenance: dict = {"command": "python models/make_models.py", "versions": versions()}
    provenance |= {"models": {}, "files": {}}

    def record(path: Path) -> None:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        provenance["files"][path.name] = {"bytes": len(content), "sha256": digest}
        print(f"wrote {path.name}  {len(content):,} bytes")

    for name, network, input_name, shape, output_name, rows, epochs, decay, about in jobs:
        sets = {
            "calibration" if key == "train" else key: value.reshape(-1, *shape)
            for key, value in rows.items()
            if not key.endswith("_labels")
        }
        training = train(network, sets["calibration"], rows["train_labels"], epochs, decay)
        path = HERE / f"{name}.onnx"
        onnx.save(onnx_model(name, network, input_name, output_name, sets["heldout"], about), path)
        record(path)
        for key, value in sets.items():
            labels = {"labels": rows["heldout_labels"]} if key == "heldout" else {}
            np.savez_compressed(HERE / f"{name}_{key}.npz", **{input_name: value}, **labels)
            record(HERE / f"{name}_{key}.npz")
        measure, on_training = accuracy(path, sets["calibration"], rows["train_labels"])
        _, on_heldout = accuracy(path, sets["heldout"], rows["heldout_labels"])
        print(f"      {name}: {measure} {on_training:.4f} on training rows, {on_heldout:.4f} held out")
        every_row = np.concatenate(list(sets.values()))
        provenance["models"][name] = {
            "input": input_name,
            "output": output_name,
            "rows": {key: len(value) for key, value in sets.items()},
            "training": training,
            "measure": measure,
            "calibration": on_training,
            "heldout": on_heldout,
            "difference_from_torch": difference_from_torch(path, network, every_row),
        }
    regression = {"linear_regression_heldout": linear_baseline(diabetes), "standardised_by": scaling}
    provenance["models"]["diabetes_mlp"].update(regression)
    (HERE / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    write_readme(provenance)
    print("wrote provenance.json and the measured table in README.md")


if __name__ == "__main__":
    main()
