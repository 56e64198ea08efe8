"""One forward pass over all text: what the model says and what goes on inside of it, kept in files.

    FOLDER/set/ids.npy          (n, t) tokens;  documents.npy (n,) where they are from;  done.json: rows so far
    FOLDER/set/place_07.npy     (n, t, d) float16: the vectors that block 7 hands on; place_00 the embeddings, the last
                                what the head reads
    FOLDER/set/entropy.npy      (n, t) of the next token, in nats;  nll.npy of the one that came, NaN at the end of a
                                sequence;  right.npy whether that was the most probable one
    FOLDER/set/top_logp.npy     (n, t, 512) log probabilities of the leading tokens;  top_ids.npy which these are
    FOLDER/set/tempered.npy     (n, t, temperatures) entropies at other temperatures, of the sets in TEMPERED
    FOLDER/squares.npy          (2, v) sums of p and p² over tokens of the calibration set

`Dump` reads them; what is not made yet is made by `make`, which can be interrupted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from lines import say

from gapa_onnx.model.load import load
from gapa_onnx.plan.cuts import cut_tensors
from gapa_onnx.plan.layers import Network
from gapa_onnx.sessions.runtime import session_options
from language.texts import CALIBRATION, HELDOUT, WEB, Sequences

LEADING = 512
TEMPERATURES = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
TEMPERED = (HELDOUT, WEB)
BATCH = 8  # sequences
SUMMED = 4  # one calibration batch in so many enters squares.npy
LOGITS = "logits"


@dataclass(frozen=True)
class Dump:
    """What was kept of these sets."""

    folder: Path
    sets: tuple[str, ...] = ()

    def array(self, of: str, name: str) -> np.ndarray:
        """An array of a set, its finished rows, mapped from the file."""
        found: np.ndarray = np.load(self.folder / of / f"{name}.npy", mmap_mode="r")[: self.done(of)]
        return found

    def hidden(self, of: str, place: int) -> np.ndarray:
        """(n, t, d) float16"""
        return self.array(of, f"place_{place:02d}")

    @property
    def places(self) -> int:
        return len(list((self.folder / CALIBRATION).glob("place_*.npy")))

    def done(self, of: str) -> int:
        path = self.folder / of / "done.json"
        return int(json.loads(path.read_text())) if path.exists() else 0

    def squares(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Sums of p and of p² (v,), and over how many tokens."""
        with np.load(self.folder / "squares.npz") as held:
            return held["first"], held["second"], int(held["count"])


# --------------------------------------------------------------------------- making it


def block_ends(path: Path) -> list[str]:
    """The tensors that everything passes through behind the embeddings and behind each block, and what the head reads."""
    source = load(path)
    network = Network.of(source)
    logits = source.tensors[LOGITS]
    head = next(node for node in network.source.graph.nodes if logits in node.outputs)
    before, behind = cut_tensors(network, head.inputs[0])
    by_depth: dict[int, str] = {}
    for cut in (*before, *behind):
        by_depth.setdefault(cut.depth, cut.tensor.name)
    ends = list(by_depth.values())[
        ::2
    ]  # in each block two things add to what passes: attention, and inner layers
    return [*ends, head.inputs[0].name]


def opened(path: Path, ends: Sequence[str], threads: int) -> Any:
    """A session of the model whose outputs are the logits and these tensors."""
    import onnxruntime as ort

    model = onnx.load(path, load_external_data=False)
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info(LOGITS, 1, None))
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in ends)
    copy = path.with_name("with-ends.onnx")
    onnx.save(model, copy)
    return ort.InferenceSession(
        str(copy), session_options(threads=threads), providers=["CPUExecutionProvider"]
    )


class Maker:
    """Runs the model over sets, as far as they are asked for."""

    def __init__(self, dump: Dump, path: Path, sets: Mapping[str, Sequences], threads: int):
        self.dump, self.sets = dump, sets
        self._path, self._threads = path, threads
        self._session: Any = None
        self._ends: list[str] = []

    def make(self, of: str, count: int | None = None) -> None:
        """The first `count` rows of a set, or all."""
        rows = self.sets[of]
        wanted = min(len(rows.ids), count or len(rows.ids))
        done = self.dump.done(of)
        if done >= wanted:
            return
        if self._session is None:
            self._ends = block_ends(self._path)
            self._session = opened(self._path, self._ends, self._threads)
        folder = self.dump.folder / of
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "ids.npy", rows.ids)
        np.save(folder / "documents.npy", rows.documents)
        start = time.monotonic()
        for first in range(done, wanted, BATCH):
            ids = rows.ids[first : first + BATCH]
            answers = self._session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
            self._keep(folder, of, first, len(rows.ids), ids, answers)
            done = first + len(ids)
            (folder / "done.json").write_text(json.dumps(done))
            if not first // BATCH % 10:
                say(f"{of}: {done} of {wanted}, {time.monotonic() - start:.0f} s")

    def _keep(
        self, folder: Path, of: str, first: int, total: int, ids: np.ndarray, answers: Sequence[np.ndarray]
    ) -> None:
        logits, hidden = answers[0], answers[1:]
        kept: dict[str, np.ndarray] = {
            f"place_{at:02d}": each.astype(np.float16) for at, each in enumerate(hidden)
        }
        parts = [_said(one, tokens, of in TEMPERED) for one, tokens in zip(logits, ids)]
        for name in parts[0]:
            kept[name] = np.stack([part[name] for part in parts])
        for name, array in kept.items():
            path = folder / f"{name}.npy"
            if not path.exists():
                np.lib.format.open_memmap(path, "w+", array.dtype, (total, *array.shape[1:]))
            held = np.lib.format.open_memmap(path, "r+")
            held[first : first + len(array)] = array
        if of == CALIBRATION and not first // BATCH % SUMMED:
            self._sum(logits)

    def _sum(self, logits: np.ndarray) -> None:
        path = self.dump.folder / "squares.npz"
        width = logits.shape[-1]
        first, second, count = self.dump.squares() if path.exists() else (np.zeros(width), np.zeros(width), 0)
        for one in logits:
            p = np.exp(one - one.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            first, second = first + p.sum(axis=0), second + np.einsum("tv,tv->v", p, p)
        np.savez(path, first=first, second=second, count=count + logits.shape[0] * logits.shape[1])


def _said(logits: np.ndarray, tokens: np.ndarray, tempered: bool) -> dict[str, np.ndarray]:
    """What one sequence's logits (t, v) say."""
    width = min(LEADING, logits.shape[1])
    largest = logits.max(axis=1, keepdims=True)
    shifted = logits - largest
    entropy, norm = _entropy(shifted, 1.0)
    order = np.argpartition(shifted, -width, axis=1)[:, -width:]
    values = np.take_along_axis(shifted, order, axis=1)
    sort = np.argsort(-values, axis=1, kind="stable")
    order, values = np.take_along_axis(order, sort, axis=1), np.take_along_axis(values, sort, axis=1)
    following = tokens[1:]
    nll = np.full(len(tokens), np.nan, np.float32)
    nll[:-1] = norm[:-1] - shifted[np.arange(len(following)), following]
    right = np.zeros(len(tokens), bool)
    right[:-1] = order[:-1, 0] == following
    found = {
        "entropy": entropy,
        "nll": nll,
        "right": right,
        "top_logp": (values - norm[:, None]).astype(np.float32),
        "top_ids": order.astype(np.int32),
    }
    if tempered:
        others = [_entropy(shifted, temperature)[0] for temperature in TEMPERATURES]
        found["tempered"] = np.stack(others, axis=1)
    return found


def _entropy(shifted: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """The entropy of softmax(logits / temperature) and its log normaliser, from logits (t, v) whose largest is 0."""
    scaled = shifted if temperature == 1 else shifted * np.float32(1 / temperature)
    weights = np.exp(scaled)
    total = weights.sum(axis=1, dtype=np.float64)
    mean = np.einsum("tv,tv->t", weights, scaled) / total
    return (np.log(total) - mean).astype(np.float32), np.log(total).astype(np.float32)


def steps(sets: Mapping[str, Sequences]) -> Iterator[tuple[str, int | None]]:
    """In which order: what choices are made on first, the set of the final tables last."""
    yield CALIBRATION, len(sets[CALIBRATION].ids) // 4
    for name in sets:
        if name not in (CALIBRATION, WEB):
            yield name, None
    yield CALIBRATION, None
    if WEB in sets:
        yield WEB, None
