"""The drift test: false alarms in streams that have not changed, and rows until a change is told.

    python benchmarks/drift.py [--data ../shared/data] [--streams 2000] [--only MNIST] [--quick]

Made scores are normal, or normal in steps of a quarter, so that many are equal. Those of MNIST are of a converted
classifier on images that it was not trained on; each stream draws a table and its rows from them without putting any back.
A table of 5,000 rows that stands for 50,000 is thinned as in a file. Writes results/drift.json, one kind of scores at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import gapa_onnx
from gapa_onnx.files import locked, write
from gapa_onnx.monitor.drift import Ordinary, drift, log_capital
from gapa_onnx.settle.scores import thinned

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "drift.json"
LEVEL = 0.01
ROWS = 10_000  # of a stream
TABLES = (500, 5_000)
THINNED = 50_000
TRAINED, HIDDEN = 10_000, 128  # images that the classifier learns from; units of its hidden layer
Draw = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class FalseAlarms:
    table: int
    of: int  #: rows that the table stands for
    streams: int
    rows: int
    alarms: int
    fixed: int  #: the same bets on ranks among the table alone
    fixed_streams: int


@dataclass(frozen=True)
class Delay:
    table: int
    strange: float  #: share of strange rows
    first: int  #: row of the change
    streams: int
    told: int  #: before the stream ended
    median: float  #: rows from the change to the alarm
    high: float  #: quantile .9
    largest: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "shared" / "data")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--only", default="normal,in steps,MNIST,thinned")
    parser.add_argument("--quick", action="store_true", help="few streams, written nowhere")
    given = parser.parse_args()
    count = 20 if given.quick else given.streams
    for name in given.only.split(","):
        if name == "MNIST" and not (given.data / "mnist.npz").is_file():
            print(f"no {given.data / 'mnist.npz'}: made scores alone", file=sys.stderr)
            continue
        found = measured(name, count, given.data)
        print(name, json.dumps(found), file=sys.stderr, flush=True)
        if not given.quick:
            record(name, found)


def measured(name: str, count: int, data: Path) -> dict[str, Any]:
    """What there is to say of one kind of scores."""
    if name == "thinned":
        return {"alarms": [asdict(false_alarms(normal, TABLES[-1], THINNED, count))], "delays": []}
    if name == "MNIST":
        draw, strange = map(without_return, mnist_scores(data))
    else:
        draw = {"normal": normal, "in steps": in_steps}[name]
        strange = partial(moved, draw)
    alarms = [asdict(false_alarms(draw, table, table, count)) for table in TABLES]
    changes = ((0.02, 0), (0.1, 0), (0.1, ROWS // 2), (1.0, 0))
    delays = [
        asdict(delay(draw, strange, table, share, first, max(10, count // 20)))
        for table in TABLES
        for share, first in changes
    ]
    return {"alarms": alarms, "delays": delays}


def record(name: str, found: dict[str, Any]) -> None:
    with locked(RESULTS.parent):  # several kinds may be measured side by side
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"level": LEVEL, "scores": {}}
        known["scores"][name] = found
        known["scores"] = dict(sorted(known["scores"].items()))
        write(RESULTS, (json.dumps(known, indent=1) + "\n").encode())


def moved(draw: Draw, rng: np.random.Generator, count: int) -> np.ndarray:
    return draw(rng, count) + 4


def normal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(size=count)


def in_steps(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.round(4 * rng.normal(size=count)) / 4


def without_return(pool: np.ndarray) -> Draw:
    return lambda rng, count: rng.permutation(pool)[:count] if count <= len(pool) else rng.choice(pool, count)


def false_alarms(draw: Draw, table: int, of: int, streams: int) -> FalseAlarms:
    alarms, fixed, fixed_streams = 0, 0, max(10, streams // 10)
    for number in range(streams):
        rng = np.random.default_rng([number, table, of])
        scores = draw(rng, of + ROWS)
        known = Ordinary.of(thinned(scores[:of], table))
        places = known.places(scores[of:])
        found = drift(known, places, LEVEL, number)
        alarms += found.alarm is not None
        if number < fixed_streams:
            u = fixed_ranks(scores[:of], scores[of:], rng)
            fixed += bool(log_capital(u).max() >= -np.log(LEVEL))
    return FalseAlarms(table, of, streams, ROWS, alarms, fixed, fixed_streams)


def fixed_ranks(table: np.ndarray, stream: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Smoothed p-values by a table that stays as it is."""
    ordered = np.sort(table)
    above = len(ordered) - np.searchsorted(ordered, stream, "right")
    equal = np.searchsorted(ordered, stream, "right") - np.searchsorted(ordered, stream, "left")
    return (above + rng.random(len(stream)) * (equal + 1)) / (len(ordered) + 1)


def delay(draw: Draw, strange: Draw, table: int, share: float, first: int, streams: int) -> Delay:
    waited = []
    for number in range(streams):
        rng = np.random.default_rng([number, table, first, round(1000 * share)])
        scores = draw(rng, table + ROWS)
        known, stream = Ordinary.of(scores[:table]), scores[table:].copy()
        other = np.flatnonzero((rng.random(ROWS) < share) & (np.arange(ROWS) >= first))
        stream[other] = strange(rng, len(other))
        alarm = drift(known, known.places(stream), LEVEL, number).alarm
        if alarm is not None and alarm >= first:
            waited.append(alarm - first + 1)
    median, high = (float(np.quantile(waited, q)) if waited else float("nan") for q in (0.5, 0.9))
    return Delay(table, share, first, streams, len(waited), median, high, max(waited, default=0))


# --------------------------------------------------------------------------------- MNIST


def mnist_scores(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Scores of images of MNIST that the classifier has not seen, and of clothes."""
    from sklearn.neural_network import MLPClassifier

    digits, clothes = np.load(data / "mnist.npz"), np.load(data / "fashion_mnist.npz")
    x, y = _rows(digits["x_train"]), digits["y_train"]
    net = MLPClassifier((HIDDEN,), max_iter=10, early_stopping=True, random_state=0).fit(
        x[:TRAINED], y[:TRAINED]
    )
    with tempfile.TemporaryDirectory() as folder:
        source, file = Path(folder, "mnist.onnx"), Path(folder, "mnist.gapa.onnx")
        onnx.save(_as_onnx(net.coefs_, net.intercepts_), source)
        gapa_onnx.convert(source, {"x": x[:TRAINED]}, file, task="classification")
        session = gapa_onnx.session(file)
        name = next(o.name for o in session.get_outputs() if o.name.endswith("_score"))

        def scores(rows: np.ndarray) -> np.ndarray:
            parts = [session.run([name], {"x": part})[0] for part in np.array_split(rows, len(rows) // 500)]
            return np.concatenate(parts)

        unseen = np.concatenate([x[TRAINED:], _rows(digits["x_test"])])
        return scores(unseen), scores(_rows(clothes["x_test"]))


def _rows(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1).astype(np.float32) / 255


def _as_onnx(weights: list[np.ndarray], offsets: list[np.ndarray]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[n, {len(weights[0])}] x) => (float[n, 10] logits) {{
            a = Gemm(x, w0, b0)  h = Relu(a)  logits = Gemm(h, w1, b1) }}"""
    )
    for place, (weight, offset) in enumerate(zip(weights, offsets)):
        for name, array in ((f"w{place}", weight), (f"b{place}", offset)):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


if __name__ == "__main__":
    main()
