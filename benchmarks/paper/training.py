"""The classifiers of the paper's MNIST tables, 784 → 200 → 200 → 10 with tanh: trained by torch, kept in a cache.

Adam 1e-3, batches of 256, dropout 0.1 while training, pixels / 255, 55,000 rows. Epochs are as many as bring the
test accuracy of seed 0 near that of the paper's backbone, whose errors the table is about (`recipes.py` compares
other ways to such a network). A pool of networks
serves all seeds: the network of seed i is number i, its ensemble numbers i … i + 4, so that the ensembles of
neighbouring seeds overlap but differ.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from backbones import CACHE, as_onnx, images  # noqa: E402
from lines import say  # noqa: E402

DATA_SETS = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}  #: each with its out-of-distribution set
WIDTH, CLASSES, DROPOUT = 200, 10, 0.1
MEMBERS = 5


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: by Adam, or by SGD where there is a momentum."""

    epochs: int
    batch: int = 256
    rate: float = 1e-3
    weight_decay: float = 0.0
    momentum: float | None = None

    def optimiser(self, net: nn.Module) -> torch.optim.Optimizer:
        choices = {"lr": self.rate, "weight_decay": self.weight_decay}
        if self.momentum is None:
            return torch.optim.Adam(net.parameters(), **choices)
        return torch.optim.SGD(net.parameters(), momentum=self.momentum, **choices)


@dataclass(frozen=True)
class Scale:
    """How much is computed; the second one is for trying that everything works."""

    training_rows: int = 55_000
    recipes: dict[str, Recipe] = field(
        default_factory=lambda: {"mnist": Recipe(10), "fashion_mnist": Recipe(3)}
    )
    test_rows: int = 10_000
    all_layer_rows: int = 250  #: of each test set, where a row of data costs a Jacobian of all weights
    prior_steps: int = 50  #: of laplace-torch's search for the prior precision
    rounds: int = 48  #: of a timing
    folder: Path = CACHE / "paper"  #: for networks, trained and converted


QUICK = Scale(
    training_rows=4_000,  # feature densities need more rows of each class than features
    recipes={"mnist": Recipe(3), "fashion_mnist": Recipe(3)},
    test_rows=500,
    all_layer_rows=32,
    prior_steps=3,
    rounds=6,
)


@dataclass(frozen=True)
class Trained:
    """A network and the CPU seconds that its training took."""

    net: nn.Sequential
    seconds: float


@dataclass(frozen=True)
class Problem:
    """A data set, a seed, and all that methods may use: the networks, training and validation rows."""

    name: str
    seed: int
    scale: Scale
    data: dict[str, np.ndarray] = field(repr=False)

    @cached_property
    def members(self) -> list[Trained]:
        return [load(self.name, self.seed + i, self.scale, self.data) for i in range(MEMBERS)]

    @cached_property
    def net(self) -> nn.Sequential:
        return load(self.name, self.seed, self.scale, self.data).net

    @cached_property
    def onnx_path(self) -> Path:
        """The network as an ONNX file, written by hand: Gemm and Tanh."""
        path = self.scale.folder / f"{self.name}_{self.seed}.onnx"
        layers = [layer for layer in self.net if isinstance(layer, nn.Linear)]
        weights = [(w.weight.detach().numpy().T, w.bias.detach().numpy()) for w in layers]
        onnx.save(as_onnx(weights), path)
        return path

    def features(self, x: np.ndarray) -> np.ndarray:
        """The last hidden layer, (n, WIDTH)."""
        with torch.no_grad():
            return plain(self.net)[:-1](torch.from_numpy(x)).numpy()

    def loader(self, batch: int) -> torch.utils.data.DataLoader:
        rows = torch.utils.data.TensorDataset(*tensors(self.data, "train"))
        return torch.utils.data.DataLoader(rows, batch_size=batch)


def problem(name: str, seed: int, scale: Scale, folder: Path) -> Problem:
    data = images(name, folder)
    data = {key: rows[: scale.training_rows] if "train" in key else rows for key, rows in data.items()}
    return Problem(name, seed, scale, data)


def tensors(data: dict[str, np.ndarray], part: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(data[f"x_{part}"]), torch.from_numpy(data[f"y_{part}"].astype(np.int64))


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(28 * 28, WIDTH),
        nn.Tanh(),
        nn.Dropout(DROPOUT),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Dropout(DROPOUT),
        nn.Linear(WIDTH, CLASSES),
    )


def plain(net: nn.Sequential) -> nn.Sequential:
    """The same layers without dropout."""
    return nn.Sequential(*(layer for layer in net if not isinstance(layer, nn.Dropout))).eval()


def load(name: str, number: int, scale: Scale, data: dict[str, np.ndarray]) -> Trained:
    """A network of the pool, trained unless it is in the cache."""
    path = scale.folder / f"{name}_{scale.recipes[name].epochs}_{number}.pt"
    if not path.exists():
        say(f"training the {name} classifier {number}")
        scale.folder.mkdir(parents=True, exist_ok=True)
        started = time.process_time()
        net = train(*tensors(data, "train"), scale.recipes[name], seed=number)
        torch.save({"weights": net.state_dict(), "seconds": time.process_time() - started}, path)
    kept = torch.load(path, weights_only=True)
    net = network()
    net.load_state_dict(kept["weights"])
    return Trained(net.eval(), kept["seconds"])


def train(x: torch.Tensor, y: torch.Tensor, recipe: Recipe, *, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = network().train()
    optimiser = recipe.optimiser(net)
    for _ in range(recipe.epochs):
        for rows in torch.randperm(len(x)).split(recipe.batch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
    return net.eval()
