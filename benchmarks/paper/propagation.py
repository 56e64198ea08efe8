"""What independence costs: variance born at one vector, on its way through a convolutional decoder.

    python benchmarks/paper/propagation.py [--data DIR]

The U-Net of `segmentation.py` (seed 0) is converted with the site at its embedding. One embedding moves all pixels
of the decoder together, but the diagonal rules take elements as independent. For each stage, the mean variance

    rules          as the converted file computes it
    first_order    over 200 draws of noise of the same variance at the embedding, made a thousand times smaller
                   and the result scaled back: what a rule that knew all correlations would say
    sampled        over 200 draws of the noise as it is, which also opens and closes Relus

Writes results/propagation.csv.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import scenes  # noqa: E402
from backbones import DATA  # noqa: E402
from lines import machine, say  # noqa: E402
from segmentation import FULL, trained  # noqa: E402

STAGES = ("expand", "up3", "up2", "merge2", "up1", "merge1", "logits")
DRAWS, CALIBRATION, SCENES = 200, 300, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of mnist.npz")
    options = parser.parse_args()
    training = scenes.make(FULL.training, 0, scenes.digits(options.data, "train"))
    test = scenes.make(SCENES, 1, scenes.digits(options.data, "test"))
    net = trained(training, FULL.epochs, 0)
    ruled = by_rules(net, training.images[:CALIBRATION], test.images)
    var = embedding_variance(net, ruled["expand"])
    found = {"rules": ruled} | {
        name: by_sampling(net, var, test.images, smaller)
        for name, smaller in (("first_order", 1000), ("sampled", 1))
    }
    with open(HERE / "results" / "propagation.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["stage", *found, "draws", "scenes", *machine()])
        writer.writeheader()
        for stage in STAGES:
            means = {name: f"{variances[stage].mean():.4g}" for name, variances in found.items()}
            say(f"{stage}: {means}")
            writer.writerow({"stage": stage, **means, "draws": DRAWS, "scenes": SCENES, **machine()})
    return 0


def by_rules(net, calib: np.ndarray, images: np.ndarray) -> dict[str, np.ndarray]:
    """The variance of each stage as the converted file computes it."""
    import onnx
    import unet

    import gapa_onnx

    model = gapa_onnx.convert(unet.as_onnx(net), {"image": calib}, sites="embedding").model
    names = [f"{stage}/var" for stage in STAGES[:-1]]
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    found = gapa_onnx.session(model.SerializeToString()).run([*names, "logits_var"], {"image": images})
    return dict(zip(STAGES, found))


def embedding_variance(net, expand_var: np.ndarray) -> np.ndarray:
    """The variance v at the embedding, which the file holds as a factor and a vector: W² v = the next layer's."""
    squared = np.square(net.expand.weight.detach().numpy().astype(np.float64))  # (576, 64)
    found = np.linalg.lstsq(squared, expand_var.T.astype(np.float64), rcond=None)[0].T
    return found.clip(0)


def by_sampling(net, var: np.ndarray, images: np.ndarray, smaller: float) -> dict[str, np.ndarray]:
    """The sample variance of each stage under Gaussian noise at the embedding, shrunk and scaled back; float64."""
    import torch

    torch.manual_seed(0)
    net = copy.deepcopy(net).double()
    std, seen = torch.from_numpy(np.sqrt(var)) / smaller, {stage: [] for stage in STAGES}
    net.embedding.register_forward_hook(lambda _, given, out: out + std * torch.randn_like(out))
    for stage in STAGES:
        keep = seen[stage].append
        getattr(net, stage).register_forward_hook(lambda _, given, out, keep=keep: keep(out))
    with torch.no_grad():
        for _ in range(DRAWS):
            net(torch.from_numpy(images).double())
    return {stage: torch.stack(outputs).var(0).numpy() * smaller**2 for stage, outputs in seen.items()}


def section(rows: Sequence[dict[str, Any]]) -> str:
    """The part of the results page, beside that of segmentation."""
    if not rows:
        return ""
    lines = []
    for row in rows:
        rules, first, sampled = (float(row[name]) for name in ("rules", "first_order", "sampled"))
        lines.append(
            f"| {row['stage']} | {rules:.3g} | {first:.3g} | {sampled:.3g} | {first / rules:.3g} | {sampled / rules:.3g} |"
        )
    return f"""### What independence costs in a decoder

One embedding moves all pixels together, but diagonal rules take elements as independent. Mean variance of each
stage of the U-Net's decoder by the rules; by {rows[0]["draws"]} draws of the same noise at the embedding, so small that all is linear
(what correlations add); and by draws of the noise as it is (what Relus that open and close add too):

| stage | rules | first order | sampled | first order / rules | sampled / rules |
|---|---|---|---|---|---|
{chr(10).join(lines)}
"""


if __name__ == "__main__":
    sys.exit(main())
