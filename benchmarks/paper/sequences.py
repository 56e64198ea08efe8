"""Small networks that read sequences, trained by torch and written by its exporter: an LSTM and two transformers.

    lstm           two layers of 64 units over the 28 rows of an image; the last step goes to the classes
    transformer    three blocks of 64 units and 4 heads over the 28 rows of an image, and a summary token
    reader         two blocks over 32 words of a text, whose mean tells Wikipedia from the web

The exporter is that of TorchScript, which needs no other package.
"""

from __future__ import annotations

import importlib
import inspect
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WIDTH, HEADS, ROWS, CLASSES = 64, 4, 28, 10
WORDS, COMMON, BUCKETS = (
    32,
    4_000,
    500,
)  #: of a piece; words that have a number; numbers that the others share
EPOCHS, BATCH, RATE = 3, 128, 2e-3


def train(network: str, x: np.ndarray, y: np.ndarray, path: Path, *, epochs: int | None = None) -> None:
    """Train a network on these rows and write its ONNX file."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = _network(network)
    _fit(net, torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)), epochs or EPOCHS)
    _export(net.eval(), torch.from_numpy(x[:2]), path)


def _fit(net, x, y, epochs: int) -> None:
    import torch

    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    steps = epochs * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            schedule.step()


def _export(net, x, path: Path) -> None:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this exporter is the older one, and about the batch of an LSTM
        axes = {"x": {0: "batch"}, "logits": {0: "batch"}}
        torch.onnx.export(
            net,
            (x,),
            path,
            input_names=["x"],
            output_names=["logits"],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )


def _network(name: str):
    from torch import nn

    if name == "lstm":
        return _lstm()
    if name == "transformer":
        return _transformer(nn.Linear(ROWS, WIDTH), blocks=3, length=ROWS, summary=True, classes=CLASSES)
    return _transformer(
        nn.Embedding(COMMON + BUCKETS, WIDTH), blocks=2, length=WORDS, summary=False, classes=2
    )


def _lstm():
    from torch import nn

    class Lstm(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(ROWS, WIDTH, num_layers=2, batch_first=True)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    return Lstm()


def _transformer(embedding, *, blocks: int, length: int, summary: bool, classes: int):
    """Blocks that normalise first, with positions that are learned; what is summed up is a token of its own, or the mean."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            self.dropout = nn.Dropout(0.1)

        def heads(self, x):
            return x.reshape(x.shape[0], x.shape[1], HEADS, WIDTH // HEADS).transpose(1, 2)

        def forward(self, x):
            normed = self.before(x)
            query, key, value = (self.heads(part(normed)) for part in (self.query, self.key, self.value))
            weights = (query @ key.transpose(2, 3) / (WIDTH // HEADS) ** 0.5).softmax(dim=-1)
            seen = (weights @ value).transpose(1, 2).reshape(x.shape)
            x = x + self.dropout(self.out(seen))
            return x + self.dropout(self.feed(self.between(x)))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = embedding
            self.token = nn.Parameter(torch.zeros(1, 1, WIDTH)) if summary else None
            self.positions = nn.Parameter(0.02 * torch.randn(1, length + summary, WIDTH))
            self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
            self.last = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, classes)

        def forward(self, x):
            x = self.embedding(x)
            if self.token is not None:
                x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
            x = self.last(self.blocks(x + self.positions))
            return self.head(x[:, 0] if self.token is not None else x.mean(dim=1))

    return Transformer()


# --------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Texts:
    """Pieces of texts as the numbers of their words, (n, WORDS) int64, with 0 for the web and 1 for Wikipedia."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    code: np.ndarray  #: pieces of Python's standard library


def texts(folder: Path) -> Texts:
    """From one document a line; documents of the last fifth of the web, and all of WikiText's held-out part, are for tests."""
    web, wiki, held_out = (
        _documents((folder / f"{name}.txt").read_text(encoding="utf-8"))
        for name in ("openwebtext", "wikitext_calibration", "wikitext_heldout")
    )
    cut = len(web) * 4 // 5
    known = numbered([*web[:cut], *wiki])
    parts = [pieces(documents, known) for documents in (web[:cut], wiki, web[cut:], held_out)]
    fewest = min(len(parts[2]), len(parts[3]))
    parts[2:] = [part[:fewest] for part in parts[2:]]
    train, test = (_mixed(*parts[at : at + 2], seed=at) for at in (0, 2))
    source = [inspect.getsource(importlib.import_module(name)) for name in _CODE]
    code = pieces(_documents("\n".join(text.replace("\n", " ") for text in source)), known)
    return Texts(*train, *test, code)


_CODE = ("argparse", "inspect", "typing", "subprocess", "pathlib", "zipfile", "tarfile", "ast", "tokenize")


def _documents(text: str) -> list[list[str]]:
    """Words of each line, without what stands for a word that WikiText has left out."""
    return [re.findall(r"[a-z]+", line.lower().replace("<unk>", " ")) for line in text.splitlines()]


def numbered(documents: Sequence[Sequence[str]]) -> dict[str, int]:
    """The most common words, each with its number; of equals the first in the alphabet."""
    counts = Counter(word for document in documents for word in document)
    common = sorted(counts, key=lambda word: (-counts[word], word))[:COMMON]
    return {word: number for number, word in enumerate(common)}


def pieces(documents: Sequence[Sequence[str]], known: dict[str, int]) -> np.ndarray:
    """Documents cut into pieces of WORDS words, what is left over dropped; unknown words share a few numbers."""
    found = []
    for words in documents:
        numbers = [known.get(word, COMMON + zlib.crc32(word.encode()) % BUCKETS) for word in words]
        found += [numbers[at : at + WORDS] for at in range(0, len(numbers) - WORDS + 1, WORDS)]
    return np.array(found, np.int64).reshape(-1, WORDS)


def _mixed(web: np.ndarray, wiki: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(len(web) + len(wiki))
    labels = np.repeat([0, 1], [len(web), len(wiki)])
    return np.concatenate([web, wiki])[order], labels[order]
