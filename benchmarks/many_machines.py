"""Calibration in shards and by Ray against one pass: the same bytes, and how much faster two workers are than one.

    python benchmarks/many_machines.py [--data FOLDER] [--cache FOLDER] [--quick] [--only mnist,resnet20,decoder,ray]

mnist is the classifier of the other benchmarks on 55,000 images, resnet20 the network of the CIFAR tables on 50,000, decoder the
small one of the tests on 512 sequences. `ray` needs the extra of that name: workers of one thread each read ResNet-20's images,
one, two, and one again as the control.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import gapa_onnx
from gapa_onnx.fit.parts import Collected

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "paper"), str(HERE / "paper" / "cifar"), str(HERE.parent / "tests")]
from backbones import CACHE, DATA, classifier, images  # noqa: E402
from lines import machine  # noqa: E402

RESULTS = HERE / "results" / "many_machines.json"
SHARDS = 8
EPOCHS = 2  # of the classifier: what it has learnt makes no difference here
QUICK_ROWS = 2000
RAY_ROWS = 10_000

Case = tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, Any]]


def mnist(options: argparse.Namespace) -> Case:
    model = onnx.load(classifier("mnist", folder=options.data, epochs=EPOCHS))
    return model, {model.graph.input[0].name: images("mnist", options.data)["x_train"]}, {}


def resnet20(options: argparse.Namespace) -> Case:
    import images as cifar
    from nets import resnet

    rows = cifar.cifar10(options.cache, 1 if options.quick else 5).x_train
    return resnet(cifar.shared(options.data, "resnet20.npz")), {"x": cifar.normalised(rows)}, {}


def decoder(options: argparse.Namespace) -> Case:
    from support.decoders import decoder as tiny
    from support.decoders import token_rows

    return tiny(), token_rows(512, 16), {"batch_size": 64}


CASES = {"mnist": mnist, "resnet20": resnet20, "decoder": decoder}


def digest(conversion: gapa_onnx.Conversion) -> str:
    assert all(check.passed for check in conversion.checks)
    return hashlib.sha256(conversion.model.SerializeToString(deterministic=True)).hexdigest()


def made(name: str, options: argparse.Namespace) -> Case:
    model, rows, choices = CASES[name](options)
    return (
        model,
        {key: array[:QUICK_ROWS] if options.quick else array for key, array in rows.items()},
        choices,
    )


def in_shards(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One pass, and shards through files."""
    model, rows, choices = made(name, options)
    start = time.perf_counter()
    one = digest(gapa_onnx.convert(model, rows, **choices))
    alone = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.npz") for number in range(1, SHARDS + 1)]
        for number, path in enumerate(paths, 1):
            gapa_onnx.collect(model, rows, shard=(number, SHARDS), **choices).save(path)
        start = time.perf_counter()
        whole = Collected.merge(map(Collected.load, paths))
        same = digest(gapa_onnx.convert(model, whole)) == one
        merging = time.perf_counter() - start
        sizes = [path.stat().st_size for path in paths]
    return {
        "rows": len(next(iter(rows.values()))),
        "shards": SHARDS,
        "same": same,
        "digest": one,
        "convert_seconds": round(alone, 1),
        "from_parts_seconds": round(merging, 1),
        "largest_part_bytes": max(sizes),
    }


def by_ray(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of reading ResNet-20's images by one worker, two, and one again; the bytes of one pass each time."""
    import ray

    from gapa_onnx import ray as engine

    model, rows, choices = made("resnet20", options)
    rows = {name: array[:RAY_ROWS] for name, array in rows.items()}
    expected = digest(gapa_onnx.convert(model, rows, **choices))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    same = True
    engine.collect(model, {"x": rows["x"][:256]}, workers=2, **choices)  # so that processes are there
    for workers in (1, 2, 1, 2):
        start = time.perf_counter()
        # as many shards in each case, so that both do the same work
        found = engine.collect(model, rows, workers=workers, shards=SHARDS, **choices)
        seconds[workers].append(round(time.perf_counter() - start, 2))
        same = same and digest(gapa_onnx.convert(model, found)) == expected
    ray.shutdown()
    one, two = (float(np.median(seconds[workers])) for workers in (1, 2))
    return {
        "rows": len(rows["x"]),
        "same": same,
        "seconds_of_one": seconds[1],
        "seconds_of_two": seconds[2],
        "times_as_fast": round(one / two, 2),
        "control": round(max(seconds[1]) / min(seconds[1]), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS} rows of each, and no file")
    parser.add_argument("--only", default="mnist,resnet20,decoder,ray")
    options = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.only.split(","):
        found = by_ray(options) if name == "ray" else in_shards(name, options)
        print(json.dumps({name: found}), flush=True)
        known |= {"machine": machine(), name: found}
        if not options.quick:
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
