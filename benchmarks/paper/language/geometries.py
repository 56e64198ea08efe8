"""Where tokens are asked and how they are compared, chosen without OpenWebText: what docs/decisions.md says of both.

    python benchmarks/paper/language/geometries.py [--data DIR] [--cache DIR]

The vectors of two blocks and of the head's input, of the model of `exports.py --only plain`, for held-out WikiText and for
kinds of text that are near (`texts.NEAR`) and far. At each place 1000 k-means points and 20 neighbours, by each geometry;
told are AUROCs of the mean over tokens of the logarithm of the share, and of scores made of several places as the tool
makes them. Writes results/language_geometries.csv. Two cores take half an hour.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[2] / "tests")]

import faiss  # noqa: E402
import numpy as np  # noqa: E402
import packages  # noqa: E402
from backbones import DATA  # noqa: E402
from lines import Lines, machine, say  # noqa: E402

from gapa_onnx.fit import statistics, streams  # noqa: E402
from gapa_onnx.fit.geometry import geometry_of  # noqa: E402
from gapa_onnx.op.shares import unexplained_share  # noqa: E402
from gapa_onnx.plan.heads.strangeness import ENTROPY, LAST, QUANTILE  # noqa: E402
from language.dump import block_ends, opened  # noqa: E402
from language.judging import auroc  # noqa: E402
from language.texts import CALIBRATION, HELDOUT, NEAR, OTHERS, sequences  # noqa: E402

COUNTS = {CALIBRATION: 760, HELDOUT: 320, **dict.fromkeys(OTHERS, 120), **dict.fromkeys(NEAR, 160)}
BLOCKS = (10, 20)  # a third and two thirds of the way
METRICS = ("euclidean", "whitened-direction", "whitened", "polar")
POINTS, NEIGHBOURS, FITTED, EVERY = 1000, 20, 20_000, 2
JITTER, BATCH, LEADING = 1e-6, 8, 512
FAINTEST = {LAST: 1e-12, ENTROPY: 1e-7}

Tokens = dict[str, np.ndarray]  #: by set, (n, t): logarithms of shares or entropies


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--cache", type=Path, default=packages.cache_folder("language"))
    options = parser.parse_args()
    lines = Lines(HERE.parent / "results" / "language_geometries.csv", ("what",), fresh=True)
    vectors, entropies = read(options)
    last = max(vectors[HELDOUT])
    by: dict[tuple[int, str], Tokens] = {}
    for place in (*BLOCKS, last):
        for metric in METRICS:
            by[place, metric] = shares(vectors, place, metric)
            name = "head's input" if place == last else f"block {place}"
            lines.add({"what": f"{name}, {metric}", **told_apart(by[place, metric]), **machine()})
    for places in ((), BLOCKS[:1], BLOCKS[1:], BLOCKS):
        for metric in ("whitened-direction", "whitened"):
            earlier = [by[place, metric] for place in places]
            said = score(by[last, "whitened-direction"], earlier, entropies)
            named = " and ".join(f"block {place}" for place in places) or "no earlier place"
            lines.add({"what": f"score with {named}, {metric}", **told_apart(said), **machine()})


def read(options: argparse.Namespace) -> tuple[dict[str, dict[int, np.ndarray]], Tokens]:
    """Vectors (n, t, d) of each set and place, and the logarithm of the entropy of the leading tokens (n, t), of every
    second token."""
    path = options.cache / "plain" / "model.onnx"
    tokenizer = options.cache / "checkpoint" / "tokenizer.json"
    ends = block_ends(path)
    places = (*BLOCKS, len(ends) - 1)
    session = opened(path, [ends[place] for place in places], 2)
    vectors: dict[str, dict[int, np.ndarray]] = {}
    entropies: Tokens = {}
    for name, count in COUNTS.items():
        ids = sequences(name, tokenizer, count, options.data).ids
        say(f"{name}: {len(ids)} sequences")
        parts = []
        for start in range(0, len(ids), BATCH):
            rows = ids[start : start + BATCH]
            logits, *found = session.run(None, {"input_ids": rows, "attention_mask": np.ones_like(rows)})
            parts.append(
                (_entropy(logits[:, ::EVERY]), *(one[:, ::EVERY].astype(np.float16) for one in found))
            )
        entropy, *of_places = (np.concatenate(part) for part in zip(*parts))
        entropies[name] = np.log(np.maximum(entropy, FAINTEST[ENTROPY]))
        vectors[name] = dict(zip(places, of_places))
    return vectors, entropies


def _entropy(logits: np.ndarray) -> np.ndarray:
    leading = np.partition(logits, -LEADING, axis=-1)[..., -LEADING:].astype(np.float64)
    p = np.exp(leading - leading.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    found: np.ndarray = -(p * np.log(np.maximum(p, 1e-30))).sum(axis=-1)
    return found


def shares(vectors: dict[str, dict[int, np.ndarray]], place: int, metric: str) -> Tokens:
    """The logarithms of shares, by points of the calibration set."""
    known = _flat(vectors[CALIBRATION][place])
    moments = streams.Moments(known.shape[1], covariance=True)
    moments.add(known)
    how = geometry_of(metric, known, moments.mean, moments.std, moments.covariance)
    rows = how(known[np.random.default_rng(1).permutation(len(known))[:FITTED]])
    means = faiss.Kmeans(rows.shape[1], POINTS, niter=6, seed=1, max_points_per_centroid=FITTED)
    means.train(rows)
    points = means.centroids
    search, scale = statistics.NearestSearch(points), statistics.median_distance(rows, seed=0)
    found = {}
    for name, held in vectors.items():
        if name != CALIBRATION:
            queries = how(_flat(held[place]))
            nearest = search.candidates(queries, NEIGHBOURS)
            share = unexplained_share(queries, points, nearest, scale, JITTER)
            found[name] = np.log(np.maximum(share, FAINTEST[LAST])).reshape(held[place].shape[:2])
    return found


def _flat(vectors: np.ndarray) -> np.ndarray:
    return vectors.reshape(-1, vectors.shape[-1]).astype(np.float32)


def score(last: Tokens, earlier: list[Tokens], entropies: Tokens) -> Tokens:
    """As the tool makes it of tokens (`plan/heads/strangeness.py`), on scales of the held-out set."""
    mean = {name: sum(_scaled(one)[name] for one in earlier) for name in last} if earlier else None
    of_earlier, of_last, entropy = _scaled(mean) if mean else None, _scaled(last), _scaled(entropies)
    found = {}
    for name in last:
        bent = np.logaddexp(0, ENTROPY.steepness * (entropy[name] - ENTROPY.start))
        found[name] = LAST.steepness * of_last[name] + ENTROPY.weight * bent
        found[name] = found[name] + (of_earlier[name] if of_earlier else 0)
    return found


def _scaled(logs: Tokens) -> Tokens:
    """0 at the median and 1 at the quantile of held-out tokens."""
    known = logs[HELDOUT]
    middle = np.median(known)
    unit = np.quantile(known, QUANTILE) - middle
    return {name: (one - middle) / unit for name, one in logs.items() if name != CALIBRATION}


def told_apart(tokens: Tokens) -> dict[str, Any]:
    known = tokens[HELDOUT].mean(axis=1)
    return {name: round(auroc(known, tokens[name].mean(axis=1)), 4) for name in (*OTHERS, *NEAR)}


if __name__ == "__main__":
    main()
